"""Evaluate a policy by whole episodes, side by side, in environments and with keys of their own; and find the best."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.agents import as_single_env, flatten_agents, unflatten_agents
from jaxrl.envs.base import Env, finite_rows, zero_invalid_rows
from jaxrl.envs.host import HostEnv, HostVectorEnv
from jaxrl.errors import SettingsError, check_count
from jaxrl.strategies.base import Policy, Strategy, fold
from jaxrl.strategies.interaction import scalar_column
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import programs_of
from jaxrl.training.storage.run_dir import plain
from jaxrl.trees import Array, Key, PyTree, make_key, tree_bytes
from jaxrl.types import Step
from jaxrl.xla.contexts import options_of
from jaxrl.xla.options import graph_options

MAX_STEPS = 10_000
"""Steps after which an episode without a time limit counts as unfinished."""

EVAL_STREAM = 2**32 - 1
"""Folded into the seed's key for evaluation: no iteration has this number."""
CONFIRM_STREAM = 2**32 - 1
"""Folded into the key of an evaluation for the second look at a candidate for the best.

The first look has consumed that key by splitting it, and `fold_in` gives what a split would give as the key of this
number: one far beyond those that an evaluation takes, hence independent of them.
"""
SAMPLE_STREAM = 2**32 - 2
"""Folded into the key of an evaluation for the actions it draws."""
DECAYED = 2**32 - 1
"""An optimisation step after the end of any schedule of exploration."""


def confirm_key(key: Key) -> Key:
    """Return the key of the second look after a first one with `key`."""
    return jax.random.fold_in(key, CONFIRM_STREAM)


def eval_key(seed: int) -> Key:
    """Return the key that those of all evaluations in a run of this `seed` are folded from."""
    return jax.random.fold_in(make_key(seed), EVAL_STREAM)


class Evaluation(NamedTuple):
    """The outcome of `E` episodes."""

    returns: np.ndarray
    """Float `[E]`, undiscounted; of an unfinished episode what it had gathered, and NaN of one that was not finite."""
    lengths: np.ndarray
    """Int `[E]`."""
    finished: np.ndarray
    """Bool `[E]`: the episode ended, rather than being left at the step limit of the evaluation."""
    columns: Mapping[str, np.ndarray] = {}
    """Further numbers of each episode, `[E]`, such as `success`; their means go into the row of the evaluation.

    Those of an environment's `info` are as of the last step: `info/NAME`, or `NAME` where it begins with `episode_`.
    NaN is in the episodes without such a number; means are over the others."""

    @property
    def unfinished(self) -> int:
        """How many episodes were left at the step limit."""
        return int(np.sum(~np.asarray(self.finished, bool)))

    def report(self) -> "EvaluationReport":
        """Return the episodes in a few numbers: `print` it, or write its `to_json()`."""
        columns = {name: _spread(_there(values)) for name, values in self.columns.items()}
        return EvaluationReport(
            len(self.returns), self.unfinished, _spread(self.returns), _spread(self.lengths), columns
        )


QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation in a few numbers."""

    episodes: int
    unfinished: int
    returns: Mapping[str, float]
    """Mean, standard deviation and quantiles, by name."""
    lengths: Mapping[str, float]
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same of further columns, by name."""

    def to_json(self) -> str:
        """Return it as one JSON object; NaN and infinity as `null`."""
        return json.dumps(plain(asdict(self)))

    def __str__(self) -> str:
        """Return it as a small table."""
        rows = {"return": self.returns, "length": self.lengths, **self.columns}
        wide = max(10, *map(len, rows))
        lines = [" " * wide + "".join(f"{text:>10}" for text in self.returns)]
        for name, numbers in rows.items():
            lines.append(f"{name:>{wide}}" + "".join(f"{number:>10.5g}" for number in numbers.values()))
        return "\n".join([*lines, f"{self.episodes} episodes, {self.unfinished} unfinished"])


