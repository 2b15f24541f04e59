"""Running normalisation: exact moments, what the policy sees by them, and rewards against numbers worked by hand."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import require_same_bits
from toys_envs import counting, rollout
from toys_processors import processed, random_steps
from toys_steps import stepped

from jaxrl.agents import Agent
from jaxrl.envs import Env, TimeStep, vectorise
from jaxrl.processors import Processor, chain, frame_stack, init_processor, normalise_obs, normalise_reward, one_step
from jaxrl.processors.normalise import Moments, init_moments, update_moments
from jaxrl.spaces import Box, EnvSpec
from jaxrl.strategies import on_policy
from jaxrl.types import Step

OBS_ONLY = chain(normalise_obs(), one_step())
ROWS = np.random.default_rng(0).normal(3.0, 2.0, (24, 3)).astype(np.float32)


# --- moments ------------------------------------------------------------------------------------------------------

take_in = jax.jit(update_moments)


def merged(chunks: list[np.ndarray]) -> Moments:
    """Take in `chunks` one after the other."""
    moments = init_moments(chunks[0].shape[1:])
    for chunk in chunks:
        moments = take_in(moments, jnp.asarray(chunk))
    return moments


def assert_moments_of(moments: Moments, rows: np.ndarray, rtol: float = 1e-5) -> None:
    rows = rows.astype(np.float64)
    assert float(moments.count) == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=rtol)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=rtol)


FAR = (ROWS + np.float32(10_000)).astype(np.float32)
"""A sum of squares less the square of a sum would have nothing left of the variance here."""


@pytest.mark.parametrize(
    ("rows", "cuts", "rtol"),
    [
        (ROWS, [], 1e-5),
        (ROWS, range(1, 24), 1e-5),
        (ROWS, [1], 1e-5),
        (ROWS, [8, 8], 1e-5),
        (ROWS, [2, 5, 10], 1e-5),
        (FAR, range(3, 24, 3), 1e-3),
        (ROWS[:, 0], [12], 1e-5),
        (ROWS.reshape(6, 2, 3, 2), [3], 1e-5),
    ],
    ids=["whole", "one by one", "one first", "of none", "uneven", "far from zero", "numbers", "pictures"],
)
def test_moments_are_those_of_all_rows_however_they_were_cut(rows: np.ndarray, cuts: Any, rtol: float) -> None:
    assert_moments_of(merged(np.split(rows, cuts)), rows, rtol)


def test_rows_outside_the_mask_are_left_out() -> None:
    where = np.arange(24) % 3 != 1
    spoilt = np.where(where[:, None], ROWS, 1e9).astype(np.float32)
    moments = take_in(init_moments((3,)), jnp.asarray(spoilt[:10]), jnp.asarray(where[:10]))
    moments = take_in(moments, jnp.asarray(spoilt[10:]), jnp.asarray(where[10:]))
    assert_moments_of(moments, ROWS[where])


@pytest.mark.parametrize("placeholder", [0.0, np.nan])
def test_zeros_in_place_of_a_first_observation_are_not_counted(placeholder: float) -> None:
    seen = np.arange(24) % 3 != 1
    rows = np.where(seen[:, None], ROWS, np.float32(placeholder))
    processor, nothing = OBS_ONLY, jnp.zeros(6)
    state = init_processor(processor, jnp.asarray(rows[:6]), nothing, (), jnp.asarray(seen[:6]))
    process = jax.jit(processor.process)
    for k in range(1, 4):
        here = slice(6 * k, 6 * k + 6)
        obs, no = jnp.asarray(rows[here]), jnp.zeros(6, bool)
        step = Step(nothing, (), nothing, no, ~no, obs, obs, valid=no, obs_valid=jnp.asarray(seen[here]))
        state, _ = process(state, step)
    assert_moments_of(processor.get_stats(state)[0][0], ROWS[seen])


def test_a_mask_without_rows_changes_nothing() -> None:
    before = merged([ROWS])
    for start in (before, init_moments((3,))):
        after = take_in(start, jnp.asarray(ROWS), jnp.zeros(24, bool))
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(start), strict=True):
            np.testing.assert_array_equal(a, b)


def test_many_small_merges_stay_exact() -> None:
    rows = np.random.default_rng(1).normal(-5.0, 0.5, (20_000, 4)).astype(np.float32)
    one = lambda moments, chunk: (update_moments(moments, chunk), ())
    many, _ = jax.jit(lambda chunks: jax.lax.scan(one, init_moments(()), chunks))(rows)
    assert_moments_of(many, rows.ravel(), rtol=1e-3)


def test_the_variance_is_one_before_there_are_two_rows() -> None:
    np.testing.assert_array_equal(init_moments((3,)).variance, [1, 1, 1])
    np.testing.assert_array_equal(merged([ROWS[:1]]).variance, [1, 1, 1])


# --- observations ---------------------------------------------------------------------------------------------------


def scaled(x: np.ndarray, history: np.ndarray) -> np.ndarray:
    """Scale `x` by the moments of `history` `[T, N, ...]`."""
    rows = history.reshape(-1, *history.shape[2:]).astype(np.float64)
    return np.clip((x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), -10, 10)


@jax.jit
def first_seen(obs: Any) -> Any:
    """Return what the policy sees of first observations."""
    envs = jax.tree.leaves(obs)[0].shape[0]
    return OBS_ONLY.observe(init_processor(OBS_ONLY, obs, jnp.zeros(envs, jnp.int32), ()))


def test_the_policy_sees_observations_scaled_by_the_moments_so_far_each_of_which_counts_once() -> None:
    first, steps = random_steps()
    seen, out, _ = processed(OBS_ONLY, first, steps)
    history = np.concatenate([first[None], steps.obs])
    for t in range(len(history)):
        np.testing.assert_allclose(seen[t], scaled(history[t], history[: t + 1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out.obs, seen[:-1])


def test_the_successor_is_scaled_by_the_same_moments_as_what_the_policy_sees_next() -> None:
    first, steps = random_steps()
    seen, out, _ = processed(OBS_ONLY, first, steps)
    history = np.concatenate([first[None], steps.obs])
    for t in range(len(steps.reward)):
        expected = scaled(steps.final_obs[t], history[: t + 2])
        np.testing.assert_allclose(out.next_obs[t], expected, rtol=1e-4, atol=1e-5)
    going_on = ~(steps.terminated | steps.truncated)
    assert 0 < going_on.mean() < 1
    np.testing.assert_array_equal(out.next_obs[going_on], seen[1:][going_on])


def test_whole_numbers_pixels_and_flags_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    leaf = {
        "number": rng.integers(0, 9, (4,), np.int32),
        "pixels": rng.integers(0, 256, (4, 3, 3, 1), np.uint8),
        "flag": rng.random((4, 2)) < 0.5,
    }
    for name, x in leaf.items():
        seen = first_seen(x)
        assert seen.dtype == x.dtype, name
        np.testing.assert_array_equal(seen, x)


def test_every_leaf_of_a_dict_has_moments_of_its_own() -> None:
    first, steps = random_steps(shape=(3,))
    as_dict = lambda x: {
        "near": x[..., :2],
        "far": 1_000 * x[..., 2],
        "id": np.arange(x.size // 3, dtype=np.int32).reshape(x.shape[:-1]),
    }
    pairs = as_dict(first), steps._replace(obs=as_dict(steps.obs), final_obs=as_dict(steps.final_obs))
    seen, out, _ = processed(OBS_ONLY, *pairs)
    plain, plain_out, _ = processed(OBS_ONLY, first, steps)
    for whole, parts in ((plain, seen), (plain_out.next_obs, out.next_obs)):
        np.testing.assert_allclose(parts["near"], whole[..., :2], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(parts["far"], whole[..., 2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(seen["id"][1:], pairs[1].obs["id"])
    np.testing.assert_array_equal(out.next_obs["id"], pairs[1].final_obs["id"])


def test_what_lies_far_out_is_clipped_at_ten_deviations_and_what_never_changes_is_zero() -> None:
    """Of 400 rows one can lie at most `sqrt(399)`, about 20, deviations out."""
    np.testing.assert_array_equal(first_seen(np.full((8, 2), 3.5, np.float32)), np.zeros((8, 2)))
    for outlier, seen_as in ((1e6, 10.0), (-1e6, -10.0)):
        first = np.zeros((400, 1), np.float32)
        first[7] = outlier
        seen = np.asarray(first_seen(first))
        assert float(seen[7, 0]) == seen_as
        assert np.abs(np.delete(seen, 7, axis=0)).max() < 0.1


def test_the_space_keeps_its_shape() -> None:
    assert chain(frame_stack(3), normalise_obs(), one_step()).space(Box(-1.0, 1.0, (2,))).shape == (6,)


# --- frozen ----------------------------------------------------------------------------------------------------------


def learnt_from(processor: Processor, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Return what `processor` learns of random steps, and all the observations that it was shown."""
    first, steps = random_steps(seed=seed)
    _, _, states = processed(processor, first, steps)
    return processor.get_stats(jax.tree.map(lambda x: x[-1], states)), np.concatenate([first[None], steps.obs])


