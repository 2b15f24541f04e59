"""Evaluation: run complete episodes in parallel, with separate environments and keys; and selection of the best."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import streams
from jaxrl.envs.agents import as_single_env, flatten_agents, unflatten_agents
from jaxrl.envs.base import Env, finite_rows, zero_invalid_rows
from jaxrl.envs.host import HostEnv, HostVectorEnv
from jaxrl.errors import SettingsError, check_count, check_number
from jaxrl.strategies.base import Policy, Strategy, fold
from jaxrl.strategies.interaction import scalar_column
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import cached
from jaxrl.training.storage.files import plain
from jaxrl.trees import Array, Key, PyTree, make_key, tree_bytes
from jaxrl.types import Step
from jaxrl.xla.contexts import options_of
from jaxrl.xla.options import graph_options

MAX_STEPS = 10_000
"""Step limit of an evaluation without a time limit; an episode that reaches it counts as unfinished."""

DECAYED = 2**32 - 1
"""An optimisation step past the end of any exploration schedule."""


def eval_key(seed: int) -> Key:
    """Return the base key of all evaluations in a run with this `seed`."""
    return jax.random.fold_in(make_key(seed), streams.EVALUATION)


class Evaluation(NamedTuple):
    """Results of `E` episodes."""

    returns: np.ndarray
    """Float `[E]`, undiscounted; of an unfinished episode up to the step limit, and NaN of a non-finite one."""
    lengths: np.ndarray
    """Int `[E]`."""
    finished: np.ndarray
    """Bool `[E]`: whether the episode ended before the step limit of the evaluation."""
    columns: Mapping[str, np.ndarray] = {}
    """Further numbers `[E]`, such as `success`, whose means go into the row of the evaluation.

    Scalars of an environment's `info`, at the last step, are named `info/NAME`, or `NAME` if it begins with `episode_`.
    NaN marks episodes without the number; means skip it."""

    @property
    def unfinished(self) -> int:
        """Number of episodes that reached the step limit."""
        return int(np.sum(~np.asarray(self.finished, bool)))

    def report(self) -> "EvaluationReport":
        """Return summary statistics of the episodes: `print` them, or write their `to_json()`."""
        columns = {name: _spread(_there(values)) for name, values in self.columns.items()}
        return EvaluationReport(
            len(self.returns), self.unfinished, _spread(self.returns), _spread(self.lengths), columns
        )


QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


@dataclass(frozen=True)
class EvaluationReport:
    """Summary statistics of an evaluation."""

    episodes: int
    unfinished: int
    returns: Mapping[str, float]
    """Mean, standard deviation and quantiles, by name."""
    lengths: Mapping[str, float]
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same for each further column, by name."""

    def to_json(self) -> str:
        """Return the report as a JSON object; NaN and infinity become `null`."""
        return json.dumps(plain(asdict(self)))

    def __str__(self) -> str:
        """Return the report as a table."""
        rows = {"return": self.returns, "length": self.lengths, **self.columns}
        wide = max(10, *map(len, rows))
        lines = [" " * wide + "".join(f"{text:>10}" for text in self.returns)]
        for name, numbers in rows.items():
            lines.append(f"{name:>{wide}}" + "".join(f"{number:>10.5g}" for number in numbers.values()))
        return "\n".join([*lines, f"{self.episodes} episodes, {self.unfinished} unfinished"])


