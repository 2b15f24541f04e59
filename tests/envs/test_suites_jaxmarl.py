"""JaxMARL: agents share a policy, numbers are the suite's, and limits are not ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_suites import checked

from jaxrl.envs import make_env
from jaxrl.envs.jaxmarl import KINDS
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box

jaxmarl = pytest.importorskip("jaxmarl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_promoted")]


@pytest.mark.parametrize("name", [name for name in KINDS if "facmac" not in name])
def test_every_environment_of_like_agents_passes_the_check(name: str) -> None:
    found = checked(make_env(f"jaxmarl:{name}"))
    if name == "overcooked_v2":  # of which every game begins alike
        assert [line.split(";")[0] for line in found] == ["reset uses its key but returns the same state for every key"]
    else:
        assert found == []


def test_numbers_are_those_of_the_suite_for_the_same_keys() -> None:
    env, theirs = make_env("jaxmarl:MPE_simple_spread_v3"), jaxmarl.make("MPE_simple_spread_v3")
    state, first = env.reset(jax.random.key(3))
    their_first, their = theirs.reset(jax.random.key(3))
    np.testing.assert_array_equal(first, np.stack([their_first[agent] for agent in theirs.agents]))
    actions = np.array([1, 2, 3])
    for t in range(30):
        key = jax.random.fold_in(jax.random.key(4), t)
        state, out = env.step(state, actions, key)
        obs, their, rewards, _, _ = theirs.step_env(key, their, dict(zip(theirs.agents, actions, strict=True)))
        np.testing.assert_array_equal(out.obs, np.stack([obs[agent] for agent in theirs.agents]))
        np.testing.assert_array_equal(out.reward, np.stack([rewards[agent] for agent in theirs.agents]))
        assert not out.terminated.any()  # neither after 25 steps, where the suite would end it
    assert env.spec.time_limit == 25
    assert make_env("jaxmarl:MPE_simple_spread_v3", time_limit=7, num_agents=2).spec.time_limit == 7


def test_parameters_that_give_agents_unequal_actions_are_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match=r"ally_0 has actions .*n=10.*, but enemy_0 .*n=7.*; agents share a policy"):
        make_env("jaxmarl:SMAX", num_allies=2)


def test_a_limit_that_agents_see_stays_and_truncates() -> None:
    env = make_env("jaxmarl:overcooked", max_steps=3)
    state, _ = env.reset(jax.random.key(0))
    for t in range(3):
        state, out = env.step(state, jnp.zeros(2, jnp.int32), jax.random.key(t))
        assert (bool(jnp.any(out.terminated)), bool(jnp.any(out.truncated))) == (False, t == 2)


def test_illegal_actions_are_masked_and_the_dead_of_smax_die_alone() -> None:
    env = make_env("jaxmarl:HeuristicEnemySMAX")
    assert env.agents == 5
    assert env.spec.observation_space["action_mask"] == Box(0, 1, (10,), "bool")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    step, ends = jax.jit(env.step), []
    for t in range(100):  # they stand still, and are shot one after the other
        state, out = step(state, jnp.full(5, 4), jax.random.key(t))
        ends.append(np.asarray(out.terminated))
        if ends[-1].all():
            break
    assert ends[-1].all()
    assert any(one.any() and not one.all() for one in ends)


def test_a_longer_limit_replaces_that_of_the_suite_also_where_a_wrapper_has_it() -> None:
    env = make_env("jaxmarl:HeuristicEnemySMAX", time_limit=200)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    late = state.replace(state=state.state.replace(step=jnp.full_like(state.state.step, 150)))
    _, out = jax.jit(env.step)(late, jnp.full(5, 4), jax.random.key(1))
    assert not out.terminated.any()
    assert not out.truncated
