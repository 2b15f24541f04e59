"""The benchmarks' own arithmetic: what is called faster, and what is counted."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import harness, loops
from benchmarks.compare import compare, verdict
from jaxrl.strategies.base import fold, iterate


def row(case: str, *samples: float, kernels: int = 10) -> harness.Row:
    return harness.row(case, samples, samples, 1.0, kernels_per_iteration=kernels)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ((100, 110, 120), (80, 85, 90), "faster"),
        ((80, 85, 90), (100, 110, 120), "slower"),
        ((100, 110, 120), (80, 85, 101), "same"),  # the ranges overlap
        ((100, 100, 100), (98, 98, 98), "same"),  # apart, but by less than 3 %
    ],
)
def test_a_difference_counts_only_beyond_the_noise(old: tuple[float, ...], new: tuple[float, ...], said: str) -> None:
    assert verdict(row("x", *old), row("x", *new)) == said


def test_what_only_one_result_has_and_other_kernels_are_told() -> None:
    lines = compare(
        {"rows": [row("a", 1, 1, 1), row("b", 1, 1, 1)]}, {"rows": [row("b", 1, 1, 1, kernels=12), row("c", 1, 1, 1)]}
    )
    assert "only in A" in lines[0]
    assert "kernels 10 -> 12" in lines[1]
    assert "only in B" in lines[2]


def test_a_row_is_made_of_medians_and_of_ratios_side_by_side() -> None:
    made = harness.row("x", [10.0, 30.0, 20.0], [10.0, 15.0, 5.0], env_steps=4)
    assert (made["us_per_opt_step"], made["spread"], made["ceiling_us"]) == (20.0, [10.0, 20.0, 30.0], 10.0)
    assert made["ratio_to_ceiling"] == 2.0  # of 1, 2 and 4
    assert (made["opt_steps_per_sec"], made["env_steps_per_sec"]) == (50_000.0, 200_000.0)


def test_subjects_take_turns_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []
    samples = harness.interleave(
        {name: lambda name=name: float(len(calls.append(name) or calls)) for name in ("a", "b")}, repeats=2
    )
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


@pytest.mark.parametrize("extra", [0, 3])
def test_kernels_are_those_of_one_iteration(extra: int) -> None:
    def body(carry: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
        for _ in range(1 + extra):  # a sort cannot be fused with another
            carry = jnp.sort(carry + jax.random.uniform(noise, carry.shape))
        return carry

    def run(carry: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        return iterate(fold, body, jax.random.key(0), carry, start, stop)

    loop = loops.Loop(run, jnp.zeros(32))
    text = loop.compiled.as_text()
    counted = loops.kernels_per_iteration(loop.compiled)
    assert "sort(" in text
    assert 2 + 2 * extra <= counted
    assert loop.us(10) > 0
    if extra:
        plain = loops.Loop(
            lambda c, a, b: iterate(fold, lambda x, n, t: x + 1, jax.random.key(0), c, a, b), jnp.zeros(32)
        )
        assert loops.kernels_per_iteration(plain.compiled) < counted
