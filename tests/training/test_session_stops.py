"""Sessions that stop by a score, by patience or by environment steps, and that go back where training diverges."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_envs import counting
from toys_runs import events_in, rows_in
from toys_session import PARTS, Script, digest, drive, reached, single, small

import jaxrl
from jaxrl.errors import DivergedError
from jaxrl.strategies.guard import reseed
from jaxrl.training.session import session as module
from jaxrl.training.session.state import shapes_of
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest

HUGE = 3e38
"""Finite, but no sum of two of them is."""


def take(session: jaxrl.Session, reward: float = 1.0) -> None:
    session.act(np.zeros(2))
    session.observe(reward, np.zeros(2), False, False)


def take_to(session: jaxrl.Session, opt_steps: int) -> None:
    while session.opt_steps < opt_steps:
        take(session)


def take_all(session: jaxrl.Session, reward: float) -> None:
    while not session.is_done:
        take(session, reward)


def spoil(session: jaxrl.Session) -> None:
    """Give rewards of which no update is finite until the session has gone back."""
    before = session.summary()["rollbacks"]
    for _ in range(100):
        take(session, HUGE)
        if session.summary()["rollbacks"] > before:
            return
    raise AssertionError("it never went back")


def metadata(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "metadata.json").read_text())
    return told


def is_healthy(run: Path) -> bool:
    """Return what the newest checkpoint says."""
    return bool(Store(run / "checkpoints", 3).newest_facts()[1]["healthy"])


# --- stopping ---


def test_metadata_say_why_a_session_was_closed_before_its_end(tmp_path: Path) -> None:
    def close_after(opt_steps: int, error: BaseException | None = None) -> str:
        with single(max_opts=9, run_dir=str(tmp_path), resume=(tmp_path / "config.yaml").exists()) as session:
            take_to(session, opt_steps)
            if error is not None:
                raise error
        assert session.summary()["stop"] == metadata(tmp_path)["status"]
        return str(metadata(tmp_path)["status"])

    assert close_after(3) == "left"
    for error, status in ((ValueError("no"), "failed: ValueError"), (KeyboardInterrupt(), "SIGINT")):
        with pytest.raises(type(error)):
            close_after(5, error)
        assert metadata(tmp_path)["status"] == status
    # That of another run is no divergence of this one.
    for error, status in ((SystemExit(0), "left"), (SystemExit(1), "failed: SystemExit"),
                          (GeneratorExit(), "left"), (DivergedError("another"), "failed: DivergedError")):  # fmt: skip
        with pytest.raises(type(error)):
            close_after(7, error)
        assert metadata(tmp_path)["status"] == status
    assert close_after(9) == "max_opts"


def test_a_score_at_stop_reward_ends_it_with_a_row_and_a_checkpoint(tmp_path: Path) -> None:
    with single(stop_reward=2.0, record_interval=5, run_dir=str(tmp_path)) as session:
        take_to(session, 5)
        session.evaluate_score(float("nan"))
        session.evaluate_score(1.9)
        assert not session.is_done
        take_to(session, 7)
        session.evaluate_score(2.0)
        assert session.is_done
    assert session.summary()["stop"] == metadata(tmp_path)["status"] == "stop_reward"
    told = [(row["kind"], row["opt_steps"]) for row in rows_in(tmp_path) if row["kind"] != "event"]
    assert told == [("train", 5), ("eval", 5), ("eval", 5), ("eval", 7), ("train", 7)]
    assert Store(tmp_path / "checkpoints", 1).steps() == [7]
    # As a trainer's, it goes on if it is told to, until the next score.
    with single(stop_reward=2.0, run_dir=str(tmp_path), resume=True) as session:
        take_to(session, 8)
        assert not session.is_done
        session.evaluate_score(3.0)
        assert session.is_done


def test_scores_without_a_new_best_end_it_also_where_it_was_resumed_between_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"patience": 3, "run_dir": str(tmp_path)}
    with single(**settings) as session:
        for score in (1.0, 0.5, 2.0, 2.0, 1.0):
            session.evaluate_score(score)
        assert not session.is_done
    with single(**settings, resume=True) as session:
        assert not session.is_done
        session.evaluate_score(1.5)
        assert session.is_done
        assert session.summary()["stop"] == "patience"


@pytest.mark.parametrize("limit", [1, 30, 50, 51])
def test_environment_steps_end_it_where_a_trainer_ends(limit: int) -> None:
    strategy = jaxrl.off_policy(counting(), **PARTS, num_envs=2, opt_interval=4, warmup=20)
    schedule = jaxrl.TrainerConfig(max_env_steps=limit).schedule(strategy)
    session, script = small(max_env_steps=limit), Script()
    while not session.is_done:
        drive(session, script, 1)
    wanted = (schedule.opt_steps(schedule.last), schedule.env_steps(schedule.last))
    assert (session.opt_steps, session.env_steps) == wanted
    assert session.env_steps >= limit
    assert session.summary()["stop"] == "max_env_steps"
    with pytest.raises(jaxrl.SettingsError, match=f"act was called after max_env_steps {limit} was reached"):
        drive(session, script, 1)


def test_with_one_environment_and_an_update_a_step_it_ends_at_just_that_step() -> None:
    session = single(max_env_steps=33)
    take_all(session, 1.0)
    assert session.env_steps == 33


# --- going back ---

RETRIED: dict[str, Any] = {"save_interval": 10, "record_interval": 10, "max_skips": 4}


@pytest.mark.filterwarnings("ignore:overflow")  # of the return of the episode
def test_a_session_that_diverges_goes_back_to_what_it_saved(tmp_path: Path) -> None:
    with single(**RETRIED, run_dir=str(tmp_path)) as session:
        take_to(session, 12)
        session._storage.collect_saves()
        saved, _ = Store(tmp_path / "checkpoints", 3).load(10, shapes_of(reached(session)))
        session.evaluate_score(1.0)
        spoil(session)
        now = reached(session)
        assert (session.opt_steps, session.env_steps) == (10, int(saved.host.lengths[0]))
        assert state_digest(now.state) == state_digest(reseed(saved.state, 1))
        assert state_digest((now.sums, now.past)) == state_digest((saved.sums, saved.past))
        assert state_digest(now.state.key) != state_digest(saved.state.key)
        # The environment did not go back: its episode is cut.
        assert session.ended.all()
        assert session.best_score == 1.0
        take_to(session, 30)
    assert session.summary()["skipped_updates"] == 0
    assert session.summary()["rollbacks"] == 1
    assert events_in(tmp_path) == [("rollback", 10)]
    assert [row["opt_steps"] for row in rows_in(tmp_path) if row["kind"] == "train"] == [10, 20, 30]
    message = next(row["message"] for row in rows_in(tmp_path) if row.get("event") == "rollback")
    assert "4 updates in a row were skipped, the first at optimisation step" in message
    assert message.endswith("went back to here, to go on with other random numbers")


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.every_day("27")
@pytest.mark.parametrize("stop", [23, 27])
def test_one_that_went_back_is_resumed_to_the_same_bits(stop: int, tmp_path: Path) -> None:
    """It diverges twice, but gets further in between: one try is enough."""
    settings = {**RETRIED, "max_rollbacks": 1}

    def go(session: jaxrl.Session, points: list[int]) -> str:
        for point in points:
            take_to(session, point)
            if point in (13, 25):
                spoil(session)
        return digest(session)

    points = [13, 23, 25, 27, 36]
    with single(**settings, run_dir=str(tmp_path / "whole")) as session:
        wanted = go(session, points)
        assert session.summary()["rollbacks"] == 2
    cut = points.index(stop) + 1
    with single(**settings, run_dir=str(tmp_path / "run")) as session:
        halfway = go(session, points[:cut])
    with single(**settings, run_dir=str(tmp_path / "run"), resume=True) as session:
        assert digest(session) == halfway
        assert go(session, points[cut:]) == wanted


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_session_that_has_diverged_is_resumed_from_its_last_good_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_skips": 5, "max_rollbacks": 0, "save_interval": 10, "run_dir": str(tmp_path)}
    with single(**settings) as session:
        take_to(session, 13)
        with pytest.raises(DivergedError):
            take_all(session, HUGE)
    assert not is_healthy(tmp_path)
    with single(**settings, resume=True) as session:
        assert session.opt_steps == 10
        take_to(session, 20)
    assert events_in(tmp_path)[-1] == ("resume", 10)
    assert Store(tmp_path / "checkpoints", 1).steps() == [10, 20]


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_session_that_may_not_go_back_saves_and_says_so_and_goes_on_without_the_limit(tmp_path: Path) -> None:
    saved: list[int] = []
    settings: dict[str, Any] = {"run_dir": str(tmp_path), "hooks": jaxrl.SessionHooks(save=saved.append)}
    with (
        pytest.raises(DivergedError, match=r"5 updates in a row were skipped, the first at optimisation step 0, where"),
        single(max_skips=5, max_rollbacks=0, **settings) as session,
    ):
        take_all(session, HUGE)
    assert (session.opt_steps, saved, session.is_done) == (5, [5], True)
    assert not is_healthy(tmp_path)
    assert metadata(tmp_path)["status"] == "diverged"
    assert events_in(tmp_path) == [("diverged", 5)]
    with single(max_skips=0, max_opts=15, run_dir=str(tmp_path), resume=True) as session:
        take_all(session, HUGE)
    assert session.summary()["skipped_updates"] == 15


def test_a_session_looks_at_its_updates_only_when_it_may_have_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[int](), module.skips_left
    monkeypatch.setattr(module, "skips_left", lambda *given: looks.append(session.opt_steps) or look(*given))
    with single(max_skips=10, run_dir=str(tmp_path)) as session:
        take_to(session, 30)
    assert looks == [1, 11, 21]
    assert is_healthy(tmp_path)


@pytest.mark.filterwarnings("ignore:overflow")
def test_tries_that_end_no_better_are_reported_and_without_checkpoints_they_begin_at_the_beginning(
    tmp_path: Path,
) -> None:
    memory = jaxrl.MemoryRecorder()
    session = single(max_skips=4, max_rollbacks=2, save_interval=2, recorders=[memory], run_dir=str(tmp_path))
    with pytest.raises(DivergedError, match=r"training diverged: .*; 2 new tries from the last good checkpoint ended"):
        take_all(session, HUGE)
    told = [(row["event"], row["opt_steps"]) for row in memory.rows if row["kind"] == "event"]
    assert told[-3:] == [("rollback", 0), ("rollback", 0), ("diverged", 4)]
    assert session.is_done
    assert session.summary()["stop"] == "diverged"
    session.close()
    # Those of skipped updates are undone: with other rewards it begins at the beginning.
    with single(max_skips=4, run_dir=str(tmp_path), resume=True) as again:
        assert (again.opt_steps, again.env_steps) == (0, 0)
        take_to(again, 6)
    assert again.summary()["skipped_updates"] == 0


# --- nothing valid ---


def test_a_session_without_one_valid_step_is_no_success(tmp_path: Path) -> None:
    with (
        pytest.raises(DivergedError, match="steps gave a finite observation and reward, so that nothing was learnt"),
        single(max_opts=12, record_interval=5, run_dir=str(tmp_path)) as session,
    ):
        take_all(session, np.nan)
    assert session.opt_steps == 12
    assert events_in(tmp_path) == [("invalid", 5), ("diverged", 12)]
    assert metadata(tmp_path)["status"] == "diverged"
    assert Store(tmp_path / "checkpoints", 1).steps() == [12]


def test_few_valid_steps_are_no_reason_to_fail_and_a_row_without_any_is_told_once(tmp_path: Path) -> None:
    with single(max_opts=20, record_interval=5, run_dir=str(tmp_path)) as session:
        take(session)
        take_all(session, np.nan)
    assert events_in(tmp_path) == [("invalid", 10)]
    assert session.summary()["stop"] == "max_opts"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_session_gives_what_it_went_back_to_the_settings_that_were_changed(tmp_path: Path) -> None:
    other = jaxrl.dqn(lr=0.5, features=(8,), epsilon_decay=20, target_interval=5)
    with single(**RETRIED, run_dir=str(tmp_path)) as session:
        take_to(session, 12)
    with single(**RETRIED, run_dir=str(tmp_path), resume=True, allow_changes=True, agent=other) as session:
        spoil(session)
        assert session.opt_steps == 10
        assert float(reached(session).state.agent.hyper.lr) == 0.5
        assert reached(session).ledger.changed_at == 10
