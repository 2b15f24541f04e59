"""A function of one shard, run for all: the same as under `vmap` with a named axis, whatever meets inside of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import shards
from jaxrl.errors import SettingsError
from jaxrl.xla.attempts import failures
from jaxrl.xla.packing import take
from jaxrl.xla.spread import replicate, run_shards

V = 3
X = jnp.arange(12.0).reshape(V, 4) + 1


def all_own(made: Any) -> Any:
    """Say that each shard has all that was made for itself, where that cannot be read from the program."""
    return jax.tree.map(lambda _: True, made)


def products(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w), shards.psum(x @ w), shards.pmean(jnp.exp(x))


def in_turns(x: Any, w: Any) -> Any:
    """Shards meet in every turn of a loop, whose carry becomes each one's own, and rows of time are theirs."""

    def turn(carry: Any, row: Any) -> Any:
        same, own = carry
        same = same + shards.psum(row * own)
        return (same, own + row), (same, own * same)

    return jax.lax.scan(turn, (jnp.float32(0), jnp.float32(1)), x)


def while_it_lasts(x: Any, w: Any) -> Any:
    body = lambda c: (c[0] + shards.pmax(c[1]), c[1] * 2)
    return jax.lax.while_loop(lambda c: c[0] < 100, body, (jnp.float32(0), x.sum()))


def where_it_is_due(x: Any, w: Any) -> Any:
    """Shards meet in the branch that is taken; the other leaves to each what is its own."""
    meet = lambda x, s: (x * shards.pmean(x.sum()), shards.psum(s * x.sum()))
    first = jax.lax.cond(w[0] < 0, meet, lambda x, s: (x, s), x, w[1])
    return first, jax.lax.cond(w[0] > 0, meet, lambda x, s: (x, s), x, w[1])


def by_place(x: Any, w: Any) -> Any:
    key = shards.shard_key(jax.random.key(3))
    return jax.random.normal(key, (2,)), shards.pmin(x), jax.random.key_data(key)


def ring(x: Any, w: Any) -> Any:
    held = jax.lax.dynamic_update_slice(x, w[:2] * shards.pmean(x.sum()), (1,))
    return held, jnp.take(held, jnp.array([0, 3])), held.at[jnp.array([2, 2])].max(jnp.array([50.0, x[0]]))


def rows_by_platform(x: Any, w: Any) -> Any:
    """Each platform reads and writes rows in its own form; one of these sums computes as well."""
    read = lambda x, place: jax.lax.dynamic_slice(x, (place,), (2,))
    gather = lambda x, place: x.at[place + jnp.arange(2)].get(mode="promise_in_bounds")
    held = jax.lax.platform_dependent(
        x,
        w,
        cpu=lambda x, w: jax.lax.dynamic_update_slice(x, w[:2], (1,)),
        default=lambda x, w: x.at[1:3].set(w[:2]),
    )
    place = jax.lax.argmax(w, 0, jnp.int32) - 2
    made = jax.lax.platform_dependent(held, place, cpu=read, default=gather)
    sums = jax.lax.platform_dependent(held, cpu=lambda x: x[:2] + x[2:], default=lambda x: x[2:] + x[:2])
    return held, made, sums, shards.psum(made)


def inside_calls(x: Any, w: Any) -> Any:
    inner = jax.jit(lambda y: shards.psum(jax.nn.relu(y - 5)))
    return inner(x) * x, jax.jit(lambda a: a + 1)(w)


@pytest.mark.parametrize(
    "function", [products, in_turns, while_it_lasts, where_it_is_due, by_place, ring, rows_by_platform, inside_calls]
)
def test_it_means_what_vmap_with_a_named_axis_means(function: Callable[..., Any]) -> None:
    w = jnp.linspace(-1.0, 1.0, 4)
    wanted = jax.jit(jax.vmap(function, in_axes=(0, None), axis_name=shards.AXIS))(X, w)
    told: list[Any] = []

    def together(x: Any, w: Any) -> Any:
        made, own = run_shards(function, V, (x, w), (True, False), all_own)
        told.append(own)
        return made

    made, own = jax.jit(together)(X, w), told[0]
    for new, old in zip(jax.tree.leaves(replicate(made, own, V)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6)
    assert not failures()  # otherwise they were run in one batch, which means the same too


def test_shards_do_not_meet_where_each_chooses_by_itself() -> None:
    alone = lambda x, w: jax.lax.cond(x.sum() > 20, shards.psum, lambda x: x, x)
    with pytest.raises(SettingsError, match="each of them chooses by itself"):
        run_shards(alone, V, (X, jnp.ones(4)), (True, False), all_own)


def test_what_shards_have_in_common_is_told_from_what_is_their_own() -> None:
    def function(x: Any, w: Any) -> Any:
        return {"own": x * w, "sum": shards.psum(x), "same": w + 1, "of the sum": shards.psum(x) * w}

    _, own = run_shards(function, V, (X, jnp.ones(4)), (True, False), all_own)
    assert own == {"own": True, "sum": False, "same": False, "of the sum": False}


def test_sums_are_added_in_the_order_of_the_shards() -> None:
    """1e8 + 1 is 1e8 in float32, so that the order shows."""
    x = jnp.float32([1e8, 1.0, -1e8, 1.0])
    total, _ = run_shards(shards.psum, 4, (x,), (True,), all_own)
    assert float(total) == 1.0
    backwards, _ = run_shards(shards.psum, 4, (x[::-1],), (True,), all_own)
    assert float(backwards) == 0.0


@pytest.mark.parametrize("here", [1, 2])
def test_a_ring_is_never_taken_through_the_loop_over_shards(here: int) -> None:
    """Only a part of it is read and written, in place: the program needs no room for another ring.

    `take` reads in a form for each platform.
    """
    held = jnp.zeros((here, 50_000, 4))

    def push(held: Any, x: Any, place: Any) -> Any:
        new = jnp.tanh(x) + shards.psum(x)
        held = jax.lax.dynamic_update_slice(held, new, (place, 0))
        few = jax.lax.dynamic_slice(held, (place - 1, 0), (4, 4)).sum()
        return held, few + take(held, place + jnp.arange(3)).sum()

    run = lambda held, x, place: run_shards(push, here, (held, x, place), (True, True, False), all_own)[0]
    compiled = jax.jit(run, donate_argnums=0).lower(held, jnp.ones((here, 8, 4)), jnp.int32(5)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10_000
    _, sums = compiled(held, jnp.ones((here, 8, 4)), jnp.int32(5))
    np.testing.assert_allclose(sums, (12 + 12) * (np.tanh(1) + here), rtol=1e-6)


def test_without_shards_nothing_is_added() -> None:
    x = jnp.arange(3.0)
    assert not shards.is_sharded()
    for function in (shards.psum, shards.pmean, shards.pmin, shards.pmax, shards.shard_key):
        assert function(x) is x
