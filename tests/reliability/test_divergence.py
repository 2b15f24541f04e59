"""Promises 11 and 12: a bad update is skipped; after many in a row the run goes back, and gives up only at last."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_runs import events_in

import jaxrl
from jaxrl import train, verify
from jaxrl.errors import DivergedError
from jaxrl.strategies.guard import Health, get_health, guarded_update, init_health, reseed
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS, member_dir

QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 10, "quiet": True}


class Learner(NamedTuple):
    key: jax.Array
    agent: jax.Array
    health: Health


def poisoned(bad: Any, name: str = "loss") -> jaxrl.Strategy:
    """A walk by guarded updates, of which the metric `name` is NaN wherever `bad(luck, opt_step)`, luck in [0, 1)."""

    def update(state: jax.Array, batch: Any, luck: jax.Array, opt_step: jax.Array) -> Any:
        metrics = {"loss": state**2, "q_mean": state}
        spoilt = jnp.where(bad(luck, opt_step), jnp.nan, metrics[name])
        return state + luck + 0.5, {**metrics, name: spoilt}, jnp.zeros(1)

    agent = jaxrl.dqn()(jaxrl.make_env("CartPole-v1").spec)._replace(update=update)

    def step(state: Learner, key: Any, t: jax.Array) -> Any:
        luck = jax.random.uniform(key)
        new, health, metrics, _ = guarded_update(agent, state.agent, state.health, None, luck, t)  # type: ignore[arg-type]
        return Learner(state.key, new, health), metrics

    init = lambda key: Learner(key, jnp.float32(0), init_health())
    return jaxrl.Strategy(init, step, 1, 1, state_fns=jaxrl.StateFns(get_health, reseed))


def steps_of_rows(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["opt_steps"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("bad", [[0], [17], list(range(17, 38))], ids=["the first", "one", "21 in a row"])
def test_skipped_updates_leave_the_agent_bitwise_as_it_was_and_are_counted(bad: list[int]) -> None:
    strategy = poisoned(lambda luck, opt_step: (opt_step >= bad[0]) & (opt_step <= bad[-1]))
    memory = jaxrl.MemoryRecorder()
    trainer = jaxrl.Trainer(strategy, max_opts=50, recorders=[memory], max_chunk=1, **QUIET)
    agents: list[str] = []
    trainer.hooks = jaxrl.Hooks(
        start=lambda t: agents.append(state_digest(t.state.agent)),
        chunk=lambda t, progress: agents.append(state_digest(t.state.agent)),
    )
    trainer.train()
    assert [k for k in range(50) if agents[k] == agents[k + 1]] == bad
    assert sum(row["skipped_updates"] for row in memory.rows if row["kind"] == "train") == len(bad)


def test_a_permanent_nan_is_tried_again_and_then_reported(tmp_path: Path) -> None:
    run, strategy = tmp_path / "run", poisoned(lambda luck, opt_step: opt_step >= 33, "q_mean")
    trainer = jaxrl.Trainer(strategy, max_opts=100, save_interval=10, max_skips=12, run_dir=str(run), **QUIET)
    with pytest.raises(DivergedError) as raised:
        trainer.train()
    for part in ("updates in a row", "at optimisation step 33", "q_mean was not finite", "3 new tries", "agent.lr"):
        assert part in str(raised.value)
    assert raised.value.exit_code == 3
    # 40 was saved while updates were being skipped: each try begins at 30, the last that was saved in good health.
    assert events_in(run) == [("rollback", 30)] * 3 + [("diverged", 50)]
    assert steps_of_rows(run) == [10, 20, 30, 40]
    assert json.loads((run / "metadata.json").read_text())["status"] == "diverged"
    # What was good is still there, and other settings may go on from it.
    assert 30 in Store(run / "checkpoints", 1).steps()


@pytest.mark.parametrize("keep", [1, 3])
def test_saves_of_skipped_updates_do_not_push_out_the_checkpoint_to_go_back_to(tmp_path: Path, keep: int) -> None:
    run, strategy = tmp_path / "run", poisoned(lambda luck, opt_step: opt_step >= 33)
    settings = {"max_opts": 50, "save_interval": 2, "keep": keep, "max_skips": 12, "max_rollbacks": 1, **QUIET}
    trainer = jaxrl.Trainer(strategy, run_dir=str(run), **settings)
    with pytest.raises(DivergedError):
        trainer.train()
    assert events_in(run) == [("rollback", 32), ("diverged", 46)]
    assert len(Store(run / "checkpoints", 1).steps()) == keep + 1


def test_a_run_that_has_diverged_goes_on_from_its_last_good_checkpoint(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {"max_opts": 60, "save_interval": 10, "max_skips": 12, **QUIET}
    with pytest.raises(DivergedError):
        jaxrl.Trainer(poisoned(lambda luck, opt_step: opt_step >= 33), run_dir=str(run), **settings).train()
    assert Store(run / "checkpoints", 1).steps()[-1] == 40
    mended = poisoned(lambda luck, opt_step: False)
    result = jaxrl.Trainer(mended, run_dir=str(run), resume=True, **settings).train()
    assert events_in(run)[-1] == ("resume", 30)
    assert steps_of_rows(run) == [10, 20, 30, 40, 50, 60]
    # Its random numbers are those of a run that never diverged.
    assert state_digest(result.state) == state_digest(jaxrl.Trainer(mended, **settings).train().state)


def test_with_a_passing_nan_the_run_comes_to_its_end(tmp_path: Path) -> None:
    bad = lambda luck, opt_step: luck < 0.03  # another stream of randomness has other luck
    settings = {"max_opts": 100, "save_interval": 10, "max_skips": 1, "max_rollbacks": 50, **QUIET}
    digests, told = set(), set()
    for chunk in (1, 7, None):
        run = tmp_path / str(chunk)
        trainer = jaxrl.Trainer(poisoned(bad), max_chunk=chunk, run_dir=str(run), **settings)
        result = trainer.train()
        digests.add(state_digest(result.state))
        told.add(tuple(events_in(run)))
        assert result.summary["opt_steps"] == 100
        assert result.summary["rollbacks"] == len(events_in(run)) > 0
        assert steps_of_rows(run) == list(range(10, 101, 10))
    assert (len(digests), len(told)) == (1, 1)


def test_what_was_noted_and_evaluated_after_the_checkpoint_is_undone_with_the_rest(tmp_path: Path) -> None:
    def note(trainer: jaxrl.Trainer, progress: Any) -> None:
        trainer.note(late=100.0 if progress.opt_steps > 20 and not trainer.ledger.rollbacks else 1.0)

    def judge(params: Any, key: Any) -> Evaluation:
        return Evaluation(np.ones(1), np.ones(1, int), np.ones(1, bool))

    strategy = poisoned(lambda luck, opt_step: (luck < 0.1) & (opt_step >= 30))
    intervals = {"eval_interval": 6, "eval_episodes": 1, "record_interval": 40, "save_interval": 20}
    settings = {**QUIET, **intervals, "max_opts": 40, "max_skips": 1, "max_rollbacks": 50, "max_chunk": 1}
    hooks = jaxrl.Hooks(chunk=note)
    trainer = jaxrl.Trainer(strategy, evaluator=judge, hooks=hooks, run_dir=str(tmp_path), **settings)
    result = trainer.train()
    assert events_in(tmp_path)[0] == ("rollback", 20)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["late"] for row in rows if row["kind"] == "train"] == [1.0]
    assert [point.opt_steps for point in result.curve] == [6, 12, 18, 24, 30, 36, 40]


@pytest.mark.every_day("43")
@pytest.mark.parametrize("stop", [15, 40, 43, 77])
def test_a_run_that_went_back_resumes_bit_exactly(tmp_path: Path, stop: int) -> None:
    settings = {"save_interval": 10, "max_skips": 1, "max_rollbacks": 50, "max_chunk": 4, **QUIET}
    strategy = poisoned(lambda luck, opt_step: luck < 0.03)
    whole = jaxrl.Trainer(strategy, max_opts=100, run_dir=str(tmp_path / "whole"), **settings).train()
    run = str(tmp_path / "run")
    jaxrl.Trainer(strategy, max_opts=stop, run_dir=run, **settings).train()
    result = jaxrl.Trainer(strategy, max_opts=100, run_dir=run, resume=True, **settings).train()
    assert state_digest(result.state) == state_digest(whole.state)


def test_a_trainer_gives_what_it_went_back_to_the_settings_that_were_changed(tmp_path: Path) -> None:
    """Else the run would go on with the old ones, of the older checkpoint, and say nothing."""
    settings: dict[str, Any] = {"save_interval": 10, "max_skips": 3, "run_dir": str(tmp_path), **QUIET}

    def made(kind: int, bad: Any) -> jaxrl.Strategy:
        strategy, tune = poisoned(bad), lambda state: state._replace(agent=jnp.float32(kind))
        state_fns = strategy.state_fns._replace(set_hyperparams=tune)
        info = jaxrl.StrategyInfo(settings={"algo": "custom", "kind": kind})
        return strategy._replace(info=info, state_fns=state_fns)

    jaxrl.Trainer(made(0, lambda luck, step: False), max_opts=20, **settings).train()
    agents = list[float]()
    hooks = jaxrl.Hooks(chunk=lambda trainer, progress: agents.append(float(trainer.state.agent)))
    spoilt = made(100, lambda luck, step: (step >= 22) & (luck < 0.9))
    trainer = jaxrl.Trainer(
        spoilt, max_opts=30, resume=True, allow_changes=True, hooks=hooks, max_chunk=1, max_rollbacks=1, **settings
    )
    with pytest.raises(DivergedError):
        trainer.train()
    assert trainer.ledger.rollbacks == 1
    assert min(agents) > 100


def test_without_checkpoints_it_goes_back_to_the_beginning() -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = poisoned(lambda luck, opt_step: opt_step >= 20)
    trainer = jaxrl.Trainer(strategy, max_opts=60, max_skips=5, max_rollbacks=2, recorders=[memory], **QUIET)
    with pytest.raises(DivergedError, match="2 new tries"):
        trainer.train()
    assert [row["opt_steps"] for row in memory.rows if row.get("event") == "rollback"] == [0, 0]


def test_a_run_that_went_back_to_the_beginning_leaves_nothing_of_what_it_undid(tmp_path: Path) -> None:
    """The only checkpoint is of skipped updates, so that there is none to go back to."""
    run, killed = tmp_path / "run", tmp_path / "killed"

    class Killing(jaxrl.MemoryRecorder):
        """Copy the directory as a kill at the first rollback would leave it."""

        def write(self, row: Any) -> None:
            super().write(row)
            if row.get("event") == "rollback" and not killed.exists():
                shutil.copytree(run, killed)

    strategy = poisoned(lambda luck, opt_step: opt_step >= 5)
    settings = {"max_opts": 60, "save_interval": 10, "max_skips": 8, "max_rollbacks": 2, **QUIET}

    def diverge(path: Path, **more: Any) -> list[tuple[str, int]]:
        with pytest.raises(DivergedError, match="2 new tries"):
            jaxrl.Trainer(strategy, run_dir=path, **settings, **more).train()
        return events_in(path)

    assert diverge(run, recorders=["jsonl", Killing()]) == [("rollback", 0)] * 2 + [("diverged", 20)]
    for path in (killed, run):
        assert Store(path / "checkpoints", 1).steps()[0] == 0
        assert verify.main([str(path)]) == 0
    # It makes the same try again, and then those that the other made.
    events = [("rollback", 0), ("resume", 0), ("rollback", 0), ("rollback", 0), ("diverged", 20)]
    assert diverge(killed, resume=True) == events
    # With other settings it begins at the beginning, as a run that never diverged.
    mended = jaxrl.Trainer(poisoned(lambda luck, opt_step: False), run_dir=run, resume=True, **settings).train()
    alone = jaxrl.Trainer(poisoned(lambda luck, opt_step: False), **settings).train()
    assert state_digest(mended.state) == state_digest(alone.state)


def test_members_that_went_back_to_the_beginning_leave_nothing_of_what_they_undid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    population = jaxrl.population(poisoned(lambda luck, opt_step: opt_step >= 5), seeds=2)
    settings = {**QUIET, "max_opts": 60, "save_interval": 10, "max_skips": 8, "max_rollbacks": 1, "quiet": False}
    with pytest.raises(DivergedError, match="all 2 members diverged"):
        jaxrl.Trainer(population, run_dir=tmp_path, **settings).train()
    said = capsys.readouterr().out
    for number in range(2):
        assert f"opts  member {number}: training diverged: " in said
        assert open_store(member_dir(tmp_path, number), CHECKPOINTS).steps()[0] == 0
    assert verify.main([str(tmp_path)]) == 0


def test_without_its_replay_buffer_the_start_is_made_with_the_whole_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    hot = ["--agent.lr", "1000", "--agent.optimizer", "sgd", "--agent.max-grad-norm", "1e30", "--agent.features", "16"]
    sizes = ["--num-envs", "4", "--opt-interval", "4", "--warmup", "200", "--no-save-replay", "--quiet"]
    often = ["--eval-interval", "0", "--eval-episodes", "0", "--record-interval", "10", "--save-interval", "10"]
    tries = ["--max-skips", "8", "--max-rollbacks", "2", "--max-opts", "100"]
    with pytest.raises(DivergedError, match="2 new tries"):
        train.main(["dqn", "--env", "CartPole-v1", *hot, *sizes, *often, *tries, "--run-dir", run])
    assert Store(tmp_path / "run/checkpoints", 1).steps()[0] == 0
    assert train.main(["--resume", run, "--agent.lr", "1e-4", "--allow-changes", "--max-opts", "30"]) == 0
    assert "filled anew" not in (tmp_path / "run/metrics.jsonl").read_text()
    capsys.readouterr()
    assert verify.main([run, "--replay"]) == 0
    assert "0 -> 10 bit-equal" in capsys.readouterr().out


@pytest.mark.parametrize(("max_skips", "skips"), [(0, 80), (30, 21)], ids=["never", "not yet"])
def test_fewer_skips_than_the_limit_are_no_reason_to_go_back(max_skips: int, skips: int) -> None:
    memory = jaxrl.MemoryRecorder()
    strategy = poisoned(lambda luck, opt_step: (opt_step >= 20) & (opt_step < 20 + skips))
    result = jaxrl.Trainer(strategy, max_opts=100, max_skips=max_skips, recorders=[memory], **QUIET).train()
    assert result.summary["rollbacks"] == 0
    assert sum(row["skipped_updates"] for row in memory.rows if row["kind"] == "train") == skips


def given(reward: float, chance: float) -> jaxrl.Strategy:
    """Steps of an environment of which so many give this reward."""
    env = jaxrl.make_env("CartPole-v1")

    def step(state: Any, action: jax.Array, key: jax.Array) -> Any:
        state, out = env.step(state, action, key)
        return state, out._replace(reward=jnp.where(jax.random.uniform(key) < chance, reward, out.reward))

    spoilt = env._replace(step=step)
    return jaxrl.off_policy(
        spoilt, jaxrl.dqn(features=(4,)), buffer=jaxrl.uniform(64, batch_size=4), num_envs=2, opt_interval=2
    )


@pytest.mark.slow
def test_a_run_without_one_valid_step_is_no_success(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(DivergedError, match="none of 60 environment steps gave a finite observation and reward") as it:
        jaxrl.Trainer(given(jnp.nan, 1.0), max_opts=30, run_dir=str(run), **QUIET).train()
    assert it.value.exit_code == 3
    assert events_in(run) == [("invalid", 10), ("diverged", 30)]
    assert steps_of_rows(run) == [10, 20, 30]
    assert json.loads((run / "metadata.json").read_text())["status"] == "diverged"


@pytest.mark.slow
def test_few_valid_steps_are_no_reason_to_fail_and_a_row_without_any_is_told_once() -> None:
    memory = jaxrl.MemoryRecorder()
    settings = {**QUIET, "record_interval": 1}
    result = jaxrl.Trainer(given(jnp.nan, 0.9), max_opts=60, recorders=[memory], **settings).train()
    rows = [row["invalid_steps"] for row in memory.rows if row["kind"] == "train"]
    assert sum(rows) < 120
    assert rows.count(2) > 5
    assert [row["opt_steps"] for row in memory.rows if row.get("event") == "invalid"] == [rows.index(2) + 1]
    assert result.summary["stop"] == "max_opts"
