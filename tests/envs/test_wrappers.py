"""Wrappers, on an environment whose numbers are known in advance."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxrl
from jaxrl import SettingsError
from jaxrl.envs.wrappers import (
    action_repeat,
    apply_wrappers,
    hide,
    previous,
    sticky_actions,
    time,
    transform_obs,
    transform_reward,
)

KEY = jax.random.key(0)


def walk(end: float = 100.0, limit: int | None = 20) -> jaxrl.Env:
    """Return a walk by steps of 0, 1 or 2, which pays where it stands and ends at `end`."""

    def reset(key: Any) -> Any:
        return jnp.float32(0), jnp.zeros(1)

    def step(place: Any, action: Any, key: Any) -> Any:
        place = place + action
        info = {"action": action.astype(jnp.float32)}
        return place, jaxrl.TimeStep(place[None], reward=place, terminated=place >= end, info=info)

    spec = jaxrl.EnvSpec("Walk", jaxrl.Box(0.0, 200.0, (1,)), jaxrl.Discrete(3), time_limit=limit)
    return jaxrl.Env(spec, reset, step)


def played(env: jaxrl.Env, actions: list[Any], seed: int = 0) -> list[jaxrl.TimeStep]:
    """Return the steps of one episode under these actions, each traced, as a compiled loop would take them."""
    state, _ = env.reset(KEY)
    steps, take = [], jax.jit(env.step)
    for t, action in enumerate(actions):
        state, out = take(state, jnp.asarray(action), jax.random.fold_in(jax.random.key(seed), t))
        steps.append(out)
    return steps


def test_a_repeated_action_adds_up_what_it_is_paid() -> None:
    first, second = played(action_repeat(walk(), 3), [1, 2])
    assert (float(first.reward), first.obs.tolist(), bool(first.terminated)) == (1 + 2 + 3, [3.0], False)
    assert (float(second.reward), second.obs.tolist()) == (5 + 7 + 9, [9.0])


def test_nothing_is_repeated_past_the_end_of_an_episode() -> None:
    (only,) = played(action_repeat(walk(end=2.0), 4), [1])
    assert (float(only.reward), only.obs.tolist(), bool(only.terminated)) == (1 + 2, [2.0], True)


def test_a_time_limit_holds_whole_repeats_and_each_has_its_own_noise() -> None:
    assert action_repeat(walk(limit=20), 3).spec.time_limit == 6
    assert action_repeat(walk(limit=None), 3).spec.time_limit is None
    step = lambda s, a, key: (s, jaxrl.TimeStep(s[None], jax.random.normal(key), False))
    env = action_repeat(walk()._replace(step=step), 2)
    both = map(jax.random.normal, jax.random.split(jax.random.fold_in(KEY, 0), 2))
    assert float(played(env, [0])[0].reward) == pytest.approx(float(sum(both)))


def test_an_action_sticks_as_often_as_it_is_told_and_never_the_first() -> None:
    chosen = [1 + t % 2 for t in range(400)]
    taken = [int(out.info["action"]) for out in played(sticky_actions(walk(1e9), 0.25), chosen)]
    stuck = [t for t in range(1, 400) if taken[t] != chosen[t]]
    assert taken[0] == chosen[0]
    assert all(taken[t] == taken[t - 1] for t in stuck)  # what sticks is what was taken, not what was chosen
    # Where the last action taken is the one chosen anyway, sticking is not seen: in a chain of period two that
    # hides the sticking after an odd number of it. So a share p / (1 + p) differs; three deviations of 400 draws.
    assert abs(len(stuck) / 399 - 0.25 / 1.25) < 3 * (0.2 * 0.8 / 399) ** 0.5
    never, always = (
        [int(out.info["action"]) for out in played(sticky_actions(walk(), p), [1, 2, 0])] for p in (0.0, 1.0)
    )
    assert (never, always) == ([1, 2, 0], [1, 1, 1])


@pytest.mark.parametrize("name", ["action_repeat:2", "sticky_actions:0.25"])
def test_an_action_that_a_mask_may_forbid_later_is_not_taken_again(name: str) -> None:
    masked = {"action_mask": jaxrl.Box(0, 1, (3,), bool), "place": jaxrl.Box(0.0, 200.0, (1,))}
    env = transform_obs(walk(), lambda obs: {"action_mask": jnp.arange(3) * obs < 150.0, "place": obs}, masked)
    with pytest.raises(SettingsError, match="observations of Walk have an action_mask, which may forbid an action"):
        apply_wrappers(env, name)
    assert apply_wrappers(env, ["time", "previous"]).spec.observation_space["action_mask"] == masked["action_mask"]


def test_time_tells_what_is_left() -> None:
    env = time(walk(limit=4))
    assert env.reset(KEY)[1]["time"].tolist() == [1.0]
    assert [out.obs["time"].tolist() for out in played(env, [0, 0, 0, 0])] == [[0.75], [0.5], [0.25], [0.0]]
    assert played(env, [2])[0].obs["observation"].tolist() == [2.0]
    with pytest.raises(SettingsError, match="Walk has no time limit"):
        time(walk(limit=None))
    with pytest.raises(SettingsError, match="an entry 'time' already"):
        time(env)


def test_the_last_action_and_reward_are_seen() -> None:
    env = previous(walk())
    _, first = env.reset(KEY)
    assert (first["previous_action"].tolist(), first["previous_reward"].tolist()) == ([0.0, 0.0, 0.0], [0.0])
    seen = [out.obs for out in played(env, [2, 1])]
    assert [obs["previous_action"].tolist() for obs in seen] == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert [obs["previous_reward"].tolist() for obs in seen] == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("space", "action", "shown"),
    [
        (jaxrl.MultiDiscrete((2, 3)), [1, 0], [0.0, 1.0, 1.0, 0.0, 0.0]),
        (jaxrl.Box(-1.0, 1.0, (2, 1)), [[0.5], [-1.0]], [0.5, -1.0]),
    ],
)
def test_actions_of_other_spaces_are_shown_as_numbers(space: Any, action: Any, shown: list[float]) -> None:
    still = walk()._replace(step=lambda s, a, key: (s, jaxrl.TimeStep(s[None], 0.0, False)))
    env = previous(still._replace(spec=still.spec._replace(action_space=space)))
    assert played(env, [action])[0].obs["previous_action"].tolist() == shown
    assert env.spec.observation_space["previous_action"].shape == (len(shown),)


def test_observations_and_rewards_are_transformed() -> None:
    halved = transform_obs(walk(), lambda obs: {"half": obs / 2}, {"half": jaxrl.Box(0.0, 100.0, (1,))})
    assert halved.reset(KEY)[1]["half"].tolist() == [0.0]
    assert played(halved, [2])[0].obs["half"].tolist() == [1.0]
    # Potential-based shaping (Ng et al. 1999) with the place as potential: the difference is the action.
    shaped = transform_reward(walk(), lambda state, action, out: out.obs[0] - state)
    assert [float(out.reward) for out in played(shaped, [2, 0, 1])] == [2.0, 0.0, 1.0]


def test_wrapped_environments_keep_the_contract_and_nest_in_the_order_given() -> None:
    env = apply_wrappers(walk(end=1e9), ["sticky_actions:0.25", "action_repeat:2", "time", "previous"])
    assert jaxrl.check_env(env) == []
    assert env.spec.time_limit == 10
    # A step of the clock is one repeat; in the other order, the inner clock would tick twice.
    assert played(env, [1])[0].obs["time"].tolist() == pytest.approx([0.9])
    other = apply_wrappers(walk(end=1e9), ["time", "action_repeat:2"])
    assert played(other, [1])[0].obs["time"].tolist() == pytest.approx([0.9])
    assert played(other, [1])[0].reward == 1 + 2


def test_a_hidden_entry_is_0_and_in_the_space() -> None:
    both = jaxrl.Box((0.0, 5.0), (200.0, 205.0), (2,))
    env = hide(transform_obs(walk(), lambda obs: jnp.concatenate([obs, obs + 5]), both), 1)
    assert env.spec.observation_space == jaxrl.Box((0.0, 0.0), (200.0, 205.0), (2,))
    assert env.reset(KEY)[1].tolist() == [0.0, 0.0]
    assert [out.obs.tolist() for out in played(env, [1, 2])] == [[1.0, 0.0], [3.0, 0.0]]
    assert jaxrl.check_env(env._replace(deterministic=True)) == []


@pytest.mark.parametrize("name", ["action_repeat:2", "sticky_actions:0.25", "time", "previous"])
def test_wrapped_environments_keep_the_contract_in_64_bits(name: str) -> None:
    with jax.enable_x64(True):
        jaxrl.vectorise(jaxrl.make_env("CartPole-v1", wrap=name), 2)


def test_an_environment_by_name_is_wrapped_by_name() -> None:
    env = jaxrl.make_env("CartPole-v1", wrap=["time", "previous"], max_steps_in_episode=50)
    assert sorted(env.spec.observation_space) == ["observation", "previous_action", "previous_reward", "time"]
    assert env.settings == {
        "env": "CartPole-v1",
        "env_args": {"max_steps_in_episode": 50, "wrap": ["time", "previous"]},
    }
    assert jaxrl.make_env(env.settings["env"], **env.settings["env_args"]).spec == env.spec


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["stiky_actions:0.1"], "unknown wrapper 'stiky_actions'; did you mean sticky_actions"),
        ("action_repeat", "wrapper 'action_repeat' has no number; expected one, as in 'action_repeat:4'"),
        ("action_repeat:x", "wrapper 'action_repeat:x' has no number"),
        ("action_repeat:0", "action_repeat is 0; expected a whole number of at least 1"),
        ("action_repeat:501", "action_repeat is 501, but episodes of CartPole-v1 have 500 steps at most"),
        ("sticky_actions:2", "sticky_actions is 2.0; expected a number from 0 to 1"),
        ("hide:4", "hide is 4; expected an entry of CartPole-v1, from 0 to 3"),
        (["time", "hide:0"], "hide takes an entry of a vector, but observations of CartPole-v1 are"),
        ("time:3", "wrapper 'time:3' takes no number"),
        (3, "wrap is 3; expected names of wrappers"),
    ],
)
def test_what_is_no_wrapper_is_refused(wrap: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        jaxrl.make_env("CartPole-v1", wrap=wrap)
