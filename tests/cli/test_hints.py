"""What is misused in Python is answered in words, with the name for it."""

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
from jaxrl.errors import SettingsError, close_matches, suggest
from jaxrl.training import loop, memory


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(SettingsError) as refused:
        action()
    line = str(refused.value)
    assert "\n" not in line
    return line


# --- names ------------------------------------------------------------------------------------------------------


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


def test_what_gymnasium_has_is_named_for_an_environment_of_no_suite() -> None:
    assert "gymnasium:Ant-v5" in refusal(lambda: jaxrl.make_env("qwertz:ant"))
    assert "there is no qwertz: here" in refusal(lambda: jaxrl.make_env("qwertz:qwertz"))


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


def test_a_length_is_rounded_up_to_whole_iterations() -> None:
    strategy = rollouts()
    for asked, taken in ((1, 4), (4, 4), (5, 8), (1001, 1004)):
        trainer = jaxrl.Trainer(strategy, max_opts=asked, quiet=True)
        assert trainer.config.max_opts == trainer.settings()["max_opts"] == trainer.schedule.max_opts == taken
    limited = jaxrl.Trainer(strategy, max_opts=5, max_env_steps=20, quiet=True).schedule
    assert limited.env_steps(limited.last) == 16


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
    "the settings of a family": (lambda: jaxrl.crossq(jaxrl.SACConfig()), ["are SACConfig; expected CrossQConfig"]),
    "an agent that is built": (
        lambda: jaxrl.off_policy(counting(), jaxrl.dqn()(counting().spec), **BUFFER),
        ["agent is dqn, already built", "off_policy(env, jaxrl.dqn())"],
    ),
    "half an environment": (
        lambda: jaxrl.off_policy(counting(), jaxrl.dqn(), num_envs=0.5, **BUFFER), ["num_envs is 0.5", "whole number"],
    ),
    "no text for resets": (lambda: jaxrl.on_policy(counting(), jaxrl.ppo(), resets=1), ["resets is 1", "fresh"]),
    "a name for actors": (
        lambda: jaxrl.on_policy(counting(), jaxrl.ppo(), actors="x"), ["actors is str", "ActorsConfig"],
    ),
    "a file for data": (lambda: jaxrl.offline("x.npz", jaxrl.iql()), ["data is 'x.npz'", "load_dataset('x.npz')"]),
    "text for a compact buffer": (lambda: jaxrl.uniform(compact="no"), ["buffer.compact is str", "True or False"]),
    "no buffer for hindsight": (lambda: jaxrl.hindsight(None), ["made by jaxrl.uniform(...)"]),
    "no function for goals": (lambda: jaxrl.hindsight(jaxrl.uniform(), goal=5), ["goal is 5", "function"]),
    "no processor in a chain": (lambda: jaxrl.chain("x"), ["'x' is no processor", "one_step()"]),
    "no function for rewards": (lambda: jaxrl.map_reward(5), ["5 is no function"]),
    "a name for a population": (lambda: jaxrl.population("x"), ["strategy is 'x'", "off_policy(...)"]),
    "a list for a sweep": (lambda: jaxrl.population(rollouts(), sweep=["agent.lr"]), ["sweep is list", "agent.lr"]),
    "a name for a search": (lambda: jaxrl.population(rollouts(), search="halving"), ["'halving'", "Halving(...)"]),
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


def test_a_name_that_jaxrl_lacks_is_answered_with_the_nearest() -> None:
    hints = {"PPO": ".ppo?", "train": ".Trainer(", "make_envs": ".make_env?"}
    code = f"import jaxrl\nfor name in {[*hints]}:\n try: getattr(jaxrl, name)\n except AttributeError as no: print(no)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (name, hint), line in zip(hints.items(), done.stdout.splitlines(), strict=True):
        assert line.startswith(f"module 'jaxrl' has no attribute '{name}'")
        assert hint in line


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.every_day("dqn-100000000")
@pytest.mark.parametrize(("algo", "num_envs"), [("dqn", "100000000"), ("ppo", "10000000")])
def test_more_environments_than_the_memory_holds_are_refused_before_any_is_taken(
    algo: str, num_envs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state alone would fit: what acting in all of them takes does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "device_bytes", lambda: 20 * 10**9)
    monkeypatch.setattr(loop, "compile_all", lambda *args: pytest.fail("it began to compile"))
    said = refusal(lambda: train.main([algo, "--num-envs", num_envs, "--processor.n-step", "1", "--quiet"]))
    assert "an iteration needs" in said
    assert "the device has 20.0 GB" in said
    assert re.search(r"or num_envs to at most \d+$|lower num_envs to at most \d+$", said)
    assert list(tmp_path.iterdir()) == []
