"""Sanity checks of rows: values beyond all possible returns, a support that is too narrow, greedy actions that return
far less than sampled ones.

Pure functions of a row, as from `program.summarise`: a dict of numbers or `None`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.agents.dqn import MUNCHAUSEN_CLIP
from jaxrl.registry import ALGORITHMS
from jaxrl.strategies.base import Strategy

FACTOR = 2.0
"""Warn about values above this multiple of the bound: estimates may overshoot it temporarily."""
OUTSIDE = 0.05
"""Warn if a larger share of the targets is outside of the support."""
ENTROPY = 10.0
"""Maximum entropy bonus for a temperature of 1: that of 22 000 equally likely actions."""


CHECKED = ("largest_reward", "largest_discount")
"""Metrics for these checks only; rows omit them."""
EXTREMES = ("", "_min", "_max")
"""Suffixes of the columns of a metric."""
WITHOUT_EXTREMES = ("reward_factor",)
"""Metrics that are constant in a run, and so have a single column."""
OMITTED = frozenset(
    [f"{name}{end}" for name in CHECKED for end in EXTREMES]
    + [f"{name}{end}" for name in WITHOUT_EXTREMES for end in EXTREMES[1:]]
)


class Extremes(NamedTuple):
    """Maxima over all transitions learnt from so far."""

    reward: float = 0.0
    """Largest magnitude of a reward."""
    discount: float = 0.0
    bonus: float = 0.0
    """What the agent adds to a reward, such as the entropy of its policy."""

    @property
    def bound(self) -> float:
        """Largest possible magnitude of a return, at least 1; infinite for a discount of 1."""
        return max(1.0, (self.reward + self.bonus) / (1 - self.discount)) if self.discount < 1 else math.inf


def columns_to_write(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of metrics without those for internal checks."""
    return {name: value for name, value in columns.items() if name not in OMITTED}


def extremes(row: Mapping[str, Any], agent: Mapping[str, Any], before: Extremes) -> Extremes:
    """Return the maxima `before`, updated with the interval of `row`; `agent` has the agent's settings."""
    size = lambda name: max((abs(x) for x in (_number(row, f"{name}_{end}") for end in ("min", "max"))), default=0.0)
    # SAC adds its entropy to rewards; Munchausen DQN adds its clipped log-policy to rewards and the entropy to values.
    bonus = size("temperature") * size("entropy")
    if munchausen := agent.get("munchausen"):
        bonus += -MUNCHAUSEN_CLIP * munchausen + ENTROPY * agent.get("munchausen_temperature", 0.0)
    came = Extremes(size("largest_reward"), size("largest_discount"), bonus)
    return Extremes(*(max(old, new) for old, new in zip(before, came, strict=True)))


def values_beyond(row: Mapping[str, Any], agent: Mapping[str, Any], allowed: Extremes) -> str | None:
    """Return a warning if the mean values of an interval exceed what rewards and discounts allow, else `None`."""
    # Unknown are the rewards of a custom strategy, and how much ReBRAC takes from the values of actions far from data.
    if "largest_reward_max" not in row or agent.get("critic_bc_coef"):
        return None
    for name in ("q", "value"):
        value = _number(row, name)
        if abs(value) > FACTOR * allowed.bound:
            entropy = " and entropy" if allowed.bonus else ""
            return (
                f"{name} reaches {value:.5g}, but rewards up to {allowed.reward:.4g}{entropy} and discount "
                f"{allowed.discount:.4g} allow at most {allowed.bound:.4g}: training has probably diverged; "
                f"try {_advice(agent)}"
            )
    return None


def support_missed(row: Mapping[str, Any], agent: Mapping[str, Any]) -> str | None:
    """Return a warning if many targets of an interval were outside of the support of c51 or `reppo`, else `None`."""
    share = _number(row, "out_of_support")
    if share <= OUTSIDE:
        return None
    ends = " and ".join(f"agent.{name} {agent[name]}" for name in ("v_min", "v_max") if agent.get(name) is not None)
    outside = f"{share:.0%} of the returns that are learnt lie outside of the support"
    if not ends:
        return (
            f"{outside} that follows from the rewards: what the agent adds to them, as entropy or a penalty, reaches "
            "further; set agent.v_min and agent.v_max"
        )
    return f"{outside}, by {ends}; set them wider, or leave them unset: they are then derived from the rewards"


