"""Parameters as one vector: the same numbers, the same optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.agents.optimizers import OPTIMIZERS, gradient_step
from jaxrl.xla.flat import Flat

TREE = {"w": jnp.arange(6.0).reshape(2, 3), "b": [jnp.array([7.0, 8.0]), jnp.float32(9.0)]}


def test_leaves_lie_one_after_another_and_come_back():
    flat = Flat.of(TREE)
    assert flat.vector.tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert jax.tree.structure(flat.tree) == jax.tree.structure(TREE)
    for a, b in zip(jax.tree.leaves(flat.tree), jax.tree.leaves(TREE), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def test_narrow_leaves_are_kept_in_the_widest_type_and_come_back_as_they_were():
    tree = {"narrow": jnp.array([1.5, -2.25], jnp.bfloat16), "wide": jnp.array([0.1])}
    flat = Flat.of(tree)
    assert flat.vector.dtype == jnp.float32
    assert flat.tree["narrow"].dtype == jnp.bfloat16
    assert flat.tree["narrow"].tolist() == [1.5, -2.25]


def test_the_gradient_of_a_function_of_the_tree_is_that_tree_flattened():
    loss = lambda tree: (tree["w"] ** 2).sum() + 3 * tree["b"][0][1] * tree["b"][1]
    by_tree, by_vector = jax.grad(loss)(TREE), jax.grad(lambda flat: loss(flat.tree))(Flat.of(TREE))
    assert by_vector.vector.tolist() == Flat.of(by_tree).vector.tolist()
    assert float(by_vector.norm) == pytest.approx(float(optax.tree.norm(by_tree)), rel=1e-6)


def test_a_population_of_vectors_becomes_a_population_of_trees():
    many = jax.vmap(lambda scale: Flat.of(jax.tree.map(lambda x: x * scale, TREE)))(jnp.array([1.0, 2.0]))
    assert many.vector.shape == (2, 9)
    assert many.matrices == ()
    assert jax.vmap(lambda flat: flat.tree)(many)["w"][1].tolist() == (2 * TREE["w"]).tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizers_do_to_the_vector_what_they_do_to_the_tree(name):
    """If one of them told leaves apart, it would have to be given the tree."""
    make = OPTIMIZERS[name]
    grads = jax.tree.map(lambda x: 0.1 * x - 0.3, TREE)
    tree, opt_state = TREE, make(0.1).init(TREE)
    flat, steps = Flat.of(TREE), gradient_step(make)
    flat_state = steps.init(flat, jnp.float32(0.1))
    for _ in range(3):
        updates, opt_state = make(0.1).update(grads, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
        flat, flat_state, _ = steps.step(flat, Flat.of(grads), flat_state, jnp.float32(0.1), jnp.float32(1e9))
    np.testing.assert_allclose(flat.vector, Flat.of(tree).vector, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_ones_own_is_given_the_tree_and_may_tell_leaves_apart():
    frozen = lambda lr: optax.multi_transform(
        {"train": optax.sgd(lr), "keep": optax.set_to_zero()}, lambda tree: {"w": "train", "b": ["keep", "keep"]}
    )
    steps, flat = gradient_step(frozen), Flat.of(TREE)
    ones = jax.tree.map(jnp.ones_like, flat)
    new, _, norm = steps.step(flat, ones, steps.init(flat, jnp.float32(0.5)), jnp.float32(0.5), jnp.float32(1e9))
    assert float(norm) == 3.0
    assert new.tree["b"][0].tolist() == [7, 8]
    assert new.tree["w"].tolist() == (TREE["w"] - 0.5).tolist()


def test_pieces_cut_out_beforehand_are_used_until_the_vector_is_mapped():
    flat = Flat.of(TREE)
    assert [x.tolist() for x in flat.matrices] == [TREE["w"].tolist()]
    at_hand = flat.cut((jnp.full((2, 3), 5.0),))
    assert at_hand.tree["w"].tolist() == [[5.0] * 3] * 2
    assert at_hand.tree["b"][0].tolist() == [7, 8]
    assert jax.tree.structure(at_hand) == jax.tree.structure(flat)
    assert jax.tree.map(lambda x: x, at_hand).tree["w"].tolist() == TREE["w"].tolist()
