"""The prioritised ring: what a push and a priority change, what is drawn and how often, and what it weighs."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from toys_bits import same_bits
from toys_draws import drawn

from jaxrl.buffers import Buffer, prioritised
from jaxrl.buffers.prioritised import FANOUT, MAX_PRIORITY, MIN_PRIORITY, PrioritisedState
from jaxrl.errors import SettingsError
from jaxrl.trees import tree_bytes
from jaxrl.types import Batch, Transition

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
LARGEST_U = np.nextafter(np.float32(1), np.float32(0))
STEP = jnp.uint32(0)


def sampler(buffer: Buffer) -> Callable[[PrioritisedState, Any, Any], Batch]:
    """Return `(state, numbers, opt_step) -> items` for numbers drawn `[levels, N]`, batch by batch of the buffer."""

    @jax.jit
    def sample(state: PrioritisedState, numbers: jax.Array, opt_step: jax.Array) -> Batch:
        def one(numbers: jax.Array) -> Batch:
            with drawn(uniform=[numbers]):
                return buffer.sample(state, jax.random.key(0), jnp.uint32(1), opt_step)

        batches = jax.vmap(one, in_axes=1)(numbers.reshape(len(numbers), -1, buffer.batch_size))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)

    return sample


def compiled(*args: Any, **settings: Any) -> Buffer:
    """Return a prioritised buffer that is not worked out operation by operation, each compiled on its own."""
    buffer = prioritised(*args, **settings)
    return buffer._replace(push=jax.jit(buffer.push), reprioritise=jax.jit(buffer.reprioritise))


def groups_of(level: np.ndarray) -> np.ndarray:
    return level.reshape(-1, FANOUT)


def tree_over(leaves: Any, combine: Any, blank: float) -> list[np.ndarray]:
    """Work out a tree over `leaves` in NumPy, level by level in whole groups, up to a single group."""
    pad = lambda x: np.pad(x, (0, -len(x) % FANOUT), constant_values=blank)
    levels = [pad(np.asarray(leaves, np.float32))]
    while len(levels[-1]) > FANOUT:
        levels.append(pad(combine(groups_of(levels[-1]), axis=1)))
    return levels


def holding(buffer: Buffer, leaves: Any, rows: int = 1) -> PrioritisedState:
    """Return a state whose items matter as much as `leaves` say, whatever priorities could bring that about."""
    state = buffer.init(NUMBER, rows)
    least = np.where(np.asarray(leaves) > 0, leaves, np.inf)
    sums, least = tree_over(leaves, np.sum, 0.0), tree_over(least, np.min, np.inf)
    assert [len(x) for x in sums] == [len(x) for x in state.sums]
    as_tree = lambda levels: tuple(jnp.asarray(x) for x in levels)
    return state._replace(sums=as_tree(sums), least=as_tree(least) if state.least else ())


def noise_of(state: PrioritisedState, *last: float) -> jax.Array:
    """Return noise that takes the first child on the way down, and then what each of `last` chooses."""
    noise = np.zeros((len(state.sums), len(last)), np.float32)
    noise[-1] = last
    return jnp.asarray(noise)


# --- the trees ------------------------------------------------------------------------------------------------------


LAYOUTS = [
    (5, 1),
    (FANOUT, FANOUT),
    (FANOUT + 1, 3),
    (40, 100),
    (FANOUT**2, 2 * FANOUT),
    (FANOUT**2 + 1, FANOUT + 1),
    (10 * FANOUT, FANOUT // 2 + 1),
    (FANOUT**3 + 6, FANOUT + 6),
    (3 * FANOUT**3, 5 * FANOUT**2 + 3),
]
"""Capacities and rows of a block: on both sides of a whole group and of a level more, and blocks across groups.

