"""Soft actor-critic: its losses and targets in NumPy, on linear networks, and how it acts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun, drawn_anew, equal, retuned, six_steps, vector_of
from toys_by_hand import beside, linear, numbers, slope, softmax, squashed
from toys_draws import drawn

from jaxrl.agents import sac
from jaxrl.buffers import prioritised
from jaxrl.envs import Env, TimeStep
from jaxrl.processors import chain, n_step, normalise_obs
from jaxrl.spaces import Box, Discrete, EnvSpec, box_bounds
from jaxrl.strategies import off_policy
from jaxrl.types import Batch, RecurrentObs, Transition

KEY = jax.random.key(0)
OBS = Box(-1.0, 1.0, (3,))
SPECS = {
    "discrete": EnvSpec("Toy", OBS, Discrete(4)),
    "continuous": EnvSpec("Toy", OBS, Box((-2.0, 0.0), (4.0, 0.5), (2,))),
}
SIZE = 6
TEMPERATURE = 0.5
LR, POLICY_LR, TEMPERATURE_LR, TAU = 0.25, 0.125, 0.5, 0.25


@pytest.fixture(params=SPECS)
def name(request):
    return request.param


@functools.cache
def agent_of(name, **settings):
    """Make an agent with linear networks and plain gradient descent, all of which can be said again in NumPy."""
    rates = {"lr": LR, "policy_lr": POLICY_LR, "temperature_lr": TEMPERATURE_LR, "tau": TAU}
    plain = {"features": (), "optimizer": "sgd", "temperature": TEMPERATURE, "target_entropy": 0.25}
    return sac(**{**plain, **rates, **settings})(SPECS[name])


@functools.cache
def step_of(name, **settings):
    """Return the update, compiled once; what it draws is what is `drawn` then."""
    return jax.jit(lambda *args: agent_of(name, **settings).update(*args))


NOISE = np.random.default_rng(3).normal(size=(2, SIZE, 2)).astype(np.float32)
"""How far the policy's actions lie from the mean in an update, before a step and after it."""


@functools.cache
def beginning(name, **settings):
    """Return a state whose target is not the critic, and whose parameters are all drawn anew."""
    return drawn_anew(agent_of(name, **settings), "policy", "critic", "target")


def batch_of(name, **weights):
    return six_steps(SPECS[name].action_space, **weights)


def update(name, state, batch, **settings):
    with drawn(normal=[NOISE[1], NOISE[0]]):
        return step_of(name, **settings)(state, batch, KEY, jnp.uint32(0))


# --- the same in NumPy --------------------------------------------------------------------------------------------

WEIGHT, IMPORTANCE = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), np.array([1.0, 0.5, 0.7, 0.2, 1.0, 0.9])


def weighted(name):
    return batch_of(name, weight=WEIGHT, importance=IMPORTANCE)


def unit(name, action):
    """Bring actions of the box back to -1 to 1."""
    low, high, _ = box_bounds(SPECS[name].action_space)
    return (np.asarray(action) - (low + high)[None] / 2) / ((high - low)[None] / 2)


def soft_value_by_hand(name, policy, critic, temperature, obs, noise):
    """Return `E[q - temperature log p]` and the entropy, `[B]`; of continuous actions as one draw has it."""
    obs = np.asarray(obs, np.float64)
    outputs = linear(policy, obs)
    if name == "discrete":
        p = softmax(outputs)
        lowest = linear(critic, obs).min(0)
        return (p * (lowest - temperature * np.log(p))).sum(1), -(p * np.log(p)).sum(1)
    action, log_p = squashed(outputs, noise)
    lowest = linear(critic, beside(obs, action)).min(0)[:, 0]
    return lowest - temperature * log_p, -log_p


def judged(name, critic, items):
    """Return what the critics say of the actions that were taken, `[K, B]`, and of what they are linear, `[B, D]`."""
    obs = np.asarray(items.obs, np.float64)
    if name == "discrete":
        return linear(critic, obs)[:, np.arange(len(obs)), np.asarray(items.action)], obs
    x = beside(obs, unit(name, items.action))
    return linear(critic, x)[..., 0], x


