"""Processors that a test runs over steps, all of them in one compiled scan."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.processors import Processor, init_processor
from jaxrl.types import Step


def processed(processor: Processor, first: Any, steps: Step) -> tuple[Any, Any, Any]:
    """Return what the policy sees at first and after each of `steps`, leaves `[T, N, ...]`; what came out; the states.

    That is `[T + 1, N, ...]`, `[T, N, ...]` and `[T + 1, ...]`.
    """
    running = _running(processor.init, processor.process, processor.observe, processor.makes_transitions)
    return jax.tree.map(np.asarray, running(first, steps))


@cache
def _running(init: Any, process: Any, observe: Any, makes_transitions: bool) -> Any:
    """Return the compiled scan of a processor; the same for the same processor."""

    def body(state: Any, step: Step) -> Any:
        new, out = process(state, step)
        return new, (observe(new), out, new)

    @jax.jit
    def scan(first: Any, steps: Step) -> Any:
        blank = jax.tree.map(lambda x: jnp.zeros_like(x[0]), (steps.action, steps.extras))
        begin = init_processor(Processor(init, process, observe), first, *blank) if makes_transitions else init(first)
        _, (seen, out, states) = jax.lax.scan(body, begin, steps)
        join = lambda first, later: jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
        return join(observe(begin), seen), out, join(begin, states)

    return scan


def random_steps(
    shape: tuple[int, ...] = (2,), steps: int = 12, num_envs: int = 4, seed: int = 0, invalid: float = 0.0
) -> tuple[np.ndarray, Step]:
    """Make first observations and steps of which some end an episode, and about a share `invalid` are spoilt.

    Observations, of `shape`, are far from 0 and 1; rewards are whole numbers.
    """
    rng, lead = np.random.default_rng(seed), (steps, num_envs)
    draw = lambda *lead: rng.normal(5.0, 3.0, (*lead, *shape)).astype(np.float32)
    ends, spoilt = rng.choice(3, lead, p=[0.6, 0.2, 0.2]), rng.random(lead) < invalid
    final_obs, done = draw(*lead), ((ends > 0) | spoilt).reshape(*lead, *(1,) * len(shape))
    return draw(num_envs), Step(
        action=rng.integers(0, 4, lead).astype(np.int32),
        extras=(),
        reward=np.where(spoilt, 0, rng.integers(-8, 9, lead)).astype(np.float32),
        terminated=(ends == 1) & ~spoilt,
        truncated=(ends == 2) | spoilt,
        final_obs=final_obs,
        obs=np.where(done, draw(*lead), final_obs),
        valid=~spoilt,
    )
