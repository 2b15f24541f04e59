"""Torsos of residual blocks: what they compute, in NumPy, how they begin, and what they refuse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import CONTINUOUS, DISCRETE, KEY, updated

import jaxrl
from jaxrl.nn import BroNet, Critic, PolicyNetwork, SimBa, check_torso, make_torso
from jaxrl.spaces import Box

WIDTH, ROWS = 6, 3
VECTOR = Box(-1.0, 1.0, (4,))
IMAGE = Box(0, 255, (5, 5, 2), "uint8")


def random_like(params: Any) -> Any:
    """Return parameters drawn anew, so that biases and scales matter too."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.2, 0.7, x.shape).astype(np.float32), params)


# --- what they compute --------------------------------------------------------------------------------------------


def affine(layer: Any, x: np.ndarray) -> np.ndarray:
    return np.asarray(x @ layer["kernel"] + layer["bias"])


def normed(layer: Any, x: np.ndarray) -> np.ndarray:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return np.asarray(scaled * layer["scale"] + layer["bias"])


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def simba_of_two(p: Any, x: np.ndarray) -> np.ndarray:
    x = affine(p["Dense_0"], x)
    x = x + affine(p["Dense_2"], relu(affine(p["Dense_1"], normed(p["LayerNorm_0"], x))))
    x = x + affine(p["Dense_4"], relu(affine(p["Dense_3"], normed(p["LayerNorm_1"], x))))
    return normed(p["LayerNorm_2"], x)


def bro_of_two(p: Any, x: np.ndarray) -> np.ndarray:
    x = relu(normed(p["LayerNorm_0"], affine(p["Dense_0"], x)))
    for first, second in ((1, 2), (3, 4)):
        inner = relu(normed(p[f"LayerNorm_{first}"], affine(p[f"Dense_{first}"], x)))
        x = x + normed(p[f"LayerNorm_{second}"], affine(p[f"Dense_{second}"], inner))
    return x


BY_HAND: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "simba": ("SimBa_0", simba_of_two),
    "bro": ("BroNet_0", bro_of_two),
}


