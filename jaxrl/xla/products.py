"""Matrix products in forms that XLA runs fast. Plain: XLA's own.

On two cores, DQN takes 0.94 to 0.98 of the time, PPO 0.73 to 0.95 (with 512-bit vectors), DQN with a convolution 0.54;
`benchmarks/NOTES.md` reports each form separately. Recurrent cores are Flax's own and do not use these forms.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla import by_platform, is_reverse_only, shaped_for

TINY = 1 << 10
"""Largest product, in multiplications, that is faster without the matrix library."""
THIN = 32
"""Largest number of outputs of a layer whose gradient is treated as a few vectors."""
SMALL = 1 << 13
"""Entries of a parameter matrix, and rows of a batch, up to which one core is faster than two."""
NARROW = 8
"""Largest number of inputs or outputs for which CUDA devices do not use their matrix units."""
LONG = 1 << 10
"""Smallest batch that is split, for a small parameter matrix."""
PIECE = 256
"""Most rows in a piece of a batch on CUDA."""
SHORTEST = 64
"""Fewest rows in a piece."""
PIECES_BYTES = 128 << 20
"""Largest size of the gradients of all pieces, in bytes."""
CUTS = 16
"""Pieces of a batch on CPUs: XLA divides this many among cores, but not fewer."""

_barrier = jax.lax.optimization_barrier
"""Barrier, without which XLA folds a transposition into the product."""


def dot_general(x: Array, kernel: Array, dimensions: Any, precision: Any = None, **wanted: Any) -> Array:
    """Return `multiply(x, kernel)`, for `nn.Dense`; if a precision or a dtype is requested, use XLA's own product."""
    if precision is None and not any(x is not None for x in wanted.values()) and x.dtype == kernel.dtype:
        return multiply(x, kernel)
    return jax.lax.dot_general(x, kernel, dimensions, precision=precision, **wanted)


def multiply(x: Array, kernel: Array) -> Array:
    """Return `x @ kernel`, `[..., D], [D, F] -> [..., F]`.

    Pass all rows in one call: the form depends on the visible shapes, and `vmap` hides its axis.
    """
    return _reversed_product(x, kernel) if is_reverse_only() else _product(x, kernel)


def _product(x: Array, kernel: Array) -> Array:
    if is_narrow(kernel.shape) and x.dtype == jnp.float32:
        return _unrolled_product(x, kernel)
    if not shaped_for("cpu") or x.size * kernel.shape[1] > TINY:
        return _plain(x, kernel)
    return by_platform(_sums, _plain, x, kernel)


def _plain(x: Array, kernel: Array) -> Array:
    return x @ kernel


def num_pieces(rows: int, gradient: int) -> int:
    """Return the number of pieces of a batch of `rows`, whose gradients are computed in parallel and then added.

    The gradient of small parameters is a sum over all rows, which occupies the units of a CUDA device only if it is
    split. XLA splits it, too, but adds up each of the many sums in a separate kernel. Returns 1 if the gradients of
    all pieces, of `gradient` bytes each, would take more than `PIECES_BYTES`.
    """
    if not shaped_for("cuda") or rows < LONG:
        return 1
    # The largest piece that divides the rows evenly.
    piece = next(size for size in range(PIECE, 0, -1) if rows % size == 0)
    return rows // piece if piece >= SHORTEST and rows // piece * gradient <= PIECES_BYTES else 1


def is_narrow(shape: tuple[int, ...]) -> bool:
    """Return whether products by matrices of this shape, `[D, F]` or with an axis of critics, are unrolled into sums.

    Such sums read the matrix in any layout.
    """
    return shaped_for("cuda") and len(shape) in (2, 3) and min(shape[-2:]) <= NARROW


def _unrolled_product(x: Array, kernel: Array) -> Array:
    """Return `x @ kernel` as a sum over a few inputs, or as a few sums over the inputs, one per output."""
    (inputs, outputs), rows = kernel.shape, _rows(x)
    if inputs <= NARROW:
        summed = sum((rows[:, i : i + 1] * kernel[i][None] for i in range(1, inputs)), rows[:, :1] * kernel[:1])
    else:
        summed = jnp.stack([(rows * kernel[:, j][None]).sum(axis=1) for j in range(outputs)], axis=1)
    return summed.reshape(*x.shape[:-1], outputs)


def _sums(x: Array, kernel: Array) -> Array:
    return (_rows(x)[:, :, None] * kernel[None]).sum(axis=1).reshape(*x.shape[:-1], kernel.shape[1])


@jax.custom_vjp
def _reversed_product(x: Array, kernel: Array) -> Array:
    """Multiply, with a gradient for the kernel that is fast on CPUs; it has no forward-mode derivative."""
    return _product(x, kernel)


def _forwards(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _backwards(given: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = given
    by_input = _product(g, kernel.T) if shaped_for("cuda") else g @ kernel.T
    return by_input.astype(x.dtype), _kernel_gradient(_rows(x), _rows(g)).astype(kernel.dtype)


_reversed_product.defvjp(_forwards, _backwards)


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _kernel_gradient(x: Array, g: Array) -> Array:
    """Return `x.T @ g`, `[B, D], [B, F] -> [D, F]`.

    XLA for CPUs dispatches `x.T @ g` to a different library than other products, one several times slower if there are
    few outputs. So one of the two is transposed by a separate kernel first.
    """
    rows, inputs, outputs = len(x), x.shape[1], g.shape[1]
    if shaped_for("cuda", "tpu"):
        return _plain_kernel_gradient(x, g)
    small = inputs * outputs <= SMALL
    # Few outputs: the transposed gradient, for which only `g`, the narrower of the two, is transposed.
    if outputs <= THIN and outputs < inputs:
        return by_platform(lambda x, g: _barrier(_barrier(g.T) @ x).T, _plain_kernel_gradient, x, g)
    # A long batch and a small matrix: in pieces that XLA divides among cores.
    if small and THIN < outputs <= inputs and rows >= LONG and rows % CUTS == 0:
        return by_platform(_in_pieces, _plain_kernel_gradient, x, g)
    # A short batch and a small matrix: `x` is transposed by a separate kernel.
    if small and rows <= SMALL:
        return by_platform(lambda x, g: _barrier(x.T) @ g, _plain_kernel_gradient, x, g)
    return _plain_kernel_gradient(x, g)


def _in_pieces(x: Array, g: Array) -> Array:
    """Return `x.T @ g` as a sum of products, each over a piece of the rows, with `g` transposed."""
    pieces = partial(jnp.reshape, shape=(CUTS, len(x) // CUTS, -1))
    return _barrier(_barrier(pieces(g).mT) @ pieces(x)).sum(axis=0).T


def _plain_kernel_gradient(x: Array, g: Array) -> Array:
    return x.T @ g


def convolve(x: Array, kernel: Array, window_strides: Any, padding: Any, **kwargs: Any) -> Array:
    """Return the convolution of `x` `[B, H, W, C]` with `kernel` `[h, w, C, D]`, as `nn.Conv` asks for it.

    On CPUs, a convolution of stride 1 without padding is computed as a matrix product; XLA's own gradient for the
    kernel takes up to 30 times as long. With a stride or padding, XLA's own is faster.
    """
    plain = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, window_strides, padding, **kwargs)
    if padding != "VALID" or set(window_strides) != {1}:
        return plain(x, kernel)
    return by_platform(_patches, plain, x, kernel)


def _patches(x: Array, kernel: Array) -> Array:
    height, width, channels, features = kernel.shape
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    # Every shifted view of the images, in the order in which the kernel's leading axes are flattened: one product then
    # sums over all.
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(height * width * channels, features)
