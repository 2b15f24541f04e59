"""Settings of trainers and sessions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from jaxrl.agents.fields import SequenceConfig
from jaxrl.envs.registry import registered_envs
from jaxrl.errors import SettingsError, check_between, check_count, check_type, suggest
from jaxrl.nn import CORES, WINDOWED
from jaxrl.parsing import as_int
from jaxrl.paths import local
from jaxrl.registry import ALGORITHMS, RECORDERS, import_name, split_suite
from jaxrl.strategies.base import Strategy
from jaxrl.strategies.host_actors import ActorsConfig
from jaxrl.training.mesh import as_text, read_mesh
from jaxrl.training.schedule import Schedule, round_to_iterations

FORMATS = ("gif", "mp4")
"""Formats of films."""
MAX_SIDE_BY_SIDE = 2**20
"""Largest number of environments that evaluations and the gathering of data step side by side."""


class GivenArrays:
    """Initial weights given in Python as arrays; the saved settings only say that there were some."""

    NAME = "arrays given in Python"

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree

    def __str__(self) -> str:
        return self.NAME

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that trainers and sessions have in common."""

    max_opts: int = field(default=10_000, kw_only=False)
    """Optimisation steps of the run, rounded up to whole iterations; the run ends exactly there."""
    seed: int = field(default=0, kw_only=False)
    """Random seed; together with the settings it determines every bit of the training."""
    record_interval: int = 1_000
    """Optimisation steps between records of metrics; 0: only at the end."""
    save_interval: int | None = None
    """Optimisation steps between checkpoints; 0: only at the end; unset: every ten seconds of training, or less often
    where saving would take more than a fortieth of the time."""
    keep: int = 3
    """Number of newest checkpoints to keep; the best policy is kept separately."""
    stop_reward: float | None = None
    """Mean evaluation return at which to stop; unset: never."""
    patience: int = 0
    """Evaluations without a new best after which to stop; 0: never."""
    max_env_steps: int = 0
    """Stop once this many environment steps are taken, warm-up included; 0: no limit."""
    max_skips: int = 100
    """Non-finite updates skipped in a row after which to go back to the last good checkpoint; 0: never."""
    max_rollbacks: int = 3
    """Number of times to go back without making progress before giving up."""
    run_dir: str | None = None
    """Directory for settings, logs and checkpoints; unset: the library writes nothing, the command line chooses a
    name."""
    name: str | None = None
    """Display name in TensorBoard, W&B and MLflow; unset: the name of the directory."""
    tags: tuple[str, ...] = ()
    """Tags for finding the run later."""
    notes: str = ""
    """Free-text notes."""
    recorders: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Where rows of metrics go, by name: console, jsonl (in any case), tensorboard, csv, wandb, mlflow."""

    def __post_init__(self) -> None:
        _localise(self, "run_dir")

    def changed(self, **settings: Any) -> Self:
        """Return these settings with some replaced; raise `SettingsError` for an unknown name."""
        known = self.__dataclass_fields__
        for name in settings:
            if name not in known:
                whose = type(self).__name__.removesuffix("Config")
                raise SettingsError(f"{whose} has no setting {name!r}; {suggest(name, known, settings=True)}")
        return replace(self, **{name: _as_declared(self, name, value) for name, value in settings.items()})

    def check(self) -> None:
        """Raise `SettingsError` for settings that cannot work."""
        if self.run_dir is not None and not isinstance(self.run_dir, str):
            raise SettingsError(f"run_dir is {self.run_dir!r}; expected a path")
        for name in ("patience", "max_skips", "max_rollbacks"):
            check_count(name, getattr(self, name), least=0)
        check_count("keep", self.keep)
        check_seed(self.seed)
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise SettingsError(f"name is {self.name!r}; expected some text, or leave it out")
        if not isinstance(self.tags, tuple) or not all(isinstance(tag, str) and tag.strip() for tag in self.tags):
            raise SettingsError(f"tags is {self.tags!r}; expected a list of words, as in ['first', 'wide']")
        if not isinstance(self.notes, str):
            raise SettingsError(f"notes is {self.notes!r}; expected text")
        if self.stop_reward is not None:
            check_between("stop_reward", self.stop_reward, -1e30, 1e30)
        check_recorders(self.recorders, self.run_dir, type(self).recorders)


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """How long to train, and when to evaluate, record, save and stop."""

    eval_interval: int = 1_000
    """Optimisation steps between evaluations; 0: only at the end."""
    eval_episodes: int = 20
    """Episodes per evaluation, run in parallel, each from start to end; 0: never evaluate."""
    eval_starts: str = "fresh"
    """Where evaluations begin: fresh, in other states each time, or fixed, always in the same ones."""
    eval_actions: str = "greedy"
    """How evaluations act: greedy, or sampled, as in training at the end of what exploration decays to."""
    eval_at_start: bool = False
    """Also evaluate before the first optimisation step."""
    eval_at_return: float | None = None
    """Also evaluate where a record's mean return of training episodes is at least this; unset: never. With stop_reward
    a run may so end earlier, but never by training returns alone."""
    confirm_best: bool = True
    """Evaluate a candidate for the best policy a second time: it must win in fresh episodes too, and keeps that second
    score."""
    video_interval: int = 0
    """Optimisation steps between films of an episode of the latest policy, each made after the next evaluation; 0:
    none."""
    video_format: str = "gif"
    """Format of these films: gif or mp4."""
    save_replay: bool = True
    """Save the replay buffer with each checkpoint; without it, a run that is resumed fills a new one first."""
    train_episodes: bool = False
    """Also write a line for each finished episode of the training, into train_episodes.jsonl."""
    init_from: str | None = None
    """Run whose newest checkpoint the networks begin with, or the directory of one of its checkpoints, or a file of
    arrays by path (.npz, .safetensors), or a checkpoint of Orbax; in Python also a tree of arrays; unset: none."""
    init_parts: tuple[str, ...] = ()
    """Parts of the agent's state to begin with, as policy/params/MLP_0, with * for any text in a name, or TO=FROM where
    the other run has another name for it; empty: all networks, which must be alike."""
    devices: int = 1
    """Devices over which a run's shards, or the members of a population, are spread; their number changes no bit."""
    mesh: str | None = None
    """Devices by axis, as members=4,envs=2: four groups train members, each with its shards over two devices."""
    quiet: bool = False
    """Print nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _localise(self, "init_from")
        if isinstance(tree := cast(Any, self.init_from), Mapping):
            object.__setattr__(self, "init_from", GivenArrays(tree))
        elif not isinstance(tree, str | Path | GivenArrays | None):
            raise SettingsError(f"init_from is a {type(tree).__name__}; expected a path, or a nested dict of arrays")

    def check(self) -> None:
        """Raise `SettingsError` for settings that cannot work."""
        check_count("eval_episodes", self.eval_episodes, least=0, most=MAX_SIDE_BY_SIDE)
        if self.eval_starts not in ("fresh", "fixed"):
            raise SettingsError(f"eval_starts is {self.eval_starts!r}; expected fresh or fixed")
        if self.eval_at_return is not None:
            check_between("eval_at_return", self.eval_at_return, -1e30, 1e30)
            if not self.eval_episodes or not self.record_interval:
                raise SettingsError(
                    "eval_at_return looks at records, and evaluates; set record_interval and eval_episodes"
                )
        if self.eval_actions not in ("greedy", "sampled"):
            raise SettingsError(f"eval_actions is {self.eval_actions!r}; expected greedy or sampled")
        if self.init_parts and self.init_from is None:
            raise SettingsError("init_parts names parts of what init_from has; set init_from")
        check_format(self.video_format)
        super().check()
        check_count("devices", self.devices)
        if self.mesh is not None:
            read_mesh(self.mesh)
        if check_count("video_interval", self.video_interval, least=0) and not (self.run_dir and self.eval_episodes):
            raise SettingsError(
                "video_interval films after evaluations, into the directory of the run; set run_dir and eval_episodes"
            )
        if self.eval_interval and not self.eval_episodes:
            raise SettingsError(
                f"eval_interval is {self.eval_interval} but eval_episodes is 0; "
                "set eval_episodes to at least 1, or eval_interval to 0"
            )
        if (self.patience or self.stop_reward is not None) and not self.eval_interval:
            raise SettingsError("patience and stop_reward look at evaluations; set eval_interval as well")

    def is_promising(self, row: Mapping[str, Any] | None) -> bool:
        """Return whether the row of a record triggers an evaluation, see `eval_at_return`."""
        mean = None if row is None else row.get("episode_return")
        return self.eval_at_return is not None and mean is not None and bool(mean >= self.eval_at_return)

    def films_at(self, opt_steps: int, before: int | None) -> bool:
        """Return whether the evaluation at `opt_steps` is the first at or past a multiple of `video_interval`.

        `before` are the optimisation steps of the evaluation before; `None`: there was none.
        """
        if not self.video_interval:
            return False
        before = min(opt_steps - 1, 0) if before is None else before
        return opt_steps // self.video_interval > before // self.video_interval

    def schedule(self, strategy: Strategy) -> Schedule:
        """Return the schedule of a run of `strategy`; raise `SettingsError` for incompatible intervals."""
        return Schedule(
            max_opts=self.max_opts,
            opt_steps_per_step=strategy.opt_steps_per_step,
            env_steps_per_step=strategy.env_steps_per_step,
            warmup_env_steps=strategy.warmup_env_steps,
            eval_interval=self.eval_interval,
            record_interval=self.record_interval,
            save_interval=self.save_interval,
            max_env_steps=self.max_env_steps,
        )


def config_for(
    strategy: Strategy, evaluator: object, config: TrainerConfig | None, settings: Mapping[str, Any]
) -> TrainerConfig:
    """Return `config` with changed `settings`; the default config has no evaluations if nothing can evaluate."""
    check_type("config", config, TrainerConfig, "jaxrl.TrainerConfig(...)")
    if strategy.policy is None and evaluator is None and config is None:
        settings = {"eval_interval": 0, "eval_episodes": 0, **settings}
    return (config or TrainerConfig()).changed(**settings)


def settings_of_run(strategy: Strategy, config: TrainerConfig) -> dict[str, Any]:
    """Return all settings of a run as in `config.yaml`, without its directory, which can be moved."""
    own = {field.name: getattr(config, field.name) for field in fields(TrainerConfig) if field.name != "run_dir"}
    own["init_from"] = config.init_from and str(config.init_from)
    return {**(strategy.info.settings or {"algo": "custom", "custom": ["strategy"]}), **own}


@dataclass(frozen=True, kw_only=True)
class SessionConfig(RunConfig):
    """How a session learns, for how long, and when it saves."""

    num_envs: int = field(default=1, kw_only=False)
    """Number of parallel environments `N`."""
    opt_interval: int = 10
    """Environment steps per optimisation step; a multiple of `num_envs` or a divisor of it."""
    updates: int = 1
    """Optimisation steps taken each time one is due."""
    warmup: int = 1_000
    """Environment steps before the first optimisation step; never fewer than one batch needs."""
    random_warmup: bool = True
    """Act uniformly at random during the warm-up, instead of by the agent's exploration. `opt_interval`, `updates`,
    `warmup` and `random_warmup` are for agents that learn from replay."""
    rollout: int | None = None
    """Steps per environment in a rollout of an on-policy agent; `None`: the agent's default, also of the next two."""
    epochs: int | None = None
    """Passes over each rollout."""
    minibatches: int | None = None
    """Minibatches per epoch, one optimisation step each; of a recurrent agent, made of whole environments."""
    max_opts: int = 10_000
    """Optimisation steps, rounded up to whole iterations; the session ends exactly there. 0: no limit."""
    seed: int = 0
    """Random seed; together with the settings and what the environments return it determines every bit of the
    training."""
    record_interval: int = 1_000
    """Optimisation steps between records of metrics in the run directory; 0: none."""
    stop_reward: float | None = None
    """Score passed to `evaluate_score` at which to stop; unset: never."""
    patience: int = 0
    """Scores passed to `evaluate_score` without a new best after which to stop; 0: never."""
    recorders: tuple[str, ...] = ("jsonl", "tensorboard")
    """Where rows of metrics go, by name: console, jsonl (in any case), tensorboard, csv, wandb, mlflow."""

    def check(self) -> None:
        """Raise `SettingsError` for settings that cannot work."""
        check_count("max_opts", self.max_opts, least=0)
        super().check()


