"""Where the next episode begins: fresh for each step, out of a pool, or shared (`--resets`).

An episode may end at any step, and `jit` wants the same work in every one. So a plain loop resets every environment
at every step, and throws nearly all of it away. That is nothing where a reset is cheap, and most of the time where it
builds a world. Three ways:

- `fresh`: reset all environments at every step.
- `pool`: hold reset states in store, hand each out once, and make new ones only when the store runs low: one reset an
  episode. Starts are as independent as fresh ones.
- `optimistic`: reset a share of the environments at every step; those that end in the same step share what there is
  (Matthews et al. 2024, Craftax, section 3.2). Less work in every step where something always ends, at the price of
  twins: two episodes may begin in the same state.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, check_count, suggest
from jaxrl.trees import Array, Key, PyTree, make_key, tree_bytes
from jaxrl.xla.attempts import attempt
from jaxrl.xla.equations import work_of

KINDS = ("auto", "fresh", "pool", "optimistic")
FRESH_BYTES = 4096
"""Bytes of a state that `auto` calls small."""
FRESH_WORK = 30_000
"""Numbers that a reset may work out for `auto` to call it cheap; most environments of gymnax take some hundreds."""
SHARED_BY = 16
"""Environments that share a reset in `optimistic`, as Craftax's own baselines have it."""

Starts = tuple[PyTree, PyTree, Array]
"""States and first observations, leaves `[M, ...]`, and what the length of their episodes begins with, `[M]`."""
StartFn = Callable[..., Starts]
"""From keys `[M]`, and the values under which episodes begin, if an environment has any."""


class Resets(NamedTuple):
    """A source of starts for `N` environments."""

    name: str
    """What `make_resets` makes it from again, such as `pool:64`."""
    init: Callable[..., PyTree]
    """`(key, *values) -> store`: what is held in store; the key is consumed."""
    take: Callable[..., tuple[PyTree, Starts]]
    """`(store, done, key, *values) -> (store, starts)`: the starts `[N, ...]`; only rows of `done` `[N]` are meant to
    be read. The key is consumed."""


def make_resets(name: str, start: StartFn, num_envs: int) -> Resets:
    """Return the source that `name` says: `fresh`, `pool[:K]`, `optimistic[:R]`, or `auto`.

    `K` is the number of states in a pool (twice the environments, if left out), `R` how many environments share a
    reset (16). `auto` is `fresh` where a reset is cheap and small, `pool` elsewhere; it goes by the traced program, so
    it answers the same on every machine. Where starts depend on values, those of a pool are of the values when it was
    filled.

    Raises:
      SettingsError: the name is unknown, or the number does not fit the environments.
    """
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
    if not given and not name.endswith(":"):
        return None
    if kind not in ("pool", "optimistic") or not given.isdecimal():
        raise SettingsError(f"resets is {name!r}; expected fresh, pool, pool:K, optimistic, optimistic:R or auto")
    return int(given)


def resets_note(asked: str, taken: str) -> tuple[str, ...]:
    """Return what to tell a user about where episodes begin: nothing, if it is what was asked for or the usual."""
    if asked != "auto" or taken == "fresh":
        return ()
    return (f"resets {taken}: a reset is dear here, so each is made once and kept until an episode needs it",)


def is_cheap(start: StartFn) -> bool:
    """Return whether a reset is so small and so little work that each step may make one for every environment."""
    one = jax.eval_shape(lambda: jax.random.split(make_key(0), 1))
    if tree_bytes(jax.eval_shape(start, one)) > FRESH_BYTES:
        return False
    return attempt("the work of a reset", lambda: work_of(start, one) <= FRESH_WORK, lambda: True)


def fresh(start: StartFn, num_envs: int) -> Resets:
    """Reset all environments at every step."""
    made = jax.jit(start)  # a function of keys alone is one that can be computed ahead of a loop as a whole

    def take(store: PyTree, done: Array, key: Key, *values: PyTree) -> tuple[PyTree, Starts]:
        return store, made(jax.random.split(key, num_envs), *values)

    return Resets("fresh", lambda key, *values: (), take)


class Pool(NamedTuple):
    """A ring of `K` starts."""

    starts: Starts
    """Leaves `[K, ...]`."""
    head: Array
    """Int32: where the next one to be handed out lies."""
    left: Array
    """Int32: how many there are; with fewer than `N`, a step begins by making more."""


def pool(start: StartFn, num_envs: int, size: int) -> Resets:
    """Hold `size` starts, hand each out once, and make `size - num_envs` at once when fewer than `num_envs` are left.

    Raises:
      SettingsError: the pool cannot serve all environments ending at once.
    """
    if size <= num_envs:
        raise SettingsError(
            f"resets is pool:{size}; expected more than num_envs {num_envs}, since all may end at once, "
            f"as in pool:{2 * num_envs}"
        )
    batch = size - num_envs

    def init(key: Key, *values: PyTree) -> Pool:
        return Pool(start(jax.random.split(key, size), *values), jnp.int32(0), jnp.int32(size))

    def take(store: Pool, done: Array, key: Key, *values: PyTree) -> tuple[Pool, Starts]:
        # Refill first: the other way round XLA must keep the old pool for those who read it, and copies it every step.
        store = jax.lax.fori_loop(0, _batches(store.left), lambda turn, held: refill(held, key, turn, *values), store)
        place = (store.head + jnp.cumsum(done, dtype=jnp.int32) - 1) % size
        count = jnp.sum(done, dtype=jnp.int32)
        handed = jax.tree.map(lambda leaf: leaf[place], store.starts)
        return store._replace(head=(store.head + count) % size, left=store.left - count), handed

    def _batches(left: Array) -> Array:
        return jnp.maximum(0, (num_envs - left + batch - 1) // batch)

    def refill(store: Pool, key: Key, turn: Array, *values: PyTree) -> Pool:
        made = start(jax.random.split(jax.random.fold_in(key, turn), batch), *values)
        place = (store.head + store.left + jnp.arange(batch, dtype=jnp.int32)) % size
        put = lambda leaf, rows: leaf.at[place].set(rows, unique_indices=True)
        return store._replace(starts=jax.tree.map(put, store.starts, made), left=store.left + batch)

    return Resets(f"pool:{size}", init, take)


def optimistic(start: StartFn, num_envs: int, shared_by: int) -> Resets:
    """Make one start for `shared_by` environments at every step; the first to end in a step get one each.

    Raises:
      SettingsError: `shared_by` is more than the environments.
    """
    check_count("resets: the number that shares a reset", shared_by, most=num_envs)
    made = math.ceil(num_envs / shared_by)

    def take(store: PyTree, done: Array, key: Key, *values: PyTree) -> tuple[PyTree, Starts]:
        place = (jnp.cumsum(done, dtype=jnp.int32) - 1) % made
        return store, jax.tree.map(lambda leaf: leaf[place], start(jax.random.split(key, made), *values))

    return Resets(f"optimistic:{shared_by}", lambda key, *values: (), take)
