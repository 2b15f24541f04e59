"""Recorders: lines that can be read back, mended logs, TensorBoard's own reader, and plain or live output."""

import io
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from toys_runs import full_disk, values_of
from toys_trainer import Scripted, counting

import jaxrl
from jaxrl.training.recorders import (
    ConsoleRecorder,
    JSONLRecorder,
    Progress,
    Recorders,
    RunInfo,
    TensorBoardRecorder,
    console,
)

TRAIN = {"kind": "train", "opt_steps": 10, "env_steps": 100, "wall_s": 1.0, "loss": 0.5, "episode_return": None}
EVAL = {
    "kind": "eval", "opt_steps": 10, "env_steps": 100, "wall_s": 1.0, "eval_reward": 7.5, "eval_reward_std": 0.5,
    "eval_reward_min": 7.0, "eval_reward_max": 8.0, "eval_length": 9.0, "episodes": 2, "unfinished": 1, "is_best": True,
}  # fmt: skip


def test_nan_and_infinity_are_null_in_rows_that_can_be_read_at_once(tmp_path: Path) -> None:
    JSONLRecorder(tmp_path / "log").write({**TRAIN, "loss": float("nan"), "q": float("inf")})
    row = json.loads((tmp_path / "log").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row == {**TRAIN, "loss": None, "q": None}


def test_damaged_lines_are_left_out_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    good = [json.dumps({"kind": "train", "opt_steps": step}).encode() + b"\n" for step in (1, 2, 3, 9)]
    bad = [b'{"opt_steps": 1, "kind": []}\n', b'{"opt_steps": 2, "name": "\xff"}\n']
    path.write_bytes(good[0] + bad[0] + good[1] + bad[1] + good[2] + good[3] + b'{"opt_st')
    JSONLRecorder(path).rewind(3)
    assert path.read_bytes() == b"".join(good[:3])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "2 of its lines are no rows and left out (2, 4)" in said
    JSONLRecorder(path).rewind(3)
    assert capsys.readouterr().err == ""


def test_a_large_log_is_rewound_line_by_line(tmp_path: Path) -> None:
    path, rows = tmp_path / "log", 50_000
    with path.open("w") as file:
        file.writelines(f'{{"kind": "train", "opt_steps": {step}, "name": "{"x" * 99}"}}\n' for step in range(rows))
    tracemalloc.start()
    try:
        JSONLRecorder(path).rewind(rows - 2)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.read_bytes().count(b"\n") == rows - 1
    assert most < path.stat().st_size / 10


@pytest.mark.parametrize("torn", ["", "no row\n"], ids=["whole", "damaged"])
def test_a_log_that_a_full_disk_could_not_rewind_has_every_later_row_once(
    torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter log needs no room, and one with another beginning waits for it; all rows stay in order."""
    path, recorders = tmp_path / "log", Recorders([JSONLRecorder(tmp_path / "log")])
    row = lambda step, attempt: {"kind": "train", "opt_steps": step, "attempt": attempt}
    path.write_text(torn)
    for step in (10, 20, 30):
        recorders.write(row(step, 1))
    before = path.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)  # no further file is written
        recorders.rewind(20)
        recorders.write(row(30, 2))
        assert path.read_bytes().startswith(before) == bool(torn)
    recorders.write(row(40, 2))
    recorders.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [row(10, 1), row(20, 1), row(30, 2), row(40, 2)]


def test_tensorboard_has_the_same_scalars_on_the_opt_steps_axis(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path / "board")
    recorder.write(TRAIN)
    recorder.write(EVAL)
    recorder.write(
        {"kind": "event", "opt_steps": 10, "env_steps": 100, "wall_s": 1.0, "event": "note", "message": "hello"}
    )
    recorder.close()
    scalars = [(value.tag, step, value.simple_value) for step, value in values_of(tmp_path / "board")]
    assert ("train/loss", 10, 0.5) in scalars
    assert ("eval/eval_reward", 10, 7.5) in scalars
    assert not [tag for tag, _, _ in scalars if "episode_return" in tag or "is_best" in tag or "message" in tag]


def test_off_a_terminal_a_silent_half_minute_ends_with_a_line_that_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    out = io.StringIO()
    recorder = ConsoleRecorder(Console(file=out, soft_wrap=True))
    for now in (110.0, 129.0, 131.0, 132.0, 160.0):
        recorder.tick(Progress(int(now), 1_500, 20_000, 4_321.0, 4.0))
    recorder.write(EVAL)
    for now in (180.0, 189.0, 191.0):
        recorder.tick(Progress(int(now), 1_500, 20_000, 4_321.0, 4.0))
    first, evaluation, last = out.getvalue().splitlines()
    assert first.split("  ")[-6:] == ["1,500 env steps", "4,321 opts/s", "4 s left", "train -", "last -", "best -"]
    assert [line.split("/")[0].strip() for line in (first, last)] == ["131", "191"]
    assert "7.5 +- 0.5 over 2 episodes" in evaluation
    assert "last 7.5" in last


def test_after_a_resumption_the_returns_before_it_are_the_last_and_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_S", 0.0)
    how = {"eval_interval": 10, "confirm_best": False, "run_dir": tmp_path / "run", "quiet": True}
    for length, evaluator in ((20, Scripted([9.0], [5.0])), (30, Scripted([6.0]))):
        out = io.StringIO()
        recorders = [ConsoleRecorder(Console(file=out, soft_wrap=True))]
        resumed = {"resume": length == 30, "evaluator": evaluator, "recorders": recorders}
        jaxrl.Trainer(counting(), max_opts=length, **resumed, **how).train()
    first = next(line for line in out.getvalue().splitlines() if " last " in line)
    assert "  last 5  best 9" in first


def test_rows_without_numbers_are_no_returns_before_a_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_S", 0.0)
    how = {"eval_interval": 10, "confirm_best": False, "run_dir": tmp_path / "run", "quiet": True}
    jaxrl.Trainer(counting(), max_opts=20, evaluator=Scripted([9.0], [5.0]), **how).train()
    log, out = tmp_path / "run" / "metrics.jsonl", io.StringIO()
    log.write_text(log.read_text().replace('"eval_reward": 5.0', '"eval_reward": "x"'))
    recorders = [ConsoleRecorder(Console(file=out, soft_wrap=True))]
    resumed = {"resume": True, "evaluator": Scripted([6.0]), "recorders": recorders}
    with pytest.warns(UserWarning, match="was changed"):
        jaxrl.Trainer(counting(), max_opts=30, **resumed, **how).train()
    assert "last -  best 9" in out.getvalue()
    assert "left out" not in capsys.readouterr().err


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return what shows rows on a terminal of `width` columns, or in a file, at a moment without a live line."""
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def show(*rows: dict[str, Any], width: int | None, evaluates: bool = True) -> list[str]:
        out = io.StringIO()
        terminal = {"force_terminal": width is not None, "width": width or 200}
        recorder = ConsoleRecorder(Console(file=out, soft_wrap=True, highlight=False, **terminal))
        recorder.begin(RunInfo("run", None, {"eval_interval": 100 * evaluates, "eval_episodes": 20}, (), 0))
        recorder.actions = "greedy"
        recorder.tick(Progress(10, 100, 20, 100.0, 35.0))
        for row in rows:
            recorder.write(row)
        recorder.close()
        return out.getvalue().splitlines()

    return show


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (
            None,
            "10 opts          100 env steps  return       7.5 +- 0.5 over 2 episodes{}  train -5.6  best  35 s left",
        ),
        (40, "10 opts  return       7.5  best"),
        (60, "10 opts  return       7.5  train -5.6  best"),
        (80, "10 opts  return       7.5{}  train -5.6  best  35 s left"),
    ],
)
def test_an_evaluation_stands_beside_the_training_and_the_first_names_its_actions(
    shown: Callable[..., list[str]], width: int | None, text: str
) -> None:
    row = {**EVAL, "unfinished": 0, "train_return": -5.6}
    first, second = shown(row, row, width=width)
    assert first.strip() == text.format(", greedy actions" if width != 60 else "")
    assert second.strip().startswith(text.split("{}")[0].split(" +-")[0])
    assert "actions" not in second
    assert max(len(first), len(second)) <= (width or 200)


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (None, "2,000 opts       64,000 env steps  train 21.5  explained variance 0.83  35 s left"),
        (40, "2,000 opts  train 21.5  35 s left"),
        (60, "2,000 opts       64,000 env steps  train 21.5  35 s left"),
        (80, "2,000 opts       64,000 env steps  train 21.5  35 s left"),
    ],
)
def test_without_evaluations_each_record_shows_the_training_return(
    shown: Callable[..., list[str]], width: int | None, text: str
) -> None:
    counters = {"opt_steps": 2_000, "env_steps": 64_000, "wall_s": 1.0}
    row = {"kind": "train", **counters, "episode_return": 21.5, "explained_variance": 0.834}
    assert [line.strip() for line in shown(row, width=width, evaluates=False)] == [text]
    assert shown(row, width=width) == []