def _spread(values: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation and quantiles; NaN where a value is not finite."""
    wide = np.asarray(values, np.float64)
    # One episode that is not finite leaves nothing to say of all.
    wide = wide if np.isfinite(wide).all() else np.full_like(wide, np.nan)
    spread = {"mean": float(wide.mean()), "std": float(wide.std())}
    return spread | {name: float(np.quantile(wide, share)) for name, share in QUANTILES.items()}


def _there(values: Any) -> np.ndarray:
    """Return the numbers of a further column; NaN alone if no episode has one."""
    wide = np.asarray(values, np.float64)
    return wide if np.isnan(wide).all() else wide[~np.isnan(wide)]


def eval_columns(evaluation: Evaluation, score: float, again: float | None, is_best: bool) -> dict[str, Any]:
    """Return what an evaluation adds to its row; `again` is the score of a second look at a candidate for the best."""
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
    """Return a row for each episode of an evaluation."""
    # As lists: a scalar of an array takes longer to make than the rest of a row.
    floats = lambda values: np.asarray(values, np.float64).tolist()
    columns = {
        "return": floats(evaluation.returns),
        "length": np.asarray(evaluation.lengths, np.int64).tolist(),
        "finished": np.asarray(evaluation.finished, bool).tolist(),
        **{name: floats(values) for name, values in evaluation.columns.items()},
    }
    for episode, row in enumerate(zip(*columns.values(), strict=True)):
        yield {**counters, "episode": episode, **dict(zip(columns, row, strict=True))}


class EvaluateFn(Protocol):
    def __call__(self, params: PyTree, key: Key, /) -> Evaluation:
        """Evaluate the policy with `params`, what the strategy's `policy.params` returns (the whole state without one).

        Where a run confirms its best, a candidate is evaluated again right after, with these `params` and another key.
        """
        ...


ScoreFn = Callable[[Evaluation], float]
"""What "best" means: the larger the better; NaN is never best."""


def mean_return(evaluation: Evaluation) -> float:
    """Score by the mean return, unfinished episodes included."""
    return float(np.mean(np.asarray(evaluation.returns, np.float64)))


class CompiledEvaluator:
    """Evaluate by a pure function that returns the fields of an `Evaluation` in order, compiled."""

    def __init__(self, run: Callable[[PyTree, Key], tuple[Any, ...]]) -> None:
        """Prepare an evaluation; nothing is compiled before the first call."""
        self.run = run
        # `partial` makes it a function of its own: JAX would give one that was traced with other forms the programs of
        # then.
        self._jitted: Any = jax.jit(partial(run), compiler_options=graph_options())
        self._run = self._jitted
        self._compiled_for: Any = None

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Evaluate; the key is consumed."""
        return Evaluation(*jax.tree.map(np.asarray, tuple(self._run(params, key))))

    def compile(self, params: PyTree, key: Key) -> None:
        """Compile for `params` of these shapes, so that the first evaluation is not slower than the others."""
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params), jax.tree.structure(params), options_of()
        if self._compiled_for != shapes:
            # Compiled again only for other shapes or options of JAX.
            self._run, self._compiled_for = self._jitted.lower(params, key).compile(), shapes


class Evaluator(CompiledEvaluator):
    """Run `episodes` parallel episodes from start to end, greedy ones unless `sampled`.

    An episode ends where the environment gives a non-finite observation, the first one included, or reward: its return
    is NaN, so that no score is made of it.
    """

    def __init__(
        self, env: Env, policy: Policy, episodes: int, max_steps: int | None = None, *, sampled: bool = False
    ) -> None:
        """Prepare an evaluation; nothing is compiled before the first call.

        Args:
          env: the environment to act in.
          policy: how to act.
          episodes: how many, all at once.
          max_steps: steps after which an episode is left unfinished; the environment's own limit, or 10 000.
          sampled: draw actions as in training, at the end of what exploration decays to.

        Raises:
          SettingsError: the number of episodes cannot be, or the policy was made by hand and cannot sample.
        """
        check_count("eval_episodes", episodes)
        self.actions = "sampled" if sampled else "greedy"
        # With several agents, the policy of one is asked for each of them.
        asked, one = _asked(env, policy, sampled)
        self.episodes, self._begun = episodes, partial(begin_episodes, one, asked, episodes)
        limit = max_steps or env.spec.time_limit or MAX_STEPS
        super().__init__(partial(run_episodes, env, policy, episodes, limit, sampled=sampled))

    def bytes_of(self, params: PyTree) -> int:
        """Return how many bytes the episodes take side by side, given the shapes of the policy's parameters."""
        return tree_bytes(jax.eval_shape(self._begun, params, jax.eval_shape(lambda: make_key(0))))


