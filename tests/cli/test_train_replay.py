"""The agents that learn from replay, beside plain DQN, from the command line to the loaded policy."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from front_doors import leaves, timeless
from test_readme import block

import jaxrl
from jaxrl import train
from jaxrl.cli.config import parse

SMALL = (
    *("--num-envs", "4", "--opt-interval", "2", "--warmup", "16", "--agent.features", "8", "--quiet"),
    *("--buffer.capacity", "200", "--buffer.batch-size", "8", "--eval-interval", "20", "--eval-episodes", "3"),
    *("--record-interval", "20", "--save-interval", "20"),
)
CASES = {
    "sac": ("--env", "Pendulum-v1", "--buffer.prioritised", "--updates", "2"),
    "td3": ("--env", "Pendulum-v1", "--agent.noise-memory", "0.8"),
    "ddpg": ("--env", "Pendulum-v1", "--processor.n-step", "3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("algo", CASES)
def test_each_trains_resumes_to_the_same_bits_and_leaves_a_policy(algo: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for path, opts in ((whole, 80), (parts, 40)):
        assert train.main([algo, *CASES[algo], *SMALL, "--max-opts", str(opts), "--run-dir", str(path)]) == 0
    assert train.main(["--resume", str(parts), "--max-opts", "80"]) == 0
    assert leaves(whole, 80) == leaves(parts, 80)
    last = [row for row in timeless(whole / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert last == [row for row in timeless(parts / "metrics.jsonl") if row["kind"] == "train"][-1]
    action = jaxrl.load_policy(whole)(np.array([1.0, 0.0, 0.0], np.float32))
    assert action.shape == (1,)
    assert -2.0 <= float(action[0]) <= 2.0


@pytest.mark.slow
def test_rainbow_is_what_its_name_says_unless_told_otherwise(tmp_path: Path) -> None:
    args = ("rainbow", "--env", "Catch-bsuite", "--max-opts", "20", *SMALL, "--agent.atoms", "5")
    assert train.main([*args, "--run-dir", str(tmp_path)]) == 0
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
    assert train.main([*words, "--quiet", "--run-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("td3", "--env", "CartPole-v1"), "td3 takes continuous actions, but CartPole-v1 has Discrete actions"),
        (("rainbow", "--env", "Pendulum-v1"), "rainbow takes discrete actions, but Pendulum-v1 has Box actions"),
        (("sac", "--updates", "0"), "updates"),
        (("sac", "--agent.temperature", "0"), "agent.temperature"),
        (("sac", "--buffer.prioritised", "--buffer.beta", "2"), "buffer.beta"),
        (("sac", "--buffer.prioritised", "--buffer.normalise", "some"), "expected batch or all"),
        (("dqn", "--agent.values", "c52"), "c51"),
        (("dqn", "--agent.values", "c51", "--agent.v-min", "3", "--agent.v-max", "3"), "expected v_min below v_max"),
        (("rainbow", "--agent.v-min", "1e8", "--agent.v-max", "100000001"), "which float32 can resolve"),
        (("dqn", "--agent.values", "iqn", "--agent.features", "8"), "another behind"),
        (("dqn", "--agent.epsilon-decay", "10000000000"), "at most 2147483647"),
        (("sac", "--buffer.prioritised", "--buffer.beta-steps", "10000000000"), "at most 2147483647"),
        (("rainbow", "--processor.discount", "1", "--agent.v-max", "None"), "set agent.v_min and agent.v_max"),
        (("dqn", "--agent.values", "c51", "--agent.munchausen", "0.9"), "use qr or iqn"),
        (("dqn", "--agent.values", "iqn", "--agent.value-rescaling"), "set it to expected"),
        (("td3", "--agent.noise-memory", "0.5", "--processor.n-step", "3"), "set processor.n_step to 1"),
    ],
)
def test_bad_settings_are_refused_by_name(
    args: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jaxrl.JaxrlError) as refused:
        train.main(args)
    assert refused.value.exit_code == 2
    assert said in str(refused.value)
    assert list(tmp_path.iterdir()) == []