Their trees have 1 to 4 levels.
"""


@pytest.mark.every_day("9-3", "518-14")
@pytest.mark.parametrize(("capacity", "rows"), LAYOUTS)
def test_every_level_is_what_its_items_come_to(capacity: int, rows: int) -> None:
    """A new item matters as much as any ever did; of one that is given several priorities the highest counts."""
    buffer = compiled(capacity, 5, alpha=0.7, epsilon=0.5, normalise="all")
    rng, held = np.random.default_rng(0), buffer.capacity(rows)
    state, leaves, highest, blocks = buffer.init(NUMBER, rows), np.zeros(held), 1.0, held // rows
    assert len(state.sums) == len(state.least) == len(tree_over(leaves, np.sum, 0.0))
    # Round the ring twice and a bit; looked at where blocks end beside a group's end, and at the end.
    for t in range(2 * blocks + 2):
        state = buffer.push(state, jnp.full(rows, float(t)), jnp.uint32(t))
        leaves[t % blocks * rows : (t % blocks + 1) * rows] = highest
        written = np.flatnonzero(leaves)
        index, priority = rng.choice(written, 7), rng.lognormal(sigma=2, size=7).astype(np.float32)
        state = buffer.reprioritise(state, jnp.asarray(index, jnp.int32), jnp.asarray(priority))
        new = (priority + 0.5) ** 0.7
        leaves[index] = 0.0
        np.maximum.at(leaves, index, new)
        highest = max(highest, new.max())
        if t % 16 and t < 2 * blocks:
            continue
        np.testing.assert_allclose(state.sums[0][:held], leaves, rtol=1e-5)
        np.testing.assert_allclose(state.highest, highest, rtol=1e-5)
        leaf = np.asarray(state.sums[0])
        for ours, theirs in zip(state.sums, tree_over(leaf[:held], np.sum, 0.0), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        smallest = np.where(leaf > 0, leaf, np.inf)
        for ours, theirs in zip(state.least, tree_over(smallest[:held], np.min, np.inf), strict=True):
            np.testing.assert_array_equal(ours, theirs)


# --- priorities -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored() -> tuple[Buffer, PrioritisedState, Any]:
    """A buffer of 40 items, each of its own priority."""
    buffer = compiled(40, 4, alpha=0.6, normalise="all")
    state, reprioritise = buffer.init(NUMBER, 10), buffer.reprioritise
    for t in range(4):
        state = buffer.push(state, jnp.arange(10.0), jnp.uint32(t))
    priorities = np.random.default_rng(0).lognormal(size=40).astype(np.float32)
    for i in range(0, 40, 4):
        state = reprioritise(state, jnp.arange(i, i + 4), jnp.asarray(priorities[i : i + 4]))
    np.testing.assert_allclose(state.sums[0][:40], (priorities + 1e-6) ** 0.6, rtol=1e-5)
    return buffer, state, reprioritise


@pytest.mark.parametrize("unknown", [-1.0, jnp.nan])
def test_priorities_that_are_not_known_leave_everything_as_it_was(scored: Any, unknown: float) -> None:
    _, state, reprioritise = scored
    assert same_bits(reprioritise(state, jnp.array([3, 39, 3, 0]), jnp.full(4, unknown)), state)
    assert not same_bits(reprioritise(state, jnp.array([3, 39, 3, 0]), jnp.full(4, 0.1)), state)


def test_an_item_whose_priority_is_not_known_keeps_its_own_beside_others_that_change(scored: Any) -> None:
    _, state, reprioritise = scored
    new = reprioritise(state, jnp.array([3, 39, 5, 0]), jnp.array([-1.0, 7.0, -1.0, 8.0]))
    changed = np.flatnonzero(np.asarray(new.sums[0] != state.sums[0]))
    assert changed.tolist() == [0, 39]


@pytest.mark.every_day("10.0-all")
@pytest.mark.parametrize(("alpha", "normalise"), [(0.6, "batch"), (10.0, "all")])
def test_no_priority_is_so_small_or_large_that_sampling_breaks(alpha: float, normalise: str) -> None:
    """To the power of 10 some of these vanish in float32, and others overflow."""
    buffer = compiled(4, 4, alpha=alpha, normalise=normalise)
    state = buffer.push(buffer.init(NUMBER, 4), jnp.ones(4), jnp.uint32(0))
    noise = noise_of(state, 0.0, 0.3, 0.6, 0.99)
    for priority in ([0.0, 1e-30, 0.0, 0.0], [1e30, 3e38, jnp.inf, 1.0], [0.0, jnp.inf, 0.0, 0.0]):
        state = buffer.reprioritise(state, jnp.arange(4), jnp.array(priority))
        assert (np.asarray(state.sums[0])[:4] > 0).all()
        assert all(np.isfinite(np.asarray(x)).all() for x in (*state.sums, state.highest))
        weight = np.asarray(sampler(buffer)(state, noise, STEP).weight)
        assert np.isfinite(weight).all()
        assert (weight >= 0).all()
        assert weight.max() > 0


def test_bounds_of_priorities_leave_room_for_the_sum_of_the_largest_buffer() -> None:
    assert np.isfinite(np.float32(2.0**31 * MAX_PRIORITY))
    assert np.float32(MIN_PRIORITY / 2**10) > 0


@pytest.mark.every_day("bfloat16")
@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float16"])
def test_priorities_of_any_dtype_are_taken_and_kept_as_float32(scored: Any, dtype: str) -> None:
    buffer, state, _ = scored
    new = buffer.reprioritise(state, jnp.arange(4), jnp.array([0, 1, 2, 4], dtype))
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, state)
    np.testing.assert_allclose(new.sums[0][1:4], np.array([1, 2, 4]) ** 0.6, rtol=1e-2)
    assert 0 < new.sums[0][0] < 0.01


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_an_item_takes_a_share_of_the_random_number_as_large_as_its_own() -> None:
    buffer = compiled(8, 1)
    state = holding(buffer, [1, 1, 0, 2, 4, 0, 0, 0])
    shares = {0.0: 0, 0.124: 0, 0.125: 1, 0.249: 1, 0.25: 3, 0.499: 3, 0.5: 4, float(LARGEST_U): 4}
    batch = sampler(buffer)(state, noise_of(state, *shares), STEP)
    assert batch.index.tolist() == list(shares.values())


def test_a_batch_says_where_its_items_lie() -> None:
    buffer = compiled(6, 3)
    state = buffer.init(NUMBER, 3)
    for t in range(2):
        state = buffer.push(state, jnp.arange(3.0) + 10 * (t + 1), jnp.uint32(t))
    batch = sampler(buffer)(state, noise_of(state, 0.0, 0.5, 0.99), STEP)
    assert batch.index.tolist() == [0, 3, 5]
    assert batch.items.tolist() == [10, 20, 22]
    assert batch.weight.tolist() == [1, 1, 1]


def counts_of(buffer: Buffer, state: PrioritisedState, pushes: int, rows: int, draws: int) -> np.ndarray:
    """Count how often each place is drawn in `draws` batches."""

    @jax.jit
    def indices(state: PrioritisedState, keys: jax.Array) -> jax.Array:
        one = lambda key: buffer.sample(state, key, jnp.uint32(pushes), STEP).index
        return jax.lax.map(one, keys)

    drawn = indices(state, jax.random.split(jax.random.key(0), draws))
    return np.bincount(np.asarray(drawn).ravel(), minlength=len(state.sums[0]))


@pytest.mark.every_day("90-9-63")
@pytest.mark.parametrize(("capacity", "rows", "full"), [(20, 4, 20), (90, 9, 63), (1500, 12, 1488)])
def test_items_are_drawn_in_proportion_to_their_priorities_to_the_power_of_alpha(
    capacity: int, rows: int, full: int
) -> None:
    alpha = 0.6
    buffer = compiled(capacity, 20, alpha=alpha)
    state = buffer.init(NUMBER, rows)
    for t in range(full // rows):
        state = buffer.push(state, jnp.zeros(rows), jnp.uint32(t))
    priorities = np.random.default_rng(1).uniform(0.1, 3.0, full)
    index = jnp.arange(full)
    state = buffer.reprioritise(state, index, jnp.asarray(priorities, jnp.float32))
    counts = counts_of(buffer, state, full // rows, rows, draws=10_000)
    assert counts[full:].sum() == 0
    total = counts.sum()

    def p_value(alpha: float) -> float:
        shares = priorities**alpha / np.sum(priorities**alpha)
        return float(chisquare(counts[:full], total * shares).pvalue)

    # One right sampler in a thousand would fail, and the key is fixed; a wrong alpha of 0.5 or 0.7 is told apart by
    # far with so many draws, which is what shows that the test has teeth.
    assert p_value(alpha) > 1e-3
    assert max(p_value(alpha - 0.1), p_value(alpha + 0.1)) < 1e-9


def test_with_alpha_0_all_items_are_alike() -> None:
    buffer = compiled(40, 20, alpha=0.0, epsilon=0.0)
    state = buffer.init(NUMBER, 8)
    for t in range(5):
        state = buffer.push(state, jnp.zeros(8), jnp.uint32(t))
    state = buffer.reprioritise(state, jnp.arange(20), jnp.arange(20.0) * 100)
    assert state.sums[0].tolist() == [1.0] * 40 + [0.0] * (-40 % FANOUT)
    assert chisquare(counts_of(buffer, state, 5, 8, draws=1_000)[:40]).pvalue > 1e-3
    assert sampler(buffer)(state, noise_of(state, *np.arange(0.0, 1.0, 0.05)), STEP).weight.tolist() == [1] * 20


def test_the_places_of_a_batch_and_its_levels_are_drawn_apart() -> None:
    buffer = compiled(1500, 1000)
    state = holding(buffer, np.ones(1500))
    index = np.asarray(jax.jit(lambda key: buffer.sample(state, key, jnp.uint32(1500), STEP).index)(jax.random.key(0)))
    # The digits to base FANOUT are what each level has chosen. Of 1000 pairs that have nothing to do with each other,
    # the correlation has a deviation of 0.03.
    digits = np.stack([index // FANOUT**i % FANOUT for i in range(3)])
    assert np.abs(np.corrcoef(digits) - np.eye(3)).max() < 0.12
    assert abs(np.corrcoef(index[:-1], index[1:])[0, 1]) < 0.12


def extremes(count: int) -> np.ndarray:
    """All ways to choose `[levels, B]` of `count` levels from numbers at the edges of `[0, 1)`, and some between."""
    edges = [0.0, 2.0**-24, 0.5, 1 - 2.0**-23, float(LARGEST_U)]
    products = np.array(list(itertools.product(edges, repeat=count))).T
    between = np.random.default_rng(0).random((count, 2_000)).astype(np.float32)
    return np.minimum(np.concatenate([products, between], axis=1), LARGEST_U).astype(np.float32)


@pytest.mark.every_day("96 items")
@pytest.mark.parametrize("capacity", [7, 96, 1100], ids=lambda capacity: f"{capacity} items")
def test_an_item_of_priority_0_is_never_drawn(capacity: int) -> None:
    buffer = compiled(capacity, 1)
    sample, noise = sampler(buffer), jnp.asarray(extremes(len(buffer.init(NUMBER, 1).sums)))
    rng = np.random.default_rng(capacity)
    for zeros in (0.02, 0.5, 0.9, 0.995):
        for widest in (0.0, 1.0, 30.0):
            leaves = 10 ** rng.uniform(-widest, widest, capacity)
            leaves[rng.random(capacity) < zeros] = 0
            # The ends are where rounding leads to; and there is something to be drawn.
            leaves[[0, -1]] = 0
            leaves[capacity // 2] = 10**-widest
            index = np.asarray(sample(holding(buffer, leaves), noise, STEP).index)
            assert (leaves[index] > 0).all(), (zeros, widest)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("normalise", "weights"), [("batch", [1.0, 0.5**0.5]), ("all", [0.5**0.5, 0.5])])
def test_weights_are_those_worked_by_hand(normalise: str, weights: list[float]) -> None:
    """Chances of 1/8, 2/8, 4/8 and 1/8: `(N p)^-beta` of the middle two is 1 and 2^-1/2, the largest of all 2^1/2."""
    buffer = compiled(4, 2, alpha=0.5, beta=0.5, beta_steps=0, epsilon=1.0, normalise=normalise)
    state = buffer.push(buffer.init(NUMBER, 4), jnp.ones(4), jnp.uint32(0))
    state = buffer.reprioritise(state, jnp.arange(4), jnp.array([0.0, 3.0, 15.0, 0.0]))
    batch = sampler(buffer)(state, noise_of(state, 0.2, 0.5), STEP)
    assert batch.index.tolist() == [1, 2]
    np.testing.assert_allclose(batch.weight, weights, rtol=1e-6)


@pytest.mark.parametrize("normalise", ["batch", "all"])
def test_what_is_not_learnt_from_lowers_no_weight(normalise: str) -> None:
    """Chances of 1, 2 and 4; the first item, and in a second batch all of them, are of steps that do not count."""
    buffer = compiled(3, 3, alpha=1.0, beta=1.0, beta_steps=0, epsilon=1.0, normalise=normalise)
    ones, index = jnp.ones(3), jnp.arange(3)
    items = Transition(ones, ones, ones, ones, ones, weight=jnp.array([0.0, 1.0, 1.0]))
    state = buffer.init(jax.tree.map(lambda x: NUMBER, items), 3)
    for weight, expected in ((items.weight, [1.0, 1.0, 0.5]), (jnp.zeros(3), [1.0, 1.0, 1.0])):
        state = buffer.push(state, items._replace(weight=weight), jnp.uint32(0))
        state = buffer.reprioritise(state, index, jnp.array([0.0, 1.0, 3.0]))
        batch = sampler(buffer)(state, noise_of(state, 0.1, 0.3, 0.9), STEP)
        assert batch.index.tolist() == index.tolist()
        np.testing.assert_allclose(batch.weight, expected)


def test_weights_make_up_for_the_chances_in_full_when_beta_is_1() -> None:
    """Under such weights a batch's mean of anything is, up to their scale, that of items drawn uniformly."""
    buffer = compiled(50, 1, beta=1.0, beta_steps=0, normalise="all")
    leaves = np.random.default_rng(0).uniform(0.1, 5.0, 50)
    state = holding(buffer, leaves)
    batch = sampler(buffer)(state, jnp.asarray(extremes(len(state.sums))), STEP)
    worth = np.asarray(batch.weight) * leaves[np.asarray(batch.index)]
    np.testing.assert_allclose(worth, leaves.min(), rtol=1e-5)
    assert 0 < np.asarray(batch.weight).min() < np.asarray(batch.weight).max() <= 1


