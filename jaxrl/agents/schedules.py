"""Hyperparameters that follow schedules: functions of the number of optimisation steps taken, which settings can hold.

An agent reads its hyperparameters from its state. `follow` sets those with a schedule to the value of the moment before
each call, so no agent knows of schedules, and every hyperparameter that can be swept can follow one.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, Mode, Tunable
from jaxrl.agents.exploration import EPSILONS
from jaxrl.errors import SettingsError, check_between, check_count, suggest
from jaxrl.metrics import Metrics
from jaxrl.parsing import as_int, parse_float
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Batch

KINDS = ("linear", "cosine", "exponential", "constant")
ALIASES = {"epsilon": EPSILONS}
"""Names that stand for several hyperparameters, which are then always the same."""


class Schedule(NamedTuple):
    """A hyperparameter as a function of the number of optimisation steps taken.

    During `warmup` steps it rises linearly from 0 to `start`. Then it goes from `start` to `end` in `steps` steps, and
    stays there.
    """

    kind: str
    start: float
    end: float
    steps: int
    warmup: int = 0

    def __call__(self, opt_step: Array) -> Array:
        """Return the value, a float32 scalar, when `opt_step` optimisation steps have been taken."""
        step = jnp.asarray(opt_step, jnp.float32)
        done = jnp.clip((step - self.warmup) / max(self.steps, 1), 0.0, 1.0)
        value = _SHAPES[self.kind](jnp.float32(self.start), jnp.float32(self.end), done)
        return value if not self.warmup else jnp.where(step < self.warmup, self.start * step / self.warmup, value)

    def __str__(self) -> str:
        values = [self.start] if self.kind == "constant" else [self.start, self.end, self.steps]
        warmup = [f"warmup={self.warmup}"] if self.warmup else []
        return f"{self.kind}({','.join([*map(repr, values), *warmup])})"

    @property
    def peak(self) -> float:
        """The value furthest from 0."""
        return max(self.start, self.end, key=abs)


_SHAPES = {
    "linear": lambda start, end, done: start + (end - start) * done,
    # Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, equation 5, without restarts.
    "cosine": lambda start, end, done: end + (start - end) * (1 + jnp.cos(jnp.pi * done)) / 2,
    "exponential": lambda start, end, done: start * (end / start) ** done,
    "constant": lambda start, end, done: start,
}


def linear(start: float, end: float, steps: int, warmup: int = 0) -> Schedule:
    """Go from `start` to `end` along a line in `steps` optimisation steps, after `warmup` steps from 0 to `start`.

    As a setting of an agent: `dqn(lr=linear(1e-3, 0, 10_000))`.

    Raises:
      SettingsError: a value is not finite, or a number of steps is not a whole number.
    """
    return _check(Schedule("linear", start, end, steps, warmup))


def cosine(start: float, end: float, steps: int, warmup: int = 0) -> Schedule:
    """Go from `start` to `end` along half a wave of a cosine; otherwise as `linear`."""
    return _check(Schedule("cosine", start, end, steps, warmup))


def exponential(start: float, end: float, steps: int, warmup: int = 0) -> Schedule:
    """Go from `start` to `end` by the same factor in each step; otherwise as `linear`.

    Raises:
      SettingsError: as for `linear`; or `start` and `end` are not both above 0 or both below it.
    """
    return _check(Schedule("exponential", start, end, steps, warmup))


def constant(value: float, warmup: int = 0) -> Schedule:
    """Rise from 0 to `value` in `warmup` optimisation steps, and stay there."""
    return _check(Schedule("constant", value, value, 0, warmup))


def _check(schedule: Schedule) -> Schedule:
    kind = schedule.kind
    start, end = (check_between(f"{kind}: {name}", getattr(schedule, name), -1e30, 1e30) for name in ("start", "end"))
    steps = check_count(f"{kind}: steps", as_int(schedule.steps), least=0 if kind == "constant" else 1)
    warmup = check_count(f"{kind}: warmup", as_int(schedule.warmup), least=0)
    if kind == "exponential" and not start * end > 0:
        raise SettingsError(f"exponential from {start:g} to {end:g}; expected both above 0, or both below it")
    return Schedule(kind, float(start), float(end), steps, warmup)


# --- as settings ------------------------------------------------------------------------------------------------


def is_written(value: object) -> bool:
    """Return whether `value` is text that begins as a schedule does, as in `linear(1e-3,0,10000)`."""
    return isinstance(value, str) and "(" in value and value.strip().partition("(")[0] in KINDS


def read_schedule(text: str) -> Schedule:
    """Read a schedule as `str` writes it, or as a person does: `cosine(1e-3, 0, 1e4, warmup=500)`.

    Raises:
      SettingsError: it cannot be read, or is no schedule.
    """
    kind, _, rest = text.strip().partition("(")
    words = [word.strip() for word in rest.removesuffix(")").split(",")]
    # `warmup=` can only come last.
    warmup = words.pop().removeprefix("warmup=") if words[-1].startswith("warmup=") else "0"
    values = [parse_float(word) for word in words]
    if kind not in KINDS or not rest.endswith(")") or len(values) != (1 if kind == "constant" else 3) or None in values:
        raise SettingsError(
            f"cannot read the schedule {text!r}; expected linear(START,END,STEPS), cosine(START,END,STEPS), "
            "exponential(START,END,STEPS) or constant(VALUE), each also with warmup=STEPS at its end"
        )
    start, end, steps = (values[0], values[0], 0.0) if kind == "constant" else values
    return _check(Schedule(kind, start, end, steps, as_int(warmup)))  # type: ignore[arg-type]


def name_of(line: str) -> str:
    """Return the name of the hyperparameter that a line `NAME=SCHEDULE` is about."""
    return str(line).partition("=")[0].strip().replace("-", "_")


def with_schedules(settings: Mapping[str, Any], old: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings of an agent, with each that is a schedule, or the text of one, moved into `schedules`.

    Schedules that were there, `old`, stay, unless `settings` has a number or a schedule for the same hyperparameters.

    Raises:
      SettingsError: `schedules` is no list, or two settings are of the same hyperparameter.
    """
    given = {name: value for name, value in settings.items() if isinstance(value, Schedule) or is_written(value)}
    rest = {name: value for name, value in settings.items() if name not in given}
    before = rest.pop("schedules", None)
    if before is None:
        before = [line for line in old if not _fields(name_of(line)) & rest.keys()]
    lines = [before] if isinstance(before, str) else before
    if not isinstance(lines, list | tuple):
        raise SettingsError(f"agent.schedules is {lines!r}; expected a list, as in [lr=linear(1e-3,0,10000)]")
    _check_aliases(settings, given.keys(), {name_of(line) for line in lines} if "schedules" in settings else set())
    # Whatever is given replaces an old schedule of the same fields: a number above, another schedule here.
    replaced = {field for name in given for field in _fields(name)}
    kept = [line for line in lines if not _fields(name_of(line)) & replaced]
    return {**rest, "schedules": (*kept, *(f"{name}={value}" for name, value in given.items()))}


