"""A run's shards on several devices: where each part of its state is, and programs that run on all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrl.training.processes as processes
from jaxrl.errors import SettingsError, check_count
from jaxrl.strategies.base import Strategy
from jaxrl.training.mesh import check_there, require_all_used, require_even, shape_of
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

    def params(self, strategy: Strategy, state: PyTree) -> PyTree:
        """Return what the policy needs of a state."""
        return params_of(strategy, state)


def on_devices(strategy: Strategy, devices: int, mesh: str | None = None) -> Strategy:
    """Return `strategy` with its shards spread over so many devices; no bit of what it computes depends on them.

    Raises:
      SettingsError: they are not there, cannot have as many shards each, or are not those of the `mesh`.
    """
    shape = shape_of(mesh, devices, of_members=False)
    if processes.several():
        return _on_all(strategy, shape.envs if mesh else devices)
    there = check_there(devices)
    what, most = ("devices", there) if mesh is None else ("mesh envs", None)
    # Every device runs the same program, with as many shards as any other.
    require_even(strategy.placement.shards, shape.envs, what, most)
    if mesh is not None and devices == 1:
        require_all_used(
            shape, len(jax.devices()), lambda fit: fit.members == 1 and strategy.placement.shards % fit.envs == 0
        )
    return _over(strategy, shape.envs)


def _on_all(strategy: Strategy, devices: int) -> Strategy:
    """Do the same on the devices of all processes; none can be left out, for each process runs every program."""
    if strategy.actor_fns is not None:
        processes.require_alone("training with actors, or in environments on the host,")
    if not strategy.env_steps_per_step:
        processes.require_alone("learning from offline data")
    there = len(jax.devices())
    if check_count("devices", devices) != there:
        raise SettingsError(
            f"devices is {devices}, but the {processes.processes()} processes of the run have {there} together, and "
            f"all take part; set devices to {there}"
        )
    if strategy.placement.shards % there:
        raise SettingsError(
            f"the {processes.processes()} processes of the run have {there} devices together, among which its "
            f"{strategy.placement.shards} shards do not divide evenly; set shards to a multiple of {there}"
        )
    return _over(strategy, there)


def over_devices(strategy: Strategy, function: Callable[..., Any], like: PyTree, begins: bool = False) -> Any:
    """Return `function` run on all devices of `strategy`, each with its shards.

    Args:
      strategy: its state is the first of what the function takes (unless it `begins` with a key) and returns.
      function: `(state, *others) -> (state, other)`; all others are the same on every device.
      like: the shapes of the state.
      begins: whether the function makes the first state.
    """
    if strategy.placement.devices == 1:
        return function
    state = _specs(strategy, like)

    def run(*args: Any) -> Any:
        given = (SAME if begins else state, *[SAME] * (len(args) - 1))
        # What is the same on all devices, JAX cannot tell of what they have gathered; `jaxrl.strategies.sharded` does.
        return jax.shard_map(function, mesh=_mesh(strategy), in_specs=given, out_specs=(state, SAME), check_vma=False)(
            *args
        )

    return run


def placed(strategy: Strategy, state: PyTree) -> PyTree:
    """Put a training state where its run has it; shapes are told where they are to be."""
    if strategy.placement.devices == 1:
        return state
    put = lambda x, spec: _at(x, NamedSharding(_mesh(strategy), spec))
    return jax.tree.map(put, state, _specs(strategy, state))


def copied(strategy: Strategy, state: PyTree, device: Any) -> PyTree:
    """Return a copy of a training state where another run of `strategy` has it; on `device` if it has one alone."""
    if strategy.placement.devices == 1:
        return jax.device_put(state, device, may_alias=False)
    put = lambda x, spec: jax.device_put(x, NamedSharding(_mesh(strategy), spec), may_alias=False)
    return jax.tree.map(put, state, _specs(strategy, state))


def params_of(strategy: Strategy, state: PyTree) -> PyTree:
    """Return what the policy needs of a state, on the first device alone; without a policy, the state."""
    if processes.is_spread(state):
        return _params_of_all(strategy, state)
    if strategy.policy is None or strategy.placement.devices == 1:
        return state if strategy.policy is None else strategy.policy.params(state)
    # A policy acts on one device: in each of several processes on its own first.
    first = jax.local_devices()[0] if processes.several() else jax.devices()[strategy.placement.first_device]
    return jax.device_put(strategy.policy.params(state), first)


def _params_of_all(strategy: Strategy, state: PyTree) -> PyTree:
    """Do the same in all processes."""
    if strategy.policy is None:
        return gathered(state)
    processes.tell("params")
    with processes.reported():
        # Computed on all devices, with a replicated result: each process then has all of it.
        same = NamedSharding(_mesh(strategy), SAME)
        return processes.whole(jax.jit(strategy.policy.params, out_shardings=same)(state))


def gathered(tree: PyTree) -> PyTree:
    """Return a training state, with its sums or without, of which this process has all; that of one it has already."""
    if processes.is_spread(tree):
        processes.tell("gather")
        tree = processes.whole(tree)
    return tree


def spread_out(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Return a state and its sums on the devices of all processes, in the first; it may have them alone so far."""
    if processes.is_spread(state):
        return state, sums
    processes.tell("place")
    return handed_out(strategy, state, processes.whole(sums))


