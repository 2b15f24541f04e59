"""`python -m jaxrl.train`: what it leaves, which setting wins, and going on after every kind of end."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from commands import SMALL, Cli, Finished, leaves, rows, snapshot, timeless

import jaxrl
from jaxrl import train
from jaxrl.cli.algos import BufferConfig
from jaxrl.cli.config import flags_of, parse
from jaxrl.cli.presets import PRESETS
from jaxrl.errors import SettingsError
from jaxrl.registry import ALGORITHMS
from jaxrl.training import Result
from jaxrl.training.storage.run_dir import RunDir

COMMON = {"kind", "opt_steps", "env_steps", "wall_s"}
TRAIN = {
    "opt_steps_per_sec", "env_steps_per_sec", "episode_return", "episode_length", "episodes", "terminated", "truncated",
    "skipped_updates", "loss", "loss_min", "loss_max",
}  # fmt: skip
EVAL = {
    "eval_reward", "eval_reward_std", "eval_reward_min", "eval_reward_max", "eval_length", "episodes", "unfinished",
    "score", "confirm_score", "is_best",
}  # fmt: skip

# --- what a run leaves ------------------------------------------------------------------------------------------


def test_a_run_directory_has_the_documented_layout_and_keeps_the_newest_checkpoints(finished: Finished) -> None:
    visible = {p.name for p in finished.path.iterdir() if not p.name.startswith(".")}
    documented = "config.yaml metadata.json metrics.jsonl eval_episodes.jsonl tensorboard checkpoints best"
    assert visible == set(documented.split())
    assert {p.name for p in (finished.path / "checkpoints").iterdir()} == {"40", "60"}
    best = json.loads((finished.path / "metadata.json").read_text())["best_opt_steps"]
    assert [p.name for p in (finished.path / "best").iterdir()] == [str(best)]
    events = b"".join(p.read_bytes() for p in (finished.path / "tensorboard").iterdir())
    assert b"train/loss" in events
    assert b"eval/eval_reward" in events


def test_rows_have_the_documented_columns_and_exact_counters(finished: Finished) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "event": []}
    for row in rows(finished.path / "metrics.jsonl"):
        kinds[row["kind"]].append(row)
    assert [(row["opt_steps"], row["env_steps"]) for row in kinds["train"]] == [(20, 400), (40, 600), (60, 800)]
    for row in kinds["train"]:
        assert row.keys() >= COMMON | TRAIN
        assert all(isinstance(row[name], int) for name in ("opt_steps", "env_steps", "episodes", "skipped_updates"))
        assert row["loss_min"] <= row["loss"] <= row["loss_max"]
        assert row["episodes"] == row["terminated"] + row["truncated"]
    assert [(row["opt_steps"], row["env_steps"]) for row in kinds["eval"]] == [(30, 500), (60, 800)]
    played = rows(finished.path / "eval_episodes.jsonl")
    assert [(row["opt_steps"], row["episode"]) for row in played] == [(at, i) for at in (30, 60) for i in range(3)]
    assert all(row.keys() == {"opt_steps", "env_steps", "episode", "return", "length", "finished"} for row in played)
    for row in kinds["eval"]:
        assert row.keys() >= COMMON | EVAL
        assert row["episodes"] == 3
        assert row["eval_reward_min"] <= row["eval_reward"] <= row["eval_reward_max"]
        returns = [episode["return"] for episode in played if episode["opt_steps"] == row["opt_steps"]]
        assert row["eval_reward"] == pytest.approx(sum(returns) / 3)


def test_metadata_tells_versions_devices_status_counters_and_best_score(finished: Finished) -> None:
    facts = json.loads((finished.path / "metadata.json").read_text())
    assert facts.keys() >= {"format", "versions", "devices", "status"}
    assert facts["versions"]["jaxrl"] == jaxrl.__version__  # of the code that ran, whatever was installed from it
    assert (facts["status"], facts["opt_steps"], facts["env_steps"]) == ("max_opts", 60, 800)
    evaluations = [row for row in rows(finished.path / "metrics.jsonl") if row["kind"] == "eval"]
    assert facts["best_score"] == max(row["confirm_score"] for row in evaluations if row["is_best"])
    assert facts["last_score"] == evaluations[-1]["score"]


def test_output_off_a_terminal_is_plain_lines_with_a_summary(finished: Finished) -> None:
    out, err = finished.output.stdout, finished.output.stderr
    assert err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)
    assert len(re.findall(r"^ +(30|60) opts .* over 3 episodes", out, re.MULTILINE)) == 2
    summary = dict(
        re.findall(r"^  (stopped by|steps|best|last|seconds|run|go on|evaluate|watch) +(.*)$", out, re.MULTILINE)
    )
    assert {"best", "last", "seconds", "run"} <= summary.keys()
    assert summary["stopped by"].strip() == "max_opts"
    assert summary["steps"].strip() == "60 optimisation, 800 environment"
    assert summary["go on"].strip() == "python -m jaxrl.train --resume run --max-opts 120"
    assert summary["evaluate"].strip() == "python -m jaxrl.evaluate run"
    assert summary["watch"].strip() == "python -m jaxrl.play run --out episode.gif"


# --- which setting wins -----------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_presets_of_the_environment_that_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = {"Catch-*": {"num_envs": 4, "opt_interval": 4, "agent": {"lr": 0.1}}}
    monkeypatch.setitem(PRESETS, "dqn", presets)
    file = tmp_path / "mine.yaml"
    file.write_text("env: Catch-bsuite\nopt_interval: 8\nagent:\n  lr: 1e-2\n")
    config = parse(["--config", str(file), "--agent.lr", "0.5"]).config
    assert (config.num_envs, config.opt_interval, config.agent.lr) == (4, 8, 0.5)
    assert parse([f"--config={file}"]).config.agent.lr == 0.01
    assert config.buffer == BufferConfig()
    file.write_text("env: Catch-bsuite\n")
    config = parse(["--config", str(file), "--env", "CartPole-v1"]).config
    assert (config.env, config.num_envs, config.agent.lr) == ("CartPole-v1", 10, 2.5e-4)


def test_algorithm_comes_first_and_defaults_to_dqn() -> None:
    named, unnamed = parse(["dqn", "--env", "Catch-bsuite"]), parse(["--env", "Catch-bsuite"])
    assert named == unnamed
    assert (named.algo, named.resume) == ("dqn", False)


def test_config_of_a_run_gives_its_settings_back(finished: Finished) -> None:
    from_file = parse(["--config", str(finished.path / "config.yaml")]).config
    chosen = {"resets": "fresh"}  # `auto` looks at what a reset costs; the file says what came of it
    assert asdict(from_file) == {**asdict(parse(finished.args).config), **chosen}


@pytest.mark.slow
def test_config_of_a_run_makes_the_same_run_again_and_quiet_says_nothing(cli: Cli, finished: Finished) -> None:
    done = cli.here("train", "dqn", "--config", finished.path / "config.yaml", "--run-dir", "again", "--quiet")
    assert (done.stdout, done.stderr) == ("", "")
    assert leaves(cli.cwd / "again", 60) == leaves(finished.path, 60)
    assert timeless(cli.cwd / "again" / "metrics.jsonl") == timeless(finished.path / "metrics.jsonl")


def test_help_shows_each_setting_with_unit_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "dqn", {})
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    common = (
        "--env --seed --num-envs --max-opts --opt-interval --warmup --eval-interval --eval-episodes --record-interval "
        "--save-interval --keep --run-dir --stop-reward --patience --quiet --agent.lr --buffer.capacity --config "
        "--resume"
    )
    assert [flag for flag in common.split() if flag not in shown] == []
    assert "Optimisation steps between evaluations; 0: only at the end. (1000)" in shown
    assert "Environment steps before the first optimisation step. (1000)" in shown
    assert "Learning rate. (0.00025)" in shown


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        train.main(["--help"])
    lines = capsys.readouterr().out.split("\nall settings\n", 1)[0].splitlines()
    # What is to be typed stays whole.
    assert {line.split()[0] for line in lines if len(line) > 40} == {"usage:", "python"}
    (at,) = [number for number, line in enumerate(lines) if line.startswith("  --eval-interval")]
    assert lines[at : at + 2] == ["  --eval-interval  optimisation steps", "      between evaluations (600)"]


ELSEWHERE = {
    "--seeds", "--sweep", "--halving", "--pbt", "--layout", "--width", "--config", "--resume", "--members", "--help",
    "--version",
}  # fmt: skip
"""Told in words on the first page of the help, not flags of a run."""


@pytest.mark.every_day("dqn", "ppo", "iql")
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_help_begins_with_a_page_of_what_is_changed_first_and_has_every_flag(
    algo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit):
        train.main([algo, "--help"])
    page, rest = capsys.readouterr().out.split("\nall settings\n", 1)
    lines = page.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    config = parse([algo]).config
    rate = f"({config.agent.lr:g})"
    assert [line.endswith(rate) for line in lines if line.startswith("  --agent.lr   ")] == [True]
    assert {"--env", "--seed", "--max-opts", "--run-dir", "--sweep"} <= set(page.split())
    there = {word for line in lines if line.startswith("  --") for word in re.findall(r"--[\w.-]+", line[:26])}
    assert {flag for flag in there - ELSEWHERE if not re.search(rf" {flag}[ ,]", rest)} == set()
    accepted = flags_of(config)
    assert {"--members", "--draw-seed"} <= set(accepted)
    assert set(accepted) <= set(re.findall(r"--[\w.-]*\w", page + rest))
    rows = [(line[:26].strip(), line[26:].strip() if line[24:26] == "  " else "") for line in rest.splitlines()]
    assert len(rows) > 50
    broken = [
        text
        for (_, text), (flag, after) in itertools.pairwise(rows)
        if text and after and not flag and len(text) + 1 + len(after.split()[0]) <= 80 - 26
    ]
    assert broken == []  # where a line ends, the next word did not fit


# --- going on ---------------------------------------------------------------------------------------------------


def test_resumed_and_prolonged_run_equals_an_uninterrupted_one_bit_for_bit(cli: Cli, finished: Finished) -> None:
    half, whole = cli.cwd / "half", cli.cwd / "whole"
    shutil.copytree(finished.path, half)
    done = cli.here("train", "--resume", half, "--max-opts", "120", "--quiet")  # which another process has begun
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    cli.here("train", *SMALL, "--max-opts", "120", "--run-dir", whole, "--quiet")
    assert leaves(half, 120) == leaves(whole, 120)
    for log in ("metrics.jsonl", "eval_episodes.jsonl"):
        assert timeless(half / log) == timeless(whole / log)
    assert yaml.safe_load((half / "config.yaml").read_text())["max_opts"] == 120


def test_resuming_a_finished_run_needs_no_flag_and_trains_no_further(cli: Cli, finished: Finished) -> None:
    copy = cli.cwd / "copy"
    shutil.copytree(finished.path, copy)
    before = snapshot(copy)
    done = cli.here("train", "--resume", copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "nothing is left to train: max_opts 60 is reached; prolong it by "
        f"python -m jaxrl.train --resume {copy} --max-opts 120\n"
    )
    assert snapshot(copy) == before
    assert leaves(copy, 60) == leaves(finished.path, 60)
    assert timeless(copy / "metrics.jsonl") == timeless(finished.path / "metrics.jsonl")
    assert json.loads((copy / "metadata.json").read_text())["status"] == "max_opts"


@pytest.mark.every_day("True")
@pytest.mark.parametrize("ended", [False, True])
def test_two_runs_begun_in_one_second_get_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "time", SimpleNamespace(strftime=lambda form: "20260501-120000"))
    choose, others = train.new_run_dir, []

    def choose_with_another(name: str) -> str:
        chosen = choose(name)
        if not others:
            others.append(RunDir(chosen, resume=False))  # another process, just after this one looked
            others[0].write_config({"algo": "dqn"})
            if ended:
                others[0].release()
        return chosen

    monkeypatch.setattr(train, "new_run_dir", choose_with_another)
    assert train.main([*SMALL, "--max-opts", "10", "--quiet"]) == 0
    if not ended:
        others[0].release()
    stem = "Catch-bsuite-dqn-s0-20260501-120000"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [stem, f"{stem}-2"]
    assert (tmp_path / "runs" / f"{stem}-2" / "checkpoints" / "10").is_dir()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.slow
def test_a_run_started_without_standard_streams_gives_their_numbers_to_no_file(cli: Cli) -> None:
    command = [sys.executable, "-m", "jaxrl.train", *SMALL, "--max-opts", "40000000", "--run-dir", "run", "--quiet"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cli.cache)}
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command]
    process = subprocess.Popen(closed, cwd=cli.cwd, env=env)
    log = cli.cwd / "run" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and '"kind": "train"' in log.read_text()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    held = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
    process.terminate()
    assert process.wait() == 143
    assert held == [os.devnull] * 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "5"], "seed: 0 -> 5"),
        (["--agent.features", "8"], "agent.features cannot change"),
    ],
)
def test_what_cannot_change_is_named_at_once_with_what_can_be_done(
    finished: Finished, flags: list[str], said: str
) -> None:
    """The same with and without `--allow-changes`, to which nobody is sent in vain."""
    answers = set()
    for allowed in ([], ["--allow-changes"]):
        with pytest.raises(SettingsError) as refused:
            train.main(["--resume", str(finished.path), *flags, *allowed])
        answers.add(str(refused.value))
    (answer,) = answers
    assert said in answer
    assert "--start-over" in answer
    assert "--allow-changes" not in answer
    assert "[0]" not in answer


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        ("max_opts", " --max-opts 120"),
        ("max_env_steps", " --max-env-steps 1600"),
        ("SIGINT", ""),
        ("SIGTERM", ""),
        ("handle", ""),
        ("stop_reward", None),
        ("diverged", None),
    ],
)
def test_the_summary_says_how_to_go_on(stop: str, more: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"stop": stop, "opt_steps": 60, "env_steps": 800, "opt_steps_per_sec": 1.0, "best_score": None}
    counters: Any = {**summary, "last_score": None, "seconds": {}, "wall_s": 1.0, "best_opt_steps": None}
    train.show(Result(None, None, counters, None), "my run")
    shown = re.findall(r"^  go on +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert shown == ([] if more is None else [f"python -m jaxrl.train --resume 'my run'{more}"])


def test_a_finished_run_that_has_lost_its_last_checkpoint_goes_on_from_the_one_before(
    cli: Cli, finished: Finished
) -> None:
    lost = Path(shutil.copytree(finished.path, cli.cwd / "lost"))
    shutil.rmtree(lost / "checkpoints" / "60")
    done = cli.here("train", "--resume", lost)
    assert (done.returncode, "resumed at 40" in done.stdout) == (0, True)
    assert leaves(lost, 60) == leaves(finished.path, 60)
    assert timeless(lost / "metrics.jsonl") == timeless(finished.path / "metrics.jsonl")
