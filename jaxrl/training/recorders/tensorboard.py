"""Scalars for TensorBoard, without TensorFlow."""

import math
from pathlib import Path

from jaxrl.training.recorders.base import Progress, Row


class TensorBoardRecorder:
    """Write every number of the `train` and `eval` rows as `train/...` and `eval/...` over `opt_steps`."""

    def __init__(self, directory: Path, resume_at: int | None = None) -> None:
        """Open a new event file in `directory`; with `resume_at`, hide what older ones hold after that step."""
        from tensorboardX import SummaryWriter

        purge = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=5)

    def write(self, row: Row) -> None:
        if row["kind"] not in ("train", "eval"):
            return
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or name == "opt_steps":
                continue
            if math.isfinite(value):
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["opt_steps"])

    def tick(self, progress: Progress) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
