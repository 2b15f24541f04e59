"""Scalars, histograms, texts and films for TensorBoard, without TensorFlow."""

import platform
import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import KINDS, Histogram, Recorder, Row, RunInfo, Video, numbers_of
from jaxrl.training.recorders.log_file import LogFile

SCORES = ("eval/eval_reward", "train/episode_return")
"""What the page of hyperparameters compares runs by."""


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
        if type(self).write is not TensorBoardRecorder.write:  # that of a subclass takes in all rows
            super().scored(row, histograms)
        else:
            self._write_numbers(row, histograms)

    def _write_numbers(self, row: Row, histograms: Sequence[Histogram]) -> None:
        self._tell_run()
        self._append(_framed(event(row["opt_steps"], scalars(numbers_of(row)), *map(_bars, histograms))))

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
        self._append(_framed(event(histogram.opt_steps, _bars(histogram))))

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


def _bars(of: Histogram) -> bytes:
    return bars(of.name, of.values, *of.bins())


def _framed(data: bytes) -> bytes:
    """Return `data` as a TFRecord: length, checksum of it, data, checksum of it."""
    return _length(len(data)) + data + _masked_crc(data)


@lru_cache(maxsize=256)
def _length(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + _masked_crc(length)


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
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# --- the bytes of a summary ---------------------------------------------------------------------------------------


LARGEST = float(np.finfo(np.float32).max)
VALUE, TAG, SIMPLE_VALUE, HISTO = b"\x0a", b"\x0a", b"\x15", b"\x2a"
"""Keys of the fields in `summary.proto`: its number, times eight, and how it is stored."""
BUCKET_LIMIT, BUCKET = b"\x32", b"\x3a"
SUMS = struct.Struct("<BdBdBdBdBd")
"""Fields 1 to 5 of a histogram, each with its key: min, max, num, sum and sum of squares."""


def scalars(numbers: Mapping[str, float]) -> bytes:
    """Return numbers by their tags as a summary; in float32, where those that are too large are infinite."""
    layout, heads = _layout(tuple(numbers))
    try:
        return layout.pack(*chain.from_iterable(zip(heads, numbers.values(), strict=True)))
    except OverflowError:
        within = [x if abs(x) <= LARGEST else x * float("inf") for x in numbers.values()]
        return layout.pack(*chain.from_iterable(zip(heads, within, strict=True)))


@lru_cache(maxsize=64)
def _layout(tags: tuple[str, ...]) -> tuple[struct.Struct, list[bytes]]:
    """Return how to pack numbers of these tags, and what stands before each of them."""
    named = [field(TAG, tag.encode()) + SIMPLE_VALUE for tag in tags]
    heads = [VALUE + varint(len(name) + 4) + name for name in named]
    return struct.Struct("<" + "".join(f"{len(head)}sf" for head in heads)), heads


def bars(tag: str, values: np.ndarray, counts: np.ndarray, edges: np.ndarray) -> bytes:
    """Return `values` `[n]`, counted as `counts` `[b]` between `edges` `[b + 1]`, as a summary."""
    sums = (values.min(), values.max(), len(values), values.sum(), values @ values)
    # A bucket ends at its limit, so the first, which is empty, is there for where the second one begins.
    buckets = bytes(8) + counts.astype("<f8").tobytes()
    histo = SUMS.pack(*chain.from_iterable(zip((0x09, 0x11, 0x19, 0x21, 0x29), sums, strict=True)))
    histo += field(BUCKET_LIMIT, edges.astype("<f8").tobytes()) + field(BUCKET, buckets)
    return field(VALUE, field(TAG, tag.encode()) + field(HISTO, histo))


def event(step: int, *summaries: bytes) -> bytes:
    """Return what these summaries tell of a step, as an event of now."""
    return struct.pack("<BdB", 0x09, time.time(), 0x10) + varint(step) + field(b"\x2a", b"".join(summaries))


def field(key: bytes, data: bytes) -> bytes:
    """Return a field whose length stands before it."""
    return key + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a natural number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


# --- CRC-32C ------------------------------------------------------------------------------------------------------


POLYNOMIAL = 0x82F63B78
BLOCK = 2048
"""Bytes of a block: most records are one. Its table takes 32 bytes for each."""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    state, table = 0xFFFFFFFF, _table()
    for start in range(0, len(data), BLOCK):
        block = np.frombuffer(data[start : start + BLOCK], np.uint8).copy()
        carried = np.frombuffer(state.to_bytes(4, "little"), np.uint8)
        block[:4] ^= carried[: len(block)]
        bits = np.unpackbits(block, bitorder="little").astype(np.uint32)
        bits *= table[len(table) - len(bits) :]
        state = int(np.bitwise_xor.reduce(bits)) ^ state >> 8 * min(len(block), 4)
    return state ^ 0xFFFFFFFF


@cache
def _table() -> np.ndarray:
    """Return what each bit contributes, `[8 * BLOCK]`, those of the last byte at the end, lowest first."""
    state, table = 1, []
    for _ in range(8 * BLOCK):
        state = state >> 1 ^ POLYNOMIAL * (state & 1)
        table.append(state)
    return np.array(table[::-1], np.uint32)
