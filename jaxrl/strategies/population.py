"""Populations: one strategy with several seeds and settings, whose members share programs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations as combinations_of, product
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.agents.custom import PARTS
from jaxrl.agents.fields import rules_of
from jaxrl.agents.schedules import scheduled_settings
from jaxrl.errors import SettingsError, check_between, check_count, check_type, suggest
from jaxrl.parsing import format_repr, format_settings, parse_float
from jaxrl.registry import ALGORITHMS, algorithm_maker, config_class
from jaxrl.strategies.base import Strategy, format_name
from jaxrl.strategies.interaction import require_discounting
from jaxrl.trees import PyTree, make_key
from jaxrl.tuning import Override, override, trace_hyperparams, trace_initial
from jaxrl.xla.options import prefers_one_program

DISCOUNT = "processor.discount"
SWITCHES = tuple(
    f"agent.{name}"
    for name in (
        *("noise_memory", "noise_min", "cql", "eta", "boltzmann", "bc_alpha", "actor_bc_coef", "critic_bc_coef"),
        *("rho_clip", "target_entropy", "teacher_coef", "imitation_coef"),
    )
)
"""Settings for which 0 changes the program: it turns something off (for a target entropy, selects the default)."""
MAX_MEMBERS = 100_000
"""Largest number of members."""
LAYOUTS = ("auto", "spread", "together")
"""Ways to train members: one per call, spread over cores and devices, or `width` together in one program."""


class Range(NamedTuple):
    """A uniform or log-uniform distribution from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def draw(self, rng: np.random.Generator) -> float:
        """Return one random value."""
        if self.log:
            return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return float(rng.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'between'}({self.low!r},{self.high!r})"


def log_uniform(low: float, high: float) -> Range:
    """Return a log-uniform range for a sweep, such as of learning rates; `0 < low < high`."""
    return _check_range(Range(low, high, log=True))


def between(low: float, high: float) -> Range:
    """Return a uniform range for a sweep; `low < high`."""
    return _check_range(Range(low, high))


def _check_range(range: Range) -> Range:
    """Return `range`; raise `SettingsError` unless its bounds are finite and in order."""
    bounds = [x for x in range[:2] if isinstance(x, int | float) and math.isfinite(x)]
    # The difference must be finite, too: a uniform draw computes it.
    if len(bounds) < 2 or not 0 < range.high - range.low < math.inf or (range.log and range.low <= 0):
        least = "0 < " if range.log else ""
        raise SettingsError(f"a range from {range.low} to {range.high}; expected finite numbers, {least}low < high")
    return range


Sweep = Mapping[str, Sequence[Any] | Range]
"""Values or a range for each swept setting, by names such as `agent.lr`."""


class Member(NamedTuple):
    """A member of a population."""

    number: int
    seed: int
    """Added to the seed of the run."""
    swept: Mapping[str, Any]
    """Its values of the swept settings, by name."""
    strategy: Strategy

    def __repr__(self) -> str:
        return format_repr(
            "Member", self.number, f"seed={self.seed}", format_settings(self.swept), format_name(self.strategy)
        )


class PopulationLayout(NamedTuple):
    """How the members of a population are divided into programs."""

    name: str = "spread"
    """One of `LAYOUTS` except `auto`."""
    width: int | None = None
    """Members per program with `together`; `None`: all that share it."""


class Population(NamedTuple):
    """Members, ordered by settings and then by seed. `Trainer` trains them."""

    members: tuple[Member, ...]
    settings: Mapping[str, Any]
    """Settings that rebuild it, for the settings of the run."""
    search: Any = None
    """A `jaxrl.strategies.search.Search` among the members, or `None`."""
    layout: PopulationLayout = PopulationLayout()

    def __repr__(self) -> str:
        return format_repr(
            "Population",
            f"{len(self.members)} members",
            format_name(self.members[0].strategy) if self.members else None,
            format_settings({name: value for name, value in self.settings.items() if value is not None}),
        )


def resolve_layout(name: str, width: int | None, shards: int = 1) -> PopulationLayout:
    """Return a valid layout; `auto` depends on the platform, and is `spread` for members with several `shards`.

    Raises:
      SettingsError: the layout is unknown, or does not support a width or shards.
    """
    if name not in LAYOUTS:
        raise SettingsError(f"layout is {name!r}; {suggest(str(name), LAYOUTS)}")
    if name == "together" and shards > 1:
        raise SettingsError(
            f"layout together trains members in one program on one device, and these have {shards} shards, which "
            "several devices can share; set layout to spread, or shards to 1"
        )
    chosen = ("together" if prefers_one_program() and shards == 1 else "spread") if name == "auto" else name
    if width is not None and check_count("width", width) and chosen == "spread":
        raise SettingsError(f"width is {width}, but members are spread, one in each call; set layout to together")
    return PopulationLayout(chosen, width)


