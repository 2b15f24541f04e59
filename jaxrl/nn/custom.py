"""Custom networks: their interface, its check, and an adapter for `flax.nnx`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, safe_str
from jaxrl.trees import Array, Key, PyTree, make_key

ROWS = 3
"""Batch size for checking a network; an unusual number, unlikely to be the size of another axis."""


class Network(Protocol):
    """Two pure functions, with the signatures of a Flax Linen module's."""

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables, `{"params": ...}`. The key is consumed."""
        ...

    def apply(self, variables: PyTree, /, *args: Any) -> Any:
        """Return the network's outputs."""
        ...


class Output(NamedTuple):
    """A required float32 output of a network."""

    what: str
    """A description, such as `a value for each action`."""
    shapes: tuple[tuple[int, ...], ...]
    """Allowed shapes, for `ROWS` observations."""


def check_network(
    made: Any, name: str, args: Sequence[PyTree], outputs: Sequence[Output], kept: Collection[str] = ("params",)
) -> Network:
    """Check the network `made` by tracing it with `args` `[ROWS, ...]`, and return it; nothing is computed.

    Args:
      made: the return value of the argument `name`.
      name: name of an agent's argument, such as `make_network`.
      args: arguments for calling the network.
      outputs: required outputs: one array, or a tuple of several; a trailing `()` is ignored.
      kept: allowed collections of variables.

    Raises:
      SettingsError: `made` is no network, fails with `args`, or has other outputs or variables.
    """
    network, taken = _require_functions(made, name), _describe(args)
    try:
        variables = jax.eval_shape(network.init, make_key(0), *args)
        _check_variables(variables, name, kept)
        out = jax.eval_shape(network.apply, variables, *args)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{name}: the network cannot be called with {taken}: {_first_line(error)}") from error
    found = list(out) if isinstance(out, tuple | list) and len(outputs) > 1 else [out]
    while len(found) > len(outputs) and not jax.tree.leaves(found[-1]):
        found.pop()
    if len(found) != len(outputs) or not all(map(_matches, found, outputs)):
        wanted = " and ".join(f"{' or '.join(map(_format_shape, x.shapes))} float32, {x.what}" for x in outputs)
        raise SettingsError(f"{name}: called with {taken}, the network returns {_describe(found)}; expected {wanted}")
    return network


def _require_functions(made: Any, name: str) -> Network:
    if isinstance(made, type):
        raise SettingsError(
            f"{name} returned the class {made.__name__} itself; return an instance, as in {made.__name__}()"
        )
    if callable(getattr(made, "init", None)) and callable(getattr(made, "apply", None)):
        return cast(Network, made)
    if any(base.__module__.startswith("flax.nnx") for base in type(made).__mro__):
        raise SettingsError(
            f"{name} returned {type(made).__name__}, a module of flax.nnx; "
            "return jaxrl.nn.from_nnx(lambda rngs: ...), with the function that makes it"
        )
    raise SettingsError(
        f"{name} returned {type(made).__name__}; expected a Flax Linen module, or an object with init and apply"
    )


def _check_variables(variables: Any, name: str, kept: Collection[str]) -> None:
    if not isinstance(variables, Mapping) or not jax.tree.leaves(variables.get("params")):
        raise SettingsError(f"{name}: the network has no parameters; expected init to return {{'params': ...}}")
    if more := sorted(set(variables) - set(kept)):
        raise SettingsError(
            f"{name}: the network has the variables {', '.join(more)} beside params; expected it to depend on its "
            "params alone (layer norm in place of batch norm, say)"
        )


def _matches(found: Any, output: Output) -> bool:
    return isinstance(found, jax.ShapeDtypeStruct) and found.shape in output.shapes and found.dtype == jnp.float32


def _describe(tree: Any) -> str:
    """Describe shapes, and dtypes other than float32, for a message."""
    leaves = [x if hasattr(x, "shape") else jnp.asarray(x) for x in jax.tree.leaves(tree)]
    described = [_format_shape(x.shape) + (f" {x.dtype}" if x.dtype != jnp.float32 else "") for x in leaves]
    return " and ".join(described) or "nothing"


def _format_shape(shape: Sequence[int]) -> str:
    return str(list(shape))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in safe_str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class Ensemble(NamedTuple):
    """An ensemble of `size` networks of one architecture with separate parameters; values `[size, B, outputs]`."""

    member: Network
    """Returns `[B, outputs]`, or `[B]`."""
    size: int

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables of all members, leaves `[size, ...]`. The key is consumed."""
        return jax.vmap(lambda key: self.member.init(key, *args))(jax.random.split(key, self.size))

    def apply(self, variables: PyTree, /, *args: Any) -> Array:
        """Return the outputs of all members."""
        out = jax.vmap(lambda params: self.member.apply(params, *args))(variables)
        return out if out.ndim == 3 else out[..., None]


class FromNNX(NamedTuple):
    """A network of `flax.nnx` as two pure functions, made by `from_nnx`."""

    make: Callable[[Any], Any]
    graph: Any
    """Static graph definition of the module, without parameters."""
    names: tuple[str, ...]
    """Names of the parameters, from their paths in the module."""
    treedef: Any

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the parameters, by name. The key is consumed."""
        from flax import nnx

        params = nnx.state(self.make(nnx.Rngs(key)), nnx.Param)
        return {"params": dict(zip(self.names, jax.tree.leaves(params), strict=True))}

    def apply(self, variables: PyTree, /, *args: Any) -> Any:
        """Call the module with these parameters."""
        from flax import nnx

        params = jax.tree.unflatten(self.treedef, [variables["params"][name] for name in self.names])
        return nnx.merge(self.graph, params)(*args)


def from_nnx(make: Callable[[Any], Any]) -> FromNNX:
    """Make a network from a `flax.nnx` module, as in `from_nnx(lambda rngs: MyModule(4, 2, rngs=rngs))`.

    Args:
      make: function from `nnx.Rngs` to the module; called for each initialisation.

    Raises:
      SettingsError: the result is no module, or has state other than parameters, such as running means or PRNG state.
    """
    from flax import nnx

    try:
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    except Exception as error:
        raise SettingsError(f"from_nnx: the module cannot be made: {_first_line(error)}") from error
    if not isinstance(module, nnx.Module):
        raise SettingsError(f"from_nnx: make returned {type(module).__name__}; expected a module of flax.nnx")
    graph, params, rest = cast(Any, nnx.split)(module, nnx.Param, ...)
    if kinds := sorted(
        {type(x).__name__ for x in jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))}
    ):
        raise SettingsError(
            f"from_nnx: the module keeps {', '.join(kinds)} beside its Param; expected it to depend on these alone "
            "(no batch norm, no dropout, and rngs not kept)"
        )
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path, _ in paths]
    return FromNNX(make, graph, tuple(names), treedef)
