"""Parts of an agent that the user makes in Python, in place of those that its settings describe."""

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker, Maker
from jaxrl.agents.checks import Config, replace_settings
from jaxrl.agents.fields import OptimizerConfig
from jaxrl.agents.optimizers import GradientStep, gradient_step, optimizer_of, settings_given, without_usual
from jaxrl.distributions import Distribution, Head
from jaxrl.errors import SettingsError, describe_error
from jaxrl.nn import Network, check_network
from jaxrl.nn.custom import ROWS, Output
from jaxrl.registry import config_class
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
"""`(params, sample, outputs) -> [B]`: a term of the loss for each step, added to the agent's.

`params` are the network's variables, and `sample` the steps that are learnt from: of actor-critics `Sample`, of `pqn`
`TargetSample`, of `reppo` its `Sample`, of all others `Transition`. With a recurrent core, the steps of sequences of
replay stand one after the other as `[B]`, and observations are `RecurrentObs`, with the memories that were stored. What
`outputs` is depends on the loss:

- of actor-critics `Outputs`; with a memory it and the sample are `[B, T]`;
- of the DQN family and `pqn` the values `[B, A]` of the actions;
- for critics (`sac`, `td3` and their kin), whose `params` are those of all `K`: their values of the actions taken,
  `[K, B]`, or of each discrete action, `[K, B, A]`;
- of the critic of `reppo` the values `[B]` of the actions taken, or `[B, A]` of each discrete one;
- of policies trained against critics (`extra_policy_loss`), and of `bc`, the distributions of raw actions; of `td3`,
  `ddpg`, `td3_bc` and `rebrac` the actions themselves, `[B, D]` from -1 to 1.
"""


CriticLoss = Callable[[Array, Array], Array]
"""`(q, target) -> loss`: the loss of critics of mean returns in place of `(target - q)^2 / 2`.

`q` are their values of the actions taken, `[K, B]`, and `target` is the return on which all are regressed, `[B]`. The
loss, `[K, B]`, is summed over critics; weights and the mean over steps are the agent's.
"""

BATCH_FUNCTIONS = ("extra_loss", "extra_policy_loss", "target", "critic_loss")


class CustomParts(NamedTuple):
    """Parts made in Python, and the gradient step, of a named optimizer or the user's own."""

    gradient_step: GradientStep
    makers: Mapping[str, Callable[..., Network]]
    """Makers of networks, by the names of their arguments."""
    custom: tuple[str, ...]
    """Names of all such arguments that were given."""
    extra_loss: ExtraLoss | None = None
    extra_policy_loss: ExtraLoss | None = None
    target: Callable[..., Array] | None = None
    critic_loss: CriticLoss | None = None

    def make(self, name: str, *given: Any) -> Any:
        """Call the maker of the argument `name` with `given`; raise `SettingsError` if it fails."""
        try:
            return self.makers[name](*given)
        except Exception as error:
            reason = describe_error(error)[:300]
            arguments = "the spec and the head of the policy" if len(given) == 2 else "the spec"
            raise SettingsError(f"{name}, which is called with {arguments}, failed: {reason}") from error


def agent_maker(
    name: str,
    build: Callable[[str, Any, CustomParts, EnvSpec], Agent],
    config: Config,
    arguments: Mapping[str, Any],
    parts: Sequence[str],
    check: Callable[[Config, Mapping[str, Any]], None] | None = None,
) -> AgentMaker:
    """Return the maker of an agent: what `jaxrl.dqn(...)` and its siblings do with their arguments.

    Args:
      name: the agent's name.
      build: `(name, config, custom, spec) -> agent`.
      config: its settings.
      arguments: settings that replace some of these, and parts made in Python, which are `None` if settings describe
        them.
      parts: names of all such parts that the agent takes.
      check: `(config, parts)`: raises `SettingsError` for settings that contradict each other, or one of the parts.

    Raises:
      SettingsError: a setting is unknown or a value is out of range, or a part is not a function.
    """
    given = {part: arguments.get(part) for part in parts}
    config = replace_settings(name, config, {word: arguments[word] for word in arguments if word not in given})
    config = without_usual(config, config_class(name)(), given.get("make_optimizer") is not None)
    if check is not None:
        check(config, given)
    return Maker(build, name, config, collect_parts(cast(OptimizerConfig, config), given))


