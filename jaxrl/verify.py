"""`python -m jaxrl.verify RUN_DIR`: check every checkpoint of a run, its best policy and its logs; change nothing.

It prints one line per checkpoint, `<opt_steps> <ok or what is wrong> <sha256 of the training state>`, then one for the
best policy, `best <opt_steps> ok <sha256 of its parameters>` or `best none`, and one for the logs, `logs ok <names>`.
With `--replay`, further lines say whether training again from each checkpoint leads to the next. Any other findings are
on standard error.
"""

from jaxrl.cli.main import (  # first: it installs signal handlers
    Parser,
    cache_compilations,
    path_arg,
    require_devices,
    run_main,
)

# isort: split
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.agents.outside import made_by_hand
from jaxrl.cli.algos import build
from jaxrl.cli.config import Request, parse
from jaxrl.cli.outside import admit, admit_algorithm, require_algorithm
from jaxrl.envs.registry import is_imported, is_path, module_to_import
from jaxrl.errors import JaxrlError, MissingError, NoCheckpointError, SettingsError, print_line, print_stderr
from jaxrl.loading import teacher_of
from jaxrl.registry import ALGORITHMS
from jaxrl.strategies import Strategy
from jaxrl.training.logbook import reading_facts
from jaxrl.training.program import Saved, compile_all, lacks_replay, state_shapes, without_replay
from jaxrl.training.settings import changes
from jaxrl.training.storage.checkpoints import CheckpointError, Store
from jaxrl.training.storage.files import plain
from jaxrl.training.storage.leaves import digest, state_digest
from jaxrl.training.storage.logs import LOGS, damage, lines_of_nobody, log_problems
from jaxrl.training.storage.members import runs_of
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.population_saves import PopulationStore
from jaxrl.training.storage.run import find_missing_best
from jaxrl.training.storage.run_dir import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    open_log,
    read_metadata,
    read_settings,
    require_run,
)
from jaxrl.trees import PyTree, make_key

NAMED_AGAIN: dict[str, tuple[int | str, str]] = {
    "env": (1, "the environment, where it is your own, as in my_package.envs:make"),
    "env_args": ("+", "its parameters, where one is a path, as in --env-args level maps/1.txt"),
    "eval_env": (1, "the environment of evaluations, where it is your own"),
    "eval_env_args": ("+", "its parameters, where one is a path"),
    "data": ("+", "the data sets, where they have been moved"),
}
"""Settings without which a run may not be rebuilt, unless they are named again: how many words they take, and help."""


def main(args: Sequence[str]) -> int:
    """Parse, check, print; return the exit code: 0, or 6 if anything is bad.

    Raises:
      SettingsError: the arguments are invalid, or `--replay` could not train anything again.
    """
    parser = Parser(
        "verify",
        "runs/cartpole --replay",
        description="Check every checkpoint of a run, its best policy and its logs; change nothing.",
    )
    parser.add_argument("run_dir", type=path_arg, help="directory of the run")
    parser.add_argument("--member", type=int, help="which of a population (default: all of them)")
    parser.add_argument(
        "--replay", action="store_true", help="train again from each checkpoint to the next, and compare every bit"
    )
    parser.add_argument("--algo", help="the algorithm, where it is your own, as in my_package.algos:make")
    for name, (count, about) in NAMED_AGAIN.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=count, default=[], help=about)
    options = parser.parse(args)
    admit_algorithm(options.algo)
    require_run(Path(options.run_dir))
    cache_compilations()
    require_devices()
    call, problems = Call(options), Problems()
    runs = runs_of(options.run_dir, options.member)
    expected = read_metadata(Path(options.run_dir)).get("members", 0)
    if not runs or (options.member is None and type(expected) is int and len(runs) < expected):
        problems.add(f"{options.run_dir} has {len(runs)} members of {expected}")
    pairs, obstacles = 0, []
    for run_dir in runs:
        if run_dir != Path(options.run_dir):
            print_line(member := f"member {int(run_dir.name)}")
            problems.where = f"{member}: "
        made, obstacle = _verify(run_dir, call, problems)
        pairs += made
        obstacles += [] if obstacle is None else [obstacle]
    problems.where = ""
    if runs and runs[0] != Path(options.run_dir):
        for name in LOGS:
            for number in lines_of_nobody(Path(options.run_dir), name):
                problems.add(f"{name}: line {number} is no row")
    for directory, saves in call.opened.items():
        for save, error in saves.unreadable().items():
            problems.add(f"{directory.name}/{save}: {error}")
    if options.replay and not pairs and not problems.found:
        raise SettingsError(f"--replay: {shorten(obstacles[0])}")
    for obstacle in obstacles:
        print_stderr(shorten(obstacle))
    return NoCheckpointError.exit_code if problems.found else 0


