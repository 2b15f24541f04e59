"""What is wrong with a run, by its rows: values that no return can have, a support that is too narrow, greedy actions
that return far less than sampled ones.

Pure functions of a row, a dict of numbers or `None`, as of `program.summarise`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.agents.dqn import MUNCHAUSEN_CLIP
from jaxrl.registry import ALGORITHMS
from jaxrl.strategies.base import Strategy

FACTOR = 2.0
"""Times the bound from which on values are told: what is learnt may overshoot a little on its way."""
OUTSIDE = 0.05
"""Share of the targets beyond the support from which on it is told."""
ENTROPY = 10.0
"""Most that an entropy adds for a temperature of 1: that of 22 000 actions, all alike."""


CHECKED = ("largest_reward", "largest_discount")
"""Metrics that are measured for these checks alone; rows do not have them."""
EXTREMES = ("", "_min", "_max")
"""Endings of the columns that a metric has."""
WITHOUT_EXTREMES = ("reward_factor",)
"""Metrics that are the same throughout a run; rows have them in one column each."""
LEFT_OUT = frozenset(
    [f"{name}{end}" for name in CHECKED for end in EXTREMES]
    + [f"{name}{end}" for name in WITHOUT_EXTREMES for end in EXTREMES[1:]]
)


class Extremes(NamedTuple):
    """The largest numbers over all transitions learnt from so far."""

    reward: float = 0.0
    """Its size, with or without sign."""
    discount: float = 0.0
    bonus: float = 0.0
    """What the agent itself adds to a reward, such as the entropy of its policy."""

    @property
    def bound(self) -> float:
        """The largest size that a return can have, at least 1; infinite under a discount of 1."""
        return max(1.0, (self.reward + self.bonus) / (1 - self.discount)) if self.discount < 1 else math.inf


def columns_to_write(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of metrics that somebody reads."""
    return {name: value for name, value in columns.items() if name not in LEFT_OUT}


def extremes(row: Mapping[str, Any], agent: Mapping[str, Any], before: Extremes) -> Extremes:
    """Return the largest numbers so far, with the interval of `row`, of an agent with these settings."""
    size = lambda name: max((abs(x) for x in (_number(row, f"{name}_{end}") for end in ("min", "max"))), default=0.0)
    # SAC adds its entropy to rewards, Munchausen's DQN its clipped log-policy, and to values the entropy.
    bonus = size("temperature") * size("entropy")
    if munchausen := agent.get("munchausen"):
        bonus += -MUNCHAUSEN_CLIP * munchausen + ENTROPY * agent.get("munchausen_temperature", 0.0)
    came = Extremes(size("largest_reward"), size("largest_discount"), bonus)
    return Extremes(*(max(old, new) for old, new in zip(before, came, strict=True)))


def values_beyond(row: Mapping[str, Any], agent: Mapping[str, Any], allowed: Extremes) -> str | None:
    """Say by how much the mean values of an interval exceed what rewards and discounts allow; `None` if they do not."""
    if "largest_reward_max" not in row:
        return None  # a strategy of one's own, of whose rewards nothing is known
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
    """Say which share of an interval's targets was beyond the support of c51 or `reppo`; `None` if it is small."""
    share = _number(row, "out_of_support")
    if share <= OUTSIDE:
        return None
    ends = " and ".join(f"agent.{name} {agent[name]}" for name in ("v_min", "v_max") if agent.get(name) is not None)
    return (
        f"{share:.0%} of the returns that are learnt lie outside of the support, by {ends or 'its bounds'}; "
        "set them wider, or leave them unset: they are then derived from the rewards"
    )


def _number(row: Mapping[str, Any], name: str) -> float:
    """Return the finite number `name` of `row`, or 0."""
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


class EvalKind(NamedTuple):
    """How the policy of a run is evaluated."""

    actions: str | None
    """`greedy` or `sampled`; `None` for an evaluator of the user's own."""
    hints: bool
    """Whether returns of greedy evaluations and of training are of the same episodes but for how actions are chosen."""


def eval_kind_of(strategy: Strategy, evaluator: object) -> EvalKind:
    """Return how `evaluator` evaluates a policy of `strategy`."""
    actions = getattr(evaluator, "actions", None)
    env = strategy.env or (strategy.actor_fns.env if strategy.actor_fns else None)
    algorithm = ALGORITHMS.get(str((strategy.info.settings or {}).get("algo")))
    # An evaluation in another environment, or of games of several agents, has returns of its own.
    same = strategy.evaluation.env is None and not getattr(env, "eval_env", None) and not getattr(env, "agents", None)
    draws = algorithm is not None and algorithm.module == ACTOR_CRITIC
    return EvalKind(actions, actions == "greedy" and same and draws)


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
