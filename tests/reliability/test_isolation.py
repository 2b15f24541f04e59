"""Promise 13: what one environment breaks reaches neither the agent nor the buffer nor the other environments."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.strategies.interaction import episode_metrics, step_info

N, T, BROKEN, WHEN = 8, 30, 3, 4
"""Environments, steps, which of them breaks, and at which step."""
BREAK = 2


def fragile(part: str) -> jaxrl.Env:
    """CartPole with a third action, at which its observation or reward is NaN."""
    env = jaxrl.make_env("CartPole-v1")

    def step(state: Any, action: jax.Array, key: Any) -> Any:
        state, out = env.step(state, jnp.minimum(action, 1), key)
        nan = jnp.where(action == BREAK, jnp.nan, 0.0)
        return state, out._replace(**{part: getattr(out, part) + nan})

    return env._replace(spec=env.spec._replace(action_space=jaxrl.Discrete(3)), step=step)


def born_bad(chance: float) -> jaxrl.Env:
    """CartPole of which so many episodes begin with a NaN."""
    env = jaxrl.make_env("CartPole-v1")

    def reset(key: jax.Array) -> Any:
        state, obs = env.reset(key)
        bad = jax.random.uniform(jax.random.fold_in(key, 1)) < chance
        return state, obs.at[1].set(jnp.where(bad, jnp.nan, obs[1]))

    return env._replace(reset=reset)


def rollout(env: jaxrl.Env, actions: jax.Array) -> Any:
    vec = jaxrl.vectorise(env, N)
    state, _ = vec.reset(jax.random.key(0))

    def one(state: Any, given: Any) -> Any:
        action, key = given
        return vec.step(state, action, key)

    return jax.jit(lambda s: jax.lax.scan(one, s, (actions, jax.random.split(jax.random.key(1), T)))[1])(state)


@pytest.mark.parametrize("part", ["obs", "reward"])
def test_the_other_environments_are_bitwise_as_if_nothing_had_happened(part: str) -> None:
    actions = jax.random.randint(jax.random.key(2), (T, N), 0, 2)
    whole = rollout(fragile(part), actions)
    broken = rollout(fragile(part), actions.at[WHEN, BROKEN].set(BREAK))
    others = np.arange(N) != BROKEN
    for a, b in zip(jax.tree.leaves(whole._replace(action=0)), jax.tree.leaves(broken._replace(action=0)), strict=True):
        if np.ndim(a) > 1:
            np.testing.assert_array_equal(np.asarray(a)[:, others], np.asarray(b)[:, others])
            assert np.isfinite(np.asarray(b, float)).all()
    # The broken one was cut there, and began another episode.
    assert not np.asarray(broken.valid)[WHEN, BROKEN]
    assert np.asarray(broken.truncated)[WHEN, BROKEN]
    assert np.asarray(broken.valid).sum() == T * N - 1


def test_what_an_environment_reports_of_an_invalid_step_is_in_no_mean() -> None:
    """Each step reports its reward, which is 1, or NaN in the step that breaks."""
    env = fragile("reward")

    def step(state: Any, action: jax.Array, key: Any) -> Any:
        state, out = env.step(state, action, key)
        return state, out._replace(info={"reward": out.reward})

    actions = jnp.zeros((T, N), jnp.int32).at[WHEN, BROKEN].set(BREAK)
    reported = episode_metrics(jax.vmap(step_info)(rollout(env._replace(step=step), actions)))["info/reward"]
    assert (int(reported.count), float(reported.sum)) == (T * N - 1, T * N - 1)
    assert (float(reported.min), float(reported.max)) == (1.0, 1.0)


def test_an_episode_that_begins_with_a_nan_is_cut_at_once_and_the_others_are_bitwise_as_without_it() -> None:
    actions = jax.random.randint(jax.random.key(2), (T, N), 0, 2)
    whole, some = (rollout(born_bad(chance), actions) for chance in (0.0, 0.15))
    bad = ~np.asarray(some.valid)
    # What is left by an invalid step is the first observation of an episode: that of the reset, or after an end.
    np.testing.assert_array_equal(bad[1:], ~np.asarray(some.obs_valid)[:-1])
    assert bad.sum() >= 3
    np.testing.assert_array_equal(np.asarray(some.obs)[:-1][bad[1:]], 0)
    assert np.asarray(some.truncated)[bad].all()
    np.testing.assert_array_equal(np.asarray(some.info["episode_length"])[bad], 1)
    np.testing.assert_array_equal(np.asarray(some.reward)[bad], 0)
    others = ~bad.any(0)
    assert 0 < others.sum() < N
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(some), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:, others], np.asarray(b)[:, others])
        assert np.isfinite(np.asarray(b, float)).all()


@pytest.mark.slow
def test_no_first_observation_that_is_not_finite_is_in_the_buffer_the_agent_or_the_normaliser() -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.off_policy(
        born_bad(0.3),
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(800, batch_size=8),
        processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(3)),
        num_envs=4,
        opt_interval=4,
        warmup=0,
    )
    result = jaxrl.Trainer(strategy, max_opts=180, eval_interval=0, eval_episodes=0, recorders=[memory]).train()
    row = [row for row in memory.rows if row["kind"] == "train"][-1]
    assert row["invalid_steps"] > 5
    assert row["skipped_updates"] == 0
    state = result.state
    for leaf in jax.tree.leaves((state.buffer, state.agent, state.processor)):
        assert np.isfinite(np.asarray(leaf, float)).all()
    # The normaliser has counted all first observations and successors but the spoilt ones. Each of these is left by one
    # row of weight 0, and no other row has it, for the episode before had ended; the last rows are still to come out.
    spoilt = row["env_steps"] + 4 - float(state.processor[0].moments[0].count)
    rows = np.asarray(state.buffer.items.weight).reshape(-1)[: row["env_steps"] - 4 * 2]
    assert 0 <= spoilt - (rows == 0).sum() <= 4 * 3
    assert (rows == 0).sum() > 5


@pytest.mark.every_day("obs")
@pytest.mark.parametrize("part", ["obs", "reward"])
def test_nothing_that_is_not_finite_is_in_the_buffer_or_the_agent(part: str) -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.off_policy(
        fragile(part),
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(400, batch_size=8),
        num_envs=4,
        opt_interval=4,
        warmup=0,
    )
    result = jaxrl.Trainer(strategy, max_opts=90, eval_interval=0, eval_episodes=0, recorders=[memory]).train()
    row = memory.rows[-1]
    # A third of the random actions breaks an episode; every such step is counted, and no update was spoilt by one.
    assert row["invalid_steps"] > 20
    assert row["skipped_updates"] == 0
    for leaf in jax.tree.leaves((result.state.buffer, result.state.agent)):
        assert np.isfinite(np.asarray(leaf, float)).all()
    weights = np.asarray(result.state.buffer.items.weight)
    assert 0 < weights.sum() < weights.size


@pytest.mark.slow
@pytest.mark.parametrize("part", ["obs", "reward"])
@pytest.mark.parametrize(
    "agent",
    [
        *(jaxrl.ppo, jaxrl.pqn, partial(jaxrl.ppo, core="gru"), jaxrl.a2c, jaxrl.reinforce, jaxrl.impala),
        partial(jaxrl.reppo, v_min=-10.0, v_max=10.0),
    ],
)
def test_nothing_that_is_not_finite_reaches_an_agent_that_learns_on_policy(part: str, agent: Any) -> None:
    memory = jaxrl.MemoryRecorder()
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(), jaxrl.one_step())
    strategy = jaxrl.on_policy(
        fragile(part), agent(features=(8,)), processor=processor, num_envs=4, rollout=8, minibatches=2
    )
    result = jaxrl.Trainer(strategy, max_opts=80, eval_interval=0, eval_episodes=0, recorders=[memory]).train()
    row = memory.rows[-1]
    assert row["invalid_steps"] > 20
    assert row["skipped_updates"] == 0
    for leaf in jax.tree.leaves((result.state.processor, result.state.agent)):
        assert np.isfinite(np.asarray(leaf, float)).all()
