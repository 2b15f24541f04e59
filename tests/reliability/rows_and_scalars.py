"""What logs and boards of a run hold, less what was measured by the clock."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import toys_runs
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

LOGS = ("metrics.jsonl", "eval_episodes.jsonl")


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that a run must repeat: all but events, less what was measured by the clock."""
    return toys_runs.timeless([row for row in rows if row.get("kind") != "event"])


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Read tag, step and value of all that TensorBoard shows of `directory`, less events and what the clock measured.

    It reads the files in the order of their names, each as far as it is whole, and drops what a later start of a
    session takes back.
    """
    found: list[tuple[str, int, float]] = []
    for path in sorted(directory.iterdir()):
        for event in events(path):
            if event.session_log.status == SessionLog.START:
                found = [scalar for scalar in found if scalar[1] < event.step]
            told = [value for value in event.summary.value if value.tag != "events"]  # such as those of a full disk
            found += [(value.tag, event.step, value.simple_value) for value in told]
    by_the_clock = ("wall_s", "_per_sec", "_mb")
    return [scalar for scalar in found if not scalar[0].endswith(by_the_clock)]


def events(path: Path) -> list[Event]:
    """Read the records of an event file as far as they are whole; check their checksums."""
    data, found = path.read_bytes(), []
    while len(data) >= 12:
        length = struct.unpack("<Q", data[:8])[0]
        record, rest = data[12 : 12 + length], data[12 + length :]
        if len(record) < length or len(rest) < 4:
            break
        assert data[8:12] == struct.pack("<I", masked_crc32c(data[:8]))
        assert rest[:4] == struct.pack("<I", masked_crc32c(record))
        found.append(Event.FromString(record))
        data = rest[4:]
    return found
