"""`bit_flipping`: a task of goals that only hindsight teaches (Andrychowicz et al. 2017, section 3.1).

`python -m jaxrl.train dqn --env benchmarks.goals:bit_flipping --env-args bits 15 --buffer.hindsight 0.8`
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxrl


def pays(achieved: Any, desired: Any) -> tuple[jax.Array, jax.Array]:
    """Return 0 where the goal is reached, which ends the episode, and -1 elsewhere."""
    reached = jnp.all(achieved == desired)
    return jnp.where(reached, 0.0, -1.0), reached


def bit_flipping(bits: int = 15) -> jaxrl.Env:
    """Flip one of `bits` bits a step until they are those of the goal; start and goal are drawn at random.

    As many steps are allowed as there are bits. Chance hardly ever reaches a goal, so every step of nearly every
    episode pays -1. The best policy flips each wrong bit once; its return is 1 less their number, 1 - `bits` / 2 on
    average.
    """
    one = jaxrl.Box(0.0, 1.0, (bits,))
    space = {"observation": one, "achieved_goal": one, "desired_goal": one}
    see = lambda state, goal: {"observation": state, "achieved_goal": state, "desired_goal": goal}

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state, goal = jax.random.bernoulli(key, 0.5, (2, bits)).astype(jnp.float32)
        return (state, goal), see(state, goal)

    def step(state: Any, action: jax.Array, key: Any) -> tuple[Any, jaxrl.TimeStep]:
        at, goal = state
        at = jnp.where(jnp.arange(bits) == action, 1 - at, at)
        reward, reached = pays(at, goal)
        return (at, goal), jaxrl.TimeStep(see(at, goal), reward, reached)

    spec = jaxrl.EnvSpec("BitFlipping", space, jaxrl.Discrete(bits), time_limit=bits)
    return jaxrl.Env(spec, reset, step, goal=pays)
