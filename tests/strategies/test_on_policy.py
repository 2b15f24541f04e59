"""The on-policy step: what a rollout holds, what is learnt from and in what order, and when updates are left out."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stacked import reduce_metrics
from toys_closed_form import TOYS, action_preference, counting_env
from toys_envs import counting, nan_at
from toys_steps import KEY, begun, require_episodes, stepper, walk, watched

from jaxrl.agents import Agent, AgentFns, a2c, dqn, ppo
from jaxrl.agents.returns import last_steps
from jaxrl.errors import SettingsError
from jaxrl.metrics import Stat
from jaxrl.processors import chain, frame_stack, n_step, one_step, reward_scale
from jaxrl.strategies import on_policy
from jaxrl.training.program import jit_run, state_shapes
from jaxrl.trees import tree_bytes
from jaxrl.types import Batch, RecurrentObs, Rollout, Transition
from jaxrl.xla import ahead
from jaxrl.xla.shuffle import random_orders

GAMMA = 0.5


def make(agent, env=None, processor=None, **settings):
    settings = {"num_envs": 3, "rollout": 5, "epochs": 1, "minibatches": 1, **settings}
    return on_policy(env or counting_env(), agent, processor=processor or one_step(GAMMA), **settings)


def tossed(key, obs):
    """Toss a coin for each environment."""
    seen = obs.obs if isinstance(obs, RecurrentObs) else obs
    return jax.random.randint(key, jax.tree.leaves(seen)[0].shape[:1], 0, 2)


def coins(spec, **parts):
    """Make an agent that tosses a coin and learns nothing, but for `parts`."""
    agent = Agent(
        "coins",
        init=lambda key: jnp.zeros(()),
        act=lambda state, obs, key, opt_step, mode: (tossed(key, obs), ()),
        update=lambda state, batch, key, opt_step: (state, {}, jnp.zeros(batch.weight.shape)),
        strip=lambda state: state,
        prepare=lambda state, rollout: rollout.items.reward.reshape(-1),
    )
    return agent._replace(**parts)


# --- the rollout ------------------------------------------------------------------------------------------------


def keeper(steps, num_envs, width):
    """Make an agent that keeps as its state the rollout that `prepare` was given, `[T, N, ...]`."""
    shape = (steps, num_envs)
    obs, scalar = jnp.zeros((*shape, width)), jnp.zeros(shape)
    no = jnp.zeros(shape, bool)
    items = Transition(obs, jnp.zeros(shape, jnp.int32), scalar, scalar, obs, {"saw": obs}, scalar, no, no)
    blank = Rollout(items, no)

    def update(state, batch, key, opt_step):
        kept = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch.items)
        return kept, {}, jnp.zeros(batch.weight.shape)

    def prepare(state, rollout):
        assert rollout.last.shape == shape
        return jax.tree.map(lambda x: x.reshape(steps * num_envs, *x.shape[2:]), rollout)

    act = lambda state, obs, key, opt_step, mode: (tossed(key, obs), {"saw": obs})
    return lambda spec: coins(spec, init=lambda key: blank, act=act, update=update, prepare=prepare)


def rollouts(env, iterations, rollout=5, num_envs=3, width=1):
    """Return what `prepare` was given in each of `iterations`, one behind the other along time, and the metrics."""
    strategy = make(keeper(rollout, num_envs, width), env, rollout=rollout, num_envs=num_envs)
    kept, metrics = watched(strategy, iterations, lambda state: state.agent)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept), reduce_metrics(metrics)


@pytest.fixture(scope="module")
def trajectory():
    return rollouts(counting_env(), 8)


def test_rollouts_hold_exactly_the_true_trajectory_without_a_gap_between_them(trajectory):
    (items, last), _ = trajectory
    ends = set()
    for env in range(3):
        for t, (obs, action, reward, terminated, truncated, after) in enumerate(walk(items.action[:, env].tolist())):
            came = (items.obs[t, env, 0], items.action[t, env], items.reward[t, env], items.next_obs[t, env, 0])
            assert came == (obs, action, reward, after)
            assert items.discount[t, env] == (0 if terminated else GAMMA)
            assert last[t, env] == items.is_last[t, env] == (terminated or truncated)
            assert items.is_first[t, env] == (obs == 0)
            assert items.extras["saw"][t, env, 0] == obs  # what acting left beside the action
            ends.add((terminated, truncated, t % 5 == 4))
    # Ends of both kinds and none, at a rollout's last step and before.
    assert len(ends) == 6
    assert (items.weight == 1).all()


def test_episode_metrics_are_those_of_the_true_trajectory(trajectory):
    (items, _), metrics = trajectory
    require_episodes(metrics, [walk(items.action[:, env].tolist()) for env in range(3)])


def test_scalars_of_whole_episodes_are_recorded_only_where_one_ends():
    env = counting(length=4)

    def step(state, action, key):
        state, out = env.step(state, action, key)
        return state, out._replace(info={"steps": out.reward, "episode_steps": out.reward})

    _, metrics = rollouts(env._replace(step=step), 2, rollout=4, width=2)
    count, total, low, high = map(float, metrics["episode_steps"])
    assert (total / count, low, high) == (4, 4, 4)
    count, total, low, high = map(float, metrics["info/steps"])
    assert (total / count, low, high) == (2.5, 1, 4)


def test_scalars_of_an_episode_whose_last_step_is_invalid_are_left_out():
    """Some episodes end at their third step, which is not finite, the others at their fourth."""
    env = counting(length=4)

    def step(state, action, key):
        breaks, (inner, out) = state[0], env.step(state[1], action, key)
        reward = jnp.where(breaks & (inner.step == 3), jnp.nan, out.reward)
        return (breaks, inner), out._replace(reward=reward, info={"episode_paid": reward})

    reset = lambda key: ((jax.random.bernoulli(key), env.reset(key)[0]), env.reset(key)[1])
    _, metrics = rollouts(env._replace(reset=reset, step=step), 8, rollout=4, width=2)
    count, total, low, high = map(float, metrics["episode_paid"])
    assert (total / count, low, high) == (4, 4, 4)
    assert count == int(metrics["terminated"].count) > 0
    assert int(metrics["episode_length"].count) == count + int(metrics["invalid_steps"].count) > count


@pytest.mark.every_day("obs")
@pytest.mark.parametrize("where", ["obs", "reward"])
def test_an_invalid_step_has_no_weight_and_the_step_before_it_is_a_last_one(where):
    """Every third step is broken. Rollouts of 4 meet it at each of their places."""
    (items, last), metrics = rollouts(nan_at(3, where), 6, rollout=4, width=2)
    place = np.arange(24) % 3
    # What the next rollout begins with was not known to the one before it.
    expected = (place == 2) | ((place == 1) & (np.arange(24) % 4 < 3))
    for env in range(3):
        np.testing.assert_array_equal(items.obs[:, env, 0], place)
        np.testing.assert_array_equal(items.weight[:, env], place < 2)
        np.testing.assert_array_equal(last[:, env], expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(items))
    valid = items.weight > 0
    np.testing.assert_array_equal(items.next_obs[valid][:, 0], items.obs[valid][:, 0] + 1)
    np.testing.assert_array_equal(items.discount[valid], np.full(valid.sum(), GAMMA))
    assert int(metrics["invalid_steps"].count) == int(metrics["truncated"].count) == 8 * 3


# --- ratios and order -------------------------------------------------------------------------------------------


def writer(units, updates, memory):
    """Make an agent that writes down of every minibatch the number of the update, the indices, and the units."""
    log = {name: jnp.full((updates, units), -1) for name in ("index", "unit", "opt_step")}

    def act(state, obs, key, opt_step, mode):
        return tossed(key, obs), {} if memory is None else {"memory": obs.memory}

    def update(state, batch, key, opt_step):
        rows = {"index": batch.index, "unit": batch.items, "opt_step": jnp.full(batch.index.shape, opt_step)}
        place = opt_step.astype(jnp.int32) % updates
        write = lambda old, row: old.at[place, : row.shape[0]].set(row.astype(jnp.int32))
        return jax.tree.map(write, state, rows), {}, jnp.zeros(batch.weight.shape)

    prepare = lambda state, rollout: jnp.arange(units)
    return lambda spec: coins(spec, init=lambda key: log, act=act, update=update, prepare=prepare, memory=memory)


@cache
def diary(rollout, epochs, minibatches, remembers=False):
    """Return the strategy, and what was written down in three iterations: `[3, updates, units of a minibatch]`."""
    units = 4 if remembers else 4 * rollout
    agent = writer(units, epochs * minibatches, jnp.zeros(()) if remembers else None)
    strategy = make(agent, num_envs=4, rollout=rollout, epochs=epochs, minibatches=minibatches)
    logs, _ = watched(strategy, 3, lambda state: state.agent)
    return strategy, {name: x[..., : units // minibatches] for name, x in logs.items()}


@pytest.mark.every_day("3-4-False", "2-1-False", "3-2-True")
@pytest.mark.parametrize(
    ("epochs", "minibatches", "remembers"), [(3, 4, False), (1, 24, False), (2, 1, False), (3, 2, True)]
)
def test_every_unit_is_learnt_from_exactly_once_an_epoch(epochs, minibatches, remembers):
    """A unit is a step, or with a memory an environment."""
    strategy, logs = diary(6, epochs, minibatches, remembers)
    units = 4 if remembers else 24
    assert strategy.env_steps_per_step == 24
    assert strategy.opt_steps_per_step == epochs * minibatches
    for epoch in logs["index"].reshape(3 * epochs, units):
        assert sorted(epoch.tolist()) == list(range(units))
    np.testing.assert_array_equal(logs["unit"], logs["index"])
    updates = np.arange(3 * epochs * minibatches).reshape(3, -1, 1)
    np.testing.assert_array_equal(logs["opt_step"], np.broadcast_to(updates, logs["opt_step"].shape))


@pytest.mark.every_day("6")
@pytest.mark.parametrize("rollout", [6, 16])
def test_the_order_differs_from_epoch_to_epoch_and_from_iteration_to_iteration(rollout):
    _, logs = diary(rollout, 3, 4)
    assert len(np.unique(logs["index"].reshape(9, 4 * rollout), axis=0)) == 9


@pytest.fixture(scope="module", params=[6, 16, 35], ids=lambda rollout: f"{4 * rollout} units")
def orders(request):
    """Draw 4 800 orders, `[4800, units]`."""
    draw = lambda key: random_orders(key, 2, 4 * request.param)
    return np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 2_400))).reshape(4_800, 4 * request.param)


def test_every_unit_comes_to_stand_at_every_place_equally_often(orders):
    units = orders.shape[1]
    counts = np.stack([np.bincount(orders[:, place], minlength=units) for place in range(units)])
    # Of thousands of counts none lies more than 5.5 deviations off.
    assert np.abs(counts - 4_800 / units).max() < 5.5 * (4_800 / units) ** 0.5


def test_units_far_and_near_meet_in_a_minibatch_equally_often(orders):
    units = orders.shape[1]
    minibatch = np.argsort(orders, axis=1) // (units // 4)
    chance = (units // 4 - 1) / (units - 1)
    for apart in range(1, units // 2):
        met = minibatch[:, apart:] == minibatch[:, :-apart]
        assert abs(met.mean() - chance) < 0.01


def test_a_rollout_learnt_from_as_a_whole_is_not_shuffled():
    _, logs = diary(6, 2, 1)
    np.testing.assert_array_equal(logs["index"], np.broadcast_to(np.arange(24), (3, 2, 24)))


def test_exploration_is_told_the_optimisation_steps_done_before_the_rollout():
    act = lambda state, obs, key, opt_step, mode: (tossed(key, obs), {"at": jnp.full(obs.shape[:1], opt_step)})
    update = lambda state, batch, key, opt_step: (batch.items.astype(jnp.float32), {}, jnp.zeros(batch.index.shape))
    prepare = lambda state, rollout: rollout.items.extras["at"].reshape(-1)
    agent = lambda spec: coins(spec, init=lambda key: jnp.zeros(15), act=act, update=update, prepare=prepare)
    strategy = make(agent, epochs=2)
    told, _ = watched(strategy, 3, lambda state: state.agent)
    np.testing.assert_array_equal(told, np.repeat([[0], [2], [4]], 15, axis=1))


# --- advantages computed anew -----------------------------------------------------------------------------------


@pytest.mark.every_day("3-2-7", "2-1-3")
@pytest.mark.parametrize(("epochs", "minibatches", "rollout"), [(3, 2, 7), (2, 1, 3), (4, 1, 3)])
def test_what_is_learnt_from_is_refreshed_before_each_epoch_alone(epochs, minibatches, rollout):
    """Each update adds 1. The rollout was prepared with the hundreds, and refreshed with the rest."""
    updates, num_envs = epochs * minibatches, 2
    begin = (jnp.float32(0), jnp.zeros(updates))

    def update(state, batch, key, opt_step):
        made, seen = state
        seen = seen.at[opt_step.astype(jnp.int32) % updates].set(batch.items.mean())
        return (made + 1, seen), {}, jnp.zeros(batch.weight.shape)

    prepare = lambda state, rollout: jnp.full(rollout.last.size, 100 * state[0])
    refresh = lambda state, rollout, prepared: prepared + jnp.full(rollout.last.size, state[0])
    agent = lambda spec: coins(
        spec, init=lambda key: begin, update=update, prepare=prepare, fns=AgentFns(refresh=refresh)
    )
    strategy = make(agent, num_envs=num_envs, rollout=rollout, epochs=epochs, minibatches=minibatches)
    seen, _ = watched(strategy, 3, lambda state: state.agent[1])
    at_rollout = updates * np.arange(3)[:, None]
    at_epoch = at_rollout + np.repeat(np.arange(epochs) * minibatches, minibatches)
    np.testing.assert_array_equal(seen, 100 * at_rollout + at_epoch)


OWN = {"ppo": {}, "with V-trace": {"rho_clip": 1.0}, "with a memory": {"core": "gru", "core_features": 4}}


@pytest.mark.every_day("ppo", "with a memory")
@pytest.mark.parametrize("name", OWN)
def test_ppo_takes_the_values_of_each_epoch_and_the_policy_that_acted(name):
    """An iteration of two epochs, put together by hand: the second is prepared as for an actor that lags behind."""
    agent = ppo(features=(8,), lr=0.1, vf_coef=1.0, recompute_advantage=True, **OWN[name])
    strategy = make(agent, TOYS["delayed_reward"](GAMMA).env, num_envs=4, rollout=6, epochs=2)
    built = agent(strategy.env.spec)

    @jax.jit
    def both(state, key):
        whole, _ = strategy.step(state, key, jnp.uint32(0))
        _, items, _ = strategy.step.collect(state, jax.random.split(key)[0], jnp.uint32(0))
        rollout = Rollout(items, last_steps(items))
        first = built.prepare(state.agent, rollout)
        batch = lambda items: Batch(items, jnp.arange(len(items.weight)), jnp.ones(len(items.weight)))
        once, _, _ = built.update(state.agent, batch(first), key, jnp.uint32(0))
        of_actor = first.log_prob.T if name == "with a memory" else first.log_prob.reshape(6, 4)
        second = built.prepare(once, rollout._replace(items=items._replace(extras={"log_prob": of_actor})))
        now = built.prepare(once, rollout).log_prob
        moved = jnp.abs(second.advantage - first.advantage).max(), jnp.abs(now - first.log_prob).max()
        twice, _, _ = built.update(once, batch(second), key, jnp.uint32(1))
        return whole.agent.params, twice.params, moved

    whole, by_hand, moved = both(begun(strategy), jax.random.key(4))
    assert min(moved) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, by_hand)


@pytest.mark.parametrize("agent", [ppo, a2c])
def test_advantages_cannot_be_computed_anew_before_a_single_epoch(agent):
    with pytest.raises(SettingsError, match=r"recompute_advantage is set, but epochs is 1.*; set epochs above 1"):
        make(agent(features=(8,), recompute_advantage=True), epochs=1)


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_envs", "rollout", "minibatches", "fits"),
    [(3, 5, 4, "3 or 5"), (3, 5, 2, "1 or 3"), (3, 5, 100, "15"), (4, 6, 7, "6 or 8"), (1, 1, 2, "1")],
)
def test_minibatches_that_do_not_divide_are_refused_with_the_nearest_that_do(num_envs, rollout, minibatches, fits):
    steps = num_envs * rollout
    said = f"minibatches {minibatches} does not divide the {steps} steps of a rollout; the nearest.* is {fits}$"
    with pytest.raises(SettingsError, match=said):
        make(coins, num_envs=num_envs, rollout=rollout, minibatches=minibatches)
    for fit in map(int, fits.split(" or ")):
        make(coins, num_envs=num_envs, rollout=rollout, minibatches=fit)


def test_with_a_memory_minibatches_must_divide_the_environments():
    agent = ppo(core="gru", features=(4,))
    with pytest.raises(SettingsError, match=r"minibatches 3 does not divide the 4 environments.* is 2 or 4$"):
        make(agent, num_envs=4, rollout=6, minibatches=3)
    make(agent, num_envs=4, rollout=5, minibatches=4)


@pytest.mark.parametrize("name", ["num_envs", "rollout", "epochs", "minibatches"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_counts_that_make_no_sense_are_refused(name, value):
    with pytest.raises(SettingsError, match=name):
        make(coins, **{name: value})


@pytest.mark.parametrize(
    ("agent", "processor", "said"),
    [
        (dqn(), None, "dqn does not learn on-policy; agents that do: ppo, a2c, reinforce, impala, pqn and reppo"),
        (coins, chain(frame_stack(2), n_step(3)), r"look ahead by themselves; set processor\.n_step to 1"),
        (coins, reward_scale(2.0), r"makes no transitions; end it with .*one_step\(\)\) or n_step\(n\)"),
    ],
    ids=["of replay", "several steps", "no transitions"],
)
def test_agents_and_processors_of_another_kind_are_refused(agent, processor, said):
    with pytest.raises(SettingsError, match=said):
        make(agent, processor=processor)


def test_without_a_processor_steps_are_single_and_the_discount_is_its_default():
    strategy = on_policy(counting_env(), keeper(5, 3, 1), num_envs=3, rollout=5, epochs=1, minibatches=1)
    state, _ = stepper(strategy)(begun(strategy), jnp.uint32(0))
    discounts = set(np.asarray(state.agent.items.discount).ravel().tolist())
    assert discounts - {0.0} == {float(np.float32(0.99))}


# --- stopping ---------------------------------------------------------------------------------------------------

THIRD = np.float32(1 / 3)


class Counter(NamedTuple):
    """State of an agent that adds a third at every update; the rest is said of each update of three iterations."""

    made: jax.Array
    value: jax.Array
    asks: np.ndarray
    """Whether it asks to stop after the update."""
    loss: np.ndarray
    """NaN where the update is not finite."""
    added: np.ndarray
    """As `loss`."""


@cache
def counting_updates():
    """Return a strategy of six updates an iteration, its first state, and its compiled step."""

    def update(state, batch, key, opt_step):
        metrics = {"loss": state.loss[opt_step], "number": opt_step.astype(jnp.float32)}
        value = state.value + THIRD + state.added[opt_step]
        return state._replace(made=state.made + 1, value=value), metrics, jnp.zeros(batch.weight.shape)

    stop = lambda state, metrics: state.asks[metrics["number"].sum.astype(jnp.int32)]
    begin = lambda key: Counter(jnp.int32(0), jnp.float32(0), jnp.zeros(18, bool), jnp.zeros(18), jnp.zeros(18))
    agent = lambda spec: coins(spec, init=begin, update=update, fns=AgentFns(stop=stop))
    strategy = make(agent, epochs=2, minibatches=3)
    return strategy, begun(strategy), stepper(strategy)


def counted(iterations, asks=lambda number: False, poison=()):
    """Yield the state and the metrics of each iteration; of `poison` are updates of which a part is NaN, by number."""
    _, state, step = counting_updates()
    nan = lambda part: np.array([np.nan if dict(poison).get(n) == part else 0.0 for n in range(18)], np.float32)
    told = {"asks": np.array([asks(n) for n in range(18)]), "loss": 1 + nan("loss"), "added": nan("value")}
    state = state._replace(agent=state.agent._replace(**told))
    for t in range(iterations):
        state, metrics = step(state, jnp.uint32(t))
        yield state, metrics
        assert np.asarray(state.agent.value).tobytes() == thirds(int(state.agent.made)).tobytes()


def thirds(times):
    value = np.float32(0)
    for _ in range(times):
        value = np.float32(value + THIRD)
    return value


def test_updates_behind_a_stop_leave_the_agent_bitwise_as_it_was_until_the_next_rollout():
    """Six updates an iteration; the third of each asks to stop."""
    for t, (state, metrics) in enumerate(counted(3, lambda number: number % 6 == 2)):
        assert int(state.agent.made) == 3 * (t + 1)
        assert int(metrics["stopped_updates"].count) == 3
        numbers_of_updates = [float(x) for x in metrics["number"]]
        assert numbers_of_updates == [3, 3 * 6 * t + 3, 6 * t, 6 * t + 2]
        assert int(metrics["loss"].count) == 3
        assert int(metrics["skipped_updates"].count) == 0


@pytest.mark.parametrize(("first", "made"), [(0, 1), (4, 5), (5, 6), (6, 6)])
def test_the_update_that_asks_is_still_made(first, made):
    """Or all are, where none asks."""
    ((state, metrics),) = counted(1, lambda number: number >= first)
    assert int(state.agent.made) == int(metrics["loss"].count) == made
    assert int(metrics["stopped_updates"].count) == 6 - made


def test_what_was_left_out_is_not_counted_as_skipped():
    """The second and the fifth update of each iteration are not finite; the stop comes between them."""
    poison = dict.fromkeys((1, 4, 7, 10), "loss")
    for t, (state, metrics) in enumerate(counted(2, lambda number: number % 6 == 2, poison)):
        assert int(state.agent.made) == 2 * (t + 1)
        assert int(metrics["skipped_updates"].count) == 1
        assert int(metrics["stopped_updates"].count) == 3
        assert int(metrics["loss"].count) == 2
        assert int(state.health.skipped_in_a_row) == 0
        assert int(state.health.most_in_a_row) == 1


def test_of_several_updates_only_the_bad_ones_are_skipped_and_leave_the_agent_bitwise_as_it_was():
    told = []
    for state, metrics in counted(2, poison={1: "value", 5: "value", 6: "loss", 7: "loss", 11: "loss"}):
        told.append((int(state.agent.made), int(metrics["skipped_updates"].count), int(metrics["loss"].count)))
        assert np.isfinite(float(metrics["loss"].sum))
        assert int(state.health.skipped_in_a_row) == 1
    assert told == [(4, 2, 4), (7, 3, 3)]
    assert int(state.health.most_in_a_row) == 3


def preferring(**settings):
    """Make PPO before a toy that it learns, eight updates an iteration on the rollout as a whole."""
    agent = ppo(**{"features": (8,), "lr": 0.03, "ent_coef": 0.0, **settings})
    return make(agent, action_preference(GAMMA).env, num_envs=4, rollout=8, epochs=8, minibatches=1)


@pytest.mark.every_day("lowered")
@pytest.mark.parametrize(
    ("desired", "lr", "expected"),
    [
        (1e-6, 0.03, [0.03 / 1.5**i for i in range(8)]),
        (1e9, 2e-3, [2e-3, 3e-3, 4.5e-3, 6.75e-3, *[1e-2] * 4]),
    ],
    ids=["lowered", "raised, not above the bound"],
)
def test_ppo_adapts_its_learning_rate_to_the_divergence(desired, lr, expected):
    """Before the first update on a rollout the policy has not moved, which tells nothing; each later one adapts."""
    strategy = preferring(desired_kl=desired, lr=lr)
    lr = watched(strategy, 2, lambda state: ())[1]["lr"]
    np.testing.assert_allclose([lr.sum[0], lr.min[0], lr.max[0]], [sum(expected), min(expected), max(expected)], 1e-5)
    # The next rollout goes on with it.
    assert pytest.approx(expected[-1], rel=1e-5) in (lr.min[1], lr.max[1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_decay": 100}, "lr_decay 100"),
        ({"lr": "linear(1e-3,0,100)"}, "a schedule of lr"),
        ({"lr": 0.0}, "agent.lr is 0"),
    ],
)
def test_only_one_may_change_the_learning_rate(settings, words):
    with pytest.raises(SettingsError, match=words):
        ppo(desired_kl=0.01, **settings)


def test_the_kl_of_several_shards_is_compared_by_its_mean():
    agent = ppo(features=(8,), target_kl=0.1)(action_preference(GAMMA).env.spec)
    of_shards = lambda count, total: {"approx_kl": Stat(*map(jnp.float32, (count, total, 0.0, 1.0)))}
    assert not agent.fns.stop(None, of_shards(4, 0.39))
    assert agent.fns.stop(None, of_shards(4, 0.41))
    assert not agent.fns.stop(None, of_shards(0, 0.0))  # of an update that was skipped
    assert agent.fns.stop(None, {"approx_kl": jnp.float32(0.11)})


# --- populations ------------------------------------------------------------------------------------------------

LRS = (1e-2, 3e-3, 0.0)


@pytest.mark.slow
def test_one_member_of_a_population_stops_where_another_goes_on_and_each_goes_where_it_would_alone():
    agent = ppo(features=(8,), target_kl=1e-4)
    strategy = make(agent, TOYS["delayed_reward"](GAMMA).env, num_envs=4, rollout=6, epochs=2, minibatches=3)
    with_lr = lambda state, lr: state._replace(agent=state.agent._replace(hyper=state.agent.hyper._replace(lr=lr)))
    keys = jax.random.split(jax.random.key(5), len(LRS))
    together = with_lr(jax.jit(jax.vmap(strategy.init))(keys), jnp.array(LRS))
    alone = [with_lr(begin, jnp.float32(lr)) for begin, lr in zip(map(jax.jit(strategy.init), keys), LRS, strict=True)]

    step, fold = jax.vmap(strategy.step, in_axes=(0, 0, None)), jax.vmap(jax.random.fold_in, in_axes=(0, None))
    step_together, step_alone = jax.jit(lambda s, t: step(s, fold(s.key, t), t)), stepper(strategy)
    stopped = np.zeros(len(LRS))
    for t in range(15):
        together, metrics = step_together(together, jnp.uint32(t))
        alone, seen = zip(*(step_alone(state, jnp.uint32(t)) for state in alone), strict=True)
        np.testing.assert_allclose(metrics["loss"].sum, [float(m["loss"].sum) for m in seen], rtol=1e-3, atol=1e-4)
        counts = np.asarray(metrics["stopped_updates"].count)
        np.testing.assert_array_equal(counts, [int(m["stopped_updates"].count) for m in seen])
        stopped += counts
    assert stopped[0] > stopped[2] == 0
    for member, state in enumerate(alone):
        mine = jax.tree.map(lambda x: x[member], (together.agent.params, together.env))  # noqa: B023
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves((state.agent.params, state.env)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


# --- memory -----------------------------------------------------------------------------------------------------


def loop_memory(strategy, block, monkeypatch):
    """Return the memory analysis of the compiled loop, which draws the randomness of `block` iterations at once."""
    monkeypatch.setattr(ahead, "BLOCK", block)
    state, sums = state_shapes(strategy)
    t = jax.ShapeDtypeStruct((), jnp.uint32)
    return jit_run(strategy).lower(state, sums, t, t).compile().memory_analysis(), tree_bytes(state)


@pytest.mark.slow
def test_what_a_loop_needs_does_not_grow_with_its_iterations_but_for_their_randomness(monkeypatch):
    """The observations of a rollout take 16 MB here; what is drawn for it, a sixtieth of that."""
    stack = chain(frame_stack(128), one_step())
    strategy = make(ppo(features=(4,)), nan_at(3), stack, num_envs=8, rollout=1_000, epochs=2, minibatches=4)
    noise = 8 * 1_000 * 64  # bytes of what is drawn for each step of each environment, at most
    (one, state_bytes), (many, _) = (loop_memory(strategy, block, monkeypatch) for block in (1, 16))
    observations = 2 * 8 * 1_000 * 2 * 128 * 4
    assert 16 * noise <= observations / 2
    assert one.temp_size_in_bytes > observations
    assert many.temp_size_in_bytes - one.temp_size_in_bytes < 2 * 16 * noise
    # No rollout is left in the state, and the new state lies where the old one was.
    assert many.output_size_in_bytes < state_bytes + (1 << 16) < observations / 8
    assert many.alias_size_in_bytes > state_bytes - (1 << 10)
