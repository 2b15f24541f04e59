"""Loops over bundles: the same bits as JAX's own loops, in fewer arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import same_bits

import jaxrl
from jaxrl.strategies.base import iterate
from jaxrl.xla import forms
from jaxrl.xla.carry import (
    LEAF,
    WIDE,
    WORDS,
    bundle,
    loop_form,
    pack_columns,
    pack_rows,
    scan,
    scan_rows,
)


class Carry(NamedTuple):
    count: jax.Array
    flags: jax.Array
    number: jax.Array
    key: jax.Array
    image: jax.Array
    half: jax.Array
    params: Any


def carry() -> Carry:
    return Carry(
        count=jnp.int32(-3),
        flags=jnp.array([True, False]),
        number=jnp.array([[np.nan, -0.0], [np.inf, 1e-42]], jnp.float32),
        key=jax.random.key(1),
        image=jnp.full((2, 3), 255, jnp.uint8),
        half=jnp.float16(0.1),
        params={"params": {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(2)}},
    )


def same(a: Any, b: Any) -> bool:
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    return kinds(a) == kinds(b) and same_bits(a, b)


def fori_loop(start: jax.Array, stop: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    form = loop_form(carry)
    turn = lambda t, held: form.hold(body(t, form.release(held)))
    return form.release(form.loop(start, stop, turn, form.hold(carry)))


def test_every_bit_comes_back_in_its_own_type():
    tree = carry()
    tie, untie = bundle(tree)
    tied = jax.eval_shape(tie, tree)
    # One count, two flags, four numbers and the eight parameters; the key, the bytes and the half lie outside.
    assert (tied.words.shape, tied.words.dtype, len(tied.large)) == ((15,), jnp.uint32, 3)
    assert same(jax.jit(lambda t: untie(tie(t)))(tree), tree)


def test_the_smallest_are_tied_and_no_more_than_is_good():
    sizes = [LEAF + 1, LEAF, 5, *[LEAF] * (WORDS // LEAF)]
    # The five, and as many of the largest allowed as fit beside them; of what is large, nothing.
    for which, count in ((sizes, 5 + (WORDS // LEAF - 1) * LEAF), (sizes[:1], 0)):
        tree = [np.full(size, i, np.float32) for i, size in enumerate(which)]
        tie, untie = bundle(tree)
        assert jax.eval_shape(tie, tree).words.size == count
        assert same(jax.jit(lambda t, tie=tie, untie=untie: untie(tie(t)))(tree), tree)


def test_rows_are_tied_one_by_one():
    tree = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(4) > 1}

    @jax.jit
    def third(tree: Any) -> Any:
        rows, row = pack_rows(tree)
        return rows.words, row(jax.tree.map(lambda x: x[2], rows))

    words, came = third(tree)
    assert words.shape == (4, 4)
    assert same(came, jax.tree.map(lambda x: x[2], tree))


def test_iterations_without_randomness_read_nothing():
    body = lambda count, key, t: count + 1
    count = jax.jit(lambda: iterate(body, jax.random.key(0), jnp.int32(0), jnp.uint32(3), jnp.uint32(70)))()
    assert int(count) == 67


@pytest.mark.parametrize("wrong", [jnp.float32(0), jnp.zeros(1, jnp.int32)])
def test_a_carry_that_changes_its_type_is_refused_by_name(wrong: jax.Array):
    with pytest.raises(jaxrl.SettingsError, match=r"after an iteration has .* at .*count"):
        fori_loop(jnp.int32(0), jnp.int32(2), lambda t, c: {"count": wrong}, {"count": jnp.int32(0)})


def step(t: jax.Array, state: Carry) -> Carry:
    tree = state.params["params"]
    return state._replace(
        count=state.count + t.astype(jnp.int32),
        flags=~state.flags,
        number=jnp.sin(state.number) + tree["w"].sum(),
        key=jax.random.fold_in(state.key, t),
        image=state.image + 1,
        params={"params": {"w": tree["w"] * 1.5 + tree["b"][None], "b": tree["b"] - state.number[0, 1]}},
    )


@pytest.mark.parametrize("which", ["cpu", "cuda"])
def test_a_loop_makes_the_same_bits_as_that_of_jax(which: str) -> None:
    start, stop = jnp.int32(2), jnp.int32(9)
    with forms(which):
        ours = jax.jit(lambda c: fori_loop(start, stop, step, c))(carry())
    assert same(ours, jax.jit(lambda c: jax.lax.fori_loop(start, stop, step, c))(carry()))


def test_on_cuda_members_of_a_population_count_as_one() -> None:
    """A loop that may end for each at another time selects, in every turn, between all that it carries."""
    members = {"x": jnp.linspace(0.0, 1.0, 3), "image": jnp.ones((3, LEAF + 1))}
    turn = lambda t, c: {"x": c["x"] * 3 + t, "image": c["image"] * c["x"]}
    with forms("cuda"):
        ours = jax.jit(jax.vmap(lambda c, stop: fori_loop(jnp.uint32(1), stop, turn, c), in_axes=(0, None)))
        end, text = ours(members, jnp.uint32(6)), ours.lower(members, jnp.uint32(6)).as_text()
    plain = jax.vmap(lambda c: jax.lax.fori_loop(jnp.uint32(1), jnp.uint32(6), turn, c))
    assert same(end, jax.jit(plain)(members))
    assert "stablehlo.select" not in text


def test_a_scan_makes_the_same_bits_as_that_of_jax():
    xs = {"t": jnp.arange(5, dtype=jnp.int32), "key": jax.random.split(jax.random.key(2), 5)}

    def body(state: Carry, x: dict[str, jax.Array]) -> tuple[Carry, jax.Array]:
        new = step(x["t"], state)
        return new, new.number * jax.random.uniform(x["key"])

    assert same(jax.jit(lambda c: scan(body, c, xs))(carry()), jax.jit(lambda c: jax.lax.scan(body, c, xs))(carry()))


def test_on_cuda_leaves_of_as_many_rows_lie_side_by_side():
    n = LEAF + 2
    tree = {
        "place": jnp.arange(2.0 * n).reshape(n, 2),
        "length": jnp.arange(n, dtype=jnp.int32),
        "done": jnp.arange(n) % 3 == 0,
        "key": jax.random.split(jax.random.key(0), n),
        "frame": jnp.zeros((n, WIDE + 1)),
        "count": jnp.int32(7),
    }
    with forms("cuda"):
        hold, release = pack_columns(tree, n)
        held, others = jax.eval_shape(hold, tree)
        assert {word: rows.shape for word, rows in held.items()} == {"uint32": (n, 4)}
        assert [leaf.shape for leaf in others] == [(), (n, WIDE + 1), (n,)]
        assert same(jax.jit(lambda tree: release(hold(tree)))(tree), tree)
    hold, _ = pack_columns(tree, n)
    assert hold(tree) is tree


def test_on_cuda_a_scan_over_rows_makes_the_same_bits():
    n = LEAF + 1
    start = {"x": jnp.linspace(0.0, 1.0, n), "steps": jnp.zeros(n, jnp.int32)}

    def body(carry: Any, x: jax.Array) -> tuple[Any, Any]:
        new = {"x": carry["x"] * x, "steps": carry["steps"] + 1}
        return new, {"before": carry["x"], "odd": new["steps"] % 2 == 1}

    xs = jnp.array([0.5, 3.0, -1.0])
    with forms("cuda"):
        ours = scan_rows(body, start, xs)
    assert same(ours, jax.lax.scan(body, start, xs))


@pytest.mark.every_day("2")
@pytest.mark.parametrize("members", [1, 2])
def test_on_a_tpu_a_scan_over_rows_of_images_makes_the_same_bits(members: int) -> None:
    """Large images are stacked flat, each in order, and come back in their shape; also of several members at once."""
    shape = (3, 64, 64, 1)

    def roll(start: jax.Array) -> Any:
        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
            image = jnp.where(jnp.arange(4096).reshape(1, 64, 64, 1) == carry[:, None, None, None], 255, x)
            return carry + 7, {"image": image.astype(jnp.uint8), "small": image[:, :2, :2], "at": carry}

        return scan_rows(body, start, jnp.arange(5))

    starts = jnp.arange(3 * members, dtype=jnp.int32).reshape(members, 3)
    with forms("tpu"):
        end, ours = jax.jit(jax.vmap(lambda start: roll(start)))(starts)
        text = jax.jit(lambda start: roll(start)).lower(starts[0]).as_text()
    with forms("plain"):
        plain = jax.jit(jax.vmap(lambda start: roll(start)))(starts)
    assert same((end, ours), plain)
    assert ours["image"].shape == (members, 5, *shape)
    assert "5x3x4096xui8" in text
