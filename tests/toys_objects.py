"""A walk whose every number can be worked out by hand, for adapters of objects of other libraries."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun
from toys_envs import rollout

import jaxrl
from jaxrl import evaluate, train
from jaxrl.envs import vectorise
from jaxrl.errors import SettingsError
from jaxrl.types import Step

GOAL, LIMIT = 4, 6


class Walk(NamedTuple):
    place: Any
    """From 0, where one falls, to `GOAL`; 1 or 2 at the start."""
    steps: Any
    key: Any
    """For what is drawn in steps: one in ten goes nowhere."""


def begin(key: Any) -> Walk:
    mine, own = jax.random.split(key)
    return Walk(jax.random.randint(mine, (), 1, 3), jnp.int32(0), own)


def advance(walk: Walk, action: Any) -> tuple[Walk, dict[str, Any]]:
    """Go left (0) or right (1); reaching the goal pays 1 and falling -1, both ends; `LIMIT` steps are cut."""
    mine, own = jax.random.split(walk.key)
    slipped = jax.random.bernoulli(mine, 0.1)
    place = walk.place + jnp.where(slipped, 0, 2 * action.astype(jnp.int32) - 1)
    walk = Walk(place, walk.steps + 1, own)
    ended = (place <= 0) | (place >= GOAL)
    reward = jnp.where(place >= GOAL, 1.0, jnp.where(place <= 0, -1.0, -0.01))
    return walk, {
        "reward": reward,
        "terminated": ended,
        "truncated": (walk.steps >= LIMIT) & ~ended,
        "slipped": slipped,
        "place": place,
    }


def seen(walk: Walk) -> Any:
    return jnp.stack([walk.place, walk.steps]).astype(jnp.float32)


def walking(name: str = "walk") -> jaxrl.Env:
    """Return the walk as an environment of jaxrl."""

    def reset(key: Any) -> Any:
        walk = begin(key)
        return walk, seen(walk)

    def step(walk: Any, action: Any, key: Any) -> Any:
        walk, out = advance(walk, action)
        info = {"slipped": out["slipped"].astype(jnp.float32), "inner/place": out["place"].astype(jnp.float32)}
        return walk, jaxrl.TimeStep(seen(walk), out["reward"], out["terminated"], out["truncated"], info)

    spec = jaxrl.EnvSpec(name, jaxrl.Box(0.0, 9.0, (2,)), jaxrl.Discrete(2))
    return jaxrl.Env(spec, reset, step)


def walked(env: jaxrl.Env, actions: Any, seed: int = 0) -> tuple[Any, Step]:
    return rollout(vectorise(env, actions.shape[1]), actions, seed)


def random_actions(steps: int = 40, num_envs: int = 8) -> Any:
    return np.random.default_rng(0).integers(0, 2, (steps, num_envs)).astype(np.int32)


def is_the_walk(env: jaxrl.Env) -> None:
    """Assert that `env` is the walk, to the bit, over many episodes; and what its ends are."""
    assert env.spec == walking(env.spec.name).spec
    assert jaxrl.check_env(env) == []
    mine, theirs = (walked(made, random_actions()) for made in (walking(), env))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    _, steps = theirs
    place, number = steps.final_obs[..., 0], steps.final_obs[..., 1]
    assert steps.terminated.any()
    assert steps.truncated.any()
    np.testing.assert_array_equal(steps.terminated, (place <= 0) | (place >= GOAL))
    np.testing.assert_array_equal(steps.truncated, (number == LIMIT) & ~steps.terminated)
    np.testing.assert_array_equal(steps.reward[steps.terminated], np.where(place[steps.terminated] >= GOAL, 1, -1))
    ends = steps.terminated | steps.truncated
    np.testing.assert_array_equal(steps.obs[ends][:, 1], 0)  # the next episode begins where the last one ended
    np.testing.assert_array_equal(steps.obs[~ends], steps.final_obs[~ends])
    np.testing.assert_array_equal(steps.info["inner/place"], place)


def keeps_to_its_mask(env: jaxrl.Env) -> None:
    """Of the walk whose mask forbids to go left."""
    strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, minibatches=1)
    policy: Any = strategy.policy
    params = begun(lambda key: policy.params(strategy.init(key)))
    judged = jaxrl.Evaluator(env, policy, 64)(params, jax.random.key(1))
    assert (judged.returns > -0.1).all(), "who may only go right does not fall"
    assert judged.returns.mean() > 0.8


FLAGS = (
    *("ppo", "--num-envs", "16", "--rollout", "16", "--epochs", "2", "--minibatches", "2", "--agent.features", "16"),
    *("--agent.lr", "1e-2", "--eval-interval", "0", "--quiet", "--run-dir", "run"),
)


def is_learnt_from_the_command_line(walk: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the present directory."""
    assert train.main([*FLAGS, "--env", walk, "--env-args", "limit", "5", "--max-opts", "120"]) == 0
    assert evaluate.main(["run", "--env", walk, "--episodes", "100"]) == 0
    told = capsys.readouterr().out
    score = float(told.split("return ")[1].split()[0])
    assert score > 0.85  # whoever always goes right comes to the goal, but for a few who slip too often
    policy = jaxrl.load_policy("run")
    assert [int(policy([place, 1.0])) for place in (1.0, 2.0, 3.0)] == [1, 1, 1]


def is_refused_by_the_command_line(env: str, said: str) -> None:
    """In one line, with exit code 2."""
    with pytest.raises(SettingsError) as refused:
        train.main([*FLAGS[:-2], "--env", env, "--max-opts", "4"])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
