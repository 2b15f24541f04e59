"""What resuming in unusual ways does: other settings, another score, interrupted beginnings, rows that waited."""

import concurrent.futures
import json
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from toys_trainer import Scripted, counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.recorders.jsonl import JSONLRecorder
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.logs import log_problems
from jaxrl.training.storage.run import Best, Resume, Storage

QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "save_interval": 10, "quiet": True}


@cache
def dqn(discount: float = 0.99, warmup: int = 64, opt_interval: int = 4, **agent: Any) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(8,), **agent),
        buffer=jaxrl.uniform(200, batch_size=8),
        processor=jaxrl.n_step(2, discount),
        num_envs=4,
        opt_interval=opt_interval,
        warmup=warmup,
    )


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 optimisation steps, to be copied."""
    run = tmp_path_factory.mktemp("twenty") / "run"
    jaxrl.Trainer(dqn(), max_opts=20, run_dir=str(run), **QUIET).train()
    return run


@pytest.fixture
def run(twenty: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(twenty, tmp_path / "run"))


@pytest.mark.parametrize(
    "changed",
    [{"lr": 0.1}, *(pytest.param(change, marks=pytest.mark.slow) for change in ({"tau": 0.5}, {"discount": 0.5}))],
    ids=str,
)
def test_an_allowed_change_takes_effect(run: Path, tmp_path: Path, changed: dict[str, float]) -> None:
    (name, value), *_ = changed.items()
    strategy = dqn(**changed)  # type: ignore[arg-type]
    trainer = jaxrl.Trainer(strategy, max_opts=30, run_dir=str(run), resume=True, allow_changes=True, **QUIET)
    state = trainer.train().state
    held = state.processor.discount if name == "discount" else getattr(state.agent.hyper, name)
    assert float(held) == pytest.approx(value)
    # A second resume, of the run as it is now, needs no leave.
    again = jaxrl.Trainer(strategy, max_opts=30, run_dir=str(run), resume=True, **QUIET).train()
    assert state_digest(again.state) == state_digest(state)


def test_the_seed_cannot_change(run: Path) -> None:
    with pytest.raises(SettingsError, match=r"seed: 0 -> 1.*--start-over"):
        jaxrl.Trainer(dqn(), max_opts=30, seed=1, run_dir=str(run), resume=True, allow_changes=True, **QUIET).train()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"warmup": 128}, "warmup cannot change"),
        pytest.param({"opt_interval": 8}, "opt_interval cannot change", marks=pytest.mark.slow),
        pytest.param({"opt_interval": 2}, "opt_interval cannot change", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_would_falsify_the_counts_is_refused_and_changes_nothing(
    run: Path, changed: dict[str, int], said: str
) -> None:
    before = {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    trainer = jaxrl.Trainer(
        dqn(**changed),  # type: ignore[arg-type]
        max_opts=40, run_dir=str(run), resume=True, allow_changes=True, **QUIET,
    )  # fmt: skip
    with pytest.raises(SettingsError, match=said):
        trainer.train()
    after = {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert {k: v for k, v in after.items() if "metadata" not in k} == {
        k: v for k, v in before.items() if "metadata" not in k
    }
    resumed = jaxrl.Trainer(dqn(), max_opts=40, run_dir=str(run), resume=True, **QUIET).train()
    assert state_digest(resumed.state) == state_digest(jaxrl.Trainer(dqn(), max_opts=40, **QUIET).train().state)


def test_a_run_that_begins_again_with_other_settings_has_no_best_policy_of_the_old_ones(tmp_path: Path) -> None:
    evaluated = {"eval_interval": 10, "eval_episodes": 1, "save_interval": 0}
    settings: dict[str, Any] = {**QUIET, **evaluated, "max_opts": 20, "run_dir": str(tmp_path / "run")}

    def fail(*told: Any) -> None:
        raise RuntimeError("the machine is gone")

    first = jaxrl.Trainer(dqn(), evaluator=Scripted([9.0], [9.0]), hooks=jaxrl.Hooks(evaluation=fail), **settings)
    with pytest.raises(RuntimeError, match="gone"):
        first.train()
    best = tmp_path / "run" / "best"
    assert [path.name for path in best.iterdir()] == ["10"]
    left = list[Path]()
    second = jaxrl.Trainer(
        dqn(lr=0.5), evaluator=Scripted([1.0], [1.0], [0.5]), resume=True, allow_changes=True,
        hooks=jaxrl.Hooks(start=lambda trainer: left.extend(best.iterdir())), **settings,
    )  # fmt: skip
    assert second.train().best_score == 1.0
    assert left == []
    facts = jaxrl.load_policy(tmp_path / "run").facts
    assert (facts["score"], facts["settings"]["agent"]["lr"]) == (1.0, 0.5)


def test_a_best_policy_that_is_newer_than_the_checkpoint_has_its_own_step(tmp_path: Path) -> None:
    evaluated = {"eval_interval": 10, "eval_episodes": 1, "confirm_best": False}
    settings: dict[str, Any] = {**QUIET, **evaluated, "max_opts": 20, "run_dir": str(tmp_path)}
    scores = Scripted([1.0], [2.0])
    jaxrl.Trainer(dqn(), evaluator=scores, **settings).train()
    shutil.rmtree(tmp_path / "checkpoints" / "20")  # as if killed just before it
    stop = jaxrl.Hooks(start=lambda trainer: trainer.interrupt.stop())
    resumed = jaxrl.Trainer(dqn(), evaluator=scores, hooks=stop, resume=True, **settings).train()
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
        full.setattr("os.write", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
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


def test_a_trainer_can_train_twice() -> None:
    trainer = jaxrl.Trainer(dqn(), max_opts=20, eval_interval=10, eval_episodes=2, quiet=True)
    assert state_digest(trainer.train().state) == state_digest(trainer.train().state)


def test_a_result_on_the_way_stays_as_it_was() -> None:
    trainer = jaxrl.Trainer(counting(), max_opts=20, record_interval=10, eval_interval=0, eval_episodes=0, quiet=True)
    with pytest.raises(SettingsError, match="nothing has been trained"):
        trainer.result()
    assert [int(trainer.result().state.steps) for _ in trainer] == [10, 20]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["train", "verify"])
def test_a_reader_that_goes_away_stops_nothing_and_hides_no_exit_code(run: Path, tmp_path: Path, door: str) -> None:
    if door == "train":
        args = ["train", "--env", "Catch-bsuite", "--max-opts", "60", "--eval-interval", "10", "--run-dir", "piped"]
    else:
        (run / "checkpoints" / "20" / "manifest.json").write_text("{}")
        args = ["verify", str(run)]
    command = f"{sys.executable} -m jaxrl.{' '.join(args)} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    if door == "train":
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "piped" / "metadata.json").read_text())["opt_steps"] == 60
    else:
        assert done.returncode in (6, 141)
