"""REPPO: equations by hand, an update and its targets in NumPy on linear networks, and what it takes and refuses."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun, drawn_anew, retuned
from toys_by_hand import linear, softmax
from toys_draws import drawn

import jaxrl
from jaxrl.agents.losses import hl_gauss
from jaxrl.agents.reppo import Multipliers, multiplier_gradients, policy_loss
from jaxrl.agents.values import ENTROPY_MARGIN
from jaxrl.distributions import LOG_STD, Categorical, kl_divergence, mask_distribution
from jaxrl.errors import SettingsError
from jaxrl.spaces import sample_space
from jaxrl.training.settings import unused_settings
from jaxrl.tuning import Override, override
from jaxrl.types import Batch, Rollout, Transition

KEY = jax.random.key(0)
OBS = jaxrl.Box(-1.0, 1.0, (3,))
SPECS = {
    "discrete": jaxrl.EnvSpec("Toy", OBS, jaxrl.Discrete(4)),
    "continuous": jaxrl.EnvSpec("Toy", OBS, jaxrl.Box((-2.0, 0.0), (4.0, 0.5), (2,))),
}
T, N = 3, 2
ATOMS, LOW, HIGH = 21, -4.0, 6.0
SUPPORT = np.linspace(LOW, HIGH, ATOMS)
UNIT = (HIGH - LOW) / 100
TEMPERATURE, KL_WEIGHT, BOUND = 3.0, 2.0, 0.05
FIXED = {"v_min": LOW, "v_max": HIGH}
normal_cdf = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))


def float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


# --- the equations ------------------------------------------------------------------------------------------------


def histogram(target: float, support: np.ndarray) -> np.ndarray:
    """Return what the normal distribution around `target`, of 3/4 of a bin, has in each bin, in float64."""
    width = support[1] - support[0]
    edges = np.append(support - width / 2, support[-1] + width / 2)
    below = normal_cdf((edges - np.clip(target, support[0], support[-1])) / (0.75 * width))
    return np.asarray(np.diff(below) / (below[-1] - below[0]))


@pytest.mark.parametrize("target", [-9.0, -4.0, -3.8, 0.0, 0.123, 5.9, 6.0, 50.0])
def test_a_return_becomes_a_histogram(target: float) -> None:
    made = float64(jax.jit(hl_gauss)(jnp.float32(target), jnp.asarray(SUPPORT, jnp.float32)))
    np.testing.assert_allclose(made, histogram(target, SUPPORT), atol=1e-6)
    assert made.sum() == pytest.approx(1, abs=1e-6)
    # Within the support its mean is the return; at the ends the half that is cut off pulls it in by half a bin.
    assert made @ SUPPORT == pytest.approx(np.clip(target, LOW, HIGH), abs=1e-3 if abs(target) < 1 else 0.3)


def test_beyond_the_bound_only_the_divergence_counts() -> None:
    value, kl = jnp.array([3.0, 3.0, 3.0]), jnp.array([0.0, 0.04, 0.06])
    np.testing.assert_allclose(policy_loss(value, kl, 0.05, 10.0), [-3.0, -3.0, 0.6], rtol=1e-6)
    of_value, of_kl = jax.grad(lambda *x: policy_loss(*x, 0.05, 10.0).sum(), argnums=(0, 1))(value, kl)
    np.testing.assert_array_equal(of_value, [-1.0, -1.0, 0.0])
    np.testing.assert_array_equal(of_kl, [0.0, 0.0, 10.0])


def test_gradients_of_the_multipliers_are_those_of_what_they_weigh() -> None:
    made = multiplier_gradients(Multipliers(jnp.log(2.0), jnp.log(3.0)), jnp.float32(0.5), jnp.float32(-0.25))
    np.testing.assert_allclose(made, [2 * 0.5, 3 * 0.25], rtol=1e-6)


def test_divergences_under_a_mask_are_those_of_the_allowed_actions_and_have_finite_slopes() -> None:
    mask, logits = jnp.array([True, False, True]), jnp.array([0.0, 5.0, 1.0])
    held = mask_distribution(Categorical(jnp.array([0.0, 1.0, 0.0])), mask)
    kl = lambda logits: kl_divergence(held, mask_distribution(Categorical(logits), mask))
    wanted = sum(0.5 * math.log(0.5 / p) for p in softmax(np.array([0.0, 1.0])))
    assert float(kl(logits)) == pytest.approx(wanted, rel=1e-5)
    slope = jax.grad(kl)(logits)
    assert np.isfinite(slope).all()
    assert slope[1] == 0


# --- a rollout and an update in NumPy -----------------------------------------------------------------------------


@pytest.fixture(params=SPECS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def agent_of(name: str, **settings: Any) -> jaxrl.Agent:
    """Make an agent with linear networks and plain gradient descent, all of which can be said again in NumPy."""
    plain = {"features": (), "optimizer": "sgd", "lr": 0.25, "max_grad_norm": 1e9, "atoms": ATOMS, "kl_bound": BOUND}
    weights = {"temperature": TEMPERATURE, "kl_weight": KL_WEIGHT, "target_entropy": 0.25, "q_lambda": 0.5}
    return jaxrl.reppo(**{**plain, **weights, **FIXED, **settings})(SPECS[name])


@functools.cache
def beginning(name: str, scale: float = 0.4, **settings: Any) -> Any:
    """Return a state whose parameters are all drawn anew."""
    return drawn_anew(agent_of(name, **settings), "policy", "critic", scale=scale)


NOISE = np.random.default_rng(3).normal(size=(2, T * N, 2)).astype(np.float32)
"""How far actions lie from the mean: those after each step, and those that the policy learns from."""


def rollout_of(name: str, scale: float = 1.0) -> Rollout:
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(0, 0.5, (2, T, N, 3)).astype(np.float32)
    action = sample_space(SPECS[name].action_space, KEY, T * N)
    discount = np.where(np.arange(T * N) == 2, 0.0, 0.9).reshape(T, N)
    last = np.isin(np.arange(T * N), (2, 1)).reshape(T, N)
    extras = {} if name == "discrete" else {"deviation": NOISE[0].reshape(T, N, 2)}
    reward = scale * rng.normal(size=(T, N))
    parts = (obs, action.reshape(T, N, *action.shape[1:]), reward, discount, next_obs)
    arrays = [jnp.asarray(x) if i == 1 else jnp.asarray(x, jnp.float32) for i, x in enumerate(parts)]
    items = Transition(*arrays, jax.tree.map(jnp.asarray, extras), jnp.ones((T, N)))
    return Rollout(items, jnp.asarray(last))


def prepared(name: str, state: Any, rollout: Rollout) -> Any:
    """Return what an update learns from, made in one program."""
    return jax.jit(agent_of(name).prepare)(state, rollout)


def updated(name: str, state: Any, sample: Any, weight: Any = None, **settings: Any) -> tuple[Any, Any, Any]:
    rows = sample.target.shape[0]
    if weight is not None:
        sample = sample._replace(weight=jnp.asarray(weight, jnp.float32))
    batch = Batch(sample, jnp.arange(rows), jnp.ones(rows))
    with drawn(normal=[NOISE[1]]):
        made: tuple[Any, Any, Any] = jax.jit(agent_of(name, **settings).update)(state, batch, KEY, jnp.uint32(0))
    return made


def unit(action: Any) -> np.ndarray:
    """Bring actions of the box back to -1 to 1."""
    return np.asarray((float64(action) - [1.0, 0.25]) / [3.0, 0.25])


def outputs_by_hand(state: Any, obs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the Gaussian."""
    mean, log_std = np.split(linear(state.policy, float64(obs)), 2, axis=-1)
    return mean, np.exp(np.clip(log_std, *LOG_STD))


