"""A task of goals small enough to be trained in a moment."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxrl


def pays(achieved: Any, desired: Any) -> tuple[jax.Array, jax.Array]:
    """Return 0 where the goal is reached, which ends the episode, and -1 elsewhere."""
    reached = jnp.all(jnp.abs(achieved - desired) < 0.5)
    return jnp.where(reached, 0.0, -1.0), reached


def places(size: int = 5) -> jaxrl.Env:
    """Go left or right on a line of `size` places, from its middle to a goal that is drawn for each episode."""
    one = jaxrl.Box(0.0, size - 1.0, (1,))
    space = {"observation": one, "achieved_goal": one, "desired_goal": one}
    see = lambda at, goal: {"observation": at, "achieved_goal": at, "desired_goal": goal}

    def reset(key: jax.Array) -> tuple[Any, Any]:
        at, goal = jnp.full(1, size // 2, jnp.float32), jax.random.randint(key, (1,), 0, size).astype(jnp.float32)
        return (at, goal), see(at, goal)

    def step(state: Any, action: jax.Array, key: Any) -> tuple[Any, jaxrl.TimeStep]:
        at, goal = jnp.clip(state[0] + 2.0 * action - 1.0, 0.0, size - 1.0), state[1]
        reward, reached = pays(at, goal)
        return (at, goal), jaxrl.TimeStep(see(at, goal), reward, reached)

    spec = jaxrl.EnvSpec("Places", space, jaxrl.Discrete(2), time_limit=2 * size)
    return jaxrl.Env(spec, reset, step, goal=pays)