def collect_parts(config: OptimizerConfig, parts: Mapping[str, Callable[..., Any] | None]) -> CustomParts:
    """Collect the parts made in Python; without an optimizer among them, use the one that `config` describes.

    Raises:
      SettingsError: an optimizer is unknown or has no such setting, or an argument is not a function.
    """
    given = {name: made for name, made in parts.items() if made is not None}
    for name, made in given.items():
        # A network given in place of its maker may be callable as well, as Linen modules are; its `apply` tells.
        if not callable(made) or (hasattr(made, "apply") and not isinstance(made, type)):
            kind = "a function of a batch" if name in BATCH_FUNCTIONS else "a function that makes it"
            raise SettingsError(f"{name} is {type(made).__name__}; expected {kind}, as in {_EXAMPLES[name]}")
        if name in BATCH_FUNCTIONS:
            _check_arguments(name, made)
    make_optimizer = given.get("make_optimizer")
    if make_optimizer is not None and (settings := settings_given(config)):
        raise SettingsError(
            f"agent.{next(iter(settings))} is set beside make_optimizer, which takes its place; leave it out"
        )
    networks = {name: made for name, made in given.items() if name not in ("make_optimizer", *BATCH_FUNCTIONS)}
    losses = (given.get(name) for name in BATCH_FUNCTIONS)
    step = gradient_step(make_optimizer or optimizer_of(config), config.lr_decay, config.accumulate)
    return CustomParts(step, networks, tuple(given), *losses)


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    """Raise `SettingsError` unless the user's function `name` can be called with the arguments of its example."""
    arguments = _EXAMPLES[name].removeprefix("lambda ").partition(":")[0]
    try:
        found = signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        found.bind(*arguments.split(", "))
    except TypeError:
        raise SettingsError(
            f"{name} takes the arguments {found}; expected ({arguments}), as in {_EXAMPLES[name]}"
        ) from None


def check_per_step(name: str, value: Any, like: Array) -> Array:
    """Return what the user's function `name` returned; raise `SettingsError` unless it is a number for each step."""
    made = jnp.asarray(value)
    if made.shape != like.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        raise SettingsError(
            f"{name} returned {made.dtype}{list(made.shape)}; expected a number for each step, "
            f"{like.dtype}{list(like.shape)}"
        )
    return made


def extra_term(
    extra_loss: ExtraLoss, params: PyTree, sample: Any, outputs: Any, weight: Array, name: str = "extra_loss"
) -> Array:
    """Return the user's term of the loss for steps whose weights these are; of weight 0 it is 0.

    Raises:
      SettingsError: it is not of a floating type and of the shape of `weight`.
    """
    term = check_per_step(name, extra_loss(params, sample, outputs), weight)
    # Select instead of multiplying by the weight alone: a term of weight 0 may be NaN.
    return jnp.where(weight > 0, term, 0.0)


_EXAMPLES = {
    "make_optimizer": "lambda lr: optax.adam(lr)",
    "extra_loss": "lambda params, sample, outputs: jnp.zeros(sample.weight.shape)",
    "extra_policy_loss": "lambda params, items, outputs: jnp.zeros(items.weight.shape)",
    "critic_loss": "lambda q, target: 0.5 * (q - target) ** 2",
    "target": "lambda items, values: items.reward + items.discount * values.target_t.max(axis=1)",
    "make_network": "lambda spec: MyNetwork()",
    "make_policy": "lambda spec, head: MyPolicy(head.outputs)",
    "make_critic": "lambda spec: MyCritic()",
    "make_value": "lambda spec: MyValue()",
}
PARTS = tuple(_EXAMPLES)
"""Names of all arguments that supply parts made in Python."""


def build_network(
    custom: CustomParts,
    name: str,
    given: tuple[Any, ...],
    usual: Callable[[], Network],
    args: Sequence[PyTree],
    outputs: Sequence[Output],
    kept: Collection[str] = ("params",),
) -> Network:
    """Return the network that the argument `name` makes from `given`, or the `usual` one.

    `args`, `outputs` and `kept` are as for `check_network`.

    Raises:
      SettingsError: the result is no network, or not one of this kind.
    """
    if name not in custom.makers:
        return usual()
    return check_network(custom.make(name, *given), name, args, outputs, kept)


def observation_structs(spec: EnvSpec) -> PyTree:
    """Return the shapes of the observations with which a network is checked."""
    struct = space_struct(spec.observation_space)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((ROWS, *x.shape), x.dtype), struct)


def value_output(spec: EnvSpec, atoms: int = 0) -> Output:
    """Return the output required of a value network for discrete actions; with `atoms`, of distributions."""
    actions = cast(Discrete, spec.action_space).n
    if atoms:
        return Output("agent.atoms numbers for each action", ((ROWS, actions, atoms),))
    return Output("a value for each action", ((ROWS, actions),))


ONE_VALUE = Output("a value for each observation", ((ROWS,), (ROWS, 1)))


def policy_output(head: Head) -> Output:
    """Return the output required of a policy network."""
    return Output("what the head of the policy takes", ((ROWS, head.outputs),))


def squeeze_values(value: Array) -> Array:
    """Return values `[B]` or `[B, 1]` as `[B]`."""
    return value[:, 0] if value.ndim == 2 else value