def population(
    strategy: Strategy,
    *,
    seeds: int = 1,
    sweep: Sweep | None = None,
    members: int | None = None,
    draw_seed: int = 0,
    search: Any = None,
    layout: str = "auto",
    width: int | None = None,
) -> Population:
    """Create a population: each combination of `sweep` with each of `seeds` seeds.

    Args:
      strategy: the strategy of all members, but for swept settings.
      seeds: number of runs per combination; seeds count up from that of the run.
      sweep: lists of values, of which all combinations are run; or ranges, as returned by `log_uniform`, from which
        combinations are drawn (together with values from lists). For the possible names see `sweepable`.
      members: number of members, required with ranges; a multiple of `seeds`.
      draw_seed: seed for drawing from ranges.
      search: a search that favours the better members: `jaxrl.Halving(...)` or `jaxrl.PBT(...)`.
      layout: `spread` over cores and devices, each member with the bits of a run of its own; `together`, many members
        in one program by `vmap`, whose bits depend on that program; or `auto`: `together` on accelerators, `spread` on
        CPUs.
      width: members per program with `together` (default: all that share it). Results depend on it in their last bits.

    Raises:
      SettingsError: a name cannot be swept (the message has the nearest), a value is invalid, or there are no members.
    """
    if not isinstance(strategy, Strategy):
        raise SettingsError(f"strategy is {strategy!r:.60}; expected what jaxrl.off_policy(...) and others return")
    check_type("sweep", sweep, Mapping, 'values by name, as {"agent.lr": [1e-3, 3e-3]}')
    if search is not None and not hasattr(search, "decide"):
        raise SettingsError(f"search is {search!r:.60}; expected jaxrl.Halving(...), jaxrl.PBT(...) or one of your own")
    known = sweepable(strategy) if sweep else {}
    for name in sweep or {}:
        require_sweepable(name, known)
    combined = combinations(sweep or {}, seeds, members, draw_seed)
    variants = [with_values(strategy, swept, known) for swept in combined]
    return make_population(
        variants,
        combined,
        seeds,
        sweep or {},
        members,
        draw_seed,
        search,
        resolve_layout(layout, width, strategy.placement.shards),
    )


def make_population(
    variants: Sequence[Strategy],
    combined: Sequence[Mapping[str, Any]],
    seeds: int,
    sweep: Sweep,
    members: int | None,
    draw_seed: int,
    search: Any,
    layout: PopulationLayout,
) -> Population:
    """Build a population of `seeds` members for each of the settings `combined`, whose strategies are `variants`.

    Raises:
      SettingsError: values of a member, each of which it may have, contradict each other.
    """
    for swept, strategy in zip(combined, variants, strict=True):
        # PBT may set a discount to any value of its range.
        if strategy.info.bounds_returns and DISCOUNT in sweep:
            require_discounting(_highest(sweep[DISCOUNT]))
        if any(name.startswith("agent.") for name in swept):
            _check_agent(strategy.info.settings or {})
    settings = {**settings_of_sweep(sweep, seeds, members, draw_seed), "layout": layout.name, "width": layout.width}
    if search is not None:
        search = search.within(sweep, draw_seed)
        settings[search.name] = search.settings()
    made = [
        Member(i * seeds + seed, seed, swept, strategy)
        for i, (swept, strategy) in enumerate(zip(combined, variants, strict=True))
        for seed in range(seeds)
    ]
    return Population(tuple(made), settings, search, layout)


def require_compatible(strategy: Strategy, sweep: Sweep) -> None:
    """Raise `SettingsError` if values of swept settings of the agent contradict each other, or one that is not swept.

    PBT may give any of them to a member, whatever the members begin with.
    """
    ends = {name: (_lowest(x), _highest(x)) for name, x in sweep.items() if name.startswith("agent.")}
    for names in (*combinations_of(ends, 1), *combinations_of(ends, 2)):
        for values in product(*(ends[name] for name in names)):
            given = dict(zip(names, values, strict=True))
            try:
                _check_agent(replace_settings(strategy.info.settings or {}, given))
            except SettingsError as error:
                said = " with ".join(f"{name} {value:g}" for name, value in given.items())
                raise SettingsError(
                    f"pbt may give a member {said}: {error}; sweep values that all go together"
                ) from error


def _lowest(values: Sequence[Any] | Range) -> float:
    return values.low if isinstance(values, Range) else min(float(value) for value in values)


def _highest(values: Sequence[Any] | Range) -> float:
    return values.high if isinstance(values, Range) else max(float(value) for value in values)


