"""What objects show of themselves at the end of a notebook's cell, and what `train()` prints when it ends."""

from pathlib import Path
from typing import Any

import pytest
from toys_session import small
from toys_trainer import counting, small_dqn

import jaxrl
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS

SETTINGS: dict[str, Any] = {"max_opts": 20, "eval_interval": 10, "eval_episodes": 2, "quiet": True}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has come to its end."""
    made = jaxrl.Trainer(small_dqn(), run_dir=str(tmp_path_factory.mktemp("shown")), **SETTINGS)
    made.train()
    return made


def test_what_a_cell_ends_with_is_shown_in_a_line(trainer: Any) -> None:
    result, strategy = trainer.result(), small_dqn()
    made = jaxrl.population(strategy, seeds=2, sweep={"agent.lr": [1e-3, 1e-4]})
    score, run_dir = f"best score {result.best_score:.6g}", trainer.config.run_dir
    ended = ("dqn on CartPole-v1", "20 optimisation steps", score, "stopped by max_opts", repr(run_dir))
    shown: list[tuple[Any, tuple[str, ...]]] = [
        (trainer, ("Trainer", *ended)),
        (result, ("Result", *ended)),
        (result.policy, ("GreedyPolicy", "CartPole-v1", f"score {result.best_score:.6g}")),
        (jaxrl.load_policy(run_dir), ("GreedyPolicy", "CartPole-v1")),
        (strategy, ("Strategy", "dqn on CartPole-v1")),
        (counting(), ("Strategy", "custom")),
        (jaxrl.dqn(lr=0.125), ("dqn(lr=0.125)",)),
        (jaxrl.bc(), ("bc()",)),
        (jaxrl.dqn()(strategy.env.spec), ("Agent", "dqn", "lr=")),
        (made, ("Population", "4 members", "dqn on CartPole-v1", "agent.lr")),
        (made.members[3], ("Member", "seed=1", "agent.lr=0.0001")),
        (jaxrl.Trainer(made, max_opts=60), ("PopulationTrainer", "4 members", "max_opts=60")),
        (small(), ("Session", "dqn on scripted", "0 optimisation steps")),
        (strategy.env, ("Env", "CartPole-v1")),
        (jaxrl.uniform(400, batch_size=16), ("Buffer", "capacity=400", "batch_size=16")),
        (jaxrl.n_step(3), ("Processor", "n_step=3")),
    ]
    for thing, parts in shown:
        text = repr(thing)
        assert len(text) < 300, text
        assert "\n" not in text
        assert [part for part in parts if part not in text] == [], text


def test_a_population_shows_its_best(tmp_path: Path) -> None:
    found: Any = jaxrl.Trainer(jaxrl.population(small_dqn(), seeds=2), run_dir=str(tmp_path), **SETTINGS).train()
    best = max(member.best_score for member in found.members)
    assert repr(found) == f"PopulationResult(dqn on CartPole-v1, 2 members, best score {best:.6g}, see .table())"
    text = repr(found.members[1])
    assert len(text) < 300
    assert [part for part in ("seed=1", "max_opts", str(tmp_path)) if part not in text] == []


@pytest.mark.parametrize("kind", [str, Path])
def test_training_ends_with_a_summary_in_the_words_of_python(
    kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "run")
    trainer = jaxrl.Trainer(small_dqn(), run_dir=kind(run_dir), **{**SETTINGS, "quiet": False})
    result = trainer.train()
    lines = capsys.readouterr().out.splitlines()
    last = {line[:14].strip(): line[14:] for line in lines[lines.index("  stopped by  max_opts") :]}
    assert last["best"].startswith(f"{result.best_score:.6g} at ")
    assert "compile" in last["seconds"]
    assert last["run"] == run_dir
    assert last["load"] == f"policy = jaxrl.load_policy({run_dir!r})"
    assert repr(eval(last["load"].partition(" = ")[2])).startswith("GreedyPolicy(CartPole-v1")
    assert last["go on"] == "trainer.train(max_opts=40)"
    assert eval(last["go on"]).summary["opt_steps"] == 40


def test_the_table_of_a_population_ends_with_a_call_that_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    population = jaxrl.population(small_dqn(), seeds=2)
    jaxrl.Trainer(population, run_dir=tmp_path / "run", **{**SETTINGS, "quiet": False}).train()
    (call,) = [line.partition(" = ")[2] for line in capsys.readouterr().out.splitlines() if "load_policy" in line]
    assert repr(eval(call)).startswith("GreedyPolicy(CartPole-v1")


@pytest.mark.parametrize("silent", [{"quiet": True}, {"console": False}, {"recorders": []}])
def test_who_wants_no_console_gets_no_summary(silent: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    jaxrl.Trainer(counting(), max_opts=4, **silent).train()
    assert capsys.readouterr().out == ""


def test_a_run_in_python_needs_no_settings_of_its_directory_but_for_those_that_it_is_given(tmp_path: Path) -> None:
    """Its checkpoint says what it was trained with; a `config.yaml` that was damaged is written anew."""
    run = tmp_path / "run"
    jaxrl.Trainer(counting(), max_opts=4, run_dir=run, quiet=True).train()
    for max_opts, how in ((8, {"resume": True}), (6, {"start_over": True})):
        (run / "config.yaml").write_text("a: [")
        result = jaxrl.Trainer(counting(), max_opts=max_opts, run_dir=run, quiet=True, **how).train()
        assert result.summary["opt_steps"] == max_opts
        assert f"max_opts: {max_opts}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("members", [None, 2])
def test_a_cell_is_run_again_by_start_over_and_refused_without(tmp_path: Path, members: int | None) -> None:
    run_dir = str(tmp_path / "run")
    trained: Any = counting() if members is None else jaxrl.population(counting(), seeds=members)
    for max_opts in (4, 6, 8):  # whatever the settings of what is there
        jaxrl.Trainer(trained, max_opts=max_opts, run_dir=run_dir, start_over=True, quiet=True).train()
    inside = tmp_path / "run" if members is None else tmp_path / "run" / "members" / "00000"
    assert open_store(inside, CHECKPOINTS).steps() == [8]
    assert sorted(path.name for path in (tmp_path / "run").glob("discarded-*")) == ["discarded-1", "discarded-2"]
    with pytest.raises(jaxrl.SettingsError, match=r"resume=True.*start_over=True.*another run_dir") as refused:
        jaxrl.Trainer(trained, max_opts=4, run_dir=run_dir, quiet=True).train()
    assert "--" not in str(refused.value)
