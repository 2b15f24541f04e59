"""Sequences out of the ring: of one environment, in order, whole, and each as likely as its priority says."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from toys_bits import require_same_bits

from jaxrl.buffers import Buffer, prioritised, uniform
from jaxrl.errors import SettingsError
from jaxrl.trees import tree_bytes
from jaxrl.types import SequenceSpec, Transition

ENVS = 3
CASES = {
    "at every step": (SequenceSpec(3), 1, 7),
    "side by side, a ring of no whole number of them": (SequenceSpec(3, 3), 1, 7),
    "overlapping by half, several vector steps a push": (SequenceSpec(4, 2), 2, 10),
    "a push longer than a sequence": (SequenceSpec(2), 4, 12),
    "no room to spare": (SequenceSpec(4), 2, 4),
}
"""Sequences, vector steps in a push, and vector steps that the ring holds."""
MAKERS: dict[str, Any] = {"uniform": uniform, "prioritised": prioritised}


def block(push: int, steps: int) -> jax.Array:
    """Return a block of numbers `100 * environment + vector step`, counted from 1: a 0 was never written."""
    time = push * steps + 1 + np.arange(steps)
    return jnp.asarray(100.0 * np.arange(ENVS)[None] + time[:, None], jnp.float32).reshape(-1)


@cache
def made(kind: str, case: str) -> Buffer:
    """Return the same buffer for the same case, so that it is compiled once."""
    window, _, held = CASES[case]
    return MAKERS[kind](held * ENVS, 4).as_sequence_buffer(window, ENVS)


def filled(buffer: Buffer, steps: int, pushes: int) -> Any:
    state, push = buffer.init(jax.ShapeDtypeStruct((), jnp.float32), steps * ENVS), jax.jit(buffer.push)
    for t in range(pushes):
        state = push(state, block(t, steps), jnp.uint32(t))
    return state


def sampled(buffer: Buffer, state: Any, pushes: int, draws: int = 300) -> Any:
    """Return many batches as one."""
    batches = _sampler(buffer.sample, draws)(state, jnp.uint32(pushes))
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), batches)


@cache
def _sampler(sample: Any, draws: int) -> Any:
    """Return what samples many batches, compiled once for all states of a buffer."""

    def one(state: Any, pushes: Any, key: Any) -> Any:
        return sample(state, key, pushes, jnp.uint32(0))

    keys = jax.random.split(jax.random.key(0), draws)
    return jax.jit(lambda state, pushes: jax.vmap(one, in_axes=(None, None, 0))(state, pushes, keys))


def there_are(case: str, pushes: int) -> set[tuple[int, ...]]:
    """Return the sequences that a ring must offer after so many pushes, worked out step by step."""
    window, per_push, held = CASES[case]
    now = pushes * per_push
    starts = [
        t for t in range(max(0, now - held), now - window.length + 1) if (t % held) % window.interval == 0
    ]  # of vector steps, counted from 0
    return {
        tuple(100 * env + t + 1 + i for i in range(window.length)) for t in starts for env in range(ENVS)
    }  # as numbers


@pytest.mark.every_day(
    "at every step-uniform",
    "at every step-prioritised",
    "side by side, a ring of no whole number of them-prioritised",
    "overlapping by half, several vector steps a push-uniform",
    "overlapping by half, several vector steps a push-prioritised",
    "a push longer than a sequence-uniform",
)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("case", CASES)
def test_all_whole_sequences_of_one_environment_are_offered_and_no_others(case: str, kind: str) -> None:
    window, per_push, held = CASES[case]
    buffer, seen = made(kind, case), 0
    state, push = filled(buffer, per_push, 0), jax.jit(buffer.push)
    for pushes in range(1, 2 * held // per_push + 3):
        state = push(state, block(pushes - 1, per_push), jnp.uint32(pushes - 1))
        wanted = there_are(case, pushes)
        if not wanted:
            continue
        batch = sampled(buffer, state, pushes)
        assert batch.items.shape[1:] == (window.length,)
        assert {tuple(int(x) for x in row) for row in batch.items} == wanted
        seen += 1
    assert seen > 4


@pytest.mark.parametrize("kind", MAKERS)
def test_each_is_as_likely_as_any_other_before_priorities_are_known(kind: str) -> None:
    case = "overlapping by half, several vector steps a push"
    buffer = made(kind, case)
    batch = sampled(buffer, filled(buffer, 2, 7), 7, draws=2_000)
    _, counts = np.unique(batch.items[:, 0], return_counts=True)
    assert len(counts) == len(there_are(case, 7))
    assert chisquare(counts).pvalue > 1e-3
    assert np.all(batch.weight == 1)


def test_an_index_is_that_of_the_first_row() -> None:
    buffer = made("uniform", "at every step")
    state = filled(buffer, 1, 9)
    batch = sampled(buffer, state, 9)
    np.testing.assert_array_equal(np.asarray(state.items)[batch.index], batch.items[:, 0])


def test_priorities_are_those_of_sequences_and_pass_away_with_them() -> None:
    buffer = made("prioritised", "at every step")
    state = filled(buffer, 1, 7)
    row = int(np.flatnonzero(np.asarray(state.rows.items) == 104)[0])  # the sequence 104, 105, 106
    state = buffer.reprioritise(state, jnp.array([row]), jnp.array([1e6]))
    seen = sampled(buffer, state, 7).items[:, 0]
    assert np.mean(seen == 104) > 0.98
    push = jax.jit(buffer.push)
    for t in (7, 8, 9):  # the steps 1, 2 and 3 are overwritten, and then 4
        state = push(state, block(t, 1), jnp.uint32(t))
        seen = sampled(buffer, state, t + 1).items[:, 0]
        assert np.mean(seen == 104) == pytest.approx(1 / (1 + (t - 6) * ENVS), abs=0.05)  # new ones are as high
    state = push(state, block(10, 1), jnp.uint32(10))
    assert 104 not in sampled(buffer, state, 11).items


def test_the_least_weight_of_all_is_that_of_a_whole_sequence() -> None:
    buffer = prioritised(21, 4, normalise="all", beta_steps=0, beta=1.0).as_sequence_buffer(SequenceSpec(3), ENVS)
    state = filled(buffer, 1, 9)
    rows = np.flatnonzero(np.asarray(state.sums[0]) > 0)
    assert len(rows) == 5 * ENVS
    state = buffer.reprioritise(state, jnp.asarray(rows, jnp.int32), jnp.full(len(rows), 8.0))
    state = buffer.reprioritise(state, jnp.asarray(rows[:1], jnp.int32), jnp.array([1.0]))
    batch = sampled(buffer, state, 9)
    low = 8.0**-0.6  # priorities to the power alpha, least by own
    np.testing.assert_allclose(np.unique(np.round(batch.weight, 4)), [round(low, 4), 1.0], rtol=1e-3)


@pytest.mark.every_day("prioritised")
@pytest.mark.parametrize("kind", MAKERS)
def test_a_compact_ring_offers_the_same_bits(kind: str) -> None:
    window, steps, pushes = SequenceSpec(4, 2), 2, 9

    def item(push: int) -> Transition:
        reward = block(push, steps)
        ends = (reward % 5 == 0)[:, None]  # there the successor is no later observation
        obs = jnp.stack([reward, reward], axis=1)
        worth = jnp.ones_like(reward)
        return Transition(obs, reward, reward, worth, jnp.where(ends, -obs, obs + 1), (), worth)

    batches = []
    for compact in (False, True):
        buffer = MAKERS[kind](30, 4, compact=compact, ends=1.0).as_sequence_buffer(window, ENVS)
        state = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), item(0)), 6, ENVS, ENVS)
        push = jax.jit(buffer.push)
        for t in range(pushes):
            state = push(state, item(t), jnp.uint32(t))
        batches.append(sampled(buffer, state, pushes, draws=20))
    require_same_bits(*batches)


@pytest.mark.every_day("uniform")
@pytest.mark.parametrize("kind", MAKERS)
def test_members_that_share_their_count_hold_what_each_would_alone_and_a_push_copies_nothing(kind: str) -> None:
    buffer = MAKERS[kind](30_000, 32).as_sequence_buffer(SequenceSpec(8, 4), ENVS)
    empty = lambda: buffer.init(jax.ShapeDtypeStruct((64,), jnp.float32), ENVS)
    wide = lambda t: jnp.broadcast_to(block(t, 1)[:, None], (ENVS, 64))
    compiled = jax.jit(buffer.push, donate_argnums=0).lower(jax.eval_shape(empty), wide(0), jnp.uint32(0)).compile()
    size = tree_bytes(jax.eval_shape(empty))
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 100
    push, several = jax.jit(buffer.push), jax.jit(jax.vmap(buffer.push, in_axes=(0, 0, None)))
    alone = [empty(), empty()]
    together = jax.tree.map(lambda *xs: jnp.stack(xs), *alone)
    for t in range(12):
        alone = [push(state, wide(by * t), jnp.uint32(t)) for by, state in enumerate(alone, 1)]
        both = jnp.stack([wide(t), wide(2 * t)])
        together = several(together, both, jnp.uint32(t))
    require_same_bits(together, jax.tree.map(lambda *xs: jnp.stack(xs), *alone))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_ring_too_small_for_a_sequence_and_stacks_are_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match=r"buffer\.capacity is 9.*sequence of 3 steps.*raise it to at least 12"):
        MAKERS[kind](9, 4).as_sequence_buffer(SequenceSpec(3, 2), ENVS)
    with pytest.raises(SettingsError, match=r"buffer\.frames is 2.*set it to 1"):
        MAKERS[kind](30, 4, compact=True, frames=2).as_sequence_buffer(SequenceSpec(3), ENVS)