Config = TypeVar("Config", bound=RunConfig)


def _localise(config: Any, name: str) -> None:
    """Expand `~` in the path of a setting, as text; raise `SettingsError` for a URL."""
    if isinstance(path := getattr(config, name), str | Path):
        object.__setattr__(config, name, str(local(path)))


def _as_declared(config: Any, name: str, value: Any) -> Any:
    """Convert `value` to the type of the setting: lists to tuples, meshes to text, and `1e5` to an `int`."""
    value = tuple(value) if name in ("recorders", "tags", "init_parts") and isinstance(value, list) else value
    value = as_text(value) if name == "mesh" else value
    return as_int(value) if config.__dataclass_fields__[name].type in (int, int | None) else value


def with_recorders(config: Config, given: Sequence[Any] | None) -> tuple[Config, list[Any]]:
    """Return `config` with the recorders `given` by name in place of its own, and the list of those given as objects.

    `None` keeps those of `config`.
    """
    if given is None:
        return config, []
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SettingsError(f"recorders is {given!r}; expected a list of names or objects, as in ['console', 'wandb']")
    names = tuple(recorder for recorder in given if isinstance(recorder, str))
    return replace(config, recorders=names), [recorder for recorder in given if not isinstance(recorder, str)]


def check_format(video_format: str) -> None:
    """Raise `SettingsError` unless films have this format."""
    if video_format not in FORMATS:
        raise SettingsError(f"video_format is {video_format!r}; expected gif or mp4")


