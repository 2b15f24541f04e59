"""The logs that members of a population share: full disks, lines by strangers, and what is read of them."""

import base64
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_population import go_on
from toys_runs import full_disk, read_lines, rows_about_all, rows_in, shown_values
from toys_trainer import small_dqn

import jaxrl
from jaxrl import verify
from jaxrl.registry import RECORDERS, RecorderRow
from jaxrl.reports.read import read_runs
from jaxrl.training.loop import Trainer
from jaxrl.training.recorders import Recorder, RunInfo
from jaxrl.training.recorders.service import summary_of
from jaxrl.training.storage.logs import damage
from jaxrl.training.storage.population_files import MemberDir, PopulationFiles
from jaxrl.training.storage.run_dir import METRICS, read_members
from tests.reliability.test_divergence import poisoned

LENGTH = {"max_opts": 20, "eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "quiet": True}


def row(step: int, kind: str = "train") -> bytes:
    """Return a row of a log."""
    return json.dumps({"kind": kind, "opt_steps": step}).encode() + b"\n"


def steps(run: Path, member: int, kind: str = "eval") -> list[int]:
    """Return the optimisation steps of a member's rows of a kind."""
    return [row["opt_steps"] for row in rows_in(run, member) if row["kind"] == kind]


# --- full disks ---------------------------------------------------------------------------------------------------


def test_what_waits_of_the_population_and_of_others_outlives_a_member_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PopulationFiles(tmp_path, None)
    log = files.log(METRICS)
    log.append(0, row(10))
    with monkeypatch.context() as full:
        full.setattr(os, "write", full_disk)
        log.append_own(row(10, "population"))
        log.append(0, row(20))
        log.append(1, row(20))
        log.rewind(0, 10)
    log.append(0, row(30))
    files.close()
    assert [one["opt_steps"] for one in rows_about_all(tmp_path)] == [10]
    assert (steps(tmp_path, 0, "train"), steps(tmp_path, 1, "train")) == ([10, 30], [20])
    for number in (0, 1):
        member = MemberDir(files, number)
        assert damage(member.open_log, {"logs": member.log_sums()}) == []


def test_a_disk_too_full_to_rewind_the_log_leaves_that_for_later_and_no_member_loses_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PopulationFiles(tmp_path, None)
    for number in (0, 1):
        MemberDir(files, number).write_config({})
        for step in (10, 20):
            files.log(METRICS).append(number, row(step))
    files.close()
    again = PopulationFiles(tmp_path, lambda members: dict.fromkeys(members, 10)).log(METRICS)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        again.rewind(0, 10)
        again.append(0, row(15))
        again.rewind(1, 10)
        again.append(1, row(16))
        again.rewind(1, 10)
        assert (steps(tmp_path, 0, "train"), steps(tmp_path, 1, "train")) == ([10, 20], [10, 20])
        assert (again.read(0), again.read(1)) == (row(10), row(10))
    again.append(1, row(20))
    assert (steps(tmp_path, 0, "train"), steps(tmp_path, 1, "train")) == ([10, 15], [10, 20])


def test_logs_are_closed_although_the_file_of_members_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PopulationFiles(tmp_path, None)
    with monkeypatch.context() as full:
        full.setattr(os, "write", full_disk)
        files.log(METRICS).append(0, row(10))
    MemberDir(files, 0).write_config({})
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.close()
    assert steps(tmp_path, 0, "train") == [10]


# --- lines that others have written -------------------------------------------------------------------------------


def test_settings_that_python_calls_equal_are_kept_as_each_member_has_them(tmp_path: Path) -> None:
    files = PopulationFiles(tmp_path, None)
    given: list[Any] = [1, True, 1.0]
    for number, x in enumerate(given):
        MemberDir(files, number).write_config({"x": x, "y": 1})
    files.close()
    read = [member.settings for member in read_members(tmp_path).values()]
    assert [(type(one["x"]), one["y"]) for one in read] == [(int, 1), (bool, 1), (float, 1)]


def test_a_last_row_without_its_line_break_is_a_row_and_no_damage(run: Path) -> None:
    """As an editor leaves it, or a kill in the middle of the last byte."""
    lines = [line for line in (run / METRICS).read_text().splitlines() if line.startswith('{"member"')]
    (run / METRICS).write_text("\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # for whichever member looks at its rows first
        go_on(run)
    assert [steps(run, number) for number in (0, 1)] == [[20, 40], [20, 40]]
    assert verify.main([str(run)]) == 0


STRANGE = (
    '{"member": ' + "9" * 5000 + ', "kind": "eval", "opt_steps": 20, "score": 1.0}',
    '{"member": 01, "kind": "eval", "opt_steps": 10, "score": 1.0}',
    '{"member": 1, "opt_steps": 20}',
    '{"member": 1, "kind": "eval", "opt_steps": 10, "env_steps": "x", "score": [], "train_return": "x"}',
    '{"member": 0, "kind": "eval", "opt_steps": 10, "score": 1' + "0" * 400 + "}",
)


def test_rows_of_strangers_stop_neither_a_resume_nor_a_reader(run: Path) -> None:
    with (run / METRICS).open("a") as log:
        for line in STRANGE:
            log.write(line + "\n")
            log.flush()
            assert [one.member for one in read_runs([str(run)])] == [0, 1]
    go_on(run)
    assert [one["opt_steps"] for one in rows_about_all(run)][-2:] == [20, 40]


def test_what_a_checkpoint_says_is_unwritten_breaks_no_row_of_another_member(tmp_path: Path) -> None:
    files = PopulationFiles(tmp_path, None)
    unwritten = [row(10).rstrip(b"\n"), b"no row\n" + row(20)]
    log = MemberDir(files, 0).log(METRICS)
    log.restore_pending([base64.b64encode(record).decode() for record in unwritten], b"")
    files.log(METRICS).append(1, row(10))
    assert (tmp_path / METRICS).read_text().splitlines() == [
        '{"member": 0, "kind": "train", "opt_steps": 10}',
        '{"member": 0, "kind": "train", "opt_steps": 20}',
        '{"member": 1, "kind": "train", "opt_steps": 10}',
    ]


# --- what others read ---------------------------------------------------------------------------------------------


class Asking(Recorder):
    """Ask at the end how the run has ended, as services do."""

    name = "asking"
    said: list[tuple[dict[str, Any], bool]]

    def begin(self, run: RunInfo) -> None:
        self._run = run

    def write(self, row: Any) -> None: ...

    def close(self) -> None:
        Asking.said.append(summary_of(self._run))


def test_one_that_diverges_is_frozen_and_services_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "asking", RecorderRow(__name__, "Asking", "asks"))
    Asking.said = []
    made, run = jaxrl.population(poisoned(lambda luck, step: step >= 0), seeds=1), tmp_path / "run"
    for resume in (False, True):  # it stays so
        trainer = Trainer(
            made, max_opts=1_000, max_skips=3, quiet=True, run_dir=run, recorders=("asking",), resume=resume
        )
        with pytest.raises(jaxrl.JaxrlError, match="all 1 members diverged"):
            trainer.train()
        assert Asking.said[0] == ({"status": "diverged"}, True)
        assert json.loads((run / "metadata.json").read_text())["table"][0]["status"] == "diverged"


@pytest.mark.parametrize(("status", "failed"), [("max_opts", False), ("SIGTERM", False), ("actor", True)])
def test_services_are_told_whether_a_run_failed(tmp_path: Path, status: str, failed: bool) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"status": status}))
    assert summary_of(RunInfo("run", tmp_path, {}, (), 0)) == ({"status": status}, failed)


def test_curves_begin_again_with_a_run_that_was_killed_before_its_first_save(tmp_path: Path) -> None:
    made, run = jaxrl.population(small_dqn(), seeds=2), tmp_path / "run"
    for _ in Trainer(made, **LENGTH, run_dir=run, save_interval=0):
        pass
    for path in ("checkpoints", "best"):
        (run / path).rename(tmp_path / path)
    first, *members = read_lines(run / "members.jsonl")
    del first["common"]["metadata"]["saved_opt_steps"]
    (run / "members.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, *members)))
    before = {path: path.read_bytes() for path in (run / "tensorboard").iterdir()}
    with pytest.raises(jaxrl.SettingsError, match="was trained with other settings"):
        Trainer(made, **LENGTH, seed=7, run_dir=run, resume=True).train()
    assert {path: path.read_bytes() for path in (run / "tensorboard").iterdir()} == before
    Trainer(made, **{**LENGTH, "max_opts": 40}, run_dir=run, resume=True).train()
    shown = shown_values(run / "tensorboard")
    assert [step for step, value in shown if value.tag == "eval/score"] == [20, 40]
    assert np.isfinite([one["iqm"] for one in rows_about_all(run)]).all()
