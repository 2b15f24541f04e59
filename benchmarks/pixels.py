"""`catching`: a ball and a paddle, drawn on a grey frame of 84 x 84, in JAX.

`python -m jaxrl.train ppo --env benchmarks.pixels:catching --processor.frame-stack 4`

It stands for Atari where a program is compiled or timed: frames are of Atari's usual size and type, one frame does not
tell where the ball flies, and all of it runs on the device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl

SIDE = 84
"""Of a frame, in pixels."""
BALL = 3
"""Of the ball, in pixels."""
PADDLE = 13
"""Width of the paddle, in pixels; it is as high as the ball, and lies along the lowest rows."""
SPEED = 3
"""Pixels that the paddle moves in a step."""
LOWEST = SIDE - 2 * BALL
"""Highest row of a ball that touches the paddle."""


class Flight(NamedTuple):
    """Where everything is; int32 scalars and pairs `(row, column)`, in pixels."""

    ball: jax.Array
    """Its upper left corner."""
    speed: jax.Array
    paddle: jax.Array
    """Its leftmost column."""


def catching(time_limit: int = 1_000) -> jaxrl.Env:
    """Keep a ball in the air that flies between the walls; each catch pays 1, and a miss ends the episode.

    Observations are `[84, 84, 1]` uint8, 255 where the ball or the paddle is and 0 elsewhere. Actions are to stay, left
    and right.
    """
    spec = jaxrl.EnvSpec(
        "catching", jaxrl.Box(0, 255, (SIDE, SIDE, 1), "uint8"), jaxrl.Discrete(3), time_limit=time_limit
    )

    def step(state: Flight, action: jax.Array, key: Any) -> tuple[Flight, jaxrl.TimeStep]:
        moved = (action == 2).astype(jnp.int32) - (action == 1)
        paddle = jnp.clip(state.paddle + SPEED * moved, 0, SIDE - PADDLE)
        ball, speed = _flown(state)
        low, over = ball[0] >= LOWEST, jnp.abs(2 * (ball[1] - paddle) + BALL - PADDLE) < BALL + PADDLE
        caught = low & over
        speed = jnp.where(caught, speed * jnp.array([-1, 1]), speed)
        state = Flight(ball, speed, paddle)
        return state, jaxrl.TimeStep(drawn(state), jnp.where(caught, 1.0, 0.0), low & ~over)

    return jaxrl.Env(spec, _begun, step, lambda key: ())


def _begun(key: jax.Array) -> tuple[Flight, jax.Array]:
    """Throw the ball from a random column, and put the paddle anywhere."""
    numbers = jax.random.bits(key, (4,)) % jnp.array([SIDE - BALL, SIDE - PADDLE, 2, 2], jnp.uint32)
    column, paddle, left, fast = numbers.astype(jnp.int32)
    state = Flight(jnp.stack([jnp.int32(0), column]), jnp.stack([2 + fast, 1 - 2 * left]), paddle)
    return state, drawn(state)


def _flown(state: Flight) -> tuple[jax.Array, jax.Array]:
    """Return where the ball is a step later, and its speed: walls and ceiling throw it back."""
    ball, most = state.ball + state.speed, jnp.array([LOWEST, SIDE - BALL])
    beyond = (ball < 0) | ((ball > most) & jnp.array([False, True]))
    return jnp.clip(ball, 0, most), jnp.where(beyond, -state.speed, state.speed)


def drawn(state: Flight) -> jax.Array:
    """Return the frame, `[84, 84, 1]` uint8."""
    row, column = jnp.arange(SIDE)[:, None], jnp.arange(SIDE)[None]
    within = lambda place, start, size: (place >= start) & (place < start + size)
    ball = within(row, state.ball[0], BALL) & within(column, state.ball[1], BALL)
    paddle = (row >= SIDE - BALL) & within(column, state.paddle, PADDLE)
    return jnp.where(ball | paddle, 255, 0).astype(jnp.uint8)[:, :, None]
