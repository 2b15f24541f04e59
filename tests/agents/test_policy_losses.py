"""The losses of policies and values, worked by hand and against RLax, and what an update makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from toys_agents import vector_of

from jaxrl import shards
from jaxrl.agents import impala, ppo
from jaxrl.agents.actor_critic import standardise
from jaxrl.agents.losses import clipped_surrogate, value_loss, weighted_surrogate
from jaxrl.nn import ActorCritic
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Batch, RecurrentObs, Rollout, Transition

CLIP = 0.25
"""A quarter and small whole numbers keep every product exact in float32."""


# --- the surrogate ------------------------------------------------------------------------------------------------

of_clipped, of_weighted, of_value = (
    jax.jit(jax.value_and_grad(loss)) for loss in (clipped_surrogate, weighted_surrogate, value_loss)
)
standardised = jax.jit(standardise)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.125, 2.0, -1.125 * 2.0, -2.0),
        (1.5, 2.0, -1.25 * 2.0, 0.0),  # flat only where the ratio went too far in the right direction
        (0.875, 2.0, -0.875 * 2.0, -2.0),
        (0.5, 2.0, -0.5 * 2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.125, -2.0, 1.125 * 2.0, 2.0),
        (1.5, -2.0, 1.5 * 2.0, 2.0),
        (0.875, -2.0, 0.875 * 2.0, 2.0),
        (0.5, -2.0, 0.75 * 2.0, 0.0),  # and here
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_surrogate_is_that_worked_by_hand(ratio, advantage, loss, slope):
    assert of_clipped(jnp.float32(ratio), jnp.float32(advantage), CLIP) == (loss, slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"), [(0.5, 3.0, -1.5), (2.0, 3.0, -3.0), (4.0, 3.0, -3.0 * 1.0), (0.5, -3.0, 1.5)]
)
def test_the_slope_of_the_weighted_surrogate_is_the_bounded_ratio_times_the_advantage(ratio, advantage, slope):
    """As of the log-probability, and the ratio itself has none. The probability under the old policy was 1/4."""
    behaviour = jnp.log(jnp.float32(0.25))
    log_prob = behaviour + jnp.log(jnp.float32(ratio))
    loss, of_log = of_weighted(log_prob, behaviour, jnp.float32(advantage), 1.0)
    np.testing.assert_allclose(of_log, slope, rtol=1e-6)
    np.testing.assert_allclose(loss, slope * log_prob, rtol=1e-6)


# --- the value ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.125, 0.5 * 0.875**2, -0.875),  # within the clip: as it is
        (0.75, 0.5 * 0.75**2, 0.0),  # beyond, towards the target: as if held at 0.25
        (1.0, 0.5 * 0.75**2, 0.0),
        (-1.0, 0.5 * 2.0**2, -2.0),  # beyond, away from the target: as it is
        (3.0, 0.5 * 2.0**2, 2.0),  # beyond the target, and farther from it than 0.25 is
    ],
)
@pytest.mark.parametrize("before", [0.0, 8.0])
def test_the_value_loss_is_that_worked_by_hand(value, loss, slope, before):
    """The value should be 1 more than it was before."""
    assert of_value(jnp.float32(before + value), jnp.float32(before), jnp.float32(before + 1.0), CLIP) == (loss, slope)


# --- advantages ---------------------------------------------------------------------------------------------------


def test_entries_of_weight_0_do_not_count_when_advantages_are_standardised():
    x, weight = jnp.array([1.0, 1e6, 3.0, -2e5, 5.0]), jnp.array([1.0, 0.0, 1.0, 0.0, 1.0])
    out = standardised(x, weight)[jnp.array([0, 2, 4])]
    deviation = ((2**2 + 0 + 2**2) / 3) ** 0.5
    np.testing.assert_allclose(out, [-2 / deviation, 0.0, 2 / deviation], atol=1e-6)


def test_standardising_sequences_looks_at_all_of_them_at_once():
    x = jnp.array([[0.0, 2.0], [4.0, 6.0]])
    np.testing.assert_allclose(standardised(x, jnp.ones((2, 2))), (np.asarray(x) - 3) / 5**0.5, atol=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_equal_advantages_and_no_advantages_at_all_standardise_to_finite_numbers(weight):
    out = standardised(jnp.full(4, 7.0), jnp.full(4, weight))
    assert np.isfinite(out).all()
    if weight:
        np.testing.assert_array_equal(out, np.zeros(4))


# --- the policy at the start --------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 0.25])
def test_continuous_actions_begin_with_the_deviation_given(std):
    """The bounds' half-widths are 2."""
    agent = an_agent(SPECS["continuous"], **({} if std == 1.0 else {"init_std": std}))
    obs = jnp.zeros((4_000, 4))
    act = jax.jit(lambda state, key: agent.act(state, obs, key, jnp.uint32(0), "explore"))
    action, extras = jax.tree.map(np.asarray, act(agent.init(jax.random.key(1)), jax.random.key(2)))
    # Of so many draws, the deviation errs by a hundredth.
    np.testing.assert_allclose(extras["raw"].std(axis=0), std, rtol=0.05)
    np.testing.assert_allclose(action, np.clip(2 * extras["raw"], -2, 2), rtol=1e-6)


