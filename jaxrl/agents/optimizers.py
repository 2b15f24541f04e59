"""Optimizers by name, and the gradient step that every agent shares."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import shards
from jaxrl.agents.checks import check_pieces
from jaxrl.agents.fields import OptimizerConfig
from jaxrl.errors import SettingsError, suggest
from jaxrl.registry import join_names
from jaxrl.trees import Array, PyTree, tree_bytes
from jaxrl.xla import reverse_mode
from jaxrl.xla.flat import elementwise, ravel, unravel
from jaxrl.xla.products import num_pieces

Optimizer = Callable[[Any], optax.GradientTransformation]
"""A function from a learning rate, which may be a traced array, to an Optax transformation."""

OPTIMIZERS: dict[str, Optimizer] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": optax.lion,
    "nadam": optax.nadam,
    "radam": optax.radam,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
}

_SETTINGS = {"optimizer_eps": "eps", "optimizer_b1": "b1", "optimizer_b2": "b2", "weight_decay": "weight_decay"}
"""Settings of `OptimizerConfig` that are arguments of Optax's optimizers, and their names there."""


def optimizer_of(config: OptimizerConfig) -> Optimizer:
    """Return the Optax optimizer that `config` describes.

    Raises:
      SettingsError: there is none of this name (with the nearest names), or it has no such setting.
    """
    name, given = config.optimizer, settings_given(config)
    if name not in OPTIMIZERS:
        raise SettingsError(f"unknown optimizer {name!r}; {suggest(name, OPTIMIZERS)}")
    for setting in given:
        able = [n for n, make in OPTIMIZERS.items() if _SETTINGS[setting] in signature(make).parameters]
        if name not in able:
            raise SettingsError(
                f"agent.{setting} is set, which {name} does not have; optimizers that do: {join_names(able)}"
            )
    arguments: dict[str, Any] = {_SETTINGS[setting]: value for setting, value in given.items()}
    if "weight_decay" in arguments:
        arguments["mask"] = _kernels
    return partial(OPTIMIZERS[name], **arguments) if arguments else OPTIMIZERS[name]


def settings_given(config: OptimizerConfig) -> dict[str, float]:
    """Return those settings of the optimizer that are not left to Optax."""
    return {name: getattr(config, name) for name in _SETTINGS if getattr(config, name) is not None}


def _kernels(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.ndim > 1, params)


class GradientStep(NamedTuple):
    """Gradient clipping, optimizer and parameter update as one step."""

    init: Callable[[PyTree, Array], PyTree]
    """`(params, lr) -> opt_state`"""
    step: Callable[[PyTree, list[Array], PyTree, Array, Array], tuple[PyTree, PyTree, Array]]
    """`(params, gradient, opt_state, lr, max_norm) -> (params, opt_state, norm of the gradient before clipping)`; the
    gradient is as `ravel` returns it."""


def gradient_step(optimizer: Optimizer) -> GradientStep:
    """Return the gradient step of an optimizer.

    Named optimizers treat every parameter alike, so they are given all parameters as one vector. One that decays
    kernels alone tells parameters apart, as a user's own may, so it is given the tree.
    """
    made, arguments = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    alike = made in OPTIMIZERS.values() and "mask" not in arguments

    def init(params: PyTree, lr: Array) -> PyTree:
        return optimizer(lr).init(ravel(params) if alike else params)

    def step(
        params: PyTree, gradient: list[Array], opt_state: PyTree, lr: Array, max_norm: Array
    ) -> tuple[PyTree, PyTree, Array]:
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in gradient))
        clipped = clip_by_norm(gradient, norm, max_norm)
        if alike:
            updates, opt_state = optimizer(lr).update(clipped, opt_state, ravel(params))
            updates = unravel(updates, params)
        else:
            updates, opt_state = optimizer(lr).update(unravel(clipped, params), opt_state, params)
        return elementwise(lambda x, change: (x + change).astype(x.dtype), params, updates), opt_state, norm

    return GradientStep(init, step)


def clip_by_norm(grads: PyTree, norm: Array, max_norm: Array) -> PyTree:
    """Scale `grads`, whose global norm is `norm`, down to a global norm of at most `max_norm`."""
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)


