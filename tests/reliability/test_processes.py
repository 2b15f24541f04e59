"""Several processes make one run: the same bits as one, and whoever of them stops, dies or differs. Real processes.

They compile as users have it, as those of `test_shards` do, but for the toy, of whole numbers. They talk over the
loopback.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import processes_toy
import pytest
from jax._src import distributed

import jaxrl
import jaxrl.train
import jaxrl.verify
from jaxrl.errors import SettingsError
from jaxrl.training.storage.arrays import FILES, combine_crcs, file_sums

HERE = Path(__file__).parent
RUN = HERE / "processes_run.py"
AT, LAST = 64, 1_024
KILL_S = 0.05
"""Within how many seconds after a step is reported one is killed."""
PPO = [
    *("ppo", "--env", "CartPole-v1", "--num-envs", "8", "--rollout", "4", "--epochs", "2", "--minibatches", "2"),
    *("--agent.features", "4", "--max-opts", str(LAST), "--save-interval", str(AT), "--keep", "1", "--quiet"),
    *("--eval-interval", "0", "--eval-episodes", "0", "--recorders", "jsonl"),
]
DQN = [
    *("dqn", "--env", "CartPole-v1", "--num-envs", "4", "--opt-interval", "4", "--warmup", "16", "--shards", "2"),
    *("--buffer.capacity", "256", "--buffer.batch-size", "8", "--buffer.prioritised", "--agent.features", "4"),
    *("--agent.lr-decay", str(LAST), "--agent.epsilon-decay", str(AT)),  # a preset would fit them to each length
    *("--max-opts", str(LAST), "--save-interval", str(AT), "--keep", "1", "--quiet", "--eval-interval", "512"),
    *("--eval-episodes", "2", "--recorders", "jsonl"),
]


class Ended(NamedTuple):
    """How a process has ended: by which code, with what lines of jaxrl as errors, and what it printed last."""

    code: int
    errors: list[str]
    said: str = ""


DONE = Ended(0, [])


def begin(*args: object, without: Sequence[str] = ("XLA_FLAGS",)) -> "subprocess.Popen[str]":
    command = [sys.executable, *map(str, args)]
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", *without)}
    return subprocess.Popen(
        command, env={**env, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: "subprocess.Popen[str]") -> Ended:
    try:
        out, errors = process.communicate(timeout=900)
    finally:
        process.kill()
    # The library by which CPUs talk, and JAX where it loses a process, print lines of their own.
    own = [line for line in errors.splitlines() if line.startswith(("error:", "warning:", "Traceback"))]
    said = [line for line in out.splitlines() if "[Gloo]" not in line and "peer ranks" not in line]  # threads of it mix
    return Ended(process.returncode, own, *said[-1:])


def alone(*args: object) -> None:
    """Train in one process, to the end."""
    ended = end(begin(RUN, "-", *args))
    assert ended.code == 0, ended.errors


def address() -> str:
    """Return where process 0 can be found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def together(*each: Sequence[object], whats: Sequence[str] = ()) -> list[Ended]:
    """Train in processes that join, each with arguments of its own; `@1` in what process 0 is to do is the pid of 1."""
    at, begun = address(), dict[int, "subprocess.Popen[str]"]()
    for i in reversed(range(len(each))):
        what = whats[i] if i < len(whats) else "-"
        for j, process in begun.items():
            what = what.replace(f"@{j}", str(process.pid))
        join = ("--distributed", "--coordinator-address", at, "--num-processes", len(each), "--process-id", i)
        begun[i] = begin(RUN, what, *each[i], *join)
    return [end(begun[i]) for i in range(len(each))]


def toys(path: Path, *seeds: int) -> list[Ended]:
    """Train the toy in processes that join, each with a seed of its own; they compile as this process does."""
    at, count = address(), len(seeds)
    begun = [begin(HERE / "processes_toy.py", path, seed, at, count, i, without=()) for i, seed in enumerate(seeds)]
    return [end(process) for process in begun]


def but(args: Sequence[object], flag: str, value: object) -> list[object]:
    """Return arguments with another value of a flag that they have."""
    place = list(args).index(flag) + 1
    return [*args[:place], value, *args[place + 1 :]]