def squashed_entropy(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the entropy of `tanh` of a Gaussian by a fine sum, `[..., D] -> [...]`."""
    z = np.linspace(-8, 8, 4_001)
    weight = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    size = np.abs(mean[..., None] + std[..., None] * z)
    slope = 2 * (math.log(2) - size - np.log1p(np.exp(-2 * size))) @ weight
    return np.asarray((np.log(std) + 0.5 * math.log(2 * math.pi * math.e) + slope).sum(-1))


def value_by_hand(name: str, state: Any, obs: Any, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the critic's value of the policy's action, and the policy's entropy, `[B]`."""
    obs = float64(obs)
    if name == "discrete":
        p = softmax(linear(state.policy, obs))
        q = softmax(linear(state.critic, obs).reshape(-1, 4, ATOMS)) @ SUPPORT
        return (p * q).sum(-1), -(p * np.log(p)).sum(-1)
    mean, std = outputs_by_hand(state, obs)
    q = softmax(linear(state.critic, np.concatenate([obs, np.tanh(mean + std * noise)], -1))) @ SUPPORT
    return q, squashed_entropy(mean, std)


def flat(x: Any) -> Any:
    return x.reshape(T * N, *x.shape[2:])


def targets_by_hand(name: str, state: Any, rollout: Rollout, passed: Any = 1.0) -> np.ndarray:
    items, last = rollout.items, np.asarray(rollout.last)
    q, entropy = (x.reshape(T, N) for x in value_by_hand(name, state, flat(items.next_obs), NOISE[0]))
    reward, discount = float64(items.reward), float64(items.discount)
    share = 0.5 * np.broadcast_to(passed, (T, N))
    target = np.zeros((T, N))
    for t in reversed(range(T)):
        ends = last[t] | (t == T - 1)
        following = np.zeros(N) if t == T - 1 else share[t + 1] * target[t + 1]
        mixed = np.where(ends, q[t], 0 if t == T - 1 else (1 - share[t + 1]) * q[t] + following)
        target[t] = reward[t] + discount[t] * (TEMPERATURE * UNIT * entropy[t] + mixed)
    return target


def test_targets_of_a_rollout_are_those_of_numpy(name: str) -> None:
    state, rollout = beginning(name), rollout_of(name)
    made = jax.jit(agent_of(name).prepare)(state, rollout).target
    np.testing.assert_allclose(made.reshape(T, N), targets_by_hand(name, state, rollout), rtol=1e-3, atol=1e-4)


def test_returns_of_actors_with_other_parameters_are_passed_on_by_no_more_than_the_policy_would(name: str) -> None:
    state, rollout, log_prob = beginning(name), rollout_of(name), agent_of(name).policy_fns.distribution
    action = flat(rollout.items.action)
    raw = action if name == "discrete" else jnp.arctanh(jnp.asarray(unit(action), jnp.float32))
    own = log_prob(state, flat(rollout.items.obs), jnp.uint32(0)).log_prob(raw).reshape(T, N)
    ratio = np.array([[1.0, 1.0], [0.25, 4.0], [0.5, 0.125]])
    extras = {**rollout.items.extras, "log_prob": own - jnp.log(jnp.asarray(ratio, jnp.float32))}
    lagging = rollout._replace(items=rollout.items._replace(extras=extras))
    made = jax.jit(agent_of(name).prepare)(state, lagging).target
    wanted = targets_by_hand(name, state, rollout, np.minimum(1.0, ratio))
    np.testing.assert_allclose(made.reshape(T, N), wanted, rtol=1e-3, atol=1e-4)
    assert np.abs(wanted - targets_by_hand(name, state, rollout)).max() > 0.1


def test_actors_record_the_log_probability_of_the_actions_they_return(name: str) -> None:
    agent, state, obs = agent_of(name), beginning(name), jax.random.normal(KEY, (64, 3))
    action, extras = agent.fns.behave(state, obs, KEY, jnp.uint32(0), "explore")
    raw = agent.policy_fns.head.to_raw(action)
    wanted = agent.policy_fns.distribution(state, obs, jnp.uint32(0)).log_prob(raw)
    np.testing.assert_array_equal(extras["log_prob"], wanted)
    np.testing.assert_array_equal(agent.act(state, obs, KEY, jnp.uint32(0), "explore")[0], action)


def shaken(state: Any, by: float) -> Any:
    """Move the parameters of the policy."""
    return state._replace(policy=jax.tree.map(lambda x: x + by * jnp.sin(30 * x), state.policy))


WEIGHT = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])