@dataclass(frozen=True)
class Call:
    """One call of `verify`: its options, and what the members of a population share."""

    options: Namespace
    opened: dict[Path, PopulationStore] = field(default_factory=dict)
    """Stores of saves that hold rows of several members."""
    built: dict[str, Strategy] = field(default_factory=dict)
    """The last strategy built, by its settings; only one, as a strategy may hold its data."""


class Problems:
    """Collects the problems found."""

    def __init__(self) -> None:
        self.found = False
        self.where = ""
        """Begins each line: the member of a population."""

    def add(self, line: str) -> None:
        """Print a problem and remember that there was one."""
        self.found = True
        print_stderr(shorten(self.where + line))


def _verify(run_dir: Path, call: Call, problems: Problems) -> tuple[int, str | None]:
    """Check one run; return how many pairs of checkpoints it was trained again between, and why not between any."""
    store = open_store(run_dir, CHECKPOINTS, call.opened)
    strategy, obstacle = _rebuild_strategy(run_dir, store, call, problems)
    good = list(check_checkpoints(store, strategy, problems))
    check_best(run_dir, open_store(run_dir, BEST, call.opened), problems)
    check_logs(run_dir, store, good, problems)
    pairs = 0
    if call.options.replay and strategy is not None:
        try:
            for start, step, equal in replay(strategy, store, good):
                print_line(f"{start} -> {step} {'bit-equal' if equal else 'differs'}")
                problems.found |= not equal
                pairs += 1
        except NoCheckpointError as error:
            problems.add(f"{run_dir}: {error}")
        else:
            if not pairs:
                obstacle = (
                    f"no two checkpoints of {run_dir} were trained in one go under the present settings and versions; "
                    "keep more of them (--keep), or leave --replay out"
                )
    return pairs, obstacle


class _Damaged(Exception):
    """The settings of a run cannot be read, or fit nothing that jaxrl trains."""


class _NotHere(Exception):
    """A run needs code, data or parts made in Python that are not here."""


def _rebuild_strategy(
    run_dir: Path, store: Store, call: Call, problems: Problems
) -> tuple[Strategy | None, str | None]:
    """Build the strategy that `config.yaml` describes; otherwise return why not, unless it is damaged.

    Raises:
      SettingsError: what the options name is not what the run was trained with.
    """
    try:
        return _rebuild(run_dir, store, call), None
    except _NotHere as obstacle:
        return None, str(obstacle)
    except _Damaged as damage:
        problems.add(f"{CONFIG}: {damage}")
        return None, None


def _rebuild(run_dir: Path, store: Store, call: Call) -> Strategy:
    try:
        settings = read_settings(run_dir)
    except JaxrlError as error:
        raise _Damaged(error) from error
    _require_algorithm_here(run_dir, settings, call.options.algo)
    request = _parse_settings(run_dir, settings, call.options)
    config = request.config
    key = repr((request.algo, asdict(config.changed(seed=0, run_dir=None))))
    try:
        if key not in call.built:
            call.built.clear()
            call.built[key] = build(request.algo, config, teacher_of(config))
        return call.built[key]
    except JaxrlError as error:
        envs = [name for name in (config.env, getattr(config, "eval_env", None)) if name]
        if is_missing(error) or not all(map(is_imported, envs)) or _has_saved(store, settings):
            raise _cannot_rebuild(run_dir, error) from error
        raise _Damaged(error) from error


def _has_saved(store: Store, settings: Mapping[str, Any]) -> bool:
    """Return whether the newest checkpoint, which has a checksum, says that these are the settings of its run."""
    try:
        steps = store.steps()
        return bool(steps) and not changes(store.manifest(steps[-1])["facts"].get("settings"), settings)
    except CheckpointError:
        return False


