"""A run directory from a stranger: loading it runs no code of his, and nothing outside it is read or written."""

import hashlib
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_damage import BEFORE, LAST, NEWEST, SmallRun, compiled_once, contents, rewrite_manifest, small_run, take_up

from jaxrl import evaluate, train, verify
from jaxrl.errors import JaxrlError, SettingsError
from jaxrl.loading import load_policy
from jaxrl.training.ledger import PARTS
from jaxrl.training.storage.checkpoints import FILES, file_sums

Door = Callable[[Path], Any]
DOORS: dict[str, Door] = {
    "load_policy": lambda run: evaluate.env_of(load_policy(run)),
    "verify": lambda run: verify.main([str(run)]),
    "train": lambda run: train.main(["--resume", str(run)]),
}


def go(door: str, run: Path) -> str | None:
    """Go through a door; return the one line of a refusal, or nothing. Any other exception is the test's failure."""
    try:
        DOORS[door](run)
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


def mend(checkpoint: Path) -> None:
    """Write the list of files of a checkpoint anew, so that its files are read further than to their checksums."""
    (checkpoint / FILES).write_text(json.dumps(file_sums(checkpoint)))


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


HOSTILE = [
    *(yaml_tags, pickled_json, pickled_settings, pickled_arrays, pickled_lists, object_arrays, deep_nesting),
    *(deep_settings, huge_numbers, modules, object_dtypes, hostile_facts, names_of_code, names_of_handlers),
]

WATCHED = {
    *("exec", "marshal.loads", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork"),
    *("os.posix_spawn", "os.spawn", "ctypes.dlopen", "socket.connect", "socket.getaddrinfo"),
}


def audit(root: Path) -> None:
    """Go through all doors of all run directories below `root`, first the harmless ones; print as JSON what was run.

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
    with compiled_once():
        for run in sorted((root / "harmless").iterdir()):
            for door in DOORS:
                assert go(door, run) is None
        for run in sorted((root / "hostile").iterdir()):
            for door in DOORS:
                name = f"{run.name} {door}"
                told["ran"][name] = during(lambda door=door, run=run, name=name: _say(told, name, door, run))
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    told["loaded"] = [name for name, file in files.items() if file.startswith(str(root))]
    print("\n" + json.dumps(told))


def _say(told: dict[str, Any], name: str, door: str, run: Path) -> None:
    try:
        told["said"][name] = go(door, run)
    except Exception as error:
        told["said"][name] = f"not refused in one line: {type(error).__name__}: {error}"[:300]


def _describe(event: str, args: tuple[Any, ...]) -> str:
    """Return what tells one piece of code from another."""
    if event == "exec" and isinstance(args[0], types.CodeType):
        return f"{args[0].co_filename} {args[0].co_name} {hashlib.sha256(args[0].co_code).hexdigest()[:12]}"
    if event == "marshal.loads":
        return hashlib.sha256(bytes(args[0])).hexdigest()[:12] if isinstance(args[0], bytes) else "a file"
    return repr(args)[:300]


@pytest.fixture(scope="module", autouse=True)
def share_programs() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return small_run(tmp_path_factory)


@pytest.fixture
def run(small: SmallRun, tmp_path: Path) -> Path:
    """A copy of the small run, for a stranger to alter."""
    return small.copy(tmp_path / "run")


@pytest.fixture(scope="module")
def audited(
    small: SmallRun, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What all doors did with the hostile run directories that tests to be run ask for; with all, if none does."""
    root = tmp_path_factory.mktemp("audit")
    for name in ("first", "second"):
        small.copy(root / "harmless" / name)
    cases = [item.name for item in request.session.items if item.get_closest_marker("skip") is None]
    asked = [spoil for spoil in HOSTILE if any(case.endswith(f"[{spoil.__name__}]") for case in cases)]
    for spoil in asked or HOSTILE:
        spoil(small.copy(root / "hostile" / spoil.__name__))
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys, test_hostile as t; t.audit(t.Path(sys.argv[1]))", str(root)],
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(root / "cache")},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not (root / "executed").exists()
    return told


@pytest.mark.slow
def test_the_hook_sees_code_of_a_pickle(audited: dict[str, Any]) -> None:
    assert {"exec", "pickle.find_class"} <= set(audited["control"])


@pytest.mark.every_day("yaml_tags", "pickled_json", "object_arrays", "deep_nesting", "modules", "names_of_code")
@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_a_strangers_run_directory_runs_no_code_and_is_used_or_refused_in_one_line(
    audited: dict[str, Any], spoil: Callable[[Path], None]
) -> None:
    for door in DOORS:
        assert audited["ran"][f"{spoil.__name__} {door}"] == []
        assert not (audited["said"][f"{spoil.__name__} {door}"] or "").startswith("not refused in one line")


def test_no_module_is_imported_from_a_strangers_run_directory(audited: dict[str, Any]) -> None:
    assert audited["loaded"] == []


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


@pytest.mark.every_day("environment is a path", "score is null", "space has huge numbers")
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


@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
@pytest.mark.parametrize("name", ["../../../victim/notes.txt", "{victim}/notes.txt", "../20/files.json"])
def test_a_list_of_files_that_names_others_is_no_list(small: SmallRun, run: Path, victim: Path, name: str) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    # With size and checksum of the file outside: it would be found whole if it were read.
    sums = file_sums(newest) | {name.format(victim=victim): file_sums(victim)["notes.txt"]}
    (newest / FILES).write_text(json.dumps(sums))
    with pytest.warns(UserWarning, match=f"checkpoints/{NEWEST} is passed over: its file .* is missing"):
        train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]


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