class HostEvaluator:
    """Run `episodes` episodes from start to end, side by side, in environments on the host.

    Those that are not finite are treated as `Evaluator` does.
    """

    def __init__(
        self, env: HostEnv, policy: Policy, episodes: int, max_steps: int | None = None, *, sampled: bool = False
    ) -> None:
        """Prepare an evaluation; arguments are those of `Evaluator`. Environments are opened for each anew."""
        check_count("eval_episodes", episodes)
        self.actions = "sampled" if sampled else "greedy"
        self.env, self.episodes = env.eval_env or env, episodes
        self.max_steps = max_steps or self.env.spec.time_limit or MAX_STEPS
        chosen = chooser(policy, sampled)
        self._begin, self._act, self._observe = (
            jax.jit(partial(function)) for function in (chosen.begin, chosen.act, chosen.observe)
        )

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Run the episodes; the key is consumed."""
        envs = HostVectorEnv(self.env, self.episodes, int(jax.random.bits(key) >> 1))
        try:
            return self._run(envs, params, key)
        finally:
            envs.close()

    def _run(self, envs: HostVectorEnv, params: PyTree, key: Key) -> Evaluation:
        carry = self._begin(params, envs.reset())
        returns, lengths = np.where(envs.invalid_reset, np.nan, 0.0), np.zeros(self.episodes, np.int32)
        running, info = ~envs.invalid_reset, dict[str, Any]()
        # Environments reset themselves where an episode has ended; these later episodes are masked by `running`.
        for t in range(self.max_steps):
            if not running.any():
                break
            carry, action = self._act(params, carry, key, np.uint32(t))
            step = envs.step(jax.tree.map(np.asarray, action))
            # NaN makes the return of an episode NaN from here on, so that no score is made of it.
            reward = np.where(step.valid, step.reward, np.nan)
            returns, lengths = returns + np.where(running, reward, 0.0), lengths + running
            info = _latest(info, step.info, running)
            running &= ~(step.terminated | step.truncated)
            # Without the scalars: their names may change from step to step, and each set would be compiled anew.
            carry = self._observe(params, carry, step._replace(action=action, info={}))
        return Evaluation(returns, lengths, ~running, columns_of_info(info))


def _latest(known: Mapping[str, Any], new: Mapping[str, Any], running: np.ndarray) -> dict[str, Any]:
    """Return the scalars that each episode told last, `[E]`; NaN in one that has not told it yet."""
    latest = dict(known)
    for name, values in new.items():
        if name not in ("episode_return", "episode_length"):
            before = latest.get(name, np.full(len(running), np.nan, np.float32))
            latest[name] = np.where(running & ~np.isnan(values), values, before)
    return latest


class Chooser(NamedTuple):
    """A policy as evaluation asks it: greedily, or drawing from the key of the evaluation."""

    begin: Callable[[PyTree, PyTree], PyTree]
    act: Callable[[PyTree, PyTree, Key, Array], tuple[PyTree, PyTree]]
    """`(params, carry, key, t) -> (carry, action)` at step `t`."""
    observe: Callable[[PyTree, PyTree, Step], PyTree]


def chooser(policy: Policy, sampled: bool) -> Chooser:
    """Return how evaluation asks `policy`; raise `SettingsError` if it is to sample and cannot."""
    if not sampled:
        return Chooser(policy.begin, lambda params, carry, key, t: policy.act(params, carry), policy.observe)
    sample = policy.sample
    if sample is None:
        raise SettingsError("the policy was made by hand without a way to sample; evaluate it with greedy actions")

    def act(params: PyTree, carry: PyTree, key: Key, t: Array) -> tuple[PyTree, PyTree]:
        # A stream of its own, beside that of the environments' steps.
        drawn = jax.random.fold_in(jax.random.fold_in(key, SAMPLE_STREAM), t)
        return sample(params, carry, drawn, jnp.uint32(DECAYED))

    return Chooser(policy.begin, act, policy.observe)


def of_agents(one: Chooser, count: int) -> Chooser:
    """Return the policy of one agent as that of games with `count` agents each, who all follow it."""

    def act(params: PyTree, carry: PyTree, key: Key, t: Array) -> tuple[PyTree, PyTree]:
        carry, action = one.act(params, carry, key, t)
        return carry, unflatten_agents(action, count)

    def observe(params: PyTree, carry: PyTree, step: Step) -> PyTree:
        action, successor, obs = flatten_agents((step.action, step.final_obs, step.obs))
        reward, terminated, truncated = (jnp.repeat(x, count) for x in (step.reward, step.terminated, step.truncated))
        return one.observe(params, carry, Step(action, (), reward, terminated, truncated, successor, obs))

    return Chooser(lambda params, obs: one.begin(params, flatten_agents(obs)), act, observe)


def evaluator_for(env: Env | HostEnv, policy: Policy, episodes: int, sampled: bool = False) -> EvaluateFn:
    """Return what evaluates `policy` in `env`."""
    made = Evaluator if isinstance(env, Env) else HostEvaluator
    evaluator: EvaluateFn = made(env, policy, episodes, sampled=sampled)  # type: ignore[arg-type]
    return evaluator


def evaluator_of(strategy: Strategy, episodes: int, sampled: bool = False) -> EvaluateFn:
    """Return the evaluator of `strategy`, in an environment or by `EvalFns.evaluate`; raise `SettingsError` without.

    For the same strategy it is the same evaluator, compiled once.
    """
    made, name = programs_of(strategy), f"evaluator of {episodes}{' sampled' if sampled else ''}"
    if name not in made:
        made[name] = _evaluator_of(strategy, episodes, sampled)
    evaluator: EvaluateFn = made[name]
    return evaluator


def _evaluator_of(strategy: Strategy, episodes: int, sampled: bool) -> EvaluateFn:
    env = strategy.evaluation.env or (strategy.actor_fns.env if strategy.actor_fns else strategy.env)
    evaluate = strategy.evaluation.evaluate
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
    """The environment's own scalars `[E]`, as of the last step of each episode so far."""


