"""Sources of initial states for auto-reset: fresh ones at every step, a pool, or shared ones (`--resets`).

An episode may end at any step, and a compiled step always does the same work. So a plain loop resets every environment
at every step and discards nearly all of the results. That costs nothing if a reset is cheap, and most of the time if it
generates a world. Three sources:

- `fresh`: reset all environments at every step.
- `pool`: keep a pool of initial states, use each once, and refill it when it runs low: one reset per episode. Initial
  states are as independent as fresh ones.
- `optimistic`: reset a fraction of the environments at every step; episodes that end in the same step share the results
  (Matthews et al. 2024, Craftax, section 3.2). Constant work per step, but two episodes may start in the same state.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, check_count, suggest
from jaxrl.trees import Array, Key, PyTree, make_key, tree_bytes
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.equations import count_work

KINDS = ("auto", "fresh", "pool", "optimistic")
FRESH_BYTES = 4096
"""Largest state in bytes for which `auto` selects `fresh`."""
FRESH_WORK = 30_000
"""Largest work of a reset, in numbers computed, for which `auto` selects `fresh`; in gymnax it is mostly hundreds."""
SHARED_BY = 16
"""Default number of environments per reset of `optimistic`, as in Craftax's baselines."""

Starts = tuple[PyTree, PyTree, Array]
"""States and first observations, leaves `[M, ...]`, and initial episode lengths, `[M]`."""
StartFn = Callable[..., Starts]
"""`(keys [M], *values) -> starts`; `values` are those of `VecEnvState`, if the environment has any."""


class Resets(NamedTuple):
    """A source of initial states for `N` environments."""

    name: str
    """Argument of `make_resets` that makes it again, such as `pool:64`."""
    init: Callable[..., PyTree]
    """`(key, *values) -> store`: the initial state of the source; the key is consumed."""
    take: Callable[..., tuple[PyTree, Starts]]
    """`(store, done, key, *values) -> (store, starts)`: starts `[N, ...]`, of which only the rows where `done` `[N]` is
    true may be used. The key is consumed."""


def make_resets(name: str, start: StartFn, num_envs: int) -> Resets:
    """Return the source called `name`: `fresh`, `pool[:K]`, `optimistic[:R]`, or `auto`.

    `K` is the size of the pool (default: twice the environments), `R` the number of environments per reset (default:
    16). `auto` selects `fresh` if a reset is cheap and small, and `pool` otherwise. It decides by the traced program
    and not by timing, so that runs are the same on every machine. Initial states in a pool depend on the values at the
    time when it was filled.

    Raises:
      SettingsError: the name is unknown, or the number does not fit the environments.
    """
    if not isinstance(name, str):
        raise SettingsError(f"resets is {name!r}; expected one of {', '.join(KINDS)}, as text")
    kind, _, given = name.partition(":")
    if kind not in KINDS:
        raise SettingsError(f"unknown resets {name!r}; {suggest(kind, KINDS)}")
    number = _parse_number(name, kind, given)
    if kind == "auto":
        kind = "fresh" if is_cheap(start) else "pool"
    if kind == "fresh":
        return fresh(start, num_envs)
    if kind == "optimistic":
        return optimistic(start, num_envs, min(SHARED_BY, num_envs) if number is None else number)
    return pool(start, num_envs, 2 * num_envs if number is None else number)


def _parse_number(name: str, kind: str, given: str) -> int | None:
    # `pool:` without a number is a mistake, not a request for the default.
    if not given and not name.endswith(":"):
        return None
    if kind not in ("pool", "optimistic") or not given.isdecimal():
        raise SettingsError(f"resets is {name!r}; expected fresh, pool, pool:K, optimistic, optimistic:R or auto")
    return int(given)


def resets_note(requested: str, selected: str) -> tuple[str, ...]:
    """Return a note for the log if `auto` selected something other than `fresh`; otherwise nothing."""
    if requested != "auto" or selected == "fresh":
        return ()
    return (f"resets {selected}: a reset is expensive here, so each is made once and kept until an episode needs it",)


