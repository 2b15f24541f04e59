"""What says whether numbers are finite, and summaries of several arrays: the same in the forms of every platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.metrics import Stat, stats
from jaxrl.xla import PLATFORMS, forms
from jaxrl.xla.finite import find_non_finite, stays_finite

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
