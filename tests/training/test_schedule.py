"""The schedule: exact multiples, the first iteration boundary at or past them, and the exact end."""

import pytest
from hypothesis import given, strategies as st

from jaxrl.errors import SettingsError
from jaxrl.training.schedule import Boundary, Schedule, next_boundary


def walk(schedule: Schedule, t: int = 0) -> list[Boundary]:
    boundaries = []
    while t < schedule.last:
        boundaries.append(next_boundary(schedule, t))
        t = boundaries[-1].t
    return boundaries


@given(
    k=st.integers(1, 20),
    iterations=st.integers(1, 60),
    intervals=st.tuples(*[st.integers(0, 40)] * 3),
)
def test_against_a_plain_loop(k: int, iterations: int, intervals: tuple[int, int, int]) -> None:
    schedule = Schedule(iterations * k, k, 1, 0, *intervals)
    got = {b.t: b[1:4] for b in walk(schedule)}
    assert [b.t for b in walk(schedule) if b.last] == [iterations]
    for t in range(1, iterations + 1):
        due = tuple(
            bool(interval and t * k // interval > (t - 1) * k // interval) or t == iterations for interval in intervals
        )
        assert got.get(t, (False, False, False)) == due


def test_env_step_limit_ends_at_the_first_iteration_at_or_past_it() -> None:
    schedule = Schedule(max_opts=100, env_steps_per_step=10, warmup_env_steps=40, max_env_steps=95)
    assert schedule.last == 6
    assert schedule.env_steps(6) == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_opts": 0}, "max_opts is 0; expected a whole number of at least 1"),
        ({"max_opts": 2.5}, "max_opts is 2.5"),
        ({"max_opts": True}, "max_opts is True"),
        ({"max_opts": 10, "eval_interval": -1}, "eval_interval is -1"),
        ({"max_opts": 2**32}, "at most 4294967295"),
        ({"max_opts": 23, "opt_steps_per_step": 5}, "the nearest that is: 20 or 25"),
        ({"max_opts": 3, "opt_steps_per_step": 5}, "the nearest that is: 5"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Schedule(**settings)


def test_training_without_environment_steps_counts_none() -> None:
    schedule = Schedule(max_opts=12, opt_steps_per_step=3, env_steps_per_step=0, eval_interval=5)
    assert (schedule.last, schedule.env_steps(4), schedule.opt_steps(4)) == (4, 0, 12)
    with pytest.raises(SettingsError, match="takes no environment steps; set max_opts"):
        Schedule(max_opts=12, env_steps_per_step=0, max_env_steps=5)
