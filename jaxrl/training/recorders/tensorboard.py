"""Scalars for TensorBoard, without TensorFlow."""

import math
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.training.recorders.base import Progress, Row
from jaxrl.training.recorders.log_file import LogFile


class TensorBoardRecorder:
    """Write every number of the `train` and `eval` rows as `train/...` and `eval/...` over `opt_steps`.

    The events are written as they come, without the writer thread of tensorboardX: a thread that dies on a full disk
    leaves its queue to fill up and block the training.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboardX.proto import event_pb2

        self.name = directory.name
        self._directory, self._proto = directory, event_pb2
        self._log: LogFile | None = None

    def write(self, row: Row) -> None:
        if row["kind"] not in ("train", "eval"):
            return
        names = [name for name in row if name != "opt_steps" and _is_number(row[name])]
        values = [{"tag": f"{row['kind']}/{name}", "simple_value": float(row[name])} for name in names]
        self._append(self._record(step=row["opt_steps"], summary={"value": values}))

    def tick(self, progress: Progress) -> None:
        pass

    def rewind(self, opt_steps: int) -> None:
        """Begin a new file of events; TensorBoard then hides what older ones hold after `opt_steps`."""
        carried: list[bytes] = []
        if self._log is not None:
            self._log.release()
            carried, self._log = self._log.waiting, None
        for record in carried:
            self._append(record)
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._append(self._record(step=opt_steps + 1, session_log=start))

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Tell which events the disk has not taken."""
        if self._log is not None and self._log.waiting:
            waiting[self.name] = self._log.unwritten()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Append the events that an earlier process could not write."""
        if unwritten := waiting.get(self.name):
            held = b"".join(path.read_bytes() for path in self._directory.glob("events.*"))
            assert self._log is not None  # a run that goes on has just been told to rewind
            self._log.take_up(unwritten, held)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _append(self, record: bytes) -> None:
        if self._log is None:
            # The directory's files are read in the order of their names.
            name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
            self._log = LogFile(self._directory / name)
            self._log.append(self._record(file_version="brain.Event:2"))
        self._log.append(record)

    def _record(self, **fields: Any) -> bytes:
        """Return an event as a TFRecord: length, checksum of it, data, checksum of it."""
        data: bytes = self._proto.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        return length + _masked_crc(length) + data + _masked_crc(data)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _masked_crc(data: bytes) -> bytes:
    """Return the checksum of the TFRecord format: CRC-32C, rotated right by 15 bits, plus a constant."""
    from tensorboardX.crc32c import crc32c

    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
