"""Scalars, histograms, texts and films for TensorBoard, without TensorFlow."""

import math
import platform
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import KINDS, Histogram, Recorder, Row, RunInfo, Video, numbers_of
from jaxrl.training.recorders.log_file import LogFile

SCORES = ("eval/eval_reward", "train/episode_return")
"""What the page of hyperparameters compares runs by."""
LARGEST = float(np.finfo(np.float32).max)


class TensorBoardRecorder(Recorder):
    """Write every number of the `train` and `eval` rows as `train/...` and `eval/...` over `opt_steps`.

    Events are texts under `events`, and the run's notes under `notes`.

    The events are written as they come, without the writer thread of tensorboardX: a thread that dies on a full disk
    leaves its queue to fill up and block the training.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Write into `directory`; left out, into `tensorboard` in that of the run."""
        from tensorboardX.proto import event_pb2

        self.name = "tensorboard" if directory is None else directory.name
        self._given, self._proto = directory, event_pb2
        self._directory = Path(self.name) if directory is None else directory
        self._begun: RunInfo | None = None
        self._log: LogFile | None = None

    def begin(self, run: RunInfo) -> None:
        """Take note of the directory, and of the settings, which a run that begins writes before its first row."""
        if self._given is None:
            if run.directory is None:
                raise SettingsError("TensorBoardRecorder() needs a run_dir, or a directory of its own")
            self._directory = run.directory / self.name
        # A run that goes on has written them in an earlier process.
        self._begun = None if run.opt_steps else run

    def write(self, row: Row) -> None:
        if row["kind"] in KINDS:
            self._write_numbers(row, ())
        else:
            self._tell_run()
            text = _text("events", f"{row['event']}: {row['message']}")
            self._append(self._record(step=row["opt_steps"], summary={"value": [text]}))

    def scored(self, row: Row, histograms: Sequence[Histogram]) -> None:
        """Write a row of numbers, and the histograms of its episodes, as one event."""
        own = (type(self).write, type(self).histogram) == (TensorBoardRecorder.write, TensorBoardRecorder.histogram)
        if not own:  # those of a subclass take in all rows and histograms
            super().scored(row, histograms)
        else:
            self._write_numbers(row, histograms)

    def _write_numbers(self, row: Row, histograms: Sequence[Histogram]) -> None:
        self._tell_run()
        values = [{"tag": tag, "simple_value": _in_float32(x)} for tag, x in numbers_of(row).items()]
        self._append(self._record(step=row["opt_steps"], summary={"value": [*values, *map(_bars, histograms)]}))

    def video(self, video: Video) -> None:
        """Show the episode among the images, where TensorBoard plays a GIF; it plays no MP4."""
        if video.path.suffix != ".gif":
            return
        self._tell_run()
        picture = {"height": video.height, "width": video.width, "colorspace": 3}
        value = {"tag": "eval/episode", "image": {**picture, "encoded_image_string": video.path.read_bytes()}}
        self._append(self._record(step=video.opt_steps, summary={"value": [value]}))

    def histogram(self, histogram: Histogram) -> None:
        self._tell_run()
        self._append(self._record(step=histogram.opt_steps, summary={"value": [_bars(histogram)]}))

    def rewind(self, opt_steps: int) -> None:
        """Begin a new file of events; TensorBoard then hides what older ones hold after `opt_steps`."""
        carried: list[bytes] = []
        if self._log is not None:
            self._log.release()
            # What the disk has not taken goes into the new file.
            carried, self._log = self._log.waiting, None
        for record in carried:
            self._append(record)
        # The mark by which TensorBoard takes the rest of older files for undone.
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

    def _tell_run(self) -> None:
        """Write settings and notes of a run that begins."""
        if self._begun is None:
            return
        run, self._begun = self._begun, None
        for summary in _settings_events(run.settings):
            self._append(self._record(summary=summary))
        if run.notes:
            self._append(self._record(summary={"value": [_text("notes", run.notes)]}))

    def _append(self, record: bytes) -> None:
        if self._log is None:
            # The directory's files are read in the order of their names.
            name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
            self._log = LogFile(self._directory / name)
            self._log.append(self._record(file_version="brain.Event:2"))
        self._log.append(record)

    def _record(self, **fields: Any) -> bytes:
        """Return an event of these fields, as the file holds it."""
        return _framed(self._proto.Event(wall_time=time.time(), **fields).SerializeToString())


def _in_float32(x: float) -> float:
    """Return a number as float32 has it, where those that are too large are infinite."""
    return x if abs(x) <= LARGEST else math.copysign(math.inf, x)


def _bars(of: Histogram) -> dict[str, Any]:
    """Return the value that TensorBoard shows as a histogram."""
    (counts, edges), values = of.bins(), of.values
    sums = {"min": values.min(), "max": values.max(), "num": len(values), "sum": values.sum()}
    # A bucket ends at its limit, so the first, which is empty, is there for where the second one begins.
    buckets = {"bucket_limit": edges.tolist(), "bucket": [0.0, *counts.tolist()]}
    return {"tag": of.name, "histo": {**sums, "sum_squares": values @ values, **buckets}}


def _framed(data: bytes) -> bytes:
    """Return `data` as a TFRecord: length, checksum of it, data, checksum of it."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _settings_events(settings: Mapping[str, Any]) -> list[Any]:
    """Return the summaries that TensorBoard's page of hyperparameters is made of."""
    from tensorboardX.summary import hparams

    plain = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
    return list(hparams(plain, dict.fromkeys(SCORES, 0.0)))


def _text(tag: str, text: str) -> dict[str, Any]:
    """Return the value that TensorBoard shows on its page of texts."""
    tensor = {
        "dtype": "DT_STRING",
        "string_val": [text.encode(errors="replace")],
        "tensor_shape": {"dim": [{"size": 1}]},
    }
    return {"tag": tag, "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}


def _masked_crc(data: bytes) -> bytes:
    """Return the checksum of the TFRecord format: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
