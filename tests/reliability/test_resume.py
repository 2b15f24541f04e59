"""What resuming in unusual ways does: other settings, another score, interrupted beginnings, rows that waited."""

import concurrent.futures
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_run import BEFORE, LAST, SMALL, SmallRun
from toys_runs import contents, full_disk
from toys_trainer import Scripted, counting

import jaxrl
from jaxrl import train
from jaxrl.errors import SettingsError
from jaxrl.training.recorders.jsonl import JSONLRecorder
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.logs import log_problems
from jaxrl.training.storage.run import Best, Resume, Storage


@pytest.mark.parametrize(
    ("flag", "value", "leaf"),
    [
        ("agent.lr", 0.1, "agent/hyper/lr"),
        pytest.param("agent.tau", 0.5, "agent/hyper/tau", marks=pytest.mark.slow),
        pytest.param("processor.discount", 0.5, "processor/discount", marks=pytest.mark.slow),
    ],
)
def test_an_allowed_change_takes_effect(small: SmallRun, run: Path, flag: str, value: float, leaf: str) -> None:
    changed = ["--resume", str(run), f"--{flag}", str(value)]
    train.main([*changed, "--allow-changes"])
    leaves, _ = Store(run / "checkpoints", 1).read(LAST)
    held = [float(array) for path, array in leaves.items() if path.endswith(leaf)]
    assert held == [pytest.approx(value)]
    # A second resume, of the run as it is now, needs no leave.
    digest = small.digest(run, LAST)
    train.main(changed)
    assert small.digest(run, LAST) == digest


@pytest.mark.every_day("warmup")
@pytest.mark.parametrize(("name", "value"), [("warmup", 24), ("opt_interval", 4)], ids=["warmup", "opt_interval"])
def test_what_would_falsify_the_counts_is_refused_and_changes_nothing(
    small: SmallRun, run: Path, name: str, value: int
) -> None:
    before = contents(run)
    with pytest.raises(SettingsError, match=f"{name} cannot change"):
        train.main(["--resume", str(run), f"--{name.replace('_', '-')}", str(value), "--allow-changes"])
    assert contents(run) == before
    train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]


def of_kind(kind: int) -> jaxrl.Strategy:
    """The counting strategy, with a setting."""
    return counting()._replace(info=jaxrl.StrategyInfo(settings={"algo": "counting", "kind": kind}))


def test_a_run_that_begins_again_with_other_settings_has_no_best_policy_of_the_old_ones(tmp_path: Path) -> None:
    evaluated = {"eval_interval": 10, "eval_episodes": 1, "save_interval": 0, "quiet": True}
    settings: dict[str, Any] = {**evaluated, "max_opts": 20, "run_dir": str(tmp_path / "run")}

    def fail(*told: Any) -> None:
        raise RuntimeError("the machine is gone")

    first = jaxrl.Trainer(of_kind(1), evaluator=Scripted([9.0], [9.0]), hooks=jaxrl.Hooks(evaluation=fail), **settings)
    with pytest.raises(RuntimeError, match="gone"):
        first.train()
    best = tmp_path / "run" / "best"
    assert [path.name for path in best.iterdir()] == ["10"]
    left = list[Path]()
    second = jaxrl.Trainer(
        of_kind(2), evaluator=Scripted([1.0], [1.0], [0.5]), resume=True, allow_changes=True,
        hooks=jaxrl.Hooks(start=lambda trainer: left.extend(best.iterdir())), **settings,
    )  # fmt: skip
    assert second.train().best_score == 1.0
    assert left == []
    _, facts = Store(best, 1).read(10)
    assert (facts["score"], facts["settings"]["kind"]) == (1.0, 2)


def test_a_best_policy_that_is_newer_than_the_checkpoint_has_its_own_step(tmp_path: Path) -> None:
    strategy, scores = train.build("dqn", SMALL), Scripted([1.0], [2.0])
    evaluated = {"eval_interval": 10, "eval_episodes": 1, "confirm_best": False, "evaluator": scores}
    settings: dict[str, Any] = {**evaluated, "save_interval": 10, "max_opts": 20, "run_dir": str(tmp_path)}
    jaxrl.Trainer(strategy, quiet=True, **settings).train()
    shutil.rmtree(tmp_path / "checkpoints" / "20")  # as if killed just before it
    stop = jaxrl.Hooks(start=lambda trainer: trainer.interrupt.stop())
    resumed = jaxrl.Trainer(strategy, quiet=True, hooks=stop, resume=True, **settings).train()
    assert resumed.summary["opt_steps"] == 10
    assert resumed.policy.facts == {"score": 2.0, "opt_steps": 20}


