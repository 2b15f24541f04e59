"""The table of algorithms says what is so, and what follows from it agrees with it."""

import numpy as np
import pytest

import jaxrl
from jaxrl import agents
from jaxrl.cli.algos import general
from jaxrl.cli.presets import PRESETS
from jaxrl.envs.registry import make_env
from jaxrl.errors import SettingsError
from jaxrl.registry import ALGORITHMS, algorithm_maker, algorithm_names, join_names, matching_presets, split_suite

SPACES = {
    "discrete": jaxrl.Discrete(3),
    "multidiscrete": jaxrl.MultiDiscrete((2, 3)),
    "bounded": jaxrl.Box(-1.0, 2.0, (2,)),
    "unbounded": jaxrl.Box(-np.inf, np.inf, (2,)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_agent_takes_the_actions_of_its_row_and_refuses_others_by_naming_agents_that_take_them(name: str) -> None:
    row = ALGORITHMS[name]
    for kind, space in SPACES.items():
        spec = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (3,)), space)
        if kind in row.actions:
            assert algorithm_maker(name)()(spec).name == name
            continue
        with pytest.raises(SettingsError, match=name) as refused:
            algorithm_maker(name)()(spec)
        suggested = str(refused.value).split(";")[1]
        others = [
            other for other in ALGORITHMS if f" {other}," in f"{suggested} ,".replace(" and", ",").replace(" ,", ",")
        ]
        assert others
        assert all(kind in ALGORITHMS[other].actions for other in others)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_has_a_public_maker_settings_presets_and_a_usual_environment_that_it_takes(name: str) -> None:
    row = ALGORITHMS[name]
    assert getattr(jaxrl, name) is getattr(agents, name) is algorithm_maker(name)
    assert getattr(jaxrl, row.config) is getattr(agents, row.config) is type(general(name).agent)
    assert PRESETS[name]
    assert general(name).env == row.env
    if row.env is not None:
        algorithm_maker(name)()(make_env(row.env).spec)
    assert (row.env is None) == (row.kind == "offline")


def test_tables_have_no_rows_beside_one_another() -> None:
    assert PRESETS.keys() == ALGORITHMS.keys()


def test_names_are_chosen_by_kind_and_by_actions_and_listed_as_in_a_sentence() -> None:
    assert algorithm_names("on_policy", actions="unbounded") == ["ppo", "a2c", "reinforce", "impala"]
    assert algorithm_names(actions="multidiscrete") == ["ppo", "a2c", "reinforce", "impala", "bc"]
    assert set(algorithm_names()) == set(ALGORITHMS)
    assert [join_names("a"), join_names("ab"), join_names("abc", "or")] == ["a", "a and b", "a, b or c"]


def test_the_name_of_a_suite_is_told_from_a_name_with_a_colon() -> None:
    suite, name = split_suite("gymnasium:CartPole-v1")
    assert (suite and suite.make, name) == ("gymnasium_env", "CartPole-v1")
    assert split_suite("CartPole-v1") == (None, "CartPole-v1")
    assert split_suite("mine:CartPole-v1") == (None, "mine:CartPole-v1")


def test_presets_of_a_name_and_of_a_family_come_together_whatever_the_suite() -> None:
    presets = {"Catch-*": {"num_envs": 4}, "Catch-v1": {"seed": 1}, "Pong": {"seed": 2}}
    assert matching_presets(presets, "gymnasium:Catch-v1") == [{"num_envs": 4}, {"seed": 1}]
    assert matching_presets(presets, "My-Catch-v1") == matching_presets(presets, None) == []
    # A name with a suite's prefix is for that suite alone.
    own = {"brax:*": {"num_envs": 8}, "ant": {"seed": 3}}
    assert matching_presets(own, "brax:ant") == [{"num_envs": 8}, {"seed": 3}]
    assert matching_presets(own, "ant") == [{"seed": 3}]


@pytest.mark.parametrize(("space", "said"), [(jaxrl.Box(0, 9, (2,), "int32"), "Box actions of int32"), ({}, "dict")])
@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "iql"])
def test_spaces_of_no_kind_are_refused_with_one_clear_message(name: str, space: object, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} takes .* but Toy has {said}") as refused:
        algorithm_maker(name)()(jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (3,)), space))
    assert "\n" not in str(refused.value)
