"""Updates that may be undone: accepted they are the update, undone the old state, and large ones are in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl
from jaxrl.training.program import compile_all
from jaxrl.trees import make_key, tree_bytes
from jaxrl.xla import forms
from jaxrl.xla.in_place import attempt

WIDTHS = [pytest.param(16, id="small"), pytest.param(400, id="large")]


def adam(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """Take a step of Adam on a squared error, and move an average of the parameters."""
    params, moments, mean = state
    loss = lambda params: jnp.mean((jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] - y) ** 2)
    error, gradient = jax.value_and_grad(loss)(params)
    changes, moments = optax.adam(0.1).update(gradient, moments, params)
    params = optax.apply_updates(params, changes)
    mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, params)
    return (params, moments, mean), {"error": error}


def state_of(width: int) -> Any:
    a, c = jax.random.normal(jax.random.key(0), (2, width, width)) / np.sqrt(width)
    params = {"a": a, "b": jnp.zeros((1, width)), "c": c}
    return params, optax.adam(0.1).init(params), jax.tree.map(jnp.copy, params)


def rows_of(width: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(1), (2, 8, width))


@jax.jit
def accepted(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """Take the step if its error and its result are finite."""
    (new, metrics), accept = attempt(adam, state, x, y)
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((new, metrics))]
    return accept(jnp.all(jnp.stack(finite))), metrics


def same(came: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(came), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_accepted_update_is_the_update(width: int) -> None:
    state, (x, y) = state_of(width), rows_of(width)
    for _ in range(3):
        wanted, metrics = jax.jit(adam)(state, x, y)
        state, measured = accepted(state, x, y)
        same(measured, metrics)
        # The last bit may differ, where products and sums are joined in one of the two programs.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, wanted)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [np.nan, 1e30], ids=["not a number", "overflow"])
def test_an_undone_update_leaves_every_bit(width: int, scale: float) -> None:
    state, _ = accepted(state_of(width), *rows_of(width))
    after, metrics = accepted(state, *rows_of(width, scale))
    assert not np.isfinite(metrics["error"])
    same(after, state)


def test_members_of_one_program_are_accepted_one_by_one() -> None:
    state, good, bad = state_of(400), rows_of(400), rows_of(400, np.nan)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    after, _ = jax.jit(jax.vmap(accepted))(states, *jnp.stack([good, bad], axis=1))
    same(jax.tree.map(lambda leaf: leaf[1], after), state)
    moved, _ = accepted(state, *good)
    first = jax.tree.map(lambda leaf: leaf[0], after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), first, moved)


def temporary_bytes(strategy: jaxrl.Strategy, which: str) -> int:
    with forms(which):
        run = compile_all(strategy, make_key(0), None, None, resume=True).run  # alone
    return int(run.memory_analysis().temp_size_in_bytes)


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_a_large_agent_needs_no_second_state(algo: str) -> None:
    env, sizes = jaxrl.make_env("CartPole-v1"), {"features": (1024, 1024)}
    if algo == "ppo":
        strategy = jaxrl.on_policy(env, jaxrl.ppo(**sizes), num_envs=4, rollout=16)
    else:
        strategy = jaxrl.off_policy(env, jaxrl.dqn(**sizes), buffer=jaxrl.uniform(1000, batch_size=32), num_envs=5)
    size = tree_bytes(jax.eval_shape(strategy.init, jax.random.key(0)).agent)
    assert temporary_bytes(strategy, "plain") > 0.9 * size
    assert temporary_bytes(strategy, "cpu") < 0.6 * size