def test_a_better_policy_of_the_same_step_replaces_the_worse(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "run"), 3, {}, Resume())
    for score in (5.0, 7.0, 6.0):
        storage.keep_best(Best(1000, score, {"w": jnp.full(3, score)}, {"score": score}))
    storage.finish()
    leaves, facts = storage.best.read(1000)
    assert facts == {"score": 7.0}
    np.testing.assert_array_equal(leaves["w"], [7, 7, 7])


def test_a_checkpoint_is_whole_only_after_the_best_policy_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from it does not meet that policy again. The best policy gives the checkpoint time."""
    storage, write = Storage(str(tmp_path / "run"), 3, {}, Resume()), Store.write
    begun, there = threading.Event(), []

    def slowly(store: Store, *args: Any) -> int:
        if store is storage.best:
            begun.wait()
            concurrent.futures.wait([storage.checkpoints._job], timeout=0.3)  # type: ignore[list-item]
            there.append(storage.checkpoints.steps())
        return write(store, *args)

    monkeypatch.setattr(Store, "write", slowly)
    storage.save(1000, {"w": jnp.ones(3)}, {}, Best(1000, 5.0, {"w": jnp.ones(3)}, {"score": 5.0}))
    begun.set()
    storage.finish()
    assert there == [[]]
    assert storage.checkpoints.steps() == storage.best.steps() == [1000]


def test_rows_that_waited_and_were_written_after_all_are_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JSONLRecorder(path)
    first.write({"kind": "train", "opt_steps": 400})
    with monkeypatch.context() as full:
        full.setattr("os.write", full_disk)
        first.write({"kind": "train", "opt_steps": 500})
    waiting: dict[str, list[str]] = {}
    first.unwritten(waiting)  # what a checkpoint at 500 keeps
    first.write({"kind": "train", "opt_steps": 700})  # there is room again; then the process is killed
    second = JSONLRecorder(path)
    second.rewind(500)
    second.take_up(waiting)
    second.close()
    assert [json.loads(line)["opt_steps"] for line in path.read_text().splitlines()] == [400, 500]
    # And where it was killed before there was room, the row is there all the same.
    path.write_text('{"kind": "train", "opt_steps": 400}\n')
    third = JSONLRecorder(path)
    third.rewind(500)
    third.take_up(waiting)
    third.close()
    assert [json.loads(line)["opt_steps"] for line in path.read_text().splitlines()] == [400, 500]


def test_an_evaluation_at_the_start_is_made_once_however_the_run_begins(tmp_path: Path) -> None:
    settings = {"max_opts": 3, "eval_interval": 1, "eval_at_start": True, "run_dir": str(tmp_path), "quiet": True}
    stop = jaxrl.Hooks(start=lambda trainer: trainer.interrupt.stop())
    jaxrl.Trainer(counting(), evaluator=Scripted(), hooks=stop, **settings).train()
    scores = Scripted(*([score] for score in (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0)))  # each confirmed
    jaxrl.Trainer(counting(), evaluator=scores, resume=True, **settings).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["opt_steps"] for row in rows if row["kind"] == "eval"] == [0, 1, 2, 3]
    assert log_problems(tmp_path, "metrics.jsonl") == []


def test_a_result_on_the_way_stays_as_it_was() -> None:
    trainer = jaxrl.Trainer(counting(), max_opts=20, record_interval=10, eval_interval=0, eval_episodes=0, quiet=True)
    with pytest.raises(SettingsError, match="nothing has been trained"):
        trainer.result()
    assert [int(trainer.result().state.steps) for _ in trainer] == [10, 20]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_reader_that_goes_away_stops_nothing_and_hides_no_exit_code(run: Path, tmp_path: Path, command: str) -> None:
    if command == "train":
        args = ["train", "--env", "Catch-bsuite", "--max-opts", "60", "--eval-interval", "10", "--run-dir", "piped"]
    else:
        (run / "checkpoints" / str(BEFORE) / "manifest.json").write_text("{}")
        args = ["verify", str(run)]
    command = f"{sys.executable} -m jaxrl.{' '.join(args)} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    if command == "train":
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "piped" / "metadata.json").read_text())["opt_steps"] == 60
    else:
        assert done.returncode in (6, 141)
