"""Sizes in a stranger's run directory: none is believed, so none can take all memory or abort the process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_run import BY_SIZE, FEW, SIZES, spoiled


@pytest.mark.every_day("few")
@pytest.mark.parametrize(
    ("sizes", "doors"), [(FEW, ["latest", "verify", "resume"]), ([*SIZES], [*BY_SIZE])], ids=["few", "all"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
def test_no_size_in_a_strangers_run_is_believed(strangers: dict[str, Any], sizes: list[str], doors: list[str]) -> None:
    found = {name: came for name, came in strangers["sizes"].items() if came not in ("code 2", "code 6")}
    assert {f"{size}: {door}" for size in sizes for door in doors} <= strangers["sizes"].keys()
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shape", "both", "told alike", "many chunks"])
def test_the_front_doors_end_with_one_line(run: Path, name: str) -> None:
    spoiled(run, name)
    for door in (["verify", run], ["train", "--resume", run], ["evaluate", run, "--episodes", "1"]):
        done = subprocess.run([sys.executable, "-m", f"jaxrl.{door[0]}", *map(str, door[1:])], capture_output=True)
        assert done.returncode == 6
        assert b"Traceback" not in done.stderr
