"""Any checkpoint of a run can be used: its policy, a run that branches off there."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_runs import contents, messages, repeated_rows, rows_in
from toys_trainer import counting, normalising_dqn, small_dqn

import jaxrl
from jaxrl import evaluate
from jaxrl.cli.config import parse
from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.strategies.population import with_values
from jaxrl.training.storage.leaves import state_digest

KEEP: dict[str, Any] = {"save_interval": 10, "record_interval": 10, "keep": 9, "quiet": True}
UNJUDGED: dict[str, Any] = {**KEEP, "eval_interval": 0, "eval_episodes": 0}
OBS = np.linspace(-0.5, 0.5, 12, dtype=np.float32).reshape(3, 4)


def params_by_step(strategy: jaxrl.Strategy, run: Path, **settings: Any) -> dict[int, Any]:
    """Train, and return the policy's parameters at each boundary, on the host."""
    trainer = jaxrl.Trainer(strategy, max_opts=30, run_dir=str(run), **{**UNJUDGED, **settings})
    assert strategy.policy is not None
    return {report.opt_steps: jax.device_get(strategy.policy.params(trainer.state)) for report in trainer}


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope="module")
def unjudged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A run of 30 optimisation steps without evaluations, whose observations are normalised; do not write it."""
    run = tmp_path_factory.mktemp("unjudged") / "run"
    return run, params_by_step(normalising_dqn(), run)


# --- policies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "number"), [(10, 10), ("20", 20), ("latest", 30), ("final", 30), (None, 30)])
def test_the_policy_of_any_checkpoint_is_loaded(unjudged: Any, step: Any, number: int) -> None:
    run, params = unjudged
    policy = jaxrl.load_policy(run, step=step)
    assert_same(policy.params, params[number])
    assert {name: policy.facts[name] for name in ("opt_steps", "kept_as")} == {
        "opt_steps": number,
        "kept_as": "checkpoint",
    }
    assert policy(OBS).shape == (3,)


def test_a_strategy_given_in_python_loads_the_same(unjudged: Any) -> None:
    run, params = unjudged
    assert_same(jaxrl.load_policy(run, normalising_dqn(), step=10).params, params[10])
    agent, buffer = jaxrl.dqn(features=(8,)), jaxrl.uniform(400, batch_size=16)
    other = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), agent, buffer=buffer)
    with pytest.raises(SettingsError, match="the strategy is not what trained"):
        jaxrl.load_policy(run, other, step=10)
    # The same networks, which see observations as they come.
    with pytest.raises(SettingsError, match="part of how observations are prepared"):
        jaxrl.load_policy(run, small_dqn(), step=10)


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [
        (15, SettingsError, "keeps no checkpoint of step 15; kept are 10, 20, 30"),
        ("newest", SettingsError, "expected best, latest, final or a number"),
        ("best", NoCheckpointError, "no best policy"),  # one that was named is not replaced by another
    ],
)
def test_a_step_that_is_none_is_refused_by_name(unjudged: Any, step: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        jaxrl.load_policy(unjudged[0], step=step)


def test_nothing_is_final_before_the_end(unjudged: Any, tmp_path: Path) -> None:
    run = shutil.copytree(unjudged[0], tmp_path / "run")
    (run / "metadata.json").write_text((run / "metadata.json").read_text().replace('"max_opts"', '"SIGINT"'))
    with pytest.raises(SettingsError, match=r"its status is SIGINT.*'latest'"):
        jaxrl.load_policy(run, step="final")
    assert jaxrl.load_policy(run, step="latest").facts["opt_steps"] == 30


def test_a_damaged_step_is_named_and_the_latest_passes_it_over(unjudged: Any, tmp_path: Path) -> None:
    run = shutil.copytree(unjudged[0], tmp_path / "run")
    (run / "checkpoints" / "30" / "manifest.json").write_text("{")
    with pytest.raises(NoCheckpointError, match=r"checkpoint 30 of .* is damaged"):
        jaxrl.load_policy(run, step=30)
    with pytest.warns(UserWarning, match="is skipped"):
        assert jaxrl.load_policy(run, step="latest").facts["opt_steps"] == 20


def test_evaluate_takes_a_step_and_says_which_it_took_unasked(
    unjudged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(unjudged[0])
    assert evaluate.main([run, "--episodes", "2", "--step", "10"]) == 0
    assert capsys.readouterr().err == ""
    assert evaluate.main([run, "--episodes", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"{run} has no best policy: the latest is used, of checkpoint 30\n"
    assert shown.out.startswith("return ")


# --- branching off ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_branches_off_unchanged_is_the_same_run_and_leaves_the_other_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    judged = {**KEEP, "eval_interval": 10, "eval_episodes": 2, "max_opts": 20}
    whole = jaxrl.Trainer(normalising_dqn(), run_dir=str(old), **judged).train()
    before = contents(old)
    branch = jaxrl.Trainer(normalising_dqn(), run_dir=str(new), resume=str(old), from_step=10, **judged).train()
    assert contents(old) == before
    assert state_digest(branch.state) == state_digest(whole.state)
    assert repeated_rows(rows_in(new)) == repeated_rows(rows_in(old))
    assert [int(path.name) for path in sorted((new / "checkpoints").iterdir())] == [10, 20]
    metadata = json.loads((new / "metadata.json").read_text())
    assert metadata["forked_from"] == {"run": str(old), "opt_steps": 10}
    assert messages(new, "fork")[0].startswith(f"branched off from {old} at 10 optimisation steps")


@pytest.mark.slow
def test_a_branch_takes_other_settings_where_that_is_allowed(unjudged: Any, tmp_path: Path) -> None:
    run, new, settings = unjudged[0], str(tmp_path / "new"), {**UNJUDGED, "max_opts": 20}
    other = with_values(normalising_dqn(), {"agent.lr": 0.5})
    with pytest.raises(SettingsError, match="--allow-changes"):
        jaxrl.Trainer(other, run_dir=new, resume=run, from_step=10, **settings).train()
    assert not Path(new).exists()
    branch = jaxrl.Trainer(other, run_dir=new, resume=run, from_step=10, allow_changes=True, **settings).train()
    assert float(branch.state.agent.hyper.lr) == 0.5
    assert branch.summary["opt_steps"] == 20


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"from_step": 15}, "keeps no checkpoint of step 15; kept are 10, 20, 30"),
        ({"from_step": "first"}, "expected latest or a number"),
        ({"from_step": 10, "run_dir": None}, "name a new run_dir"),
        ({"from_step": 10, "resume": True}, "from_step is a checkpoint of another run"),
        ({"from_step": 10, "start_over": True}, "leave one of them out"),
        ({}, "leave run_dir out"),
    ],
)
def test_what_no_run_can_branch_off_from_is_refused(unjudged: Any, tmp_path: Path, how: Any, said: str) -> None:
    given = {"resume": unjudged[0], "run_dir": str(tmp_path / "new"), **UNJUDGED, "max_opts": 30, **how}
    with pytest.raises(SettingsError, match=said):
        jaxrl.Trainer(normalising_dqn(), **given).train()
    assert not (tmp_path / "new").exists()


def test_a_branch_never_writes_over_anything(unjudged: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (str(tmp_path), str(unjudged[0] / "below")):
        with pytest.raises(SettingsError, match=r"is not empty|lies inside"):
            jaxrl.Trainer(
                normalising_dqn(), run_dir=target, resume=unjudged[0], from_step=10, **UNJUDGED, max_opts=30
            ).train()
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    assert not (unjudged[0] / "below").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--resume", "RUN"], "give --resume RUN and --run-dir NEW"), (["--run-dir", "new"], "give --resume RUN")],
)
def test_the_command_line_wants_a_new_directory(unjudged: Any, args: list[str], said: str) -> None:
    given = [str(unjudged[0]) if arg == "RUN" else arg for arg in args]
    with pytest.raises(SettingsError, match=said):
        parse([*given, "--from-step", "10"])


# --- training again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
def test_training_again_goes_on_from_where_it_is(tmp_path: Path, stored: bool) -> None:
    place = {"run_dir": str(tmp_path / "run")} if stored else {}
    whole = jaxrl.Trainer(counting(), max_opts=20, **UNJUDGED).train()
    trainer = jaxrl.Trainer(counting(), max_opts=10, **UNJUDGED, **place)
    first = trainer.train()
    kept = state_digest(first.state)
    second = trainer.train(max_opts=20)
    assert (first.summary["opt_steps"], second.summary["opt_steps"]) == (10, 20)
    assert state_digest(second.state) == state_digest(whole.state)
    assert state_digest(first.state) == kept
    if stored:
        assert [row["opt_steps"] for row in repeated_rows(rows_in(tmp_path / "run"))] == [10, 20]


def test_training_again_with_nothing_left_says_so_and_returns_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = jaxrl.Trainer(counting(), max_opts=10, eval_interval=0, eval_episodes=0, recorders=[])
    first = trainer.train()
    capsys.readouterr()
    again = trainer.train()
    said = "nothing is left to train: max_opts 10 is reached; give a larger one, as in train(max_opts=...)\n"
    assert capsys.readouterr().err == said
    assert state_digest(again.state) == state_digest(first.state)
    assert again.summary["stop"] == "max_opts"
    with pytest.raises(SettingsError, match="max_opts is 5, but the run has made 10"):
        trainer.train(max_opts=5)


def test_training_saves_and_goes_on_where_it_was_stopped_or_left(tmp_path: Path) -> None:
    settings = {**UNJUDGED, "save_interval": 0, "run_dir": str(tmp_path / "run")}
    trainer = jaxrl.Trainer(counting(), max_opts=30, **settings)
    for report in trainer:
        if report.opt_steps == 10:
            break
    saved = lambda: sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved() == ["10"]
    for report in trainer:
        if report.opt_steps == 20:
            trainer.interrupt.stop()
    assert saved() == ["10", "20"]
    assert (trainer.stop_reason, trainer.result().summary["opt_steps"]) == ("handle", 20)
    assert trainer.train().summary["opt_steps"] == 30
    assert [row["opt_steps"] for row in repeated_rows(rows_in(tmp_path / "run"))] == [10, 20, 30]
