"""Environments of a user's own by name, arguments of any type, and evaluation in another environment."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from toys_envs import forget_envs

import jaxrl
from jaxrl import evaluate, play, train, verify
from jaxrl.cli.outside import admit
from jaxrl.errors import SettingsError

LEAVES = """
import sys

def make():
    sys.exit(0)

def make_later():
    return make_walk()._replace(step=lambda state, action, key: sys.exit(0))
"""
"""Functions that end the process, added to those of `CODE`."""
CODE = """
import jax.numpy as jnp
import jaxrl

CALLS = []


def make_walk(length=5, reward=1.0, noisy=False, sizes=(), title=""):
    CALLS.append((length, reward, noisy, sizes, title))

    def step(state, action, key):
        state = state + 1
        return state, jaxrl.TimeStep(jnp.full(2, state, jnp.float32), reward, state >= length)

    spec = jaxrl.EnvSpec("walk", jaxrl.Box(0.0, 100.0, (2,)), jaxrl.Discrete(2))
    return jaxrl.Env(spec, lambda key: (jnp.int32(0), jnp.zeros(2)), step)


def make_gym(**limits):
    import gymnasium

    return gymnasium.make("CartPole-v1", **limits)


def make_wrapped(limit):
    from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

    return RecordEpisodeStatistics(TimeLimit(make_gym().unwrapped, int(limit)))


def make_endless():
    return make_gym().unwrapped


def make_nothing():
    return 3


not_callable = 3
"""
REGISTERED = """
import jaxrl
from walks_of_mine.envs import make_walk