def is_cheap(start: StartFn) -> bool:
    """Return whether resets are small and cheap enough to compute one per environment at every step."""
    one = jax.eval_shape(lambda: jax.random.split(make_key(0), 1))
    if tree_bytes(jax.eval_shape(start, one)) > FRESH_BYTES:
        return False
    # Counting work needs JAX internals. Should they change, assume a cheap reset, as in a plain loop.
    return with_fallback("the work of a reset", lambda: count_work(start, one) <= FRESH_WORK, lambda: True)


def fresh(start: StartFn, num_envs: int) -> Resets:
    """Reset all environments at every step."""
    made = jax.jit(start)  # as one function of keys it can be hoisted out of the loop as a whole

    def take(store: PyTree, done: Array, key: Key, *values: PyTree) -> tuple[PyTree, Starts]:
        return store, made(jax.random.split(key, num_envs), *values)

    return Resets("fresh", lambda key, *values: (), take)


class Pool(NamedTuple):
    """A ring of `K` initial states."""

    starts: Starts
    """Leaves `[K, ...]`."""
    head: Array
    """Int32, index of the next one to use."""
    left: Array
    """Int32, number of unused ones; if fewer than `N`, the next step refills the ring first."""


def pool(start: StartFn, num_envs: int, size: int) -> Resets:
    """Keep `size` initial states, use each once, and make `size - num_envs` more when fewer than `num_envs` are left.

    Raises:
      SettingsError: the pool is too small for all episodes ending in the same step.
    """
    if size <= num_envs:
        raise SettingsError(
            f"resets is pool:{size}; expected more than the {num_envs} environments that it serves, since all "
            f"episodes may end at once, as in pool:{2 * num_envs}"
        )
    # A refill happens with fewer than `num_envs` left, so a batch of the rest never overwrites an unused state.
    batch = size - num_envs

    def init(key: Key, *values: PyTree) -> Pool:
        return Pool(start(jax.random.split(key, size), *values), jnp.int32(0), jnp.int32(size))

    def take(store: Pool, done: Array, key: Key, *values: PyTree) -> tuple[Pool, Starts]:
        # Refill before reading: the other way round XLA must keep the old pool for the reads, and copies it every step.
        # A loop with a traced bound in place of a `cond`, which would copy the pool too.
        store = jax.lax.fori_loop(0, _batches(store.left), lambda turn, held: refill(held, key, turn, *values), store)
        # The k-th episode that ended takes the k-th unused state; other rows get an arbitrary one.
        place = (store.head + jnp.cumsum(done, dtype=jnp.int32) - 1) % size
        count = jnp.sum(done, dtype=jnp.int32)
        starts = jax.tree.map(lambda leaf: leaf[place], store.starts)
        return store._replace(head=(store.head + count) % size, left=store.left - count), starts

    # More than one batch only if the pool is smaller than twice the environments.
    def _batches(left: Array) -> Array:
        return jnp.maximum(0, (num_envs - left + batch - 1) // batch)

    def refill(store: Pool, key: Key, turn: Array, *values: PyTree) -> Pool:
        made = start(jax.random.split(jax.random.fold_in(key, turn), batch), *values)
        place = (store.head + store.left + jnp.arange(batch, dtype=jnp.int32)) % size
        put = lambda leaf, rows: leaf.at[place].set(rows, unique_indices=True)
        return store._replace(starts=jax.tree.map(put, store.starts, made), left=store.left + batch)

    return Resets(f"pool:{size}", init, take)


def optimistic(start: StartFn, num_envs: int, shared_by: int) -> Resets:
    """Make one initial state per `shared_by` environments at every step, used in turn by the episodes that end.

    Raises:
      SettingsError: `shared_by` exceeds the number of environments.
    """
    check_count("resets: the number that shares a reset", shared_by, most=num_envs)
    made = math.ceil(num_envs / shared_by)

    def take(store: PyTree, done: Array, key: Key, *values: PyTree) -> tuple[PyTree, Starts]:
        # The k-th episode that ended takes state `k % made`; other rows get an arbitrary one.
        place = (jnp.cumsum(done, dtype=jnp.int32) - 1) % made
        return store, jax.tree.map(lambda leaf: leaf[place], start(jax.random.split(key, made), *values))

    return Resets(f"optimistic:{shared_by}", lambda key, *values: (), take)
