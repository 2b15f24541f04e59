"""What a user can get wrong: refused in one line that says what came and what would do, before anything is done."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from front_doors import Doors, Finished, one_error_line, snapshot

from jaxrl import collect, evaluate, play, publish, train
from jaxrl.cli.config import parse
from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError
from jaxrl.training import loop, program

Refuse = Callable[..., str]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Return what `main(args)` says on refusing, once it is clear that it compiled and left nothing."""
    monkeypatch.chdir(tmp_path)
    for module in (loop, program):
        monkeypatch.setattr(module, "compile_all", lambda *args: pytest.fail("it began to compile"))

    def said(*args: str, main: Callable[..., int] = train.main) -> str:
        before = snapshot(tmp_path)
        with pytest.raises(JaxrlError) as refused:
            main(list(args))
        assert snapshot(tmp_path) == before
        assert refused.value.exit_code == 2
        return str(refused.value)

    return said


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "came", "hint"),
    [
        (["--env", "cartpole-v1"], "'cartpole-v1'", "CartPole-v1"),
        (["--env", "Zzzzzz"], "'Zzzzzz'", "known: "),
        (["dqm"], "'dqm'", "dqn"),
        (["--agent.lrr", "3"], "--agent.lrr", "--agent.lr"),
        (["--agent.lrr=3"], "--agent.lrr", "--agent.lr"),
        (["--no-agent.double"], "--no-agent.double", "--agent.no-double"),
        (["--confg", "x.yaml"], "--confg", "--config"),
        (["--agent.optimizer", "adm"], "'adm'", "adam"),
        (["--agent.activation", "rel"], "'rel'", "relu"),
        (["--agent.torso", "mpl"], "'mpl'", "mlp"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest(refuse: Refuse, args: list[str], came: str, hint: str) -> None:
    said = refuse(*args)
    assert came in said
    assert hint in said.split(came, 1)[1]


def test_continuous_actions_name_the_agents_that_take_them(refuse: Refuse) -> None:
    said = refuse("dqn", "--env", "Pendulum-v1")
    assert "Pendulum-v1" in said
    assert [agent for agent in ("ppo", "a2c", "reinforce") if agent not in said] == []


# --- numbers ----------------------------------------------------------------------------------------------------

AT_LEAST_ONE = "num-envs max-opts opt-interval keep buffer.capacity buffer.batch-size processor.n-step agent.features"
AT_LEAST_ZERO = "warmup eval-interval eval-episodes record-interval save-interval patience seed max-env-steps"


@pytest.mark.parametrize("flag", f"{AT_LEAST_ONE} {AT_LEAST_ZERO}".split())
def test_negative_count_is_refused_by_name(refuse: Refuse, flag: str) -> None:
    said = refuse(f"--{flag}", "-1")
    assert flag.split(".")[-1].replace("-", "_") in said
    assert "-1" in said


@pytest.mark.parametrize("flag", AT_LEAST_ONE.split())
def test_zero_is_refused_where_one_is_the_least(refuse: Refuse, flag: str) -> None:
    said = refuse(f"--{flag}", "0")
    assert flag.split(".")[-1].replace("-", "_") in said
    assert "at least 1" in said


@pytest.mark.parametrize("flag", ["num-envs", "max-opts", "warmup", "keep", "seed", "buffer.capacity"])
@pytest.mark.parametrize("value", ["1.5", "ten", "1e-3", "nan", ""])
def test_count_that_is_no_whole_number_is_refused(refuse: Refuse, flag: str, value: str) -> None:
    assert flag in refuse(f"--{flag}", value)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--agent.lr", "nan"], "agent.lr"),
        (["--agent.lr", "-1e-3"], "agent.lr"),
        (["--agent.epsilon-start", "1.5"], "agent.epsilon_start"),
        (["--agent.tau", "inf"], "agent.tau"),
        (["--processor.reward-clip", "-1"], "reward_clip"),
        (["--seed", "99999999999"], "seed"),
        (["--max-opts", "5000000000"], "max_opts"),
        (["--eval-episodes", "1048577"], "eval_episodes is 1048577; expected at most 1048576"),
    ],
)
def test_number_out_of_range_is_refused_by_name(refuse: Refuse, args: list[str], name: str) -> None:
    assert refuse(*args).startswith(name)


