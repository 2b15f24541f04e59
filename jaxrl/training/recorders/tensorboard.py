"""TensorBoard: scalars, histograms, texts and videos, without TensorFlow."""

import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import Histogram, Recorder, Row, RunInfo, Video, numbers_of
from jaxrl.training.storage.logs import KINDS, LogFile, in_base64, rows_of

SCORES = ("eval/eval_reward", "train/episode_return")
"""Metrics by which TensorBoard's HPARAMS page compares runs."""


class TensorBoardRecorder(Recorder):
    """Writes every number of `train` and `eval` rows as `train/...` and `eval/...` over `opt_steps`.

    Events of the run are texts under `events`, and its notes are under `notes`.

    Files are written in the training thread, without the writer thread of tensorboardX: when that dies on a full disk,
    its queue fills up and blocks the training.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Write into `directory` (default: `tensorboard` in the run directory)."""
        from tensorboardX.proto import event_pb2

        self.name = "tensorboard" if directory is None else directory.name
        self._given, self._proto = directory, event_pb2
        self._directory = Path(self.name) if directory is None else directory
        self._begun: RunInfo | None = None
        self._source: Path | None = None
        """The run whose log has rows from before this recorder was added."""
        self._log: LogFile | None = None

    def begin(self, run: RunInfo) -> None:
        """Set the directory and, unless they are there, the settings, which are written before the first row."""
        if self._given is None:
            if run.directory is None:
                raise SettingsError("TensorBoardRecorder() needs a run_dir, or a directory of its own")
            self._directory = run.directory / self.name
        is_new = next(self._directory.glob("events.*"), None) is None
        self._begun = run if is_new or run.changed or not run.opt_steps else None
        self._source = run.directory if is_new and run.opt_steps else None

    def write(self, row: Row) -> None:
        self._write_run()
        if row["kind"] in KINDS:
            values = [{"tag": tag, "simple_value": x} for tag, x in numbers_of(row).items()]
        else:
            values = [_text("events", f"{row['event']}: {row['message']}")]
        self._append(self._record(step=row["opt_steps"], summary={"value": values}))

    def video(self, video: Video) -> None:
        """Write the episode as an image if it is a GIF; TensorBoard cannot play MP4."""
        if video.path.suffix != ".gif":
            return
        self._write_run()
        picture = {"height": video.height, "width": video.width, "colorspace": 3}
        value = {"tag": "eval/episode", "image": {**picture, "encoded_image_string": video.path.read_bytes()}}
        self._append(self._record(step=video.opt_steps, summary={"value": [value]}))

    def histogram(self, histogram: Histogram) -> None:
        from tensorboardX.summary import histogram_raw

        self._write_run()
        (counts, edges), x = histogram.bins(), histogram.values
        # Buckets have only upper limits, so an empty first bucket marks the lower limit of the second.
        buckets = edges.tolist(), [0.0, *counts.tolist()]
        summary = histogram_raw("histogram", x.min(), x.max(), len(x), x.sum(), x @ x, *buckets)
        summary.value[0].tag = histogram.name  # in which tensorboardX would replace spaces and brackets
        self._append(self._record(step=histogram.opt_steps, summary=summary))

    def rewind(self, opt_steps: int) -> None:
        """Start a new event file unless it is the first; TensorBoard then hides later events in older ones."""
        if self._source is not None:
            return
        carried: list[bytes] = []
        if self._log is not None:
            self._log.close_file()
            # Unwritten records move to the new file.
            carried, self._log = self._log.pending, None
        for record in carried:
            self._append(record)
        # A session start makes TensorBoard discard later steps of older files.
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._append(self._record(step=opt_steps + 1, session_log=start))

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Add the events that are not written yet to `waiting`."""
        if self._log is not None and self._log.pending:
            waiting[self.name] = in_base64(self._log.pending)

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Append the events that an earlier process could not write, or all rows of the log if it wrote none."""
        source, self._source = self._source, None
        if source is not None:
            for row in rows_of(source):
                self.write(row)
        elif unwritten := waiting.get(self.name):
            held = b"".join(path.read_bytes() for path in self._directory.glob("events.*"))
            assert self._log is not None  # a resumed run has just called `rewind`
            self._log.restore_pending(unwritten, held)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write_run(self) -> None:
        """Write settings and notes of a new run, once."""
        if self._begun is None:
            return
        run, self._begun = self._begun, None
        for summary in _settings_events(run.settings):
            self._append(self._record(summary=summary))
        if run.notes:
            self._append(self._record(summary={"value": [_text("notes", run.notes)]}))

    def _append(self, record: bytes) -> None:
        if self._log is None:
            # TensorBoard reads the files in order of their names.
            name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
            self._log = LogFile(self._directory / name)
            self._log.append(self._record(file_version="brain.Event:2"))
        self._log.append(record)

    def _record(self, **fields: Any) -> bytes:
        """Return an event with these fields, serialised as a record of the file."""
        return _as_tfrecord(self._proto.Event(wall_time=time.time(), **fields).SerializeToString())


def _as_tfrecord(data: bytes) -> bytes:
    """Return `data` as a TFRecord: length, checksum of the length, data, checksum of the data."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))


def _settings_events(settings: Mapping[str, Any]) -> list[Any]:
    """Return the summaries for TensorBoard's HPARAMS page."""
    from tensorboardX.summary import hparams

    plain = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
    return list(hparams(plain, dict.fromkeys(SCORES, 0.0)))


def _text(tag: str, text: str) -> dict[str, Any]:
    """Return a summary value for TensorBoard's TEXT page."""
    tensor = {
        "dtype": "DT_STRING",
        "string_val": [text.encode(errors="replace")],
        "tensor_shape": {"dim": [{"size": 1}]},
    }
    return {"tag": tag, "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}
