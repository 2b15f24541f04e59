"""Sharded strategies: data parallelism with the same bits on any number of devices.

Each shard has its own environments, replay and batches; parameters, optimizer and counters are replicated. In every
update, each shard computes the gradient of its part of the batch, and the gradients are gathered and added in the order
of the shards. A shard computes the same bits on any device, so a run does not depend on the number of devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.strategies.base import Placement, Policy, Strategy
from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla.spread import replicate, run_shards


class _Parts(NamedTuple):
    one: Strategy
    """The strategy of one shard."""
    shards: int
    fields: tuple[str, ...]
    """Fields of a state that are per shard, `[V, ...]`; the others are replicated."""


def sharded(one: Strategy, count: int, fields: Sequence[str]) -> Strategy:
    """Return the strategy of `count` shards that run `one` each.

    Args:
      one: the strategy of one shard, which reduces over environments by the functions of `jaxrl.shards`.
      count: number of shards; 1 returns `one`.
      fields: fields of the training state that are per shard, `[V, ...]` in the new state; the others are replicated.
    """
    if count == 1:
        return one
    parts, on_state = _Parts(one, count, tuple(fields)), one.state_fns
    return one._replace(
        init=partial(_init, parts),
        step=partial(_step, parts),
        env_steps_per_step=one.env_steps_per_step * count,
        warmup_env_steps=one.warmup_env_steps * count,
        policy=one.policy and _policy(parts, one.policy),
        # The host sees no halves of a sharded step, and a buffer cannot be refilled shard by shard.
        state_fns=on_state._replace(
            set_hyperparams=on_state.set_hyperparams and partial(_apply, parts, on_state.set_hyperparams),
            warm_up=on_state.warm_up and partial(_apply, parts, on_state.warm_up),
            refill=None,
            capacity=on_state.capacity and on_state.capacity * count,
        ),
        placement=Placement(count, partial(_by_shard, parts)),
    )


def _fill_like(own: bool, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda _: own, tree)


def _by_shard(parts: _Parts, state: Any) -> Any:
    """Return bools like `state`: whether a leaf is per shard."""
    marked = {name: _fill_like(name in parts.fields, part) for name, part in state._asdict().items()}
    return state._replace(**marked)


def _init(parts: _Parts, key: Key) -> PyTree:
    return _broadcast_fields(
        parts, *run_shards(parts.one.init, parts.shards, (key,), (False,), partial(_by_shard, parts))
    )


def _step(parts: _Parts, state: PyTree, key: Key, t: Array) -> tuple[PyTree, Metrics]:
    # Key and number of the iteration are the same for all shards; each folds its own index into the key.
    each = (_by_shard(parts, state), False, False)
    owned = lambda made: (_by_shard(parts, made[0]), _fill_like(False, made[1]))
    (state, metrics), (own, measured) = run_shards(parts.one.step, parts.shards, (state, key, t), each, owned)
    state = _broadcast_fields(parts, state, own)
    _require_same("metrics", measured)
    return state, metrics


def _apply(parts: _Parts, function: Callable[..., PyTree], state: PyTree, *keys: Key) -> PyTree:
    """Apply `function`, `(state, *keys) -> state`, in all shards; keys are the same for all."""
    each = (_by_shard(parts, state), *[False] * len(keys))
    return _broadcast_fields(
        parts, *run_shards(function, parts.shards, (state, *keys), each, partial(_by_shard, parts))
    )


def _broadcast_fields(parts: _Parts, state: PyTree, own: PyTree) -> PyTree:
    """Return `state` with all `fields` per shard; raise `SettingsError` if another field differs between shards."""
    _require_same("state", own._replace(**dict.fromkeys(parts.fields, ())))
    # A field that all shards computed alike, such as an empty buffer, comes out replicated and is copied to each.
    wanted = _by_shard(parts, state)
    # Flags of leaves that `replicate` leaves unchanged: those already per shard, and those meant to be replicated.
    return replicate(state, jax.tree.map(lambda has, wants: has or not wants, own, wanted), parts.shards)


def _require_same(what: str, own: PyTree) -> None:
    """Raise `SettingsError` if a leaf differs between shards."""
    parted = [jax.tree_util.keystr(path, simple=True, separator=".") for path, x in jax.tree.leaves_with_path(own) if x]
    if parted:
        raise SettingsError(
            f"shards: {what} {', '.join(parted[:3])} would differ between shards, so this agent cannot be trained in "
            "shards; it must add over them by the functions of jaxrl.shards"
        )


def _policy(parts: _Parts, policy: Policy) -> Policy:
    def params(state: PyTree) -> PyTree:
        """Return the parameters of the first shard; those of all shards are equal."""
        first = lambda x, own: x[0] if own else x
        return policy.params(jax.tree.map(first, state, _by_shard(parts, state)))

    return policy._replace(params=params)
