"""What every agent keeps, row by row of the table: a new one is tested here by having a row."""

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import equal, vector_of

import jaxrl
from jaxrl.agents import Agent
from jaxrl.agents.schedules import follow
from jaxrl.cli.algos import general
from jaxrl.errors import SettingsError
from jaxrl.registry import ALGORITHMS, algorithm_maker, algorithm_names
from jaxrl.spaces import sample_space
from jaxrl.types import Batch, NextAction, Rollout, Transition

NUMBERS = Path(__file__).parents[2] / "docs" / "numbers.md"
KEY, OPT_STEP = jax.random.key(0), jnp.uint32(3)
T, N = 4, 2
SIZE = T * N
OBS = jaxrl.Box(-1.0, 1.0, (3,))
ACTIONS = {"discrete": jaxrl.Discrete(3), "bounded": jaxrl.Box((-1.0, 0.0), (1.0, 4.0), (2,))}
DISCRETE = {*algorithm_names(actions="discrete")} - {"sac", "a2c", "reinforce", "cql", "iql"}
"""Those tried with discrete actions; the others with a box, each kind at least once for a family."""

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)
one_of_each_kind = pytest.mark.every_day("dqn", "ppo", "sac", "td3", "iql")
"""Each family of losses, what is learnt from and kinds of actions; the others' own tests update them every day."""


class Tried(NamedTuple):
    """An agent with a fresh state and a batch to learn from."""

    agent: Agent
    state: Any
    batch: Batch
    update: Callable[..., Any]
    """`(state, batch) -> (state, metrics, priorities)`, compiled."""
    init: Callable[..., Any]
    """`key -> state`, compiled."""


def spec_of(name: str) -> jaxrl.EnvSpec:
    return jaxrl.EnvSpec("Toy", OBS, ACTIONS["discrete" if name in DISCRETE else "bounded"])


PLAIN: dict[str, dict[str, Any]] = {
    "crossq": {"batch_norm": "none", "policy_interval": 1, "critic_features": (5,)},
    "xqc": {
        "batch_norm": "none",
        "pre_activation_norm": False,
        "joint_batch": False,
        "policy_interval": 1,
        "critic_features": (5,),
    },
    "tqc": {"critic_features": (5,)},
    "redq": {"policy_interval": 1},
    "droq": {"policy_interval": 1, "dropout": 0.0},
    "simba": {"critic_features": (5,)},
    "fast_sac": {"policy_interval": 1, "critic_features": (5,)},
    "fast_td3": {"policy_interval": 1, "critic_features": (5,)},
}
"""Settings of those whose defaults do not keep all of it: statistics of a batch are those of all its rows and of its
pieces, which also draw their dropout, and a policy that rests does not move."""


def agent_of(name: str, **settings: Any) -> Agent:
    usual = {"features": (5,), "lr": 0.01, "max_grad_norm": 1.0, **PLAIN.get(name, {})}
    return algorithm_maker(name)(**{**usual, **settings})(spec_of(name))


@cache
def tried(name: str) -> Tried:
    agent = agent_of(name)
    init = jax.jit(agent.init)
    state = init(KEY)
    return Tried(agent, state, jax.jit(lambda state: batch_of(name, agent, state))(state), updating(agent), init)


def updating(agent: Agent) -> Callable[..., Any]:
    return jax.jit(lambda state, batch: agent.update(state, batch, KEY, OPT_STEP))


def batch_of(name: str, agent: Agent, state: Any) -> Batch:
    """Return `SIZE` items: transitions, or what an agent that learns on-policy makes of a rollout."""
    keys = jax.random.split(KEY, 5)
    obs, next_obs = jax.random.uniform(keys[0], (2, SIZE, *OBS.shape), minval=-1.0)
    acted, extras = agent.act(state, obs, keys[1], OPT_STEP, "explore")
    action = acted if agent.prepare else sample_space(spec_of(name).action_space, keys[2], SIZE)
    reward, ends = jax.random.normal(keys[3], (SIZE,)), jax.random.bernoulli(keys[4], 0.2, (SIZE,))
    if agent.info.next_actions:
        extras = NextAction(jnp.roll(action, 1, axis=0), ~ends)
    items: Any = Transition(obs, action, reward, jnp.where(ends, 0.0, 0.9), next_obs, extras, jnp.ones(SIZE))
    if agent.prepare is not None:
        by_time = jax.tree.map(lambda x: x.reshape(T, N, *x.shape[1:]), items)
        items = agent.prepare(state, Rollout(by_time, (by_time.discount == 0).at[-1].set(True)))
    return Batch(items, jnp.arange(SIZE), jnp.ones(SIZE))


