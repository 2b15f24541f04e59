"""Promises 3 and 5: kill, interrupt and terminate a run anywhere; it goes on to the very same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from fragile_run import AFTER, SETTINGS
from toys_trainer import small_dqn

import jaxrl
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.logs import log_problems

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
POINTS = tuple(AFTER)


class Ended(NamedTuple):
    code: int
    digest: str
    errors: str


class Runs(NamedTuple):
    """Start the fragile run in `path`; its compiled programs are kept in `cache`."""

    path: Path
    cache: Path

    def start(self, *args: object) -> "subprocess.Popen[str]":
        command = [sys.executable, str(Path(__file__).parent / "fragile_run.py"), str(self.path), *map(str, args)]
        env = {**os.environ, "XDG_CACHE_HOME": str(self.cache)}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *args: object) -> Ended:
        process = self.start(*args)
        out, err = process.communicate()
        return Ended(process.returncode, out.strip(), err)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run that nobody disturbs, in this process: all others must come to its bits."""
    run = str(tmp_path_factory.mktemp("untouched") / "run")
    return state_digest(jaxrl.Trainer(small_dqn(), run_dir=run, **SETTINGS).train().state)


@pytest.fixture
def runs(tmp_path: Path, cache: Path) -> Runs:
    return Runs(tmp_path / "run", cache)


def assert_whole(run: Path) -> None:
    """The newest checkpoints and the best policy are there, and the logs have each row once."""
    store = Store(run / "checkpoints", 1)
    assert store.steps() == [110, 120]
    for step in store.steps():
        store.read(step)
    assert len(Store(run / "best", 1).steps()) == 1
    assert log_problems(run, "metrics.jsonl") + log_problems(run, "eval_episodes.jsonl") == []
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["110", "120"]


def saved(run: Path) -> int:
    return max(Store(run / "checkpoints", 1).steps(), default=0)


@pytest.mark.slow
def test_killed_at_one_point_after_the_other_it_ends_in_the_same_bits(runs: Runs, untouched: str) -> None:
    codes = []
    for point in POINTS:
        before = saved(runs.path)
        ended = runs.run(point, KILL.value)
        codes.append(ended.code)
        assert ended.code in (-KILL, 0), ended.errors
        assert saved(runs.path) >= before
    # A point that a stretch does not pass any more is no kill; the run then goes on to its end.
    assert codes.count(-KILL) >= 10
    assert runs.run()[:2] == (0, untouched)
    assert_whole(runs.path)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_one_point_it_loses_at_most_one_interval(runs: Runs, untouched: str, point: str) -> None:
    if point == "log is mended":  # passed by a run that is resumed
        assert runs.run("training", KILL.value).code == -KILL
    assert runs.run(point, KILL.value).code == -KILL
    ended = runs.run()
    assert (ended.code, ended.digest) == (0, untouched), ended.errors
    assert_whole(runs.path)


@pytest.mark.every_day("training-15")
@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize(
    "point", ["compile", "warm-up", "training", "evaluation", "save begins", "files are summed", "end"]
)
def test_a_signal_at_one_point_changes_nothing(runs: Runs, untouched: str, point: str, number: signal.Signals) -> None:
    ended = runs.run(point, number.value)
    assert (ended.code, ended.errors) == (128 + number, "")
    assert saved(runs.path) > 0 or point in ("compile", "warm-up")
    begun = (runs.path / "config.yaml").exists()
    resumed = jaxrl.Trainer(small_dqn(), run_dir=str(runs.path), resume=begun, **SETTINGS)
    assert state_digest(resumed.train().state) == untouched


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.slow
def test_a_second_signal_stops_at_once(runs: Runs, untouched: str, number: signal.Signals) -> None:
    ended = runs.run("evaluation", number.value, 2)
    said = f"stopped at once by a second {signal.Signals(number).name}\n"
    assert (ended.code, ended.digest, ended.errors) == (128 + number, "", said)
    # Nothing was saved on the way out: the newest checkpoint is one of the plan.
    assert saved(runs.path) % SETTINGS["save_interval"] == 0
    assert runs.run()[:2] == (0, untouched)
