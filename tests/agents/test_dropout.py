"""Dropout of critics, DroQ and SimBa: what is dropped, where and by which key, in NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import CONTINUOUS, DISCRETE, drawn_anew, five_steps, updated
from toys_by_hand import beside, linear, squashed
from toys_draws import drawn

import jaxrl
from jaxrl.nn import DropoutCritic, Ensemble, forward

KEY = jax.random.key(0)
OBS = jaxrl.Box(-1.0, 1.0, (3,))
SIZE, WIDTH, RATE, TEMPERATURE = 5, 4, 0.5, 0.5
RNG = np.random.default_rng(3)
NOISE = RNG.normal(size=(2, SIZE, 2)).astype(np.float32)
"""How far actions lie from the mean: those that the policy learns from, and those after a step."""
MASKS = RNG.random((3, SIZE, WIDTH)) < 1 - RATE
"""What is kept in the target, in the loss of the critics, and in that of the policy."""


# --- the network --------------------------------------------------------------------------------------------------


def test_the_share_is_dropped_and_the_rest_is_scaled_up_so_that_the_mean_stays() -> None:
    """All units are 1 before dropout, and the output is their mean."""
    units, rows, rate = 50, 400, 0.2
    network = DropoutCritic(OBS, features=(units,), dropout=rate)
    layers = {
        "MLP_0": {"Dense_0": {"kernel": jnp.zeros((3, units)), "bias": jnp.ones(units)}},
        "Dense_0": {"kernel": jnp.full((units, 1), 1 / units), "bias": jnp.zeros(1)},
    }
    out = np.asarray(forward(network, {"params": layers}, jnp.zeros((rows, 3)), key=KEY)[0])[:, 0]
    kept = out * units * (1 - rate)
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)  # whole units
    np.testing.assert_allclose(kept.mean() / units, 1 - rate, atol=0.01)
    np.testing.assert_allclose(out.mean(), 1.0, atol=0.015)
    np.testing.assert_allclose(out.var(), rate / (1 - rate) / units, rtol=0.25)


def test_what_is_dropped_follows_from_the_key_and_is_each_critics_own() -> None:
    ensemble = Ensemble(DropoutCritic(OBS, features=(32,), dropout=RATE), 2)
    obs = jnp.ones((8, 3))
    one = ensemble.member.init(KEY, obs)
    alike = jax.tree.map(lambda x: jnp.stack([x, x]), one)
    values = lambda seed: np.asarray(forward(ensemble, alike, obs, key=jax.random.key(seed))[0])
    np.testing.assert_array_equal(values(0), values(0))
    assert (values(0) != values(1)).any()
    assert (values(0)[0] != values(0)[1]).any()


# --- an update ----------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "features": (), "critic_features": (WIDTH,), "optimizer": "sgd", "temperature": TEMPERATURE,
    "learn_temperature": False, "lr": 0.0, "dropout": RATE, "layer_norm": True,
}  # fmt: skip


def numbers(params: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])


def by_hand(p: Any, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return what a critic of one hidden layer puts out with these units kept, or each of several."""
    bias = lambda layer: np.expand_dims(layer["bias"], -2)
    hidden = p["MLP_0"]["Dense_0"]
    x = (x @ hidden["kernel"] + bias(hidden)) * mask / (1 - RATE)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    norm = p["MLP_0"]["LayerNorm_0"]
    x = np.maximum(x * np.expand_dims(norm["scale"], -2) + bias(norm), 0)
    return np.asarray(x @ p["Dense_0"]["kernel"] + bias(p["Dense_0"]))


def acted(policy: Any, obs: Any, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return observations with the actions drawn there, `[B, 5]`, and their log-probabilities, `[B]`."""
    action, log_p = squashed(linear(policy, obs), noise)
    return beside(obs, action), log_p


@functools.cache
def state_of(make: Any = jaxrl.sac, **settings: Any) -> tuple[Any, Any]:
    """Return an agent and a state whose parameters are drawn anew."""
    agent = make(**{**PLAIN, **settings})(CONTINUOUS)
    return agent, drawn_anew(agent, "policy", "critic", "target")


def test_an_update_of_droq_drops_in_targets_in_the_critics_and_where_the_policy_learns_from_their_mean() -> None:
    agent, state = state_of(jaxrl.droq, policy_interval=1)
    items = five_steps().items
    # As many masks as there are passes; a further one would have nothing to draw.
    with drawn(normal=[NOISE[1], NOISE[0]], bernoulli=MASKS, choice=[np.array([0, 1])]):
        _, metrics, _ = jax.jit(agent.update)(state, five_steps(), KEY, jnp.uint32(0))
    x, log_p = acted(state.policy, items.next_obs, NOISE[1])
    v_t = by_hand(numbers(state.target), x, MASKS[0])[..., 0].min(0) - TEMPERATURE * log_p
    target = np.asarray(items.reward) + np.asarray(items.discount) * v_t
    taken = np.concatenate([items.obs, items.action], axis=1)
    q = by_hand(numbers(state.critic), taken, MASKS[1])[..., 0]
    np.testing.assert_allclose(metrics["loss"], (0.5 * (target[None] - q) ** 2).sum(0).mean(), rtol=1e-4)
    x, log_p = acted(state.policy, items.obs, NOISE[0])
    value = by_hand(numbers(state.critic), x, MASKS[2])[..., 0].mean(0) - TEMPERATURE * log_p
    np.testing.assert_allclose(metrics["policy_loss"], -value.mean(), rtol=1e-4)


def test_policies_and_values_see_no_dropout() -> None:
    agent, state = state_of()
    items, keep_all = five_steps().items, np.full((SIZE, WIDTH), 1 - RATE)
    taken = np.concatenate([items.obs, items.action], axis=1)
    expected = by_hand(numbers(state.critic), taken, keep_all)
    np.testing.assert_allclose(agent.apply["critic"](state.critic, items.obs, items.action), expected, rtol=1e-4)
    assert agent.policy_fns.value is not None
    value = agent.policy_fns.value(state, items.obs, items.action)
    np.testing.assert_allclose(value, expected[..., 0].min(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "spec", "passes"),
    [
        (jaxrl.td3, CONTINUOUS, 3), (jaxrl.awac, CONTINUOUS, 2), (jaxrl.iql, CONTINUOUS, 2),
        (jaxrl.sac, DISCRETE, 3), (jaxrl.cql, CONTINUOUS, 3),
    ],
)  # fmt: skip
def test_other_agents_drop_in_as_many_passes(make, spec, passes) -> None:
    """Targets and critics; also in the policy's loss where that is of the critics' values."""
    agent = make(features=(WIDTH,), dropout=RATE, **({"policy_interval": 1} if make is jaxrl.td3 else {}))(spec)
    state, drawn_shapes = jax.eval_shape(agent.init, KEY), []
    draw = jax.random.bernoulli

    def count(key: Any, *args: Any, **shape: Any) -> Any:
        drawn_shapes.append(shape.get("shape") or args[-1])
        return draw(key, *args, **shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bernoulli", count)
        after, _ = jax.eval_shape(lambda state: updated(agent, spec, state), state)
    assert len(drawn_shapes) == passes
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
