"""Build typed settings from presets, files and flags."""

import contextlib
import functools
import operator
import reprlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl.agents.fields import rules_of
from jaxrl.agents.outside import made_by_hand
from jaxrl.agents.schedules import with_schedules
from jaxrl.cli.algos import general
from jaxrl.cli.arguments import (
    command,
    no,
    normalise,
    read_flags,
    refuse_repeats,
    translate,
    value_of,
    without_no,
)
from jaxrl.cli.help import all_settings, first_page, settings_of, wrap_paragraphs
from jaxrl.cli.outside import require_algorithm
from jaxrl.cli.presets import PRESETS
from jaxrl.envs.registry import NAME_TAKEN, check_plain_args, env_names
from jaxrl.errors import SettingsError, suggest
from jaxrl.parsing import as_int, flatten_settings, parse_float, split_list
from jaxrl.paths import CONFIG, local
from jaxrl.registry import ALGORITHMS, RECORDERS, SUITES, join_names, matching_presets
from jaxrl.strategies.population import replace_settings
from jaxrl.strategies.search import parse_search
from jaxrl.training.settings import unused_settings
from jaxrl.training.storage.files import read_yaml
from jaxrl.training.storage.run_dir import read_settings, require_run


class Request(NamedTuple):
    """A parsed command line."""

    algo: str
    config: Any
    resume: bool
    allow_changes: bool
    start_over: bool
    population: Mapping[str, Any] | None = None
    """Given fields of `PopulationConfig`; `None` for a single run."""
    from_run: str | None = None
    """Run from whose checkpoint `from_step` a new one branches off."""
    from_step: str | None = None
    notes: tuple[str, ...] = ()
    """Notes on flags translated from other libraries, on a preset scaled to the run's length, and on a missing one."""
    typed_envs: Mapping[str, str | None] = MappingProxyType({})
    """What a person typed as `env` and `eval_env`, whose code may be imported."""


def parse(args: Sequence[str]) -> Request:
    """Parse the arguments of `jaxrl.train`: presets, then the file, then the flags; later ones win.

    Raises:
      SettingsError: a name is unknown or a value invalid, in the file or in a flag; a flag is given twice.
      SystemExit: `--help` was shown.
    """
    args = normalise(args)
    _answer(args)
    refuse_repeats(args)
    first = args.pop(0) if args and not args[0].startswith("-") else None
    launch, args = typed_flags(args, LAUNCH)
    if first is not None and "algo" in launch:
        raise SettingsError(f"the algorithm is named twice, as {first} and by --algo {launch['algo']}; name it once")
    file, resume = _source(launch, args)
    from_step = launch.get("from_step")
    given, args = _population(args)
    from_file = read_settings(Path(resume)) if resume else read_yaml(Path(file)) if file else {}
    algo = _algorithm(launch.get("algo") if first is None else first, file, resume, from_file)
    args, notes = translate(args, flags_of(general(algo)))
    members = _same_population(given, from_file.pop("population", None), resume)
    env = value_of(args, "--env") or from_file.get("env")
    for flag, other in (("--devices", "mesh"), ("--mesh", "devices")):  # either flag replaces the other setting
        if resume and value_of(args, flag):
            from_file.pop(other, None)
    for name in ("env_args", "eval_env_args"):
        if resume and name in from_file and f"--{name.replace('_', '-')}" not in args:
            check_plain_args(from_file[name], f"{file}")
    settings = {k: v for k, v in from_file.items() if k not in ("algo", "custom")}
    flags = [without_no(word.partition("=")[0]) for word in args if word.startswith("--")]
    chosen = {flag[2:].replace("-", "_") for flag in flags}
    of_preset = preset(algo, env if isinstance(env, str) else None)
    config = _flags(algo, from_plain(of_preset, settings, file), args)
    if not resume:
        fixed = chosen | set(flatten_settings(settings)) | ({"eval_interval"} if "pbt" in (members or {}) else set())
        config, notes = _fit_length(algo, config, of_preset, fixed, notes, 1 if members else 2)
    if not file and config.env is not None and not matching_presets(PRESETS.get(algo, {}), config.env):
        notes = (*notes, "generic settings: there is no preset for this environment")
    # Of a sweep, members may read what the settings in common leave unread.
    ignored = [] if "sweep" in (members or {}) else sorted(chosen & unused_settings({**asdict(config), "algo": algo}))
    if ignored:
        other = "; n-step returns without a core are processor.n_step" if "agent.n_step" in ignored else ""
        notes = (*notes, f"nothing reads {', '.join(ignored)} under these settings{other}")
    if resume and not from_step and config.run_dir not in (None, resume):
        raise SettingsError(
            f"--resume {resume} goes on in that directory; leave --run-dir out, or begin a new run there from one of "
            "its checkpoints by --from-step N"
        )
    if config.run_dir == "":
        raise SettingsError("--run-dir needs a value")
    if launch.get("start_over") and not resume and config.run_dir is None:
        raise SettingsError(
            "--start-over needs the run to begin again; give --resume DIR to keep its settings, or --run-dir DIR for "
            "those given here"
        )
    if from_step and members:
        raise SettingsError(f"{resume} is a population; branch off from one of its members, as of {resume}/members")
    how = (launch.get("allow_changes", False), launch.get("start_over", False))
    from_run = resume if from_step else None
    config = replace(config, run_dir=resume) if resume and not from_run else config
    typed = {"env": value_of(args, "--env"), "eval_env": value_of(args, "--eval-env")}
    return Request(algo, config, bool(resume), *how, members, from_run, from_step, notes, typed)


