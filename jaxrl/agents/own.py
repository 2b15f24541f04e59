"""Parts of an agent that the user makes in Python, in place of those that its settings describe."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax

from jaxrl.agents.optimizers import Optimizer, optimizer_named
from jaxrl.distributions import Head
from jaxrl.errors import SettingsError, describe_error
from jaxrl.nn import Network, require_network
from jaxrl.nn.own import ROWS, Output
from jaxrl.spaces import Discrete, EnvSpec, space_struct
from jaxrl.trees import Array, PyTree

MakeNetwork = Callable[[EnvSpec], Network]
"""Makes a value network, or a critic, for the spaces of an `EnvSpec`."""
MakePolicy = Callable[[EnvSpec, Head], Network]
"""Makes a policy network, or one with values, that outputs `head.outputs` numbers per observation."""


class Own(NamedTuple):
    """Makers of the networks made in Python, and the optimizer, named or the user's own."""

    optimizer: Optimizer
    makers: Mapping[str, Callable[..., Network]]
    """Makers of networks, by the names of their arguments."""
    custom: tuple[str, ...]
    """Names of all such arguments that were given."""

    def made(self, name: str, *given: Any) -> Any:
        """Call the maker of the argument `name` with `given`; raise `SettingsError` if it fails."""
        try:
            return self.makers[name](*given)
        except Exception as error:
            reason = describe_error(error)[:300]
            arguments = "the spec and the head of the policy" if len(given) == 2 else "the spec"
            raise SettingsError(f"{name}, which is called with {arguments}, failed: {reason}") from error


def own_parts(optimizer: str, make_optimizer: Optimizer | None, **makers: Callable[..., Network] | None) -> Own:
    """Collect the parts made in Python; without an optimizer among them, use the one named `optimizer`.

    Raises:
      SettingsError: an optimizer is unknown, or an argument is not a function.
    """
    given = {name: made for name, made in {"make_optimizer": make_optimizer, **makers}.items() if made is not None}
    for name, made in given.items():
        if not callable(made) or (hasattr(made, "apply") and not isinstance(made, type)):
            raise SettingsError(
                f"{name} is {type(made).__name__}; expected a function that makes it, as in {_AS[name]}"
            )
    networks = {name: made for name, made in given.items() if name != "make_optimizer"}
    return Own(make_optimizer or optimizer_named(optimizer), networks, tuple(given))


_AS = {
    "make_optimizer": "lambda lr: optax.adam(lr)",
    "make_network": "lambda spec: MyNetwork()",
    "make_policy": "lambda spec, head: MyPolicy(head.outputs)",
    "make_critic": "lambda spec: MyCritic()",
    "make_value": "lambda spec: MyValue()",
}


def network_of(
    own: Own,
    name: str,
    given: tuple[Any, ...],
    usual: Callable[[], Network],
    args: Sequence[PyTree],
    outputs: Sequence[Output],
    kept: Collection[str] = ("params",),
) -> Network:
    """Return the network that the argument `name` makes from `given`, or the `usual` one.

    `args`, `outputs` and `kept` are as for `require_network`.

    Raises:
      SettingsError: the result is no network, or not one of this kind.
    """
    if name not in own.makers:
        return usual()
    return require_network(own.made(name, *given), name, args, outputs, kept)


def observations(spec: EnvSpec) -> PyTree:
    """Return the shapes of the observations with which a network is checked."""
    struct = space_struct(spec.observation_space)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((ROWS, *x.shape), x.dtype), struct)


def values_of(spec: EnvSpec, atoms: int = 0) -> Output:
    """Return the output required of a value network for discrete actions; with `atoms`, of distributions."""
    actions = cast(Discrete, spec.action_space).n
    if atoms:
        return Output("agent.atoms numbers for each action", ((ROWS, actions, atoms),))
    return Output("a value for each action", ((ROWS, actions),))


ONE_VALUE = Output("a value for each observation", ((ROWS,), (ROWS, 1)))


def choices(head: Head) -> Output:
    """Return the output required of a policy network."""
    return Output("what the head of the policy takes", ((ROWS, head.outputs),))


def by_row(value: Array) -> Array:
    """Return values `[B]` or `[B, 1]` as `[B]`."""
    return value[:, 0] if value.ndim == 2 else value
