"""Environments on the host: no junk at an episode's end, true successors, the bookkeeping of `vectorise`."""

import multiprocessing
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from toys_actors import counter
from toys_agents import begun
from toys_envs import counting, forget_envs
from toys_gymnasium import Counting, Ending, Frames, Locks, Telling, Unopened

import jaxrl
from jaxrl.env_process import EnvError
from jaxrl.envs.host import HostVectorEnv, convert_action, gymnasium_spec, vector_scalars
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, convert_space, to_channels_last
from jaxrl.training.evaluator import evaluator_of
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.session.inputs import describe_envs, take_obs


def walk(envs: HostVectorEnv, steps: int) -> list[Any]:
    envs.reset()
    try:
        return [envs.step(np.zeros(envs.num_envs, np.int32)) for _ in range(steps)]
    finally:
        envs.close()


def test_environments_in_processes_end_by_signals_what_they_have_started(tmp_path: Path):
    make = partial(Ending, str(tmp_path / "ended"))
    walk(HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), make), 1, 0, processes=True), 1)
    codes = (tmp_path / "ended").read_text().split()
    assert codes == [str(-signal.SIGTERM)] * 2  # here, where one is made for its spaces, and in its process


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_episode_s_end_keeps_its_true_successor_and_the_next_begins_in_the_same_step(processes: bool):
    steps = walk(HostVectorEnv(counter(), 2, 0, processes), 9)
    # Episode 1 terminates at step 3, episode 2 is truncated at its step 5, episode 3 begins.
    assert [s.final_obs[0].tolist() for s in steps] == [
        [1, 1], [2, 1], [3, 1], [1, 2], [2, 2], [3, 2], [4, 2], [5, 2], [1, 3],
    ]  # fmt: skip
    assert [s.obs[0].tolist() for s in steps][2] == [0, 2]
    assert [s.obs[0].tolist() for s in steps][7] == [0, 3]
    assert [bool(s.terminated[0]) for s in steps] == [i == 2 for i in range(9)]
    assert [bool(s.truncated[0]) for s in steps] == [i == 7 for i in range(9)]
    assert steps[2].info["episode_return"].tolist() == [6, 6]
    assert steps[7].info["episode_length"].tolist() == [5, 5]
    assert steps[8].info["episode_return"].tolist() == [1, 1]
    assert steps[0].final_obs.dtype == np.float32


def test_a_step_that_is_not_finite_cuts_its_episode_there_and_nothing_else():
    steps = walk(HostVectorEnv(counter(bad_step=2), 1, 0), 3)
    assert [bool(s.valid[0]) for s in steps] == [True, False, True]
    assert bool(steps[1].truncated[0])
    assert not steps[1].terminated[0]
    assert steps[1].final_obs[0].tolist() == [0, 0]
    assert steps[1].obs[0].tolist() == [0, 2]
    assert steps[2].info["episode_length"][0] == 1


@pytest.mark.parametrize("bad", [1, 2])
def test_an_episode_whose_first_observation_is_not_finite_is_cut_at_its_first_step(bad: int):
    envs = HostVectorEnv(counter(bad_reset=bad), 1, 0)
    first = envs.reset()
    steps = [envs.step(np.zeros(1, np.int32)) for _ in range(6)]
    envs.close()
    shown = [first, *(s.obs for s in steps)]
    at = {1: 0, 2: 3}[bad]  # episode 1 takes 3 steps, and the fourth leaves the spoilt one
    assert shown[at][0].tolist() == [0, 0]
    assert shown[at + 1][0].tolist() == [0, bad + 1]
    assert [bool(s.valid[0]) for s in steps] == [t != at for t in range(6)]
    assert [bool(s.obs_valid[0]) for s in steps] == [t != at - 1 for t in range(6)]
    assert bool(steps[at].truncated[0])
    assert (steps[at].reward[0], steps[at].final_obs[0].tolist()) == (0, [0, 0])
    assert (steps[at].info["episode_length"][0], steps[at + 1].info["episode_length"][0]) == (1, 1)
    assert steps[at + 1].final_obs[0].tolist() == [1, bad + 1]


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_numbers_in_info_come_along_where_they_are_told(processes: bool):
    steps = walk(HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Telling()), Telling), 2, 0, processes), 4)
    told = [{name: x.tolist() for name, x in s.info.items() if not name.startswith("episode_")} for s in steps]
    at = lambda left, **more: {"left": [left] * 2, "parts/half": [left / 2] * 2, **more}
    assert told == [at(9), at(8), at(7, won=[1, 1]), at(9)]


