"""Types of agents' settings, each with the values that it accepts."""

import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, Protocol

from jaxrl.errors import SettingsError, check_between, check_count, suggest
from jaxrl.nn import ACTIVATIONS, CORES, DTYPES, TORSOS, Core, initial_memory
from jaxrl.parsing import as_int
from jaxrl.trees import PyTree


class Rule(Protocol):
    def check(self, name: str, value: Any) -> Any:
        """Return `value` as it is stored; raise `SettingsError`, beginning with `name`, if it is not allowed."""
        ...


class Between(NamedTuple):
    """A finite number from `low` to `high`."""

    low: float
    high: float

    def check(self, name: str, value: Any) -> Any:
        return check_between(name, value, self.low, self.high)


class AtLeast(NamedTuple):
    """A whole number of at least `least`; `1e5` counts as one."""

    least: int

    def check(self, name: str, value: Any) -> Any:
        return check_count(name, as_int(value), self.least, 2**31 - 1)


class OneOf(NamedTuple):
    """One of a set of names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> Any:
        if value not in self.names:
            raise SettingsError(f"unknown {name} {value!r}; {suggest(str(value), self.names)}")
        return value


class CoreName(NamedTuple):
    """`none`, or the name of a recurrent core, also of one that was made known by `jaxrl.nn.register_core`."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("none", *CORES)

    def check(self, name: str, value: Any) -> Any:
        return OneOf(self.names).check(name, value)


class EachAtLeast(NamedTuple):
    """Several whole numbers, each of at least `least`."""

    least: int

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, tuple | list):
            raise SettingsError(f"{name} is {value!r}; expected a width for each layer, as in (120, 84)")
        return tuple(check_count(name, as_int(width), self.least) for width in value)


Rate = Annotated[float, Between(0.0, 1e3)]
Share = Annotated[float, Between(0.0, 1.0)]
Weight = Annotated[float, Between(0.0, 1e30)]
Positive = Annotated[float, Between(1e-30, 1e30)]
Real = Annotated[float, Between(-1e30, 1e30)]
Count = Annotated[int, AtLeast(1)]
Steps = Annotated[int, AtLeast(0)]
Widths = Annotated[tuple[int, ...], EachAtLeast(1)]
Activation = Annotated[str, OneOf(tuple(ACTIVATIONS))]
Torso = Annotated[str, OneOf(TORSOS)]
DType = Annotated[str, OneOf(tuple(DTYPES))]


@cache
def rules_of(config: Any) -> dict[str, tuple[Rule, bool]]:
    """Return the rule of each setting of a dataclass that has one, and whether the setting may be `None`."""
    found = {}
    for name, hint in typing.get_type_hints(config, include_extras=True).items():
        # The rule of `Real` is at the hint itself, that of `Real | None` inside of the union.
        parts = (hint, *typing.get_args(hint))
        rules = [part.__metadata__[0] for part in parts if typing.get_origin(part) is Annotated]
        if rules:
            found[name] = (rules[0], type(None) in parts)
    return found


# --- settings that many agents share ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients move parameters."""

    lr: Rate = 3e-4
    """Learning rate."""
    lr_decay: Steps = 0
    """Optimisation steps over which the learning rate decays linearly to 0; 0: no decay."""
    schedules: tuple[str, ...] = ()
    """Schedules of hyperparameters over optimisation steps, as in `ent_coef=linear(0.01,0,10000)`: linear, cosine or
    exponential (START,END,STEPS) or constant(VALUE), each also with warmup=STEPS at its end."""
    freeze: tuple[str, ...] = ()
    """Parts of the agent's state that no update changes, as policy/params/MLP_0, with * for any text in a name."""
    optimizer: str = "adam"
    """Optax optimizer: adam, adamw, lion, nadam, radam, rmsprop or sgd."""
    optimizer_eps: Positive | None = None
    """Constant in the optimizer's denominator; unset, Optax's own, 1e-8. Not of lion and sgd."""
    optimizer_b1: Share | None = None
    """Decay of the mean of gradients; unset, Optax's own, 0.9. Not of rmsprop and sgd."""
    optimizer_b2: Share | None = None
    """Decay of the mean of squared gradients; unset, Optax's own, 0.999 (lion 0.99). Not of rmsprop and sgd."""
    weight_decay: Weight | None = None
    """Decoupled weight decay of kernels, not of biases and scales, for adamw and lion; unset, Optax's own, of all
    parameters (adamw 1e-4, lion 1e-3)."""
    max_grad_norm: Positive = 10.0
    """Largest global norm of the gradient; larger gradients are scaled down to it. 1e6 is as good as no limit."""
    accumulate: Count = 1
    """Number of equal pieces a batch or minibatch is split into, to save memory; their gradients are averaged. Must
    divide its size."""


@dataclass(frozen=True)
class NetworkConfig:
    """What the built-in networks are made of."""

    torso: Torso = "auto"
    """Network torso: mlp, simba or bro (residual blocks of dense layers), minatar, nature, impala or auto. auto chooses
    nature for images [H, W, C] with sides of at least 36, minatar for smaller ones, and mlp for other observations."""
    features: Widths = (256, 256)
    """Widths of the dense layers; for simba and bro one equal width for each block."""
    channels: Widths = ()
    """Channels of the convolutions; empty: the torso's defaults (minatar 16, nature 32 64 64, impala 16 32 32)."""
    dtype: DType = "float32"
    """Type that torsos compute in: float32 or bfloat16; parameters, heads and outputs are always float32."""
    activation: Activation = "relu"
    """Activation function: relu, tanh, gelu, silu or elu."""


@dataclass(frozen=True)
class CoreConfig:
    """The recurrent core after a torso; without one, nothing reads the rest."""

    core: Annotated[str, CoreName()] = "none"
    """Memory after the torso: gru or lstm, step by step; lru, s5, mingru, minlstm or gla, by associative scans; trxl
    or gtrxl, attention over the last core_window steps; or none."""
    core_features: Count = 64
    """Width of the core."""
    core_layers: Count = 1
    """Cells of the core, one on top of the other."""
    core_window: Count = 32
    """Steps before the present one that a layer of trxl or gtrxl attends to."""

    def make_core(self) -> Core | None:
        """Return the core, a new module; `None` without one."""
        if self.core == "none":
            return None
        return Core(self.core, self.core_features, self.core_layers, self.core_window)

    def initial_memory(self) -> PyTree | None:
        """Return its memory at the start of an episode, of one environment; `None` without a core."""
        return initial_memory(self.core, self.core_features, self.core_layers, self.core_window)


@dataclass(frozen=True)
class SequenceConfig(CoreConfig):
    """How an agent with a recurrent core learns from sequences of replay, of which buffer.batch_size make a batch.

    Without a core, nothing reads these.
    """

    sequence: Count = 20
    """Steps of each sequence that are learnt from."""
    burn_in: Steps = 10
    """Steps before those, which bring the core's stored memory up to the present parameters, without a gradient."""
    sequence_interval: Count = 1
    """Steps from the start of one sequence to that of the next: 1 lets one start at every step; burn_in + sequence lays
    them side by side."""
    n_step: Count = 5
    """Steps over which returns run within a sequence; processor.n_step must be 1."""
    priority_max: Share = 0.9
    """Share of the largest error of a sequence in its priority; their mean has the rest."""
