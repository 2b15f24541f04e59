"""Sharding of a run over devices: placement of its state, and programs that run on all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import jaxrl.training.processes as processes
from jaxrl.errors import SettingsError, check_count
from jaxrl.strategies.base import Strategy
from jaxrl.training.mesh import check_there, require_all_used, require_even, shape_of
from jaxrl.trees import PyTree
from jaxrl.xla import host_memory, packing
from jaxrl.xla.spread import DEVICES

REPLICATED = PartitionSpec()
"""The spec of replicated values."""


def on_devices(strategy: Strategy, devices: int, mesh: str | None = None) -> Strategy:
    """Return `strategy` with its shards spread over `devices` devices; results do not depend on their number.

    Raises:
      SettingsError: there are too few devices, shards do not divide evenly, or the `mesh` has another size.
    """
    shape = shape_of(mesh, devices, of_members=False)
    if processes.several():
        return _on_all(strategy, shape.envs if mesh else devices)
    there = check_there(devices)
    what, most = ("devices", there) if mesh is None else ("mesh envs", None)
    # Every device runs the same program, so all have the same number of shards.
    require_even(strategy.placement.shards, shape.envs, what, most)
    if mesh is not None and devices == 1:
        require_all_used(
            shape, len(jax.devices()), lambda fit: fit.members == 1 and strategy.placement.shards % fit.envs == 0
        )
    return _over(strategy, shape.envs)


def _on_all(strategy: Strategy, devices: int) -> Strategy:
    """Do the same over the devices of all processes; all must be used, as each process runs every program."""
    if strategy.host_env is not None:
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
    """Map `function` over the devices of `strategy`, each with its shards.

    Args:
      strategy: the strategy whose state the function takes and returns.
      function: `(state, *others) -> (state, other)`, or `(key, *others) -> ...` if it `begins`; others are replicated.
      like: the shapes of the state.
      begins: whether the function makes the initial state, from a key.
    """
    if strategy.placement.devices == 1:
        return function
    state = _specs(strategy, like)

    def run(*args: Any) -> Any:
        given = (REPLICATED if begins else state, *[REPLICATED] * (len(args) - 1))
        made = (state, REPLICATED)
        # `check_vma=False`: JAX cannot infer that gathered values are replicated; `strategies.sharded` ensures it.
        spread = jax.shard_map(function, mesh=_mesh(strategy), in_specs=given, out_specs=made, check_vma=False)
        return spread(*args)

    return run


def shard_state(strategy: Strategy, state: PyTree) -> PyTree:
    """Place a training state on the devices of its run, or what belongs there in the host's memory; for shapes, add the
    shardings."""
    if strategy.placement.devices == 1:
        return packing.in_place(state, lambda x: _at(x, host_memory.sharding()))
    put = lambda x, spec: _at(x, NamedSharding(_mesh(strategy), spec))
    return jax.tree.map(put, state, _specs(strategy, state))


def copy_state(strategy: Strategy, state: PyTree, device: Any) -> PyTree:
    """Return a copy of a training state on the devices of `strategy`, or on `device` if it has a single one."""
    if strategy.placement.devices == 1:
        return move_state(state, device, may_alias=False)
    put = lambda x, spec: jax.device_put(x, NamedSharding(_mesh(strategy), spec), may_alias=False)
    return jax.tree.map(put, state, _specs(strategy, state))


def move_state(state: PyTree, device: Any, may_alias: bool | None = None) -> PyTree:
    """Return a training state on `device`, or in the host's memory beside it what belongs there; `None`: where it
    is."""
    where = device and jax.tree.map(lambda _: SingleDeviceSharding(device), state)
    return jax.device_put(state, packing.in_place(where, lambda _: host_memory.sharding(device)), may_alias=may_alias)


def params_of(strategy: Strategy, state: PyTree) -> PyTree:
    """Return the policy's parameters, on the first device only; without a policy, the state."""
    if processes.is_spread(state):
        return _params_of_all(strategy, state)
    if strategy.policy is None or strategy.placement.devices == 1:
        return state if strategy.policy is None else strategy.policy.params(state)
    # A policy acts on one device, the first local one if there are several processes.
    first = jax.local_devices()[0] if processes.several() else jax.devices()[strategy.placement.first_device]
    return jax.device_put(strategy.policy.params(state), first)


