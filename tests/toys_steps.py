"""Strategies that a test drives step by step, and the counting environment, which it walks through again by hand."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.agents import Agent
from jaxrl.strategies.base import iterate

KEY = jax.random.key(1)


def begun(strategy: jaxrl.Strategy, key: Any = KEY) -> Any:
    return jax.jit(strategy.init)(key)


def stepper(strategy: jaxrl.Strategy) -> Any:
    """Return a compiled `(state, t) -> (state, metrics)`."""
    return jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t))


def stepped(strategy: jaxrl.Strategy, iterations: int, key: Any = KEY) -> tuple[Any, Any, Any]:
    """Return the first state, that after so many iterations, and the metrics of each; all in one program."""

    def run(key: Any) -> Any:
        step = lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t)
        first = strategy.init(key)
        return first, *jax.lax.scan(step, first, np.arange(iterations, dtype=np.uint32))

    return jax.jit(run)(key)


def watched(strategy: jaxrl.Strategy, iterations: int, look: Callable[[Any], Any], key: Any = KEY) -> tuple[Any, Any]:
    """Return what `look` sees of the state after each of so many iterations, and the metrics; all in one program."""

    def step(state: Any, t: Any) -> Any:
        state, metrics = strategy.step(state, jax.random.fold_in(state.key, t), t)
        return state, (look(state), metrics)

    times = np.arange(iterations, dtype=np.uint32)
    return jax.tree.map(np.asarray, jax.jit(lambda key: jax.lax.scan(step, strategy.init(key), times)[1])(key))


def trained(strategy: jaxrl.Strategy, iterations: int, seed: int = 0) -> Any:
    """Return the state after so many iterations, in one program; that of a strategy is compiled once."""
    return _training(strategy.init, strategy.step)(jax.random.key(seed), jnp.uint32(iterations))


@lru_cache(maxsize=4)
def _training(init: Any, step: Any) -> Any:
    @jax.jit
    def train(key: Any, stop: Any) -> Any:
        state = init(key)
        return iterate(lambda state, key, t: step(state, key, t)[0], state.key, state, jnp.uint32(0), stop)

    return train


def summing(spec: jaxrl.EnvSpec) -> Agent:
    """Make an agent that does nothing but mix the bits of what it is given into a number."""
    return Agent(
        "summing",
        init=lambda key: jnp.uint32(0),
        act=lambda state, obs, key, opt_step, mode: (jnp.zeros(len(obs), int), ()),
        update=lambda state, batch, key, opt_step: (
            31 * state + jax.lax.bitcast_convert_type(batch.items.obs.sum(), jnp.uint32),
            {},
            batch.items.obs[:, 0] ** 2,
        ),
        strip=lambda state: state,
    )


class Walked(NamedTuple):
    """A step of `toys_closed_form.counting_env`."""

    obs: int
    action: int
    reward: int
    terminated: bool
    truncated: bool
    after: int


def walk(actions: Iterable[int], terminate_at: int = 7, time_limit: int = 4) -> list[Walked]:
    """Walk one counting environment by hand through `actions`."""
    count, length, steps = 0, 0, []
    for action in actions:
        after, length = count + 1 + action, length + 1
        terminated = after >= terminate_at
        truncated = not terminated and length >= time_limit
        steps.append(Walked(count, action, 10 * count + action, terminated, truncated, after))
        count, length = (0, 0) if terminated or truncated else (after, length)
    return steps


def require_episodes(metrics: Any, walks: Iterable[list[Walked]], begun: int = 0) -> None:
    """Fail unless `metrics` tell of the episodes that ended in `walks`, from step `begun` of each on."""
    returns, lengths, ends = [], [], []
    for steps in walks:
        total = length = 0
        for place, step in enumerate(steps):
            total, length = total + step.reward, length + 1
            if step.terminated or step.truncated:
                if place >= begun:
                    returns.append(total)
                    lengths.append(length)
                    ends.append(step.terminated)
                total = length = 0
    assert int(metrics["terminated"].count) == sum(ends) > 0
    assert int(metrics["truncated"].count) == len(ends) - sum(ends) > 0
    for name, values in (("episode_return", returns), ("episode_length", lengths)):
        assert [float(x) for x in metrics[name]] == [len(values), sum(values), min(values), max(values)]
