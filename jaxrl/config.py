"""Typed settings of a run, from presets, files and flags; and the tables from a name to what builds it."""

import contextlib
import fnmatch
import io
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.agents import AgentMaker, DQNConfig, dqn
from jaxrl.buffers import uniform
from jaxrl.envs import make_env
from jaxrl.errors import SettingsError, nearest
from jaxrl.processors import Processor, chain, frame_stack, n_step, reward_clip, reward_scale
from jaxrl.strategies import Strategy, off_policy
from jaxrl.training.run_dir import CONFIG, read_yaml, require_run
from jaxrl.training.settings import TrainerConfig


@dataclass(frozen=True)
class ProcessorConfig:
    """How steps become transitions, in this order."""

    frame_stack: int = 1
    """Observations that the policy sees at once; 1: the latest alone."""
    reward_scale: float = 1.0
    """Factor of every reward."""
    reward_clip: float = 0.0
    """Bound to which rewards are clipped on both sides; 0: not at all."""
    n_step: int = 1
    """Steps over which a transition goes."""
    discount: float = 0.99
    """Discount of the next reward against this one (gamma)."""


@dataclass(frozen=True)
class UniformConfig:
    """The replay buffer."""

    capacity: int = 50_000
    """Transitions kept, the newest; rounded up to whole pushes."""
    batch_size: int = 128
    """Transitions in a batch."""


@dataclass(frozen=True)
class DQNRun(TrainerConfig):
    """Train DQN."""

    env: str = "CartPole-v1"
    """Environment."""
    env_args: dict[str, float] = field(default_factory=dict)
    """Parameters of the environment in place of its defaults, as in `--env-args max_steps_in_episode 200`."""
    num_envs: int = 10
    """Environments side by side."""
    opt_interval: int = 10
    """Environment steps per optimisation step; a multiple of num_envs, or a divisor of it."""
    warmup: int = 1_000
    """Environment steps before the first optimisation step."""
    random_warmup: bool = True
    """Take random actions during the warm-up, not the agent's."""
    agent: DQNConfig = field(default_factory=DQNConfig)
    buffer: UniformConfig = field(default_factory=UniformConfig)
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)


class Algo(NamedTuple):
    """What the command line knows of an algorithm."""

    config: type[Any]
    agent: Callable[..., AgentMaker]
    presets: Mapping[str, Mapping[str, Any]]
    """Settings by environment that `--env` alone brings along; `*` stands for anything."""


DQN_PRESETS: dict[str, dict[str, Any]] = {
    # Found by trying: tanh and a small buffer make DQN far steadier here than the usual ReLU and 50 000 or more.
    # The run ends at 100 000 environment steps.
    "CartPole-v1": {
        "max_opts": 19_800,
        "eval_episodes": 50,
        "num_envs": 5,
        "opt_interval": 5,
        "agent": {"lr": 1e-3, "activation": "tanh", "target_interval": 50, "epsilon_decay": 5_000},
        "buffer": {"capacity": 10_000},
    },
    "Catch-bsuite": {
        "max_opts": 5_000,
        "num_envs": 8,
        "opt_interval": 8,
        "agent": {"lr": 1e-3, "epsilon_decay": 2_000},
        "buffer": {"batch_size": 64},
    },
    # After Young and Tian 2019, https://arxiv.org/abs/1903.03176, with Adam and more environments at once.
    "*-MinAtar": {
        "max_opts": 30_000,
        "eval_interval": 5_000,
        "save_interval": 10_000,
        "num_envs": 16,
        "opt_interval": 16,
        "warmup": 5_008,
        "agent": {"lr": 1e-3, "target_interval": 250, "epsilon_decay": 10_000},
        "buffer": {"capacity": 100_000, "batch_size": 32},
    },
}


ALGOS: dict[str, Algo] = {"dqn": Algo(DQNRun, dqn, DQN_PRESETS)}


def build(algo: str, config: Any) -> Strategy:
    """Build the strategy of `config`; raise `SettingsError` for what cannot be."""
    return off_policy(
        make_env(config.env, **config.env_args),
        ALGOS[algo].agent(config.agent),
        buffer=uniform(config.buffer.capacity, config.buffer.batch_size),
        processor=build_processor(config.processor),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
    )


def build_processor(config: ProcessorConfig) -> Processor:
    """Build the chain of `config`, less what it leaves off."""
    parts = [n_step(config.n_step, config.discount)]
    if config.reward_clip != 0.0:
        parts.insert(0, reward_clip(config.reward_clip))
    if config.reward_scale != 1.0:
        parts.insert(0, reward_scale(config.reward_scale))
    if config.frame_stack != 1:
        parts.insert(0, frame_stack(config.frame_stack))
    return chain(*parts)


# --- from flags and files to settings ---------------------------------------------------------------------------


class Request(NamedTuple):
    """What the command line asked for."""

    algo: str
    config: Any
    resume: bool
    allow_changes: bool
    start_over: bool


