"""Updates that may be undone: accepted they are the update, undone the old state, and large ones are in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys_bits import require_same_bits

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


@pytest.mark.parametrize("width", WIDTHS)
def test_an_accepted_update_is_the_update(width: int) -> None:
    state, (x, y) = state_of(width), rows_of(width)
    for _ in range(3):
        wanted, metrics = jax.jit(adam)(state, x, y)
        state, measured = accepted(state, x, y)
        require_same_bits(measured, metrics)
        # The last bit may differ, where products and sums are joined in one of the two programs.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, wanted)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [np.nan, 1e30], ids=["not a number", "overflow"])
def test_an_undone_update_leaves_every_bit(width: int, scale: float) -> None:
    state, _ = accepted(state_of(width), *rows_of(width))
    after, metrics = accepted(state, *rows_of(width, scale))
    assert not np.isfinite(metrics["error"])
    require_same_bits(after, state)


def test_an_undone_update_leaves_parameters_and_the_target_that_it_would_have_made_equal() -> None:
    def update(state: Any, x: jax.Array) -> Any:
        params = state[0] - 0.5 * x
        return (params, params), jnp.sum(x)

    @jax.jit
    def guarded(state: Any, x: jax.Array) -> Any:
        (_, error), accept = attempt(update, state, x)
        return accept(jnp.isfinite(error))

    state = jnp.full((800, 800), 1.0), jnp.full((800, 800), 2.0)
    require_same_bits(guarded(state, jnp.full((800, 800), np.nan)), state)
    require_same_bits(guarded(state, jnp.ones((800, 800))), (jnp.full((800, 800), 0.5),) * 2)


def test_members_of_one_program_are_accepted_one_by_one() -> None:
    state, good, bad = state_of(400), rows_of(400), rows_of(400, np.nan)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    after, _ = jax.jit(jax.vmap(accepted))(states, *jnp.stack([good, bad], axis=1))
    require_same_bits(jax.tree.map(lambda leaf: leaf[1], after), state)
    moved, _ = accepted(state, *good)
    first = jax.tree.map(lambda leaf: leaf[0], after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), first, moved)


def temporary_share(algo: str, which: str) -> float:
    """Return how large what a run needs beside its arguments is, compared with the agent."""
    env, sizes = jaxrl.make_env("CartPole-v1"), {"features": (1024, 1024)}
    if algo == "ppo":
        strategy = jaxrl.on_policy(env, jaxrl.ppo(**sizes), num_envs=4, rollout=16)
    else:
        strategy = jaxrl.off_policy(env, jaxrl.dqn(**sizes), buffer=jaxrl.uniform(1000, batch_size=32), num_envs=5)
    with forms(which):
        run = compile_all(strategy, make_key(0), None, None, resume=True).run  # alone
    size = tree_bytes(jax.eval_shape(strategy.init, jax.random.key(0)).agent)
    return int(run.memory_analysis().temp_size_in_bytes) / size


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_a_large_agent_needs_no_second_state(algo: str) -> None:
    assert temporary_share(algo, "cpu") < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_in_plain_it_would(algo: str) -> None:
    assert temporary_share(algo, "plain") > 0.9
