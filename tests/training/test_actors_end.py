"""How actors end: whatever an environment raises is reported, what it has started ends, and no step is in vain."""

import os
import select
import threading
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from toys_actors import begun, events, replaying, rollouts, train
from toys_gymnasium import Counting, Deadly, Raising, Silent, Starting, Tallied, Unsendable

import jaxrl
from jaxrl.envs.host import HostEnv, gymnasium_spec
from jaxrl.errors import ActorError

slow = pytest.mark.slow
IN_THREADS: dict[str, Any] = {"engine": "threads"}
IN_PROCESSES: dict[str, Any] = {"engine": "processes"}
ENVS_IN_PROCESSES: dict[str, Any] = {"engine": "threads", "processes": True}


def envs(make: Any, *args: Any) -> HostEnv:
    return jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(make, *args))


MAKE: dict[str, Any] = {"make": Counting}
"""What makes the environments of `threads`."""


@cache
def threads() -> jaxrl.Strategy:
    """Return two actors in threads, in environments that each test makes as it needs them: compiled once for all."""
    return replaying(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), lambda: MAKE["make"]()), **IN_THREADS)


@pytest.mark.parametrize(
    ("kind", "said", "where"),
    [
        (Silent, r"Silent\('oil', 'fire'\)", IN_THREADS),
        pytest.param(Silent, r"Silent\('oil', 'fire'\)", IN_PROCESSES, marks=slow),
        pytest.param(Unsendable, r"Unsendable: \('oil', 'fire'\)", IN_PROCESSES, marks=slow),
        pytest.param(Unsendable, r"Unsendable: \('oil', 'fire'\)", ENVS_IN_PROCESSES, marks=slow),
        pytest.param(Silent, r"Silent\('oil', 'fire'\)", ENVS_IN_PROCESSES, marks=slow),
    ],
)
def test_an_exception_that_cannot_be_told_or_sent_ends_the_run_with_its_type(
    kind: type[Exception], said: str, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAKE, "make", partial(Raising, kind))
    strategy = threads() if where is IN_THREADS else replaying(envs(Raising, kind), **where)
    with pytest.raises(ActorError, match=rf"^actor [01] failed: {said}$") as raised:
        train(strategy, 4_000, run_dir=str(tmp_path))
    assert raised.value.exit_code == 1
    (event,) = events(tmp_path, "actor")
    assert "raise self.kind(" in event["traceback"]
    assert list((tmp_path / "checkpoints").glob("*/manifest.json"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_report_why_it_ended_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKE, "make", partial(Raising, Deadly))
    said = r"^actor (0|1|0, 1) failed: its thread has ended without a reason$"
    before = set(threading.enumerate())
    with pytest.raises(ActorError, match=said):
        train(threads(), 4_000, run_dir=str(tmp_path))
    assert list((tmp_path / "checkpoints").glob("*/manifest.json"))
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("actor "):
            thread.join(60)  # the other one may be in its last step
            assert not thread.is_alive()


@pytest.mark.parametrize("make", [replaying, rollouts])
@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=slow)])
def test_environments_take_the_steps_that_are_learnt_from_and_no_more(
    make: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallied = partial(Tallied, str(tmp_path / "steps"))
    monkeypatch.setitem(MAKE, "make", tallied)
    shared = make is replaying and engine == "threads"
    result = train(threads() if shared else make(envs(tallied), engine), 24)
    taken = sum(map(int, (tmp_path / "steps").read_text().split()))
    assert taken == sum(actor["env_steps"] for actor in result.summary["actors"]) == result.summary["env_steps"]


def wait_for_ends(file: Path, learner: int) -> int:
    """Return when all has ended that was started by others than the learner; how many processes that were."""
    started = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    pids = [child for parent, child in started if parent != learner]
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            assert select.select([handle], [], [], 60)[0] == [handle]  # readable once the process has ended
            os.close(handle)
    for parent, child in started:
        if parent == learner:
            os.kill(child, 9)
    return len(pids)


@pytest.mark.parametrize("where", [IN_PROCESSES, pytest.param(ENVS_IN_PROCESSES, marks=slow)])
def test_what_environments_in_processes_have_started_ends_with_a_run_that_succeeds(
    where: dict[str, Any], tmp_path: Path
) -> None:
    train(replaying(envs(Starting, str(tmp_path / "pids")), **where), 8)
    assert wait_for_ends(tmp_path / "pids", os.getpid()) == 8  # two of each of four environments


STARTING = """
from toys_gymnasium import Starting

def make():
    return Starting("pids")
"""


@slow
@pytest.mark.parametrize("flags", [("--actor-engine", "processes"), ("--processes",)])
def test_what_environments_in_processes_have_started_ends_with_a_learner_that_is_killed(
    flags: tuple[str, ...], path: None, tmp_path: Path
) -> None:
    process = begun(tmp_path, *flags, mine=STARTING)
    process.kill()
    process.communicate()
    assert wait_for_ends(tmp_path / "pids", process.pid) == 2 * 2 * 2
