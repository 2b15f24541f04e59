"""Numbers that a long run, an unusual state or a single sample must not spoil, beside those of NumPy and by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import DISCRETE
from toys_envs import constant_reward

import jaxrl
from jaxrl.agents import Agent
from jaxrl.metrics import Stat, Total
from jaxrl.processors import normalise_obs, normalise_reward
from jaxrl.types import Batch, Rollout, Step, Transition

# --- counts beyond what a float32 or an int32 can hold ---------------------------------------------------------------

BEFORE, STEPS = 2**26, 2**16


def after(processor: Any, obs: Any, rewards: Any, moments: Any) -> Any:
    """Return what `processor` has learnt after a step for each row of `obs` and `rewards`, given `moments` before."""
    no = jnp.zeros(1, bool)

    def one(state: Any, row: Any) -> tuple[Any, None]:
        seen, reward = row
        step = Step(no, (), reward, no, no, seen, seen, valid=~no, obs_valid=~no)
        return processor.process(state, step)[0], None

    state = processor.init(jnp.zeros((1, 2), jnp.float32))
    state = state._replace(moments=moments(state.moments))
    return jax.jit(lambda state: jax.lax.scan(one, state, (obs, rewards))[0])(state).moments


def long_ago(moments: Any) -> Any:
    """Return moments after `BEFORE` entries of mean 0 and variance 1."""
    full = lambda x, value: jnp.full(x.shape, value, jnp.float32)
    return moments._replace(count=jnp.float32(BEFORE), squares=full(moments.squares, BEFORE))


def test_observations_are_counted_beyond_what_a_float_can_count_one_by_one() -> None:
    rows = np.random.default_rng(0).normal(3.0, 2.0, (STEPS, 1, 2)).astype(np.float32)
    (moments,) = after(normalise_obs(), rows, np.zeros((STEPS, 1), np.float32), lambda one: (long_ago(one[0]),))
    exact, count = rows[:, 0].astype(np.float64), BEFORE + STEPS
    mean = exact.sum(0) / count
    assert int(moments.count) == count
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(moments.variance, (BEFORE + (exact**2).sum(0)) / count - mean**2, rtol=1e-6)


def test_rewards_are_counted_so_too() -> None:
    rewards = np.full((STEPS, 1), 2.0, np.float32)
    moments = after(normalise_reward(0.5), np.zeros((STEPS, 1, 2), np.float32), rewards, long_ago)
    sums = 4.0 * (1 - 0.5 ** np.arange(1, STEPS + 1, dtype=np.float64))  # of rewards of 2, discounted by a half
    count = BEFORE + STEPS
    assert int(moments.count) == count
    np.testing.assert_allclose(
        moments.variance, (BEFORE + (sums**2).sum()) / count - (sums.sum() / count) ** 2, rtol=1e-6
    )


class Alone(NamedTuple):
    """The least that can be trained."""

    key: Any


def test_a_row_counts_beyond_2_to_the_32() -> None:
    each = 2**30

    def step(state: Alone, key: Any, t: Any) -> tuple[Alone, Any]:
        lived = Stat(jnp.int32(each), jnp.float32(each / 2), jnp.float32(0), jnp.float32(1))
        return state, {"counted": Total(jnp.int32(each)), "lived": lived}

    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.Strategy(Alone, step, 1, 1)
    options = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": [memory]}
    jaxrl.Trainer(strategy, max_opts=7, record_interval=7, **options).train()
    (row,) = (row for row in memory.rows if "counted" in row)
    assert row["counted"] == 7 * each
    assert row["lived"] == 0.5


# --- infinities on purpose -------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """The smallest and the largest reward so far, from infinity on, and a parameter."""

    low: Any
    high: Any
    never: Any
    weight: Any


def bounding() -> Any:
    """Return an agent that keeps bounds of rewards, and whose parameter is NaN after update 3."""

    def update(state: Bounds, batch: Batch, key: Any, opt_step: Any) -> tuple[Bounds, Any, Any]:
        reward = batch.items.reward
        weight = jnp.where(opt_step == 3, jnp.nan, state.weight + 1)
        low, high = jnp.minimum(state.low, reward.min()), jnp.maximum(state.high, reward.max())
        return Bounds(low, high, state.never, weight), {"loss": jnp.float32(0)}, batch.weight

    infinite = jnp.float32(jnp.inf)
    init = lambda key: Bounds(infinite, -infinite, infinite, jnp.float32(0))
    act = lambda state, obs, key, opt_step, mode: (jnp.zeros(obs.shape[0], jnp.int32), ())
    return lambda spec: Agent("bounding", init, act, update, strip=lambda state: state)


def test_an_agent_may_keep_infinities_but_not_make_a_number_one() -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.off_policy(
        constant_reward(0.5), bounding(), buffer=jaxrl.uniform(16, 4), num_envs=2, warmup=8, opt_interval=2
    )
    options = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": [memory]}
    result = jaxrl.Trainer(strategy, max_opts=6, record_interval=6, **options).train()
    assert [float(x) for x in result.state.agent] == [0.5, 0.5, np.inf, 5]
    assert sum(row.get("skipped_updates", 0) for row in memory.rows) == 1


# --- a single sample -------------------------------------------------------------------------------------------------


@pytest.mark.every_day("batch")
@pytest.mark.parametrize("normalise", ["minibatch", "batch"])
def test_the_advantage_of_a_single_sample_is_left_as_it_is(normalise: str) -> None:
    """At an episode's end it is the reward less the value; the loss of a policy not yet changed is minus that."""
    agent = jaxrl.ppo(features=(4,), normalise_advantage=normalise)(DISCRETE)

    @jax.jit
    def first_update(key: Any) -> Any:
        state, obs, one = agent.init(key), jnp.ones((1, 3), jnp.float32), jnp.ones(1, jnp.float32)
        action, extras = agent.act(state, obs, key, jnp.uint32(0), "explore")
        item = Transition(obs, action, 3.0 * one, 0.0 * one, obs, extras, one)
        sample = agent.prepare(state, Rollout(jax.tree.map(lambda x: x[None], item), jnp.ones((1, 1), bool)))
        return agent.update(state, Batch(sample, jnp.zeros(1, jnp.int32), one), key, jnp.uint32(0))[1]

    metrics = first_update(jax.random.key(0))
    np.testing.assert_allclose(metrics["policy_loss"], metrics["value"] - 3.0, rtol=1e-5)