def target_by_hand(name, state, items):
    v, _ = soft_value_by_hand(name, numbers(state.policy), numbers(state.target), TEMPERATURE, items.next_obs, NOISE[1])
    return np.asarray(items.reward) + np.asarray(items.discount) * v


def test_without_a_target_network_one_pass_through_the_critics_is_as_a_target_that_equals_them(name):
    state, batch = beginning(name), weighted(name)
    by_target = update(name, state._replace(target=state.critic), batch)
    by_pass = update(name, state._replace(target=()), batch, target_network=False)
    assert by_pass[0].target == ()
    pairs = zip(by_target, (by_pass[0]._replace(target=by_target[0].target), *by_pass[1:]), strict=True)
    for one, other in pairs:
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_the_one_pass_is_normalised_by_steps_and_next_steps_together():
    settings = {"target_network": False, "batch_norm": "renorm", "features": (4,)}
    agent, batch = agent_of("discrete", **settings), batch_of("discrete")
    state = begun(agent.init)
    new, *_ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    rows = np.concatenate([batch.items.obs, batch.items.next_obs])
    for of_critic in np.asarray(new.critic["batch_stats"]["BatchNorm_0"]["mean"]):
        np.testing.assert_allclose(of_critic, 0.01 * rows.mean(0), rtol=1e-4, atol=1e-7)
    # The policy learns from the steps alone.
    of_policy = new.policy["batch_stats"]["BatchNorm_0"]["var"]
    np.testing.assert_allclose(of_policy, 0.99 + 0.01 * batch.items.obs.var(0), rtol=1e-5)