@pytest.mark.every_day("dqn", "cql", "td3_bc", "ppo", "pqn", "reppo", "bc", "iql")  # one of each module, with most
def test_every_metric_of_an_update_is_explained(name: str) -> None:
    """`docs/numbers.md` has each; nothing is computed here, only traced."""
    agent = agent_of(name)
    state = jax.eval_shape(agent.init, KEY)
    batch = jax.eval_shape(partial(batch_of, name, agent), state)
    _, metrics, _ = jax.eval_shape(agent.update, state, batch, KEY, OPT_STEP)
    assert {*metrics} <= {*re.findall(r"`(\w+)`", NUMBERS.read_text())}


@one_of_each_kind
def test_a_fresh_state_follows_from_the_key(name: str) -> None:
    agent, state, _, _, init = tried(name)
    other = init(jax.random.key(1))
    assert equal(state, init(KEY))
    assert not equal(agent.strip(state), agent.strip(other))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


@one_of_each_kind
def test_what_a_sweep_varies_is_a_float_in_the_state(name: str) -> None:
    hyper = tried(name).state.hyper
    assert {"lr", "max_grad_norm"} <= set(hyper._fields)
    assert {(x.shape, str(x.dtype)) for x in jax.tree.leaves(hyper)} == {((), "float32")}


@one_of_each_kind
def test_actions_are_of_the_space_and_exploiting_needs_no_noise_and_only_a_stripped_state(name: str) -> None:
    agent, state, *_ = tried(name)
    space, bare = spec_of(name).action_space, agent.strip(state)

    def act(state: Any, bare: Any) -> Any:
        obs = jax.random.uniform(KEY, (SIZE, *OBS.shape), minval=-1.0)
        greedy, stripped = (agent.act(some, obs, None, OPT_STEP, "exploit")[0] for some in (state, bare))
        return greedy, stripped, agent.act(state, obs, KEY, OPT_STEP, "explore")[0]

    greedy, stripped, explored = jax.jit(act)(state, bare)
    assert equal(greedy, stripped)
    assert len(jax.tree.leaves(bare)) < len(jax.tree.leaves(state))
    low, high = (0, 2) if isinstance(space, jaxrl.Discrete) else (space.low, space.high)
    for action in (greedy, explored):
        assert (action.shape, action.dtype) == ((SIZE, *space.shape), space.dtype)
        assert np.all((np.asarray(action) >= low) & (np.asarray(action) <= high))


@pytest.mark.every_day("dqn", "ppo", "reppo", "sac", "td3", "iql")
def test_what_is_stored_with_an_action_has_the_same_shapes_whether_it_is_greedy_or_not(name: str) -> None:
    """So that a policy can be evaluated either way."""
    agent = agent_of(name)
    state, obs = jax.eval_shape(agent.init, KEY), jnp.zeros((SIZE, *OBS.shape))
    greedy, explored = (
        jax.eval_shape(lambda state, key, mode=mode: agent.act(state, obs, key, OPT_STEP, mode)[1], state, KEY)
        for mode in ("exploit", "explore")
    )
    assert greedy == explored


@one_of_each_kind
def test_an_update_moves_what_acts_and_keeps_every_shape_and_dtype(name: str) -> None:
    agent, state, batch, update, _ = tried(name)
    new, metrics, priorities = update(state, batch)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    assert shapes(new) == shapes(state)
    assert not equal(agent.strip(new), agent.strip(state))
    assert equal(new.hyper, state.hyper)
    assert priorities.shape == (SIZE,)
    assert {"loss", "grad_norm"} <= metrics.keys()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((metrics, agent.strip(new))))


@pytest.mark.every_day("ppo", "sac")
def test_a_learning_rate_that_follows_a_schedule_is_that_of_the_moment(name: str) -> None:
    """From 0 to 0.02 in six optimisation steps: nothing moves at first; after three, as far as by 0.01."""
    _, state, batch, fixed, _ = tried(name)
    agent = follow(agent_of(name, lr=jaxrl.linear(0.0, 0.02, 6)))
    update = jax.jit(lambda opt_step: agent.update(state, batch, KEY, opt_step))
    part = next(x for x in ("critic", "params", "policy") if x in state._fields)
    first, (new, metrics, _) = update(jnp.uint32(0))[0], update(OPT_STEP)
    assert float(metrics["lr"]) == float(new.hyper.lr) == np.float32(0.01)
    assert equal(vector_of(getattr(first, part)), vector_of(getattr(state, part)))
    wanted = vector_of(getattr(fixed(state, batch)[0], part))
    np.testing.assert_allclose(vector_of(getattr(new, part)), wanted, rtol=1e-5, atol=1e-7)
    assert not equal(wanted, vector_of(getattr(state, part)))


