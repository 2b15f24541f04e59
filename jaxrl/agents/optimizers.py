"""Optimizers by name, and the gradient step that every agent shares.

Authors of agents may use it, as `docs/extending.md` shows: `gradient_step(optimizer_of(config), config.lr_decay,
config.accumulate)` once, and `gradient_update` and `polyak_update` in each update. It follows the settings of
`OptimizerConfig`, updates collections such as batch statistics, and averages over shards.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import shards
from jaxrl.agents.checks import check_pieces
from jaxrl.agents.fields import OptimizerConfig
from jaxrl.errors import SettingsError, suggest
from jaxrl.nn import join_variables, split_variables
from jaxrl.registry import join_names
from jaxrl.trees import Array, Key, PyTree, tree_bytes
from jaxrl.xla import flat, reverse_mode
from jaxrl.xla.products import num_pieces
from jaxrl.xla.reductions import sum_once

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
        able = [n for n in OPTIMIZERS if _takes(n, setting)]
        if name not in able:
            raise SettingsError(
                f"agent.{setting} is set, which {name} does not have; optimizers that do: {join_names(able)}"
            )
    arguments: dict[str, Any] = {_SETTINGS[setting]: value for setting, value in given.items()}
    if "weight_decay" in arguments:
        # Optax decays all parameters unless it is given a mask; a decay that the user sets spares biases and scales.
        arguments["mask"] = _kernels
    return partial(OPTIMIZERS[name], **arguments) if arguments else OPTIMIZERS[name]


def settings_given(config: OptimizerConfig) -> dict[str, float]:
    """Return those settings of the optimizer that are not left to Optax."""
    return {name: getattr(config, name) for name in _SETTINGS if getattr(config, name) is not None}


def without_usual(config: Any, usual: OptimizerConfig, replaced: bool) -> Any:
    """Return `config` without those settings of the optimizer that are only an algorithm's `usual` ones.

    They suit its usual optimizer alone: left out are those that another one, `config.optimizer`, does not have, and all
    if the optimizer is `replaced` by the user's own.
    """
    of_other = lambda name: replaced or (config.optimizer in OPTIMIZERS and not _takes(config.optimizer, name))
    left_out = [name for name, x in settings_given(config).items() if x == getattr(usual, name) and of_other(name)]
    return replace(config, **dict.fromkeys(left_out))


def _takes(optimizer: str, setting: str) -> bool:
    return _SETTINGS[setting] in signature(OPTIMIZERS[optimizer]).parameters


def _kernels(params: PyTree) -> PyTree:
    """Return whether each parameter is a kernel, by name; if none is named so, whether it is a matrix."""
    # The number of axes does not tell: in an ensemble, biases and the time scales of a core are matrices `[K, F]`.
    named = _kernels_by_name(params)
    return named if any(jax.tree.leaves(named)) else jax.tree.map(lambda x: x.ndim > 1, params)


def _kernels_by_name(params: PyTree) -> PyTree:
    def has_name(path: tuple[Any, ...], x: Array) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True).rpartition("/")[2].startswith("kernel")

    return jax.tree_util.tree_map_with_path(has_name, params)


def require_kernels(params: PyTree, name: str, **settings: object) -> None:
    """Raise `SettingsError` if one of `settings` is on, which act on kernels, and the network `name` names none so.

    This is for networks that are mapped over several sets of parameters, of which biases are matrices too.
    """
    for setting, value in settings.items():
        if value and not any(jax.tree.leaves(_kernels_by_name(params))):
            raise SettingsError(
                f"agent.{setting} is {value}, but the network of {name} has no parameter whose name begins with "
                f"kernel, so its kernels cannot be told from its biases; name them so, or turn {setting} off"
            )


class GradientStep(NamedTuple):
    """Gradient clipping, optimizer and parameter update as one step."""

    init: Callable[[PyTree, Array], PyTree]
    """`(variables, lr) -> opt_state`"""
    step: Callable[[PyTree, list[Array], PyTree, Array, Array], tuple[PyTree, PyTree, Array]]
    """`(params, gradient, opt_state, lr, max_norm) -> (params, opt_state, norm of the gradient before clipping)`; the
    gradient is as `ravel` returns it."""
    lr_decay: int
    """Optimisation steps over which the learning rate decays linearly to 0; 0: no decay."""
    accumulate: int
    """Equal pieces of a batch whose gradients are computed in turn."""


def gradient_step(optimizer: Optimizer, lr_decay: int = 0, accumulate: int = 1) -> GradientStep:
    """Return the gradient step of an optimizer.

    Named optimizers treat every parameter alike, so they are given all parameters as one vector. An optimizer with a
    mask for kernels treats them differently, and one made by the user may, so these are given the tree.
    """
    # `optimizer_of` returns a partial if there are settings beside the learning rate.
    made, arguments = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    alike = made in OPTIMIZERS.values() and "mask" not in arguments

    def init(variables: PyTree, lr: Array) -> PyTree:
        params, _ = split_variables(variables)
        return optimizer(lr).init(params)

    def step(
        params: PyTree, gradient: list[Array], opt_state: PyTree, lr: Array, max_norm: Array
    ) -> tuple[PyTree, PyTree, Array]:
        # The global norm, over all parameters together (Pascanu et al. 2013), as in `optax.clip_by_global_norm`.
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in gradient))
        clipped = clip_by_norm(gradient, norm, max_norm)
        # The transformation is made anew in each step, because its learning rate is an array, which may decay or be
        # swept.
        if alike and flat.is_network(params):
            updates, new = optimizer(lr).update(clipped, flat.ravel_networks(opt_state), flat.ravel(params))
            updates, opt_state = flat.unravel(updates, params), flat.unravel_networks(new, opt_state)
        else:
            updates, opt_state = optimizer(lr).update(flat.unravel(clipped, params), opt_state, params)
        # As in `optax.apply_updates`: the sum is cast, so that parameters keep their type.
        return flat.elementwise(lambda x, change: (x + change).astype(x.dtype), params, updates), opt_state, norm

    return GradientStep(init, step, lr_decay, accumulate)


def on_sphere(step: GradientStep) -> GradientStep:
    """Return `step` behind which kernels are projected onto the unit sphere, see `project_kernels`."""

    def projected(
        params: PyTree, gradient: list[Array], opt_state: PyTree, lr: Array, max_norm: Array
    ) -> tuple[PyTree, PyTree, Array]:
        params, opt_state, norm = step.step(params, gradient, opt_state, lr, max_norm)
        return project_kernels(params), opt_state, norm

    return step._replace(step=projected)


def project_kernels(variables: PyTree) -> PyTree:
    """Scale the kernels of a network so that the weights of each output have length 1; all else stays as it is.

    Where normalisation follows, no output depends on that length, but the angle by which a step turns a kernel does: it
    shrinks as kernels grow (Palenicek et al. 2025, https://arxiv.org/abs/2502.07523). Kernels are `[..., in, out]` of
    dense layers, and `[..., H, W, in, out]` of convolutions. Weights that are all 0 stay 0.
    """
    params, collections = split_variables(variables)

    def project(kernel: bool, x: Array) -> Array:
        if not kernel:
            return x
        # Members of an ensemble come first: three axes are those of dense layers, five those of convolutions.
        inputs = (-2,) if x.ndim < 4 else (-4, -3, -2)
        length = jnp.sqrt(jnp.sum(jnp.square(x), axis=inputs, keepdims=True))
        # What differs from 1 by rounding alone stays, so that a step of 0 changes no bit.
        return x / jnp.where((length > 0) & (jnp.abs(length - 1) > 1e-6), length, 1.0)

    return join_variables(jax.tree.map(project, _kernels(params), params), collections)


def clip_by_norm(grads: PyTree, norm: Array, max_norm: Array) -> PyTree:
    """Scale `grads`, whose global norm is `norm`, down to a global norm of at most `max_norm`."""
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)


def polyak_update(target: PyTree, online: PyTree, tau: Array) -> PyTree:
    """Move `target` towards `online` by the fraction `tau` (Polyak averaging); integers are copied.

    Every leaf keeps its dtype.
    """

    def mix(new: Array, old: Array) -> Array:
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return new
        return (tau * new + (1.0 - tau) * old).astype(old.dtype)

    return flat.elementwise(mix, online, target)


Loss = Callable[[PyTree, PyTree, Key | None], tuple[Array, tuple[PyTree, PyTree]]]
"""`(variables, batch, key) -> (mean over the batch, (aux, collections))`: what `forward` takes and returns, and any
output beside the loss, `[B, ...]`."""


class Gradient(NamedTuple):
    """The gradient of a loss for the parameters of one network, the mean over all shards."""

    loss: Array
    params: list[Array]
    """The gradient itself, as `flat.ravel` returns it."""
    collections: PyTree
    """The network's, as the forward pass left them."""
    aux: PyTree


class GradientUpdate(NamedTuple):
    """The result of a gradient step of one network."""

    variables: PyTree
    """The network's: its parameters, and its collections as the forward pass left them."""
    opt_state: PyTree
    loss: Array
    norm: Array
    """Global norm of the gradient before clipping."""
    aux: PyTree


def gradient_update(
    step: GradientStep,
    loss: Loss,
    variables: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    *,
    key: Key | None,
    lr: Array,
    max_norm: Array,
    opt_step: Array,
) -> GradientUpdate:
    """Take one gradient step on the parameters of a network.

    Args:
      step: the optimizer.
      loss: the mean loss over a batch, see `Loss`.
      variables: the network's.
      opt_state: the optimizer's state.
      batch: what the loss is computed on, leaves `[B, ...]`.
      key: of `training_key`. The key is consumed.
      lr: learning rate before any decay.
      max_norm: largest global norm of the gradient.
      opt_step: number of the optimisation step, from 0.
    """
    gradient = loss_gradient(step, loss, variables, batch, key=key)
    return apply_gradient(step, gradient, variables, opt_state, lr=lr, max_norm=max_norm, opt_step=opt_step)


def loss_gradient(step: GradientStep, loss: Loss, variables: PyTree, batch: PyTree, *, key: Key | None) -> Gradient:
    """Return the gradient of `loss` for the parameters of a network; arguments are as for `gradient_update`."""
    parts = check_pieces(step.accumulate, jax.tree.leaves(batch)[0].shape[0])
    value, aux, collections, grads = accumulate(loss, variables, batch, key, parts)
    # The mean over shards of means over equal batches is the mean over all of them.
    value, gradient = shards.pmean((value, flat.ravel(grads)))
    return Gradient(value, gradient, _mean_of_shards(collections), aux)


def gradient_if(due: Array, gradient: Callable[[], Gradient]) -> Gradient:
    """Return `gradient()` if the scalar `due` is true, otherwise zeros without computing it.

    For updates that are not due at every step. The optimizer's step stays outside of the branch and is undone by
    `select`: it is cheap beside the gradient, while every array that a branch reads or returns may cost a kernel. With
    the step inside, `td3` takes 100 kernels on an H200 instead of 68, and 221 000 estimated cycles on a v5e instead of
    168 000.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient))
    return jax.lax.cond(due, gradient, lambda: zeros)


def apply_gradient(
    step: GradientStep,
    gradient: Gradient,
    variables: PyTree,
    opt_state: PyTree,
    *,
    lr: Array,
    max_norm: Array,
    opt_step: Array,
) -> GradientUpdate:
    """Take the step of `gradient_update` with a gradient that is there already."""
    lr = decay_lr(lr, step.lr_decay, opt_step)
    params, opt_state, norm = step.step(split_variables(variables)[0], gradient.params, opt_state, lr, max_norm)
    return GradientUpdate(join_variables(params, gradient.collections), opt_state, gradient.loss, norm, gradient.aux)


def _mean_of_shards(collections: PyTree) -> PyTree:
    """Return the means of numbers over all shards; integers, such as counts of calls, are alike on all of them."""
    return jax.tree.map(lambda x: shards.pmean(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, collections)


def decay_lr(lr: Array, duration: int, opt_step: Array) -> Array:
    """Decay a learning rate linearly to 0 over `duration` optimisation steps; a duration of 0 keeps it constant."""
    return linear(lr, 0.0, duration, opt_step) if duration else lr


def linear(start: Array, end: Array | float, duration: int, step: Array) -> Array:
    """Interpolate from `start` to `end` over `duration` steps, then stay; a duration of 0 means `end` at once."""
    if duration == 0:
        return jnp.asarray(end, jnp.float32)
    done = jnp.minimum(step, duration).astype(jnp.float32) / duration
    return start + (end - start) * done


def accumulate(
    loss: Loss, variables: PyTree, batch: PyTree, key: Key | None, parts: int
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """Return the loss, its auxiliary output, the network's collections, and the gradient for its parameters.

    They are computed on `parts` equal pieces of `batch` in turn, each of which updates the collections. The loss is a
    mean over the batch, so the result is that of the whole batch, in `1 / parts` of the memory; but batch statistics
    are those of a piece. Every leaf of the auxiliary output is `[B, ...]`. The key is consumed.
    """
    # Statistics and other collections pass through the loss, but are not differentiated.
    params, collections = split_variables(variables)
    differentiate = jax.value_and_grad(
        lambda params, collections, batch, key: loss(join_variables(params, collections), batch, key), has_aux=True
    )

    def grad(params: PyTree, collections: PyTree, batch: PyTree, key: Key | None) -> Any:
        with reverse_mode():
            return differentiate(params, collections, batch, key)

    # Pieces side by side share one set of statistics and one key, so they are for networks without either.
    at_once = num_pieces(jax.tree.leaves(batch)[0].shape[0], tree_bytes(params))
    if parts == 1 and at_once > 1 and key is None and not collections:
        value, aux, grads = _gradient_in_parts(
            lambda params, batch: grad(params, {}, batch, None), params, batch, at_once
        )
        return value, aux, collections, grads
    if parts == 1:
        (value, (aux, collections)), grads = grad(params, collections, batch, key)
        return value, aux, collections, sum_once(grads)
    # Each leaf is cut by its own length. Of sequences some leaves are `[B, ...]` and others `[B * T, ...]`, in the same
    # order.
    pieces = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    keys = None if key is None else jax.random.split(key, parts)

    def piece(carry: tuple[Array, PyTree, PyTree], part: PyTree) -> tuple[tuple[Array, PyTree, PyTree], PyTree]:
        *sums, collections = carry
        (value, (aux, collections)), grads = grad(params, collections, *part)
        value, grads = jax.tree.map(lambda s, x: s + x / parts, tuple(sums), (value, grads))
        return (value, grads, collections), aux

    # Loss and gradient are summed up from zeros, while collections go on from one piece to the next.
    zeros = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params), collections)
    (value, grads, collections), aux = jax.lax.scan(piece, zeros, (pieces, keys))
    return value, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux), collections, grads


def _gradient_in_parts(grad: Callable[[PyTree, PyTree], Any], params: PyTree, batch: PyTree, parts: int) -> Any:
    """Return the loss, its auxiliary output and the gradient, of `parts` equal pieces computed side by side."""
    cut = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    (value, (aux, _)), grads = jax.vmap(grad, in_axes=(None, 0))(params, cut)
    aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
    # The gradients of all leaves are averaged over the pieces in one reduction, and taken apart again.
    rows = jnp.concatenate([g.reshape(parts, -1) for g in jax.tree.leaves(grads)], axis=1).mean(axis=0)
    ends = np.cumsum([g.size // parts for g in jax.tree.leaves(grads)])
    split = zip(jnp.split(rows, ends[:-1]), jax.tree.leaves(grads), strict=True)
    summed = [x.reshape(g.shape[1:]).astype(g.dtype) for x, g in split]
    return value.mean(), aux, jax.tree.unflatten(jax.tree.structure(grads), summed)