@pytest.mark.parametrize("args", [["--seed"], ["--config"], ["--resume"], ["--env"], ["--env="], ["--run-dir", ""]])
def test_flag_without_a_value_is_refused(refuse: Refuse, args: list[str]) -> None:
    assert args[0].rstrip("=") in refuse(*args)


@pytest.mark.parametrize("args", [["--resume="], ["--resume", ""], ["--config="]])
def test_empty_name_of_a_run_or_file_is_not_taken_for_none(refuse: Refuse, args: list[str]) -> None:
    assert "needs a value" in refuse(*args)


@pytest.mark.parametrize(
    "args",
    [
        ["--stop-reward", "nan"],
        ["--env-args", "max_steps_in_episode", "-5"],
        ["--env-args", "max_steps_in_episode", "nan"],
        ["--env-args", "max_steps_in_episode", "1e+300"],
        ["--env-args", "max_steps_in_episode", "2147483648.0"],
        ["--env-args", "max_steps_in_episode", "20.5"],
        ["--env-args", "gravity", "1e+39"],
        ["--env", "Asterix-MinAtar", "--env-args", "ramping", "2.0"],
        ["--env", "BernoulliBandit-misc", "--env-args", "max_steps_in_episode", "1e+30"],
    ],
)
def test_setting_that_only_tracing_or_the_environment_can_judge_is_refused(refuse: Refuse, args: list[str]) -> None:
    assert args[-1] in refuse(*args)


def test_word_that_belongs_to_nothing_is_refused(refuse: Refuse) -> None:
    assert "extra" in refuse("dqn", "extra")


# --- settings that do not go together ---------------------------------------------------------------------------


