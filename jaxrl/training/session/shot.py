"""Filming an evaluation in the user's loop: a frame of the user's environment per step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError, error_text
from jaxrl.training.reel import LONGEST, as_picture, check_format


class Shot(NamedTuple):
    """The film so far of the first counted episode of environment 0 in an evaluation."""

    draw: Callable[[], Any]
    """Renders the current state of that environment, `[H, W, 3]` uint8."""
    form: str
    pictures: tuple[np.ndarray, ...] = ()
    total: float | None = None
    """The episode's return, once it is over."""
    failed: str = ""
    """Why there is no film."""

    def begin(self) -> "Shot":
        """Take the first frame of an episode; drop those of an episode that was abandoned."""
        # Once the film is complete, later episodes are not filmed.
        return self if self.total is not None else self._replace(pictures=()).take_frame()

    def after(self, total: float, ended: bool) -> "Shot":
        """Take a frame after a step; `total` is the return so far, and `ended` whether the step ended the episode."""
        if self.total is not None:
            return self
        shot = self.take_frame()
        return shot._replace(total=total) if ended else shot

    def take_frame(self) -> "Shot":
        """Take a frame; an error fails the film, not the loop."""
        if self.failed or len(self.pictures) > LONGEST:
            return self
        try:
            return self._replace(pictures=(*self.pictures, _seen(self.draw())))
        except Exception as error:
            return self._replace(failed=error_text(error))

    def result(self) -> tuple[tuple[np.ndarray, ...], float]:
        """Return the frames and the return; raise `SettingsError` if there is no film."""
        if self.failed or self.total is None:
            raise SettingsError(self.failed or "the episode did not end")
        return self.pictures, self.total


def _seen(drawn: Any) -> np.ndarray:
    if drawn is None:
        raise SettingsError("film drew nothing; make a Gymnasium environment with render_mode='rgb_array'")
    return as_picture(drawn, "the environment")


def shot_of(draw: Callable[[], Any] | None, form: str, run_dir: str | None) -> Shot | None:
    """Return a film to be taken by `draw`; `None` if `draw` is.

    Raises:
      SettingsError: `run_dir` is not set, or the format `form` is unknown or not supported here.
    """
    if draw is None:
        return None
    if run_dir is None:
        raise SettingsError("film writes into the directory of the run; set run_dir")
    check_format(form, "video_format")
    return Shot(draw, form)
