"""JAX's own random bits, in a form that CPUs compute two to five times faster.

Plain, and on other devices: JAX's own generator. The bits are the same.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry2x32_p

from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla import by_platform, chosen, shaped_for

TURNS = (13, 15, 26, 6), (17, 29, 16, 24)
"""Bits by which each round rotates a word: four rounds use the first tuple, four the second, and so on."""

Words = tuple[Array, ...]
"""Both words of each hash, or their exclusive or."""


def unrolled(draw: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return `draw` with bits computed by `hashes`; its results stay exactly the same.

    Keys among the results are of the same kind as those passed in. Keys of other generators than JAX's default, and
    old-style keys, which are plain words, are left alone.
    """

    def drawn(key: Key, *args: Any) -> PyTree:
        kind = jax.random.key_impl(key)
        old_style = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if (
            not shaped_for("cpu")
            or old_style
            or kind != "threefry2x32"
            or not cast(Any, jax.config).jax_threefry_partitionable
        ):
            return draw(key, *args)
        own = jax.random.wrap_key_data(jax.random.key_data(key), impl=_GENERATOR)
        ours = lambda x: getattr(x, "dtype", None) == own.dtype
        back = lambda x: jax.random.wrap_key_data(jax.random.key_data(x), impl=kind) if ours(x) else x
        return jax.tree.map(back, draw(own, *args))

    return drawn


def hashes(key: Array, first: Array | int, count: int, pairs: bool) -> Words:
    """Hash the numbers `first + [0..count)` under `key`, uint32 `[2]`; return one word for each, or with `pairs` both.

    It is Threefry-2x32 with 20 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3").

    On CPUs, JAX runs the rounds as a loop over whole arrays. Unrolled, a word stays in a register. All keys of a batch
    are hashed together, in a loop over two halves, because XLA does not recompute the result of a loop for each of its
    readers.
    """

    words: Words = _hashed(key[0], key[1], jnp.uint32(first), count, pairs, chosen())
    return words


@partial(jax.jit, static_argnums=(3, 4, 5))
def _hashed(a: Array, b: Array, first: Array, count: int, pairs: bool, forms: str) -> Words:
    """Trace the hash once for each shape, and lower it once for each program: most of them draw often.

    `forms` is the choice under which it is traced.
    """
    del forms

    @jax.custom_batching.custom_vmap
    def hashed(*args: Array) -> Words:
        on_cpu = lambda a, b, first: _in_halves(a, b, first, count, pairs)
        elsewhere = lambda a, b, first: _words(threefry2x32_p.bind(*_numbered(a, b, first, count)), pairs)
        words: Words = by_platform(on_cpu, elsewhere, *args)
        return words

    @hashed.def_vmap
    def rule(size: int, batched: list[bool], *args: Array) -> tuple[Words, Any]:
        full = (x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip(args, batched, strict=True))
        words = hashed(*full)
        return words, jax.tree.map(lambda _: True, words)

    words: Words = hashed(a, b, first)
    return words


def _in_halves(a: Array, b: Array, first: Array, count: int, pairs: bool) -> Words:
    """Hash under keys `(a, b)` from `first` on, all `[...]`; return words `[..., count]`."""
    shape, rows = (*first.shape, count), first.size
    args = [x.reshape(-1) for x in (a, b, first)]
    if rows == 1:  # as if each number had its own key
        args = [jnp.broadcast_to(x, count) for x in args]
        args[2] += jax.lax.iota(jnp.uint32, count)
        rows, count = count, 1
    half = -(-rows // 2)

    def one(i: Array, done: Words) -> Words:
        # With an odd number of rows, the middle one is computed twice.
        start = jnp.minimum(i * half, rows - half)
        a, b, first = (jax.lax.dynamic_slice_in_dim(x, start, half) for x in args)
        new = _words(_rounds(*_numbered(a, b, first, count)), pairs)
        return tuple(jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(done, new, strict=True))

    nothing = (jnp.zeros((rows, count), jnp.uint32),) * (2 if pairs else 1)
    return tuple(x.reshape(shape) for x in jax.lax.fori_loop(0, 2, one, nothing))


def _numbered(a: Array, b: Array, first: Array, count: int) -> tuple[Array, Array, Array, Array]:
    """Return the words to hash, each `[..., count]`: two of the key and two of the number."""
    shape = (*first.shape, count)
    a, b, first = (jnp.broadcast_to(x[..., None], shape) for x in (a, b, first))
    low = first + jax.lax.broadcasted_iota(jnp.uint32, shape, first.ndim - 1)
    return a, b, jnp.zeros_like(low), low


def _rounds(a: Array, b: Array, x: Array, y: Array) -> tuple[Array, Array]:
    keys = a, b, a ^ b ^ jnp.uint32(0x1BD11BDA)
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for turn in TURNS[i % 2]:
            x = x + y
            y = x ^ (y << turn | y >> (32 - turn))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def _words(hashed: tuple[Array, Array], pairs: bool) -> Words:
    x, y = hashed
    return (x, y) if pairs else (x ^ y,)


# --- as a generator for `jax.random` ----------------------------------------------------------------------------


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.stack(hashes(key, 0, prod(shape), pairs=True), axis=-1).reshape(*shape, 2)


def _fold_in(key: Array, data: Array | int) -> Array:
    return jnp.concatenate(hashes(key, data, 1, pairs=True))


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    if width == 64:
        high, low = (x.astype(jnp.uint64).reshape(shape) for x in hashes(key, 0, prod(shape), pairs=True))
        return high << 32 | low
    (word,) = hashes(key, 0, prod(shape), pairs=False)
    return word.reshape(shape).astype(f"uint{width}")


def _seed(seed: Array) -> Array:
    raise NotImplementedError("keys are made by JAX's own generator")


_GENERATOR = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry_unrolled",
    tag="fru",
)
