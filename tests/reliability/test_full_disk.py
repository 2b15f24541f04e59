"""A disk that takes no more: real refusals of the kernel, by a limit on the size of files and by small file systems."""

import concurrent.futures
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from rows_and_scalars import LOGS, scalars
from toys_runs import read_lines as lines, repeated_rows
from toys_trainer import CountState, counting

import jaxrl
from jaxrl.cli.main import cache_compilations, run_main
from jaxrl.errors import StorageError
from jaxrl.train import show
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.recorders import TensorBoardRecorder
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.logs import log_problems

FULL, ROOM, END = 7, 13, 24
"""Optimisation steps after which the disk is full, has room again, and the run ends; it saves after every third."""
LAST = {"checkpoints": [18, 21, 24], "best": [24]}
"""What is left at the end."""
LIMITS = (0, 50, 100, 250, 500, 700, 1000, 1400, 3000, 6000)
"""Bytes that a file can have: each stops the files of a checkpoint, and the logs, at other places."""
NOTHING: dict[str, list[int]] = {"checkpoints": [], "best": []}
FREE = (0, 8192, 16384, 32768)
"""Bytes that are left on a small file system."""
WAYS = (*(f"limit-{size}" for size in LIMITS), *(f"free-{free}" for free in FREE), "names", "read-only")
"""How a disk refuses from `FULL` to `ROOM`."""
EVERY_DAY = ("limit-0", "limit-1000", "free-0", "read-only")
"""Those of the ordinary tests."""
KEPT = {"checkpoints": 3, "best": 1}
"""How many are kept of each."""

WALKS = (2000,)
"""So many that the states fill a file of 8 kB."""

# --- the run ----------------------------------------------------------------------------------------------------


def rising(params: CountState, key: jax.Array) -> Evaluation:
    """Judge every later state better."""
    return Evaluation(np.array([float(params.steps)]), np.array([1]), np.array([True]))


def trainer_of(run: Path, recorders: Sequence[Any] = (), **settings: Any) -> jaxrl.Trainer:
    settings = {"max_opts": END, **settings}
    board = TensorBoardRecorder(run / "tensorboard")
    return jaxrl.Trainer(
        counting(walks=WALKS),
        evaluator=rising,
        eval_interval=3,
        record_interval=1,
        save_interval=3,
        keep=KEPT["checkpoints"],
        run_dir=str(run),
        recorders=[board, *recorders],
        **settings,
    )


def live(run: Path, changes: Mapping[int, Callable[[], object]]) -> dict[str, Any]:
    """Train in `run`, making `changes` after these optimisation steps; return what was seen."""
    memory, saved, during = jaxrl.MemoryRecorder(), [], {}  # type: ignore[var-annotated]
    hooks = jaxrl.Hooks(
        start=lambda trainer: changes.get(0, dict)(), save=lambda trainer, opt_steps: saved.append(opt_steps)
    )
    trainer, error = trainer_of(run, [memory], hooks=hooks), ""
    try:
        for report in trainer:
            if report.opt_steps in changes:
                settle(trainer)
                during[report.opt_steps] = {"saved": [*saved], "whole": whole(run), "parts": parts(run)}
                changes[report.opt_steps]()
    except StorageError as refused:
        error = str(refused)
    except Exception:
        error = traceback.format_exc()
    events = [row["message"] for row in memory.rows if row.get("event") == "storage"]
    digest = state_digest(trainer.state)
    return {"digest": digest, "saved": saved, "during": during, "events": events, "error": error, "whole": whole(run)}


def settle(trainer: jaxrl.Trainer) -> None:
    """Let what is being written come to its end."""
    jobs = [store._job for store in (trainer._storage.checkpoints, trainer._storage.best)]
    concurrent.futures.wait([job for job in jobs if job is not None])


def whole(run: Path) -> dict[str, list[int]]:
    """Return the steps that are there, of checkpoints and best policy; a test fails if one is not whole."""
    found: dict[str, list[int]] = {part: [] for part in KEPT}
    for part, steps in found.items():
        store = Store(run / part, 1)
        for step in store.steps():
            leaves = store.read(step)[0]
            assert [int(array) for path, array in leaves.items() if path.endswith("steps")] == [step]
            steps.append(step)
        store.close()
    return found


