"""Logs that outlive a kill at any moment, and recorders that fail alone."""

import multiprocessing
import random
import shutil
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rows_and_scalars import LOGS, scalars
from toys_runs import read_lines as lines, repeated_rows
from toys_trainer import CountState, counting

import jaxrl
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.recorders import TensorBoardRecorder
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.logs import log_problems

# --- killed while writing ---------------------------------------------------------------------------------------


class Telling(jaxrl.MemoryRecorder):
    """Tell another process of every row of metrics, once the recorders before this one have it."""

    def __init__(self, ear: Connection) -> None:
        super().__init__()
        self.ear = ear

    def write(self, row: Any) -> None:
        if row["kind"] == "train":
            self.ear.send_bytes(b"%d" % row["opt_steps"])


def walked(params: CountState, key: jax.Array) -> Evaluation:
    """Judge the counting strategy by its walk: the same after a resume."""
    walk = float(params.walk)
    return Evaluation(np.array([walk, -walk]), np.array([1, 2]), np.array([True, False]))


def write_often(run: str, max_opts: int, resume: bool, recorders: Sequence[Any] = (), **settings: Any) -> None:
    """Train with a row of metrics at every step."""
    board = TensorBoardRecorder(Path(run) / "tensorboard")
    jaxrl.Trainer(
        counting(),
        evaluator=walked,
        max_opts=max_opts,
        eval_interval=5,
        record_interval=1,
        run_dir=run,
        resume=resume,
        recorders=[board, *recorders],
        **settings,
    ).train()


def write_and_tell(run: str, max_opts: int, resume: bool, ear: Connection) -> None:
    write_often(run, max_opts, resume, [Telling(ear)], save_interval=20, confirm_best=False)


def killed_run(run: Path, kills: int, max_opts: int) -> None:
    """Train in processes of their own of which all but the last are killed, each at some row; check what each left."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["jaxrl.training.loop", "orbax.checkpoint", "tensorboardX.proto.event_pb2"])
    chance = random.Random(kills)
    for kill in range(kills + 1):
        hearing, ear = processes.Pipe(duplex=False)
        process = processes.Process(target=write_and_tell, args=(str(run), max_opts, run.exists(), ear))
        process.start()
        ear.close()
        try:
            if kill == kills:
                process.join()
                assert process.exitcode == 0
                return
            for _ in range(chance.randint(1, 60)):
                told = int(hearing.recv_bytes())
        finally:
            process.kill()
            process.join()
            hearing.close()
        # What a recorder was told is in the log, although nobody closed it.
        assert told in [row["opt_steps"] for row in lines(run / LOGS[0]) if row["kind"] == "train"]
        assert [problem for log in LOGS for problem in log_problems(run, log)] == []
        if chance.random() < 0.5:
            tear(run)


def tear(run: Path) -> None:
    """Let every log end in the middle of a record, as where the system died with the process."""
    for log in LOGS:
        with open(run / log, "a") as file:
            file.write('{"kind": "train", "opt_steps": 1000000, "env_st')
    newest = max((run / "tensorboard").iterdir())
    newest.write_bytes(newest.read_bytes() + struct.pack("<Q", 100) + b"torn")


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "max_opts"), [(10, 700), (50, 3100)], ids=["10", "50"])
def test_after_kills_while_writing_the_logs_equal_those_of_an_undisturbed_run(
    tmp_path: Path, kills: int, max_opts: int
) -> None:
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    killed_run(killed, kills, max_opts)
    write_often(str(calm), max_opts, resume=False, save_interval=0, confirm_best=False)
    # Killed before its first save it begins again, and its best policy of before stays the one to beat: scores of an
    # evaluator in Python may come out differently.
    without_best = lambda rows: [{k: v for k, v in row.items() if k != "is_best"} for row in repeated_rows(rows)]
    for log in LOGS:
        assert without_best(lines(killed / log)) == without_best(lines(calm / log))
        assert (killed / log).read_text().endswith("\n")
        assert log_problems(killed, log) == []
    assert [row["opt_steps"] for row in lines(killed / LOGS[0]) if row["kind"] == "train"] == [*range(1, max_opts + 1)]
    assert scalars(killed / "tensorboard") == scalars(calm / "tensorboard")
    resumed = [row for row in lines(killed / LOGS[0]) if row.get("event") == "resume"]
    assert 1 <= len(resumed) <= kills


# --- read while it is written -----------------------------------------------------------------------------------


class Reading(jaxrl.MemoryRecorder):
    """Read every row back from the logs as soon as it was written."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run
        self.found: list[bool] = []

    def write(self, row: Any) -> None:
        super().write(row)
        shown = {step for _, step, _ in scalars(self.run / "tensorboard")}
        self.found.append(lines(self.run / LOGS[0])[-1] == row and row["opt_steps"] in shown)