def _fields(name: str) -> frozenset[str]:
    """Return the hyperparameters that a schedule of this name sets."""
    return frozenset(ALIASES.get(name, (name,)))


def _check_aliases(settings: Mapping[str, Any], given: Collection[str], listed: Collection[str]) -> None:
    """Raise `SettingsError` for a schedule of several hyperparameters beside another setting of one of them.

    Schedules are `given` among the settings, or `listed` in `schedules`. Numbers beside the latter are their peaks, as
    in the settings of a run.
    """
    for alias, fields in ALIASES.items():
        others = {*given, *listed, *(settings if alias in given else ())}
        if alias in {*given, *listed} and (beside := [field for field in fields if field in others]):
            raise SettingsError(
                f"agent.{alias} is a schedule of {' and '.join(fields)}, but agent.{beside[0]} is set as well; leave "
                "one of them out"
            )


def schedules_in(lines: Iterable[str]) -> dict[str, Schedule]:
    """Return the schedules of the setting `schedules` by the names of their hyperparameters.

    Raises:
      SettingsError: a line cannot be read.
    """
    found = {}
    for line in lines:
        if "=" not in str(line):
            raise SettingsError(f"agent.schedules has {line!r}; expected NAME=SCHEDULE, as in lr=linear(1e-3,0,10000)")
        found[name_of(line)] = read_schedule(str(line).partition("=")[2])
    return found