@pytest.mark.slow
def test_an_environment_that_another_process_cannot_make_is_told_of_with_its_exception_there():
    envs = HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Unopened), 2, 0, processes=True)
    with pytest.raises(EnvError, match="no display") as raised:
        envs.reset()
    assert str(raised.value) == "OSError: no display"
    assert 'raise OSError("no display")' in raised.value.__notes__[0]
    envs.close()
    assert multiprocessing.active_children() == []


def test_an_environment_that_loses_its_connection_says_so_and_is_closed():
    closed: list[Any] = []

    class Remote(Counting):
        def step(self, action: Any) -> Any:
            raise ConnectionResetError("the game has gone")

        def close(self) -> None:
            closed.append(self)

    envs = HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Remote), 2, 0)
    envs.reset()
    with pytest.raises(ConnectionResetError, match="the game has gone"):
        envs.step(np.zeros(2, np.int32))
    envs.close()
    assert len({*closed}) == 2


def test_what_goes_wrong_here_before_processes_begin_is_told_as_it_is():
    def make() -> Any:
        raise ConnectionRefusedError("no licence")

    envs = HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), make), 2, 0, processes=True)
    with pytest.raises(ConnectionRefusedError, match="no licence"):
        envs.start()
    envs.close(kill=True)


def test_what_only_some_environments_tell_is_missing_in_the_others():
    told = {"won": np.array([1, 0]), "_won": np.array([True, False]), "env_id": np.arange(2), "_x": np.array([5, 6])}
    found = vector_scalars(told, 2)
    assert found.keys() == {"won", "_x"}
    np.testing.assert_array_equal(found["won"], [1, np.nan])


@pytest.mark.parametrize("suite", ["gymnasium", "envpool"])
def test_no_step_is_lost_or_made_up_where_an_episode_ends(suite: str):
    pytest.importorskip(suite)
    envs = HostVectorEnv(jaxrl.make_env(f"{suite}:CartPole-v1"), 3, 0)
    obs, lengths, ends = envs.reset(), np.zeros(3, int), 0
    for t in range(60):
        step = envs.step(np.array([0, 1, t % 2], np.int32))
        # The cart's place moves by its speed at every step, the last and the first of an episode included.
        np.testing.assert_allclose(step.final_obs[:, 0], obs[:, 0] + 0.02 * obs[:, 1], atol=1e-6)
        done, lengths = step.terminated | step.truncated, lengths + 1
        np.testing.assert_array_equal(step.info["episode_length"], lengths)
        assert (np.abs(step.obs[done]) <= 0.05).all()
        np.testing.assert_array_equal(step.obs[~done], step.final_obs[~done])
        obs, lengths, ends = step.obs, np.where(done, 0, lengths), ends + done.sum()
    envs.close()
    assert ends > 10


def test_an_environment_in_jax_on_the_host_does_what_vectorise_does():
    env = counting(length=4, time_limit=3)
    steps = walk(HostVectorEnv(jaxrl.on_host(env), 2, 7), 7)
    vector = jaxrl.vectorise(env, 2)
    state, _ = jax.jit(vector.reset)(jax.random.key(0))
    advance = jax.jit(vector.step)
    for step in steps:
        state, other = advance(state, np.zeros(2, np.int32), jax.random.key(1))
        for name in ("reward", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(step, name), getattr(other, name))
        np.testing.assert_array_equal(step.final_obs[:, 0], other.final_obs[:, 0])
        np.testing.assert_array_equal(step.obs[:, 0], other.obs[:, 0])
        for name in ("episode_return", "episode_length"):
            np.testing.assert_array_equal(step.info[name], other.info[name])


def test_actions_go_back_to_gymnasium_from_their_own_start():
    spaces = gymnasium.spaces
    both = spaces.Dict({"a": spaces.Discrete(3, start=2), "b": spaces.Box(-1, np.array([1.0, 2.0]), dtype=np.float64)})
    assert convert_space("x", both) == {"a": Discrete(3, start=2), "b": Box(-1.0, (1.0, 2.0), (2,))}
    back = convert_action(both, {"a": np.array([0, 2], np.int32), "b": np.zeros((2, 2), np.float32)})
    assert back["a"].tolist() == [2, 4]
    assert back["b"].dtype == np.float64


def test_observations_count_from_0_and_never_wrap():
    envs = HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Locks()), Locks), 2, 0)
    obs = envs.reset()
    doors = [envs.vector._env.envs[i].unwrapped.door for i in range(2)]
    assert obs["door"].tolist() == [door - 2 for door in doors]
    assert obs["hint"].tolist() == [[door % 2, door % 3] for door in doors]
    step = envs.step(np.array(doors) - 2)
    envs.close()
    assert step.reward.tolist() == [1, 1]