def _params_of_all(strategy: Strategy, state: PyTree) -> PyTree:
    """Return the policy's parameters, or without a policy the state, in every process."""
    if strategy.policy is None:
        return gather_state(state)
    processes.broadcast("params")
    with processes.reported():
        # A replicated output, so that each process has all of it.
        same = NamedSharding(_mesh(strategy), REPLICATED)
        return processes.whole(jax.jit(strategy.policy.params, out_shardings=same)(state))


def gather_state(tree: PyTree) -> PyTree:
    """Gather a training state, with or without its sums, in this process; a local state is returned as is."""
    if processes.is_spread(tree):
        processes.broadcast("gather")
        tree = processes.whole(tree)
    return tree


def shard_local(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """In process 0, shard a local state and its sums over the devices of all processes, unless they already are."""
    if processes.is_spread(state):
        return state, sums
    processes.broadcast("distribute")
    return distribute(strategy, state, processes.whole(sums))


def distribute(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Shard the state and sums of process 0 over the devices of all processes; the others pass shapes."""
    sharding = lambda spec: NamedSharding(_mesh(strategy), spec)
    where = jax.tree.map(sharding, (_specs(strategy, state), jax.tree.map(lambda _: REPLICATED, sums)))
    return processes.distribute((state, sums), where)


def shardings_of(strategy: Strategy, state: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Return the shapes of a state and its sums; with several processes, with their shardings."""
    if not processes.several():
        return state, sums
    same = NamedSharding(_mesh(strategy), REPLICATED)
    return shard_state(strategy, state), jax.tree.map(lambda x: _at(x, same), sums)


def _over(strategy: Strategy, devices: int) -> Strategy:
    return strategy._replace(placement=strategy.placement._replace(devices=devices))


def apply_in_all(strategy: Strategy, how: str, state: PyTree, *args: int) -> PyTree:
    """Apply the function `how` of `strategy.state_fns`, such as `reseed`, to a state, in all processes."""
    if not processes.is_spread(state):
        return getattr(strategy.state_fns, how)(state, *args)
    processes.broadcast("apply", how, *args)
    # `over_devices` wraps functions with two results.
    function = lambda state: (getattr(strategy.state_fns, how)(state, *args), ())
    with processes.reported():
        return jax.block_until_ready(jax.jit(over_devices(strategy, function, state))(state)[0])


def copy(tree: PyTree) -> PyTree:
    """Return copies of arrays, safe to donate."""
    return jax.tree.map(processes.copy_leaf, tree)


def _at(x: Any, sharding: Sharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def _specs(strategy: Strategy, state: PyTree) -> PyTree:
    assert strategy.placement.by_shard is not None
    return jax.tree.map(lambda own: PartitionSpec(DEVICES) if own else REPLICATED, strategy.placement.by_shard(state))


def _mesh(strategy: Strategy) -> Mesh:
    first = strategy.placement.first_device
    return Mesh(np.array(jax.devices()[first : first + strategy.placement.devices]), (DEVICES,))


def place_then(strategy: Strategy, program: Callable[..., Any], like: PyTree) -> Callable[..., Any]:
    """Wrap a compiled program to shard its state, of the shapes `like`, on the devices first."""
    alone = strategy.placement.devices == 1 and not packing.bytes_on_host(like)
    return program if alone else partial(_run_placed, strategy, program)


def _run_placed(strategy: Strategy, program: Callable[..., Any], state: PyTree, *others: Any) -> Any:
    # With a single process, the arguments must still be placed as the program was compiled.
    if not processes.several():
        return program(shard_state(strategy, state), *others)
    sums, start, stop = others
    # Broadcast in the order in which programs start: all processes must start the same ones.
    state, sums = shard_local(strategy, state, sums)
    processes.broadcast("run", int(start), int(stop), not isinstance(sums.count, jax.Array))
    with processes.reported():
        return jax.block_until_ready(program(state, sums, start, stop))


def run_init(program: Callable[..., Any], *args: Any) -> Any:
    """Run the program that makes the initial state, in all processes."""
    processes.broadcast("init")
    with processes.reported():
        return jax.block_until_ready(program(*args)) if processes.several() else program(*args)
