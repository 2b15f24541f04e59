"""Pgx: every game for one player keeps its contract, its numbers are the suite's, and limits are not ends."""

import jax
import numpy as np
import pytest
from toys_suites import played

from jaxrl.envs import make_env
from jaxrl.spaces import Box

pgx = pytest.importorskip("pgx")
pytestmark = pytest.mark.slow

GAMES = ("2048", "minatar-asterix", "minatar-breakout", "minatar-freeway", "minatar-seaquest", "minatar-space_invaders")


@pytest.mark.parametrize("name", ["2048", "minatar-breakout", "minatar-asterix"])
def test_numbers_are_those_of_the_suite_for_the_same_keys(name: str) -> None:
    env, theirs = make_env(f"pgx:{name}"), pgx.make(name)
    state, _ = env.reset(jax.random.key(3))
    their = theirs.init(jax.random.key(3))
    step, their_step = jax.jit(env.step), jax.jit(theirs.step)
    for t in range(12):
        key = jax.random.fold_in(jax.random.key(4), t)
        action = int(np.flatnonzero(their.legal_action_mask)[0])
        state, out = step(state, action, key)
        their = their_step(their, action, key)
        seen = out.obs["observation"] if name == "2048" else out.obs
        np.testing.assert_array_equal(seen, their.observation)
        assert (out.reward, out.terminated) == (their.rewards[0], their.terminated)
        assert not out.truncated
        if their.terminated:
            break


def test_2048_shows_its_legal_moves_and_ends_with_an_illegal_one() -> None:
    env = make_env("pgx:2048")
    space = env.spec.observation_space
    assert space == {"observation": Box(0, 1, (4, 4, 31), "bool"), "action_mask": Box(0, 1, (4,), "bool")}
    for seed in range(50):
        state, obs = env.reset(jax.random.key(seed))
        if not obs["action_mask"].all():
            break
    illegal = int(np.flatnonzero(~np.asarray(obs["action_mask"]))[0])
    _, out = env.step(state, illegal, jax.random.key(0))
    assert (float(out.reward), bool(out.terminated)) == (-1.0, True)


def test_freeway_is_cut_at_its_limit_and_never_ends_by_itself() -> None:
    env = make_env("pgx:minatar-freeway")
    steps = played(env, np.zeros(2510, np.int32))
    assert env.spec.time_limit == 2500
    assert np.flatnonzero(steps.truncated).tolist() == [2499]
    assert not steps.terminated.any()
    longer = played(make_env("pgx:minatar-freeway", time_limit=3000.0), np.zeros(3000, np.int32))
    assert np.flatnonzero(longer.truncated).tolist() == [2999]
    assert not longer.terminated.any()


def test_a_limit_truncates_with_the_true_successor() -> None:
    env = make_env("pgx:minatar-breakout", time_limit=3)
    steps = played(env, [0, 0, 0])
    assert steps.truncated.tolist() == [False, False, True]
    assert not steps.terminated.any()
    ball = lambda obs: np.argwhere(obs[..., 1])
    assert ball(steps.final_obs[2])[0, 0] == 6  # the ball begins in row 3 and falls by one row a step
    assert ball(steps.obs[2])[0, 0] == 3


def test_sticky_actions_and_the_set_of_actions_can_be_chosen() -> None:
    env = make_env("pgx:minatar-breakout", sticky_action_prob=0, use_minimal_action_set=0.0)
    assert env.spec.action_space.n == 6
    assert env.settings == {
        "env": "pgx:minatar-breakout",
        "env_args": {"sticky_action_prob": 0, "use_minimal_action_set": 0.0},
    }
    steps = played(env, [1, 1, 1, 1])
    assert steps.final_obs[:, 9, :, 0].argmax(-1).tolist() == [3, 2, 1, 0]  # the paddle obeys each time


def test_a_state_is_drawn() -> None:
    for name in ("pgx:2048", "pgx:minatar-seaquest"):
        env = make_env(name)
        assert env.render is not None
        assert env.render(env.reset(jax.random.key(0))[0]).shape == (300, 300, 3)
