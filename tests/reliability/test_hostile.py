"""A run directory from a stranger: loading it runs no code of his, and nothing outside it is read or written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_run import DOORS, HOSTILE, go
from small_run import BEFORE, LAST, NEWEST, SmallRun, contents, rewrite_manifest, take_up

from jaxrl import train
from jaxrl.errors import SettingsError
from jaxrl.loading import load_policy
from jaxrl.training.ledger import PARTS
from jaxrl.training.storage.checkpoints import FILES, file_sums


@pytest.mark.slow
def test_the_hook_sees_code_of_a_pickle(strangers: dict[str, Any]) -> None:
    assert {"exec", "pickle.find_class"} <= set(strangers["control"])


@pytest.mark.every_day("yaml_tags", "pickled_json", "object_arrays", "deep_nesting", "modules", "names_of_code")
@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_a_strangers_run_directory_runs_no_code_and_is_used_or_refused_in_one_line(
    strangers: dict[str, Any], spoil: Callable[[Path], None]
) -> None:
    for door in DOORS:
        assert strangers["ran"][f"{spoil.__name__} {door}"] == []
        assert not (strangers["said"][f"{spoil.__name__} {door}"] or "").startswith("not refused in one line")


def test_no_module_is_imported_from_a_strangers_run_directory(strangers: dict[str, Any]) -> None:
    assert strangers["loaded"] == []


# --- facts of strange types, under a right seal ------------------------------------------------------------------


def ledger(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["facts"]["ledger"].update(values)


def facts(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["facts"].update(values)


def leaf(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["leaves"][0].update(values)


STRANGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "facts are a list": lambda manifest: manifest.update(facts=[]),
    "facts are null": lambda manifest: manifest.update(facts=None),
    "facts are empty": lambda manifest: manifest.update(facts={}),
    "settings are text": facts(settings="x"),
    "settings are a list": facts(settings=[1]),
    "versions are a number": facts(versions=3),
    "ledger is a list": facts(ledger=[]),
    "ledger is null": facts(ledger=None),
    "ledger t is text": ledger(t="7"),
    "ledger t is negative": ledger(t=-1),
    "ledger t is a fraction": ledger(t=1.5),
    "ledger t is huge": ledger(t=10**30),
    "ledger t is null": ledger(t=None),
    "ledger score is text": ledger(best_score="high"),
    "ledger evaluations are text": ledger(evals_without_best="x"),
    "ledger interval is text": ledger(interval_start="x"),
    "ledger seconds are a list": ledger(seconds=[]),
    "ledger seconds are text": ledger(seconds={**dict.fromkeys(PARTS, 0.0), "train": "x"}),
    "ledger seconds lack a part": ledger(seconds={"train": 1.0}),
    "ledger wall time is text": ledger(wall_s="x"),
    "ledger rollbacks are text": ledger(rollbacks="x"),
    "ledger has an unknown entry": ledger(__class__="os.system"),
    "leaves are text": lambda manifest: manifest.update(leaves="x"),
    "leaves are numbers": lambda manifest: manifest.update(leaves=[1, 2]),
    "leaf without a path": lambda manifest: manifest["leaves"][0].pop("path"),
    "leaf path is a list": leaf(path=[]),
    "leaf shape is negative": leaf(shape=[-1]),
    "leaf shape is text": leaf(shape="x"),
    "leaf shape is huge": leaf(shape=[10**18]),
    "leaf dtype is a list": leaf(dtype=[["a", "O"]]),
    "leaf dtype is no name": leaf(dtype="os.system"),
    "step is text": lambda manifest: manifest.update(step=str(NEWEST)),
    "step is a path": lambda manifest: manifest.update(step="../../victim"),
    "format is a list": lambda manifest: manifest.update(format=[2]),
}


@pytest.mark.every_day("leaf shape is huge", "leaf path is a list", "step is a path")
@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
@pytest.mark.parametrize("strange", STRANGE)
def test_a_checkpoint_with_strange_facts_is_used_rightly_or_refused_in_one_line(
    small: SmallRun, run: Path, strange: str
) -> None:
    rewrite_manifest(run / "checkpoints" / str(NEWEST), STRANGE[strange])
    go("verify", run)
    if go("train", run) is None:
        assert small.digest(run, LAST) == small.digests[LAST]


def setting(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["facts"]["settings"].update(values)


def spec(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["facts"]["spec"].update(values)


STRANGE_BEST: dict[str, Callable[[dict[str, Any]], Any]] = {
    "facts are a list": lambda manifest: manifest.update(facts=[]),
    "facts are empty": lambda manifest: manifest.update(facts={}),
    "score is missing": lambda manifest: manifest["facts"].pop("score"),
    "score is text": facts(score="high"),
    "score is null": facts(score=None),
    "settings are text": facts(settings="x"),
    "settings without an environment": lambda manifest: manifest["facts"]["settings"].pop("env"),
    "environment is a list": setting(env=[]),
    "environment is a path": setting(env="../../victim/evil.py"),
    "environment's arguments are text": setting(env_args="x"),
    "environment's argument is called name": setting(env_args={"name": "x"}),
    "custom is a number": setting(custom=3),
    "algorithm is a list": setting(algo=[]),
    "agent is text": setting(agent="x"),
    "agent is of nothing known": setting(agent={"__class__": "os.system"}),
    "processor is a list": setting(processor=[]),
    "spec is null": facts(spec=None),
    "spec has an unknown entry": spec(evil=1),
    "space is text": spec(observation_space="x"),
    "space is of an unknown kind": spec(observation_space={"os.system": {}}),
    "space is of two kinds": spec(action_space={"Box": {}, "Discrete": {}}),
    "space has another shape": spec(observation_space={"Box": {"low": 0, "high": 1, "shape": [9], "dtype": "float32"}}),
    "space has a strange dtype": spec(
        observation_space={"Box": {"low": 0, "high": 1, "shape": [4], "dtype": "object"}}
    ),
    "space has no actions": spec(action_space={"Discrete": {"n": 0, "dtype": "int32"}}),
    "space has huge numbers": spec(action_space={"Discrete": {"n": 10**30, "dtype": "int32"}}),
}


@pytest.mark.every_day(
    "environment is a path", "environment's argument is called name", "score is null", "space has huge numbers"
)
@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
@pytest.mark.parametrize("strange", STRANGE_BEST)
def test_a_best_policy_with_strange_facts_is_used_or_refused_in_one_line(
    small: SmallRun, run: Path, strange: str
) -> None:
    (best,) = (run / "best").iterdir()
    rewrite_manifest(best, STRANGE_BEST[strange])
    go("verify", run)
    go("load_policy", run)
    assert go("train", run) is None
    assert small.digest(run, LAST) == small.digests[LAST]


# --- links, and other ways out of the directory ------------------------------------------------------------------


@pytest.fixture
def victim(small: SmallRun, run: Path) -> Iterator[Path]:
    """A directory beside the run that must stay as it is: another's run, of the same settings, further on."""
    path = small.copy(run.parent / "victim")
    (path / "notes.txt").write_text("mine")
    before = contents(path)
    yield path
    assert contents(path) == before


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """End a test that waits for ever, for a writer to a pipe say."""
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waited for ever"))
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


