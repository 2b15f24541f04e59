"""What the device allows: the least time that a kernel takes, by the bytes it moves and the products it makes."""

import bisect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.hlo import Kernel, kernels
from benchmarks.loops import Loop

FLOATS = [4**k for k in range(4, 13)]
"""Lengths of the vectors that the simplest kernel is timed with: 3 kB to 200 MB moved."""
SIDES = [512, 1024, 2048, 4096]
"""Of the square matrices that are multiplied."""
LINKS = 16
"""Kernels of a chain, each of which needs what the last one made: enough for XLA to give them to a GPU as one graph."""


def shorten() -> None:
    """Have the device measured by the smallest vectors and matrices alone: its limits then mean nothing."""
    del FLOATS[2:], SIDES[1:]


class Limits(NamedTuple):
    """The device, as it was measured."""

    kernel_us: dict[int, float]
    """Microseconds of `a x + y` by the bytes it moves, one after the other: a launch, or the speed of the memory."""
    flops_per_us: float
    """Of the fastest product of square matrices, of the precision that training has."""
    turn_us: float
    """What a turn of a loop costs whose length XLA does not know: on a GPU the host has to be asked each time."""

    def __str__(self) -> str:
        """Return it in one line."""
        least, fastest = min(self.kernel_us.values()), max(size / us for size, us in self.kernel_us.items())
        slowest = max(self.kernel_us) / max(self.kernel_us.values())
        return (
            f"device: {least:.2f} us a kernel, {fastest / 1e3:,.0f} GB/s at best, {slowest / 1e3:,.0f} from memory, "
            f"{self.flops_per_us / 1e3:,.0f} GFLOP/s, {self.turn_us:.2f} us a turn of a loop of unknown length"
        )

    def kernel(self, kernel: Kernel) -> float:
        """Return the least microseconds of one run of a kernel.

        Between two sizes that were measured it moves bytes as fast as with the better of them, and takes no less than
        with the smaller.
        """
        sizes = sorted(self.kernel_us)
        above = bisect.bisect_left(sizes, kernel.bytes)
        beside = sizes[max(0, above - 1) : above + 1]
        moving = kernel.bytes * min(self.kernel_us[size] / size for size in beside)
        return max(moving, self.kernel_us[beside[0]], kernel.flops / self.flops_per_us)

    def bound(self, iteration: Sequence[Kernel]) -> float:
        """Return the least microseconds of an iteration of these kernels, one after the other."""
        return sum(kernel.times * self.kernel(kernel) for kernel in iteration)


@cache
def limits() -> Limits:
    """Measure the device, once a process."""
    turn = {}
    for n in FLOATS:
        turns = min(256, max(16, FLOATS[-1] // n))
        turn[n] = _fastest(_loop(_triad, jnp.ones(n), turns)) / turns
    least = FLOATS[0]
    launching = [_loop(_triad, jnp.ones(least), 64), _loop(_chain, jnp.ones((32, 32)), 64)]
    launch = min(_fastest(loop) / (64 * len(kernels(loop.compiled))) for loop in launching)
    return Limits(
        kernel_us={12 * n: launch + max(0.0, turn[n] - turn[least]) for n in FLOATS},
        flops_per_us=max(2 * n**3 / _fastest(_loop(jnp.matmul, jnp.eye(n))) for n in SIDES),
        turn_us=max(0.0, _fastest(_loop(_triad, jnp.ones(least))) - turn[least]),
    )


def _triad(x: Any, y: Any) -> Any:
    return 0.5 * x + y


def _chain(x: Any, y: Any) -> Any:
    """Make `LINKS` kernels: a sum is not fused with one that needs it, for each of its terms would add up anew."""
    for _ in range(LINKS):
        x = (0.03 * x * y).sum(1)[None] + y
    return x


def _loop(step: Callable[[Any, Any], Any], x: Any, turns: int = 1) -> Loop:
    """Return a loop whose length XLA does not know, over one, where `turns` are more than 1, whose length it does."""
    once = lambda i, carry: (step(*carry), carry[1])
    many = once if turns == 1 else lambda i, carry: jax.lax.fori_loop(0, turns, once, carry)
    return Loop(lambda carry, start, stop: jax.lax.fori_loop(start, stop, many, carry), (x, x))


def _fastest(loop: Loop, repeats: int = 5) -> float:
    """Return the fewest microseconds of an iteration, of calls of 20 ms and more."""
    iterations = 1
    while loop.us(iterations) * iterations < 20_000:
        iterations *= 2
    return min(loop.us(iterations) for _ in range(repeats))
