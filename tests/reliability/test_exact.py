"""Promises 1, 2 and 25: a run is a function of settings and seed, however it is cut, watched, stopped or repeated."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agents import COMBINATIONS
from toys_runs import rows_in, timeless

import jaxrl
from jaxrl.training.storage.leaves import state_digest

N = 24
WATCHED = {"eval_interval": 8, "eval_episodes": 2, "record_interval": 5, "save_interval": 12, "keep": 9, "quiet": True}


class Told(NamedTuple):
    """All that a run says, less what the clock measures."""

    digest: str
    rows: list[dict[str, Any]]
    episodes: list[dict[str, Any]]


def told(run: Path, digest: str) -> Told:
    logs = [timeless(rows_in(run, log=name)) for name in ("metrics.jsonl", "eval_episodes.jsonl")]
    return Told(digest, *([row for row in rows if row.get("kind") != "event"] for rows in logs))


def train(run: Path, name: str, max_opts: int = 2 * N, **settings: Any) -> Told:
    trainer = jaxrl.Trainer(COMBINATIONS[name](), max_opts=max_opts, run_dir=str(run), **{**WATCHED, **settings})
    return told(run, state_digest(trainer.train().state))


ORDINARY = (
    "rainbow, n-step, prioritised over all",
    "ppo with a memory, stopped by divergence",
)
"""Those of which the others are parts, or near kin; these only when slow tests are asked for."""


@pytest.fixture(
    scope="module",
    params=[name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in COMBINATIONS],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Told]:
    return request.param, train(tmp_path_factory.mktemp("whole") / "run", request.param)


@pytest.mark.parametrize("stop", [13, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (N, 2 * N - 1))])
def test_stopped_and_resumed_is_as_if_never_stopped(whole: tuple[str, Told], tmp_path: Path, stop: int) -> None:
    name, expected = whole
    trainer = jaxrl.Trainer(COMBINATIONS[name](), max_opts=2 * N, run_dir=str(tmp_path), max_chunk=1, **WATCHED)
    trainer.hooks = jaxrl.Hooks(chunk=lambda t, at: t.interrupt.stop() if at.opt_steps >= stop else None)
    trainer.train()
    assert train(tmp_path, name, resume=True) == expected


@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2 * N))])
def test_the_length_of_a_call_changes_nothing(whole: tuple[str, Told], tmp_path: Path, chunk: int) -> None:
    name, expected = whole
    assert train(tmp_path / "run", name, max_chunk=chunk) == expected


def test_watching_and_saving_change_nothing(whole: tuple[str, Told]) -> None:
    name, expected = whole
    off = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 0, "save_interval": 0, "quiet": True}
    result = jaxrl.Trainer(COMBINATIONS[name](), max_opts=2 * N, **off).train()
    assert state_digest(result.state) == expected.digest


AGAIN = """
import sys
sys.path[:0] = [{here!r}, {tests!r}]
from pathlib import Path
from test_exact import train
print(train(Path({run!r}), {name!r}).digest)
"""


@pytest.mark.slow  # every day, cli/test_train goes on from a run of another process to the same bits
def test_another_process_makes_the_same_bits(whole: tuple[str, Told], tmp_path: Path) -> None:
    name, expected = whole
    here, run = Path(__file__).parent, tmp_path / "run"
    code = AGAIN.format(here=str(here), tests=str(here.parent), run=str(run), name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told(run, done.stdout.strip()) == expected
