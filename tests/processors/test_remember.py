"""Memory that goes from step to step, begins anew with an episode, and stands beside every observation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_envs import counting
from toys_processors import processed, random_steps

from jaxrl.agents import Agent
from jaxrl.errors import SettingsError
from jaxrl.processors import (
    Processor,
    carry_memory,
    chain,
    frame_stack,
    init_processor,
    n_step,
    normalise_obs,
    one_step,
)
from jaxrl.spaces import EnvSpec
from jaxrl.strategies import on_policy
from jaxrl.types import Step

BLANK = jnp.array([-1.0, -2.0])
"""What is remembered at an episode's start; not zeros, so that it cannot come about by chance."""
STEPS, ENVS = 10, 4


def remembered(memory: Any = BLANK) -> tuple[Any, Step]:
    """Make steps of which some end an episode; each leaves memories that appear nowhere else."""
    first, steps = random_steps(steps=STEPS, num_envs=ENVS)
    ends = steps.terminated | steps.truncated
    assert (ends.any(1) & ~ends.all(1)).sum() > 3
    rng = np.random.default_rng(1)
    draw = lambda shape: rng.normal(size=(STEPS, ENVS, *shape)).astype(np.float32)
    extras = {"memory": jax.tree.map(lambda x: draw(x.shape), memory), "raw": draw(())}
    return first, steps._replace(extras=extras)


def run(processor: Processor, first: Any, steps: Step) -> tuple[Any, Any]:
    """Return what the policy sees, `[T + 1, N, ...]`, and the transitions."""
    return processed(processor, first, steps)[:2]


@pytest.fixture(scope="module")
def ran() -> tuple[Any, Any, Any, Step]:
    first, steps = remembered()
    return *run(carry_memory(one_step(0.9), BLANK), first, steps), first, steps


def test_an_episode_begins_with_the_blank_memory() -> None:
    processor = carry_memory(one_step(), BLANK)
    first, steps = remembered()
    state = processor.init(jnp.asarray(first))
    started = init_processor(processor, jnp.asarray(first), steps.action[0], jax.tree.map(lambda x: x[0], steps.extras))
    for seen in (processor.observe(state), processor.observe(started)):
        np.testing.assert_array_equal(seen.obs, first)
        np.testing.assert_array_equal(seen.memory, np.broadcast_to(BLANK, (ENVS, 2)))


def test_memory_goes_from_step_to_step_and_begins_anew_only_where_an_episode_ended(ran: Any) -> None:
    seen, _, _, steps = ran
    for t in range(STEPS):
        for n in range(ENVS):
            ended = steps.terminated[t, n] or steps.truncated[t, n]
            expected = BLANK if ended else steps.extras["memory"][t, n]
            np.testing.assert_array_equal(seen.memory[t + 1, n], expected)


def test_the_successor_is_seen_with_the_memory_after_the_step_also_at_an_episodes_end(ran: Any) -> None:
    seen, out, _, steps = ran
    assert min(steps.terminated.sum(), steps.truncated.sum()) > 3
    np.testing.assert_array_equal(out.obs.memory, seen.memory[:-1])
    np.testing.assert_array_equal(out.obs.obs, seen.obs[:-1])
    np.testing.assert_array_equal(out.next_obs.memory, steps.extras["memory"])
    np.testing.assert_array_equal(out.next_obs.obs, steps.final_obs)


