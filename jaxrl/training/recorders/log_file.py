"""A file that is only appended to, and outlives a full disk."""

import base64
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl.errors import print_stderr


class LogFile:
    """Append records; each is in the system's hands when `append` returns, whole or not at all.

    What a full disk does not take waits in memory, said once, and is written with a later record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        """Records that are not in the file yet."""
        self._descriptor: int | None = None
        self._failing = False

    def append(self, record: bytes) -> None:
        """Add `record` to the end of the file; an empty one only has those that wait tried again."""
        self.waiting += [record] if record else []
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                print_stderr(f"warning: cannot write {self.path}: {error.strerror}; its rows wait")
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        """Bring everything to the disk; raise `OSError` if it does not take it."""
        try:
            self._flush()
            if self._descriptor is not None:
                os.fsync(self._descriptor)
        finally:
            self.release()

    def unwritten(self) -> list[str]:
        """Return the records that are not in the file yet, in base64."""
        return [base64.b64encode(record).decode() for record in self.waiting]

    def take_up(self, unwritten: Sequence[str], held: bytes) -> None:
        """Append the records that an earlier process could not, but for those that `held` shows it could after all."""
        for text in unwritten:
            record = base64.b64decode(text)
            # The disk may have taken it after the checkpoint was made.
            if record not in held:
                self.append(record)

    def release(self) -> None:
        """Let go of the file; the next record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flush(self) -> None:
        if not self.waiting:
            return
        if self._descriptor is None:
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o666)
        # All that waits in one go, the oldest first.
        data, written = b"".join(self.waiting), 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except OSError:
            # A record that was written in part is taken back whole. It still waits.
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise
        self.waiting.clear()
