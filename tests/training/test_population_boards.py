"""TensorBoard of a population: a curve for each setting, the means of its members' rows."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_runs import rows_in, values_of
from toys_trainer import small_dqn

import jaxrl
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.loop import Trainer
from jaxrl.training.population.scores import iqm
from jaxrl.tuning import tunable

LENGTH = {"max_opts": 40, "eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "quiet": True}


def curve(board: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by optimisation steps; a later one replaces those before."""
    return {step: value.simple_value for step, value in values_of(board) if value.tag == tag}


def means(run: Path, members: list[int], kind: str, column: str) -> dict[int, float]:
    """Return the mean of a column over members, by optimisation steps."""
    rows = [row for number in members for row in rows_in(run, number) if row["kind"] == kind]
    steps = sorted({row["opt_steps"] for row in rows})
    of = {step: np.array([row[column] for row in rows if row["opt_steps"] == step]) for step in steps}
    return {step: float(iqm(values) if column == "score" else values.mean()) for step, values in of.items()}


@pytest.mark.every_day("together")
@pytest.mark.parametrize("layout", ["spread", "together"])
def test_each_setting_has_the_means_of_its_members_under_the_tags_of_a_run(layout: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = jaxrl.population(small_dqn(), seeds=2, sweep={"agent.lr": [1e-2, 1e-3]}, layout=layout)
    Trainer(made, **LENGTH, run_dir=run).train()
    for setting, members in (("agent.lr=0.01", [0, 1]), ("agent.lr=0.001", [2, 3])):
        for kind, column in (("eval", "score"), ("eval", "eval_reward"), ("train", "loss"), ("train", "env_steps")):
            drawn = curve(run / "tensorboard" / setting, f"{kind}/{column}")
            assert drawn == pytest.approx(means(run, members, kind, column), rel=1e-6)
    assert {path.name for path in (run / "tensorboard").iterdir()} == {"agent.lr=0.01", "agent.lr=0.001"}


class Walk(NamedTuple):
    key: jax.Array
    walk: jax.Array
    pace: jax.Array


def test_settings_that_agree_in_six_digits_have_a_curve_and_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = lambda key: Walk(key, jnp.float32(0), tunable("agent.pace", 0.5))
    step = lambda state, key, t: (state._replace(walk=state.walk + state.pace), {"walk": state.walk})
    sweep, run = {"agent.pace": [0.5, 0.5000001, 0.75]}, tmp_path / "run"
    made = jaxrl.population(jaxrl.Strategy(init, step, 1, 1), sweep=sweep)
    evaluate = lambda params, key: Evaluation(np.asarray(params.walk)[None], np.ones(1), np.ones(1, bool))
    length = {"max_opts": 8, "record_interval": 4, "eval_interval": 8, "eval_episodes": 1}
    result = Trainer(made, evaluator=evaluate, **length, run_dir=run).train()
    names = ["agent.pace=0.5", "agent.pace=0.5000001", "agent.pace=0.75"]
    assert sorted(path.name for path in (run / "tensorboard").iterdir()) == names
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown if "IQM" in line and " of 1 " in line] == names
    assert sorted(line.split()[-1] for line in result.table().splitlines()[1:]) == names


def test_settings_whose_names_are_too_long_for_a_directory_have_a_curve_each(tmp_path: Path) -> None:
    name, run = "agent." + 130 * "é", tmp_path / "run"  # 266 bytes
    init = lambda key: Walk(key, jnp.float32(0), tunable(name, 0.5))
    step = lambda state, key, t: (state._replace(walk=state.walk + state.pace), {"walk": state.walk})
    strategy = jaxrl.Strategy(init, step, 1, 1)
    made = jaxrl.population(strategy, seeds=2, sweep={name: [0.25, 0.75]})
    Trainer(made, max_opts=40, record_interval=20, eval_interval=0, eval_episodes=0, quiet=True, run_dir=run).train()
    shown = {path.name: curve(path, "train/walk") for path in (run / "tensorboard").iterdir()}
    # Of the two bytes of the last letter only one is among the first 200.
    assert [*dict(sorted(shown.items()))] == [f"agent.{97 * 'é'}... (member {number})" for number in (0, 2)]
    for number, curve_of in zip((0, 2), (shown[one] for one in sorted(shown)), strict=True):
        assert curve_of == pytest.approx(means(run, [number, number + 1], "train", "walk"))


def test_seeds_of_one_setting_are_one_curve_that_goes_on(tmp_path: Path) -> None:
    run, made = tmp_path / "run", jaxrl.population(small_dqn(), seeds=2)
    Trainer(made, **{**LENGTH, "max_opts": 20}, run_dir=run).train()
    Trainer(made, **LENGTH, run_dir=run, resume=True).train()
    board = run / "tensorboard"
    assert all(path.is_file() for path in board.iterdir())
    steps = [step for step, value in values_of(board) if value.tag == "eval/score"]
    assert steps == [20, 40]
    assert curve(board, "eval/score") == pytest.approx(means(run, [0, 1], "eval", "score"), rel=1e-6)


def test_many_settings_and_changing_ones_are_one_curve(tmp_path: Path) -> None:
    sweep = {"agent.lr": jaxrl.log_uniform(1e-4, 1e-1)}
    several = jaxrl.population(small_dqn(), members=13, sweep=sweep)
    search = jaxrl.population(small_dqn(), members=4, sweep=sweep, search=jaxrl.PBT(20, share=0.4))
    for made, length in ((several, 20), (search, 40)):
        run = tmp_path / str(length)
        Trainer(made, **{**LENGTH, "max_opts": length}, run_dir=run).train()
        found = curve(run / "tensorboard", "eval/eval_reward")
        assert found == pytest.approx(means(run, [*range(len(made.members))], "eval", "eval_reward"), rel=1e-6)


def test_a_member_that_has_diverged_or_ended_is_not_waited_for(tmp_path: Path) -> None:
    stop = lambda report: report.opt_steps == 20 and next(ends)
    ends = iter([True, False, False])
    made, run = jaxrl.population(small_dqn(), seeds=3), tmp_path / "run"
    Trainer(made, **LENGTH, run_dir=run, stop=stop, workers=1).train()
    assert list(curve(run / "tensorboard", "eval/score")) == [20, 40]
    assert list(curve(run / "tensorboard", "train/loss")) == [20, 40]
