"""The uniform ring: what it holds, what it samples, what it refuses, and that a push moves nothing else."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxrl.buffers import Buffer, uniform
from jaxrl.buffers.uniform import read_batch
from jaxrl.errors import SettingsError
from jaxrl.trees import tree_bytes
from jaxrl.xla.packing import Rows

ROWS = 2


def number(dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def filled(buffer: Buffer, blocks: int, rows: int = ROWS) -> Rows:
    """Push `blocks` blocks of the numbers 1, 2, 3, ... (0 marks a row that was never written)."""
    ring, push = buffer.init(number(), rows), jax.jit(buffer.push)
    for t in range(blocks):
        ring = push(ring, 1.0 + jnp.arange(t * rows, (t + 1) * rows, dtype=jnp.float32), jnp.int32(t))
    return ring


def sampler(buffer: Buffer, rows: int = ROWS, draws: int = 200) -> Callable[[int], np.ndarray]:
    """Return `pushes -> [draws, B]`, the indices of so many batches, compiled once."""
    keys, ring = jax.random.split(jax.random.key(0), draws), buffer.init(number(), rows)
    sample = lambda key, pushes: buffer.sample(ring, key, pushes, jnp.uint32(0)).index
    several = jax.jit(jax.vmap(sample, in_axes=(0, None)))
    return lambda pushes: np.asarray(several(keys, jnp.uint32(pushes)))


# --- what it holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "held"),
    [
        (2, [1, 2, 3, 4, 0, 0]),
        (3, [1, 2, 3, 4, 5, 6]),
        (4, [7, 8, 3, 4, 5, 6]),
        (8, [13, 14, 15, 16, 11, 12]),
    ],
)
def test_blocks_lie_one_after_another_and_a_full_ring_overwrites_its_oldest(blocks: int, held: list[int]) -> None:
    assert filled(uniform(6, 2), blocks).items.tolist() == held
    assert filled(uniform(5, 1), blocks).items.tolist() == held  # rounded up


@pytest.mark.parametrize(("capacity", "rows", "rounded"), [(6, 2, 6), (5, 2, 6), (7, 3, 9), (4, 4, 4), (4, 10, 10)])
def test_the_capacity_is_rounded_up_to_whole_blocks(capacity: int, rows: int, rounded: int) -> None:
    buffer = uniform(capacity, 1)
    assert buffer.capacity(rows) == rounded
    assert buffer.init(number(), rows).items.shape == (rounded,)


def test_any_pytree_keeps_its_values_and_dtypes() -> None:
    rng = np.random.default_rng(0)
    block = {
        "mask": jnp.asarray(rng.random((ROWS, 3)) < 0.5),
        "pixels": jnp.asarray(rng.integers(-128, 128, (ROWS, 2, 2)), jnp.int8),
        "nested": (jnp.asarray(rng.normal(size=ROWS), jnp.bfloat16), [jnp.arange(ROWS, dtype=jnp.uint32)]),
    }
    buffer = uniform(4, 2)
    ring = buffer.init(jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], block)), ROWS)
    batch = jax.jit(lambda ring: read_batch(buffer.push(ring, block, jnp.int32(1)), jnp.array([3, 2, 3])))(ring)
    for leaf, original in zip(jax.tree.leaves(batch.items), jax.tree.leaves(block), strict=True):
        assert leaf.dtype == original.dtype
        np.testing.assert_array_equal(leaf, original[jnp.array([1, 0, 1])])
    assert jax.tree.structure(batch.items) == jax.tree.structure(block)


def test_an_example_may_be_an_item_or_its_struct() -> None:
    buffer, item = uniform(4, 1), (jnp.ones(3), jnp.int8(7))
    by_item, by_struct = (buffer.init(x, ROWS) for x in (item, jax.eval_shape(lambda: item)))
    for a, b in zip(by_item.items, by_struct.items, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# --- what it samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "rows", "size"), [(8, 2, 8), (5, 2, 6), (4, 10, 10)])
def test_only_written_rows_are_sampled_and_all_of_them(capacity: int, rows: int, size: int) -> None:
    indices = sampler(uniform(capacity, 4), rows)
    for pushes in (1, 2, 3, 4, 7, 1000):
        assert set(indices(pushes).ravel().tolist()) == set(range(min(pushes * rows, size)))


def test_every_written_row_is_equally_likely() -> None:
    indices = sampler(uniform(12, 12))
    for pushes, written in ((3, 6), (50, 12)):
        assert chisquare(np.bincount(indices(pushes).ravel(), minlength=written)).pvalue > 1e-3


def test_the_places_of_a_batch_are_independent() -> None:
    """With replacement: two places of one batch hold the same row one time in `size`."""
    drawn = sampler(uniform(10, 2), draws=5000)(5)
    assert np.mean(drawn[:, 0] == drawn[:, 1]) == pytest.approx(0.1, abs=0.02)


def test_a_batch_says_where_its_items_lie_and_weighs_them_equally() -> None:
    buffer = uniform(6, 3)
    batch = read_batch(filled(buffer, 3), jnp.array([4, 0, 4]))
    assert batch.items.tolist() == [5, 1, 5]
    assert batch.index.tolist() == [4, 0, 4]
    assert batch.weight.tolist() == [1, 1, 1]


def test_priorities_do_not_matter() -> None:
    buffer = uniform(6, 2)
    ring = filled(buffer, 3)
    assert buffer.reprioritise(ring, jnp.array([0]), jnp.array([9.0])).items.tolist() == ring.items.tolist()


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}, ["float32[2]", "['b']", "expected int32"]),
        ({"a": jnp.zeros((2, 4)), "b": jnp.zeros(2, int)}, ["float32[2, 4]", "['a']", "[rows, *[3]]"]),
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(1, int)}, ["with the same rows in every leaf"]),
        ({"a": jnp.zeros((2, 3)), "b": jnp.int32(0)}, ["with the same rows in every leaf"]),
        ({"a": jnp.zeros((2, 3))}, ["structure", "['b']"]),
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2, int), "c": jnp.zeros(2)}, ["structure", "['c']"]),
    ],
)
def test_items_unlike_the_example_are_refused_by_the_name_of_the_leaf(items: Any, words: list[str]) -> None:
    buffer = uniform(6, 2)
    ring = buffer.init({"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": number(jnp.int32)}, ROWS)
    with pytest.raises(SettingsError) as error:
        jax.jit(buffer.push)(ring, items, jnp.int32(0))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("rows", [4, 8, 12])
def test_blocks_that_do_not_tile_the_ring_are_refused(rows: int) -> None:
    """Written all the same, they would leave rows that are sampled though nothing was ever put there."""
    buffer = uniform(6, 2)
    with pytest.raises(SettingsError, match=f"{rows} rows"):
        buffer.push(buffer.init(number(), ROWS), jnp.zeros(rows), jnp.int32(0))


# --- what a push costs ------------------------------------------------------------------------------------------------

BIG, WIDE = 4096, 64
"""A ring of 1 MB."""


def big() -> tuple[Buffer, Any, Any]:
    buffer = uniform(BIG, 32)
    ring = jax.eval_shape(lambda: buffer.init(jax.ShapeDtypeStruct((WIDE,), jnp.float32), ROWS))
    return buffer, ring, jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32)


def members(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def test_a_population_that_shares_its_count_pushes_without_a_scatter() -> None:
    """One contiguous update for all members; were the count batched, it would be a scatter, or a loop over members."""
    buffer, ring, block = big()
    rings, blocks, scatters = members(ring, 3), members(block, 3), {}
    for name, axis, count in (("shared", None, jnp.int32(0)), ("batched", 0, jnp.zeros(3, jnp.int32))):
        push = jax.jit(jax.vmap(buffer.push, in_axes=(0, 0, axis)), donate_argnums=0)
        compiled = push.lower(rings, blocks, count).compile()
        operations = set(re.findall(r" ([a-z-]+)\(", compiled.as_text()))
        if name == "shared":
            assert "dynamic-update-slice" in operations
            assert compiled.memory_analysis().temp_size_in_bytes < tree_bytes(rings) / 100
        scatters[name] = bool(operations & {"scatter", "while"})
    assert scatters == {"shared": False, "batched": True}
