"""A policy as one pure function of arrays, with its memory as an explicit input and output."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError
from jaxrl.spaces import space_struct, space_to_plain, to_elements, to_indices, without_names
from jaxrl.training.policy import GreedyPolicy, begin, follow, memory_leaves
from jaxrl.trees import Array, PyTree, row_struct

Shapes = list[jax.ShapeDtypeStruct]


class Part(NamedTuple):
    """An array that an exported policy takes or returns."""

    name: str
    shape: tuple[Any, ...]
    """With `B` for a batch axis of any size."""
    dtype: str


class Function(NamedTuple):
    """A policy as `call(params, *obs, *memory, first) -> (*actions, *memory)`, all arrays `[B, ...]`.

    Without a memory, it is `call(params, *obs) -> (*actions,)`.
    """

    call: Callable[..., tuple[Array, ...]]
    params: PyTree
    obs: Shapes
    """Shape of each part of an observation, without the batch axis; likewise below."""
    actions: Shapes
    memory: Shapes
    """Zeros where an episode begins (`first`, bool `[B]`), otherwise the output of the previous call."""
    names: list[str]
    """Names of the inputs, in order."""
    results: list[str]
    """Names of the outputs, in order."""
    spaces: dict[str, Any]
    """The spaces of observations and actions, as plain values."""
    entries: list[str]
    """Python expression for each part of an observation, such as `obs['camera']`."""
    action_entries: list[str]
    """Python expression for each part of an action, such as `action['aim']`."""

    def inputs(self, rows: Any) -> Shapes:
        """Return the shapes of the inputs for a batch of `rows`, which may be symbolic."""
        first = [jax.ShapeDtypeStruct((), jnp.bool_)] if self.memory else []
        return [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in (*self.obs, *self.memory, *first)]


def function_of(policy: GreedyPolicy) -> Function:
    """Return the function that a loaded policy computes.

    Raises:
      SettingsError: its memory contains an array without a row for each environment.
    """
    spec = policy.policy.spec
    # Parts of a tuple go by their number: what calls an export has no class of named tuples.
    observations, choices = without_names(spec.observation_space), without_names(spec.action_space)
    struct = space_struct(observations)
    obs: Shapes = jax.tree.leaves(struct)
    form: Any = jax.tree.structure(struct)
    begun_as = lambda n: jax.eval_shape(partial(begin, policy.policy), policy.params, _rows(n, struct))
    carried, action = begun_as(1)
    memory: Shapes = jax.tree.leaves((carried, action))
    memory_form: Any = jax.tree.structure((carried, action))
    actions = row_struct(jax.tree.leaves(action))
    names, made = _names_in("obs", struct), _names_in("action", space_struct(choices))
    # Discrete values are those of the environment outside, and count from 0 inside.
    indices, elements = partial(to_indices, observations), partial(to_elements, choices)
    entries = _entries_in("obs", struct), _entries_in("action", space_struct(choices))
    spaces = {"observation": space_to_plain(observations), "action": space_to_plain(choices)}
    kept = memory_leaves(policy.policy, policy.params, _rows(1, struct))
    if not kept:

        def act(params: PyTree, *parts: Array) -> tuple[Array, ...]:
            return tuple(elements(jax.tree.leaves(begin(policy.policy, params, indices(form.unflatten(parts)))[1])))

        return Function(act, policy.params, obs, actions, [], names, made, spaces, *entries)
    # Traced for one environment and for two: only arrays that grow with their number have a row for each.
    two = jax.tree.leaves(begun_as(2))
    for i in kept:
        if memory[i].shape[:1] != (1,) or two[i].shape != (2, *memory[i].shape[1:]):
            raise SettingsError(
                f"the policy remembers an array {list(memory[i].shape)} that has no row for each environment, "
                "so it cannot be exported"
            )

    def step(params: PyTree, *parts: Array) -> tuple[Array, ...]:
        # Both a first and a later step of an episode are computed; `first` selects one for each row.
        now, past, first = indices(form.unflatten(parts[: len(obs)])), parts[len(obs) : -1], parts[-1]
        begun = jax.tree.leaves(begin(policy.policy, params, now))
        before = [past[kept.index(i)] if i in kept else x for i, x in enumerate(begun)]
        followed = jax.tree.leaves(follow(policy.policy, params, *memory_form.unflatten(before), now))
        where = lambda a, b: jnp.where(first.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
        decided = [where(begun[i], followed[i]) for i in range(len(memory))[-len(actions) :]]
        return (*elements(decided), *(where(begun[i], followed[i]) for i in kept))

    names, made = [*names, *_names("memory", len(kept)), "first"], [*made, *_names("next_memory", len(kept))]
    remembered = row_struct([memory[i] for i in kept])
    return Function(step, policy.params, obs, actions, remembered, names, made, spaces, *entries)


def signature(function: Function) -> tuple[list[Part], list[Part]]:
    """Return the inputs and outputs of `function.call`."""
    inputs = [Part(name, ("B", *x.shape[1:]), str(x.dtype)) for name, x in _pair(function.names, function.inputs(1))]
    made = _pair(function.results, [*function.actions, *function.memory])
    return inputs, [Part(name, ("B", *x.shape), str(x.dtype)) for name, x in made]


def describe(
    function: Function, facts: dict[str, Any], inputs: Sequence[Part], outputs: Sequence[Part]
) -> dict[str, Any]:
    """Return a description of a policy with these inputs and outputs for its callers, as plain values."""
    return {
        "inputs": [part._asdict() for part in inputs],
        "outputs": [part._asdict() for part in outputs],
        "spaces": function.spaces,
        "score": facts.get("score"),
        "opt_steps": facts.get("opt_steps"),
        "env": facts.get("settings", {}).get("env"),
        "algo": facts.get("settings", {}).get("algo"),
    }


def _pair(names: Sequence[str], shapes: Shapes) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return list(zip(names, shapes, strict=True))


def _entries_in(of: str, struct: PyTree) -> list[str]:
    return [f"{of}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(struct)]


def _names_in(of: str, struct: PyTree) -> list[str]:
    """Return a name for each leaf of `struct`, made of `of` and its path."""
    paths = [jax.tree_util.keystr(path, simple=True, separator="_") for path, _ in jax.tree.leaves_with_path(struct)]
    words = ["_".join([of, *re.findall(r"\w+", path)]) for path in paths]
    # Entries such as `a b` and `a_b` would give the same name.
    return [word if words.index(word) == i else f"{word}_{i}" for i, word in enumerate(words)]


def _names(of: str, count: int) -> list[str]:
    return [of] if count == 1 else [f"{of}_{i}" for i in range(count)]


def _rows(n: int, struct: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), struct)
