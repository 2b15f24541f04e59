"""Real signals to several runs in one process."""

import signal
from collections.abc import Iterator

import pytest
from toys_trainer import counting

import jaxrl
from jaxrl.training.interrupt import Interrupt


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The signals that came to the handler that was there before all runs."""
    came: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGINT, old)


def test_after_two_runs_in_lockstep_signals_go_where_they_went_before(noted: list[int]) -> None:
    first, second = (jaxrl.Trainer(counting(), max_opts=4, record_interval=1, quiet=True) for _ in range(2))
    steps = [(one.opt_steps, other.opt_steps) for one, other in zip(first, second, strict=True)]
    assert steps == [(1, 1), (2, 2), (3, 3), (4, 4)]
    signal.raise_signal(signal.SIGINT)
    assert noted == [signal.SIGINT]


def test_a_signal_stops_all_runs_in_lockstep_and_a_later_one_goes_on_listening(noted: list[int]) -> None:
    settings = {"max_opts": 9, "record_interval": 1, "quiet": True, "raise_on_signal": False}
    first, second = (jaxrl.Trainer(counting(), **settings) for _ in range(2))  # type: ignore[arg-type]
    for one, _ in zip(first, second, strict=True):
        if one.opt_steps == 3 and one.stop is None:
            signal.raise_signal(signal.SIGINT)
    assert [first.stop_reason, second.stop_reason] == ["SIGINT", "SIGINT"]
    assert noted == []
    signal.raise_signal(signal.SIGINT)
    assert noted == [signal.SIGINT]


@pytest.mark.parametrize("first_out", [0, 1])
def test_the_run_that_is_left_still_listens(noted: list[int], first_out: int) -> None:
    handles = [Interrupt(), Interrupt()]
    blocks = [handle.signals() for handle in handles]
    for block in blocks:
        block.__enter__()
    blocks[first_out].__exit__(None, None, None)
    signal.raise_signal(signal.SIGINT)
    assert [handle.reason for handle in handles] == (["SIGINT", None] if first_out else [None, "SIGINT"])
    blocks[1 - first_out].__exit__(None, None, None)
    signal.raise_signal(signal.SIGINT)
    assert noted == [signal.SIGINT]
