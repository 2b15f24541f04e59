"""Evaluation beside training: its rows have the training return, and an event says where greedy actions mislead."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from toys_agents import FirstAsValue
from toys_runs import rows_in

import jaxrl
from jaxrl import train

STEPS = 20


def changing() -> jaxrl.Env:
    """Pay 1 for each action that differs from the one before: tossing a coin returns 9.5 of 19, a fixed policy 0."""

    def step(before: jax.Array, action: jax.Array, key: Any) -> tuple[jax.Array, jaxrl.TimeStep]:
        return action, jaxrl.TimeStep(jnp.ones(1), jnp.where((action == before) | (before < 0), 0.0, 1.0), False)

    spec = jaxrl.EnvSpec("Changing", jaxrl.Box(0.0, 1.0, (1,)), jaxrl.Discrete(2), STEPS)
    return jaxrl.Env(spec, lambda key: (jnp.int32(-1), jnp.ones(1)), step)


@cache
def coin(**settings: Any) -> jaxrl.Strategy:
    agent = jaxrl.a2c(make_network=lambda spec, head: FirstAsValue(head.outputs), lr=1e-9)
    return jaxrl.on_policy(changing(), agent, num_envs=4, rollout=STEPS, **settings)


def events(run: Path) -> list[tuple[int, str]]:
    rows = rows_in(run)
    return [(row["opt_steps"], row["message"]) for row in rows if row.get("event") == "greedy"]


HOW: dict[str, Any] = {"eval_interval": 4, "record_interval": 4, "save_interval": 4, "eval_episodes": 10}


def test_greedy_actions_that_return_far_less_are_pointed_out_once_however_often_a_run_is_resumed(
    tmp_path: Path,
) -> None:
    out = io.StringIO()
    console = jaxrl.ConsoleRecorder(Console(file=out, width=200, soft_wrap=True))
    for end in (4, 8, 12):
        trainer = jaxrl.Trainer(coin(), max_opts=end, run_dir=str(tmp_path), resume=end > 4, recorders=[console], **HOW)
        trainer.train()
    ((step, message),) = events(tmp_path)
    assert step == 4
    assert message.startswith("greedy actions return 0 where sampled ones return ")
    assert message.endswith("see --eval-actions sampled")
    trained = float(message.split(" in training")[0].split()[-1])
    assert 6 < trained < 13
    lines = out.getvalue().splitlines()
    assert [line for line in lines if message in line] == [f"{4:>9,} opts  {message}"]
    evaluations = [line for line in lines if "return" in line and "opts" in line and message not in line]
    assert "over 10 episodes, greedy actions  train" in evaluations[0]
    rows = rows_in(tmp_path)
    returns = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "eval")}
    assert [row["train_return"] for row in returns["eval"]] == [row["episode_return"] for row in returns["train"]]


@pytest.mark.parametrize("settings", [{"eval_actions": "sampled"}, {"eval_episodes": 4}], ids=["sampled", "few"])
def test_sampled_evaluations_and_few_episodes_say_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    jaxrl.Trainer(coin(), max_opts=8, run_dir=str(tmp_path), quiet=True, **{**HOW, **settings}).train()
    assert events(tmp_path) == []


def test_members_are_pointed_out_once_and_the_best_is_named_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = coin()
    result = jaxrl.Trainer(jaxrl.population(strategy, seeds=2), max_opts=8, run_dir=str(tmp_path), **HOW).train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "compiling"
    assert len([line for line in lines if "greedy actions return 0" in line]) == 1
    first, second = (line for line in lines if "env steps" in line)
    assert first.split()[:5] == ["4", "opts", "320", "env", "steps"]
    assert first.endswith(" s left")
    assert second.split()[:5] == ["8", "opts", "640", "env", "steps"]
    assert second.endswith(" s")
    best = result.best_member()
    assert best.best_score == max(member.best_score for member in result.members)
    train.show_population(result, str(tmp_path))
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["best", "member", f"{best.number},", "score", f"{best.best_score:.6g},", "seed", str(best.seed)]
    for status, goes_on in {"max_opts": False, "patience": False, "diverged": False, "handle": True}.items():
        train.show_population(result._replace(members=(best._replace(status=status),)), "run")
        assert ("jaxrl.train --resume run\n" in capsys.readouterr().out) is goes_on