LAUNCH = {
    "--algo": str,
    "--config": str,
    "--resume": str,
    "--from-step": str,
    "--allow-changes": bool,
    "--start-over": bool,
}
"""Flags that are not settings: where these come from, and how to resume."""


def _source(launch: Mapping[str, Any], args: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the file with settings, and the run to resume, if any.

    Raises:
      SettingsError: the flags in `launch` contradict each other or `args`, the others.
    """
    file, resume = launch.get("config"), launch.get("resume")
    if file and resume:
        raise SettingsError("--resume takes all settings from the run; leave --config out")
    if launch.get("allow_changes") and not resume:
        raise SettingsError("--allow-changes says how to resume; give --resume DIR as well")
    if launch.get("from_step") and not (resume and value_of(args, "--run-dir")):
        raise SettingsError(
            "--from-step begins a new run from a checkpoint; give --resume RUN and --run-dir NEW as well"
        )
    if resume:
        resume = local(resume)
        require_run(Path(resume))
        file = str(Path(resume) / CONFIG)
    return file and local(file), resume


def _algorithm(named: str | None, file: str | None, resume: str | None, from_file: Mapping[str, Any]) -> str:
    """Return the name of the algorithm: that of the command line, or else of the file.

    Raises:
      SettingsError: the name is unknown or not that of the run to resume, or the run has parts made in Python.
    """
    custom = as_type(f"{file}: custom", from_file.get("custom") or [], tuple[str, ...])
    if parts := made_by_hand(from_file.get("algo"), custom):
        raise SettingsError(
            f"{resume or file} has parts that were made in Python ({', '.join(parts)}); "
            f"{_in_python(resume, 'driven' in from_file)}"
        )
    of_file: str = as_type(f"{file}: algo", from_file.get("algo", "dqn"), str)
    algo = of_file if named is None else named
    if algo not in ALGORITHMS:
        if (resume or file) and named is None:
            raise SettingsError(
                f"{resume or file} names the algorithm {algo!r}, which is not known here; code of your own is imported "
                f"only where you name it, as in: train my_package.algos:make {'--resume' if resume else '--config'} "
                f"{resume or file} (known here: {join_names(ALGORITHMS)})"
            )
        raise SettingsError(f"unknown algorithm {algo!r}; {suggest(algo, ALGORITHMS)}")
    if resume:
        require_algorithm(named, of_file, resume)
    return algo


def algorithm_named(args: Sequence[str]) -> str | None:
    """Return the algorithm that a command line names, as its first word or by `--algo`."""
    return args[0] if args and not args[0].startswith("-") else value_of(args, "--algo")


def _in_python(resume: str | None, driven: bool) -> str:
    """Return advice on resuming a run that no command line can rebuild."""
    if resume is None:
        return "train it in Python, by Trainer(strategy)"
    if driven:
        return f"go on in Python by the Session that made it, with run_dir={resume!r} and resume=True"
    return (
        f"go on in Python by Trainer(strategy, resume={resume!r}).train(); load_policy({resume!r}, strategy=strategy) "
        "has its policy"
    )


def _fit_length(
    algo: str, config: Any, of_preset: Any, chosen: Collection[str], notes: tuple[str, ...], room: int
) -> tuple[Any, tuple[str, ...]]:
    """Fit the decays and intervals of a new run to its length; return the settings and all notes.

    Other libraries limit environment steps only: with their flag for these, `max_opts` is raised to `room` times the
    number that this takes, so that one flag extends the run.
    """
    steps = _opt_steps_within(config)
    if steps is not None and "max_opts" not in chosen and any("taken as --max-env-steps" in note for note in notes):
        config = replace(config, max_opts=max(config.max_opts, room * steps))
    own: set[str] = set().union(*map(flatten_settings, matching_presets(PRESETS.get(algo, {}), of_preset.env)))
    config, note = scale_to_length(config, of_preset, own, chosen)
    return config, (*notes, note) if note else notes


INTERVALS = ("eval_interval", "record_interval")
DECAYS = ("agent.lr_decay", "agent.epsilon_decay", "buffer.beta_steps")
"""Settings that are a number of optimisation steps over which something decays or rises."""
MAX_INTERVAL = 2**31 - 1
"""Largest value of these settings, an int32."""


def scale_to_length(
    config: Any, preset: Any, preset_names: Collection[str], chosen: Collection[str]
) -> tuple[Any, str | None]:
    """Scale decays and intervals of `config` to its length; return it and a note on the changes, if any.

    Args:
      config: the settings of a run.
      preset: the settings of the preset alone.
      preset_names: names of the settings in the preset; of the decays, only these were chosen for its length.
      chosen: names of the settings that the user has given, which stay.
    """
    length, preset_length = _estimate_opt_steps(config), preset.max_opts
    if "max_opts" not in preset_names or length == preset_length or min(length, preset_length) < 1:
        return config, None
    changed: dict[str, int] = {}
    for name in (*INTERVALS, *(decay for decay in DECAYS if decay in preset_names)):
        before = operator.attrgetter(name)(preset)
        after = min(max(round(before * length / preset_length), 1), MAX_INTERVAL) if before else 0
        if name not in chosen and after != before:
            changed[name] = after
    if not changed:
        return config, None
    changes = ", ".join(f"{name} {value}" for name, value in changed.items())
    note = f"the preset is for max_opts {preset_length}; scaled to {length}: {changes}"
    return from_plain(config, replace_settings({}, changed)), note


def _estimate_opt_steps(config: Any) -> int:
    """Return the approximate number of optimisation steps of a run with these settings."""
    within = _opt_steps_within(config)
    return config.max_opts if within is None else min(within, config.max_opts)


def _opt_steps_within(config: Any) -> int | None:
    """Return the number of optimisation steps in `max_env_steps`; `None` for offline runs, and if that is not set."""
    known = type(config).__dataclass_fields__
    if config.max_env_steps <= 0:
        return None
    if "rollout" in known:
        rows, made, warmup = config.num_envs * config.rollout, config.epochs * config.minibatches, 0
    elif "opt_interval" in known:
        rows = max(config.num_envs, config.opt_interval)
        made, warmup = config.updates * rows // max(config.opt_interval, 1), config.warmup
    else:
        return None
    rows = max(rows, 1)
    left = config.max_env_steps - -(-warmup // rows) * rows
    return max(-(-left // rows), 1) * made


TOGETHER = {"--distributed": bool, "--coordinator-address": str, "--num-processes": int, "--process-id": int}
"""Flags of multi-process runs; all but the first are arguments of `jax.distributed.initialize`."""


POPULATION = {
    "--seeds": int,
    "--members": int,
    "--draw-seed": int,
    "--width": int,
    "--layout": str,
    "--sweep": tuple[str, ...],
    "--halving": tuple[str, ...],
    "--pbt": tuple[str, ...],
}
"""Flags of a population, with their types."""


def _population(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a population among `args`, and the other arguments."""
    settings, rest = typed_flags(args, POPULATION)
    if "sweep" in settings:
        settings["sweep"] = list(settings["sweep"])  # as a file has it; `build_population` knows what may be swept
    for name in {"halving", "pbt"} & {*settings}:
        settings[name] = parse_search(name, settings[name])
    return settings, rest


def _same_population(given: dict[str, Any], found: Any, resume: str | None) -> Mapping[str, Any] | None:
    """Merge the population settings of a file and of flags; raise `SettingsError` for flags on resuming."""
    if found is not None and not isinstance(found, Mapping):
        raise SettingsError(f"population is {found!r}; expected its seeds, sweep, members and draw_seed")
    if resume and given:
        raise SettingsError(
            f"--resume goes on with the members that {resume} has; leave --seeds, --sweep and --members out"
        )
    return {**(found or {}), **given} or None


def _answer(args: Sequence[str]) -> None:
    """Print the environments and exit if `--list-envs` is given."""
    if "--list-envs" in args:
        listed = env_names()
        others = [f"{suite}:" for suite in SUITES if not any(name.startswith(f"{suite}:") for name in listed)]
        print("\n".join(listed))
        print(f"\nas well as {join_names(f'{prefix}NAME' for prefix in others)} for environments of other libraries")
        raise SystemExit(0)


def preset(algo: str, env: str | None = None) -> Any:
    """Return the preset settings of `algo` for `env` (default: its default environment)."""
    config = general(algo)
    env = config.env if env is None else env
    for settings in matching_presets(PRESETS.get(algo, {}), env):
        config = from_plain(config, settings)
    return replace(config, env=env)


def from_plain(
    config: Any, settings: Mapping[str, Any], source: str | None = None, prefix: str = "", flags: bool = False
) -> Any:
    """Return the dataclass `config` with fields replaced by `settings`, from a file (`source`) or from `flags`.

    Raises:
      SettingsError: a key is unknown, or a value has the wrong type.
    """
    where = f"{source}: " if source else ""
    hints = typing.get_type_hints(type(config))
    known = {f.name: f for f in fields(config)}
    changes = {}
    if "schedules" in known:
        settings = with_schedules(settings, config.schedules)
    for name, value in settings.items():
        if name not in known:
            raise SettingsError(f"{where}unknown setting {prefix}{name}; {suggest(str(name), known, settings=True)}")
        old = getattr(config, name)
        shown = f"--{prefix}{name}".replace("_", "-") if flags else f"{where}{prefix}{name}"
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise SettingsError(f"{shown} is {reprlib.repr(value)[:80]}; expected settings by name")
            changes[name] = from_plain(old, value, source, f"{prefix}{name}.", flags)
        else:
            changes[name] = as_type(shown, value, hints[name])
            _check_allowed(where, f"{prefix}{name}", type(config), name, changes[name])
    return replace(config, **changes)


def _check_allowed(where: str, path: str, kind: Any, name: str, value: Any) -> None:
    """Raise `SettingsError`, prefixed by `where`, if `value` is not allowed for the setting `name` of `kind`."""
    rule = rules_of(kind).get(name)
    if rule is not None and value is not None:
        try:
            rule[0].check(path, value)
        except SettingsError as error:
            raise SettingsError(f"{where}{error}") from None


def as_type(name: str, value: Any, hint: Any) -> Any:
    """Convert `value`, as a file or a flag has it, to the type `hint`; YAML parses `1e-3` as a string."""
    options = _options(hint)
    if hint is Any or (value is None and type(None) in options):
        return value
    kind = options[0]
    origin = typing.get_origin(kind) or kind
    value = as_int(value) if origin is int else value
    if origin is bool and isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if origin is tuple and isinstance(value, str) and typing.get_args(kind)[0] is not str:
        value = split_list(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(as_type(name, item, typing.get_args(kind)[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _plain(f"{name}.{k}", v) for k, v in value.items()}
    if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    if origin in (int, bool, str) and type(value) is origin:
        return value
    raise SettingsError(f"{name} is {reprlib.repr(value)[:80]}; expected {_WANTED.get(origin, origin)}")


def _plain(name: str, value: Any) -> Any:
    """Convert a parameter of an environment: a number, also one in a string, a boolean, another string or a list."""
    if name.endswith(("env_args.name", "env-args.name")):
        raise SettingsError(f"{name}: {NAME_TAKEN}")
    if isinstance(value, list):
        return [_plain(name, item) for item in value]
    if isinstance(value, str):
        # YAML parses `1e-3` as a string.
        return value if value.strip().isdecimal() or parse_float(value) is None else parse_float(value)
    if isinstance(value, int | float):
        return value
    raise SettingsError(f"{name} is {reprlib.repr(value)[:80]}; expected a number, text, true, false or a list")


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types that `hint` allows: both for `X | None`."""
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if several else (hint,)


_WANTED = {
    int: "a whole number, as in 5000 or 5e3",
    float: "a number, as in 0.1 or 1e-3",
    bool: "true or false",
    str: "a name",
    tuple: "a list, as in [64, 64]",
    dict: "names with values, as in {gravity: 9.8}",
}
"""Descriptions of each type's values, for messages."""


def _flags(algo: str, config: Any, args: Sequence[str]) -> Any:
    """Return `config` with the settings that flags give; they are read as those of a file are."""
    if {"--help", "-h"} & set(args):
        print(first_page(algo, config, command("train")), _description(algo), sep="\n", end="\n\n")
        print(all_settings(config))
        raise SystemExit(0)
    given, unknown = read_flags(args, flag_types(config))
    if unknown:
        raise SettingsError(_explain_unknown(algo, unknown[0], config))
    settings = {flag.removeprefix("--").replace("-", "_"): value for flag, value in given.items()}
    return from_plain(config, replace_settings({}, settings), flags=True)


def typed_flags(words: Sequence[str], kinds: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of those flags of `kinds` that are given, by names such as `from_step`, and the other words."""
    given, rest = read_flags(words, kinds)
    values = {flag: as_type(flag, given[flag], kind) for flag, kind in kinds.items() if flag in given}
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in values.items()}, rest


def _explain_unknown(algo: str, word: str, config: Any) -> str:
    """Return the message for an unknown argument."""
    if not word.startswith("-"):
        return (
            f"unexpected argument {word!r} after {algo}; the algorithm comes first, then flags, as in: {algo} --seed 1"
        )
    return f"unknown argument {word}; {suggest(word.split('=')[0], flags_of(config), settings=True)}"


def flags_of(config: Any) -> list[str]:
    """Return all flags of an algorithm with the settings `config`."""
    kinds = {**flag_types(config), **LAUNCH, **POPULATION, **TOGETHER}
    switches = [no(flag) for flag, kind in flag_types(config).items() if kind is bool]
    return [*kinds, *switches, "--version", "--list-envs", "--help"]


def flag_types(config: Any) -> dict[str, Any]:
    """Return the type of each setting of `config` by its flag, as `--agent.lr`; `X | None` counts as `X`."""
    hints = functools.cache(typing.get_type_hints)
    settings = settings_of(config).items()
    return {f"--{name}".replace("_", "-"): _options(hints(s.owner)[s.name])[0] for name, s in settings}


def _description(algo: str) -> str:
    """Return the text of `--help` on flags that are not settings."""
    recorders = ", ".join(f"{name} ({row.about})" for name, row in RECORDERS.items())
    return wrap_paragraphs(
        f"Train {ALGORITHMS[algo].title}. The first argument, or --algo, names the algorithm "
        f"({', '.join(ALGORITHMS)}), or one of your own, as in my_package.algos:make.",
        "--config FILE reads settings from a YAML file; flags win over it.",
        "--resume RUN goes on with a run and needs no other flag. With --allow-changes it goes on under other settings "
        "or versions; with --start-over it begins anew and moves aside what was there. --run-dir DIR --start-over does "
        "that with the settings given here, and begins a run if there is none.",
        "--resume RUN --from-step N --run-dir NEW begins a new run from a checkpoint of another, which stays as it is.",
        "--distributed makes one run of several processes, with the shards spread over the devices of all. Where JAX "
        "does not find them by itself, give --coordinator-address HOST:PORT of process 0, --num-processes N, and "
        "--process-id 0 to N - 1.",
        f"--recorders takes any of: {recorders}.",
    )
