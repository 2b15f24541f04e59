"""Runs found by name, in natural order."""

from pathlib import Path

import pytest

import jaxrl


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "config.yaml").write_text("algo: dqn\n")


def test_the_newest_come_first_in_natural_order(tmp_path: Path) -> None:
    make(tmp_path, "v9", "v10", "v1", "v10-b", "2026-02-03", "2026-10-01")
    (tmp_path / "no run").mkdir()
    found = [path.name for path in jaxrl.find_runs(tmp_path)]
    assert found == ["v10-b", "v10", "v9", "v1", "2026-10-01", "2026-02-03"]


def test_names_are_matched(tmp_path: Path) -> None:
    make(tmp_path, "cartpole/v9", "cartpole/v10", "pong/v2")
    assert jaxrl.find_runs(tmp_path, "v1*") == [tmp_path / "cartpole" / "v10"]
    assert [path.name for path in jaxrl.find_runs(tmp_path, "cartpole/*")] == ["v10", "v9"]
    assert jaxrl.find_runs(str(tmp_path), "v3") == []


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jaxrl.SettingsError, match="holds no runs"):
        jaxrl.find_runs(tmp_path / "none")
