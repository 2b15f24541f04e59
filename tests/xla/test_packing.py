"""Rows of bits: how columns are put side by side."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.xla.packing import SHARE, SHORT, HostRows, empty, join, join_short, layout_of, pack, take, unpack


@pytest.mark.parametrize("widths", [(3,), (1, 1), (2, 1, 4, 1, 1), (0, 3, 0, 2), (SHORT, 1), (SHORT - 1, 1)])
@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_columns_joined_in_one_kernel_are_those_joined_one_by_one(widths: tuple[int, ...], dtype: str) -> None:
    most = np.iinfo(dtype).max
    columns = [jnp.asarray(np.random.default_rng(w).integers(0, most, (2, w), dtype, endpoint=True)) for w in widths]
    np.testing.assert_array_equal(jax.jit(join_short)(columns), join(columns))


def test_flags_may_lie_among_the_words():
    item = {"done": jnp.bool_(True), "mask": jnp.zeros(3, bool), "x": jnp.float32(0.5)}
    layout = layout_of(item, flag="uint32")
    rows = jax.tree.map(lambda x: jnp.stack([x, ~x if x.dtype == jnp.bool_ else -x]), item)
    words = pack(layout, rows)
    assert {word: x.shape for word, x in words.items()} == {"uint32": (2, 2), "uint8": (2, 3)}
    back = unpack(layout, words)
    assert {name: str(x.dtype) for name, x in back.items()} == {"done": "bool", "mask": "bool", "x": "float32"}
    jax.tree.map(np.testing.assert_array_equal, back, rows)


def test_what_the_host_packs_is_what_programs_pack_and_a_later_item_leaves_it_alone():
    item = {
        "count": jnp.int32(-3),
        "done": jnp.bool_(True),
        "half": jnp.zeros(2, jnp.bfloat16),
        "image": jnp.zeros((2, 3, 1), jnp.uint8),
        "mask": jnp.zeros(3, bool),
        "obs": jnp.zeros((2, 2)),
    }
    layout, draw = layout_of(item, flag="uint32"), np.random.default_rng(0)
    one, other = (
        {name: draw.integers(-9, 9, (4, *x.shape)).astype(x.dtype) for name, x in item.items()} for _ in range(2)
    )
    rows = HostRows(layout, 4)
    words = rows.pack(one)
    rows.pack(other)
    wanted = pack(layout, jax.tree.map(jnp.asarray, one))
    assert words.keys() == wanted.keys()
    jax.tree.map(np.testing.assert_array_equal, words, dict(wanted))
    jax.tree.map(np.testing.assert_array_equal, unpack(layout, words), one)


LARGE = 2 * SHARE // 12 + 1
"""Rows of three words that are too many for one thread, in the eyes of XLA for CPUs."""


@pytest.mark.parametrize(("size", "batch"), [(7, 3), (LARGE, 5), (LARGE, SHARE // 12 + 1)])
def test_rows_are_taken_from_where_they_are(size: int, batch: int) -> None:
    array = np.arange(3 * size, dtype=np.uint32).reshape(size, 3)
    index = np.random.default_rng(0).integers(0, size, (2, batch)).astype(np.int32)
    index[0, :2] = 0, size - 1
    np.testing.assert_array_equal(jax.jit(take)(array, index[0]), array[index[0]])
    of_each = jax.jit(jax.vmap(take, in_axes=(0, 0)))(np.stack([array, array[::-1]]), index)
    np.testing.assert_array_equal(of_each, np.stack([array[index[0]], array[::-1][index[1]]]))


@pytest.mark.skipif(jax.default_backend() != "cpu" or (os.cpu_count() or 1) < 2, reason="needs a CPU of two cores")
def test_few_rows_of_a_large_buffer_are_not_shared_among_threads() -> None:
    held = jax.eval_shape(lambda: empty(layout_of({"obs": jnp.zeros(2), "reward": jnp.zeros(())}), LARGE))
    index = jax.ShapeDtypeStruct((5,), jnp.int32)

    def is_shared(read: Any) -> bool:
        and_compute = lambda held, index: jax.tree.map(lambda x: x + 1, read(held, index))
        return "outer_dimension_partitions" in jax.jit(and_compute).lower(held, index).compile().as_text()

    assert not is_shared(lambda held, index: held.read(index))
    plain = lambda held, index: [words.at[index].get(mode="promise_in_bounds") for words in held.words.values()]
    assert is_shared(plain)  # if it is not, nothing need be done about it
