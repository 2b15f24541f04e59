"""What comes from other libraries, or is written as people write it, is understood or answered with the name for it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from toys_envs import counting

import jaxrl
from jaxrl import train
from jaxrl.cli import opening
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError, close_matches, suggest
from jaxrl.training import loop, memory


def refusal(action: Callable[[], Any]) -> str:
    """Return the one line in which `action` is refused."""
    with pytest.raises(SettingsError) as refused:
        action()
    line = str(refused.value)
    assert "\n" not in line
    return line


# --- names of other libraries -----------------------------------------------------------------------------------

FLAGS = {
    "--batch-size=3 --n-steps 3": "--processor.n-step?",
    "sac --lr 1e-3": "--agent.lr?",
    "td3 --learning-rate 1e-3": "--agent.lr?",
    "--max-steps 100": "--max-env-steps? (the run ends where max_opts",
    "--total-frames 100": "--max-env-steps?",
    "ppo --n-steps 3": "--rollout?",
    "ppo --batch-size 3": "--minibatches?",
    "ppo --entropy-coef 1": "--agent.ent-coef?",
    "ppo --agent.entropy 1": "--agent.ent-coef?",
    "sac --ent-coef 1": "--agent.temperature?",
    "ppo --value-coef 1": "--agent.vf-coef?",
    "ppo --agent.value 1": "--agent.vf-coef?",
    "sac --agent.critics 3": "--agent.num-critics?",
    "--clip-range 1": "--agent.clip-eps, which this algorithm does not have",
    "--algorithm ppo": "the algorithm is the first argument",
    "--track": "--recorders? (names, as in console tensorboard wandb",
    "--wandb": "--recorders?",
    "--tensorboard": "--recorders?",
    "--render": "jaxrl play RUN_DIR",
    "--device gpu": "JAX_PLATFORMS",
    "--num-env 3": "--num-envs?",
    "--qwertz 3": "--help shows all flags",
}


@pytest.mark.parametrize("args", FLAGS)
def test_a_flag_of_another_library_is_answered_with_ours(args: str) -> None:
    said = refusal(lambda: parse(args.split()))
    assert FLAGS[args] in said
    assert len(said) < 200


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        ("dqn --gamma 0.9", "--processor.discount 0.9"),
        ("ppo --discount_factor=0.9", "--processor.discount 0.9"),
        ("ppo --lr 2e-3", "--agent.lr 2e-3"),
        ("dqn --learning-rate=2e-3", "--agent.lr 2e-3"),
        ("dqn --batch-size 64", "--buffer.batch-size 64"),
        ("dqn --buffer_size 999", "--buffer.capacity 999"),
        ("ppo --n-envs 16", "--num-envs 16"),
        ("ppo --total-timesteps 2048", "--max-env-steps 2048"),
        ("ppo --TOTAL_TIMESTEPS=2048", "--max-env-steps 2048"),
        ("ppo --env-id Acrobot-v1", "--env Acrobot-v1"),
        ("ppo --clip-range 0.1", "--agent.clip-eps 0.1"),
        ("ppo --gae-lambda 0.9", "--agent.gae-lambda 0.9"),
    ],
)
def test_a_flag_of_another_library_that_means_just_ours_is_taken_for_it(args: str, ours: str) -> None:
    found, same = parse(args.split()), parse([args.split()[0], *ours.split()])
    theirs = args.split()[1].partition("=")[0].replace("_", "-")
    assert found.notes[0] == f"{theirs} {ours.split()[1]} taken as {ours}"
    unlike = {"max_opts"} if "TIMESTEPS" in args.upper() else set()
    assert {k: v for k, v in vars(found.config).items() if k not in unlike} == {
        k: v for k, v in vars(same.config).items() if k not in unlike
    }


def test_a_length_in_environment_steps_is_not_cut_by_the_one_in_optimisation_steps() -> None:
    """PPO on CartPole: 512 environment steps and 16 optimisation steps an iteration, of which a preset has 976."""
    config = parse(["ppo", "--total-timesteps", "1e6"]).config
    assert config.max_opts * 32 > 1_000_000  # 32 environment steps for each optimisation step
    assert parse(["ppo", "--total-timesteps", "1e6", "--max-opts", "160"]).config.max_opts == 160


def test_a_setting_of_another_library_in_a_file_is_answered_with_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("agent:\n  learning_rate: 1")
    assert refusal(lambda: parse(["--config", f"{tmp_path}/mine.yaml"])).endswith("did you mean lr?")


@pytest.mark.parametrize(
    ("word", "known", "close"),
    [
        ("render", ["send", "env"], []),
        ("track", ["max-rollbacks", "actors"], []),
        ("cartpole", ["CartPole-v1", "Catch-bsuite"], ["CartPole-v1"]),
        ("max_step", ["max_steps_in_episode", "gravity"], ["max_steps_in_episode"]),
        ("hubber", ["huber", "squared"], ["huber"]),
        ("Adam", ["adam", "adamw", "radam"], ["adam", "adamw", "radam"]),
    ],
)
def test_only_what_looks_like_a_word_is_guessed(word: str, known: list[str], close: list[str]) -> None:
    assert close_matches(word, known) == close


def test_a_long_list_of_names_is_cut() -> None:
    said = suggest("qqq", [f"name-{i:02}" for i in range(40)])
    assert "name-00" in said
    assert said.endswith("and 28 more")


def test_two_algorithms_are_answered_in_one_short_line() -> None:
    said = refusal(lambda: parse(["dqn", "ppo"]))
    assert "'ppo'" in said
    assert "the algorithm comes first" in said
    assert len(said) < 120


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CliffWalking-v1", "gymnasium:CliffWalking-v1"),
        ("HalfCheetah", "gymnasium:HalfCheetah-v5"),
        ("ALE/Breakout-v5", "Breakout-MinAtar"),
        ("qwertz:ant", "gymnasium:Ant-v5"),
        ("qwertz:qwertz", "there is no qwertz: here"),
        ("qwertz", "--list-envs"),
    ],
)
def test_an_environment_that_gymnasium_has_is_named(name: str, said: str) -> None:
    pytest.importorskip("gymnasium")
    assert said in refusal(lambda: jaxrl.make_env(name))


def test_environments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--list-envs"])
    assert stop.value.code == 0
    assert {"CartPole-v1", "Pong-misc"} <= set(capsys.readouterr().out.splitlines())


def test_the_version_is_told_before_anything_slow_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        opening.greet(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jaxrl {jaxrl.__version__}\n"


# --- numbers ----------------------------------------------------------------------------------------------------


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
        ("--stop-reward -1e2", "stop_reward", -100.0),
        ("--actors 1e0", "actors", 1),
    ],
)
def test_a_number_is_read_as_people_write_it(args: str, path: str, value: object, tmp_path: Path) -> None:
    def of(config: Any) -> object:
        for name in path.split("."):
            config = getattr(config, name)
        return config

    assert repr(of(parse(args.split()).config)) == repr(value)
    _, written = args.replace("=", " ").split(" ", 1)
    if "." in path:
        (tmp_path / "mine.yaml").write_text("{}:\n  {}: {}".format(*path.split("."), written))
    else:
        (tmp_path / "mine.yaml").write_text(f"{path}: {written}")
    assert repr(of(parse(["--config", f"{tmp_path}/mine.yaml"]).config)) == repr(value)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--max-opts 1.5", "--max-opts is '1.5'; expected a whole number"),
        ("--max-opts 1e999999999", "expected a whole number"),
        ("--agent.features 64,wide", "--agent.features is 'wide'; expected a whole number"),
        ("--agent.lr fast", "--agent.lr is 'fast'; expected a number"),
        ("--env-args gravity", "expected names with values"),
        ("--seed", "--seed needs a value"),
        ("--agent.features", "--agent.features needs a value"),
    ],
)
def test_what_is_no_such_number_is_refused_in_words(args: str, said: str) -> None:
    line = refusal(lambda: parse(args.split()))
    assert said in line
    assert not line.endswith(":")


def test_numbers_given_in_python_may_be_floats_that_are_whole() -> None:
    strategy = jaxrl.off_policy(counting(), jaxrl.dqn(epsilon_decay=1e3), buffer=jaxrl.uniform(1e3, 8.0), num_envs=2.0)  # type: ignore[arg-type]
    config = jaxrl.Trainer(strategy, max_opts=1e5, quiet=True).config  # type: ignore[arg-type]
    assert (config.max_opts, type(config.max_opts)) == (100_000, int)
    assert strategy.info.settings is not None
    found = (strategy.info.settings["buffer"]["capacity"], strategy.info.settings["num_envs"])
    assert repr(found) == "(1000, 2)"
    assert "expected a whole number" in refusal(lambda: jaxrl.Trainer(strategy, max_opts=1.5))


# --- lengths ----------------------------------------------------------------------------------------------------


def rollouts() -> jaxrl.Strategy:
    return jaxrl.on_policy(counting(), jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=2, minibatches=2)


@pytest.mark.parametrize(("asked", "taken"), [(1, 4), (4, 4), (5, 8), (1001, 1004)])
def test_a_length_is_rounded_up_to_whole_iterations(asked: int, taken: int) -> None:
    trainer = jaxrl.Trainer(rollouts(), max_opts=asked, quiet=True)
    assert trainer.config.max_opts == trainer.settings()["max_opts"] == trainer.schedule.max_opts == taken


def test_a_length_that_fits_within_a_limit_of_steps_is_rounded_too() -> None:
    trainer = jaxrl.Trainer(rollouts(), max_opts=5, max_env_steps=20, quiet=True)
    assert trainer.schedule.env_steps(trainer.schedule.last) == 16


@pytest.mark.slow
def test_rounding_is_said_aloud_and_resuming_keeps_it(tmp_path: Path) -> None:
    memory = jaxrl.MemoryRecorder()
    settings: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "eval_interval": 0, "eval_episodes": 0}
    jaxrl.Trainer(rollouts(), max_opts=5, recorders=[memory], **settings).train()
    assert memory.rows[0]["message"].startswith("max_opts 5 is rounded up to 8")
    again = jaxrl.MemoryRecorder()
    jaxrl.Trainer(rollouts(), max_opts=8, recorders=[again], resume=True, **settings).train()
    assert [row["message"] for row in again.rows if row["kind"] == "event"] == ["resumed at 8 optimisation steps"]


# --- misuse in Python -------------------------------------------------------------------------------------------


class Theirs:
    """An environment with Gymnasium's interface."""

    observation_space = action_space = None

    def step(self, action: object) -> None:
        """Do nothing."""


