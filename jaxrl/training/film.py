"""Rendering of episodes: of a loaded policy, and of the latest policy during a run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.envs import Env, HostEnv
from jaxrl.envs.agents import as_single_env
from jaxrl.envs.host import convert_action
from jaxrl.errors import SettingsError, error_text
from jaxrl.spaces import to_indices
from jaxrl.strategies.base import Strategy
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import Video
from jaxrl.training.reel import LONGEST, as_picture, check_format, save_film
from jaxrl.training.report import Hooks, call
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.run_dir import VIDEOS
from jaxrl.trees import PyTree, make_key

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
    key = make_key(seed)
    state, obs = reset(key)
    policy.reset()
    frames, total = [env.render(state)], 0.0
    for t in range(min(max_steps, env.spec.time_limit or max_steps)):
        state, out = step(state, policy(obs), jax.random.fold_in(key, t))
        obs, total = out.obs, total + float(out.reward)
        frames.append(env.render(state))
        if out.terminated or out.truncated:
            break
    return frames, total


def _on_host(env: HostEnv, policy: GreedyPolicy, seed: int, max_steps: int) -> tuple[list[np.ndarray], float]:
    assert env.make_renderable is not None
    one = env.make_renderable()
    try:
        obs, _ = one.reset(seed=seed)
        policy.reset()
        frames, total = [one.render()], 0.0
        for _ in range(max_steps):
            action = jax.tree.map(lambda x: np.asarray(x)[None], policy(obs))
            action = to_indices(env.spec.action_space, action)
            obs, reward, terminated, truncated, _ = one.step(_first(convert_action(one.action_space, action)))
            frames.append(one.render())
            total += float(reward)
            if terminated or truncated:
                break
    except Exception as error:
        raise SettingsError(f"{env.spec.name} cannot be rendered: {error_text(error)}") from error
    finally:
        one.close()
    return frames, total


def _first(tree: PyTree) -> PyTree:
    """Return the first row of leaves `[1, ...]`."""
    return jax.tree.map(lambda x: x[0], tree)


# --- during a run -------------------------------------------------------------------------------------------------


def add_video_hook(strategy: Strategy, config: TrainerConfig, given: Hooks | None) -> Hooks:
    """Return the hooks `given` to a run, with one that films the latest policy every `video_interval`.

    Films start in the same state each time, so that they are comparable. They do not affect the training: a failure is
    logged, and the run continues.

    Raises:
      SettingsError: there is no environment or no policy, or the environment cannot be rendered.
    """
    hooks = given or Hooks()
    if not config.video_interval:
        return hooks
    check_format(config.video_format, "video_format")
    env = strategy.eval_env
    if env is None or strategy.policy is None:
        raise SettingsError("video_interval films episodes, but there is no environment or no policy; set it to 0")
    try:
        play = player(env)
        # Fail before the training, not after hours of it.
        _first_picture(env)
    except SettingsError as error:
        raise SettingsError(f"video_interval is {config.video_interval}, but {error}; or set it to 0") from error
    policy = GreedyPolicy(strategy.policy, ())

    def film(trainer: Any, evaluation: Any, is_best: bool) -> None:
        counters = trainer.ledger.counters(trainer.schedule)
        if trainer.config.films_at(counters["opt_steps"], trainer.schedule.opt_steps_per_step):
            with trainer.ledger.timed("record"):
                latest = policy.at(trainer._params(trainer.state))
                trainer._log.log_video(_film(play, latest, trainer.config, **counters))

    # Before the user's hook, which may read the film.
    return hooks._replace(evaluation=(film, partial(call, hooks.evaluation)))


def _first_picture(env: Env | HostEnv) -> None:
    """Render an initial state; raise `SettingsError` if that fails."""
    try:
        if isinstance(env, HostEnv):
            assert env.make_renderable is not None
            one = env.make_renderable()
            try:
                one.reset(seed=0)
                picture = one.render()
            finally:
                one.close()
        else:
            assert env.render is not None
            picture = env.render(jax.jit(env.reset)(make_key(0))[0])
    except Exception as error:
        raise SettingsError(f"{env.spec.name} cannot be rendered: {error_text(error)}") from error
    as_picture(picture, env.spec.name)


def _film(play: Player, policy: GreedyPolicy, config: TrainerConfig, opt_steps: int, env_steps: int) -> Video | str:
    """Film an episode; return the video, or the reason why there is none."""
    assert config.run_dir is not None
    return save_video(
        partial(play, policy, config.seed, LONGEST), config.run_dir, config.video_format, opt_steps, env_steps
    )


def save_video(take: Take, run_dir: str, form: str, opt_steps: int, env_steps: int) -> Video | str:
    """Write the film from `take` into the directory of a run; return the video, or the reason why there is none."""
    film = save_film(take, Path(run_dir) / VIDEOS / f"{opt_steps}.{form}")
    return film if isinstance(film, str) else Video(opt_steps, env_steps, *film)
