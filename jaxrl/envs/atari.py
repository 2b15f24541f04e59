"""Atari by the Arcade Learning Environment (https://github.com/Farama-Foundation/Arcade-Learning-Environment).

Frames go through Gymnasium's preprocessing; stacking frames and clipping rewards is done by processors.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from jaxrl.envs.host import PREFIX, HostEnv, check_gymnasium_id, floats_to_ints, make_gymnasium_host
from jaxrl.envs.suites import check_flag, check_int, check_params, convert_params
from jaxrl.errors import SettingsError, check_between, require_extra

ATARI = "ALE/"
"""Prefix of Gymnasium's names of these games, as in `gymnasium:ALE/Pong-v5`."""
PURPOSE = "games of Atari"
PREPROCESSING = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "grayscale_obs": True}
"""Parameters of `AtariPreprocessing` with their defaults."""
GAME_PARAMS: Mapping[str, type] = {
    "repeat_action_probability": float,
    "full_action_space": bool,
    "mode": int,
    "difficulty": int,
    "max_num_frames_per_episode": int,
}
"""Parameters of games; their defaults depend on the name of the game."""
PARAM_TYPES = {**{word: type(value) for word, value in PREPROCESSING.items()}, **GAME_PARAMS}


def atari_env(name: str, /, *, life_loss: bool | float = False, raw: bool | float = False, **params: Any) -> HostEnv:
    """Return the game `name`, such as `ALE/Pong-v5`: uint8 frames `[84, 84, 1]`, of which none are stacked yet.

    A step is `frame_skip` frames, and its observation the maximum of the last two in grey; an episode starts with up to
    `noop_max` no-op steps (Machado et al. 2018, https://arxiv.org/abs/1709.06009).

    Args:
      name: with or without `gymnasium:`.
      life_loss: in training, end an episode with each life; the next one continues the game. Evaluation and `play` use
        whole games. The return of whole games is recorded as `game_return`.
      raw: no preprocessing; all `params` go to `gymnasium.make`.
      **params: parameters of `AtariPreprocessing` and of the game.

    Raises:
      SettingsError: ALE or OpenCV is not installed, or a name or parameter is unknown or invalid.
    """
    for module in ("ale_py", "cv2"):
        require_extra(module, PURPOSE, "atari")
    id_, wants_raw = check_gymnasium_id(name), check_flag("raw", raw)
    given = {**params, **({"raw": True} if wants_raw else {})}
    if wants_raw:
        if life_loss:
            raise SettingsError("life_loss is for games that are preprocessed; leave out raw, or life_loss")
        game = make_gymnasium_host(id_, partial(make_game, id_, params, None, False), given)
        played = floats_to_ints({**_registered_kwargs(id_), **params})
        skip = played.get("frameskip", 1)  # a number, or the fewest and one more than the most
        return _with_limit(game, played.get("max_num_frames_per_episode"), skip if isinstance(skip, int) else skip[0])
    settings = check_settings(PREFIX + id_, params, (*PARAM_TYPES, "life_loss", "raw"))
    shaped = {word: settings.get(word, value) for word, value in PREPROCESSING.items()}
    played = {word: value for word, value in settings.items() if word in GAME_PARAMS}
    whole = make_gymnasium_host(id_, partial(make_game, id_, played, shaped, False), given)
    frames = settings.get("max_num_frames_per_episode", _registered_kwargs(id_).get("max_num_frames_per_episode"))
    whole = _with_limit(whole, frames, shaped["frame_skip"])
    if not check_flag("life_loss", life_loss):
        return whole
    lives = make_gymnasium_host(id_, partial(make_game, id_, played, shaped, True), {**given, "life_loss": True})
    return lives._replace(spec=whole.spec, make_renderable=whole.make_renderable, eval_env=whole)


def _with_limit(game: HostEnv, frames: int | None, skip: int) -> HostEnv:
    """Return `game` with the limit of its episodes in steps of at least `skip` frames; the game counts `frames`."""
    return game if frames is None else game._replace(spec=game.spec._replace(time_limit=max(1, frames // skip)))


def check_settings(name: str, params: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Check parameters and convert them to their types; raise `SettingsError` for those invalid or not `known`."""
    check_params(name, params, known)
    from_0 = ("noop_max", "mode", "difficulty")
    settings: dict[str, Any] = {
        word: check_int(f"{name}: {word}", params[word], 0) for word in from_0 if word in params
    }
    settings |= convert_params(name, {word: x for word, x in params.items() if word not in from_0}, PARAM_TYPES)
    check_between("repeat_action_probability", settings.get("repeat_action_probability", 0.0), 0, 1)
    return settings


def _registered_kwargs(id_: str) -> Mapping[str, Any]:
    return require_extra("gymnasium", PURPOSE).registry[id_.rpartition(":")[2]].kwargs


def make_game(
    id_: str, played: Mapping[str, Any], shaped: Mapping[str, Any] | None, lives: bool, render_mode: str | None = None
) -> Any:
    """Make a game, preprocessed if `shaped`, with one episode per life if `lives`."""
    ale = require_extra("ale_py", PURPOSE, "atari")  # registers its games with Gymnasium, also in processes of actors
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # no banner
    gymnasium = require_extra("gymnasium", PURPOSE)
    if shaped is None:
        return gymnasium.make(id_, **played, render_mode=render_mode)
    # The preprocessing skips frames, because it takes the maximum over the last two.
    game = gymnasium.make(id_, **played, frameskip=1, render_mode=render_mode)
    seen = gymnasium.wrappers.AtariPreprocessing(game, **shaped, grayscale_newaxis=True)
    return _with_lives(seen) if lives else seen


def _with_lives(game: Any) -> Any:
    """Return a preprocessed game with one episode per life (Mnih et al. 2015, https://www.nature.com/articles/nature14236).

    A lost life terminates. The next episode continues from there; only a game that is over, or a seed, resets it.
    """
    gymnasium = require_extra("gymnasium", PURPOSE)

    class Lives(gymnasium.Wrapper):  # type: ignore[name-defined]
        lives, over, total = 0, True, 0.0
        last: tuple[Any, dict[str, Any]] = None, {}

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            if self.over or seed is not None:
                self.last = self.env.reset(seed=seed, options=options)
                self.over, self.total, self.lives = False, 0.0, self.last[1]["lives"]
            return self.last

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, terminated, truncated, info = self.env.step(action)
            # The first observation of the next life, if this step loses one.
            self.last = obs, info
            self.over, self.total = terminated or truncated, self.total + float(reward)
            if self.over:
                info = {**info, "game_return": self.total}
            lost, self.lives = info["lives"] < self.lives, info["lives"]
            return obs, float(reward), terminated or (lost and not truncated), truncated, info

    return Lives(game)