def parse(args: Sequence[str], prog: str = "python -m jaxrl.train") -> Request:
    """Read the arguments of `jaxrl.train`: presets, then the file, then the flags, of which the later wins.

    Raises:
      SettingsError: an unknown name or a value that is none, wherever it stands.
      SystemExit: `--help` was shown.
    """
    args = list(args)
    file, resume = _take(args, "--config"), _take(args, "--resume")
    allow_changes, start_over = _switch(args, "--allow-changes"), _switch(args, "--start-over")
    if file and resume:
        raise SettingsError("--resume takes all settings from the run; leave --config out")
    if (allow_changes or start_over) and not resume:
        raise SettingsError("--allow-changes and --start-over say how to resume; give --resume DIR as well")
    if resume:
        require_run(Path(resume))
        file = str(Path(resume) / CONFIG)
    from_file = read_yaml(Path(file)) if file else {}
    named = args.pop(0) if args and not args[0].startswith("-") else None
    algo = named or _typed(f"{file}: algo", from_file.get("algo", "dqn"), str)
    if algo not in ALGOS:
        raise SettingsError(f"unknown algorithm {algo!r}; {nearest(algo, ALGOS)}")
    if resume and algo != from_file.get("algo"):
        raise SettingsError(f"{resume} is a run of {from_file.get('algo')}, not of {algo}")
    if from_file.get("custom"):
        parts = ", ".join(_typed(f"{file}: custom", from_file["custom"], tuple[str, ...]))
        raise SettingsError(
            f"{file} has parts that were made in Python ({parts}); go on with Trainer(..., resume=True)"
        )
    env = _peek(args, "--env") or from_file.get("env")
    suited = preset(algo, env if isinstance(env, str) else None)
    config = from_plain(suited, {k: v for k, v in from_file.items() if k not in ("algo", "custom")}, file)
    config = _flags(algo, config, args, prog)
    if resume and config.run_dir not in (None, resume):
        raise SettingsError(f"--resume {resume} goes on in that directory; leave --run-dir out")
    if config.run_dir == "":
        raise SettingsError("--run-dir needs a value")
    config = replace(config, run_dir=resume) if resume else config
    return Request(algo, config, bool(resume), allow_changes, start_over)


def preset(algo: str, env: str | None = None) -> Any:
    """Return the settings of `algo` that suit `env`, or its usual environment."""
    entry = ALGOS[algo]
    config = entry.config()
    env = config.env if env is None else env
    for name, settings in entry.presets.items():
        if fnmatch.fnmatchcase(env, name):
            config = from_plain(config, settings)
    return replace(config, env=env)


def from_plain(config: Any, settings: Mapping[str, Any], source: str | None = None, prefix: str = "") -> Any:
    """Return the dataclass `config` with `settings`, as YAML gives them, in place of its own.

    Raises:
      SettingsError: a key that is no setting, or a value of another type.
    """
    where = f"{source}: " if source else ""
    hints = typing.get_type_hints(type(config))
    known = {f.name: f for f in fields(config)}
    changes = {}
    for name, value in settings.items():
        if name not in known:
            raise SettingsError(f"{where}unknown setting {prefix}{name}; {nearest(str(name), known)}")
        old = getattr(config, name)
        if is_dataclass(old) and isinstance(value, Mapping):
            changes[name] = from_plain(old, value, source, f"{prefix}{name}.")
        else:
            changes[name] = _typed(f"{where}{prefix}{name}", value, hints[name])
    return replace(config, **changes)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`; YAML reads `1e-3` as text and `1` as a whole number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = options[0]
    origin = typing.get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, item, typing.get_args(kind)[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _typed(name, v, typing.get_args(kind)[1]) for k, v in value.items()}
    if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    if origin in (int, bool, str) and type(value) is origin:
        return value
    raise SettingsError(f"{name} is {reprlib.repr(value)[:80]}; expected {getattr(origin, '__name__', origin)}")


def _flags(algo: str, config: Any, args: list[str], prog: str) -> Any:
    """Parse flags over `config` with tyro, whose boxes of several lines become one."""
    import tyro

    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            result, unknown = tyro.cli(
                type(config),
                args=args,
                default=config,
                prog=f"{prog} {algo}",
                description=_DESCRIPTION.format(algos=", ".join(ALGOS)),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise SettingsError(_one_line(shown.getvalue())) from None
    if unknown:
        flags = [
            f"--{name.replace('_', '-')}"
            for name in (*_flag_names(config), "config", "resume", "allow_changes", "start_over")
        ]
        raise SettingsError(f"unknown argument {unknown[0]}; {nearest(unknown[0].split('=')[0], flags)}")
    return result


_DESCRIPTION = (
    "Train an agent. The first argument names the algorithm ({algos}). --config FILE reads settings from a YAML file; "
    "flags win over it. --resume DIR goes on with a run and needs no other flag; with --allow-changes also under other "
    "settings or versions, with --start-over from its very beginning, what was there being moved aside."
)


def _one_line(box: str) -> str:
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("For full helptext", "Argument helptext"))]
    return " ".join(lines[1:2] or lines) or "bad arguments"


def _flag_names(config: Any, prefix: str = "") -> list[str]:
    names = []
    for f in fields(config):
        value = getattr(config, f.name)
        names += _flag_names(value, f"{prefix}{f.name}.") if is_dataclass(value) else [prefix + f.name]
    return names


def _take(args: list[str], flag: str) -> str | None:
    """Remove `flag VALUE` or `flag=VALUE` from `args` and return the value."""
    for i, arg in enumerate(args):
        if arg == flag or arg.startswith(flag + "="):
            value = arg[len(flag) + 1 :] if arg != flag else "".join(args[i + 1 : i + 2])
            if not value or (arg == flag and value.startswith("--")):
                raise SettingsError(f"{flag} needs a value")
            del args[i : i + (2 if arg == flag else 1)]
            return value
    return None


def _switch(args: list[str], flag: str) -> bool:
    """Remove `flag` from `args`; say whether it was there."""
    there = flag in args
    args[:] = [arg for arg in args if arg != flag]
    return there


def _peek(args: Sequence[str], flag: str) -> str | None:
    return _take(list(args), flag)