def test_a_frozen_processor_scales_by_what_was_learnt_and_learns_no_more() -> None:
    learnt, history = learnt_from(OBS_ONLY)
    first, steps = random_steps(seed=1)
    seen, out, _ = processed(OBS_ONLY.freeze(learnt), first, steps)
    np.testing.assert_allclose(seen, scaled(np.concatenate([first[None], steps.obs]), history), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.next_obs, scaled(steps.final_obs, history), rtol=1e-4, atol=1e-5)


def echo(spec: EnvSpec) -> Agent:
    """Make an agent whose action is what it sees, and which learns nothing."""
    return Agent(
        "echo",
        init=lambda key: jnp.zeros(()),
        act=lambda state, obs, key, opt_step, mode: (obs, ()),
        update=lambda state, batch, key, opt_step: (state, {}, jnp.zeros(batch.weight.shape)),
        strip=lambda state: state,
        prepare=lambda state, rollout: rollout.items.reward.reshape(-1),
    )


def wandering() -> Env:
    """Start far from 0 and walk on at random whatever one does; nothing ends."""
    space = Box(-1e9, 1e9, (2,))

    def step(state: Any, action: Any, key: Any) -> Any:
        state = state + jax.random.normal(key)
        return state, TimeStep(state, 1.0, False)

    first = lambda key: 50 + 10 * jax.random.normal(key, (2,))
    reset = lambda key: (first(key), first(key))
    return Env(EnvSpec("Wandering", space, space), reset, step, lambda key: jax.random.normal(key, (2,)))


