"""The agents that act and learn, beside plain DQN, from the command line to the loaded policy."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from front_doors import Doors, leaves, rows, timeless
from test_readme import block
from toys_agents import vector_of

import jaxrl
from jaxrl import train
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse

COMMON = (
    *("--num-envs", "4", "--agent.features", "8", "--eval-interval", "20", "--eval-episodes", "3"),
    *("--record-interval", "20", "--save-interval", "20", "--quiet"),
)
CATCH = ("--env", "Catch-bsuite")
PENDULUM = ("--env", "Pendulum-v1")
ROLLOUTS = (*COMMON, "--rollout", "8", "--epochs", "2", "--minibatches", "2")
REPLAY = (*COMMON, "--opt-interval", "2", "--warmup", "16", "--buffer.capacity", "200", "--buffer.batch-size", "8")
REMEMBERING = ("--agent.core", "gru", "--agent.core-features", "8", "--processor.normalise-obs")
AGENTS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce", "impala", "pqn", "reppo"), (*CATCH, *ROLLOUTS)),
    "sac": (*PENDULUM, *REPLAY, "--buffer.prioritised", "--updates", "2"),
    "td3": (*PENDULUM, *REPLAY, "--agent.noise-memory", "0.8"),
    "ddpg": (*PENDULUM, *REPLAY, "--processor.n-step", "3"),
}


def run(path: Path, *args: object) -> None:
    assert train.main([*map(str, args), "--run-dir", str(path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("algo", AGENTS)
def test_each_trains_resumes_to_the_same_bits_and_leaves_a_policy(algo: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, algo, *AGENTS[algo], "--max-opts", 80)
    run(parts, algo, *AGENTS[algo], "--max-opts", 40)
    assert train.main(["--resume", str(parts), "--max-opts", "80"]) == 0
    assert leaves(whole, 80) == leaves(parts, 80)
    last = [row for row in timeless(whole / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert last == [row for row in timeless(parts / "metrics.jsonl") if row["kind"] == "train"][-1]
    policy = jaxrl.load_policy(whole)
    if "Pendulum-v1" in AGENTS[algo]:
        action = policy(np.array([1.0, 0.0, 0.0], np.float32))
        assert action.shape == (1,)
        assert -2.0 <= float(action[0]) <= 2.0
        return
    assert (last["opt_steps"], last["env_steps"]) == (80, 80 // 4 * 32)
    assert last["episodes"] == last["terminated"] > 0
    assert int(policy(np.zeros((10, 5), np.float32))) in range(3)


@pytest.mark.slow
def test_what_was_learnt_of_observations_and_the_memory_belong_to_the_policy(tmp_path: Path) -> None:
    run(tmp_path, "ppo", *CATCH, *ROLLOUTS, *REMEMBERING, "--max-opts", 40)
    request = parse(["--resume", str(tmp_path)])
    result = jaxrl.Trainer(build(request.algo, request.config), request.config, resume=True).train()
    policy, trained = jaxrl.load_policy(tmp_path), result.policy
    assert trained is not None
    for a, b in zip(jax.tree.leaves(policy.params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_array_equal(a, b)
    ((moments,),) = (part for part in policy.params.processor if part)
    # Every observation that the policy saw has been counted once: the first, and the one after every step.
    assert int(moments.count) == policy.facts["env_steps"] + 4
    obs = jax.random.normal(jax.random.key(0), (3, 10, 5))
    first = [int(policy(x)) for x in obs]
    policy.reset()
    assert first == [int(policy(x)) for x in obs]


@pytest.mark.slow
def test_a_real_process_trains_continuous_actions_and_is_evaluated(doors: Doors) -> None:
    small = ("--num-envs", 2, "--rollout", 16, "--epochs", 1, "--minibatches", 1, "--max-opts", 4, "--eval-episodes", 2)
    doors.train("ppo", *PENDULUM, *small, "--agent.squash", "--agent.lr-decay", 4, "--run-dir", "run")
    done = doors.here("evaluate", "run", "--episodes", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("return -")
    verified = doors.here("verify", "run")
    assert (verified.returncode, " ok " in verified.stdout) == (0, True)


@pytest.mark.slow
def test_the_rest_of_the_epochs_that_divergence_stops_is_counted(tmp_path: Path) -> None:
    run(tmp_path, "ppo", *CATCH, *ROLLOUTS, "--agent.target-kl", "1e-9", "--agent.lr", "0.01", "--max-opts", 40)
    counted = [row for row in rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    # The first update of an iteration has a ratio of 1; the second is made and asks to stop the other two.
    assert sum(row["stopped_updates"] for row in counted) == 10 * 2


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
