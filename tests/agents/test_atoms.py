"""Critics of atoms: targets, losses and moves in NumPy on linear networks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun, drawn_anew, five_steps, values_of_constant
from toys_by_hand import beside, linear, numbers, project, slope, softmax, squashed
from toys_draws import drawn

import jaxrl
from jaxrl.agents.critics import target_distribution
from jaxrl.types import Transition

KEY = jax.random.key(0)
BOX = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (3,)), jaxrl.Box(-1.0, 1.0, (2,)))
SIZE, TEMPERATURE = 5, 0.5
NOISE = np.random.default_rng(3).normal(size=(2, SIZE, 2)).astype(np.float32)
"""What is drawn: for the policy's loss and for targets by SAC; the first alone by TD3."""
ATOMS = {"atoms": 5, "v_min": -2.0, "v_max": 2.0}
SUPPORT = np.linspace(-2.0, 2.0, 5)
PLAIN = {"features": (), "optimizer": "sgd", "lr": 0.25, "policy_lr": 0.25, "policy_interval": 1}


@functools.cache
def updated(name: str, **settings: Any) -> tuple[Any, Any, Any]:
    """Return a state with all parameters drawn anew, that after an update from it, and the update's metrics."""
    fixed = {"temperature": TEMPERATURE, "learn_temperature": False} if name == "sac" else {}
    agent = {"sac": jaxrl.sac, "td3": jaxrl.td3}[name](**{**PLAIN, **fixed, **ATOMS, **settings})(BOX)
    parts = ("policy", "critic", *(("target",) if name == "sac" else ("target_policy", "target_critic")))
    state = drawn_anew(agent, *parts)
    with drawn(normal=[NOISE[1], NOISE[0]]):
        after, metrics, _ = jax.jit(agent.update)(state, five_steps(), KEY, jnp.uint32(0))
    return state, after, metrics


