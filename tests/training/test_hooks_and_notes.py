"""Hooks by the step, several of a kind, and numbers of one's own in the rows of training and of evaluation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_runs import rows_in
from toys_trainer import counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.evaluator import Evaluation


def judged(params: Any, key: object) -> Evaluation:
    """Two episodes; of the first, the step is the return, and only it succeeds."""
    step = float(params.steps)
    columns = {"success": np.array([True, False]), "info/cost": np.array([step, 3 * step])}
    return Evaluation(np.array([step, 0.0]), np.array([1, 2]), np.ones(2, bool), columns)


def train(
    hooks: jaxrl.Hooks | None = None, max_opts: int = 8, **settings: Any
) -> tuple[jaxrl.Trainer, jaxrl.MemoryRecorder]:
    rows = jaxrl.MemoryRecorder()
    settings = {"eval_interval": 4, "record_interval": 2, "save_interval": 4, "quiet": True, **settings}
    trainer = jaxrl.Trainer(counting(), max_opts=max_opts, evaluator=judged, hooks=hooks, recorders=[rows], **settings)
    trainer.train()
    return trainer, rows


def column(rows: jaxrl.MemoryRecorder, name: str, kind: str = "train") -> list[Any]:
    return [row.get(name) for row in rows.rows if row["kind"] == kind]


def test_hooks_are_called_at_their_steps_and_several_of_a_kind_in_order() -> None:
    seen: list[tuple[Any, ...]] = []
    at = lambda trainer: int(trainer.state.steps)
    hooks = jaxrl.Hooks(
        start=lambda t: seen.append(("start", at(t))),
        chunk=lambda t, progress: seen.append(("chunk", progress.opt_steps)),
        before_evaluation=[lambda t: seen.append(("first", at(t))), lambda t: seen.append(("second", at(t)))],
        evaluation=lambda t, evaluation, best: seen.append(("after", at(t), evaluation.returns[0], best)),
        record=(lambda t, row: seen.append(("record", at(t), row["opt_steps"])),),
        end=lambda t, result: seen.append(("end", result.summary["stop"], result.summary["opt_steps"])),
    )
    falling = lambda evaluation: -float(evaluation.returns[0])
    train(hooks, score=falling, confirm_best=False, eval_at_start=False, max_chunk=2)
    evaluated = lambda step: [("first", step), ("second", step), ("after", step, float(step), step == 4)]
    assert seen == [
        ("start", 0),
        *(("chunk", 2), ("record", 2, 2)),
        *(("chunk", 4), *evaluated(4), ("record", 4, 4)),
        *(("chunk", 6), ("record", 6, 6)),
        *(("chunk", 8), *evaluated(8), ("record", 8, 8)),
        ("end", "max_opts", 8),
    ]


def test_what_a_hook_notes_is_in_the_next_row_as_a_mean_and_only_there() -> None:
    def note(trainer: jaxrl.Trainer, evaluation: Evaluation, is_best: bool) -> None:
        trainer.note(mine=trainer.state.steps, other=np.float32(0.5))
        trainer.note(mine=6)

    _, rows = train(jaxrl.Hooks(evaluation=note), eval_at_start=False)
    # Evaluated, and noted, at 4 and 8, before the rows of these steps are written.
    assert column(rows, "mine") == [None, (4 + 6) / 2, None, (8 + 6) / 2]
    assert column(rows, "other") == [None, 0.5, None, 0.5]


def test_a_run_that_was_left_has_the_row_that_a_whole_one_has(tmp_path: Path) -> None:
    """Noted at 4 and saved there; the row comes at 6, after the run was stopped, and resumed or gone on with."""

    def note(trainer: jaxrl.Trainer, evaluation: Evaluation, is_best: bool) -> None:
        trainer.note(mine=int(trainer.state.steps))

    settings: dict[str, Any] = {"record_interval": 6, "eval_at_start": False}
    hooks = jaxrl.Hooks(evaluation=note)
    _, whole = train(hooks, 12, **settings)
    assert column(whole, "mine") == [4.0, (8 + 12) / 2]

    settings |= {"max_opts": 12, "eval_interval": 4, "save_interval": 4, "quiet": True}

    def left(**where: Any) -> jaxrl.Trainer:
        trainer = jaxrl.Trainer(counting(), evaluator=judged, hooks=hooks, **where, **settings)
        for report in trainer:
            if report.opt_steps == 4:
                break
        return trainer

    run = str(tmp_path / "run")
    left(run_dir=run)
    jaxrl.Trainer(counting(), evaluator=judged, hooks=hooks, resume=run, **settings).train()
    assert [row.get("mine") for row in rows_in(Path(run)) if row["kind"] == "train"] == [4.0, 10.0]

    in_memory = jaxrl.MemoryRecorder()
    left(recorders=[in_memory]).train()
    assert column(in_memory, "mine") == [4.0, 10.0]


def test_notes_that_cannot_be_are_refused_and_names_of_columns_are_kept_for_them() -> None:
    told: list[str] = []

    def note(trainer: jaxrl.Trainer, row: Any) -> None:
        for values in ({"t": 1.0}, {"opt_steps": 1}, {"mine": "much"}, {"mine": None}):
            with pytest.raises(SettingsError) as error:
                trainer.note(**values)
            told.append(str(error.value))

    train(jaxrl.Hooks(record=note), max_opts=2, eval_interval=0)
    assert told == [
        "note: rows have a column 't' of their own; take another name",
        "note: rows have a column 'opt_steps' of their own; take another name",
        "note: mine is 'much'; expected a number",
        "note: mine is None; expected a number",
    ]
    # Before the first row nobody knows its columns; the row's own stays, and an event tells.
    _, rows = train(jaxrl.Hooks(start=lambda trainer: trainer.note(t=99.0)), max_opts=2, eval_interval=0)
    assert column(rows, "t") == [0.5]
    assert "note: rows have a column 't' of their own, so that it was left out" in column(rows, "message", "event")
    ended, _ = train(max_opts=2, eval_interval=0)
    for trainer in (ended, jaxrl.Trainer(counting(), evaluator=judged)):
        with pytest.raises(SettingsError, match=r"nothing is being trained; call note\(\) in a hook"):
            trainer.note(mine=1.0)


def test_a_members_number_is_no_name_for_a_note(tmp_path: Path) -> None:
    hooks = jaxrl.Hooks(start=lambda trainer: trainer.note(member=1.0))
    made = jaxrl.population(counting(), seeds=2)
    with pytest.raises(SettingsError, match="note: rows have a column 'member' of their own"):
        jaxrl.Trainer(made, max_opts=4, hooks=hooks, run_dir=str(tmp_path / "run"), quiet=True).train()


def test_columns_of_ones_own_are_in_rows_of_evaluations_and_episodes_and_a_run_can_be_judged_by_them(
    tmp_path: Path,
) -> None:
    judge = lambda evaluation: -float(evaluation.columns["info/cost"].mean())
    trainer, _ = train(run_dir=str(tmp_path), score=judge, eval_at_start=False)
    assert trainer.ledger.best_score == -8.0
    lines = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    evals = [row for row in lines("metrics.jsonl") if row["kind"] == "eval"]
    assert [(row["eval_success"], row["eval_info/cost"]) for row in evals] == [(0.5, 8.0), (0.5, 16.0)]
    assert [(row["success"], row["info/cost"]) for row in lines("eval_episodes.jsonl")][:2] == [(1.0, 4.0), (0.0, 12.0)]


@pytest.mark.parametrize("name", ["reward", "length", "return", "opt_steps", "episode"])
def test_columns_of_ones_own_with_names_that_the_rows_have_are_refused(name: str) -> None:
    evaluator = lambda params, key: judged(params, key)._replace(columns={"success": np.ones(2), name: np.ones(2)})
    said = f"evaluator: rows have a column '{name}' of their own; give that of the evaluation another name"
    with pytest.raises(SettingsError, match=said):
        jaxrl.Trainer(counting(), max_opts=4, eval_interval=4, evaluator=evaluator, quiet=True).train()


# --- what is no callback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hooks": lambda trainer: None}, "hooks is function; expected jaxrl.Hooks"),
        ({"hooks": jaxrl.Hooks(record=5)}, "hooks: record is 5; expected a function"),
        ({"hooks": jaxrl.Hooks(end=[print, "x"])}, "hooks: end is 'x'; expected a function"),
        ({"stop": 5}, "stop is 5; expected a function"),
        ({"score": "return"}, "score is 'return'; expected a function"),
        ({"evaluator": 5}, "evaluator is 5; expected a function"),
        ({"interrupt": 5}, r"interrupt is int; expected jaxrl.Interrupt\(\)"),
        ({"config": {}}, "config is dict; expected jaxrl.TrainerConfig"),
        ({"resume": 5}, "resume is 5; expected a bool, or the directory of a run"),
        ({"run_dir": 5}, "run_dir is 5; expected a path"),
        ({"run_dir": "a\0b"}, "has a null character"),
    ],
)
def test_what_is_of_another_type_is_refused_before_anything_begins(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        jaxrl.Trainer(counting(), **{"max_opts": 8, "evaluator": judged, **settings})


@pytest.mark.parametrize("score", [None, "x", np.zeros(2)])
def test_a_score_that_is_no_number_is_named(score: Any) -> None:
    with pytest.raises(SettingsError, match=r"score is .*; expected a number"):
        train(score=lambda evaluation: score)


@pytest.mark.parametrize(
    "again",
    [lambda trainer: trainer.train(), lambda trainer: trainer.train(max_opts=100), lambda trainer: next(iter(trainer))],
)
def test_a_trainer_that_trains_cannot_begin_again_and_goes_on(again: Any, tmp_path: Path) -> None:
    said = []

    def begin_again(trainer: jaxrl.Trainer, row: Any) -> None:
        with pytest.raises(SettingsError, match="this trainer is training already") as refused:
            again(trainer)
        said.append(refused)

    trainer, rows = train(jaxrl.Hooks(record=begin_again), run_dir=str(tmp_path))
    assert len(said) == 4
    assert column(rows, "opt_steps") == [2, 4, 6, 8]
    assert trainer.config.max_opts == 8
    assert trainer.train(max_opts=10).summary["opt_steps"] == 10


def test_the_last_hook_may_train_on() -> None:
    once = [16]
    hooks = jaxrl.Hooks(end=lambda trainer, result: once and trainer.train(max_opts=once.pop()))
    trainer, _ = train(hooks)
    assert trainer.result().summary["opt_steps"] == 16