def test_the_least_of_all_items_forgets_those_that_are_no_longer_there() -> None:
    buffer = compiled(3, 1, alpha=1.0, beta=1.0, beta_steps=0, epsilon=1.0, normalise="all")
    state = buffer.init(NUMBER, 1)
    for t in range(3):
        state = buffer.push(state, jnp.ones(1), jnp.uint32(t))
    state = buffer.reprioritise(state, jnp.arange(3), jnp.array([1.0, 3.0, 7.0]))
    sample = sampler(buffer)
    weight = lambda state: float(sample(state, noise_of(state, float(LARGEST_U)), STEP).weight[0])
    assert weight(state) == 0.25
    assert weight(buffer.reprioritise(state, jnp.array([0]), jnp.array([5.0]))) == 0.5
    assert weight(buffer.push(state, jnp.ones(1), jnp.uint32(3))) == 0.5


@pytest.mark.every_day("100")
@pytest.mark.parametrize("beta_steps", [0, 100])
def test_beta_rises_to_1_linearly_or_stays(beta_steps: int) -> None:
    buffer = compiled(2, 1, beta=0.4, beta_steps=beta_steps, normalise="all")
    state = holding(buffer, [1.0, 4.0])
    sample = sampler(buffer)
    weight = lambda step: sample(state, noise_of(state, 0.5), step).weight[0]
    for step, beta in ((0, 0.4), (50, 0.7), (99, 0.994), (100, 1.0), (101, 1.0), (2**31 + 7, 1.0), (2**32 - 1, 1.0)):
        np.testing.assert_allclose(weight(jnp.uint32(step)), 0.25 ** (beta if beta_steps else 0.4), rtol=1e-5)


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha": -0.1}, r"buffer\.alpha is -0\.1"),
        ({"alpha": float("nan")}, r"buffer\.alpha is nan"),
        ({"alpha": "all"}, r"buffer\.alpha is 'all'"),
        ({"beta": 1.1}, r"buffer\.beta is 1\.1; expected a number from 0 to 1"),
        ({"beta": True}, r"buffer\.beta is True"),
        ({"beta_steps": -1}, r"buffer\.beta_steps is -1"),
        ({"beta_steps": 0.5}, r"buffer\.beta_steps is 0\.5"),
        ({"epsilon": -1e-6}, r"buffer\.epsilon is -1e-06"),
        ({"epsilon": 0.0}, r"buffer\.epsilon is 0, .*; raise it"),
        ({"normalise": "none"}, r"buffer\.normalise is 'none'; expected batch or all"),
        ({"capacity": 0}, r"buffer\.capacity is 0"),
        ({"batch_size": 101}, r"buffer\.capacity is 100, below buffer\.batch_size 101"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        prioritised(**{"capacity": 100, "batch_size": 10, **settings})


# --- a population, and what it costs --------------------------------------------------------------------------------


def cycle(buffer: Buffer) -> Any:
    """Return what a training step does with the buffer: push, sample, reprioritise."""

    def once(state: PrioritisedState, items: jax.Array, key: jax.Array, t: jax.Array) -> tuple[PrioritisedState, Any]:
        state = buffer.push(state, items, t)
        batch = buffer.sample(state, key, t + 1, t)
        # An update weighs its items, so that what becomes of the priorities waits for the weights.
        known = jnp.isfinite(jnp.mean(batch.weight * batch.items))
        return buffer.reprioritise(state, batch.index, jnp.where(known, jnp.abs(batch.items), -1.0)), batch

    return once


def test_members_of_a_population_get_what_they_would_alone_to_the_bit() -> None:
    buffer, members, rng = prioritised(FANOUT**2 + 12, 16, normalise="all"), 3, np.random.default_rng(0)
    alone, together = jax.jit(cycle(buffer)), jax.jit(jax.vmap(cycle(buffer), in_axes=(0, 0, 0, None)))
    states = [buffer.init(NUMBER, 12)] * members
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    for t in range(20):
        items = rng.normal(size=(members, 12)).astype(np.float32)
        keys = jax.random.split(jax.random.key(t), members)
        stacked, batches = together(stacked, items, keys, jnp.uint32(t))
        for member in range(members):
            states[member], batch = alone(states[member], items[member], keys[member], jnp.uint32(t))
            mine = jax.tree.map(lambda x: x[member], batches)  # noqa: B023
            assert same_bits((mine.items, mine.index), (batch.items, batch.index))
            np.testing.assert_allclose(mine.weight, batch.weight, rtol=1e-6)
    assert same_bits(stacked, jax.tree.map(lambda *x: jnp.stack(x), *states))


@pytest.mark.every_day("one")
@pytest.mark.parametrize("members", [0, 2], ids=["one", "population"])
def test_nothing_is_copied_in_a_loop_of_pushes_samples_and_new_priorities(members: int) -> None:
    buffer = prioritised(300_000, 8, normalise="all")
    once = jax.vmap(cycle(buffer), in_axes=(0, 0, 0, None)) if members else cycle(buffer)
    several = lambda x: jax.ShapeDtypeStruct((members, *x.shape) if members else x.shape, x.dtype)

    def loop(state: PrioritisedState, items: jax.Array, key: jax.Array, stop: jax.Array) -> PrioritisedState:
        return jax.lax.fori_loop(jnp.uint32(0), stop, lambda t, state: once(state, items, key, t)[0], state)

    state = jax.eval_shape(lambda: buffer.init(NUMBER, 10))
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = jax.tree.map(several, (state, jax.ShapeDtypeStruct((10,), jnp.float32), key))
    stop = jax.ShapeDtypeStruct((), jnp.uint32)
    memory = jax.jit(loop, donate_argnums=0).lower(*arguments, stop).compile().memory_analysis()
    # Leaves alone are 1.2 MB, of each tree and member.
    assert memory.temp_size_in_bytes < 1 << 16
    assert memory.alias_size_in_bytes == tree_bytes(arguments[0])