def test_the_policy_and_the_temperature_move_at_their_interval():
    name = "continuous"
    state, batch, noise = beginning(name), batch_of(name), [NOISE[1], NOISE[0]]
    after = {}
    for interval, opt_step in ((1, 2), (3, 1), (3, 2)):
        with drawn(normal=noise):
            step = jax.jit(agent_of(name, policy_interval=interval).update)
            after[interval, opt_step] = step(state, batch, KEY, jnp.uint32(opt_step))
    (every, _, _), (rests, metrics, _), (due, last, _) = after.values()
    assert equal((rests.policy, rests.log_temperature), (state.policy, state.log_temperature))
    assert not equal(rests.critic, state.critic)
    assert float(metrics["policy_loss"].count) == 0
    assert float(last["policy_loss"].count) == 1
    for x, y in zip(jax.tree.leaves(due), jax.tree.leaves(every), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_the_objective_of_the_policy_is_the_soft_value_by_the_lowest_critic(name):
    state, batch = retuned(beginning(name), lr=0.0), weighted(name)
    _, metrics, _ = update(name, state, batch)
    critic, obs = numbers(state.critic), batch.items.obs
    value, entropy = soft_value_by_hand(name, numbers(state.policy), critic, TEMPERATURE, obs, NOISE[0])
    np.testing.assert_allclose(metrics["policy_loss"], -(WEIGHT * IMPORTANCE * value).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy[WEIGHT > 0].mean(), rtol=1e-5)
    assert metrics["temperature"] == TEMPERATURE


def test_targets_are_soft_values_by_the_target_network_with_noise_of_their_own_and_rewards_alone_at_the_end(name):
    state, batch = beginning(name), weighted(name)
    _, metrics, priorities = update(name, state, batch)
    q, _ = judged(name, numbers(state.critic), batch.items)
    target = target_by_hand(name, state, batch.items)
    np.testing.assert_array_equal(target[1::3], batch.items.reward[1::3])
    error = target[None] - q
    np.testing.assert_allclose(priorities, WEIGHT * np.abs(error).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], (WEIGHT * IMPORTANCE * 0.5 * (error**2).sum(0)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["td_error"], np.abs(error)[:, WEIGHT > 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["q"], q[:, WEIGHT > 0].mean(), rtol=1e-5)


def test_critics_descend_towards_their_targets_as_worked_by_hand(name):
    state, batch = beginning(name), weighted(name)
    new, _, _ = update(name, state, batch)
    (kernel, bias), (was, bias_was) = numbers(new.critic), numbers(state.critic)
    q, x = judged(name, (was, bias_was), batch.items)
    pull = WEIGHT * IMPORTANCE * (target_by_hand(name, state, batch.items)[None] - q) / SIZE
    picked = np.eye(4)[np.asarray(batch.items.action)] if name == "discrete" else np.ones((SIZE, 1))
    np.testing.assert_allclose(kernel - was, LR * np.einsum("kb,bd,ba->kda", pull, x, picked), atol=1e-5)
    np.testing.assert_allclose(bias - bias_was, LR * np.einsum("kb,ba->ka", pull, picked), atol=1e-5)


def test_the_policy_climbs_its_objective_under_the_new_critics(name):
    """The slope is that of the value worked by hand, by differences."""
    state, batch = beginning(name), weighted(name)
    new, _, _ = update(name, state, batch)
    critic, noise = numbers(new.critic), NOISE[0]
    was, bias = numbers(state.policy)

    def objective(kernel, bias):
        value, _ = soft_value_by_hand(name, (kernel, bias), critic, TEMPERATURE, batch.items.obs, noise)
        return (WEIGHT * IMPORTANCE * value).mean()

    moved, moved_bias = numbers(new.policy)
    np.testing.assert_allclose(moved - was, POLICY_LR * slope(lambda k: objective(k, bias), was), atol=1e-5)
    np.testing.assert_allclose(moved_bias - bias, POLICY_LR * slope(lambda b: objective(was, b), bias), atol=1e-5)


def test_the_temperature_descends_by_how_far_the_entropy_is_from_its_target(name):
    state, batch = beginning(name), weighted(name)
    policy, critic = numbers(state.policy), numbers(state.critic)
    _, entropy = soft_value_by_hand(name, policy, critic, TEMPERATURE, batch.items.obs, NOISE[0])
    for target in (-2.0, 0.25, 2.0):
        new, _, _ = update(name, retuned(state, target_entropy=target), batch)
        moved, slope = float(new.log_temperature) - np.log(TEMPERATURE), (WEIGHT * (entropy - target)).mean()
        # Adam's first step goes as far as the learning rate says; its moment tells the slope.
        np.testing.assert_allclose(moved, -TEMPERATURE_LR * np.sign(slope), rtol=1e-4)
        np.testing.assert_allclose(vector_of(new.opt_state.temperature[0].mu), [0.1 * TEMPERATURE * slope], rtol=1e-4)


def test_a_fixed_temperature_stays_bit_for_bit():
    state = beginning("continuous", learn_temperature=False)
    assert state.opt_state.temperature == ()
    new, metrics, _ = update("continuous", state, batch_of("continuous"), learn_temperature=False)
    assert new.log_temperature == ()
    assert metrics["temperature"] == np.float32(TEMPERATURE)
    assert not equal(new.policy, state.policy)
    # A sweep, or a run that goes on with another setting, changes it there.
    hotter = retuned(state, temperature=2 * TEMPERATURE)
    _, metrics, _ = update("continuous", hotter, batch_of("continuous"), learn_temperature=False)
    assert metrics["temperature"] == np.float32(2 * TEMPERATURE)


@pytest.mark.parametrize(
    ("space", "target"), [(Discrete(4), 0.3 * np.log(4)), (Box(-1.0, 1.0, ()), -1), (Box(-1.0, 1.0, (2, 3)), -6)]
)
def test_the_usual_target_is_a_share_of_all_entropy_or_minus_the_number_of_actions(space, target):
    def aim(**settings):
        agent = sac(features=(), **settings)(EnvSpec("Toy", OBS, space))
        return jax.jit(lambda: agent.init(KEY).hyper.target_entropy)()  # networks that nobody asks for are not compiled

    np.testing.assert_allclose(aim(), target, rtol=1e-6)
    np.testing.assert_allclose(aim(target_entropy=0.7), 0.7, rtol=1e-6)


def test_the_target_moves_by_tau_towards_the_new_critics(name):
    state = beginning(name)
    for tau in (0.25, 1.0, 0.0):
        new, _, _ = update(name, retuned(state, tau=tau), batch_of(name))
        assert not equal(new.critic, state.critic)
        mixed = tau * vector_of(new.critic) + (1 - tau) * vector_of(state.target)
        np.testing.assert_allclose(vector_of(new.target), mixed, atol=1e-6)
    assert equal(new.target, state.target)


# --- acting -------------------------------------------------------------------------------------------------------


def test_exploit_takes_the_likeliest_action_and_needs_only_a_stripped_state(name):
    state, obs = beginning(name), batch_of(name).items.obs
    bare = agent_of(name).strip(state)
    assert len(jax.tree.leaves(bare)) == len(jax.tree.leaves((state.policy, state.hyper)))
    action, extras = agent_of(name).act(bare, obs, None, jnp.uint32(0), "exploit")
    outputs = linear(numbers(state.policy), np.asarray(obs, np.float64))
    if name == "discrete":
        np.testing.assert_array_equal(action, outputs.argmax(1))
    else:
        np.testing.assert_allclose(unit(name, action), np.tanh(outputs[:, :2]), atol=1e-6)
    assert extras == ()


def test_explore_draws_from_the_policy(name):
    state, agent = beginning(name), agent_of(name)
    obs = jnp.broadcast_to(batch_of(name).items.obs[:1], (20_000, 3))
    action = jax.jit(lambda obs: agent.act(state, obs, jax.random.key(2), jnp.uint32(0), "explore")[0])(obs)
    outputs = linear(numbers(state.policy), np.asarray(obs[:1], np.float64))[0]
    if name == "discrete":
        shares = np.bincount(np.asarray(action), minlength=4) / 20_000
        np.testing.assert_allclose(shares, np.exp(outputs) / np.exp(outputs).sum(), atol=0.02)
    else:
        raw = np.arctanh(unit(name, action))
        np.testing.assert_allclose(raw.mean(0), outputs[:2], atol=0.05)
        np.testing.assert_allclose(np.log(raw.std(0)), outputs[2:], atol=0.03)


def test_noise_with_a_memory_keeps_a_share_of_the_noise_before_and_draws_from_the_policy():
    agent, state = agent_of("continuous", noise_memory=0.8), beginning("continuous", noise_memory=0.8)
    obs, rng = batch_of("continuous").items.obs, np.random.default_rng(1)
    before, fresh = jnp.asarray(rng.normal(size=(2, SIZE, 2)), jnp.float32)
    act = jax.jit(lambda mode: agent.act(state, RecurrentObs(obs, before), KEY, jnp.uint32(0), mode), static_argnums=0)
    with drawn(normal=[fresh]):
        action, extras = act("explore")
    after = 0.8 * np.asarray(before) + 0.6 * np.asarray(fresh)
    np.testing.assert_allclose(extras["memory"], after, rtol=1e-5, atol=1e-6)
    outputs = linear(numbers(state.policy), np.asarray(obs, np.float64))
    raw = outputs[:, :2] + np.exp(outputs[:, 2:]) * after
    np.testing.assert_allclose(unit("continuous", action), np.tanh(raw), atol=1e-5)
    # Evaluation takes the middle, and leaves the memory alone.
    action, extras = act("exploit")
    np.testing.assert_allclose(unit("continuous", action), np.tanh(outputs[:, :2]), atol=1e-6)
    assert equal(extras["memory"], before)


def test_noise_with_a_memory_begins_at_nothing_and_leaves_no_trace_where_it_is_off():
    np.testing.assert_array_equal(agent_of("continuous", noise_memory=0.5).memory, np.zeros(2))
    assert agent_of("continuous").memory is None
    assert beginning("continuous").hyper.noise_memory == ()


def test_the_memory_of_noise_is_not_shown_to_the_networks():
    batch, memory = batch_of("continuous"), jnp.asarray(np.random.default_rng(0).normal(size=(SIZE, 2)), jnp.float32)
    items = batch.items._replace(
        obs=RecurrentObs(batch.items.obs, memory), next_obs=RecurrentObs(batch.items.next_obs, -memory)
    )
    for settings in ({}, {"cql": 1.0}):
        state = beginning("continuous", **settings)
        step = jax.jit(agent_of("continuous", **settings).update)
        plain = step(state, batch, KEY, jnp.uint32(0))
        assert equal(plain, step(state, batch._replace(items=items), KEY, jnp.uint32(0)))


def test_critics_are_given_every_entry_of_an_action_from_minus_1_to_1():
    """Two critics over 3 numbers of the observation and 6 of the action, all with parameters of 0 but one."""
    space = Box(tuple(np.arange(6) - 3.0), tuple(np.arange(6) * 2.0), (2, 3))
    agent = sac(features=(), tau=1.0)(EnvSpec("Toy", OBS, space))
    state = begun(agent.init)
    assert vector_of(state.critic).shape == (2 * (3 + 6 + 1),)
    low, high, _ = box_bounds(space)
    action = jnp.asarray(np.stack([low, high, (low + high) / 2]), jnp.float32)
    zeros, ones = np.zeros((3, 3), np.float32), np.ones(3, np.float32)
    items = Transition(zeros, action, zeros[0], zeros[0], zeros, weight=ones)
    batch = Batch(items, np.arange(3), ones)
    update = jax.jit(agent.update)
    for entry in range(6):
        tree = jax.tree.map(lambda x: np.zeros_like(np.asarray(x)), state.critic)
        tree["params"]["Dense_0"]["kernel"][:, 3 + entry] = 2.0
        tree["params"]["Dense_0"]["bias"] += 3.0
        _, _, priorities = update(state._replace(critic=tree), batch, KEY, jnp.uint32(0))
        np.testing.assert_allclose(priorities, [1.0, 5.0, 3.0], atol=1e-6)


def test_a_fresh_target_equals_the_critics_without_sharing_their_memory():
    state = jax.jit(agent_of("continuous").init)(KEY)
    assert equal(state.critic, state.target)
    for one, other in zip(jax.tree.leaves(state.critic), jax.tree.leaves(state.target), strict=True):
        assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
    first, second = state.critic["params"]["Dense_0"]["kernel"]
    assert not np.array_equal(first, second)


# --- in training --------------------------------------------------------------------------------------------------


def images(action_space: Any) -> Env:
    """Show a random 8-bit image of 4x4 with a marked corner; pay 1 a step, in episodes of 5."""

    def see(count):
        return jnp.zeros((4, 4, 1), jnp.uint8).at[0, 0, 0].set((50 * count).astype(jnp.uint8))

    def step(count, action, key):
        count = count + 1
        return count, TimeStep(see(count), 1.0, count >= 5)

    spec = EnvSpec("Images", Box(0, 255, (4, 4, 1), "uint8"), action_space)
    return Env(spec, lambda key: (jnp.int32(0), see(jnp.int32(0))), step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processor"), [("continuous", chain(normalise_obs(), n_step(2))), ("discrete", n_step(3))]
)
def test_images_several_steps_and_priorities_go_together(name, processor):
    agent = sac(features=(4,), lr=1e-2, optimizer="sgd")
    settings = {"num_envs": 4, "opt_interval": 4, "updates": 2, "warmup": 32, "processor": processor}
    space = SPECS[name].action_space
    strategy = off_policy(images(space), agent, buffer=prioritised(32, 8), **settings)
    state = jax.jit(strategy.init)(KEY)
    step = jax.jit(lambda s, t: strategy.step(s, jax.random.fold_in(s.key, t), t))
    before = state
    for t in range(3):
        state, metrics = step(state, jnp.uint32(t))
        assert int(metrics["skipped_updates"].count) == 0
        assert int(metrics["loss"].count) == strategy.opt_steps_per_step == 2
    assert "Convolutions_0" in state.agent.critic["params"]
    assert not equal(before.agent.policy, state.agent.policy)
    # Items seen have a priority of their own; those not drawn yet still have the highest.
    assert len(np.unique(np.asarray(state.buffer.sums[0]))) > 5
