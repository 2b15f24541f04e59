"""Every case and every script of the benchmarks runs in its smallest form; what computes, in a process of its own."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from benchmarks.cases import CASES

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()
COMMITTED = sorted(map(str, (BENCHMARKS / "results").glob("*cores-core.json")))[-1]


def rows_of(told: str, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["rows"]
    return rows


class Script(NamedTuple):
    """The smallest form of a script, in the folder of a test, and what it leaves."""

    arguments: str
    """What stands after its name; `out.json` is the file that it writes, where it writes one."""
    left: Callable[[str, Path], Any] = rows_of
    """Returns what must not be empty, of what it printed and the folder."""
    here: bool = False
    """Whether it computes nothing with JAX, and so can run in this process."""


def printed(words: str) -> Callable[[str, Path], Any]:
    """Return what asserts that a script prints these words."""
    return lambda told, folder: words in told


def made(name: str) -> Callable[[str, Path], Any]:
    """Return what asserts that a script leaves a file that is not empty."""
    return lambda told, folder: (folder / name).read_bytes()


def rehearsed(told: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a campaign of one agent and one case, of which each part but the forms has left one."""
    correct, kernels, speed, *forms = rows_of(told, folder)
    assert (correct["part"], correct["case"], correct["repeated"]) == ("correct", "dqn", True)
    assert len(correct["digest"]) == 16
    assert correct["apart"] < 1e-2
    assert (kernels["part"], kernels["predicted"]) == ("kernels", None)
    assert kernels["kernels_per_iteration"] > 10
    assert (speed["part"], speed["case"]) == ("speed", "env-10")
    assert [row["name"] for row in forms[:2]] == ["as it is", "plain"]
    assert forms[0]["ratio"] == [1, 1, 1]
    return [correct, kernels, speed, *forms]


TRAINED = "--seeds 0 --max-opts 40 --eval-interval 20 --eval-episodes 2 --agent.features 8 --json out.json"
SCRIPTS = {
    "run": Script("env-10 --quick --json out.json"),
    "compare": Script(f"{COMMITTED} {COMMITTED}", printed("same beside its"), here=True),
    "peers": Script("rejax --opt-steps 16 --rounds 1 --json out.json"),
    "compiled": Script("evaluate --target cpu --json out.json"),
    "compiled.shards": Script("dqn-1024 --target 8-cpu --json out.json"),
    "tables": Script("speed", printed("Measured with jaxrl"), here=True),
    "scale": Script("2 --quick --json out.json"),
    "campaign": Script("--quick --agents dqn --cases env-10 --json out.json", rehearsed),
    "learning": Script(f"--algo dqn --env CartPole-v1 {TRAINED}"),
    "offline": Script("--quick --json out.json"),
    "search": Script("--quick --json out.json"),
    "population": Script("--quick --json out.json"),
    "memory": Script("--quick --json out.json"),
    "demos": Script("--lengths 3 --seeds 0 --json out.json"),
    "begin": Script("--seeds 0 --env-steps 8192 --json out.json"),
    "distil": Script("--env CartPole-v1 --seeds 0 --opt-steps 16 --json out.json"),
    "learnt": Script("dqn rainbow --out out.svg", made("out.svg")),
    "curves": Script("run --out out.svg", made("out.svg")),
    "recorders": Script("--quick --json out.json"),
    "reports": Script("100 2", printed("2 runs of 100 rows"), here=True),
    "masks": Script("CartPole-v1 --episodes 2 --json out.json"),
    "atari": Script("--quick --json out.json"),
}
"""Of each script, by its name below `benchmarks`."""

SHORT = "--max-opts 4 --eval-interval 0 --eval-episodes 2 --run-dir run --quiet"
ENVIRONMENTS = {
    "goals:bit_flipping": "dqn --env-args bits 5 --buffer.hindsight 0.8",
    "hidden:recall": "sac --env-args steps 4 --agent.core gru",
    "hidden:pendulum": "sac",
    "pixels:catching": "ppo --processor.frame-stack 4 --num-envs 2 --rollout 8",
    "masks:snake": "ppo",
    "masks:pgx_2048": "ppo",
}
"""How each environment of the benchmarks is trained in, by its name below `benchmarks`."""


def run(cache: Path, folder: Path, module: str, arguments: str) -> str:
    paths = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache / "benchmarks")}
    kept = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    command = [sys.executable, "-m", module, *arguments.split()]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **paths, **kept}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2_000:]}{done.stderr[-4_000:]}"
    return done.stdout


