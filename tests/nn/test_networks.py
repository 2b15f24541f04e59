"""The network of a policy with a critic: how it begins, what is shared, what it sees, and what it remembers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import SettingsError
from jaxrl.nn import (
    MLP,
    ActorCritic,
    Convolutions,
    Core,
    encode,
    initial_memory,
    make_torso,
)
from jaxrl.nn.layers import BatchNorm
from jaxrl.spaces import Box, Discrete, MultiDiscrete, space_zeros
from jaxrl.types import RecurrentObs

VECTOR = Box(-1.0, 1.0, (6,))
IMAGE = Box(0, 255, (5, 4, 2), "uint8")
SPACES = {
    "vector": VECTOR,
    "number": Box(-1.0, 1.0, ()),
    "image": IMAGE,
    "discrete": Discrete(4),
    "several numbers": MultiDiscrete((2, 3)),
    "dict": {"camera": IMAGE, "arm": VECTOR, "mode": Discrete(4)},
    "tuple": (VECTOR, MultiDiscrete((2, 3))),
    "nested": {"a": (VECTOR, Discrete(4)), "b": {"c": IMAGE}},
}
OUTPUTS = 3
KEY = jax.random.key(0)


class Toy(NamedTuple):
    """A network, and what would otherwise be compiled anew in every test."""

    network: ActorCritic
    init: Any
    """Makes the parameters as they begin, from a key."""
    apply: Any
    shapes: Any
    """Of the parameters."""
    drawn: Any
    """Random parameters, such that everything in the network matters."""


def toy_of(network, space):
    obs, core = space_zeros(space), network.core
    memory = None if core is None else initial_memory(core.core, core.features)
    seen = jax.tree.map(lambda x: x[None], obs if memory is None else RecurrentObs(obs, memory))
    init = jax.jit(lambda key: network.init(key, seen))
    shapes, rng = jax.eval_shape(init, KEY), np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    compiled = jax.jit(network.apply)
    apply = lambda params, obs: jax.tree.map(np.asarray, compiled(params, obs))
    return Toy(network, init, apply, shapes["params"], drawn)


@functools.cache
def a_toy(name="vector", **settings):
    return toy_of(ActorCritic(SPACES[name], OUTPUTS, features=(8, 5), **settings), SPACES[name])


def vectors():
    return np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)


def observations(name, count):
    rng = np.random.default_rng(0)

    def draw(space):
        if isinstance(space, Box):
            numbers = rng.uniform(space.low, space.high, (count, *space.shape))
        else:
            numbers = rng.integers(0, space.n, (count, *space.shape))
        return numbers.astype(space.dtype)

    return jax.tree.map(draw, SPACES[name], is_leaf=lambda x: isinstance(x, Box | Discrete | MultiDiscrete))


def with_row(x, at, new):
    """Return a copy of `x` whose entry `at` is `new`."""
    x = x.copy()
    x[at] = new
    return x


def matrices(params):
    """All kernels by name, those of convolutions as `[inputs, outputs]`."""
    leaves = jax.tree_util.tree_leaves_with_path(params["params"])
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    return {name: x.reshape(-1, x.shape[-1]) for name, x in named.items() if name.endswith("kernel")}


def check_orthogonal(matrix, gain):
    narrow = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(narrow.T @ narrow, gain**2 * np.eye(narrow.shape[1]), atol=1e-5 * gain**2)


def size_of(toy):
    return sum(leaf.size for leaf in jax.tree.leaves(toy.shapes))


def slopes(toy):
    """The largest entry of the gradients of the policy's outputs and of the values, by the parts of the network."""

    def largest(output):
        total = lambda params: jnp.sum(jnp.sin(toy.network.apply(params, vectors())[output]))
        grads = jax.grad(total)(toy.drawn)["params"]
        leaves = {name: jax.tree.leaves(part) for name, part in grads.items()}
        return {name: jnp.stack([jnp.abs(x).max() for x in part]).max() for name, part in leaves.items()}

    return jax.jit(lambda: (largest(0), largest(1)))()


