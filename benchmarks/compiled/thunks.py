"""What the host launches of a program for CUDA, read from the sequence of thunks that XLA writes beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DUMP = "*.thunk_sequence_after_thunk_passes.txt"
NAMES = "*.thunk_metadata.txt"


class Thunk(NamedTuple):
    """A node of the sequence."""

    number: int
    kind: str
    inside: "list[Thunk]"
    """Of a command buffer what it holds, of a loop its condition and its body."""


def parse(text: str) -> list[Thunk]:
    """Return the sequence, each thunk with what is indented under it."""
    top: list[Thunk] = []
    levels: list[tuple[int, list[Thunk]]] = [(-1, top)]
    for line in text.splitlines():
        found = re.match(r"(\s*)(\d+): (k\w+)", line)
        if found is None:
            continue
        depth = len(found[1])
        while levels[-1][0] >= depth:
            levels.pop()
        thunk = Thunk(int(found[2]), found[3], [])
        levels[-1][1].append(thunk)
        levels.append((depth, thunk.inside))
    return top


def names(text: str) -> dict[int, str]:
    """Return the instruction of each thunk that has one, by the thunk's number."""
    found = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', text)
    return {int(number): name for name, number in found}


class Launches(NamedTuple):
    """What the host does for one call."""

    launches: int
    """Kernels, copies and command buffers, of a loop outside a command buffer as often as it turns; a loop of unknown
    length turns once."""
    waits: int
    """Conditionals and turns of loops of unknown length, for which the host waits."""
    buffers: int
    """Command buffers among the launches."""


def launches(thunks: list[Thunk], turns: Mapping[int, int]) -> Launches:
    """Count what lies outside command buffers; `turns` has the loops of known length, by their thunk's number."""
    launched, waits, buffers = 0, 0, 0
    for thunk in thunks:
        if thunk.kind == "kCommandBuffer":
            launched, buffers = launched + 1, buffers + 1
        elif thunk.inside:
            times = turns.get(thunk.number, 1)
            inner = launches(thunk.inside, turns)
            launched += times * inner.launches
            waits += times * inner.waits + (thunk.number not in turns)
            buffers += times * inner.buffers
        else:
            launched += 1
    return Launches(launched, waits, buffers)


def read(folder: Path, turns: Mapping[str, int]) -> Launches:
    """Count for the program whose dump lies in `folder`; `turns` has its loops of known length, by name."""
    sequence, named = (next(folder.glob(pattern)).read_text() for pattern in (DUMP, NAMES))
    numbers = {number: turns[name] for number, name in names(named).items() if name in turns}
    return launches(parse(sequence), numbers)
