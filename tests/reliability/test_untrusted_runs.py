"""A run directory from a stranger: loading it runs no code of his, and nothing outside it is read or written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile_run import BY_SIZE, FEW, HOSTILE, READERS, SIZES, go
from small_run import BEFORE, LAST, NEWEST, SmallRun, resume, rewrite_manifest
from toys_runs import contents

from jaxrl import train
from jaxrl.errors import SettingsError
from jaxrl.loading import load_policy
from jaxrl.training.ledger import PARTS
from jaxrl.training.storage.checkpoints import FILES, file_sums


@pytest.mark.every_day("yaml_tags", "pickled_json", "object_arrays", "deep_nesting", "modules", "names_of_code")
@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_a_strangers_run_directory_runs_no_code_and_is_used_or_refused_in_one_line(
    strangers: dict[str, Any], spoil: Callable[[Path], None]
) -> None:
    for reader in READERS:
        assert strangers["ran"][f"{spoil.__name__} {reader}"] == []
        assert not (strangers["said"][f"{spoil.__name__} {reader}"] or "").startswith("not refused in one line")


def test_no_module_is_imported_from_a_strangers_run_directory(strangers: dict[str, Any]) -> None:
    assert strangers["loaded"] == []


@pytest.mark.every_day("few")
@pytest.mark.parametrize(
    ("sizes", "readers"), [(FEW, ["latest", "verify", "resume"]), ([*SIZES], [*BY_SIZE])], ids=["few", "all"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
def test_no_size_in_a_strangers_run_is_believed(
    strangers: dict[str, Any], sizes: list[str], readers: list[str]
) -> None:
    """So none can take all memory, or abort the process."""
    found = {name: came for name, came in strangers["sizes"].items() if came not in ("code 2", "code 6")}
    assert {f"{size}: {reader}" for size in sizes for reader in readers} <= strangers["sizes"].keys()
    assert found == {}


# --- facts of strange types, under a right seal ------------------------------------------------------------------


GONE = object()
"""In place of a value: the entry is not there."""
Strange = tuple[str, Any]
"""An entry of a manifest by its path, and its value."""


def put(manifest: Any, strange: Strange) -> None:
    path, value = strange
    *groups, last = [int(word) if word.isdecimal() else word for word in path.split(".")]
    for group in groups:
        manifest = manifest[group]
    if value is GONE:
        del manifest[last]
    else:
        manifest[last] = value


def cases(table: dict[str, Sequence[Any]]) -> dict[str, Strange]:
    """Return one case for each value, by its name."""
    said = lambda value: "gone" if value is GONE else repr(value)[:40]
    return {f"{path} {said(value)}": (path, value) for path, values in table.items() for value in values}


STRANGE = cases(
    {
        "facts": ([], None, {}),
        "facts.settings": ("x", [1], None),
        "facts.settings.seed": (10**40,),
        "facts.noted": (None, {"loss": [10**400, 1]}),
        "facts.versions": (3,),
        "facts.ledger": ([], None),
        "facts.ledger.t": ("7", -1, 1.5, 10**30, None),
        "facts.ledger.best_score": ("high",),
        "facts.ledger.evals_without_best": ("x",),
        "facts.ledger.interval_start": ("x",),
        "facts.ledger.seconds": ([], {**dict.fromkeys(PARTS, 0.0), "train": "x"}, {"train": 1.0}),
        "facts.ledger.wall_s": ("x",),
        "facts.ledger.rollbacks": ("x",),
        "facts.ledger.__class__": ("os.system",),
        "leaves": ("x", [1, 2]),
        "leaves.0.path": (GONE, []),
        "leaves.0.shape": ([-1], "x", [10**18]),
        "leaves.0.dtype": ([["a", "O"]], "os.system"),
        "step": (str(NEWEST), "../../victim"),
        "format": ([2],),
    }
)


@pytest.mark.every_day("leaves.0.shape [1000000000000000000]", "leaves.0.path []", "step '../../victim'")
@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_a_checkpoint_with_strange_facts_is_used_rightly_or_refused_in_one_line(
    small: SmallRun, run: Path, strange: Strange
) -> None:
    rewrite_manifest(run / "checkpoints" / str(NEWEST), lambda manifest: put(manifest, strange))
    go("verify", run)
    if go("train", run) is None:
        assert small.digest(run, LAST) == small.digests[LAST]


BOX = {"low": 0, "high": 1, "shape": [4], "dtype": "float32"}
STRANGE_BEST = cases(
    {
        "facts": ([], {}),
        "facts.score": (GONE, "high", None),
        "facts.settings": ("x",),
        "facts.settings.env": (GONE, [], "../../victim/evil.py"),
        "facts.settings.env_args": ("x", {"name": "x"}),
        "facts.settings.custom": (3,),
        "facts.settings.algo": ([],),
        "facts.settings.agent": ("x", {"__class__": "os.system"}),
        "facts.settings.processor": ([],),
        "facts.spec": (None,),
        "facts.spec.evil": (1,),
        "facts.spec.observation_space": ("x", {"os.system": {}}),
        "facts.spec.observation_space.Box": ({**BOX, "shape": [9]}, {**BOX, "dtype": "object"}),
        "facts.spec.action_space": ({"Box": {}, "Discrete": {}},),
        "facts.spec.action_space.Discrete": ({"n": 0, "dtype": "int32"}, {"n": 10**30, "dtype": "int32"}),
    }
)


@pytest.mark.every_day(
    "facts.settings.env '../../victim/evil.py'", "facts.settings.env_args {'name': 'x'}", "facts.score None",
    "facts.spec.action_space.Discrete {'n': 1000000000000000000000000000000, '",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
@pytest.mark.parametrize("strange", STRANGE_BEST.values(), ids=STRANGE_BEST)
def test_a_best_policy_with_strange_facts_is_used_or_refused_in_one_line(
    small: SmallRun, run: Path, strange: Strange
) -> None:
    (best,) = (run / "best").iterdir()
    rewrite_manifest(best, lambda manifest: put(manifest, strange))
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


OTHERS_OWN, NOTHING, ITSELF, PIPE = "the same of another run", "nothing", "the directory itself", "a pipe"
LINKS = [
    *("checkpoints", f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json", f"checkpoints/{NEWEST}/arrays"),
    *(f"checkpoints/{NEWEST}/manifest.json", f"checkpoints/{BEFORE}", "best", "best/20", "best/20/arrays"),
    *("metrics.jsonl", "eval_episodes.jsonl", ".lock", "config.yaml", "metadata.json", "tensorboard"),
    *("discarded-1", "checkpoints/50", "checkpoints/5.removed", ".config.yaml.tmp", "notes.txt"),
]
PIPES = [
    *("metrics.jsonl", "eval_episodes.jsonl", ".lock", "config.yaml", "metadata.json", "tensorboard/pipe"),
    *(f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json", f"checkpoints/{NEWEST}/manifest.json"),
]
EVERY_DAY = (
    *(f"{name}-{OTHERS_OWN}" for name in (f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/files.json")),
    *(f"{name}-{OTHERS_OWN}" for name in ("best/20/arrays", ".lock", "config.yaml", "tensorboard")),
    *(f"metrics.jsonl-{NOTHING}", f"best-{ITSELF}", f"metrics.jsonl-{PIPE}", f".lock-{PIPE}"),
    *(f"config.yaml-{PIPE}", f"checkpoints/{NEWEST}/manifest.json-{PIPE}"),
)
"""What stands where in the ordinary tests."""


@pytest.mark.every_day(*EVERY_DAY)
@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, OTHERS_OWN) for name in LINKS),
        *((name, what) for name in ("metrics.jsonl", "best") for what in (NOTHING, ITSELF)),
        *((name, PIPE) for name in PIPES),
    ],
)
def test_a_link_or_a_pipe_anywhere_is_refused_by_name_at_every_door_and_nobody_waits_for_it(
    run: Path, name: str, what: str
) -> None:
    entry, outside = run / name, run.parent / "victim"
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    if what == PIPE:
        os.mkfifo(entry)
    else:
        target = {NOTHING: outside / "new", ITSELF: run}.get(what, outside / name)
        entry.symlink_to(target if target.exists() or what == NOTHING else outside)
    said = f"{entry} is neither a file nor a directory" if what == PIPE else f"{entry} is a link"
    for reader in READERS:
        assert said in (go(reader, run) or "")
    for args in (["--start-over"], ["--allow-changes"]):
        with pytest.raises(SettingsError, match=re.escape(said)):
            train.main(["--resume", str(run), *args])
    assert entry.is_symlink() or entry.is_fifo()


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


@pytest.mark.parametrize("name", ["../../../victim/notes.txt", "{victim}/notes.txt", "../20/files.json"])
def test_a_list_of_files_that_names_others_is_no_list(small: SmallRun, run: Path, victim: Path, name: str) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    # With size and checksum of the file outside: it would be found whole if it were read.
    sums = file_sums(newest) | {name.format(victim=victim): file_sums(victim)["notes.txt"]}
    (newest / FILES).write_text(json.dumps(sums))
    taken = resume(small, run)
    assert (taken.step, taken.digest) == (BEFORE, small.digests[BEFORE])
    (said,) = taken.warnings
    assert re.search(f"checkpoints/{NEWEST} is skipped: its file .* is missing", said)


@pytest.mark.usefixtures("victim")
@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
def test_checkpoints_of_strange_names_are_never_taken(small: SmallRun, run: Path) -> None:
    (best,) = (run / "best").iterdir()
    policy = load_policy(run)
    for name in ("007", "+35", " 35", "35 ", "3_5", "-35", "\u0663\u0665", "35.0", "3e1", "..35", "9" * 200):
        shutil.copytree(run / "checkpoints" / "10", run / "checkpoints" / name)
        if name != "9" * 200:
            shutil.copytree(best, run / "best" / name)
    assert load_policy(run).facts == policy.facts
    assert resume(small, run).step == NEWEST
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