# --- what is seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "dtype", "divisor"),
    [
        (0, 1, "uint8", 1),
        (0, 10, "uint8", 1),
        (0, 255, "uint8", 255),
        (-np.inf, np.inf, "uint8", 255),
        (0, [[255, 255, 255]], "uint8", 255),
        (0, [[255, 255, 7]], "uint8", 1),
        (0, 255, "int32", 255),
        (-255, 255, "int32", 1),
        (-np.inf, np.inf, "int32", 1),
        (0, 1, "bool", 1),
        (0, 255, "float32", 1),
    ],
)
def test_whole_numbers_are_divided_by_255_where_their_bounds_are_those_of_pictures(low, high, dtype, divisor):
    box = Box(low, np.array(high), (1, 3), dtype)
    seen = np.array([[[0, 1, 1]]]).astype(dtype)
    np.testing.assert_allclose(encode(box, seen)[0], np.array([0, 1, 1]) / divisor, rtol=1e-6)
    both = encode({"a": (box,), "b": Discrete(2)}, {"a": (seen,), "b": np.ones(1, np.int32)})
    np.testing.assert_allclose(both[0], [0, 1 / divisor, 1 / divisor, 0, 1], rtol=1e-6)


# --- the beginning ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"), [("vector", {"scales": 1}), ("image", {"shared": True})], ids=["vector", "image"]
)
def test_matrices_begin_orthogonal_each_with_its_gain(name, settings):
    found = matrices(a_toy(name, **settings).init(KEY))
    gains = {"policy/kernel": 0.01, "value/kernel": 1.0}
    for matrix, kernel in found.items():
        check_orthogonal(kernel, gains.get(matrix, 2**0.5))
    layers = {"vector": 2 + 2, "image": 1 + 2}[name]
    assert len(found) == layers + 2
    assert set(gains) < set(found)


def test_other_networks_begin_orthogonal_only_if_told():
    x = jnp.zeros((1, 6))
    told, untold = (
        matrices(jax.jit(MLP((4,), orthogonal=orthogonal).init)(KEY, x))["Dense_0/kernel"]
        for orthogonal in (True, False)
    )
    check_orthogonal(told, 2**0.5)
    with pytest.raises(AssertionError):
        check_orthogonal(untold, 2**0.5)


def test_at_first_all_actions_are_nearly_alike_whatever_is_seen_and_torsos_of_their_own_differ():
    toy = a_toy(scales=1)
    params = toy.init(KEY)
    outputs, value, _ = toy.apply(params, 10 * vectors())
    assert 0 < np.abs(outputs[:, :-1]).max() < 0.05
    np.testing.assert_array_equal(outputs[:, -1], np.zeros(7))  # the free log-scale
    assert (np.std(outputs[:, :-1], axis=0) > 0).all()
    assert np.abs(value).max() > 0.1
    of_other_seed = toy.apply(toy.init(jax.random.key(1)), 10 * vectors())[1]
    assert np.abs(value - of_other_seed).max() > 0.1
    actor, critic = (params["params"][name]["Dense_0"]["kernel"] for name in ("actor_torso", "critic_torso"))
    assert np.abs(actor - critic).max() > 0.1


def test_free_scales_are_learnt_and_do_not_depend_on_the_observation():
    toy = a_toy(scales=2)
    outputs, _, _ = toy.apply(toy.drawn, vectors())
    np.testing.assert_array_equal(outputs[:, 1:], np.tile(toy.drawn["params"]["log_std"], (7, 1)))
    policy, value = slopes(toy)
    assert policy["log_std"] > 0
    assert value["log_std"] == 0


def test_scales_that_are_not_free_depend_on_the_observation():
    toy = a_toy(scales=0)
    assert "log_std" not in toy.shapes
    assert (np.std(toy.apply(toy.drawn, vectors())[0], axis=0) > 0.1).all()


# --- what is shared -----------------------------------------------------------------------------------------------

TORSO = (6 * 8 + 8) + (8 * 5 + 5)
HEADS = (5 * OUTPUTS + OUTPUTS) + (5 + 1)


def test_a_shared_torso_is_there_once_and_separate_ones_twice():
    assert size_of(a_toy(shared=True)) == TORSO + HEADS
    assert size_of(a_toy(shared=False)) == 2 * TORSO + HEADS
    scale_and_shift = 2 * (8 + 5)  # of every unit
    assert size_of(a_toy(layer_norm=True)) == 2 * (TORSO + scale_and_shift) + HEADS


def test_with_separate_torsos_policy_and_value_learn_apart():
    policy, value = slopes(a_toy())
    assert policy["critic_torso"] == policy["value"] == 0
    assert min(policy["actor_torso"], policy["policy"]) > 0
    assert value["actor_torso"] == value["policy"] == 0
    assert min(value["critic_torso"], value["value"]) > 0


def test_with_a_shared_torso_policy_and_value_learn_together():
    policy, value = slopes(a_toy(shared=True))
    assert min(policy["actor_torso"], value["actor_torso"]) > 0
    assert policy["value"] == value["policy"] == 0