def test_an_update_has_the_losses_of_numpy(name: str) -> None:
    """The policy learns from another state than that of the rollout, so that it is beyond the bound at some rows."""
    state, rollout = beginning(name), rollout_of(name)
    sample = prepared(name, state, rollout)
    moved = shaken(state, 1.0 if name == "discrete" else 0.2)
    after, metrics, errors = updated(name, moved, sample, WEIGHT)
    obs = float64(sample.obs)
    if name == "discrete":
        out = linear(state.critic, obs).reshape(-1, 4, ATOMS)
        logits = out[np.arange(T * N), np.asarray(sample.action)]
        p, q = softmax(linear(state.policy, obs)), softmax(linear(moved.policy, obs))
        kl = (p * np.log(p / q)).sum(-1)
    else:
        logits = linear(state.critic, np.concatenate([obs, unit(sample.action)], -1))
        (m, s), (n, r) = outputs_by_hand(state, obs), outputs_by_hand(moved, obs)
        kl = (np.log(r / s) + (s**2 + (m - n) ** 2) / (2 * r**2) - 0.5).sum(-1)
    rows = np.stack([histogram(x, SUPPORT) for x in float64(sample.target)])
    loss = (-(rows * np.log(softmax(logits))).sum(-1) * WEIGHT).mean()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    # Numbers of steps are means over those that count.
    counted = WEIGHT > 0
    np.testing.assert_allclose(metrics["kl"], kl[counted].mean(), rtol=1e-3)
    expected = softmax(logits) @ SUPPORT
    np.testing.assert_allclose(errors, np.abs(float64(sample.target) - expected) * WEIGHT, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["q"], expected[counted].mean(), rtol=1e-3)
    # The policy is improved against the critic after its update.
    value, entropy = value_by_hand(name, moved._replace(critic=after.critic), obs, NOISE[1])
    assert 0 < (kl < BOUND).sum() < T * N
    improved = np.where(kl < BOUND, -(value / UNIT + TEMPERATURE * entropy), KL_WEIGHT * kl)
    np.testing.assert_allclose(metrics["policy_loss"], (improved * WEIGHT).mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["entropy"], entropy[counted].mean(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["temperature"], TEMPERATURE * UNIT, rtol=1e-5)


def test_multipliers_rise_at_too_little_entropy_or_too_much_divergence_and_fall_otherwise(name: str) -> None:
    state = beginning(name)
    sample = prepared(name, state, rollout_of(name))
    for target, by, change in ((-9.0, 0.0, -1), (9.0, 1.0, 1)):
        after, metrics, _ = updated(name, shaken(retuned(state, target_entropy=target), by), sample)
        assert (float(metrics["kl"]) > BOUND) == (by > 0)
        moved = jax.tree.map(lambda a, b: np.sign(a - b), after.multipliers, state.multipliers)
        assert moved == (change, change)


def test_far_beyond_the_bound_an_update_takes_the_policy_back_to_that_of_the_rollout(name: str) -> None:
    state = beginning(name)
    sample = prepared(name, state, rollout_of(name))
    state, metrics, _ = updated(name, shaken(retuned(state, lr=0.01), 2.0), sample)
    assert float(updated(name, state, sample)[1]["kl"]) < float(metrics["kl"])


# --- the support --------------------------------------------------------------------------------------------------

DERIVED = {"v_min": None, "v_max": None, "optimizer": "adam", "q_lambda": 1.0, "temperature": 1e-3}


def test_the_support_reaches_a_little_beyond_the_returns_that_rewards_allow() -> None:
    """Rewards are -1, 2 and, at an end, 7: returns lie between `-1 / 0.1` and `2 / 0.1`, and the margin is a tenth."""
    name = "discrete"
    agent, state = agent_of(name, **DERIVED), beginning(name, **DERIVED)
    sample = jax.jit(agent.prepare)(state, rollout_of(name))
    reward, discount = jnp.array([-1.0, 2.0, 7.0, 0, 0, 0]), jnp.array([0.9, 0.9, 0.0, 0.9, 0.9, 0.9])
    after, metrics, _ = updated(name, state, sample._replace(reward=reward, discount=discount), **DERIVED)
    np.testing.assert_allclose(after.reach, [-10.0, 20.0], rtol=1e-5)
    assert "out_of_support" not in metrics
    np.testing.assert_allclose(metrics["temperature"], 1e-3 * 30 * (1 + 2 * ENTROPY_MARGIN) / 100, rtol=1e-5)
    # Logits that are all alike mean the middle.
    flat_critic = after._replace(critic=jax.tree.map(jnp.zeros_like, after.critic))
    obs, action = sample.obs, sample.action
    np.testing.assert_allclose(agent.policy_fns.value(flat_critic, obs, action), 5.0, rtol=1e-4)


def test_rewards_of_any_scale_are_learnt_from_alike() -> None:
    """A thousand times the reward moves policy, critic and multipliers as the reward itself does."""
    name = "discrete"
    ends, values = [], []
    for scale in (1.0, 1000.0):
        state, agent = beginning(name, **DERIVED), agent_of(name, **DERIVED)
        rollout = rollout_of(name, scale)
        state = state._replace(reach=type(state.reach)(jnp.float32(-20 * scale), jnp.float32(20 * scale)))
        after, metrics, _ = updated(name, state, jax.jit(agent.prepare)(state, rollout), **DERIVED)
        ends.append((after.policy, after.critic, after.multipliers))
        values.append(metrics["q"] / scale)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-4)


