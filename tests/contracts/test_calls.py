"""A run comes to the same bits however it is cut into calls of its program: so a run that is resumed is exact."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_bits import require_same_bits

import jaxrl
from benchmarks.pixels import catching
from jaxrl.registry import ALGORITHMS, algorithm_maker, algorithm_names
from jaxrl.strategies.base import iterate

ITERATIONS = 12
DISCRETE = algorithm_names(actions="discrete")


def strategy_of(name: str, frames: bool) -> jaxrl.Strategy:
    vector = "CartPole-v1" if name in DISCRETE and name != "sac" else "Pendulum-v1"
    env = catching() if frames else jaxrl.make_env(vector)
    agent = algorithm_maker(name)(features=(8,) if frames else (24, 24))
    if ALGORITHMS[name].kind == "on_policy":
        return jaxrl.on_policy(env, agent, num_envs=2, rollout=16, minibatches=4 if name == "reppo" else None)
    buffer = jaxrl.uniform(64, batch_size=8)
    return jaxrl.off_policy(env, agent, buffer=buffer, num_envs=2, opt_interval=4, warmup=16)


# Slow, for what is rounded where is only seen where programs are compiled as users have them. Networks over frames have
# small matrices beside large ones; a loop carries them as slices of what else it carries.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frames"),
    [(name, False) for name in algorithm_names("off_policy", "on_policy")]
    + [(name, True) for name in ("dqn", "pqn", "ppo", "sac")],
)
def test_how_a_run_is_cut_into_calls_does_not_change_a_bit(name: str, frames: bool) -> None:
    strategy = strategy_of(name, frames)

    def step(state: Any, key: Any, t: Any) -> Any:
        return strategy.step(state, key, t)[0]

    run = jax.jit(lambda state, start, stop: iterate(step, state.key, state, start, stop))
    state = jax.jit(strategy.init)(jax.random.key(0))

    def cut(ends: Sequence[int]) -> Any:
        reached, start = state, 0
        for end in ends:
            reached, start = run(reached, jnp.uint32(start), jnp.uint32(end)), end
        return reached

    whole = cut([ITERATIONS])
    for ends in ([5, ITERATIONS], range(1, ITERATIONS + 1)):
        require_same_bits(cut(ends), whole)
