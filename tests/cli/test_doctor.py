"""The doctor says what there is and what works, goes on past what does not, and leaves nothing behind."""

import errno
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commands import Cli

from jaxrl import doctor
from jaxrl.xla import current_forms, products

SKIPPED = ["speed dqn", "forms ppo", "bits ppo", "save ppo", "speed ppo"]


STRATEGY = functools.cache(doctor.AGENTS["dqn"])


@pytest.fixture
def one_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor train the same strategy each time, which is traced once."""
    monkeypatch.setitem(doctor.AGENTS, "dqn", STRATEGY)


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of temporary files that nobody else uses."""
    path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def checked(cli: Cli, code: int) -> dict[str, dict[str, Any]]:
    """Run the quick form, which must end with `code`; return its checks, which are those that it has printed."""
    done = cli.here("doctor", "--quick", "--json", "page.json")
    assert (done.returncode, [path.name for path in cli.cwd.iterdir()]) == (code, ["page.json"])
    page = json.loads((cli.cwd / "page.json").read_text())
    lines = {line[:17].rstrip(): line[18:] for line in done.stdout.splitlines()}
    assert sorted(lines) == sorted([*page["facts"], *page["checks"]])
    assert {name: lines[name] for name in page["facts"]} == page["facts"]
    for name, found in page["checks"].items():
        assert lines[name].split()[0] == found["verdict"]
        assert [key for key in found if key not in ("verdict", "seconds") and f"{key} " not in lines[name]] == []
    assert done.stdout.splitlines()[-1] == f"result            {page['facts']['result']}"
    assert (page["facts"]["result"] == "all is well") == (code == 0)
    checks: dict[str, dict[str, Any]] = page["checks"]
    assert [name for name, found in checks.items() if found["verdict"] == "skipped"] == SKIPPED
    return checks


def failed(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: found["error"] for name, found in checks.items() if found["verdict"] == "failed"}


@pytest.mark.usefixtures("one_strategy")
def test_a_sound_machine_passes_and_nothing_is_left_behind(cli: Cli, temporary: Path) -> None:
    checks = checked(cli, 0)
    assert checks["forms dqn"]["apart"] <= 1e-4
    assert checks["bits dqn"]["digest"] == checks["save dqn"]["digest"]  # both are 512 steps from one key
    assert checks["disk"]["where"] == str(temporary)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_form_that_errs_is_found_and_the_other_checks_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = products.multiply
    wrong = lambda x, kernel: right(x, kernel) + (0.0 if current_forms() == "plain" else 1.0)
    monkeypatch.setattr(products, "multiply", wrong)
    checks = checked(cli, 1)
    assert list(failed(checks)) == ["forms dqn"]
    assert "of what an iteration changes" in failed(checks)["forms dqn"]
    page = json.loads((cli.cwd / "page.json").read_text())
    assert "JAXRL_FORMS=plain" in page["facts"]["result"]


@pytest.mark.usefixtures("one_strategy")
def test_a_disk_that_takes_nothing_is_found_and_the_other_checks_go_on(
    cli: Cli, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    checks = checked(cli, 1)
    assert list(failed(checks)) == ["save dqn", "disk"]
    assert failed(checks)["disk"] == "OSError: [Errno 28] No space left on device"
    assert "No space left on device" in failed(checks)["save dqn"]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_the_long_form_compiles_both_agents_and_caches_nothing(tmp_path: Path) -> None:
    cli = Cli(tmp_path, tmp_path / "cache")
    done = cli.run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped" not in done.stdout
    assert done.stdout.count("  steps/s ") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_the_devices_asked_for_it_says_what_it_can(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    done = cli.run("doctor")
    assert done.returncode == 2
    assert "JAX_PLATFORMS=tpu" in done.stdout
    assert done.stderr.startswith("error: JAX_PLATFORMS=tpu asks for devices")
