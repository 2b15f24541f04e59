"""The log of a session: what its rows say, and that none is doubled or lost however the session is cut."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_agents import vector_of
from toys_runs import rows_in, timeless
from toys_session import PARTS, SPEC, Script, digest, drive, reached, single, small

import jaxrl
from jaxrl.training.storage.logs import log_problems

EVERY = 4


def rows(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the rows of one kind, or of all, less what the clock has measured."""
    return timeless([row for row in rows_in(run) if kind in (None, row["kind"])])


def test_rows_tell_of_the_time_since_the_last_one(tmp_path: Path) -> None:
    learnt: list[dict[str, float]] = []
    hooks = jaxrl.SessionHooks(learnt=lambda told: learnt.append(dict(told)))
    with single(run_dir=str(tmp_path), record_interval=EVERY, max_opts=10, hooks=hooks) as session:
        step = 0
        while not session.is_done:
            step += 1
            session.act([float(step % 5), 0.0])
            if step == 13:
                session.note(battery=0.5)
            reward = np.nan if step == 16 else float(step)
            session.observe(reward, [float(step % 5 + 1), 0.0], step % 6 == 0, step == 15)
            if step % 6 == 0 or step in (15, 16):
                continue
            session.cut()  # the observations begin again after the fifth
    first, second, last = rows(tmp_path, "train")
    # Two steps prime the window of three, and a batch of 8 fills the buffer: then each step is learnt from.
    assert [(row["opt_steps"], row["env_steps"]) for row in (first, second, last)] == [(4, 14), (8, 18), (10, 20)]
    assert (first["episodes"], first["terminated"], first["truncated"], first["invalid_steps"]) == (2, 2, 0, 0)
    assert (first["episode_return"], first["episode_return_min"], first["episode_return_max"]) == (9.0, 6.0, 12.0)
    assert (first["episode_length"], first["info/battery"]) == (1.0, 0.5)
    # Steps 15 (cut), 16 (not finite, so cut) and 18 (an end).
    assert (second["episodes"], second["terminated"], second["truncated"], second["invalid_steps"]) == (3, 1, 2, 1)
    assert (second["episode_return"], second["episode_return_min"]) == (11.0, 0.0)
    assert (last["episodes"], last["episode_return"], last["episode_length_max"]) == (0, None, None)
    for row, told in ((first, learnt[:4]), (second, learnt[4:8]), (last, learnt[8:])):
        losses = [each["loss"] for each in told]
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert (row["loss_min"], row["loss_max"]) == (min(losses), max(losses))
        assert row["skipped_updates"] == 0
    # The summary is over the whole session all the same.
    assert session.summary()["loss"] == pytest.approx(np.mean([told["loss"] for told in learnt]), rel=1e-5)
    assert session.summary()["loss_max"] == max(told["loss"] for told in learnt)
    text = (tmp_path / "metrics.jsonl").read_text()
    (speed, *_) = [json.loads(line)["opt_steps_per_sec"] for line in text.splitlines() if '"train"' in line]
    assert speed > 0


def test_scores_are_rows_of_which_only_a_greater_finite_one_is_best(tmp_path: Path) -> None:
    scores = [3.0, math.nan, math.inf, 3.0, 2.0, 3.5]
    with small(run_dir=str(tmp_path), record_interval=0) as session:
        drive(session, Script(), 20)
        best = [session.evaluate_score(score) for score in scores]
    assert (best, session.best_score) == ([True, False, False, False, False, True], 3.5)
    told = rows(tmp_path, "eval")
    assert [row["is_best"] for row in told] == best
    assert [row["eval_reward"] for row in told] == [score if math.isfinite(score) else None for score in scores]
    assert {(row["opt_steps"], row["env_steps"]) for row in told} == {(session.opt_steps, 40)}
    assert rows(tmp_path, "train") == []
    assert log_problems(tmp_path, "metrics.jsonl") == []
    assert any("the training state takes" in row["message"] for row in rows(tmp_path, "event"))