def run_here(module: str, arguments: str) -> str:
    """Run a module as a script in this process; return what it printed."""
    with (
        mock.patch.object(sys, "argv", [module, *arguments.split()]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module may be there already
        runpy.run_module(module, run_name="__main__")
    return out.getvalue()


# --- the tables are whole --------------------------------------------------------------------------------------------


def test_every_script_has_its_smallest_form_here_and_its_line_in_the_readme() -> None:
    (shown,) = re.findall(r"^# Benchmarks\n\n```sh\n(.*?)```", README, re.DOTALL)
    named = re.findall(r"^python -m benchmarks\.([\w.]+)", shown, re.MULTILINE)
    modules = [file.relative_to(BENCHMARKS) for file in BENCHMARKS.rglob("*.py") if starts_itself(file)]
    scripts = {".".join(file.with_suffix("").parts).removesuffix(".__main__") for file in modules}
    assert set(named) == scripts
    assert set(SCRIPTS) == scripts


def starts_itself(file: Path) -> bool:
    return 'if __name__ == "__main__":' in file.read_text()


def test_every_environment_of_the_benchmarks_is_trained_in_as_its_module_shows() -> None:
    shown = [
        found
        for file in BENCHMARKS.glob("*.py")
        for found in re.findall(r"--env benchmarks\.(\w+:\w+)", file.read_text())
    ]
    assert set(shown) <= set(ENVIRONMENTS)


def test_every_case_has_its_row_in_the_readme() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", README, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} - {"actors-processes"} == set(CASES)


# --- they run --------------------------------------------------------------------------------------------------------


@pytest.mark.every_day("env-10")
@pytest.mark.parametrize("case", CASES)
def test_a_case_runs(case: str, cache: Path, tmp_path: Path) -> None:
    if case == "actors":
        pytest.importorskip("gymnasium")
    told = run(cache, tmp_path, "benchmarks.run", f"{case} --quick --json out.json")
    rows = rows_of(told, tmp_path)
    assert {row["case"] for row in rows} <= {case, f"{case}-processes"}
    for row in rows:
        assert row["us_per_opt_step"] > 0
        assert row["ratio_to_ceiling"] > 0
        assert f"\n{row.get('name', case)} " in told
    trains = re.match(r"dqn|ppo|sac", case)
    assert not trains or rows[0]["ratio_to_scan"] > 0


@pytest.mark.every_day("compare", "tables", "reports")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, cache: Path, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    if name in ("learnt", "curves"):
        pytest.importorskip("matplotlib")
    if name == "atari":
        pytest.importorskip("ale_py")
        pytest.importorskip("cv2")
    if name == "curves":
        short = "--max-opts 20 --eval-interval 10 --eval-episodes 2 --run-dir run --quiet"
        run(cache, tmp_path, "jaxrl.train", f"dqn {short}")
    module = f"benchmarks.{name}"
    told = run_here(module, script.arguments) if script.here else run(cache, tmp_path, module, script.arguments)
    left = script.left(told, tmp_path)
    assert left
    if isinstance(left, list):
        assert [row for row in left if row.get("failed")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_is_trained_in(name: str, cache: Path, tmp_path: Path) -> None:
    suite = {"masks:snake": "jumanji", "masks:pgx_2048": "pgx"}.get(name)
    if suite:
        pytest.importorskip(suite)
    algo, _, flags = ENVIRONMENTS[name].partition(" ")
    run(cache, tmp_path, "jaxrl.train", f"{algo} --env benchmarks.{name} {flags} {SHORT}")
    assert (tmp_path / "run" / "metadata.json").exists()


@pytest.mark.slow
def test_a_case_is_traced_where_asked_for(cache: Path, tmp_path: Path) -> None:
    told = run(cache, tmp_path, "benchmarks.run", "env-10 --quick --profile traces")
    assert re.search(r"^env-10 +[\d.]+ us +[\d.]+ runs ", told, re.MULTILINE)
    assert list((tmp_path / "traces" / "env-10").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_told_and_the_others_go_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = run(cache, tmp_path, "benchmarks.peers", "rejax --opt-steps 16 --rounds 1 --json out.json")
    ours, theirs = rows_of(told, tmp_path)
    assert (ours["name"], ours["ratio_to_ceiling"], theirs["name"]) == ("jaxrl", 1.0, "rejax")
    assert theirs["failed"].startswith("cannot be installed: ERROR: No matching distribution found for rejax")
    assert theirs["failed"] in told


@pytest.mark.slow
def test_a_campaign_goes_on_where_a_case_fails_and_its_exit_code_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.campaign", "--quick", "--parts", "speed", "--cases", "env-x"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-2_000:]
    (row,) = rows_of(done.stdout, tmp_path)
    assert row["failed"] == "KeyError: 'env-x'"