def test_all_else_is_as_without_memory(ran: Any) -> None:
    seen, out, first, steps = ran
    plain_seen, plain = run(one_step(0.9), first, steps._replace(extras={"raw": steps.extras["raw"]}))
    np.testing.assert_array_equal(seen.obs, plain_seen)
    bare = out._replace(obs=out.obs.obs, next_obs=out.next_obs.obs)
    assert set(bare.extras) == {"raw"}
    for a, b in zip(jax.tree.leaves(bare), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_memory_may_have_several_parts_of_any_shape() -> None:
    memory = (jnp.zeros(3), {"count": jnp.ones(()), "map": jnp.full((2, 2), 7.0)})
    first, steps = remembered(memory)
    seen, out = run(carry_memory(one_step(), memory), first, steps)
    done = steps.terminated | steps.truncated
    for part, after, blank in zip(*map(jax.tree.leaves, (seen.memory, steps.extras["memory"], memory)), strict=True):
        np.testing.assert_array_equal(part[1:][~done], after[~done])
        np.testing.assert_array_equal(part[1:][done], np.broadcast_to(blank, part[1:][done].shape))
    for a, b in zip(jax.tree.leaves(out.next_obs.memory), jax.tree.leaves(steps.extras["memory"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stacked_frames_are_remembered_beside() -> None:
    first, steps = remembered()
    processor = chain(frame_stack(2), one_step())
    seen, out = run(carry_memory(processor, BLANK), first, steps)
    plain_seen, plain = run(processor, first, steps._replace(extras=()))
    np.testing.assert_array_equal(seen.obs, plain_seen)
    np.testing.assert_array_equal(out.next_obs.obs, plain.next_obs)
    np.testing.assert_array_equal(out.next_obs.memory, steps.extras["memory"])


def test_a_frozen_processor_still_remembers() -> None:
    first, steps = remembered()
    processor = carry_memory(chain(normalise_obs(), one_step()), BLANK)
    *_, states = processed(processor, first, steps)
    learnt = processor.get_stats(jax.tree.map(lambda x: x[-1], states))
    ((moments,), *_) = learnt
    assert float(moments.count) == (STEPS + 1) * ENVS
    seen, _ = run(processor.freeze(learnt), first, steps)
    raw = np.concatenate([first[None], steps.obs])
    np.testing.assert_allclose(seen.obs, (raw - moments.mean) / np.sqrt(moments.variance), rtol=1e-4, atol=1e-5)
    done = steps.terminated | steps.truncated
    np.testing.assert_array_equal(seen.memory[1:], np.where(done[..., None], BLANK, steps.extras["memory"]))


@pytest.mark.parametrize("processor", [n_step(2), chain(frame_stack(2), n_step(3))])
def test_transitions_over_several_steps_are_refused(processor: Processor) -> None:
    with pytest.raises(SettingsError, match=r"agent\.noise_min\) learns from single steps; set processor\.n_step to 1"):
        carry_memory(processor, BLANK)


def tally(spec: EnvSpec) -> Agent:
    """Make an agent that remembers how many steps it has taken in this episode; as its state it keeps a rollout."""
    zeros = jnp.zeros((7, 3))

    def act(state: Any, seen: Any, key: Any, opt_step: Any, mode: str) -> Any:
        return jnp.zeros(seen.memory.shape, jnp.int32), {"memory": seen.memory + 1}

    def prepare(state: Any, rollout: Any) -> Any:
        items = rollout.items
        return jax.tree.map(lambda x: x.T, (items.obs.obs[..., 0], items.obs.memory, items.next_obs.memory))

    return Agent(
        "tally",
        init=lambda key: (zeros,) * 3,
        act=act,
        update=lambda state, batch, key, opt_step: (jax.tree.map(jnp.transpose, batch.items), {}, jnp.zeros(3)),
        strip=lambda state: state,
        prepare=prepare,
        memory=jnp.zeros(()),
    )


@pytest.mark.slow
def test_in_training_an_agent_is_given_what_it_left_for_itself() -> None:
    """The environment counts its steps too, in episodes of 5; rollouts of 7 cut across them."""
    strategy = on_policy(counting(length=5), tally, num_envs=3, rollout=7, epochs=1, minibatches=1)
    state = jax.jit(strategy.init)(jax.random.key(0))
    step = jax.jit(lambda s, t: strategy.step(s, jax.random.fold_in(s.key, t), t)[0])
    for t in range(3):
        state = step(state, jnp.uint32(t))
        count, before, after = (np.asarray(x) for x in state.agent)
        np.testing.assert_array_equal(count[:, 0], np.arange(7 * t, 7 * t + 7) % 5)
        np.testing.assert_array_equal(before, count)
        np.testing.assert_array_equal(after, count + 1)
