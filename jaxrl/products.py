"""Products of matrices in the forms that XLA for CPUs is fast at; on other devices they are XLA's own.

What each form gains is in `benchmarks/NOTES.md`.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxrl.types import Array

TINY = 1 << 10
"""Multiplications of a product that is not worth a call of the library for matrices, at most."""
THIN = 32
"""Outputs of a layer whose gradient is that of a few vectors, at most."""
SMALL = 1 << 13
"""Entries of a matrix of parameters, and rows of a batch, up to which one core is faster than two that share."""


@jax.custom_vjp
def multiply(x: Array, kernel: Array) -> Array:
    """Return `x @ kernel`, `[..., D], [D, F] -> [..., F]`; only for reverse-mode differentiation."""
    plain = lambda x, kernel: x @ kernel
    if x.size * kernel.shape[1] > TINY:
        return plain(x, kernel)
    sums = lambda x, kernel: (_rows(x)[:, :, None] * kernel[None]).sum(axis=1).reshape(*x.shape[:-1], -1)
    return _on_cpus(sums, plain, x, kernel)


def _forwards(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return multiply(x, kernel), (x, kernel)


def _backwards(given: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = given
    return g @ kernel.T, _by_kernel(_rows(x), _rows(g))


multiply.defvjp(_forwards, _backwards)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _by_kernel(x: Array, g: Array) -> Array:
    """Return `x.T @ g`, `[B, D], [B, F] -> [D, F]`.

    XLA for CPUs leaves a product over the first axes of both to another library than all else, one several times
    slower where there are few outputs. So one of the two is transposed by a kernel of its own beforehand.
    """
    plain, (rows, inputs), outputs = (lambda x, g: x.T @ g), x.shape, g.shape[1]
    # What is behind a barrier is not made one with the product again.
    apart = jax.lax.optimization_barrier
    if outputs <= THIN and outputs < inputs:
        return _on_cpus(lambda x, g: apart(apart(g.T) @ x).T, plain, x, g)
    if inputs * outputs <= SMALL and rows <= SMALL:
        return _on_cpus(lambda x, g: apart(x.T) @ g, plain, x, g)
    return plain(x, g)


def convolve(x: Array, kernel: Array, *args: Any, **kwargs: Any) -> Array:
    """Return the convolution of `x` `[B, H, W, C]` with `kernel` `[h, w, C, D]`, as `nn.Conv` asks for it.

    On CPUs one of stride 1 without padding is a product of matrices, of which XLA's own gradient by the kernel takes up
    to 30 times as long.
    """
    return _on_cpus(_patches, lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, *args, **kwargs), x, kernel)


def _patches(x: Array, kernel: Array) -> Array:
    height, width, channels, features = kernel.shape
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(height * width * channels, features)


def _on_cpus(ours: Any, default: Any, x: Array, y: Array) -> Array:
    return cast(Array, jax.lax.platform_dependent(x, y, cpu=ours, default=default))