class Odd(Counting):
    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        usual = dict(zip(("obs", "reward", "terminated", "truncated", "info"), super().step(action), strict=True))
        return tuple({**usual, **self.answers}.values())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": "5"}, "Odd.step returned the reward '5'; expected a number"),
        ({"reward": None}, "Odd.step returned the reward None; expected a number"),
        ({"reward": [1.0, 2.0]}, r"Odd.step returned the reward \[1.0, 2.0\]; expected a number"),
        ({"terminated": "yes"}, "Odd.step returned terminated 'yes'; expected True or False"),
        ({"truncated": None}, "Odd.step returned truncated None; expected True or False"),
        ({"terminated": 2}, "Odd.step returned terminated 2; expected True or False"),
    ],
)
def test_a_reward_that_is_no_number_or_an_end_that_is_no_flag_is_refused(answer: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        walk(HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Odd()), partial(Odd, **answer)), 1, 0), 1)


def test_numbers_and_flags_of_numpy_are_taken_and_infinite_ones_of_float32_cut_their_episode():
    odd = lambda **answer: HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Odd()), partial(Odd, **answer)), 2, 0)
    (step,) = walk(odd(reward=np.array([2]), terminated=np.bool_(True), truncated=0), 1)
    assert (step.reward.tolist(), step.terminated.tolist(), step.truncated.tolist()) == (
        [2, 2],
        [True] * 2,
        [False] * 2,
    )
    for answer in ({"reward": 1e300}, {"obs": np.array([1e300, 0.0])}):
        (step,) = walk(odd(**answer), 1)
        assert (step.valid.tolist(), step.truncated.tolist(), step.reward.tolist()) == ([False] * 2, [True] * 2, [0, 0])


def test_what_is_no_number_in_info_is_not_recorded():
    info = {"big": 10**400, "seed": 2**127, "word": "x", "none": None, "good": 7, "part": {"half": 0.5, "big": 2**64}}
    (step,) = walk(HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Odd()), partial(Odd, info=info)), 2, 0), 1)
    told = {name: x.tolist() for name, x in step.info.items() if not name.startswith("episode_")}
    assert told == {"good": [7, 7], "part/half": [0.5, 0.5]}


def test_large_whole_numbers_arrive_as_they_are_or_are_refused():
    class Meter(Counting):
        def __init__(self, high: int, value: int) -> None:
            super().__init__()
            self.observation_space, self.value = gymnasium.spaces.Box(0, high, (1,), np.int64), value

        def reset(self, **_: Any) -> tuple[np.ndarray, dict]:
            return np.array([self.value]), {}

    first = lambda high, value: HostVectorEnv(
        jaxrl.gymnasium_envs(gymnasium_spec(Meter(high, value)), partial(Meter, high, value)), 1, 0
    ).reset()
    assert first(2**40, 3_000_000_000)[0, 0] == 3e9
    assert first(2**30, 2**30)[0, 0] == 2**30
    with pytest.raises(SettingsError, match="an observation of gymnasium:Meter holds 3000000000; int32 holds"):
        first(2**30, 3_000_000_000)
    spec = gymnasium_spec(Meter(2**40, 0))
    assert take_obs("obs", spec.observation_space, 1, np.array([3_000_000_000])).obs[0, 0] == 3e9
    with pytest.raises(SettingsError, match="obs holds 3000000000; int32 holds -2147483648 to 2147483647"):
        take_obs("obs", Box(0, 9, (1,), "int32"), 1, np.array([3_000_000_000]))


def test_frames_with_channels_first_come_with_channels_last():
    envs = HostVectorEnv(jaxrl.gymnasium_envs(gymnasium_spec(Frames()), Frames), 2, 0)
    assert envs.spec.observation_space == {"camera": Box(0, 255, (12, 10, 3), "uint8"), "steps": Box(0.0, 4.0, (1,))}
    frame = np.moveaxis(np.arange(360).reshape(3, 12, 10), 0, -1)
    shown = [envs.reset(), *(envs.step(np.zeros(2, np.int32)) for _ in range(4))]
    envs.close()
    np.testing.assert_array_equal(shown[0]["camera"], [frame % 251] * 2)
    for t, step in enumerate(shown[1:], 1):
        np.testing.assert_array_equal(step.final_obs["camera"], [(frame + t) % 251] * 2)
        np.testing.assert_array_equal(step.obs["camera"], [(frame + t % 4) % 251] * 2)
        assert step.obs["steps"].tolist() == [[t % 4]] * 2


