"""Frame stacks that never show the previous episode, reward scale and clip, and chains of processors."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import require_same_bits
from toys_envs import counting, rollout, time_limited
from toys_processors import processed, random_steps

from jaxrl.envs import vectorise
from jaxrl.errors import SettingsError
from jaxrl.processors import (
    Processor,
    chain,
    frame_stack,
    n_step,
    normalise_reward,
    one_step,
    reward_clip,
    reward_scale,
)
from jaxrl.spaces import Box, Discrete, MultiDiscrete, space_struct
from jaxrl.types import Step


def run(processor: Processor, first: Any, steps: Step) -> tuple[Any, Any, Any]:
    """Return what the policy sees at first, and step by step what came out and what the policy sees then."""
    seen, out, _ = processed(processor, first, steps)
    return seen[0], out, seen[1:]


def counted(make: Any, length: int, steps: int, num_envs: int = 2) -> tuple[Any, Step]:
    """Return the first observations and the steps of counting environments whose episodes have that length."""
    first, whole = _counted(make, length, num_envs)
    return first, jax.tree.map(lambda x: x[:steps], whole)


@cache
def _counted(make: Any, length: int, num_envs: int) -> tuple[Any, Step]:
    return rollout(vectorise(make(length), num_envs), np.zeros((40, num_envs), np.int32))


def clocks(stack: np.ndarray, frames: int) -> list:
    """Of stacks of `counting`'s observations keep the step counts, for the first environment."""
    return stack.reshape(*stack.shape[:-1], frames, 2)[..., 0, :, 0].tolist()


# --- frame stack --------------------------------------------------------------------------------------------------


def test_the_newest_frame_stands_last_and_an_episode_begins_with_copies_of_its_first() -> None:
    first, steps = counted(counting, 4, 6)
    start, out, seen = run(frame_stack(3), first, steps)
    assert clocks(start[None], 3) == [[0, 0, 0]]
    assert clocks(seen, 3) == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0], [0, 0, 1], [0, 1, 2]]
    np.testing.assert_array_equal(out.obs, seen)


def test_the_successor_of_a_last_step_ends_the_old_stack() -> None:
    for make in (counting, time_limited):
        first, steps = counted(make, 4, 5)
        _, out, _ = run(frame_stack(3), first, steps)
        assert clocks(out.final_obs, 3) == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 0, 1]]


def test_no_stack_holds_two_episodes() -> None:
    first, steps = counted(counting, 3, 40, num_envs=5)
    _, out, seen = run(frame_stack(4), first, steps)
    for stack in (seen, out.final_obs):
        episodes = stack.reshape(*stack.shape[:-1], 4, 2)[..., 1]
        np.testing.assert_array_equal(episodes, np.broadcast_to(episodes[..., :1], episodes.shape))
    assert len(np.unique(seen.reshape(-1, 4, 2)[:, 0, 1])) > 60


@pytest.mark.every_day("shape1")
@pytest.mark.parametrize("shape", [(), (5, 4, 2), (1,), (3,), (4, 4)])
def test_compiled_and_uncompiled_stacks_are_equal(shape: tuple[int, ...]) -> None:
    """Shifting an array in place has gone wrong in compilers before."""
    first, steps = random_steps(shape, steps=5, num_envs=3)
    compiled = run(frame_stack(4), first, steps)
    with jax.disable_jit():
        plain = run(frame_stack(4), first, steps)
    assert compiled[0].shape == (3, *(shape or (1,))[:-1], 4 * (shape or (1,))[-1])
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_frame_changes_nothing() -> None:
    first, steps = counted(counting, 3, 5)
    _, out, seen = run(frame_stack(1), first, steps)
    np.testing.assert_array_equal(seen, steps.obs)
    np.testing.assert_array_equal(out.final_obs, steps.final_obs)


@pytest.mark.parametrize(
    ("space", "stacked"),
    [
        (Box(-1.0, 2.0, (3,)), Box(-1.0, 2.0, (9,))),
        (Box(0.0, 1.0, (8, 8, 2), "bool"), Box(0.0, 1.0, (8, 8, 6), "bool")),
        (Box(-1.0, 1.0, ()), Box(-1.0, 1.0, (3,))),
        (Box((0.0, 1.0), (2.0, 3.0), (2,)), Box((0.0, 1.0) * 3, (2.0, 3.0) * 3, (6,))),
        (Discrete(5), MultiDiscrete((5, 5, 5))),
        (MultiDiscrete((2, 4)), MultiDiscrete((2, 4, 2, 4, 2, 4))),
        ({"a": Discrete(2), "b": Box(0.0, 1.0, (1,))}, {"a": MultiDiscrete((2,) * 3), "b": Box(0.0, 1.0, (3,))}),
    ],
)
def test_the_space_is_that_of_what_the_policy_sees(space: Any, stacked: Any) -> None:
    processor = frame_stack(3)
    assert processor.space(space) == stacked
    obs = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), space_struct(space))
    seen = processor.observe(processor.init(obs))
    assert jax.tree.map(lambda x: (x.shape[1:], x.dtype), seen) == jax.tree.map(
        lambda x: (x.shape, x.dtype), space_struct(stacked)
    )


