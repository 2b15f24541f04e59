"""What a run takes of the device's memory, planned from shapes before anything is compiled."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import Strategy
from jaxrl.trees import PyTree, tree_bytes
from jaxrl.xla.ahead import BLOCK_BYTES
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.equations import eqn_scan_counts, walk

SHARED = ("agent", "buffer", "health", "key")
"""Parts of a training state that do not grow with the number of environments."""
NOTEWORTHY = 100_000_000
"""Bytes from which on a run with a replay buffer says what it takes, as it begins: for less, nobody chooses another."""


class Plan(NamedTuple):
    """What surely is in memory at once, in bytes: the state, and beside it an iteration's or an evaluation's own."""

    state: Mapping[str, int]
    """The parts of the training state."""
    iteration: Mapping[str, int] = {}
    """What an iteration takes beside it."""
    evaluation: int = 0
    """What the environments of an evaluation take beside it."""
    capacity: int | None = None
    """Transitions that the buffer holds, if there is one."""

    @property
    def kept(self) -> int:
        return sum(self.state.values())

    @property
    def beside(self) -> int:
        return max(sum(self.iteration.values()), self.evaluation)

    @property
    def total(self) -> int:
        return self.kept + self.beside

    def notes(self) -> list[str]:
        """Return what is said of it as a run begins: where replay takes much, which is for the user to choose."""
        return [str(self)] if self.capacity is not None and self.total >= NOTEWORTHY else []

    def facts(self) -> dict[str, Any]:
        """Return it in bytes, for JSON."""
        return {"state": dict(self.state), "iteration": dict(self.iteration), "evaluation": self.evaluation}

    def __str__(self) -> str:
        """Say it in one line."""
        ordered = sorted(((size, name) for name, size in self.state.items()), reverse=True)
        each = ", ".join(f"{name} {readable(size)}" for size, name in ordered if size >= 1_000 and name)
        text = f"the training state takes {readable(self.kept)}" + (f" ({each})" if each else "")
        if self.capacity is not None:
            text += f", {self.state['buffer'] / self.capacity:.4g} bytes for each of {self.capacity} transitions"
        if own := [f"{name} {readable(size)}" for name, size in self.iteration.items() if size]:
            text += f"; an iteration needs {readable(sum(self.iteration.values()))} beside it ({', '.join(own)})"
        return text + (f"; an evaluation {readable(self.evaluation)}" if self.evaluation else "")


def plan_of_state(state: PyTree, capacity: int | None = None) -> Plan:
    """Return the plan of a training state alone, from its shapes; `capacity` is that of its buffer, if it has one."""
    # The fields of the state, each as a whole.
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    parts = {jax.tree_util.keystr(path, simple=True): tree_bytes(part) for path, part in children}
    return Plan(parts, capacity=capacity)


def plan_of(strategy: Strategy, state: PyTree, jaxpr: Any = None, evaluation: int = 0) -> Plan:
    """Return the plan of a run: of `strategy`, and its `state` as shapes.

    `jaxpr` is that of an iteration, once it is known; `evaluation` what evaluating takes, in bytes.
    """
    iteration: dict[str, int] = {}
    if jaxpr is not None:
        # Of the traced iteration, what XLA surely has to hold.
        known = lambda: {"the steps it learns from": largest_rows(jaxpr), "the largest array": largest_array(jaxpr)}
        iteration |= with_fallback("the memory plan of an iteration", known, dict)
    return plan_of_state(state, strategy.state_fns.capacity)._replace(iteration=iteration, evaluation=evaluation)


def require_fit(plan: Plan, num_envs: int | None = None, episodes: int | None = None) -> None:
    """Raise `SettingsError` if a run of this plan cannot fit in the memory of the device.

    The error names the nearest settings that would. `num_envs` are the environments of the plan, `episodes` those of an
    evaluation.
    """
    limit = device_bytes()
    if plan.total <= limit:
        return
    ways = [f"{name} to at most {most}" for name, most in fitting(plan, limit, num_envs, episodes).items()]
    mend = " or ".join(ways) if ways else "buffer.capacity, num_envs and the size of the networks"
    raise SettingsError(
        f"the run needs {readable(plan.total)} at once, but the device has {readable(limit)}: {plan}; lower {mend}"
    )


def fitting(plan: Plan, limit: int, num_envs: int | None, episodes: int | None) -> dict[str, int]:
    """Return the settings of which one alone, at most so large, lets the run fit into `limit` bytes."""
    limit -= BLOCK_BYTES  # of random numbers, which are drawn for more iterations at once where one takes fewer
    ways: dict[str, int] = {}
    if plan.capacity is not None:
        each = plan.state["buffer"] / plan.capacity
        ways["buffer.capacity"] = int((limit - plan.total + plan.state["buffer"]) / each)
    shared = sum(size for name, size in plan.state.items() if name in SHARED)
    grows = plan.kept - shared + sum(plan.iteration.values())
    if num_envs and grows and limit >= plan.kept - grows + plan.evaluation:
        ways["num_envs"] = (limit - shared) * num_envs // grows
    if episodes and plan.evaluation and plan.kept + sum(plan.iteration.values()) <= limit:
        ways["eval_episodes"] = (limit - plan.kept) * episodes // plan.evaluation
    return {name: most for name, most in ways.items() if most > 0}


def require_members_fit(plan: Plan, members: int) -> None:
    """Raise `SettingsError` if a population of so many `members`, of which one has this `plan`, cannot fit."""
    limit, one = device_bytes(), plan.kept
    if members * one + plan.beside > limit:
        raise SettingsError(
            f"a population of {members} members takes {readable(members * one)} ({readable(one)} each), but the "
            f"device has {readable(limit)}; at most {max(limit - plan.beside, 0) // max(one, 1)} members fit, or lower "
            "buffer.capacity or num_envs"
        )


def readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def device_bytes() -> int:
    """Return the memory of the device; of a CPU, that of the machine."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# --- what a program makes ---------------------------------------------------------------------------------------


def largest_array(jaxpr: Any) -> int:
    """Return the bytes of the largest array that a product of matrices or a convolution makes, wherever it stands.

    Others may never be written: XLA fuses them with what follows, or updates in place.
    """
    products = (eqn for eqn in walk(jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated"))
    return max([0, *(tree_bytes(out.aval) for eqn in products for out in eqn.outvars)])


def largest_rows(jaxpr: Any) -> int:
    """Return the bytes of the most that a scan puts side by side, such as the steps of a rollout."""
    scans = (eqn for eqn in walk(jaxpr) if eqn.primitive.name == "scan")
    return max([0, *(sum(tree_bytes(row.aval) for row in eqn.outvars[eqn_scan_counts(eqn).carry :]) for eqn in scans)])
