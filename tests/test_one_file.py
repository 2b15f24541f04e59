"""What `examples/dqn_in_one_file.py` and `examples/ppo_in_one_file.py` say on one page is what jaxrl computes."""

import pkgutil
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from test_examples import FOLDER, script

import jaxrl

DQN, PPO = "dqn_in_one_file.py", "ppo_in_one_file.py"


@pytest.mark.parametrize("name", [DQN, PPO])
def test_nothing_of_jaxrl_is_imported(name: str) -> None:
    assert "import jaxrl" not in (FOLDER / name).read_text()
    assert "from jaxrl" not in (FOLDER / name).read_text()


@pytest.mark.parametrize("name", [DQN, PPO])
def test_the_counterparts_that_comments_name_exist(name: str) -> None:
    comments = "\n".join(re.findall(r"^# (jaxrl\..+)$", (FOLDER / name).read_text(), re.MULTILINE))
    named = re.findall(r"jaxrl[\w.]+\w", comments)
    assert len(named) > 9
    for path in named:
        pkgutil.resolve_name(path)


def both(strategy: jaxrl.Strategy, one: Any, iterations: int) -> tuple[Any, Any]:
    """Return the training states of jaxrl and of the page, after as many iterations from the same key."""

    def run(state: Any) -> Any:
        turn = lambda i, state: strategy.step(state, jax.random.fold_in(state.key, i), i)[0]
        return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(iterations), turn, state)

    key = jax.random.key(7)
    ours = jax.jit(lambda key: run(strategy.init(key)))(key)
    return ours, jax.jit(lambda key: one.iterate(one.init(key), 0, iterations))(key)


def agree(ours: Any, theirs: Any) -> None:
    """Assert the same numbers, but for how XLA rounds fused products: another draw or action would show at once."""
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_jaxrl_takes_the_same_steps_as_dqn_on_one_page_and_learns_the_same() -> None:
    strategy = jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(64, 64), lr=1e-3, target_interval=50, epsilon_decay=2_000, max_grad_norm=1e9),
        buffer=jaxrl.uniform(1_000, 32),
        processor=jaxrl.one_step(0.99),
        num_envs=4,
        opt_interval=4,
        warmup=200,
    )
    ours, theirs = both(strategy, script(DQN), 200)
    agree(ours.env.env, theirs.env)
    agree((ours.agent.params, ours.agent.target), (theirs.params, theirs.target))


@pytest.mark.slow
def test_jaxrl_takes_the_same_steps_as_ppo_on_one_page_and_learns_the_same() -> None:
    one = script(PPO)
    one.NUM_ENVS, one.ROLLOUT = 4, 31  # few enough steps for jaxrl to sort them too
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.ppo(lr=1e-3),
        processor=jaxrl.one_step(0.99),
        num_envs=4,
        rollout=31,
        epochs=4,
        minibatches=4,
    )
    ours, theirs = both(strategy, one, 10)
    agree(ours.env.env, theirs.env)
    agree(ours.agent.params, theirs.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", [DQN, PPO])
def test_it_learns(name: str) -> None:
    assert script(name).main() > 300