def test_bounds_of_stacked_pictures_follow_their_entries() -> None:
    """Each row of `[[1, 2], [3, 4]]` is repeated along the last axis."""
    stacked = frame_stack(2).space(Box((1.0, 2.0, 3.0, 4.0), 9.0, (2, 2)))
    assert stacked == Box((1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0), 9.0, (2, 4))


# --- rewards --------------------------------------------------------------------------------------------------------


def test_rewards_are_scaled_and_nothing_else_is_as_the_return_that_is_recorded() -> None:
    first, steps = counted(counting, 3, 4)
    start, out, seen = run(reward_scale(0.5), first, steps)
    assert out.reward[:, 0].tolist() == [0.5, 1.0, 1.5, 0.5]
    assert out.info["episode_return"][:, 0].tolist() == [1, 3, 6, 1]
    np.testing.assert_array_equal(start, first)
    np.testing.assert_array_equal(seen, steps.obs)
    require_same_bits(out._replace(reward=()), steps._replace(reward=()))


def test_rewards_are_clipped_on_both_sides() -> None:
    first, steps = counted(counting, 3, 4)
    steps = steps._replace(reward=np.array([[-5, 5], [-1, 1], [-0.5, 0.25], [0, 3]], np.float32))
    _, out, _ = run(reward_clip(1.0), first, steps)
    assert out.reward.tolist() == [[-1, 1], [-1, 1], [-0.5, 0.25], [0, 1]]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        *((frame_stack, value) for value in (0, -1, 2.5)),
        *((reward_scale, value) for value in (float("nan"), float("inf"), "1")),
        (reward_clip, -1.0),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(make: Any, value: Any) -> None:
    with pytest.raises(SettingsError, match=make.__name__):
        make(value)


# --- chains -----------------------------------------------------------------------------------------------------------


def test_a_chain_runs_from_left_to_right() -> None:
    """Rewards 1, 2, 3: doubled and then clipped at 3 they are 2, 3, 3; clipped first they are 2, 4, 6."""
    first, steps = counted(counting, 3, 3)
    scaled_first = run(chain(reward_scale(2.0), reward_clip(3.0), one_step(0.5)), first, steps)[1]
    clipped_first = run(chain(reward_clip(3.0), reward_scale(2.0), one_step(0.5)), first, steps)[1]
    assert scaled_first.reward[:, 0].tolist() == [2, 3, 3]
    assert clipped_first.reward[:, 0].tolist() == [2, 4, 6]


def test_n_steps_of_stacked_frames() -> None:
    """Episodes of 3 steps cut by a time limit, stacks of 2, windows of 2: both ends of each window are stacks."""
    first, steps = counted(time_limited, 3, 7)
    processor = chain(frame_stack(2), n_step(2, 0.5))
    start, out, seen = run(processor, first, steps)
    out = jax.tree.map(lambda x: x[1:], out)
    assert clocks(start[None], 2) == [[0, 0]]
    assert clocks(out.obs, 2) == [[0, 0], [0, 1], [1, 2]] * 2
    assert clocks(out.next_obs, 2) == [[1, 2], [2, 3], [2, 3]] * 2
    assert out.reward[:, 0].tolist() == [2, 3.5, 3] * 2
    assert out.discount[:, 0].tolist() == [0.25, 0.25, 0.5] * 2
    assert clocks(seen, 2) == [[0, 1], [1, 2], [0, 0], [0, 1], [1, 2], [0, 0], [0, 1]]
    assert processor.horizon == 1
    assert processor.makes_transitions


def test_a_chains_space_and_settings_are_those_of_its_parts() -> None:
    processor = chain(frame_stack(2), reward_clip(1.0), n_step(3, 0.9))
    assert processor.space(Box(0.0, 1.0, (4,))) == Box(0.0, 1.0, (8,))
    assert processor.settings == {"frame_stack": 2, "reward_clip": 1.0, "n_step": 3, "discount": 0.9}


@pytest.mark.parametrize(
    "parts",
    [
        (reward_clip(1.0), reward_scale(2.0)),
        (reward_scale(2.0), reward_scale(3.0)),
        (normalise_reward(0.9),),
    ],
    ids=["another order", "twice", "two discounts"],
)
def test_a_chain_that_settings_would_build_otherwise_has_none(parts: tuple) -> None:
    assert chain(*parts, one_step(0.5)).settings is None
    assert chain(parts[0], one_step(0.9)).settings is not None


@pytest.mark.parametrize(
    "parts",
    [(), (reward_scale(1.0),), (one_step(), reward_scale(1.0)), (one_step(), one_step()), (frame_stack(2),)],
)
def test_exactly_the_last_part_makes_transitions(parts: tuple) -> None:
    with pytest.raises(SettingsError, match=r"must make transitions.*one_step\(\) or n_step\(n\)"):
        chain(*parts)