def run_episodes(
    env: Env, policy: Policy, episodes: int, max_steps: int, params: PyTree, key: Key, *, sampled: bool = False
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Run `episodes` episodes to their ends; return the fields of an `Evaluation`. Pure."""
    asked, env = _asked(env, policy, sampled)
    reset_key, step_key = jax.random.split(key)
    start = begin_episodes(env, asked, episodes, params, reset_key)
    # The carry of a loop has all of its leaves from the start: an abstract step tells which scalars there will be.
    seen = jax.eval_shape(partial(_advance, env, asked, params, step_key), start).info
    start = start._replace(info={name: jnp.full(episodes, jnp.nan, jnp.float32) for name in seen})
    end = jax.lax.while_loop(
        lambda e: e.running.any() & (e.step < max_steps), partial(_advance, env, asked, params, step_key), start
    )
    return end.returns, end.lengths, ~end.running, columns_of_info(end.info)


def _asked(env: Env, policy: Policy, sampled: bool) -> tuple[Chooser, Env]:
    """Return how `policy` is asked in `env`, and that as an environment of one agent."""
    asked = chooser(policy, sampled)
    return (asked, env) if env.agents is None else (of_agents(asked, env.agents), as_single_env(env))


def begin_episodes(env: Env, asked: Chooser, episodes: int, params: PyTree, reset_key: Key) -> _Episodes:
    """Return `episodes` episodes before their first steps."""
    state, obs = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    state, obs = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (state, obs))
    finite = finite_rows(obs)
    return _Episodes(
        step=jnp.int32(0),
        env=state,
        carry=asked.begin(params, zero_invalid_rows(finite, obs)),
        # An episode whose first observation is not finite is over before its first step.
        returns=jnp.where(finite, jnp.float32(0), jnp.float32(jnp.nan)),
        lengths=jnp.zeros(episodes, jnp.int32),
        running=finite,
        info={},
    )


def columns_of_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's own scalars by the names that their columns have, as in training."""
    return {scalar_column(name): value for name, value in info.items()}


def _advance(env: Env, policy: Chooser, params: PyTree, key: Key, e: _Episodes) -> _Episodes:
    # All episodes step on until the last has ended. Whatever follows an end is masked by `running`.
    carry, action = policy.act(params, e.carry, key, e.step)
    keys = jax.random.split(fold(key, e.step), e.running.shape[0])
    state, out = jax.vmap(env.step)(e.env, action, keys)
    lengths = e.lengths + e.running
    terminated, truncated = (jnp.asarray(x, bool) for x in (out.terminated, out.truncated))
    if env.spec.time_limit is not None:
        truncated = truncated | (lengths >= env.spec.time_limit)
    finite = finite_rows((out.obs, out.reward))
    reward = jnp.where(finite, jnp.asarray(out.reward, jnp.float32), jnp.nan)
    # No auto-reset: what a policy would see of another episode is not counted anyway.
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
    """What evaluates the policy of a run, and how its score counts."""

    evaluator: EvaluateFn
    score: ScoreFn
    key: Key
    fixed: bool
    """Whether all evaluations begin in the same states."""
    confirms: bool
    """Whether a candidate for the best is evaluated a second time."""


class EvalOutcome(NamedTuple):
    """An evaluation, and whether the policy is the best."""

    evaluation: Evaluation
    score: float
    again: float | None
    """The score of the second look, if there was one."""
    is_best: bool
    is_to_keep: bool
    """Whether it is better than what is on disk: that can be poorer than the best so far, for that was damaged."""
    least_return: float
    """The lower of the mean returns of both looks; NaN if one is."""

    @property
    def kept(self) -> float:
        """The score that counts."""
        return self.score if self.again is None else self.again


def evaluate_and_confirm(
    rules: EvalRules, params: PyTree, opt_steps: int, ledger: Ledger, on_disk: float | None
) -> EvalOutcome:
    """Evaluate `params` after `opt_steps` optimisation steps, a candidate for the best twice; `ledger` takes note.

    `on_disk` is the score of the best policy there.
    """
    # By the optimisation step, not by the number of evaluations so far, which a resumption may change.
    key = jax.random.fold_in(rules.key, 0 if rules.fixed else opt_steps)
    evaluation, score = _evaluate_once(rules, params, key, ledger, "evaluate")
    least, again = mean_return(evaluation), None
    better = lambda score: math.isfinite(score) and (on_disk is None or score > on_disk)
    # A candidate is the highest of many noisy scores, and so probably too high. The second look is independent of it.
    if rules.confirms and (ledger.is_better(score) or better(score)):
        second, again = _evaluate_once(rules, params, confirm_key(key), ledger, "confirm")
        least = float(np.minimum(least, mean_return(second)))
    is_best = ledger.record_score(score, opt_steps, again)
    is_to_keep = math.isfinite(score) and better(score if again is None else again)
    return EvalOutcome(evaluation, score, again, is_best, is_to_keep, least)


def _evaluate_once(rules: EvalRules, params: PyTree, key: Key, ledger: Ledger, part: str) -> tuple[Evaluation, float]:
    """Evaluate once; return also the score. The time counts as `part`; the key is split."""
    with ledger.timed(part):
        evaluation = rules.evaluator(params, key)
        return evaluation, float(rules.score(evaluation))
