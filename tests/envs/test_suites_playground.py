"""MuJoCo Playground: every name keeps its contract, its numbers are the suite's, and limits are not ends."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_envs import rollout
from toys_suites import played

import jaxrl
from jaxrl.envs import make_env, vectorise
from jaxrl.envs.physics import _find_varied_leaves
from jaxrl.envs.playground import PREFIX, _get_randomiser
from jaxrl.errors import SettingsError

playground = pytest.importorskip("mujoco_playground")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_promoted")]

CARTPOLE = "playground:CartpoleBalance"
CONTROL = playground.dm_control_suite.ALL_ENVS
ROBOTS = [name for name in playground.registry.ALL_ENVS if name not in CONTROL]


@pytest.mark.parametrize("name", CONTROL)
def test_every_environment_without_robots_keeps_its_forms(name: str) -> None:
    spec = vectorise(make_env(PREFIX + name), 2).spec
    assert (spec.name, spec.time_limit) == (PREFIX + name, 1000)
    assert (spec.action_space.low, spec.action_space.high) == (-1.0, 1.0)


def test_the_limit_truncates_and_the_last_observation_is_the_true_one() -> None:
    steps = played(make_env(CARTPOLE, episode_length=3.0), np.ones((7, 1), np.float32))
    assert steps.truncated.tolist() == [False, False, True, False, False, True, False]
    assert not steps.terminated.any()
    # Pushed to the right, the cart gains speed within an episode, and stands nearly still where the next one begins.
    speed, following = steps.final_obs[:, 3], steps.obs[:, 3]
    assert speed[0] < speed[1] < speed[2]
    assert abs(following[2]) < speed[2] / 2
    np.testing.assert_array_equal(following[:2], speed[:2])
    assert {"reward/upright", "episode_return"} <= steps.info.keys()


def test_numbers_are_those_of_the_suite_for_the_same_keys() -> None:
    env = make_env(CARTPOLE)
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    step, their_step = jax.jit(env.step), jax.jit(theirs.step)
    (state, obs), their = jax.jit(env.reset)(jax.random.key(3)), jax.jit(theirs.reset)(jax.random.key(3))
    np.testing.assert_array_equal(obs, their.obs)
    for t in range(5):
        action = np.full(1, 0.1 * t, np.float32)
        state, out = step(state, action, ())
        their = their_step(their, action)
        np.testing.assert_allclose(out.obs, their.obs, rtol=1e-5, atol=1e-6)
        assert float(out.reward) == pytest.approx(float(their.reward), rel=1e-5)
        assert not out.terminated


def test_a_repeated_action_adds_rewards_and_counts_steps_of_the_suite() -> None:
    once, twice = make_env(CARTPOLE), make_env(CARTPOLE, action_repeat=2, episode_length=7)
    assert twice.spec.time_limit == 4
    state, _ = jax.jit(once.reset)(jax.random.key(0))
    action = np.full(1, 0.5, np.float32)
    _, both = jax.jit(twice.step)(state, action, ())
    first_state, first = jax.jit(once.step)(state, action, ())
    _, second = jax.jit(once.step)(first_state, action, ())
    np.testing.assert_allclose(both.obs, second.obs, rtol=1e-5, atol=1e-6)
    assert float(both.reward) == pytest.approx(float(first.reward + second.reward), rel=1e-5)


@pytest.mark.parametrize("name", ROBOTS)
def test_robots_are_never_fetched_unasked(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "nowhere")
    monkeypatch.setattr(mjx_env, "ensure_menagerie_exists", lambda: pytest.fail("fetched"))
    with pytest.raises(SettingsError, match="which are never fetched unasked: git clone https:") as refused:
        make_env(PREFIX + name)
    assert "\n" not in str(refused.value)


# --- a model for each episode -----------------------------------------------------------------------------------


def heavier(model: Any, rng: Any) -> Any:
    """Playground's form of a randomiser: gravity from 1 to 3 times the task's own, along its axis."""
    gravity = jax.vmap(lambda key: model.opt.gravity * jax.random.uniform(key, minval=1.0, maxval=3.0))(rng)
    axes = jax.tree.map(lambda x: None, model)
    return model.tree_replace({"opt.gravity": gravity}), axes.tree_replace({"opt.gravity": 0})


def test_each_episode_has_a_model_of_its_own_that_stays() -> None:
    env = make_env(CARTPOLE, episode_length=3, randomiser=heavier)
    first, steps = rollout(vectorise(env, 4), np.zeros((6, 4, 1), np.float32))
    del first
    assert env.settings is None
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), 64))
    (gravity,) = state.params
    drawn = np.asarray(gravity[:, 2]) / -9.81
    assert ((drawn >= 1) & (drawn <= 3)).all()
    assert len(np.unique(drawn)) == 64
    after, _ = jax.vmap(lambda s: env.step(s, np.zeros(1, np.float32), ()))(state)
    np.testing.assert_array_equal(after.env.model[0], gravity)
    assert steps.valid.all()


def test_an_episode_is_that_of_the_suite_with_the_model_drawn() -> None:
    env = make_env(CARTPOLE, randomiser=heavier)
    state, obs = jax.jit(env.reset)(jax.random.key(3))
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    mine, own = jax.random.split(jax.random.key(3))
    models, _ = heavier(theirs.mjx_model, mine[None])
    theirs._mjx_model = models.tree_replace({"opt.gravity": models.opt.gravity[0]})
    their = jax.jit(theirs.reset)(own)
    np.testing.assert_array_equal(obs, their.obs)
    step, their_step = jax.jit(env.step), jax.jit(theirs.step)
    for _ in range(5):
        state, out = step(state, np.full(1, 0.1, np.float32), ())
        their = their_step(their, np.full(1, 0.1, np.float32))
        np.testing.assert_allclose(out.obs, their.obs, rtol=1e-5, atol=1e-6)


def test_the_share_of_the_way_follows_a_number_or_a_schedule() -> None:
    still, half = (make_env(CARTPOLE, randomiser=heavier, randomise=share) for share in (0.0, 0.5))
    key = jax.random.key(5)
    gravity = [float(env.reset(key)[0].params[0][2]) for env in (still, half, make_env(CARTPOLE, randomiser=heavier))]
    assert gravity[0] == pytest.approx(-9.81, rel=1e-6)
    assert gravity[1] == pytest.approx((gravity[0] + gravity[2]) / 2, rel=1e-6)
    later = make_env(CARTPOLE, randomiser=heavier, randomise=jaxrl.linear(0.0, 1.0, 10))
    assert set(later.values) == {"randomise"}
    strategy = jaxrl.on_policy(half, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4)
    found = jaxrl.population(strategy, sweep={"env_args.randomise": [0.0, 1.0]})
    assert len(found.members) == 2


def test_the_suites_own_randomiser_is_taken_for_the_parts_that_it_varies() -> None:
    """Without the models of robots: Playground's randomiser of Go1, on a body of twelve joints."""
    import mujoco
    from mujoco import mjx

    legs = "".join(
        f"<body pos='0 0 {0.1 * n}'><joint axis='0 1 0' frictionloss='0.1' armature='0.01'/><geom size='0.05'/></body>"
        for n in range(12)
    )
    xml = f"<worldbody><geom type='plane' size='1 1 1'/><body><freejoint/><geom size='0.1'/>{legs}</body></worldbody>"
    model = mjx.put_model(mujoco.MjModel.from_xml_string(f"<mujoco>{xml}</mujoco>"), impl="jax")
    taken = _get_randomiser("playground:Go1Getup", playground.registry.get_domain_randomizer, "Go1Getup")
    wanted, _ = taken(model, jax.random.key(1)[None])
    leaves, drawn = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (model, wanted))
    places = _find_varied_leaves(taken, model)
    assert [place for place, x in enumerate(leaves) if np.shape(x) != np.shape(drawn[place])] == places
    assert len(places) == 6
    for words in ("geom_friction", "body_mass", "body_ipos", "qpos0", "dof_frictionloss", "dof_armature"):
        assert any(drawn[place] is getattr(wanted, words) for place in places), words


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"randomise": True}, f"Playground has no randomiser for {CARTPOLE}; leave randomise out, or give one"),
        ({"randomise": 2.0, "randomiser": heavier}, "randomise is 2.0; expected a number from 0 to 1"),
        ({"randomise": "much"}, "randomise is 'much'; expected a number from 0 to 1"),
        (
            {"randomiser": lambda model, rng: (model, [None])},
            "the axes that the randomiser returns do not fit the model",
        ),
    ],
)
def test_what_cannot_be_randomised_is_said_in_one_line(params: Any, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        make_env(CARTPOLE, **params)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