def test_a_row_can_be_read_from_the_file_as_soon_as_it_was_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reading = Reading(run)
    episodes: list[list[int]] = []
    hooks = jaxrl.Hooks(evaluation=lambda *_: episodes.append([row["opt_steps"] for row in lines(run / LOGS[1])]))
    write_often(str(run), 20, resume=False, recorders=[reading], hooks=hooks)
    assert reading.found == [True] * 24
    assert episodes == [[5, 5], [5, 5, 10, 10], [5, 5, 10, 10, 15, 15], [5, 5, 10, 10, 15, 15, 20, 20]]


# --- recorders that fail ----------------------------------------------------------------------------------------


class Failing(jaxrl.MemoryRecorder):
    """Fail at call `k` of `method`."""

    def __init__(self, method: str, k: int) -> None:
        super().__init__()
        self.method, self.k = method, k
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("write", "tick", "rewind", "close"):
            return lambda *args: self._called(name, getattr(super(Failing, self), name), *args)
        return super().__getattribute__(name)

    def _called(self, name: str, method: Any, *args: Any) -> None:
        self.calls += name == self.method
        if name == self.method and self.calls >= self.k:
            raise RuntimeError("out of order")
        method(*args)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps, to be gone on with."""
    run = tmp_path_factory.mktemp("begun") / "run"
    write_often(str(run), 5, resume=False, save_interval=0)
    return run


@pytest.fixture(scope="module")
def undisturbed() -> tuple[str, list[dict[str, Any]]]:
    """The state after 15 steps, and the rows up to there."""
    memory = jaxrl.MemoryRecorder()
    settings = {"evaluator": walked, "eval_interval": 5, "record_interval": 1, "recorders": [memory]}
    return state_digest(jaxrl.Trainer(counting(), max_opts=15, **settings).train().state), repeated_rows(memory.rows)


@pytest.mark.every_day("write-1", "write-7", "tick-1", "rewind-1", "close-1")
@pytest.mark.parametrize(
    ("method", "k"),
    [("write", 1), ("write", 2), ("write", 7), ("write", 13), ("tick", 1), ("tick", 10), ("rewind", 1), ("close", 1)],
)
def test_a_failing_recorder_is_reported_once_and_stops_nothing_else(
    begun: Path,
    undisturbed: tuple[str, list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    k: int,
) -> None:
    run = Path(shutil.copytree(begun, tmp_path / "run"))
    before, failing, after = jaxrl.MemoryRecorder(), Failing(method, k), jaxrl.MemoryRecorder()
    settings = {"evaluator": walked, "eval_interval": 5, "record_interval": 1, "max_chunk": 1, "run_dir": str(run)}
    trainer = jaxrl.Trainer(
        counting(), max_opts=15, resume=True, recorders=[before, failing, after], save_interval=0, **settings
    )
    digest, rows = undisturbed
    assert state_digest(trainer.train().state) == digest
    assert repeated_rows(lines(run / LOGS[0])) == rows
    assert repeated_rows(before.rows) == repeated_rows(after.rows) == [row for row in rows if row["opt_steps"] > 5]
    assert failing.calls == k
    said = capsys.readouterr().err
    assert said.count("recorder Failing failed and is left out: RuntimeError: out of order") == 1
    assert len(said.splitlines()) == 1
