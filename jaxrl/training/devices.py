"""A run's shards on several devices: where each part of its state is, and programs that run on all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import SettingsError, check_count
from jaxrl.strategies.base import Strategy
from jaxrl.trees import PyTree
from jaxrl.xla.spread import DEVICES

SAME = PartitionSpec()
"""Of what every device has."""


class Alone:
    """Where the state of a run is that trains by itself: with its trainer."""

    others = None
    """What makes its iterations in place of a program of its own."""

    def whole(self, state: PyTree) -> PyTree:
        """Return a state by itself, wherever it is."""
        return state

    def part(self, state: PyTree, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return what `choose` takes of a state."""
        return choose(state)


def on_devices(strategy: Strategy, devices: int) -> Strategy:
    """Return `strategy` with its shards spread over so many devices; no bit of what it computes depends on them.

    Raises:
      SettingsError: they are not there, or cannot have as many shards each.
    """
    there = check_there(devices)
    if strategy.shards % devices:
        fits = [n for n in range(1, there + 1) if strategy.shards % n == 0]
        more = f"set shards to a multiple of {devices}, or " if devices > 1 else ""
        raise SettingsError(
            f"devices is {devices}, but the {strategy.shards} shards of a run are divided evenly among devices; "
            f"{more}devices to {' or '.join(map(str, fits))}"
        )
    return strategy._replace(devices=devices)


def check_there(devices: int) -> int:
    """Return how many devices there are, if more than one is asked for; raise `SettingsError` if there are fewer."""
    there = len(jax.devices()) if check_count("devices", devices) > 1 else 1
    if devices > there:
        raise SettingsError(
            f"devices is {devices}, but JAX has {there} here; set devices to {there}, or before JAX starts, on a CPU, "
            f"jax_num_cpu_devices to {devices}"
        )
    return there


def over_devices(strategy: Strategy, function: Callable[..., Any], like: PyTree, begins: bool = False) -> Any:
    """Return `function` run on all devices of `strategy`, each with its shards.

    Args:
      strategy: its state is the first of what the function takes (unless it `begins` with a key) and returns.
      function: `(state, *others) -> (state, other)`; all others are the same on every device.
      like: the shapes of the state.
      begins: whether the function makes the first state.
    """
    if strategy.devices == 1:
        return function
    state = _specs(strategy, like)

    def run(*args: Any) -> Any:
        given = (SAME if begins else state, *[SAME] * (len(args) - 1))
        # What is the same on all devices, JAX cannot tell of what they have gathered; `jaxrl.strategies.shards` does.
        return jax.shard_map(function, mesh=_mesh(strategy), in_specs=given, out_specs=(state, SAME), check_vma=False)(
            *args
        )

    return run


def placed(strategy: Strategy, state: PyTree) -> PyTree:
    """Put a training state where its run has it; shapes are told where they are to be."""
    if strategy.devices == 1:
        return state
    put = lambda x, spec: _at(x, NamedSharding(_mesh(strategy), spec))
    return jax.tree.map(put, state, _specs(strategy, state))


def gathered(strategy: Strategy, tree: PyTree) -> PyTree:
    """Put what is the same on all devices on the first alone, for work that is done once."""
    return tree if strategy.devices == 1 else jax.device_put(tree, jax.devices()[0])


def _at(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def _specs(strategy: Strategy, state: PyTree) -> PyTree:
    assert strategy.by_shard is not None
    return jax.tree.map(lambda own: PartitionSpec(DEVICES) if own else SAME, strategy.by_shard(state))


def _mesh(strategy: Strategy) -> Mesh:
    return Mesh(np.array(jax.devices()[: strategy.devices]), (DEVICES,))


def after_placing(strategy: Strategy, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled program that takes its state from wherever it is."""
    return program if strategy.devices == 1 else partial(_run_placed, strategy, program)


def _run_placed(strategy: Strategy, program: Callable[..., Any], state: PyTree, *others: Any) -> Any:
    return program(placed(strategy, state), *others)
