"""Networks made in Python: every agent learns with one, and what is none is refused before anything compiles."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from toys_agents import ACTIONS, CONTINUOUS, DISCRETE, KEY, ROWS, begun, updated, vector_of

import jaxrl
from jaxrl.nn import ActorCritic, from_nnx
from jaxrl.spaces import sample_space


class Mine(nn.Module):
    """A layer, and heads of these widths behind it; of several a tuple, `[B]` each where the width is 0."""

    widths: tuple[int, ...]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, obs, *action):
        hidden = nn.tanh(nn.Dense(5, name="mine")(jnp.concatenate([obs, *action], axis=-1)))
        heads = [nn.Dense(max(1, width))(hidden).astype(self.dtype) for width in self.widths]
        heads = [x if width else x[:, 0] for x, width in zip(heads, self.widths, strict=True)]
        return heads[0] if len(heads) == 1 else tuple(heads)


values = {"make_network": lambda spec: Mine((ACTIONS,))}
both = {"make_network": lambda spec, head: Mine((head.outputs, 0))}
policy = {"make_policy": lambda spec, head: Mine((head.outputs,))}
critic = {"make_critic": lambda spec: Mine((0,))}
five_atoms = lambda: nn.Sequential([Mine((ACTIONS * 5,)), lambda x: x.reshape(-1, ACTIONS, 5)])
CASES: dict[str, tuple[Any, jaxrl.EnvSpec, dict[str, Any]]] = {
    "rainbow": (jaxrl.rainbow, DISCRETE, {"make_network": lambda spec: five_atoms()}),
    "discrete reppo": (jaxrl.reppo, DISCRETE, {**policy, "make_critic": lambda spec: five_atoms()}),
    "discrete awac": (jaxrl.awac, DISCRETE, {**policy, "make_critic": lambda spec: Mine((ACTIONS,))}),
    "values of shape [B, 1]": (jaxrl.a2c, DISCRETE, {"make_network": lambda spec, head: Mine((head.outputs, 1))}),
    "a critic of shape [B, 1]": (jaxrl.ddpg, CONTINUOUS, {**policy, "make_critic": lambda spec: Mine((1,))}),
}
"""Beside those in `test_training_mode.py`, whose networks normalise what they see."""
FIVE_ATOMS = ("rainbow", "discrete reppo")
"""Those whose networks above put out distributions of five atoms."""
NETWORKS = ("params", "policy", "critic", "value")
"""Entries of agents' states that are the parameters of a network."""


@pytest.mark.every_day("rainbow", "a critic of shape [B, 1]")
@pytest.mark.parametrize("name", CASES)
def test_an_agent_learns_with_networks_made_in_python(name):
    make, spec, own = CASES[name]
    agent = make(**own, **({"atoms": 5} if name in FIVE_ATOMS else {}))(spec)
    assert agent.info.custom == tuple(own)
    state = begun(agent.init)
    new, metrics = jax.jit(lambda state: updated(agent, spec, state))(state)
    networks = [x for x in NETWORKS if getattr(state, x, ())]
    assert len(networks) == len(own)
    for entry in networks:
        before, after = (getattr(s, entry)["params"] for s in (state, new))
        assert "mine" in before or "layers_0" in before
        pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        assert all(np.isfinite(moved).all() for _, moved in pairs)
        # TD3 moves its policy at every other step, of which this was the second.
        assert any((np.asarray(old) != moved).any() for old, moved in pairs)
    assert np.isfinite(metrics["loss"])


def test_a_network_of_ones_own_acts():
    agent = jaxrl.dqn(**values)(DISCRETE)
    state = begun(agent.init)

    @jax.jit
    def acted(state):
        obs = sample_space(DISCRETE.observation_space, KEY, ROWS)
        best = Mine((ACTIONS,)).apply(state.params, obs).argmax(axis=-1)
        return agent.act(state, obs, None, jnp.uint32(0), "exploit")[0], best

    np.testing.assert_array_equal(*acted(state))


def test_our_actor_critic_will_do_as_a_network_of_ones_own():
    net = lambda spec, head: ActorCritic(spec.observation_space, head.outputs, features=(5,))
    agents = jaxrl.ppo(features=(5,))(DISCRETE), jaxrl.ppo(make_network=net)(DISCRETE)
    one, other = (jax.jit(lambda key, agent=agent: agent.init(key).params)(KEY) for agent in agents)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert vector_of(one).tolist() == vector_of(other).tolist()


