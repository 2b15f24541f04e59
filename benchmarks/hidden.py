"""Tasks of continuous actions in which what matters is hidden, so that a policy without a memory cannot solve them.

`python -m jaxrl.train sac --env benchmarks.hidden:recall --env-args steps 10 --agent.core gru`
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.envs.wrappers import transform_obs


def recall(steps: int = 10) -> jaxrl.Env:
    """Show a number from -1 to 1 at first, and ask for it `steps` steps later: the last action costs the squared error.

    All other steps pay nothing. The best policy with a memory has a return of 0. Without one it is at best that of the
    mean, minus the variance: -1/3.
    """
    space = jaxrl.Box(-1.0, 1.0, (2,))  # the number at first, then 0; and whether it is asked for

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        number = jax.random.uniform(key, minval=-1.0, maxval=1.0)
        return (number, jnp.int32(0)), jnp.stack([number, 0.0])

    def step(state: Any, action: jax.Array, key: Any) -> tuple[Any, jaxrl.TimeStep]:
        number, at = state
        asked, soon = at == steps, (at + 1 == steps).astype(jnp.float32)
        reward = jnp.where(asked, -jnp.square(action[0] - number), 0.0)
        return (number, at + 1), jaxrl.TimeStep(jnp.stack([0.0, soon]), reward, asked)

    spec = jaxrl.EnvSpec("Recall", space, jaxrl.Box(-1.0, 1.0, (1,)), time_limit=steps + 1)
    return jaxrl.Env(spec, reset, step)


def pendulum() -> jaxrl.Env:
    """Return Pendulum-v1 without its velocity: cosine and sine of the angle alone are seen."""
    return transform_obs(jaxrl.make_env("Pendulum-v1"), lambda obs: obs[:2], jaxrl.Box(-1.0, 1.0, (2,)))


def in_part(name: str, seen: Sequence[int]) -> jaxrl.Env:
    """Show these entries of a task's observations; all of them are the privileged state, for critics and teachers."""
    box = lambda size: jaxrl.Box(-float("inf"), float("inf"), (size,))
    show = lambda obs: {"seen": obs[jnp.array(seen)], "privileged_state": obs}
    env = jaxrl.make_env(name)
    return transform_obs(
        env, show, {"seen": box(len(seen)), "privileged_state": box(*env.spec.observation_space.shape)}
    )
