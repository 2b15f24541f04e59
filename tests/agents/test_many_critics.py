"""TQC and REDQ: what they draw, leave out and average, in NumPy on linear networks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun, drawn_anew, five_steps
from toys_by_hand import beside, linear, squashed
from toys_draws import drawn

import jaxrl
from jaxrl.agents.sac import lowest_of_subset

KEY = jax.random.key(0)
BOX = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (3,)), jaxrl.Box(-1.0, 1.0, (2,)))
SIZE, TEMPERATURE = 5, 0.5
RNG = np.random.default_rng(3)
NOISE = RNG.normal(size=(2, SIZE, 2)).astype(np.float32)
"""How far actions lie from the mean: those that the policy learns from, and those after a step."""
PLAIN: dict[str, Any] = {
    "features": (), "critic_features": (), "optimizer": "sgd", "temperature": TEMPERATURE, "learn_temperature": False,
}  # fmt: skip
TQC = {"quantiles": 3, "drop_quantiles": 1, "num_critics": 2}


@functools.cache
def updated(seed: int = 0, choice: tuple[int, ...] = (), **settings: Any) -> tuple[Any, Any, Any]:
    """Return a state with all parameters drawn anew, that after an update from it, and the update's metrics."""
    agent = jaxrl.sac(**{**PLAIN, **settings})(BOX)
    state = drawn_anew(agent, "policy", "critic", "target")
    draws = {"choice": [jnp.asarray(choice)]} if choice else {}
    with drawn(normal=[NOISE[1], NOISE[0]], **draws):
        after, metrics, _ = jax.jit(agent.update)(state, five_steps(), jax.random.key(seed), jnp.uint32(0))
    return state, after, metrics


def acted(state: Any, obs: Any, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return observations with the actions drawn there, `[B, 5]`, and their log-probabilities, `[B]`."""
    action, log_p = squashed(linear(state.policy, obs), noise)
    return beside(obs, action), log_p


def taken() -> np.ndarray:
    return beside(five_steps().items.obs, five_steps().items.action)


def quantile_huber(z: np.ndarray, samples: np.ndarray) -> float:
    """Return the mean over quantiles `[M]` and samples `[S]`, a pair at a time."""
    total = 0.0
    for i, value in enumerate(z):
        for sample in samples:
            error = sample - value
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs((i + 0.5) / len(z) - (error < 0)) * huber
    return total / (len(z) * len(samples))


# --- TQC ----------------------------------------------------------------------------------------------------------


def test_an_update_of_tqc_is_that_worked_by_hand() -> None:
    state, _, metrics = updated(**TQC, lr=0.0)
    items = five_steps().items
    x, log_p = acted(state, items.next_obs, NOISE[1])
    together = np.sort(np.moveaxis(linear(state.target, x), 0, 1).reshape(SIZE, 6), axis=1)[:, :4]
    soft = together - TEMPERATURE * log_p[:, None]
    samples = np.asarray(items.reward)[:, None] + np.asarray(items.discount)[:, None] * soft
    z = linear(state.critic, taken())
    loss = [sum(quantile_huber(critic[row], samples[row]) for critic in z) for row in range(SIZE)]
    np.testing.assert_allclose(metrics["loss"], np.mean(loss), rtol=1e-5)
    np.testing.assert_allclose(metrics["q"], z.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["td_error"], np.abs(samples.mean(1)[None] - z.mean(2)).mean(), rtol=1e-4)
    # The policy improves the mean of all quantiles, of which none is left out.
    x, log_p = acted(state, items.obs, NOISE[0])
    value = linear(state.critic, x).mean((0, 2)) - TEMPERATURE * log_p
    np.testing.assert_allclose(metrics["policy_loss"], -value.mean(), rtol=1e-5)


def test_the_value_of_a_policy_of_tqc_is_the_mean_of_its_quantiles() -> None:
    agent = jaxrl.sac(**{**PLAIN, **TQC})(BOX)
    state, items = begun(agent.init), five_steps().items
    assert agent.policy_fns.value is not None
    value = agent.policy_fns.value(state, items.obs, items.action)
    np.testing.assert_allclose(value, linear(state.critic, taken()).mean((0, 2)), rtol=1e-4, atol=1e-6)


# --- REDQ ---------------------------------------------------------------------------------------------------------


def redq_loss(state: Any, subset: tuple[int, ...]) -> float:
    items = five_steps().items
    x, log_p = acted(state, items.next_obs, NOISE[1])
    v_t = linear(state.target, x)[list(subset), :, 0].min(0) - TEMPERATURE * log_p
    target = np.asarray(items.reward) + np.asarray(items.discount) * v_t
    return float((0.5 * (target[None] - linear(state.critic, taken())[..., 0]) ** 2).sum(0).mean())


@pytest.mark.parametrize(("subset", "critics"), [((0, 1), 3), ((2, 0), 3), ((0, 1), 2)])
def test_an_update_of_redq_takes_the_lowest_of_the_critics_drawn_and_improves_the_mean_of_all(subset, critics) -> None:
    state, _, metrics = updated(choice=subset, num_critics=critics, critic_subset=2, lr=0.0)
    np.testing.assert_allclose(metrics["loss"], redq_loss(state, subset), rtol=1e-5)
    x, log_p = acted(state, five_steps().items.obs, NOISE[0])
    value = linear(state.critic, x)[..., 0].mean(0) - TEMPERATURE * log_p
    np.testing.assert_allclose(metrics["policy_loss"], -value.mean(), rtol=1e-5)


def test_subsets_are_drawn_without_repetition_each_as_often_as_the_others() -> None:
    """With values of one critic each, the lowest of two tells which pair it was, but for the largest of three."""
    outputs = jnp.array([[[1.0]], [[2.0]], [[4.0]]])
    lowest = jax.vmap(lambda key: lowest_of_subset(key, 2, outputs))(jax.random.split(KEY, 3_000))
    counts = [float((lowest == value).mean()) for value in (1.0, 2.0, 4.0)]
    np.testing.assert_allclose(counts, [2 / 3, 1 / 3, 0.0], atol=0.03)