def saved(path: Path) -> tuple[int, dict[str, str]]:
    """Return the newest checkpoint's step, and what its manifest says of each array: shape, type and checksum."""
    step = max(int(entry.name) for entry in (path / "checkpoints").iterdir() if entry.name.isdigit())
    leaves = json.loads((path / "checkpoints" / str(step) / "manifest.json").read_text())["leaves"]
    return step, {leaf["path"]: json.dumps(leaf) for leaf in leaves}


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the log, without what depends on time."""
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{name: row.get(name) for name in ("opt_steps", "t", "t_min", "t_max")} for row in lines if "t" in row]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy in this process, `one`, and in two processes, `two`: four shards on one device and on two of each."""
    path = tmp_path_factory.mktemp("pair")
    digest = processes_toy.train(str(path / "one"), 2 * processes_toy.HALF)
    assert toys(path / "two", 0, 0) == [(0, [], digest)] * 2
    return path


def test_processes_train_save_resume_and_roll_back_to_the_bits_of_one(pair: Path) -> None:
    assert saved(pair / "two") == saved(pair / "one")
    assert rows(pair / "two") == rows(pair / "one")
    log = (pair / "two" / "metrics.jsonl").read_text()
    assert '"rollback"' in log
    assert '"storage"' not in log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[int, dict[str, str]]:
    """PPO in two shards in one process, to its end."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    alone(*PPO, "--shards", 2, "--run-dir", path)
    return saved(path)


# --- checkpoints that several have written ------------------------------------------------------------------------


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for sizes in ([0], [1, 0, 2], [5, 1 << 17, 3], rng.integers(0, 999, 50)):
        parts = [rng.bytes(size) for size in sizes]
        assert combine_crcs((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def part_of_second(path: Path) -> Path:
    """Return the file of the newest checkpoint in which the second process has its shards."""
    step = path / "checkpoints" / str(saved(path)[0])
    return max((step / "arrays" / "ocdbt.process_1" / "d").iterdir(), key=lambda file: file.stat().st_size)


def damage(file: Path) -> str:
    raw = file.read_bytes()
    file.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    return "its file arrays/ocdbt.process_1/d/.* is damaged"


def remove(file: Path) -> str:
    file.unlink()
    return "its file arrays/ocdbt.process_1/d/.* is missing"


def mistake(file: Path) -> str:
    """Put the shards of another step there, and let the list of files say that they belong there."""
    newest = file.parents[3]
    before = max((step for step in newest.parent.iterdir() if step != newest), key=lambda step: int(step.name))
    shutil.rmtree(newest / "arrays")
    shutil.copytree(before / "arrays", newest / "arrays")
    (newest / FILES).write_text(json.dumps(file_sums(newest)))
    return "the data of .* is damaged: its checksum differs"


@pytest.mark.parametrize("break_it", [damage, remove, mistake])
def test_a_part_that_is_not_as_it_was_written_is_named_and_the_step_before_is_gone_on_from(
    tmp_path: Path, pair: Path, break_it: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(pair / "two", tmp_path / "run")
    newest, said = saved(path)[0], break_it(part_of_second(path))
    assert jaxrl.verify.main([str(path)]) == 6
    assert re.search(f"(?m)^{newest} {said}", capsys.readouterr().out)
    with pytest.warns(UserWarning, match=f"checkpoints/{newest} is skipped: {said}"):
        digest = processes_toy.train(str(path), 2 * processes_toy.HALF, resume=True)
    assert digest == processes_toy.train(str(pair / "one"), 2 * processes_toy.HALF, resume=True)
    assert saved(path) == saved(pair / "one")


@pytest.mark.slow
@pytest.mark.parametrize("break_it", [damage, mistake])
def test_a_damaged_part_is_skipped_by_processes(
    tmp_path: Path, undisturbed: tuple[int, dict[str, str]], break_it: Callable[[Path], str]
) -> None:
    path = tmp_path / "run"
    run = [*but(PPO, "--keep", 2), "--shards", 2, "--run-dir", path]
    assert together(run, run) == [DONE, DONE]
    said = break_it(part_of_second(path))
    go_on = ["--resume", path]
    first, second = together(go_on, go_on)
    (line,) = first.errors
    assert re.match(f"warning: checkpoint .*/{LAST} is skipped: {said}", line)
    assert (first.code, second) == (0, DONE)
    assert saved(path) == undisturbed
    for step in (LAST, LAST - AT):
        shutil.rmtree(path / "checkpoints" / str(step) / "arrays" / "ocdbt.process_1")
    first, second = together(go_on, go_on)
    assert (first.code, second.code) == (6, 7)
    assert first.errors[-1].startswith("error: ")
    assert "holds no valid checkpoint" in first.errors[-1]
    assert "process 0" in second.errors[-1]


@pytest.mark.slow
def test_two_processes_one_four_devices_and_two_processes_again(tmp_path: Path, cache: Path) -> None:
    """Each saves what the next goes on from; its policy needs no devices."""
    run = [*PPO, "--shards", 4, "--agent.lr-decay", LAST]  # a preset would fit it to each length
    alone(*run, "--run-dir", tmp_path / "one")
    path = tmp_path / "two"
    first = [*but(run, "--max-opts", 256), "--run-dir", path, "--devices", 4]
    assert together(first, first) == [DONE, DONE]
    alone("--resume", path, "--max-opts", 512, "--devices", 1)
    alone("--resume", path, "--max-opts", 768, "--devices", 4)
    last = ["--resume", path, "--max-opts", LAST]
    assert together(last, last) == [DONE, DONE]
    assert saved(path) == saved(tmp_path / "one")
    obs = np.zeros(4, np.float32)
    actions = [jaxrl.load_policy(str(tmp_path / name), step="latest")(obs) for name in ("one", "two")]
    assert int(actions[0]) == int(actions[1])


@pytest.mark.slow
@pytest.mark.parametrize("other", [0, 1])
def test_where_the_disk_of_one_is_full_the_run_goes_on_and_saves_when_there_is_room(
    tmp_path: Path, undisturbed: tuple[int, dict[str, str]], other: int
) -> None:
    """The kernel refuses every byte of one process from the second save on, and takes them again from the fourth on."""
    path, pid = tmp_path / "run", "@1" if other else "0"
    run = [*PPO, "--shards", 2, "--run-dir", path]
    ended = together(run, run, whats=(f"by {2 * AT}:{pid}:full,by {4 * AT}:{pid}:room",))
    assert [process.code for process in ended] == [0, 0]
    assert saved(path) == undisturbed
    events = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    said = [row["message"] for row in events if row.get("event") == "storage"]
    if other:  # the first one's log was on the full disk as well
        assert re.match(f"warning: checkpoint .*/{2 * AT} could not be written: process 1: OSError", said[0])
        assert said[1:] == ["the checkpoint could be written again"]


@pytest.mark.slow
def test_one_that_stands_still_for_a_while_is_waited_for(
    tmp_path: Path, undisturbed: tuple[int, dict[str, str]]
) -> None:
    run = [*PPO, "--shards", 2, "--run-dir", tmp_path / "run"]
    what = f"{AT}:@1:slow,by {8 * AT}:@1:slow"  # between programs, and while the others save
    assert together(run, run, whats=(what,)) == [DONE, DONE]
    assert saved(tmp_path / "run") == undisturbed
    assert undisturbed[0] == LAST
    assert '"storage"' not in (tmp_path / "run" / "metrics.jsonl").read_text()  # no save has failed


@pytest.mark.slow
def test_ten_kills_at_random_moments_cost_no_bit(tmp_path: Path, undisturbed: tuple[int, dict[str, str]]) -> None:
    """One of two is killed, whatever it does, and all begin again: the end is that of a run that was let alone.

    The moments are told by the steps of the run and a little later, for a fast machine ends before a slow one begins.
    Where a run came to its end all the same, another begins.
    """
    path, rng, killed = tmp_path / "run", random.Random(0), 0
    go_on: list[object] = [*PPO, "--shards", 2, "--run-dir", path]
    begin, reached = go_on, 0
    while killed < 10:
        victim = rng.randrange(2)
        when = f"{min(reached + rng.randrange(0, 3 * AT), LAST - 2 * AT)}+{rng.uniform(0, KILL_S):.4f}"
        ended = together(go_on, go_on, whats=(f"{when}:{'@1' if victim else 0}:{int(signal.SIGKILL)}",))
        if ended[1 - victim] == DONE:
            assert saved(path) == undisturbed
            shutil.rmtree(path)
            go_on, reached = begin, 0
            continue
        killed += 1
        assert ended[victim] == Ended(-signal.SIGKILL, [])
        assert ended[1 - victim].code == 7, ended
        steps = [int(entry.name) for entry in (path / "checkpoints").glob("*") if entry.name.isdigit()]
        go_on, reached = ["--resume", path], max(steps, default=0)
    assert together(go_on, go_on) == [DONE, DONE]
    assert saved(path) == undisturbed
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == [str(LAST)]


# --- processes that differ, stop and die --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_with_another_seed_is_refused_by_all(tmp_path: Path) -> None:
    first, second = toys(tmp_path / "run", 0, 1)
    said = "has other settings or versions than process 0 (seed: 0 -> 1); start all by one command"
    assert first[:2] == (2, [f"error: process 1: {said}"])
    assert second[:2] == (2, [f"error: {said}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_refused_run_leaves_the_next_one_of_the_same_processes_in_step() -> None:
    """The second is refused, the first says so, and the others learn that the run has ended."""
    at, seeds = address(), (0, 1, 0, 0)
    begun = [begin(HERE / "processes_refused.py", seed, at, len(seeds), i) for i, seed in enumerate(seeds)]
    ended = [end(process) for process in begun]
    assert [each.code for each in ended] == [0] * 4, ended
    came, digests = zip(*(each.said.split() for each in ended), strict=True)
    assert came == ("SettingsError", "SettingsError", "ProcessError", "ProcessError")
    assert len({*digests}) == 1


@pytest.mark.slow
def test_four_processes_of_two_shards_each_come_to_the_bits_of_one(tmp_path: Path, cache: Path) -> None:
    run = [*but(PPO, "--max-opts", AT), "--shards", 8]
    alone(*run, "--run-dir", tmp_path / "one")
    four = [*run, "--run-dir", tmp_path / "four"]
    assert together(four, four, four, four) == [DONE] * 4
    assert saved(tmp_path / "four") == saved(tmp_path / "one")


@pytest.mark.slow
def test_a_signal_to_any_process_saves_and_stops_all(tmp_path: Path, undisturbed: tuple[int, dict[str, str]]) -> None:
    path = tmp_path / "run"
    run = [*PPO, "--shards", 2, "--run-dir", path]
    stopped = together(run, run, whats=(f"{AT}:@1:{int(signal.SIGTERM)}",))
    assert stopped == [Ended(143, [])] * 2
    assert AT < saved(path)[0] < LAST
    assert json.loads((path / "metadata.json").read_text())["status"] == "SIGTERM"
    go_on = ["--resume", path]
    assert together(go_on, go_on) == [DONE, DONE]
    assert saved(path) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_ends_the_other_and_the_run_goes_on_from_its_last_save_in_one_process(
    tmp_path: Path, undisturbed: tuple[int, dict[str, str]], victim: int
) -> None:
    path = tmp_path / "run"
    run = [*PPO, "--shards", 2, "--run-dir", path]
    ended = together(run, run, whats=(f"{4 * AT}:{'@1' if victim else 0}:{int(signal.SIGKILL)}",))
    other = ended[1 - victim]
    assert ended[victim] == Ended(-signal.SIGKILL, [])
    assert other.code == 7
    (line,) = other.errors
    assert "is gone" in line
    assert "--resume" in line
    assert saved(path)[0] == 4 * AT
    alone("--resume", path, "--devices", 1)
    assert saved(path) == undisturbed


@pytest.mark.slow
def test_replay_goes_on_within_processes(tmp_path: Path, cache: Path) -> None:
    """DQN by priority: begun in two processes, stopped, gone on in two, and again on the devices of one."""
    alone(*DQN, "--run-dir", tmp_path / "one")
    path = tmp_path / "two"
    run = [*but(DQN, "--max-opts", 256), "--run-dir", path]
    assert together(run, run) == [DONE, DONE]
    go_on = ["--resume", path, "--max-opts", 512]
    assert together(go_on, go_on) == [DONE, DONE]
    alone("--resume", path, "--max-opts", LAST, "--devices", 2)
    assert saved(path) == saved(tmp_path / "one")
    scores = [(tmp_path / name / "eval_episodes.jsonl").read_text() for name in ("one", "two")]
    assert scores[0].splitlines()[-1] == scores[1].splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("args", [[*PPO, "--shards", "2"], [*DQN, "--no-random-warmup"]], ids=["ppo", "dqn"])
def test_processes_begin_with_the_networks_of_another_run_as_one_does(
    args: list[str], tmp_path: Path, cache: Path
) -> None:
    short = but(args, "--max-opts", AT)
    alone(*short, "--seed", 1, "--run-dir", tmp_path / "old")
    run = [*short, "--init-from", tmp_path / "old"]
    alone(*run, "--run-dir", tmp_path / "one")
    two = [*run, "--run-dir", tmp_path / "two"]
    assert together(two, two) == [DONE, DONE]
    assert saved(tmp_path / "two") == saved(tmp_path / "one")
    alone(*short, "--run-dir", tmp_path / "none")
    assert saved(tmp_path / "none") != saved(tmp_path / "one")


@pytest.mark.slow
def test_a_second_run_in_the_directory_is_refused_by_all_its_processes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "run"
    hold = subprocess.Popen(
        [sys.executable, str(RUN), "-", *map(str, but(PPO, "--max-opts", 1_000_000)), "--run-dir", str(path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        while not (path / "metadata.json").exists():
            assert hold.poll() is None
            time.sleep(0.1)
        run = [*PPO, "--shards", 2, "--run-dir", path]
        first, second = together(run, run)
    finally:
        hold.kill()
        hold.wait()
    assert first.code == 4
    assert second.code == 7
    assert str(path) in second.errors[0]


@pytest.mark.slow
def test_a_process_with_another_version_is_refused_by_all(tmp_path: Path, cache: Path) -> None:
    run = [*PPO, "--shards", 2, "--run-dir", tmp_path / "run"]
    first, second = together(run, run, whats=("-", "jax=0.0.1"))
    for ended in (first, second):
        assert ended.code == 2
        (line,) = ended.errors
        assert "versions.jax: " in line
    assert not (tmp_path / "run").exists()


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num-processes", "2", "--process-id", "0"], "--num-processes, --process-id.* give --distributed as well"),
        (["--distributed", "--num-processes", "two"], "--num-processes is 'two'; expected a whole number"),
        (["--distributed", "--num-processes", "0"], "--num-processes is 0; expected 1 or more"),
        (["--distributed", "--num-processes", "2", "--process-id", "2"], "--process-id is 2; expected 0 to 1"),
        (["--distributed", "--coordinator-address", "node7"], "'node7'; expected HOST:PORT of process 0"),
    ],
)
def test_flags_that_lack_each_other_or_cannot_be_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        jaxrl.train.main(["ppo", *given])


@pytest.mark.slow  # every day, flags that lack each other are refused in the same way
def test_processes_that_jax_does_not_find_are_to_be_named() -> None:
    ended = end(begin(RUN, "-", "ppo", "--distributed", "--num-processes", 2))
    assert ended.code == 2
    (line,) = ended.errors
    assert "give --coordinator-address HOST:PORT of process 0, --num-processes N, and --process-id 0 to N - 1" in line


@pytest.mark.slow
def test_a_process_that_nobody_joins_says_so() -> None:
    how = {"coordinator_address": address(), "num_processes": 2, "process_id": 0, "initialization_timeout": 2}
    ended = end(begin("-c", f"import jaxrl.cli.joining; jaxrl.cli.joining.join({how}, 2)"))
    assert ended.code == 7
    (line,) = ended.errors
    assert line.startswith("error: the other processes of the run have not come")


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process believe that it is the first of two."""
    jax.devices()  # JAX has begun, alone
    state = SimpleNamespace(client=object(), num_processes=2, process_id=0)
    monkeypatch.setattr(distributed, "global_state", state)


def strategy(**settings: Any) -> jaxrl.Strategy:
    return jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(4,)), num_envs=6, **settings)


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jaxrl.Trainer(jaxrl.population(strategy(), seeds=2)), "a population takes one process"),
        (lambda: jaxrl.Session(jaxrl.make_env("CartPole-v1"), jaxrl.ppo()), "a session takes one process"),
        (lambda: jaxrl.Trainer(strategy(actors=jaxrl.ActorsConfig(actors=1))), "actors, .* takes one process"),
        (lambda: jaxrl.Trainer(strategy(shards=3), devices=4), "devices is 4, but the 2 processes of the run have 1"),
    ],
)
def test_what_takes_one_process_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make()
