"""Reductions of few numbers and of a state: the results of JAX's own in the forms of every platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.metrics import Stat, stats
from jaxrl.xla import PLATFORMS, forms, reductions
from jaxrl.xla.reductions import find_non_finite, stays_finite

ROWS = jnp.array([[1.0, 3.0, 3.0], [-np.inf, -2.0, -5.0], [0.5, 0.25, -0.25]])
PAIRS = {
    "argmax": (reductions.argmax, lambda x: jnp.argmax(x, axis=-1)),
    "largest": (reductions.largest, lambda x: x.max(axis=-1)),
    "total": (reductions.total, lambda x: x.sum(axis=-1)),
    "every": (lambda x: reductions.all_true(x > 0), lambda x: (x > 0).all(axis=-1)),
    "log_softmax": (reductions.log_softmax, jax.nn.log_softmax),
}


@pytest.mark.parametrize("width", [3, reductions.SHORT + 1])
@pytest.mark.parametrize("name", PAIRS)
def test_a_short_axis_written_out_gives_what_a_reduction_gives(name: str, width: int) -> None:
    ours, plain = PAIRS[name]
    x = jnp.pad(ROWS, ((0, 0), (0, width - 3)), constant_values=0.75)
    with forms("cuda"):
        text = str(jax.make_jaxpr(ours)(x))
        np.testing.assert_allclose(ours(x), plain(x), rtol=1e-6)
    assert ("axes=(1,)" in text) is (width > reductions.SHORT)  # that of a reduction


def test_only_what_is_asked_for_is_summed() -> None:
    with forms("cuda"):
        summed = reductions.total(jnp.array([[1.0, np.nan, 4.0]]), jnp.array([[True, False, True]]))
    assert summed.tolist() == [5.0]


def test_gradients_are_those_of_the_reductions() -> None:
    """Of the softmax `exp(x) / sum(exp(x))`: the gradient of its logarithm's first entry is `(1, 0, 0) - softmax`."""
    x = jnp.array([[1.0, 3.0, 3.0], [0.5, 0.25, -0.25]])
    with forms("cuda"):
        slope = jax.jit(jax.grad(lambda x: reductions.log_softmax(x)[:, 0].sum()))(x)
        top = jax.jit(jax.grad(lambda x: reductions.largest(x).sum()))(x)
    np.testing.assert_allclose(slope, jnp.array([[1.0, 0.0, 0.0]]) - jax.nn.softmax(x), rtol=1e-5, atol=1e-6)
    assert top.tolist() == [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]


LABELS = jnp.array([7, 8, 9], jnp.uint32)


@pytest.mark.parametrize("which", ["plain", *PLATFORMS])
@pytest.mark.parametrize(
    ("numbers", "fine", "label"),
    [([1.0, 2.0, 3.0], True, 7), ([1.0, np.inf, np.nan], False, 8), ([1.0, 2.0, -np.inf], False, 9)],
)
def test_the_first_number_that_is_not_finite_is_named(which: str, numbers: list[float], fine: bool, label: int) -> None:
    with forms(which):
        ok, first = find_non_finite([jnp.float32(x) for x in numbers], LABELS)
    assert (bool(ok), int(first)) == (fine, label)


@pytest.mark.parametrize("which", ["plain", *PLATFORMS])
@pytest.mark.parametrize(
    ("tree", "finite"),
    [
        ((jnp.ones(3), jnp.arange(2)), True),
        ({"a": jnp.ones((3, 2)), "b": jnp.array([0.0, jnp.inf])}, False),
        ((jnp.ones(3), jnp.ones(3), jnp.array([[1.0], [1.0], [1.0], [jnp.nan]])), False),
        ((jnp.float32(jnp.nan), jnp.ones(3), jnp.zeros((2, 0))), False),
        ([jnp.array(jnp.nan, jnp.bfloat16)], False),
        ((jnp.arange(2), jnp.zeros(2, bool)), True),
        ((), True),
    ],
)
def test_every_floating_leaf_is_looked_at(which: str, tree: Any, finite: bool) -> None:
    with forms(which):
        assert bool(stays_finite(tree, jax.tree.map(jnp.zeros_like, tree))) is finite


def test_on_cuda_leaves_of_all_shapes_are_one_reduction() -> None:
    trees = {"policy": jnp.ones(5), "critic": jnp.ones(7), "hyper": jnp.float32(1)}
    with forms("cuda"):
        assert str(jax.make_jaxpr(stays_finite)(trees, trees)).count("reduce_and[axes=(0,)") == 1


def test_summaries_of_several_arrays_are_those_of_each() -> None:
    values, where = {"a": jnp.array([1.0, 5.0, 2.0]), "b": jnp.array([-1, 0, 7])}, jnp.array([True, False, True])
    expected = {"a": Stat(2, 3.0, 1.0, 2.0), "b": Stat(2, 6.0, -1.0, 7.0)}
    for which in ("plain", *PLATFORMS):
        with forms(which):
            assert jax.tree.map(float, stats(values, where)) == jax.tree.map(float, expected)
