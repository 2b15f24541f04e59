"""Append-only files that survive a full disk."""

import base64
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl.errors import print_stderr


class LogFile:
    """Appends records atomically and unbuffered: each has been passed to the operating system when `append` returns.

    Records that a full disk rejects stay pending in memory, with one warning, and are written with a later record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: list[bytes] = []
        """Pending records, not in the file yet."""
        self._descriptor: int | None = None
        self._failing = False

    def append(self, record: bytes) -> None:
        """Append `record` to the file; an empty one only retries the pending records."""
        self.pending += [record] if record else []
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                print_stderr(f"warning: cannot write {self.path}: {error.strerror}; its rows wait")
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        """Flush everything to disk and close the file; raise `OSError` on failure."""
        try:
            self._flush()
            if self._descriptor is not None:
                os.fsync(self._descriptor)
        finally:
            self.close_file()

    def unwritten(self) -> list[str]:
        """Return the pending records in base64."""
        return [base64.b64encode(record).decode() for record in self.pending]

    def restore_pending(self, unwritten: Sequence[str], held: bytes) -> None:
        """Append the records that an earlier process could not, except those in `held`, the content of the file."""
        for text in unwritten:
            record = base64.b64decode(text)
            # It may have been written after the checkpoint was made.
            if record not in held:
                self.append(record)

    def close_file(self) -> None:
        """Close the file; the next record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flush(self) -> None:
        if not self.pending:
            return
        if self._descriptor is None:
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o666)
        data, written = b"".join(self.pending), 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except OSError:
            # Truncate a partial write: all records stay pending.
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise
        self.pending.clear()
