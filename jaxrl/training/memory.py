"""Device memory of a run, planned from shapes before anything is compiled."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import Strategy
from jaxrl.trees import PyTree, tree_bytes
from jaxrl.xla import host_memory
from jaxrl.xla.ahead import BLOCK_BYTES
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.equations import eqn_scan_counts, walk
from jaxrl.xla.packing import bytes_on_host

SHARED = ("agent", "buffer", "health", "key")
"""Parts of a training state whose size is independent of the number of environments."""
NOTEWORTHY = 100_000_000
"""Minimum size in bytes at which a run with a replay buffer logs its plan: smaller ones do not matter to users."""


class Plan(NamedTuple):
    """A lower bound of the peak memory in bytes: the state, plus the larger of an iteration and an evaluation.

    For a run on several devices, it is that of one of them.
    """

    state: Mapping[str, int]
    """Sizes of the parts of the training state on the device."""
    iteration: Mapping[str, int] = {}
    """Additional memory of an iteration."""
    evaluation: int = 0
    """Additional memory of the environments of an evaluation."""
    capacity: int | None = None
    """Capacity of the buffer in transitions, if there is one."""
    on_host: int = 0
    """Bytes of the buffer in the host's memory."""
    is_data: bool = False
    """Whether the buffer is a data set, whose size no setting lowers."""
    devices: int = 1
    """Number of devices among which the shards of the run are divided."""

    @property
    def buffer(self) -> int:
        """Bytes of the buffer in total."""
        return self.state["buffer"] * self.devices + self.on_host

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on the device."""
        return sum(self.state.values())

    @property
    def extra_bytes(self) -> int:
        """Bytes beside the state, of an iteration or an evaluation."""
        return max(sum(self.iteration.values()), self.evaluation)

    @property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return self.state_bytes + self.extra_bytes

    def notes(self) -> list[str]:
        """Return the plan as a note for the start of a run, if it has a large replay buffer."""
        return [str(self)] if self.capacity is not None and self.total + self.on_host >= NOTEWORTHY else []

    def facts(self) -> dict[str, Any]:
        """Return the plan in bytes, for JSON."""
        host = {"on_host": self.on_host} if self.on_host else {}
        return {"state": dict(self.state), "iteration": dict(self.iteration), "evaluation": self.evaluation, **host}

    def __str__(self) -> str:
        """Return the plan as a line of text."""
        ordered = sorted(((size, name) for name, size in self.state.items()), reverse=True)
        each = ", ".join(f"{name} {readable(size)}" for size, name in ordered if size >= 1_000 and name)
        where = f" on each of {self.devices} devices" if self.devices > 1 else ""
        text = f"the training state takes {readable(self.state_bytes)}{where}" + (f" ({each})" if each else "")
        if self.on_host:
            text += f", and replay {readable(self.on_host)} in the host's memory"
        if self.capacity is not None:
            text += f", {self.buffer / self.capacity:.4g} bytes for each of {self.capacity} transitions"
        if own := [f"{name} {readable(size)}" for name, size in self.iteration.items() if size]:
            text += f"; an iteration needs {readable(sum(self.iteration.values()))} beside it ({', '.join(own)})"
        return text + (f"; an evaluation {readable(self.evaluation)}" if self.evaluation else "")


def plan_of_state(state: PyTree, capacity: int | None = None) -> Plan:
    """Return the plan of a training state alone, from its shapes; `capacity` is that of its buffer, if any."""
    # Sizes by top-level field of the state.
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    parts = {jax.tree_util.keystr(path, simple=True): tree_bytes(part) for path, part in children}
    if on_host := bytes_on_host(state):
        parts["buffer"] -= on_host
    return Plan(parts, capacity=capacity, on_host=on_host)


def plan_of_strategy(strategy: Strategy, state: PyTree) -> Plan:
    """Return the plan of the training state of `strategy` alone, from its shapes: of one device's share."""
    # The number of memories among which a run is divided; CPUs share that of the machine.
    devices = 1 if device_bytes() == host_bytes() else strategy.placement.devices
    if devices > 1:
        assert strategy.placement.by_shard is not None
        share = lambda x, own: jax.ShapeDtypeStruct((x.shape[0] // devices, *x.shape[1:]), x.dtype) if own else x
        state = jax.tree.map(share, state, strategy.placement.by_shard(state))
    plan = plan_of_state(state, strategy.state_fns.capacity)
    return plan._replace(is_data=strategy.env_steps_per_step == 0, devices=devices)


def plan_of(strategy: Strategy, state: PyTree, jaxpr: Any) -> Plan:
    """Return the plan of training `strategy`, from the shapes of its `state` and the `jaxpr` of an iteration."""
    plan = plan_of_strategy(strategy, state)
    # Arrays of the traced iteration that XLA must materialise. The rows are of all shards; products are of one shard,
    # since each device runs its shards in turn.
    known = lambda: {
        "the steps it learns from": largest_rows(jaxpr) // plan.devices,
        "the largest array": largest_array(jaxpr),
    }
    iteration: dict[str, int] = with_fallback("the memory plan of an iteration", known, dict)
    return plan._replace(iteration=iteration)


def require_fit(plan: Plan, num_envs: int | None = None, episodes: int | None = None) -> None:
    """Raise `SettingsError`, naming the nearest settings that fit, if a plan exceeds the memory of the device.

    `num_envs` is the number of environments in the plan, `episodes` that in an evaluation.
    """
    limit, room = device_bytes(), room_on_host(plan.total)
    if plan.on_host > room:
        assert plan.capacity is not None
        raise SettingsError(
            f"replay needs {readable(plan.on_host)} in the host's memory, which has {readable(room)} for it: {plan}; "
            f"lower buffer.capacity to at most {int(room / (plan.on_host / plan.capacity))}"
        )
    if plan.total <= limit:
        return
    ways = [f"{name} to at most {most}" for name, most in fitting(plan, limit, num_envs, episodes).items()]
    if plan.is_data:
        mend = "the size of the networks, or the number of steps in the data"
    else:
        mend = " or ".join(ways) if ways else "buffer.capacity, num_envs and the size of the networks"
    can_move = plan.capacity is not None and not plan.is_data and plan.devices == 1 and limit < host_bytes()
    moved = plan.state.get("buffer", 0) if can_move else 0
    if plan.total - moved <= limit and host_memory.is_usable():
        mend += ", or set buffer.memory to host"
    where = "at once, but the device has" if plan.devices == 1 else f"on each of {plan.devices} devices, which have"
    raise SettingsError(f"the run needs {readable(plan.total)} {where} {readable(limit)}: {plan}; lower {mend}")


def fitting(plan: Plan, limit: int, num_envs: int | None, episodes: int | None) -> dict[str, int]:
    """Return the settings that alone let the run fit into `limit` bytes, each with its maximum."""
    limit -= BLOCK_BYTES  # for blocks of random numbers, which cover more iterations if one needs fewer
    ways: dict[str, int] = {}
    if plan.capacity is not None and plan.state["buffer"] and not plan.is_data:
        each = plan.state["buffer"] / plan.capacity
        ways["buffer.capacity"] = int((limit - plan.total + plan.state["buffer"]) / each)
    shared = sum(size for name, size in plan.state.items() if name in SHARED)
    # All other memory grows linearly with `num_envs`.
    grows = plan.state_bytes - shared + sum(plan.iteration.values())
    if num_envs and grows and limit >= plan.state_bytes - grows + plan.evaluation:
        ways["num_envs"] = (limit - shared) * num_envs // grows
    if episodes and plan.evaluation and plan.state_bytes + sum(plan.iteration.values()) <= limit:
        ways["eval_episodes"] = (limit - plan.state_bytes) * episodes // plan.evaluation
    return {name: most for name, most in ways.items() if most > 0}


def require_members_fit(plans: Sequence[Sequence[Plan]]) -> None:
    """Raise `SettingsError` if the states of members exceed the memory of a device, or their replay that of the host.

    `plans` has, for each device, the plans of the members on it.
    """
    on_device = lambda own: sum(plan.state_bytes for plan in own) + max(plan.extra_bytes for plan in own)
    fullest, every = max(plans, key=on_device), [plan for own in plans for plan in own]
    room, on_host = room_on_host(on_device(fullest)), [plan.on_host for plan in every]
    if sum(on_host) > room:
        raise SettingsError(
            f"replay of {len(every)} members takes {readable(sum(on_host))} in the host's memory "
            f"({_each(on_host)}), which has {readable(room)} for it; lower buffer.capacity, or train at "
            f"most {room // max(on_host)} members"
        )
    limit, states = device_bytes(), [plan.state_bytes for plan in fullest]
    if on_device(fullest) > limit:
        most = max(limit - max(plan.extra_bytes for plan in fullest), 0) // max(1, *states)
        where = "the device" if len(plans) == 1 else f"one of its {len(plans)} devices"
        mend = "learn from less data" if all(plan.is_data for plan in fullest) else "lower buffer.capacity or num_envs"
        raise SettingsError(
            f"a population of {len(every)} members takes {readable(sum(states))} on {where} ({_each(states)}), which "
            f"has {readable(limit)}; at most {most} members fit there, or {mend}"
        )


def _each(sizes: Sequence[int]) -> str:
    return f"{'' if len(set(sizes)) == 1 else 'up to '}{readable(max(sizes))} each"


def readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def device_bytes() -> int:
    """Return the memory of the device in bytes; for a CPU, that of the machine."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or host_bytes())


def room_on_host(on_device: int) -> int:
    """Return the bytes of the host's memory that are left by what is on the device: a CPU has the same memory."""
    return max(0, host_bytes() - on_device) if device_bytes() == host_bytes() else host_bytes()


def host_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- arrays in a program ----------------------------------------------------------------------------------------


def largest_array(jaxpr: Any) -> int:
    """Return the bytes of the largest output of a matrix product or convolution, nested ones included.

    Other arrays may never be materialised: XLA fuses them or updates in place.
    """
    products = (eqn for eqn in walk(jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated"))
    return max([0, *(tree_bytes(out.aval) for eqn in products for out in eqn.outvars)])


def largest_rows(jaxpr: Any) -> int:
    """Return the bytes of the largest stacked output of a scan, such as the steps of a rollout."""
    scans = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "scan")
    return max([0, *(sum(tree_bytes(row.aval) for row in eqn.outvars[eqn_scan_counts(eqn).carry :]) for eqn in scans)])