def scheduled_settings(agent: Mapping[str, Any]) -> set[str]:
    """Return which settings of a run, as `agent.lr`, follow a schedule in the settings `agent`."""
    names = schedules_in(agent.get("schedules", ()))
    return {f"agent.{field}" for name in names for field in _fields(name)}


# --- as an agent follows them -----------------------------------------------------------------------------------


def follow(agent: Agent) -> Agent:
    """Return `agent` with the hyperparameters in its setting `schedules` set anew before each action and update.

    Its metrics then hold their values, by their names.

    Raises:
      SettingsError: a name is not that of a hyperparameter that lives in the agent's state.
    """
    schedules = schedules_in((agent.info.settings or {}).get("schedules", ()))
    if not schedules:
        return agent
    _require_known(agent, schedules)
    targets = {field: schedule for name, schedule in schedules.items() for field in ALIASES.get(name, (name,))}

    def at(state: PyTree, opt_step: Array | int) -> PyTree:
        values = {field: schedule(jnp.asarray(opt_step)) for field, schedule in targets.items()}
        return state._replace(hyper=state.hyper._replace(**values))

    def act(state: PyTree, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode) -> tuple[PyTree, PyTree]:
        return agent.act(state if mode == "exploit" else at(state, opt_step), obs, key, opt_step, mode)

    def behave(state: PyTree, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode) -> tuple[PyTree, PyTree]:
        assert agent.fns.behave is not None
        return agent.fns.behave(at(state, opt_step), obs, key, opt_step, mode)

    def update(state: PyTree, batch: Batch, key: Key, opt_step: Array) -> tuple[PyTree, Metrics, Array]:
        state, metrics, priorities = agent.update(at(state, opt_step), batch, key, opt_step)
        # The agent's own metrics come last: of the same name, as `epsilon`, they are what was in effect.
        return state, {**{name: schedule(opt_step) for name, schedule in schedules.items()}, **metrics}, priorities

    policy_fns = agent.policy_fns
    if policy_fns is not None and not isinstance(policy_fns.distribution, str):
        distribution = policy_fns.distribution
        policy_fns = policy_fns._replace(
            distribution=lambda state, obs, opt_step: distribution(at(state, opt_step), obs, opt_step)
        )
    return agent._replace(
        init=lambda key: at(agent.init(key), 0),
        act=act,
        update=update,
        fns=agent.fns._replace(behave=agent.fns.behave and behave),
        info=agent.info._replace(scheduled=tuple(targets)),
        policy_fns=policy_fns,
    )


def _require_known(agent: Agent, schedules: Mapping[str, Schedule]) -> None:
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: make_key(0)))
    hyper = state.hyper._asdict() if isinstance(state, Tunable) else {}
    # An option that is off is `()` in the state, and has nothing to set.
    known = [name for name, value in hyper.items() if isinstance(value, jax.ShapeDtypeStruct)]
    known += [name for name, fields in ALIASES.items() if set(fields) <= {*known}]
    for name, schedule in schedules.items():
        if name not in known:
            if name in (agent.info.settings or {}) and not schedule.peak:
                raise SettingsError(f"agent.{name} is 0 throughout {schedule}; set it to 0, or give another schedule")
            raise SettingsError(f"agent.{name} of {agent.name} cannot follow a schedule; {suggest(name, known)}")