def check_recorders(names: Sequence[str], run_dir: str | None, default: Sequence[str]) -> None:
    """Raise `SettingsError` for unknown recorders, and for those that are not available here.

    Without a run directory, recorders of the `default` that need one are skipped silently.
    """
    if not isinstance(names, tuple):
        raise SettingsError(f"recorders is {names!r}; expected a list of names, as in ['console', 'wandb']")
    for name in names:
        if not isinstance(name, str):
            raise SettingsError(
                f"recorders has {type(name).__name__} in it; here it takes names, and only the argument of a single "
                "Trainer or Session takes objects"
            )
        row = RECORDERS.get(name)
        if row is None:
            raise SettingsError(f"unknown recorder {name!r}; {suggest(name, RECORDERS)}")
        if row.package is not None:
            import_name(row.module, row.maker)()  # it checks what it needs: the package, a key
        if run_dir is None and not row.anywhere and names != default:
            raise SettingsError(f"recorder {name!r} writes into the directory of the run; set run_dir as well")


def check_seed(seed: int) -> None:
    """Raise `SettingsError` unless `seed` is an unsigned 32-bit integer."""
    if check_count("seed", seed, least=0) >= 2**32:
        raise SettingsError(f"seed is {seed}; expected a whole number below 2^32")


def check_strategy(strategy: object) -> None:
    """Raise `SettingsError` unless `strategy` can be trained."""
    if not isinstance(strategy, Strategy):
        raise SettingsError(
            f"Trainer was given {type(strategy).__name__}; expected a strategy, as in "
            "Trainer(off_policy(make_env('CartPole-v1'), dqn(), buffer=uniform(50_000, batch_size=128)))"
        )
    if (strategy.state_fns.health is None) != (strategy.state_fns.reseed is None):
        given, lacking = ("health", "reseed") if strategy.state_fns.reseed is None else ("reseed", "health")
        raise SettingsError(
            f"the strategy has {given} but no {lacking}; give both, as jaxrl.strategies.guard has them, or neither"
        )