def parts(run: Path) -> list[str]:
    """Return what is there, where checkpoints are, that is none."""
    entries = [entry for part in KEPT if (run / part).is_dir() for entry in (run / part).iterdir()]
    return sorted(entry.name for entry in entries if not entry.name.isdecimal())


# --- ways in which a disk refuses -------------------------------------------------------------------------------


def limit(size: int) -> None:
    """Let no file of this process grow past `size` bytes; -1: any size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def mount(kind: str, where: Path, options: str) -> None:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(where)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave `free` bytes of a file system."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(file.tell() - free)


def take_all_names(disk: Path) -> None:
    """Leave room for bytes, but for no further file."""
    (disk / "fillers").mkdir()
    try:
        for number in range(100_000):
            (disk / "fillers" / str(number)).touch()
    except OSError:
        pass


def make_read_only(directory: Path) -> None:
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)


def make_writable(directory: Path) -> None:
    subprocess.run(["umount", str(directory)], check=True)


# --- what runs in a process of its own --------------------------------------------------------------------------

OFF = functools.partial(limit, -1)
ON = functools.partial(limit, 0)
ON_SMALL_DISKS = "--- on small disks ---"


def everything(directory: str, small: str, *names: str) -> None:
    """Run the commands and make the runs of these names; print what came of them, and end at once.

    With `small`, file systems may be mounted.
    """
    ended = commands(directory, *(name for name in names if name.partition(" ")[0] in COMMANDS))
    runs = within_limits(directory, *names)
    print(ON_SMALL_DISKS, file=sys.stderr)
    runs |= on_small_disks(directory, *names) if small else {}
    print(json.dumps({"ended": ended, "runs": runs}), flush=True)
    os._exit(0)


def within_limits(directory: str, *names: str) -> dict[str, Any]:
    """Make an undisturbed run, and those of these `names` that meet with a limit; return what came of them."""
    plans: dict[str, dict[int, Callable[[], object]]] = {
        "calm": {},
        **{f"limit-{size}": {FULL: functools.partial(limit, size), ROOM: OFF} for size in LIMITS},
        "twice": {4: ON, 8: OFF, 13: ON, 17: OFF},
        "never": {FULL: ON},
    }
    plans = {name: plan for name, plan in plans.items() if name in names or name not in WAYS}
    found = {name: live(Path(directory, name), plan) for name, plan in plans.items()}
    OFF()
    return found


def on_small_disks(directory: str, *names: str) -> dict[str, Any]:
    """Make runs of these `names` on file systems that fill up or become read-only, and one that begins on a full one.

    Return what came of them, and copy what they left.
    """
    disk, found = Path(directory, "disk"), {}
    run, empty = disk / "run", (disk / "filler").unlink
    take, give = functools.partial(take_all_names, disk), lambda: shutil.rmtree(disk / "fillers")
    plans: dict[str, dict[int, Callable[[], object]]] = {
        **{f"free-{free}": {FULL: functools.partial(fill, disk, free), ROOM: empty} for free in FREE},
        "names": {FULL: take, ROOM: give},
        "names-from-the-start": {0: take, ROOM: give},
        "read-only": {FULL: lambda: make_read_only(run), ROOM: lambda: make_writable(run)},
    }
    for name, plan in ((name, plan) for name, plan in plans.items() if name in names or name not in WAYS):
        mount("tmpfs", disk, "size=1m,nr_inodes=1000")
        found[name] = live(run, plan)
        shutil.copytree(run, Path(directory, name))
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a thread that could not write may still hold it
    return found


def commands(directory: str, *names: str) -> dict[str, Any]:
    """Fork this process for each of `names`, to run the command of that name; return how each ended.

    From there on each is a process of its own, and ends as any interpreter does; it need not import everything again.
    """
    found = {}
    for module in ("orbax.checkpoint", "tensorboardX", "tensorstore"):  # else each of them would import these
        importlib.import_module(module)
    for name in names:
        pipes = [os.pipe(), os.pipe()]
        kind, _, how = name.partition(" ")
        run = Path(directory, name, "run")
        run.parent.mkdir()
        pid = os.fork()
        if pid == 0:
            for number, (reads, writes) in enumerate(pipes, start=1):
                os.dup2(writes, number)
                os.close(reads)
                os.close(writes)
            signal.alarm(30)  # one that hangs is none that ends well
            cache_compilations()  # the first compiles for all
            command = functools.partial(COMMANDS[kind], run, how)
            run_main(lambda args, command=command: command())  # type: ignore[misc]
        for _, writes in pipes:
            os.close(writes)
        out, err = [_read(reads) for reads, _ in reversed(pipes)][::-1]
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found[name] = {"code": code, "out": out, "err": err}
    for name, ending in found.items():
        ending["whole"] = whole(Path(directory, name, "run"))
    return found


def _read(descriptor: int) -> str:
    with open(descriptor, errors="replace") as file:
        return file.read()


def command_start(run: Path, how: str) -> int:
    """Begin, or go on with, a run where nothing can be written."""
    small = how.removeprefix("resume ") != "limit"
    if small:
        mount("tmpfs", run.parent, "size=1m,nr_inodes=1000")
    if how.startswith("resume"):
        trainer_of(run, max_opts=6).train()
    refuse = {"limit": ON, "bytes": lambda: fill(run.parent, 0), "names": lambda: take_all_names(run.parent)}
    refuse.get(how.removeprefix("resume "), lambda: make_read_only(run.parent))()
    trainer_of(run, resume=how.startswith("resume")).train()
    return 0


def command_never(run: Path, how: str) -> int:
    """Come to the end of a run that can never be written again after some step."""
    refuse, _, when = how.partition(" at ")
    if refuse == "read-only":
        mount("tmpfs", run.parent, "size=1m,nr_inodes=1000")
    trainer = trainer_of(run, [jaxrl.ConsoleRecorder()])
    for report in trainer:
        if report.opt_steps == int(when):
            settle(trainer)
            ON() if refuse == "limit" else make_read_only(run)
    return 0


def command_output(run: Path, how: str) -> int:
    """Train with the outputs `how` on a full disk, and with nothing to be written elsewhere for a while."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        if name in how:
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    trainer = trainer_of(run, [jaxrl.ConsoleRecorder()])
    for report in trainer:
        if report.opt_steps in (FULL, ROOM) and how != "stdout":
            {FULL: ON, ROOM: OFF}[report.opt_steps]()
    show(trainer.result(), str(run))
    return 0


