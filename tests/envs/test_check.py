"""`check_env` finds nothing in a good environment, and names each thing that is wrong with a bad one."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_envs import action_from_observation, counting, nan_at, time_limited

from jaxrl.envs import Env, TimeStep, check_env, make_env
from jaxrl.spaces import Box, Discrete, EnvSpec

STEPS = 200


def walker(
    step: Any = None,
    reset: Any = None,
    time_limit: int | None = 20,
    space: Box | None = None,
    limits: float = 100.0,
    deterministic: bool = False,
) -> Env:
    """A good environment, a random walk from a random place, to be spoilt in one part by each test."""
    spec = EnvSpec("walker", space or Box(-limits, limits, (1,)), Discrete(2), time_limit)
    return Env(spec, reset or _walker_reset, step or _walker_step, deterministic=deterministic)


def _walker_reset(key: Any) -> tuple[Any, Any]:
    start = jax.random.normal(key, (1,))
    return start, start


def _walker_step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
    state = state + 2.0 * action - 1.0 + 0.1 * jax.random.normal(key, (1,))
    return state, TimeStep(state, 1.0, jnp.abs(state[0]) > 5)


@pytest.mark.every_day("CartPole-v1")
@pytest.mark.parametrize("name", ["CartPole-v1", "Catch-bsuite", "Breakout-MinAtar"])
def test_good_environments_of_gymnax_pass(name: str) -> None:
    assert check_env(make_env(name), STEPS) == []


@pytest.mark.parametrize("env", [walker(), counting(length=5), time_limited(10), action_from_observation()])
def test_good_toys_pass(env: Env) -> None:
    assert check_env(env, STEPS) == []


def finding(env: Env, steps: int = STEPS) -> str:
    (found,) = check_env(env, steps)
    return found


# --- types ------------------------------------------------------------------------------------------------------


def test_unstable_structure() -> None:
    found = finding(walker(lambda s, a, k: ((s, s), TimeStep(s, 1.0, False))))
    assert "the state after step has no leaf" in found
    assert "keep the structure the same" in found


def test_unstable_dtype() -> None:
    found = finding(walker(lambda s, a, k: (s, TimeStep(s.astype(int), 1.0, False))))
    assert "the observation after step has int32[1]" in found
    assert "float32[1]" in found


def test_unstable_shape() -> None:
    found = finding(walker(lambda s, a, k: (s, TimeStep(jnp.zeros(3), 1.0, False))))
    assert "the observation after step has float32[3]" in found


def test_reward_that_is_not_a_scalar() -> None:
    assert "reward has shape (1,)" in finding(walker(lambda s, a, k: (s, TimeStep(s, s, False))))


def test_observation_unlike_its_space() -> None:
    assert "the observation space has float32[7]" in finding(walker(space=Box(-9, 9, (7,))))


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reward", "obs"])
def test_nan(where: str) -> None:
    name = {"reward": "reward", "obs": "observation"}[where]
    assert f"a {name} is not finite" in finding(nan_at(4, where, length=6))


def test_nan_from_reset() -> None:
    def reset(key: Any) -> tuple[Any, Any]:
        start, obs = _walker_reset(key)
        return start, jnp.where(jax.random.uniform(jax.random.fold_in(key, 1)) < 0.1, jnp.nan, obs)

    assert finding(walker(reset=reset)) == (
        "a first observation is not finite; look for a division by zero or an overflow in reset"
    )


def test_out_of_bounds() -> None:
    found = finding(walker(limits=2.0))
    assert "outside the declared bounds" in found
    assert "declared -2 to 2" in found


# --- keys -------------------------------------------------------------------------------------------------------


def keyed_step(advance: bool) -> Any:
    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        place, key = state["place"], state["key"]
        following, draw = jax.random.split(key)
        place = place + jax.random.normal(draw, (1,))
        state = {"place": place, "key": following if advance else key}
        return state, TimeStep(place, 1.0, jnp.abs(place[0]) > 3)

    return step


def keyed_reset(key: Any) -> tuple[Any, Any]:
    place = jax.random.uniform(key, (1,))
    return {"place": place, "key": key}, place


def test_a_key_in_the_state_that_never_advances() -> None:
    found = finding(walker(keyed_step(advance=False), keyed_reset))
    assert "['key'] does not advance" in found


def test_a_key_in_the_state_that_advances() -> None:
    assert check_env(walker(keyed_step(advance=True), keyed_reset), STEPS) == []


def blind_step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
    state = state + 2.0 * action - 1.0
    return state, TimeStep(state, 1.0, jnp.abs(state[0]) > 5)


def fixed_reset(key: Any) -> tuple[Any, Any]:
    return jnp.zeros(1), jnp.zeros(1)


def test_ignored_keys() -> None:
    assert "reset and step both ignore their keys" in finding(walker(blind_step, fixed_reset))


def test_a_deterministic_environment_may_say_so() -> None:
    assert check_env(walker(blind_step, fixed_reset, deterministic=True), STEPS) == []


def test_a_key_used_in_vain() -> None:
    def reset(key: Any) -> tuple[Any, Any]:
        start = 0.0 * jax.random.normal(key, (1,))
        return start, start

    assert "returns the same state for every key" in finding(walker(blind_step, reset))


# --- ends -------------------------------------------------------------------------------------------------------


def test_missing_truncation() -> None:
    env = walker(lambda s, a, k: (s, TimeStep(s, 1.0, False)), time_limit=None)
    assert "truncation is missing; set EnvSpec.time_limit" in finding(env)


def test_a_time_limit_told_as_termination() -> None:
    assert "set EnvSpec.time_limit=12 instead of terminating" in finding(counting(length=12))


def test_a_declared_time_limit_told_as_termination() -> None:
    assert "terminated at the time limit of 7 steps" in finding(counting(length=7, time_limit=7))


@pytest.mark.parametrize("limit", [None, 12])
def test_a_task_of_one_length_may_say_so(limit: int | None) -> None:
    env = counting(length=12, time_limit=limit)
    assert "if the task itself ends there, say so with Env(..., fixed_length=True)" in finding(env)
    assert check_env(env._replace(fixed_length=True), STEPS) == []


def test_a_task_of_many_lengths_that_says_it_has_one() -> None:
    assert "but the environment has fixed_length: leave it out" in finding(walker()._replace(fixed_length=True))


def test_a_reset_inside_a_step() -> None:
    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        after, out = _walker_step(state, action, key)
        after = jnp.where(out.terminated, jnp.clip(jax.random.normal(key, (1,)), -1, 1), after)
        return after, out._replace(obs=after)

    assert "step resets by itself" in finding(walker(step))


def test_every_finding_is_reported() -> None:
    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        return state, TimeStep(state, jnp.nan, False)

    found = check_env(walker(step, fixed_reset, time_limit=None), STEPS)
    assert len(found) == 3
    assert [any(word in line for line in found) for word in ("not finite", "ignore their keys", "truncation")] == [
        True
    ] * 3
