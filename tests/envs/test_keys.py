"""Keys that users are given are JAX's own: every sampler works with them, and draws what it would draw by itself."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from toys_keys import FEW, SAMPLERS, Drawn, all_drawn, draw, drawing_agent, drawing_env

import jaxrl

ALL = tuple(SAMPLERS)
NO_SAMPLERS = {"key_data", "key_impl", "key_dtype"}


class Climb(NamedTuple):
    key: Any
    init: Drawn
    step: Drawn


def test_samplers_are_all_of_them() -> None:
    """A sampler that a newer JAX brings is one to be added."""
    functions = {name: getattr(jax.random, name) for name in dir(jax.random) if not name.startswith("_")}
    takes_key = lambda f: callable(f) and next(iter(inspect.signature(f).parameters), "") == "key"
    assert {name for name, f in functions.items() if takes_key(f)} - NO_SAMPLERS == set(SAMPLERS)


def check_drawn(tree: Any, names: tuple[str, ...]) -> None:
    """Check that what stands in `tree` is what the samplers draw with the same keys, outside of any loop."""
    again = jax.jit(lambda words: draw(names, jax.random.wrap_key_data(words, impl="threefry2x32")).numbers)
    found = all_drawn(tree)
    assert len(found) >= 2
    for drawn in found:
        words = np.asarray(drawn.words).reshape(-1, 2)
        for i, word in enumerate(words):
            for name, wanted in again(word).items():
                came = np.asarray(drawn.numbers[name]).reshape(len(words), *wanted.shape)[i]
                np.testing.assert_allclose(came, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def train(strategy: jaxrl.Strategy, kinds: list[Any]) -> Any:
    """Train for a few iterations, and check that all keys were JAX's."""
    result = jaxrl.Trainer(strategy, max_opts=4, eval_interval=2, eval_episodes=2, quiet=True).train()
    assert set(kinds) == {"threefry2x32"} == {str(jax.random.key_impl(result.state.key))}
    return result.state


NAMES = pytest.mark.parametrize(
    "names", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@NAMES
def test_an_environment_may_draw_from_any_sampler_in_its_reset_and_its_step(names: tuple[str, ...]) -> None:
    kinds: list[Any] = []
    agent = jaxrl.ppo(jaxrl.PPOConfig(features=(4,)))
    state = train(
        jaxrl.on_policy(drawing_env(names, kinds), agent, num_envs=2, rollout=4, epochs=1, minibatches=2), kinds
    )
    check_drawn(state, names)


@pytest.mark.slow
@NAMES
def test_an_agent_of_ones_own_may_draw_from_any_sampler(names: tuple[str, ...]) -> None:
    kinds: list[Any] = []
    agent = drawing_agent(names, kinds)
    strategy = jaxrl.off_policy(drawing_env(("uniform",)), agent, buffer=jaxrl.uniform(64, 4), num_envs=2, warmup=8)
    check_drawn(train(strategy, kinds).agent, names)


@NAMES
def test_a_strategy_of_ones_own_may_draw_from_any_sampler(names: tuple[str, ...]) -> None:
    kinds: list[Any] = []

    def step(state: Climb, key: Any, t: Any) -> tuple[Climb, Any]:
        drawn = draw(names, key, kinds)
        return Climb(state.key, state.init, drawn), {"loss": drawn.numbers["uniform"]}

    def init(key: Any) -> Climb:
        drawn = draw(names, key, kinds)
        return Climb(key, drawn, drawn)

    strategy = jaxrl.Strategy(init, step, 1, 1)
    result = jaxrl.Trainer(strategy, max_opts=4, eval_interval=0, eval_episodes=0, quiet=True).train()
    assert set(kinds) == {"threefry2x32"}
    check_drawn(result.state, names)


def test_the_check_of_an_environment_traces_it_as_training_does() -> None:
    """What only training does with keys is done by the check too: rows of them, in loops, ahead of time."""
    kinds: list[Any] = []
    assert jaxrl.check_env(drawing_env(FEW, kinds), steps=20) == []
    assert set(kinds) == {"threefry2x32"}


SCRIPT = """
import jax, jaxrl, numpy as np
from toys_keys import FEW, drawing_env
kinds = []
agent = jaxrl.ppo(jaxrl.PPOConfig(features=(4,)))
strategy = jaxrl.on_policy(drawing_env(FEW, kinds), agent, num_envs=2, rollout=4, epochs=1, minibatches=2)
result = jaxrl.Trainer(strategy, max_opts=4, eval_interval=2, eval_episodes=2, quiet=True).train()
print(sorted(set(kinds)), np.asarray(jax.random.key_data(result.state.key)).tolist(), result.best_score)
"""


@pytest.mark.slow
def test_another_default_generator_of_jax_changes_nothing() -> None:
    def printed(default: str) -> str:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "JAX_DEFAULT_PRNG_IMPL": default, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "threefry2x32" in printed("threefry2x32") == printed("rbg")