def test_how_many_targets_lie_beyond_given_ends_is_measured() -> None:
    name = "discrete"
    state = beginning(name)
    sample = prepared(name, state, rollout_of(name))
    sample = sample._replace(target=jnp.array([-5.0, 0.0, 1.0, 7.0, 2.0, 6.0]))
    assert float(updated(name, state, sample)[1]["out_of_support"]) == pytest.approx(2 / 6)


# --- what it sees, tells and refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_what_a_mask_forbids_is_never_chosen_and_lowers_the_target_entropy_but_not_one_that_is_set(
    target: float,
) -> None:
    space = {"action_mask": jaxrl.Box(0, 1, (4,), bool), "seen": OBS}
    agent = jaxrl.reppo(features=(8,), target_entropy=target)(jaxrl.EnvSpec("Toy", space, jaxrl.Discrete(4)))
    state = begun(agent.init)
    rows, ones = 200, np.ones(200, np.float32)
    allowed, seen = np.tile(np.array([True, False, True, False]), (rows, 1)), np.zeros((rows, 3), np.float32)
    obs = {"action_mask": allowed, "seen": seen}

    @jax.jit
    def learn(state: Any) -> Any:
        action, extras = agent.act(state, obs, KEY, jnp.uint32(0), "explore")
        items = Transition(obs, action, ones, 0.9 * ones, obs, extras, ones)
        rollout = Rollout(jax.tree.map(lambda x: x[None], items), jnp.zeros((1, rows), bool))
        batch = Batch(agent.prepare(state, rollout), jnp.arange(rows), ones)
        after, metrics, _ = agent.update(state, batch, KEY, jnp.uint32(0))
        return action, after, metrics, agent.policy_fns.value(state, obs, ())

    action, after, metrics, value = learn(state)
    assert {*np.asarray(action).tolist()} == {0, 2}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, metrics)))
    # The entropy lies between the halved target, 0.3 log 2, and log 2: too high, so the temperature falls.
    assert 0.3 * math.log(2) < float(metrics["entropy"]) <= math.log(2) + 1e-6
    # One of 1 nat, which two actions cannot reach, lets it rise.
    moved = after.multipliers.log_temperature - state.multipliers.log_temperature
    assert moved > 0 if target else moved < 0
    assert np.asarray(value)[:, [1, 3]].max() == -math.inf


