"""Parameters as vectors: the same numbers, the same optimizer, the same bits in a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.agents.optimizers import OPTIMIZERS, gradient_step
from jaxrl.xla import flat, forms
from jaxrl.xla.carry import loop_form
from jaxrl.xla.flat import LARGE, elementwise, ravel, unravel

TREE = {"w": jnp.arange(6.0).reshape(2, 3), "b": [jnp.array([7.0, 8.0]), jnp.float32(9.0)]}


def test_small_leaves_lie_one_after_another_and_come_back() -> None:
    large = jnp.arange(LARGE + 1.0)
    vector, alone = ravel({**TREE, "large": large})
    assert vector.tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert alone is large
    tree = unravel([vector, alone], {**TREE, "large": large})
    assert jax.tree.structure(tree) == jax.tree.structure({**TREE, "large": large})
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves({**TREE, "large": large}), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def test_leaves_of_each_type_lie_in_a_vector_of_their_own_and_come_back_rounded_as_they_were() -> None:
    tree = {"a": jnp.array([1.5, -2.25], jnp.bfloat16), "b": jnp.array([0.1]), "c": jnp.ones(1, jnp.bfloat16)}
    narrow, wide = ravel(tree)
    assert (narrow.dtype, narrow.tolist()) == (jnp.bfloat16, [1.5, -2.25, 1.0])
    assert (wide.dtype, wide.shape) == (jnp.float32, (1,))
    back = unravel([narrow + jnp.float32(0.001), wide], tree)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, tree)
    assert back["a"].tolist() == [1.5, -2.25]
    assert back["b"].tolist() == tree["b"].tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizers_do_to_the_vector_what_they_do_to_the_tree(name: str) -> None:
    """If one of them told leaves apart, it would have to be given the tree."""
    make = OPTIMIZERS[name]
    grads = jax.tree.map(lambda x: 0.1 * x - 0.3, TREE)
    tree, opt_state = TREE, make(0.1).init(TREE)
    params, steps = TREE, gradient_step(make)
    state = steps.init(params, jnp.float32(0.1))
    for _ in range(3):
        updates, opt_state = make(0.1).update(grads, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
        params, state, _ = steps.step(params, ravel(grads), state, jnp.float32(0.1), jnp.float32(1e9))
    np.testing.assert_allclose(ravel(params)[0], ravel(tree)[0], rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_ones_own_is_given_the_tree_and_may_tell_leaves_apart() -> None:
    frozen = lambda lr: optax.multi_transform(
        {"train": optax.sgd(lr), "keep": optax.set_to_zero()}, lambda tree: {"w": "train", "b": ["keep", "keep"]}
    )
    steps, ones = gradient_step(frozen), ravel(jax.tree.map(jnp.ones_like, TREE))
    new, _, norm = steps.step(TREE, ones, steps.init(TREE, jnp.float32(0.5)), jnp.float32(0.5), jnp.float32(1e9))
    assert float(norm) == 3.0
    assert new["b"][0].tolist() == [7, 8]
    assert new["w"].tolist() == (TREE["w"] - 0.5).tolist()


def test_the_norm_is_that_of_small_and_large_leaves() -> None:
    tree = {"small": jnp.array([2.0, 3.0]), "large": jnp.zeros(LARGE + 1).at[7].set(6.0)}
    steps = gradient_step(optax.sgd)
    state = steps.init(tree, jnp.float32(1.0))
    new, _, norm = steps.step(tree, ravel(tree), state, jnp.float32(1.0), jnp.float32(3.5))
    assert float(norm) == 7.0
    np.testing.assert_allclose(new["small"], [1.0, 1.5], rtol=1e-6)  # clipped to half
    assert float(new["large"][7]) == 3.0


NETWORK = {"params": {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(2)}}


def turns(body: Any, count: int) -> Any:
    """Run `body` on the network in a loop whose carry is held as on CPUs."""

    def run(carry: Any) -> Any:
        form = loop_form(carry)

        def turn(_: Any, held: Any) -> Any:
            with flat.cutting():
                return form.hold(body(form.release(held)))

        return form.release(form.loop(jnp.int32(0), jnp.int32(count), turn, form.hold(carry)))

    with forms("cpu"):
        return jax.jit(run).lower(NETWORK), jax.jit(run)(NETWORK)


def test_what_is_computed_on_all_leaves_alike_is_computed_on_the_vector_alone() -> None:
    lowered, end = turns(lambda tree: elementwise(lambda x: 2.0 * x, tree), 3)
    assert end["params"]["w"].tolist() == (8 * np.arange(6.0).reshape(3, 2)).tolist()
    assert end["params"]["b"].tolist() == [8.0, 8.0]
    (product,) = (line for line in lowered.as_text().splitlines() if "stablehlo.multiply" in line)
    assert "tensor<8xf32>" in product


def test_a_leaf_that_is_changed_by_itself_is_seen_by_what_comes_after() -> None:
    def body(tree: Any) -> Any:
        doubled = elementwise(lambda x: 2.0 * x, tree)
        changed = {"params": {**doubled["params"], "b": doubled["params"]["b"] + 1.0}}
        return elementwise(lambda x, old: x + 0.0 * old, changed, tree)

    _, end = turns(body, 2)
    assert end["params"]["b"].tolist() == [7.0, 7.0]  # 2 * (2 * 1 + 1) + 1
    assert end["params"]["w"].tolist() == (4 * np.arange(6.0).reshape(3, 2)).tolist()