BUFFER: dict[str, Any] = {"buffer": jaxrl.uniform(64, batch_size=8)}
MISUSE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a name for an environment": (
        lambda: jaxrl.off_policy("CartPole-v1", jaxrl.dqn(), **BUFFER), ["jaxrl.make_env('CartPole-v1')"],
    ),
    "an environment of Gymnasium": (
        lambda: jaxrl.off_policy(Theirs(), jaxrl.dqn(), **BUFFER), ["Theirs", "gymnasium_env", "Session"],
    ),
    "another thing for an environment": (lambda: jaxrl.on_policy(3, jaxrl.ppo()), ["env is int", "make_env"]),
    "an agent that was not called": (
        lambda: jaxrl.off_policy(counting(), jaxrl.dqn, **BUFFER), ["jaxrl.dqn itself", "dqn()"],
    ),
    "an agent by name": (lambda: jaxrl.on_policy(counting(), "ppo"), ["'ppo'", "jaxrl.dqn(...)"]),
    "an on-policy agent with a buffer": (
        lambda: jaxrl.off_policy(counting(), jaxrl.ppo(), **BUFFER), ["ppo learns on-policy", "on_policy(env, ppo("],
    ),
    "an environment for a strategy": (lambda: jaxrl.Trainer(counting()), ["Env", "expected a strategy"]),
    "learning_rate": (lambda: jaxrl.dqn(learning_rate=1e-3), ["did you mean lr?"]),
    "gamma": (lambda: jaxrl.ppo(gamma=0.9), ["discount", "processor="]),
    "discount for an agent": (lambda: jaxrl.ppo(discount=0.9), ["processor=jaxrl.n_step(1, discount=0.99)"]),
    "frame_stack for an agent": (lambda: jaxrl.dqn(frame_stack=4), ["belong to the processor"]),
    "capacity for an agent": (lambda: jaxrl.dqn(capacity=100), ["buffer=jaxrl.uniform(capacity, batch_size)"]),
    "num_envs for an agent": (lambda: jaxrl.ppo(num_envs=4), ["it is a setting of off_policy(...) or on_policy(...)"]),
    "a number for the settings of an agent": (
        lambda: jaxrl.dqn(1e-3), ["the settings of dqn are 0.001", "DQNConfig(...)", "dqn(lr=...)"],
    ),
    "the class of the settings": (lambda: jaxrl.ppo(jaxrl.PPOConfig), ["expected PPOConfig(...)"]),
    "the settings of another agent": (lambda: jaxrl.dqn(jaxrl.PPOConfig()), ["are PPOConfig; expected DQNConfig"]),
    "an agent that is built": (
        lambda: jaxrl.off_policy(counting(), jaxrl.dqn()(counting().spec), **BUFFER),
        ["agent is dqn, already built", "off_policy(env, jaxrl.dqn())"],
    ),
    "total_timesteps": (lambda: jaxrl.TrainerConfig().changed(total_timesteps=5), ["max_env_steps?"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_in_python_is_answered_in_words(case: str) -> None:
    action, said = MISUSE[case]
    line = refusal(action)
    assert [part for part in said if part not in line] == []


@pytest.mark.slow
def test_an_observation_of_another_shape_is_refused_by_both_shapes() -> None:
    strategy = rollouts()
    trainer = jaxrl.Trainer(strategy, max_opts=4, quiet=True)
    policy = trainer.train().policy
    assert policy is not None
    assert strategy.env is not None
    shape = strategy.env.spec.observation_space.shape  # type: ignore[union-attr]
    assert refusal(lambda: policy(jnp.zeros(7))).startswith(
        f"the observation has shape [7]; counting has {list(shape)}"
    )
    for one_or_three in (shape, (3, *shape)):
        policy(jnp.zeros(one_or_three))


@pytest.mark.parametrize(("name", "hint"), [("PPO", ".ppo?"), ("train", ".Trainer("), ("make_envs", ".make_env?")])
def test_a_name_that_jaxrl_lacks_is_answered_with_the_nearest(name: str, hint: str) -> None:
    code = f"import jaxrl; jaxrl.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(f"AttributeError: module 'jaxrl' has no attribute '{name}'")
    assert hint in done.stderr


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "num_envs"), [("dqn", "100000000"), ("ppo", "10000000")])
def test_more_environments_than_the_memory_holds_are_refused_before_any_is_taken(
    algo: str, num_envs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state alone would fit: what acting in all of them takes does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "cache_compilations", lambda: None)
    monkeypatch.setattr(memory, "device_bytes", lambda: 20 * 10**9)
    monkeypatch.setattr(loop, "compile_all", lambda *args: pytest.fail("it began to compile"))
    said = refusal(lambda: train.main([algo, "--num-envs", num_envs, "--processor.n-step", "1", "--quiet"]))
    assert "an iteration needs" in said
    assert "the device has 20.0 GB" in said
    assert re.search(r"or num_envs to at most \d+$|lower num_envs to at most \d+$", said)
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_of_more_steps_than_can_be_numbered_is_refused() -> None:
    said = refusal(lambda: train.main(["ppo", "--num-envs", "100000000", "--quiet"]))
    assert said.endswith("lower rollout to at most 21 or num_envs to at most 16777215")
