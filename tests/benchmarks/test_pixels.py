"""The benchmarks' own environment of frames: what is drawn, what is caught, and what a stack of frames tells."""

import jax
import numpy as np

import jaxrl
from benchmarks.pixels import BALL, LOWEST, PADDLE, SIDE, Flight, catching, drawn

STAY, LEFT, RIGHT = 0, 1, 2


def flight(row: int, column: int, down: int, right: int, paddle: int) -> Flight:
    return Flight(np.array([row, column], np.int32), np.array([down, right], np.int32), np.int32(paddle))


@jax.jit
def stepped(state: Flight, action: jax.Array) -> tuple[Flight, jaxrl.TimeStep]:
    return catching().step(state, action, ())


def step(state: Flight, action: int = STAY) -> tuple[Flight, jaxrl.TimeStep]:
    return stepped(state, np.int32(action))


def test_ball_and_paddle_are_drawn_where_they_are() -> None:
    frame = np.asarray(jax.jit(drawn)(flight(10, 20, 2, 1, 30)))
    expected = np.zeros((SIDE, SIDE, 1), np.uint8)
    expected[10:13, 20:23] = 255
    expected[SIDE - BALL :, 30 : 30 + PADDLE] = 255
    np.testing.assert_array_equal(frame, expected)


def test_walls_and_ceiling_throw_the_ball_back_and_it_stays_on_the_frame() -> None:
    state, out = step(flight(1, 0, -2, -1, 0))
    assert (state.ball.tolist(), state.speed.tolist()) == ([0, 0], [2, 1])
    assert not out.terminated
    state, _ = step(state)
    assert state.ball.tolist() == [2, 1]


def test_a_catch_pays_and_a_miss_ends_the_episode() -> None:
    caught, out = step(flight(LOWEST - 2, 40, 3, 1, 35))
    assert (float(out.reward), bool(out.terminated), caught.speed.tolist()) == (1.0, False, [-3, 1])
    _, out = step(flight(LOWEST - 2, 40, 3, 1, 0))
    assert (float(out.reward), bool(out.terminated)) == (0.0, True)
    # The paddle reaches from its first column to that of the ball's last pixel, and no further.
    for paddle, touches in ((42 - PADDLE, True), (41 - PADDLE, False), (43, True), (44, False)):
        _, out = step(flight(LOWEST, 40, 2, 1, paddle))
        assert bool(out.terminated) is not touches, paddle


def test_the_paddle_moves_as_told_and_stops_at_the_walls() -> None:
    assert [int(step(flight(0, 0, 2, 1, 30), action)[0].paddle) for action in (STAY, LEFT, RIGHT)] == [30, 27, 33]
    assert int(step(flight(0, 0, 2, 1, 1), LEFT)[0].paddle) == 0
    assert int(step(flight(0, 0, 2, 1, SIDE - PADDLE), RIGHT)[0].paddle) == SIDE - PADDLE


def test_starts_differ_and_lie_on_the_frame() -> None:
    states, frames = jax.jit(jax.vmap(catching().reset))(jax.random.split(jax.random.key(0), 64))
    assert len({tuple(row) for row in np.asarray(states.ball).tolist()}) > 16
    assert (np.asarray(states.ball) >= 0).all()
    assert (np.asarray(states.ball)[:, 1] <= SIDE - BALL).all()
    assert (np.asarray(states.paddle) <= SIDE - PADDLE).all()
    assert (np.asarray(frames, np.int32).sum(axis=(1, 2, 3)) == 255 * BALL * (BALL + PADDLE)).all()