def command_told(run: Path, how: str) -> int:
    """Tell of every save; end on the fourth as `how` says."""

    def saved(trainer: jaxrl.Trainer, opt_steps: int) -> None:
        print("saved", opt_steps, flush=True)
        if opt_steps == 12:
            end(how)

    for report in trainer_of(run, hooks=jaxrl.Hooks(save=saved)):
        if how == "break" and report.opt_steps == 14:
            break
    return 0


def command_lost(run: Path, how: str) -> int:
    """End as `how` says when the last saves have failed."""

    def go_on(trainer: jaxrl.Trainer, progress: Any) -> None:
        if progress.opt_steps == END - 1:
            end(how)

    for report in trainer_of(run, hooks=jaxrl.Hooks(chunk=go_on)):
        if report.opt_steps == FULL:
            ON()
    return 0


def end(how: str) -> None:
    if how == "raise":
        raise RuntimeError("mine")
    if how == "exit":
        sys.exit(0)
    if how == "vanish":
        os._exit(0)


COMMANDS = {
    "start": command_start,
    "never": command_never,
    "output": command_output,
    "told": command_told,
    "lost": command_lost,
}


# --- a disk that is full for a while ----------------------------------------------------------------------------


class Seen(NamedTuple):
    """What was seen in a process of its own of runs, and of how others ended that ran commands, by name."""

    runs: dict[str, dict[str, Any]]
    ended: dict[str, dict[str, Any]]
    err: str
    """What it said before it mounted anything."""
    mounts: bool
    """Whether it could mount anything; otherwise some things could not be seen."""
    directory: Path

    def of(self, name: str) -> dict[str, Any]:
        """Return what was seen of this run or command."""
        found = {**self.runs, **self.ended}
        if name not in found and not self.mounts:
            pytest.skip("this system lets nobody mount a file system")
        return found[name]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What one process has seen of all that tests to be run ask for; file systems that it mounts are gone with it."""
    directory, here = tmp_path_factory.mktemp("full"), Path(__file__)
    namespace = ["unshare", "-Urm"]
    mount = [*namespace, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    small = shutil.which("unshare") is not None and not subprocess.run(mount, capture_output=True).returncode
    cases = [item.name for item in request.session.items if item.get_closest_marker("skip") is None]
    needs_mount = {*_each({"start": SMALL_START, "never": SMALL_NEVER})}
    names = [
        name
        for name in (*WAYS, *ENDINGS)
        if any(case.endswith(f"[{name}]") for case in cases) and (small or name not in needs_mount)
    ]
    args = [str(directory), "small" if small else "", *names]
    code = f"import {here.stem} as module; module.everything(*{args!r})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[1])])}
    command = [*(namespace if small else []), sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return Seen(
        **json.loads(done.stdout), err=done.stderr.partition(ON_SMALL_DISKS)[0], mounts=small, directory=directory
    )


@pytest.fixture(params=[way if way in EVERY_DAY else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def name(request: pytest.FixtureRequest) -> str:
    """A way in which the disk refuses from `FULL` to `ROOM`."""
    request.getfixturevalue("seen").of(request.param)
    return str(request.param)


def about(what: str, events: Sequence[str]) -> list[str]:
    """Say for each event about `what` whether it is of a failure or of its end."""
    of = {"checkpoint": "checkpoints/", "best policy": "best/", "metadata": "metadata.json"}[what]
    words = {f"the {what} could be written again": "again"}
    return [words.get(event, "warning") for event in events if event in words or of in event]


def test_training_goes_on_to_the_same_bits_and_the_next_saves_are_good(seen: Seen, name: str) -> None:
    run = seen.runs[name]
    assert run["error"] == ""
    assert run["digest"] == seen.runs["calm"]["digest"]
    assert [step for step in run["saved"] if step > ROOM] == [15, 18, 21, 24]
    assert run["whole"] == LAST


def test_meanwhile_old_checkpoints_and_the_best_policy_stay_whole_and_there_is_no_part_of_others(
    seen: Seen, name: str
) -> None:
    full, room = (seen.runs[name]["during"][str(step)] for step in (FULL, ROOM))
    assert full["whole"] == room["whole"] == {"checkpoints": [3, 6], "best": [6]}
    assert room["parts"] == []


def test_the_logs_have_every_row_once_and_one_warning_that_is_taken_back(seen: Seen, name: str) -> None:
    here, calm = seen.directory / name, seen.directory / "calm"
    for log in LOGS:
        assert repeated_rows(lines(here / log)) == repeated_rows(lines(calm / log))
        assert log_problems(here, log) == []
    assert scalars(here / "tensorboard") == scalars(calm / "tensorboard")
    events = seen.runs[name]["events"]
    for what in ("checkpoint", "best policy"):
        assert about(what, events) == ["warning", "again"]
    assert about("metadata", events) in ([], ["warning", "again"])
    assert [row["message"] for row in lines(here / LOGS[0]) if row.get("event") == "storage"] == events


def test_a_second_time_is_warned_of_again(seen: Seen) -> None:
    run = seen.runs["twice"]
    for what in ("checkpoint", "best policy", "metadata"):
        assert about(what, run["events"]) == ["warning", "again"] * 2
    assert run["digest"] == seen.runs["calm"]["digest"]
    assert run["whole"] == LAST


def test_standard_error_has_a_line_for_each_log_and_nothing_else(seen: Seen) -> None:
    said = seen.err.splitlines()
    assert [line for line in said if not line.startswith(("warning: cannot write", "recorder "))][:5] == []
    for name, run in seen.runs.items():
        if name.startswith(("free", "names", "read-only")):
            continue  # what is said of these is not kept
        periods = {"calm": 0, "twice": 2}.get(name, 1)
        for log in (*LOGS, "tensorboard/"):
            path = seen.directory / name / log
            assert len([line for line in said if line.startswith(f"warning: cannot write {path}")]) in (periods, 0)
        assert run["during"] or name == "calm"
    assert len([line for line in said if line.startswith("recorder ")]) <= 3  # of the one that never has room


def test_a_recorder_whose_directory_could_not_be_made_has_every_row_later(seen: Seen) -> None:
    assert seen.of("names-from-the-start")["whole"] == LAST
    boards = [seen.directory / run / "tensorboard" for run in ("names-from-the-start", "calm")]
    assert boards[0].is_dir()
    assert scalars(boards[0]) == scalars(boards[1])


def test_no_room_until_the_end_is_an_error_with_the_old_checkpoints_whole(seen: Seen) -> None:
    run = seen.runs["never"]
    assert "could not be written: " in run["error"]
    assert len(run["error"].splitlines()) == 1
    assert run["digest"] == seen.runs["calm"]["digest"]
    assert run["whole"] == {"checkpoints": [3, 6], "best": [6]}


# --- exit codes -------------------------------------------------------------------------------------------------

START = ("limit", "resume limit")
SMALL_START = ("bytes", "names", "read-only", "resume bytes", "resume read-only")
NEVER, SMALL_NEVER = f"limit at {FULL}", (f"read-only at {FULL}", f"read-only at {END - 1}")
OUTPUTS = ("stdout", "stderr", "stdout and stderr")
TOLD = ("return", "break", "raise", "exit", "vanish")
LOST = ("return", "raise", "exit")


def _each(names: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{kind} {how}" for kind, hows in names.items() for how in hows]


ENDINGS = _each(
    {"told": TOLD, "start": (*START, *SMALL_START), "never": (NEVER, *SMALL_NEVER), "output": OUTPUTS, "lost": LOST}
)


@pytest.fixture
def ending(how: str, seen: Seen) -> dict[str, Any]:
    """How the process ended that ran the command `how`."""
    return seen.of(how)


@pytest.mark.every_day("start resume limit")
@pytest.mark.parametrize("how", _each({"start": (*START, *SMALL_START)}))
def test_nothing_to_be_written_at_the_start_is_one_clear_line(ending: dict[str, Any], how: str) -> None:
    assert ending["code"] == (2 if how.endswith("read-only") else 5)
    assert ending["out"] == ""
    (line,) = ending["err"].splitlines()
    assert line.startswith("error: cannot write the run directory")
    assert line.endswith(("No space left on device", "File too large", "Read-only file system"))
    assert ending["whole"] == ({"checkpoints": [3, 6], "best": [6]} if "resume" in how else NOTHING)


@pytest.mark.every_day(f"never {NEVER}")
@pytest.mark.parametrize("how", _each({"never": (NEVER, *SMALL_NEVER)}))
def test_nothing_to_be_written_at_the_end_is_exit_code_5_with_one_error_and_the_old_checkpoints(
    ending: dict[str, Any], how: str
) -> None:
    assert ending["code"] == 5
    errors = [line for line in ending["err"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "could not be written" in errors[0]
    assert "Traceback" not in ending["err"]
    assert f"{END} opts" in ending["out"]
    newest = FULL // 3 * 3 if how.endswith(f" {FULL}") else END - 3
    assert ending["whole"]["best"] == [newest]
    assert ending["whole"]["checkpoints"][-1] == newest


@pytest.mark.every_day("output stdout and stderr")
@pytest.mark.parametrize("how", _each({"output": OUTPUTS}))
def test_outputs_that_take_nothing_stop_no_training(ending: dict[str, Any], how: str) -> None:
    assert ending["whole"] == LAST
    assert "Traceback" not in ending["err"] + ending["out"]
    assert ending["code"] == (5 if "stdout" in how else 0)


@pytest.mark.every_day("told vanish")
@pytest.mark.parametrize("how", _each({"told": TOLD}))
def test_saves_that_were_reported_are_there_however_the_process_ends(ending: dict[str, Any], how: str) -> None:
    told = [int(line.split()[1]) for line in ending["out"].splitlines()]
    assert ending["code"] == (1 if how == "told raise" else 0)
    assert told[-1] == {"told return": END, "told break": 14}.get(how, 12)
    assert ending["whole"]["checkpoints"] == told[-3:]


@pytest.mark.every_day("lost exit")
@pytest.mark.parametrize("how", _each({"lost": LOST}))
def test_the_exit_code_tells_that_the_last_save_failed(ending: dict[str, Any], how: str) -> None:
    assert ending["code"] != 0
    assert ending["whole"]["checkpoints"][0] == 3
