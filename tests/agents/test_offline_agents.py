"""What agents for data add: their equations by hand, and what they make of a batch, on linear networks in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import vector_of
from toys_draws import drawn

from jaxrl.agents import awac, bc, cql, cql_dqn, dqn, iql, sac, td3, td3_bc
from jaxrl.agents.losses import advantage_weight, conservative_gap, expectile_loss
from jaxrl.agents.td3 import value_weight
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, sample_space
from jaxrl.types import Batch, Transition

KEY = jax.random.key(0)
OBS = Box(-1.0, 1.0, (3,))
SPECS = {
    "discrete": EnvSpec("Toy", OBS, Discrete(4)),
    "continuous": EnvSpec("Toy", OBS, Box(-1.0, 1.0, (2,))),
}
SIZE, RIVALS = 6, 5
WEIGHT = np.array([1.0, 1.0, 0.0, 1.0, 0.5, 1.0], np.float32)
PLAIN = {"features": (), "optimizer": "sgd"}


# --- equations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "loss"), [(2.0, 0.7 * 4), (-2.0, 0.3 * 4), (0.0, 0.0), (0.5, 0.7 * 0.25)])
def test_the_loss_of_an_expectile_is_that_worked_by_hand(error, loss):
    np.testing.assert_allclose(expectile_loss(jnp.float32(error), 0.7), loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("advantage", "weight"), [(0.0, 1.0), (0.5, np.exp(1.5)), (-2.0, np.exp(-6)), (9.0, 100.0), (1e30, 100.0)]
)
def test_weights_are_exponential_in_the_advantage_up_to_the_most(advantage, weight):
    np.testing.assert_allclose(advantage_weight(jnp.float32(advantage), 3.0, 100.0), weight, rtol=1e-5)


def test_the_conservative_gap_is_that_worked_by_hand():
    q = jnp.array([0.0, np.log(3.0), 1.0])
    np.testing.assert_allclose(conservative_gap(q, jnp.zeros(3), q[2]), np.log(1 + 3 + np.e) - 1, rtol=1e-6)
    # Four actions drawn uniformly from a segment of length 2 estimate the logarithm of the integral of exp(q).
    flat = conservative_gap(jnp.zeros(4), jnp.full(4, -np.log(2) + np.log(4)), jnp.float32(0))
    np.testing.assert_allclose(flat, np.log(2), rtol=1e-6)


def test_values_weigh_alpha_over_their_mean_size():
    q, weight = jnp.array([3.0, -5.0, 100.0]), jnp.array([1.0, 1.0, 0.0])
    np.testing.assert_allclose(value_weight(q, weight, jnp.float32(2.5)), 2.5 / 4, rtol=1e-6)


# --- agents -------------------------------------------------------------------------------------------------------


def batch_of(name, seed=0):
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(0, 0.5, (2, SIZE, 3)).astype(np.float32)
    action = sample_space(SPECS[name].action_space, jax.random.key(seed), SIZE)
    reward = rng.normal(size=SIZE).astype(np.float32)
    discount = np.where(np.arange(SIZE) % 3 == 1, 0.0, 0.9).astype(np.float32)
    items = Transition(*map(jnp.asarray, (obs, action, reward, discount, next_obs)))
    return Batch(items._replace(weight=jnp.asarray(WEIGHT)), jnp.arange(SIZE), jnp.ones(SIZE))


def beginning(agent, parts):
    """Return a state whose networks are all drawn anew, the targets others than what they trail."""
    state, rng = jax.jit(agent.init)(KEY), np.random.default_rng(5)
    draw = lambda params: jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32), params)
    return state._replace(**{part: draw(getattr(state, part)) for part in parts})


def layer(flat):
    numbers = flat["params"]["Dense_0"]
    return np.asarray(numbers["kernel"], np.float64), np.asarray(numbers["bias"], np.float64)


def linear(flat, x):
    """Apply one layer, or one of each critic: `[B, D] -> [(K,) B, outputs]`."""
    kernel, bias = layer(flat)
    return np.asarray(x, np.float64) @ kernel + bias[..., None, :]


def logsumexp(x):
    return np.log(np.exp(x).sum(-1))


def test_sac_holds_down_the_values_of_other_actions_as_worked_by_hand_of_discrete_ones():
    agent, batch = cql(**PLAIN, cql=2.0)(SPECS["discrete"]), batch_of("discrete")
    state = beginning(agent, ("policy", "critic", "target"))
    q = linear(state.critic, batch.items.obs)
    chosen = q[:, np.arange(SIZE), np.asarray(batch.items.action)]
    gap = logsumexp(q) - chosen
    check_penalty(agent, sac(**PLAIN)(SPECS["discrete"]), state, batch, gap)


def test_sac_holds_down_the_values_of_drawn_actions_by_their_density_of_continuous_ones():
    agent, batch = cql(**PLAIN, cql=2.0, cql_actions=RIVALS)(SPECS["continuous"]), batch_of("continuous")
    state = beginning(agent, ("policy", "critic", "target"))
    rng = np.random.default_rng(0)
    uniform, normal = rng.uniform(-1, 1, (SIZE, RIVALS, 2)), rng.normal(size=(2, SIZE, RIVALS, 2))
    actions, densities = [uniform], [np.full((SIZE, RIVALS), -2 * np.log(2))]
    for obs, noise in zip((batch.items.obs, batch.items.next_obs), normal, strict=True):
        mean, log_std = np.split(linear(state.policy, obs)[:, None], 2, axis=-1)
        raw = mean + np.exp(log_std) * noise
        slope = -2 * (np.logaddexp(raw, -raw) - np.log(2))
        actions.append(np.tanh(raw))
        densities.append((-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - slope).sum(-1))
    action, density = np.concatenate(actions, 1), np.concatenate(densities, 1)
    several = np.repeat(np.asarray(batch.items.obs)[:, None], 3 * RIVALS, axis=1)
    joined = np.concatenate([several, action], axis=-1).reshape(-1, 5)
    q = linear(state.critic, joined)[..., 0].reshape(2, SIZE, 3 * RIVALS)
    chosen = linear(state.critic, np.concatenate([batch.items.obs, batch.items.action], axis=-1))[..., 0]
    gap = logsumexp(q - density[None] - np.log(3 * RIVALS)) - chosen
    usual = rng.normal(size=(2, SIZE, 2))
    draws = {"uniform": [uniform], "normal": [usual[0], *normal, usual[1]]}
    check_penalty(agent, sac(**PLAIN)(SPECS["continuous"]), state, batch, gap, draws, {"normal": usual})


def check_penalty(agent, without, state, batch, gap, draws=None, usual_draws=None):
    """Check that the loss is the usual one and twice the weighted mean of the critics' summed gaps `[K, B]`.

    `draws` are what the agent draws, and `usual_draws` what it draws without the penalty.
    """
    as_floats = lambda draws: {name: [np.float32(x) for x in xs] for name, xs in (draws or {}).items()}

    def made(agent, state, draws):
        with drawn(**as_floats(draws)):
            return jax.jit(agent.update)(state, batch, jax.random.key(3), jnp.uint32(0))[1]

    metrics = made(agent, state, draws)
    usual = made(without, state._replace(hyper=state.hyper._replace(cql=())), usual_draws)
    assert "cql_gap" not in usual
    np.testing.assert_allclose(metrics["cql_gap"], gap.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"] - usual["loss"], 2.0 * (WEIGHT * gap.sum(0)).mean(), rtol=1e-4)
    # A sweep varies the weight where it is.
    more = state._replace(hyper=state.hyper._replace(cql=jnp.float32(3.0)))
    heavier = made(agent, more, draws)
    np.testing.assert_allclose(heavier["loss"] - usual["loss"], 3.0 * (WEIGHT * gap.sum(0)).mean(), rtol=1e-4)


def test_dqn_holds_down_the_values_of_other_actions():
    agent, without, batch = cql_dqn(**PLAIN, cql=2.0), dqn(**PLAIN), batch_of("discrete")
    agent, without = agent(SPECS["discrete"]), without(SPECS["discrete"])
    state = beginning(agent, ("params", "target"))
    _, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    off = state._replace(hyper=state.hyper._replace(cql=()))
    _, usual, _ = jax.jit(without.update)(off, batch, KEY, jnp.uint32(0))
    (name,) = state.params["params"]
    kernel, bias = (np.asarray(state.params["params"][name][part], np.float64) for part in ("kernel", "bias"))
    q = np.asarray(batch.items.obs, np.float64) @ kernel + bias[None]
    gap = logsumexp(q) - q[np.arange(SIZE), np.asarray(batch.items.action)]
    np.testing.assert_allclose(metrics["loss"] - usual["loss"], 2.0 * (WEIGHT * gap).mean(), rtol=1e-4)


def test_the_policy_of_td3_bc_climbs_values_and_stays_near_the_actions_of_the_data():
    agent = td3_bc(**PLAIN, policy_lr=0.125, lr=0.0, policy_interval=1, bc_alpha=2.0)(SPECS["continuous"])
    state, batch = beginning(agent, ("policy", "critic")), batch_of("continuous")
    new, _, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    obs, near = np.asarray(batch.items.obs, np.float64), np.asarray(batch.items.action, np.float64)
    (kernel, bias), (critic, critic_bias) = layer(state.policy), (x[0] for x in layer(state.critic))

    def value(kernel, bias):
        action = np.tanh(obs @ kernel + bias[None])
        return np.concatenate([obs, action], 1) @ critic[:, 0] + critic_bias[0], action

    fixed = 2.0 * WEIGHT.sum() / (WEIGHT * np.abs(value(kernel, bias)[0])).sum()

    def loss(kernel, bias):
        q, action = value(kernel, bias)
        return (WEIGHT * (-fixed * q + np.square(action - near).mean(1))).mean()

    h = 1e-5
    for entry in np.ndindex(kernel.shape):
        way = h * np.eye(1, kernel.size, np.ravel_multi_index(entry, kernel.shape)).reshape(kernel.shape)
        slope = (loss(kernel + way, bias) - loss(kernel - way, bias)) / (2 * h)
        np.testing.assert_allclose(layer(new.policy)[0][entry] - kernel[entry], -0.125 * slope, atol=1e-5)


def test_td3_bc_without_likeness_is_td3():
    plain, near = (make(**PLAIN)(SPECS["continuous"]) for make in (td3, functools.partial(td3_bc, bc_alpha=0.0)))
    batch = batch_of("continuous")
    one, two = (jax.jit(a.update)(jax.jit(a.init)(KEY), batch, KEY, jnp.uint32(1))[0] for a in (plain, near))
    np.testing.assert_array_equal(vector_of(one.policy), vector_of(two.policy))
    assert one.hyper.bc_alpha == ()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("make", [iql, awac])
def test_the_policy_learns_from_each_action_by_its_advantage(make, name):
    agent, batch = make(**PLAIN, lr=0.0, policy_lr=0.5, beta=2.0, tau=0.0)(SPECS[name]), batch_of(name)
    state = beginning(agent, ("policy", "critic", "target"))
    noise = np.random.default_rng(0).normal(size=(SIZE, 2)).astype(np.float32)
    with drawn(normal=[np.zeros_like(noise), noise]):  # the critics do not move, so that their target does not matter
        new, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    discrete, items = name == "discrete", batch.items
    x = items.obs if discrete else np.concatenate([items.obs, items.action], axis=-1)
    pick = np.asarray(items.action) if discrete else np.zeros(SIZE, int)
    q = linear(state.target if make is iql else state.critic, x)[:, np.arange(SIZE), pick].min(0)
    outputs = linear(state.policy, items.obs)
    if make is iql:
        v = linear(state.value, items.obs)[:, 0]
    elif discrete:
        share = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
        v = (share * linear(state.critic, items.obs).min(0)).sum(-1)
    else:
        chosen = np.tanh(outputs[:, :2]) + np.exp(-1.5 + 1.5 * np.tanh(outputs[:, 2:])) * noise
        v = linear(state.critic, np.concatenate([items.obs, chosen.clip(-1, 1)], axis=-1)).min(0)[:, 0]
    weight = np.minimum(np.exp(2.0 * (q - v)), 100.0)
    np.testing.assert_allclose(metrics["advantage"], (q - v).mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["advantage_weight"], weight.mean(), rtol=1e-4)
    if discrete:
        log_prob = outputs[np.arange(SIZE), pick] - logsumexp(outputs)
        np.testing.assert_allclose(metrics["policy_loss"], -(WEIGHT * weight * log_prob).mean(), rtol=1e-4)
        share = np.exp(outputs - logsumexp(outputs)[:, None])
        pull = (WEIGHT * weight)[:, None] * (np.eye(4)[pick] - share) / SIZE
        moved = layer(new.policy)[0] - layer(state.policy)[0]
        np.testing.assert_allclose(moved, 0.5 * np.asarray(items.obs, np.float64).T @ pull, atol=1e-5)


def test_cloning_takes_several_discrete_actions_at_once():
    spec = EnvSpec("Toy", OBS, MultiDiscrete((2, 3)))
    agent, rng = bc(**PLAIN)(spec), np.random.default_rng(0)
    state = beginning(agent, ("policy",))
    action = jnp.asarray(np.stack([rng.integers(0, 2, SIZE), rng.integers(0, 3, SIZE)], axis=1), jnp.int32)
    batch = batch_of("discrete")._replace(items=batch_of("discrete").items._replace(action=action))
    _, metrics, _ = jax.jit(agent.update)(state, batch, (), jnp.uint32(0))
    outputs, rows = linear(state.policy, batch.items.obs), np.arange(SIZE)
    parts = np.split(outputs, [2], axis=1)
    log_prob = sum(x[rows, action[:, i]] - logsumexp(x) for i, x in enumerate(parts))
    np.testing.assert_allclose(metrics["loss"], -(WEIGHT * log_prob).mean(), rtol=1e-5)


@pytest.mark.parametrize("make", [bc, td3_bc, cql, awac, iql])
def test_a_state_that_only_acts_is_the_policy(make):
    agent = make(features=(4,))(SPECS["continuous"])
    state = jax.eval_shape(agent.init, KEY)
    bare, obs = agent.strip(state), batch_of("continuous").items.obs
    assert len(jax.tree.leaves(bare)) == len(jax.tree.leaves((state.policy, state.hyper)))
    action, _ = jax.eval_shape(lambda state: agent.act(state, obs, None, jnp.uint32(0), "exploit"), bare)
    assert action.shape == (SIZE, 2)
    assert agent.info.offline


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: iql(expectile=1.0), r"agent\.expectile is 1\.0"),
        (lambda: awac(beta=-1.0), r"agent\.beta is -1\.0"),
        (lambda: cql(cql=-1.0), r"agent\.cql is -1\.0"),
        (lambda: cql(cql_actions=0), r"agent\.cql_actions is 0"),
        (lambda: td3_bc(bc_alpha=np.inf), r"agent\.bc_alpha is inf"),
        (lambda: bc(tau=0.5), "bc has no setting 'tau'"),
        (lambda: iql()(EnvSpec("Toy", OBS, MultiDiscrete((2, 3)))), "iql takes continuous or discrete actions"),
        (lambda: bc()(EnvSpec("Toy", OBS, Box(-np.inf, np.inf, (1,)))), "bound on both sides"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()
