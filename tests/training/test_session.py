"""Sessions, one step at a time: what is told, what acting gives, and what is refused."""

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from toys_session import SPEC, Script, digest, drive, reached, single, small

import jaxrl
from jaxrl.spaces import to_elements, to_indices
from jaxrl.training.session.inputs import describe_envs, format_action, take_obs


def test_one_environment_goes_without_the_axis_of_environments() -> None:
    session = single()
    action = session.act([0.0, 1.0])
    assert np.shape(action) == ()
    assert session.observe(1, [0.0, 2.0], False, False) is None
    action = session.act(np.array([[0.0, 2.0]]))
    assert action.shape == (1,)
    session.observe([1.0], [[0.0, 3.0]], [True], [False])
    assert session.ended.tolist() == [True]


def test_what_is_learnt_comes_when_it_is_due() -> None:
    session, script, told = small(), Script(), []
    for _ in range(30):
        told.append(session.observe(*script.advance(session.act(script.obs(session.ended)))))
    # 4 steps of 2 environments prime the window; the warm-up of 20 takes 8 more vector steps, whole pairs of them.
    assert [i for i, learnt in enumerate(told) if learnt is not None] == list(range(11, 30, 2))
    assert session.opt_steps == 10
    learnt = told[11]
    assert set(learnt) >= {"loss", "skipped_updates"}
    assert learnt["skipped_updates"] == 0
    assert np.isfinite(learnt["loss"])


def test_episodes_are_told_with_their_returns() -> None:
    episodes: list[Any] = []
    session = single(hooks=jaxrl.SessionHooks(episode=episodes.append))
    for step, reward in enumerate([1.0, 2.0, 4.0, 8.0, 16.0]):
        session.act([float(step), 0.0])
        session.observe(reward, [step + 1.0, 0.0], step == 1, step == 4)
    assert [(e.env, e.episode_return, e.length, e.terminated, e.env_steps) for e in episodes] == [
        (0, 3.0, 2, True, 2),
        (0, 28.0, 3, False, 5),
    ]
    summary = session.summary()
    assert (summary["episode_return_mean"], summary["episode_length_max"]) == (15.5, 3.0)
    assert summary["terminated_mean"] == 0.5


def test_acting_greedily_changes_nothing() -> None:
    one, other = small(), small()

    def act_greedily() -> None:
        one.act(np.zeros(2), explore=False)
        assert one.act(np.zeros((5, 2)), explore=False).shape == (5,)

    drive(one, Script(), 20, between=act_greedily)
    drive(other, Script(), 20)
    assert digest(one) == digest(other)
    assert one.act(np.ones(2), explore=False) == int(one.policy(np.ones(2)))


def test_the_session_ends_at_its_last_optimisation_step_or_when_asked() -> None:
    session = single(max_opts=3)
    while not session.is_done:
        session.act([0.0, 0.0])
        session.observe(0.0, [0.0, 0.0], False, False)
    assert session.opt_steps == 3
    with pytest.raises(jaxrl.SettingsError, match="after max_opts 3 was reached"):
        session.act([0.0, 0.0])
    other = small()
    other.stop()
    assert other.is_done


def test_numbers_of_ones_own_are_told() -> None:
    session = small(statistics=jaxrl.Statistics({"battery": ["min", "last"]}))
    session.note(battery=3.0)
    session.note(battery=math.nan, speed=None)
    session.note(battery=2.0)
    summary = session.summary()
    assert (summary["battery_min"], summary["battery_last"], summary["battery_not_finite"]) == (2.0, 2.0, 1)
    assert (summary["speed_mean"], summary["speed_missing"]) == (None, 1)


@pytest.mark.parametrize("name", ["episode_return", "episode_length", "terminated"])
def test_names_of_the_sessions_own_series_are_refused_in_notes(name: str) -> None:
    session = single()
    with pytest.raises(jaxrl.SettingsError, match=f"a session has a series '{name}' of its own; take another name"):
        session.note(battery=3.0, **{name: 1e6})
    assert not {f"{name}_count", "battery_count"} & session.summary().keys()


def test_the_spaces_come_from_an_env_a_spec_or_gymnasium() -> None:
    gym = gymnasium.make_vec("CartPole-v1", num_envs=3)
    env = jaxrl.make_env("CartPole-v1")
    assert describe_envs(env, 3).spec == describe_envs(env.spec, 3).spec == env.spec
    assert describe_envs(env, 3).made == env.settings
    assert describe_envs(gym, 3).spec.observation_space.shape == (4,)
    assert describe_envs(gym, 3).action_space == gym.single_action_space
    with pytest.raises(jaxrl.SettingsError, match="num_envs is 2, but the environment is a vector of 3"):
        describe_envs(gym, 2)


def test_actions_are_those_of_the_gymnasium_space() -> None:
    class Odd:
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        action_space = gymnasium.spaces.Discrete(3, start=5)

    taken = format_action(describe_envs(Odd(), 1), np.arange(3, dtype=np.int32), single=False)
    assert taken.tolist() == [5, 6, 7]
    assert all(Odd.action_space.contains(action) for action in taken)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_whole_numbers_of_any_kind_may_count_from_any_start(dtype: str) -> None:
    space = jaxrl.Discrete(3, dtype=dtype, start=5)
    assert to_elements(space, np.arange(3, dtype=dtype)).tolist() == [5, 6, 7]
    assert to_indices(space, np.array([5, 6, 7], dtype)).tolist() == [0, 1, 2]


