"""What is said where a suite of environments is not installed."""

import sys
from typing import Any

import pytest

import jaxrl
from jaxrl import train
from jaxrl.envs import make_env
from jaxrl.errors import SettingsError

NAMES = {
    "xminigrid": "MiniGrid-Empty-8x8",
    "jumanji": "Snake-v1",
    "pgx": "2048",
    "jaxmarl": "MPE_simple_spread_v3",
}


@pytest.mark.parametrize("suite", NAMES)
def test_a_suite_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    suite: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, suite, None)
    with pytest.raises(SettingsError, match=rf"need the extra `{suite}`: pip install 'jaxrl\[{suite}\]'$"):
        make_env(f"{suite}:{NAMES[suite]}")


@pytest.mark.parametrize("name", ["gymnasium:ALE/Pong-v5", "ale:Pong"])
def test_games_of_atari_need_an_extra_beside_gymnasium(name: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(SettingsError, match=r"games of Atari need the extra `atari`: pip install 'jaxrl\[atari\]'$"):
        make_env(name)


def test_navix_which_has_no_extra_is_answered_with_its_own_name(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "navix", None)
    with pytest.raises(SettingsError, match=r"which no extra of jaxrl installs .*: pip install navix$"):
        make_env("navix:Navix-Empty-5x5-v0")


def test_the_command_line_says_so_in_one_line(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pgx", None)
    said = r"^[^\n]*games of Pgx need the extra `pgx`: pip install 'jaxrl\[pgx\]'$"
    with pytest.raises(SettingsError, match=said):  # of which a front door prints one line
        train.main(["ppo", "--env", "pgx:2048", "--quiet"])


@pytest.mark.parametrize(
    ("suite", "module", "name"),
    [
        ("playground", "mujoco_playground", "CartpoleBalance"),
        ("craftax", "craftax", "Craftax-Symbolic-v1"),
        ("brax", "brax", "ant"),
    ],
)
def test_the_extra_is_named_whatever_the_name_of_its_module(
    suite: str, module: str, name: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=rf"need the extra `{suite}`: pip install 'jaxrl\[{suite}\]'$"):
        make_env(f"{suite}:{name}")


@pytest.mark.parametrize("module", ["stoa", "envelope"])
def test_objects_of_what_is_not_installed_are_answered_with_what_installs_it(module: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = rf"^environments of {module} need it: pip install 'jaxrl\[{module}\]'"
    with pytest.raises(SettingsError, match=said):
        getattr(jaxrl, f"{module}_env")(3)
