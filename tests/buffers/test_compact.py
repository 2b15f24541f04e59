"""The compact ring: it samples what the plain one does, bit for bit, in little more than half of the memory."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.buffers import Buffer, prioritised, uniform
from jaxrl.envs import Env, TimeStep
from jaxrl.errors import SettingsError
from jaxrl.processors import Processor, chain, frame_stack, n_step
from jaxrl.processors.base import init_processor
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.strategies.base import iterate
from jaxrl.training.memory import plan_of_state
from jaxrl.trees import PyTree, tree_bytes
from jaxrl.types import RecurrentObs, Step, Transition
from jaxrl.xla import forms

STEP = jnp.uint32(0)
look = jax.jit(lambda ring: ring.items)


def bits(tree: PyTree) -> list[bytes]:
    return [x.tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


# --- histories ------------------------------------------------------------------------------------------------------


def observations(key: jax.Array, envs: int) -> PyTree:
    """Draw observations of several widths, seldom twice the same; NaNs of any payload among their numbers."""
    number, pixel, flag = jax.random.split(key, 3)
    words = jax.random.bits(number, (envs, 2), jnp.uint32) | jnp.uint32(0x7F800000)
    return {
        "numbers": jax.lax.bitcast_convert_type(words, jnp.float32),
        "pixels": (jax.random.bits(pixel, (envs, 2, 3), jnp.uint8), jax.random.bernoulli(flag, 0.5, (envs,))),
    }


def steps(envs: int, ending: float, seed: int = 0) -> Iterator[Step]:
    """Yield steps of random episodes, a share `ending` of which are the last of theirs, one way or the other."""
    key = jax.random.key(seed)
    draw = jax.jit(
        lambda key: (observations(key, envs), *(jax.random.uniform(k, (envs,)) for k in jax.random.split(key)))
    )
    for t in range(10_000):
        final, u, valid = draw(jax.random.fold_in(key, t))
        first, _, _ = draw(jax.random.fold_in(key, 10_000 + t))
        done = u < ending
        obs = jax.tree.map(lambda a, b: jnp.where(done.reshape(-1, *[1] * (a.ndim - 1)), a, b), first, final)  # noqa: B023
        yield Step(jnp.full(envs, t), (), u, u < ending / 2, done & (u >= ending / 2), final, obs, {}, valid < 0.9)


def blocks(processor: Processor, envs: int, vector_steps: int, ending: float) -> Iterator[Transition]:
    """Yield what `processor` makes of `steps`, `vector_steps` of them in a block, environments beside one another."""
    stream, process = steps(envs, ending), jax.jit(processor.process)
    state = init_processor(processor, next(stream).obs, jnp.zeros(envs, jnp.int32), ())
    for _ in range(processor.horizon):
        state, _ = process(state, next(stream))
    while True:
        made = []
        for _ in range(vector_steps):
            state, items = process(state, next(stream))
            made.append(items)
        yield jax.tree.map(lambda *x: jnp.concatenate(x), *made)


def both(
    capacity: int, ends: float, block: PyTree, rows: int, lag: int, frames: int = 1, stride: int = 0
) -> tuple[Any, Any, Any]:
    """Return a plain and a compact ring for blocks like `block`, how both are pushed to, and how one is looked at."""
    buffers = uniform(capacity, 1), uniform(capacity, 1, compact=True, ends=ends, frames=frames)
    push = lambda held, block, t: tuple(b.push(ring, block, t) for b, ring in zip(buffers, held, strict=True))
    held = tuple(buffer.init(one_of(block), rows, lag, stride) for buffer in buffers)
    return held, jax.jit(push, donate_argnums=0), lambda ring: jax.device_get(look(ring))


def one_of(block: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block)


@pytest.mark.every_day("1-4-2-3-16-0.15")
@pytest.mark.parametrize(
    ("frames", "envs", "vector_steps", "n", "capacity", "ending"),
    [
        (1, 3, 1, 1, 12, 0.2),
        (1, 4, 2, 3, 16, 0.15),
        (1, 1, 5, 3, 10, 0.2),
        (1, 3, 1, 1, 12, 0.0),
        (1, 3, 1, 1, 12, 1.0),
        (1, 1, 1, 1, 7, 0.3),
        (1, 2, 3, 1, 18, 0.2),
        (1, 2, 1, 3, 14, 0.15),
        (1, 3, 2, 2, 20, 0.2),
        (3, 3, 1, 1, 12, 0.2),
        (3, 1, 1, 1, 9, 0.0),
        (3, 2, 3, 1, 18, 0.3),
        (3, 2, 1, 3, 14, 0.15),
        (3, 4, 2, 3, 16, 1.0),
    ],
)
def test_it_holds_the_same_bits_after_every_push(
    frames: int, envs: int, vector_steps: int, n: int, capacity: int, ending: float
) -> None:
    """Also of stacks, which are kept frame by frame."""
    rows, stream = envs * vector_steps, blocks(chain(frame_stack(frames), n_step(n)), envs, vector_steps, ending)
    block = next(stream)
    held, push, items = both(capacity, 1.0, block, rows, envs * n, frames=frames, stride=envs)
    for t in range(4 * capacity // rows + 3):
        held = push(held, block, jnp.uint32(t))
        a, b = (jax.tree.map(lambda x: x[: (t + 1) * rows], items(ring)) for ring in held)  # noqa: B023
        assert bits(a) == bits(b)
        block = next(stream)


def test_one_bit_that_differs_makes_another_successor() -> None:
    """And only that: numbers that are the same bits are the same, also where they are not equal, as NaNs are not."""
    obs = observations(jax.random.key(3), 1)
    leaves, treedef = jax.tree.flatten(obs)
    block = Transition(obs, (), jnp.zeros(1), jnp.ones(1), obs, (), jnp.ones(1))
    held, push, items = both(40, 1.0, block, 1, 1)
    following = [block]
    for i, leaf in enumerate(leaves):
        for j in range(leaf.size):
            words = leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
            words = words.reshape(-1).at[j].set(words.reshape(-1)[j] ^ True).reshape(words.shape)
            changed = words if leaf.dtype == bool else jax.lax.bitcast_convert_type(words, leaf.dtype)
            other = jax.tree.unflatten(treedef, [*leaves[:i], changed, *leaves[i + 1 :]])
            following += [block._replace(next_obs=other), block]
    for t, one in enumerate(following):
        held = push(held, one, jnp.uint32(t))
    a, b = (items(ring) for ring in held)
    assert bits(a) == bits(b)
    # One more for the successor that the ring begins with, of a row before the first.
    assert int(held[1].next_end) == 1 + len(following) // 2


def test_observations_with_a_memory_are_kept_once() -> None:
    remember = lambda x: x._replace(obs=RecurrentObs(x.obs, x.action), next_obs=RecurrentObs(x.next_obs, x.action + 1))
    stream = map(remember, blocks(n_step(1), 2, 1, 0.2))
    held, push, items = both(20, 0.5, next(stream), 2, 2)
    for t in range(25):
        held = push(held, next(stream), jnp.uint32(t))
    a, b = (items(ring) for ring in held)
    assert bits(a) == bits(b)
    assert b.next_obs.memory.tolist() == (b.obs.memory + 1).tolist()


# --- ends that are lost ---------------------------------------------------------------------------------------------


def test_where_an_end_is_lost_nothing_wrong_is_learnt() -> None:
    stream = blocks(n_step(2), 2, 2, 0.3)
    held, push, items = both(64, 0.1, next(stream), 4, 4)
    lost = {"cut": 0, "terminated": 0}
    for t in range(48):
        held = push(held, next(stream), jnp.uint32(t))
        if t < 20 or t % 3:
            continue
        a, b = (items(ring) for ring in held)
        right, own = (rows_of(b.next_obs) == rows_of(like) for like in (a.next_obs, b.obs))
        terminated = a.discount == 0
        assert bits(b._replace(next_obs=(), weight=())) == bits(a._replace(next_obs=(), weight=()))
        assert (right | own).all()
        assert b.weight.tolist() == (a.weight * (right | terminated)).tolist()
        assert right[terminated].any()
        lost["cut"] += (~right & ~terminated).sum()
        lost["terminated"] += (~right & terminated).sum()
    assert min(lost.values()) > 10


def rows_of(tree: PyTree) -> np.ndarray:
    return np.array([b"".join(bits(jax.tree.map(lambda x: x[i], tree))) for i in range(64)], object)  # noqa: B023


def test_of_a_block_with_more_ends_than_places_the_last_stay() -> None:
    rows = 8
    buffer = uniform(32, 1, compact=True, ends=0.1)
    numbers = jnp.arange(6.0 * rows).reshape(6, rows)
    block = lambda t: Transition(numbers[t], (), jnp.zeros(rows), jnp.ones(rows), -1 - numbers[t], (), jnp.ones(rows))
    ring = buffer.init(one_of(block(0)), rows, rows)
    for t in range(4):
        ring = jax.jit(buffer.push)(ring, block(t), jnp.uint32(t))
    # The last block waits; of the ends before it there is place for four.
    assert look(ring).weight.tolist() == [0] * 20 + [1] * 12
    assert look(ring).next_obs.tolist() == [*range(20), *range(-21, -33, -1)]


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stacks_are_read_the_same_as_on_accelerators() -> None:
    """There what is read is not packed again."""
    stream = blocks(chain(frame_stack(3), n_step(1)), 2, 1, 0.3)
    block = next(stream)
    buffer = uniform(12, 1, compact=True, ends=1.0, frames=3)
    ring = buffer.init(one_of(block), 2, 2, 2)
    for t in range(9):
        ring, block = jax.jit(buffer.push)(ring, block, jnp.uint32(t)), next(stream)
    here = look(ring)
    for platform in ("cuda", "tpu"):
        with forms(platform):
            assert bits(jax.jit(lambda ring: ring.items)(ring)) == bits(here)


def test_what_is_no_stack_is_not_learnt_from() -> None:
    frames = jnp.arange(40.0)
    obs = lambda t: jnp.stack([frames[t], frames[t + 1], frames[t + 2]])[None]
    buffer = uniform(8, 1, compact=True, frames=3)
    block = lambda t: Transition(obs(t), (), jnp.zeros(1), jnp.ones(1), obs(t + 1), (), jnp.ones(1))
    ring = buffer.init(one_of(block(0)), 1, 1, 1)
    for t in range(5):
        ring = jax.jit(buffer.push)(ring, block(t), jnp.uint32(t))
    # It begins with three frames that differ: no episode does. Two steps later all frames are known.
    assert look(ring).weight[:5].tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(look(ring).obs[2:5], jnp.concatenate([obs(t) for t in (2, 3, 4)]))


def test_the_program_of_a_push_of_frames_is_as_long_for_many_steps_as_for_a_few() -> None:
    buffer = uniform(480, 1, compact=True, frames=3)

    def length(steps: int) -> int:
        rows = jnp.zeros(2 * steps)
        items = Transition(jnp.zeros((2 * steps, 3)), rows, rows, rows, jnp.zeros((2 * steps, 3)), (), rows)
        state = jax.eval_shape(lambda: buffer.init(one_of(items), 2 * steps, 2, 2))
        return len(jax.make_jaxpr(buffer.push)(state, items, jnp.uint32(0)).eqns)

    assert length(6) == length(24)


def test_frames_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"buffer.frames is for compact buffers; set buffer.compact as well"):
        uniform(8, 1, frames=2)
    block = next(blocks(n_step(1), 2, 1, 0.2))
    with pytest.raises(
        SettingsError, match=r"buffer.frames is 4, but an observation is \[2\]: its last axis is no stack"
    ):
        uniform(8, 1, compact=True, frames=4).init(one_of(block), 2, 2, 2)
    frames = jax.ShapeDtypeStruct((3,), jnp.float32)
    beside = one_of(block)._replace(obs=RecurrentObs(frames, frames), next_obs=RecurrentObs(frames, frames))
    with pytest.raises(SettingsError, match=r"buffer.frames is 3, .* memory.*leave buffer.frames out, or set agent"):
        uniform(9, 1, compact=True, frames=3).init(beside, 2, 2, 2)


# --- in training ----------------------------------------------------------------------------------------------------


def walk() -> Env:
    """Walk to and fro, observed without and with rounding; walks of six steps are cut, at 2 and -2 they end."""
    spec = EnvSpec("Walk", Box(-9.0, 9.0, (2,)), Discrete(2), 6)
    seen = lambda place: jnp.stack([place, jnp.sin(place)])

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        place = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
        return place, seen(place)

    def step(place: PyTree, action: PyTree, key: Any) -> tuple[PyTree, TimeStep]:
        place = 1.01 * place + (action - 0.5) * jax.random.uniform(key, (), minval=0.2, maxval=3.0)
        return place, TimeStep(seen(place), place, jnp.abs(place) > 2)

    return Env(spec, reset, step)


def strategy(buffer: Buffer, n: int, frames: int = 1, **settings: int) -> jaxrl.Strategy:
    agent = jaxrl.dqn(features=(8,), target_interval=7)
    processor = chain(frame_stack(frames), n_step(n, 0.9))
    return jaxrl.off_policy(walk(), agent, buffer=buffer, processor=processor, warmup=40, **settings)


MADE = {"uniform": uniform, "prioritised": partial(prioritised, normalise="all")}
SETTINGS: dict[str, dict[str, int]] = {
    "uniform": {"n": 1, "frames": 3, "num_envs": 4, "opt_interval": 4},
    "prioritised": {"n": 3, "frames": 1, "num_envs": 4, "opt_interval": 8, "updates": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_training_makes_the_same_bits(kind: str) -> None:
    states = []
    for compact in (False, True):
        kept = {"compact": True, "frames": SETTINGS[kind]["frames"], "ends": 0.9} if compact else {}
        made = strategy(MADE[kind](96, 8, **kept), **SETTINGS[kind])
        step = lambda state, key, t, made=made: made.step(state, key, t)[0]
        run = lambda state, made=made, step=step: iterate(step, state.key, state, STEP, jnp.uint32(100))
        states.append(jax.jit(lambda key, made=made, run=run: run(made.init(key)))(jax.random.key(0)))
    plain, compact = states
    items = plain.buffer.items
    # Both kinds of ends are there.
    ended = jax.jit(lambda ring: ring.tails.words["uint32"][:, 0] > 0)(getattr(compact.buffer, "rows", compact.buffer))
    assert 3 < int((items.discount == 0).sum()) < int(ended.sum())
    assert bits((plain.agent, plain.env.env, items)) == bits((compact.agent, compact.env.env, compact.buffer.items))
    if kind == "prioritised":
        assert bits(plain.buffer._replace(rows=())) == bits(compact.buffer._replace(rows=()))


# --- what it takes --------------------------------------------------------------------------------------------------

IMAGE = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)


def images(rows: int | None = None) -> Transition:
    like = lambda x: jax.ShapeDtypeStruct((x.shape if rows is None else (rows, *x.shape)), x.dtype)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.tree.map(like, Transition(IMAGE, jax.ShapeDtypeStruct((), jnp.int32), number, number, IMAGE, (), number))  # type: ignore[arg-type]


def ring_of(buffer: Buffer) -> PyTree:
    return jax.eval_shape(lambda: buffer.init(images(), 10, 10, 10))


@pytest.mark.parametrize("kind", MADE)
def test_images_take_little_more_than_half_and_stacks_of_them_a_fifth(kind: str) -> None:
    size = lambda **how: tree_bytes(ring_of(MADE[kind](100_000, 32, **how)))
    assert size(compact=True) < 0.57 * size()
    # Half a stack a transition for the ends, a quarter of one for the frame, of two.
    assert 0.18 < size(compact=True, frames=4) / size() < 0.20


@pytest.mark.parametrize("kind", MADE)
def test_the_memory_plan_counts_its_items(kind: str) -> None:
    made = strategy(MADE[kind](200, 8, compact=True), 1, num_envs=4, opt_interval=4)
    plan = str(plan_of_state(jax.eval_shape(made.init, jax.random.key(0)), made.state_fns.capacity))
    assert "bytes for each of 200 transitions" in plan


@pytest.mark.every_day("uniform-4", "prioritised-1")
@pytest.mark.parametrize(("kind", "frames"), [("uniform", 1), ("uniform", 4), ("prioritised", 1)])
def test_pushes_and_samples_in_a_scan_need_no_second_ring(kind: str, frames: int) -> None:
    buffer = MADE[kind](2_000 * frames, 4, compact=True, frames=frames)
    ring = ring_of(buffer)

    def body(ring: Any, inputs: Any) -> Any:
        block, key, t = inputs
        ring = buffer.push(ring, block, t)
        batch = buffer.sample(ring, key, t + 1, t)
        ring = buffer.reprioritise(ring, batch.index, batch.items.reward)
        return ring, sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(batch.items))

    def scan(ring: Any, block: Any, key: Any) -> Any:
        blocks = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), block)
        return jax.lax.scan(body, ring, (blocks, jax.random.split(key, 2), jnp.arange(2)))

    compiled = jax.jit(scan, donate_argnums=0).lower(ring, images(10), jax.random.key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tree_bytes(ring) / 10


def test_a_population_that_shares_its_count_writes_its_rows_as_one_piece() -> None:
    buffer = uniform(2_000, 4, compact=True)
    members = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tree)
    rings, blocks = members(ring_of(buffer)), members(images(10))
    push = jax.jit(jax.vmap(buffer.push, in_axes=(0, 0, None)), donate_argnums=0)
    compiled = push.lower(rings, blocks, STEP).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tree_bytes(rings) / 10
    assert re.search(r"u8\[3,\d+,28224\]\S* dynamic-update-slice\(", compiled.as_text())


# --- what it refuses ------------------------------------------------------------------------------------------------

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
ITEM: Any = Transition(NUMBER, (), NUMBER, NUMBER, NUMBER, (), NUMBER)


@pytest.mark.parametrize(
    ("example", "lag", "words"),
    [
        (NUMBER, 2, ["items are ShapeDtypeStruct", "expected Transition"]),
        (ITEM._replace(next_obs=jax.ShapeDtypeStruct((2,), jnp.float32)), 2, ["next_obs", "differ in layout"]),
        (ITEM, 0, ["0 items after"]),
        (ITEM, 8, ["8 items after", "buffer.capacity holds 8", "raise it above 8"]),
    ],
)
def test_what_has_no_successors_in_the_ring_is_refused(example: Any, lag: int, words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        uniform(7, 1, compact=True).init(example, 2, lag)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("ends", [-0.1, 1.5, float("nan"), True])
def test_ends_are_a_share(ends: Any) -> None:
    with pytest.raises(SettingsError, match=r"buffer\.ends is"):
        uniform(8, 1, compact=True, ends=ends)
