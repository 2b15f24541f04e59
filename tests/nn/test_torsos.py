"""Torsos for images: which there are, which is chosen, how large each is, and what it computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import DISCRETE, KEY, seeing, updated, vector_of

import jaxrl
from jaxrl.nn import (
    MLP,
    ActorCritic,
    Convolutions,
    Critic,
    ImpalaCNN,
    NatureCNN,
    PolicyNetwork,
    QNetwork,
    check_torso,
    encode,
    make_torso,
    torso_kind,
)
from jaxrl.spaces import Box, Discrete, space_struct, space_zeros

ATARI = Box(0, 255, (84, 84, 4), "uint8")
SMALL = Box(0, 255, (10, 10, 4), "uint8")
VECTOR = Box(-1.0, 1.0, (6,))


def image(height, width):
    return Box(0, 255, (height, width, 3), "uint8")


def sizes(module, *args):
    """Return the shape of what `module` puts out, and how many parameters it has."""
    params = jax.eval_shape(module.init, KEY, *args)
    out = jax.eval_shape(module.apply, params, *args)
    return out.shape, sum(leaf.size for leaf in jax.tree.leaves(params))


# --- shapes and sizes ---------------------------------------------------------------------------------------------

MINATAR = 3 * 3 * 4 * 16 + 16
NATURE = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64)
STAGE = lambda before, after: (9 * before * after + after) + 4 * (9 * after * after + after)
IMPALA = STAGE(4, 16) + STAGE(16, 32) + STAGE(32, 32)


@pytest.mark.parametrize(
    ("module", "side", "width", "parameters"),
    [
        (Convolutions(), 10, 8 * 8 * 16, MINATAR),
        (NatureCNN(), 84, 7 * 7 * 64, NATURE),
        (NatureCNN(), 36, 1 * 1 * 64, NATURE),
        (ImpalaCNN(), 84, 11 * 11 * 32, IMPALA),
        (ImpalaCNN(), 10, 2 * 2 * 32, IMPALA),
        (ImpalaCNN((8,)), 10, 5 * 5 * 8, STAGE(4, 8)),
        (Convolutions((8, 2)), 10, 6 * 6 * 2, (9 * 4 * 8 + 8) + (9 * 8 * 2 + 2)),
    ],
)
def test_convolutional_networks_are_as_large_as_worked_by_hand(module, side, width, parameters):
    assert sizes(module, jnp.zeros((2, side, side, 4))) == ((2, width), parameters)


def test_dqn_on_atari_is_that_of_the_paper():
    network = QNetwork(ATARI, 4, torso="nature", features=(512,))
    assert sizes(network, space_zeros(ATARI, 2)) == ((2, 4), NATURE + (3136 * 512 + 512) + (512 * 4 + 4))
    assert NATURE + (3136 * 512 + 512) + (512 * 4 + 4) == 1_686_180  # as it is known to be


@pytest.mark.parametrize("torso", ["minatar", "nature", "impala"])
def test_channels_and_features_may_be_others(torso):
    channels = {"minatar": (2, 3), "nature": (2, 3, 4), "impala": (2, 3)}[torso]
    module = make_torso(torso, image(36, 36), (7,), "relu", channels)
    params = jax.eval_shape(module.init, KEY, jnp.zeros((1, 36, 36, 3)))
    kernels = [x.shape for x in jax.tree.leaves(params) if len(x.shape) == 4]
    assert {shape[-1] for shape in kernels} == set(channels)
    assert jax.eval_shape(module.apply, params, jnp.zeros((5, 36, 36, 3))).shape == (5, 7)


def test_the_stages_of_impala_by_hand():
    """An image of 0 to 15 through one stage: the convolution keeps it, the largest of each window is taken, the first
    block adds 1 and the second nothing."""
    module, x = ImpalaCNN((1,)), jnp.arange(16.0).reshape(1, 4, 4, 1)
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(module.init, KEY, x))
    params["params"]["Conv_0"]["kernel"] = jnp.zeros((3, 3, 1, 1)).at[1, 1].set(1.0)
    params["params"]["Residual_0"]["Conv_1"]["bias"] = jnp.ones(1)
    assert module.apply(params, x)[0].tolist() == [11.0, 12.0, 15.0, 16.0]


def test_the_strides_of_nature_by_hand():
    """A single bright pixel reaches, through kernels of ones, those outputs whose windows hold it."""
    module, x = NatureCNN((1, 1, 1)), jnp.zeros((1, 84, 84, 1)).at[0, 40, 0, 0].set(1.0)
    params = jax.tree.map(jnp.ones_like, jax.eval_shape(module.init, KEY, x))
    params = jax.tree_util.tree_map_with_path(lambda path, p: p * (path[-1].key == "kernel"), params)
    # Rows 9 and 10 of 20, then 3 to 5 of 9 (4 sees both), then 1 to 5 of 7; the first column alone in each.
    out = module.apply(params, x)[0].reshape(7, 7)
    assert out[:, 0].tolist() == [0, 1, 3, 4, 3, 1, 0]
    assert float(jnp.abs(out[:, 1:]).max()) == 0


@pytest.mark.every_day("QNetwork-nature", "Critic-nature", "PolicyNetwork-impala")
@pytest.mark.parametrize("torso", ["nature", "impala"])
@pytest.mark.parametrize("network", [QNetwork, PolicyNetwork, Critic, ActorCritic])
def test_every_network_takes_every_torso_also_among_other_observations(network, torso):
    for space in (image(36, 40), {"camera": image(36, 40), "wrist": image(50, 36), "arm": VECTOR, "mode": Discrete(4)}):
        net = network(space, 3, torso=torso, features=(7,))
        obs = space_zeros(space, 2)
        params = jax.eval_shape(net.init, KEY, obs)
        out = jax.eval_shape(net.apply, params, obs)
        assert (out[0] if network is ActorCritic else out).shape == (2, 3)
        assert {"nature": "NatureCNN_0", "impala": "ImpalaCNN_0"}[torso] in str(params)


# --- which is chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "channels", "kind"),
    [
        (VECTOR, (), "mlp"),
        (SMALL, (), "minatar"),
        (image(35, 84), (), "minatar"),
        (image(84, 35), (), "minatar"),
        (image(36, 36), (), "nature"),
        (ATARI, (), "nature"),
        (ATARI, (8, 8, 8), "nature"),
        (ATARI, (16,), "minatar"),
        ({"camera": ATARI, "arm": VECTOR}, (), "nature"),
        ({"camera": ATARI, "map": SMALL}, (), "minatar"),
        ({"arm": VECTOR, "mode": Discrete(2)}, (), "mlp"),
    ],
)
def test_auto_goes_by_the_smallest_image(space, channels, kind):
    assert torso_kind("auto", space, channels) == kind
    struct = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), space_struct(space))
    jax.eval_shape(make_torso("auto", space, (3,), "relu", channels).init, KEY, encode(space, struct))


@pytest.mark.parametrize(
    ("torso", "space", "channels", "said"),
    [
        ("nature", image(36, 35), (), "sides of at least 36, but one has 35; use torso minatar, impala or mlp"),
        ("nature", {"a": ATARI, "b": SMALL}, (), "at least 36, but one has 10"),
        ("nature", ATARI, (16, 32), r"agent.channels is \(16, 32\); torso nature has three convolutions"),
        ("minatar", image(4, 4), (8, 8), "at least 5 for 2 channels, but one has 4"),
        ("impala", VECTOR, (), "torso impala needs an observation"),
        ("natur", ATARI, (), "unknown torso 'natur'; did you mean nature"),
    ],
)
def test_images_that_are_too_small_are_refused(torso, space, channels, said):
    with pytest.raises(jaxrl.SettingsError, match=said):
        check_torso(torso, space, channels)


# --- bfloat16 -----------------------------------------------------------------------------------------------------

NETWORKS = {
    "q": lambda **options: QNetwork(SMALL, 3, features=(8, 7), layer_norm=True, dueling=True, **options),
    "noisy q": lambda **options: QNetwork(VECTOR, 3, features=(8, 7), noisy=0.5, **options),
    "impala": lambda **options: QNetwork(SMALL, 3, torso="impala", channels=(4,), features=(7,), **options),
    "policy": lambda **options: PolicyNetwork(VECTOR, 3, features=(8, 7), **options),
    "simba": lambda **options: PolicyNetwork(VECTOR, 3, torso="simba", features=(8, 8), **options),
    "bro": lambda **options: Critic(VECTOR, 3, torso="bro", features=(8, 8), **options),
    "critic": lambda **options: Critic(SMALL, 3, features=(8, 7), **options),
    "joined critic": lambda **options: Critic({"a": SMALL, "b": VECTOR}, 3, features=(8, 7), **options),
    "both": lambda **options: ActorCritic(VECTOR, 3, features=(8, 7), **options),
}
HEADS = {"Dense_0", "Dense_1", "NoisyDense_0", "policy", "value"}
"""Of a network itself, not of its torso."""


@pytest.mark.every_day("impala")
@pytest.mark.parametrize("name", NETWORKS)
def test_in_bfloat16_torsos_compute_while_parameters_heads_and_outputs_stay_float32(name):
    full, half = NETWORKS[name](), NETWORKS[name](dtype="bfloat16")
    obs = jax.tree.map(lambda x: jnp.ones((2, *x.shape), x.dtype), space_struct(full.observation_space))
    variables = jax.jit(half.init)(KEY, obs)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    seen = lambda net: net.apply(variables, obs, capture_intermediates=True, mutable=["intermediates"])
    out, found = jax.eval_shape(lambda: seen(half))
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype("float32")}
    whole = {"__call__", "apply_torso", "apply_heads"}  # of the network itself
    inner = {part: jax.tree.leaves(x) for part, x in found["intermediates"].items() if part not in whole}
    torsos = {part: {x.dtype for x in leaves} for part, leaves in inner.items() if part not in HEADS}
    assert torsos
    for part, dtypes in torsos.items():
        joined = {jnp.dtype("float32")} if part.startswith("Joined") else set()  # with the rest, which is float32
        assert dtypes - joined == {jnp.dtype("bfloat16")}, part
    heads = {part: {x.dtype for x in leaves} for part, leaves in inner.items() if part in HEADS}
    assert heads
    assert all(dtypes == {jnp.dtype("float32")} for dtypes in heads.values())
    outputs = jax.jit(lambda variables: [jax.tree.leaves(net.apply(variables, obs))[0] for net in (half, full)])
    ours, theirs = map(np.asarray, outputs(variables))
    assert (ours != theirs).any()
    np.testing.assert_allclose(ours, theirs, atol=0.05)


def test_float32_is_the_very_program_of_before():
    text = lambda **dtype: str(jax.make_jaxpr(MLP((8,), **dtype).init)(KEY, jnp.zeros((2, 6))))
    assert text() == text(dtype="float32") != text(dtype="bfloat16")


def test_gradients_through_bfloat16_are_float32_and_move_the_parameters():
    agent = jaxrl.dqn(features=(8,), dtype="bfloat16")(DISCRETE)
    state, (new, metrics) = jax.jit(lambda key: (s := agent.init(key), updated(agent, DISCRETE, s)))(KEY)
    assert {leaf.dtype for leaf in jax.tree.leaves((new.params, new.opt_state[0].mu))} == {jnp.dtype("float32")}
    assert (np.asarray(vector_of(new.params)) != np.asarray(vector_of(state.params))).any()
    assert np.isfinite(metrics["loss"])


# --- learning -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("torso", ["nature", "impala"])
def test_a_few_updates_on_frames_as_large_as_ataris(torso, dtype):
    spec = seeing(ATARI)
    agent = jaxrl.dqn(torso=torso, features=(64,), dtype=dtype, lr=1e-4)(spec)
    state = jax.jit(agent.init)(KEY)
    step, losses = jax.jit(lambda state: updated(agent, spec, state)), []
    for _ in range(8):
        state, metrics = step(state)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[0]