def _require_algorithm_here(run_dir: Path, settings: Mapping[str, Any], named: str | None) -> None:
    """Raise `_NotHere` for an algorithm that is not here, or one with parts made in Python.

    Raises:
      SettingsError: another algorithm is `named`.
    """
    algo, custom = settings.get("algo"), settings.get("custom") or []
    if parts := made_by_hand(algo, custom if isinstance(custom, list) else [custom]):
        raise _NotHere(
            f"{run_dir} has parts made in Python ({', '.join(map(str, parts))}), so that its settings do not "
            "rebuild it: shapes are not compared with them, and --replay must be left out"
        )
    require_algorithm(named, algo, run_dir)
    if isinstance(algo, str) and algo not in ALGORITHMS:
        name = algo if module_to_import(algo) else "my_package.algos:make, the function registered as such"
        raise _NotHere(
            f"{run_dir} was trained by {algo}, code of your own that shapes and --replay need; name it by --algo {name}"
        )


def _parse_settings(run_dir: Path, settings: Mapping[str, Any], options: Namespace) -> Request:
    """Return the settings of a run as checked, with what `options` name again."""
    given = {name: words for name in NAMED_AGAIN if (words := vars(options)[name])}
    given |= {name: [str(admit(given[name][0], settings.get(name)))] for name in ("env", "eval_env") if name in given}
    resumed = ["--resume", str(run_dir)]
    try:
        request = _parse(run_dir, resumed)
    except JaxrlError as error:  # of the run itself, for no flag was given
        raise _Damaged(error) from error
    except _NotHere:
        if not given:
            raise
    if not given:
        return request
    flags = [word for name, words in given.items() for word in (f"--{name.replace('_', '-')}", *words)]
    request = _parse(run_dir, [*resumed, *flags])
    old = {name: settings.get(name) for name in given if name != "data"}
    differing = changes(old, {name: plain(vars(request.config)[name]) for name in old})
    if found := ", ".join(str(change) for change in differing if not is_path(change.new)):
        raise SettingsError(f"{run_dir} was trained under other settings ({found}); name its own")
    return request


def _parse(run_dir: Path, flags: Sequence[str]) -> Request:
    """Parse and check `flags`; raise `_NotHere` if something is not here, `JaxrlError` if they are invalid."""
    try:
        request = parse(flags)
        request.config.check()
    except JaxrlError as error:
        if is_missing(error):
            raise _cannot_rebuild(run_dir, error) from error
        raise
    return request


def is_missing(error: BaseException | None) -> bool:
    """Return whether an error is due to code, a package, a file or data that are not here."""
    while error is not None and not isinstance(error, MissingError | ImportError | OSError):
        error = error.__cause__
    return error is not None


def _cannot_rebuild(run_dir: Path, error: JaxrlError) -> _NotHere:
    return _NotHere(f"{run_dir} cannot be rebuilt here, so that checksums and logs are checked, but no shapes: {error}")


def check_checkpoints(store: Store, strategy: Strategy | None, problems: Problems) -> Iterator[int]:
    """Print the line of each checkpoint; yield the steps of the valid ones."""
    like = None if strategy is None else state_shapes(strategy)
    steps = store.steps()
    for step in steps:
        try:
            leaves, _ = store.read(step, like)
        except CheckpointError as error:
            if step not in store.steps():
                continue  # a running process has removed it
            problems.found = True
            print_line(step, shorten(error), "-")
        else:
            # A checkpoint holds the state, and then the running sums of the metrics.
            state = {path.removeprefix("state/"): leaf for path, leaf in leaves.items() if path.startswith("state/")}
            print_line(step, "ok", digest(state))
            yield step
    if not steps:
        problems.add(f"{store.directory} holds no checkpoint")


def check_best(run_dir: Path, store: Store, problems: Problems) -> None:
    """Print the line of the best policy, if there is one, and compare its score with that of the run."""
    steps, scores = store.steps(), []
    for step in steps:
        try:
            leaves, facts = store.read(step)
        except CheckpointError as error:
            if step in store.steps():
                problems.add(f"best/{step}: {error}")
        else:
            print_line("best", step, "ok", digest(leaves))
            scores.append(facts.get("score"))
    if not steps:
        print_line("best none")
    elif not scores:
        return  # a damaged one is a problem already
    if missing := find_missing_best(read_metadata(run_dir), scores):
        problems.add(f"best: {missing}")


