"""When a run saves: by its interval, or without one by the time that training has taken."""

import itertools
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import pytest
from toys_runs import rows_in
from toys_session import Script, drive, small
from toys_trainer import counting

import jaxrl
from jaxrl.training.storage import checkpoints
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run import Resume, Storage


class AtOnce:
    """Does what a thread would."""

    def __init__(self, *args: object, **settings: object) -> None:
        pass

    def submit(self, function: Callable[[], Any]) -> Future:
        job: Future = Future()
        job.set_result(function())
        return job

    def shutdown(self) -> None:
        pass


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, on the clock by which training is timed: nothing else moves it.

    What is saved is written at once, and takes no time.
    """
    passed, start = [0.0], time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: start + passed[0])
    monkeypatch.setattr(checkpoints, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(checkpoints.Store, "write_s", 0.0)

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def slow(seconds: float, wait: Callable[[float], None]) -> jaxrl.Strategy:
    """Return a strategy whose iterations take so long, by that clock."""
    strategy = counting()

    def step(state: Any, key: jax.Array, t: jax.Array) -> tuple[Any, dict]:
        jax.debug.callback(lambda t: wait(seconds), t, ordered=True)
        return strategy.step(state, key, t)

    return strategy._replace(step=step)


def saved(run: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (run / "checkpoints").iterdir())


def train(strategy: jaxrl.Strategy, run: Path, **settings: object) -> list[int]:
    jaxrl.Trainer(strategy, run_dir=str(run), recorders=[], keep=100, max_chunk=1, **settings).train()
    return saved(run)


def test_without_an_interval_a_run_saves_after_ten_seconds_of_training(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    """An iteration takes four seconds, and rows are of no account."""
    for record_interval in (0, 5):
        run = tmp_path / str(record_interval)
        found = train(slow(4.0, wait), run, max_opts=16, record_interval=record_interval)
        assert found == [3, 6, 9, 12, 15, 16]


def test_it_goes_on_from_such_a_checkpoint_to_the_same_rows_and_bits(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    digests, rows, strategy = [], [], slow(4.0, wait)
    settings = {"max_opts": 16, "record_interval": 5, "recorders": [], "keep": 100}
    for name, kept in (("whole", None), ("cut", 3), ("cut where a row is due", 5)):
        run = str(tmp_path / name)
        trained = jaxrl.Trainer(strategy, run_dir=run, max_chunk=1, **settings).train()
        if kept is not None:
            for step in saved(tmp_path / name)[kept:]:
                shutil.rmtree(tmp_path / name / "checkpoints" / str(step))
            trained = jaxrl.Trainer(strategy, run_dir=run, max_chunk=1, resume=True, **settings).train()
        digests.append(state_digest(trained.state))
        told = rows_in(tmp_path / name)
        rows.append([(row["opt_steps"], row["t"], row["t_min"]) for row in told if row["kind"] == "train"])
    assert digests[0] == digests[1] == digests[2]
    assert rows[0] == rows[1] == rows[2]
    assert [step for step, *_ in rows[0]] == [5, 10, 15, 16]


def test_a_short_run_saves_once_and_an_interval_is_kept_to_the_step(tmp_path: Path) -> None:
    settings = {"max_opts": 40, "record_interval": 10}
    assert train(counting(), tmp_path / "short", **settings) == [40]
    assert train(counting(), tmp_path / "given", save_interval=15, **settings) == [15, 30, 40]
    assert train(counting(), tmp_path / "last", save_interval=0, **settings) == [40]


@pytest.mark.parametrize(
    ("write_s", "held_s", "turns", "seconds"),
    [(0.01, 0.0, 1, 10), (0.5, 0.0, 1, 20), (0.5, 2.0, 1, 100), (50.0, 0.0, 1, 600), (0.002, 0.003, 100, 20)],
)
def test_what_takes_long_to_save_is_saved_less_often_but_every_ten_minutes(
    write_s: float, held_s: float, turns: float, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving takes at most a fortieth of the time; members that train together wait for each other's saves."""
    monkeypatch.setattr(checkpoints.Store, "write_s", write_s)
    storage = Storage(str(tmp_path / "run"), 3, {}, Resume())
    assert not storage.is_time_to_save(seconds - 0.1, held_s, turns)
    assert storage.is_time_to_save(seconds, held_s, turns)
    storage.finish()
    storage.close()


@pytest.mark.parametrize(("layout", "turns"), [("spread", 1.0), ("together", 2.0)])
def test_members_count_the_saves_that_they_wait_for(
    layout: str, turns: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four members on two threads, each waits for its own save and another's before its team trains on."""
    seen, ask = set[float](), Storage.is_time_to_save

    def recorded(storage: Storage, seconds: float, held_s: float, turns: float = 1.0) -> bool:
        seen.add(turns)
        return ask(storage, seconds, held_s, turns)

    monkeypatch.setattr(Storage, "is_time_to_save", recorded)
    members = jaxrl.population(counting(), seeds=4, layout=layout)
    settings = {"max_opts": 4, "record_interval": 2, "quiet": True, "recorders": []}
    jaxrl.PopulationTrainer(members, run_dir=str(tmp_path / "run"), workers=2, **settings).train()
    assert seen == {turns}


def test_members_that_train_together_save_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would say yes at another time; the first that is asked after a call decides for all."""
    asked = itertools.count()
    monkeypatch.setattr(Storage, "is_time_to_save", lambda *args: next(asked) % 3 == 0)
    members = jaxrl.population(counting(), seeds=4, layout="together")
    settings = {"max_opts": 12, "record_interval": 3, "quiet": True, "recorders": [], "keep": 100}
    jaxrl.PopulationTrainer(members, run_dir=str(tmp_path / "run"), max_chunk=1, **settings).train()
    saves = [json.loads(path.read_text())["facts"]["rows"] for path in tmp_path.glob("run/checkpoints/*/manifest.json")]
    found = sorted(([(row["member"], row["step"]) for row in save] for save in saves), key=lambda save: save[0][1])
    assert found == [[(member, step) for member in range(4)] for step in (1, 4, 7, 10, 12)]


def test_a_session_saves_by_the_clock_too(tmp_path: Path, wait: Callable[[float], None]) -> None:
    session = small(run_dir=str(tmp_path), save_interval=None, keep=100, recorders=[])
    saves = []
    session.hooks = jaxrl.SessionHooks(save=saves.append)
    drive(session, Script(), 100, between=lambda: wait(0.6))
    session.close()
    assert saves[1:9] == [6, 11, 16, 21, 26, 31, 36, 41]  # an optimisation step takes 2.4 seconds
    assert saves[-1] == session.opt_steps
    assert json.loads((tmp_path / "metadata.json").read_text())["saved_opt_steps"] == session.opt_steps