def test_the_policy_acts_on_observations_scaled_by_the_moments_of_training() -> None:
    strategy = on_policy(wandering(), echo, processor=OBS_ONLY, num_envs=4, rollout=10, epochs=1, minibatches=1)
    _, state, _ = stepped(strategy, 2)
    params = strategy.policy.params(state)
    ((moments,), *_) = params.processor
    assert float(moments.count) == 4 * (2 * 10 + 1)
    obs = jnp.array([[50.0, 40.0], [0.0, 60.0]])
    expected = (obs - moments.mean[None]) / jnp.sqrt(moments.variance)[None]
    act, observe = jax.jit(strategy.policy.act), jax.jit(strategy.policy.observe)
    carry, action = act(params, jax.jit(strategy.policy.begin)(params, obs))
    np.testing.assert_allclose(action, expected, rtol=1e-4)
    never = jnp.zeros(2, bool)
    later = observe(params, carry, Step(action, (), jnp.ones(2), never, never, obs[::-1], obs[::-1]))
    np.testing.assert_allclose(act(params, later)[1], expected[::-1], rtol=1e-4)


# --- with stacked frames ---------------------------------------------------------------------------------------------


def test_a_stack_holds_the_frames_as_they_were_seen() -> None:
    first, steps = random_steps()
    single, _, _ = processed(OBS_ONLY, first, steps)
    stacked, out, _ = processed(chain(normalise_obs(), frame_stack(2), one_step()), first, steps)
    done = steps.terminated | steps.truncated
    older = np.where(done[..., None], single[1:], stacked[:-1, :, 2:])
    np.testing.assert_allclose(stacked[0], np.concatenate([single[0]] * 2, -1), rtol=1e-5)
    np.testing.assert_allclose(stacked[1:], np.concatenate([older, single[1:]], -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.next_obs[..., :2], single[:-1], rtol=1e-5, atol=1e-6)


def test_a_frozen_chain_still_stacks() -> None:
    processor = chain(normalise_obs(), frame_stack(2), normalise_reward(), one_step())
    learnt, history = learnt_from(processor)
    first, steps = random_steps(seed=1)
    seen, _, _ = processed(processor.freeze(learnt), first, steps)
    single = scaled(np.concatenate([first[None], steps.obs]), history)
    assert seen.shape[-1] == 4
    np.testing.assert_allclose(seen[..., 2:], single, rtol=1e-4, atol=1e-5)


# --- rewards ---------------------------------------------------------------------------------------------------------


def paid(rewards: Any, terminated: Any = (), truncated: Any = (), invalid: Any = (), discount: float = 0.5) -> Any:
    """Pay `rewards` `[T, N]`; the rest are pairs `(t, n)`. Return the rewards of the transitions."""
    rewards = np.array(rewards, np.float32)
    flags = []
    for places in (terminated, truncated, invalid):
        flag = np.zeros(rewards.shape, bool)
        flag[tuple(np.array(places, int).reshape(-1, 2).T)] = True
        flags.append(flag)
    obs = np.zeros((*rewards.shape, 1), np.float32)
    steps = Step(np.zeros(rewards.shape, np.int32), (), rewards, *flags[:2], obs, obs, valid=~flags[2])
    _, out, _ = processed(scaling(discount), obs[0], steps)
    return out.reward


@cache
def scaling(discount: float) -> Processor:
    return chain(normalise_reward(discount), one_step(discount))


def divided(rewards: list, returns: list) -> np.ndarray:
    """Divide each row of `rewards` by the deviation of all `returns` up to it; `None` marks what does not count."""
    rows = []
    for t, row in enumerate(rewards):
        so_far = [x for earlier in returns[: t + 1] for x in earlier if x is not None]
        rows.append(np.clip(np.array(row) / np.sqrt(np.var(so_far) + 1e-8), -10, 10))
    return np.array(rows)


def test_rewards_are_divided_by_the_deviation_of_discounted_sums() -> None:
    """With two environments: 1 and 3 have deviation 1; 1, 3, 2.5 and 1.5 have variance 5/8."""
    rewards = [[1, 3], [2, 0], [4, -1]]
    came = paid(rewards)
    np.testing.assert_allclose(came[0], [1, 3], rtol=1e-5)
    np.testing.assert_allclose(came[1], [2 / 0.625**0.5, 0], rtol=1e-5)
    np.testing.assert_allclose(came, divided(rewards, [[1, 3], [2.5, 1.5], [5.25, -0.25]]), rtol=1e-5)


PAID = [[1, 3], [2, 0], [4, -1], [1, 1]]
ANEW = [[1, 3], [2.5, 1.5], [4, -0.25], [3, 0.875]]


@pytest.mark.parametrize(
    ("ends", "returns"),
    [
        ({"terminated": [(1, 0)]}, ANEW),
        ({"truncated": [(1, 0)]}, ANEW),
        ({"truncated": [(1, 1)], "invalid": [(1, 1)]}, [[1, 3], [2.5, None], [5.25, -1], [3.625, 0.5]]),
    ],
    ids=["terminated", "truncated", "not valid"],
)
def test_the_discounted_sum_begins_anew_behind_an_episodes_end_and_rows_that_are_not_valid_do_not_count(
    ends: dict[str, Any], returns: list
) -> None:
    np.testing.assert_allclose(paid(PAID, **ends), divided(PAID, returns), rtol=1e-5)


def test_the_first_reward_of_all_is_not_compared_with_anything() -> None:
    """The blank step before the first one does not count."""
    np.testing.assert_allclose(paid([[7.0], [1.0]])[0], [7.0], rtol=1e-6)


def test_a_reward_of_any_scale_comes_out_the_same_and_keeps_its_sign() -> None:
    rewards = np.random.default_rng(0).normal(1, 2, (20, 6))
    came = paid(rewards)
    np.testing.assert_allclose(paid(1_000 * rewards), came, rtol=1e-4)
    assert (np.sign(came) == np.sign(rewards)).all()


def test_rewards_are_clipped_at_ten() -> None:
    rewards = np.zeros((3, 400))
    rewards[1, 3], rewards[2, 5] = 1e4, -3e4
    came = paid(rewards)
    assert (came[1, 3], came[2, 5]) == (10, -10)


def test_a_discount_outside_its_range_is_refused() -> None:
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match="discount"):
            normalise_reward(bad)


def test_nothing_but_the_reward_changes_so_that_recorded_returns_stay_those_of_the_environment() -> None:
    first, steps = rollout(vectorise(counting(length=3), 2), np.zeros((4, 2), np.int32))
    seen, out, _ = processed(normalise_reward(0.9), first, steps)
    np.testing.assert_array_equal(seen, np.concatenate([first[None], steps.obs]))
    require_same_bits(out._replace(reward=()), steps._replace(reward=()))
