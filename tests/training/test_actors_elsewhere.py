"""Actors in other processes, of this machine or of a Ray cluster: the bits of threads, clear ends, no rests."""

import json
import os
import resource
import select
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_actors import (
    STARTED,
    begun,
    counted,
    counter,
    events,
    learning,
    replaying,
    rollouts,
    shared,
    train,
    train_until_restart,
    wait_for_ends,
    with_settings,
)
from toys_envs import counting
from toys_gymnasium import Counting

import jaxrl
import jaxrl.training.actors.distant
from jaxrl.envs.host import gymnasium_spec
from jaxrl.errors import ActorError, SettingsError
from jaxrl.training.actors.worker import Order, Worker
from jaxrl.training.storage.leaves import state_digest


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> str:
    """Give the name of an engine whose workers can begin; those of Ray on two nodes."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)


def workers(of: int | str = "self") -> set[int]:
    """Return the workers that a process has begun and that have not ended, below the supervisor of each."""
    found: set[int] = set()
    for task in Path(f"/proc/{of}/task").glob("*/children"):
        found |= {int(word) for word in task.read_text().split()}
    named = lambda pid: Path(f"/proc/{pid}/cmdline").read_text() if Path(f"/proc/{pid}").exists() else ""
    ours = {pid for pid in found if "actors.in_processes" in named(pid)}
    return {worker for pid in ours for worker in workers(pid) or {pid}}


def test_workers_make_the_bits_that_threads_make_and_what_environments_have_started_ends_with_them(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = train(shared(3), 24)
    monkeypatch.setenv(STARTED, str(tmp_path / "pids"))
    there = train(with_settings(shared(3), actor_engine=engine), 24)
    assert state_digest(there.state) == state_digest(here.state)
    assert not workers()
    if engine == "processes":  # nodes of Ray have begun before
        assert wait_for_ends(tmp_path / "pids", os.getpid()) == 8  # two of each of four environments


@pytest.mark.every_day("processes-rollouts")
@pytest.mark.parametrize("make", [replaying, rollouts])
def test_other_workers_make_the_bits_that_threads_make(make: Any, engine: str):
    env = jaxrl.make_env("gymnasium:CartPole-v1")
    here, there = train(make(env, "threads"), 24), train(make(env, engine), 24)
    assert state_digest(there.state) == state_digest(here.state)
    assert not workers()


@pytest.mark.slow
def test_workers_begin_where_more_than_a_thousand_files_are_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4_096:
        pytest.skip("the system lets no process open so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4_096, limits[0]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:
        assert train(rollouts(counter(), "processes"), 8).summary["opt_steps"] == 8
    finally:
        for handle in opened:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not workers()


@pytest.mark.slow
def test_environments_in_jax_and_exploration_go_to_workers_too(engine: str):
    make = partial(replaying, counting(length=4), exploration=(0.1, 0.9))
    here, there = train(make("threads"), 16), train(make(engine), 16)
    assert state_digest(there.state) == state_digest(here.state)


@pytest.mark.slow
def test_a_run_resumes_with_either_engine_to_the_same_bits(engine: str, tmp_path: Path):
    train(replaying(counter(), engine), 16, run_dir=str(tmp_path / "run"))
    digests = []
    for other in ("threads", engine):
        shutil.copytree(tmp_path / "run", tmp_path / other)
        result = train(replaying(counter(), other), 32, run_dir=str(tmp_path / other), resume=True)
        digests.append(state_digest(result.state))
    assert digests[0] == digests[1]
    (event,) = events(tmp_path / engine, "resume")
    assert event["message"].startswith("resumed at 16 optimisation steps with environments that start anew")


@pytest.mark.slow
def test_what_a_worker_raises_ends_the_run_in_one_line(engine: str, tmp_path: Path):
    before = set(threading.enumerate())
    with pytest.raises(ActorError, match=r"^actor [01] failed: RuntimeError: the motor is on fire$"):
        train(replaying(counter(raise_step=40), engine), 4_000, run_dir=str(tmp_path))
    (event,) = events(tmp_path, "actor")
    assert "raise RuntimeError" in event["traceback"]
    assert list((tmp_path / "checkpoints").glob("*/manifest.json"))
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"actor 0", "actor 1"}
    assert not workers()


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run_in_one_line(engine: str, tmp_path: Path):
    said = r"^actor [01]: a call of gymnasium:Counting takes more than 1 s; it hangs, or raise actor_timeout$"
    with pytest.raises(ActorError, match=said):
        train(replaying(counter(hang_step=40), engine, actor_timeout=1.0), 4_000, run_dir=str(tmp_path))
    (event,) = events(tmp_path, "actor")
    assert "time.sleep" in event["traceback"]
    assert not workers()


@pytest.mark.slow
def test_processes_that_environments_have_begun_end_with_the_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXRL_TEST_MARK", mark := uuid.uuid4().hex)  # which they inherit
    with pytest.raises(ActorError, match=r"takes more than 1 s"):
        train(replaying(counter(hang_step=40), "processes", processes=True, actor_timeout=1.0), 4_000)
    assert not [pid for pid, others in environments() if mark in others]


def environments() -> Iterator[tuple[str, str]]:
    """Yield the processes of this machine and what each was begun with."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            yield file.parts[2], file.read_text(errors="replace")


