"""Sessions that say when their updates are no longer made, and recorders of one's own."""

import json
from pathlib import Path

import numpy as np
import pytest
from toys_runs import rows_in
from toys_session import single

import jaxrl
from jaxrl.errors import DivergedError
from jaxrl.training.session import session as module
from jaxrl.training.storage.checkpoints import Store

HUGE = 3e38
"""Finite, but no sum of two of them is."""


def drive_with(session: jaxrl.Session, reward: float, steps: int) -> None:
    for _ in range(steps):
        session.act(np.zeros(2))
        session.observe(reward, np.zeros(2), False, False)


def is_healthy(run: Path) -> bool:
    _, facts = Store(run / "checkpoints", 3).newest_facts()
    return bool(facts["healthy"])


@pytest.mark.filterwarnings("ignore:overflow")  # of the return of the episode
def test_a_session_without_finite_updates_saves_and_says_so(tmp_path: Path) -> None:
    saved: list[int] = []
    hooks = jaxrl.SessionHooks(save=saved.append)
    with (
        pytest.raises(DivergedError, match=r"5 updates in a row were skipped, the first at optimisation step 0, where"),
        single(max_skips=5, max_rollbacks=0, run_dir=str(tmp_path), hooks=hooks) as session,
    ):
        drive_with(session, HUGE, 40)
    assert (session.opt_steps, saved, session.is_done) == (5, [5], True)
    assert not is_healthy(tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "diverged"
    rows = rows_in(tmp_path)
    assert [row["opt_steps"] for row in rows if row.get("event") == "diverged"] == [5]
    with single(max_skips=0, run_dir=str(tmp_path), resume=True) as session:
        drive_with(session, HUGE, 10)
    assert session.summary()["skipped_updates"] == session.opt_steps == 15


def test_a_session_looks_at_its_updates_only_when_it_may_have_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = module.skips_left
    monkeypatch.setattr(module, "skips_left", lambda *given: looks.append(session.opt_steps) or look(*given))  # type: ignore[func-returns-value]
    with single(max_skips=10, run_dir=str(tmp_path)) as session:
        drive_with(session, 1.0, 40)
    assert looks == [1, 11, 21]
    assert is_healthy(tmp_path)


def test_recorders_of_ones_own_get_the_rows_of_the_log(tmp_path: Path) -> None:
    memory, alone = jaxrl.MemoryRecorder(), jaxrl.MemoryRecorder()
    for recorder, run_dir in ((memory, str(tmp_path)), (alone, None)):
        with single(recorders=[recorder], run_dir=run_dir, record_interval=4) as session:
            drive_with(session, 1.0, 16)
            session.evaluate_score(1.0)
    rows = rows_in(tmp_path)
    assert [(row["kind"], row["opt_steps"]) for row in memory.rows] == [(row["kind"], row["opt_steps"]) for row in rows]
    assert [row["kind"] for row in alone.rows if row["kind"] != "event"] == ["train", "eval"]
    assert not (tmp_path / "tensorboard").exists()