# --- updates ------------------------------------------------------------------------------------------------------

BOX = Box(-1.0, 1.0, (4,))
SPECS = {
    "discrete": EnvSpec("Toy", BOX, Discrete(3)),
    "continuous": EnvSpec("Toy", BOX, Box(-2.0, 2.0, (2,))),
}
T, N = 8, 2


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


def an_agent(spec, **settings):
    plain = {"optimizer": "sgd", "lr": 0.5, "max_grad_norm": 1e9, "normalise_advantage": "none", "features": (8,)}
    return ppo(**{**plain, **settings})(spec)


@functools.cache
def fresh(spec):
    """Return a fresh state, the same for all agents of this file."""
    return jax.jit(an_agent(spec).init)(jax.random.key(1))


def beginning(agent, spec, weight=None):
    """Return a fresh state, and steps on random observations as this policy takes them, ready to be learnt from."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, T, N, 4)).astype(np.float32)
    reward = rng.normal(size=(T, N)).astype(np.float32)
    weight = np.ones((T, N), np.float32) if weight is None else weight
    last = np.arange(T * N).reshape(T, N) >= (T - 1) * N

    def begin(state, key):
        by_time = lambda x: x.reshape(T, N, *x.shape[1:])
        noise = key
        acted = agent.act(state, jnp.asarray(obs.reshape(T * N, 4)), noise, jnp.uint32(0), "explore")
        action, extras = jax.tree.map(by_time, acted)
        items = Transition(*jax.tree.map(jnp.asarray, (obs, action, reward, 0.9 * np.ones_like(reward), next_obs)))
        return agent.prepare(state, Rollout(items._replace(extras=extras, weight=jnp.asarray(weight)), last))

    return fresh(spec), jax.jit(begin)(fresh(spec), jax.random.key(1))


def updating(agent):
    batch = lambda sample: Batch(sample, jnp.arange(T * N), jnp.ones(T * N))
    return jax.jit(lambda state, sample: agent.update(state, batch(sample), (), jnp.uint32(0))[:2])


def test_the_clipped_surrogate_makes_the_update_of_the_plain_one_only_at_ratio_1():
    spec = SPECS["discrete"]
    clipped, plain = (an_agent(spec, surrogate=surrogate) for surrogate in ("clipped", "plain"))
    update_ppo, update_a2c = updating(clipped), updating(plain)
    before, sample = beginning(clipped, spec)
    (of_ppo, metrics), (of_a2c, _) = update_ppo(before, sample), update_a2c(before, sample)
    assert metrics["clip_fraction"] == 0
    np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-6)
    assert np.abs(vector_of(of_ppo.params) - vector_of(before.params)).max() > 0.01
    np.testing.assert_allclose(vector_of(of_ppo.params), vector_of(of_a2c.params), atol=1e-6)
    # The same steps once more: the policy is no longer the one that took them.
    (of_ppo, metrics), (of_a2c, _) = update_ppo(of_ppo, sample), update_a2c(of_ppo, sample)
    assert metrics["approx_kl"] > 1e-3
    assert np.abs(vector_of(of_ppo.params) - vector_of(of_a2c.params)).max() > 1e-3


def test_metrics_are_means_over_the_steps_that_count():
    spec = SPECS["discrete"]
    weight = np.ones((T, N), np.float32)
    weight[2:, 1] = 0
    agent = an_agent(spec)
    before, sample = beginning(agent, spec, weight)
    sample = sample._replace(log_prob=sample.log_prob - jnp.where(sample.weight > 0, 0.1, 5.0))
    metrics = updating(agent)(before, sample)[1]
    np.testing.assert_allclose(metrics["approx_kl"], np.exp(0.1) - 1 - 0.1, rtol=1e-4)
    entropy = jax.jit(lambda obs: agent.policy_fns.distribution(before, obs, jnp.uint32(0)).entropy())(sample.obs)
    np.testing.assert_allclose(metrics["entropy"], np.mean(entropy[sample.weight > 0]), rtol=1e-5)


def test_metrics_of_shards_are_means_over_all_steps_that_count():
    """Of the first shard all steps count, of the second one, and of the others none."""
    spec, rows = SPECS["discrete"], T * N // 4
    weight = np.zeros(T * N, np.float32)
    weight[: rows + 1] = 1
    agent = an_agent(spec, desired_kl=0.01)
    state, sample = beginning(agent, spec, weight.reshape(T, N))
    params = jax.tree.map(lambda x: 9 * x, state.params)  # others, or the divergence would be 0
    state = state._replace(params=params, lr_scale=jnp.float32(1.0))
    flat = jax.tree.map(lambda x: x.reshape(T * N, *x.shape[2:]) if x.shape[:2] == (T, N) else x, sample)
    _, whole = updating(agent)(state, flat)
    each = jax.tree.map(lambda x: x.reshape(4, rows, *x.shape[1:]), flat)
    batch = lambda sample: Batch(sample, jnp.arange(rows), jnp.ones(rows))
    update = lambda sample: agent.update(state, batch(sample), (), jnp.uint32(0))[1]
    of_shards = jax.jit(jax.vmap(update, axis_name=shards.AXIS))(each)
    for name in ("approx_kl", "entropy", "value_loss", "lr"):
        np.testing.assert_allclose(of_shards[name], np.full(4, whole[name]), rtol=1e-5, err_msg=name)
    # Not by chance: a learning rate of each shard's own could not be one for all.
    one = jax.vmap(lambda sample: update(sample)["lr"], axis_name=shards.AXIS, out_axes=None)
    assert jax.eval_shape(one, each).shape == ()


def test_the_learning_rate_is_not_adapted_to_what_a_rollout_and_its_minibatches_are_rounded_by():
    """Of a policy that has not moved, a minibatch in bfloat16 may have other log-probabilities than its rollout."""
    agent = an_agent(SPECS["discrete"], desired_kl=1.0)
    state, sample = beginning(agent, SPECS["discrete"])
    state = state._replace(hyper=state.hyper._replace(lr=jnp.float32(1e-3)), lr_scale=jnp.float32(1.0))
    rounded, update = sample._replace(log_prob=sample.log_prob + 0.01), updating(agent)
    state, metrics = update(state, rounded)
    assert metrics["approx_kl"] > 1e-5
    np.testing.assert_allclose(metrics["lr"], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(update(state, rounded)[1]["lr"], 1.5e-3, rtol=1e-6)


# --- old parameters ---------------------------------------------------------------------------------------------


def moved(state):
    """Return the state with other parameters, far from its own."""
    rng = np.random.default_rng(4)
    change = lambda x: x + jnp.asarray(rng.normal(0.0, 0.3, x.shape), jnp.float32)
    return state._replace(params=jax.tree.map(change, state.params))


def rollout_of(agent, state):
    """Return a rollout `[T, N]` without an end, as an actor with the parameters of `state` sends it."""
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(T + 1, N, 4)).astype(np.float32)
    behave = lambda state, obs, key: agent.fns.behave(state, obs, key, jnp.uint32(0), "explore")
    acted = jax.jit(behave)(state, obs[:-1].reshape(T * N, 4), jax.random.key(3))
    action, extras = jax.tree.map(lambda x: x.reshape(T, N, *x.shape[1:]), acted)
    reward = jnp.asarray(rng.normal(size=(T, N)), jnp.float32)
    items = Transition(obs[:-1], action, reward, jnp.full((T, N), 0.9), jnp.asarray(obs[1:]), extras, jnp.ones((T, N)))
    return Rollout(items, jnp.zeros((T, N), bool))


@functools.partial(jax.jit, static_argnums=0)
def judged(spec, state, rollout):
    """Work out log-probabilities and values `[T, N]` of a rollout's steps with nothing of the agent but its network."""
    discrete = isinstance(spec.action_space, Discrete)
    network = ActorCritic(BOX, 3 if discrete else 4, 0 if discrete else 2, features=(8,))
    outputs, value, _ = network.apply(state.params, rollout.items.obs.reshape(T * N, 4))
    outputs, value = outputs.reshape(T, N, -1), value.reshape(T, N)
    if discrete:
        chosen = jax.nn.one_hot(rollout.items.action, 3)
        return (jax.nn.log_softmax(outputs) * chosen).sum(-1), value
    mean, std = outputs[..., :2], jnp.exp(outputs[..., 2:])
    density = jnp.exp(-0.5 * ((rollout.items.extras["raw"] - mean) / std) ** 2) / (std * (2 * np.pi) ** 0.5)
    return jnp.log(density).sum(-1), value


