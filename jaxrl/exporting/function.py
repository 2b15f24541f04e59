"""A policy as one pure function of arrays, its memory an explicit input and output."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError
from jaxrl.spaces import space_struct, space_to_plain
from jaxrl.training.policy import GreedyPolicy, begin, follow, remembers, used
from jaxrl.trees import Array, PyTree

Shapes = list[jax.ShapeDtypeStruct]


class Function(NamedTuple):
    """What a policy computes: `call(*obs, *memory, first) -> (*actions, *memory)`, all of them arrays `[B, ...]`.

    Without a memory it is `call(*obs) -> (*actions,)`. Parameters are constants.
    """

    call: Callable[..., tuple[Array, ...]]
    obs: Shapes
    """Of each part of an observation, without the axis of the batch; so are the others."""
    actions: Shapes
    memory: Shapes
    """Zeros where `first`, bool `[B]`, says that an episode begins; then what the call before returned."""
    names: list[str]
    """What the inputs are called, in order."""
    results: list[str]
    """What it returns is called, in order."""
    spaces: dict[str, Any]
    """The spaces of observations and actions, as plain values."""

    def inputs(self, rows: Any) -> Shapes:
        """Return the shapes of the inputs for a batch of `rows`, which may be symbolic."""
        first = [jax.ShapeDtypeStruct((), jnp.bool_)] if self.memory else []
        return [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in (*self.obs, *self.memory, *first)]


def function_of(policy: GreedyPolicy) -> Function:
    """Return the function that a loaded policy computes.

    Raises:
      SettingsError: it remembers something that is no array with a row for each environment.
    """
    spec = policy.policy.spec
    struct = space_struct(spec.observation_space)
    obs: Shapes = jax.tree.leaves(struct)
    form: Any = jax.tree.structure(struct)
    rows = lambda n: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), struct)
    first_shapes = lambda n: jax.eval_shape(lambda obs: begin(policy.policy, policy.params, obs), rows(n))
    memory: Shapes = jax.tree.leaves(first_shapes(1))
    memory_form: Any = jax.tree.structure(first_shapes(1))
    actions = [_row(x) for x in jax.tree.leaves(first_shapes(1)[1])]
    names = _obs_names(struct)
    spaces = {"observation": space_to_plain(spec.observation_space), "action": space_to_plain(spec.action_space)}

    def act(*parts: Array) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(begin(policy.policy, policy.params, form.unflatten(parts))[1]))

    if not remembers(policy.policy, policy.params, rows(1)):
        return Function(act, obs, actions, [], names, _names("action", len(actions)), spaces)
    kept = _needed(policy, memory_form, memory, rows(1))
    for i, (one, two) in enumerate(zip(memory, jax.tree.leaves(first_shapes(2)), strict=True)):
        if i in kept and (one.shape[:1] != (1,) or two.shape != (2, *one.shape[1:])):
            raise SettingsError(
                f"the policy remembers an array {list(one.shape)} that has no row for each environment, "
                "so it cannot be exported"
            )

    def step(*parts: Array) -> tuple[Array, ...]:
        now, past, first = form.unflatten(parts[: len(obs)]), parts[len(obs) : -1], parts[-1]
        begun = jax.tree.leaves(begin(policy.policy, policy.params, now))
        before = [past[kept.index(i)] if i in kept else x for i, x in enumerate(begun)]
        followed = jax.tree.leaves(follow(policy.policy, policy.params, *memory_form.unflatten(before), now))
        where = lambda a, b: jnp.where(first.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
        done = jax.tree.leaves(memory_form.unflatten(begun)[1])
        chosen = [where(*pair) for pair in zip(begun[-len(done) :], followed[-len(done) :], strict=True)]
        return (*chosen, *(where(begun[i], followed[i]) for i in kept))

    shapes, made = [_row(memory[i]) for i in kept], [*_names("action", len(actions)), *_names("next_memory", len(kept))]
    return Function(step, obs, actions, shapes, [*names, *_names("memory", len(kept)), "first"], made, spaces)


def _needed(policy: GreedyPolicy, form: Any, memory: Sequence[Any], obs: PyTree) -> list[int]:
    """Return which leaves of what is remembered decide on actions, now or later."""
    traced = jax.make_jaxpr(
        lambda memory: jax.tree.leaves(follow(policy.policy, policy.params, *form.unflatten(memory), obs))
    )(list(memory))
    inputs, outputs = traced.jaxpr.invars, traced.jaxpr.outvars
    actions = len(jax.tree.leaves(form.unflatten(memory)[1]))
    wanted = set(range(len(memory) - actions, len(memory)))
    while True:
        needed = used(traced.jaxpr, [outputs[i] for i in wanted])
        found = {i for i, x in enumerate(inputs) if x in needed}
        if found <= wanted:
            return sorted(found)
        wanted |= found


def described(function: Function, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a person needs to call it, as plain values."""
    told = lambda names, shapes: [
        {"name": name, "shape": ["B", *x.shape], "dtype": str(x.dtype)} for name, x in zip(names, shapes, strict=True)
    ]
    shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in function.inputs(1)]
    return {
        "inputs": told(function.names, shapes),
        "outputs": told(function.results, [*function.actions, *function.memory]),
        "spaces": function.spaces,
        "score": facts.get("score"),
        "opt_steps": facts.get("opt_steps"),
        "env": facts.get("settings", {}).get("env"),
        "algo": facts.get("settings", {}).get("algo"),
    }


def _obs_names(struct: PyTree) -> list[str]:
    paths = [jax.tree_util.keystr(path, simple=True, separator="_") for path, _ in jax.tree.leaves_with_path(struct)]
    return ["_".join(["obs", *re.findall(r"\w+", path)]) for path in paths]


def _names(of: str, count: int) -> list[str]:
    return [of] if count == 1 else [f"{of}_{i}" for i in range(count)]


def _row(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def memories(function: Function, rows: int) -> Sequence[Array]:
    """Return the memory to begin with, for a batch of `rows`."""
    return [jnp.zeros((rows, *x.shape), x.dtype) for x in function.memory]
