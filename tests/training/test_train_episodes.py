"""Episodes of the training, one by one: in a log and to a hook, whole and in order however the run is cut."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_runs import rows_in
from toys_trainer import counting, short_ppo, small_dqn

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training import program
from jaxrl.training.episodes import Episodes, format_lines
from jaxrl.training.program import jit_run
from jaxrl.training.recorders import JSONLRecorder, jsonl
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.logs import log_problems

RUN: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 10, "quiet": True}


def rows(run: Path) -> list[dict[str, Any]]:
    return rows_in(run, log="train_episodes.jsonl")


def train(run: Path, max_opts: int, strategy: jaxrl.Strategy | None = None, **settings: Any) -> Any:
    settings = {**RUN, "train_episodes": True, "save_interval": 10, "run_dir": run, **settings}
    return jaxrl.Trainer(strategy or short_ppo(), max_opts=max_opts, **settings).train()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 iterations of 4 steps in 3 environments; do not write it."""
    run = tmp_path_factory.mktemp("short") / "run"
    train(run, 20)
    return run


def test_each_episode_has_a_row_where_it_ended(short: Path) -> None:
    """Episodes of 5 steps, cut in all environments at once: 80 steps have 16 of them in each."""
    found = rows(short)
    ends = [5 * k for k in range(1, 17) for _ in range(3)]
    assert [row["env_steps"] for row in found] == [3 * end for end in ends]
    assert [row["opt_steps"] for row in found] == [-(-end // 4) for end in ends]
    assert [row["env"] for row in found] == [0, 1, 2] * 16
    assert {(row["return"], row["length"], row["terminated"]) for row in found} == {(5, 5, False)}
    assert list(found[0]) == ["opt_steps", "env_steps", "env", "return", "length", "terminated"]


def test_a_hook_gets_the_same_rows_without_a_file(short: Path, tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []
    hooks = jaxrl.Hooks(episode=lambda trainer, row: got.append(row))
    train(tmp_path / "hooked", 20, hooks=hooks, train_episodes=False)
    assert got == rows(short)
    assert not (tmp_path / "hooked" / "train_episodes.jsonl").exists()


def test_a_row_twice_and_a_row_lost_are_found(short: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(short, tmp_path / "run"))
    path = run / "train_episodes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], *lines[4:]]))
    assert log_problems(run, path.name) == ["line 6 repeats a row of optimisation step 3"]
    with pytest.warns(UserWarning, match=r"train_episodes.jsonl: was changed"):
        train(run, 21, resume=True)


def test_rows_say_what_the_sums_say_and_training_is_the_same_without(tmp_path: Path) -> None:
    """DQN in episodes that fall by themselves: number, sum and ends are those of the metrics."""
    told = train(tmp_path / "a", 200, small_dqn(), record_interval=200, save_interval=0)
    bare = train(tmp_path / "b", 200, small_dqn(), record_interval=200, save_interval=0, train_episodes=False)
    assert state_digest(told.state) == state_digest(bare.state)
    assert not (tmp_path / "b" / "train_episodes.jsonl").exists()
    found = rows(tmp_path / "a")
    (row,) = [r for r in map(json.loads, (tmp_path / "a" / "metrics.jsonl").open()) if r["kind"] == "train"]
    assert len(found) == row["episodes"] > 10
    assert sum(r["terminated"] for r in found) == row["terminated"]
    assert np.isclose(np.mean([r["return"] for r in found]), row["episode_return"])
    assert all(r["return"] == r["length"] for r in found)
    last: dict[int, int] = {}
    for r in found:  # after the first of an environment, each begins where the one before ended
        taken = r["env_steps"] // 4
        assert r["length"] == taken - last[r["env"]] if r["env"] in last else r["length"] <= taken
        last[r["env"]] = taken


def test_without_the_setting_the_program_is_the_same() -> None:
    """What tells is another program; the one without has no array as long as a call."""
    strategy, count = short_ppo(), jax.ShapeDtypeStruct((), np.uint32)
    like = program.state_shapes(strategy)
    plain, tells = (jit_run(strategy, told).lower(*like, count, count).as_text() for told in (False, True))
    shape = f"tensor<{program.max_iterations(strategy)}x4x3xi32>"
    assert shape in tells
    assert shape not in plain


def test_how_a_run_is_cut_and_resumed_changes_no_row(tmp_path: Path, monkeypatch: Any) -> None:
    train(tmp_path / "whole", 40, save_interval=7)
    monkeypatch.setattr(program, "MAX_EPISODE_STEPS", 12 * 3)  # no more than three iterations in a call
    run, anew = tmp_path / "cut", short_ppo.__wrapped__()  # whose programs are its own
    train(run, 20, anew, save_interval=7)
    with (run / "train_episodes.jsonl").open("a") as file:  # as after a kill: rows of a future that will come again
        file.write('{"opt_steps": 21, "env_steps": 246, "env": 0, "return": 1, "length": 1, "terminated": true}\n{"op')
    train(run, 40, anew, save_interval=7, resume=True)
    assert rows(run) == rows(tmp_path / "whole")
    assert log_problems(run, "train_episodes.jsonl") == []


@pytest.mark.slow
def test_actors_and_members_tell_too(tmp_path: Path) -> None:
    env = jaxrl.make_env("CartPole-v1", max_steps_in_episode=5)
    actors = jaxrl.ActorsConfig(actors=2, max_lag=0)
    agent = jaxrl.ppo(features=(8,))
    acting = jaxrl.on_policy(env, agent, num_envs=2, rollout=5, epochs=1, minibatches=1, actors=actors)
    train(tmp_path / "acting", 4, acting)
    assert [(row["env_steps"], row["env"]) for row in rows(tmp_path / "acting")] == [
        (20 * k, env) for k in range(1, 5) for env in range(4)
    ]
    train(tmp_path / "all", 20, jaxrl.population(short_ppo(), seeds=2))
    train(tmp_path / "alone", 20, seed=1)
    assert rows_in(tmp_path / "all", 1, "train_episodes.jsonl") == rows(tmp_path / "alone")


def test_who_has_no_episodes_is_refused() -> None:
    for settings, said in (
        ({"train_episodes": True}, "does not report training episodes; leave train_episodes out"),
        ({"hooks": jaxrl.Hooks(episode=print)}, r"leave Hooks\.episode out"),
    ):
        with pytest.raises(SettingsError, match=said):
            jaxrl.Trainer(counting(), **settings)


def test_numbers_come_back_bit_for_bit() -> None:
    total = np.array([0.1, -1e-30, 3.0, np.inf, 16777217.0], np.float32)
    whole = np.arange(5)
    found = [
        json.loads(line) for line in format_lines(Episodes(whole, whole, whole, total, whole, whole > 2)).splitlines()
    ]
    assert found[3]["return"] is None
    assert [np.float32(row["return"]) for row in found if row["return"] is not None] == total[[0, 1, 2, 4]].tolist()
    assert [row["terminated"] for row in found] == [False, False, False, True, True]


def test_what_a_full_disk_does_not_take_is_bounded_and_counted(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(jsonl, "MAX_PENDING", 100)
    (tmp_path / "log").mkdir()
    recorder = JSONLRecorder(tmp_path / "log")  # a directory cannot be written to
    line = b'{"opt_steps": 1, "env": 0, "env_steps": 1}\n'
    for _ in range(4):
        recorder.extend(line * 2)
    assert "6 of its rows are lost" in capsys.readouterr().err
    waiting: dict[str, list[str]] = {}
    recorder.unwritten(waiting)
    assert len(waiting["log"]) == 1