# --- layer norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image"])
def test_layer_norm_takes_the_scale_out_of_observations(name):
    """With biases of 0, as at the beginning, and everything else random."""
    obs = 1.0 + observations(name, 7).astype(np.float32)
    change = {}
    for layer_norm in (False, True):
        toy = a_toy(name, layer_norm=layer_norm)
        params = jax.tree_util.tree_map_with_path(lambda path, x: x * (path[-1].key != "bias"), toy.drawn)
        near, far = (toy.apply(params, scale * obs)[1] for scale in (1, 3))
        change[layer_norm] = np.abs(near - far).max()
    assert change[True] < 1e-2
    assert change[False] > 0.1


# --- observations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["number", "discrete", "several numbers", "dict", "nested"])
def test_every_part_of_an_observation_counts_in_its_own_row_and_in_no_other(name):
    toy = a_toy(name)
    obs = observations(name, 6)
    outputs, value, memory = toy.apply(toy.drawn, obs)
    assert (outputs.shape, value.shape, memory) == ((6, OUTPUTS), (6,), ())
    leaves, treedef = jax.tree.flatten(obs)
    for i, leaf in enumerate(leaves):
        unlike = next(row for row in range(6) if (leaf[row] != leaf[0]).any())
        changed = [*leaves[:i], with_row(leaf, 0, leaf[unlike]), *leaves[i + 1 :]]
        new_outputs, new_value, _ = toy.apply(toy.drawn, jax.tree.unflatten(treedef, changed))
        assert np.abs(new_outputs - outputs)[0].min() > 1e-4
        assert np.abs(new_value - value)[0] > 1e-4
        np.testing.assert_array_equal(new_outputs[1:], outputs[1:])
        np.testing.assert_array_equal(new_value[1:], value[1:])


def test_convolutions_by_hand():
    # Of an image with a single 1 in its middle, each output is the entry of the kernel that meets it.
    layer = Convolutions(channels=(1,))
    image = jnp.zeros((1, 5, 5, 1)).at[0, 2, 2, 0].set(1.0)
    kernel = jnp.arange(1.0, 10.0).reshape(3, 3, 1, 1)
    params = {"params": {"Conv_0": {"kernel": kernel, "bias": jnp.array([0.5])}}}
    assert layer.apply(params, image)[0].tolist() == [9.5, 8.5, 7.5, 6.5, 5.5, 4.5, 3.5, 2.5, 1.5]


def test_an_image_is_flattened_where_dense_layers_are_asked_for():
    dense = a_toy("image", torso="mlp").shapes["actor_torso"]
    assert dense["Dense_0"]["kernel"].shape == (5 * 4 * 2, 8)