def handed_out(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Spread a state and its sums that the first process has over the devices of all; the others give the shapes."""
    sharding = lambda spec: NamedSharding(_mesh(strategy), spec)
    where = jax.tree.map(sharding, (_specs(strategy, state), jax.tree.map(lambda _: SAME, sums)))
    made: tuple[PyTree, PyTree] = processes.handed_out((state, sums), where)
    return made


def whereabouts(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Return the shapes of a state and its sums; where several processes have them, with their places."""
    if not processes.several():
        return state, sums
    same = NamedSharding(_mesh(strategy), SAME)
    return placed(strategy, state), jax.tree.map(lambda x: _at(x, same), sums)


def _over(strategy: Strategy, devices: int) -> Strategy:
    return strategy._replace(placement=strategy.placement._replace(devices=devices))


def altered(strategy: Strategy, how: str, state: PyTree, *args: int) -> PyTree:
    """Return what the function `how` of `strategy.state_fns`, such as `reseed`, makes of a state, in all processes."""
    if not processes.is_spread(state):
        return getattr(strategy.state_fns, how)(state, *args)
    processes.tell("alter", how, *args)
    # `over_devices` wraps functions with two results.
    function = lambda state: (getattr(strategy.state_fns, how)(state, *args), ())
    with processes.reported():
        return jax.block_until_ready(jax.jit(over_devices(strategy, function, state))(state)[0])


def apart(tree: PyTree) -> PyTree:
    """Return copies of arrays, which may be donated."""
    return jax.tree.map(processes.copied, tree)


def _at(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def _specs(strategy: Strategy, state: PyTree) -> PyTree:
    assert strategy.placement.by_shard is not None
    return jax.tree.map(lambda own: PartitionSpec(DEVICES) if own else SAME, strategy.placement.by_shard(state))


def _mesh(strategy: Strategy) -> Mesh:
    first = strategy.placement.first_device
    return Mesh(np.array(jax.devices()[first : first + strategy.placement.devices]), (DEVICES,))


def after_placing(strategy: Strategy, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled program that takes its state from wherever it is."""
    return program if strategy.placement.devices == 1 else partial(_run_placed, strategy, program)


def _run_placed(strategy: Strategy, program: Callable[..., Any], state: PyTree, *others: Any) -> Any:
    # With one process, the compiled program still wants its arguments where it was compiled for them.
    if not processes.several():
        return program(placed(strategy, state), *others)
    sums, start, stop = others
    # The orders are given in the order in which programs begin: every process must begin the same ones.
    state, sums = spread_out(strategy, state, sums)
    processes.tell("run", int(start), int(stop), not isinstance(sums.count, jax.Array))
    with processes.reported():
        return jax.block_until_ready(program(state, sums, start, stop))


def begun(program: Callable[..., Any], *args: Any) -> Any:
    """Run the program that makes the first state, in all processes."""
    processes.tell("init")
    with processes.reported():
        return jax.block_until_ready(program(*args)) if processes.several() else program(*args)
