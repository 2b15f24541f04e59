"""XLand-MiniGrid: every name keeps its contract, its numbers are the suite's, and limits are not ends."""

import bz2
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_suites import checked, keeps_its_contract, played

from jaxrl.envs import make_env, vectorise
from jaxrl.errors import SettingsError

xminigrid = pytest.importorskip("xminigrid")
pytestmark = pytest.mark.slow

from xminigrid.core.goals import AgentOnTileGoal  # noqa: E402
from xminigrid.core.rules import EmptyRule  # noqa: E402

NAMES = xminigrid.registered_environments()
PLAIN = [name for name in NAMES if name.startswith("MiniGrid-")]
FORWARD, RIGHT = 0, 1
TO_THE_GOAL = [FORWARD, FORWARD, RIGHT, FORWARD, FORWARD]
"""From the upper left corner of `MiniGrid-Empty-5x5` to its goal in the lower right one."""


def a_ruleset() -> Any:
    """Return rules by which the one ball there is to be stepped on, in the suite's own form."""
    ball = np.array([3, 1], np.uint8)
    goal, rules = AgentOnTileGoal(tile=ball).encode(), EmptyRule().encode()[None]
    return xminigrid.types.RuleSet(goal=goal, rules=rules, init_tiles=ball[None])


@pytest.mark.parametrize("name", PLAIN)
def test_every_environment_of_minigrid_passes_the_check(name: str) -> None:
    assert checked(make_env(f"xminigrid:{name}")) == []


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(PLAIN)))
def test_every_environment_of_xland_is_made_with_a_ruleset(name: str) -> None:
    """Traced only: compiling the many rooms of each takes half a minute."""
    env = make_env(f"xminigrid:{name}", ruleset=a_ruleset())
    assert vectorise(env, 2).spec.name == f"xminigrid:{name}"
    assert env.settings is None


def test_xland_passes_the_check() -> None:
    assert checked(make_env("xminigrid:XLand-MiniGrid-R1-9x9", ruleset=a_ruleset())) == []


def test_the_goal_terminates_and_pays_by_the_suites_formula() -> None:
    env = make_env("xminigrid:MiniGrid-Empty-5x5")
    steps = played(env, TO_THE_GOAL)
    assert (env.spec.name, env.spec.time_limit) == ("xminigrid:MiniGrid-Empty-5x5", 100)
    np.testing.assert_allclose(steps.reward, [0, 0, 0, 0, 1 - 0.9 * 5 / 100], rtol=1e-6)
    assert steps.terminated.tolist() == [False] * 4 + [True]
    assert not steps.truncated.any()


def test_the_limit_truncates_with_the_true_successor_and_the_goal_at_the_limit_still_terminates() -> None:
    env = make_env("xminigrid:MiniGrid-Empty-5x5", max_steps=4.0)
    steps = played(env, [RIGHT] * 5)
    assert steps.truncated.tolist() == [False, False, False, True, False]
    assert not steps.terminated.any()
    made, params = xminigrid.make("MiniGrid-Empty-5x5", max_steps=4)
    theirs = made.reset(params, jax.random.key(0))
    for t in range(4):
        theirs = made.step(params, theirs, RIGHT)
        np.testing.assert_array_equal(symbols(steps.final_obs[t]), theirs.observation)
    np.testing.assert_array_equal(symbols(steps.obs[3]), made.reset(params, jax.random.key(0)).observation)
    last = played(make_env("xminigrid:MiniGrid-Empty-5x5", max_steps=5), TO_THE_GOAL)
    assert (last.terminated[-1], last.truncated[-1]) == (True, False)
    assert last.reward[-1] == pytest.approx(0.1)


def symbols(obs: np.ndarray) -> np.ndarray:
    """Return the tiles and colours `[H, W, 2]` of a one-hot observation."""
    assert (obs.sum(axis=-1) == 2).all()
    return np.stack([obs[..., :13].argmax(-1), obs[..., 13:].argmax(-1)], axis=-1)


def test_observations_are_whole_numbers_if_asked_for() -> None:
    env = make_env("xminigrid:MiniGrid-DoorKey-5x5", one_hot=0.0)
    assert (env.spec.observation_space.shape, env.spec.observation_space.dtype) == ((7, 7, 2), "int32")
    assert env.settings == {"env": "xminigrid:MiniGrid-DoorKey-5x5", "env_args": {"one_hot": 0.0}}
    assert checked(env) == []


def test_a_state_is_drawn() -> None:
    env = make_env("xminigrid:MiniGrid-DoorKey-5x5")
    assert env.render is not None
    picture = env.render(env.reset(jax.random.key(0))[0])
    assert (picture.shape, picture.dtype) == ((160, 160, 3), np.uint8)


def test_a_ruleset_of_a_benchmark_is_loaded_only_where_pickles_are_allowed(tmp_path: Path, monkeypatch: Any) -> None:
    rules = {word: np.asarray(value)[None].repeat(3, 0) for word, value in vars(a_ruleset()).items()}
    data = {"goals": rules["goal"], "rules": rules["rules"], "init_tiles": rules["init_tiles"], "num_rules": np.ones(3)}
    (tmp_path / "trivial_21k").write_bytes(bz2.compress(pickle.dumps(data)))
    monkeypatch.setattr(xminigrid.benchmarks, "DATA_PATH", str(tmp_path))
    params = {"benchmark": "trivial-21k", "pickles": True}
    env = make_env("xminigrid:XLand-MiniGrid-R1-9x9", ruleset=2.0, **params)
    assert env.settings == {"env": env.spec.name, "env_args": {"ruleset": 2.0, **params}}
    keeps_its_contract(env)
    with pytest.raises(SettingsError, match="ruleset is 3; trivial-21k has 3, counted from 0"):
        make_env("xminigrid:XLand-MiniGrid-R1-9x9", ruleset=3, **params)
