"""Learning from data, from the command line to the loaded policy."""

from pathlib import Path

import jax
import numpy as np
import pytest
from commands import Cli, Finished, leaves, rows, timeless

import jaxrl
from jaxrl import collect, train, verify
from jaxrl.cli.algos import build_processor
from jaxrl.cli.config import preset
from jaxrl.cli.presets import PRESETS
from jaxrl.registry import algorithm_maker, algorithm_names

OFFLINE = algorithm_names("offline")
SMALL = (
    *("--agent.features", "8", "--batch-size", "16", "--eval-interval", "20", "--eval-episodes", "3"),
    *("--record-interval", "10", "--save-interval", "20", "--quiet"),
)
ENV = ("--env", "Catch-bsuite")


@pytest.fixture(scope="session")
def catch(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of the finished run's policy, a third of it random."""
    path = tmp_path_factory.mktemp("data") / "catch.npz"
    args = ("--transitions", "500", "--random", "0.3", "--num-envs", "4")
    assert collect.main([str(finished.path), "--out", str(path), *args]) == 0
    return path


def run(path: Path, *args: object) -> None:
    assert train.main([*map(str, args), "--run-dir", str(path)]) == 0


def test_collected_data_are_whole_episodes_of_the_environment(catch: Path) -> None:
    data = jaxrl.load_dataset(catch)
    assert (data.rows, data.spec.name) == (500, "Catch-bsuite")
    assert set(np.bincount(data.episode)[:-1]) == {9}
    assert data.truncated.sum() == data.truncated[-1] == 1


@pytest.mark.slow
def test_it_trains_resumes_elsewhere_to_the_same_bits_and_leaves_a_policy(
    catch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(catch.parent)
    run(tmp_path / "whole", "iql", "--data", catch.name, *ENV, *SMALL, "--max-opts", 80)
    run(tmp_path / "parts", "iql", "--data", catch.name, *ENV, *SMALL, "--max-opts", 40)
    monkeypatch.chdir(tmp_path)
    assert train.main(["--resume", "parts", "--max-opts", "80"]) == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert leaves(whole, 80) == leaves(parts, 80)
    assert timeless(whole / "metrics.jsonl") == timeless(parts / "metrics.jsonl")
    last = [row for row in rows(whole / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert (last["opt_steps"], last["env_steps"], last["env_steps_per_sec"]) == (80, 0, 0)
    policy = jaxrl.load_policy(whole)
    assert int(policy(np.zeros((10, 5), np.float32))) in range(3)
    # The data may be found elsewhere, but no others take their place.
    moved = catch.rename(tmp_path / "moved.npz")
    try:
        with pytest.raises(jaxrl.SettingsError, match="cannot read"):
            train.main(["--resume", "parts", "--max-opts", "100"])
        assert verify.main(["parts"]) == 0
        assert "cannot be rebuilt here" in capsys.readouterr().err
        assert verify.main(["parts", "--data", "moved.npz"]) == 0
        assert capsys.readouterr().err == ""
        assert train.main(["--resume", "parts", "--max-opts", "100", "--data", "moved.npz"]) == 0
        data = jaxrl.load_dataset(moved)
        jaxrl.save_dataset("other.npz", data._replace(reward=data.reward + np.float32(1)))
        with pytest.raises(jaxrl.SettingsError, match="not what the run was trained on"):
            train.main(["--resume", "parts", "--max-opts", "120", "--data", "other.npz"])
    finally:
        moved.rename(catch)


@pytest.mark.slow
def test_a_run_in_epochs_goes_on_in_the_middle_of_one_to_the_same_bits(catch: Path, tmp_path: Path) -> None:
    """An epoch of 500 transitions is 31.25 updates of 16 of them; the run is cut after 40 of 80."""
    flags = ("--data", catch, *ENV, *SMALL, "--no-replacement", "--scale-rewards-by", "std")
    run(tmp_path / "whole", "bc", *flags, "--max-opts", 80)
    run(tmp_path / "parts", "bc", *flags, "--max-opts", 40)
    assert train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "80"]) == 0
    assert leaves(tmp_path / "whole", 80) == leaves(tmp_path / "parts", 80)
    told = [row for row in rows(tmp_path / "parts" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["epochs_max"] for row in told] == pytest.approx([steps * 16 / 500 for steps in range(10, 81, 10)])
    data = jaxrl.load_dataset(catch)
    returns = np.bincount(data.episode, weights=data.reward)
    assert told[-1]["reward_factor"] == pytest.approx(1 / returns.std())
    with pytest.raises(jaxrl.SettingsError, match="scale_rewards_by: std -> range"):
        train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "90", "--scale-rewards-by", "range"])
    with pytest.raises(jaxrl.SettingsError, match="replacement: False -> True"):
        train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "90", "--replacement"])


@pytest.mark.slow
def test_the_commands_take_a_run_that_learnt_from_data(cli: Cli, catch: Path) -> None:
    cli.train("bc", "--data", catch, catch, *ENV, *SMALL, "--max-opts", 40, "--run-dir", "run")
    done = cli.here("evaluate", "run", "--episodes", 2)
    assert (done.returncode, done.stderr) == (0, "")
    verified = cli.here("verify", "run", "--replay")
    assert (verified.returncode, "20 -> 40 bit-equal" in verified.stdout) == (0, True)
    again = cli.here("collect", "run", "--transitions", 20, "--out", "again.npz")
    assert again.stdout.startswith("again.npz: 20 transitions in ")


@pytest.mark.slow
def test_without_an_environment_a_run_is_judged_by_episodes_held_out(catch: Path, tmp_path: Path) -> None:
    processor = ("--processor.normalise-obs", "--processor.n-step", 3, "--processor.reward-scale", 0.5)
    run(tmp_path / "run", "cql_dqn", "--data", catch, *processor, *SMALL, "--updates", 2, "--max-opts", 40)
    judged = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "eval"]
    assert len(judged) == 2
    assert all(-1 <= row["eval_reward"] <= 0 and row["episodes"] == 5 for row in judged)
    policy = jaxrl.load_policy(tmp_path / "run")
    assert policy(np.zeros((3, 10, 5), np.float32)).shape == (3,)
    with pytest.raises(jaxrl.SettingsError, match="no env was named then; name one by --env"):
        collect.main([str(tmp_path / "run"), "--transitions", "5", "--out", str(tmp_path / "x.npz")])


@pytest.mark.parametrize("algo", OFFLINE)
def test_every_preset_suits_its_agent_and_processor(algo: str) -> None:
    for name in PRESETS[algo]:
        config = preset(algo, name)
        config.check()
        assert config.max_opts % config.updates == 0
        build_processor(config.processor)
        agent = algorithm_maker(algo)(config.agent)(jaxrl.make_env(name).spec)
        jax.eval_shape(agent.init, jax.random.key(0))
