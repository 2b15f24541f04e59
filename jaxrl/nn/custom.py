"""Custom networks: their interface, its check, and an adapter for `flax.nnx`."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, safe_str
from jaxrl.trees import Array, Key, PyTree, make_key

ROWS = 3
"""Batch size for checking a network; an unusual number, unlikely to be the size of another axis."""


class Network(Protocol):
    """Two pure functions, with the signatures of a Flax Linen module's.

    Networks that act and learn differently, such as those with batch normalisation or dropout, have an argument `train`
    (of `__call__`, for a Linen module): False, the default, to act, True to learn. `apply` then also takes Flax's
    `rngs={"dropout": key}` and `mutable`, a list of collections of variables, which it returns updated together with
    the outputs.
    """

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables: `{"params": ...}`, and further collections, such as `batch_stats`.

        The key is consumed.
        """
        ...

    def apply(self, variables: PyTree, /, *args: Any) -> Any:
        """Return the network's outputs."""
        ...


TRAINING = 0x7261494E
"""Folded into the key of an update to get that of a network. `fold_in(key, i)` may equal `split(key, n)[i]`, so this is
larger than the index of any split."""


def takes_train(network: Network) -> bool:
    """Return whether `network` has an argument `train`, see `Network`."""
    if isinstance(network, Ensemble):
        return takes_train(network.member)
    if isinstance(network, FromNNX):
        return bool(network.stats.names or jax.tree.leaves(network.rngs))
    # `apply` of a Linen module takes any arguments; `__call__` has the actual ones.
    call = type(network).__call__ if isinstance(network, nn.Module) else network.apply
    try:
        return "train" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


def training_key(network: Network, key: Key, number: int = 0) -> Key | None:
    """Return the key for `forward` to apply `network` in an update; `None` if the network acts and learns alike.

    `key` is the key of the update; `number` distinguishes the networks of an agent.
    """
    return jax.random.fold_in(key, TRAINING + number) if takes_train(network) else None


def forward(network: Network, variables: PyTree, *args: Any, key: Key | None) -> tuple[Any, PyTree]:
    """Apply `network`; return its outputs, and its collections of variables other than `params`.

    Without a key the network acts: it uses running statistics and no dropout, and its collections are unchanged. With a
    key, which is consumed, it learns: it uses the statistics of the batch, and its collections are updated.
    """
    collections = split_variables(variables)[1]
    if key is None:
        return network.apply(variables, *args), collections
    if isinstance(network, Ensemble):
        # Members have separate variables and dropout, and see the same rows.
        one = lambda variables, key: forward(network.member, variables, *args, key=key)
        out, collections = jax.vmap(one)(variables, jax.random.split(key, network.size))
        return network.with_outputs_axis(out), collections
    # Linen returns updated collections only if they are named as mutable.
    learning: Any = network.apply
    return learning(variables, *args, train=True, rngs={"dropout": key}, mutable=list(collections))


def split_variables(variables: PyTree) -> tuple[PyTree, PyTree]:
    """Split a network's variables into `{"params": ...}` and its other collections, except NoisyNet's noise.

    Any other tree counts as parameters.
    """
    if not (isinstance(variables, Mapping) and "params" in variables):
        return variables, {}
    return {"params": variables["params"]}, {k: x for k, x in variables.items() if k not in ("params", "noise")}