def round_length(config: Config, opt_steps_per_step: int) -> tuple[Config, list[str]]:
    """Return settings with `max_opts` rounded up to whole iterations, and a note if it was."""
    asked, taken = config.max_opts, round_to_iterations(config.max_opts, opt_steps_per_step)
    note = f"max_opts {asked} is rounded up to {taken}: an iteration makes {opt_steps_per_step} optimisation steps"
    return replace(config, max_opts=taken), [note] if taken != asked else []


def plan_run(strategy: Strategy, config: TrainerConfig) -> tuple[TrainerConfig, Schedule, list[str]]:
    """Return validated settings with a rounded length, the schedule of the run, and notes on the length.

    Raises:
      SettingsError: a setting is invalid, or settings contradict each other.
    """
    config.check()
    if not config.save_replay and strategy.state_fns.refill is None:
        name = (strategy.info.settings or {}).get("algo", "this strategy")
        raise SettingsError(f"save_replay is no, but {name} has no replay that could be filled again; leave it out")
    config, notes = round_length(config, strategy.opt_steps_per_step)
    return config, config.schedule(strategy), notes


def extend(
    strategy: Strategy, config: TrainerConfig, max_opts: int, done: int
) -> tuple[TrainerConfig, Schedule, list[str]]:
    """Return the settings, schedule and notes of a run extended to a total of `max_opts` optimisation steps.

    Raises:
      SettingsError: `max_opts` is not a valid length, or less than the `done` steps.
    """
    plan = plan_run(strategy, config.changed(max_opts=max_opts))
    if plan[0].max_opts < done:
        raise SettingsError(f"max_opts is {max_opts}, but the run has made {done} optimisation steps; expected more")
    return plan


