"""What every processor keeps: a new one is tested here by having a row."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.cli.algos import ProcessorConfig, build_processor
from jaxrl.processors import init_processor
from jaxrl.types import Step

ROWS: dict[str, dict[str, Any]] = {
    "one_step": {},
    "n_step": {"n_step": 3},
    "frame_stack": {"frame_stack": 2},
    "reward_scale": {"reward_scale": 0.1},
    "reward_clip": {"reward_clip": 1.0},
    "one_hot": {"one_hot": 4},
    "normalise_obs": {"normalise_obs": True},
    "normalise_reward": {"normalise_reward": True},
    "all": {
        "normalise_obs": True,
        "frame_stack": 2,
        "reward_scale": 0.5,
        "reward_clip": 2.0,
        "normalise_reward": True,
        "n_step": 2,
    },
}
N, T = 2, 9

pytestmark = pytest.mark.parametrize("name", ROWS)


@cache
def processor_of(name: str) -> Any:
    return build_processor(ProcessorConfig(**ROWS[name]))


def space_of(name: str) -> jaxrl.Box:
    """Return the space of the environment's observations: whole numbers for what is for these."""
    return jaxrl.Box(-5.0, 3.0, (3,), "int32" if "one_hot" in ROWS[name] else "float32")


def steps(name: str, seed: int = 0) -> tuple[jax.Array, Step]:
    """Return first observations and `T` random steps of two environments, of which some end an episode."""
    rng, dtype = np.random.default_rng(seed), space_of(name).dtype
    final = jnp.asarray(rng.uniform(-5, 3, (T, N, 3)), dtype)
    ended = jnp.asarray(rng.random((T, N)) < 0.3)
    fresh = jnp.asarray(rng.uniform(-5, 3, (T, N, 3)), dtype)
    reward = jnp.asarray(rng.normal(size=(T, N)), jnp.float32)
    action = jnp.asarray(rng.integers(0, 2, (T, N)), jnp.int32)
    cut = jnp.asarray(rng.random((T, N)) < 0.5)
    obs = jnp.where(ended[..., None], fresh, final)
    step = Step(action, (), reward, ended & ~cut, ended & cut, final, obs, {"episode_return": reward}, jnp.ones((T, N)))
    return jnp.asarray(rng.uniform(-5, 3, (N, 3)), dtype), step


def running(processor: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a compiled `(first, steps) -> (state, out, seen)`.

    That is the last state, all transitions `[T, N, ...]`, and what the policy saw after each step.
    """

    def one(state: Any, step: Step) -> Any:
        state, out = processor.process(state, step)
        return state, (out, processor.observe(state))

    @jax.jit
    def whole(first: jax.Array, several: Step) -> Any:
        state, told = jax.lax.scan(one, init_processor(processor, first, several.action[0], ()), several)
        return state, *told

    return whole


@cache
def running_of(name: str) -> Callable[..., tuple[Any, Any, Any]]:
    return running(processor_of(name))


def test_what_the_policy_sees_is_of_the_space_that_is_said(name: str) -> None:
    processor = processor_of(name)
    _, out, seen = running_of(name)(*steps(name))
    space = processor.space(space_of(name))
    for obs in (seen, out.obs, out.next_obs):
        assert obs.shape == (T, N, *space.shape)
        assert obs.dtype == space.dtype
        assert np.isfinite(obs).all()


def test_transitions_come_late_by_the_horizon_and_those_before_are_worth_nothing(name: str) -> None:
    processor = processor_of(name)
    _, out, _ = running_of(name)(*steps(name))
    weight = np.asarray(out.weight)
    assert np.all(weight[: processor.horizon] == 0)
    assert np.all(weight[processor.horizon :] == 1)


def test_only_a_termination_is_worth_nothing_afterwards(name: str) -> None:
    """A transition over `k` steps is discounted by `0.99^k`, and by 0 if it ended; never by anything between."""
    processor, (first, several) = processor_of(name), steps(name)
    _, out, _ = running_of(name)(first, several)
    window = processor.horizon + 1
    late = lambda x: np.asarray(x)[processor.horizon :]
    allowed = {0.0, *(np.float32(0.99) ** np.arange(1, window + 1)).astype(np.float32).tolist()}
    assert np.all([any(np.isclose(x, a) for a in allowed) for x in late(out.discount).ravel()])
    if window == 1:
        np.testing.assert_array_equal(np.asarray(out.discount) == 0, several.terminated)


def test_what_comes_later_changes_nothing_that_was_said_before(name: str) -> None:
    first, several = steps(name)
    _, out, seen = running_of(name)(first, several)
    other = jax.tree.map(lambda a, b: jnp.concatenate([a[:5], b[5:]]), several, steps(name, seed=1)[1])
    _, again, seen_again = running_of(name)(first, other)
    for a, b in zip(jax.tree.leaves((out, seen)), jax.tree.leaves((again, seen_again)), strict=True):
        np.testing.assert_array_equal(a[:5], b[:5])
    assert not np.array_equal(out.reward, again.reward)


@pytest.mark.every_day("frame_stack", "normalise_obs", "normalise_reward", "all")  # the others learn nothing
def test_frozen_it_learns_nothing_more(name: str) -> None:
    processor = processor_of(name)
    state, _, _ = running_of(name)(*steps(name))
    learnt = processor.get_stats(state)
    frozen = processor.freeze(learnt)
    first, several = steps(name, seed=1)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), several)
    twice = twice._replace(truncated=twice.truncated.at[T - 1].set(~twice.terminated[T - 1]))
    twice = twice._replace(obs=twice.obs.at[T - 1].set(first))
    _, out, seen = running(frozen)(first, twice)
    later = slice(processor.horizon + ROWS[name].get("frame_stack", 1), T - 1)
    np.testing.assert_allclose(seen[later], seen[T:][later], rtol=1e-6)
    if not ROWS[name].get("normalise_reward"):  # a matter of training alone: no policy sees rewards
        np.testing.assert_allclose(out.reward[later], out.reward[T:][later], rtol=1e-6)


def test_settings_rebuild_it(name: str) -> None:
    processor = processor_of(name)
    said = {**ROWS[name], "discount": 0.99, "n_step": ROWS[name].get("n_step", 1)}
    assert {k: processor.settings[k] for k in said} == said
    again = build_processor(ProcessorConfig(**processor.settings))
    assert again.settings == processor.settings
