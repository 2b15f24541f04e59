"""The law of the house: rooms import only to their left, pure rooms stay pure, and `import jaxrl` stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl"
ROOMS = [
    "foundations",
    "envs",
    "processors",
    "buffers",
    "agents",
    "strategies",
    "training",
    "algos",
    "config",
    "reports",
    "exporting",
    "front doors",
]
TRAINING = [
    {
        "changes",
        "devices",
        "divergence",
        "gap",
        "interrupt",
        "ledger",
        "memory",
        "mesh",
        "processes",
        "program",
        "reel",
        "sanity",
        "schedule",
        "settings",
    },
    {"storage"},
    {"data"},
    {"recorders"},
    {"closing", "episodes", "evaluator", "film", "judging", "logbook", "policy", "report", "stopping", "taking_up"},
    {"session"},
    {"actors"},
    {"following", "trainer"},
    {"population"},
]
"""The floors of `training`, of sub-rooms and loose modules: a module imports from its own floor and those before."""
FOUNDATIONS = {
    *("types", "spaces", "metrics", "trees", "xla", "nn", "errors", "distributions", "presets", "registry"),
    *("tuning", "shards", "arguments", "help_page", "hints", "hush", "lengths", "masks", "paths", "terminal"),
    *("written", "env_process", "supervisor"),
}
PURE = {"foundations", "envs", "processors", "buffers", "agents", "strategies"}
PURE_TOO = {"training/schedule.py"}
IMPURE_ANYWAY = {
    "envs/host.py",
    "env_process.py",
    "hush.py",
    "paths.py",
    "supervisor.py",
    "terminal.py",
    "xla/__init__.py",
    "xla/options.py",
}
"""Environments outside the device, the terminal, directories, what libraries print, and what the user set."""
IMPURE_MODULES = {"os", "time", "threading", "logging", "pathlib", "pickle", "random"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """Name the room of a dotted module below `jaxrl`; whatever is no room is a front door, `jaxrl` itself included."""
    head = module.split(".")[1] if "." in module else ""
    if head in FOUNDATIONS:
        return "foundations"
    return head if head in ROOMS else "front doors"


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str = "jaxrl") -> Iterator[str]:
    """Yield every module imported below `tree`, absolute; of `from jaxrl import x` it is `jaxrl.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            yield from (f"jaxrl.{alias.name}" for alias in node.names) if base == "jaxrl" else (base,)


def imported(file: Path) -> set[str]:
    module = module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return set(imports(ast.parse(file.read_text()), package))


def label(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def top(module: str) -> str:
    return module.split(".")[0]


def test_every_room_is_seen() -> None:
    """The laws below say nothing about files that are not found."""
    assert {"foundations", "envs", "processors", "buffers", "agents"} <= {room_of(module_of(file)) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=label)
def test_a_room_imports_only_to_its_left(file: Path) -> None:
    own = ROOMS.index(room_of(module_of(file)))
    right = {m for m in imported(file) if top(m) == "jaxrl" and ROOMS.index(room_of(m)) > own}
    assert not right, f"{label(file)} imports {sorted(right)}, to the right of {ROOMS[own]}"


def floor_of(module: str) -> int:
    """Return the floor of a module `jaxrl.training.<part>...`."""
    (floor,) = [i for i, parts in enumerate(TRAINING) if module.split(".")[2] in parts]
    return floor


def in_training(modules: Iterable[str]) -> list[str]:
    return [m for m in modules if m.startswith("jaxrl.training.")]


@pytest.mark.parametrize("file", [f for f in FILES if in_training([module_of(f)])], ids=label)
def test_a_sub_room_of_training_imports_only_from_floors_before_it(file: Path) -> None:
    own = floor_of(module_of(file))
    after = {m for m in in_training(imported(file)) if floor_of(m) > own}
    assert not after, f"{label(file)} imports {sorted(after)}, from a floor after its own"
    assert "jaxrl.training" not in imported(file), "what stands in the room itself names its module"


@pytest.mark.parametrize("file", [f for f in FILES if room_of(module_of(f)) in PURE or label(f) in PURE_TOO], ids=label)
def test_pure_rooms_touch_no_disk_clock_thread_or_log(file: Path) -> None:
    if label(file) in IMPURE_ANYWAY:
        pytest.skip("impure for a reason of its own")
    assert not {m for m in imported(file) if top(m) in IMPURE_MODULES}


def test_only_checkpoints_know_orbax() -> None:
    assert {label(f) for f in FILES if any(top(m) == "orbax" for m in imported(f))} <= {"training/storage/arrays.py"}


def test_only_the_gymnax_adapter_knows_gymnax() -> None:
    assert {label(f) for f in FILES if any(top(m) == "gymnax" for m in imported(f))} == {"envs/gymnax.py"}


def test_the_gymnax_adapter_imports_gymnax_only_when_asked() -> None:
    """Every import of gymnax stands inside a function."""
    tree = ast.parse((PACKAGE / "envs" / "gymnax.py").read_text())
    functions = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    loose = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in functions]
    assert "gymnax" not in {top(m) for n in loose for m in imports(n)}


def test_the_scan_sees_every_kind_of_import() -> None:
    lines = ["import os.path", "from jaxrl import envs", "from . import nn", "from .agents.dqn import dqn"]
    text = "\n".join([*lines, "def f():", "    import time"])
    found = set(imports(ast.parse(text), "jaxrl"))
    assert found == {"os.path", "jaxrl.envs", "jaxrl.nn", "jaxrl.agents.dqn", "time"}


def test_importing_jaxrl_stays_light() -> None:
    """Nothing heavy comes with it; `rich` comes with flax, so it counts only where flax alone would not bring it."""
    heavy = "[m for m in ('gymnax', 'orbax', 'matplotlib', 'plotly', 'tyro', 'rich') if m in sys.modules]"
    program = f"import sys, flax.linen, optax; before = {heavy}; import jaxrl; print(set({heavy}) - set(before))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
