"""Atari by the Arcade Learning Environment (https://github.com/Farama-Foundation/Arcade-Learning-Environment).

Frames go through Gymnasium's own preprocessing; what is stacked or clipped of them is a matter of processors.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxrl.envs.host import PREFIX, HostEnv, check_gymnasium_id, make_gymnasium_host
from jaxrl.envs.suites import check_flag, check_int, check_params, convert_params
from jaxrl.errors import SettingsError, check_between, require_extra

ATARI = "ALE/"
"""How Gymnasium's names of these games begin, as in `gymnasium:ALE/Pong-v5`."""
PURPOSE = "games of Atari"
PREPROCESSING = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "grayscale_obs": True}
"""What `AtariPreprocessing` takes."""
GAME_PARAMS: Mapping[str, type] = {
    "repeat_action_probability": float,
    "full_action_space": bool,
    "mode": int,
    "difficulty": int,
    "max_num_frames_per_episode": int,
}
"""What games take; left unset they are as the name of the game has them."""
PARAM_TYPES = {**{word: type(value) for word, value in PREPROCESSING.items()}, **GAME_PARAMS}


def atari_env(name: str, /, *, life_loss: bool | float = False, raw: bool | float = False, **params: Any) -> HostEnv:
    """Return the game `name`, such as `ALE/Pong-v5`: uint8 frames `[84, 84, 1]`, of which none are stacked yet.

    A step is `frame_skip` frames, of which the last two are joined by their maximum, in grey; an episode
    begins with up to `noop_max` steps without action (Machado et al. 2018, https://arxiv.org/abs/1709.06009).

    Args:
      name: with or without `gymnasium:`.
      life_loss: end an episode with each life, in training alone: the next goes on in the same game. Evaluation plays
        whole games, as does `play`. The return of whole games is told as `game_return`.
      raw: leave the game as Gymnasium makes it, to which all `params` go.
      **params: those of `AtariPreprocessing` and of the game.

    Raises:
      SettingsError: ALE or OpenCV is not installed, or a name or parameter is unknown or cannot be.
    """
    for module in ("ale_py", "cv2"):
        require_extra(module, PURPOSE, "atari")
    id_, wants_raw = check_gymnasium_id(name), check_flag("raw", raw)
    given = {**params, **({"raw": True} if wants_raw else {})}
    if wants_raw:
        if life_loss:
            raise SettingsError("life_loss is for games that are preprocessed; leave out raw, or life_loss")
        return make_gymnasium_host(id_, partial(_make, id_, params, None, False), given)
    settings = _check_settings(PREFIX + id_, params)
    shaped = {word: settings.get(word, value) for word, value in PREPROCESSING.items()}
    played = {word: value for word, value in settings.items() if word in GAME_PARAMS}
    whole = make_gymnasium_host(id_, partial(_make, id_, played, shaped, False), given)
    frames = settings.get("max_num_frames_per_episode", _registered_kwargs(id_).get("max_num_frames_per_episode"))
    limit = None if frames is None else max(1, frames // shaped["frame_skip"])
    whole = whole._replace(spec=whole.spec._replace(time_limit=limit))
    if not check_flag("life_loss", life_loss):
        return whole
    lives = make_gymnasium_host(id_, partial(_make, id_, played, shaped, True), {**given, "life_loss": True})
    return lives._replace(spec=whole.spec, make_renderable=whole.make_renderable, eval_env=whole)


def _check_settings(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with their types; raise `SettingsError` for what cannot be."""
    check_params(name, params, {**PARAM_TYPES, "life_loss": bool, "raw": bool})
    from_0 = ("noop_max", "mode", "difficulty")
    settings: dict[str, Any] = {
        word: check_int(f"{name}: {word}", params[word], 0) for word in from_0 if word in params
    }
    settings |= convert_params(name, {word: x for word, x in params.items() if word not in from_0}, PARAM_TYPES)
    check_between("repeat_action_probability", settings.get("repeat_action_probability", 0.0), 0, 1)
    return settings


def _registered_kwargs(id_: str) -> Mapping[str, Any]:
    known: Mapping[str, Any] = require_extra("gymnasium", PURPOSE).registry[id_.rpartition(":")[2]].kwargs
    return known


def _make(
    id_: str, played: Mapping[str, Any], shaped: Mapping[str, Any] | None, lives: bool, render_mode: str | None = None
) -> Any:
    """Make a game, preprocessed if `shaped`, with an episode for each life if `lives`."""
    ale = require_extra("ale_py", PURPOSE, "atari")  # known to Gymnasium from now on, in a process of its own too
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # no banner
    gymnasium = require_extra("gymnasium", PURPOSE)
    if shaped is None:
        return gymnasium.make(id_, **played, render_mode=render_mode)
    # Frames are skipped by the preprocessing, which has to see them.
    game = gymnasium.make(id_, **played, frameskip=1, render_mode=render_mode)
    seen = gymnasium.wrappers.AtariPreprocessing(game, **shaped, grayscale_newaxis=True)
    return Lives(seen) if lives else seen


class Lives:
    """A game of which each life is an episode (Mnih et al. 2015, https://www.nature.com/articles/nature14236, methods).

    A lost life terminates. The next episode begins where it was lost, and only a game that is over is reset.
    """

    def __init__(self, game: Any) -> None:
        """Take over a game of Gymnasium, preprocessed."""
        self._game = game
        self._lives, self._over, self._return = 0, True, 0.0
        self._last: tuple[Any, dict[str, Any]] = None, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._game, name)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next life, or the next game; a seed begins one in any case."""
        if self._over or seed is not None:
            self._last = self._game.reset(seed=seed, options=options)
            self._over, self._return = False, 0.0
            self._lives = self._last[1]["lives"]
        return self._last

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step of the game; a lost life terminates. Where the game is over, `game_return` is told."""
        obs, reward, terminated, truncated, info = self._game.step(action)
        self._last = obs, info
        self._over, self._return = terminated or truncated, self._return + float(reward)
        if self._over:
            info = {**info, "game_return": self._return}
        lost, self._lives = info["lives"] < self._lives, info["lives"]
        return obs, float(reward), terminated or (lost and not truncated), truncated, info
