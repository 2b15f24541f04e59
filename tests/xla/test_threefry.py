"""The same random bits as JAX's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.xla.threefry import unrolled

DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda key: jax.random.uniform(key, (5, 3)),
    "normal": lambda key: jax.random.normal(key, (7,)),
    "one word": jax.random.bits,
    "nothing": lambda key: jax.random.bits(key, (0, 3)),
    "bytes": lambda key: jax.random.bits(key, (5,), "uint8"),
    "half words": lambda key: jax.random.bits(key, (2, 2), "uint16"),
    "whole numbers": lambda key: jax.random.randint(key, (4,), 0, 10),
    "an order": lambda key: jax.random.permutation(key, 11),
    "keys": lambda key: jax.random.split(key, (2, 3)),
    "one key": lambda key: jax.random.split(key, 1),
    "a folded key": lambda key: jax.random.fold_in(key, 2**32 - 1),
    "keys of keys": lambda key: jax.vmap(jax.random.split)(jax.random.split(key, 3)),
    "a number": lambda key: 0.5,
    "an array of NumPy": lambda key: np.arange(3),
    "several": lambda key: [jax.random.gumbel(k, (3,)) for k in jax.random.split(key, 3)],
}


def same(came: Any, wanted: Any) -> None:
    assert jax.tree.map(lambda x: x.dtype, came) == jax.tree.map(lambda x: x.dtype, wanted)
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    for (path, a), (_, b) in zip(*(jax.tree.leaves_with_path(x) for x in (came, wanted)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b), jax.tree_util.keystr(path))


@pytest.mark.parametrize("keys", [(2, 3), *(pytest.param(keys, marks=pytest.mark.slow) for keys in ((), (1,), (5,)))])
def test_its_bits_are_those_of_jax(keys: tuple[int, ...]):
    def draw_all(key: Any) -> dict[str, Any]:
        return {name: draw(key) for name, draw in DRAWS.items()}

    wanted, came = draw_all, unrolled(draw_all)
    for _ in keys:
        wanted, came = jax.vmap(wanted), jax.vmap(came)
    given = jax.random.split(jax.random.key(3), keys)
    same(jax.jit(came)(given), jax.jit(wanted)(given))


def test_its_bits_are_those_of_jax_where_only_the_number_of_an_iteration_differs():
    fold = lambda key, t: jax.random.normal(jax.random.fold_in(key, t), (2,))
    key, t = jax.random.key(0), jnp.arange(5, dtype=jnp.uint32)
    same(jax.vmap(unrolled(fold), (None, 0))(key, t), jax.vmap(fold, (None, 0))(key, t))


def test_words_of_64_bits():
    draw = lambda key: jax.random.bits(key, (3,), "uint64")
    with jax.enable_x64(True):
        same(unrolled(draw)(jax.random.key(1)), draw(jax.random.key(1)))


@pytest.mark.parametrize(
    "key",
    [jax.random.key(1, impl="rbg"), jax.random.key(1, impl="unsafe_rbg"), jax.random.PRNGKey(1)],
    ids=["rbg", "unsafe_rbg", "plain words"],
)
@pytest.mark.parametrize("name", ["several", "keys"])
def test_another_generator_or_kind_of_key_is_left_alone(name: str, key: Any):
    same(unrolled(DRAWS[name])(key), DRAWS[name](key))


def test_the_older_layout_of_bits_is_left_alone():
    draw = DRAWS["uniform"]
    with jax.threefry_partitionable(False):
        same(unrolled(draw)(jax.random.key(1)), draw(jax.random.key(1)))
