"""Turn steps into transitions over one or several steps.

The n-step return is equation 7.1 of Sutton and Barto, *Reinforcement Learning* (2018). Every environment yields one
transition per step, `n - 1` steps late, whether an episode ended or not. So shapes and positions in a buffer depend on
the number of steps alone.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import check_between, check_count
from jaxrl.processors.base import Processor
from jaxrl.trees import Array, PyTree, tree_where
from jaxrl.tuning import tunable
from jaxrl.types import Step, Transition


class NStepState(NamedTuple):
    """The current observation and the `n - 1` incomplete transitions."""

    obs: PyTree
    discount: Array
    """Float32 scalar, gamma: an array, so that a sweep can vary it without recompiling."""
    pending: tuple[Transition, ...]
    """Oldest first, each `[N, ...]`; `discount` is `gamma^k` for the `k` steps accumulated so far."""
    open: tuple[Array, ...]
    """`[N]` bool for each pending transition: its episode continues, so the next reward counts towards it."""
    is_first: Array
    """`[N]` bool: the next step is the first of an episode."""


def one_step(discount: float = 0.99) -> Processor:
    """Make a transition of every step."""
    return n_step(1, discount)


def n_step(n: int, discount: float = 0.99) -> Processor:
    """Make a transition over `n` steps, starting at every step.

    `reward` is the sum of `discount^i` times the `i`-th reward over `k` steps: `n`, or fewer if the episode ends
    earlier. `next_obs` is the true successor of the last of these steps. `Transition.discount` is `discount^k`, or 0 if
    the last step terminated; after a truncation the return is bootstrapped. `is_first` is that of the first of these
    steps, and `is_last` that of the last.

    Raises:
      SettingsError: `n` is below 1, or `discount` is outside `[0, 1]`.
    """
    check_count("n_step", n)
    check_between("discount", discount, 0.0, 1.0)
    return Processor(
        init=partial(_init, n, discount),
        process=_process,
        observe=lambda state: state.obs,
        horizon=n - 1,
        makes_transitions=True,
        settings={"n_step": n, "discount": discount},
        changes=(),
    )


def _init(n: int, discount: float, obs: PyTree) -> NStepState:
    # The shape of actions is unknown before the first step: `None` until then (see `base.init_processor`).
    none: tuple[Any, ...] = (None,) * (n - 1)
    first = jnp.ones(jax.tree.leaves(obs)[0].shape[0], bool)
    return NStepState(obs, tunable("processor.discount", discount), none, none, first)


def _process(state: NStepState, step: Step) -> tuple[NStepState, Transition]:
    gamma, ended = state.discount, step.terminated | step.truncated
    newest = Transition(
        obs=state.obs,
        action=step.action,
        reward=step.reward,
        discount=jnp.where(step.terminated, 0.0, gamma),
        next_obs=step.final_obs,
        extras=step.extras,
        weight=jnp.asarray(step.valid, jnp.float32) * jnp.ones_like(step.reward),
        is_first=state.is_first,
        is_last=ended,
    )
    # Extend the pending transitions by this step, then emit the oldest and append the newest. With `n = 1` there are
    # none pending, and the newest is emitted at once.
    entries = [
        (newest, ~ended) if old is None else (_extend(old, is_open, step, gamma), is_open & ~ended)
        for old, is_open in zip(state.pending, state.open, strict=True)
    ]
    (out, _), *rest = [*entries, (newest, ~ended)]
    # Where an episode ended, the next step is the first of another.
    return NStepState(step.obs, gamma, tuple(t for t, _ in rest), tuple(o for _, o in rest), ended), out


def _extend(old: Transition, is_open: Array, step: Step, gamma: Array) -> Transition:
    """Add one step to a pending transition, in environments where its episode continues.

    With `G_k` and `gamma^k` in `old.reward` and `old.discount`: `G_{k+1} = G_k + gamma^k r`. A termination sets the
    discount to 0, so that nothing is bootstrapped.
    """
    longer = old._replace(
        reward=old.reward + old.discount * step.reward,
        discount=jnp.where(step.terminated, 0.0, old.discount * gamma),
        next_obs=step.final_obs,
        # A single invalid step invalidates every transition that contains it.
        weight=old.weight * jnp.asarray(step.valid, jnp.float32),
        is_last=step.terminated | step.truncated,
    )
    return tree_where(is_open, longer, old)
