"""The command line does what was typed, or says in one line why not; nothing that was typed is dropped or overruled."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from front_doors import SMALL, Doors, Finished, one_error_line, snapshot
from test_first_seconds import run_with_fake_jax
from toys_envs import counting

import jaxrl
from jaxrl import collect, evaluate, export, play, publish, report, train, verify
from jaxrl.config import flags_of, parse
from jaxrl.errors import JaxrlError, SettingsError

DOORS: dict[str, Callable[[list[str]], int]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "play": play.main,
    "verify": verify.main,
    "collect": collect.main,
    "report": report.main,
    "export": export.main,
    "publish": publish.main,
}


def refusal(main: Callable[[list[str]], Any], *args: str) -> str:
    """Return the one line in which a front door refuses these words, with exit code 2."""
    with pytest.raises(JaxrlError) as refused:
        main(list(args))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- one form for all flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("--env-args=gravity 12.5", "--env-args gravity 12.5"),
        ("--env_args gravity 12.5", "--env-args gravity 12.5"),
        ("--env_args=gravity 12.5 force_mag 5", "--env-args gravity 12.5 force_mag 5"),
        ("--eval-env-args=gravity 12.5", "--eval-env-args gravity 12.5"),
        ("--max_opts=500", "--max-opts 500"),
        ("--agent.target_interval=7", "--agent.target-interval 7"),
        ("--quiet=true", "--quiet"),
        ("--agent.double=False", "--agent.no-double"),
        ("--agent.no_double", "--agent.no-double"),
        ("--sweep=agent.lr=1e-4,1e-3", "--sweep agent.lr=1e-4,1e-3"),
        ("--seeds=3", "--seeds 3"),
        ("--members=4 --draw_seed=5", "--members 4 --draw-seed 5"),
        ("--halving=3", "--halving 3"),
        ("--pbt=2000 share=0.5", "--pbt 2000 share=0.5"),
        ("--agent.schedules=lr=linear(1e-3,0,100)", "--agent.schedules lr=linear(1e-3,0,100)"),
    ],
)
def test_equals_signs_and_underscores_are_as_spaces_and_dashes(typed: str, plain: str) -> None:
    assert parse(typed.split()) == parse(plain.split()) != parse([])


def test_a_value_that_looks_like_a_flag_stands_behind_an_equals_sign() -> None:
    assert parse(["--notes=--fast, but why?"]).config.notes == "--fast, but why?"


def test_an_evaluation_takes_what_was_typed(doors: Doors, finished: Finished) -> None:
    plain, joined, underscored = (
        doors.here("evaluate", finished.path, "--episodes", "3", *words)
        for words in (
            ("--env", "MemoryChain-bsuite", "--env-args", "memory_length", "7"),
            ("--env=MemoryChain-bsuite", "--env-args=memory_length", "7"),
            ("--env", "MemoryChain-bsuite", "--env_args", "memory_length", "7"),
        )
    )
    assert plain.stderr == joined.stderr == underscored.stderr
    assert plain.stdout == joined.stdout == underscored.stdout


@pytest.mark.parametrize("algo", ["dqn", "ppo", "iql"])
def test_the_help_has_every_flag_that_is_accepted(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main([algo, "--help"])
    words = set(re.findall(r"--[\w.-]*\w", capsys.readouterr().out))
    known = flags_of(parse([algo]).config)
    assert {"--members", "--draw-seed"} <= set(known)
    assert [flag for flag in known if flag not in words] == []


# --- flags that are given twice ---------------------------------------------------------------------------------

REQUIRED = {"collect": ["--transitions", "9", "--out", "x.npz"], "publish": ["--out", "x"]}
TWICE = [
    ("train", "--env", "Acrobot-v1", "CartPole-v1"),
    ("train", "--seeds", "3", "4"),
    ("train", "--pbt", "2000", "3000"),
    ("train", "--env-args", "gravity 9", "gravity 8"),
    ("train", "--resume", "a", "b"),
    ("train", "--config", "a", "b"),
    ("train", "--process-id", "0", "1"),
    ("evaluate", "--step", "latest", "best"),
    ("play", "--out", "a.gif", "b.gif"),
    ("verify", "--member", "0", "1"),
    ("collect", "--random", "0.1", "0.2"),
    ("report", "--csv", "a.csv", "b.csv"),
    ("export", "--format", "onnx", "numpy"),
    ("publish", "--episodes", "3", "4"),
]


@pytest.mark.parametrize(("door", "flag", "first", "second"), TWICE)
def test_a_flag_given_twice_is_refused_with_both_values(
    door: str, flag: str, first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = [] if door == "train" else ["run"]
    said = refusal(
        DOORS[door],
        *run,
        *REQUIRED.get(door, []),
        flag,
        *first.split(),
        f"{flag}={second.split()[0]}",
        *second.split()[1:],
    )
    assert said == f"{flag} is given twice, as {first!r} and as {second!r}; give it once"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--quiet --quiet", "--quiet is given twice; give it once"),
        ("--agent.double --agent.no-double", "--agent.double and --agent.no-double contradict each other"),
        ("--lr 1e-3 --agent.lr 1e-4", "--agent.lr is given twice, as '1e-3' and as '1e-4'"),
        ("--env-args gravity 9 gravity 8", "--env-args names gravity twice, as '9' and as '8'"),
        ("--halving factor=2 factor=3", "halving names factor twice"),
    ],
)
def test_what_contradicts_itself_is_refused(args: str, said: str) -> None:
    assert said in refusal(parse, *args.split())


def test_a_shortened_flag_given_twice_is_refused(tmp_path: Path) -> None:
    assert "--episodes is given twice" in refusal(evaluate.main, "run", "--epi", "3", "--episodes", "4")


def test_a_sweep_may_be_given_in_parts() -> None:
    parts = parse(["--sweep", "agent.lr=1e-4,1e-3", "--sweep=agent.tau=0.1,1"])
    assert parts.population == parse(["--sweep", "agent.lr=1e-4,1e-3", "agent.tau=0.1,1"]).population


def test_a_setting_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\nagent:\n  lr: 1e-3\n  lr: 1e-4\n")
    said = refusal(parse, "--config", str(tmp_path / "mine.yaml"))
    assert "lr" in said
    assert "twice" in said


# --- where things are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--run-dir gs://bucket/run", "--run_dir=s3://b/run", "--resume=gs://bucket/run"])
def test_a_url_is_refused_before_anything_slow(tmp_path: Path, words: str) -> None:
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", ["-m", "jaxrl.train", *words.split()])
    assert done.returncode == 2
    said = one_error_line(done)
    assert "://b" in said
    assert "is a URL" in said
    assert "mounted" in said
    assert [path.name for path in tmp_path.iterdir()] == ["jax"]


@pytest.mark.parametrize("flag", ["--init-from", "--config", "--run-dir", "--data"])
def test_no_flag_takes_a_url(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    algo = "bc" if flag == "--data" else "ppo"
    assert "gs://bucket/run is a URL" in refusal(train.main, algo, f"{flag}=gs://bucket/run", "--quiet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("door", [door for door in DOORS if door != "train"])
def test_every_front_door_refuses_a_url(door: str) -> None:
    assert "gs://bucket/run is a URL" in refusal(DOORS[door], "gs://bucket/run", *REQUIRED.get(door, []))


@pytest.mark.parametrize("where", ["gs://bucket/run", Path("gs://bucket/run")])
def test_the_library_refuses_a_url(where: Any) -> None:
    strategy = jaxrl.on_policy(counting(), jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=1, minibatches=1)
    for use in (
        lambda: jaxrl.Trainer(strategy, run_dir=where),
        lambda: jaxrl.Trainer(strategy, resume=where),
        lambda: jaxrl.load_policy(where),
        lambda: jaxrl.SessionConfig(run_dir=where),
        lambda: jaxrl.find_runs(where),
    ):
        with pytest.raises(SettingsError, match="is a URL"):
            use()


def test_a_tilde_is_the_home_directory(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = finished.path.parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    strategy = jaxrl.on_policy(counting(), jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=1, minibatches=1)
    assert jaxrl.Trainer(strategy, run_dir="~/x").config.run_dir == f"{home}/x"
    assert jaxrl.Trainer(strategy, resume="~/run").config.run_dir == f"{home}/run"
    assert jaxrl.SessionConfig(run_dir="~/x").run_dir == f"{home}/x"
    assert jaxrl.load_policy("~/run").facts["kept_as"] == "best"
    assert finished.path in jaxrl.find_runs("~")
    assert "holds a run already" in refusal(train.main, "--run-dir=~/run")
    assert evaluate.main(["~/run", "--episodes=3"]) == 0
    config = parse(["--run-dir=~/y", "--init-from", "~/run"]).config
    assert (config.run_dir, config.init_from) == (f"{home}/y", f"{home}/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("door", DOORS)
def test_a_name_too_long_for_the_system_is_refused(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    long = "x" * 300
    flags = ["--run-dir"] if door == "train" else []
    assert "File name too long" in refusal(DOORS[door], *flags, long, *REQUIRED.get(door, []))


@pytest.mark.parametrize("flag", ["--out", "--png", "--csv", "--json"])
def test_a_file_whose_name_is_too_long_is_refused(flag: str, finished: Finished, tmp_path: Path) -> None:
    assert "File name too long" in refusal(report.main, str(finished.path), flag, f"{tmp_path}/{'x' * 300}")


def test_a_taken_directory_is_refused_before_anything_slow(tmp_path: Path, finished: Finished) -> None:
    before = snapshot(finished.path)
    args = ["-m", "jaxrl.train", "ppo", f"--run_dir={finished.path}"]
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", args)
    assert done.returncode == 2
    assert one_error_line(done).startswith(f"error: {finished.path} holds a run already")
    assert snapshot(finished.path) == before


def test_what_is_printed_of_a_directory_stays_on_its_line(doors: Doors) -> None:
    """A newline and an escape, by which a terminal clears itself; the commands that come next still find the run."""
    name = "a\nb\x1b[2Jc"
    done = doors.here("train", *SMALL, "--max-opts", "20", "--run-dir", name)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert not any(line.startswith("b") for line in done.stdout.splitlines())
    (watch,) = [line.split(None, 1)[1] for line in done.stdout.splitlines() if line.startswith("  evaluate ")]
    words = subprocess.run(["bash", "-c", f"printf '%s|' {watch}"], capture_output=True, text=True, check=True).stdout
    assert words.split("|")[-2] == name
