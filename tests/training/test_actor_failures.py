"""How actors end: whatever an environment raises is reported, what it has started ends, and no step is in vain."""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_actors import MAKE, begun, counted, counter, events, replaying, rollouts, train, wait_for_ends, workers
from toys_gymnasium import Counting, Deadly, Raising, Silent, Starting, Tallied, Unsendable
from toys_runs import rows_in

import jaxrl
from jaxrl.envs.host import HostEnv, gymnasium_spec
from jaxrl.errors import ActorError

slow = pytest.mark.slow
IN_THREADS: dict[str, Any] = {"engine": "threads"}
IN_PROCESSES: dict[str, Any] = {"engine": "processes"}
ON_RAY: dict[str, Any] = {"engine": "ray"}
ENVS_IN_PROCESSES: dict[str, Any] = {"engine": "threads", "processes": True}
ALL_IN_PROCESSES: dict[str, Any] = {"engine": "processes", "processes": True}


def envs(make: Any, *args: Any) -> HostEnv:
    return jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(make, *args))


def actors(env: HostEnv, where: dict[str, Any], request: pytest.FixtureRequest, **settings: Any) -> jaxrl.Strategy:
    """Return actors in this environment; those of Ray on two nodes."""
    if where is ON_RAY:
        request.getfixturevalue("cluster")
    return replaying(env, **where, **settings)


def nothing_is_left(before: set[threading.Thread]) -> bool:
    return set(threading.enumerate()) <= before and not workers()


@pytest.mark.parametrize(
    ("kind", "said", "where"),
    [
        (Silent, r"Silent\('oil', 'fire'\)", IN_THREADS),
        pytest.param(Silent, r"Silent\('oil', 'fire'\)", IN_PROCESSES, marks=slow),
        pytest.param(Silent, r"Silent\('oil', 'fire'\)", ON_RAY, marks=slow),
        pytest.param(Unsendable, r"Unsendable: \('oil', 'fire'\)", IN_PROCESSES, marks=slow),
        pytest.param(Unsendable, r"Unsendable: \('oil', 'fire'\)", ENVS_IN_PROCESSES, marks=slow),
        pytest.param(Silent, r"Silent\('oil', 'fire'\)", ENVS_IN_PROCESSES, marks=slow),
    ],
)
def test_an_exception_even_one_that_cannot_be_told_or_sent_ends_the_run_with_its_type(
    kind: type[Exception],
    said: str,
    where: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MAKE, "make", partial(Raising, kind))
    strategy = counted() if where is IN_THREADS else actors(envs(Raising, kind), where, request)
    before = set(threading.enumerate())
    with pytest.raises(ActorError, match=rf"^actor [01] failed: {said}$") as raised:
        train(strategy, 4_000, run_dir=str(tmp_path))
    assert raised.value.exit_code == 1
    (event,) = events(tmp_path, "actor")
    assert "raise self.kind(" in event["traceback"]
    assert list((tmp_path / "checkpoints").glob("*/manifest.json"))
    assert where is ON_RAY or nothing_is_left(before)  # Ray has threads of its own


