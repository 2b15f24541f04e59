"""Actors in other processes, of this machine or of a Ray cluster: the bits of threads, clear ends, no rests."""

import json
import os
import resource
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_actors import (
    STARTED,
    begun,
    counter,
    events,
    keyed,
    learning,
    replaying,
    rollouts,
    shared,
    train,
    train_until_restart,
    wait_for_ends,
    with_settings,
    workers,
)
from toys_envs import counting
from toys_gymnasium import Counting

import jaxrl
import jaxrl.training.actors.remote
from jaxrl.envs.host import gymnasium_spec
from jaxrl.errors import ActorError, SettingsError
from jaxrl.training.actors.worker import Worker, WorkerConfig
from jaxrl.training.storage.leaves import state_digest

slow = pytest.mark.slow


@pytest.fixture(params=[pytest.param("processes", marks=slow), pytest.param("ray", marks=slow)])
def engine(request: pytest.FixtureRequest) -> str:
    """Give the name of an engine whose workers can begin; those of Ray on two nodes."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)


MAKERS = {
    "shared statistics": lambda engine: with_settings(shared(3), actor_engine=engine),
    "rollouts": partial(rollouts, jaxrl.make_env("gymnasium:CartPole-v1")),
    "environments in JAX": partial(replaying, counting(length=4), exploration=(0.1, 0.9)),
    "an agent that holds a key": partial(replaying, counter(), agent=keyed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_workers_make_the_bits_that_threads_make(name: str, engine: str):
    here, there = train(MAKERS[name]("threads"), 24), train(MAKERS[name](engine), 24)
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


def test_workers_make_the_bits_of_threads_and_one_that_is_killed_ends_the_run_and_all_that_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(STARTED, str(tmp_path / "pids"))
    run, hooks = tmp_path / "run", on_death(signal.SIGKILL)
    said = r"^actor [01] failed: its process is gone: killed by SIGKILL, out of memory\?$"
    with pytest.raises(ActorError, match=said):
        train(with_settings(shared(3), actor_engine="processes"), 1_000_000, run_dir=str(run), hooks=hooks, max_chunk=8)
    assert not workers()
    assert wait_for_ends(tmp_path / "pids", os.getpid()) == 8  # two of each of four environments
    metadata = json.loads((run / "metadata.json").read_text())
    done = metadata["opt_steps"]
    assert (metadata["status"], done >= 16) == ("actor", True)
    assert (run / "checkpoints" / str(done) / "manifest.json").exists()
    monkeypatch.delenv(STARTED)
    kept = train(shared(3), done, run_dir=str(run), resume=True)  # nothing is left to do
    assert state_digest(kept.state) == state_digest(train(shared(3), done).state)


@pytest.mark.slow
def test_a_process_that_has_stopped_is_told_of_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxrl.training.actors.remote, "OPENING_S", 2.0)
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


def test_a_machine_with_other_versions_is_named_in_one_line():
    order = WorkerConfig({"jaxrl": "0.1.0", "jax": "0.2.0"}, {}, "auto", b"", b"")
    line, _ = Worker().open(order, [0, 0, 0.0, 0.0]).failure or ("", "")
    assert line.startswith(": its machine has jaxrl ")
    assert line.endswith(", and the learner's has jaxrl 0.1.0, jax 0.2.0; install the same")
