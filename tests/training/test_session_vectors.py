"""Sessions that drive a Gymnasium vector: in any autoreset mode each step is learnt from once, and no reset is."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from toys_gymnasium import Counting
from toys_session import reached, small

import jaxrl
from jaxrl.errors import SettingsError

MODES = gymnasium.vector.AutoresetMode
STEPS = 70


class OneKind(Counting):
    action_space = gymnasium.spaces.Discrete(2)


def vector(mode: Any) -> Any:
    return gymnasium.vector.SyncVectorEnv([OneKind] * 2, autoreset_mode=mode)


PARTS = {"agent": jaxrl.dqn(features=(4,)), "buffer": jaxrl.uniform(400, 8), "processor": jaxrl.one_step()}


def session_of(envs: Any, hooks: Any = None, **settings: Any) -> jaxrl.Session:
    """Return a session that only warms up, so that all that it was told is in its buffer, in order."""
    return small(envs, **{**PARTS, "opt_interval": 2, "warmup": 300, "hooks": hooks, **settings})


def drive(session: jaxrl.Session, envs: Any, steps: int) -> int:
    """Drive a session as each mode asks for; return how many steps the environments took."""
    obs, _ = envs.reset(seed=0)
    for _ in range(steps):
        next_obs, reward, terminated, truncated, info = envs.step(session.act(obs))
        done, successor = terminated | truncated, next_obs.copy()
        for i in np.flatnonzero(info.get("_final_obs", np.zeros(2, bool))):
            successor[i] = info["final_obs"][i]
        session.observe(reward, successor, terminated, truncated)
        obs = next_obs
        if envs.metadata["autoreset_mode"] == MODES.DISABLED and done.any():
            obs, _ = envs.reset(options={"reset_mask": done})
    return sum(env.total for env in envs.envs)


@pytest.mark.parametrize("mode", list(MODES))
def test_each_step_is_learnt_from_once_and_no_reset(mode: Any) -> None:
    """Episodes are of 3 steps, which terminates, and of 5, which is truncated, in turns; the reward counts them."""
    envs, episodes = vector(mode), list[Any]()
    session = session_of(envs, jaxrl.SessionHooks(episode=episodes.append))
    taken = drive(session, envs, STEPS)
    resets = STEPS // 5 if mode == MODES.NEXT_STEP else 0  # two in each ten steps of a vector
    assert taken == 2 * (STEPS - resets)
    items, rows = reached(session).state.buffer.items, slice(0, 2 * STEPS)
    weight = np.broadcast_to(np.asarray(items.weight), items.reward.shape)[rows] > 0
    obs, successor, reward, discount = (
        np.asarray(x)[rows][weight] for x in (items.obs, items.next_obs, items.reward, items.discount)
    )
    step, episode = obs.T
    assert weight.sum() == taken
    np.testing.assert_array_equal(successor, np.stack([step + 1, episode], axis=1))
    np.testing.assert_array_equal(reward, step + 1)
    np.testing.assert_array_equal(discount == 0, (episode % 2 == 1) & (step == 2))
    assert len(np.unique(obs, axis=0)) * 2 == taken
    assert {(e.length, e.episode_return) for e in episodes} == {(3, 6.0), (5, 15.0)}
    assert session.summary()["invalid_steps"] == 0


def test_resets_of_the_wrapper_autoreset_are_not_learnt_from() -> None:
    """Episodes of 3 and 5 steps and the resets between: ten steps of the wrapper are eight of the environment."""
    env, episodes = OneKind(), list[Any]()
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.Autoreset(env))
    session = session_of(wrapped, jaxrl.SessionHooks(episode=episodes.append), num_envs=1)
    obs, _ = wrapped.reset()
    for _ in range(50):
        obs, reward, terminated, truncated, _ = wrapped.step(session.act(obs))
        session.observe(reward, obs, terminated, truncated)
    assert env.total == 40
    items = reached(session).state.buffer.items
    learnt = np.asarray(items.weight)[:50].ravel() > 0
    assert learnt.sum() == 40
    step, episode = np.asarray(items.obs)[:50].reshape(50, 2)[learnt].T
    successors = np.asarray(items.next_obs)[:50].reshape(50, 2)[learnt]
    np.testing.assert_array_equal(successors, np.stack([step + 1, episode], axis=1))
    assert [(e.length, e.episode_return) for e in episodes] == [(3, 6.0), (5, 15.0)] * 5


@pytest.mark.parametrize("mode", list(MODES))
def test_only_observations_that_are_acted_on_enter_statistics(mode: Any) -> None:
    """Episodes of 3 and 5 steps in turns: of each, the observations 0 to 2, or 0 to 4, but not the last."""
    envs = vector(mode)
    session = session_of(envs, processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()))
    drive(session, envs, 9 if mode == MODES.NEXT_STEP else 8)  # one of the nine is a reset
    moments = session.policy.params.processor[0][0]
    np.testing.assert_allclose(moments.mean[0], np.mean([0, 1, 2, 0, 1, 2, 3, 4]), rtol=1e-6)


def test_an_evaluation_counts_whole_episodes_without_resets_and_a_reset_by_hand_is_seen() -> None:
    envs, evaluated = vector(MODES.NEXT_STEP), list[Any]()
    session = session_of(envs, jaxrl.SessionHooks(evaluated=evaluated.append))
    session.evaluate_episodes(4)
    drive(session, envs, 11)
    assert sorted(evaluated[0].lengths.tolist()) == [3, 3, 5, 5]
    assert sorted(evaluated[0].returns.tolist()) == [6, 6, 15, 15]
    envs = vector(MODES.NEXT_STEP)
    session = session_of(envs)
    assert drive(session, envs, 3) == 6  # the next step would reset
    assert drive(session, envs, 4) == 14  # but the loop itself has
    weight = np.asarray(reached(session).state.buffer.items.weight)[:14]
    assert (weight > 0).all()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("why", ["restored", "diverged"])
def test_a_reset_that_is_due_when_a_session_goes_back_is_no_step_of_an_episode(why: str, tmp_path: Path) -> None:
    envs, lengths = vector(MODES.NEXT_STEP), list[int]()
    hooks = jaxrl.SessionHooks(episode=lambda episode: lengths.append(episode.length))
    # The first update, which comes with the ninth step, is not finite.
    diverges = {"processor": jaxrl.n_step(3), "warmup": 16, "max_skips": 1}
    session = session_of(envs, hooks, run_dir=str(tmp_path), **(diverges if why == "diverged" else {}))
    obs, _ = envs.reset(seed=0)
    for step in range(1, 20):
        obs, _, terminated, truncated, _ = envs.step(session.act(obs))
        session.observe([3e38 if step < 10 else 0.0] * 2, obs, terminated, truncated)
        if step == 5 and why == "restored":
            session.save()
        if step == 9:  # the last of episodes
            if why == "restored":
                session.restore()
            assert session.env_steps == (10 if why == "restored" else 0)
    assert lengths == [3, 3, 5, 5, 3, 3, 5, 5]
    session.close()


def test_a_vector_that_does_not_say_when_it_resets_is_refused() -> None:
    envs = vector(MODES.NEXT_STEP)
    envs.metadata = {}
    with pytest.raises(SettingsError, match=r"SyncVectorEnv does not say in .* give jaxrl\.EnvSpec\(name"):
        session_of(envs)
