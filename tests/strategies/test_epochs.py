"""Epochs: each order is a permutation, all of them are gone through whole, and no two are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.strategies.offline import epoch_indices, mul_divmod
from jaxrl.xla.shuffle import permute

KEY = jax.random.key(3)
SIZES = [1, 2, 7, 67, 1024, *(pytest.param(size, marks=pytest.mark.slow) for size in (63, 64, 100, 997, 4099))]
"""Of few units, of squares, of primes, and in between."""


@pytest.mark.parametrize("units", SIZES)
def test_every_place_has_a_unit_of_its_own_however_few_are_asked_for(units: int) -> None:
    look = jax.jit(lambda place: permute(KEY, place, units))
    order = np.asarray(look(jnp.arange(units)))
    assert sorted(order) == list(range(units))
    some = np.array([units - 1, 0, units // 2])
    np.testing.assert_array_equal(look(some), order[some])


@pytest.mark.every_day("50")
@pytest.mark.parametrize("units", [50, 997])
def test_units_come_to_lie_anywhere(units: int) -> None:
    """Of 2000 orders, each unit lies in each tenth of the places in about a tenth (five standard deviations: 67)."""
    place = jnp.arange(units)
    orders = jax.jit(jax.vmap(lambda key: permute(key, place, units)))(jax.random.split(KEY, 2000))
    tenth = np.argsort(np.asarray(orders), axis=1)[:, [0, 1, units - 1]] * 10 // units
    counts = np.stack([np.bincount(column, minlength=10) for column in tenth.T])
    assert np.abs(counts - 200).max() < 67
    # Nor do neighbours stay together: one lies behind the other at once in one of `units` orders.
    places = np.argsort(np.asarray(orders), axis=1)
    assert (places[:, 1] == places[:, 0] + 1).mean() < 5 / units + 0.01


@pytest.mark.every_day("10-4", "7-7")
@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (7, 7), (101, 3)])
def test_an_epoch_has_every_item_once_and_the_next_another_order(rows: int, batch: int) -> None:
    steps = jnp.arange(3 * rows, dtype=jnp.uint32)
    batches = jax.jit(jax.vmap(lambda step: epoch_indices(KEY, step, batch, rows)))(steps)
    orders = np.asarray(batches).reshape(-1, rows)  # 3 * batch epochs
    assert [sorted(order) for order in orders] == [list(range(rows))] * (3 * batch)
    assert len({tuple(order) for order in orders}) > min(2 * batch, 20)


def test_division_is_exact_where_the_product_has_more_than_32_bits() -> None:
    cases = [
        (0, 5, 7),
        (1, 7, 7),
        (2**32 - 1, 2**31 - 3, 2**31 - 1),
        (123_456_789, 4096, 5000),
        (17_000_000, 256, 999_983),
    ]
    for count, size, rows in cases:
        whole, rest = jax.jit(mul_divmod, static_argnums=(1, 2))(jnp.uint32(count), size, rows)
        assert (int(whole), int(rest)) == divmod(count * size, rows)
