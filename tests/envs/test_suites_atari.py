"""Atari: frames are those of Gymnasium's own preprocessing, and lives end episodes in training alone."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.envs import HostEnv, make_env
from jaxrl.envs.host import HostVectorEnv
from jaxrl.spaces import Box, Discrete
from jaxrl.strategies.base import Policy
from jaxrl.training.evaluator import HostEvaluator

pytestmark = pytest.mark.slow
LIVES = {
    "gymnasium": ("gymnasium:ALE/Breakout-v5", {"life_loss": True}),
    "envpool": ("envpool:Breakout-v5", {"episodic_life": True, "reward_clip": True}),
    "ale": ("ale:Breakout", {"life_loss": True}),
}


def lives_of(suite: str) -> HostEnv:
    name, params = LIVES[suite]
    pytest.importorskip("envpool" if suite == "envpool" else "ale_py")
    env: HostEnv = make_env(name, **params)
    return env


def walked(env: HostEnv, actions: Any, seed: int = 3) -> tuple[Any, list[Any]]:
    envs = HostVectorEnv(env, actions.shape[1], seed)
    try:
        return envs.reset(), [envs.step(action) for action in actions]
    finally:
        envs.close()


@pytest.mark.parametrize("params", [{}, {"repeat_action_probability": 0.0, "noop_max": 0, "frame_skip": 3}])
def test_frames_and_rewards_are_those_of_gymnasium_s_preprocessing(params: dict[str, Any]) -> None:
    gymnasium, ale = pytest.importorskip("gymnasium"), pytest.importorskip("ale_py")
    gymnasium.register_envs(ale)
    env = make_env("gymnasium:ALE/Pong-v5", **params)
    assert env.spec.observation_space == Box(0, 255, (84, 84, 1), "uint8")
    assert env.spec.action_space == Discrete(6)
    actions = np.random.default_rng(0).integers(0, 6, (1200, 2)).astype(np.int32)
    first, steps = walked(env, actions)
    sticks = {"repeat_action_probability": params.get("repeat_action_probability", 0.25)}
    shaped = {word: x for word, x in params.items() if word not in sticks}
    ends, paid = 0, 0
    for i in range(2):
        game = gymnasium.make("ALE/Pong-v5", frameskip=1, **sticks)
        one = gymnasium.wrappers.AtariPreprocessing(game, **shaped)
        obs, _ = one.reset(seed=3 + i)
        np.testing.assert_array_equal(first[i, :, :, 0], obs)
        for t, step in enumerate(steps):
            obs, reward, terminated, truncated, info = one.step(int(actions[t, i]))
            np.testing.assert_array_equal(step.final_obs[i, :, :, 0], obs)
            told = (step.reward[i], step.terminated[i], step.truncated[i], step.info["frame_number"][i])
            assert told == (reward, terminated, truncated, info["frame_number"])
            ends, paid = ends + terminated, paid + abs(reward)
            if terminated:
                one.reset()
        one.close()
    assert ends
    assert paid > 21


@pytest.mark.parametrize("suite", LIVES)
def test_a_lost_life_ends_an_episode_and_the_next_goes_on_in_the_same_game(suite: str) -> None:
    actions = np.random.default_rng(1).integers(0, 4, (600, 2)).astype(np.int32)
    _, steps = walked(lives_of(suite), actions)
    lives, done = (np.stack(x) for x in zip(*[(s.info["lives"], s.terminated) for s in steps], strict=True))
    assert not any(step.truncated.any() for step in steps)
    games = 0
    for i in range(2):
        left = 5
        for t in range(600):
            assert done[t, i] == (lives[t, i] < left)
            left = int(lives[t, i]) or 5  # a game that is over is followed by a whole one
            games += lives[t, i] == 0
    assert games >= 4


def test_the_return_of_a_whole_game_is_told_where_it_ends() -> None:
    actions = np.random.default_rng(1).integers(0, 4, (600, 1)).astype(np.int32)
    _, steps = walked(lives_of("gymnasium"), actions)
    paid, told = 0.0, []
    for step in steps:
        paid += float(step.reward[0])
        if "game_return" in step.info:
            told.append((float(step.info["game_return"][0]), paid))
            paid = 0.0
    assert len(told) >= 2
    assert sum(whole for whole, _ in told) > 0
    assert [whole for whole, _ in told] == [paid for _, paid in told]


def always(spec: Any, actions: tuple[int, ...]) -> Policy:
    """Take these actions in turn."""
    chosen = np.array(actions, np.int32)
    act = lambda params, carry: (carry + 1, jax.numpy.broadcast_to(jax.numpy.asarray(chosen)[carry % len(chosen)], 2))
    return Policy(spec, lambda state: (), lambda params, obs: jax.numpy.int32(0), act, lambda p, carry, step: carry)


@pytest.mark.parametrize("suite", LIVES)
def test_evaluation_plays_whole_games_for_their_own_rewards(suite: str) -> None:
    env = lives_of(suite)
    name, _ = LIVES[suite]
    policy = always(env.spec, (1, 2, 2, 3))
    judged, whole = (HostEvaluator(one, policy, 2)((), jax.random.key(5)) for one in (env, make_env(name, noop_max=30)))
    np.testing.assert_array_equal(judged.returns, whole.returns)
    np.testing.assert_array_equal(judged.lengths, whole.lengths)
    assert judged.columns["info/lives"].tolist() == [0, 0]
    assert judged.finished.all()
