"""The settings of the host loop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from jaxrl.errors import SettingsError, check_between, check_count, nearest
from jaxrl.strategies.base import Strategy
from jaxrl.training.schedule import Schedule, rounded_up
from jaxrl.written import whole


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train, and when to look, write and stop."""

    max_opts: int = 10_000
    """Optimisation steps, rounded up to whole iterations; the run ends exactly there."""
    seed: int = 0
    """Seed; with the settings it decides every bit of the training."""
    eval_interval: int = 1_000
    """Optimisation steps between evaluations; 0: only at the end."""
    eval_episodes: int = 20
    """Episodes of an evaluation, run in parallel from start to end; 0: never evaluate."""
    eval_at_start: bool = False
    """Evaluate before the first optimisation too."""
    confirm_best: bool = True
    """Evaluate a candidate for the best again: it must be better in fresh episodes too, and that score is kept."""
    record_interval: int = 1_000
    """Optimisation steps between rows of metrics; 0: only at the end."""
    save_interval: int = 2_500
    """Optimisation steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Checkpoints kept, the newest; the best policy is kept apart."""
    stop_reward: float | None = None
    """Mean evaluation return at which to stop; unset: never."""
    patience: int = 0
    """Evaluations without a new best after which to stop; 0: never."""
    max_env_steps: int = 0
    """Environment steps, warm-up included, at or past which to stop; 0: no limit."""
    max_skips: int = 100
    """Updates skipped in a row, for not being finite, after which to go back to the last good checkpoint; 0: never."""
    max_rollbacks: int = 3
    """Times to go back without getting any further before giving up."""
    run_dir: str | None = None
    """Directory for settings, logs and checkpoints; unset: the library writes none, the command line makes one up."""
    quiet: bool = False
    """Show nothing."""

    def changed(self, **settings: Any) -> "TrainerConfig":
        """Return these settings with some replaced; raise `SettingsError` for a name that is none."""
        return changed("Trainer", self, settings)

    def check(self) -> None:
        """Raise `SettingsError` for what cannot be."""
        check_count("eval_episodes", self.eval_episodes, least=0)
        check_shared(self)
        if self.eval_episodes > 2**20:
            raise SettingsError(f"eval_episodes is {self.eval_episodes}; at most {2**20} run in parallel")
        if self.eval_interval and not self.eval_episodes:
            raise SettingsError(
                f"eval_interval is {self.eval_interval} but eval_episodes is 0; "
                "set eval_episodes to at least 1, or eval_interval to 0"
            )
        if (self.patience or self.stop_reward is not None) and not self.eval_interval:
            raise SettingsError("patience and stop_reward look at evaluations; set eval_interval as well")

    def rounded(self, strategy: Strategy) -> "TrainerConfig":
        """Return these settings with a `max_opts` of whole iterations of `strategy`, at least as many as asked for."""
        return replace(self, max_opts=rounded_up(self.max_opts, strategy.opt_steps_per_step))

    def schedule(self, strategy: Strategy) -> Schedule:
        """Return when things happen in a run of `strategy`; raise `SettingsError` for counts that do not fit it."""
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


@dataclass(frozen=True)
class SessionConfig:
    """How a session learns, for how long, and when it writes."""

    num_envs: int = 1
    """Environments `N` that are driven side by side."""
    opt_interval: int = 10
    """Environment steps per optimisation step; a multiple of `num_envs` or a divisor of it."""
    updates: int = 1
    """Optimisation steps made each time that one is due."""
    warmup: int = 1_000
    """Environment steps before the first optimisation; at least those of one batch are taken."""
    random_warmup: bool = True
    """Act uniformly at random during it, instead of as the agent explores."""
    max_opts: int = 10_000
    """Optimisation steps; the session is done exactly there."""
    seed: int = 0
    """Seed; with the settings and what the environments tell it decides every bit of the training."""
    record_interval: int = 1_000
    """Optimisation steps between rows of metrics in the run directory; 0: none."""
    save_interval: int = 2_500
    """Optimisation steps between checkpoints; 0: only when asked to and at the end."""
    keep: int = 3
    """Checkpoints kept, the newest; the best policy is kept apart."""
    stop_reward: float | None = None
    """Score given to `evaluate_score` at which to stop; unset: never."""
    patience: int = 0
    """Scores given to it without a new best after which to stop; 0: never."""
    max_env_steps: int = 0
    """Environment steps, warm-up included, at or past which to stop; 0: no limit."""
    max_skips: int = 100
    """Updates skipped in a row, for not being finite, after which to go back to the last good checkpoint; 0: never."""
    max_rollbacks: int = 3
    """Times to go back without getting any further before saving and raising `DivergedError`."""
    run_dir: str | None = None
    """Directory for settings, logs and checkpoints; unset: nothing is written."""

    def changed(self, **settings: Any) -> "SessionConfig":
        """Return these settings with some replaced; raise `SettingsError` for a name that is none."""
        return changed("Session", self, settings)

    def check(self) -> None:
        """Raise `SettingsError` for what cannot be."""
        check_shared(self)


Config = TypeVar("Config", TrainerConfig, SessionConfig)


