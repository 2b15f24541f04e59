"""Atari inside compiled programs: steps are those of ALE's own loop, and no transition joins two episodes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.envs import HostEnv, make_env
from jaxrl.envs.base import require_same_spaces
from jaxrl.envs.host import HostVectorEnv
from jaxrl.errors import SettingsError
from jaxrl.training.storage.leaves import state_digest

pytestmark = pytest.mark.slow
pytest.importorskip("ale_py")
ENVS = 3
SMALL = {"screen_size": 36, "max_num_frames_per_episode": 400}
"""For tests of training, whose networks are then small."""


def rolled(env: HostEnv, actions: Any, key: Any) -> tuple[Any, Any, Any]:
    """Play `actions` `[T, N]` in compiled loops of two calls; return the state, first observations and steps."""
    assert env.vectorise is not None
    vector = env.vectorise(actions.shape[1])
    loop = jax.jit(lambda state, rows: jax.lax.scan(lambda s, row: vector.step(s, *row), state, rows))
    state, first = jax.jit(vector.reset)(key)
    rows = (jnp.asarray(actions), jax.random.split(key, len(actions)))
    half = len(actions) // 2
    state, one = loop(state, jax.tree.map(lambda x: x[:half], rows))
    state, two = loop(state, jax.tree.map(lambda x: x[half:], rows))
    return state, np.asarray(first), jax.tree.map(lambda a, b: np.concatenate([a, b]), one, two)


def loop_of_ale(actions: Any, key: Any, **arguments: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
    """Play `actions` `[T, N]` in ALE's own loop, whose reset takes a step; return first observations and steps."""
    from ale_py.vector_env import AtariVectorEnv

    shaped = {"stack_num": 1, "frameskip": 4, "use_fire_reset": False, "reward_clipping": False, "noop_max": 31}
    vector = AtariVectorEnv("breakout", ENVS, repeat_action_probability=0.25, **{**shaped, **arguments})
    seeds = np.asarray(jax.random.bits(key, (ENVS,), jnp.uint32) >> 1).astype(np.int32)
    obs, info = vector.reset(seed=seeds)
    first, lives = obs[:, 0, :, :, None], info["lives"]
    steps: list[list[dict[str, Any]]] = [[] for _ in range(ENVS)]
    taken, over = np.zeros(ENVS, int), np.zeros(ENVS, bool)
    while taken.min() < len(actions):
        # An environment that has reset takes no action; the others wait for none, so that each has a clock of its own.
        action = np.array([actions[min(taken[i], len(actions) - 1), i] for i in range(ENVS)], np.int32)
        obs, reward, ended, cut, info = vector.step(action)
        for i in range(ENVS):
            frame = obs[i, 0, :, :, None]
            if over[i]:
                steps[i][-1]["first of next"] = frame
            elif taken[i] < len(actions):
                known = {"action": action[i], "obs": frame, "reward": reward[i], "over": ended[i], "cut": cut[i]}
                steps[i].append({**known, "lost": info["lives"][i] < lives[i], "first of next": frame})
                taken[i] += 1
            lives[i] = info["lives"][i]
        over = ended | cut
    return first, steps


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        ({}, {}),
        ({"life_loss": True}, {}),
        ({"max_num_frames_per_episode": 322}, {"max_num_frames_per_episode": 320}),
    ],
)
def test_steps_are_those_of_ale_s_own_loop_and_join_no_episodes(
    params: dict[str, Any], arguments: dict[str, Any]
) -> None:
    actions = np.random.default_rng(0).integers(0, 4, (700, ENVS)).astype(np.int32)
    key = jax.random.key(5)
    state, first, steps = rolled(make_env("ale:Breakout", **params), actions, key)
    expected_first, expected = loop_of_ale(actions, key, **arguments)
    np.testing.assert_array_equal(first, expected_first)
    assert steps.present.all()
    assert steps.valid.all()
    assert not np.asarray(state.env.token).any()
    ends = cuts = 0
    for i in range(ENVS):
        total, length = 0.0, 0
        for t, one in enumerate(expected[i]):
            np.testing.assert_array_equal(steps.final_obs[t, i], one["obs"])
            np.testing.assert_array_equal(steps.obs[t, i], one["first of next"])
            ended = one["over"] or ("life_loss" in params and one["lost"] and not one["cut"])
            assert (steps.terminated[t, i], steps.truncated[t, i]) == (ended, one["cut"])
            total, length = total + float(one["reward"]), length + 1
            assert (steps.reward[t, i], steps.info["episode_return"][t, i]) == (one["reward"], total)
            assert steps.info["episode_length"][t, i] == length
            if ended or one["cut"]:
                total, length, ends, cuts = 0.0, 0, ends + 1, cuts + bool(one["cut"])
    assert ends >= 3
    assert (cuts > 0) == bool(arguments)


