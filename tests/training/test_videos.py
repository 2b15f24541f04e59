"""Episodes filmed while a run goes on: where, what is in them, who is told, and that training does not notice."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from test_recorders import read_events
from toys_gymnasium import Counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.settings import NEWER, TrainerConfig
from jaxrl.training.storage.leaves import state_digest

LENGTH = 6
SETTINGS: dict[str, Any] = {"max_opts": 64, "eval_interval": 16, "record_interval": 16, "eval_episodes": 2}


def draw(state: Any) -> np.ndarray:
    """Draw where an episode is as a bar that grows."""
    picture = np.zeros((8, 16, 3), np.uint8)
    picture[:, : int(state) + 1] = 255
    return picture


def line(render: Any = draw) -> jaxrl.Env:
    """Walk along a line whatever one does, until the time limit."""
    spec = jaxrl.EnvSpec("Line", jaxrl.Box(0.0, 10.0, (1,)), jaxrl.Discrete(2), time_limit=LENGTH)
    step = lambda state, action, key: (state + 1, jaxrl.TimeStep((state + 1.0)[None], 1.0, False))
    return jaxrl.Env(spec, lambda key: (jnp.int32(0), jnp.zeros(1)), step, render=render)


@cache
def strategy() -> jaxrl.Strategy:
    return jaxrl.on_policy(line(), jaxrl.ppo(features=(4,)), num_envs=2, rollout=8, epochs=2, minibatches=2)


def trained(run_dir: Path, **settings: Any) -> Any:
    return jaxrl.Trainer(strategy(), run_dir=str(run_dir), **{**SETTINGS, "quiet": True, **settings}).train()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without what the clock and the memory say."""
    clock = ("wall_s", "opt_steps_per_sec", "env_steps_per_sec", "rss_mb")
    log = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in row.items() if name not in clock} for row in log]


def videos(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "videos").iterdir())