def acted(name: str, params: Any, obs: Any, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return observations with the actions drawn there, `[B, 5]`, and what the entropy adds to their value, `[B]`."""
    outputs = linear(params, np.asarray(obs, np.float64))
    if name == "td3":
        return beside(obs, np.clip(np.tanh(outputs) + np.clip(0.2 * noise, -0.5, 0.5), -1, 1)), np.zeros(SIZE)
    action, log_p = squashed(outputs, noise)
    return beside(obs, action), -TEMPERATURE * log_p


def targets(name: str, state: Any, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the target probabilities `[B, 5]`, and those of returns beyond the support, `[B]`."""
    items, noise = five_steps().items, NOISE[1]
    policy, critic = (state.policy, state.target) if name == "sac" else (state.target_policy, state.target_critic)
    x, bonus = acted(name, policy, items.next_obs, noise)
    p = softmax(linear(critic, x))
    rows, outside = [], []
    for b in range(SIZE):
        means = [float(p[k, b] @ SUPPORT) for k in range(2)]
        chosen = p[int(np.argmin(means)), b] if how == "min" else (p[0, b] + p[1, b]) / 2
        z = float(items.reward[b]) + float(items.discount[b]) * (SUPPORT + bonus[b])
        rows.append(project(z, chosen, SUPPORT))
        outside.append(chosen[(z < -2) | (z > 2)].sum())
    return np.array(rows), np.array(outside)


@pytest.mark.parametrize("name", ["td3", "sac"])
@pytest.mark.parametrize("how", ["min", "mean"])
def test_an_update_is_that_worked_by_hand(name: str, how: str) -> None:
    state, after, metrics = updated(name, critic_target=how)
    target, outside = targets(name, state, how)
    x = beside(five_steps().items.obs, five_steps().items.action)
    p = softmax(linear(state.critic, x))
    np.testing.assert_allclose(metrics["loss"], -(target[None] * np.log(p)).sum((0, 2)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["q"], (p @ SUPPORT).mean(), rtol=1e-4, atol=1e-6)
    error = np.abs((target @ SUPPORT)[None] - p @ SUPPORT).mean()
    np.testing.assert_allclose(metrics["td_error"], error, rtol=1e-4)
    np.testing.assert_allclose(metrics["out_of_support"], outside.mean(), rtol=1e-4)
    # The gradient of a cross-entropy for its logits is the difference of the probabilities.
    gradient = np.einsum("bd,kbn->kdn", x, p - target[None]) / SIZE
    moved = numbers(state.critic)[0] - 0.25 * gradient
    np.testing.assert_allclose(numbers(after.critic)[0], moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["td3", "sac"])
@pytest.mark.parametrize("how", ["min", "mean"])
def test_the_policy_improves_the_lowest_or_the_mean_of_the_critics_means(name: str, how: str) -> None:
    state, after, _ = updated(name, critic_target=how)

    def value(bias: np.ndarray) -> float:
        params = {"params": {"Dense_0": {**state.policy["params"]["Dense_0"], "bias": bias}}}
        obs = five_steps().items.obs
        x, bonus = acted(name, params, obs, NOISE[0] if name == "sac" else np.zeros_like(NOISE[0]))
        means = softmax(linear(after.critic, x)) @ SUPPORT
        return float(((means.min(0) if how == "min" else means.mean(0)) + bonus).mean())

    bias = numbers(state.policy)[1]
    np.testing.assert_allclose(numbers(after.policy)[1], bias + 0.25 * slope(value, bias), atol=2e-5)
    if name == "td3":
        agent: Any = jaxrl.td3(**PLAIN, **ATOMS, critic_target=how)(BOX)
        items = five_steps().items
        means = softmax(linear(state.critic, beside(items.obs, items.action))) @ SUPPORT
        told = agent.policy_fns.value(state, items.obs, items.action)
        np.testing.assert_allclose(told, means.min(0) if how == "min" else means.mean(0), rtol=1e-4, atol=1e-5)


def test_the_distribution_of_the_critic_with_the_lowest_mean_is_the_target_row_by_row() -> None:
    """Certain critics: the first knows returns of 1 and -1, the second of 0 and 0, each at two steps."""
    sure = np.full((2, 2, 5), -1e3)
    for critic, row, atom in ((0, 0, 3), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        sure[critic, row, atom] = 0.0
    items = Transition(None, None, jnp.zeros(2), jnp.ones(2), None)._replace(weight=jnp.ones(2))
    learnt = lambda **settings: target_distribution(
        jaxrl.TD3Config(**{**ATOMS, **settings}), items, jnp.asarray(sure, jnp.float32), jnp.asarray(SUPPORT), 0.0
    )[0]
    np.testing.assert_allclose(learnt(), [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(learnt(critic_target="mean"), [[0, 0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0, 0]], atol=1e-6)
    # A histogram around the mean 0: what a normal distribution of deviation 0.75 has in bins of width 1.
    smooth = np.asarray(learnt(critic_loss="hl_gauss"))
    np.testing.assert_allclose(smooth[0], [0.0223, 0.2299, 0.4954, 0.2299, 0.0223], atol=1e-4)
    np.testing.assert_allclose(smooth.sum(1), 1.0, rtol=1e-6)


@pytest.mark.every_day("fast_td3-c51", "fast_sac-hl_gauss")
@pytest.mark.parametrize("loss", ["c51", "hl_gauss"])
@pytest.mark.parametrize("make", [jaxrl.fast_td3, jaxrl.fast_sac])
def test_the_value_of_a_constant_reward_is_that_of_the_closed_form(make: Any, loss: str) -> None:
    """A reward of 1 a step for ever, discounted by 0.8, is worth 5; its entropy is worth next to nothing."""
    small = {"features": (), "critic_features": (16,), "weight_decay": 0.0, "lr": 3e-2, "lr_decay": 800}
    agent = make(**small, atoms=41, v_min=-10.0, v_max=10.0, critic_loss=loss, policy_interval=1)(BOX)
    np.testing.assert_allclose(values_of_constant(agent, reward=1.0, updates=800), 5.0, atol=0.15)


def test_a_support_follows_from_the_rewards_and_none_is_reported_to_lie_beyond_it() -> None:
    agent = jaxrl.td3(**PLAIN, atoms=5)(BOX)
    after, metrics, _ = jax.jit(agent.update)(begun(agent.init), five_steps(), KEY, jnp.uint32(0))
    reward, discount = (np.asarray(x) for x in (five_steps().items.reward, five_steps().items.discount))
    bounds = reward / (1 - discount)
    np.testing.assert_allclose([after.reach.low, after.reach.high], [min(0, bounds.min()), bounds.max()], rtol=1e-5)
    assert "out_of_support" not in metrics
    assert agent.info.bounds_returns
    assert jax.eval_shape(jaxrl.td3(**PLAIN, **ATOMS)(BOX).init, KEY).reach == ()


@pytest.mark.parametrize(("bonus", "outside"), [(0.0, 0.0), (0.4, 0.25), (1.5, 0.5), (-0.5, 0.25)])
def test_what_is_added_to_returns_may_lead_beyond_a_support_that_follows_from_rewards(
    bonus: float, outside: float
) -> None:
    """Rewards and values after the step are added to 0, 4, 9 and 10, between the ends 0 and 10."""
    reward, after = jnp.array([0.0, 2.0, 4.0, 5.0]), jnp.array([0, 2, 5, 5])
    items = Transition((), (), reward, jnp.ones(4), (), (), jnp.ones(4))
    logits = 50.0 * jax.nn.one_hot(after, 11)[None]
    config = jaxrl.SACConfig(atoms=11)
    _, metrics = target_distribution(config, items, logits, jnp.arange(11.0), jnp.full(4, bonus))
    assert metrics["out_of_support"] == outside
