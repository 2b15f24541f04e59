"""Asymmetric actor-critics: critics see all of an observation, and what chooses actions sees no privileged state."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import KEY, begun, transitions

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.masks import fill_privileged
from jaxrl.registry import algorithm_maker
from jaxrl.spaces import Box, Discrete, EnvSpec, sample_space
from jaxrl.types import Batch, RecurrentObs, Rollout

HIDDEN = {"privileged_state": Box(-1.0, 1.0, (1,)), "seen": Box(-1.0, 1.0, (2,))}
BOX, NUMBERS = (EnvSpec("Hidden", HIDDEN, actions) for actions in (Box(-1.0, 1.0, (2,)), Discrete(3)))
SMALL: dict[str, Any] = {"features": (8,)}
ROWS = 6


def drawn_of(space: Any, rows: int) -> Any:
    """Draw observations, in one program."""
    return jax.jit(lambda key: sample_space(space, key, rows))(KEY)


def with_state(obs: Any, state: Any) -> Any:
    return {**obs, "privileged_state": state}


OFF_POLICY = [("sac", BOX), ("sac", NUMBERS), ("td3", BOX), ("ddpg", BOX)]


@pytest.mark.every_day("td3-spec2")
@pytest.mark.parametrize(("name", "spec"), OFF_POLICY, ids=lambda x: getattr(x, "action_space", x))
def test_only_the_critics_of_replay_see_the_privileged_state(name: str, spec: Any) -> None:
    agent = algorithm_maker(name)(**SMALL)(spec)
    state = begun(agent.init)
    assert {x.shape[0] for x in jax.tree.leaves(state.policy) if x.ndim == 2} == {2, 8}
    obs = drawn_of(spec.observation_space, ROWS)

    def judged(privileged: Any) -> Any:
        items = transitions(agent, spec, state, ROWS)
        items = items._replace(obs=with_state(items.obs, privileged))
        batch = Batch(items, jnp.arange(ROWS), jnp.ones(ROWS))
        return agent.update(state, batch, KEY, jnp.uint32(0))[1]["q"]

    def chosen(privileged: Any, mode: Any) -> Any:
        seen = with_state(obs, privileged)
        return agent.act(state, seen, KEY, jnp.uint32(0), mode)[0].astype(jnp.float32)

    at = obs["privileged_state"]
    slope = jax.jit(jax.grad(judged))(at)
    assert np.abs(slope).min() > 0
    for mode in ("explore", "exploit"):
        choose = partial(chosen, mode=mode)
        slope, one, other = jax.jit(lambda at, f=choose: (jax.jacobian(f)(at), f(at), f(-at)))(at)
        assert not np.any(slope)
        np.testing.assert_array_equal(one, other)


class Peeping(nn.Module):
    """A network that would choose by the privileged state, if it were let."""

    outputs: int

    @nn.compact
    def __call__(self, obs: Any) -> tuple[Any, Any]:
        x = nn.Dense(8)(jnp.concatenate([obs["privileged_state"], obs["seen"]], axis=-1))
        return nn.Dense(self.outputs)(x), nn.Dense(1)(x)


class Dropping(Peeping):
    """The same that learns in another way than it acts."""

    def __call__(self, obs: Any, train: bool = False) -> tuple[Any, Any]:
        return super().__call__(obs)


PPO = {
    "own torsos": {},
    "shared": {"shared": True},
    "recurrent": {"core": "gru", "core_features": 4},
    "recurrent policy": {"core": "gru", "core_features": 4, "critic_core": "none"},
    "recurrent value": {"core": "gru", "core_features": 4, "critic_core": "separate"},
    "network in Python": {"make_network": lambda spec, head: Peeping(head.outputs)},
}


def test_a_network_that_learns_otherwise_than_it_acts_cannot_be_kept_from_it() -> None:
    with pytest.raises(jaxrl.SettingsError, match=r"has a privileged state.*cannot have batch statistics or dropout"):
        jaxrl.ppo(make_network=lambda spec, head: Dropping(head.outputs))(BOX)


@pytest.mark.every_day("shared", "recurrent", "recurrent value")
@pytest.mark.parametrize("case", PPO)
def test_only_the_value_of_policy_gradients_sees_the_privileged_state(case: str) -> None:
    agent = jaxrl.ppo(**SMALL, **PPO[case])(BOX)
    state = begun(agent.init)
    last = jnp.zeros((2, ROWS), bool)

    def prepared(privileged: Any) -> Any:
        items = transitions(agent, BOX, state, 2, ROWS)
        if case.startswith("recurrent"):
            items = items._replace(obs=items.obs._replace(obs=with_state(items.obs.obs, privileged)))
        else:
            items = items._replace(obs=with_state(items.obs, privileged))
        sample = agent.prepare(state, Rollout(items, last))
        return sample.value.sum(), sample.log_prob.sum()

    of_value, of_policy = jax.jit(jax.jacobian(prepared))(jnp.full((2, ROWS, 1), 0.5))
    assert np.abs(of_value).min() > 0
    assert not np.any(of_policy)


@pytest.mark.every_day("True")
@pytest.mark.parametrize("privileged", [True, False])
def test_a_value_without_the_core_has_a_torso_of_its_own_and_no_memory(privileged: bool) -> None:
    spec = BOX if privileged else BOX._replace(observation_space={"seen": Box(-1.0, 1.0, (2,))})
    agent = jaxrl.ppo(**SMALL, core="mingru", core_features=4, critic_core="none")(spec)
    state = begun(agent.init)
    obs = drawn_of(spec.observation_space, ROWS)

    def outputs(memory: Any) -> Any:
        return agent.apply["params"](state.params, RecurrentObs(obs, memory))[:2]

    memories = jax.tree.map(lambda x: np.full((ROWS, *x.shape), 0.3, np.float32), agent.memory)
    of_policy, of_value = jax.jit(jax.jacobian(outputs))(memories)
    assert all(np.any(x) for x in jax.tree.leaves(of_policy))
    assert not any(np.any(x) for x in jax.tree.leaves(of_value))
    # In sequences, values are those of the single observations; the torso of the policy has no part in them.
    items = transitions(agent, spec, state, 3, ROWS)
    flat = jax.tree.map(lambda x: np.moveaxis(x, 0, 1).reshape(3 * ROWS, *x.shape[2:]), items.obs.obs)
    none = jax.tree.map(lambda x: np.zeros((3 * ROWS, *x.shape), np.float32), agent.memory)

    def values(params: Any) -> Any:
        rollout = Rollout(items, jnp.zeros((3, ROWS), bool))
        value = agent.prepare(state._replace(params=params), rollout).value
        return value.sum(), (value.ravel(), agent.apply["params"](params, RecurrentObs(flat, none))[1])

    slopes, (in_sequences, alone) = jax.jit(jax.grad(values, has_aux=True))(state.params)
    np.testing.assert_allclose(in_sequences, alone, atol=1e-6)
    slopes = slopes["params"]
    moved = {name for name, part in slopes.items() if any(np.any(x) for x in jax.tree.leaves(part))}
    assert moved == {"critic_torso", "value"}


@pytest.mark.parametrize("core", ["gru", "mingru"])
def test_policy_and_value_with_a_core_each_remember_for_themselves(core: str) -> None:
    agent = jaxrl.ppo(**SMALL, core=core, core_features=4, critic_core="separate")(BOX)
    state = begun(agent.init)
    step = jax.jit(lambda obs, memory: agent.apply["params"](state.params, RecurrentObs(obs, memory)))
    memories = jax.tree.map(lambda x: np.full((ROWS, *x.shape), 0.3, np.float32), agent.memory)
    slopes = jax.jacobian(partial(step, drawn_of(BOX.observation_space, ROWS)))(memories)
    of_outputs = (slopes[0], slopes[1], *(of_layers[0] for of_layers in slopes[2]))
    moved = [[any(np.any(x) for x in jax.tree.leaves(of)) for of in slope] for slope in of_outputs]
    assert moved == [[True, False], [False, True]] * 2
    # Values of sequences are those of single steps, from the memory that was stored and with resets in between.
    items = transitions(agent, BOX, state, 5, ROWS)
    values, memory = [], jax.tree.map(lambda x: x[0], items.obs.memory)
    for t in range(5):
        kept = lambda x, t=t: np.where(items.is_first[t].reshape(-1, *[1] * (x.ndim - 1)), 0.0, x)
        _, value, memory = step(jax.tree.map(lambda x, t=t: x[t], items.obs.obs), jax.tree.map(kept, memory))
        values.append(value)
    learnt = agent.prepare(state, Rollout(items, jnp.zeros((5, ROWS), bool)))
    np.testing.assert_allclose(learnt.value, np.stack(values, 1), atol=1e-5)


def test_agents_without_a_critic_do_without_it() -> None:
    plain = NUMBERS._replace(observation_space={"seen": Box(-1.0, 1.0, (2,))})
    for name in ("dqn", "pqn", "bc"):
        make = algorithm_maker(name)(**SMALL)
        assert jax.eval_shape(make(NUMBERS).init, KEY) == jax.eval_shape(make(plain).init, KEY)


def test_images_may_be_for_critics_alone_and_something_must_be_left_for_the_policy() -> None:
    image = Box(0, 255, (8, 8, 1), "uint8")
    spec = BOX._replace(observation_space={"privileged_state": {"map": image}, "seen": Box(-1.0, 1.0, (2,))})
    agent = jaxrl.sac(**SMALL)(spec)
    policy, critic = jax.eval_shape(lambda key: (agent.init(key).policy, agent.init(key).critic), KEY)
    dims = lambda tree: {x.ndim for x in jax.tree.leaves(tree)}
    assert (dims(policy), dims(critic)) == ({1, 2}, {2, 3, 5})  # of critics there are two, hence an axis more
    with pytest.raises(SettingsError, match="are privileged_state, none of which a policy sees; add an entry"):
        jaxrl.td3()(BOX._replace(observation_space={"privileged_state": image}))


def test_what_only_critics_see_is_left_out_of_lists_as_of_arrays() -> None:
    space = {"privileged_state": Box(-1.0, 1.0, (2,)), "sensor": Box(-1.0, 1.0, (1,))}
    for sensor, shape in (([0.5], (2,)), ([[0.5], [0.2]], (2, 2)), (np.zeros((3, 1)), (3, 2))):
        assert fill_privileged(space, {"sensor": sensor})["privileged_state"].shape == shape
    counted = {**space, "privileged_state": Discrete(4, start=7)}
    assert fill_privileged(counted, {"sensor": [0.5]})["privileged_state"] == 7  # which networks see as 0
    nested = {**space, "sensor": {"of": space["sensor"]}}
    assert "privileged_state" not in fill_privileged(nested, {"sensor": 1.0})  # which is refused where it is read
