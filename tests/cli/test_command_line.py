"""The command line does what was typed, or says in one line why not; nothing that was typed is dropped or overruled."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from front_doors import SMALL, Doors, Finished, leaves, one_error_line, snapshot
from test_first_seconds import run_with_fake_jax
from toys_envs import counting

import jaxrl
from jaxrl import collect, doctor, evaluate, export, play, publish, report, train, verify
from jaxrl.cli.config import flags_of, parse
from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError

DOORS: dict[str, Callable[[list[str]], int]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "play": play.main,
    "verify": verify.main,
    "collect": collect.main,
    "report": report.main,
    "export": export.main,
    "publish": publish.main,
    "doctor": doctor.main,
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


@pytest.mark.slow
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

FIRST = {"train": ["--run-dir"], "doctor": ["--json"]}
"""The flag of a front door's directory or file, where it is not the first word."""
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
    ("doctor", "--json", "a.json", "b.json"),
]


@pytest.mark.parametrize(("door", "flag", "first", "second"), TWICE)
def test_a_flag_given_twice_is_refused_with_both_values(
    door: str, flag: str, first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = [] if door in FIRST else ["run"]
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
        ("dqn --algo ppo", "the algorithm is named twice, as dqn and by --algo ppo; name it once"),
        ("--no-quiet false", "unexpected argument 'false'"),
        ("--env-args name 1", "no parameter can be called name"),
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
    args = [*FIRST.get(door, []), "gs://bucket/run", *REQUIRED.get(door, [])]
    assert "gs://bucket/run is a URL" in refusal(DOORS[door], *args)


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
    assert "File name too long" in refusal(DOORS[door], *FIRST.get(door, []), long, *REQUIRED.get(door, []))


@pytest.mark.parametrize("flag", ["--out", "--png", "--csv", "--json"])
def test_a_file_whose_name_is_too_long_is_refused(flag: str, finished: Finished, tmp_path: Path) -> None:
    if flag == "--out":
        pytest.importorskip("plotly")  # without which there is no page
    assert "File name too long" in refusal(report.main, str(finished.path), flag, f"{tmp_path}/{'x' * 300}")


def test_a_taken_directory_is_refused_before_anything_slow(tmp_path: Path, finished: Finished) -> None:
    before = snapshot(finished.path)
    args = ["-m", "jaxrl.train", "ppo", f"--run_dir={finished.path}"]
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", args)
    assert done.returncode == 2
    assert one_error_line(done).startswith(f"error: {finished.path} holds a run already")
    assert snapshot(finished.path) == before


def test_a_directory_is_begun_again_under_the_settings_given(doors: Doors) -> None:
    """As by `start_over=True` in Python: also where nothing has begun yet, and under another seed."""
    args = (*SMALL, "--max-opts", "20", "--run-dir", "run")
    for seed in (3, 4):
        done = doors.here("train", *args, "--seed", seed, "--start-over")
        assert done.returncode == 0, done.stderr
    (discarded,) = (doors.cwd / "run").glob("discarded-*")
    seeds = [yaml.safe_load((path / "config.yaml").read_text())["seed"] for path in (discarded, doors.cwd / "run")]
    assert seeds == [3, 4]
    refused = doors.here("train", *args)
    assert refused.returncode == 2
    assert "begin again by --start-over" in one_error_line(refused)


def test_what_is_printed_of_a_directory_stays_on_its_line(doors: Doors) -> None:
    """A newline and an escape, by which a terminal clears itself; the commands that come next still find the run."""
    name = "a\nb\x1b[2Jc"
    at = SMALL.index("--record-interval")
    done = doors.here("train", *SMALL[:at], *SMALL[at + 2 :], "--max-opts=20", "--gamma=0.99", "--run-dir", name)
    assert done.returncode == 0, done.stderr
    told = ["--gamma 0.99 taken as --processor.discount 0.99", "the preset is for max_opts 5000; scaled to 20: record_"]
    assert [line for line in told if f"\n  {line}" not in done.stdout] == []
    assert "\x1b" not in done.stdout
    assert not any(line.startswith("b") for line in done.stdout.splitlines())
    (watch,) = [line.split(None, 1)[1] for line in done.stdout.splitlines() if line.startswith("  evaluate ")]
    words = subprocess.run(["bash", "-c", f"printf '%s|' {watch}"], capture_output=True, text=True, check=True).stdout
    assert words.split("|")[-2] == name


# --- the length of a preset -------------------------------------------------------------------------------------


def lengths(config: Any) -> tuple[int, ...]:
    agent = config.agent
    return agent.lr_decay, agent.epsilon_decay, config.eval_interval, config.record_interval


def test_what_a_preset_decays_and_when_it_evaluates_follows_the_length_that_is_asked_for() -> None:
    assert lengths(parse(["dqn"]).config) == (19_800, 5_000, 600, 1_000)
    assert lengths(parse(["dqn", "--max-opts", "1980"]).config) == (1_980, 500, 60, 100)
    assert lengths(parse(["dqn", "--max-opts", "39600"]).config) == (39_600, 10_000, 1_200, 2_000)
    (note,) = parse(["dqn", "--max-opts", "1980"]).notes
    assert note == (
        "the preset is for max_opts 19800; scaled to 1980: eval_interval 60, record_interval 100, "
        "agent.lr_decay 1980, agent.epsilon_decay 500"
    )
    chosen = ["--agent.lr-decay", "7", "--eval-interval=0", "--record-interval", "9"]
    assert lengths(parse(["dqn", "--max-opts", "1980", *chosen]).config) == (7, 500, 0, 9)


def test_a_length_in_environment_steps_counts_as_the_optimisation_steps_that_are_made_in_it() -> None:
    """PPO on CartPole learns 16 times from each rollout of 512 steps, DQN once every five steps after 1000."""
    ppo = parse(["ppo", "--max-env-steps", "51200"]).config
    assert (ppo.max_opts, ppo.agent.lr_decay, ppo.eval_interval) == (15_616, 1_600, 102)
    assert parse(["dqn", "--max-env-steps", "6000"]).config.agent.lr_decay == 1_000
    assert parse(["ppo", "--max-env-steps", "1e9"]).config.agent.lr_decay == 15_616  # which ends by max_opts
    assert parse(["ppo", "--total-timesteps", "5120000"]).config.agent.lr_decay == 160_000


def test_without_a_preset_of_that_length_nothing_follows(tmp_path: Path, finished: Finished) -> None:
    generic = parse(["dqn", "--env", "gymnasium:Nothing-v0", "--max-opts", "100"])
    assert generic.notes == ("generic settings: there is no preset for this environment",)
    assert generic.config.eval_interval == 1_000
    kept = parse(["--resume", str(finished.path), "--max-opts", "6000"])
    assert kept.notes == ()
    assert vars(kept.config) == {**vars(parse(["--resume", str(finished.path)]).config), "max_opts": 6_000}
    (tmp_path / "mine.yaml").write_text("max_opts: 1980\nagent:\n  lr_decay: 5\n")
    assert lengths(parse(["--config", str(tmp_path / "mine.yaml")]).config)[:3] == (5, 500, 60)


def test_a_search_goes_by_the_evaluations_that_the_preset_has() -> None:
    searched = ["ppo", "--sweep", "agent.lr=log_uniform(1e-4,1e-2)", "--members", "4", "--pbt", "2000"]
    assert parse([*searched, "--max-opts", "8000"]).config.eval_interval == 1_000


# --- what is said of a run --------------------------------------------------------------------------------------


def test_verify_says_what_it_has_looked_at(doors: Doors, finished: Finished) -> None:
    *checkpoints, best, logs = doors.here("verify", finished.path).stdout.splitlines()
    assert [line.split()[:2] for line in checkpoints] == [["40", "ok"], ["60", "ok"]]
    assert re.fullmatch(r"best (30|60) ok [0-9a-f]{64}", best)
    assert logs == "logs ok metrics.jsonl eval_episodes.jsonl"
    copy = Path(shutil.copytree(finished.path, doors.cwd / "copy"))
    shutil.rmtree(copy / "best")
    with open(copy / "metrics.jsonl", "a") as log:
        log.write("no row\n")
    done = doors.here("verify", copy)
    assert done.returncode == 6
    assert done.stdout.splitlines() == [*checkpoints, "best none"]
    assert "metrics.jsonl" in done.stderr


def test_evaluate_names_the_policy_that_was_asked_for(doors: Doors, finished: Finished) -> None:
    for step, said in (("60", "the saved policy"), ("latest", "the saved policy")):
        out = doors.here("evaluate", finished.path, "--episodes", "3", "--step", step).stdout
        assert f"of {said} of {finished.path}, after 60 optimisation steps, in Catch-bsuite\n" in out


def test_a_folder_that_is_no_run_is_not_refused_for_its_links(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib64").symlink_to("lib")
    assert "is no run directory: it has no config.yaml" in refusal(evaluate.main, str(tmp_path))


def test_a_run_of_a_newer_version_is_not_called_damaged(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.path, tmp_path / "run"))
    for file in (*run.glob("checkpoints/*/manifest.json"), *run.glob("best/*/manifest.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
        (file.parent / "files.json").unlink()
    before = snapshot(run)
    for use in (
        lambda: jaxrl.load_policy(run),
        lambda: jaxrl.load_policy(run, step="latest"),
        lambda: train.main(["--resume", str(run), "--quiet", "--max-opts", "80"]),
    ):
        with pytest.raises(NoCheckpointError, match=r"cannot be read: it was written by .* newer version") as no:
            use()
        assert "damaged" not in str(no.value)
    assert {**snapshot(run), ".lock": None} == {**before, ".lock": None}
    (run / "metadata.json").write_text(json.dumps({**json.loads((run / "metadata.json").read_text()), "format": 2}))
    assert "was written by a newer version of jaxrl" in refusal(evaluate.main, str(run))


def test_a_finished_run_that_has_lost_something_is_mended_by_going_on(doors: Doors, finished: Finished) -> None:
    copy = Path(shutil.copytree(finished.path, doors.cwd / "copy"))
    shutil.rmtree(copy / "checkpoints" / "60")
    done = doors.here("train", "--resume", copy)
    assert (done.returncode, "resumed at 40" in done.stdout) == (0, True)
    assert leaves(copy, 60) == leaves(finished.path, 60)


@pytest.mark.parametrize(
    ("driven", "said"),
    [
        ("", "Trainer(strategy, resume='RUN').train(); load_policy('RUN', strategy=strategy)"),
        ("driven: 1\n", "Session"),
    ],
)
def test_a_run_of_an_agent_made_in_python_says_how_to_go_on(driven: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"algo: kl_ppo\ncustom: [agent]\n{driven}")
    line = refusal(parse, "--resume", str(tmp_path))
    assert line.startswith(f"{tmp_path} has parts that were made in Python (agent); go on in Python by ")
    assert said.replace("RUN", str(tmp_path)) in line


def test_an_environment_of_ones_own_is_answered_with_the_flag_first(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.path, tmp_path / "run"))
    for file in run.glob("best/*/manifest.json"):
        manifest = json.loads(file.read_text())
        manifest["facts"]["settings"]["env"] = "inventory:make"
        sealed = {name: value for name, value in manifest.items() if name != "sha256"}
        sealed["sha256"] = hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()
        file.write_text(json.dumps(sealed))
        (file.parent / "files.json").unlink()
    said = refusal(evaluate.main, str(run), "--episodes", "3")
    assert said.startswith("unknown environment 'inventory:make'; give --env inventory:make: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "called"),
    [
        (["-m", "jaxrl.evaluate"], "python -m jaxrl.evaluate"),
        (["-m", "jaxrl", "evaluate"], "python -m jaxrl evaluate"),
        (["bin/jaxrl", "evaluate"], "jaxrl evaluate"),
    ],
    ids=["module", "package", "script"],
)
def test_a_command_calls_itself_as_it_was_called(begin: list[str], called: str, doors: Doors) -> None:
    (doors.cwd / "bin").mkdir()
    (doors.cwd / "bin" / "jaxrl").write_text("from jaxrl.__main__ import main\nmain()\n")
    done = subprocess.run([sys.executable, *begin, "--help"], cwd=doors.cwd, capture_output=True, text=True, check=True)
    shown = " ".join(done.stdout.split())
    assert shown.startswith(f"usage: {called} [-h]")
    assert f"Example: {called} runs/cartpole" in shown
