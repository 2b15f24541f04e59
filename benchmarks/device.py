"""What the device allows: the least time that a kernel takes, by the bytes it moves and the products it makes."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hlo import Kernel, kernels
from benchmarks.loops import Loop

FLOATS = tuple(2**k for k in range(8, 27, 3))
"""Lengths of the vectors that the simplest kernel is timed with: 3 kB to 800 MB moved."""
SIDES = (512, 1024, 2048, 4096)
"""Of the square matrices that are multiplied, as long as larger ones are faster."""


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
        """Return the least microseconds of one run of a kernel."""
        most = max(self.kernel_us)
        moving = np.interp(kernel.bytes, list(self.kernel_us), list(self.kernel_us.values()))
        return max(float(moving) * max(1.0, kernel.bytes / most), kernel.flops / self.flops_per_us)

    def bound(self, iteration: Sequence[Kernel]) -> float:
        """Return the least microseconds of an iteration of these kernels, one after the other."""
        return sum(kernel.times * self.kernel(kernel) for kernel in iteration)


@cache
def limits() -> Limits:
    """Measure the device, once a process."""
    turn, size = {}, {}
    for n in FLOATS:
        turns = min(256, max(16, FLOATS[-1] // n))
        loop = _loop(_triad, jnp.ones(n), turns)
        turn[n], size[n] = _fastest(loop) / turns, len(kernels(loop.compiled))
    least = FLOATS[0]
    launch = turn[least] / size[least]  # the counter of the loop is a kernel, too
    alone = {12 * n: turn[n] - (size[n] - 1) * launch for n in FLOATS}
    return Limits(alone, _flops_per_us(), max(0.0, _fastest(_loop(_triad, jnp.ones(least))) - turn[least]))


def _flops_per_us() -> float:
    """Return how fast square matrices are multiplied."""
    best = 0.0
    for n in SIDES:
        rate = 2 * n**3 / _fastest(_loop(jnp.matmul, jnp.eye(n)))
        if rate < best:
            break
        best = rate
    return best


def _triad(x: Any, y: Any) -> Any:
    return 0.5 * x + y


def _loop(step: Callable[[Any, Any], Any], x: Any, turns: int = 1) -> Loop:
    """Return a loop whose length XLA does not know, over one, where `turns` are more than 1, whose length it does."""
    once = lambda i, carry: (step(*carry), carry[1])
    many = once if turns == 1 else lambda i, carry: jax.lax.fori_loop(0, turns, once, carry)
    return Loop(lambda carry, start, stop: jax.lax.fori_loop(start, stop, many, carry), (x, jnp.copy(x)))


def _fastest(loop: Loop, repeats: int = 5) -> float:
    """Return the fewest microseconds of an iteration, of calls of some 20 ms."""
    iterations = max(1, int(20_000 / min(loop.us(1) for _ in range(2))))
    return min(loop.us(iterations) for _ in range(repeats))
