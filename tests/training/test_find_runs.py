"""Runs found by name, the newest first."""

import json
import os
from pathlib import Path

import pytest

import jaxrl


def make(root: Path, *names: str, created: object = "2026-05-01T12:00:00+0000") -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "config.yaml").write_text("algo: dqn\n")
        (root / name / "metadata.json").write_text(json.dumps({"created": created}))


def test_the_newest_come_first_whatever_their_names(tmp_path: Path) -> None:
    make(tmp_path, "zebra", created="2026-05-01T12:00:00+0000")
    make(tmp_path, "ant", created="2026-05-01T13:30:00+0200")  # 11:30 by the time of the zebra
    make(tmp_path, "moth", created="2026-05-01T12:00:01+0000")
    assert [path.name for path in jaxrl.find_runs(tmp_path)] == ["moth", "zebra", "ant"]


def test_a_run_that_does_not_tell_its_beginning_is_as_old_as_its_settings(tmp_path: Path) -> None:
    make(tmp_path, "told", created="2026-05-01T12:00:00+0000")
    make(tmp_path, "no time", created=[3])
    make(tmp_path, "no metadata")
    (tmp_path / "no metadata" / "metadata.json").unlink()
    noon = 1777636800  # 2026-05-01T12:00:00 UTC
    os.utime(tmp_path / "no time" / "config.yaml", (noon + 5, noon + 5))
    os.utime(tmp_path / "no metadata" / "config.yaml", (noon - 5, noon - 5))
    assert [path.name for path in jaxrl.find_runs(tmp_path)] == ["no time", "told", "no metadata"]


def test_runs_of_one_second_come_in_natural_order(tmp_path: Path) -> None:
    make(tmp_path, "v9", "v10", "v1", "v10-b", "2026-02-03", "2026-10-01")
    (tmp_path / "no run").mkdir()
    found = [path.name for path in jaxrl.find_runs(tmp_path)]
    assert found == ["v10-b", "v10", "v9", "v1", "2026-10-01", "2026-02-03"]


def test_names_are_matched(tmp_path: Path) -> None:
    make(tmp_path, "cartpole/v9", "cartpole/v10", "pong/v2")
    assert jaxrl.find_runs(tmp_path, "v1*") == [tmp_path / "cartpole" / "v10"]
    assert [path.name for path in jaxrl.find_runs(tmp_path, "cartpole/*")] == ["v10", "v9"]
    assert jaxrl.find_runs(str(tmp_path), "v3") == []


def test_what_was_begun_again_is_listed_once(tmp_path: Path) -> None:
    make(tmp_path, "walk", "walk/discarded-1", "walk/discarded-12", "walk/mlruns/4/8/artifacts")
    make(tmp_path, "discarded-1", "walk/again", "mlruns/walk")
    found = {path.relative_to(tmp_path).as_posix() for path in jaxrl.find_runs(tmp_path)}
    assert found == {"walk", "discarded-1", "walk/again", "mlruns/walk"}
    assert jaxrl.find_runs(tmp_path / "walk" / "discarded-1") == [tmp_path / "walk" / "discarded-1"]


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jaxrl.SettingsError, match="holds no runs"):
        jaxrl.find_runs(tmp_path / "none")