def polyak_update(target: PyTree, online: PyTree, tau: Array) -> PyTree:
    """Move `target` towards `online` by the fraction `tau` (Polyak averaging)."""
    return elementwise(lambda new, old: tau * new + (1.0 - tau) * old, online, target)


class Schedule(Protocol):
    """The settings of gradient steps that every agent has."""

    @property
    def lr_decay(self) -> int: ...
    @property
    def accumulate(self) -> int: ...


class Learnt(NamedTuple):
    """The result of a gradient step of one network."""

    params: PyTree
    opt_state: PyTree
    loss: Array
    norm: Array
    """Global norm of the gradient before clipping."""
    aux: PyTree


def learn(
    config: Schedule,
    gradient_step: GradientStep,
    loss: Callable[[PyTree, PyTree], tuple[Array, PyTree]],
    params: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    lr: Array,
    max_norm: Array,
    opt_step: Array,
) -> Learnt:
    """Take one gradient step on `loss(params, batch)`, a mean over the batch; its auxiliary output is `[B, ...]`.

    `lr` is the learning rate before any decay.
    """
    parts = check_pieces(config.accumulate, jax.tree.leaves(batch)[0].shape[0])
    value, aux, grads = accumulate(loss, params, batch, parts)
    value, gradient = shards.pmean((value, ravel(grads)))
    lr = decayed(lr, config.lr_decay, opt_step)
    new, opt_state, norm = gradient_step.step(params, gradient, opt_state, lr, max_norm)
    return Learnt(new, opt_state, value, norm, aux)


def decayed(lr: Array, duration: int, opt_step: Array) -> Array:
    """Decay a learning rate linearly to 0 over `duration` optimisation steps; a duration of 0 keeps it constant."""
    return linear(lr, 0.0, duration, opt_step) if duration else lr


def linear(start: Array, end: Array | float, duration: int, step: Array) -> Array:
    """Interpolate from `start` to `end` over `duration` steps, then stay; a duration of 0 means `end` at once."""
    if duration == 0:
        return jnp.asarray(end, jnp.float32)
    done = jnp.minimum(step, duration).astype(jnp.float32) / duration
    return start + (end - start) * done


def accumulate(
    loss: Callable[[PyTree, PyTree], tuple[Array, PyTree]], params: PyTree, batch: PyTree, parts: int
) -> tuple[Array, PyTree, PyTree]:
    """Return `loss`, its auxiliary output and its gradient, computed on `parts` equal pieces of `batch` in turn.

    `loss(params, batch)` must be a mean over the batch; the result is then that of the whole batch, in `1 / parts` of
    the memory. Every leaf of the auxiliary output is `[B, ...]`.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def grad(params: PyTree, batch: PyTree) -> Any:
        with reverse_mode():
            return differentiate(params, batch)

    at_once = num_pieces(jax.tree.leaves(batch)[0].shape[0], tree_bytes(params))
    if parts == 1 and at_once > 1:
        return _gathered(grad, params, batch, at_once)
    if parts == 1:
        (value, aux), grads = grad(params, batch)
        return value, aux, grads
    check_pieces = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)

    def piece(sums: tuple[Array, PyTree], part: PyTree) -> tuple[tuple[Array, PyTree], PyTree]:
        (value, aux), grads = grad(params, part)
        return jax.tree.map(lambda s, x: s + x / parts, sums, (value, grads)), aux

    zeros = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
    (value, grads), aux = jax.lax.scan(piece, zeros, check_pieces)
    return value, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux), grads


def _gathered(grad: Callable[[PyTree, PyTree], Any], params: PyTree, batch: PyTree, parts: int) -> Any:
    """Return what `accumulate` does, from the gradients of `parts` equal pieces, computed side by side."""
    cut = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    (value, aux), grads = jax.vmap(grad, in_axes=(None, 0))(params, cut)
    aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
    rows = jnp.concatenate([g.reshape(parts, -1) for g in jax.tree.leaves(grads)], axis=1).mean(axis=0)
    ends = np.cumsum([g.size // parts for g in jax.tree.leaves(grads)])
    summed = [x.reshape(g.shape[1:]) for x, g in zip(jnp.split(rows, ends[:-1]), jax.tree.leaves(grads), strict=True)]
    return value.mean(), aux, jax.tree.unflatten(jax.tree.structure(grads), summed)
