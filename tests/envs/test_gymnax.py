"""The gymnax adapter: every registered environment runs, and its numbers are gymnax's own."""

import subprocess
import sys
from typing import Any

import gymnax
import jax
import numpy as np
import pytest
from toys_envs import rollout
from toys_suites import keeps_its_contract

from jaxrl.envs import gymnax as gymnax_adapter, make_env, vectorise
from jaxrl.envs.gymnax import names
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete

NEEDS_A_DOWNLOAD = {"MNISTBandit-bsuite"}


@pytest.mark.every_day("Breakout-MinAtar", "FourRooms-misc")  # the other families are trained in elsewhere
@pytest.mark.parametrize("name", sorted(set(names()) - NEEDS_A_DOWNLOAD))
def test_every_environment_runs_as_its_spec_says(name: str) -> None:
    with jax.numpy_rank_promotion("allow"):  # some of gymnax's own code relies on it
        env = make_env(name)
    keeps_its_contract(env)


def test_cartpole_moves_by_gymnaxs_numbers() -> None:
    venv = vectorise(make_env("CartPole-v1"), 3)
    env, params = gymnax.make("CartPole-v1")
    actions = np.random.default_rng(0).integers(0, 2, (8, 3)).astype(np.int32)
    key = jax.random.key(5)
    state, _ = jax.jit(venv.reset)(key)
    theirs, our_step, their_step = state.env, jax.jit(venv.step), jax.jit(jax.vmap(env.step, (None, 0, 0, None)))

    for action in actions:  # 8 pushes do not topple a pole that begins upright
        state, step = our_step(state, action, key)
        obs, theirs, reward, terminated, truncated, _ = their_step(key, theirs, action, params)
        np.testing.assert_allclose(step.final_obs, obs, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        assert not (np.asarray(terminated) | np.asarray(truncated)).any()


def test_a_fallen_pole_terminates_and_its_last_observation_is_gymnaxs() -> None:
    venv = vectorise(make_env("CartPole-v1"), 1)
    first, steps = rollout(venv, np.ones((30, 1), np.int32))
    end = int(np.argmax(steps.terminated[:, 0]))
    env, params = gymnax.make("CartPole-v1")
    key, step = jax.random.key(0), jax.jit(env.step)
    _, state = jax.jit(env.reset)(key, params)
    state = state.replace(**dict(zip(("x", "x_dot", "theta", "theta_dot"), first[0], strict=True)))
    for _ in range(end + 1):
        _, state, _, terminated, _, info = step(key, state, 1, params)

    assert bool(terminated)
    np.testing.assert_allclose(steps.final_obs[end, 0], info["final_observation"], rtol=1e-5)
    assert np.abs(steps.obs[end, 0]).max() <= 0.05
    assert steps.info["episode_return"][end, 0] == end + 1


def test_spaces_of_cartpole() -> None:
    spec = make_env("CartPole-v1").spec
    assert spec.action_space == Discrete(2)
    assert isinstance(spec.observation_space, Box)
    assert spec.observation_space.shape == (4,)
    assert spec.observation_space.high[0] == pytest.approx(4.8)
    assert spec.observation_space.low[2] == pytest.approx(-24 * np.pi / 180)
    assert spec.time_limit == 500


def test_a_parameter_changes_the_environment() -> None:
    env = make_env("CartPole-v1", max_steps_in_episode=3)
    _, steps = rollout(vectorise(env, 2), np.zeros((3, 2), np.int32))
    assert env.spec.time_limit == 3
    assert steps.truncated[:, 0].tolist() == [False, False, True]
    assert env.settings == {"env": "CartPole-v1", "env_args": {"max_steps_in_episode": 3}}


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_its_types_are_those_it_was_made_with_where_64_bits_are_enabled_later(name: str) -> None:
    env = make_env(name)

    def types() -> Any:
        state, obs = jax.eval_shape(env.reset, jax.random.key(0))
        action = jax.ShapeDtypeStruct(env.spec.action_space.shape, env.spec.action_space.dtype)
        after, out = jax.eval_shape(env.step, state, action, jax.random.key(0))
        return [jax.tree.map(lambda x: str(x.dtype), part) for part in (state, obs, after, out.obs)]

    as_made = types()
    with jax.enable_x64(True):
        assert types() == as_made


def test_an_unknown_parameter_is_named_with_its_nearest_and_one_that_is_no_number_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"CartPole-v1 has no parameter 'gravitas'; did you mean gravity\?"):
        make_env("CartPole-v1", gravitas=1.0)
    with pytest.raises(SettingsError, match="max_steps_in_episode is 'long'; expected a number"):
        make_env("CartPole-v1", max_steps_in_episode="long")
    said = r"Acrobot-v1: available_torque is an array of shape \[3\], which cannot be set; leave it out"
    with pytest.raises(SettingsError, match=said):
        make_env("Acrobot-v1", available_torque=5)


@pytest.mark.parametrize(
    ("name", "params", "same"),
    [
        ("SpaceInvaders-MinAtar", {"shot_cool_down": 7.0}, {"shot_cool_down": 7}),
        ("BernoulliBandit-misc", {"normalize_time": 0.0}, {"normalize_time": False}),
        ("CartPole-v1", {"gravity": 20}, {"gravity": 20.0}),
    ],
)
def test_a_parameter_may_be_any_number_of_its_value(name: str, params: Any, same: Any) -> None:
    """The command line passes every number as a float."""
    with jax.numpy_rank_promotion("allow"):
        one, other = (
            rollout(vectorise(make_env(name, **given), 2), np.ones((9, 2), np.int32)) for given in (params, same)
        )
    jax.tree.map(np.testing.assert_array_equal, one, other)


# --- how it is imported -----------------------------------------------------------------------------------------

HEAVY = "[name for name in ('matplotlib', 'pandas', 'seaborn', 'scipy.stats') if name in sys.modules]"


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_what_draws_is_not_imported_to_step_a_cart() -> None:
    made = "; ".join(f"jaxrl.make_env({name!r})" for name in names() if name != "Catch-bsuite")
    assert fresh(f"import sys, jaxrl; {made}; print({HEAVY})") == "[]"


@pytest.mark.slow
def test_gymnax_is_complete_for_whoever_imports_it_afterwards() -> None:
    """One object each, however it is reached: nobody sees that it was opened lazily."""
    shown = fresh(
        "import sys, jaxrl; jaxrl.make_env('CartPole-v1')\n"
        "before = sys.modules['gymnax.environments.classic_control.cartpole'].CartPole\n"
        "import gymnax, gymnax.environments.spaces\n"
        "from gymnax.environments import environment, Pong\n"
        "from gymnax import make\n"
        "print(gymnax.environments.CartPole is before is gymnax.environments.classic_control.CartPole,\n"
        "      type(make('CartPole-v1')[0]) is before,\n"
        "      gymnax.environments.spaces.Discrete.__name__, len(gymnax.registered_envs), Pong.__name__,\n"
        "      gymnax is sys.modules['gymnax'], 'make' in dir(gymnax), issubclass(before, environment.Environment))\n"
        "try: gymnax.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    first, second = shown.splitlines()
    assert first == f"True True Discrete {len(names())} Pong True True True"
    assert second == "module 'gymnax' has no attribute 'nothing'"


def test_the_environments_that_are_found_without_gymnax_are_those_that_it_registers() -> None:
    for name, home in gymnax_adapter._MODULES.items():
        kind = type(gymnax.make(name)[0])
        assert f"gymnax.environments.{home}" == f"{kind.__module__}:{kind.__name__}"
