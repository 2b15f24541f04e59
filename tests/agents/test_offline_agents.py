"""What agents for data add: their equations by hand, and what they make of a batch, on linear networks in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun, drawn_anew, six_steps, vector_of
from toys_by_hand import beside, linear, numbers, slope, squashed
from toys_draws import drawn

from jaxrl.agents import awac, bc, cql, cql_dqn, dqn, edac, iql, rebrac, sac, td3, td3_bc
from jaxrl.agents.critics import similarity
from jaxrl.agents.losses import advantage_weight, expectile_loss
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.types import NextAction

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


similarity_and_slope = jax.jit(jax.value_and_grad(lambda x: similarity(x).sum()))


@pytest.mark.parametrize(
    ("gradients", "wanted"),
    [
        ([[3.0, 0.0], [5.0, 0.0]], 1.0),
        ([[3.0, 0.0], [0.0, 0.1]], 0.0),
        ([[3.0, 4.0], [-0.6, -0.8]], -1.0),
        ([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], (0 + np.sqrt(2)) / 3),
        ([[0.0, 0.0], [5.0, 0.0], [1.0, 0.0]], 1 / 3),
    ],
)
def test_the_similarity_of_gradients_is_their_mean_cosine_and_has_a_slope_where_one_is_zero(gradients, wanted):
    found, slope = similarity_and_slope(np.asarray(gradients, np.float32)[:, None])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_the_similarity_has_no_slope_along_a_gradient_however_small(size):
    slope = similarity_and_slope(np.array([[[size * 0.6, size * 0.8]], [[5.0, 0.0]]], np.float32))[1][0, 0]
    # Across it the cosine changes by its sine over its length.
    np.testing.assert_allclose(slope * size, [0.8 * 0.8, -0.8 * 0.6], atol=1e-5)


# --- agents -------------------------------------------------------------------------------------------------------


def batch_of(name):
    return six_steps(SPECS[name].action_space, WEIGHT)


def logsumexp(x):
    return np.log(np.exp(x).sum(-1))


def test_sac_holds_down_the_values_of_other_actions_as_worked_by_hand_of_discrete_ones():
    agent, batch = cql(**PLAIN, cql=2.0)(SPECS["discrete"]), batch_of("discrete")
    state = drawn_anew(agent, "policy", "critic", "target")
    q = linear(state.critic, batch.items.obs)
    chosen = q[:, np.arange(SIZE), np.asarray(batch.items.action)]
    gap = logsumexp(q) - chosen
    check_penalty(agent, sac(**PLAIN)(SPECS["discrete"]), state, batch, gap)


def test_sac_holds_down_the_values_of_drawn_actions_by_their_density_of_continuous_ones():
    agent, batch = cql(**PLAIN, cql=2.0, cql_actions=RIVALS)(SPECS["continuous"]), batch_of("continuous")
    state = drawn_anew(agent, "policy", "critic", "target")
    rng = np.random.default_rng(0)
    uniform, normal = rng.uniform(-1, 1, (SIZE, RIVALS, 2)), rng.normal(size=(2, SIZE, RIVALS, 2))
    actions, densities = [uniform], [np.full((SIZE, RIVALS), -2 * np.log(2))]
    for obs, noise in zip((batch.items.obs, batch.items.next_obs), normal, strict=True):
        action, density = squashed(linear(state.policy, obs)[:, None], noise)
        actions.append(action)
        densities.append(density)
    action, density = np.concatenate(actions, 1), np.concatenate(densities, 1)
    several = np.repeat(np.asarray(batch.items.obs)[:, None], 3 * RIVALS, axis=1)
    joined = np.concatenate([several, action], axis=-1).reshape(-1, 5)
    q = linear(state.critic, joined)[..., 0].reshape(2, SIZE, 3 * RIVALS)
    chosen = linear(state.critic, beside(batch.items.obs, batch.items.action))[..., 0]
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
    np.testing.assert_allclose(metrics["cql_gap"], gap[..., WEIGHT > 0].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"] - usual["loss"], 2.0 * (WEIGHT * gap.sum(0)).mean(), rtol=1e-4)
    # A sweep varies the weight where it is.
    more = state._replace(hyper=state.hyper._replace(cql=jnp.float32(3.0)))
    heavier = made(agent, more, draws)
    np.testing.assert_allclose(heavier["loss"] - usual["loss"], 3.0 * (WEIGHT * gap.sum(0)).mean(), rtol=1e-4)


def test_dqn_holds_down_the_values_of_other_actions():
    agent, without, batch = cql_dqn(**PLAIN, cql=2.0), dqn(**PLAIN), batch_of("discrete")
    agent, without = agent(SPECS["discrete"]), without(SPECS["discrete"])
    state = drawn_anew(agent, "params", "target")
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
    state, batch = drawn_anew(agent, "policy", "critic"), batch_of("continuous")
    new, _, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    obs, near = np.asarray(batch.items.obs, np.float64), np.asarray(batch.items.action, np.float64)
    (kernel, bias), (critic, critic_bias) = numbers(state.policy), (x[0] for x in numbers(state.critic))

    def value(kernel, bias):
        action = np.tanh(obs @ kernel + bias[None])
        return beside(obs, action) @ critic[:, 0] + critic_bias[0], action

    fixed = 2.0 * WEIGHT.sum() / (WEIGHT * np.abs(value(kernel, bias)[0])).sum()

    def loss(kernel, bias):
        q, action = value(kernel, bias)
        return (WEIGHT * (-fixed * q + np.square(action - near).mean(1))).mean()

    moved = numbers(new.policy)[0] - kernel
    np.testing.assert_allclose(moved, -0.125 * slope(lambda kernel: loss(kernel, bias), kernel), atol=1e-5)


def test_an_update_of_rebrac_is_that_worked_by_hand():
    settings = {"actor_bc_coef": 0.7, "critic_bc_coef": 1.3, "layer_norm": False, "policy_interval": 1, "tau": 0.0}
    agent = rebrac(**PLAIN, **settings, lr=0.25, policy_lr=0.125)(SPECS["continuous"])
    state = drawn_anew(agent, "policy", "critic", "target_policy", "target_critic")
    rng, batch = np.random.default_rng(2), batch_of("continuous")
    known, after = np.arange(SIZE) % 4 != 2, rng.uniform(-1, 1, (SIZE, 2)).astype(np.float32)
    batch = batch._replace(items=batch.items._replace(extras=NextAction(jnp.asarray(after), jnp.asarray(known))))
    noise = rng.normal(0, 3, (SIZE, 2)).astype(np.float32)
    with drawn(normal=[noise]):
        new, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    items = jax.tree.map(lambda x: np.asarray(x, np.float64), batch.items)
    # The critics, by targets at the target policy's action with clipped noise.
    then = np.clip(np.tanh(linear(state.target_policy, items.next_obs)) + np.clip(0.2 * noise, -0.5, 0.5), -1, 1)
    apart = np.where(known, np.square(then - after).sum(1), 0.0)
    value = linear(state.target_critic, beside(items.next_obs, then))[..., 0].min(0) - 1.3 * apart
    target = items.reward + items.discount * value
    x = beside(items.obs, items.action)
    error = target[None] - linear(state.critic, x)[..., 0]
    np.testing.assert_allclose(metrics["loss"], (WEIGHT * 0.5 * np.square(error).sum(0)).mean(), rtol=1e-5)
    moved = numbers(new.critic)[0] - numbers(state.critic)[0]
    np.testing.assert_allclose(moved[..., 0], 0.25 * (WEIGHT * error) @ x / SIZE, atol=1e-5)
    # The policy, by the lowest of the new critics over its mean size, near the data's actions.
    kernel, bias = numbers(state.policy)

    def outcome(kernel):
        action = np.tanh(items.obs @ kernel + bias[None])
        return linear(new.critic, beside(items.obs, action))[..., 0].min(0), np.square(action - items.action).sum(1)

    size = (WEIGHT * np.abs(outcome(kernel)[0])).sum() / WEIGHT.sum()

    def loss(kernel):
        q, distance = outcome(kernel)
        return (WEIGHT * (0.7 * distance - q / size)).mean()

    np.testing.assert_allclose(numbers(new.policy)[0] - kernel, -0.125 * slope(loss, kernel), atol=1e-5)


@pytest.mark.every_day("td3_bc")
@pytest.mark.parametrize(
    ("make", "of", "off"),
    [
        (td3_bc, td3, {"bc_alpha": 0.0}),
        (rebrac, td3, {"actor_bc_coef": 0.0, "critic_bc_coef": 0.0}),
        (edac, sac, {"eta": 0.0, "num_critics": 3}),
    ],
    ids=["td3_bc", "rebrac", "edac"],
)
def test_without_their_terms_they_are_bit_for_bit_what_they_are_made_of(make, of, off):
    shared = {name: value for name, value in off.items() if name == "num_critics"}
    agents = made({**PLAIN, "layer_norm": True, **off}, make) + made({**PLAIN, "layer_norm": True, **shared}, of)
    batch = batch_of("continuous")
    one, two = (jax.jit(agent.update)(begun(agent.init), batch, KEY, jnp.uint32(1)) for agent in agents)
    parts = lambda state: vector_of(state._replace(hyper=()))
    np.testing.assert_array_equal(parts(one[0]), parts(two[0]))
    assert one[1].keys() == two[1].keys()


def made(settings, *makers):
    return [make(**{**settings, "features": (5,), "lr": 0.1, "policy_lr": 0.1})(SPECS["continuous"]) for make in makers]


def test_edac_moves_critics_apart_by_the_slope_of_the_cosines_between_their_gradients():
    """Against a loss over pairs of critics and rows one by one, differentiated as a whole."""
    settings = {"num_critics": 3, "activation": "tanh", "optimizer": "sgd", "tau": 0.0}
    agent, plain = made({**settings, "eta": 2.0}, edac)[0], made(settings, sac)[0]
    state, batch = drawn_anew(agent, "policy", "critic", "target"), batch_of("continuous")
    update = lambda agent, state: jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    new, metrics, _ = update(agent, state)
    old, usual, _ = update(plain, state._replace(hyper=state.hyper._replace(eta=())))

    def pairs(critic):
        value = lambda obs, action: agent.apply["critic"](critic, obs[None], action[None])[:, 0, 0]
        slopes = jax.vmap(jax.jacobian(value, argnums=1))(batch.items.obs, batch.items.action)  # [B, K, D]
        cosine = lambda a, b: (a @ b) / (jnp.linalg.norm(a) * jnp.linalg.norm(b))
        rows = [cosine(x[0], x[1]) + cosine(x[0], x[2]) + cosine(x[1], x[2]) for x in slopes]
        return jnp.stack(rows)

    def term(critic):
        cosines = pairs(critic)
        return 2.0 / 2 * (WEIGHT * cosines).mean(), cosines[WEIGHT > 0].mean() / 3

    (wanted, mean), slope = jax.jit(jax.value_and_grad(term, has_aux=True))(state.critic)
    np.testing.assert_allclose(metrics["similarity"], mean, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"] - usual["loss"], wanted, rtol=1e-3)
    np.testing.assert_allclose(
        vector_of(new.critic) - vector_of(old.critic), -0.1 * vector_of(slope), rtol=1e-3, atol=1e-6
    )
    assert float(np.abs(vector_of(slope)).max()) > 1e-3


@pytest.mark.slow
def test_a_single_dimension_has_two_ways_to_go_and_no_slope_between_them():
    spec = EnvSpec("Toy", OBS, Box(-1.0, 1.0, (1,)))
    settings = {**PLAIN, "features": (5,), "lr": 0.1, "num_critics": 3}
    batch = batch_of("continuous")
    batch = batch._replace(items=batch.items._replace(action=batch.items.action[:, :1]))
    agent, plain = edac(**settings, eta=100.0)(spec), sac(**settings)(spec)
    state = drawn_anew(agent, "policy", "critic", "target")
    new, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    old, _, _ = jax.jit(plain.update)(state._replace(hyper=state.hyper._replace(eta=())), batch, KEY, jnp.uint32(0))
    np.testing.assert_allclose(vector_of(new.critic), vector_of(old.critic), atol=1e-5)
    assert -1 / 3 - 1e-4 <= float(metrics["similarity"]) <= 1 + 1e-4


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("make", [iql, awac])
def test_the_policy_learns_from_each_action_by_its_advantage(make, name):
    agent, batch = make(**PLAIN, lr=0.0, policy_lr=0.5, beta=2.0, tau=0.0)(SPECS[name]), batch_of(name)
    state = drawn_anew(agent, "policy", "critic", "target")
    noise = np.random.default_rng(0).normal(size=(SIZE, 2)).astype(np.float32)
    with drawn(normal=[np.zeros_like(noise), noise]):  # the critics do not move, so that their target does not matter
        new, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    discrete, items = name == "discrete", batch.items
    x = items.obs if discrete else beside(items.obs, items.action)
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
        v = linear(state.critic, beside(items.obs, chosen.clip(-1, 1))).min(0)[:, 0]
    weight = np.minimum(np.exp(2.0 * (q - v)), 100.0)
    learnt = WEIGHT > 0
    np.testing.assert_allclose(metrics["advantage"], (q - v)[learnt].mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["advantage_weight"], weight[learnt].mean(), rtol=1e-4)
    if make is iql:
        np.testing.assert_allclose(metrics["value"], v[learnt].mean(), rtol=1e-4, atol=1e-6)
    if discrete:
        log_prob = outputs[np.arange(SIZE), pick] - logsumexp(outputs)
        np.testing.assert_allclose(metrics["log_prob"].sum, log_prob[learnt].mean(), rtol=1e-4)
        np.testing.assert_allclose(metrics["policy_loss"], -(WEIGHT * weight * log_prob).mean(), rtol=1e-4)
        share = np.exp(outputs - logsumexp(outputs)[:, None])
        pull = (WEIGHT * weight)[:, None] * (np.eye(4)[pick] - share) / SIZE
        moved = numbers(new.policy)[0] - numbers(state.policy)[0]
        np.testing.assert_allclose(moved, 0.5 * np.asarray(items.obs, np.float64).T @ pull, atol=1e-5)


def test_cloning_takes_several_discrete_actions_at_once():
    spec = EnvSpec("Toy", OBS, MultiDiscrete((2, 3)))
    agent, rng = bc(**PLAIN)(spec), np.random.default_rng(0)
    state = drawn_anew(agent, "policy")
    action = jnp.asarray(np.stack([rng.integers(0, 2, SIZE), rng.integers(0, 3, SIZE)], axis=1), jnp.int32)
    batch = batch_of("discrete")._replace(items=batch_of("discrete").items._replace(action=action))
    _, metrics, _ = jax.jit(agent.update)(state, batch, (), jnp.uint32(0))
    outputs, rows = linear(state.policy, batch.items.obs), np.arange(SIZE)
    parts = np.split(outputs, [2], axis=1)
    log_prob = sum(x[rows, action[:, i]] - logsumexp(x) for i, x in enumerate(parts))
    np.testing.assert_allclose(metrics["loss"], -(WEIGHT * log_prob).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["log_prob"].sum, log_prob[WEIGHT > 0].mean(), rtol=1e-5)
    nothing = batch._replace(items=batch.items._replace(weight=jnp.zeros(SIZE)))
    assert jax.jit(agent.update)(state, nothing, (), jnp.uint32(0))[1]["log_prob"].count == 0