def _spread(values: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation and quantiles; all NaN if any value is not finite."""
    wide = np.asarray(values, np.float64)
    # A single non-finite episode makes all statistics meaningless.
    wide = wide if np.isfinite(wide).all() else np.full_like(wide, np.nan)
    spread = {"mean": float(wide.mean()), "std": float(wide.std())}
    return spread | {name: float(np.quantile(wide, share)) for name, share in QUANTILES.items()}


def _there(values: Any) -> np.ndarray:
    """Return the numbers of a further column without NaN; all NaN if no episode has one."""
    wide = np.asarray(values, np.float64)
    return wide if np.isnan(wide).all() else wide[~np.isnan(wide)]


def eval_columns(evaluation: Evaluation, score: float, again: float | None, is_best: bool) -> dict[str, Any]:
    """Return the columns of an evaluation; `again` is the score of the confirmation of a candidate for the best."""
    returns = np.asarray(evaluation.returns, np.float64)
    return {
        "eval_reward": float(returns.mean()),
        "eval_reward_std": float(returns.std()) if np.isfinite(returns).all() else float("nan"),
        "eval_reward_min": float(returns.min()),
        "eval_reward_max": float(returns.max()),
        "eval_length": float(np.mean(evaluation.lengths)),
        "episodes": len(returns),
        "unfinished": evaluation.unfinished,
        "score": score,
        "confirm_score": again,
        "is_best": is_best,
        **{f"eval_{name}": float(np.mean(_there(values))) for name, values in evaluation.columns.items()},
    }


def episode_rows(counters: dict[str, int], evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode of an evaluation."""
    # Lists: indexing scalars of an array takes longer than the rest of a row.
    floats = lambda values: np.asarray(values, np.float64).tolist()
    columns = {
        "return": floats(evaluation.returns),
        "length": np.asarray(evaluation.lengths, np.int64).tolist(),
        "finished": np.asarray(evaluation.finished, bool).tolist(),
        **{name: floats(values) for name, values in evaluation.columns.items()},
    }
    for episode, row in enumerate(zip(*columns.values(), strict=True)):
        yield {**counters, "episode": episode, **dict(zip(columns, row, strict=True))}


def _own_columns() -> frozenset[str]:
    one = Evaluation(np.zeros(1), np.ones(1, np.int64), np.ones(1, bool))
    in_evaluations = eval_columns(one, 0.0, None, False)
    in_episodes = next(episode_rows({"opt_steps": 0, "env_steps": 0, "member": 0}, one))
    # `NAME` is written as `eval_NAME` to the row of an evaluation, and as it is to those of its episodes.
    return frozenset(in_episodes) | {name.removeprefix("eval_") for name in in_evaluations if name.startswith("eval_")}


OWN_COLUMNS = _own_columns()
"""Names that the further columns of an evaluation cannot have."""


class EvaluateFn(Protocol):
    def __call__(self, params: PyTree, key: Key, /) -> Evaluation:
        """Evaluate the policy with `params`, as from the strategy's `policy.params` (without a policy, the state).

        With `confirm_best`, a candidate for the best is evaluated again at once, with these `params` and another key.
        """
        ...


ScoreFn = Callable[[Evaluation], float]
"""Maps an evaluation to the score that selects the best policy; larger is better, and NaN is never best."""


def mean_return(evaluation: Evaluation) -> float:
    """Return the mean return, unfinished episodes included."""
    return float(np.mean(np.asarray(evaluation.returns, np.float64)))


class CompiledEvaluator:
    """Evaluate by a pure, compiled function that returns the fields of an `Evaluation` in order."""

    def __init__(self, run: Callable[[PyTree, Key], tuple[Any, ...]]) -> None:
        """Prepare the evaluation; compile at the first call."""
        self.run = run
        # `partial` makes a distinct function: otherwise JAX would reuse programs traced with other forms.
        self._jitted: Any = jax.jit(partial(run), compiler_options=graph_options())
        self._run = self._jitted
        self._compiled_for: Any = None

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Evaluate; the key is consumed."""
        return Evaluation(*jax.tree.map(np.asarray, tuple(self._run(params, key))))

    def compile(self, params: PyTree, key: Key) -> None:
        """Compile for `params` of these shapes ahead of the first evaluation."""
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params), jax.tree.structure(params), options_of()
        if self._compiled_for != shapes:
            # Recompile only for other shapes or options of JAX.
            self._run, self._compiled_for = self._jitted.lower(params, key).compile(), shapes


class Evaluator(CompiledEvaluator):
    """Run `episodes` complete episodes in parallel, greedily unless `sampled`.

    A non-finite reward or observation, the first one included, ends its episode with a NaN return, and so makes the
    score NaN.
    """

    def __init__(
        self, env: Env, policy: Policy, episodes: int, max_steps: int | None = None, *, sampled: bool = False
    ) -> None:
        """Prepare the evaluation; compile at the first call.

        Args:
          env: the environment.
          policy: the policy to evaluate.
          episodes: the number of parallel episodes.
          max_steps: steps after which an episode is left unfinished (default: the time limit of `env`, or 10 000).
          sampled: sample actions as in training, with fully decayed exploration.

        Raises:
          SettingsError: `episodes` is invalid, or `sampled` with a custom policy that has no `sample`.
        """
        check_count("eval_episodes", episodes)
        self.actions = "sampled" if sampled else "greedy"
        # With several agents, all follow the policy of one.
        chosen, one = _to_single_agent(env, policy, sampled)
        self.episodes, self._begun = episodes, partial(begin_episodes, one, chosen, episodes)
        limit = max_steps or env.spec.time_limit or MAX_STEPS
        super().__init__(partial(run_episodes, env, policy, episodes, limit, sampled=sampled))

    def bytes_of(self, params: PyTree) -> int:
        """Return the memory of the parallel episodes in bytes, given the shapes of the policy's parameters."""
        return tree_bytes(jax.eval_shape(self._begun, params, jax.eval_shape(lambda: make_key(0))))


class HostEvaluator:
    """Run `episodes` complete episodes in parallel, in environments on the host.

    Non-finite episodes are handled as in `Evaluator`.
    """

    def __init__(self, env: HostEnv, policy: Policy, episodes: int, *, sampled: bool = False) -> None:
        """Prepare the evaluation, as `Evaluator` does. Each call opens new environments."""
        check_count("eval_episodes", episodes)
        self.actions = "sampled" if sampled else "greedy"
        self.env, self.episodes = env.eval_env or env, episodes
        self.max_steps = self.env.spec.time_limit or MAX_STEPS
        chosen = make_eval_policy(policy, sampled)
        self._begin, self._act, self._observe = (
            jax.jit(partial(function)) for function in (chosen.begin, chosen.act, chosen.observe)
        )

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Run the episodes; the key is consumed."""
        with closing(HostVectorEnv(self.env, self.episodes, int(jax.random.bits(key) >> 1))) as envs:
            return self._run(envs, params, key)

    def _run(self, envs: HostVectorEnv, params: PyTree, key: Key) -> Evaluation:
        carry = self._begin(params, envs.reset())
        returns, lengths = np.where(envs.invalid_reset, np.nan, 0.0), np.zeros(self.episodes, np.int32)
        running, info = ~envs.invalid_reset, dict[str, Any]()
        # Environments reset themselves after an episode; `running` masks these later episodes.
        for t in range(self.max_steps):
            if not running.any():
                break
            carry, action = self._act(params, carry, key, np.uint32(t))
            step = envs.step(jax.tree.map(np.asarray, action))
            # NaN propagates to the return of the episode, and to the score.
            reward = np.where(step.valid, step.reward, np.nan)
            returns, lengths = returns + np.where(running, reward, 0.0), lengths + running
            info = _latest(info, step.info, running)
            running &= ~(step.terminated | step.truncated)
            # Drop the scalars: their names may change from step to step, and each set would recompile.
            carry = self._observe(params, carry, step._replace(action=action, info={}))
        return Evaluation(returns, lengths, ~running, columns_of_info(info))


def _latest(known: Mapping[str, Any], new: Mapping[str, Any], running: np.ndarray) -> dict[str, Any]:
    """Return the latest scalars of each episode, `[E]`; NaN if an episode has had none yet."""
    latest = dict(known)
    for name, values in new.items():
        if name not in ("episode_return", "episode_length"):
            before = latest.get(name, np.full(len(running), np.nan, np.float32))
            latest[name] = np.where(running & ~np.isnan(values), values, before)
    return latest


class EvalPolicy(NamedTuple):
    """A policy in evaluation, greedy or sampled."""

    begin: Callable[[PyTree, PyTree], PyTree]
    act: Callable[[PyTree, PyTree, Key, Array], tuple[PyTree, PyTree]]
    """`(params, carry, key, t) -> (carry, action)` at step `t`."""
    observe: Callable[[PyTree, PyTree, Step], PyTree]


def make_eval_policy(policy: Policy, sampled: bool) -> EvalPolicy:
    """Return `policy` as an `EvalPolicy`; raise `SettingsError` if it is `sampled` and has no `sample`."""
    if not sampled:
        return EvalPolicy(policy.begin, lambda params, carry, key, t: policy.act(params, carry), policy.observe)
    sample = policy.sample
    if sample is None:
        raise SettingsError("the policy was made by hand without a way to sample; evaluate it with greedy actions")

    def act(params: PyTree, carry: PyTree, key: Key, t: Array) -> tuple[PyTree, PyTree]:
        # A separate stream from that of the environments' steps.
        drawn = jax.random.fold_in(jax.random.fold_in(key, streams.SAMPLED_ACTIONS), t)
        return sample(params, carry, drawn, jnp.uint32(DECAYED))

    return EvalPolicy(policy.begin, act, policy.observe)


def for_agents(one: EvalPolicy, count: int) -> EvalPolicy:
    """Return the policy for environments with `count` agents each, which all follow the policy of `one`."""

    def act(params: PyTree, carry: PyTree, key: Key, t: Array) -> tuple[PyTree, PyTree]:
        carry, action = one.act(params, carry, key, t)
        return carry, unflatten_agents(action, count)

    def observe(params: PyTree, carry: PyTree, step: Step) -> PyTree:
        action, successor, obs = flatten_agents((step.action, step.final_obs, step.obs))
        reward, terminated, truncated = (jnp.repeat(x, count) for x in (step.reward, step.terminated, step.truncated))
        return one.observe(params, carry, Step(action, (), reward, terminated, truncated, successor, obs))

    return EvalPolicy(lambda params, obs: one.begin(params, flatten_agents(obs)), act, observe)


def evaluator_for(env: Env | HostEnv, policy: Policy, episodes: int, sampled: bool) -> EvaluateFn:
    """Return an evaluator of `policy` in `env`, on the device or on the host."""
    made = Evaluator if isinstance(env, Env) else HostEvaluator
    return made(env, policy, episodes, sampled=sampled)  # type: ignore[arg-type]


def evaluator_of(strategy: Strategy, episodes: int, sampled: bool = False) -> EvaluateFn:
    """Return the evaluator of `strategy`, in an environment or by `EvalFns.evaluate`; raise `SettingsError` without.

    The evaluator is cached per strategy, and compiled once.
    """
    name = f"evaluator of {episodes}{' sampled' if sampled else ''}"
    return cached(strategy, name, partial(_evaluator_of, strategy, episodes, sampled))


def _evaluator_of(strategy: Strategy, episodes: int, sampled: bool) -> EvaluateFn:
    env, evaluate = strategy.eval_env, strategy.evaluation.evaluate
    if env is not None and strategy.policy is not None:
        return evaluator_for(env, strategy.policy, episodes, sampled)
    if evaluate is not None and sampled:
        raise SettingsError("eval_actions is sampled, which needs an environment to act in; name one, or leave it out")
    if evaluate is not None and strategy.policy is not None:
        return CompiledEvaluator(evaluate)
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
    info: dict[str, Array]
    """Scalars of the environment's `info`, `[E]`, at the latest step of each episode."""


def run_episodes(
    env: Env, policy: Policy, episodes: int, max_steps: int, params: PyTree, key: Key, *, sampled: bool = False
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Run `episodes` episodes in parallel until all have ended; return the fields of an `Evaluation`. Pure."""
    chosen, env = _to_single_agent(env, policy, sampled)
    reset_key, step_key = jax.random.split(key)
    start = begin_episodes(env, chosen, episodes, params, reset_key)
    # The loop's carry needs all leaves from the start: find the names of the scalars by an abstract step.
    seen = jax.eval_shape(partial(_advance, env, chosen, params, step_key), start).info
    start = start._replace(info={name: jnp.full(episodes, jnp.nan, jnp.float32) for name in seen})
    end = jax.lax.while_loop(
        lambda e: e.running.any() & (e.step < max_steps), partial(_advance, env, chosen, params, step_key), start
    )
    return end.returns, end.lengths, ~end.running, columns_of_info(end.info)


def _to_single_agent(env: Env, policy: Policy, sampled: bool) -> tuple[EvalPolicy, Env]:
    """Return the evaluation policy of `policy` in `env`, and `env` as an environment of a single agent."""
    chosen = make_eval_policy(policy, sampled)
    return (chosen, env) if env.agents is None else (for_agents(chosen, env.agents), as_single_env(env))


def begin_episodes(env: Env, policy: EvalPolicy, episodes: int, params: PyTree, reset_key: Key) -> _Episodes:
    """Return the initial state of `episodes` parallel episodes."""
    state, obs = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    state, obs = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (state, obs))
    finite = finite_rows(obs)
    return _Episodes(
        step=jnp.int32(0),
        env=state,
        carry=policy.begin(params, zero_invalid_rows(finite, obs)),
        # An episode with a non-finite first observation ends before its first step.
        returns=jnp.where(finite, jnp.float32(0), jnp.float32(jnp.nan)),
        lengths=jnp.zeros(episodes, jnp.int32),
        running=finite,
        info={},
    )


def columns_of_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars of an environment by their column names, as in training."""
    return {scalar_column(name): value for name, value in info.items()}


def _advance(env: Env, policy: EvalPolicy, params: PyTree, key: Key, e: _Episodes) -> _Episodes:
    # All episodes step until the last has ended; `running` masks the steps after an end.
    carry, action = policy.act(params, e.carry, key, e.step)
    keys = jax.random.split(fold(key, e.step), e.running.shape[0])
    state, out = jax.vmap(env.step)(e.env, action, keys)
    lengths = e.lengths + e.running
    terminated, truncated = (jnp.asarray(x, bool) for x in (out.terminated, out.truncated))
    if env.spec.time_limit is not None:
        truncated = truncated | (lengths >= env.spec.time_limit)
    finite = finite_rows((out.obs, out.reward))
    reward = jnp.where(finite, jnp.asarray(out.reward, jnp.float32), jnp.nan)
    # No auto-reset: later episodes are not counted.
    step = Step(action, (), reward, terminated, truncated & ~terminated, out.obs, out.obs)
    new = {name: jnp.asarray(value, jnp.float32) for name, value in out.info.items() if jnp.ndim(value) == 1}
    return _Episodes(
        step=e.step + 1,
        env=state,
        carry=policy.observe(params, carry, step),
        returns=e.returns + jnp.where(e.running, reward, 0.0),
        lengths=lengths,
        running=e.running & finite & ~(terminated | truncated),
        info={name: jnp.where(e.running, value, e.info.get(name, jnp.nan)) for name, value in new.items()},
    )


# --- the best policy ----------------------------------------------------------------------------------------------


class EvalRules(NamedTuple):
    """How a run evaluates its policy and selects the best."""

    evaluator: EvaluateFn
    score: ScoreFn
    confirms: bool
    """Whether to evaluate a candidate for the best a second time."""


class EvalOutcome(NamedTuple):
    """An evaluation, its scores, and whether the policy is the best."""

    evaluation: Evaluation
    score: float
    again: float | None
    """The score of the confirmation, if there was one."""
    is_best: bool
    should_save: bool
    """Whether it is better than the best policy on disk, which lags behind the best so far if its file was damaged."""
    least_return: float
    """The lower of the mean returns of both evaluations; NaN if one is."""

    @property
    def kept(self) -> float:
        """The score that counts: that of the confirmation, if there was one."""
        return self.score if self.again is None else self.again


def evaluate_and_confirm(
    rules: EvalRules, params: PyTree, key: Key, opt_steps: int, ledger: Ledger, on_disk: float | None
) -> EvalOutcome:
    """Evaluate `params` after `opt_steps` optimisation steps, a candidate for the best twice; update `ledger`.

    `on_disk` is the score of the best policy on disk. The key is consumed.
    """
    evaluation, score = _evaluate_once(rules, params, key, ledger, "evaluate")
    least, again = mean_return(evaluation), None
    better = lambda score: math.isfinite(score) and (on_disk is None or score > on_disk)
    # A candidate has the maximum of many noisy scores, which is biased upwards; the confirmation is independent of it.
    if rules.confirms and (ledger.is_better(score) or better(score)):
        confirm_key = jax.random.fold_in(key, streams.CONFIRMATION)
        second, again = _evaluate_once(rules, params, confirm_key, ledger, "confirm")
        least = float(np.minimum(least, mean_return(second)))
    is_best = ledger.record_score(score, opt_steps, again)
    should_save = better(score if again is None else again)
    return EvalOutcome(evaluation, score, again, is_best, should_save, least)


def _evaluate_once(rules: EvalRules, params: PyTree, key: Key, ledger: Ledger, part: str) -> tuple[Evaluation, float]:
    """Evaluate once; return the evaluation and its score. Time is added to `part`; the key is consumed.

    Raises:
      SettingsError: the evaluation has a further column of a name that its rows have.
    """
    with ledger.timed(part):
        evaluation = rules.evaluator(params, key)
        if taken := sorted(OWN_COLUMNS.intersection(evaluation.columns)):
            raise SettingsError(
                f"evaluator: rows have a column {taken[0]!r} of their own; give that of the evaluation another name"
            )
        return evaluation, check_number("score", rules.score(evaluation))