def test_observations_may_be_dicts_in_any_order() -> None:
    space = {"a": jaxrl.Box(-1.0, 1.0, (2,)), "b": jaxrl.Discrete(4)}
    seen = take_obs("obs", space, 1, {"b": 3, "a": [0.5, np.nan]})
    assert seen.single
    assert seen.valid.tolist() == [False]
    assert seen.obs["b"].tolist() == [3]
    assert seen.obs["a"].tolist() == [[0.0, 0.0]]
    with pytest.raises(jaxrl.SettingsError, match="expected a dict of a, b"):
        take_obs("obs", space, 1, {"a": [0.5, 0.0]})


NO, FITS = [False, False], np.ones((2, 2))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (r"next_obs is float64\[3\]; expected float32\[2, 2\]", ([1, 1], [1.0, 2.0, 3.0], NO, NO)),
        (r"reward is float64\[3\]; expected a number for each of 2", (np.ones(3), FITS, NO, NO)),
        (r"terminated is float64\[2\]; expected True or False", ([1, 1], FITS, [0.5, 1.0], NO)),
        (r"truncated is bool\[\]; expected True or False for each of 2", ([1, 1], FITS, NO, False)),
        (r"next_obs is <U1\[\]", ([1, 1], "x", NO, NO)),
        (r"next_obs is no array", ([1, 1], [[1.0], [1.0, 2.0]], NO, NO)),
        (r"next_obs is complex128", ([1, 1], FITS.astype(complex), NO, NO)),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(message: str, told: tuple[Any, ...]) -> None:
    session = small()
    actions = session.act(np.zeros((2, 2)))
    before = reached(session)
    with pytest.raises(jaxrl.SettingsError, match=message) as refused:
        session.observe(*told)
    assert "\n" not in str(refused.value)
    assert reached(session) is before
    assert session.act(np.zeros((2, 2))).tolist() == actions.tolist()


def test_steps_for_actions_never_given_are_refused() -> None:
    session, told = small(), ([1.0, 1.0], FITS, NO, NO)
    with pytest.raises(jaxrl.SettingsError, match="without an act before it"):
        session.observe(*told)
    session.act(np.zeros((2, 2)))
    session.observe(*told)
    with pytest.raises(jaxrl.SettingsError, match="without an act before it"):
        session.observe(*told)
    with pytest.raises(jaxrl.SettingsError, match=r"act: obs is float64\[3, 2\]; expected float32\[2, 2\]"):
        session.act(np.zeros((3, 2)))
    with pytest.raises(jaxrl.SettingsError, match="environment 1 is not the next_obs"):
        session.act([[1.0, 1.0], [1.0, 2.0]])
    session.cut()
    session.act([[1.0, 1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("Session has no setting 'max_opt'; did you mean max_opts", {"max_opt": 3}),
        ("do not divide one another", {"num_envs": 2, "opt_interval": 3}),
        ("learns from rollouts, and keeps no replay", {"agent": jaxrl.ppo()}),
        ("makes no transitions", {"processor": jaxrl.frame_stack(2)}),
        ("seed is -1", {"seed": -1}),
        ("patience is -1", {"patience": -1}),
        ("max_rollbacks is 0.5", {"max_rollbacks": 0.5}),
        ("max_env_steps is -3", {"max_env_steps": -3}),
        ("stop_reward is 'much'; expected a number", {"stop_reward": "much"}),
        ("was given str for its environment", {"spec": "CartPole-v1"}),
        ("buffer is str; expected what jaxrl.uniform", {"buffer": "uniform"}),
        ("processor is int; expected what jaxrl.n_step", {"processor": 3}),
        ("random_warmup is str; expected true or false", {"random_warmup": "no"}),
    ],
)
def test_settings_that_cannot_be_are_refused(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(jaxrl.SettingsError, match=message):
        small(**settings)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("hooks", {"episode": print}, r"jaxrl\.SessionHooks\(\.\.\.\)"),
        ("statistics", {"battery": ["mean"]}, r"jaxrl\.Statistics\(\.\.\.\)"),
        ("interrupt", {}, r"jaxrl\.Interrupt\(\)"),
    ],
)
def test_arguments_of_other_types_are_refused(name: str, given: Any, expected: str) -> None:
    with pytest.raises(jaxrl.SettingsError, match=f"^{name} is dict; expected {expected}$"):
        jaxrl.Session(SPEC, jaxrl.dqn(), buffer=jaxrl.uniform(1_000), **{name: given})


@pytest.mark.parametrize("value", ["abc", [1.0, 2.0]])
def test_what_is_no_number_is_refused_and_changes_nothing(value: Any) -> None:
    memory = jaxrl.MemoryRecorder()
    session = single(recorders=[memory])
    before = list(memory.rows)
    with pytest.raises(jaxrl.SettingsError, match=r"^note: battery is .*; expected a number$"):
        session.note("charged", speed=1.0, battery=value)
    with pytest.raises(jaxrl.SettingsError, match=r"^evaluate_score: score is .*; expected a number$"):
        session.evaluate_score(value)
    assert memory.rows == before
    assert "speed_count" not in session.summary()


def test_going_on_and_starting_over_need_a_run_directory() -> None:
    for how in ("resume", "start_over"):
        with pytest.raises(jaxrl.SettingsError, match=f"{how} needs the run_dir"):
            jaxrl.Session(SPEC, jaxrl.dqn(), buffer=jaxrl.uniform(40, batch_size=8), **{how: True})
