"""The learning curve of a result: what it holds after going on, and what is drawn of it."""

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from toys_runs import rows_in
from toys_trainer import Scripted, counting, small_dqn

import jaxrl
from jaxrl.errors import SettingsError

mpl.use("agg")

LENGTH: dict[str, Any] = {"eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "quiet": True}


def logged(run: Path) -> list[tuple[int, int, float, float | None]]:
    """Return what a run's log has of each evaluation."""
    rows = rows_in(run)
    names = ("opt_steps", "env_steps", "score", "train_return")
    return [tuple(row[name] for name in names) for row in rows if row["kind"] == "eval"]


def test_the_curve_is_that_of_the_log_however_the_run_has_gone_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = jaxrl.Trainer(small_dqn(), run_dir=run, max_opts=40, **LENGTH)
    assert [point.opt_steps for point in trainer.train().curve] == [20, 40]
    trainer.train(max_opts=60)
    resumed = jaxrl.Trainer(small_dqn(), run_dir=run, max_opts=80, resume=True, **LENGTH).train()
    assert list(resumed.curve) == logged(run)
    assert [point.opt_steps for point in resumed.curve] == [20, 40, 60, 80]
    whole = jaxrl.Trainer(small_dqn(), max_opts=40, **LENGTH)  # in memory, without a directory
    whole.train()
    assert whole.train(max_opts=80).curve == resumed.curve


def test_scores_that_are_not_finite_are_left_out_of_the_picture() -> None:
    scored = Scripted([1.0], [math.nan], [3.0])
    trainer = jaxrl.Trainer(counting(), evaluator=scored, max_opts=30, eval_interval=10, confirm_best=False, quiet=True)
    result = trainer.train()
    assert [point.score for point in result.curve] == [1.0, None, 3.0]
    (line,) = [line for line in result.plot().lines if line.get_label() == "evaluation score"]
    np.testing.assert_array_equal(line.get_ydata(), [1.0, 3.0])
    np.testing.assert_array_equal(line.get_xdata(), [result.curve[0].env_steps, result.curve[2].env_steps])


def test_a_population_draws_each_member_in_the_colour_of_its_setting() -> None:
    made = jaxrl.population(small_dqn(), seeds=2, sweep={"agent.lr": [1e-3, 1e-4]})
    result = jaxrl.Trainer(made, max_opts=40, **LENGTH).train()
    axes = result.plot()
    assert len(axes.lines) == 4
    assert len({line.get_color() for line in axes.lines}) == 2
    assert sorted(text.get_text() for text in axes.get_legend().texts) == ["agent.lr=0.0001", "agent.lr=0.001"]
    drawn = {tuple(line.get_ydata()) for line in axes.lines}
    assert drawn == {tuple(point.score for point in member.result.curve) for member in result.members}


def test_without_evaluations_there_is_nothing_to_draw() -> None:
    result = jaxrl.Trainer(counting(), max_opts=10, quiet=True).train()
    with pytest.raises(SettingsError, match="nothing was evaluated, so there is no curve; set eval_interval"):
        result.plot()
