"""Recurrent TD3 on sequences of replay: an update beside a walk step by step, and what is refused."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import drawn_anew
from toys_sequences import BURN, KEY, WIDTH, B, L, T, Walk, batch_of, one_of, updating

import jaxrl
from jaxrl.nn import Core, Critic, PolicyNetwork, Recurrent
from jaxrl.spaces import Box, EnvSpec

OBS = Box(-1.0, 1.0, (2,))
SPEC = EnvSpec("Toy", OBS, Box((-2.0, 0.0), (4.0, 0.5), (2,)))
STEPS, NOISE, CLIP = 3, 0.4, 0.3
"""Steps of a return; standard deviation and bound of the target policy's noise."""


@cache
def agent_of(core: str) -> Any:
    plain: dict[str, Any] = {"features": (5,), "core_features": WIDTH, "burn_in": BURN, "sequence": T, "n_step": STEPS}
    rates = {"lr": 0.05, "policy_lr": 0.05, "optimizer": "sgd", "target_noise": NOISE, "target_noise_clip": CLIP}
    return jaxrl.td3(core=core, **plain, **rates)(SPEC)


def plain_calls(core: str) -> tuple[Any, Any]:
    """Return the plain calls of the policy's network and of one critic's, compiled."""
    hidden = Box(-jnp.inf, jnp.inf, (WIDTH,))
    policy = Recurrent(PolicyNetwork(hidden, 2, "mlp", ()), OBS, Core(core, WIDTH), features=(5,))
    critic = Recurrent(Critic(hidden, 1, "mlp", (5,)), OBS, Core(core, WIDTH), features=())
    return jax.jit(policy.apply), jax.jit(critic.apply)


@pytest.mark.every_day("mingru")
@pytest.mark.parametrize("core", ["gru", "mingru", "s5"])
def test_an_update_sees_what_a_walk_through_the_sequences_finds(core: str) -> None:
    """Optimisation step 3, counted from 0, is one after which the policy is updated as well."""
    agent, (policy, critic) = agent_of(core), plain_calls(core)
    state = drawn_anew(agent, "policy", "critic", "target_policy", "target_critic")
    batch = batch_of(agent, SPEC.action_space)
    new, metrics, priorities = updating(agent)(state, batch)
    items = jax.tree.map(np.asarray, batch.items)
    noise = np.clip(NOISE * np.asarray(jax.jit(lambda: jax.random.normal(KEY, (B * T, 2)))()), -CLIP, CLIP)
    error, loss = np.zeros((B, T)), np.zeros((B, T))
    for b in range(B):
        weight, first = items.weight[b], jax.tree.map(lambda x, b=b: x[b, 0], items.obs.memory)
        walk = lambda apply, params, memory, *action, b=b: Walk(apply, params, memory, items, b, *action)
        memory_of = lambda k, first=first: jax.tree.map(lambda x: x[k], first.critic)
        nothing = jnp.zeros((1, 2))
        actor = walk(policy, state.target_policy, first.policy)
        critics = [walk(critic, one_of(state.critic, k), memory_of(k), nothing) for k in range(2)]
        targets = [walk(critic, one_of(state.target_critic, k), memory_of(k), nothing) for k in range(2)]
        for t in range(BURN, L):
            aim, factor = 0.0, 1.0
            for end in range(t, min(t + STEPS, L)):
                aim += factor * float(items.reward[b, end])
                factor *= float(items.discount[b, end])
                if end + 1 in (L, t + STEPS) or items.is_first[b, end + 1] or weight[end + 1] == 0:
                    break
            # Smoothed, the target policy's action is still one that can be taken.
            action = np.clip(np.tanh(actor.then(end)) + noise[b * T + end - BURN], -1, 1)[None]
            aim += factor * min(float(each.then(end, jnp.asarray(action, jnp.float32))[0]) for each in targets)
            unit = (items.action[b, t] - np.array([1.0, 0.25])) / np.array([3.0, 0.25])
            held = [float(each.now(t, jnp.asarray(unit[None], jnp.float32))[0]) for each in critics]
            errors = (aim - np.array(held)) * weight[t]
            error[b, t - BURN], loss[b, t - BURN] = np.abs(errors).mean(), np.square(errors).sum() / 2
    np.testing.assert_allclose(priorities, 0.9 * error.max(1) + 0.1 * error.mean(1), rtol=2e-4)
    np.testing.assert_allclose(metrics["td_error"], error[items.weight[:, BURN:] > 0].mean(), rtol=2e-4)
    np.testing.assert_allclose(metrics["loss"], (np.asarray(batch.weight)[:, None] * loss).mean(), rtol=2e-4)
    moved = lambda part: max(
        float(np.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(getattr(new, part)), jax.tree.leaves(getattr(state, part)), strict=True)
    )
    assert all(moved(part) > 0 for part in ("policy", "critic", "target_policy", "target_critic"))
    # The policy learns through its own memory: a gradient reaches the core, though the head alone chooses the action.
    before, after = (jax.tree.leaves(s.policy["params"]["core"]) for s in (state, new))
    assert all(float(np.abs(a - b).max()) > 0 for a, b in zip(before, after, strict=True))
