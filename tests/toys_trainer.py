"""Strategies small enough that a test of the host loop spends no time on learning."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.training.evaluator import Evaluation

TRACES: list[int] = []
"""Grows by one whenever the counting strategy's step is traced."""


class CountState(NamedTuple):
    key: jax.Array
    steps: jax.Array
    walk: jax.Array


@cache
def counting(env_steps: int = 1, opt_steps: int = 1, warmup: int = 0, walks: tuple[int, ...] = ()) -> jaxrl.Strategy:
    """Count iterations and walk randomly; the metric `t` is the iteration's number. The same counts compile once."""

    def init(key: jax.Array) -> CountState:
        return CountState(key, jnp.uint32(0), jnp.zeros(walks))

    def step(state: CountState, key: jax.Array, t: jax.Array) -> tuple[CountState, dict]:
        TRACES.append(1)
        walk = state.walk + jax.random.normal(key, walks)
        return CountState(state.key, state.steps + 1, walk), {"t": t, "rows": jaxrl.total(jnp.ones(3, bool))}

    return jaxrl.Strategy(init, step, env_steps, opt_steps, warmup_env_steps=warmup)


class Scripted:
    """An evaluator whose returns are given beforehand, one list an evaluation."""

    def __init__(self, *returns: list[float]) -> None:
        self.returns = list(returns)
        self.keys: list[jax.Array] = []

    def __call__(self, params: object, key: jax.Array) -> Evaluation:
        self.keys.append(key)
        values = np.array(self.returns[len(self.keys) - 1])
        return Evaluation(values, np.ones(len(values), int), np.ones(len(values), bool))


class ByStep:
    """An evaluator whose return after each optimisation step of `counting` is given beforehand, the first for step 1.

    However often it looks at a step, it sees the same; `luck` is added where it looks at one for the first time.
    """

    def __init__(self, returns: Sequence[float], luck: Mapping[int, float] | None = None) -> None:
        self.returns, self.luck = returns, dict(luck or {})
        self.looks: list[tuple[int, tuple[int, ...]]] = []
        """Of each call the step, and the key's numbers."""

    def __call__(self, params: CountState, key: jax.Array) -> Evaluation:
        step = int(params.steps)
        self.looks.append((step, tuple(jax.random.key_data(key).tolist())))
        value = np.array([self.returns[step - 1] + self.luck.pop(step, 0.0)])
        return Evaluation(value, np.ones(1, int), np.ones(1, bool))


@cache
def small_dqn(**changes: object) -> jaxrl.Strategy:
    """DQN on CartPole in the smallest useful size; the same strategy for the same changes, so compiled once."""
    parts = {"buffer": jaxrl.uniform(400, batch_size=16), "processor": jaxrl.n_step(3)}
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(16,), epsilon_decay=20, target_interval=5),
        **{**parts, "num_envs": 4, "opt_interval": 4, "warmup": 64, **changes},  # type: ignore[arg-type]
    )


@cache
def normalising_dqn(**changes: object) -> jaxrl.Strategy:
    """The same, whose observations are normalised."""
    return small_dqn.__wrapped__(processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(3)), **changes)


@cache
def short_ppo(**changes: object) -> jaxrl.Strategy:
    """PPO on episodes of CartPole that are all cut after five steps, in which no pole falls."""
    env = jaxrl.make_env("CartPole-v1", max_steps_in_episode=5)
    sizes = {"num_envs": 3, "rollout": 4, "epochs": 1, "minibatches": 1, **changes}
    return jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), **sizes)  # type: ignore[arg-type]
