"""Promise 13: what one environment breaks reaches neither the agent nor the buffer nor the other environments."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_envs import BREAK, breaking, counting, rollout

import jaxrl
from jaxrl.strategies.interaction import episode_metrics, step_info

N, T, BROKEN, WHEN = 8, 30, 3, 4
"""Environments, steps, which of them breaks, and at which step."""
WHOLE = jax.random.randint(jax.random.key(2), (T, N), 0, 2)
"""Actions at which none breaks."""


def born_bad(chance: float) -> jaxrl.Env:
    """Count as `counting` does; so many episodes begin with a NaN."""
    env = counting()

    def reset(key: jax.Array) -> Any:
        state, obs = env.reset(key)
        bad = jax.random.uniform(jax.random.fold_in(key, 1)) < chance
        return state, obs.at[1].set(jnp.where(bad, jnp.nan, obs[1]))

    return env._replace(reset=reset)


def steps_of(env: jaxrl.Env, actions: jax.Array) -> Any:
    return rollout(jaxrl.vectorise(env, N), actions)[1]


@pytest.mark.parametrize("part", ["obs", "reward"])
def test_the_other_environments_are_bitwise_as_if_nothing_had_happened(part: str) -> None:
    env = breaking(part)
    whole, broken = (steps_of(env, actions) for actions in (WHOLE, WHOLE.at[WHEN, BROKEN].set(BREAK)))
    assert_alike(whole._replace(action=0), broken._replace(action=0), np.arange(N) != BROKEN)
    # The broken one was cut there, and began another episode.
    assert not broken.valid[WHEN, BROKEN]
    assert broken.truncated[WHEN, BROKEN]
    assert broken.valid.sum() == T * N - 1


def assert_alike(whole: Any, broken: Any, others: np.ndarray) -> None:
    """Check that the other environments made the very same steps, and that all numbers are finite."""
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(broken), strict=True):
        if np.ndim(a) > 1:
            np.testing.assert_array_equal(a[:, others], b[:, others])
            assert np.isfinite(np.asarray(b, float)).all()


def test_what_an_environment_reports_of_an_invalid_step_is_in_no_mean() -> None:
    """Each step reports its reward, from 1 to 5, or NaN in the step that breaks."""
    env = breaking("reward")

    def step(state: Any, action: jax.Array, key: Any) -> Any:
        state, out = env.step(state, action, key)
        return state, out._replace(info={"reward": out.reward})

    steps = steps_of(env._replace(step=step), jnp.zeros((T, N), jnp.int32).at[WHEN, BROKEN].set(BREAK))
    reported = episode_metrics(jax.vmap(step_info)(steps))["info/reward"]
    valid = steps.reward[steps.valid]
    assert (int(reported.count), float(reported.sum)) == (T * N - 1, valid.sum())
    assert (float(reported.min), float(reported.max)) == (1.0, 5.0)


def test_an_episode_that_begins_with_a_nan_is_cut_at_once_and_the_others_are_bitwise_as_without_it() -> None:
    whole, some = (steps_of(born_bad(chance), WHOLE) for chance in (0.0, 0.08))
    bad = ~some.valid
    # What is left by an invalid step is the first observation of an episode: that of the reset, or after an end.
    np.testing.assert_array_equal(bad[1:], ~some.obs_valid[:-1])
    assert bad.sum() >= 3
    np.testing.assert_array_equal(some.obs[:-1][bad[1:]], 0)
    assert some.truncated[bad].all()
    np.testing.assert_array_equal(some.info["episode_length"][bad], 1)
    np.testing.assert_array_equal(some.reward[bad], 0)
    others = some.valid.all(0) & some.obs_valid.all(0)
    assert 0 < others.sum() < N
    assert_alike(whole, some, others)


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


def test_nothing_that_is_not_finite_is_in_the_buffer_or_the_agent() -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.off_policy(
        breaking("obs"),
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
        breaking(part), agent(features=(8,)), processor=processor, num_envs=4, rollout=8, minibatches=2
    )
    result = jaxrl.Trainer(strategy, max_opts=80, eval_interval=0, eval_episodes=0, recorders=[memory]).train()
    row = memory.rows[-1]
    assert row["invalid_steps"] > 20
    assert row["skipped_updates"] == 0
    for leaf in jax.tree.leaves((result.state.processor, result.state.agent)):
        assert np.isfinite(np.asarray(leaf, float)).all()
