"""Episodes filmed while a run goes on: where, what is in them, who is told, and that training does not notice."""

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from toys_gymnasium import Counting
from toys_runs import messages, rows_in, timeless, values_of
from toys_session import single

import jaxrl
from jaxrl import verify
from jaxrl.errors import SettingsError
from jaxrl.play import require_writable
from jaxrl.reports.groups import group_runs
from jaxrl.reports.page import page
from jaxrl.reports.read import read_runs
from jaxrl.training.film import player, write_film
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.settings import TrainerConfig
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


def learning(env: Any) -> jaxrl.Strategy:
    return jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=8, epochs=2, minibatches=2)


@cache
def strategy() -> jaxrl.Strategy:
    return learning(line())


def trained(run_dir: Path, **settings: Any) -> Any:
    return jaxrl.Trainer(strategy(), run_dir=str(run_dir), **{**SETTINGS, "quiet": True, **settings}).train()


def videos(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "videos").iterdir())


class Told(jaxrl.Recorder):
    """A recorder that keeps what it is told of videos."""

    def __init__(self) -> None:
        self.videos: list[jaxrl.Video] = []

    def video(self, video: jaxrl.Video) -> None:
        self.videos.append(video)


def test_an_episode_is_filmed_at_the_interval_and_training_does_not_notice(tmp_path: Path) -> None:
    plain, told = trained(tmp_path / "plain"), Told()
    filmed = trained(tmp_path / "filmed", video_interval=32, recorders=["tensorboard", told])
    assert videos(tmp_path / "filmed") == ["32.gif", "64.gif"]
    assert not (tmp_path / "plain" / "videos").exists()
    with Image.open(tmp_path / "filmed/videos/64.gif") as picture:
        assert (picture.size, getattr(picture, "n_frames", 1)) == ((16, 8), LENGTH + 1)
    assert state_digest(filmed.state) == state_digest(plain.state)
    assert timeless(rows_in(tmp_path / "filmed")) == timeless(rows_in(tmp_path / "plain"))
    path = tmp_path / "filmed" / "videos" / "32.gif"
    assert told.videos[0] == jaxrl.Video(32, 128, path, float(LENGTH), 8, 16)
    assert [video.opt_steps for video in told.videos] == [32, 64]
    images = [
        (step, value.tag) for step, value in values_of(tmp_path / "filmed/tensorboard") if value.HasField("image")
    ]
    assert images == [(32, "eval/episode"), (64, "eval/episode")]
    (board,) = (tmp_path / "filmed" / "tensorboard").iterdir()
    assert all(video.path.read_bytes() in board.read_bytes() for video in told.videos)


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


def test_an_evaluation_by_the_return_of_training_is_filmed_in_place_of_the_next(tmp_path: Path) -> None:
    """Each record evaluates, after every 16 steps, and the multiples are 24 and 48."""
    settings = {"eval_interval": 32, "eval_at_return": 0.0, "video_interval": 24}
    trained(tmp_path / "whole", **settings)
    trained(tmp_path / "parts", **settings, max_opts=48)
    trained(tmp_path / "parts", **settings, resume=True)
    assert videos(tmp_path / "parts") == videos(tmp_path / "whole") == ["32.gif", "48.gif"]


def test_steps_of_a_film_draw_other_numbers_than_its_reset() -> None:
    """A reset that splits its key draws from `fold_in` of it with 0, 1, ..."""

    def reset(key: Any) -> Any:
        drawn = jax.vmap(jax.random.uniform)(jax.random.split(key, LENGTH))
        return (jnp.int32(0), drawn), jnp.zeros(1)

    def step(state: Any, action: Any, key: Any) -> Any:
        again = jnp.isin(jax.random.uniform(key), state[1]).astype(jnp.float32)
        return (state[0] + 1, state[1]), jaxrl.TimeStep(jnp.zeros(1), again, False)

    env = line(lambda state: draw(state[0]))._replace(reset=reset, step=step)
    policy = learning(env).policy
    assert policy is not None
    pictures, repeats = player(env)(GreedyPolicy(policy, policy.params(learning(env).init(jax.random.key(0)))), 0, 10)
    assert (len(pictures), repeats) == (LENGTH + 1, 0.0)


def test_the_first_evaluation_after_each_interval_is_filmed() -> None:
    at = lambda evaluations, interval: [
        step
        for before, step in pairwise([None, *evaluations])
        if TrainerConfig(video_interval=interval).films_at(step, before)
    ]
    assert at(range(0, 101, 10), 25) == [0, 30, 50, 80, 100]
    assert at(range(10, 101, 10), 10) == [*range(10, 101, 10)]
    assert at(range(10, 101, 10), 3) == [*range(10, 101, 10)]
    assert at(range(10, 101, 10), 0) == []
    assert at([70], 50) == [70]
    # Iterations of 16 steps, and the end of the run, where there is an evaluation as well.
    assert at([1_008, 2_000, 3_008, 3_200], 1_000) == [1_008, 2_000, 3_008]
    assert at([1_008, 1_600], 1_500) == [1_600]
    assert at([2_000, 3_100, 4_000], 1_500) == [2_000, 3_100]