def test_a_score_told_after_a_row_of_its_step_has_the_returns_of_that_row(tmp_path: Path) -> None:
    script = Script()
    with small(run_dir=str(tmp_path), record_interval=EVERY) as session:
        while session.opt_steps < EVERY:
            drive(session, script, 1)
        session.evaluate_score(1.0)
        while session.opt_steps < EVERY + 1:
            session.cut()
            session.act(script.obs())
            session.observe([7.0, 7.0], script.obs(), [True, False], [False, False])
        session.evaluate_score(2.0)
    (row,) = rows(tmp_path, "train")
    assert row["episodes"] > 0
    assert [told["train_return"] for told in rows(tmp_path, "eval")] == [row["episode_return"], 7.0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The rows of a session that nothing disturbs, and its state at the end."""
    run = tmp_path_factory.mktemp("whole")
    with small(run_dir=str(run), record_interval=EVERY) as session:
        drive(session, Script(), 44)
    assert [row["opt_steps"] for row in rows(run, "train")] == [4, 8, 12, 16]
    return rows(run, "train"), digest(session)


def test_how_often_rows_are_written_changes_no_bit_of_the_training() -> None:
    agents = []
    for interval in (0, 7):
        session = small(record_interval=interval)
        drive(session, Script(), 44)
        agents.append(np.asarray(vector_of(reached(session).state.agent.params)))
    np.testing.assert_array_equal(*agents)


def test_a_resumed_session_goes_on_with_its_rows(whole: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": str(tmp_path), "record_interval": EVERY}
    script = Script()
    with small(**settings) as session:
        drive(session, script, 18)  # within an interval, of 5 optimisation steps
    with small(**settings, resume=True) as session:
        drive(session, script, 26)
    assert (rows(tmp_path, "train"), digest(session)) == whole
    assert rows(tmp_path, "event")[-1]["event"] == "resume"


def test_rows_after_the_checkpoint_are_cut(whole: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": str(tmp_path), "record_interval": EVERY}
    script = Script()
    session = small(**settings)
    drive(session, script, 26)
    session.save()
    kept = script.step, script.actions
    drive(session, script, 11)
    session.evaluate_score(1.0)
    # A process that is killed lets go of the directory and writes nothing more.
    session._storage.collect_saves()
    session._storage.close()
    assert [row["opt_steps"] for row in rows(tmp_path, "train")] == [4, 8, 12]
    script.step, script.actions = kept
    with small(**settings, resume=True) as session:
        assert [row["opt_steps"] for row in rows(tmp_path, "train")] == [4, 8]
        assert rows(tmp_path, "eval") == []
        drive(session, script, 9)
        session.restore()  # and once more within a process
        script.step, script.actions = kept
        assert [row["opt_steps"] for row in rows(tmp_path, "train")] == [4, 8]
        drive(session, script, 18)
    assert (rows(tmp_path, "train"), digest(session)) == whole
    assert log_problems(tmp_path, "metrics.jsonl") == []


def test_rows_have_what_was_chosen_of_what_is_noted(tmp_path: Path) -> None:
    chosen = jaxrl.Statistics({"battery": ["last", "sum"], "speed": ["mean", "max"]})
    with single(run_dir=str(tmp_path), record_interval=EVERY, statistics=chosen) as session:
        drive(session, Script(1), 10)
        for battery, speed in ((0.5, 1.0), (0.25, 3.0)):
            session.note(battery=battery, speed=speed, other=2 * speed)
        drive(session, Script(1, step=10), 8)
    first, second = rows(tmp_path, "train")
    told = {name: first[name] for name in first if name.startswith("info/")}
    assert told == {
        "info/battery_last": 0.25,
        "info/battery_sum": 0.75,
        "info/speed": 2.0,
        "info/speed_max": 3.0,
        "info/other": 4.0,
        "info/other_min": 2.0,
        "info/other_max": 6.0,
    }
    assert not [name for name in second if name.startswith("info/")]
    assert session.summary()["battery_sum"] == 0.75


def test_rolling_is_over_the_latest_numbers_of_a_row_also_where_it_was_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": str(tmp_path), "record_interval": EVERY}
    with single(**settings, statistics=jaxrl.Statistics({"battery": ["rolling"]}, window=2)) as session:
        drive(session, Script(1), 10)
        for battery in (1.0, 2.0):
            session.note(battery=battery)
    with single(**settings, statistics=jaxrl.Statistics({"battery": ["rolling"]}, window=2), resume=True) as session:
        session.note(battery=4.0)
        drive(session, Script(1, step=10), 4)
        session.note(battery=8.0)
        drive(session, Script(1, step=14), 4)
    assert [row["info/battery_rolling"] for row in rows(tmp_path, "train")] == [3.0, 8.0]


def test_recorders_of_ones_own_get_the_rows_of_the_log_and_no_others_are_there(tmp_path: Path) -> None:
    with_log, alone = jaxrl.MemoryRecorder(), jaxrl.MemoryRecorder()
    for recorder, run_dir in ((with_log, str(tmp_path)), (alone, None)):
        with single(recorders=[recorder], run_dir=run_dir, record_interval=EVERY) as session:
            drive(session, Script(1), 16)
            session.evaluate_score(1.0)
    assert timeless(with_log.rows) == rows(tmp_path)
    assert [row["kind"] for row in alone.rows if row["kind"] != "event"] == ["train", "eval"]
    assert not (tmp_path / "tensorboard").exists()


def test_a_session_tells_its_speed() -> None:
    session = single()
    assert session.steps_per_sec is None
    drive(session, Script(1), 12)
    assert session.steps_per_sec is not None
    assert session.steps_per_sec > 0
    summary = session.summary()
    assert summary["env_steps_per_sec"] == pytest.approx(12 / summary["wall_s"])
    assert summary["opt_steps_per_sec"] == pytest.approx(session.opt_steps / summary["wall_s"])


def test_a_run_has_a_name_tags_notes_and_entries_of_ones_own(tmp_path: Path) -> None:
    class Told:
        def begin(self, run: jaxrl.RunInfo) -> None:
            self.run = run

        def write(self, row: Any) -> None: ...
        def tick(self, progress: Any) -> None: ...
        def close(self) -> None: ...

    told, run = Told(), str(tmp_path / "run")
    given: dict[str, Any] = {"name": "arm", "tags": ["wide", "second"], "notes": "a new gripper"}
    with single(run_dir=run, about={"robot": {"serial": 7}, "place": "lab"}, recorders=[told], **given) as session:
        session.describe(place="hall", grip=[np.float32(1.5), None])
        with pytest.raises(jaxrl.SettingsError, match=r"about.grip\[0\] is object; expected a number"):
            session.describe(grip=[object()])
    assert (told.run.name, told.run.tags[-2:], told.run.notes) == ("arm", ("wide", "second"), "a new gripper")
    with single(run_dir=run, resume=True, about={"robot": "other"}):
        pass
    about = json.loads((tmp_path / "run" / "metadata.json").read_text())["about"]
    assert about == {"robot": "other", "place": "hall", "grip": [1.5, None]}
    with pytest.raises(jaxrl.SettingsError, match="tags is 'wide'; expected a list of words"):
        single(tags="wide")


def test_a_session_that_is_refused_for_its_entries_holds_no_run_directory(tmp_path: Path) -> None:
    for about, said in (({"robot": object()}, "about.robot is object"), ({"robot": [{1}]}, r"about.robot\[0\] is set")):
        with pytest.raises(jaxrl.SettingsError, match=said):
            jaxrl.Session(SPEC, **PARTS, run_dir=str(tmp_path / "run"), about=about)
        assert not (tmp_path / "run").exists()
