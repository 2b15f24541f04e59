"""What actors learn of rewards they share, as they do what they learn of observations; and what critics remember."""

from pathlib import Path

import jax
import numpy as np
import pytest
from toys_actors import DISCOUNT, QUIET, counter, replaying, rollouts, shared_state, train
from toys_gymnasium import Counting

import jaxrl


def sums_of_one(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards of an environment that counts, and their discounted sums so far, of so many steps."""
    env, rewards, sums, total = Counting(), [], [], 0.0
    env.reset()
    for _ in range(steps):
        _, reward, terminated, truncated, _ = env.step(5)
        total = DISCOUNT * total + reward
        rewards.append(reward)
        sums.append(total)
        if terminated or truncated:
            total, _ = 0.0, env.reset()
    return np.array(rewards), np.array(sums)


@pytest.mark.every_day("2-2-6-3")
@pytest.mark.parametrize(("actors", "lag", "sync", "n"), [(1, 2, 6, 1), (2, 1, 1, 1), (2, 2, 6, 3)])
def test_statistics_of_rewards_are_of_all_that_was_taken_up_and_replay_keeps_what_environments_paid(
    actors: int, lag: int, sync: int, n: int
) -> None:
    """All environments pay the same, so that the deviation of all sums is that of one environment's."""
    strategy, state, steps = shared_state(actors, lag, sync, n)
    envs = 2 * actors
    rewards, sums = sums_of_one(steps)
    moments = state.processor[1].moments
    assert float(moments.count) == envs * steps
    np.testing.assert_allclose(moments.mean, sums.mean(), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, sums.var(), rtol=1e-4)
    # They are of the training alone: a policy sees no rewards, and its parameters have none of them.
    assert strategy.policy.params(state).processor[1:] == ((), ())
    if actors > 1:
        return
    kept = np.asarray(state.buffer.items.reward)[: steps * envs].reshape(-1)
    np.testing.assert_array_equal(kept, np.repeat(rewards, envs))


@pytest.mark.slow
def test_what_was_learnt_of_rewards_is_taken_up_again_by_a_run_that_goes_on(tmp_path: Path) -> None:
    scaled = jaxrl.chain(jaxrl.normalise_reward(DISCOUNT), jaxrl.n_step(1, discount=DISCOUNT))
    strategy, settings = rollouts(counter(), processor=scaled), {**QUIET, "run_dir": str(tmp_path)}
    first = jaxrl.Trainer(strategy, max_opts=8, **settings).train().state
    later = jaxrl.Trainer(strategy, max_opts=16, resume=True, **settings).train().state
    count = lambda state: float(state.processor[0].moments.count)
    assert (count(first), count(later)) == (4 * 16, 2 * 4 * 16)


@pytest.mark.slow
def test_actors_send_the_memories_that_critics_have_of_their_episodes() -> None:
    """At a learning rate of 0, those after a step are what the learner's own critics make of the step."""
    agent = jaxrl.sac(features=(8,), core="gru", core_features=4, burn_in=1, sequence=3, lr=0.0, policy_lr=0.0)
    strategy = replaying(counter(), agent=agent)
    state = train(strategy, 8).state
    written = strategy.warmup_env_steps + 8 // strategy.opt_steps_per_step * strategy.env_steps_per_step
    items = jax.tree.map(lambda x: x[: min(written, 128)], state.buffer.items)
    bound = agent(strategy.policy.spec)
    after = jax.jit(lambda s, obs: bound.act(s, obs, None, np.uint32(0), "exploit")[1])(state.agent, items.obs)
    for made, kept in zip(jax.tree.leaves(after["memory"]), jax.tree.leaves(items.next_obs.memory), strict=True):
        np.testing.assert_allclose(made, kept, rtol=1e-4, atol=1e-6)
    assert all(np.abs(x).max() > 0.01 for x in jax.tree.leaves(items.obs.memory))
    assert 0 < np.mean(items.is_first) < 1
