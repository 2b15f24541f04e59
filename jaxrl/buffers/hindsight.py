"""Hindsight experience replay: relabel transitions with goals achieved later in the episode (HER).

Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495, with the strategy `future`. Goals are replaced when a batch
is sampled; besides the ring, only the age of each step in its episode is stored.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.compact import CompactRows
from jaxrl.buffers.frames import last_true, predecessors, rows_equal
from jaxrl.buffers.prioritised import PrioritisedState
from jaxrl.errors import SettingsError, check_between
from jaxrl.trees import Array, Key, PyTree, tree_where
from jaxrl.types import Batch, GoalFn, RecurrentObs, Transition

GOALS = ("observation", "achieved_goal", "desired_goal")
"""Entries of a goal-conditioned observation, as in Gymnasium-Robotics."""


class HindsightState(NamedTuple):
    """A ring of `R` rows, and the age of each in its episode."""

    ring: PyTree
    age: Array
    """`[R]` int32, steps since the start of the episode, or since its first step in the ring."""
    last: Transition
    """Successors and discounts of the newest vector step, `[stride, ...]`; other fields are empty."""
    last_age: Array
    """Ages of the newest vector step, `[stride]`."""
    newest: Array
    """Int32 scalar, index of the newest vector step in the ring."""
    discount: Array
    """Float32 scalar, the discount of steps that do not terminate."""


class _Parts(NamedTuple):
    ring: Buffer
    share: float
    goal: GoalFn


def hindsight(ring: Buffer, share: float = 0.8, goal: GoalFn | None = None) -> Buffer:
    """Relabel a `share` of the steps in each batch of `ring` with a goal achieved later in the same episode.

    Observations are dicts with `observation`, `achieved_goal` and `desired_goal`. The new goal of a step is the
    `achieved_goal` after a step drawn uniformly from itself and the later steps of its episode in the ring. Reward and
    discount are recomputed by `goal`; which steps are sampled, and their priorities, do not change.

    Args:
      ring: a buffer made by `jaxrl.uniform(...)` or `jaxrl.prioritised(...)`.
      share: fraction of relabelled steps; 0.8 relabels four for each one kept (`k` = 4 in the paper).
      goal: maps `achieved_goal` and `desired_goal` of one step to its reward and whether it terminates; `None`: the
        field `goal` of the environment.

    Raises:
      SettingsError: `share` is not between 0 and 1, or `ring` is a buffer of another kind.
    """
    check_between("buffer.hindsight", share, 0.0, 1.0)
    if goal is not None and not callable(goal):
        raise SettingsError(f"hindsight: goal is {goal!r:.60}; expected a function of achieved and desired goal")
    given = (isinstance(ring, Buffer) and ring.settings) or {}
    if "capacity" not in given or "hindsight" in given:
        raise SettingsError("hindsight expects a buffer made by jaxrl.uniform(...) or jaxrl.prioritised(...)")
    settings = {**given, "hindsight": float(share)}
    return ring._replace(
        settings=settings if goal is None else None,
        as_sequence_buffer=None,
        with_goal_fn=partial(_bind_goal, ring, share, goal),
        shard=ring.shard and partial(_shard, ring, share, goal),
    )


def _shard(ring: Buffer, share: float, goal: GoalFn | None, shards: int) -> Buffer:
    assert ring.shard is not None  # true of all buffers that `hindsight` accepts
    return hindsight(ring.shard(shards), share, goal)


def _bind_goal(ring: Buffer, share: float, given: GoalFn | None, env_goal: GoalFn | None, name: str) -> Buffer:
    goal = env_goal if given is None else given
    if goal is None:
        raise SettingsError(
            f"buffer.hindsight replaces goals, but {name} has no goal function: give one, as in "
            "jaxrl.hindsight(buffer, goal=...), or leave buffer.hindsight at 0"
        )
    parts = _Parts(ring, share, goal)
    return ring._replace(
        init=partial(_init, parts),
        push=partial(_push, parts),
        sample=partial(_sample, parts),
        reprioritise=lambda state, index, priority: state._replace(ring=ring.reprioritise(state.ring, index, priority)),
        as_sequence_buffer=None,
        settings={**(ring.settings or {}), "hindsight": float(share)} if given is None else None,
    )


def _init(parts: _Parts, example: PyTree, rows: int, lag: int = 0, stride: int = 0) -> HindsightState:
    if not isinstance(example, Transition):
        raise SettingsError(f"buffer.hindsight: items are {type(example).__name__}; expected Transition")
    _check_goals(example)
    if lag != stride or stride < 1:
        # A relabelled reward is a function of one step's achieved goal; a sum over several steps cannot be recomputed.
        raise SettingsError("buffer.hindsight: a transition over several steps has no goal; set processor.n_step to 1")
    zeros = jax.tree.map(lambda x: jnp.zeros((stride, *x.shape), x.dtype), example)
    return HindsightState(
        ring=parts.ring.init(example, rows, lag, stride),
        age=jnp.zeros(parts.ring.capacity(rows), jnp.int32),
        last=_link_fields(zeros),
        last_age=jnp.zeros(stride, jnp.int32),
        newest=jnp.int32(0),
        discount=jnp.float32(0.0),
    )


def _check_goals(example: Transition) -> None:
    obs: Any = _env_obs(example.obs)
    found = list(obs) if isinstance(obs, Mapping) else type(obs).__name__
    if not isinstance(obs, Mapping) or any(name not in obs for name in GOALS):
        raise SettingsError(f"buffer.hindsight needs observations with {', '.join(GOALS)}, but they are {found}")
    shapes = [jax.tree.map(lambda x: (x.shape, str(x.dtype)), obs[name]) for name in GOALS[1:]]
    if shapes[0] != shapes[1]:
        raise SettingsError(f"buffer.hindsight: achieved_goal is {shapes[0]}, but desired_goal {shapes[1]}")


def _env_obs(obs: PyTree) -> PyTree:
    return obs.obs if isinstance(obs, RecurrentObs) else obs


def _link_fields(items: Transition) -> Transition:
    """Return the fields that decide whether the next transitions continue the same episodes."""
    return Transition((), (), (), items.discount, items.next_obs, (), ())  # type: ignore[arg-type]


def _push(parts: _Parts, state: HindsightState, items: Transition, pushes: Array) -> HindsightState:
    rows, stride, size = items.reward.shape[0], state.last_age.shape[0], state.age.shape[0]
    links = _link_fields(items)
    before = predecessors(state.last, links)
    # As in a compact buffer: an episode continues if the next observation is the successor, bit by bit. A truncated
    # one does not, because the next observation is that of a new episode. An invalid step does not continue it
    # either: its zeros are no goal.
    continues = rows_equal(before.next_obs, items.obs) & (before.discount > 0) & (items.weight > 0)
    start, steps = last_true(~continues.reshape(-1, stride))
    age = jnp.where(start < 0, state.last_age[None] + steps, steps)
    first = jnp.asarray(pushes % (size // rows), jnp.int32) * rows
    return HindsightState(
        ring=parts.ring.push(state.ring, items, pushes),
        age=jax.lax.dynamic_update_slice_in_dim(state.age, age.reshape(-1), first, axis=0),
        last=jax.tree.map(lambda x: x[-stride:], links),
        last_age=age[-1],
        newest=first // stride + rows // stride - 1,
        # Read off the items: the processor's discount is a setting that a sweep may vary.
        discount=jnp.where(jnp.any(items.discount > 0), items.discount.max(), state.discount),
    )


def _sample(parts: _Parts, state: HindsightState, key: Key, pushes: Array, opt_step: Array) -> Batch:
    ring_key, coin_key, later_key = jax.random.split(key, 3)
    batch = parts.ring.sample(state.ring, ring_key, pushes, opt_step)
    coin, later_share = (jax.random.uniform(k, batch.index.shape, jnp.float32) for k in (coin_key, later_key))
    count = count_later_steps(state, batch.index) + 1
    # `later_share` times `count` may round up to `count`, one step too far.
    steps = jnp.minimum((later_share * count).astype(jnp.int32), count - 1)
    # A later step is read by its row alone; priorities do not matter.
    ring = state.ring.rows if isinstance(state.ring, PrioritisedState) else state.ring
    # With 0 steps, the goal is what the step itself achieved.
    later: Transition = ring.read(_later_row(state, batch.index, steps))
    new = _relabel(batch.items, _env_obs(later.next_obs)["achieved_goal"], state.discount, parts.goal)
    if isinstance(ring, CompactRows):
        # An end that is lost is no achieved goal, though without hindsight it does not matter what a last step led to.
        new = new._replace(weight=jnp.where(ring.is_lost(batch.index), jnp.zeros_like(new.weight), new.weight))
    return batch._replace(items=tree_where(coin < parts.share, new, batch.items))


def count_later_steps(state: HindsightState, index: Array) -> Array:
    """Return how many later steps of the same episode the ring holds, for rows `index` `[B]`; int32.

    A row `k` steps later belongs to the same episode if and only if its age is higher by `k`. That holds up to the end
    of the episode and nowhere beyond it, so a binary search finds the end.
    """
    stride, steps = state.last_age.shape[0], state.age.shape[0] // state.last_age.shape[0]
    # Beyond the newest step the ring holds its oldest ones, whose ages could match by chance.
    most, start = (state.newest - index // stride) % steps, state.age.at[index].get(mode="promise_in_bounds")
    found = jnp.zeros_like(index)
    # Powers of two from the largest down; each is added if the step that far ahead is of the same episode.
    for bit in reversed(range(steps.bit_length())):
        tried = found + (1 << bit)
        age = state.age.at[_later_row(state, index, tried)].get(mode="promise_in_bounds")
        found = jnp.where((tried <= most) & (age == start + tried), tried, found)
    return found


def _later_row(state: HindsightState, index: Array, steps: Array) -> Array:
    """Return the rows of the same environments `steps` `[B]` steps after rows `index` `[B]`."""
    return (index + steps * state.last_age.shape[0]) % state.age.shape[0]


def _relabel(items: Transition, goal: PyTree, discount: Array, goal_fn: GoalFn) -> Transition:
    """Return the steps `items` `[B]` as if their goals had been `goal` `[B]`.

    A step that terminated for another reason than its goal terminates under any goal.
    """
    achieved = _env_obs(items.next_obs)["achieved_goal"]
    evaluate = cast(Any, jax.vmap(goal_fn))
    _, ended_by_goal = evaluate(achieved, _env_obs(items.obs)["desired_goal"])
    reward, ends = evaluate(achieved, goal)
    ends = jnp.asarray(ends, bool) | ((items.discount == 0) & ~jnp.asarray(ended_by_goal, bool))
    return items._replace(
        obs=_replace_goal(items.obs, goal),
        next_obs=_replace_goal(items.next_obs, goal),
        reward=jnp.asarray(reward, items.reward.dtype),
        discount=jnp.where(ends, 0.0, discount),
    )


def _replace_goal(obs: PyTree, goal: PyTree) -> PyTree:
    if isinstance(obs, RecurrentObs):
        return obs._replace(obs=_replace_goal(obs.obs, goal))
    return {**obs, "desired_goal": goal}
