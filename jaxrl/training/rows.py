"""The rows of the logs."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl.training.evaluator import Evaluation


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
    }


def episode_rows(counters: dict[str, int], evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Return a row for each episode of an evaluation."""
    columns = zip(evaluation.returns, evaluation.lengths, evaluation.finished, strict=True)
    for episode, (value, length, finished) in enumerate(columns):
        yield {
            **counters,
            "episode": episode,
            "return": float(value),
            "length": int(length),
            "finished": bool(finished),
        }
