"""The compiled step updates the buffer in place: what it needs beside the state does not grow with the capacity."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from toys_closed_form import counting_env
from toys_steps import summing

from jaxrl.agents import dqn
from jaxrl.buffers import uniform
from jaxrl.processors import n_step
from jaxrl.strategies import off_policy
from jaxrl.strategies.base import iterate
from jaxrl.trees import tree_bytes

SMALL, LARGE = 10_000, 1_000_000


@cache
def memory(agent, capacity, loop, compact=False, **settings):
    """Return the memory analysis of the compiled step, or of a loop over steps, and the bytes of its state."""
    settings = {"num_envs": 10, "opt_interval": 10, "warmup": 0, **settings}
    buffer = uniform(capacity, 32, compact=compact)
    strategy = off_policy(counting_env(), agent, buffer=buffer, processor=n_step(3), **settings)
    state = jax.eval_shape(strategy.init, jax.random.key(0))

    def once(state, t):
        return strategy.step(state, jax.random.fold_in(state.key, t), t)

    def many(state, t):
        body = lambda state, key, t: strategy.step(state, key, t)[0]
        return iterate(body, state.key, state, jnp.uint32(0), t)

    t = jax.ShapeDtypeStruct((), jnp.uint32)
    compiled = jax.jit(many if loop else once, donate_argnums=0).lower(state, t).compile()
    return compiled.memory_analysis(), tree_bytes(state)


DQN = dqn(features=(8,))


@pytest.mark.every_day("toy")
@pytest.mark.parametrize(
    ("agent", "loop", "opt_interval", "compact"),
    [
        pytest.param(summing, True, 10, False, id="toy"),
        pytest.param(DQN, False, 10, False, id="step"),
        pytest.param(DQN, True, 10, False, id="loop"),
        pytest.param(DQN, True, 2, False, id="many"),
        pytest.param(DQN, True, 30, False, id="few"),
        pytest.param(DQN, True, 10, True, id="compact"),
    ],
)
def test_what_a_step_needs_beside_its_state_does_not_grow_with_the_capacity(agent, loop, opt_interval, compact):
    (small, small_bytes), (large, large_bytes) = (
        memory(agent, capacity, loop, compact, opt_interval=opt_interval) for capacity in (SMALL, LARGE)
    )
    assert large_bytes - small_bytes > 20_000_000
    assert abs(large.temp_size_in_bytes - small.temp_size_in_bytes) < 1 << 20
    # The state is donated: the new one lies where the old one was.
    assert large.alias_size_in_bytes > large_bytes - (1 << 20)


def test_what_a_loop_needs_does_not_grow_with_the_iterations_of_a_call():
    # The number of iterations is an argument of the compiled program: its memory was settled before it was known.
    analysis, state_bytes = memory(summing, SMALL, True, False, opt_interval=10)
    assert analysis.output_size_in_bytes < state_bytes + (1 << 16)
