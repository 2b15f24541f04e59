"""Networks of action values: what noise on the parameters does, and what is said of each action's return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.nn import NoisyDense, QNetwork
from jaxrl.spaces import Box

KEY = jax.random.key(0)
SPACE = Box(-1.0, 1.0, (6,))
IMAGE = Box(0, 255, (5, 4, 2), "uint8")
ACTIONS = 3


def vectors(count=7):
    return np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)


# --- noise on the parameters --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy():
    layer = NoisyDense(4, 0.5)
    variables = jax.jit(layer.init)(KEY, vectors())
    return layer, jax.tree.map(np.asarray, variables["params"]), variables["noise"]


def test_noise_that_is_not_given_is_none(noisy):
    layer, params, blank = noisy
    for leaf in jax.tree.leaves(blank):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))
    out, _ = layer.apply({"params": params}, vectors(), mutable=["noise"])
    np.testing.assert_allclose(out, vectors() @ params["kernel"] + params["bias"], atol=1e-6)


def test_a_noisy_layer_is_that_of_the_paper(noisy):
    layer, params, _ = noisy
    rng = np.random.default_rng(1)
    # Spreads that are not all alike, as after learning.
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}
    before, after = (rng.normal(size=size).astype(np.float32) for size in (6, 4))
    f = lambda e: np.sign(e) * np.sqrt(np.abs(e))
    kernel = params["kernel"] + params["kernel_spread"] * np.outer(f(before), f(after))
    bias = params["bias"] + params["bias_spread"] * f(after)
    noise = {"before": before, "after": after}
    for x in (vectors(), vectors(6).reshape(2, 3, 6)):
        out = layer.apply({"params": params, "noise": noise}, x)
        np.testing.assert_allclose(out, x @ kernel + bias, rtol=1e-4, atol=1e-5)


def test_a_noisy_layer_begins_as_that_of_the_paper(noisy):
    """Means uniform within a bound of 1 / sqrt(inputs), all spreads the deviation over the root of the inputs."""
    _, params, _ = noisy
    for name in ("kernel_spread", "bias_spread"):
        np.testing.assert_allclose(params[name], 0.5 / 6**0.5, rtol=1e-6)
    wide = jax.jit(NoisyDense(400, 0.5).init)(KEY, jnp.zeros((1, 25)))["params"]
    for name in ("kernel", "bias"):
        means = np.asarray(wide[name])
        assert 0.19 < np.abs(means).max() <= 0.2
        # Of a uniform, the deviation is its bound over the root of 3; of 400 of them that is known to 2 in 100.
        assert means.std() == pytest.approx(0.2 / 3**0.5, rel=0.08)


def test_noise_is_not_a_parameter():
    """What is learnt is means and spreads: an optimizer must find nothing else."""
    network = functools.partial(QNetwork, SPACE, ACTIONS, features=(5,))
    variables_of = lambda **settings: jax.eval_shape(network(**settings).init, KEY, vectors())
    variables = variables_of(noisy=0.5)
    assert set(variables) == {"params", "noise"}
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])}
    assert names == {"kernel", "kernel_spread", "bias", "bias_spread"}
    assert set(variables_of()) == {"params"}


def test_means_and_spreads_are_learnt(noisy):
    layer, params, blank = noisy
    noise = jax.tree.map(lambda x: jnp.full(x.shape, 0.7), blank)
    total = lambda params: jnp.sum(jnp.sin(layer.apply({"params": params, "noise": noise}, vectors())))
    least = {part: float(jnp.abs(slope).min()) for part, slope in jax.jit(jax.grad(total))(params).items()}
    assert set(least) == {"kernel", "kernel_spread", "bias", "bias_spread"}
    assert min(least.values()) > 0


# --- what is said of each action ----------------------------------------------------------------------------------


@functools.cache
def drawn(network, space=SPACE, taus=False):
    """A function of observations (and quantiles), with random parameters such that all of the network matters."""
    network = QNetwork(space, ACTIONS, features=(8, 5), activation="tanh", **dict(network))
    obs = jnp.zeros((1, *space.shape), space.dtype)
    params = jax.eval_shape(network.init, KEY, obs, *([jnp.zeros((1, 1))] if taus else []))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    return params, jax.jit(network.apply)


def test_a_network_of_atoms_says_so_many_numbers_of_each_action():
    for atoms, shape in ((0, (7, ACTIONS)), (1, (7, ACTIONS, 1)), (4, (7, ACTIONS, 4))):
        params, apply = drawn((("atoms", atoms),))
        assert jax.eval_shape(apply, params, vectors()).shape == shape


def test_dueling_takes_the_mean_over_actions_from_the_advantages_of_each_atom():
    """So the mean over actions is the value: shifting the advantages of all actions alike changes nothing."""
    params, apply = drawn((("atoms", 4), ("dueling", True)))
    before = np.asarray(apply(params, vectors()))
    sizes = {name: part["bias"].shape for name, part in params["params"].items() if "bias" in part}
    assert sorted(sizes.values()) == [(4,), (12,)]
    (advantage,) = (name for name, size in sizes.items() if size == (12,))
    (value,) = (name for name, size in sizes.items() if size == (4,))

    def shifted(name, by):
        changed = {**params["params"], name: {**params["params"][name], "bias": params["params"][name]["bias"] + by}}
        return np.asarray(apply({"params": changed}, vectors()))

    each = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    np.testing.assert_allclose(shifted(advantage, np.tile(each, ACTIONS)), before, atol=1e-4)
    np.testing.assert_allclose(shifted(value, each) - before, np.broadcast_to(each, before.shape), atol=1e-4)
    # One action's alone is a change, of each atom by itself.
    one = np.concatenate([each, np.zeros(8, np.float32)])
    change = np.stack([each * 2 / 3, -each / 3, -each / 3])
    np.testing.assert_allclose(shifted(advantage, one) - before, np.broadcast_to(change, before.shape), atol=1e-4)


def test_dueling_takes_the_mean_over_actions_at_each_quantile():
    params, apply = drawn((("dueling", True),), taus=True)
    taus = np.random.default_rng(0).random((7, 4)).astype(np.float32)
    before = np.asarray(apply(params, vectors(), taus))
    (name,) = (n for n, p in params["params"].items() if p.get("bias", np.zeros(0)).shape == (ACTIONS,))
    head = params["params"][name]

    def with_bias(by):
        return apply({"params": {**params["params"], name: {**head, "bias": head["bias"] + by}}}, vectors(), taus)

    np.testing.assert_allclose(with_bias(np.float32(5.0)), before, atol=1e-4)
    change = np.broadcast_to(np.array([2, -1, -1])[None, :, None], before.shape)
    np.testing.assert_allclose(with_bias(np.array([3, 0, 0], np.float32)) - before, change, atol=1e-4)


def test_quantiles_are_those_of_the_cosine_embedding_worked_by_hand():
    params, apply = drawn((), taus=True)
    tree = jax.tree.map(np.asarray, params["params"])
    taus = np.random.default_rng(0).random((7, 4)).astype(np.float32)
    relu, dense = lambda x: np.maximum(x, 0), lambda x, part: x @ part["kernel"] + part["bias"]
    by_shape = {part["kernel"].shape: part for part in tree.values() if "kernel" in part}
    hidden = np.tanh(dense(vectors(), tree["MLP_0"]["Dense_0"]))
    waves = np.cos(np.pi * np.arange(64) * taus[..., None])
    hidden = hidden[:, None] * relu(dense(waves, by_shape[64, 8]))
    out = dense(np.tanh(dense(hidden, tree["MLP_1"]["Dense_0"])), by_shape[5, ACTIONS])
    np.testing.assert_allclose(apply(params, vectors(), taus), out.swapaxes(1, 2), rtol=1e-3, atol=1e-3)
