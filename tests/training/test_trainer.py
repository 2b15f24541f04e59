"""The host loop: when it acts, what it may not change, how it stops, and what it tells."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from toys_runs import rows_in, timeless
from toys_trainer import TRACES, ByStep, Scripted, counting, short_ppo, small_dqn

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.program import Saved, zero_sums
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest as digest

QUIET = {"recorders": []}


def rows(recorder: jaxrl.MemoryRecorder, kind: str) -> list[dict]:
    return [row for row in recorder.rows if row["kind"] == kind]


# --- when things happen ---


def test_awkward_intervals_fire_exactly_and_compile_a_handful(tmp_path: Path) -> None:
    TRACES.clear()
    memory, saves = jaxrl.MemoryRecorder(), list[int]()
    strategy = counting.__wrapped__()  # which nobody has traced
    intervals = {"max_opts": 303, "eval_interval": 7, "record_interval": 11, "save_interval": 13, "keep": 2}
    result = jaxrl.Trainer(
        strategy,
        evaluator=Scripted(*([[1.0]] * 60)),
        run_dir=str(tmp_path),
        recorders=[memory],
        hooks=jaxrl.Hooks(save=lambda trainer, opt_steps: saves.append(opt_steps)),
        **intervals,
    ).train()
    assert [row["opt_steps"] for row in rows(memory, "eval")] == [*range(7, 303, 7), 303]
    assert [row["opt_steps"] for row in rows(memory, "train")] == [*range(11, 303, 11), 303]
    assert saves == [*range(13, 303, 13), 303]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["299", "303"]
    assert int(result.state.steps) == 303
    assert len(TRACES) <= 6


COUNTING = """
import sys, jax, jaxrl
from toys_trainer import small_dqn
seen = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))
hooks = jaxrl.Hooks(start=lambda trainer: seen.clear())
settings = {"max_opts": 40, "eval_interval": 10, "eval_episodes": 2, "record_interval": 10, "save_interval": 10}
for report in jaxrl.Trainer(small_dqn(), run_dir=sys.argv[1], quiet=True, hooks=hooks, **settings):
    pass
