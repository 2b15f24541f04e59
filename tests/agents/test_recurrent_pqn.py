"""PQN with a core: targets and errors of rollouts beside a walk step by step, and what it learns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import drawn_anew

import jaxrl
from jaxrl.agents.returns import last_steps
from jaxrl.nn import Core, QNetwork, Recurrent
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Batch, RecurrentObs, Rollout, Transition

OBS, ACTIONS, WIDTH, T, N, LAMBDA = Box(-1.0, 1.0, (2,)), 3, 4, 6, 2, 0.7
SPEC = EnvSpec("Toy", OBS, Discrete(ACTIONS))
KEY = jax.random.key(0)


def rollout_of(agent: Any) -> Rollout:
    """Return two rows of steps, with an episode that ends in each, once by a time limit; one step has no weight."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(T, N, *shape)).astype(np.float32)
    kept = lambda: jax.tree.map(lambda x: draw(*x.shape), agent.memory)
    begins, ends = np.zeros((T, N), bool), np.zeros((T, N), bool)
    begins[3, 0] = begins[2, 1] = True
    ends[2, 0] = ends[1, 1] = True
    discount = np.full((T, N), 0.9, np.float32)
    discount[2, 0] = 0.0
    weight = np.ones((T, N), np.float32)
    weight[4, 1] = 0.0
    now, then = RecurrentObs(draw(2), kept()), RecurrentObs(draw(2), kept())
    action = rng.integers(0, ACTIONS, (T, N)).astype(np.int32)
    items = jax.tree.map(jnp.asarray, Transition(now, action, draw(), discount, then, (), weight, begins, ends))
    return Rollout(items, last_steps(items))


@pytest.mark.every_day("gru")
@pytest.mark.parametrize("core", ["gru", "mingru"])
def test_targets_and_errors_are_those_of_a_walk_through_the_rollout(core: str) -> None:
    settings = {"core": core, "core_features": WIDTH, "features": (5,), "q_lambda": LAMBDA, "lr": 0.0}
    agent = jaxrl.pqn(**settings)(SPEC)
    hidden = Box(-jnp.inf, jnp.inf, (WIDTH,))
    head = QNetwork(hidden, ACTIONS, "mlp", ())
    apply = jax.jit(Recurrent(head, OBS, Core(core, WIDTH), features=(5,), layer_norm=True).apply)
    state, rollout = drawn_anew(agent, "params"), rollout_of(agent)
    items = jax.tree.map(np.asarray, rollout.items)
    sample = jax.tree.map(np.asarray, jax.jit(agent.prepare)(state, rollout))
    assert sample.target.shape == (N, T)
    held = np.zeros((N, T))
    for n in range(N):
        memory = jax.tree.map(lambda x, n=n: x[0, n][None], items.obs.memory)
        best = []
        for t in range(T):
            memory = jax.tree.map(lambda x: x * 0, memory) if items.is_first[t, n] else memory
            q, memory = apply(state.params, RecurrentObs(items.obs.obs[t, n][None], memory))
            held[n, t] = q[0, items.action[t, n]]
            # The successor is seen with the memory that was stored for it: no parameter changes during a rollout.
            stored = jax.tree.map(lambda x, t=t, n=n: x[t, n][None], items.next_obs.memory)
            best.append(float(apply(state.params, RecurrentObs(items.next_obs.obs[t, n][None], stored))[0].max()))
        target = 0.0
        for t in reversed(range(T)):
            after = best[t] if t == T - 1 or bool(rollout.last[t, n]) else LAMBDA * target + (1 - LAMBDA) * best[t]
            target = items.reward[t, n] + items.discount[t, n] * after
            np.testing.assert_allclose(sample.target[n, t], target, rtol=1e-4, atol=1e-5)
    batch = Batch(sample, np.arange(N, dtype=np.int32), np.ones(N, np.float32))
    metrics = jax.jit(lambda state, batch: agent.update(state, batch, KEY, jnp.uint32(0))[1])(state, batch)
    error = (sample.target - held) * items.weight.T
    np.testing.assert_allclose(metrics["td_error"], np.abs(error)[items.weight.T > 0].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], (np.square(error) / 2).mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "lru", "s5", "mingru", "minlstm", "gla", "trxl", "gtrxl"])
def test_every_core_recalls_what_no_agent_without_one_can(core: str) -> None:
    """A symbol of four after ten blank steps: 1 with a memory, 1/4 without."""
    env = jaxrl.make_env("memory:Recall", length=10)
    agent = jaxrl.pqn(core=core, core_features=32, features=(32,), lr=1e-3, epsilon_decay=500)
    strategy = jaxrl.on_policy(env, agent, num_envs=32, rollout=48)
    trainer = jaxrl.Trainer(
        strategy, max_opts=4_800, eval_interval=160, eval_episodes=100, stop_reward=0.95, quiet=True
    )
    assert trainer.train().summary["best_score"] >= 0.95