def test_only_the_critic_sees_the_privileged_state() -> None:
    spec = jaxrl.EnvSpec("Toy", {"seen": OBS, "privileged_state": OBS}, SPECS["continuous"].action_space)
    agent = jaxrl.reppo(features=(8,))(spec)
    state = begun(agent.init)
    obs, action = {"seen": jnp.ones((2, 3)), "privileged_state": jnp.ones((2, 3))}, jnp.ones((2, 2)) / 4
    other = {**obs, "privileged_state": -obs["privileged_state"]}
    act = jax.jit(lambda obs: agent.act(state, obs, KEY, jnp.uint32(0), "explore")[0])
    np.testing.assert_array_equal(act(obs), act(other))
    value = jax.jit(lambda obs: agent.policy_fns.value(state, obs, action))
    assert np.abs(np.asarray(value(obs) - value(other))).min() > 1e-4


def test_a_term_of_ones_own_moves_its_network_by_its_own_slope() -> None:
    """By gradient descent, a term that is `sum(params^2) / 2` takes `lr * params` off the parameters, exactly."""
    name = "continuous"
    half = lambda params, sample, outputs: jnp.broadcast_to(
        sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) / 2, sample.weight.shape
    )
    state, terms = beginning(name), {"critic": "extra_loss", "policy": "extra_policy_loss"}
    sample = prepared(name, state, rollout_of(name))
    for part, term in terms.items():
        plain, mine = (updated(name, state, sample, **given)[0] for given in ({}, {term: half}))
        moved = jax.tree.map(lambda a, b: a - b, getattr(mine, part), getattr(plain, part))
        for change, before in zip(jax.tree.leaves(moved), jax.tree.leaves(getattr(state, part)), strict=True):
            np.testing.assert_allclose(change, -0.25 * before, rtol=1e-3, atol=1e-4)


