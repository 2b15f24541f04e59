"""A film of an evaluation in the loop of a session: pictures of the user's own environment, taken as the loop goes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError, error_text
from jaxrl.training.reel import LONGEST, as_picture, check_format


class Shot(NamedTuple):
    """The first episode that environment 0 plays for an evaluation, as far as it has come."""

    draw: Callable[[], Any]
    """Returns a picture of where that environment is now, `[H, W, 3]` uint8."""
    form: str
    pictures: tuple[np.ndarray, ...] = ()
    total: float | None = None
    """The episode's return, once it is over."""
    failed: str = ""
    """Why there is no film."""

    def begun(self) -> "Shot":
        """Take the first picture of an episode; one that was given up before is forgotten."""
        # The film is whole: later episodes are not filmed.
        return self if self.total is not None else self._replace(pictures=()).looked()

    def after(self, total: float, ended: bool) -> "Shot":
        """Take a picture after a step, behind which the episode's return is `total`, and which may have `ended` it."""
        if self.total is not None:
            return self
        shot = self.looked()
        return shot._replace(total=total) if ended else shot

    def looked(self) -> "Shot":
        """Take a picture. Nothing that goes wrong there reaches the loop."""
        if self.failed or len(self.pictures) > LONGEST:
            return self
        try:
            return self._replace(pictures=(*self.pictures, _seen(self.draw())))
        except Exception as error:
            return self._replace(failed=error_text(error))

    def taken(self) -> tuple[tuple[np.ndarray, ...], float]:
        """Return the pictures and the return; raise `SettingsError` if there is no film."""
        if self.failed or self.total is None:
            raise SettingsError(self.failed or "the episode did not end")
        return self.pictures, self.total


def _seen(drawn: Any) -> np.ndarray:
    if drawn is None:
        raise SettingsError("film drew nothing; make a Gymnasium environment with render_mode='rgb_array'")
    return as_picture(drawn, "the environment")


def shot_of(draw: Callable[[], Any] | None, form: str, run_dir: str | None) -> Shot | None:
    """Return a film that is to be taken by `draw`; `None` without one.

    Raises:
      SettingsError: there is no directory for it, or `form` cannot be written here.
    """
    if draw is None:
        return None
    if run_dir is None:
        raise SettingsError("film writes into the directory of the run; set run_dir")
    check_format(form, "video_format")
    return Shot(draw, form)
