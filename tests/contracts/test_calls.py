"""A run comes to the same bits however it is cut into calls, and whether or not its random numbers are drawn ahead."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import numbers, require_same_bits

import jaxrl
from benchmarks.pixels import catching
from jaxrl.registry import ALGORITHMS, algorithm_maker, algorithm_names
from jaxrl.strategies.base import iterate
from jaxrl.xla import forms
from jaxrl.xla.ahead import block_lengths

IN_ENVS = algorithm_names("off_policy", "on_policy")
DISCRETE = algorithm_names(actions="discrete")


def strategy_of(
    name: str, discrete: str, frames: bool = False, features: Sequence[int] = (8,), rollout: int = 4, batch: int = 4
) -> jaxrl.Strategy:
    vector = discrete if name in DISCRETE and name != "sac" else "Pendulum-v1"
    env, agent = catching() if frames else jaxrl.make_env(vector), algorithm_maker(name)(features=features)
    if ALGORITHMS[name].kind == "on_policy":
        return jaxrl.on_policy(env, agent, num_envs=2, rollout=rollout, minibatches=4 if name == "reppo" else None)
    buffer = jaxrl.uniform(64, batch_size=batch)
    return jaxrl.off_policy(env, agent, buffer=buffer, num_envs=2, opt_interval=4, warmup=16)


ITERATIONS = 12


# Slow, for what is rounded where is only seen where programs are compiled as users have them. Networks over frames have
# small matrices beside large ones; a loop carries them as slices of what else it carries.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frames"),
    [(name, False) for name in IN_ENVS] + [(name, True) for name in ("dqn", "pqn", "ppo", "sac")],
)
def test_how_a_run_is_cut_into_calls_does_not_change_a_bit(name: str, frames: bool) -> None:
    """So a run that is resumed is exact."""
    require_same_however_cut(strategy_of(name, "CartPole-v1", frames, (8,) if frames else (24, 24), 16, batch=8))


class Mixed(nn.Module):
    """Values of two actions from two layers, each with parameters of its own dtype."""

    first: Any
    second: Any

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        hidden = nn.tanh(nn.Dense(8, param_dtype=self.first)(obs))
        return nn.Dense(2, param_dtype=self.second)(hidden).astype(jnp.float32)


@pytest.mark.every_day("cpu-dtypes0")
@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)])
@pytest.mark.parametrize("which", ["cpu", "plain"])
def test_parameters_of_any_dtypes_are_rounded_alike_however_a_run_is_cut(which: str, dtypes: tuple[Any, Any]) -> None:
    agent = jaxrl.dqn(make_network=lambda spec: Mixed(*dtypes))
    env, buffer = jaxrl.make_env("CartPole-v1"), jaxrl.uniform(64, batch_size=8)
    with forms(which):
        require_same_however_cut(jaxrl.off_policy(env, agent, buffer=buffer, num_envs=2, opt_interval=4, warmup=16))


def require_same_however_cut(strategy: jaxrl.Strategy) -> None:
    """Fail unless a run in one call, in two, and in one per iteration come to the same bits."""
    run = jax.jit(lambda state, start, stop: iterate(step_of(strategy), state.key, state, start, stop))
    state = jax.jit(strategy.init)(jax.random.key(0))

    def cut(ends: Sequence[int]) -> Any:
        reached, start = state, 0
        for end in ends:
            reached, start = run(reached, jnp.uint32(start), jnp.uint32(end)), end
        return reached

    whole = cut([ITERATIONS])
    for ends in ([5, ITERATIONS], range(1, ITERATIONS + 1)):
        require_same_bits(cut(ends), whole)


def step_of(strategy: jaxrl.Strategy) -> Any:
    return lambda state, key, t: strategy.step(state, key, t)[0]


MANY = 200
ROUNDED = ("rainbow", "sac")
"""Those of which XLA fuses the two loops otherwise, so that some floats differ by a last bit."""
BEFORE_ROUNDING_GROWS = 10


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("name", IN_ENVS)
def test_draws_ahead_change_no_bit_of_the_plain_loop_over_training_steps(name: str) -> None:
    strategy = strategy_of(name, "Catch-bsuite")
    iterations = BEFORE_ROUNDING_GROWS if name in ROUNDED else MANY
    step = step_of(strategy)

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
