"""Runs saved when some settings, and what a sweep varies of them, had other names."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxrl
from jaxrl import train, verify
from jaxrl.config import parse
from jaxrl.training.changes import RENAMED, changes, renewed
from jaxrl.training.storage import checkpoints, leaves

ARGS = (
    *("ppo", "--num-envs", "2", "--rollout", "8", "--epochs", "1", "--minibatches", "1", "--agent.features", "4"),
    *("--agent.ent-coef", "0.03", "--agent.clip-eps", "0.1", "--agent.vf-coef", "0.7", "--agent.lr-decay", "0"),
    *("--agent.normalise-advantage", "batch", "--eval-interval", "2", "--eval-episodes", "2", "--save-interval", "2"),
    "--quiet",
)
LAST = ("--max-opts", "8")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 optimisation steps with the names of version 0.4, in its settings and in the paths of its leaves."""
    run = tmp_path_factory.mktemp("old") / "run"
    before = {new: name for name, new in leaves.RENAMED.items()}

    def describe(path: str, leaf: Any) -> Any:
        for new, name in before.items():
            path = path.removesuffix(new) + name if path.endswith(new) else path
        return leaves.describe_leaf(path, leaf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "describe_leaf", describe)
        assert train.main([*ARGS, "--max-opts", "4", "--run-dir", str(run)]) == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    names = {new: name for name, new in RENAMED.items()}
    config["agent"] = {names.get(name, name): value for name, value in config["agent"].items()}
    assert {"entropy", "clip", "value", "normalise", "clip_value"} <= config["agent"].keys()
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert ".hyper.entropy" in (run / "checkpoints" / "4" / "manifest.json").read_text()
    return run


@pytest.mark.slow
def test_it_goes_on_to_the_bits_of_a_run_that_had_todays_names_all_along(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*ARGS, *LAST, "--run-dir", str(tmp_path / "new")]) == 0
    assert train.main(["--resume", str(old), *LAST]) == 0
    capsys.readouterr()
    said = []
    for run in (old, tmp_path / "new"):
        assert verify.main([str(run)]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "8"])
    assert said[0] == said[1]
    assert len(said[0]) == 1


@pytest.mark.slow
def test_its_best_policy_acts(old: Path) -> None:
    assert jaxrl.load_policy(old)([[0.0, 0.1, 0.0, -0.1]]).shape == (1,)


def test_a_changed_setting_is_told_by_its_name_of_today() -> None:
    old, new = {"agent": {"entropy": 0.1, "clip": 0.2}}, {"agent": {"ent_coef": 0.5, "clip_eps": 0.2}}
    assert [str(change) for change in changes(old, new)] == ["agent.ent_coef: 0.1 -> 0.5"]
    assert renewed(old)["agent"] == {"ent_coef": 0.1, "clip_eps": 0.2}


def test_a_file_of_ones_own_with_an_old_name_is_led_to_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algo: ppo\nagent: {entropy: 0.1}\n")
    with pytest.raises(jaxrl.SettingsError, match=r"unknown setting agent\.entropy; did you mean ent_coef\?"):
        parse(["--config", str(tmp_path / "mine.yaml")])