def join_variables(params: PyTree, collections: PyTree) -> PyTree:
    """Invert `split_variables`."""
    return {**collections, **params} if collections else params


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
      kept: collections of variables that a network without an argument `train` may have.

    Raises:
      SettingsError: `made` is no network, fails with `args`, or has other outputs or variables.
    """
    network, taken = _require_functions(made, name), _describe(args)
    try:
        variables = jax.eval_shape(network.init, make_key(0), *args)
        _check_variables(variables, name, network, kept)
        out = jax.eval_shape(network.apply, variables, *args)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{name}: the network cannot be called with {taken}: {_first_line(error)}") from error
    _check_outputs(out, name, taken, outputs)
    if takes_train(network):
        _check_training(network, variables, name, args, outputs)
    return network


def _check_training(
    network: Network, variables: PyTree, name: str, args: Sequence[PyTree], outputs: Sequence[Output]
) -> None:
    """Raise `SettingsError` unless the network has the same outputs and variables when it learns as when it acts."""
    taken = f"{_describe(args)} and train=True"
    learn = lambda variables, *args: forward(network, variables, *args, key=make_key(0))
    try:
        out, collections = jax.eval_shape(learn, variables, *args)
    except Exception as error:
        raise SettingsError(f"{name}: the network cannot be called with {taken}: {_first_line(error)}") from error
    _check_outputs(out, name, taken, outputs)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    # The training loop carries the variables, so their shapes and types must not change.
    before, after = shapes(split_variables(variables)[1]), shapes(dict(collections))
    if before != after:
        raise SettingsError(
            f"{name}: called with {taken}, the network makes other variables than it was initialised with: "
            f"{safe_str(after)}; expected {safe_str(before)}"
        )


def _check_outputs(out: Any, name: str, taken: str, outputs: Sequence[Output]) -> None:
    """Raise `SettingsError` unless `out` are the required `outputs`."""
    found = list(out) if isinstance(out, tuple | list) and len(outputs) > 1 else [out]
    # Such as the next memory of an actor-critic without a core.
    while len(found) > len(outputs) and not jax.tree.leaves(found[-1]):
        found.pop()
    if len(found) != len(outputs) or not all(map(_matches, found, outputs)):
        wanted = " and ".join(f"{' or '.join(map(_format_shape, x.shapes))} float32, {x.what}" for x in outputs)
        raise SettingsError(f"{name}: called with {taken}, the network returns {_describe(found)}; expected {wanted}")


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


def _check_variables(variables: Any, name: str, network: Network, kept: Collection[str]) -> None:
    if not isinstance(variables, Mapping) or not jax.tree.leaves(variables.get("params")):
        raise SettingsError(f"{name}: the network has no parameters; expected init to return {{'params': ...}}")
    if (more := sorted(set(variables) - set(kept))) and not takes_train(network):
        raise SettingsError(
            f"{name}: the network has the variables {', '.join(more)} beside params, but no argument train by which it "
            "is told to learn and not to act; expected one, as in __call__(self, obs, train=False), with "
            "nn.BatchNorm(use_running_average=not train)"
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
        return self.with_outputs_axis(jax.vmap(lambda variables: self.member.apply(variables, *args))(variables))

    @staticmethod
    def with_outputs_axis(out: Array) -> Array:
        """Return values `[size, B]` as `[size, B, 1]`."""
        return out if out.ndim == 3 else out[..., None]


class _Named(NamedTuple):
    """The variables of a `flax.nnx` module of one kind, by names from their paths in the module."""

    names: tuple[str, ...]
    treedef: Any

    def name(self, state: Any) -> dict[str, Array]:
        """Return the arrays of `state` by their names."""
        return dict(zip(self.names, jax.tree.leaves(state), strict=True))

    def state(self, named: Mapping[str, Array]) -> Any:
        """Invert `name`."""
        return jax.tree.unflatten(self.treedef, [named[name] for name in self.names])


class FromNNX(NamedTuple):
    """A network of `flax.nnx` as two pure functions, made by `from_nnx`."""

    make: Callable[[Any], Any]
    acting: Any
    """Static graph definitions of the module, without variables: for acting, and below for learning."""
    learning: Any
    params: _Named
    stats: _Named
    """Running statistics."""
    rngs: Any
    """State of the streams of random numbers, as shapes."""

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables, by name. The key is consumed."""
        from flax import nnx

        # Keys and counts of random streams are not stored: each call creates them, see `_streams`.
        params, stats, _ = nnx.state(self.make(nnx.Rngs(key)), nnx.Param, nnx.BatchStat, ...)
        variables = {"params": self.params.name(params)}
        return {**variables, "batch_stats": self.stats.name(stats)} if self.stats.names else variables

    def apply(
        self,
        variables: PyTree,
        /,
        *args: Any,
        train: bool = False,
        rngs: Mapping[str, Key] | None = None,
        mutable: Collection[str] = (),
    ) -> Any:
        """Call the module with these variables; arguments are as for `Network`."""
        from flax import nnx

        params, stats = self.params.state(variables["params"]), self.stats.state(variables.get("batch_stats", {}))
        # Acting draws no random numbers, but the module cannot be merged without its streams.
        streams = self._streams(rngs["dropout"] if rngs else make_key(0))
        module = nnx.merge(self.learning if train else self.acting, params, stats, streams)
        out = module(*args)
        if not train:
            return out
        # The call has updated the module's statistics in place; return them as an output.
        made = {"batch_stats": self.stats.name(nnx.state(module, nnx.BatchStat))} if self.stats.names else {}
        return out, made

    def _streams(self, key: Key) -> Any:
        """Return the state of the random streams: counts of 0, and a separate key for each stream."""
        leaves, treedef = jax.tree.flatten(self.rngs)

        def begin(i: int, x: jax.ShapeDtypeStruct) -> Array:
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jnp.zeros(x.shape, x.dtype)
            stream_key = jax.random.fold_in(key, i)
            return jax.random.split(stream_key, x.shape) if x.shape else stream_key

        return jax.tree.unflatten(treedef, [begin(i, x) for i, x in enumerate(leaves)])


def from_nnx(make: Callable[[Any], Any]) -> FromNNX:
    """Make a network from a `flax.nnx` module, as in `from_nnx(lambda rngs: MyModule(4, 2, rngs=rngs))`.

    It acts as after `module.eval()`, and learns as after `module.train()`.

    Args:
      make: function from `nnx.Rngs` to the module; called for each initialisation.

    Raises:
      SettingsError: the result is no module, or has state other than parameters, running statistics and streams of
        random numbers.
    """
    from flax import nnx

    try:
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    except Exception as error:
        raise SettingsError(f"from_nnx: the module cannot be made: {_first_line(error)}") from error
    if not isinstance(module, nnx.Module):
        raise SettingsError(f"from_nnx: make returned {type(module).__name__}; expected a module of flax.nnx")
    # `...` collects all other state, which networks cannot have and which raises below.
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    # The mode is a static attribute of submodules, so there are two graph definitions over the same variables.
    module.train()
    learning, *_ = cast(Any, nnx.split)(module, *kinds)
    module.eval()
    acting, params, stats, rngs, rest = cast(Any, nnx.split)(module, *kinds)
    if more := sorted({type(x).__name__ for x in jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))}):
        raise SettingsError(
            f"from_nnx: the module keeps {', '.join(more)}; expected Param, BatchStat and streams of random numbers"
        )
    return FromNNX(make, acting, learning, _flatten_by_name(params), _flatten_by_name(stats), rngs)


def _flatten_by_name(state: Any) -> _Named:
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path, _ in paths]
    return _Named(tuple(names), treedef)
