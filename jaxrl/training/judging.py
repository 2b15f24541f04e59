"""How good a policy is: one evaluation, and a second one of a candidate for the best."""

import math
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.training.evaluator import EvaluateFn, Evaluation, ScoreFn, confirm_key, mean_return
from jaxrl.training.ledger import Ledger
from jaxrl.trees import Key, PyTree


class Judge(NamedTuple):
    """What evaluates a run, and by which rules."""

    evaluator: EvaluateFn
    score: ScoreFn
    key: Key
    fixed: bool
    """Whether all evaluations begin in the same states."""
    confirms: bool
    """Whether a candidate for the best is evaluated a second time."""


class Judgement(NamedTuple):
    """What was found of a policy."""

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


def judge(judge: Judge, params: PyTree, opt_steps: int, ledger: Ledger, on_disk: float | None) -> Judgement:
    """Evaluate `params` after `opt_steps` optimisation steps; `ledger` takes note.

    `on_disk` is the score of the best policy there.
    """
    key = jax.random.fold_in(judge.key, 0 if judge.fixed else opt_steps)
    evaluation, score = _look(judge, params, key, ledger, "evaluate")
    least, again = mean_return(evaluation), None
    better = lambda score: math.isfinite(score) and (on_disk is None or score > on_disk)
    if judge.confirms and (ledger.is_better(score) or better(score)):
        second, again = _look(judge, params, confirm_key(key), ledger, "confirm")
        least = float(np.minimum(least, mean_return(second)))
    is_best = ledger.record_score(score, opt_steps, again)
    is_to_keep = math.isfinite(score) and better(score if again is None else again)
    return Judgement(evaluation, score, again, is_best, is_to_keep, least)


def _look(judge: Judge, params: PyTree, key: Key, ledger: Ledger, part: str) -> tuple[Evaluation, float]:
    """Evaluate once; return also the score. The time counts as `part`; the key is split."""
    with ledger.timed(part):
        evaluation = judge.evaluator(params, key)
        return evaluation, float(judge.score(evaluation))