@pytest.mark.parametrize("settings", [{}, {"core": "gru", "core_features": 4}], ids=["plain", "gru"])
def test_acting_on_the_device_tells_of_no_probability_and_old_parameters_do(spec, settings):
    agent = an_agent(spec, **settings)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    obs = jax.ShapeDtypeStruct((N, 4), jnp.float32)
    seen = obs if not settings else RecurrentObs(obs, (jax.ShapeDtypeStruct((N, 4), jnp.float32),))
    noise = jax.eval_shape(lambda: jax.random.key(0))
    kinds = [
        jax.eval_shape(lambda *args: act(*args, jnp.uint32(0), "explore"), state, seen, noise)[1]  # noqa: B023
        for act in (agent.act, agent.fns.behave)
    ]
    assert kinds[1].keys() - kinds[0].keys() == {"log_prob"}
    assert kinds[1]["log_prob"].shape == (N,)


def test_the_ratio_is_that_of_the_learner_to_the_parameters_that_acted(spec):
    agent = an_agent(spec, gae_lambda=0.0)
    old, new = fresh(spec), moved(fresh(spec))
    rollout = rollout_of(agent, old)
    (before, _), (after, _) = judged(spec, old, rollout), judged(spec, new, rollout)
    sample = jax.jit(agent.prepare)(new, rollout)
    np.testing.assert_allclose(sample.log_prob, before.reshape(-1), rtol=1e-4, atol=1e-4)
    ratio = np.exp(np.asarray(after - before))
    assert np.abs(ratio - 1).max() > 0.1
    metrics = updating(agent)(new, sample)[1]
    np.testing.assert_allclose(metrics["approx_kl"], (ratio - 1 - np.log(ratio)).mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["clip_fraction"], (np.abs(ratio - 1) > 0.2).mean(), atol=1e-6)