class Told:
    """A recorder that keeps what it is told of videos."""

    def __init__(self) -> None:
        self.videos: list[jaxrl.Video] = []

    def video(self, video: jaxrl.Video) -> None:
        self.videos.append(video)

    def write(self, row: Any) -> None:
        pass

    def tick(self, progress: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_episode_is_filmed_at_the_interval_and_training_does_not_notice(tmp_path: Path) -> None:
    plain, told = trained(tmp_path / "plain"), Told()
    filmed = trained(tmp_path / "filmed", video_interval=32, recorders=["tensorboard", told])
    assert videos(tmp_path / "filmed") == ["32.gif", "64.gif"]
    assert not (tmp_path / "plain" / "videos").exists()
    with Image.open(tmp_path / "filmed/videos/64.gif") as picture:
        assert (picture.size, getattr(picture, "n_frames", 1)) == ((16, 8), LENGTH + 1)
    assert state_digest(filmed.state) == state_digest(plain.state)
    assert rows(tmp_path / "filmed") == rows(tmp_path / "plain")
    path = tmp_path / "filmed" / "videos" / "32.gif"
    assert told.videos[0] == jaxrl.Video(32, 128, path, float(LENGTH), 8, 16)
    assert [video.opt_steps for video in told.videos] == [32, 64]


def test_tensorboard_shows_it_among_the_images(tmp_path: Path) -> None:
    trained(tmp_path / "run", video_interval=64)
    (path,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"eval/episode" in path.read_bytes()
    assert (tmp_path / "run/videos/64.gif").read_bytes() in path.read_bytes()
    assert read_events(tmp_path / "run" / "tensorboard")


def test_a_run_that_goes_on_films_the_same_and_may_begin_or_leave_off(tmp_path: Path) -> None:
    trained(tmp_path / "whole", video_interval=16)
    trained(tmp_path / "parts", video_interval=16, max_opts=32)
    trained(tmp_path / "parts", video_interval=16, resume=True)
    assert videos(tmp_path / "parts") == videos(tmp_path / "whole") == ["16.gif", "32.gif", "48.gif", "64.gif"]
    for name in videos(tmp_path / "whole"):
        files = [(tmp_path / run / "videos" / name).read_bytes() for run in ("whole", "parts")]
        assert files[0] == files[1]
    trained(tmp_path / "parts", video_interval=0, resume=True, max_opts=80)
    assert "80.gif" not in videos(tmp_path / "parts")
    assert NEWER["video_interval"] == 0


def test_the_first_evaluation_after_each_interval_is_filmed() -> None:
    at = lambda evaluations, by=1, **settings: [s for s in evaluations if TrainerConfig(**settings).films_at(s, by)]
    assert at(range(0, 101, 10), eval_interval=10, video_interval=25) == [0, 30, 50, 80, 100]
    assert at(range(10, 101, 10), eval_interval=10, video_interval=10) == [*range(10, 101, 10)]
    assert at(range(10, 101, 10), eval_interval=10, video_interval=3) == [*range(10, 101, 10)]
    assert at(range(10, 101, 10), eval_interval=10) == []
    assert at([70], eval_interval=0, video_interval=50) == [70]
    # Iterations of 16 steps, and the end of the run, where there is an evaluation as well.
    assert at([1_008, 2_000, 3_008, 3_200], 16, eval_interval=1_000, video_interval=1_000) == [1_008, 2_000, 3_008]
    assert at([1_008, 1_600], 16, eval_interval=1_000, video_interval=1_500) == [1_600]


def broken(state: Any) -> np.ndarray:
    raise ValueError("no\ncanvas")


@pytest.mark.parametrize(
    ("env", "settings", "said"),
    [
        (line(None), {}, "Line cannot be rendered; give its Env a render function; or set it to 0"),
        (line(broken), {}, "Line cannot be rendered: no canvas; or set it to 0"),
        (line(lambda state: np.zeros((4, 4))), {}, r"Line is drawn as float64 \[4, 4\]; expected uint8 \[H, W, 3\]"),
        (line(), {"run_dir": None}, "set run_dir and eval_episodes"),
        (line(), {"eval_interval": 0, "eval_episodes": 0}, "set run_dir and eval_episodes"),
        (line(), {"video_interval": -1}, "video_interval is -1"),
    ],
)
def test_what_cannot_be_filmed_is_refused_in_one_line_before_anything_compiles(
    env: jaxrl.Env, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=8, epochs=2, minibatches=2)
    given = {**SETTINGS, "video_interval": 32, "run_dir": str(tmp_path / "run"), **settings}
    with pytest.raises(SettingsError, match=said) as refused:
        jaxrl.Trainer(made, **given)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_film_that_fails_on_the_way_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    drawn: list[int] = []

    def tiring(state: Any) -> np.ndarray:
        drawn.append(int(state))
        if len(drawn) > 3:
            raise ValueError("no ink")
        return draw(state)

    made = jaxrl.on_policy(line(tiring), jaxrl.ppo(features=(4,)), num_envs=2, rollout=8, epochs=2, minibatches=2)
    settings = {**SETTINGS, "quiet": True, "video_interval": 32, "run_dir": str(tmp_path / "run")}
    assert jaxrl.Trainer(made, **settings).train().summary["stop"] == "max_opts"
    events = [row["message"] for row in rows(tmp_path / "run") if row.get("event") == "video"]
    assert events == ["no video: no ink"] * 2
    assert not list((tmp_path / "run").rglob("*.gif*"))


def test_a_service_is_told_and_one_that_fails_at_it_still_has_all_rows(tmp_path: Path) -> None:
    told: list[Any] = []

    class Service:
        def connect(self, run: Any, kept: dict[str, Any]) -> dict[str, Any]:
            return {}

        def send(self, row: Any) -> None:
            told.append((row["kind"], row["opt_steps"]))

        def video(self, video: jaxrl.Video) -> None:
            told.append(("video", video.opt_steps))
            raise OSError("away")

        def finish(self, run: Any) -> None:
            pass

        def abandon(self) -> None:
            pass

    recorder = jaxrl.ServiceRecorder("lab", Service, retry_s=0.01)
    trained(tmp_path / "run", video_interval=32, recorders=[recorder])
    steps = (16, 32, 48, 64)
    assert sorted(told) == sorted(
        [*(("eval", s) for s in steps), *(("train", s) for s in steps), ("video", 32), ("video", 64)]
    )


class Drawn(Counting):
    """Draw as many white columns as steps were taken."""

    def render(self) -> np.ndarray:
        return draw(self.steps)


def test_environments_on_the_host_are_filmed(tmp_path: Path) -> None:
    spec = jaxrl.EnvSpec("Counting", jaxrl.Box(0.0, np.inf, (2,)), jaxrl.Discrete(2))
    env = jaxrl.gymnasium_envs(spec, Drawn)
    parts = {"num_envs": 2, "rollout": 8, "epochs": 2, "minibatches": 2}
    settings = {**SETTINGS, "max_opts": 8, "quiet": True, "video_interval": 8, "run_dir": str(tmp_path / "run")}
    with pytest.raises(SettingsError, match="Counting cannot be rendered here"):
        jaxrl.Trainer(jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), **parts), **settings)
    made = jaxrl.on_policy(env._replace(film=Drawn), jaxrl.ppo(features=(4,)), **parts)
    jaxrl.Trainer(made, **settings).train()
    with Image.open(tmp_path / "run/videos/8.gif") as picture:
        assert getattr(picture, "n_frames", 1) == 3 + 1  # the first episode terminates after three steps
