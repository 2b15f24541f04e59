"""Rows of bits: how columns are put side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.buffers.rows import SHORT, join, join_short, layout_of, pack, unpack


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