def remembered(agent):
    """Return a rollout without rewards, memories at random, in the first row of which an episode is cut off."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=(T, N, *shape)).astype(np.float32)
    now, then = (RecurrentObs(draw(4), jax.tree.map(lambda x: draw(*x.shape), agent.memory)) for _ in range(2))
    ends = np.zeros((T, N), bool)
    ends[2, 0] = True  # by a time limit
    begins = np.roll(ends, 1, axis=0)
    then.obs[:-1] = np.where(ends[:-1, :, None], then.obs[:-1], now.obs[1:])
    nought, one = np.zeros((T, N), np.float32), np.ones((T, N), np.float32)
    items = Transition(now, np.zeros((T, N), np.int32), nought, one, then, {"log_prob": nought}, one, begins, ends)
    return jax.tree.map(jnp.asarray, Rollout(items, ends))


def test_bootstraps_remember_what_the_learner_would_though_actors_with_old_parameters_remember_otherwise():
    """Without rewards and discounts, the target of each step is the value at the end of its episode, or rollout."""
    agent = ppo(core="gru", core_features=4, features=(8,), gae_lambda=1.0)(SPECS["discrete"])
    state, rollout = moved(jax.jit(agent.init)(jax.random.key(0))), remembered(agent)
    made = jax.jit(agent.prepare)(state, rollout)
    now, then, begins = rollout.items.obs, rollout.items.next_obs, rollout.items.is_first
    apply = jax.jit(lambda obs: agent.policy_fns.value(state, obs, None))
    act = jax.jit(lambda obs: agent.act(state, obs, jax.random.key(0), jnp.uint32(0), "explore")[1]["memory"])
    for n in range(N):
        memory, values = jax.tree.map(lambda x, n=n: x[0, n][None], now.memory), []
        for t in range(T):
            memory = jax.tree.map(lambda x: 0 * x, memory) if begins[t, n] else memory
            memory = act(RecurrentObs(now.obs[t, n][None], memory))
            values.append(apply(RecurrentObs(then.obs[t, n][None], memory))[0])
        at_end = [values[2] if n == 0 and t <= 2 else values[-1] for t in range(T)]
        np.testing.assert_allclose(made.target[n], at_end, atol=1e-5)


@pytest.mark.parametrize("settings", [{"surrogate": "plain"}, {"surrogate": "weighted", "rho_clip": 1.0}])
def test_the_policy_loss_of_own_steps_is_the_mean_of_advantages_times_log_probabilities(spec, settings):
    agent = an_agent(spec, **settings)
    state = jax.jit(agent.init)(jax.random.key(1))
    sample = jax.jit(agent.prepare)(state, rollout_of(agent, state))
    wanted = -np.mean(sample.log_prob * sample.advantage)
    assert abs(wanted) > 0.1
    np.testing.assert_allclose(updating(agent)(state, sample)[1]["policy_loss"], wanted, rtol=1e-4)


def test_an_update_of_impala_from_old_parameters_is_that_of_rlax():
    spec = SPECS["discrete"]
    agent = impala(optimizer="sgd", lr=0.5, max_grad_norm=1e9, features=(8,), ent_coef=0.0, vf_coef=0.25)(spec)
    old, new = fresh(spec), moved(jax.jit(agent.init)(jax.random.key(1)))
    rollout = rollout_of(agent, old)
    before, _ = judged(spec, old, rollout)
    network = ActorCritic(BOX, 3, 0, features=(8,))
    v_t = network.apply(new.params, rollout.items.next_obs.reshape(T * N, 4))[1].reshape(T, N)

    def loss(params):
        log_prob, value = judged(spec, new._replace(params=params), rollout)
        rho = jax.lax.stop_gradient(jnp.exp(log_prob - before))
        each = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=1, out_axes=1)
        out = each(value, v_t, rollout.items.reward, rollout.items.discount, rho)
        return jnp.mean(-log_prob * jax.lax.stop_gradient(out.pg_advantage) + 0.25 * 0.5 * out.errors**2)

    expected = vector_of(new.params) - 0.5 * vector_of(jax.jit(jax.grad(loss))(new.params))
    after, _ = updating(agent)(new, jax.jit(agent.prepare)(new, rollout))
    assert np.abs(vector_of(after.params) - vector_of(new.params)).max() > 0.01
    np.testing.assert_allclose(vector_of(after.params), expected, atol=1e-5)


# --- values alone -----------------------------------------------------------------------------------------------


@pytest.mark.every_day("decay")
@pytest.mark.parametrize(
    "settings",
    [{}, {"shared": True}, {"optimizer": "adamw", "weight_decay": 1.0}, {"core": "gru", "core_features": 4}],
    ids=["apart", "shared", "decay", "core"],
)
def test_the_policy_stays_while_values_are_learnt_alone_and_then_begins_with_a_fresh_optimizer(settings):
    plain = {"features": (8,), "lr": 1e-2, "normalise_advantage": "none", **settings}
    agent, without = (ppo(critic_warmup=warmup, **plain)(SPECS["discrete"]) for warmup in (3, 0))
    state, rollout = jax.jit(agent.init)(jax.random.key(0)), remembered(agent)
    if agent.memory is None:
        items = rollout.items
        rollout = rollout._replace(items=items._replace(obs=items.obs.obs, next_obs=items.next_obs.obs))
    rows = N if agent.memory is not None else T * N
    batch = lambda sample: Batch(sample, jnp.arange(rows), jnp.ones(rows))

    def updated(agent, state, opt_step):
        update = lambda state, sample: agent.update(state, batch(sample), (), jnp.uint32(opt_step))[0]
        return jax.jit(update)(state, jax.jit(agent.prepare)(begun, rollout))

    flat = lambda x: x.reshape(T * N, *x.shape[2:])
    see = jax.jit(lambda state: agent.apply["params"](state.params, jax.tree.map(flat, rollout.items.obs))[:2])
    begun = warm = state
    for opt_step in range(3):
        warm = updated(agent, warm, opt_step)
    (policy, value), (policy_before, value_before) = see(warm), see(begun)
    np.testing.assert_array_equal(policy, policy_before)
    assert np.abs(value - value_before).max() > 1e-3
    fresh_state = jax.jit(without.init)(jax.random.key(0))._replace(params=warm.params)
    as_new = vector_of(updated(without, fresh_state, 3).params)
    for first in (3, 5):  # the update that begins it, and one before which two were skipped
        then = vector_of(updated(agent, warm, first).params)
        np.testing.assert_allclose(then, as_new, atol=1e-7)
        assert np.abs(then - vector_of(warm.params)).max() > 1e-3
