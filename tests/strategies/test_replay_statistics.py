"""Replay keeps what the environment gave, and scales a batch by the statistics of when it is used.

The environment climbs for ever: its step `t` shows `t` and pays `t`. So of a batch that is scaled by one set of
moments, whole numbers come back; one whose rows were scaled as they came would give others.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_steps import KEY, stepped

import jaxrl
from jaxrl.agents import Agent
from jaxrl.processors import (
    Processor,
    carry_memory,
    chain,
    frame_stack,
    n_step,
    normalise_obs,
    normalise_reward,
    one_step,
)
from jaxrl.processors.base import dummy_step
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import RecurrentObs, Transition

SPACES = Box(-1e9, 1e9, (1,)), Discrete(2)


def climbing() -> jaxrl.Env:
    def step(state: Any, action: Any, key: Any) -> Any:
        return state + 1, jaxrl.TimeStep((state + 1)[None], state, False)

    return jaxrl.Env(EnvSpec("Climbing", *SPACES, None), lambda key: (jnp.float32(0), jnp.zeros(1)), step)


def witness(spec: EnvSpec) -> Agent:
    """Make an agent that keeps the last batch, and what it last saw."""
    nothing = jnp.zeros((16,))
    return Agent(
        "witness",
        init=lambda key: {"obs": nothing, "next_obs": nothing, "reward": nothing},
        act=lambda state, obs, key, opt_step, mode: (jnp.zeros(obs.shape[0], jnp.int32), ()),
        update=lambda state, batch, key, opt_step: (
            {
                "obs": batch.items.obs[:, 0],
                "next_obs": batch.items.next_obs[:, 0],
                "reward": batch.items.reward,
            },
            {},
            jnp.zeros(batch.weight.shape),
        ),
        strip=lambda state: state,
    )


def witnessed(processor: Processor, **settings: Any) -> jaxrl.Strategy:
    settings = {"num_envs": 1, "opt_interval": 1, "warmup": 16, "buffer": jaxrl.uniform(1_000, 16), **settings}
    return jaxrl.off_policy(climbing(), witness, processor=processor, **settings)


def trained(processor: Processor, steps: int = 100, **settings: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the last batch, and all observations up to then."""
    strategy = witnessed(processor, **settings)
    _, state, _ = stepped(strategy, steps)
    return jax.tree.map(np.asarray, state.agent), np.arange(strategy.warmup_env_steps + steps + 1.0)


def assert_whole(numbers: np.ndarray) -> None:
    np.testing.assert_allclose(numbers, np.round(numbers), atol=1e-3)


def test_observations_of_any_age_are_scaled_alike() -> None:
    batch, seen = trained(chain(normalise_obs(), one_step()))
    obs, next_obs = (batch[name] * seen.std() + seen.mean() for name in ("obs", "next_obs"))
    assert_whole(obs)
    np.testing.assert_allclose(next_obs - obs, 1, atol=1e-3)
    assert obs.min() >= -1e-3
    assert obs.max() < len(seen)
    assert np.ptp(obs) > 50


@pytest.mark.every_day("3")
@pytest.mark.parametrize("n", [1, 3])
def test_rewards_of_any_age_are_divided_alike(n: int) -> None:
    """With a discount of 0 the sums whose deviation counts are the rewards themselves."""
    batch, seen = trained(chain(normalise_reward(0.0), n_step(n, 0.5)))
    paid = seen[:-1]
    reward = batch["reward"] * paid.std()
    first = (reward - {1: 0, 3: 0.5 + 0.25 * 2}[n]) / {1: 1, 3: 1.75}[n]  # r + (r + 1) / 2 + (r + 2) / 4
    assert_whole(first)
    assert np.ptp(first) > 50


def test_both_and_what_stands_before_them() -> None:
    processor = chain(frame_stack(2), normalise_obs(), jaxrl.reward_scale(2.0), normalise_reward(0.0), one_step())
    batch, seen = trained(processor)
    assert_whole(batch["reward"] * seen[:-1].std())
    older = np.concatenate([[0], seen[:-1]])  # the first observation fills the stack
    assert_whole(batch["obs"] * older.std() + older.mean())


def test_what_is_changed_behind_a_normaliser_is_scaled_as_it_comes() -> None:
    for processor in (
        chain(normalise_obs(), frame_stack(2), one_step()),
        chain(normalise_reward(), jaxrl.reward_clip(1.0), one_step()),
    ):
        assert processor.replay_fns is None
        init, step = witnessed(processor)[:2]
        jax.eval_shape(lambda key, init=init, step=step: step(init(key), key, jnp.uint32(0)), KEY)


# Slow: every day it is the strategies above, whose halves of a step a session calls.
@pytest.mark.slow
def test_a_session_scales_alike() -> None:
    session = jaxrl.Session(
        EnvSpec("Climbing", *SPACES, None),
        witness,
        buffer=jaxrl.uniform(1_000, 16),
        processor=chain(normalise_obs(), normalise_reward(0.0), one_step()),
        num_envs=1,
        opt_interval=1,
        warmup=16,
        max_opts=100,
    )
    for t in range(80):
        session.act(np.float32([t]))
        session.observe(float(t), np.float32([t + 1]), False, False)
    batch, seen = jax.tree.map(np.asarray, session.policy.params.agent), np.arange(81.0)
    assert_whole(batch["obs"] * seen.std() + seen.mean())
    assert_whole(batch["reward"] * seen[:-1].std())


def test_demonstrations_are_scaled_as_experience_is() -> None:
    """They climb from 1 000, and what the run itself has seen decides how they are scaled."""
    obs = np.arange(1_000, 1_008, dtype=np.float32)[:, None]
    demos = jaxrl.Dataset(
        EnvSpec("Climbing", *SPACES, None),
        obs=obs,
        action=np.zeros(8, np.int32),
        reward=np.zeros(8, np.float32),
        next_obs=obs + 1,
        terminated=np.arange(8) == 7,
        truncated=np.zeros(8, bool),
    )
    ring = jaxrl.uniform(1_000, 8)
    batch, seen = trained(chain(normalise_obs(), one_step()), buffer=ring, demos=demos, steps=300)
    whole = batch["obs"] * seen.std() + seen.mean()
    assert_whole(whole)
    assert (whole[:8] < len(seen)).all()
    assert (whole[8:] >= 999).all()


def test_a_memory_beside_the_observation_stays_as_it_is() -> None:
    processor = carry_memory(chain(normalise_obs(), one_step()).for_replay, jnp.zeros(2))
    assert processor.apply is not None
    first = np.random.default_rng(0).normal(5.0, 3.0, (50, 1)).astype(np.float32)
    blank = np.zeros((3, 4), np.float32)
    sequence = np.random.default_rng(1).normal(5.0, 3.0, (3, 4, 1)).astype(np.float32)
    seen = RecurrentObs(sequence, np.full((3, 4, 2), 7.0, np.float32))

    @jax.jit
    def scaled(first: Any, seen: Any) -> Any:
        step = dummy_step(first, jnp.zeros(50), {"memory": jnp.ones((50, 2))})
        state, *_ = processor.process(processor.init(first), step)
        return processor.apply(state, Transition(seen, (), blank, blank, seen))

    out = scaled(first, seen)
    np.testing.assert_allclose(out.obs.obs, (sequence - first.mean()) / first.std(), rtol=1e-4)
    np.testing.assert_array_equal(out.next_obs.memory, seen.memory)
