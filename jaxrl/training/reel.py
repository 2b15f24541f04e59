"""Video files: GIF by Pillow, MP4 by PyAV."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import SettingsError, error_text, require_extra, suggest

FPS = 30
LONGEST = 1_000
"""Maximum number of environment steps in a film made during training."""
FORMATS = ("gif", "mp4")


def check_format(name: str, what: str) -> None:
    """Raise `SettingsError` unless the setting `what` names a supported format."""
    if name not in FORMATS:
        raise SettingsError(f"unknown {what} {name!r}; {suggest(str(name), FORMATS)}")
    if name == "mp4":
        require_extra("av", "films as MP4", "video")


def write_film(frames: Sequence[np.ndarray], path: Path, fps: int, form: str) -> None:
    """Write `[H, W, 3]` uint8 frames in the format `form`; raise `SettingsError` if `path` cannot be written."""
    try:
        (_write_mp4 if form == "mp4" else _write_gif)(frames, path, fps)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror or error}") from error


def _write_gif(frames: Sequence[np.ndarray], path: Path, fps: int) -> None:
    """Write a GIF that loops forever."""
    from PIL import Image

    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


def _write_mp4(frames: Sequence[np.ndarray], path: Path, fps: int) -> None:
    """Write H.264, which all browsers play; odd sides are padded with the last row or column, as it requires even ones.

    The output is deterministic.
    """
    av: Any = require_extra("av", "films as MP4", "video")
    height, width = frames[0].shape[:2]
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
        for frame in frames:
            picture = np.ascontiguousarray(np.pad(frame, padding, mode="edge"))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


def save_film(take: Callable[[], tuple[Sequence[np.ndarray], float]], path: Path) -> tuple[Path, float, int, int] | str:
    """Write the film from `take` atomically; the suffix of `path` is the format.

    Return path, return of the episode, height and width; or, if anything fails, the reason why there is no film.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        frames, total = take()
        path.parent.mkdir(exist_ok=True)
        write_film(frames, temporary, FPS, path.suffix[1:])
        # Atomic rename: an incomplete film never has the final name.
        os.replace(temporary, path)
    # A failure to render, encode or write costs a film, not the run.
    except Exception as error:
        temporary.unlink(missing_ok=True)
        return f"no video: {error_text(error)}"
    height, width = frames[0].shape[:2]
    return path, total, height, width


def films_in(directory: Path) -> list[Path]:
    """Return the films in a directory, sorted by name."""
    return sorted(path for form in FORMATS for path in directory.glob(f"*.{form}"))


def as_picture(drawn: Any, whose: str) -> np.ndarray:
    """Return a copy of a frame; raise `SettingsError`, naming `whose` it is, unless it is uint8 `[H, W, 3]`."""
    if np.ndim(drawn) != 3 or np.shape(drawn)[2] != 3 or np.asarray(drawn).dtype != np.uint8:
        got = f"{np.asarray(drawn).dtype} {list(np.shape(drawn))}"
        raise SettingsError(f"{whose} is drawn as {got}; expected uint8 [H, W, 3]")
    return np.array(drawn)