def _number(row: Mapping[str, Any], name: str) -> float:
    """Return the number `name` of `row` if it is finite, else 0."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _advice(agent: Mapping[str, Any]) -> str:
    tries = ["agent.loss squared"] if agent.get("loss") == "huber" else []
    tries.append("a lower agent.lr")
    tries += ["a slower target (agent.tau, agent.target_interval)"] if "target_interval" in agent else []
    tries += ["a slower target (agent.tau)"] if "tau" in agent and "target_interval" not in agent else []
    return " or ".join([", ".join(tries[:-1]), tries[-1]] if tries[:-1] else tries)


# --- greedy and sampled actions -----------------------------------------------------------------------------------


ACTOR_CRITIC = "jaxrl.agents.actor_critic"
"""Module of the on-policy agents whose policies are stochastic."""
ERRORS, SHARE, LEAST = 4.0, 0.25, 5
"""A gap is large if it exceeds this number of standard errors and this share of the range of returns, given at least
`LEAST` episodes."""


class TrainingReturns(NamedTuple):
    """Summary of the returns of training episodes in an interval."""

    mean: float
    low: float
    high: float
    episodes: int


class EvalKind(NamedTuple):
    """How the policy of a run is evaluated."""

    actions: str | None
    """`greedy` or `sampled`; `None` for a custom evaluator."""
    hints: bool
    """Whether greedy evaluations and training episodes differ only in how actions are chosen."""


def eval_kind_of(strategy: Strategy, evaluator: object) -> EvalKind:
    """Return how `evaluator` evaluates a policy of `strategy`."""
    actions = getattr(evaluator, "actions", None)
    env = strategy.train_env
    algorithm = ALGORITHMS.get(str((strategy.info.settings or {}).get("algo")))
    # Returns in another environment, or with several agents, are not comparable.
    same = strategy.evaluation.env is None and not getattr(env, "eval_env", None) and not getattr(env, "agents", None)
    draws = algorithm is not None and algorithm.module == ACTOR_CRITIC
    return EvalKind(actions, actions == "greedy" and same and draws)


def training_returns(columns: Mapping[str, Any]) -> TrainingReturns | None:
    """Return the summary of an interval's episodes from its columns; `None` if none has ended."""
    mean, low, high = (columns.get(f"episode_return{end}") for end in ("", "_min", "_max"))
    if mean is None or low is None or high is None:
        return None
    return TrainingReturns(mean, low, high, int(columns.get("episodes") or 0))


def is_far_below(returns: np.ndarray, training: TrainingReturns | None) -> bool:
    """Return whether evaluation `returns` `[E]` are far below those of training.

    Only the extremes of training are known. The standard deviation is at most half their distance (Popoviciu 1935), so
    the standard error is overestimated.
    """
    evaluated = np.asarray(returns, np.float64)
    if training is None or min(len(evaluated), training.episodes) < LEAST:
        return False
    low, high = min(evaluated.min(), training.low), max(evaluated.max(), training.high)
    errors = (
        evaluated.std() / math.sqrt(len(evaluated)),
        (training.high - training.low) / 2 / math.sqrt(training.episodes),
    )
    gap = training.mean - evaluated.mean()
    return bool(gap > ERRORS * math.hypot(*errors) and gap > SHARE * (high - low))  # false if not finite


def hint(evaluated: float, trained: float) -> str:
    """Return the warning about greedy actions that return far less than sampled ones."""
    return (
        f"greedy actions return {evaluated:.4g} where sampled ones return {trained:.4g} in training, and the best "
        "policy is chosen by the former; see --eval-actions sampled"
    )
