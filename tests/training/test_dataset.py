"""Data sets on disk: what is written is what is read, and what is wrong with a file is said in one line."""

import io
import json
import os
import sys
import tracemalloc
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from toys_data import walk
from toys_gymnasium import Counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, spec_to_plain
from jaxrl.training.storage import weights

SPEC = walk().spec


def entries(**changes: Any) -> dict[str, Any]:
    """Return what `walk` is in a file, some of it changed, and left out where that is `None`."""
    data = walk()
    arrays = {name: getattr(data, name) for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated")}
    return {name: value for name, value in {**arrays, **changes}.items() if value is not None}


def written(path: Path, arrays: dict[str, Any]) -> str:
    np.savez(path / "data.npz", **arrays)
    return str(path / "data.npz")


def same(a: jaxrl.Dataset, b: jaxrl.Dataset) -> None:
    for name in ("reward", "terminated", "truncated", "action"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    jaxrl.save_dataset(tmp_path / "walk.npz", walk())
    data = jaxrl.load_dataset(tmp_path / "walk.npz")
    same(data, walk())
    np.testing.assert_array_equal(data.obs, walk().obs)
    assert data.spec == SPEC
    assert data.settings["data"] == [str(tmp_path / "walk.npz")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["walk.npz"]
    with np.load(tmp_path / "walk.npz") as archive:
        assert json.loads(str(archive["spec"]))["name"] == "Walk"
    # A part of it is not what the file holds.
    assert data.where(np.ones(len(data.reward), bool)).settings is None


def test_nested_observations_have_flat_names(tmp_path: Path) -> None:
    data, part = walk(), {"b": walk().obs, "c": walk().obs + np.float32(1)}
    space = {"a": {"b": SPEC.observation_space, "c": Box(0.0, 200.0, (1,))}, "d": Discrete(100)}
    nested = {"a": part, "d": walk().obs[:, 0].astype(np.int32)}
    spec = EnvSpec("Nested", space, Discrete(2))
    jaxrl.save_dataset(tmp_path / "x.npz", data._replace(spec=spec, obs=nested, next_obs={**nested, "a": nested["a"]}))
    with np.load(tmp_path / "x.npz") as archive:
        assert {"obs/a/b", "obs/a/c", "obs/d", "next_obs/d"} < set(archive.files)
    with pytest.raises(SettingsError, match="obs of step 1 is not next_obs of step 0"):
        jaxrl.load_dataset(tmp_path / "x.npz")  # they never move, though their observations do
    following = {"a": {k: v + np.float32(1) for k, v in part.items()}, "d": nested["d"] + np.int32(1)}
    jaxrl.save_dataset(tmp_path / "x.npz", data._replace(spec=spec, obs=nested, next_obs=following))
    back = jaxrl.load_dataset(tmp_path / "x.npz")
    np.testing.assert_array_equal(back.obs["a"]["c"], nested["a"]["c"])
    assert (back.obs["d"].dtype, back.spec) == (np.int32, spec)


def test_flags_come_back_and_numbers_count_from_their_start(tmp_path: Path) -> None:
    flags, floors = Box(0, 1, (2,), bool), Discrete(13, start=4)
    spec = EnvSpec("Lift", {"action_mask": flags, "floor": floors}, Discrete(2, start=-1))
    mask, floor = np.arange(26).reshape(13, 2) % 3 > 0, (4 + np.arange(13)).astype(np.int32)
    before, after = ({"action_mask": mask[at], "floor": floor[at]} for at in (slice(12), slice(1, 13)))
    action, reward = np.arange(12, dtype=np.int32) % 2 - 1, np.ones(12, np.float32)
    data = jaxrl.Dataset(spec, before, action, reward, after, np.arange(12) == 11, np.zeros(12, bool))
    jaxrl.save_dataset(tmp_path / "lift.npz", data)
    back = jaxrl.load_dataset(tmp_path / "lift.npz")
    assert back.spec == spec
    same(back, data)
    for name in ("action_mask", "floor"):
        np.testing.assert_array_equal(back.obs[name], data.obs[name])
        np.testing.assert_array_equal(back.next_obs[name], data.next_obs[name])
    assert back.obs["action_mask"].dtype == bool
    jaxrl.save_dataset(tmp_path / "lift.npz", data._replace(action=data.action + 1))
    with pytest.raises(SettingsError, match=r"action of step 1 is outside Discrete\(n=2.* start=-1"):
        jaxrl.load_dataset(tmp_path / "lift.npz")


def test_the_names_of_d4rl_and_wider_numbers_are_taken(tmp_path: Path) -> None:
    names = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
    arrays = dict(zip(names, entries().values(), strict=True))
    arrays |= {"observations": arrays["observations"].astype(np.float64), "actions": arrays["actions"][:, None]}
    same(jaxrl.load_dataset(written(tmp_path, arrays), spec=SPEC), walk())


def test_a_set_that_breaks_off_is_cut_there(tmp_path: Path) -> None:
    last = np.arange(12) == 11
    arrays = entries(terminated=walk().terminated & ~last, truncated=walk().truncated)
    data = jaxrl.load_dataset(written(tmp_path, arrays), spec=SPEC)
    assert (data.terminated[-1], data.truncated[-1]) == (False, True)


def test_several_files_are_one_set_with_a_checksum_that_knows_every_bit(tmp_path: Path) -> None:
    one, two = tmp_path / "1.npz", tmp_path / "2.npz"
    jaxrl.save_dataset(one, walk())
    jaxrl.save_dataset(two, walk((2, 3), (True, True)))
    both, other = jaxrl.load_dataset(one, two), jaxrl.load_dataset(two, one)
    assert (both.rows, both.episode[-1]) == (17, 4)
    found = both.settings["data_sha256"]
    assert found != other.settings["data_sha256"]
    jaxrl.load_dataset(one, two, sha256=found)
    with pytest.raises(SettingsError, match=r"is not what the run was trained on .* begin another run"):
        jaxrl.load_dataset(two, one, sha256=found)


def test_sets_of_two_environments_are_not_mixed(tmp_path: Path) -> None:
    jaxrl.save_dataset(tmp_path / "1.npz", walk())
    jaxrl.save_dataset(tmp_path / "2.npz", walk()._replace(spec=SPEC._replace(name="Other")))
    with pytest.raises(SettingsError, match=r"gathered in Other, and .* in Walk"):
        jaxrl.load_dataset(tmp_path / "1.npz", tmp_path / "2.npz")


def put(name: str, row: int, value: Any) -> dict[str, Any]:
    array = np.array(entries()[name])
    array[row] = value
    return entries(**{name: array})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no rewards": (entries(reward=None), r"has no reward \(or rewards\); it has action"),
    "no successors": (entries(next_obs=None), r"has no next_obs \(or next_observations\)"),
    "no ends": (entries(terminated=None), r"has no terminated \(or terminals\)"),
    "never an end": (
        entries(terminated=np.zeros(12, bool), truncated=None),
        r"no end of an episode: .* set truncated \(or timeouts\)",
    ),
    "empty": ({name: value[:0] for name, value in entries().items()}, "holds no steps"),
    "shape": (entries(obs=np.zeros((12, 2), np.float32)), r"obs has shape \[12, 2\]; expected \[12, 1\]"),
    "rows": (entries(action=np.zeros(11, np.int32)), r"action has shape \[11\]; expected \[12\]"),
    "dtype": (entries(action=np.zeros(12)), "action has dtype float64; expected int32"),
    "not a number": (put("reward", 3, np.nan), "reward of step 3 is not finite"),
    "infinite": (put("next_obs", 7, np.inf), "next_obs of step 7 is not finite"),
    "beyond float32": (entries(reward=np.r_[np.ones(11), 1e300]), "reward of step 11 is not finite as float32"),
    "observations beyond float32": (
        entries(obs=np.full((12, 1), -1e308)),
        "obs of step 0 is not finite as float32; leave the step's episode out",
    ),
    "a spec of too many": (
        entries(spec=np.array(json.dumps(spec_to_plain(SPEC)).replace('"n": 2', f'"n": {10**40}'))),
        "its entry spec is invalid: Discrete: n is 1000",
    ),
    "a spec without sense": (
        entries(spec=np.array(json.dumps({**spec_to_plain(SPEC), "time_limit": "x"}))),
        "its entry spec is invalid: environment Walk: time_limit is 'x'",
    ),
    "no such action": (put("action", 4, 2), r"action of step 4 is outside Discrete\(n=2"),
    "out of order": (put("obs", 5, 90.0), "obs of step 5 is not next_obs of step 4"),
    "a leaf too many": (entries(**{"obs/a": np.zeros(12)}), "has obs/a, but obs is obs in that environment"),
    "a pickle": (entries(reward=np.array([{}] * 12, object)), "expected an .npz file of plain arrays"),
    "a damaged spec": (entries(spec=np.array('{"name": 3')), "its entry spec is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_file_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    arrays, message = BAD[case]
    file = written(tmp_path, arrays)
    with pytest.raises(SettingsError, match=message) as refused:
        jaxrl.load_dataset(file, spec=SPEC)
    assert "\n" not in str(refused.value)
    assert file in str(refused.value)


def frames(rows: int, *shape: int) -> tuple[EnvSpec, dict[str, Any]]:
    """Return a film of so many steps, a file of it, in which each frame has another brightness."""
    obs = np.arange(rows + 1, dtype=np.uint8).reshape(-1, *[1] * len(shape)) * np.ones(shape, np.uint8)
    zeros, ends = np.zeros(rows, np.int32), np.arange(rows) == rows - 1
    arrays = {"obs": obs[:-1], "next_obs": obs[1:], "action": zeros, "reward": zeros, "terminated": ends}
    return EnvSpec("Film", Box(0, 255, shape, np.uint8), Discrete(2)), arrays


def test_images_take_little_more_memory_than_they_have(tmp_path: Path) -> None:
    spec, arrays = frames(250, 84, 84, 4)
    file = written(tmp_path, arrays)
    jaxrl.load_dataset(file, spec=spec)
    tracemalloc.start()
    data = jaxrl.load_dataset(file, spec=spec)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * (data.obs.nbytes + data.next_obs.nbytes)


def test_a_step_that_is_out_of_order_is_found_in_any_part_of_the_file(tmp_path: Path) -> None:
    spec, arrays = frames(250, 84, 84, 4)
    arrays["obs"] = arrays["obs"].copy()
    arrays["obs"][217, 3, 2, 1] ^= 1
    with pytest.raises(SettingsError, match="obs of step 217 is not next_obs of step 216"):
        jaxrl.load_dataset(written(tmp_path, arrays), spec=spec)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "torn.npz").write_bytes(Path(written(tmp_path, entries())).read_bytes()[:900])
    (tmp_path / "text.npz").write_text("hello")
    wrong = {"one.npy": "is one array", "torn.npz": "undamaged", "text.npz": "undamaged", "none.npz": "No such file"}
    for name, message in wrong.items():
        with pytest.raises(SettingsError, match=message):
            jaxrl.load_dataset(tmp_path / name, spec=SPEC)
    os.mkfifo(tmp_path / "pipe.npz")  # to open it would wait for a writer
    for name in ("pipe.npz", "."):
        with pytest.raises(SettingsError, match=r"it is no regular file; expected an \.npz file"):
            jaxrl.load_dataset(tmp_path / name, spec=SPEC)
    with pytest.raises(SettingsError, match="does not say in which environment"):
        jaxrl.load_dataset(written(tmp_path, entries()))
    with pytest.raises(SettingsError, match="cannot write"):
        jaxrl.save_dataset(tmp_path / "no" / "x.npz", walk())


def test_a_file_that_would_fill_the_memory_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("obs.npy", npy_header(400_000) + bytes(400_000))
    assert bomb.stat().st_size < 2_000
    monkeypatch.setattr(weights, "host_bytes", lambda: 300_000)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kwargs: pytest.fail("it was unpacked"))
    with pytest.raises(SettingsError, match=r"bomb.npz holds 0.0 GiB of arrays once unpacked"):
        jaxrl.load_dataset(bomb, spec=SPEC)


def test_an_array_that_is_shorter_than_it_says_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "liar.npz", "w") as archive:
        archive.writestr("reward.npy", npy_header(2**40))
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kwargs: pytest.fail("it was unpacked"))
    with pytest.raises(SettingsError, match=r"reward.npy is said to have shape \[1099511627776\], but is shorter"):
        jaxrl.load_dataset(tmp_path / "liar.npz", spec=SPEC)


