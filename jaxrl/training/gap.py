"""Evaluation beside training: the returns of both, and a hint where greedy actions do far worse than sampled ones."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.registry import ALGORITHMS
from jaxrl.strategies.base import Strategy

ACTOR_CRITIC = "jaxrl.agents.actor_critic"
"""Module of the agents that learn on-policy and draw their actions from what they learn."""
ERRORS, SHARE, LEAST = 4.0, 0.25, 5
"""Returns lie far apart by more than this number of standard errors, and by more than this share of their range; of
fewer episodes than `LEAST` nothing follows."""


class TrainingReturns(NamedTuple):
    """Returns of the training episodes of an interval in a few numbers."""

    mean: float
    low: float
    high: float
    episodes: int


class Judged(NamedTuple):
    """How the policy of a run is evaluated."""

    actions: str | None
    """`greedy` or `sampled`; `None` for an evaluator of the user's own."""
    hints: bool
    """Whether returns of greedy evaluations and of training are of the same episodes but for how actions are chosen."""


def judged_by(strategy: Strategy, evaluator: object) -> Judged:
    """Return how `evaluator` judges a policy of `strategy`."""
    actions = getattr(evaluator, "actions", None)
    env = strategy.env or (strategy.actor_fns.env if strategy.actor_fns else None)
    algorithm = ALGORITHMS.get(str((strategy.info.settings or {}).get("algo")))
    # An evaluation in another environment, or of games of several agents, has returns of its own.
    same = strategy.evaluation.env is None and not getattr(env, "judged", None) and not getattr(env, "agents", None)
    draws = algorithm is not None and algorithm.module == ACTOR_CRITIC
    return Judged(actions, actions == "greedy" and same and draws)


def training_returns(columns: Mapping[str, Any]) -> TrainingReturns | None:
    """Return what the columns of an interval hold of its episodes; `None` if none has ended."""
    mean, low, high = (columns.get(f"episode_return{end}") for end in ("", "_min", "_max"))
    if mean is None or low is None or high is None:
        return None
    return TrainingReturns(mean, low, high, int(columns.get("episodes") or 0))


def is_far_below(returns: np.ndarray, training: TrainingReturns | None) -> bool:
    """Return whether evaluation `returns` `[E]` lie far below those of training.

    Of training only the extremes are known, and no standard deviation is larger than half of their distance (Popoviciu
    1935), so that the standard error is rather taken too large.
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
    return bool(gap > ERRORS * math.hypot(*errors) and gap > SHARE * (high - low))  # false of what is not finite


def hint(evaluated: float, trained: float) -> str:
    """Return what to say where greedy actions return far less than sampled ones."""
    return (
        f"greedy actions return {evaluated:.4g} where sampled ones return {trained:.4g} in training, and the best "
        "policy is chosen by the former; see --eval-actions sampled"
    )