def changed(whose: str, config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with some settings replaced; raise `SettingsError` for a name that is none."""
    for name in settings:
        if name not in config.__dataclass_fields__:
            raise SettingsError(
                f"{whose} has no setting {name!r}; {nearest(name, config.__dataclass_fields__, settings=True)}"
            )
    return replace(config, **{name: _as_declared(config, name, value) for name, value in settings.items()})


def _as_declared(config: Any, name: str, value: Any) -> Any:
    """Return `value` as an `int` where a whole number is wanted and `1e5` was given."""
    return whole(value) if config.__dataclass_fields__[name].type is int else value


def check_shared(config: TrainerConfig | SessionConfig) -> None:
    """Raise `SettingsError` for what cannot be in a trainer or a session."""
    for name in ("patience", "max_skips", "max_rollbacks"):
        check_count(name, getattr(config, name), least=0)
    check_count("keep", config.keep)
    check_seed(config.seed)
    if config.stop_reward is not None:
        check_between("stop_reward", config.stop_reward, -1e30, 1e30)


def check_seed(seed: int) -> None:
    """Raise `SettingsError` unless `seed` is a whole number of 32 bits."""
    if check_count("seed", seed, least=0) >= 2**32:
        raise SettingsError(f"seed is {seed}; expected a whole number below 2^32")


HARMLESS = frozenset(TrainerConfig.__dataclass_fields__) - {"seed"} | {"processes", "actor_timeout", "data"}
"""Settings that may change on resume: no bit of the training depends on them, unless it diverges and goes back.

Where data lie is one of them; what they are, `data_sha256` says.
"""


NEWER: Mapping[str, object] = {
    "agent.rho_clip": 0.0,
    "agent.c_clip": 1.0,
    "agent.noise_memory": 0.0,
    "max_skips": 100,
    "patience": 0,
    "max_env_steps": 0,
    "max_rollbacks": 3,
    "agent.channels": [],
    "agent.dtype": "float32",
}
"""Settings that earlier versions did not have, here or in a session, with the values under which a run goes on as it
began."""


RENAMED: Mapping[str, str] = {
    "clip": "clip_eps",
    "clip_value": "vf_clip_eps",
    "critics": "num_critics",
    "entropy": "ent_coef",
    "normalise": "normalise_advantage",
    "value": "vf_coef",
}
"""Settings of agents by their names up to version 0.4."""


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with those of the agent by their names of today."""
    agent = settings.get("agent")
    if not isinstance(agent, Mapping):
        return dict(settings)
    return {**settings, "agent": {RENAMED.get(name, name): value for name, value in agent.items()}}


def renewed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as this version writes those under which it goes on as it began.

    Before there were `channels`, `auto` knew one convolution of 16 for images of any size, and no other torso.
    """
    settings = renamed(settings)
    agent = settings.get("agent")
    if not isinstance(agent, Mapping) or "torso" not in agent or "channels" in agent:
        return dict(settings)
    return {**settings, "agent": {**agent, "channels": [16]}}


def unread(settings: Mapping[str, Any]) -> frozenset[str]:
    """Name the settings that nothing reads under `settings`: without c51 the ends of its support."""
    agent = settings.get("agent")
    c51 = isinstance(agent, Mapping) and agent.get("values") == "c51"
    return frozenset() if c51 else frozenset({"agent.v_min", "agent.v_max"})


class Change(NamedTuple):
    """One setting or version that is not what it was."""

    name: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"

    @property
    def only_names(self) -> bool:
        """Whether it may be but another way to say which network it is, as it is where what was saved fits."""
        if self.name == "agent.torso":
            return "auto" in (self.old, self.new) or {self.old, self.new} == {"conv", "minatar"}
        return self.name == "agent.channels" and [self.old, self.new] in ([[], [16]], [[16], []])


def changes(old: object, new: object, name: str = "") -> list[Change]:
    """List where the settings `new`, nested by name, differ from `old`."""
    if not name and isinstance(old, Mapping):
        old = renamed(old)
    if isinstance(old, Mapping) and isinstance(new, Mapping) and "agent" in _custom(old) and not name:
        # Up to version 0.4 an agent with parts made in Python had no settings, and was one of the parts itself.
        made = [part for part in _custom(new) if str(part).startswith("make_")]
        others = [part for part in _custom(old) if part != "agent"]
        old = {**old, "agent": new.get("agent"), "custom": [*made, *others]} if made else old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {key: f"{name}.{key}" if name else str(key) for key in [*old, *new]}
        parts = [changes(old.get(key, NEWER.get(path)), new.get(key), path) for key, path in keys.items()]
        return [change for part in parts for change in part]
    return [] if old == new else [Change(name, old, new)]


def _custom(settings: Mapping[str, Any]) -> list[Any]:
    custom = settings.get("custom")
    return custom if isinstance(custom, list) else []


def check_strategy(strategy: object) -> None:
    """Raise `SettingsError` unless this is what can be trained."""
    if isinstance(strategy, Strategy) and (strategy.health is None) != (strategy.reseed is None):
        given, lacking = ("health", "reseed") if strategy.reseed is None else ("reseed", "health")
        raise SettingsError(
            f"the strategy has {given} but no {lacking}; give both, as jaxrl.strategies.guard has them, or neither"
        )
    if not isinstance(strategy, Strategy):
        raise SettingsError(
            f"Trainer was given {type(strategy).__name__}; expected a strategy, as in "
            "Trainer(off_policy(make_env('CartPole-v1'), dqn(), buffer=uniform(50_000, batch_size=128)))"
        )


def rounding(asked: int, taken: int, opt_steps_per_step: int) -> list[str]:
    """Return what to say if a run is longer than was asked for."""
    if asked == taken:
        return []
    return [f"max_opts {asked} is rounded up to {taken}: an iteration makes {opt_steps_per_step} optimisation steps"]
