"""The command line does what was typed; nothing that was typed is dropped or overruled."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SMALL, Cli, Finished, one_error_line
from test_first_seconds import run_with_fake_jax
from toys_envs import counting

import jaxrl
from jaxrl import evaluate, train
from jaxrl.cli import opening
from jaxrl.cli.config import parse
from jaxrl.errors import RunDirTakenError, SettingsError

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


def test_a_sweep_may_be_given_in_parts() -> None:
    parts = parse(["--sweep", "agent.lr=1e-4,1e-3", "--sweep=agent.tau=0.1,1"])
    assert parts.population == parse(["--sweep", "agent.lr=1e-4,1e-3", "agent.tau=0.1,1"]).population


@pytest.mark.parametrize(
    ("args", "path", "value"),
    [
        ("--max-opts 1e4", "max_opts", 10_000),
        ("--max-opts=1_000", "max_opts", 1_000),
        ("--seed 3.0", "seed", 3),
        ("--agent.features 64,64", "agent.features", (64, 64)),
        ("--agent.features [64,32]", "agent.features", (64, 32)),
        ("--agent.features=64,32", "agent.features", (64, 32)),
        ("--agent.features 64 32", "agent.features", (64, 32)),
        ("--agent.features []", "agent.features", ()),
        ("--agent.lr 1e-3", "agent.lr", 1e-3),
        ("--agent.tau 1", "agent.tau", 1.0),
        ("--stop-reward -1e2", "stop_reward", -100.0),
        ("--actors 1e0", "actors", 1),
    ],
)
def test_a_number_is_read_as_people_write_it_also_in_a_file(
    args: str, path: str, value: object, tmp_path: Path
) -> None:
    found = attrgetter(path)
    assert repr(found(parse(args.split()).config)) == repr(value)
    _, written = args.replace("=", " ").split(" ", 1)
    section, _, name = path.rpartition(".")
    (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {written}" if section else f"{name}: {written}")
    assert repr(found(parse(["--config", f"{tmp_path}/mine.yaml"]).config)) == repr(value)


def test_lists_of_lists_are_parameters_of_an_environment_too() -> None:
    args = parse(["--env-args", "walls", "[[1, 2.5], [], [x, [true]]]", "rows", "[8,8]"]).config.env_args
    assert args == {"walls": [[1, 2.5], [], ["x", [True]]], "rows": [8, 8]}


def test_environments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--list-envs"])
    assert stop.value.code == 0
    *listed, last = capsys.readouterr().out.splitlines()
    assert {"CartPole-v1", "Pong-misc", *jaxrl.envs.memory.names()} <= {*listed}
    assert "memory:" not in last


def test_the_version_is_told_before_anything_slow_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        opening.greet(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jaxrl {jaxrl.__version__}\n"


@pytest.mark.parametrize("words", ["jaxrl --help", "jaxrl --version", "jaxrl train --version", "jaxrl.train --version"])
def test_a_page_for_a_reader_that_has_gone_ends_quietly(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run([sys.executable, "-m", *words.split()], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


# --- where things are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "said"), [("s3://b/run", "s3://b/run is a URL"), ("RUN", "RUN holds a run already")])
def test_where_no_run_can_begin_is_refused_before_anything_slow(
    where: str, said: str, tmp_path: Path, finished: Finished
) -> None:
    where, said = (text.replace("RUN", str(finished.path)) for text in (where, said))
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", ["-m", "jaxrl.train", "ppo", f"--run_dir={where}"])
    assert done.returncode == 2
    assert one_error_line(done).startswith(f"error: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["jax"]


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
    with pytest.raises(RunDirTakenError):
        train.main(["--run-dir=~/run"])
    assert evaluate.main(["~/run", "--episodes=3"]) == 0
    config = parse(["--run-dir=~/y", "--init-from", "~/run"]).config
    assert (config.run_dir, config.init_from) == (f"{home}/y", f"{home}/run")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_begun_again_under_the_settings_given(cli: Cli) -> None:
    """As by `start_over=True` in Python: also where nothing has begun yet, and under another seed."""
    args = (*SMALL, "--max-opts", "20", "--run-dir", "run")
    for seed in (3, 4):
        done = cli.here("train", *args, "--seed", seed, "--start-over")
        assert done.returncode == 0, done.stderr
    (discarded,) = (cli.cwd / "run").glob("discarded-*")
    seeds = [yaml.safe_load((path / "config.yaml").read_text())["seed"] for path in (discarded, cli.cwd / "run")]
    assert seeds == [3, 4]


def test_a_directory_to_begin_again_may_be_named_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run_dir: mine")
    request = parse(["--config", f"{tmp_path}/mine.yaml", "--start-over"])
    assert (request.start_over, request.config.run_dir) == (True, "mine")
    with pytest.raises(SettingsError, match="--start-over needs the run to begin again"):
        parse(["--start-over"])


def test_more_devices_than_a_cpu_is_divided_into_are_missing(cli: Cli) -> None:
    line = one_error_line(cli.run("train", *SMALL, "--devices", "20000", "--quiet"))
    assert "devices is 20000, but JAX has 1 here; set devices to 1" in line


def test_what_is_printed_of_a_directory_stays_on_its_line(cli: Cli) -> None:
    """A newline and an escape, by which a terminal clears itself; the commands that come next still find the run."""
    name = "a\nb\x1b[2Jc"
    at = SMALL.index("--record-interval")
    done = cli.here("train", *SMALL[:at], *SMALL[at + 2 :], "--max-opts=20", "--gamma=0.99", "--run-dir", name)
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
    # There are 32 environment steps for each optimisation step.
    assert parse(["ppo", "--total-timesteps", "1e6"]).config.max_opts * 32 > 1_000_000
    assert parse(["ppo", "--total-timesteps", "1e6", "--max-opts", "160"]).config.max_opts == 160


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


def test_verify_says_what_it_has_looked_at(cli: Cli, finished: Finished) -> None:
    *checkpoints, best, logs = cli.here("verify", finished.path).stdout.splitlines()
    assert [line.split()[:2] for line in checkpoints] == [["40", "ok"], ["60", "ok"]]
    assert re.fullmatch(r"best (30|60) ok [0-9a-f]{64}", best)
    assert logs == "logs ok metrics.jsonl eval_episodes.jsonl"
    copy = Path(shutil.copytree(finished.path, cli.cwd / "copy"))
    shutil.rmtree(copy / "best")
    with open(copy / "metrics.jsonl", "a") as log:
        log.write("no row\n")
    done = cli.here("verify", copy)
    assert done.returncode == 6
    assert done.stdout.splitlines() == [*checkpoints, "best none"]
    assert "metrics.jsonl" in done.stderr
    assert re.search("best: the policy with the best score, .*, is gone", done.stderr)


@pytest.mark.parametrize(
    ("driven", "said"),
    [
        ("", "Trainer(strategy, resume='RUN').train(); load_policy('RUN', strategy=strategy)"),
        ("driven: 1\n", "Session"),
    ],
)
def test_a_run_of_an_agent_made_in_python_says_how_to_go_on(driven: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"algo: kl_ppo\ncustom: [agent]\n{driven}")
    with pytest.raises(SettingsError) as refused:
        parse(["--resume", str(tmp_path)])
    line = str(refused.value)
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
    with pytest.raises(SettingsError, match=r"^unknown environment 'inventory:make'; give --env inventory:make: "):
        evaluate.main([str(run), "--episodes", "3"])


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
def test_a_command_calls_itself_as_it_was_called(begin: list[str], called: str, cli: Cli) -> None:
    (cli.cwd / "bin").mkdir()
    (cli.cwd / "bin" / "jaxrl").write_text("from jaxrl.__main__ import main\nmain()\n")
    done = subprocess.run([sys.executable, *begin, "--help"], cwd=cli.cwd, capture_output=True, text=True, check=True)
    shown = " ".join(done.stdout.split())
    assert shown.startswith(f"usage: {called} [-h]")
    assert f"Example: {called} runs/cartpole" in shown


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["dqn", "--agent.n-step", "3"], "agent.n_step"),
        (["dqn", "--agent.v-max=3", "--agent.atoms", "7"], "agent.atoms, agent.v_max"),
        (["sac", "--agent.v-min", "-1", "--agent.critic-loss", "hl_gauss"], "agent.critic_loss, agent.v_min"),
        (["sac", "--env", "Pendulum-v1", "--agent.drop-quantiles", "3"], "agent.drop_quantiles"),
        (["dqn", "--agent.munchausen-temperature", "0.1"], "agent.munchausen_temperature"),
        (["dqn", "--buffer.alpha", "0.5", "--buffer.beta=1"], "buffer.alpha, buffer.beta"),
        (["dqn", "--buffer.ends", "0.5"], "buffer.ends"),
        (["rainbow", "--agent.loss", "huber"], "agent.loss"),
        (["crossq", "--env", "Pendulum-v1", "--agent.tau", "0.5"], "agent.tau"),
        (["ddpg", "--env", "Pendulum-v1", "--agent.target-noise-clip", "0.1"], "agent.target_noise_clip"),
        (["ppo", "--agent.c-clip", "0.5"], "agent.c_clip"),
        (["sac", "--env", "Pendulum-v1", "--agent.cql-actions", "20"], "agent.cql_actions"),
        (["dqn", "--demo-share", "0.25"], "demo_share"),
        (["ppo", "--agent.critic-core", "none", "--agent.core-layers=2"], "agent.core_layers, agent.critic_core"),
        (["dqn", "--send", "2", "--max-lag", "0", "--actor-engine", "threads"], "actor_engine, max_lag, send"),
    ],
)
def test_a_flag_that_nothing_reads_is_noted(args: list[str], names: str) -> None:
    note = parse(args).notes[-1]
    assert note.startswith(f"nothing reads {names} under these settings")
    assert ("processor.n_step" in note) == ("n_step" in names)
    used = {
        "n_step": ["--agent.core", "gru"],
        "atoms": ["--agent.values", "c51"],
        "v_min": ["--agent.atoms", "11"],
        "drop_quantiles": ["--agent.quantiles", "25"],
        "munchausen": ["--agent.munchausen", "0.9"],
        "alpha": ["--buffer.prioritised"],
        "ends": ["--buffer.compact"],
        "c_clip": ["--agent.rho-clip", "1"],
        "cql_actions": ["--agent.cql", "1"],
        "demo_share": ["--demos", "shown.npz"],
        "critic_core": ["--agent.core", "gru"],
        "send": ["--env", "gymnasium:CartPole-v1"],
        "loss": ["--agent.values", "expected"],
        "tau": ["--agent.target-network", "--agent.no-joint-batch"],
        "target_noise_clip": ["--agent.target-noise", "0.2"],
    }
    own = next(flags for name, flags in used.items() if name in names)
    swept = ["--sweep", "buffer.prioritised=False,True", "agent.munchausen=0,0.9"]
    for more in (own, swept):
        assert not [note for note in parse([*args, *more]).notes if note.startswith("nothing reads")]


@pytest.mark.parametrize(
    ("args", "switch", "names"),
    [
        (["sac", "--agent.target-entropy=1", "--agent.temperature-lr=1e-3"], "--agent.no-learn-temperature",
         "agent.target_entropy, agent.temperature_lr"),
        (["dqn", "--agent.epsilon-start=0.7"], "--agent.epsilon-decay=0", "agent.epsilon_start"),
        (["dqn", "--agent.no-double"], "--agent.munchausen=0.9", "agent.double"),
        (["dqn", "--buffer.prioritised", "--buffer.beta=1"], "--buffer.alpha=0", "buffer.beta"),
    ],
)  # fmt: skip
def test_a_flag_that_another_one_turns_off_is_noted(args: list[str], switch: str, names: str) -> None:
    assert parse([*args, switch]).notes[-1].startswith(f"nothing reads {names} under these settings")
    assert not [note for note in parse(args).notes if note.startswith("nothing reads")]


def test_a_window_is_noted_beside_a_core_without_one() -> None:
    notes = lambda core: parse(["ppo", "--agent.core", core, "--agent.core-window", "9"]).notes
    assert notes("gru")[-1].startswith("nothing reads agent.core_window under these settings")
    assert not [note for note in notes("trxl") if note.startswith("nothing reads")]


@pytest.mark.parametrize(
    "where",
    [["--env", "gymnasium:CartPole-v1"], ["--env", "envpool:CartPole-v1"], ["--actors", "2"]],
    ids=["gymnasium", "envpool", "actors"],
)
def test_staggering_is_noted_where_environments_are_on_the_host(where: list[str]) -> None:
    assert "nothing reads stagger under these settings" in parse(["ppo", *where, "--stagger"]).notes
    for args in ([*where], [*where, "--max-lag", "0"], ["--stagger"]):
        assert not [note for note in parse(["ppo", *args]).notes if note.startswith("nothing reads")]