def test_frames_are_taken_either_way_by_a_session_and_by_a_policy():
    spec = gymnasium_spec(Frames())
    given = describe_envs(jaxrl.EnvSpec("own", Frames.observation_space, Frames.action_space), 1)
    assert given.spec.observation_space == spec.observation_space
    raw, _ = Frames().reset()
    turned = {**raw, "camera": np.moveaxis(raw["camera"], 0, -1)}
    act = lambda params, obs: (obs, obs["camera"][:, :, :, 2].sum((1, 2), dtype=int))
    policy = GreedyPolicy(jaxrl.Policy(spec, lambda s: s, lambda params, obs: obs, act, lambda *_: _[-1]), ())
    for obs in (raw, turned):
        seen = take_obs("obs", spec.observation_space, 1, obs).obs
        np.testing.assert_array_equal(seen["camera"][0], turned["camera"])
        policy.reset()
        assert int(policy(obs)) == raw["camera"][2].sum()


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((4, 84, 84), (84, 84, 4)),
        ((3, 210, 160), (210, 160, 3)),
        ((16, 17, 20), (17, 20, 16)),
        *((shape, shape) for shape in ((84, 84, 4), (17, 84, 84), (3, 7, 7), (3, 10, 30), (8, 8, 3), (10, 10, 10))),
    ],
)
def test_channels_are_first_where_few_come_before_two_long_sides(shape: tuple, turned: tuple):
    low = np.arange(np.prod(shape)).reshape(shape) % 7
    box = to_channels_last(Box(low, 255, shape, "uint8"))
    axes = (0, 1, 2) if shape == turned else (1, 2, 0)
    assert box == Box(low.transpose(axes), 255.0, turned, "uint8")
    assert to_channels_last(Box(0, 1, shape)) == Box(0, 1, shape), "numbers other than bytes stay as they are"


def test_parameters_reach_the_maker_and_whole_numbers_stay_whole():
    env = jaxrl.make_env("gymnasium:CartPole-v1", max_episode_steps=7.0)
    steps = walk(HostVectorEnv(env, 1, 0), 7)
    assert any(s.truncated[0] and s.info["episode_length"][0] == 7 for s in steps) or any(
        s.terminated[0] for s in steps
    )
    with pytest.raises(SettingsError, match="Gymnasium cannot make CartPole-v1"):
        jaxrl.make_env("gymnasium:CartPole-v1", nonsense=1.0)


def test_the_limit_of_an_environment_is_known_so_that_whole_episodes_are_evaluated():
    assert jaxrl.make_env("gymnasium:CartPole-v1").spec.time_limit == 500
    assert jaxrl.make_env("gymnasium:CartPole-v1", max_episode_steps=20_000.0).spec.time_limit == 20_000


class EvenFirst(Counting):
    """Begin with an episode of five steps."""

    def reset(self, **given):
        self.episode = max(self.episode, 1)
        return super().reset(**given)


def test_another_environment_for_evaluation_is_never_taken_for_that_of_before():
    short, long = (jaxrl.gymnasium_envs(gymnasium_spec(kind()), kind) for kind in (Counting, EvenFirst))
    buffer = jaxrl.uniform(64, batch_size=8)
    strategy = jaxrl.off_policy(short, jaxrl.dqn(features=(4,)), buffer=buffer, num_envs=2, opt_interval=2)
    params = begun(lambda key: strategy.policy.params(strategy.init(key)))
    for eval_env, length in ((None, 3), (long, 5), (short, 3)):
        fns = strategy.actor_fns._replace(env=short._replace(eval_env=eval_env))
        evaluator = evaluator_of(strategy._replace(actor_fns=fns), 2)
        assert evaluator(params, jax.random.key(1)).lengths.tolist() == [length, length]


@pytest.mark.slow
def test_the_best_policy_can_be_judged_there():
    env = jaxrl.gymnasium_envs(gymnasium_spec(Telling()), Telling)
    buffer = jaxrl.uniform(64, batch_size=8)
    strategy = jaxrl.off_policy(env, jaxrl.dqn(), buffer=buffer, num_envs=2, opt_interval=2, warmup=0)
    evaluator = evaluator_of(strategy, 3)
    params = strategy.policy.params(strategy.init(jax.random.key(0)))
    result = evaluator(params, jax.random.key(1))
    assert result.returns.tolist() == [6, 6, 6]
    assert result.lengths.tolist() == [3, 3, 3]
    assert result.finished.all()
    told = {name: values.tolist() for name, values in result.columns.items()}
    assert told == {"info/left": [7] * 3, "info/parts/half": [3.5] * 3, "episode_steps": [3] * 3, "info/won": [1] * 3}


def test_a_registered_function_that_returns_another_environment_is_told_in_one_line(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: forget_envs("pole"))
    jaxrl.register_env("pole", lambda: gymnasium.make("CartPole-v1"))
    said = r"pole was registered with a function that returned TimeLimit; expected a jaxrl.Env, or what jaxrl.gymnasium"
    with pytest.raises(SettingsError, match=said) as raised:
        jaxrl.make_env("pole")
    assert "\n" not in str(raised.value)
