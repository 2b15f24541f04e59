"""Real signals to programs that train in Python: each is saved, ends the program, and can be gone on from."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_session import Script, drive, single, small
from toys_trainer import ByStep, counting

import jaxrl
from jaxrl.training import interrupt
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest

INT, TERM = signal.SIGINT, signal.SIGTERM
SETTINGS: dict[str, Any] = {
    "max_opts": 120, "eval_interval": 30, "eval_episodes": 4, "record_interval": 15, "max_chunk": 4, "quiet": True,
}  # fmt: skip


def make(**settings: Any) -> jaxrl.Trainer:
    evaluator = ByStep([float(step) for step in range(1, 401)])
    return jaxrl.Trainer(counting(), evaluator=evaluator, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def whole() -> str:
    """The digest of the run that nobody stops."""
    return state_digest(make().train().state)


@pytest.fixture
def script(path: None, tmp_path: Path, cache: Path) -> Iterator[Any]:
    """What begins a program in `tmp_path`, under the name of a file; what still runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def begin(code: str, *args: object) -> "subprocess.Popen[str]":
        (tmp_path / "script.py").write_text(code)
        env, pipe = {**os.environ, "XDG_CACHE_HOME": str(cache)}, subprocess.PIPE
        command = [sys.executable, "script.py", *map(str, args)]
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


SEEDS = """
import os, sys
from toys_trainer import counting
import jaxrl

stop = lambda trainer, progress: progress.opt_steps >= 50 and os.kill(os.getpid(), int(sys.argv[1]))
for seed in range(3):
    print("seed", seed, flush=True)
    jaxrl.Trainer(
        counting(), seed=seed, max_opts=120, record_interval=15, max_chunk=4, run_dir=f"run-{seed}",
        hooks=jaxrl.Hooks(chunk=stop), console=False,
    ).train()
"""