def settings_of_sweep(sweep: Sweep, seeds: int, members: int | None, draw_seed: int) -> dict[str, Any]:
    """Return the settings that rebuild a population, in plain values."""
    plain = {name: str(values) if isinstance(values, Range) else list(values) for name, values in sweep.items()}
    return {"seeds": seeds, "sweep": plain, "members": members, "draw_seed": draw_seed}


def combinations(sweep: Sweep, seeds: int, members: int | None, draw_seed: int) -> list[dict[str, Any]]:
    """Return the combinations of a sweep, each as values by name.

    Raises:
      SettingsError: a setting has no values, or the numbers of members and seeds do not fit.
    """
    check_count("seeds", seeds)
    check_count("draw_seed", draw_seed, least=0)
    check_count("members", 1 if members is None else members)
    for name, values in sweep.items():
        if isinstance(values, Range):
            _check_range(values)
        elif isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise SettingsError(f"sweep of {name} is {values!r}; expected a list of values, or a range to draw from")
        elif len({*map(_number, values)}) < len(values):
            raise SettingsError(f"sweep of {name} names a value twice; seeds gives several runs of one setting")
    drawn = any(isinstance(values, Range) for values in sweep.values())
    settings = math.prod(1 if isinstance(values, Range) else len(values) for values in sweep.values())
    # Counted before they are made, as products of lists grow fast.
    if (size := (members or 1) if drawn else settings * seeds) > MAX_MEMBERS:
        raise SettingsError(f"the population has {size} members; at most {MAX_MEMBERS}")
    if not drawn:
        lists = [values for values in sweep.values() if not isinstance(values, Range)]
        combined = [dict(zip(sweep, values, strict=True)) for values in product(*lists)]
        if members is not None and members != len(combined) * seeds:
            each = f"{len(combined)} x {seeds} members, settings x seeds" if sweep else f"{seeds} with a seed each"
            raise SettingsError(
                f"members is {members}, but no range is drawn from: there are {each}; leave members out, or sweep a "
                "range, as in agent.lr=log_uniform(1e-5,1e-1)"
            )
    else:
        combined = _draw(sweep, seeds, members, draw_seed)
    return combined


def _number(value: Any) -> Any:
    """Return a value of a sweep as a number, or as text if it is none."""
    text = str(value)
    return text if (number := parse_float(text)) is None else number


