"""`python -m jaxrl.evaluate`, `python -m jaxrl.play` and `load_policy`, over runs that were moved and are read only."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import SMALL, Cli, Finished, leaves, snapshot
from PIL import Image

import jaxrl
from jaxrl import evaluate, train
from jaxrl.envs import Env
from jaxrl.errors import NoCheckpointError
from jaxrl.training.evaluator import Evaluation


@pytest.fixture
def moved(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished run in another place, that nobody may write."""
    copy = tmp_path / "elsewhere" / "moved"
    shutil.copytree(finished.path, copy)
    for entry in [*copy.rglob("*"), copy]:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    return copy


def test_evaluate_prints_the_return_and_of_what_it_is_and_changes_nothing(cli: Cli, moved: Path) -> None:
    before = snapshot(moved)
    done = cli.here("evaluate", moved, "--episodes", "5")
    assert (done.returncode, done.stderr) == (0, "")
    number = r"-?\d[\d.e+-]*"
    line = (
        rf"return {number} \+- {number} \(min {number}, max {number}\), length {number}, over 5 episodes, 0 unfinished"
    )
    what = rf"of the best policy of {re.escape(str(moved))}, after (30|60) optimisation steps, in Catch-bsuite"
    assert re.fullmatch(f"{line}\n{what}\n", done.stdout)
    saved = cli.here("evaluate", moved, "--episodes", "5", "--step", "latest").stdout
    assert f"of the saved policy of {moved}, after 60 optimisation steps, in Catch-bsuite\n" in saved
    assert snapshot(moved) == before


def test_evaluate_prints_the_mean_of_a_number_over_the_episodes_that_have_it(
    cli: Cli, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"info/laps": np.array([1.0, np.nan, 3.0]), "info/rank": np.full(3, np.nan)}
    found = Evaluation(np.array([0.0, 1.0, 2.0]), np.array([9, 9, 9]), np.ones(3, bool), columns)
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda *_: found)
    lines = cli.here("evaluate", finished.path).stdout.splitlines()
    assert lines[1:3] == ["info/laps 2 +- 1", "info/rank nan +- nan"]


def test_play_writes_a_gif_of_every_state_and_changes_nothing(cli: Cli, moved: Path) -> None:
    before = snapshot(moved)
    (cli.cwd / "episode.gif").symlink_to("film.gif")  # which leads nowhere yet
    done = cli.here("play", moved, "--out", "episode.gif", "--fps", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"episode\.gif: 10 frames, return -?1\n", done.stdout)
    with Image.open(cli.cwd / "episode.gif") as picture:
        assert (picture.format, getattr(picture, "n_frames", 1)) == ("GIF", 10)  # Catch lasts 9 steps
        assert picture.info["duration"] == 100
    assert (cli.cwd / "episode.gif").is_symlink()
    assert snapshot(moved) == before


def test_play_stops_at_max_steps(finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "short.gif"
    assert jaxrl.play.main([str(finished.path), "--out", str(out), "--max-steps", "4"]) == 0
    assert "5 frames" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert getattr(picture, "n_frames", 1) == 5


def test_a_fresh_process_has_a_policy_by_two_lines_and_keeps_its_signals(cli: Cli, moved: Path) -> None:
    signals = "[signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]"
    done = cli.python(
        f"import signal; before = {signals}\n"
        f"import jaxrl\npolicy = jaxrl.load_policy({str(moved)!r})\n"
        "import numpy as np; print(policy(np.zeros((10, 5))), policy(np.zeros((4, 10, 5))).shape)\n"
        "import jaxrl.train, jaxrl.verify, jaxrl.cli.main, jaxrl.__main__\n"
        f"assert before == {signals}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"[012] \(4,\)\n", done.stdout)


def test_loaded_policy_knows_its_score_and_settings(finished: Finished) -> None:
    policy = jaxrl.load_policy(finished.path)
    assert policy.facts["opt_steps"] == int(next((finished.path / "best").iterdir()).name)
    assert policy.facts["settings"]["env"] == "Catch-bsuite"
    assert -1.0 <= policy.facts["score"] <= 1.0


def test_damaged_best_policy_is_named(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    for manifest in (run / "best").glob("*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(NoCheckpointError, match=r"best/\d+, is damaged"):
        jaxrl.load_policy(run)


# --- policies that remember -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy sees three frames."""
    path = tmp_path_factory.mktemp("stacked") / "run"
    args = [*SMALL, "--max-opts", "20", "--processor.frame-stack", "3", "--run-dir", str(path), "--quiet"]
    assert train.main(args) == 0
    return path


def test_a_better_policy_that_is_gone_is_warned_of(cli: Cli, finished: Finished) -> None:
    copy = cli.cwd / "copy"
    shutil.copytree(finished.path, copy)
    told = json.loads((copy / "metadata.json").read_text())
    (copy / "metadata.json").write_text(json.dumps({**told, "best_score": 7.5}))
    done = cli.here("evaluate", "copy", "--episodes", "1")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    saved = told["best_score"]
    assert done.stderr == f"warning: copy: the policy with the best score, 7.5, is gone; the one saved scored {saved}\n"


@pytest.mark.slow
def test_policy_of_stacked_frames_takes_plain_observations(stacked: Path) -> None:
    policy = jaxrl.load_policy(stacked)
    env = jaxrl.make_env("Catch-bsuite")
    first, again = _actions(policy, env), _actions(policy, env)
    assert len(first) == 9
    assert first == again
    assert {int(action) for action in first} <= {0, 1, 2}
    assert [3 * 50, 16] in [part["shape"] for part in leaves(stacked, 20, "best")]


def _actions(policy: jaxrl.training.GreedyPolicy, env: Env) -> list[int]:
    """Play one episode of `env` from its start; return the actions."""
    state, obs = env.reset(jax.random.key(3))
    policy.reset()
    actions, done = [], False
    while not done:
        actions.append(int(policy(obs)))
        state, out = env.step(state, actions[-1], jax.random.key(len(actions)))
        obs, done = out.obs, bool(out.terminated | out.truncated)
    return actions
