"""The Blind Cliffwalk of Schaul et al. 2016 (https://arxiv.org/abs/1511.05952, section 3.1): when priorities pay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.buffers import Buffer
from jaxrl.nn import QNetwork
from jaxrl.strategies.base import iterate

LENGTH, DISCOUNT, SEEDS = 12, 0.9, 10


def cliffwalk() -> jaxrl.Env:
    """Walk along a cliff: one of two actions, another at every place, goes on, the other falls. The far end pays 1."""
    spec = jaxrl.EnvSpec("BlindCliffwalk", jaxrl.Discrete(LENGTH), jaxrl.Discrete(2))

    def step(place, action, key):
        right = action == place % 2
        home = right & (place == LENGTH - 1)
        after = jnp.minimum(place + 1, LENGTH - 1)
        return after, jaxrl.TimeStep(after, jnp.where(home, 1.0, 0.0), home | ~right)

    return jaxrl.Env(spec, lambda key: (jnp.int32(0), jnp.int32(0)), step)


def errors(buffer: Buffer, updates: int) -> np.ndarray:
    """Return, for each seed, how far the values of going on are from the true ones, after `updates` at random steps."""
    env = cliffwalk()
    settings = {"lr": 1e-3, "features": (32,), "target_interval": 10, "double": False, "loss": "squared"}
    agent = jaxrl.dqn(**settings, epsilon_start=1.0, epsilon_end=1.0)
    strategy = jaxrl.off_policy(
        env,
        agent,
        buffer=buffer,
        processor=jaxrl.one_step(DISCOUNT),
        num_envs=8,
        opt_interval=8,
        warmup=20_000,
    )

    def train(key):
        state = strategy.init(key)
        body = lambda state, key, t: strategy.step(state, key, t)[0]
        return iterate(body, state.key, state, jnp.uint32(0), jnp.uint32(updates)).agent.params

    params = jax.jit(jax.vmap(train))(jax.vmap(jax.random.key)(jnp.arange(SEEDS)))
    places = jnp.arange(LENGTH)
    q = jax.vmap(lambda p: QNetwork(env.spec.observation_space, 2, features=(32,)).apply(p, places))(params)
    going_on = np.take_along_axis(np.asarray(q), np.asarray(places % 2)[None, :, None], axis=2)[..., 0]
    return np.abs(going_on - DISCOUNT ** np.arange(LENGTH - 1, -1, -1)).mean(axis=1)


@pytest.mark.slow
def test_prioritised_replay_learns_a_rare_reward_where_uniform_has_not_yet():
    # One episode in 4096 is paid, so that of 20 000 steps a handful tell of it.
    uniform = errors(jaxrl.uniform(20_000, 32), 4_000)
    prioritised = errors(jaxrl.prioritised(20_000, 32), 4_000)
    assert (prioritised < 0.1).all(), prioritised
    assert (uniform > 0.1).sum() >= SEEDS // 2, uniform
