"""Dense layers, plain and in residual blocks: the basis of all networks."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla.orthogonal import orthogonal as random_orthogonal
from jaxrl.xla.products import dot_general, multiply

LECUN = nn.initializers.lecun_normal()
HE = nn.initializers.he_normal()
ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu, "silu": nn.silu, "elu": nn.elu}
DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}
"""Types of computation of torsos, as Flax takes them: `None` is the type of the parameters, always float32."""
BATCH_NORM_EPS = 1e-3
"""Added to variances of batch normalisation, as CrossQ does."""
RENORM_AFTER = 100_000
"""Updates before renormalisation begins, as in CrossQ's code."""
RENORM_SCALE, RENORM_SHIFT = 3.0, 5.0
"""The bounds `r_max` and `d_max` of algorithm 1, as in CrossQ's code."""


class MLP(nn.Module):
    """Dense layers, each with an activation; `[..., D] -> [..., features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    """Apply layer normalisation before each activation (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""
    orthogonal: bool = False
    """Initialise with orthogonal matrices of gain `sqrt(2)` (Saxe et al. 2014, https://arxiv.org/abs/1312.6120)."""
    noisy: float = 0.0
    """Initial scale of the parameter noise, see `NoisyDense`; 0: no noise."""
    dtype: str = "float32"
    """Type of computation and output, `float32` or `bfloat16`; parameters are float32."""
    dropout: float = 0.0
    """Share of each dense layer's outputs that are set to 0, before normalisation and activation; above 0, a call needs
    Flax's `rngs={"dropout": key}`."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.features:
            x = make_dense(width, self.noisy, kernel_init(self.orthogonal), self.dtype)(x)
            if self.dropout:
                x = nn.Dropout(self.dropout, deterministic=False)(x)
            x = activate(x, self.activation, self.layer_norm, self.dtype)
        return x


class SimBa(nn.Module):
    """A linear embedding, residual blocks, and layer normalisation; `[..., D] -> [..., features[-1]]`.

    There is one block for each of `features`, which are all equal: layer normalisation, a dense layer of four times the
    width, the activation, and a dense layer back to the width (Lee et al. 2024, https://arxiv.org/abs/2410.09754,
    section 4). Matrices are initialised as in the authors' code. Without `features` it returns its input.
    """

    features: Sequence[int]
    activation: str = "relu"
    noisy: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if not self.features:
            return x
        layer = lambda width, init: make_dense(width, self.noisy, init, self.dtype)
        x = layer(self.features[0], kernel_init(True, 1.0))(x)
        for width in self.features:
            normed = nn.LayerNorm(dtype=DTYPES[self.dtype])(x)
            wide = ACTIVATIONS[self.activation](layer(4 * width, HE)(normed))
            x = x + layer(width, HE)(wide)
        # Nothing in the blocks bounds the sum.
        return nn.LayerNorm(dtype=DTYPES[self.dtype])(x)


class BroNet(nn.Module):
    """A dense layer with layer normalisation and activation, then residual blocks; `[..., D] -> [..., features[-1]]`.

    There is one block for each of `features`, which are all equal: two dense layers with layer normalisation, and the
    activation between them (Nauman et al. 2024, https://arxiv.org/abs/2405.16158, figure 3). Matrices are initialised
    as in the authors' code. Without `features` it returns its input.
    """

    features: Sequence[int]
    activation: str = "relu"
    noisy: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if not self.features:
            return x
        layer = lambda width: make_dense(width, self.noisy, kernel_init(True), self.dtype)
        x = activate(layer(self.features[0])(x), self.activation, True, self.dtype)
        for width in self.features:
            inner = activate(layer(width)(x), self.activation, True, self.dtype)
            x = x + nn.LayerNorm(dtype=DTYPES[self.dtype])(layer(width)(inner))
        return x


RESIDUAL: Mapping[str, Any] = {"simba": SimBa, "bro": BroNet}
FLAT = ("mlp", *RESIDUAL)
"""Torsos of dense layers alone, for which all observations are flattened."""


def make_layers(
    kind: str,
    features: Sequence[int],
    activation: str,
    *,
    layer_norm: bool = False,
    orthogonal: bool = False,
    noisy: float = 0.0,
    dtype: str = "float32",
    dropout: float = 0.0,
) -> nn.Module:
    """Return the dense layers of torso `kind`.

    Residual torsos have their own normalisation and initialisation, regardless of `layer_norm` and `orthogonal`, and no
    dropout.
    """
    if kind in RESIDUAL:
        return RESIDUAL[kind](features, activation, noisy, dtype)
    return MLP(features, activation, layer_norm, orthogonal, noisy, dtype, dropout)


def flatten(x: Array) -> Array:
    """Return `x` `[B, ...]` as `[B, D]`, where `B` may be 0: a size of -1 would be undefined then."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def activate(x: Array, activation: str, layer_norm: bool, dtype: str) -> Array:
    """Apply layer normalisation, if `layer_norm`, and the activation; for use inside a compact module."""
    return ACTIVATIONS[activation](nn.LayerNorm(dtype=DTYPES[dtype])(x) if layer_norm else x)


class NoisyDense(nn.Module):
    """A dense layer with factorised noise on its parameters; `[..., D] -> [..., features]`.

    The noise is in the collection `noise`, zeros unless given: two standard normal vectors per layer (Fortunato et al.
    2018, https://arxiv.org/abs/1706.10295, section 3.1b).
    """

    features: int
    std: float
    """Initial scale of the noise; it is divided by the square root of the number of inputs."""
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape, bound = (x.shape[-1], self.features), x.shape[-1] ** -0.5
        middle = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        scale = nn.initializers.constant(self.std * bound)
        # Zeros at initialisation; in a call, the noise that the caller passes in the collection.
        zeros = lambda name, size: self.variable("noise", name, jnp.zeros, size, jnp.float32).value
        # Equations 10 and 11 of the paper: noise of the kernel is the outer product of f(e) = sign(e) sqrt(|e|) of the
        # inputs' and the outputs' noise.
        before, after = (
            jnp.sign(e) * jnp.sqrt(jnp.abs(e)) for e in (zeros("before", shape[0]), zeros("after", shape[1]))
        )
        kernel = self.param("kernel", middle, shape)
        kernel_spread = self.param("kernel_spread", scale, shape, jnp.float32)
        bias = self.param("bias", middle, shape[1:])
        bias_spread = self.param("bias_spread", scale, shape[1:], jnp.float32)
        weights = kernel + kernel_spread * before[:, None] * after[None]
        cast = lambda x: x.astype(DTYPES[self.dtype] or x.dtype)
        product = multiply(cast(x), cast(weights))
        return product + cast(jnp.expand_dims(bias + bias_spread * after, tuple(range(x.ndim - 1))))


class BatchNorm(nn.Module):
    """Batch normalisation of rows `[B, D]` (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167).

    With `train`, inputs are normalised by the statistics of the batch, which update the running ones in the collection
    `batch_stats`; otherwise by the running ones. With `renorm`, after `RENORM_AFTER` batches, their difference is
    corrected within bounds (batch renormalisation, Ioffe 2017, https://arxiv.org/abs/1702.03275, algorithm 1).
    """

    renorm: bool = False
    momentum: float = 0.99

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        size = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, size, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, size, jnp.float32)
        count = self.variable("batch_stats", "count", jnp.zeros, (), jnp.uint32) if self.renorm else None
        scale = self.param("scale", nn.initializers.ones, size, jnp.float32)[None]
        bias = self.param("bias", nn.initializers.zeros, size, jnp.float32)[None]
        if not train:
            return (x - mean.value[None]) * jax.lax.rsqrt(var.value[None] + BATCH_NORM_EPS) * scale + bias
        # Over the rows of one call: those of a shard, or of a part of its batch. `gradient_update` averages the running
        # statistics of all shards.
        mean_b, var_b = x.mean(0), x.var(0)
        normed = (x - mean_b[None]) * jax.lax.rsqrt(var_b[None] + BATCH_NORM_EPS)
        if count is not None:
            std, std_b = jnp.sqrt(var.value + BATCH_NORM_EPS), jnp.sqrt(var_b + BATCH_NORM_EPS)
            # With these, algorithm 1 normalises by the running statistics:
            # `(x - mean_b) / std_b * r + d = (x - mean) / std`.
            r, d = std_b / std, (mean_b - mean.value) / std
            # Until then the running statistics lag too far behind, and this is plain batch normalisation.
            begun = count.value >= RENORM_AFTER
            r = jnp.where(begun, jnp.clip(r, 1 / RENORM_SCALE, RENORM_SCALE), 1.0)
            d = jnp.where(begun, jnp.clip(d, -RENORM_SHIFT, RENORM_SHIFT), 0.0)
            # The corrections are constants: gradients pass through the statistics of the batch alone.
            normed = normed * jax.lax.stop_gradient(r)[None] + jax.lax.stop_gradient(d)[None]
            count.value = count.value + 1
        # The variance, as in CrossQ's code; the paper averages the standard deviation.
        mean.value = self.momentum * mean.value + (1 - self.momentum) * mean_b
        var.value = self.momentum * var.value + (1 - self.momentum) * var_b
        return normed * scale + bias


def make_dense(width: int, noisy: float, init: Any = LECUN, dtype: str = "float32") -> nn.Module:
    """Return a dense layer, or a `NoisyDense`, which has its own initialiser, if `noisy` is above 0."""
    return NoisyDense(width, noisy, dtype) if noisy else dense(width, init, dtype)


def dense(width: int, kernel_init: Any = LECUN, dtype: str = "float32", bias: bool = True) -> nn.Dense:
    """Return a dense layer `[..., D] -> [..., width]` with the products of `jaxrl.xla.products`."""
    return nn.Dense(width, bias, kernel_init=kernel_init, dot_general=dot_general, dtype=DTYPES[dtype])


def kernel_init(orthogonal: bool, gain: float = 2**0.5) -> Any:
    """Return the initialiser of matrices: orthogonal with `gain`, or Flax's default."""
    return partial(random_orthogonal, gain) if orthogonal else LECUN