def test_a_state_that_the_emulators_have_left_takes_no_step_and_begins_anew() -> None:
    env = make_env("ale:Breakout")
    assert env.vectorise is not None
    vector = env.vectorise(2)
    step = jax.jit(vector.step)
    state, _ = jax.jit(vector.reset)(jax.random.key(0))
    actions = jnp.array([2, 3], jnp.int32)
    for t in range(5):
        state, _ = step(state, actions, jax.random.key(t))
    old = state
    # The first emulator goes on, the second is only where it was.
    later, _ = step(old, actions, jax.random.key(6))
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]) if a.shape[0] == 2 else a, old, later)
    after, out = step(mixed, actions, jax.random.key(7))
    assert out.present.tolist() == out.valid.tolist() == [False, True]
    assert (out.terminated.tolist(), out.truncated.tolist()) == ([False, False], [True, False])
    assert (out.reward.tolist()[0], after.episode_length.tolist()) == (0.0, [0, 7])
    again, out = step(after, actions, jax.random.key(8))
    assert out.present.all()
    assert again.episode_length.tolist() == [1, 8]
    # What begins anew depends on the key alone.
    one, two = (step(old, actions, jax.random.key(9))[1].obs for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_environments_of_one_kind_do_not_disturb_each_other() -> None:
    env, actions = make_env("ale:Breakout"), jnp.array([2, 3], jnp.int32)
    assert env.vectorise is not None
    vectors = [env.vectorise(2), make_env("ale:Breakout").vectorise(2)]
    states = [jax.jit(vector.reset)(jax.random.key(0))[0] for vector in vectors]
    steps = [jax.jit(vector.step) for vector in vectors]
    for t in range(10):
        moved = [step(state, actions, jax.random.key(t)) for step, state in zip(steps, states, strict=True)]
        states = [state for state, _ in moved]
        assert all(out.present.all() for _, out in moved)
        np.testing.assert_array_equal(moved[0][1].obs, moved[1][1].obs)


def test_transitions_of_stacked_frames_join_no_episodes() -> None:
    env = make_env("ale:Breakout", life_loss=True, **SMALL)
    processor = jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step(0.9))
    strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), processor=processor, num_envs=2, rollout=300)
    assert strategy.collect is not None
    state = jax.jit(strategy.init)(jax.random.key(1))
    _, items, _ = jax.jit(strategy.collect)(state, jax.random.key(2), jnp.uint32(0))
    obs, successors, last = (np.asarray(x) for x in (items.obs, items.next_obs, items.is_last))
    goes_on = ~last[:-1]
    np.testing.assert_array_equal(successors[:-1][goes_on], obs[1:][goes_on])
    np.testing.assert_array_equal(successors[..., :1], obs[..., 1:])
    assert (items.is_first[1:] == last[:-1]).all()
    begun = obs[1:][last[:-1]]
    assert len(begun) >= 4
    assert not begun[..., :1].any() or (begun[..., :1] == begun[..., 1:]).all()  # stacks begin with their first frame
    assert ((np.asarray(items.discount) == 0) <= last).all()
    assert (items.weight == 1).all()


