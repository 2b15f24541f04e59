"""Strangers' run directories, and a process that reads them in all ways: `python hostile_run.py ROOT READERS`.

It tells what code was run over the directories in ROOT/hostile, and how far those in ROOT/sizes came with READERS.
"""

import hashlib
import importlib
import json
import os
import pickle
import resource
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from built import built_once, no_cache_of_the_user
from small_run import NEWEST, mend, rewrite_manifest

import jaxrl
from jaxrl import evaluate, export, train, verify
from jaxrl.errors import JaxrlError
from jaxrl.loading import load_policy
from jaxrl.training.storage.checkpoints import FILES

Reader = Callable[[Path], Any]
READERS: dict[str, Reader] = {
    "load_policy": lambda run: evaluate.env_of(load_policy(run)),
    "verify": lambda run: verify.main([str(run)]),
    "train": lambda run: train.main(["--resume", str(run)]),
}


def go(reader: str, run: Path) -> str | None:
    """Read a run; return the one line of a refusal, or nothing. Any other exception is the test's failure."""
    try:
        READERS[reader](run)
    except JaxrlError as error:
        refusal = str(error)
    else:
        return None
    assert "\n" not in refusal
    return refusal


# Marker files are made in the working directory by whatever code of a stranger is run.
TOUCH = "open('executed', 'a').close()"


class Payload:
    """Pickled, it leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (TOUCH,))


def checkpoints_of(run: Path) -> list[Path]:
    return [*(run / "checkpoints").iterdir(), *(run / "best").iterdir()]


def replace_line(run: Path, name: str, value: str) -> None:
    """Replace a setting in the run's file of settings, and in the checkpoints' own copy of it."""
    config = run / "config.yaml"
    lines = [f"{name}: {value}" if line.startswith(f"{name}:") else line for line in config.read_text().splitlines()]
    config.write_text("\n".join(lines) + "\n")


# --- code of a stranger ------------------------------------------------------------------------------------------


def yaml_tags(run: Path) -> None:
    config = run / "config.yaml"
    tag = f'!!python/object/apply:builtins.exec ["{TOUCH}"]'
    config.write_text(config.read_text() + f"env_args: {tag}\nseed: {tag}\nthing: !!python/name:os.system\n")


def pickled_json(run: Path) -> None:
    (run / "metadata.json").write_bytes(pickle.dumps(Payload()))
    for log in ("metrics.jsonl", "eval_episodes.jsonl"):
        (run / log).write_bytes(pickle.dumps(Payload(), protocol=0) + b"\n")
    for checkpoint in checkpoints_of(run):
        (checkpoint / "manifest.json").write_bytes(pickle.dumps(Payload()))
        mend(checkpoint)


def pickled_settings(run: Path) -> None:
    (run / "config.yaml").write_bytes(pickle.dumps(Payload(), protocol=0))


def chunks_of(checkpoint: Path) -> list[Path]:
    """Return the files with the numbers of its arrays."""
    found = [file for file in (checkpoint / "arrays").glob("*/*") if file.name != ".zarray"]
    assert found
    return found


def pickled_arrays(run: Path) -> None:
    for checkpoint in checkpoints_of(run):
        for file in chunks_of(checkpoint):
            file.write_bytes(pickle.dumps(Payload()))
        mend(checkpoint)


def pickled_lists(run: Path) -> None:
    for checkpoint in checkpoints_of(run):
        (checkpoint / FILES).write_bytes(pickle.dumps(Payload()))


def object_arrays(run: Path) -> None:
    for checkpoint in checkpoints_of(run):
        for file in chunks_of(checkpoint):
            with open(file, "wb") as out:
                np.save(out, np.array([Payload()], dtype=object), allow_pickle=True)
            shutil.copy(file, file.with_suffix(".npy"))
        mend(checkpoint)


def deep_nesting(run: Path) -> None:
    (run / "metadata.json").write_text("[" * 100_000)
    (run / "metrics.jsonl").write_text('{"a":' * 100_000 + "\n")
    for checkpoint in checkpoints_of(run):
        (checkpoint / "manifest.json").write_text('{"facts":' * 100_000)
        mend(checkpoint)


def deep_settings(run: Path) -> None:
    (run / "config.yaml").write_text("env: " + "[" * 20_000)


def huge_numbers(run: Path) -> None:
    for checkpoint in checkpoints_of(run):
        rewrite_manifest(checkpoint, _huge)
    replace_line(run, "max_opts", "9" * 4000)


def _huge(manifest: dict[str, Any]) -> None:
    for leaf in manifest["leaves"]:
        leaf["shape"] = [10**18, 10**18]
    manifest["facts"]["score"] = 10**400


def modules(run: Path) -> None:
    for folder in (run, *checkpoints_of(run)):
        for name in ("json", "yaml", "numpy", "jaxrl", "orbax", "gymnax", "sitecustomize", "conftest", "__init__"):
            (folder / f"{name}.py").write_text(TOUCH)
        (folder / "jaxrl").mkdir()
        (folder / "jaxrl" / "__init__.py").write_text(TOUCH)
        (folder / "import.pth").write_text(f"import os; {TOUCH}\n")
    for checkpoint in checkpoints_of(run):
        mend(checkpoint)


def object_dtypes(run: Path) -> None:
    for dtype, checkpoint in zip(("object", "O", "|O8", "object"), checkpoints_of(run), strict=True):
        rewrite_manifest(checkpoint, lambda manifest, dtype=dtype: manifest["leaves"][0].update(dtype=dtype))


def hostile_facts(run: Path) -> None:
    code = f"__import__('os').system({TOUCH!r})"
    for checkpoint in checkpoints_of(run):
        rewrite_manifest(checkpoint, lambda manifest: manifest["facts"]["settings"].update(algo=code, custom=[code]))
    rewrite_manifest(run / "checkpoints" / str(NEWEST), lambda manifest: manifest["facts"].update(ledger={code: code}))


def names_of_code(run: Path) -> None:
    (run / "evil.py").write_text(TOUCH)
    for checkpoint in checkpoints_of(run):
        rewrite_manifest(checkpoint, lambda manifest: manifest["facts"]["settings"].update(env=str(run / "evil.py")))
    replace_line(run, "env", str(run / "evil.py"))


def names_of_handlers(run: Path) -> None:
    for checkpoint in checkpoints_of(run):
        tree = (checkpoint / "arrays" / "_METADATA").read_text()
        (checkpoint / "arrays" / "_METADATA").write_text(tree.replace("np.ndarray", "os.system"))
        mend(checkpoint)


HOSTILE: list[Callable[[Path], None]] = [
    *(yaml_tags, pickled_json, pickled_settings, pickled_arrays, pickled_lists, object_arrays, deep_nesting),
    *(deep_settings, huge_numbers, modules, object_dtypes, hostile_facts, names_of_code, names_of_handlers),
]


# --- sizes, of which none is true --------------------------------------------------------------------------------

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
BY_SIZE: dict[str, Reader] = {
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


def go_through(root: Path, readers: list[str]) -> dict[str, str]:
    """Read all runs below `root` with little memory; print a line before each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    found = {}
    for run in sorted(root.iterdir()):
        for reader in readers:
            print(f"through {run.name}: {reader}", flush=True)
            found[f"{run.name}: {reader}"] = outcome(BY_SIZE[reader], run)
    return found


