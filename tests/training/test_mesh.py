"""Meshes of devices: how they are written, the nearest that fits, and who may train while others do."""

import pytest

import jaxrl
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError
from jaxrl.training.mesh import MeshShape, near_shape, read_mesh, shape_of
from jaxrl.training.population.teams import MemberPlacement


@pytest.mark.parametrize(
    ("written", "shape"),
    [("members=4,envs=2", (4, 2)), (" envs = 2 , members = 4 ", (4, 2)), ("envs=8", (1, 8)), ("members=1e1", (10, 1))],
)
def test_an_axis_that_is_left_out_has_one_device(written: str, shape: tuple[int, int]) -> None:
    assert read_mesh(written) == shape


@pytest.mark.parametrize("written", ["", "4", "members", "members=", "=4", "members=4,", "members=0", "members=-1"])
def test_what_is_no_mesh_is_refused(written: str) -> None:
    with pytest.raises(SettingsError, match="mesh"):
        read_mesh(written)


def test_without_a_mesh_devices_are_for_members_or_for_shards() -> None:
    assert shape_of(None, 8, of_members=True) == MeshShape(members=8)
    assert shape_of(None, 8, of_members=False) == MeshShape(envs=8)
    assert shape_of("members=2,envs=4", 8, of_members=True).devices == 8


def test_the_nearest_mesh_is_one_that_fits() -> None:
    assert near_shape(MeshShape(4, 2), 6, lambda fit: True) == (3, 2)
    assert near_shape(MeshShape(4, 2), 6, lambda fit: fit.envs == 1) == (6, 1)
    assert near_shape(MeshShape(4, 2), 7, lambda fit: fit.members <= 4 and 4 % fit.envs == 0) == (3, 2)  # of six


def test_settings_keep_a_mesh_as_it_is_written() -> None:
    config = jaxrl.TrainerConfig().changed(mesh={"members": 4, "envs": 2})
    assert config.mesh == parse(["dqn", "--mesh", "members=4,envs=2"]).config.mesh == "members=4,envs=2"


def test_of_members_on_the_same_devices_one_trains_at_a_time() -> None:
    """Two threads would begin programs in other orders on each device, and wait for each other for ever."""
    placement = MemberPlacement({}, {0: "first", 1: "third", 2: "first", 3: "third"}, [], several=2)
    assert [placement.is_free(number, going=[0]) for number in range(4)] == [False, True, False, True]
    assert MemberPlacement({}, dict.fromkeys(range(4)), []).is_free(1, going=[0])