@pytest.mark.parametrize("layout", ["spread", pytest.param("together", marks=pytest.mark.slow)])
def test_members_of_a_population_are_filmed_as_by_themselves(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, settings = tmp_path / "run", {**SETTINGS, "max_opts": 32, "quiet": True, "video_interval": 16}
    members = jaxrl.population(strategy(), seeds=2, layout=layout)
    jaxrl.Trainer(members, **settings, run_dir=run).train()
    jaxrl.Trainer(members, **{**settings, "max_opts": 48}, run_dir=run, resume=True).train()
    trained(tmp_path / "alone", video_interval=16, max_opts=48, seed=1)
    for number in range(2):
        assert videos(run / f"members/0000{number}") == ["16.gif", "32.gif", "48.gif"]
    alone = tmp_path / "alone/videos/48.gif"
    assert (run / "members/00001/videos/48.gif").read_bytes() == alone.read_bytes()
    assert [read.film for read in read_runs([str(run)])] == [run / f"members/0000{n}/videos/48.gif" for n in range(2)]
    extracted = jaxrl.extract(run, 1, tmp_path / "extracted")
    assert videos(extracted) == ["16.gif", "32.gif", "48.gif"]
    assert verify.main([str(run)]) == 0, capsys.readouterr().err


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
    given = {**SETTINGS, "video_interval": 32, "run_dir": str(tmp_path / "run"), **settings}
    made = learning(env)
    for trained in (made, jaxrl.population(made, seeds=2)):
        with pytest.raises(SettingsError, match=said) as refused:
            jaxrl.Trainer(trained, **given)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_film_that_fails_on_the_way_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    drawn: list[int] = []

    def tiring(state: Any) -> np.ndarray:
        drawn.append(int(state))
        if len(drawn) > 3:
            raise ValueError("no ink")
        return draw(state)

    made = learning(line(tiring))
    settings = {**SETTINGS, "quiet": True, "video_interval": 32, "run_dir": str(tmp_path / "run")}
    assert jaxrl.Trainer(made, **settings).train().summary["stop"] == "max_opts"
    assert messages(tmp_path / "run", "video") == ["no video: no ink"] * 2
    assert not list((tmp_path / "run").rglob("*.gif*"))


def test_a_service_is_told_and_one_that_fails_at_it_still_has_all_rows(tmp_path: Path) -> None:
    told: list[Any] = []

    class Service(jaxrl.Service):
        def connect(self, run: Any, kept: dict[str, Any]) -> dict[str, Any]:
            return {}

        def send(self, row: Any) -> None:
            told.append((row["kind"], row["opt_steps"]))

        def video(self, video: jaxrl.Video) -> None:
            told.append(("video", video.opt_steps))
            raise OSError("away")

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


@pytest.mark.slow
def test_environments_on_the_host_are_filmed(tmp_path: Path) -> None:
    spec = jaxrl.EnvSpec("Counting", jaxrl.Box(0.0, np.inf, (2,)), jaxrl.Discrete(2))
    env = jaxrl.gymnasium_envs(spec, Drawn)
    settings = {**SETTINGS, "max_opts": 8, "quiet": True, "video_interval": 8, "run_dir": str(tmp_path / "run")}
    with pytest.raises(SettingsError, match="Counting cannot be rendered here"):
        jaxrl.Trainer(learning(env), **settings)
    jaxrl.Trainer(learning(env._replace(make_renderable=Drawn)), **settings).train()
    with Image.open(tmp_path / "run/videos/8.gif") as picture:
        assert getattr(picture, "n_frames", 1) == 3 + 1  # the first episode terminates after three steps


# --- formats ------------------------------------------------------------------------------------------------------


def of_mp4(path: Path) -> list[np.ndarray]:
    av = pytest.importorskip("av")
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_a_run_films_as_mp4_and_the_report_plays_it(tmp_path: Path) -> None:
    pytest.importorskip("av")
    told = Told()
    trained(tmp_path / "run", video_interval=32, video_format="mp4", recorders=["tensorboard", told])
    assert videos(tmp_path / "run") == ["32.mp4", "64.mp4"]
    pictures = of_mp4(tmp_path / "run/videos/64.mp4")
    assert [picture.shape for picture in pictures] == [(8, 16, 3)] * (LENGTH + 1)
    white = [float((picture > 128).mean()) * 16 for picture in pictures]  # columns of the bar that grows
    assert white == pytest.approx(range(1, LENGTH + 2), abs=1)
    assert [video.path.name for video in told.videos] == ["32.mp4", "64.mp4"]
    assert b"ftypisom" not in b"".join(path.read_bytes() for path in (tmp_path / "run/tensorboard").iterdir())
    assert read_runs([str(tmp_path / "run")])[0].film == tmp_path / "run/videos/64.mp4"
    shown = page(group_runs(read_runs([str(tmp_path / "run")])), [], "")
    assert 'src="data:video/mp4;base64,' in shown
    assert "<video" in shown


def test_odd_sides_are_filmed_and_the_same_pictures_make_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = [np.full((5, 7, 3), shade, np.uint8) for shade in (20, 120, 220)]
    for name in ("a", "b"):
        write_film(frames, tmp_path / f"{name}.mp4", 30, "mp4")
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    pictures = of_mp4(tmp_path / "a.mp4")
    assert [picture.shape for picture in pictures] == [(6, 8, 3)] * 3
    np.testing.assert_allclose([picture.mean() for picture in pictures], [20, 120, 220], atol=6)


@pytest.mark.parametrize(("fps", "milliseconds"), [(1, 1000), (30, 30), (50, 20), (100, 20)])
def test_pictures_of_a_gif_last_whole_hundredths_of_a_second_and_never_one(
    fps: int, milliseconds: int, tmp_path: Path
) -> None:
    """Which is what the format counts in; browsers show pictures of one hundredth for ten."""
    write_film([np.full((2, 2, 3), shade, np.uint8) for shade in (20, 220)], tmp_path / "film.gif", fps, "gif")
    with Image.open(tmp_path / "film.gif") as picture:
        assert picture.info["duration"] == milliseconds


def test_a_format_that_is_none_and_one_that_wants_a_package_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="video_format is 'avi'; expected gif or mp4"):
        trained(tmp_path / "run", video_format="avi")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(SettingsError, match=r"films as MP4 need the extra `video`: pip install 'jaxrl\[video\]'"):
        trained(tmp_path / "run", video_interval=32, video_format="mp4")
    with pytest.raises(SettingsError, match=r"pip install 'jaxrl\[video\]'"):
        require_writable(tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


# --- sessions -----------------------------------------------------------------------------------------------------


class Filmed:
    """A line in a loop of one's own: episodes of four steps, which pay 1 each, drawn as a bar that grows."""

    def __init__(self) -> None:
        self.place = 0

    def __call__(self, session: jaxrl.Session) -> None:
        action = session.act(np.float32([self.place]))
        assert 0 <= int(action) <= 1
        self.place += 1
        session.observe(1.0, np.float32([self.place]), self.place == 4, False)  # the last picture is of the place 4
        self.place %= 4

    def render(self) -> np.ndarray:
        return draw(self.place)


def stepwise(run_dir: Path | None, **settings: Any) -> jaxrl.Session:
    spec = jaxrl.EnvSpec("Line", jaxrl.Box(0.0, 10.0, (1,)), jaxrl.Discrete(2))
    return single(spec=spec, warmup=4, max_opts=0, run_dir=run_dir and str(run_dir), **settings)


@pytest.mark.slow
def test_a_session_films_the_first_episode_that_an_evaluation_counts(tmp_path: Path) -> None:
    loop, told = Filmed(), Told()
    with stepwise(tmp_path, recorders=["jsonl", told]) as session:
        for _ in range(6):
            loop(session)
        session.evaluate_episodes(2, film=loop.render)
        steps = 0
        while session.is_evaluating:
            loop(session)
            steps += 1
        assert steps == 2 + 2 * 4  # the running episode is played to its end, and does not count
        counters = (session.opt_steps, session.env_steps)
        loop(session)
    (video,) = told.videos
    assert video == jaxrl.Video(*counters, tmp_path / f"videos/{counters[0]}.gif", 4.0, 8, 16)
    with Image.open(video.path) as picture:
        assert getattr(picture, "n_frames", 1) == 5  # the places 0 to 4


def test_a_film_of_a_session_that_fails_or_is_given_up_never_reaches_the_loop(tmp_path: Path) -> None:
    loop = Filmed()
    with pytest.raises(SettingsError, match="film writes into the directory of the run; set run_dir"):
        stepwise(None).evaluate_episodes(1, film=loop.render)
    drawn: list[int] = []

    def tiring() -> Any:
        drawn.append(loop.place)
        return draw(loop.place) if len(drawn) < 3 else None

    with stepwise(tmp_path) as session:
        session.evaluate_episodes(1, film=tiring)
        while session.is_evaluating:
            loop(session)
        session.evaluate_episodes(1, film=loop.render)
        loop(session)
        session.cut()  # the robot was lifted: the episode begins anew, and so does its film
        loop.place = 0
        while session.is_evaluating:
            loop(session)
    assert messages(tmp_path, "video") == [
        "no video: film drew nothing; make a Gymnasium environment with render_mode='rgb_array'"
    ]
    assert drawn == [0, 1, 2]  # it is not asked again
    with Image.open(tmp_path / "videos/0.gif") as picture:
        assert getattr(picture, "n_frames", 1) == 5