@one_of_each_kind
def test_nothing_is_learnt_from_rows_of_weight_zero(name: str) -> None:
    _, state, batch, update, _ = tried(name)
    dead = jnp.arange(SIZE) % 3 == 1

    def garbage(items: Any) -> Any:
        spoil = lambda x: jnp.where(dead.reshape(-1, *[1] * (x.ndim - 1)), jnp.asarray(0.25, x.dtype), x)
        kept = {"action": items.action, "weight": jnp.where(dead, 0.0, items.weight)}
        return jax.tree.map(spoil, items)._replace(**kept)

    weighed = batch.items._replace(weight=jnp.where(dead, 0.0, batch.items.weight))
    first, told, priorities = update(state, batch._replace(items=weighed))
    second, again, _ = update(state, batch._replace(items=garbage(batch.items)))
    assert equal(first, second)
    assert not np.any(np.asarray(priorities)[np.asarray(dead)])
    assert equal(told["loss"], again["loss"])
    # Data have no such rows, so what agents tell of data alone counts all of them.
    assert ALGORITHMS[name].kind == "offline" or equal(told, again)
    if "td_error" in told:
        np.testing.assert_allclose(told["td_error"], np.sum(priorities) / np.sum(~dead), rtol=1e-5)
    assert not equal(first, update(state, batch)[0])


@pytest.mark.every_day("ppo", "sac")
def test_gradients_of_pieces_are_those_of_the_whole_batch_and_pieces_must_divide_it(name: str) -> None:
    _, state, batch, update, _ = tried(name)
    whole, in_pieces = update(state, batch)[0], updating(agent_of(name, accumulate=2))(state, batch)[0]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(in_pieces), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    with pytest.raises(SettingsError, match=rf"agent\.accumulate is 3 and does not divide the batch size {SIZE}"):
        updating(agent_of(name, accumulate=3))(state, batch)


@pytest.mark.every_day("ppo", "td3")
def test_members_of_a_population_go_where_each_would_go_alone(name: str) -> None:
    agent, state, batch, update, _ = tried(name)
    members = [state._replace(hyper=jax.tree.map(lambda x, by=by: x * by, state.hyper)) for by in (1.0, 0.7)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *members)
    together = jax.jit(jax.vmap(lambda state: agent.update(state, batch, KEY, OPT_STEP)[0]))(stacked)
    for i, member in enumerate(members):
        alone = update(member, batch)[0]
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-4, atol=2e-5)
    assert not equal(*(jax.tree.map(lambda x, i=i: x[i], agent.strip(together)) for i in (0, 1)))


def test_settings_rebuild_it_and_those_given_by_name_win(name: str) -> None:
    agent = agent_of(name)
    config = general(name).agent
    again = algorithm_maker(name)(type(config)(**agent.info.settings))(spec_of(name))
    assert again.info == agent.info
    assert jax.eval_shape(again.init, KEY) == jax.eval_shape(agent.init, KEY)
    assert algorithm_maker(name)(config, lr=0.25)(spec_of(name)).info.settings["lr"] == 0.25


@one_of_each_kind
def test_its_networks_are_pure_functions_of_what_its_state_holds(name: str) -> None:
    agent, state, batch, *_ = tried(name)
    obs, rows = batch.items.obs, len(batch.weight)
    assert agent.apply
    for part, apply in agent.apply.items():
        action = (batch.items.action,) if part == "critic" and name not in DISCRETE else ()
        for out in jax.tree.leaves(apply(getattr(state, part), obs, *action)):
            # REPPO has a single critic, which has no axis of its own.
            several = part == "critic" and "num_critics" in agent.info.settings
            critics = (agent.info.settings["num_critics"],) if several else ()
            assert out.shape[: len(critics) + 1] == (*critics, rows)
            assert jnp.isfinite(out).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 0.1}, "did you mean lr"),
    ({"gamma": 0.9}, "jaxrl calls it discount"),
    ({"lr": -1.0}, r"agent\.lr is -1\.0"),
    ({"accumulate": 0}, r"agent\.accumulate is 0"),
    ({"torso": "cnn"}, "unknown agent.torso 'cnn'"),
    ({"features": (0,)}, r"agent\.features is 0"),
    ({"optimizer": "adan"}, "did you mean adam"),
]


def test_settings_that_make_no_sense_are_refused_in_one_line(name: str) -> None:
    for settings, said in REFUSED:
        with pytest.raises(SettingsError, match=said) as refused:
            algorithm_maker(name)(**settings)(spec_of(name))
        assert "\n" not in str(refused.value)
