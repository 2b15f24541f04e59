"""Checksums of the logs: logs are append-only, so the part written before a checkpoint must not change."""

import os
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxrl.paths import reason_of_path
from jaxrl.training.storage.run_dir import EPISODES, METRICS, TRAIN_EPISODES

LOGS = (METRICS, EPISODES, TRAIN_EPISODES)
PIECE = 1 << 20
"""Bytes read at a time."""


class _Sum(NamedTuple):
    """CRC-32 of the first `size` bytes of the file `inode`."""

    inode: int
    size: int
    crc: int


class LogSums:
    """Incremental checksums of the logs in a directory: each call reads only the bytes appended since the last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, _Sum] = {}

    def facts(self) -> dict[str, list[int]]:
        """Return size and CRC-32 of each existing log."""
        for name in LOGS:
            try:
                self._known[name] = self._sum(self._directory / name, self._known.get(name))
            except OSError:
                self._known.pop(name, None)
        return {name: [found.size, found.crc] for name, found in self._known.items()}

    def _sum(self, path: Path, known: _Sum | None) -> _Sum:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if known is None or known.inode != info.st_ino or known.size > info.st_size:
                known = _Sum(info.st_ino, 0, 0)  # a rewound log is a new file
            file.seek(known.size)
            size, crc = known.size, known.crc
            while part := file.read(PIECE):
                size, crc = size + len(part), zlib.crc32(part, crc)
        return _Sum(info.st_ino, size, crc)


def damage(open_log: Callable[[str], IO[bytes]], facts: Mapping[str, Any]) -> list[str]:
    """Describe the logs, opened by name, whose content before the checkpoint with these `facts` has changed since."""
    sums = facts.get("logs")
    problems = []
    for name in LOGS:
        saved = sums.get(name) if isinstance(sums, dict) else None
        if isinstance(saved, list) and len(saved) == 2 and all(type(number) is int for number in saved):
            problem = _damage(partial(open_log, name), *saved)
            problems += [f"{name}: {problem}"] if problem else []
    return problems


def _damage(open_log: Callable[[], IO[bytes]], size: int, crc: int) -> str | None:
    found = left = 0
    try:
        with open_log() as file:
            left = size
            while left > 0 and (part := file.read(min(left, PIECE))):
                left, found = left - len(part), zlib.crc32(part, found)
    except OSError as error:
        return f"cannot be read: {reason_of_path(error)}"
    if left > 0:
        return f"has lost rows: it is shorter than the {size} bytes that the newest checkpoint tells of"
    return None if found == crc else f"was changed: its first {size} bytes are not what the newest checkpoint tells of"