FEW = ["both", "many chunks", "told alike", "bomb", "a database", "sparse manifest"]


def outcome(through: Callable[[Path], Any], run: Path) -> str:
    try:
        return f"code {through(run)}" if through is BY_SIZE["verify"] else f"used {through(run)}"
    except JaxrlError as error:
        return f"code {error.exit_code}" + (" in several lines" if "\n" in str(error) else "")


# --- the process -------------------------------------------------------------------------------------------------

WATCHED = {
    *("exec", "marshal.loads", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork"),
    *("os.posix_spawn", "os.spawn", "ctypes.dlopen", "socket.connect", "socket.getaddrinfo"),
}


def audit(root: Path) -> dict[str, Any]:
    """Read, in all ways, all run directories below `root`, first the harmless ones; return what was run.

    To be called in a process of its own: an audit hook stays for good.
    """
    seen: set[tuple[str, str]] = set()
    sys.addaudithook(lambda event, args: seen.add((event, _describe(event, args))) if event in WATCHED else None)

    def during(action: Callable[[], Any]) -> list[tuple[str, str]]:
        before = set(seen)
        action()
        return sorted(seen - before)

    control = during(lambda: pickle.loads(pickle.dumps(Payload())))
    Path("executed").unlink()
    told: dict[str, Any] = {"control": [event for event, _ in control], "ran": {}, "said": {}, "loaded": []}
    importlib.import_module("gymnax").registered_envs  # noqa: B018 - all of gymnax, which a strange name asks for
    importlib.import_module("jaxrl.envs.memory")  # whose names it is compared with
    for run in sorted((root / "harmless").iterdir()):
        for reader in READERS:
            assert go(reader, run) is None
    for run in sorted((root / "hostile").iterdir()):
        for reader in READERS:
            name = f"{run.name} {reader}"
            told["ran"][name] = during(lambda reader=reader, run=run, name=name: _say(told, name, reader, run))
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    told["loaded"] = [name for name, file in files.items() if file.startswith(str(root))]
    return told


def _say(told: dict[str, Any], name: str, reader: str, run: Path) -> None:
    try:
        told["said"][name] = go(reader, run)
    except Exception as error:
        told["said"][name] = f"not refused in one line: {type(error).__name__}: {error}"[:300]


def _describe(event: str, args: tuple[Any, ...]) -> str:
    """Return what tells one piece of code from another."""
    if event == "exec" and isinstance(args[0], types.CodeType):
        return f"{args[0].co_filename} {args[0].co_name} {hashlib.sha256(args[0].co_code).hexdigest()[:12]}"
    if event == "marshal.loads":
        return hashlib.sha256(bytes(args[0])).hexdigest()[:12] if isinstance(args[0], bytes) else "a file"
    return repr(args)[:300]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with built_once(), no_cache_of_the_user():
        told = audit(root)
        told["sizes"] = go_through(root / "sizes", sys.argv[2:])
    print("\n" + json.dumps(told))
