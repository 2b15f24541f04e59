"""Jumanji: every name keeps its contract, its numbers are the suite's, and limits are not ends."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from toys_suites import checked, played

import jaxrl
from jaxrl.envs import make_env
from jaxrl.spaces import Box, Discrete, MultiDiscrete

jumanji = pytest.importorskip("jumanji")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_promoted")]

OF_SEVERAL = {"Connector-v3", "LevelBasedForaging-v0", "SearchAndRescue-v0"}
NAMES = sorted(jumanji.registered_environments() - {*OF_SEVERAL, "Sokoban-v0"})
FOUND = {
    "FlatPack-v0": ["every episode is terminated after exactly 25 steps"],
    "GraphColoring-v1": ["every episode is terminated after exactly 20 steps"],
    "TSP-v1": [
        "the entry ['position'] of an observation lies outside the declared bounds: seen -1 to 19, declared 0 to 19",
        "every episode is terminated after exactly 20 steps",
    ],
}
"""What the check says of environments that end after a number of steps by their own rules, or start nowhere."""


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_with_one_reward_passes_the_check(name: str) -> None:
    found, known = checked(make_env(f"jumanji:{name}")), FOUND.get(name, [])
    assert [line[: len(start)] for line, start in zip(found, known, strict=True)] == known


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_is_flags_beside_the_rest_in_every_observation_that_has_one(name: str) -> None:
    space = make_env(f"jumanji:{name}").spec.observation_space
    assert ("action_mask" in space) == (not name.startswith("RubiksCube"))
    if "action_mask" in space:
        assert space["action_mask"].dtype == "bool"


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_takes_every_mask(name: str) -> None:
    strategy = jaxrl.on_policy(make_env(f"jumanji:{name}"), jaxrl.ppo(features=(8,)), num_envs=2, rollout=4)
    state = jax.eval_shape(strategy.init, jax.random.key(0))
    jax.eval_shape(strategy.step, state, state.key, np.uint32(0))


@pytest.mark.parametrize("name", ["Snake-v1", "Game2048-v1", "Tetris-v0"])
def test_numbers_are_those_of_the_suite_for_the_same_keys(name: str) -> None:
    env, theirs = make_env(f"jumanji:{name}"), jumanji.make(name)
    (state, _), (their, first) = (made.reset(jax.random.key(3)) for made in (env, theirs))
    step, their_step = jax.jit(env.step), jax.jit(theirs.step)
    for t in range(8):
        key = jax.random.fold_in(jax.random.key(4), t)
        mask = np.asarray(first.observation.action_mask)
        action = np.argwhere(mask)[0].astype(np.int32)
        action = action if mask.ndim > 1 else action[0]
        ours = np.int32(np.ravel_multi_index(action, mask.shape)) if mask.ndim > 1 else action
        state, out = step(state, ours, key)
        their, first = their_step(their.replace(key=key), action)
        for word, part in first.observation._asdict().items():
            np.testing.assert_array_equal(out.obs[word], np.ravel(part) if word == "action_mask" else part)
        assert out.reward == first.reward
        assert (out.terminated | out.truncated) == first.last()
        if first.last():
            break
    assert t > 1


def test_the_limit_truncates_where_the_suite_would_terminate() -> None:
    env = make_env("jumanji:SlidingTilePuzzle-v0", time_limit=3.0)
    steps = played(env, [0, 1, 2, 3])
    assert env.spec.time_limit == 3
    assert steps.truncated.tolist() == [False, False, True, False]
    assert not steps.terminated.any()
    assert steps.final_obs["step_count"].tolist() == [1, 2, 3, 1]
    assert steps.obs["step_count"].tolist() == [1, 2, 0, 1]
    theirs = jumanji.make("SlidingTilePuzzle-v0", time_limit=3)
    state, out = theirs.reset(jax.random.key(0))
    for action in range(3):
        state, out = theirs.step(state, action)
    assert out.last()
    assert out.discount == 0


def test_an_illegal_move_terminates_snake() -> None:
    env = make_env("jumanji:Snake-v1", num_rows=4, num_cols=4)
    steps = played(env, [0, 0, 0, 0, 0])  # up, into the wall sooner or later
    assert steps.terminated.any()
    assert not steps.truncated.any()


def test_what_the_suite_tells_beside_is_recorded() -> None:
    steps = played(make_env("jumanji:Game2048-v1"), [0, 1])
    assert (steps.info["highest_tile"] >= 2).all()


def test_spaces() -> None:
    snake = make_env("jumanji:Snake-v1").spec
    assert snake.observation_space == {
        "grid": Box(0.0, 1.0, (12, 12, 5)),
        "step_count": Box(0, 4000, (), "int32"),
        "action_mask": Box(0, 1, (4,), "bool"),
    }
    short = make_env("jumanji:Snake-v1", time_limit=20.0).spec.observation_space
    assert short["step_count"] == Box(0, 20, (), "int32")  # the last observation has 20
    assert (snake.action_space, snake.time_limit) == (Discrete(4), 4000)
    tetris = make_env("jumanji:Tetris-v0").spec  # whose mask has an entry for each rotation and column together
    assert tetris.action_space == Discrete(40)
    assert tetris.observation_space["action_mask"] == Box(0, 1, (40,), "bool")
    assert make_env("jumanji:Cleaner-v0").spec.action_space == MultiDiscrete((4, 4, 4))
    assert make_env("jumanji:TSP-v1").spec.observation_space["position"] == Discrete(20)
    assert make_env("jumanji:MultiCVRP-v0").spec.action_space == MultiDiscrete((21, 21), "int16")
    maze = make_env("jumanji:Maze-v0").spec.observation_space
    assert set(maze["agent_position"]) == {"row", "col"}


SOKOBAN = "import jaxrl; env = jaxrl.make_env('jumanji:Sokoban-v0'); print(env.spec.time_limit, jaxrl.check_env(env))"


def test_sokoban_is_refused_without_its_levels_and_made_with_them(tmp_path: Path) -> None:
    def said() -> str:
        env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        run = subprocess.run([sys.executable, "-c", SOKOBAN], env=env, capture_output=True, text=True)
        return (run.stdout + run.stderr).strip().splitlines()[-1]

    assert "jumanji:Sokoban-v0 needs levels that it would load from the internet" in said()
    levels = np.zeros((3, 10, 10, 2), np.uint8)
    levels[:, 0] = 1  # walls (1), a box (4), a target (2) and the agent (3)
    levels[:, 3, 3, 1], levels[:, 4, 4, 0] = 4, 2
    levels[range(3), (5, 6, 7), 5, 1] = 3
    cache = tmp_path / "models--InstaDeepAI--boxoban-levels"
    for folder in ("refs", "snapshots/1"):
        (cache / folder).mkdir(parents=True)
    (cache / "refs" / "main").write_text("1")
    np.save(cache / "snapshots" / "1" / "unfiltered-train.npy", levels)
    assert said() == "120 []"
