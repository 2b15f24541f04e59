"""The DQN family: each option against numbers worked by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys_agents import acting, begun, equal, retuned
from toys_closed_form import hyperbolic, parabolic

from jaxrl.agents import cql_dqn, dqn, rainbow, schedules
from jaxrl.agents.optimizers import OPTIMIZERS, accumulate
from jaxrl.nn import QNetwork
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Batch, Transition

SPEC = EnvSpec("Toy", Box(-1.0, 1.0, (4,)), Discrete(3))
KEY = jax.random.key(0)


class Table(nn.Module):
    """A network whose parameters are the action values themselves: one row an observation."""

    rows: int = 2
    actions: int = 2

    @nn.compact
    def __call__(self, obs):
        return self.param("q", nn.initializers.zeros, (self.rows, self.actions))[obs]


TABLE_SPEC = EnvSpec("Table", Discrete(2), Discrete(2))


def tabular(**settings):
    settings = {"lr": 0.5, "optimizer": "sgd", "loss": "squared", "target_interval": 1_000, **settings}
    return dqn(make_network=lambda spec: Table(), **settings)(TABLE_SPEC)


def table_state(agent, online, target=None):
    state = begun(agent.init)
    flat = lambda table: {"params": {"q": jnp.array(table, jnp.float32)}}
    return state._replace(params=flat(online), target=state.target if target is None else flat(target))


def table_of(params):
    return np.asarray(params["params"]["q"])


def transitions(obs, action, reward, discount, next_obs, weight=None):
    weight = jnp.ones(len(reward)) if weight is None else jnp.array(weight)
    items = Transition(*(jnp.array(x) for x in (obs, action, reward, discount, next_obs)), weight=weight)
    return Batch(items, jnp.arange(len(reward)), jnp.ones(len(reward)))


def random_batch(size=12, spec=SPEC, seed=0):
    rng = np.random.default_rng(seed)
    shape = (size, *spec.observation_space.shape)
    obs, next_obs = rng.normal(size=(2, *shape)).astype(np.float32)
    action = rng.integers(0, spec.action_space.n, size).astype(np.int32)
    reward = rng.normal(size=size).astype(np.float32)
    return transitions(obs, action, reward, np.full(size, 0.9, np.float32), next_obs)


def step_of(agent):
    def step(state, batch, opt_step):
        return agent.update(state, batch, KEY, opt_step)

    return jax.jit(step)


def run(agent, state, batch, updates):
    """Make `updates` optimisation steps; return the states before and after each."""
    step, states = step_of(agent), [state]
    for opt_step in range(updates):
        states.append(step(states[-1], batch, jnp.uint32(opt_step))[0])
    return states


def largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


# --- one update by hand -----------------------------------------------------------------------------------------


def test_one_update_of_a_table_is_that_worked_by_hand():
    agent = tabular(double=False)
    state = table_state(agent, [[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 5.0]])
    batch = transitions([0, 0], [1, 0], [0.5, 2.0], [0.5, 0.0], [1, 1])
    new, metrics, priorities = step_of(agent)(state, batch, jnp.uint32(0))
    # Errors: 0.5 + 0.5 * 5 - 2 = 1 and 2 + 0 - 1 = 1. A mean of two squares / 2, and lr 0.5: each value moves 0.25.
    np.testing.assert_array_equal(table_of(new.params), [[1.25, 2.25], [0.0, 0.0]])
    assert metrics["loss"] == 0.5
    assert metrics["td_error"] == 1.0
    assert metrics["q"] == 2.0
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(0.5), rtol=1e-6)
    np.testing.assert_array_equal(priorities, [1.0, 1.0])


def test_huber_bounds_what_one_large_error_can_do():
    batch = transitions([0], [0], [10.0], [0.0], [1])
    for loss, moved in (("huber", 0.5), ("squared", 5.0)):
        agent = tabular(loss=loss)
        new, metrics, priorities = step_of(agent)(table_state(agent, np.zeros((2, 2))), batch, jnp.uint32(0))
        assert table_of(new.params)[0, 0] == moved
        assert metrics["loss"] == {"huber": 9.5, "squared": 50.0}[loss]
        assert priorities[0] == 10.0


def test_double_takes_the_action_that_the_online_network_prefers():
    online, target = [[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [3.0, 5.0]]
    batch = transitions([0], [0], [0.0], [1.0], [1])
    worth = {}
    for double in (False, True):
        agent = tabular(double=double)
        new, *_ = step_of(agent)(table_state(agent, online, target), batch, jnp.uint32(0))
        worth[double] = table_of(new.params)[0, 0] / 0.5
        np.testing.assert_array_equal(table_of(new.params)[1], online[1])
    assert worth == {False: 5.0, True: 3.0}


@pytest.mark.parametrize("double", [False, True])
def test_one_update_of_rescaled_values_is_that_worked_by_hand(double):
    """Three steps, of which nothing terminates; a termination; and a truncation after the first of three steps."""
    online, target = np.array([[1.0, 2.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [3.0, 5.0]])
    agent = tabular(double=double, value_rescaling=True)
    batch = transitions([0, 0, 1], [1, 0, 1], [0.5, 2.0, -100.0], [0.9**3, 0.0, 0.9], [1, 1, 1])
    new, metrics, priorities = step_of(agent)(table_state(agent, online, target), batch, jnp.uint32(0))
    after = parabolic(3.0 if double else 5.0)  # the online network prefers the first action
    returns = np.array([0.5 + 0.9**3 * after, 2.0, -100.0 + 0.9 * after])
    held = np.array([2.0, 1.0, 0.0])
    errors = hyperbolic(returns) - held
    np.testing.assert_allclose(priorities, np.abs(errors), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(errors**2) / 2, rtol=1e-5)
    moved = online + 0.5 / 3 * np.array([[errors[1], errors[0]], [0.0, errors[2]]])
    np.testing.assert_allclose(table_of(new.params), moved, rtol=1e-5)
    # What is reported is in the unit of returns.
    np.testing.assert_allclose(metrics["td_error"], np.mean(np.abs(returns - parabolic(held))), rtol=1e-4)
    np.testing.assert_allclose(metrics["q"], np.mean(parabolic(np.array([2.0, 2.0, 1.0]))), rtol=1e-5)


def test_importance_weights_scale_the_loss_and_the_gradient():
    agent = tabular()
    batch = transitions([0, 1], [0, 0], [1.0, 1.0], [0.0, 0.0], [0, 0])._replace(weight=jnp.array([1.0, 0.25]))
    new, metrics, _ = step_of(agent)(table_state(agent, np.zeros((2, 2))), batch, jnp.uint32(0))
    np.testing.assert_array_equal(table_of(new.params), [[0.25, 0.0], [0.0625, 0.0]])
    assert metrics["loss"] == (0.5 + 0.125) / 2


# --- targets ----------------------------------------------------------------------------------------------------


def test_the_hard_target_is_copied_exactly_at_the_multiples_of_the_interval():
    agent = dqn(target_interval=4, lr=1e-2)(SPEC)
    step, state, batch = step_of(agent), begun(agent.init), random_batch()
    for opt_step in (*range(9), 2**31 + 3, 2**31 + 4, 2**32 - 5, 2**32 - 4):
        new, *_ = step(state, batch, jnp.uint32(opt_step))
        assert equal(new.target, new.params if (opt_step + 1) % 4 == 0 else state.target), opt_step
        assert not equal(new.params, state.params)
        state = new


@pytest.mark.parametrize("interval", [1, 3])
def test_the_soft_target_mixes_in_tau_of_the_online_network(interval):
    agent = dqn(target_interval=interval, tau=0.25, lr=1e-2)(SPEC)
    states = run(agent, begun(agent.init), random_batch(), 6)
    for done in range(1, 7):
        before, after = states[done - 1], states[done]
        if done % interval:
            assert equal(after.target, before.target)
        else:
            mixed = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, after.params, before.target)
            assert largest_difference(after.target, mixed) < 1e-6
            assert largest_difference(after.target, before.target) > 1e-5


# --- exploration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "values"), [(100, {0: 1.0, 50: 0.55, 100: 0.1, 2**31 + 5: 0.1}), (0, {0: 0.1, 7: 0.1})]
)
def test_epsilon_falls_linearly_or_stays(decay, values):
    agent = tabular(epsilon_start=1.0, epsilon_end=0.1, epsilon_decay=decay)
    step, state = step_of(agent), begun(agent.init)
    for opt_step, epsilon in values.items():
        _, metrics, _ = step(state, transitions([0], [0], [1.0], [0.0], [1]), jnp.uint32(opt_step))
        np.testing.assert_allclose(metrics["epsilon"], epsilon, atol=1e-6)


def test_the_share_of_random_actions_falls_with_epsilon_and_each_is_as_likely():
    agent = tabular(epsilon_start=0.6, epsilon_end=0.0, epsilon_decay=4)
    state, act = table_state(agent, [[0.0, 1.0], [0.0, 1.0]]), acting(agent)
    # Half of the random actions are the greedy one; the standard deviation of a share is at most 0.0035.
    for opt_step, share in ((0, 0.3), (2, 0.15), (4, 0.0), (9, 0.0)):
        action, extras = act(state, jnp.zeros(20_000, jnp.int32), jax.random.key(3), jnp.uint32(opt_step), "explore")
        assert (action.dtype, extras) == (jnp.int32, ())
        assert abs(float((action == 0).mean()) - share) <= 4 * 0.0035 * (share > 0)


def test_boltzmann_draws_actions_by_the_softmax_of_values_over_the_temperature():
    """With values log 3 apart at a temperature of 1, the better one is drawn three times as often."""
    state = lambda agent: table_state(agent, [[0.0, 0.5 * np.log(3.0)], [0.0, 0.0]])
    for epsilon, share in ((0.0, 0.75), (0.4, 0.65)):
        agent = tabular(epsilon_start=epsilon, epsilon_end=epsilon, boltzmann=0.5)
        action, _ = acting(agent)(
            state(agent), jnp.zeros(20_000, jnp.int32), jax.random.key(3), jnp.uint32(9), "explore"
        )
        assert abs(float((action == 1).mean()) - share) < 0.0135  # four standard deviations
        greedy, _ = acting(agent)(state(agent), jnp.zeros(5, jnp.int32), None, jnp.uint32(9), "exploit")
        assert greedy.tolist() == [1] * 5


def test_boltzmann_at_a_temperature_that_has_come_down_to_0_takes_the_best_action():
    agent = schedules.follow(tabular(epsilon_start=0.0, epsilon_end=0.0, boltzmann=schedules.linear(1.0, 0.0, 4)))
    state = table_state(agent, [[1.0, 2.0], [-1.0, -2.0]])
    obs, probabilities = jnp.array([0, 1]), [[0.0, 1.0], [1.0, 0.0]]
    action, _ = jax.jit(agent.act, static_argnums=4)(state, obs, KEY, jnp.uint32(4), "explore")
    assert action.tolist() == [1, 0]
    logits = agent.policy_fns.distribution(state, obs, jnp.uint32(4)).logits
    np.testing.assert_allclose(jax.nn.softmax(logits), probabilities)


# --- gradients and optimizers -----------------------------------------------------------------------------------


def test_gradients_are_clipped_to_a_global_norm():
    # Two values with an error of 3 and 4, alone in their batch of two: gradients 1.5 and 2, of norm 2.5.
    batch = transitions([0, 1], [0, 1], [3.0, 4.0], [0.0, 0.0], [0, 0])
    agent = tabular()
    step, state = step_of(agent), table_state(agent, np.zeros((2, 2)))
    for bound, scale in ((0.5, 0.2), (2.5, 1.0), (100.0, 1.0), (0.0, 0.0)):
        new, metrics, _ = step(retuned(state, max_grad_norm=bound), batch, jnp.uint32(0))
        moved = 0.5 * scale * np.array([[1.5, 0.0], [0.0, 2.0]])
        np.testing.assert_allclose(table_of(new.params), moved, rtol=1e-6)
        assert metrics["grad_norm"] == 2.5
    # Gradients of zero have no direction, and stay zero at any bound.
    still = transitions([0, 1], [0, 1], [0.0, 0.0], [0.0, 0.0], [0, 0])
    assert equal(step(retuned(state, max_grad_norm=0.0), still, jnp.uint32(0))[0].params, state.params)


def test_accumulate_keeps_the_order_of_what_the_loss_returns_beside_it():
    loss = lambda params, batch, key: (jnp.mean(params * batch), (batch * 2, {}))
    value, aux, _, grads = accumulate(loss, jnp.float32(3.0), jnp.arange(6.0), None, 3)
    assert value == 7.5
    assert grads == 2.5
    np.testing.assert_array_equal(aux, np.arange(6.0) * 2)


def by_optax(optimizer, params, grads_of, updates):
    opt_state = optimizer.init(params)
    for _ in range(updates):
        change, opt_state = optimizer.update(grads_of(params), opt_state, params)
        params = optax.apply_updates(params, change)
    return params


@pytest.mark.every_day("adamw", "by hand")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "by hand"])
def test_any_optax_optimizer_moves_the_parameters_as_optax_does(name):
    make = OPTIMIZERS.get(name, lambda lr: optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(lr)))
    chosen = {"make_optimizer": make} if name == "by hand" else {"optimizer": name}
    agent = dqn(make_network=lambda spec: Table(), lr=0.1, loss="squared", target_interval=1_000, **chosen)(TABLE_SPEC)
    batch = transitions([0, 1], [0, 1], [1.0, -2.0], [0.0, 0.0], [0, 0])
    state = run(agent, table_state(agent, np.ones((2, 2))), batch, 3)[-1]

    def grads_of(q):
        return jnp.array([[q[0, 0] - 1.0, 0.0], [0.0, q[1, 1] + 2.0]]) / 2

    np.testing.assert_allclose(table_of(state.params), by_optax(make(0.1), jnp.ones((2, 2)), grads_of, 3), rtol=1e-5)


def test_an_agent_tells_its_settings_and_which_of_its_parts_they_would_not_rebuild():
    assert dqn(make_optimizer=optax.sgd)(SPEC).info.custom == ("make_optimizer",)
    assert dqn(make_network=lambda spec: Table())(TABLE_SPEC).info.custom == ("make_network",)
    agent = dqn(lr=0.5, double=False)(SPEC)
    assert (agent.info.settings["lr"], agent.info.custom) == (0.5, ())


@pytest.mark.parametrize("make", [rainbow, cql_dqn])
def test_the_kin_of_dqn_take_parts_made_by_hand_as_it_does(make):
    agent = make(make_network=lambda spec: Table(), make_optimizer=optax.sgd, values="expected", noisy=0.0)(TABLE_SPEC)
    state = begun(agent.init)
    assert state.params["params"]["q"].tolist() == [[0, 0], [0, 0]]
    # Adam, the optimizer by name, keeps moments as large as the parameters; plain descent keeps nothing.
    assert all(leaf.size < 4 for leaf in jax.tree.leaves(state.opt_state))
    assert agent.info.custom == ("make_optimizer", "make_network")


def test_the_learning_rate_decays_linearly_to_zero():
    agent = tabular(lr=0.5, lr_decay=10)
    batch, step = transitions([0, 0], [0, 0], [1.0, 1.0], [0.0, 0.0], [1, 1]), step_of(agent)
    for opt_step, moved in ((0, 0.5), (5, 0.25), (9, 0.05), (10, 0.0), (11, 0.0), (2**32 - 1, 0.0)):
        new, *_ = step(table_state(agent, np.zeros((2, 2))), batch, jnp.uint32(opt_step))
        np.testing.assert_allclose(table_of(new.params)[0, 0], moved, rtol=1e-6)


# --- networks ---------------------------------------------------------------------------------------------------


def test_a_dueling_head_is_value_plus_centred_advantages():
    agent = dqn(dueling=True, features=(8,))(SPEC)
    state = begun(agent.init)
    params = state.params["params"]
    heads = {name: part for name, part in params.items() if name.startswith("Dense")}
    (advantage,) = (part for part in heads.values() if part["kernel"].shape == (8, 3))
    (value,) = (part for part in heads.values() if part["kernel"].shape == (8, 1))
    obs = random_batch(5).items.obs
    hidden = nn.relu(obs @ params["MLP_0"]["Dense_0"]["kernel"] + params["MLP_0"]["Dense_0"]["bias"][None])
    v, a = (hidden @ part["kernel"] + part["bias"][None] for part in (value, advantage))
    q = QNetwork(SPEC.observation_space, 3, features=(8,), dueling=True).apply(state.params, obs)
    np.testing.assert_allclose(q, v + a - a.mean(axis=1, keepdims=True), atol=1e-5)
    # What tells value and advantage apart: the mean over the actions is the value.
    np.testing.assert_allclose(q.mean(axis=1), v[:, 0], atol=1e-5)
    chosen, _ = acting(agent)(state, obs, None, jnp.uint32(0), "exploit")
    np.testing.assert_array_equal(chosen, np.argmax(a, axis=1))


def test_a_fresh_target_equals_the_network_without_sharing_its_memory():
    state = dqn()(SPEC).init(KEY)
    assert equal(state.params, state.target)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.target))]
    assert len(set(pointers)) == len(pointers)


# --- the support of c51 -----------------------------------------------------------------------------------------


class Logits(nn.Module):
    """One row of logits over three atoms for each of two actions, whatever is observed."""

    @nn.compact
    def __call__(self, obs):
        logits = self.param("logits", nn.initializers.zeros, (2, 3))
        return jnp.broadcast_to(logits, (obs.shape[0], 2, 3))


def updated(*batches, **settings):
    """Return the state and the metrics of a c51 of uniform logits once it has learnt from `batches`."""
    settings = {"values": "c51", "atoms": 3, "lr": 1.0, "optimizer": "sgd", "target_interval": 1_000, **settings}
    agent = dqn(make_network=lambda spec: Logits(), **settings)(TABLE_SPEC)
    state = begun(agent.init)
    for batch in batches:
        state, metrics, _ = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    return agent, state, metrics


ONE = transitions([0], [0], [1.0], [0.5], [1])
"""A reward of 1 and a discount of 0.5: returns reach 2."""


def test_c51_derives_its_support_from_the_rewards_and_discounts_that_it_learns_from():
    agent, state, metrics = updated(ONE)
    assert [float(x) for x in state.reach] == [0.0, 2.0]
    # From 0, 1, 2 to 1, 1.5, 2: by thirds, onto 1 and 2 half each; the slope of the logits is 1/3 less that.
    logits = state.params["params"]["logits"]
    np.testing.assert_allclose(logits, [[-1 / 3, 1 / 6, 1 / 6], [0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(metrics["q"], 1.0, atol=1e-6)  # the middle of 0 .. 2
    assert "out_of_support" not in metrics
    assert agent.strip(state).reach == state.reach


def test_the_support_of_c51_gets_wider_as_other_rewards_come():
    worse = transitions([0], [0], [-8.0], [0.0], [1])
    _, state, metrics = updated(ONE, worse)
    assert [float(x) for x in state.reach] == [-8.0, 2.0]
    # All of the target is on the lowest of -8, -3, 2; softmax of the first logits: 0.2330, 0.3835, 0.3835.
    p = np.exp([-1 / 3, 1 / 6, 1 / 6]) / np.exp([-1 / 3, 1 / 6, 1 / 6]).sum()
    expected = np.array([-1 / 3, 1 / 6, 1 / 6]) - (p - [1, 0, 0])
    np.testing.assert_allclose(state.params["params"]["logits"][0], expected, atol=1e-6)
    np.testing.assert_allclose(metrics["q"], max(p @ [-8, -3, 2], -3.0), atol=1e-5)


def test_c51_with_bounds_tells_the_share_of_its_targets_beyond_them():
    _, state, metrics = updated(ONE, v_min=0.0, v_max=1.5)
    assert state.reach == ()
    np.testing.assert_allclose(metrics["out_of_support"], 1 / 3, atol=1e-6)
    _, state, metrics = updated(ONE, v_max=1.5)
    assert [float(x) for x in state.reach] == [0.0, 2.0]
    np.testing.assert_allclose(metrics["out_of_support"], 1 / 3, atol=1e-6)
    assert jax.eval_shape(tabular().init, KEY).reach == ()  # others than c51 keep none