LINKS = [
    *("checkpoints", f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json", f"checkpoints/{NEWEST}/arrays"),
    *(f"checkpoints/{NEWEST}/manifest.json", f"checkpoints/{BEFORE}", "best", "best/20", "best/20/arrays"),
    *("metrics.jsonl", "eval_episodes.jsonl", ".lock", "config.yaml", "metadata.json", "tensorboard"),
    *("discarded-1", "checkpoints/50", "checkpoints/5.removed", ".config.yaml.tmp", "notes.txt"),
]


EVERY_DAY = (
    *(f"{name}-the same of another run" for name in (f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json")),
    *(f"{name}-the same of another run" for name in ("best/20/arrays", ".lock", "config.yaml", "tensorboard")),
    *("metrics.jsonl-nothing", "best-the directory itself"),
)
"""The links of the ordinary tests."""


@pytest.mark.every_day(*EVERY_DAY)
@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, "the same of another run") for name in LINKS),
        *((name, to) for name in ("metrics.jsonl", "best") for to in ("nothing", "the directory itself")),
    ],
)
def test_a_link_anywhere_is_refused_by_name_at_every_door(run: Path, name: str, to: str) -> None:
    entry = run / name
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    outside = run.parent / "victim"
    target = {"nothing": outside / "new", "the directory itself": run}.get(to, outside / name)
    entry.symlink_to(target if target.exists() or to == "nothing" else outside)
    for door in DOORS:
        said = go(door, run)
        assert said is not None
        assert f"{entry} is a link" in said
    for args in (["--start-over"], ["--allow-changes"]):
        with pytest.raises(SettingsError, match="is a link"):
            train.main(["--resume", str(run), *args])
    assert entry.is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval_episodes.jsonl", ".lock"])