def test_nearest_opt_interval_is_taken(tmp_path: Path) -> None:
    for opt_interval in (2, 4, 8, 16):
        train.build("dqn", parse(["--num-envs", "8", "--opt-interval", str(opt_interval)]).config)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mesh", "member=4,envs=2"], "mesh has no axis 'member'"),
        (["--mesh", "members=4,envs=two"], "mesh envs is 'two'; expected a whole number"),
        (["--mesh", "members=2,envs=2"], "a single run has no members to divide devices among; set mesh to envs=2"),
        (["--mesh", "members=2,envs=2", "--seeds", "2", "--devices", "6"], "set mesh to members=2,envs=3"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_nearest(refuse: Refuse, args: list[str], said: str) -> None:
    assert said in refuse(*args)


@pytest.mark.parametrize("args", [["--stop-reward", "5"], ["--patience", "2"]])
def test_stopping_by_evaluations_without_any_is_refused(refuse: Refuse, args: list[str]) -> None:
    assert "eval_interval" in refuse(*args, "--eval-interval", "0")


# --- directories ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_directory_of_another_run_is_refused_with_the_way_on(refuse: Refuse, finished: Finished) -> None:
    before = snapshot(finished.path)
    said = refuse("--run-dir", str(finished.path))
    assert str(finished.path) in said
    assert "holds a run" in said
    assert f"--resume {finished.path}" in said
    assert snapshot(finished.path) == before


@pytest.mark.parametrize("name", ["notes", "notes/thoughts.txt"])
def test_directory_with_other_files_or_a_file_is_refused(refuse: Refuse, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thoughts.txt").write_text("mine")
    assert name in refuse("--run-dir", name)


def test_directory_that_cannot_be_made_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    said = refuse("--run-dir", "file/below/run")
    assert "file/below/run" in said
    assert "Not a directory" in said


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_where_the_system_makes_no_directories_nobody_is_told_that_one_is_missing(refuse: Refuse) -> None:
    assert refuse("--run-dir", "/proc/run").endswith("'/proc/run': no directory can be made there")


@pytest.mark.parametrize("kind", ["missing", "empty", "other", "file"])
@pytest.mark.parametrize("door", ["resume", "evaluate", "play"])
def test_what_is_no_run_is_refused(refuse: Refuse, tmp_path: Path, door: str, kind: str) -> None:
    target = tmp_path / kind
    if kind in ("empty", "other"):
        target.mkdir()
    if kind in ("other", "file"):
        (target / "notes.txt" if kind == "other" else target).write_text("mine")
    doors = {"evaluate": evaluate.main, "play": play.main}
    said = refuse(str(target), main=doors[door]) if door in doors else refuse("--resume", str(target))
    assert str(target) in said
    assert "no run directory" in said
    assert ("it is a file" in said) == (kind == "file")


def test_run_without_a_best_policy_is_refused(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "best")
    for main in (evaluate.main, play.main):
        with pytest.raises(NoCheckpointError, match="no best policy"):
            main([str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("main", "args", "said"),
    [
        (evaluate.main, ["--episodes", "0"], "--episodes"),
        (evaluate.main, ["--episodes", "many"], "--episodes"),
        (evaluate.main, ["--seed", "9" * 30], "--seed"),
        (evaluate.main, ["--episode-count", "3"], "--episode-count"),
        (evaluate.main, ["--env-args", "name", "X"], "no parameter can be called name"),
        (play.main, ["--seed", "-1"], "--seed"),
        (play.main, ["--max-steps", "0"], "--max-steps"),
        (play.main, ["--fps", "0"], "--fps"),
        (play.main, ["--out", "film.avi"], "ends with .gif or .mp4"),
        (play.main, ["--out", "film"], "ends with .gif"),
        (play.main, ["--out", "missing/film.gif"], "cannot write missing/film.gif"),
    ],
)
def test_bad_arguments_of_evaluate_and_play_are_refused(
    refuse: Refuse, finished: Finished, main: Callable[..., int], args: list[str], said: str
) -> None:
    assert said in refuse(str(finished.path), *args, main=main)


@pytest.mark.parametrize("main", [evaluate.main, play.main])
def test_evaluate_and_play_want_a_run(refuse: Refuse, main: Callable[..., int]) -> None:
    assert "run_dir" in refuse(main=main)


GATHER = ["--transitions", "64", "--out"]


@pytest.mark.parametrize(
    ("main", "args", "said"),
    [
        (evaluate.main, ["--episodes", "99999999999"], "--episodes is 99999999999; expected at most 1048576"),
        (publish.main, ["--out", "hub", "--episodes", "1048577"], "--episodes is 1048577; expected at most 1048576"),
        (collect.main, [*GATHER, "nowhere/metrics.jsonl"], "lies in the run nowhere, which is only read"),
        (collect.main, [*GATHER, "missing/x.npz"], "cannot write missing/x.npz: No such file"),
        (collect.main, [*GATHER, "."], "cannot write .: Is a directory"),
        (collect.main, [*GATHER, ""], "cannot write .: Is a directory"),
        (collect.main, [*GATHER, "x.npz", "--num-envs", "99999999999"], "num_envs is 99999999999; expected at most"),
        (collect.main, [*GATHER, "x.npz", "--random", "1.5"], "random is 1.5"),
        (collect.main, [*GATHER, "x.npz", "--noise", "-1"], "noise is -1"),
        (collect.main, ["--transitions", "0", "--out", "x.npz"], "transitions is 0"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_run_is_read(
    refuse: Refuse, main: Callable[..., int], args: list[str], said: str
) -> None:
    assert said in refuse("nowhere", *args, main=main)


# --- files of settings ------------------------------------------------------------------------------------------

BOMB = (
    "[&a [x, x, x, x, x, x, x, x, x, x], "
    + ", ".join(f"&{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True))
    + "]"
)
"""Ten billion items in a few lines, for whoever writes them out."""


class _Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_env: 3", "num_envs"),
        ("agent:\n  lrr: 3", "agent.lr"),
        ("algo: dqm", "dqn"),
        ("env: CartPol-v1", "CartPole-v1"),
        ("3: 4", "unknown setting 3"),
    ],
)
def test_unknown_name_in_a_file_is_answered_with_the_nearest(
    refuse: Refuse, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert said in refuse("--config", "mine.yaml")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("num_envs: ten", "num_envs"),
        ("num_envs: 1.5", "num_envs"),
        ("num_envs: true", "num_envs"),
        ("num_envs: [1]", "num_envs"),
        ("num_envs: null", "num_envs"),
        ("max_opts: 1.0e-3", "max_opts"),
        ("env: 3", "env"),
        ("env: [CartPole-v1]", "env"),
        ("algo: [dqn]", "algo"),
        ("quiet: 1", "quiet"),
        ("agent: 3", "agent"),
        ("agent: null", "agent"),
        ("agent: [lr]", "agent"),
        ("agent:\n  lr: fast", "agent.lr"),
        ("agent:\n  lr: true", "agent.lr"),
        (f"agent:\n  lr: {10**400}", "agent.lr"),
        ("agent:\n  features: 16", "agent.features"),
        ("agent:\n  features: [[16]]", "agent.features"),
        ("env_args: [1]", "env_args"),
        ("run_dir: 3", "run_dir"),
        ("stop_reward: high", "stop_reward"),
        ("custom: 3", "custom"),
    ],
)
def test_value_of_another_type_in_a_file_is_refused_by_name(
    refuse: Refuse, tmp_path: Path, text: str, name: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said = refuse("--config", "mine.yaml")
    assert said.startswith(f"mine.yaml: {name} is ")
    assert "expected" in said


def test_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("agent:\n  lr: 1e-3\n  tau: 1\n")
    config = parse(["--config", str(tmp_path / "mine.yaml")]).config
    assert (config.agent.lr, config.agent.tau) == (1e-3, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- env\n- seed",
        "CartPole-v1",
        "env: [",
        "env: 'CartPole",
        "a: b: c",
        "\tenv: x",
        "env: *nothing",
        "? [a, b]\n: c",
        "seed: " + "9" * 5000,
        "env: " + "[" * 5000,
        "env: " + "{a: " * 5000,
        "!!python/object/apply:os.mkdir [made]",
        "env: !!python/object/apply:os.mkdir [made]",
        "env: !!python/name:os.system",
    ],
    ids=lambda text: text[:20],
)
def test_file_that_is_no_plain_settings_is_refused_by_name(refuse: Refuse, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert "mine.yaml" in refuse("--config", "mine.yaml")


def test_file_of_bytes_is_refused_and_never_executed(
    refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_bytes(pickle.dumps(_Payload()))
    assert "mine.yaml" in refuse("--config", "mine.yaml")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["env", "algo", "custom", "num_envs", "run_dir", "agent", "nothing"])
def test_file_that_would_fill_the_memory_is_refused_in_few_words(refuse: Refuse, tmp_path: Path, key: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"{key}: {BOMB}\n")
    assert len(refuse("--config", "mine.yaml")) < 500


@pytest.mark.parametrize(("name", "said"), [("missing.yaml", "No such file"), (".", "Is a directory")])
def test_file_that_cannot_be_read_is_refused(refuse: Refuse, name: str, said: str) -> None:
    assert said in refuse("--config", name)


def test_settings_of_a_stranger_that_the_environment_cannot_hold_are_refused(
    finished: Finished, tmp_path: Path
) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("env_args: {}", "env_args: {max_steps_in_episode: 1.0e+300}"))
    before = snapshot(tmp_path)
    with pytest.raises(SettingsError, match=r"max_steps_in_episode is 1e\+300; expected a whole number"):
        train.main(["--resume", str(tmp_path / "run"), "--max-opts", "80"])
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_fewer_optimisation_steps_than_were_made_are_refused(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.path, tmp_path / "run"))
    before = snapshot(run)
    with pytest.raises(SettingsError, match=r"max_opts is 59, but .* has made 60 optimisation steps") as refused:
        train.main(["--resume", str(run), "--max-opts", "59"])
    assert refused.value.exit_code == 2
    after = snapshot(run)
    assert {name: entry for name, entry in after.items() if name != ".lock"} == {
        name: entry for name, entry in before.items() if name != ".lock"
    }
    assert train.main(["--resume", str(run), "--max-opts", "60", "--quiet"]) == 0


# --- as a user sees it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        pytest.param("train", ["--env", "CartPol-v1"], "CartPole-v1", marks=pytest.mark.slow),
        ("train", ["--num-envs", "ten"], "--num-envs"),
        ("evaluate", ["nowhere"], "nowhere"),
        pytest.param("play", ["--frames", "3"], "--frames", marks=pytest.mark.slow),
    ],
)
def test_refusal_is_one_line_and_exit_code_2(doors: Doors, module: str, args: list[str], said: str) -> None:
    done = (doors.run if args[0] == "--env" else doors.here)(module, *args)  # that one is a real process
    assert done.returncode == 2
    assert said in one_error_line(done)
    assert list(doors.cwd.iterdir()) == []
