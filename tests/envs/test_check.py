"""`check_env` finds nothing in a good environment, and names each thing that is wrong with a bad one."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_envs import action_from_observation, counting, nan_at, time_limited
from toys_several import squad

from jaxrl.envs import Env, TimeStep, check_env, make_env
from jaxrl.envs.wrappers import transform_obs
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


# --- what is wrong, and what makes it right -------------------------------------------------------------------------


def constantly(**out: Any) -> Any:
    """Return a step that stays where it is, but for what is given."""
    return lambda state, action, key: (state, TimeStep(state, 1.0, False)._replace(**out))


def nan_reset(key: Any) -> tuple[Any, Any]:
    start, obs = _walker_reset(key)
    return start, jnp.where(jax.random.uniform(jax.random.fold_in(key, 1)) < 0.1, jnp.nan, obs)


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


def blind_step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
    state = state + 2.0 * action - 1.0
    return state, TimeStep(state, 1.0, jnp.abs(state[0]) > 5)


def fixed_reset(key: Any) -> tuple[Any, Any]:
    return jnp.zeros(1), jnp.zeros(1)


def vain_reset(key: Any) -> tuple[Any, Any]:
    start = 0.0 * jax.random.normal(key, (1,))
    return start, start


def resetting_step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
    after, out = _walker_step(state, action, key)
    after = jnp.where(out.terminated, jnp.clip(jax.random.normal(key, (1,)), -1, 1), after)
    return after, out._replace(obs=after)


def in_parts(step: dict[str, Any] | None = None, reset: dict[str, Any] | None = None) -> Env:
    """The walk, whose observations have two more entries, changed after a step or a reset by what is given."""
    entries = {"share": jnp.float32(0.5), "side": (jnp.int32(0),)}
    space = {"place": Box(-100.0, 100.0, (1,)), "share": Box(0.0, 1.0, ()), "side": (Discrete(3),)}
    after = transform_obs(walker(), lambda obs: {"place": obs, **entries, **(step or {})}, space)
    first = transform_obs(walker(), lambda obs: {"place": obs, **entries, **(reset or {})}, space)
    return after._replace(reset=first.reset)


def masked(agents: int | None = None, mask: int = 2) -> Env:
    """Allow each agent one of two actions, drawn anew at every step; the other one pays NaN."""
    shape = () if agents is None else (agents,)

    def look(key: Any) -> tuple[Any, Any]:
        allowed = jax.random.randint(key, shape, 0, 2)
        seen = {"action_mask": jax.nn.one_hot(allowed, mask, dtype=bool), "noise": jax.random.uniform(key, shape)}
        return (allowed, jax.random.uniform(key)), seen

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        after, seen = look(key)
        reward = jnp.where(action == state[0], 1.0, jnp.nan)
        return after, TimeStep(seen, reward, jnp.zeros(shape, bool))

    space = {"action_mask": Box(0, 1, (mask,), bool), "noise": Box(0.0, 1.0, ())}
    return Env(EnvSpec("masked", space, Discrete(2), 20), look, step, agents=agents)


def mortals(poison: float) -> Env:
    """Agents of whom two die before the third, and are shown `poison` then."""
    env = squad(poison=poison)
    space = Box(0.0, 4.0, (2,))
    return env._replace(spec=env.spec._replace(observation_space=space), deterministic=True, fixed_length=True)


LENGTH = "if the task itself ends there, say so with Env(..., fixed_length=True)"
FOUND: dict[str, tuple[Env, str]] = {
    "an observation unlike its space": (walker(space=Box(-9, 9, (7,))), "the observation space has float32[7]"),
    "a reward that is not finite": (nan_at(4, "reward", length=6), "a reward is not finite"),
    "an observation that is not finite": (nan_at(4, "obs", length=6), "a observation is not finite"),
    "a first observation that is not finite": (
        walker(reset=nan_reset),
        "a first observation is not finite; look for a division by zero or an overflow in reset",
    ),
    "out of bounds": (walker(limits=2.0), "outside the declared bounds ... declared -2 to 2"),
    "an entry out of bounds after a step": (
        in_parts(step={"share": jnp.float32(1.5)}),
        "the entry ['share'] of an observation lies outside the declared bounds: seen 0.5 to 1.5, declared 0 to 1",
    ),
    "a choice out of bounds after a reset": (
        in_parts(reset={"side": (jnp.int32(3),)}),
        "the entry ['side'][0] of an observation lies outside the declared bounds: seen 0 to 3, declared 0 to 2",
    ),
    "a mask unlike the actions": (masked(mask=3), "the action_mask of masked is [3]; expected [2]"),
    "a key in the state that stays": (walker(keyed_step(advance=False), keyed_reset), "['key'] does not advance"),
    "ignored keys": (walker(blind_step, fixed_reset), "reset and step both ignore their keys"),
    "a key used in vain": (walker(blind_step, vain_reset), "returns the same state for every key"),
    "no truncation": (walker(constantly(), time_limit=None), "truncation is missing; set EnvSpec.time_limit"),
    "a time limit told as an end": (
        counting(length=12), f"set EnvSpec.time_limit=12 instead of terminating ... {LENGTH}",
    ),
    "a declared time limit told as an end": (
        counting(length=7, time_limit=7), f"terminated at the time limit of 7 steps ... {LENGTH}",
    ),
    "many lengths declared as one": (
        walker()._replace(fixed_length=True), "but the environment has fixed_length: leave it out",
    ),
    "a reset inside a step": (walker(resetting_step), "step resets by itself"),
}  # fmt: skip
"""Environments that are spoilt in one part, and words of the one line about it, in this order."""


@pytest.mark.parametrize("case", FOUND)
def test_one_thing_that_is_wrong_is_found(case: str) -> None:
    env, said = FOUND[case]
    (line,) = check_env(env, STEPS)
    for part in said.split(" ... "):
        assert part in line
        line = line.split(part, 1)[1]


@pytest.mark.parametrize(
    "env",
    [
        walker(),
        time_limited(10),
        action_from_observation(),
        walker(keyed_step(advance=True), keyed_reset),
        walker(blind_step, fixed_reset, deterministic=True),
        counting(length=12)._replace(fixed_length=True),
        counting(length=12, time_limit=12)._replace(fixed_length=True),
        in_parts(),
        masked(),
        masked(agents=3),
        mortals(poison=9.0),
        mortals(poison=float("nan")),
    ],
    ids=[
        *("walk", "limit", "probe", "key that advances", "deterministic", "one length", "limited length", "parts"),
        *("mask", "masks of agents", "dead agents", "dead agents without numbers"),
    ],
)
def test_good_toys_pass(env: Env) -> None:
    assert check_env(env, STEPS) == []


def test_every_finding_is_reported() -> None:
    found = check_env(walker(constantly(reward=jnp.nan), fixed_reset, time_limit=None), STEPS)
    assert len(found) == 3
    for word in ("not finite", "ignore their keys", "truncation"):
        assert any(word in line for line in found)