# --- flax.nnx -----------------------------------------------------------------------------------------------------


class Counting(nnx.Module):
    """A module with state of another kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.calls = nnx.Cache(jnp.zeros(()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Counting, "keeps Cache; expected Param, BatchStat"),
        (lambda rngs: 3, "expected a module of flax.nnx"),
        (lambda: None, "from_nnx: the module cannot be made"),
    ],
)
def test_what_from_nnx_cannot_take_is_refused(make, said):
    with pytest.raises(jaxrl.SettingsError, match=said):
        from_nnx(make)


# --- refused ------------------------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """No parameters."""

    def __call__(self, obs):
        return jnp.zeros((obs.shape[0], ACTIONS))


REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "values of other actions": (jaxrl.dqn, {"make_network": lambda spec: Mine((ACTIONS + 1,))}, [
        "make_network: called with [3, 3]", "returns [3, 5]", "expected [3, 4]", "a value for each action",
    ]),
    "values without atoms": (jaxrl.rainbow, {**values, "atoms": 5}, [
        "returns [3, 4]", "expected [3, 4, 5]", "agent.atoms",
    ]),
    "no values": (jaxrl.ppo, {"make_network": lambda spec, head: Mine((head.outputs,))}, [
        "returns [3, 4]; expected [3, 4] float32", "and [3] or [3, 1] float32, a value for each observation",
    ]),
    "other outputs": (jaxrl.bc, {"make_network": lambda spec, head: Mine((head.outputs + 1,))}, [
        "returns [3, 5]", "expected [3, 4]", "what the head of the policy takes",
    ]),
    "a critic of other actions": (jaxrl.sac, {"make_critic": lambda spec: Mine((1,))}, [
        "make_critic", "returns [3, 1]", "expected [3, 4]",
    ]),
    "a value too many": (jaxrl.iql, {"make_value": lambda spec: Mine((2,))}, [
        "make_value", "returns [3, 2]", "expected [3] or [3, 1]",
    ]),
    "bfloat16": (jaxrl.dqn, {"make_network": lambda spec: Mine((ACTIONS,), jnp.bfloat16)}, [
        "returns [3, 4] bfloat16", "expected [3, 4] float32",
    ]),
    "no module": (jaxrl.dqn, {"make_network": lambda spec: 3}, ["make_network returned int", "Flax Linen module"]),
    "a class": (jaxrl.dqn, {"make_network": lambda spec: Mine}, ["the class Mine itself", "as in Mine()"]),
    "nnx, bare": (jaxrl.dqn, {"make_network": lambda spec: Counting(nnx.Rngs(0))}, [
        "Counting, a module of flax.nnx", "jaxrl.nn.from_nnx",
    ]),
    "no function": (jaxrl.dqn, {"make_network": Mine((ACTIONS,))}, [
        "make_network is Mine", "lambda spec: MyNetwork()",
    ]),
    "no optimizer": (jaxrl.dqn, {"make_optimizer": optax.sgd(0.1)}, ["make_optimizer is", "lambda lr: optax.adam(lr)"]),
    "other arguments": (jaxrl.ppo, {"make_network": lambda spec: Mine((4, 0))}, [
        "make_network, which is called with the spec and the head of the policy, failed: TypeError",
    ]),
    "no parameters": (jaxrl.dqn, {"make_network": lambda spec: Nothing()}, ["has no parameters"]),
    "other observations": (
        jaxrl.dqn, {"make_network": lambda spec: nn.Sequential([lambda x: x @ jnp.ones((7, 4)), nn.Dense(4)])},
        ["cannot be called with [3, 3]: TypeError"],
    ),
    "a memory": (jaxrl.ppo, {**both, "core": "gru"}, ["agent.core is gru", "has no memory", "none"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_network_is_refused_in_one_line(name):
    make, own, said = REFUSED[name]
    with pytest.raises(jaxrl.SettingsError) as refused:
        make(**own)(DISCRETE)
    assert "\n" not in str(refused.value)
    for part in said:
        assert part in str(refused.value)
