"""Sizes in a stranger's run directory: none is believed, so none can take all memory or abort the process."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_damage import compiled_once, rewrite_manifest, small_run
from test_hostile import mend

import jaxrl
from jaxrl import evaluate, export, train, verify
from jaxrl.errors import JaxrlError

ROOM = 3 << 30
"""Bytes of address space that a process may take beside what it has: enough for a run, too little for a lie."""
HUGE = 10**13


def of_arrays(checkpoint: Path, **changed: Any) -> None:
    """Rewrite what the arrays of a checkpoint say of themselves."""
    for file in (checkpoint / "arrays").glob("*/.zarray"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    mend(checkpoint)


def of_tree(checkpoint: Path, **changed: Any) -> None:
    """Rewrite what a checkpoint says of its tree of arrays."""
    file = checkpoint / "arrays/_METADATA"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    mend(checkpoint)


def told_alike(checkpoint: Path) -> None:
    """Give a leaf a size that manifest, array and seal agree on, with a checksum that nobody will come to."""
    rewrite_manifest(checkpoint, lambda manifest: manifest["leaves"][0].update(shape=[HUGE], dtype="uint8"))
    of_arrays(checkpoint, shape=[HUGE], chunks=[HUGE])


def bomb(checkpoint: Path) -> None:
    """Put 4 GB of zeros, in blocks of 128 KiB that take 4 bytes each, in place of a chunk (RFC 8878)."""
    blocks = 1 << 15
    block = lambda last: ((1 << 20) | 2 | last).to_bytes(3, "little") + b"\0"
    frame = bytes.fromhex("28b52ffd0038") + block(0) * (blocks - 1) + block(1)
    min(checkpoint.glob("arrays/*/0")).write_bytes(frame)
    mend(checkpoint)


def sparse(pattern: str) -> Callable[[Path], None]:
    """Make a file of 1 TB that takes no place on the disk."""

    def spoil(checkpoint: Path) -> None:
        name = str(min(checkpoint.glob(pattern)).relative_to(checkpoint))
        os.truncate(checkpoint / name, 10**12)
        listed = json.loads((checkpoint / "files.json").read_text()) if name != "files.json" else {}
        if listed:
            (checkpoint / "files.json").write_text(json.dumps({**listed, name: [10**12, 0]}))

    return spoil


SIZES: dict[str, Callable[[Path], None]] = {
    "shape": lambda at: of_arrays(at, shape=[HUGE]),
    "chunks": lambda at: of_arrays(at, chunks=[HUGE]),
    "both": lambda at: of_arrays(at, shape=[HUGE], chunks=[HUGE]),
    "10 GB": lambda at: of_arrays(at, shape=[10**10], chunks=[10**10]),
    "many chunks": lambda at: of_arrays(at, shape=[10**9], chunks=[1]),
    "beyond 64 bits": lambda at: of_arrays(at, shape=[10**30], chunks=[10**30]),
    "more dimensions": lambda at: of_arrays(at, shape=[HUGE, HUGE], chunks=[HUGE, 1]),
    "negative": lambda at: of_arrays(at, shape=[-1], chunks=[-1]),
    "dtype": lambda at: of_arrays(at, dtype=f"|S{1 << 40}"),
    "structure": lambda at: of_arrays(at, dtype=[["a", "<f8", [1 << 30]]]),
    "fill value": lambda at: of_arrays(at, fill_value=1),
    "compressor": lambda at: of_arrays(at, compressor={"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}),
    "told alike": told_alike,
    "bomb": bomb,
    "another form": lambda at: of_tree(at, use_zarr3=True),
    "a database": lambda at: of_tree(at, use_ocdbt=True),
    "other arrays": lambda at: of_tree(at, tree_metadata={"('a',)": {"key_metadata": []}}),
    "sparse chunk": sparse("arrays/*/0"),
    "sparse array": sparse("arrays/*/.zarray"),
    "sparse tree": sparse("arrays/_METADATA"),
    "sparse manifest": sparse("manifest.json"),
    "sparse list": sparse("files.json"),
}
DOORS: dict[str, Callable[[Path], Any]] = {
    "best": lambda run: jaxrl.load_policy(run),
    "latest": lambda run: jaxrl.load_policy(run, step="latest"),
    "verify": lambda run: verify.main([str(run)]),
    "resume": lambda run: train.main(["--resume", str(run)]),
    "fork": lambda run: train.main(["--resume", str(run), "--from-step", "latest", "--run-dir", f"{run}-fork"]),
    "init_from": lambda run: train.main(["dqn", *FLAGS, "--init-from", str(run), "--run-dir", f"{run}-new"]),
    "export": lambda run: export.main([str(run), "--out", f"{run}-policy"]),
    "evaluate": lambda run: evaluate.main([str(run), "--episodes", "1"]),
}
FLAGS = ("--env", "CartPole-v1", "--agent.features", "4", "--max-opts", "10", "--quiet")


def spoiled(run: Path, name: str) -> Path:
    for checkpoint in (*(run / "checkpoints").iterdir(), *(run / "best").iterdir()):
        SIZES[name](checkpoint)
    return run


def go_through(root: Path, doors: list[str]) -> None:
    """Go through these doors of all runs below `root` with little memory; print a line before and one after each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    with compiled_once():
        for run in sorted(root.iterdir()):
            for door in doors:
                print(f"through {run.name}: {door}", flush=True)
                print(f"came {outcome(DOORS[door], run)}", flush=True)


def outcome(through: Callable[[Path], Any], run: Path) -> str:
    try:
        return f"code {through(run)}" if through is DOORS["verify"] else f"used {through(run)}"
    except JaxrlError as error:
        return f"code {error.exit_code}" + (" in several lines" if "\n" in str(error) else "")


FEW = ["both", "many chunks", "told alike", "bomb", "a database", "sparse manifest"]


@pytest.mark.every_day("few")
@pytest.mark.parametrize(
    ("sizes", "doors"), [(FEW, ["latest", "verify", "resume"]), ([*SIZES], [*DOORS])], ids=["few", "all"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
def test_no_size_in_a_strangers_run_is_believed(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, sizes: list[str], doors: list[str]
) -> None:
    small = small_run(tmp_path_factory)
    for name in sizes:
        spoiled(small.copy(tmp_path / "runs" / name), name)
    here = Path(__file__).parent
    code = "import sys, test_hostile_sizes as t; t.go_through(t.Path(sys.argv[1]), sys.argv[2:])"
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "runs"), *doors],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("through", "came"))]
    assert done.returncode == 0, (lines[-1], done.stderr[-2000:])
    found = dict(zip(lines[::2], lines[1::2], strict=True))
    assert len(found) == len(sizes) * len(doors)
    assert {name: came for name, came in found.items() if came not in ("came code 2", "came code 6")} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shape", "both", "told alike", "many chunks"])
def test_the_front_doors_end_with_one_line(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, name: str) -> None:
    run = spoiled(small_run(tmp_path_factory).copy(tmp_path / "run"), name)
    for door in (["verify", run], ["train", "--resume", run], ["evaluate", run, "--episodes", "1"]):
        done = subprocess.run([sys.executable, "-m", f"jaxrl.{door[0]}", *map(str, door[1:])], capture_output=True)
        assert done.returncode == 6
        assert b"Traceback" not in done.stderr