jaxrl.register_env("Walk", make_walk)
"""
GYM = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Mine(CartPoleEnv):
    pass


gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=20)
"""
SMALL = (
    *("ppo", "--num-envs", "2", "--rollout", "8", "--epochs", "1", "--minibatches", "1", "--agent.features", "4"),
    *("--eval-interval", "4", "--eval-episodes", "2", "--save-interval", "2", "--max-opts", "4"),
)
WALK = "walks_of_mine.envs:make_walk"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's package in the working directory; nothing of it stays known after a test."""
    (tmp_path / "walks_of_mine").mkdir()
    (tmp_path / "walks_of_mine" / "__init__.py").touch()
    (tmp_path / "walks_of_mine" / "envs.py").write_text(CODE)
    (tmp_path / "walks_of_mine" / "registered.py").write_text(REGISTERED)
    (tmp_path / "walks_of_mine" / "gyms.py").write_text(GYM)
    (tmp_path / "walks_of_mine" / "broken.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "walks_of_mine" / "lacking.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "walks_of_mine" / "script.py").write_text("import sys\ndef make(): pass\nsys.exit(0)")
    (tmp_path / "walks_of_mine" / "leaves.py").write_text(f"{CODE}{LEAVES}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    """Do as a new process would that has imported nothing of the user's."""
    for name in [name for name in sys.modules if name.startswith("walks_of_mine")]:
        del sys.modules[name]
    forget_envs("")


def test_a_function_named_on_the_command_line_is_trained_in(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("length", "7", "reward", "1e-1", "noisy", "true", "sizes", "[8, 9.5, x]", "title", "two words")
    assert train.main([*SMALL, "--env", WALK, "--env-args", *args, "--run-dir", "run"]) == 0
    told = capsys.readouterr().out
    assert sys.modules["walks_of_mine.envs"].CALLS[-1] == (7, 0.1, True, [8, 9.5, "x"], "two words")
    assert f"jaxrl.train --resume run --env {WALK} --max-opts 8" in told
    assert f"jaxrl.evaluate run --env {WALK}" in told
    forget()

    # A new process: nothing is imported unless it is named again.
    for command in (
        lambda: train.main(["--resume", "run", "--max-opts", "8"]),
        lambda: evaluate.main(["run"]),
        lambda: play.main(["run"]),
    ):
        with pytest.raises(SettingsError, match="imported only where you name it"):
            command()
    # What needs no environment is checked without it, and the run is not called damaged.
    assert verify.main(["run"]) == 0
    checked = capsys.readouterr()
    assert "4 ok" in checked.out
    assert re.match(r"run cannot be rebuilt here, so that checksums and logs are checked, .*give --env", checked.err)
    with pytest.raises(SettingsError, match="--replay: run cannot be rebuilt here"):
        verify.main(["run", "--replay"])
    assert "walks_of_mine.envs" not in sys.modules

    # Named again, it has the parameters of the training, less those that are given.
    assert evaluate.main(["run", "--env", WALK, "--env-args", "length", "3", "--episodes", "2"]) == 0
    told = capsys.readouterr().out
    assert "return 0.3 " in told
    assert "length 3," in told
    assert sys.modules["walks_of_mine.envs"].CALLS[-1] == (3, 0.1, True, [8, 9.5, "x"], "two words")
    capsys.readouterr()
    assert verify.main(["run", "--env", WALK, "--replay"]) == 0
    checked = capsys.readouterr()
    assert ("2 -> 4 bit-equal" in checked.out, checked.err) == (True, "")
    with pytest.raises(SettingsError, match=r"under other settings \(env: .*:make_walk -> CartPole-v1\)"):
        verify.main(["run", "--env", "CartPole-v1"])
    with pytest.raises(SettingsError, match=r"max_opts is 2, but .*/run has made 4"):  # and the environment is made
        train.main(["--resume", "run", "--env", WALK, "--max-opts", "2"])
    assert sys.modules["walks_of_mine.envs"].CALLS[-1] == (7, 0.1, True, [8, 9.5, "x"], "two words")


def test_a_run_of_a_name_that_python_registered_goes_on_by_the_function_registered_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    importlib.import_module("walks_of_mine.registered")
    assert train.main([*SMALL, "--env", "Walk", "--env-args", "length", "3", "--run-dir", "run"]) == 0
    forget()
    capsys.readouterr()
    assert verify.main(["run"]) == 0  # no damage: the checkpoint names it too
    assert "cannot be rebuilt here" in capsys.readouterr().err
    again = ["--env", "walks_of_mine.registered:make_walk"]
    assert verify.main(["run", "--replay", *again]) == 0
    assert evaluate.main(["run", "--episodes", "2", *again]) == 0
    assert "length 3," in capsys.readouterr().out
    assert train.main(["--resume", "run", "--max-opts", "8", *again]) == 0
    assert "evaluate run --env walks_of_mine.registered:make_walk" in capsys.readouterr().out
    assert yaml.safe_load(Path("run", "config.yaml").read_text())["env"] == "Walk"


def test_printed_commands_name_the_environment_of_evaluations_where_they_train_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A flag of another library is one that a person typed.
    assert train.main([*SMALL, "--env-id", WALK, "--eval-env", WALK, "--run-dir", "run"]) == 0
    told, more = capsys.readouterr().out, f"jaxrl.train --resume run --env {WALK} --eval-env {WALK} --max-opts 8\n"
    assert more in told
    assert f"jaxrl.evaluate run --env {WALK}\n" in told
    assert train.main(["--resume", "run", "--env", WALK, "--eval-env", WALK]) == 0
    told = capsys.readouterr().out
    assert told.startswith("nothing is left to train: ")
    assert told.endswith(more)


@pytest.mark.slow
def test_a_gymnasium_environment_of_ones_own_works_both_ways() -> None:
    quick = ("dqn", "--num-envs", "2", "--opt-interval", "2", "--warmup", "16", "--max-opts", "4", "--quiet")
    small = ("--buffer.capacity", "64", "--buffer.batch-size", "8", "--agent.features", "4", "--eval-episodes", "1")
    assert train.main([*quick, *small, "--env", "walks_of_mine.envs:make_gym", "--run-dir", "one"]) == 0
    named = "gymnasium:walks_of_mine.gyms:Mine-v0"
    assert train.main([*quick, *small, "--env", named, "--run-dir", "two"]) == 0
    assert yaml.safe_load(Path("two/config.yaml").read_text())["env"] == named
    assert evaluate.main(["two", "--env", named, "--episodes", "1"]) == 0
    forget()
    with pytest.raises(SettingsError, match="happens only where you name it"):
        evaluate.main(["two"])


def test_a_module_may_register_its_function_itself(package: Path) -> None:
    name = "walks_of_mine.itself:make_walk"
    (package / "walks_of_mine" / "itself.py").write_text(f"{CODE}\njaxrl.register_env({name!r}, make_walk)\n")
    admit(name)
    assert jaxrl.make_env(name).spec.name == "walk"


@pytest.mark.parametrize(
    ("function", "args", "limit"),
    [
        ("make_gym", {"max_episode_steps": 20_000}, 20_000),
        ("make_wrapped", {"limit": 20_000}, 20_000),
        ("make_endless", {}, None),
    ],
)
def test_evaluations_know_the_limit_of_a_gymnasium_environment_of_ones_own(
    function: str, args: dict[str, int], limit: int | None
) -> None:
    """Without a limit they would cut episodes after 10 000 steps."""
    name = f"walks_of_mine.envs:{function}"
    admit(name)
    assert jaxrl.make_env(name, **args).spec.time_limit == limit


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("walks_of_nobody.envs:make_walk", "there is no module walks_of_nobody; start where it lies"),
        ("walks_of_mine.env:make_walk", "there is no module walks_of_mine.env; start where it lies"),
        ("walks_of_mine.envs:make_wal", "has no function make_wal; did you mean make_walk?"),
        ("walks_of_mine.envs:not_callable", "has no function not_callable"),
        ("walks_of_mine.broken:make", "failed: RuntimeError: no licence"),
        ("walks_of_mine.lacking:make", "failed: No module named 'a_package_that_is_not_there'"),
        ("walks_of_mine.envs:make_nothing", "returned int; expected a jaxrl.Env, or an environment of Gymnasium"),
        ("walks_of_mine.script:make", "importing walks_of_mine.script failed: SystemExit: 0"),
        ("walks_of_mine.leaves:make", "failed with {}: SystemExit: 0"),
        ("walks_of_mine.leaves:make_later", "step raised SystemExit: 0"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(name: str, told: str) -> None:
    with pytest.raises(SettingsError) as raised:
        train.main([*SMALL, "--env", name, "--run-dir", "run"])
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("module", "inside"), [("stoa", False), ("envelope", True)])
def test_an_interface_that_is_not_installed_is_named_with_the_line_that_installs_it(
    module: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    code = f"def make():\n    import {module}\n" if inside else f"import {module}\n"
    Path("walks_of_mine", "others.py").write_text(code)
    with pytest.raises(SettingsError) as raised:
        train.main([*SMALL, "--env", "walks_of_mine.others:make", "--run-dir", "run"])
    assert f": pip install 'jaxrl[{module}]'" in str(raised.value)
    assert ("is for Python 3.12 or later" in str(raised.value)) == (module == "envelope" and sys.version_info < (3, 12))


def test_arguments_that_the_function_does_not_take_are_named() -> None:
    with pytest.raises(SettingsError, match="unexpected keyword argument 'lenth'"):
        train.main([*SMALL, "--env", WALK, "--env-args", "lenth", "3", "--run-dir", "run"])


@pytest.mark.slow
def test_arguments_of_any_type_come_from_a_file_too() -> None:
    wanted = {"length": 4, "reward": 0.5, "noisy": True, "sizes": [1, 2], "title": "text"}
    Path("settings.yaml").write_text(yaml.safe_dump({"algo": "ppo", "env_args": wanted}))
    assert train.main(["--config", "settings.yaml", *SMALL[1:], "--env", WALK, "--run-dir", "run"]) == 0
    assert sys.modules["walks_of_mine.envs"].CALLS[-1] == (4, 0.5, True, [1, 2], "text")
    assert yaml.safe_load(Path("run/config.yaml").read_text())["env_args"] == wanted


@pytest.mark.slow
def test_a_path_among_the_arguments_of_a_run_must_be_typed_again(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--env", WALK, "--env-args", "title", "/etc/passwd"]
    assert train.main([*SMALL, *args, "--run-dir", "run"]) == 0
    with pytest.raises(SettingsError, match="is the path '/etc/passwd'; name it again"):
        train.main(["--resume", "run", "--env", WALK, "--max-opts", "8"])
    assert train.main(["--resume", "run", *args, "--max-opts", "8"]) == 0
    with pytest.raises(SettingsError, match="is the path '/etc/passwd'; name it again"):
        evaluate.main(["run", "--env", WALK, "--episodes", "2"])
    assert evaluate.main(["run", *args, "--episodes", "2"]) == 0
    assert verify.main(["run", "--env", WALK]) == 0
    assert "is the path '/etc/passwd'; name it again" in capsys.readouterr().err
    assert verify.main(["run", *args]) == 0
    assert capsys.readouterr().err == ""


# --- evaluation elsewhere -------------------------------------------------------------------------------------------


def scores(run: str) -> list[float]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row["score"] for row in rows if row.get("kind") == "eval"]


@pytest.mark.slow
def test_the_policy_is_scored_in_the_environment_named_for_it() -> None:
    """Training pays 1 a step for 5 steps; evaluation with the same function 2 a step, or elsewhere for 3 steps."""
    assert train.main([*SMALL, "--env", WALK, "--eval-env-args", "reward", "2", "--run-dir", "one"]) == 0
    assert scores("one") == [10.0]
    other = ["--env", WALK, "--env-args", "length", "9", "--eval-env", WALK, "--eval-env-args", "length", "3"]
    assert train.main([*SMALL, *other, "--run-dir", "two"]) == 0
    assert scores("two") == [3.0]
    assert train.main(["--resume", "two", "--env", WALK, "--eval-env-args", "length", "4", "--max-opts", "8"]) == 0
    assert scores("two") == [3.0, 4.0]


@pytest.mark.slow
def test_a_score_of_other_evaluations_is_no_best_to_beat(tmp_path: Path) -> None:
    """Where evaluation changes on the way, the best score is reset, also after another resumption, or in a fork."""
    begun = ["--env", WALK, "--patience", "2"]
    assert train.main([*SMALL, *begun, "--eval-env-args", "reward", "9", "--run-dir", "run"]) == 0
    assert jaxrl.load_policy("run").facts["score"] == 45.0
    poorer = ["--env", WALK, "--eval-env-args", "reward", "1"]
    assert train.main(["--resume", "run", "--from-step", "4", "--run-dir", "fork", *poorer, "--max-opts", "8"]) == 0
    assert train.main(["--resume", "run", *poorer, "--eval-interval", "0", "--patience", "0", "--max-opts", "4"]) == 0
    assert train.main(["--resume", "run", "--env", WALK, "--max-opts", "8"]) == 0
    for run in ("run", "fork"):
        facts = json.loads(Path(run, "metadata.json").read_text())
        assert (facts["best_score"], facts["best_opt_steps"]) == (5.0, 8)
        assert jaxrl.load_policy(run).facts["score"] == 5.0
        assert "eval_env_args.reward: 9 -> 1): the best score is reset" in Path(run, "metrics.jsonl").read_text()
    assert train.main(["--resume", "run", "--env", WALK, "--eval-actions", "sampled", "--max-opts", "12"]) == 0
    assert json.loads(Path("run", "metadata.json").read_text())["best_opt_steps"] == 12


@pytest.mark.slow
def test_fixed_starts_are_the_same_each_time() -> None:
    """A policy that does not learn scores the same from the same starts, and otherwise not."""
    small = SMALL[: SMALL.index("--max-opts")]
    still = ["--env", "CartPole-v1", "--agent.lr", "0", "--max-opts", "12", "--quiet", "--no-confirm-best"]
    for starts, steady in (("fixed", True), ("fresh", False)):
        assert train.main([*small, *still, "--eval-starts", starts, "--run-dir", starts]) == 0
        assert len(scores(starts)) == 3
        assert (len(set(scores(starts))) == 1) is steady
    with pytest.raises(SettingsError, match="eval_starts is 'same'; expected fresh or fixed"):
        jaxrl.TrainerConfig(eval_starts="same").check()