def test_a_run_is_repeated_to_the_bit_and_a_resumed_one_begins_new_episodes(tmp_path: Path) -> None:
    def trainer(run: str, max_opts: int, **resume: bool) -> jaxrl.Trainer:
        env = make_env("ale:Breakout", **SMALL)
        strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=2, rollout=16, epochs=1, minibatches=1)
        settings = {"max_opts": max_opts, "eval_interval": 0, "eval_episodes": 2, "recorders": ["jsonl"]}
        return jaxrl.Trainer(strategy, run_dir=str(tmp_path / run), **settings, **resume)

    one, two = (trainer(run, 8).train() for run in ("one", "two"))
    assert state_digest(one.state) == state_digest(two.state)
    resumed = trainer("one", 16, resume=True).train()
    assert "environments that start anew" in (tmp_path / "one" / "metrics.jsonl").read_text()
    # The first step after the resume is absent, and counts as no invalid one.
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [row["invalid_steps"] for row in rows if row.get("invalid_steps") is not None][-1] == 0
    assert (np.asarray(resumed.state.env.episode_length) <= 8 * 16 - 1).all()
    whole = trainer("whole", 16).train()
    assert state_digest(resumed.state) != state_digest(whole.state)


@pytest.mark.parametrize("game", ["Pong", "Breakout"])
@pytest.mark.parametrize("params", [{}, {"frame_skip": 3, "screen_size": 64, "grayscale_obs": False}])
def test_frames_rewards_and_spaces_are_those_by_gymnasium(game: str, params: dict[str, Any]) -> None:
    pytest.importorskip("cv2")
    shared = {"noop_max": 0, "repeat_action_probability": 0.0, **params}
    ours, theirs = make_env(f"ale:{game}", **shared), make_env(f"gymnasium:ALE/{game}-v5", **shared)
    require_same_spaces(ours.spec, theirs.spec)
    assert ours.spec.time_limit == theirs.spec.time_limit
    count = ours.spec.action_space.n
    actions = np.random.default_rng(0).integers(0, count, (400, 1)).astype(np.int32)
    _, first, steps = rolled(ours, actions, jax.random.key(0))
    envs = HostVectorEnv(theirs, 1, 0)
    np.testing.assert_array_equal(first, envs.reset())
    paid = 0.0
    for t, action in enumerate(actions):
        step = envs.step(action)
        np.testing.assert_array_equal(steps.final_obs[t], step.final_obs)
        assert (steps.reward[t], steps.terminated[t]) == (step.reward, step.terminated)
        paid += abs(float(step.reward[0]))
    envs.close()
    assert paid > 0


@pytest.mark.parametrize("function", [jaxrl.check_env, lambda env: jaxrl.vectorise(env, 2)])
def test_functions_for_environments_in_jax_say_that_it_is_none(function: Any) -> None:
    with pytest.raises(SettingsError, match=r"ale:Pong is not written in JAX; expected a jaxrl\.Env"):
        function(make_env("ale:Pong"))


def test_an_old_version_is_answered_with_what_renews_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("ale_py.__version__", "0.11.2")
    with pytest.raises(SettingsError, match=r"needs ale-py 0\.12\.1, and 0\.11\.2 is installed: pip install -U ale-py"):
        make_env("ale:Pong")


def test_populations_shards_and_pools_of_resets_are_refused(tmp_path: Path) -> None:
    env = make_env("ale:Pong")
    with pytest.raises(SettingsError, match="shards divide environments written in JAX"):
        jaxrl.on_policy(env, jaxrl.ppo(), shards=2)
    with pytest.raises(
        SettingsError, match="resets is 'pool'; environments that are not written in JAX reset only what ended"
    ):
        jaxrl.on_policy(env, jaxrl.ppo(), resets="pool")
    several = jaxrl.population(jaxrl.on_policy(env, jaxrl.ppo()), seeds=2)
    with pytest.raises(SettingsError, match="members of a population train in environments written in JAX"):
        jaxrl.Trainer(several, max_opts=16, run_dir=str(tmp_path / "several"))