@pytest.mark.slow
def test_an_environment_that_cannot_be_sent_is_refused(engine: str):
    lock = threading.Lock()
    unsendable = jaxrl.gymnasium_envs(gymnasium_spec(Counting()), lambda: (lock, Counting())[1])
    with pytest.raises(SettingsError, match=r"gymnasium:Counting cannot be sent .*; make it by a function of a module"):
        train(replaying(unsendable, engine), 8)


def on_death(number: int) -> jaxrl.Hooks:
    """Once training is under way, send a signal to one of the workers of this process."""
    left = [number]

    def kill(trainer: Any, progress: Any) -> None:
        if trainer.ledger.t >= 8 and left:
            os.kill(min(workers()), left.pop())

    return jaxrl.Hooks(chunk=kill)


def test_a_process_that_is_killed_ends_the_run_in_one_line_with_a_checkpoint(tmp_path: Path):
    said = r"^actor [01] failed: its process is gone: killed by SIGKILL, out of memory\?$"
    strategy, hooks = with_settings(counted(), actor_engine="processes"), on_death(signal.SIGKILL)
    with pytest.raises(ActorError, match=said):
        train(strategy, 1_000_000, run_dir=str(tmp_path), hooks=hooks, max_chunk=8)
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["status"] == "actor"
    assert (tmp_path / "checkpoints" / str(metadata["opt_steps"]) / "manifest.json").exists()
    assert metadata["opt_steps"] >= 16
    assert not workers()


@pytest.mark.slow
def test_a_process_that_has_stopped_is_told_of_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxrl.training.actors.distant, "OPENING_S", 2.0)
    said = r"^actor [01]: its process has not answered for 2 s; is it stopped, or the machine out of memory\?$"
    strategy, hooks = replaying(counter(), "processes", actor_timeout=1.0), on_death(signal.SIGSTOP)
    with pytest.raises(ActorError, match=said):
        train(strategy, 1_000_000, run_dir=str(tmp_path), hooks=hooks, max_chunk=8)
    assert not workers()


@pytest.mark.slow
def test_with_restarts_an_actor_whose_process_died_goes_on_in_another_and_that_is_told(tmp_path: Path):
    strategy, hooks = learning(counter(), "processes", actor_restarts=2), on_death(signal.SIGSEGV)
    message = train_until_restart(strategy, tmp_path, hooks)
    line = "starts again from its seed, 1 more times at most: its process is gone: killed by SIGSEGV"
    assert message in (f"actor 0 {line}", f"actor 1 {line}")


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_ends_a_run_and_its_processes_after_a_checkpoint(path: None, tmp_path: Path):
    process = begun(tmp_path, "--actor-engine", "processes", start_new_session=True)
    ours = workers(process.pid)
    assert len(ours) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to all
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert metadata["status"] == "SIGINT"
    assert not [pid for pid in ours if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_no_process_outlives_a_learner_that_is_killed(path: None, tmp_path: Path):
    process = begun(tmp_path, "--actor-engine", "processes")
    ours = workers(process.pid)
    assert len(ours) == 2
    watched = [os.pidfd_open(pid) for pid in ours]
    process.kill()
    process.communicate()
    for ended in watched:  # readable once the process has ended
        assert select.select([ended], [], [], 60)[0] == [ended]
        os.close(ended)


def test_a_machine_with_other_versions_is_named_in_one_line():
    order = Order({"jaxrl": "0.1.0", "jax": "0.2.0"}, {}, "auto", b"", b"")
    line, _ = Worker().open(order, [0, 0, 0.0, 0.0]).failure or ("", "")
    assert line.startswith(": its machine has jaxrl ")
    assert line.endswith(", and the learner's has jaxrl 0.1.0, jax 0.2.0; install the same")
