"""How actors end: whatever an environment raises is reported, what it has started ends, and no step is in vain."""

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_actors import MAKE, begun, counted, events, replaying, rollouts, train, wait_for_ends
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
    strategy = counted() if where is IN_THREADS else replaying(envs(Raising, kind), **where)
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
        train(counted(), 4_000, run_dir=str(tmp_path))
    assert list((tmp_path / "checkpoints").glob("*/manifest.json"))
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("actor "):
            thread.join(60)  # the other one may be in its last step
            assert not thread.is_alive()


@pytest.mark.every_day("threads-replaying")  # of rollouts it is seen where their ratios are
@pytest.mark.parametrize("make", [replaying, rollouts])
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_environments_take_the_steps_that_are_learnt_from_and_no_more(
    make: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallied = partial(Tallied, str(tmp_path / "steps"))
    monkeypatch.setitem(MAKE, "make", tallied)
    shared = make is replaying and engine == "threads"
    result = train(counted() if shared else make(envs(tallied), engine), 24)
    taken = sum(map(int, (tmp_path / "steps").read_text().split()))
    assert taken == sum(actor["env_steps"] for actor in result.summary["actors"]) == result.summary["env_steps"]


@slow
def test_what_processes_of_environments_have_started_ends_with_a_run_that_succeeds(tmp_path: Path) -> None:
    train(replaying(envs(Starting, str(tmp_path / "pids")), **ENVS_IN_PROCESSES), 8)
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
