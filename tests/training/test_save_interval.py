"""When a run saves: by its interval, or without one by the time that training has taken."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from toys_session import Script, drive, small
from toys_trainer import counting

import jaxrl


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, on the clock by which training is timed."""
    return later(monkeypatch, "perf_counter")


def later(monkeypatch: pytest.MonkeyPatch, clock: str) -> Callable[[float], None]:
    passed, now = [0.0], getattr(time, clock)
    monkeypatch.setattr(time, clock, lambda: now() + passed[0])

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
    trainer = jaxrl.Trainer(strategy, run_dir=str(run), recorders=[], keep=100, max_chunk=1, **settings)
    said = [report.opt_steps for report in trainer if report.saved]
    assert saved(run) == said
    return said


def test_without_an_interval_a_run_saves_at_the_first_row_after_ten_seconds_of_training(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    assert train(slow(0.45, wait), tmp_path / "run", max_opts=100, record_interval=10) == [30, 60, 90, 100]


def test_without_rows_and_evaluations_too_a_run_saves_on_the_way(tmp_path: Path, wait: Callable[[float], None]) -> None:
    assert train(slow(0.006, wait), tmp_path / "run", max_opts=2_500, record_interval=0) == [2_000, 2_500]


def test_a_short_run_saves_once_and_an_interval_is_kept_to_the_step(tmp_path: Path) -> None:
    settings = {"max_opts": 40, "record_interval": 10}
    assert train(counting(), tmp_path / "short", **settings) == [40]
    assert train(counting(), tmp_path / "given", save_interval=15, **settings) == [15, 30, 40]
    assert train(counting(), tmp_path / "last", save_interval=0, **settings) == [40]


def test_what_takes_long_to_save_is_saved_more_seldom(
    tmp_path: Path, wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import orbax.checkpoint as ocp

    save, while_saving = ocp.PyTreeCheckpointHandler.save, later(monkeypatch, "monotonic")
    slower = lambda *args, **kwargs: (while_saving(1.9), save(*args, **kwargs))[1]  # some 38 seconds between saves
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "save", slower)
    assert train(slow(0.45, wait), tmp_path / "run", max_opts=200, record_interval=10) == [30, 120, 200]


def test_a_session_saves_by_the_clock_too(tmp_path: Path, wait: Callable[[float], None]) -> None:
    session = small(run_dir=str(tmp_path), save_interval=None, keep=100, recorders=[])
    saves = []
    session.hooks = jaxrl.SessionHooks(save=saves.append)
    drive(session, Script(), 100, between=lambda: wait(0.6))
    session.close()
    assert saves[1:9] == [6, 11, 16, 21, 26, 31, 36, 41]  # an optimisation step takes 2.4 seconds
    assert saves[-1] == session.opt_steps
    assert json.loads((tmp_path / "metadata.json").read_text())["saved_opt_steps"] == session.opt_steps
