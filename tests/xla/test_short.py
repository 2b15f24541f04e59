"""Reductions along a short axis, written out: the numbers of JAX's own, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.xla import forms, short

ROWS = jnp.array([[1.0, 3.0, 3.0], [-np.inf, -2.0, -5.0], [0.5, 0.25, -0.25]])
PAIRS = {
    "argmax": (short.argmax, lambda x: jnp.argmax(x, axis=-1)),
    "largest": (short.largest, lambda x: x.max(axis=-1)),
    "total": (short.total, lambda x: x.sum(axis=-1)),
    "every": (lambda x: short.all_true(x > 0), lambda x: (x > 0).all(axis=-1)),
    "log_softmax": (short.log_softmax, jax.nn.log_softmax),
}


@pytest.mark.parametrize("width", [3, short.SHORT + 1])
@pytest.mark.parametrize("name", PAIRS)
def test_a_short_axis_written_out_gives_what_a_reduction_gives(name: str, width: int) -> None:
    ours, plain = PAIRS[name]
    x = jnp.pad(ROWS, ((0, 0), (0, width - 3)), constant_values=0.75)
    with forms("cuda"):
        text = str(jax.make_jaxpr(ours)(x))
        np.testing.assert_allclose(ours(x), plain(x), rtol=1e-6)
    assert ("axes=(1,)" in text) is (width > short.SHORT)  # that of a reduction


def test_only_what_is_asked_for_is_summed() -> None:
    with forms("cuda"):
        summed = short.total(jnp.array([[1.0, np.nan, 4.0]]), jnp.array([[True, False, True]]))
    assert summed.tolist() == [5.0]


def test_gradients_are_those_of_the_reductions() -> None:
    """Of the softmax `exp(x) / sum(exp(x))`: the gradient of its logarithm's first entry is `(1, 0, 0) - softmax`."""
    x = jnp.array([[1.0, 3.0, 3.0], [0.5, 0.25, -0.25]])
    with forms("cuda"):
        slope = jax.jit(jax.grad(lambda x: short.log_softmax(x)[:, 0].sum()))(x)
        top = jax.jit(jax.grad(lambda x: short.largest(x).sum()))(x)
    np.testing.assert_allclose(slope, jnp.array([[1.0, 0.0, 0.0]]) - jax.nn.softmax(x), rtol=1e-5, atol=1e-6)
    assert top.tolist() == [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
