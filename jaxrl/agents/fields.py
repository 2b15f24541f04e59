"""Types of agents' settings, each with the values that it accepts."""

import typing
from functools import cache
from typing import Annotated, Any, NamedTuple, Protocol

from jaxrl.errors import SettingsError, check_between, check_count, nearest
from jaxrl.nn import ACTIVATIONS, DTYPES, TORSOS
from jaxrl.written import whole


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
        return check_count(name, whole(value), self.least, 2**31 - 1)


class OneOf(NamedTuple):
    """One of a set of names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> Any:
        if value not in self.names:
            raise SettingsError(f"unknown {name} {value!r}; {nearest(str(value), self.names)}")
        return value


class EachAtLeast(NamedTuple):
    """Several whole numbers, each of at least `least`."""

    least: int

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, tuple | list):
            raise SettingsError(f"{name} is {value!r}; expected a width for each layer, as in (120, 84)")
        return tuple(check_count(name, whole(width), self.least) for width in value)


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
        parts = (hint, *typing.get_args(hint))
        rules = [part.__metadata__[0] for part in parts if typing.get_origin(part) is Annotated]
        if rules:
            found[name] = (rules[0], type(None) in parts)
    return found