# --- what differs between the settings of two runs, and which of them decide what -------------------------------

CHANGEABLE = frozenset(TrainerConfig.__dataclass_fields__) - {"seed"} | {
    "processes",
    "actor_timeout",
    "actor_engine",
    "actor_restarts",
    "open_in_turn",
    "data",
    "demos",
    "teacher",
    "eval_env",
    "eval_env_args",
    "buffer.memory",
}
"""Settings that may change on resume. No bit of the training depends on them, unless training diverges and is rolled
back.

`init_from` and `init_parts` may only be left out, see `require_same_start`.

The location of a data set (`data`, `demos`) or a `teacher` is one of them; what it holds is pinned by `data_sha256`,
`demos_sha256`, `teacher_sha256`.
"""
OF_SCORES = frozenset({"env", "env_args", "eval_env", "eval_env_args", "eval_actions"})
"""Settings that decide what a score means: those under others cannot be compared."""


READ_WITH = {
    "agent.c_clip": "agent.rho_clip",
    "agent.cql_actions": "agent.cql",
    "agent.drop_quantiles": "agent.quantiles",
    "agent.epsilon_start": "agent.epsilon_decay",
    "agent.munchausen_temperature": "agent.munchausen",
    "agent.target_entropy": "agent.learn_temperature",
    "agent.target_noise_clip": "agent.target_noise",
    "agent.tau": "agent.target_network",
    "agent.temperature_lr": "agent.learn_temperature",
    "buffer.ends": "buffer.compact",
    "buffer.alpha": "buffer.prioritised",
    **{f"buffer.{name}": "buffer.alpha" for name in ("beta", "beta_steps", "normalise", "epsilon")},
}
"""Settings that only another one reads, if it is on and itself read."""
OF_ACTORS = frozenset(ActorsConfig.__dataclass_fields__) - {"actors"}


