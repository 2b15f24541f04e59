"""Training whose random numbers are drawn ahead is, bit for bit, the plain loop over training steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import numbers, require_same_bits

import jaxrl
from jaxrl.registry import ALGORITHMS, algorithm_maker, algorithm_names
from jaxrl.strategies.base import iterate
from jaxrl.xla import forms
from jaxrl.xla.ahead import block_lengths

ITERATIONS = 200
DISCRETE = algorithm_names(actions="discrete")
ROUNDED = ("rainbow", "sac")
"""Those of which XLA fuses the two loops otherwise, so that some floats differ by a last bit."""
BEFORE_ROUNDING_GROWS = 10


def strategy_of(name: str) -> jaxrl.Strategy:
    env = jaxrl.make_env("Catch-bsuite" if name in DISCRETE and name != "sac" else "Pendulum-v1")
    agent = algorithm_maker(name)(features=(8,))
    if ALGORITHMS[name].kind == "on_policy":
        return jaxrl.on_policy(env, agent, num_envs=2, rollout=4, minibatches=4 if name == "reppo" else None)
    buffer = jaxrl.uniform(64, batch_size=4)
    return jaxrl.off_policy(env, agent, buffer=buffer, num_envs=2, opt_interval=4, warmup=16)


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("name", algorithm_names("off_policy", "on_policy"))
def test_draws_ahead_change_no_bit_of_a_run(name: str) -> None:
    strategy = strategy_of(name)
    iterations = BEFORE_ROUNDING_GROWS if name in ROUNDED else ITERATIONS

    def step(state: Any, key: Any, t: Any) -> Any:
        return strategy.step(state, key, t)[0]

    def plain(state: Any) -> Any:
        one = lambda t, state: step(state, jax.random.fold_in(state.key, t), t)
        return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(iterations), one, state)

    with forms("cpu"):
        state = jax.jit(strategy.init)(jax.random.key(0))
        with block_lengths() as lengths:
            ahead = jax.jit(lambda state: iterate(step, state.key, state, 0, iterations))(state)
        wanted = jax.jit(plain)(state)
    assert max(lengths) > 1
    if name not in ROUNDED:
        require_same_bits(ahead, wanted)
    # Another random number would be seen at once.
    for came, plain_loop in zip(jax.tree.leaves(numbers(ahead)), jax.tree.leaves(numbers(wanted)), strict=True):
        rounding = 1e-5 if np.issubdtype(came.dtype, np.floating) else 0.0
        np.testing.assert_allclose(came, plain_loop, rtol=rounding, atol=1e-2 * rounding)
