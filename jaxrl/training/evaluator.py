"""Judge a policy by whole episodes, run side by side, greedily, in environments and with keys of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env
from jaxrl.errors import SettingsError, check_count
from jaxrl.strategies.base import Policy, Strategy, fold
from jaxrl.types import Array, Key, PyTree, Step

MAX_STEPS = 10_000
"""Steps after which an episode without a time limit counts as unfinished."""


class Evaluation(NamedTuple):
    """The outcome of `E` episodes."""

    returns: np.ndarray
    """Float `[E]`, undiscounted; of an unfinished episode what it had gathered."""
    lengths: np.ndarray
    """Int `[E]`."""
    finished: np.ndarray
    """Bool `[E]`: the episode ended, rather than being left at the step limit of the evaluation."""


class EvaluateFn(Protocol):
    def __call__(self, params: PyTree, key: Key, /) -> Evaluation:
        """Judge the policy with `params`, what the strategy's `policy.params` returns (the whole state without one)."""
        ...


ScoreFn = Callable[[Evaluation], float]
"""What "best" means: the larger the better; NaN is never best."""


def mean_return(evaluation: Evaluation) -> float:
    """Score by the mean return, unfinished episodes included."""
    return float(np.mean(np.asarray(evaluation.returns, np.float64)))


class Judge:
    """Judge by a pure function `(params, key) -> (returns, lengths, finished)`, compiled."""

    def __init__(self, run: Callable[[PyTree, Key], tuple[Array, Array, Array]]) -> None:
        """Prepare an evaluation; nothing is compiled before the first call."""
        self._jitted: Any = jax.jit(run)
        self._run = self._jitted

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Evaluate; the key is consumed."""
        return Evaluation(*(np.asarray(x) for x in self._run(params, key)))

    def compile(self, params: PyTree, key: Key) -> None:
        """Compile for `params` of these shapes, so that the first evaluation is not slower than the others."""
        self._run = self._jitted.lower(params, key).compile()


class Evaluator(Judge):
    """Run `episodes` parallel greedy episodes from start to end."""

    def __init__(self, env: Env, policy: Policy, episodes: int, max_steps: int | None = None) -> None:
        """Prepare an evaluation; nothing is compiled before the first call.

        Args:
          env: the environment to be judged in.
          policy: how to act.
          episodes: how many, all at once.
          max_steps: steps after which an episode is left unfinished; the environment's own limit, or 10 000.
        """
        check_count("eval_episodes", episodes)
        limit = max_steps or env.spec.time_limit or MAX_STEPS
        super().__init__(partial(run_episodes, env, policy, episodes, limit))


def evaluator_of(strategy: Strategy, episodes: int) -> Judge:
    """Return the evaluator of `strategy`, in its own environment or by its `judge`; raise `SettingsError` without."""
    if strategy.env is not None and strategy.policy is not None:
        return Evaluator(strategy.env, strategy.policy, episodes)
    if strategy.judge is not None and strategy.policy is not None:
        return Judge(strategy.judge)
    raise SettingsError(
        "this strategy has no env and policy to evaluate; give them to it (or a holdout, of data), pass evaluator=..., "
        "or turn evaluation off with eval_interval=0 and eval_episodes=0"
    )


class _Episodes(NamedTuple):
    step: Array
    env: PyTree
    carry: PyTree
    returns: Array
    lengths: Array
    running: Array


def run_episodes(
    env: Env, policy: Policy, episodes: int, max_steps: int, params: PyTree, key: Key
) -> tuple[Array, Array, Array]:
    """Run `episodes` episodes to their ends; return returns, lengths and whether each finished. Pure."""
    reset_key, step_key = jax.random.split(key)
    state, obs = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    state, obs = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (state, obs))
    zeros = jnp.zeros(episodes)
    start = _Episodes(
        jnp.int32(0), state, policy.begin(params, obs), zeros, zeros.astype(jnp.int32), jnp.ones(episodes, bool)
    )
    end = jax.lax.while_loop(
        lambda e: e.running.any() & (e.step < max_steps), partial(_advance, env, policy, params, step_key), start
    )
    return end.returns, end.lengths, ~end.running


def _advance(env: Env, policy: Policy, params: PyTree, key: Key, e: _Episodes) -> _Episodes:
    carry, action = policy.act(params, e.carry)
    noise = jax.vmap(env.draw)(jax.random.split(fold(key, e.step), e.running.shape[0]))
    state, out = jax.vmap(env.step)(e.env, action, noise)
    lengths = e.lengths + e.running
    terminated, truncated = (jnp.asarray(x, bool) for x in (out.terminated, out.truncated))
    if env.spec.time_limit is not None:
        truncated = truncated | (lengths >= env.spec.time_limit)
    reward = jnp.asarray(out.reward, jnp.float32)
    step = Step(action, (), reward, terminated, truncated & ~terminated, out.obs, out.obs)
    return _Episodes(
        step=e.step + 1,
        env=state,
        carry=policy.observe(params, carry, step),
        returns=e.returns + jnp.where(e.running, reward, 0.0),
        lengths=lengths,
        running=e.running & ~(terminated | truncated),
    )
