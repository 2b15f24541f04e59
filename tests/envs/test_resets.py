"""Where episodes begin: fresh at every step, out of a pool, or shared; each start is whose it is said to be."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from scipy.stats import ks_2samp
from toys_envs import counting, idle, nan_at, rollout

import jaxrl
from jaxrl import train
from jaxrl.cli.config import parse
from jaxrl.envs import Env, make_env, vectorise
from jaxrl.envs.resets import FRESH_BYTES, FRESH_WORK
from jaxrl.errors import SettingsError
from jaxrl.trees import Key
from jaxrl.types import Step


def uneven(num_envs: int = 4) -> tuple[Env, np.ndarray]:
    """An environment that ends its episode where the action says so, and actions that do at odd times."""
    env = counting(length=1_000)

    def step(state: Any, action: Any, key: Any) -> Any:
        state, out = env.step(state, action, key)
        return state, out._replace(terminated=action == 1)

    ends = np.random.default_rng(0).random((120, num_envs)) < np.linspace(0.05, 1.0, num_envs)
    return env._replace(step=step), ends.astype(np.int32)


@cache
def unevenly(resets: str) -> tuple[np.ndarray, Step, np.ndarray]:
    """Return what four such environments show at first and in each step, and their actions."""
    env, actions = uneven()
    first, steps = rollout(vectorise(env, 4, resets), actions)
    return first, steps, actions


@pytest.mark.every_day("fresh", "pool:5")
@pytest.mark.parametrize("resets", ["fresh", "pool", "pool:5", "pool:7", "pool:64"])
def test_no_start_is_used_twice(resets: str) -> None:
    first, steps, actions = unevenly(resets)
    done = actions.astype(bool)
    starts = np.concatenate([first[:, 1], steps.obs[done][:, 1]])
    assert len(np.unique(starts)) == len(starts) == 4 + done.sum()


@pytest.mark.every_day("pool:5", "optimistic:2")
@pytest.mark.parametrize("resets", ["pool", "pool:5", "optimistic", "optimistic:2"])
def test_all_else_is_as_with_fresh_resets(resets: str) -> None:
    fresh, other = (unevenly(kind)[1] for kind in ("fresh", resets))
    np.testing.assert_array_equal(other.obs[:, :, 0], fresh.obs[:, :, 0])
    np.testing.assert_array_equal(other.info["episode_length"], fresh.info["episode_length"])
    # The number of an episode stays its own from its first step to its last.
    np.testing.assert_array_equal(other.final_obs[1:, :, 1], other.obs[:-1, :, 1])


def test_a_pool_makes_as_many_starts_as_there_are_episodes() -> None:
    """With 4 environments and 7 places, 3 are made at once: never more than those handed out and one refill."""
    env, actions = uneven()
    venv = vectorise(env, 4, "pool:7")
    state, _ = jax.jit(venv.reset)(jax.random.key(0))
    step, handed = jax.jit(venv.step), 0
    for t, action in enumerate(actions):
        state, _ = step(state, jnp.asarray(action), jax.random.key(t))
        handed += action.sum()
        assert 0 <= int(state.starts.left) <= 7
        assert int(state.starts.head) == handed % 7


@pytest.mark.slow
def test_starts_of_a_pool_are_distributed_as_fresh_ones() -> None:
    actions = np.random.default_rng(1).integers(0, 2, (1_500, 8), np.int32)
    env = make_env("CartPole-v1", max_steps_in_episode=30)
    starts = {}
    for resets in ("fresh", "pool:11"):
        _, steps = rollout(vectorise(env, 8, resets), actions, seed=3)
        starts[resets] = steps.obs[steps.terminated | steps.truncated]
    for i in range(4):
        assert ks_2samp(starts["fresh"][:, i], starts["pool:11"][:, i]).pvalue > 0.001
    pooled = starts["pool:11"]
    assert abs(np.corrcoef(pooled[1:, 0], pooled[:-1, 0])[0, 1]) < 0.1


@pytest.mark.every_day("optimistic:4-2")
@pytest.mark.parametrize(("resets", "different"), [("optimistic:1", 6), ("optimistic:2", 3), ("optimistic:4", 2)])
def test_optimistic_resets_are_shared_by_those_that_end_together(resets: str, different: int) -> None:
    _, steps = rollout(vectorise(counting(length=1), 6, resets), idle(10, 6))
    assert [len(np.unique(row)) for row in steps.obs[:, :, 1]] == [different] * 10
    assert len(np.unique(steps.obs[:, :, 1])) == 10 * different


def test_one_that_ends_alone_shares_with_none() -> None:
    env, _ = uneven()
    alone = np.eye(4, dtype=np.int32)[np.arange(40) % 4]
    _, steps = rollout(vectorise(env, 4, "optimistic:4"), alone)
    starts = steps.obs[alone.astype(bool)][:, 1]
    assert len(np.unique(starts)) == 40


def heavy() -> Env:
    """Small, but a reset works out a hundred thousand numbers."""
    env = counting()

    def reset(key: Key) -> Any:
        state, obs = env.reset(key)
        return state, obs + 0 * jnp.sum(jax.random.uniform(key, (FRESH_WORK,)))

    return env._replace(reset=reset)


def test_the_choice_goes_by_size_and_work() -> None:
    assert vectorise(make_env("CartPole-v1"), 8).resets == "fresh"
    assert vectorise(make_env("Freeway-MinAtar"), 8).resets == "fresh"
    assert vectorise(counting(ballast=FRESH_BYTES), 8).resets == "pool:16"
    assert vectorise(heavy(), 8).resets == "pool:16"


def test_a_start_that_is_not_finite_costs_one_step() -> None:
    env = nan_at(1_000, length=2)
    broken = env._replace(reset=partial(_sometimes_nan, env))
    first, steps = rollout(vectorise(broken, 4, "pool:6"), idle(60, 4))
    assert np.isfinite(first).all()
    assert np.isfinite(steps.obs).all()
    begins_badly = ~np.asarray(steps.obs_valid)
    assert begins_badly.any()
    assert not steps.valid[1:][begins_badly[:-1]].any()
    assert steps.truncated[1:][begins_badly[:-1]].all()


def _sometimes_nan(env: Env, key: Key) -> Any:
    state, obs = env.reset(key)
    return state, jnp.where(state.episode > 0.7, jnp.nan, obs)


# --- as a setting of a run --------------------------------------------------------------------------------------------

SMALL = ("--num-envs", "4", "--rollout", "8", "--epochs", "1", "--minibatches", "1", "--agent.features", "4")
ARGS = ("ppo", *SMALL, "--eval-interval", "2", "--eval-episodes", "2", "--save-interval", "2", "--quiet")


@pytest.mark.slow
def test_a_run_from_before_goes_on_with_fresh_resets(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train.main([*ARGS, "--max-opts", "2", "--run-dir", str(run)]) == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config.pop("resets") == "fresh"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert parse(["--resume", str(run)]).config.resets == "fresh"
    assert train.main(["--resume", str(run), "--max-opts", "4"]) == 0


def test_one_line_says_that_a_pool_was_chosen() -> None:
    env = counting(ballast=FRESH_BYTES)
    strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=4, rollout=8, epochs=1, minibatches=1)
    assert [note.split(":")[0] for note in strategy.info.notes] == ["resets pool"]
    assert strategy.info.settings is not None
    assert strategy.info.settings["resets"] == "pool:8"


@pytest.mark.parametrize(
    ("resets", "told"),
    [
        ("pol", "did you mean pool"),
        ("pool:", "expected fresh, pool, pool:K"),
        ("fresh:3", "expected fresh, pool, pool:K"),
        ("pool:x", "expected fresh, pool, pool:K"),
        (
            "pool:4",
            "expected more than the 4 environments that it serves, since all episodes may end at once, as in pool:8",
        ),
        ("optimistic:0", "the number that shares a reset is 0"),
        ("optimistic:5", "the number that shares a reset is 5"),
    ],
)
def test_bad_resets(resets: str, told: str) -> None:
    with pytest.raises(SettingsError) as raised:
        vectorise(counting(), 4, resets)
    assert told in str(raised.value)


def test_environments_on_the_host_have_no_pool() -> None:
    with pytest.raises(SettingsError, match="reset only what ended: leave resets out"):
        jaxrl.off_policy(jaxrl.gymnasium_env("CartPole-v1"), jaxrl.dqn(), resets="pool")
