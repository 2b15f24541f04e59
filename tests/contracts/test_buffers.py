"""What every buffer keeps: a new one is tested here by having a row."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.buffers import Buffer, prioritised, uniform
from jaxrl.errors import SettingsError
from jaxrl.trees import tree_bytes
from jaxrl.types import Transition

ROWS, LAG, WIDE = 4, 4, 5
MAKERS = {
    "uniform": uniform,
    "compact": lambda *args: uniform(*args, compact=True, ends=0.5),
    "prioritised": lambda *args: prioritised(*args, alpha=0.5, beta=0.2, beta_steps=7, normalise="all", epsilon=1e-3),
    "compact prioritised": lambda *args: prioritised(*args, compact=True, ends=0.5),
}
KEY = jax.random.key(0)

pytestmark = pytest.mark.parametrize("name", MAKERS)


def block(t: int) -> Transition:
    """Return the block of vector step `t`: rewards count up from 0, an observation holds its reward and its step."""
    reward = jnp.arange(t * ROWS, (t + 1) * ROWS, dtype=jnp.float32)
    obs = jnp.stack([reward, *[jnp.full(ROWS, float(t))] * (WIDE - 1)], axis=1)
    return Transition(obs, reward.astype(jnp.int32), reward, jnp.full(ROWS, 0.9), obs + ROWS, (), jnp.ones(ROWS))


def empty(buffer: Buffer) -> Any:
    return buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block(0)), ROWS, LAG, ROWS)


def filled(buffer: Buffer, pushes: int) -> Any:
    push, state = jax.jit(buffer.push), empty(buffer)
    for t in range(pushes):
        state = push(state, block(t), jnp.uint32(t))
    return state


def test_batches_hold_the_newest_items_alone_with_every_leaf_of_one_item(name: str) -> None:
    buffer, pushes = MAKERS[name](10, 10), 7
    state, kept = filled(buffer, pushes), buffer.capacity(ROWS)

    def sample(key: Any) -> Any:
        return buffer.sample(state, key, jnp.uint32(pushes), jnp.uint32(0))

    batch = jax.jit(jax.vmap(sample))(jax.random.split(KEY, 40))
    reward = np.asarray(batch.items.reward)
    assert reward.shape == (40, 10)
    assert kept == 12
    assert set(np.unique(reward)) == set(range(pushes * ROWS - kept, pushes * ROWS))
    np.testing.assert_array_equal(batch.items.action, reward.astype(np.int32))
    np.testing.assert_array_equal(batch.items.obs[..., 0], reward)
    np.testing.assert_array_equal(batch.items.obs[..., 1], reward // ROWS)
    np.testing.assert_array_equal(batch.items.next_obs, batch.items.obs + ROWS * (batch.items.weight[..., None] > 0))
    assert np.all(np.asarray(batch.weight) <= 1)
    assert np.all((np.asarray(batch.index) >= 0) & (np.asarray(batch.index) < kept))


def test_members_of_a_population_that_share_their_count_hold_what_each_would_alone(name: str) -> None:
    buffer = MAKERS[name](8, 4)
    push = jax.jit(jax.vmap(buffer.push, in_axes=(0, 0, None)))
    pair = lambda tree, other: jax.tree.map(lambda a, b: jnp.stack([a, b]), tree, other)
    states = pair(empty(buffer), empty(buffer))
    for t in range(3):
        states = push(states, pair(block(t), block(2 * t)), jnp.uint32(t))
    alone = filled(buffer, 3)
    for member, single in zip(jax.tree.leaves(states), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(member[0], single)


def test_a_donated_push_needs_no_second_buffer(name: str) -> None:
    buffer = MAKERS[name](50_000, 32)
    state = jax.eval_shape(lambda: empty(buffer))
    memory = jax.jit(buffer.push, donate_argnums=0).lower(state, block(0), jnp.uint32(0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * tree_bytes(state)
    assert memory.temp_size_in_bytes < tree_bytes(state) / 100


def test_items_unlike_the_example_are_refused_by_the_name_of_the_leaf(name: str) -> None:
    buffer = MAKERS[name](8, 4)
    other = block(0)._replace(reward=jnp.zeros((ROWS, 3)))
    with pytest.raises(SettingsError, match=r"float32\[4, 3\].*\.reward") as refused:
        jax.jit(buffer.push)(empty(buffer), other, jnp.uint32(0))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("capacity", "batch_size", "said"),
    [
        (0, 1, "capacity is 0"),
        (10, 0, "batch_size is 0"),
        (2.5, 1, "capacity is 2.5"),
        (10, True, "batch_size is True"),
        (32, 64, "capacity is 32, below buffer.batch_size 64; raise it to at least 64"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(name: str, capacity: Any, batch_size: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"^buffer\.{re.escape(said)}"):
        MAKERS[name](capacity, batch_size)


def test_settings_rebuild_it(name: str) -> None:
    buffer = MAKERS[name](8, 4)
    assert buffer.settings is not None
    settings = dict(buffer.settings)
    again = {True: prioritised, False: uniform}[settings.pop("prioritised")]
    assert again(**settings).settings == buffer.settings