@pytest.mark.parametrize("interval", [16, 64])
def test_an_environment_that_raises_in_an_evaluation_ends_the_run_which_makes_it_again_when_resumed(
    interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation of several, and the last one."""
    in_actor = lambda: threading.current_thread().name.startswith("actor ")
    monkeypatch.setitem(MAKE, "make", lambda: Counting() if in_actor() else Counting(raise_step=2))
    settings = {"eval_interval": interval, "record_interval": 16, "eval_episodes": 1, "eval_at_start": False}
    settings["run_dir"] = str(tmp_path)
    with pytest.raises(ActorError, match=r"^the evaluation failed: RuntimeError: the motor is on fire$") as raised:
        train(counted(), 64, **settings)
    assert raised.value.exit_code == 1
    (event,) = events(tmp_path, "evaluation")
    assert "raise RuntimeError" in event["traceback"]
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed: ActorError"
    monkeypatch.setitem(MAKE, "make", Counting)
    assert train(counted(), 64, **settings, resume=True).summary["stop"] == "max_opts"
    (event,) = events(tmp_path, "resume")
    assert event["message"].startswith(f"resumed at {interval} optimisation steps")
    rows = rows_in(tmp_path)
    assert [row["opt_steps"] for row in rows if row["kind"] == "eval"] == list(range(interval, 65, interval))
    assert [row["opt_steps"] for row in rows if row["kind"] == "train"] == [16, 32, 48, 64]


@slow
@pytest.mark.parametrize("where", [IN_PROCESSES, ON_RAY, ENVS_IN_PROCESSES, ALL_IN_PROCESSES])
def test_a_hang_elsewhere_ends_the_run_in_one_line_with_all_that_was_begun(
    where: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = actors(counter(hang_step=40), where, request, actor_timeout=1.0)
    monkeypatch.setenv("JAXRL_TEST_MARK", mark := uuid.uuid4().hex)  # which they inherit
    before = set(threading.enumerate())
    said = r"^actor (0|1|0, 1): a call of gymnasium:Counting takes more than 1 s; it hangs, or raise actor_timeout$"
    with pytest.raises(ActorError, match=said):
        train(strategy, 4_000, run_dir=str(tmp_path))
    (event,) = events(tmp_path, "actor")
    assert "processes" in where or "time.sleep" in event["traceback"]  # that of the environment's process is its own
    assert where is ON_RAY or nothing_is_left(before)
    assert multiprocessing.active_children() == []
    if where is not ENVS_IN_PROCESSES:  # then this process itself has begun others, as Python's tracker of resources
        assert not [pid for pid, others in processes() if mark in others]


def processes() -> Iterator[tuple[str, str]]:
    """Yield the processes of this machine and what each was begun with."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            yield file.parts[2], file.read_text(errors="replace")


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
def test_environments_take_the_steps_that_are_learnt_from_and_no_more_and_no_thread_is_left(
    make: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallied = partial(Tallied, str(tmp_path / "steps"))
    monkeypatch.setitem(MAKE, "make", tallied)
    shared = make is replaying and engine == "threads"
    before = set(threading.enumerate())
    result = train(counted() if shared else make(envs(tallied), engine), 24)
    taken = sum(map(int, (tmp_path / "steps").read_text().split()))
    assert taken == sum(actor["env_steps"] for actor in result.summary["actors"]) == result.summary["env_steps"]
    assert nothing_is_left(before)


@slow
def test_what_processes_of_environments_have_started_ends_with_a_run_that_succeeds(tmp_path: Path) -> None:
    train(replaying(envs(Starting, str(tmp_path / "pids")), **ENVS_IN_PROCESSES), 8)
    assert wait_for_ends(tmp_path / "pids", os.getpid()) == 8  # two of each of four environments


UNGUARDED = """
from toys_actors import replaying, train
from toys_gymnasium import Counting

import jaxrl
from jaxrl.envs.host import gymnasium_spec

print("begun", flush=True)
make = lambda more_than_a_pipe_holds=bytes(10**6): Counting()
train(replaying(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), make), actors=1, processes=True), 8)
"""


@slow
def test_a_script_that_would_run_again_in_the_processes_of_its_environments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "begun\n" * 3)  # by itself, and in each of two processes
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith('; put what it does below if __name__ == "__main__":')


OPENING = """
import signal
from pathlib import Path

from toys_actors import counter, replaying, train

if __name__ == "__main__":
    train(replaying(counter(), actors=1, processes=True), 8)
else:  # a process of an environment, which imports this
    Path(__name__).touch()
    signal.pause()
"""


@slow
def test_ctrl_c_while_processes_of_environments_begin_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OPENING)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipes = [sys.executable, "script.py"], {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes) as run:
        while not (tmp_path / "__mp_main__").exists():
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(0.1)
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate(timeout=60)[1]
    assert run.returncode in (130, -signal.SIGINT)
    assert "__mp_main__" not in said
    assert "spawn_main" not in said


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
    watched = [os.pidfd_open(pid) for pid in workers(process.pid)]
    assert len(watched) == (2 if "--actor-engine" in flags else 0)
    process.kill()
    process.wait()  # not for the end of its stderr, which what its own process has started holds open
    assert process.stderr is not None
    process.stderr.close()
    for ended in watched:  # readable once the process has ended
        assert select.select([ended], [], [], 60)[0] == [ended]
        os.close(ended)
    assert wait_for_ends(tmp_path / "pids", process.pid) == 2 * 20  # two of each environment


HANGING = """
from toys_gymnasium import Unopened

def make():
    return Unopened("pids")
"""


@slow
def test_a_run_whose_environments_hang_as_their_processes_make_them_ends_when_it_is_asked_to(
    path: None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(HANGING)
    command = [sys.executable, "-m", "jaxrl.train", "dqn", "--env", "mine:make", "--actors", "1", "--processes"]
    settings = ["--num-envs", "2", "--agent.features", "8", "--eval-episodes", "0", "--eval-interval", "0", "--quiet"]
    process = subprocess.Popen([*command, *settings], cwd=tmp_path)
    file = tmp_path / "pids"
    try:
        while not file.exists() or len(pids := file.read_text().split()) < 2:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