def check_logs(run_dir: Path, store: Store, good: Sequence[int], problems: Problems) -> None:
    """Print the line of the logs if nothing is wrong with them: in themselves, and by their sums in a checkpoint."""
    found = [f"{name}: {problem}" for name in LOGS for problem in log_problems(run_dir, name)]
    found += check_sums(run_dir, store, good)
    for problem in found:
        problems.add(problem)
    if not found:
        print_line("logs ok", *(name for name in LOGS if has_log(run_dir, name)))


def has_log(run_dir: Path, name: str) -> bool:
    """Return whether a run has written a log."""
    try:
        open_log(run_dir, name).close()
    except FileNotFoundError:
        return False
    return True


def check_sums(run_dir: Path, store: Store, good: Sequence[int]) -> list[str]:
    """Compare the logs with their sums in the newest of the `good` checkpoints; return what differs."""
    if not good:
        return []
    try:
        found = damage(partial(open_log, run_dir), store.manifest(good[-1])["facts"])
    except CheckpointError:  # a running process has removed it
        return []
    # Without it, a running process has rolled back past it, and shortened the logs.
    return found if good[-1] in store.steps() else []


def replay(strategy: Strategy, store: Store, steps: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Train from each of `steps` to the next, or from scratch to the only one; yield both and whether they are equal.

    A pair is skipped if the run was rolled back in between, or was not trained under the settings of `strategy`, since
    settings or versions changed then or later. Checkpoints without replay buffer cannot be trained from: they are
    reached from scratch, up to the first resume of the run. Runs with `init_from` are not trained from scratch: the
    weights that they began with may have changed since.
    """
    if strategy.host_env is not None:
        raise SettingsError(
            f"the environments of {strategy.host_env.spec.name} are not part of a checkpoint, so that what was "
            "trained cannot be trained again; leave --replay out"
        )
    like, settings = state_shapes(strategy), plain(strategy.info.settings or {})
    # Compiled as for training: on a GPU, other options would round differently.
    compiled = compile_all(strategy, make_key(0), None, None, resume=True)
    start = 0
    before: tuple[PyTree, dict[str, int]] | None = None
    for step in steps:
        try:
            tree, facts = store.load(step, like)
        except CheckpointError:
            before = None  # removed by a running process, or of a structure that has changed since
            continue
        with reading_facts(f"{step} of {store.directory}", "jaxrl"):
            ledger = {name: int(np.uint32(facts["ledger"][name])) for name in ("t", "rollbacks", "changed_at")}
            own, key = dict(facts["settings"]), make_key(int(np.uint32(facts["settings"]["seed"])))
        wanted = state_digest(tree[0])
        bare = lacks_replay(strategy, tree[0])
        # Without an earlier checkpoint to train from, train from scratch, unless the run began with other weights.
        if (len(steps) == 1 or (bare and step == steps[0])) and not own.get("init_from"):
            before = compiled.init(key), {"t": 0, "rollbacks": 0}
        same = all(own.get(name) == value for name, value in settings.items())
        # A run resumed at `start` without its replay buffer has refilled it, unlike the state retrained in memory.
        resumed = bare and ledger["changed_at"] == start > 0
        unchanged = same and ledger["changed_at"] <= start and not resumed
        made = None
        if unchanged and before is not None and before[1]["rollbacks"] == ledger["rollbacks"]:
            made = compiled.run(*before[0], np.uint32(before[1]["t"]), np.uint32(ledger["t"]))
            yield start, step, state_digest((without_replay(Saved(*made)) if bare else made)[0]) == wanted
        # A checkpoint without replay buffer cannot be trained from, but the state retrained up to it can.
        found = made if bare else tree
        start, before = step, None if found is None else (found, ledger)


def shorten(text: object) -> str:
    """Shorten text from the run directory, which a stranger may have made very long."""
    return str(text) if len(str(text)) <= 1_000 else f"{str(text)[:1_000]}..."


if __name__ == "__main__":
    run_main(main)