def test_the_ends_of_its_support_count_as_settings_that_are_read() -> None:
    settings = lambda algo: dict(getattr(jaxrl, algo)(features=(8,))(SPECS["discrete"]).info.settings)
    of = lambda algo: unused_settings({"algo": algo, "agent": settings(algo)})
    assert "agent.v_min" not in of("reppo")
    assert "agent.v_min" in of("dqn")


@pytest.mark.parametrize("learnt", ["temperature", "kl_weight"])
def test_a_sweep_varies_where_it_begins(learnt: str) -> None:
    agent = jaxrl.reppo(features=(8,))(SPECS["discrete"])
    first = []
    for value in (0.01, 0.5):
        with override({f"agent.{learnt}": Override(0.01, value)}):
            multipliers = jax.jit(lambda key: agent.init(key).multipliers)(KEY)
            first.append(float(getattr(multipliers, f"log_{learnt}")))
    np.testing.assert_allclose(first, np.log([0.01, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("learnt", ["temperature", "kl_weight"])
def test_what_is_learnt_follows_no_schedule(learnt: str) -> None:
    env = jaxrl.make_env("CartPole-v1")
    with pytest.raises(SettingsError, match=rf"agent\.{learnt} of reppo cannot follow a schedule"):
        jaxrl.on_policy(env, jaxrl.reppo(**{learnt: jaxrl.linear(1.0, 0.1, 10)}))


def test_a_support_cannot_be_derived_from_rewards_that_are_normalised() -> None:
    env, processor = jaxrl.make_env("CartPole-v1"), jaxrl.chain(jaxrl.normalise_reward(), jaxrl.one_step())
    with pytest.raises(SettingsError, match=r"set agent\.v_min and agent\.v_max"):
        jaxrl.on_policy(env, jaxrl.reppo(), processor=processor)
    jaxrl.on_policy(env, jaxrl.reppo(v_min=-10.0, v_max=10.0), processor=processor)
