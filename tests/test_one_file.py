"""What `examples/dqn_in_one_file.py` says on one page is what jaxrl computes."""

import importlib.util
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxrl

PAGE = Path(__file__).parents[1] / "examples" / "dqn_in_one_file.py"


def page() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_of_jaxrl_is_imported() -> None:
    assert "import jaxrl" not in PAGE.read_text()
    assert "from jaxrl" not in PAGE.read_text()


def test_jaxrl_takes_the_same_steps_and_learns_the_same() -> None:
    """Episodes bit for bit, so all that was drawn and chosen; parameters but for how XLA rounds fused products."""
    one, key, t = page(), jax.random.key(7), 200
    agent = jaxrl.dqn(features=(64, 64), lr=1e-3, target_interval=50, epsilon_decay=2_000, max_grad_norm=1e9)
    strategy = jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        agent,
        buffer=jaxrl.uniform(1_000, 32),
        processor=jaxrl.one_step(0.99),
        num_envs=4,
        opt_interval=4,
        warmup=200,
    )

    def run(state: Any) -> Any:
        turn = lambda i, state: strategy.step(state, jax.random.fold_in(state.key, i), i)[0]
        return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(t), turn, state)

    ours = jax.jit(run)(jax.jit(strategy.init)(key))
    theirs = jax.jit(one.iterate)(jax.jit(one.init)(key), 0, t)
    chex.assert_trees_all_equal(ours.env.env, theirs.env)
    chex.assert_trees_all_close(ours.agent.params.tree, theirs.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(ours.agent.target.tree, theirs.target, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_learns() -> None:
    assert page().main() > 300