print(sum("backend_compile" in event for event in seen))
"""


@pytest.mark.usefixtures("shared_programs")
def test_nothing_is_compiled_once_training_has_begun(tmp_path: Path) -> None:
    # In a process of its own: in this one other tests have compiled what little there may be to compile. A program that
    # is taken from the store counts as one that is compiled.
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", COUNTING, str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["best_score"] > 0


def test_rows_hold_the_mean_min_and_max_of_their_interval() -> None:
    memory = jaxrl.MemoryRecorder()
    jaxrl.Trainer(counting(), max_opts=25, record_interval=10, recorders=[memory]).train()
    # The metric is t: 0..9, 10..19, 20..24.
    got = [(row["t"], row["t_min"], row["t_max"], row["rows"]) for row in rows(memory, "train")]
    assert got == [(4.5, 0, 9, 30), (14.5, 10, 19, 30), (22.0, 20, 24, 15)]


def test_counters_with_warmup_and_several_steps_an_iteration() -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = counting(env_steps=8, opt_steps=4, warmup=24)
    jaxrl.Trainer(strategy, max_opts=40, record_interval=6, recorders=[memory]).train()
    assert [(row["opt_steps"], row["env_steps"]) for row in rows(memory, "train")] == [
        (8, 40), (12, 48), (20, 64), (24, 72), (32, 88), (36, 96), (40, 104),
    ]  # fmt: skip


def test_a_run_goes_on_exactly_past_2_to_the_31(tmp_path: Path) -> None:
    strategy, start = counting(env_steps=4096), 2**31 + 5
    jaxrl.Trainer(strategy, max_opts=3, run_dir=str(tmp_path), **QUIET).train()
    store = Store(tmp_path / "checkpoints", 1)
    facts = store.manifest(3)["facts"]
    facts["ledger"]["t"], facts["env_steps"] = start, 4096 * start
    store.save(start, Saved(jax.jit(strategy.init)(jax.random.key(0)), zero_sums(2)), facts)
    store.close()
    memory = jaxrl.MemoryRecorder()
    settings = {"record_interval": 10, "run_dir": str(tmp_path), "resume": True, "recorders": [memory]}
    jaxrl.Trainer(strategy, max_opts=start + 20, **settings).train()
    # float32 cannot tell these numbers apart, but the counters are integers.
    ends = [2147483660, 2147483670, 2147483673]
    assert [(row["opt_steps"], row["env_steps"]) for row in rows(memory, "train")] == [(n, 4096 * n) for n in ends]
    assert json.loads((tmp_path / "metadata.json").read_text())["opt_steps"] == 2147483673
    assert Store(tmp_path / "checkpoints", 1).steps()[-1] == 2147483673


# --- judging ---


def test_a_lucky_first_look_is_not_kept_and_the_second_score_is(tmp_path: Path) -> None:
    # Step 2 looks like 9 but is 1; step 3 looks like 5 and is 4; step 4 looks like 6, which is 3.5; step 5 is no
    # candidate; step 6 looks like infinity.
    evaluator = ByStep([2.0, 1.0, 4.0, 3.5, 3.0, 5.0], luck={2: 8.0, 3: 1.0, 4: 2.5, 6: math.inf})
    memory, run = jaxrl.MemoryRecorder(), tmp_path / "run"
    result = jaxrl.Trainer(
        counting(), evaluator=evaluator, max_opts=6, eval_interval=1, run_dir=str(run), recorders=[memory]
    ).train()
    told = [(row["score"], row["confirm_score"], row["is_best"]) for row in rows(memory, "eval")]
    assert told == [
        (2.0, 2.0, True), (9.0, 1.0, False), (5.0, 4.0, True), (6.0, 3.5, False), (3.0, None, False),
        (math.inf, None, False),
    ]  # fmt: skip
    # Candidates were looked at twice, each time with a key of its own.
    assert [step for step, _ in evaluator.looks] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert len({key for _, key in evaluator.looks}) == 10
    assert (result.best_score, result.summary["best_score"], result.summary["best_opt_steps"]) == (4.0, 4.0, 3)
    assert [path.name for path in (run / "best").iterdir()] == ["3"]
    assert Store(run / "best", 1).newest_facts()[1]["score"] == 4.0
    metadata = json.loads((run / "metadata.json").read_text())
    assert (metadata["best_score"], metadata["best_opt_steps"]) == (4.0, 3)
    assert result.summary["seconds"]["confirm"] > 0


def test_a_second_look_that_is_not_finite_confirms_nothing() -> None:
    evaluator = ByStep([math.nan, math.inf, 1.0], luck={})
    looks = iter([5.0, math.nan, 6.0, math.inf, 1.0, 1.0])
    result = jaxrl.Trainer(
        counting(), evaluator=evaluator, score=lambda evaluation: next(looks), max_opts=3, eval_interval=1, **QUIET
    ).train()
    assert (result.best_score, result.summary["best_opt_steps"]) == (1.0, 3)


def test_a_run_that_confirms_its_best_is_the_same_after_a_resume(tmp_path: Path) -> None:
    settings = {"eval_interval": 10, "eval_episodes": 7, "record_interval": 10, "quiet": True}
    logs, digests = [], []
    for name, ends in (("whole", [40]), ("parts", [10, 20, 30, 40])):
        for end in ends:
            run = tmp_path / name
            trainer = jaxrl.Trainer(small_dqn(), max_opts=end, run_dir=str(run), resume=end != ends[0], **settings)
            state = trainer.train().state
        logs.append(timeless([row for row in rows_in(run) if row["kind"] == "eval"]))
        digests.append((digest(state), Store(run / "best", 1).newest_facts()[1]["score"]))
    assert [row["opt_steps"] for row in logs[0]] == [10, 20, 30, 40]
    assert logs[0][0]["confirm_score"] not in (None, logs[0][0]["score"])  # other episodes than the first's
    assert logs[0] == logs[1]
    assert digests[0] == digests[1]


def test_stop_reward_must_be_reached_at_both_looks() -> None:
    def stopped(**settings: Any) -> tuple:
        evaluator = ByStep([2.0, 2.0, 4.0, 0.0], luck={1: 2.0})
        trainer = jaxrl.Trainer(
            counting(), evaluator=evaluator, max_opts=4, eval_interval=1, stop_reward=3.0, **settings, **QUIET
        )
        return (summary := trainer.train().summary)["stop"], summary["opt_steps"]

    assert stopped() == ("stop_reward", 3)
    assert stopped(confirm_best=False) == ("stop_reward", 1)


# --- stopping ---


@pytest.mark.parametrize(
    ("settings", "stop", "opt_steps", "resumed"),
    [
        ({"stop_reward": 2.5}, "stop_reward", 3, 4),
        ({"patience": 2}, "patience", 6, 7),
        ({"stop": lambda report: report.opt_steps >= 4}, "stop", 4, 5),
        ({"max_env_steps": 11}, "max_env_steps", 6, 6),
        ({}, "max_opts", 8, 8),
    ],
)
def test_ways_to_stop(settings: dict, stop: str, opt_steps: int, resumed: int, tmp_path: Path) -> None:
    """Resumed, a run that has reached its limit is finished, and any other goes on until it is ended again."""
    scores = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    run = tmp_path / "run"
    memory = jaxrl.MemoryRecorder()
    settings = {"max_opts": 8, "eval_interval": 1, "record_interval": 100, "run_dir": str(run), **settings}
    trainer = lambda **more: jaxrl.Trainer(counting(env_steps=2), evaluator=ByStep(scores), **settings, **more)
    summary = trainer(recorders=[memory]).train().summary
    assert (summary["stop"], summary["opt_steps"]) == (stop, opt_steps)
    assert rows(memory, "eval")[-1]["opt_steps"] == rows(memory, "train")[-1]["opt_steps"] == opt_steps
    assert Store(run / "checkpoints", 1).steps()[-1] == opt_steps
    assert json.loads((run / "metadata.json").read_text())["status"] == stop
    summary = trainer(recorders=[], resume=True).train().summary
    assert (summary["stop"], summary["opt_steps"]) == (stop, resumed)


def test_a_handle_stops_at_the_end_of_a_call_of_which_the_first_is_one_iteration() -> None:
    """So that a slow environment can be stopped."""

    def stopped(opt_steps: int, **settings: Any) -> tuple[str, int]:
        def stop(trainer: jaxrl.Trainer, progress: Any) -> None:
            if progress.opt_steps >= opt_steps:
                trainer.interrupt.stop("enough")

        trainer = jaxrl.Trainer(counting(), max_opts=100, hooks=jaxrl.Hooks(chunk=stop), **settings, **QUIET)
        return (summary := trainer.train().summary)["stop"], summary["opt_steps"]

    assert stopped(1) == ("enough", 1)
    assert stopped(30, max_chunk=10, record_interval=40) == ("enough", 30)


def test_an_exception_in_a_hook_keeps_what_was_saved(tmp_path: Path) -> None:
    def fail(trainer: jaxrl.Trainer, opt_steps: int) -> None:
        if opt_steps == 20:
            raise RuntimeError("mine")

    settings = {"max_opts": 100, "save_interval": 10, "run_dir": str(tmp_path), **QUIET}
    with pytest.raises(RuntimeError, match="mine"):
        jaxrl.Trainer(counting(), hooks=jaxrl.Hooks(save=fail), **settings).train()
    assert Store(tmp_path / "checkpoints", 1).steps() == [10, 20]


# --- telling ---


def test_the_parts_of_the_time_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds: float, after: Callable) -> Callable:
        def call(*args: object) -> object:
            now[0] += seconds
            return after(*args)

        return call

    class Slow(jaxrl.MemoryRecorder):
        write = passes(0.5, jaxrl.MemoryRecorder.write)

    strategy, evaluator = counting(), passes(10.0, ByStep([1.0, 0.0, 2.0, 0.0]))
    body = strategy.step
    strategy = strategy._replace(
        step=lambda state, key, t: (jax.debug.callback(passes(2.0, int), t, ordered=True), body(state, key, t))[1]
    )
    slow = Slow()
    trainer = jaxrl.Trainer(
        strategy, evaluator=evaluator, max_opts=4, eval_interval=2, recorders=[slow], confirm_best=False, quiet=True
    )
    summary = trainer.train().summary
    seconds, recording = summary["seconds"], 0.5 * len(slow.rows)
    assert set(seconds) == {"compile", "init", "train", "evaluate", "confirm", "record", "save", "other"}
    assert (seconds["train"], seconds["evaluate"], seconds["record"]) == (8.0, 20.0, recording)
    assert sum(seconds.values()) == summary["wall_s"] == 28.0 + recording
    assert seconds["other"] == 0.0
    assert summary["opt_steps_per_sec"] == 4 / 8.0


def test_every_number_of_a_row_is_documented_and_episode_returns_are_whole_episodes() -> None:
    memory = jaxrl.MemoryRecorder()
    settings = {"max_opts": 20, "eval_interval": 10, "eval_episodes": 4, "record_interval": 10}
    jaxrl.Trainer(short_ppo(), recorders=[memory], **settings).train()
    train, evaluation = rows(memory, "train")[0], rows(memory, "eval")[0]
    assert (train["episode_return"], train["episode_return_min"], train["episode_length_max"]) == (5.0, 5.0, 5.0)
    assert (train["episodes"], train["truncated"], train["terminated"]) == (24, 24, 0)
    assert [name for name in train if name.startswith("largest")] == []  # only checks are made of these
    assert (evaluation["eval_reward"], evaluation["eval_length"], evaluation["unfinished"]) == (5.0, 5.0, 0)
    for name in ("opt_steps", "env_steps", "wall_s", "opt_steps_per_sec", "env_steps_per_sec", "loss", "loss_min"):
        assert name in train
    for name in ("eval_reward_std", "eval_reward_min", "eval_reward_max", "episodes", "is_best"):
        assert name in evaluation


# --- refusing ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_optz": 3}, "no setting 'max_optz'; did you mean max_opts"),
        ({"eval_interval": 5, "eval_episodes": 0}, "eval_episodes is 0"),
        ({"eval_interval": 5, "eval_episodes": 2}, "no env and policy to evaluate"),
        ({"patience": 2}, "set eval_interval"),
        ({"keep": 0}, "keep is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"resume": True}, "resume needs the run_dir"),
        ({"eval_at_return": "much"}, "eval_at_return is 'much'; expected a number"),
        ({"eval_at_return": 1.0, "record_interval": 0}, "eval_at_return looks at records"),
        ({"eval_at_return": 1.0, "eval_episodes": 0, "eval_interval": 0}, "set record_interval and eval_episodes"),
    ],
)
def test_bad_settings_are_refused_before_anything_happens(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        jaxrl.Trainer(counting(), **settings)


def test_a_directory_that_holds_another_run_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jaxrl.Trainer(counting(), max_opts=3, run_dir=str(run), **QUIET).train()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="holds a run already"):
        jaxrl.Trainer(counting(), max_opts=5, run_dir=str(run), **QUIET).train()
    with pytest.raises(SettingsError, match="seed: 0 -> 1"):
        jaxrl.Trainer(counting(), max_opts=5, seed=1, run_dir=str(run), resume=True, **QUIET).train()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_promising_training_is_evaluated_at_once_and_ends_only_if_that_confirms_it() -> None:
    """Training returns the number of its iteration, from 0; what is found by evaluating is another thing."""
    plain = counting()

    def step(state: Any, key: Any, t: Any) -> tuple:
        state, metrics = plain.step(state, key, t)
        return state, {**metrics, "episode_return": metrics["t"]}

    def evaluated(scores: list[float], **settings: Any) -> tuple:
        trainer = jaxrl.Trainer(
            plain._replace(step=step),
            evaluator=ByStep(scores, luck={}),
            confirm_best=False,
            eval_interval=6,
            record_interval=1,
            stop_reward=9.0,
            max_opts=6,
            **settings,
            **QUIET,
        )
        steps = [report.opt_steps for report in trainer if report.eval]
        return steps, trainer.stop_reason

    poor = [0.0] * 6
    assert evaluated(poor) == ([6], "max_opts")
    assert evaluated(poor, eval_at_return=3.0) == ([4, 5, 6], "max_opts")
    assert evaluated([9.0, 9.0, 9.0, 0.0, 9.0, 9.0], eval_at_return=3.0) == ([4, 5], "stop_reward")