def test_a_log_with_a_second_name_outside_is_refused_by_name(run: Path, victim: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).hardlink_to(victim / "notes.txt")
    said = go("train", run)
    assert said is not None
    assert name in said
    assert "hard link" in said


def test_files_with_a_second_name_outside_are_never_changed_there(
    small: SmallRun, run: Path, victim: Path, tmp_path: Path
) -> None:
    for file in [file for file in run.rglob("*") if file.is_file()]:
        if file.name not in ("metrics.jsonl", "eval_episodes.jsonl", ".lock"):
            second = victim / file.relative_to(run)
            if second.exists():
                file.unlink()
                file.hardlink_to(second)
    assert (run / "config.yaml").stat().st_nlink == 2
    assert go("train", run) is None
    assert small.digest(run, LAST) == small.digests[LAST]
    train.main(["--resume", str(run), "--start-over", "--keep", "1", "--max-opts", "10"])


@pytest.mark.every_day("metrics.jsonl", ".lock", "config.yaml", f"checkpoints/{NEWEST}/manifest.json")
@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "eval_episodes.jsonl", ".lock", "config.yaml", "metadata.json", "tensorboard/pipe"),
        *(f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json", f"checkpoints/{NEWEST}/manifest.json"),
    ],
)
def test_a_pipe_is_refused_by_name_at_every_door_and_nobody_waits_for_it(run: Path, name: str) -> None:
    entry = run / name
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    os.mkfifo(entry)
    for door in DOORS:
        said = go(door, run)
        assert said is not None
        assert f"{entry} is neither a file nor a directory" in said


@pytest.mark.parametrize("name", ["../../../victim/notes.txt", "{victim}/notes.txt", "../20/files.json"])
def test_a_list_of_files_that_names_others_is_no_list(small: SmallRun, run: Path, victim: Path, name: str) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    # With size and checksum of the file outside: it would be found whole if it were read.
    sums = file_sums(newest) | {name.format(victim=victim): file_sums(victim)["notes.txt"]}
    (newest / FILES).write_text(json.dumps(sums))
    taken = take_up(small, run)
    assert (taken.step, taken.digest) == (BEFORE, small.digests[BEFORE])
    (said,) = taken.warnings
    assert re.search(f"checkpoints/{NEWEST} is passed over: its file .* is missing", said)


@pytest.mark.usefixtures("victim")
@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
def test_checkpoints_of_strange_names_are_never_taken(small: SmallRun, run: Path) -> None:
    (best,) = (run / "best").iterdir()
    policy = load_policy(run)
    for name in ("007", "+35", " 35", "35 ", "3_5", "-35", "\u0663\u0665", "35.0", "3e1", "..35", "9" * 200):
        shutil.copytree(run / "checkpoints" / "10", run / "checkpoints" / name)
        if name != "9" * 200:
            shutil.copytree(best, run / "best" / name)
    assert load_policy(run).facts == policy.facts
    assert take_up(small, run).step == NEWEST
    assert go("train", run) is None
    assert small.digest(run, LAST) == small.digests[LAST]


@pytest.mark.parametrize("where", ["../victim", "{victim}", ".", "/"])
def test_settings_that_name_another_directory_are_refused(run: Path, victim: Path, where: str) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text() + f"run_dir: {where.format(victim=victim)}\n")
    before = contents(run)
    with pytest.raises(SettingsError, match="goes on in that directory"):
        train.main(["--resume", str(run)])
    assert contents(run) == before


@pytest.mark.skipif(os.name != "posix", reason="owners are a matter of this system")
def test_a_run_directory_that_may_not_be_read_is_refused_in_one_line(run: Path) -> None:
    nobody: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        for parent in (run, *run.parents):
            if parent.stat().st_uid == 0 and str(parent).startswith(("/tmp/", "/dev/shm/")):
                parent.chmod(0o755)
        try:
            started = subprocess.run([sys.executable, "-c", "import jaxrl"], capture_output=True, **nobody).returncode
        except PermissionError:
            started = 1
        if started != 0:
            pytest.skip("no other user can start this interpreter")
    run.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl.verify", str(run)], capture_output=True, text=True, cwd="/", **nobody
        )
    finally:
        run.chmod(0o755)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot read {run}")
    assert len(done.stderr.splitlines()) == 1
