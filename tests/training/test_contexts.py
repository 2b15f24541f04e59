"""A `with` block of JAX around training reaches every program of it, and no program of another block is used again."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from toys_envs import constant_reward

import jaxrl
from jaxrl.xla.contexts import product_precision


class State(NamedTuple):
    """The state of a strategy that looks about itself."""

    key: Any
    number: Any


SEEN: list[tuple[str, Any]] = []


def look(where: str) -> None:
    SEEN.append((where, jax.config.jax_default_matmul_precision))


def watching() -> jaxrl.Strategy:
    """Return a strategy that notes the precision under which its parts are traced."""

    def init(key: Any) -> State:
        look("init")
        return State(key, jnp.float32(0))

    def step(state: State, key: Any, t: Any) -> tuple[State, Any]:
        look("step")
        return State(state.key, state.number + 1), {"number": state.number}

    def evaluate(params: Any, key: Any) -> tuple[Any, Any, Any]:
        look("evaluate")
        return jnp.ones(2) * params, jnp.ones(2, jnp.int32), jnp.ones(2, bool)

    params = lambda state: state.number
    policy = jaxrl.Policy(constant_reward().spec, params, *[lambda *args: args] * 3)
    return jaxrl.Strategy(init, step, 1, 1, policy=policy, evaluation=jaxrl.EvalFns(evaluate))


def seen_in(training: Any) -> set[tuple[str, Any]]:
    SEEN.clear()
    training()
    return set(SEEN)


def test_a_context_reaches_every_program_and_ends_with_its_block() -> None:
    strategy = watching()
    options = {"max_opts": 4, "eval_interval": 2, "eval_episodes": 2, "quiet": True}
    for precision in ("highest", None, "highest", "bfloat16"):
        with jax.default_matmul_precision(precision):
            trainer = jaxrl.Trainer(strategy, **options)
            assert {value for _, value in seen_in(trainer.train)} <= {precision}
            traced = seen_in(lambda: jaxrl.Trainer(watching(), **options).train())
        assert traced == {(where, precision) for where in ("init", "step", "evaluate")}


def test_a_context_reaches_the_members_of_a_population() -> None:
    population = jaxrl.population(watching(), seeds=2)
    with jax.default_matmul_precision("highest"):
        traced = seen_in(
            lambda: jaxrl.PopulationTrainer(
                population, max_opts=4, eval_interval=2, eval_episodes=2, quiet=True
            ).train()
        )
    assert {value for _, value in traced} == {"highest"}


def test_nan_is_found_where_it_is_made_with_debug_nans() -> None:
    def step(state: State, key: Any, t: Any) -> tuple[State, Any]:
        return State(state.key, jnp.log(state.number - 1)), {"number": state.number}

    strategy = jaxrl.Strategy(lambda key: State(key, jnp.float32(0)), step, 1, 1)
    trainer = jaxrl.Trainer(strategy, max_opts=2, eval_interval=0, eval_episodes=0, quiet=True)
    with jax.debug_nans(True), pytest.raises(Exception, match="nan"):
        trainer.train()


@pytest.mark.slow
def test_strategies_that_differ_in_where_they_are_evaluated_are_evaluated_there() -> None:
    agent = jaxrl.ppo(features=(4,))
    strategy = jaxrl.on_policy(constant_reward(1.0), agent, num_envs=2, rollout=2, epochs=1, minibatches=1)
    returns = {}
    for reward in (1.0, 5.0, -3.0):
        other = strategy._replace(evaluation=jaxrl.EvalFns(env=constant_reward(reward)))
        result = jaxrl.Trainer(other, max_opts=2, eval_interval=2, eval_episodes=2, quiet=True).train()
        returns[reward] = result.best_score
    assert returns == {1.0: 1.0, 5.0: 5.0, -3.0: -3.0}


class Device(NamedTuple):
    """What JAX says of a device."""

    platform: str
    compute_capability: str = ""


@pytest.mark.parametrize(
    ("device", "configured", "said"),
    [
        (Device("cpu"), None, "float32"),
        (Device("gpu", "9.0"), None, "TF32"),
        (Device("gpu", "7.5"), None, "float32"),
        (Device("gpu", "gfx90a"), None, "float32"),
        (Device("gpu", "9.0"), "highest", "float32"),
        (Device("gpu", "9.0"), "bfloat16", "bfloat16"),
        (Device("tpu"), None, "bfloat16"),
        (Device("tpu"), "float32", "float32"),
    ],
)
def test_the_precision_of_products_is_that_of_the_device_and_what_jax_is_told(
    device: Device, configured: Any, said: str
) -> None:
    with jax.default_matmul_precision(configured):
        assert product_precision(device) == said


def test_a_run_says_in_its_metadata_how_matrices_are_multiplied(tmp_path: Path) -> None:
    jaxrl.Trainer(watching(), max_opts=2, run_dir=tmp_path / "run", quiet=True).train()
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["products"] == "float32"