def _draw(sweep: Sweep, seeds: int, members: int | None, draw_seed: int) -> list[dict[str, Any]]:
    if members is None:
        raise SettingsError("a range is drawn from, but not how often; set members, the size of the population")
    check_count("members", members)
    if members % seeds:
        below = max(members // seeds, 1) * seeds
        raise SettingsError(
            f"members {members} is not a multiple of seeds {seeds}; the nearest that is: {below} or {below + seeds}"
        )
    # One generator per combination, so that a larger population starts with the same members.
    rngs = [np.random.default_rng([draw_seed, i]) for i in range(members // seeds)]
    pick = lambda values, rng: values.draw(rng) if isinstance(values, Range) else values[rng.integers(len(values))]
    return [{name: pick(values, rng) for name, values in sweep.items()} for rng in rngs]


def parse_values(text: str) -> Sequence[str] | Range:
    """Parse the values of a sweep: `1e-4,3e-4`, or `log_uniform(1e-5,1e-2)`.

    Raises:
      SettingsError: a range does not have two numbers.
    """
    name, bracket, rest = text.strip().partition("(")
    if bracket and name in ("log_uniform", "between"):
        bounds = [parse_float(part) for part in rest.removesuffix(")").split(",")]
        if len(bounds) != 2 or None in bounds or not rest.endswith(")"):
            raise SettingsError(f"cannot read the range {text!r}; expected {name}(LOW,HIGH), as in {name}(1e-5,1e-2)")
        low, high = (float(bound) for bound in bounds if bound is not None)
        return log_uniform(low, high) if name == "log_uniform" else between(low, high)
    return [part.strip() for part in text.split(",") if part.strip()]


# --- sweepable settings -----------------------------------------------------------------------------------------


def sweepable(strategy: Strategy) -> dict[str, float]:
    """Return the settings in which members of one program may differ, with their values: arrays of the state.

    Scheduled settings are not among them.
    """
    # Tracing `init` tells which numbers a state holds as arrays: it calls `tunable` for each of them.
    _, found = trace_hyperparams(strategy.init, jax.eval_shape(lambda: make_key(0)))
    scheduled = scheduled_settings((strategy.info.settings or {}).get("agent") or {})
    return {name: value for name, value in found.items() if name not in scheduled and (value or name not in SWITCHES)}


def require_movable(strategy: Strategy, names: Iterable[str]) -> None:
    """Raise `SettingsError` unless the settings `names` of `strategy` have an effect if they change during training."""
    known = sweepable(strategy)
    initial = trace_initial(strategy.init, jax.eval_shape(lambda: make_key(0)))
    for name in names:
        if name not in known:
            raise SettingsError(
                f"pbt cannot change {name} on the way: it is part of the program; {suggest(name, known)}"
            )
        if name in initial:
            raise SettingsError(
                f"pbt cannot change {name} on the way: it is only the initial value of what is learnt; sweep it "
                "without pbt, or another setting"
            )


def keeps_program(name: str, value: Any, known: Mapping[str, float]) -> bool:
    """Return whether the program, with `known` sweepable settings, also serves this `value` of a setting."""
    return name in known and not (name in SWITCHES and parse_float(str(value)) == 0)


def require_sweepable(name: str, known: Mapping[str, Any]) -> None:
    """Raise `SettingsError`, with the nearest of the `known` names, unless `name` is one of them."""
    if name not in known:
        raise SettingsError(f"{name!r} cannot be swept; {suggest(name, known)}")


def with_values(strategy: Strategy, values: Mapping[str, Any], known: Mapping[str, float] | None = None) -> Strategy:
    """Return `strategy` with other values of `sweepable` settings; it shares the programs.

    `known` is `sweepable(strategy)`; pass it to avoid computing it again.

    Raises:
      SettingsError: a value is invalid, or would change the program.
    """
    if not values:
        return strategy
    old, settings = sweepable(strategy) if known is None else known, strategy.info.settings
    algo = (settings or {}).get("algo")
    for name, value in values.items():
        require_sweepable(name, old)
        if not keeps_program(name, value, old):
            raise SettingsError(f"{name} is {value}, which turns it off; sweep values other than 0")
    swaps = {name: Override(old[name], _value(algo, name, value)) for name, value in values.items()}
    set_hyperparams = strategy.state_fns.set_hyperparams

    # Programs read these numbers from the state, so it is enough to change that.
    def tuned(state: PyTree) -> PyTree:
        with override(swaps):
            return set_hyperparams(state) if set_hyperparams else state

    new_settings = settings and replace_settings(settings, {name: swap.new for name, swap in swaps.items()})
    state_fns = strategy.state_fns._replace(set_hyperparams=tuned)
    info = strategy.info._replace(settings=new_settings, overrides={**strategy.info.overrides, **swaps})
    return strategy._replace(info=info, state_fns=state_fns)


def require_stream(strategy: Strategy) -> None:
    """Raise `SettingsError` unless the state of `strategy` has a field `key`, its stream of randomness."""
    state = jax.eval_shape(strategy.init, jax.eval_shape(lambda: make_key(0)))
    if "key" not in getattr(state, "_fields", ()):
        raise SettingsError("pbt: the state of this strategy has no field `key`, which a copied member keeps")


def set_values(member: Member, state: PyTree, values: Mapping[str, float]) -> PyTree:
    """Return `state` of `member` with other values of the swept settings."""
    strategy, overrides = member.strategy, member.strategy.info.overrides
    # `tunable` replaces a number only if it is the one that the strategy was built with.
    was = lambda name: overrides[name].old if name in overrides else float(member.swept[name])
    swaps = {name: Override(was(name), value) for name, value in values.items()}
    if strategy.state_fns.set_hyperparams is None:
        raise SettingsError("settings of this strategy cannot change on the way: it has no state_fns.set_hyperparams")
    # Outer overrides take precedence, so these win over the strategy's own, which `set_hyperparams` sets inside.
    with override(swaps):
        return strategy.state_fns.set_hyperparams(state)


def _value(algo: str | None, name: str, value: Any) -> float:
    """Return a checked value of a setting; raise `SettingsError` if the algorithm does not allow it."""
    if name == DISCOUNT:
        return check_between(name, value, 0.0, 1.0)
    part, _, field = name.partition(".")
    rules = rules_of(config_class(algo)) if part == "agent" and algo in ALGORITHMS else {}
    if field in rules:
        return float(rules[field][0].check(name, value))
    return check_between(name, value, -1e30, 1e30)


def _check_agent(settings: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings of an agent that a run alone could not have."""
    algo, agent = str(settings.get("algo")), settings.get("agent") or {}
    if algo not in ALGORITHMS or ALGORITHMS[algo].make is not None:
        return
    kind = config_class(algo)
    # Of the parts made in Python, checks ask only whether they are there.
    parts = {part: lambda *_: None for part in settings.get("custom") or () if part in PARTS}
    config = kind(**{name: agent[name] for name in kind.__dataclass_fields__ if name in agent})
    algorithm_maker(algo)(config, **parts)


def replace_settings(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested `settings` with `values` replaced, by names such as `agent.lr`."""
    changed = dict(settings)
    for name, value in values.items():
        part, dot, field = name.partition(".")
        changed[part] = {**changed.get(part, {}), field: value} if dot else value
    return changed
