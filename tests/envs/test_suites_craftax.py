"""Craftax: every name keeps its contract, and limits are not ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_suites import played

from jaxrl.envs import make_env, vectorise
from jaxrl.envs.craftax import NAMES
from jaxrl.spaces import Box, Discrete

craftax_env = pytest.importorskip("craftax.craftax_env")
pytestmark = pytest.mark.slow

CLASSIC = "craftax:Craftax-Classic-Symbolic-v1"
UP, NOTHING = 3, 0


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_keeps_its_forms(name: str) -> None:
    with jax.numpy_rank_promotion("allow"):
        spec = vectorise(make_env(f"craftax:{name}"), 2).spec
    classic = "Classic" in name
    assert spec.action_space == Discrete(17 if classic else 43)
    assert spec.time_limit == (10_000 if classic else 100_000)
    sizes = {"Pixels": (63, 63, 3) if classic else (130, 110, 3), "Symbolic": (1345,) if classic else (8268,)}
    (shape,) = [size for kind, size in sizes.items() if kind in name]
    expected = Box(0, 255, shape, "uint8") if len(shape) == 3 else Box(-np.inf, np.inf, shape)
    assert spec.observation_space == expected


def test_the_limit_truncates_where_the_suite_would_terminate() -> None:
    env = make_env(CLASSIC, max_timesteps=3.0)
    steps = played(env, [UP, NOTHING, UP, UP])
    assert steps.truncated.tolist() == [False, False, True, False]
    assert not steps.terminated.any()
    assert not np.array_equal(steps.final_obs[2], steps.obs[2])  # another world
    np.testing.assert_array_equal(steps.final_obs[:2], steps.obs[:2])
    theirs = craftax_env.make_craftax_env_from_name(CLASSIC.partition(":")[2], auto_reset=False)
    params = theirs.default_params.replace(max_timesteps=3)
    with jax.numpy_rank_promotion("allow"):
        _, state = theirs.reset(jax.random.key(0), params)
        dones = []
        for action in (UP, NOTHING, UP):
            _, state, _, done, _ = theirs.step(jax.random.key(1), state, action, params)
            dones.append(bool(done))
    assert dones == [False, False, True]


def test_the_dead_terminate_and_what_was_achieved_is_told_in_percent() -> None:
    env = make_env(CLASSIC, max_timesteps=1)
    with jax.numpy_rank_promotion("allow"):
        state, _ = env.reset(jax.random.key(0))
        step, key = jax.jit(env.step), jax.random.key(1)
        state = state.replace(achievements=state.achievements.at[0].set(True))
        _, alive = step(state, NOTHING, key)
        _, dead = step(state.replace(player_health=jnp.zeros_like(state.player_health) - 5), NOTHING, key)
    assert (bool(alive.terminated), bool(dead.terminated)) == (False, True)
    assert (alive.truncated, dead.truncated) == (False, False)
    assert float(dead.info["episode_achievements/collect_wood"]) == 100.0
    assert sum(float(x) for x in dead.info.values()) == 100.0
    assert len(dead.info) == 22


def test_pixels_and_pictures() -> None:
    env, drawn = make_env("craftax:Craftax-Classic-Pixels-v1"), make_env(CLASSIC).render
    assert drawn is not None
    with jax.numpy_rank_promotion("allow"):
        state, seen = jax.jit(env.reset)(jax.random.key(0))
        picture = drawn(state)
    assert (seen.shape, seen.dtype, picture.shape, picture.dtype) == ((63, 63, 3), np.uint8, (144, 144, 3), np.uint8)
    assert 20 < np.asarray(seen).mean() < 235
    assert abs(float(picture.mean()) - float(np.asarray(seen).mean())) < 15