def test_the_console_tells_what_a_second_look_came_to_and_the_best_is_what_it_confirmed() -> None:
    text = io.StringIO()
    recorder = ConsoleRecorder(Console(file=text, force_terminal=True, width=200, soft_wrap=True, highlight=False))
    for score, again, is_best in ((7.5, 6.25, True), (9.0, 5.0, False), (2.0, None, False)):
        recorder.write({**EVAL, "score": score, "confirm_score": again, "is_best": is_best})
    recorder.tick(Progress(1_500, 15_000, 20_000, 4_321.0, 4.0))
    recorder.close()
    first, second, third, live = text.getvalue().split("\n", 3)
    assert first.endswith("1 unfinished  best, confirmed at 6.25")
    assert second.endswith("1 unfinished  not kept as best: 5 on re-evaluation")
    assert third.endswith("1 unfinished")
    for part in ("1,500/20,000 opts", "15,000 env steps", "4,321 opts/s", "4 s left", "last 7.5", "best 6.25"):
        assert part in live


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ["2,000/19,800 opts", "12 s left"]),
        (60, ["2,000/19,800 opts", "800 opts/s", "12 s left", "last -"]),
        (80, ["2,000/19,800 opts", "11,000 env steps", "800 opts/s", "12 s left", "last -", "best -"]),
        (160, ["2,000/19,800 opts", "━", "11,000 env steps", "800 opts/s", "12 s left", "train -", "last -", "best -"]),
    ],
)
def test_a_narrow_terminal_keeps_the_counter_and_drops_what_does_not_fit(width: int, shown: list[str]) -> None:
    """No line is wider than the terminal: one that wraps could not be taken back, and would stay after the end."""
    out = io.StringIO()
    recorder = ConsoleRecorder(Console(file=out, force_terminal=True, width=width, soft_wrap=True, highlight=False))
    recorder.stage("compiling")
    recorder.tick(Progress(2_000, 11_000, 19_800, 800.0, 12.0))
    recorder.close()
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    assert max(map(len, lines)) <= width
    live = next(line for line in reversed(lines) if "opts" in line)
    every = ["2,000/19,800 opts", "━", "11,000 env steps", "800 opts/s", "12 s left", "train -", "last -", "best -"]
    assert [part for part in every if part in live] == shown
    assert not live.rstrip().endswith(("…", "11,000", "12"))
    assert out.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, "return       7.5  best"),
        (60, "return       7.5 +- 0.5  1 unfinished  best"),
        (90, "100 env steps  return       7.5 +- 0.5  1 unfinished  best"),
        (120, "100 env steps  return       7.5 +- 0.5 over 2 episodes  1 unfinished  best, confirmed at 7"),
    ],
)
def test_rows_fit_a_narrow_terminal_and_say_first_how_good_it_is(width: int, shown: str) -> None:
    out = io.StringIO()
    recorder = ConsoleRecorder(Console(file=out, force_terminal=True, width=width, soft_wrap=True, highlight=False))
    recorder.write({**EVAL, "confirm_score": 7.0})
    message = "the training state takes 0.655 MB, and a path of some length: runs/one/checkpoints"
    recorder.write({"kind": "event", "opt_steps": 20, "event": "note", "message": message})
    row, *event = out.getvalue().splitlines()
    assert row.split("opts")[1].strip() == shown
    assert max(map(len, (row, *event))) <= width
    assert " ".join(" ".join(event).split()) == f"20 opts {message}"