@pytest.mark.every_day("policy-bro", "critic-simba")
@pytest.mark.parametrize("torso", BY_HAND)
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_networks_of_two_blocks_are_those_worked_by_hand(kind: str, torso: str) -> None:
    make = PolicyNetwork if kind == "policy" else Critic
    network: Any = make(VECTOR, 3, torso=torso, features=(WIDTH, WIDTH))
    rng = np.random.default_rng(1)
    obs, action = rng.uniform(-1, 1, (ROWS, 4)), rng.uniform(-1, 1, (ROWS, 2))
    args = [x.astype(np.float32) for x in ([obs] if kind == "policy" else [obs, action])]
    variables = random_like(jax.eval_shape(network.init, KEY, *args))
    name, by_hand = BY_HAND[torso]
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    # An action enters before the embedding.
    hidden = by_hand(params[name], np.concatenate(args, axis=1))
    found = jax.jit(network.apply)(variables, *args)
    np.testing.assert_allclose(found, affine(params["Dense_0"], hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("torso", BY_HAND)
def test_images_are_flattened(torso: str) -> None:
    options: dict[str, Any] = {"torso": torso, "features": (WIDTH,)}
    network, flat = PolicyNetwork(IMAGE, 2, **options), PolicyNetwork(Box(-1.0, 1.0, (50,)), 2, **options)
    obs = np.random.default_rng(0).integers(0, 256, (ROWS, 5, 5, 2)).astype(np.uint8)
    variables = random_like(jax.eval_shape(network.init, KEY, obs))

    @jax.jit
    def both(variables: Any, obs: Any) -> Any:
        return network.apply(variables, obs), flat.apply(variables, obs.reshape(ROWS, -1).astype(jnp.float32) / 255)

    np.testing.assert_array_equal(*both(variables, obs))


# --- how they begin -----------------------------------------------------------------------------------------------


def test_the_embedding_begins_as_an_isometry_and_the_blocks_keep_the_size_of_what_passes_a_relu() -> None:
    params = jax.jit(SimBa((32,)).init)(KEY, jnp.zeros((1, 32)))["params"]
    embedding = np.asarray(params["Dense_0"]["kernel"])
    np.testing.assert_allclose(embedding.T @ embedding, np.eye(32), atol=1e-5)
    for layer, inputs in (("Dense_1", 32), ("Dense_2", 128)):
        np.testing.assert_allclose(np.std(params[layer]["kernel"]), np.sqrt(2 / inputs), rtol=0.05)


def test_all_matrices_of_bro_begin_orthogonal_with_the_gain_of_a_relu() -> None:
    params = jax.jit(BroNet((16, 16)).init)(KEY, jnp.zeros((1, 16)))["params"]
    layers = [np.asarray(layer["kernel"]) for name, layer in params.items() if name.startswith("Dense")]
    assert len(layers) == 5
    for kernel in layers:
        np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-4)


def test_without_a_block_there_is_no_layer() -> None:
    """As of `mlp`: IQN and cores take layers off the end of `features`, also the only one."""
    x = jnp.arange(4.0)[None]
    for torso in BY_HAND:
        module = make_torso(torso, VECTOR, (), "relu")
        assert jax.tree.leaves(module.init(KEY, x)) == []
        np.testing.assert_array_equal(module.apply({}, x), x)


# --- in agents ----------------------------------------------------------------------------------------------------

AGENTS: dict[str, tuple[Any, jaxrl.EnvSpec, dict[str, Any]]] = {
    "noisy dqn": (jaxrl.dqn, DISCRETE, {"features": (8, 8), "noisy": 0.5}),
    "iqn": (jaxrl.dqn, DISCRETE, {"features": (8, 8), "values": "iqn", "atoms": 4}),
    "pqn": (jaxrl.pqn, DISCRETE, {"features": (8,)}),
    "ppo": (jaxrl.ppo, CONTINUOUS, {"features": (8, 8)}),
    "recurrent ppo": (jaxrl.ppo, CONTINUOUS, {"features": (8, 8), "core": "gru", "core_features": 8}),
    "bc": (jaxrl.bc, CONTINUOUS, {"features": (8,)}),
    "td3": (jaxrl.td3, CONTINUOUS, {"features": (8,), "critic_features": (16, 16)}),
    "iql": (jaxrl.iql, CONTINUOUS, {"features": (8,)}),
    "recurrent sac": (jaxrl.sac, CONTINUOUS, {"features": (8, 8), "core": "gru", "core_features": 8}),
}


@pytest.mark.every_day("iqn-bro", "ppo-bro", "td3-simba", "recurrent sac-simba")
@pytest.mark.parametrize("torso", BY_HAND)
@pytest.mark.parametrize("name", AGENTS)
def test_agents_of_all_kinds_act_and_learn_with_them(name: str, torso: str) -> None:
    """Traced alone: that a torso of `mlp` would do as well is ruled out by the names of the parameters."""
    make, spec, settings = AGENTS[name]
    agent = make(torso=torso, **settings)(spec)
    state = jax.eval_shape(agent.init, KEY)
    networks = [getattr(state, x) for x in ("params", "policy", "critic", "value") if getattr(state, x, ())]
    blocks = {"simba": SimBa, "bro": BroNet}[torso].__name__
    for network in networks:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(network)]
        assert any(blocks in path or "torso" in path or "body" in path for path in paths)
        assert not any("MLP" in path for path in paths) or agent.memory is not None or name == "iqn"
        # A layer norm is in every block, whatever `layer_norm` says.
        assert any("LayerNorm" in path for path in paths)
    if agent.window is None and agent.memory is None:
        after, metrics = jax.eval_shape(lambda state: updated(agent, spec, state), state)
        assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
        assert metrics


def test_torsos_without_blocks_take_any_widths() -> None:
    check_torso("mlp", VECTOR, features=(8, 4))
    check_torso("impala", IMAGE, features=(8, 4))
    with pytest.raises(jaxrl.SettingsError, match="torso bro"):
        make_torso("bro", VECTOR, (8, 4), "relu")