def test_a_joined_torso_by_hand():
    """Two images, a vector and a number that is one of two; the dense layer is put together from its parts."""
    other = Box(0.0, 1.0, (3, 3, 1))
    space = {"a": IMAGE, "b": Discrete(2), "c": other, "d": VECTOR}
    rng = np.random.default_rng(0)
    obs = {
        "a": rng.integers(0, 256, (2, 5, 4, 2)).astype(np.uint8),
        "b": np.array([1, 0]),
        "c": rng.uniform(size=(2, 3, 3, 1)).astype(np.float32),
        "d": vectors()[:2],
    }
    torso = make_torso("auto", space, (7,), "relu")
    params = jax.jit(torso.init)(KEY, encode(space, obs))
    parts = params["params"]
    eyes = [{"params": parts["Joined_0"][f"Convolutions_{i}"]} for i in range(2)]
    look = jax.jit(Convolutions().apply)
    seen = [look(eyes[0], (obs["a"] / 255.0).astype(np.float32)), look(eyes[1], obs["c"])]
    x = np.concatenate([*seen, [[0, 1], [1, 0]], obs["d"]], axis=1)
    layer = jax.tree.map(np.asarray, parts["MLP_0"]["Dense_0"])
    expected = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
    np.testing.assert_allclose(jax.jit(torso.apply)(params, encode(space, obs)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vector", "discrete", "tuple"])
def test_what_is_not_an_image_cannot_be_convolved(name):
    with pytest.raises(SettingsError, match="torso minatar needs"):
        make_torso("minatar", SPACES[name], (8,), "relu")


# --- memory -------------------------------------------------------------------------------------------------------

ROWS, STEPS, WIDTH = 3, 6, 4
FIRST = np.zeros((ROWS, STEPS), bool)
FIRST[0, 0] = FIRST[1, 2] = FIRST[1, 3] = FIRST[0, 5] = True
"""Row 0 begins with an episode and ends with another, row 1 holds one of a single step, row 2 only goes on."""


@pytest.mark.every_day("gru-dict")
@pytest.mark.parametrize(("core", "name"), [("lstm", "vector"), ("gru", "dict")])
def test_a_sequence_at_once_is_judged_as_step_by_step(core, name):
    """From memories that are not blank, and set to zeros by hand where an episode begins."""
    toy, rng = a_toy(name, core=Core(core, WIDTH)), np.random.default_rng(1)
    memory = jax.tree.map(lambda x: rng.normal(size=(ROWS, *x.shape)).astype(x.dtype), initial_memory(core, WIDTH))
    obs = jax.tree.map(lambda x: x.reshape(ROWS, STEPS, *x.shape[1:]), observations(name, ROWS * STEPS))
    at_once = jax.jit(functools.partial(toy.network.apply, method="apply_sequence"))
    outputs, values = at_once(toy.drawn, RecurrentObs(obs, memory), FIRST)
    for t in range(STEPS):
        memory = jax.tree.map(lambda x, t=t: x * ~FIRST[:, t].reshape(-1, *[1] * (x.ndim - 1)), memory)
        now = jax.tree.map(lambda x, t=t: x[:, t], obs)
        wanted_outputs, wanted_values, memory = toy.apply(toy.drawn, RecurrentObs(now, memory))
        np.testing.assert_allclose(outputs.reshape(ROWS, STEPS, OUTPUTS)[:, t], wanted_outputs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values.reshape(ROWS, STEPS)[:, t], wanted_values, rtol=1e-4, atol=1e-4)


def test_a_core_stands_behind_one_torso_for_both():
    parts = a_toy(core=Core("gru", WIDTH)).shapes
    assert set(parts) == {"actor_torso", "core", "policy", "value"}
    kernels = [x.size for x in jax.tree.leaves(parts["core"]) if len(x.shape) == 2]
    assert sum(kernels) == 3 * WIDTH * (5 + WIDTH)
    assert parts["policy"]["kernel"].shape == (WIDTH, OUTPUTS)
    assert parts["value"]["kernel"].shape == (WIDTH, 1)


def test_a_core_begins_with_zeros():
    begun = lambda core: jax.tree.map(lambda x: x.tolist(), initial_memory(core, 3))
    assert (begun("none"), begun("gru"), begun("lstm")) == (None, ([0.0] * 3,), (([0.0] * 3, [0.0] * 3),))


def test_batch_normalisation_is_of_the_batch_to_learn_and_of_running_statistics_to_act():
    layer, rows = BatchNorm(momentum=0.9), np.random.default_rng(0).normal(2.0, 3.0, (8, 2)).astype(np.float32)
    variables = layer.init(jax.random.key(0), rows)
    learnt, changed = layer.apply(variables, rows, train=True, mutable=["batch_stats"])
    mean, var = rows.mean(0), rows.var(0)
    np.testing.assert_allclose(learnt, (rows - mean) / np.sqrt(var + 1e-3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(changed["batch_stats"]["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(changed["batch_stats"]["var"], 0.9 + 0.1 * var, rtol=1e-5)
    acted = layer.apply({**variables, **changed}, rows)
    np.testing.assert_allclose(acted, (rows - 0.1 * mean) / np.sqrt(0.9 + 0.1 * var + 1e-3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [99_999, 100_000])
def test_batch_renormalisation_corrects_within_bounds_what_batch_and_running_statistics_differ_by(count):
    """The first feature's corrections are within the bounds of Ioffe's algorithm 1, the second's beyond them."""
    layer, rows = BatchNorm(renorm=True), np.float32([[1.0, -900.0], [3.0, -100.0], [2.0, -500.0], [2.0, -500.0]])
    variables = jax.jit(layer.init)(jax.random.key(0), rows)
    stats = {"mean": np.float32([1.5, 0.0]), "var": np.float32([1.0, 4.0]), "count": np.uint32(count)}
    learn = jax.jit(functools.partial(layer.apply, train=True, mutable=["batch_stats"]))
    learnt, changed = learn({**variables, "batch_stats": stats}, rows)
    normed = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3)
    if count == 100_000:
        std = np.sqrt(1.0 + 1e-3)
        within = normed[:, 0] * np.sqrt(0.5 + 1e-3) / std + 0.5 / std
        normed = np.stack([within, normed[:, 1] * 3.0 - 5.0], axis=1)
    np.testing.assert_allclose(learnt, normed, rtol=1e-4, atol=1e-5)
    assert int(changed["batch_stats"]["count"]) == count + 1
    np.testing.assert_allclose(changed["batch_stats"]["mean"], 0.99 * stats["mean"] + 0.01 * rows.mean(0), rtol=1e-5)