def npy_header(rows: int) -> bytes:
    """Return the beginning of an array of `rows` bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|i1", "fortran_order": False, "shape": (rows,)})
    return file.getvalue()


def test_actions_beyond_the_bounds_are_refused_and_rounded_ones_taken(tmp_path: Path) -> None:
    spec = SPEC._replace(action_space=Box(-2.0, 2.0, (1,)))
    wide = np.full((12, 1), 2.0005, np.float32)
    jaxrl.load_dataset(written(tmp_path, entries(action=wide)), spec=spec)
    with pytest.raises(SettingsError, match=r"action of step 0 is outside Box"):
        jaxrl.load_dataset(written(tmp_path, entries(action=wide * 2)), spec=spec)


# --- Minari, of which a stand-in tells what the real one would ----------------------------------------------------


POSITION = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float64)


def minari_of(*lengths: int) -> ModuleType:
    """Return a module that holds one data set, of episodes that count and alternate actions 1 and 2."""
    episodes = [
        SimpleNamespace(
            observations={"at": np.arange(n + 1.0)[:, None]},
            actions=1 + np.arange(n) % 2,
            rewards=np.ones(n),
            terminations=np.arange(n) == n - 1 if n > 2 else np.zeros(n, bool),
            truncations=np.zeros(n, bool),
        )
        for n in lengths
    ]
    found = SimpleNamespace(
        iterate_episodes=lambda: iter(episodes),
        env_spec=SimpleNamespace(id="Walk-v0"),
        observation_space=gymnasium.spaces.Dict(at=POSITION),
        action_space=gymnasium.spaces.Discrete(2, start=1),
    )
    module = ModuleType("minari")

    def load_dataset(name: str) -> Any:
        if name != "walk/v0":
            raise FileNotFoundError(f"{name} not found locally")
        return found

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    return module


def test_a_data_set_of_minari_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", minari_of(3, 2))
    data = jaxrl.load_dataset("minari:walk/v0")
    spaces = {"at": Box(0.0, 100.0, (1,))}, Discrete(2, start=1)
    assert data.spec == EnvSpec("gymnasium:Walk-v0", *spaces)
    np.testing.assert_array_equal(data.next_obs["at"][:, 0], [1, 2, 3, 1, 2])
    np.testing.assert_array_equal(data.action, [1, 2, 1, 1, 2])
    np.testing.assert_array_equal(data.terminated, [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(data.truncated, [0, 0, 0, 0, 1])
    assert data.settings["data"] == ["minari:walk/v0"]
    given = EnvSpec("Walk", spaces[0], Discrete(2))
    named = jaxrl.load_dataset("minari:walk/v0", spec=given)
    assert named.spec == given
    np.testing.assert_array_equal(named.action, [0, 1, 0, 0, 1])
    with pytest.raises(SettingsError, match="fetch it with: minari download other/v1"):
        jaxrl.load_dataset("minari:other/v1")


def test_without_minari_the_line_that_installs_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(SettingsError, match=r"pip install 'jaxrl\[minari\]'"):
        jaxrl.load_dataset("minari:walk/v0")


class Nested(gymnasium.Wrapper):
    """`Counting`, observed as a dict with a tuple in it, by actions that are like that too."""

    observation_space = gymnasium.spaces.Dict(
        at=Counting.observation_space, flags=gymnasium.spaces.Tuple([gymnasium.spaces.MultiBinary(2)])
    )
    action_space = gymnasium.spaces.Dict(
        a=Counting.action_space, b=gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)])
    )

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return self.nested(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = self.env.step(action["a"])
        return self.nested(obs), *rest

    def nested(self, obs: np.ndarray) -> dict[str, Any]:
        return {"at": obs, "flags": (np.array([obs[0] % 2, 1], np.int8),)}


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_a_data_set_that_minari_has_written_is_read(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip({"hdf5": "h5py", "arrow": "pyarrow"}[form])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(Nested(Counting()), data_format=form)
    env.action_space.seed(0)
    taken = []
    for _ in range(3):
        env.reset(seed=0)
        ended = False
        while not ended:
            taken.append(env.action_space.sample())
            *_, terminated, truncated, _ = env.step(taken[-1])
            ended = terminated or truncated
    env.create_dataset("toys/counting-v0", algorithm_name="random", author="nobody")
    data = jaxrl.load_dataset("minari:toys/counting-v0")
    steps, episode = np.array([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]), np.repeat([1, 2, 3], [3, 5, 3])
    np.testing.assert_array_equal(data.obs["at"], np.stack([steps, episode], axis=1))
    np.testing.assert_array_equal(data.next_obs["at"], np.stack([steps + 1, episode], axis=1))
    np.testing.assert_array_equal(data.next_obs["flags"][0][:, 0], (steps + 1) % 2)
    np.testing.assert_array_equal(data.reward, steps + 1)
    np.testing.assert_array_equal(np.flatnonzero(data.terminated), [2, 10])
    np.testing.assert_array_equal(np.flatnonzero(data.truncated), [7])
    np.testing.assert_array_equal(data.action["a"], [action["a"] for action in taken])
    np.testing.assert_array_equal(data.action["b"][0], [action["b"][0] for action in taken])
    assert data.spec.action_space == {"a": Discrete(2, start=5), "b": (Box(-1.0, 1.0, (2,)),)}
    assert set(data.spec.observation_space) == {"at", "flags"}