@pytest.mark.every_day("2--2")
@pytest.mark.parametrize(("number", "code"), [(INT, -INT), (TERM, 143)])
def test_a_signal_ends_a_script_of_several_runs_after_saving(
    script: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = script(SEEDS, number.value)
    out, errors = process.communicate()
    assert (process.returncode, out) == (code, "seed 0\n"), errors
    steps = json.loads((tmp_path / "run-0" / "metadata.json").read_text())["saved_opt_steps"]
    assert 0 < steps < 120
    lines = errors.splitlines()
    name = number.name
    assert re.fullmatch(f"{name}: stopping when [a-z ]+ has finished; a second {name} stops at once", lines[0])
    again = "continue with Trainer(strategy, ..., run_dir='run-0', resume=True)"
    assert lines[1] == f"stopped by {name} at {steps} optimisation steps; saved; {again}"
    assert "Traceback" not in errors or number == INT
    settings: dict[str, Any] = {"max_opts": 120, "record_interval": 15, "quiet": True}
    resumed = jaxrl.Trainer(counting(), run_dir=str(tmp_path / "run-0"), resume=True, **settings).train()
    assert state_digest(resumed.state) == state_digest(jaxrl.Trainer(counting(), **settings).train().state)


def raising(number: int, **when: str) -> jaxrl.Hooks:
    """Hooks that send this process a signal once, at the hook `at`, from optimisation step 50 on."""
    left = [number]

    def send(trainer: jaxrl.Trainer, *_: object) -> None:
        if left and trainer.schedule.opt_steps(trainer.ledger.t) >= int(when.get("since", "50")):
            signal.raise_signal(left.pop())

    return jaxrl.Hooks(**{when["at"]: send})


@pytest.mark.parametrize(
    ("at", "directory"), [("chunk", "run"), ("before_evaluation", None), ("evaluation", "run"), ("record", None)]
)
def test_in_a_notebook_the_trainer_keeps_what_it_was_interrupted_in(
    tmp_path: Path, whole: str, at: str, directory: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = directory and str(tmp_path / directory)
    trainer = make(run_dir=run_dir, hooks=raising(INT, at=at), quiet=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    stopped = trainer.result().summary
    assert stopped["stop"] == "SIGINT"
    assert 50 <= stopped["opt_steps"] < 120
    said = capsys.readouterr().err.splitlines()[-1]
    again = f"saved; continue with Trainer(strategy, ..., run_dir={run_dir!r}, resume=True)"
    again = again if run_dir else "the trainer keeps its state: call train() again"
    assert said == f"stopped by SIGINT at {stopped['opt_steps']} optimisation steps; {again}"
    result = trainer.train()
    assert (result.summary["stop"], state_digest(result.state)) == ("max_opts", whole)


def test_a_signal_before_the_first_step_is_saved_and_raised(tmp_path: Path, whole: str) -> None:
    hooks = raising(TERM, at="start", since="0")
    trainer = make(run_dir=str(tmp_path), hooks=hooks)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    assert trainer.result().summary["opt_steps"] == 0
    assert state_digest(trainer.train().state) == whole


def test_a_signal_at_the_very_end_ends_the_program_all_the_same(whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(hooks=raising(INT, at="evaluation", since="120"), console=False, quiet=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "120 optimisation steps, at the end of the run (max_opts)" in capsys.readouterr().err
    assert state_digest(trainer.result().state) == whole
    assert trainer.train().summary["stop"] == "max_opts"


def test_who_wants_a_return_gets_one() -> None:
    before = signal.getsignal(TERM)
    trainer = make(hooks=raising(TERM, at="chunk"), raise_on_signal=False)
    assert trainer.train().summary["stop"] == "SIGTERM"
    assert signal.getsignal(TERM) == before


def test_a_loop_over_reports_gets_the_last_one_before_it_is_left() -> None:
    reports: list[Any] = []
    trainer = make(hooks=raising(INT, at="chunk"))
    with pytest.raises(KeyboardInterrupt):
        reports.extend(trainer)  # one after the other, as any loop
    assert [report.stop for report in reports] == [None] * (len(reports) - 1) + ["SIGINT"]
    assert reports[-1].saved


@pytest.mark.parametrize("directory", [None, "run"])
def test_a_population_is_saved_and_left_and_goes_on(
    tmp_path: Path, directory: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_opts": 400, "record_interval": 100, "max_chunk": 10}
    expected = jaxrl.Trainer(jaxrl.population(counting(), seeds=3), quiet=True, **settings).train()
    left = [TERM]

    def send(trainer: jaxrl.Trainer, progress: Any) -> None:
        if progress.opt_steps >= 150:  # called in the thread of a member
            with contextlib.suppress(IndexError):
                os.kill(os.getpid(), left.pop())

    run_dir = directory and str(tmp_path / directory)
    three = jaxrl.population(counting(), seeds=3)
    trainer: Any = jaxrl.Trainer(three, run_dir=run_dir, hooks=jaxrl.Hooks(chunk=send), **settings)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 143
    assert trainer.result().stop == "SIGTERM"
    again = f"saved; continue with Trainer(population, ..., run_dir={run_dir!r}, resume=True)"
    again = again if run_dir else "the trainer keeps its state: call train() again"
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped by SIGTERM; {again}"
    digests = [[state_digest(member.result.state) for member in r.members] for r in (trainer.train(), expected)]
    assert digests[0] == digests[1]


# --- sessions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def usual() -> Iterator[None]:
    """Have SIGINT raise as in a script that a terminal begins; one begun in the background ignores it."""
    before = signal.signal(INT, signal.default_int_handler)
    yield
    signal.signal(INT, before)


@pytest.mark.parametrize(("number", "raised"), [(TERM, SystemExit), (INT, KeyboardInterrupt)])
def test_a_signal_raises_in_the_loop_of_a_session_which_is_saved(
    number: signal.Signals, raised: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str], usual: None
) -> None:
    run, places, still = str(tmp_path / "run"), np.zeros((2, 2), np.float32), np.zeros(2, bool)

    def loop() -> None:
        with small(run_dir=run, max_opts=500) as session:
            while not session.is_done:
                if session.opt_steps == 20:
                    signal.raise_signal(number)
                session.act(places)
                session.observe(np.ones(2), places, still, still)

    with pytest.raises(raised) as left:
        loop()
    assert getattr(left.value, "code", 143) == 143
    again = f"saved; continue with Session(..., run_dir={run!r}, resume=True)"
    assert f"stopped by {number.name} at 20 optimisation steps; {again}" in capsys.readouterr().err.splitlines()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["20"]


@pytest.mark.parametrize(("number", "raised"), [(TERM, SystemExit), (INT, KeyboardInterrupt)])
def test_a_signal_during_the_last_save_of_a_session_is_raised_after_it(
    number: signal.Signals,
    raised: type[BaseException],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    usual: None,
) -> None:
    run, save = tmp_path / "run", Store.save

    def save_late(*args: Any, **how: Any) -> None:
        signal.raise_signal(number)
        save(*args, **how)

    monkeypatch.setattr(Store, "save", save_late)
    with pytest.raises(raised) as left, single(run_dir=str(run)) as session:
        drive(session, Script(1), 20)
    assert getattr(left.value, "code", 143) == 143
    assert f"stopped by {number.name} at 10 optimisation steps; saved;" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["10"]
    assert signal.getsignal(INT) is signal.default_int_handler
    assert signal.getsignal(TERM) == signal.SIG_DFL


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("number", [TERM, INT])
def test_a_second_signal_does_not_wait_for_the_last_save(
    number: signal.Signals, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual: None
) -> None:
    """`before`: the first came in the loop, else both during the save."""

    ended = list[str]()

    def save(*args: Any, **how: Any) -> None:
        for _ in range(1 if before else 2):
            signal.raise_signal(number)

    monkeypatch.setattr(interrupt, "end_at_once", lambda number, line: ended.append(line))
    monkeypatch.setattr(Store, "save", save)
    with contextlib.suppress(SystemExit, KeyboardInterrupt), single(run_dir=str(tmp_path / "run")):
        if before:
            signal.raise_signal(number)
    assert ended[:1] == [f"stopped at once by a second {number.name}"]


# --- while the main thread compiles ---------------------------------------------------------------------------------

HELD = """
import ctypes, sys, threading
import jax

lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
compiles, held, write = [], [], sys.stdout.write

def watch(text):
    compiles.extend(["compiling"] * ("compiling" in text))
    return write(text)

sys.stdout.write = watch

def hold(event, *_, **__):
    # As the compiler itself does, this keeps its thread from Python's own instructions, until standard input has a line
    if event.endswith("jaxpr_to_mlir_module_duration") and compiles and not held:
        held.append(threading.current_thread())
        print("held", flush=True)
        threading.Thread(target=release, daemon=True).start()
        libc.pthread_mutex_lock(lock)

def release():
    sys.stdin.readline()
    libc.pthread_mutex_unlock(lock)

jax.monitoring.register_event_duration_secs_listener(hold)

import jaxrl
import jax.numpy as jnp

def make():
    def step(place, action, key):
        return place, jaxrl.TimeStep(jnp.zeros(1), 1.0, False)
    spec = jaxrl.EnvSpec("Held", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Discrete(2), time_limit=10)
    return jaxrl.Env(spec, lambda key: (jnp.zeros(()), jnp.zeros(1)), step)
"""
TRAIN = """
if __name__ == "__main__":
    from toys_trainer import counting
    jaxrl.Trainer(counting(), max_opts=64).train()
"""
FRONT = """
if __name__ == "__main__":
    import runpy
    small = "--num-envs 2 --rollout 8 --agent.features 8 --max-opts 64 --eval-interval 0 --eval-episodes 0".split()
    sys.argv = ["jaxrl.train", "ppo", "--env", "held:make", "--run-dir", "run", *small]
    runpy.run_module("jaxrl.train", run_name="__main__", alter_sys=True)
"""


def compiling(process: "subprocess.Popen[str]") -> None:
    """Wait until a program says that it compiles, and is held there."""
    said = []
    for line in process.stdout or ():
        said.append(line.strip())
        if line == "held\n":
            break
    assert said[-2:] == ["compiling", "held"], process.communicate()


ACKNOWLEDGED = "SIGINT: stopping when the compilation has finished; a second SIGINT stops at once\n"


@pytest.mark.every_day("command")
@pytest.mark.parametrize("how", ["script", "command"])
def test_a_first_signal_is_acknowledged_while_it_compiles_and_a_second_one_obeyed(
    script: Any, tmp_path: Path, how: str
) -> None:
    process = begun(script, tmp_path, how)
    compiling(process)
    process.send_signal(INT)
    assert process.stderr.readline() == ACKNOWLEDGED
    process.send_signal(INT)
    assert process.communicate() == ("", "stopped at once by a second SIGINT\n")
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("script", -INT), ("command", 130)])
def test_after_the_compilation_it_stops(script: Any, tmp_path: Path, how: str, code: int) -> None:
    process = begun(script, tmp_path, how)
    compiling(process)
    process.send_signal(INT)
    assert process.stderr.readline() == ACKNOWLEDGED
    _, errors = process.communicate("go on\n")
    assert process.returncode == code
    if how == "script":
        keeps = "the trainer keeps its state: call train() again"
        assert errors.splitlines()[0] == f"stopped by SIGINT at 0 optimisation steps; {keeps}"
    else:
        assert errors == ""
        assert json.loads((tmp_path / "run" / "metadata.json").read_text())["status"] == "SIGINT"


def begun(script: Any, tmp_path: Path, how: str) -> Any:
    """Begin to train where compilation is held, from a script or as the command does."""
    if how == "script":
        return script(HELD + TRAIN)
    (tmp_path / "held.py").write_text(HELD)
    return script("import sys; sys.path.insert(0, '.')\n" + FRONT)


# --- neighbours -----------------------------------------------------------------------------------------------------


def test_the_descriptor_of_an_event_loop_gets_its_signals_and_comes_back() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs)
    try:
        trainer = jaxrl.Trainer(
            counting(), max_opts=200, hooks=raising(TERM, at="chunk"), raise_on_signal=False, quiet=True, max_chunk=10
        )
        trainer.train()
        assert os.read(ours, 9) == bytes([TERM])
    finally:
        assert signal.set_wakeup_fd(before) == theirs
        os.close(ours)
        os.close(theirs)


FORKS = """
import os, signal
from toys_trainer import counting
import jaxrl

def fork(trainer):
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    os.waitpid(child, 0)

print(jaxrl.Trainer(counting(), max_opts=50, hooks=jaxrl.Hooks(start=fork), console=False).train().summary["stop"])
"""


@pytest.mark.slow
def test_a_signal_to_a_child_that_was_forked_stops_no_training(script: Any) -> None:
    out, errors = script(FORKS).communicate()
    assert (out, [line for line in errors.splitlines() if "SIG" in line]) == ("max_opts\n", [])


ENDS = """
import os, signal, time
from toys_trainer import counting
import jaxrl

def fork(trainer):
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        os.write(here, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(there, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

print(jaxrl.Trainer(counting(), max_opts=50, hooks=jaxrl.Hooks(start=fork), console=False).train().summary["stop"])
"""


def test_sigterm_ends_a_child_that_was_forked(script: Any) -> None:
    """As that of a simulator, which an environment terminates and waits for."""
    assert script(ENDS).communicate()[0] == "-15\nmax_opts\n"


# --- several runs in one process ------------------------------------------------------------------------------------


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The signals that came to the handler that was there before all runs."""
    came: list[int] = []
    old = signal.signal(INT, lambda number, frame: came.append(number))
    yield came
    signal.signal(INT, old)


def test_a_signal_stops_all_runs_in_lockstep_and_a_later_one_goes_on_listening(noted: list[int]) -> None:
    settings = {"max_opts": 9, "record_interval": 1, "quiet": True, "raise_on_signal": False}
    first, second = (jaxrl.Trainer(counting(), **settings) for _ in range(2))  # type: ignore[arg-type]
    for one, _ in zip(first, second, strict=True):
        if one.opt_steps == 3 and one.stop is None:
            signal.raise_signal(INT)
    assert [first.stop_reason, second.stop_reason] == ["SIGINT", "SIGINT"]
    assert noted == []
    signal.raise_signal(INT)
    assert noted == [INT]


@pytest.mark.parametrize("first_out", [0, 1])
def test_the_run_that_is_left_still_listens(noted: list[int], first_out: int) -> None:
    handles = [Interrupt(), Interrupt()]
    blocks = [handle.signals() for handle in handles]
    for block in blocks:
        block.__enter__()
    blocks[first_out].__exit__(None, None, None)
    signal.raise_signal(INT)
    assert [handle.reason for handle in handles] == (["SIGINT", None] if first_out else [None, "SIGINT"])
    blocks[1 - first_out].__exit__(None, None, None)
    signal.raise_signal(INT)
    assert noted == [INT]
