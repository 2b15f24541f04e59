"""Parts of an agent that the user makes in Python, in place of those that its settings describe."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl.agents.fields import OptimizerConfig
from jaxrl.agents.optimizers import Optimizer, optimizer_of, settings_given
from jaxrl.distributions import Distribution, Head
from jaxrl.errors import SettingsError, describe_error
from jaxrl.nn import Network, require_network
from jaxrl.nn.own import ROWS, Output
from jaxrl.spaces import Discrete, EnvSpec, space_struct
from jaxrl.trees import Array, PyTree

MakeNetwork = Callable[[EnvSpec], Network]
"""Makes a value network, or a critic, for the spaces of an `EnvSpec`."""
MakePolicy = Callable[[EnvSpec, Head], Network]
"""Makes a policy network, or one with values, that outputs `head.outputs` numbers per observation."""


class Outputs(NamedTuple):
    """What the network of an actor-critic puts out for the steps of a minibatch."""

    policy: Distribution
    """The distributions of raw actions."""
    value: Array
    """`[B]`"""


ExtraLoss = Callable[[PyTree, Any, Any], Array]
"""`(params, sample, outputs) -> [B]`: a term of the loss for each step, beside the agent's own.

`params` are the network's variables. Actor-critics give the steps that they learn from (`Sample`) and `Outputs`; with a
memory both are `[B, T]`. The DQN family gives transitions and the values `[B, A]` of the actions in their observations.
"""


class Own(NamedTuple):
    """Parts made in Python, and the optimizer, named or the user's own."""

    optimizer: Optimizer
    makers: Mapping[str, Callable[..., Network]]
    """Makers of networks, by the names of their arguments."""
    custom: tuple[str, ...]
    """Names of all such arguments that were given."""
    extra_loss: ExtraLoss | None = None

    def made(self, name: str, *given: Any) -> Any:
        """Call the maker of the argument `name` with `given`; raise `SettingsError` if it fails."""
        try:
            return self.makers[name](*given)
        except Exception as error:
            reason = describe_error(error)[:300]
            arguments = "the spec and the head of the policy" if len(given) == 2 else "the spec"
            raise SettingsError(f"{name}, which is called with {arguments}, failed: {reason}") from error


def own_parts(
    config: OptimizerConfig,
    make_optimizer: Optimizer | None,
    extra_loss: ExtraLoss | None = None,
    /,
    **makers: Callable[..., Network] | None,
) -> Own:
    """Collect the parts made in Python; without an optimizer among them, use the one that `config` describes.

    Raises:
      SettingsError: an optimizer is unknown or has no such setting, or an argument is not a function.
    """
    parts = {"make_optimizer": make_optimizer, "extra_loss": extra_loss, **makers}
    given = {name: made for name, made in parts.items() if made is not None}
    for name, made in given.items():
        if not callable(made) or (hasattr(made, "apply") and not isinstance(made, type)):
            kind = "a loss" if name == "extra_loss" else "a function that makes it"
            raise SettingsError(f"{name} is {type(made).__name__}; expected {kind}, as in {_AS[name]}")
    if make_optimizer is not None and (settings := settings_given(config)):
        raise SettingsError(
            f"agent.{next(iter(settings))} is set beside make_optimizer, which takes its place; leave it out"
        )
    networks = {name: made for name, made in makers.items() if made is not None}
    return Own(make_optimizer or optimizer_of(config), networks, tuple(given), extra_loss)


def extra_term(extra_loss: ExtraLoss, params: PyTree, sample: Any, outputs: Any, weight: Array) -> Array:
    """Return the user's term of the loss for steps whose weights these are; of weight 0 it is 0.

    Raises:
      SettingsError: it is not float32 of the shape of `weight`.
    """
    term = jnp.asarray(extra_loss(params, sample, outputs))
    if term.shape != weight.shape or not jnp.issubdtype(term.dtype, jnp.floating):
        raise SettingsError(
            f"extra_loss returned {term.dtype}{list(term.shape)}; expected a number for each step, "
            f"{weight.dtype}{list(weight.shape)}"
        )
    # Select instead of multiplying by the weight alone: a term of weight 0 may be NaN.
    return jnp.where(weight > 0, term, 0.0)


_AS = {
    "make_optimizer": "lambda lr: optax.adam(lr)",
    "extra_loss": "lambda params, sample, outputs: -0.1 * outputs.policy.entropy()",
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