def unused_settings(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the settings that nothing reads under `settings`.

    They are those of a distribution of returns without one and `loss` with one, those of sequences and of a core
    without a recurrent core, `core_window` with one that has no window, those of actors without any, `stagger` with
    them, `send` of actors with rollouts, of which each is a block, `demo_share` without demonstrations, `double` with
    `munchausen`, which replaces it, and `READ_WITH`. What an algorithm of the user's own reads is not known, so none of
    its settings are among them.
    """
    agent, row = settings.get("agent"), ALGORITHMS.get(str(settings.get("algo")))
    built_in = row is not None and row.make is None
    known = agent if built_in and isinstance(agent, Mapping) else {}
    of_core: Collection[str] = ()
    if known.get("core") == "none":
        of_core = (*SequenceConfig.__dataclass_fields__, "critic_core")
    elif "core" in known and CORES.get(known["core"]) not in WINDOWED:
        of_core = ("core_window",)
    of_returns: tuple[str, ...] = ()
    if "values" in known:
        of_returns += () if known["values"] == "c51" else ("v_min", "v_max")
        of_returns += ("atoms",) if known["values"] == "expected" else ("loss",)
    elif known.get("atoms") == 0:
        of_returns = ("v_min", "v_max", "critic_loss")
    parts = {"agent": known, "buffer": settings.get("buffer")}
    off = {name for name, switch in READ_WITH.items() if not _is_on(parts, switch)}
    if known.get("munchausen"):
        off.add("agent.double")
    if "rollout" in settings:
        off.add("send")
    if not settings.get("demos") and "demos" not in settings.get("custom", ()):
        off.add("demo_share")
    by_actors = _is_stepped_by_actors(settings)
    if by_actors is not None:
        off |= {"stagger"} if by_actors else OF_ACTORS
    return frozenset((*off, *(f"agent.{name}" for name in (*of_returns, *of_core) if name != "core")))


def _is_on(parts: Mapping[str, Any], switch: str) -> bool:
    """Return whether a setting is on and read; one that a part lacks may be another's, and counts as on."""
    if switch in READ_WITH and not _is_on(parts, READ_WITH[switch]):
        return False
    part, _, field = switch.partition(".")
    return bool(parts[part].get(field, True)) if isinstance(parts[part], Mapping) else True


def _is_stepped_by_actors(settings: Mapping[str, Any]) -> bool | None:
    """Return whether actors, and not compiled programs, step the environment; `None` if `settings` do not tell."""
    if "actors" not in settings:
        return None
    if settings["actors"] is not None:
        return True
    env = str(settings.get("env"))
    suite, _ = split_suite(env)
    if suite is not None:
        return suite.actors
    return None if ":" in env or env in registered_envs() else False


class Change(NamedTuple):
    """A setting or a version that differs from the saved one."""

    name: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"

    @property
    def only_names(self) -> bool:
        """Whether the change may only be another name for the same network; it is if the saved parameters fit."""
        if self.name == "agent.torso":
            return "auto" in (self.old, self.new)
        return self.name == "agent.channels" and [self.old, self.new] in ([[], [16]], [[16], []])


def changes(old: object, new: object, name: str = "") -> list[Change]:
    """List the differences between the nested settings `old` and `new`, whose path is `name`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {key: f"{name}.{key}" if name else str(key) for key in [*old, *new]}
        parts = [changes(old.get(key), new.get(key), path) for key, path in keys.items()]
        return [change for part in parts for change in part]
    return [] if old == new else [Change(name, old, new)]


def evaluation_changes(found: Sequence[Change]) -> list[Change]:
    """Return the changes after which scores are not comparable with earlier ones."""
    return [change for change in found if change.name.partition(".")[0] in OF_SCORES]
