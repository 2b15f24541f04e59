"""Environments of Gymnasium from the command line: train, stop, go on, judge; and what cannot be."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Cli

import jaxrl

CARTPOLE = ("dqn", "--env", "gymnasium:CartPole-v1", "--actors", "2")
TINY = (*CARTPOLE, "--agent.features", "8", "--eval-interval", "0", "--eval-episodes", "2", "--record-interval", "8")


def wait_for_rows(run: Path, process: "subprocess.Popen[str]") -> None:
    """Return when the run has recorded its first metrics."""
    log = run / "metrics.jsonl"
    while not (log.exists() and '"kind": "train"' in log.read_text()):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.slow
def test_a_run_is_stopped_by_a_signal_goes_on_and_can_be_used(cli: Cli, processes: bool) -> None:
    flags = ["--processes"] if processes else []
    process = cli.start("train", *TINY, *flags, "--max-opts", "8000000", "--run-dir", "run")
    wait_for_rows(cli.cwd / "run", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143
    assert all(line.startswith("SIGTERM: stopping when ") for line in errors.splitlines())
    metadata = json.loads((cli.cwd / "run" / "metadata.json").read_text())
    saved = metadata["opt_steps"]
    assert (cli.cwd / "run" / "checkpoints" / str(saved) / "manifest.json").exists()
    cli.train("--resume", "run", "--max-opts", str(saved + 8))
    said = cli.here("evaluate", "run", "--episodes", "3")
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[0].endswith("over 3 episodes, 0 unfinished")
    replayed = cli.here("verify", "run", "--replay")
    assert replayed.returncode == 2
    assert "environments of gymnasium:CartPole-v1 are not part of a checkpoint" in replayed.stderr


def test_without_ray_a_line_says_what_installs_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = cli.here("train", *CARTPOLE, "--actor-engine", "ray")
    assert said.returncode == 2
    assert said.stderr == "error: actors on other machines need the extra `ray`: pip install 'jaxrl[ray]'\n"
    # Environments in JAX without actors run on the device: nobody asks where their actors are.
    config = jaxrl.ActorsConfig(actor_engine="ray")
    on_device = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), num_envs=8, rollout=8, actors=config)
    assert on_device.actor_fns is None
