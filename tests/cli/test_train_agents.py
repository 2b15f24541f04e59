"""The agents that act and learn, beside plain DQN, from the command line to the loaded policy."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from commands import Cli
from test_readme import block
from toys_agents import vector_of

import jaxrl
from jaxrl import train
from jaxrl.cli.config import parse

CATCH = ("--env", "Catch-bsuite")
PENDULUM = ("--env", "Pendulum-v1")
REPLAY = (
    *("--num-envs", "4", "--agent.features", "8", "--eval-interval", "20", "--eval-episodes", "3"),
    *("--record-interval", "20", "--save-interval", "20", "--quiet"),
    *("--opt-interval", "2", "--warmup", "16", "--buffer.capacity", "200", "--buffer.batch-size", "8"),
)


def run(path: Path, *args: object) -> None:
    assert train.main([*map(str, args), "--run-dir", str(path)]) == 0


@pytest.mark.slow
def test_a_real_process_trains_continuous_actions_and_is_evaluated(cli: Cli) -> None:
    small = ("--num-envs", 2, "--rollout", 16, "--epochs", 1, "--minibatches", 1, "--max-opts", 4, "--eval-episodes", 2)
    cli.train("ppo", *PENDULUM, *small, "--agent.squash", "--agent.lr-decay", 4, "--run-dir", "run")
    done = cli.here("evaluate", "run", "--episodes", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("return -")
    verified = cli.here("verify", "run")
    assert (verified.returncode, " ok " in verified.stdout) == (0, True)


@pytest.mark.parametrize("make", [jaxrl.ppo, pytest.param(jaxrl.pqn, marks=pytest.mark.slow)])
def test_a_population_begins_without_lapack(make: Callable[..., Any]) -> None:
    """Two factorisations for several members at once wait for each other on two cores, for ever."""
    strategy = jaxrl.on_policy(jaxrl.make_env("Catch-bsuite"), make(features=(8,)), num_envs=4)
    keys = jax.random.split(jax.random.key(0), 3)
    begin = jax.jit(jax.vmap(strategy.init)).lower(keys).compile()
    assert 'custom_call_target="lapack' not in begin.as_text()
    assert np.isfinite(vector_of(begin(keys).agent.params)).all()


@pytest.mark.slow
def test_rainbow_is_what_its_name_says_unless_told_otherwise(tmp_path: Path) -> None:
    run(tmp_path, "rainbow", *CATCH, *REPLAY, "--max-opts", "20", "--agent.atoms", "5")
    settings = (tmp_path / "config.yaml").read_text()
    for said in ("algo: rainbow", "values: c51", "dueling: true", "double: true", "noisy: 0.5", "prioritised: true"):
        assert said in settings
    assert "n_step: 3" in settings
    assert yaml.safe_load((tmp_path / "metadata.json").read_text())["memory"]["state"]["buffer"] > 200 * 4


def words_of_r2d2() -> list[str]:
    """Return the command of the page of DQN, without what starts it."""
    words = shlex.split(block("r2d2").replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "jaxrl.train"]
    return words[3:]


def test_r2d2_has_the_parts_of_its_paper() -> None:
    run = parse(words_of_r2d2()).config
    assert (run.agent.core, run.agent.value_rescaling) == ("lstm", True)
    assert (run.agent.double, run.agent.dueling) == (True, True)
    assert (run.agent.n_step, run.agent.priority_max) == (5, 0.9)
    assert (run.buffer.prioritised, run.buffer.alpha, run.buffer.beta) == (True, 0.9, 0.6)
    assert run.agent.burn_in > 0


@pytest.mark.slow
def test_r2d2_trains_by_the_command_of_its_page(tmp_path: Path) -> None:
    """In short form: with the same settings, but few steps, episodes and sequences."""
    short = {"--max-opts": "4", "--eval-interval": "4", "--eval-episodes": "2", "--buffer.batch-size": "2"}
    words = words_of_r2d2()
    for flag, value in short.items():
        words[words.index(flag) + 1] = value
    run(tmp_path, *words, "--quiet")
