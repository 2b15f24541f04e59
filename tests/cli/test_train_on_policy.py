"""The agents that learn on-policy, from the command line to the loaded policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from front_doors import Doors, leaves, rows, timeless
from toys_agents import vector_of

import jaxrl
from jaxrl import train
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse

ON_POLICY = ("ppo", "a2c", "reinforce", "impala", "pqn", "reppo")
SMALL = (
    *("--env", "Catch-bsuite", "--num-envs", "4", "--rollout", "8", "--epochs", "2", "--minibatches", "2"),
    *("--agent.features", "8", "--eval-interval", "20", "--eval-episodes", "3", "--record-interval", "20"),
    *("--save-interval", "20", "--quiet"),
)
REMEMBERING = ("--agent.core", "gru", "--agent.core-features", "8", "--processor.normalise-obs")


def run(path: Path, *args: object) -> None:
    assert train.main([*map(str, args), "--run-dir", str(path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("algo", ON_POLICY)
def test_each_trains_resumes_to_the_same_bits_and_leaves_a_policy(algo: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", algo, *SMALL, "--max-opts", 80)
    run(tmp_path / "parts", algo, *SMALL, "--max-opts", 40)
    assert train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "80"]) == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert leaves(whole, 80) == leaves(parts, 80)
    last = [row for row in timeless(whole / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert last == [row for row in timeless(parts / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert (last["opt_steps"], last["env_steps"]) == (80, 80 // 4 * 32)
    assert last["episodes"] == last["terminated"] > 0
    policy = jaxrl.load_policy(whole)
    assert int(policy(np.zeros((10, 5), np.float32))) in range(3)


@pytest.mark.slow
def test_what_was_learnt_of_observations_and_the_memory_belong_to_the_policy(tmp_path: Path) -> None:
    run(tmp_path, "ppo", *SMALL, *REMEMBERING, "--max-opts", 40)
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
    doors.train("ppo", "--env", "Pendulum-v1", *small, "--agent.squash", "--agent.lr-decay", 4, "--run-dir", "run")
    done = doors.here("evaluate", "run", "--episodes", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("return -")
    verified = doors.here("verify", "run")
    assert (verified.returncode, " ok " in verified.stdout) == (0, True)


@pytest.mark.slow
def test_the_rest_of_the_epochs_that_divergence_stops_is_counted(tmp_path: Path) -> None:
    run(tmp_path, "ppo", *SMALL, "--agent.target-kl", "1e-9", "--agent.lr", "0.01", "--max-opts", 40)
    counted = [row for row in rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    # The first update of an iteration has a ratio of 1; the second is made and asks to stop the other two.
    assert sum(row["stopped_updates"] for row in counted) == 10 * 2


Bad = tuple[list[str], list[str]]
BAD: dict[str, Bad] = {
    "minibatches that do not divide": (["ppo", "--num-envs", "3", "--minibatches", "5"], ["384", "4 or 6"]),
    "sequences that do not divide": (["ppo", "--agent.core", "gru", "--num-envs", "6"], ["6 environments", "3 or 6"]),
    "several steps": (["a2c", "--processor.n-step", "3"], ["n_step to 1"]),
    "no rollout": (["ppo", "--rollout", "0"], ["rollout", "at least 1"]),
    "a weight without V-trace": (["ppo", "--agent.surrogate", "weighted"], ["needs V-trace", "agent.rho_clip"]),
    "another core": (["ppo", "--agent.core", "gro"], ["'gro'", "gru"]),
    "squash without bounds": (["ppo", "--env", "CartPole-v1", "--agent.squash", "3"], ["3"]),
    "continuous actions": (["pqn", "--env", "Pendulum-v1"], ["pqn takes discrete actions", "ppo"]),
    "a setting of another agent": (["pqn", "--agent.clip-eps", "0.2"], ["--agent.clip-eps"]),
    "lambda": (["ppo", "--agent.gae-lambda", "1.5"], ["agent.gae_lambda", "1.5", "from 0 to 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_by_name(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args, parts = BAD[case]
    with pytest.raises(jaxrl.JaxrlError) as refused:
        train.main(args)
    assert refused.value.exit_code == 2
    assert [part for part in parts if part not in str(refused.value)] == []
    assert list(tmp_path.iterdir()) == []


Maker = Callable[..., Any]


@pytest.mark.parametrize("make", [jaxrl.ppo, pytest.param(jaxrl.pqn, marks=pytest.mark.slow)])
def test_a_population_begins_without_lapack(make: Maker) -> None:
    """Two factorisations for several members at once wait for each other on two cores, for ever."""
    strategy = jaxrl.on_policy(jaxrl.make_env("Catch-bsuite"), make(features=(8,)), num_envs=4)
    keys = jax.random.split(jax.random.key(0), 3)
    begin = jax.jit(jax.vmap(strategy.init)).lower(keys).compile()
    assert 'custom_call_target="lapack' not in begin.as_text()
    assert np.isfinite(vector_of(begin(keys).agent.params)).all()
