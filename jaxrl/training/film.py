"""Films: episodes rendered, of a loaded policy or of the latest one during a run, and their files.

GIF is written by Pillow, MP4 by PyAV.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.envs import Env, HostEnv
from jaxrl.envs.agents import as_single_env
from jaxrl.envs.host import convert_action
from jaxrl.errors import SettingsError, error_text, require_extra
from jaxrl.paths import writing
from jaxrl.spaces import to_indices
from jaxrl.strategies.base import Strategy
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import Video
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.run_dir import VIDEOS
from jaxrl.trees import make_key

FPS = 30
LONGEST = 1_000
"""Maximum number of environment steps in a film made during training."""
Player = Callable[[GreedyPolicy, int, int], tuple[list[np.ndarray], float]]
"""`(policy, seed, max_steps) -> (frames, return)`: play a greedy episode, with a frame `[H, W, 3]` of every state."""
Take = Callable[[], tuple[Sequence[np.ndarray], float]]
"""`() -> (frames, return)` of an episode."""


def player(env: Env | HostEnv) -> Player:
    """Return a player of episodes in `env`, compiled once; raise `SettingsError` if `env` cannot be rendered."""
    if isinstance(env, HostEnv):
        if env.make_renderable is None:
            raise SettingsError(f"{env.spec.name} cannot be rendered here")
        return partial(_on_host, env)
    if env.render is None:
        raise SettingsError(f"{env.spec.name} cannot be rendered; give its Env a render function")
    env = as_single_env(env)
    return partial(_on_device, env, jax.jit(env.reset), jax.jit(env.step))


def _on_device(
    env: Env, reset: Any, step: Any, policy: GreedyPolicy, seed: int, max_steps: int
) -> tuple[list[np.ndarray], float]:
    assert env.render is not None
    reset_key, steps_key = jax.random.split(make_key(seed))
    state, obs = reset(reset_key)
    policy.reset()
    try:
        frames, total = [env.render(state)], 0.0
        for t in range(min(max_steps, env.spec.time_limit or max_steps)):
            state, out = step(state, policy(obs), jax.random.fold_in(steps_key, t))
            obs, total = out.obs, total + float(out.reward)
            frames.append(env.render(state))
            if out.terminated or out.truncated:
                break
    except Exception as error:
        raise SettingsError(f"{env.spec.name} cannot be rendered: {error_text(error)}") from error
    return frames, total


def _on_host(env: HostEnv, policy: GreedyPolicy, seed: int, max_steps: int) -> tuple[list[np.ndarray], float]:
    assert env.make_renderable is not None
    try:
        with closing(env.make_renderable()) as one:
            obs, _ = one.reset(seed=seed)
            policy.reset()
            frames, total = [one.render()], 0.0
            for _ in range(max_steps):
                action = jax.tree.map(lambda x: np.asarray(x)[None], policy(obs))
                action = to_indices(env.spec.action_space, action)
                action = jax.tree.map(lambda x: x[0], convert_action(one.action_space, action))
                obs, reward, terminated, truncated, _ = one.step(action)
                frames.append(one.render())
                total += float(reward)
                if terminated or truncated:
                    break
    except Exception as error:
        raise SettingsError(f"{env.spec.name} cannot be rendered: {error_text(error)}") from error
    return frames, total


# --- during a run -------------------------------------------------------------------------------------------------


def film_player(strategy: Strategy, config: TrainerConfig) -> tuple[Player, GreedyPolicy] | None:
    """Return what films the latest policy of a run every `video_interval`, and that policy, without parameters.

    Films start in the same state each time, so that they are comparable.

    Raises:
      SettingsError: there is no environment or no policy, or the environment cannot be rendered.
    """
    if not config.video_interval:
        return None
    require_writer(config.video_format)
    env = strategy.eval_env
    if env is None or strategy.policy is None:
        raise SettingsError("video_interval films episodes, but there is no environment or no policy; set it to 0")
    policy = GreedyPolicy(strategy.policy, ())
    try:
        play = player(env)
        # Draw an initial state: fail before the training, not after hours of it.
        frames, _ = play(policy, 0, 0)
        as_picture(frames[0], env.spec.name)
    except SettingsError as error:
        raise SettingsError(f"video_interval is {config.video_interval}, but {error}; or set it to 0") from error
    return play, policy


def save_video(take: Take, run_dir: str, form: str, opt_steps: int, env_steps: int) -> Video | str:
    """Write the film from `take` into the directory of a run, atomically; return the video.

    If anything fails, return the reason why there is none.
    """
    path = Path(run_dir) / VIDEOS / f"{opt_steps}.{form}"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        frames, total = take()
        path.parent.mkdir(parents=True, exist_ok=True)  # a member of a population has no directory yet
        write_film(frames, temporary, FPS, form)
        # Atomic rename: an incomplete film never has the final name.
        os.replace(temporary, path)
    # A failure to render, encode or write costs a film, not the run.
    except Exception as error:
        temporary.unlink(missing_ok=True)
        return f"no video: {error_text(error)}"
    height, width = frames[0].shape[:2]
    return Video(opt_steps, env_steps, path, total, height, width)


# --- files --------------------------------------------------------------------------------------------------------


def require_writer(form: str) -> None:
    """Raise `SettingsError` unless the package that writes films in the format `form` is installed."""
    if form == "mp4":
        require_extra("av", "films as MP4", "video")


def write_film(frames: Sequence[np.ndarray], path: Path, fps: int, form: str) -> None:
    """Write `[H, W, 3]` uint8 frames in the format `form`; raise `SettingsError` if `path` cannot be written."""
    with writing(path):
        (_write_mp4 if form == "mp4" else _write_gif)(frames, path, fps)


def _write_gif(frames: Sequence[np.ndarray], path: Path, fps: int) -> None:
    """Write a GIF that loops forever."""
    from PIL import Image

    first, *rest = [Image.fromarray(frame) for frame in frames]
    # A GIF counts in hundredths of a second, and browsers show frames of one hundredth for ten.
    duration = 10 * max(2, round(100 / fps))
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=duration, loop=0)


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


def as_picture(drawn: Any, whose: str) -> np.ndarray:
    """Return a copy of a frame; raise `SettingsError`, naming `whose` it is, unless it is uint8 `[H, W, 3]`."""
    if np.ndim(drawn) != 3 or np.shape(drawn)[2] != 3 or np.asarray(drawn).dtype != np.uint8:
        got = f"{np.asarray(drawn).dtype} {list(np.shape(drawn))}"
        raise SettingsError(f"{whose} is drawn as {got}; expected uint8 [H, W, 3]")
    return np.array(drawn)
