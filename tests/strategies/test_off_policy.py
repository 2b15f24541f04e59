"""The off-policy step: what is collected, when is learnt, and that nothing but (settings, seed) decides it."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stacked import reduce_metrics
from toys_bits import same_bits
from toys_closed_form import counting_env
from toys_steps import KEY, begun, require_episodes, stepped, stepper, walk

import jaxrl
import jaxrl.strategies.base
from jaxrl.agents import Agent, dqn
from jaxrl.buffers import uniform
from jaxrl.envs import Env, TimeStep
from jaxrl.errors import SettingsError
from jaxrl.metrics import Stat, Total, stat
from jaxrl.processors import n_step, reward_scale
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.strategies import off_policy
from jaxrl.strategies.base import iterate
from jaxrl.strategies.guard import guarded_update, init_health
from jaxrl.types import Batch, Transition
from jaxrl.xla.in_place import LARGE

GAMMA = 0.5


def make(env=None, agent=None, n=1, capacity=64, batch_size=8, **settings):
    settings = {"num_envs": 2, "opt_interval": 2, "warmup": 8, **settings}
    return off_policy(
        env or counting_env(),
        agent or dqn(features=(8,), lr=1e-2, target_interval=5, epsilon_decay=20),
        buffer=uniform(capacity, batch_size),
        processor=n_step(n, GAMMA),
        **settings,
    )


def coins(spec):
    """Make an agent that tosses a coin and learns nothing; it compiles fast."""
    return dqn()(spec)._replace(
        init=lambda key: jnp.zeros(()),
        act=lambda state, obs, key, opt_step, mode: (jax.random.randint(key, obs.shape[:1], 0, 2), ()),
        update=lambda state, batch, key, opt_step: (state, {}, jnp.zeros(batch.weight.shape)),
        strip=lambda state: state,
    )


UPDATES = {
    "two values": (
        lambda state, batch, key, t: (state, {}), "update of dqn returned 2 values; expected three: state, metrics",
    ),
    "a state alone": (lambda state, batch, key, t: state._asdict(), "returned dict; expected three: state, metrics"),
    "a leaf too few": (
        lambda state, batch, key, t: (state._replace(target=()), {}, jnp.zeros(8)),
        r"the state that update of dqn returned has no leaf \.target.*, but the state before it has",
    ),
    "another dtype": (
        lambda state, batch, key, t: (state._replace(hyper=state.hyper._replace(lr=3)), {}, jnp.zeros(8)),
        r"returned has int32\[\] at \.hyper\.lr; the state before it has float32\[\]",
    ),
    "a number for metrics": (
        lambda state, batch, key, t: (state, jnp.float32(0), jnp.zeros(8)), "expected a dict of scalars by name",
    ),
    "one priority": (
        lambda state, batch, key, t: (state, {}, 0.0),
        r"priorities of shape \[\]; expected one for each item of the batch, \[8\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_of_ones_own_that_returns_something_else_is_refused_by_name(case):
    update, said = UPDATES[case]
    strategy = make(agent=lambda spec: dqn(features=(8,))(spec)._replace(update=update))
    state = jax.eval_shape(strategy.init, KEY)
    with pytest.raises(SettingsError, match=said):
        jax.eval_shape(strategy.step, state, KEY, jnp.uint32(0))


def runner(strategy):
    """Return a compiled `(state, start, stop) -> state`, one program for every length."""

    def body(state, key, t):
        return strategy.step(state, key, t)[0]

    return jax.jit(lambda state, start, stop: iterate(body, state.key, state, start, stop))


# --- ratios and counts ------------------------------------------------------------------------------------------


def writes_down(spec):
    """Make an agent that writes down the optimisation steps it is asked for."""

    def update(state, batch, key, opt_step):
        log, n = state
        return (log.at[n].set(opt_step.astype(jnp.int32)), n + 1), {}, jnp.zeros(batch.weight.shape)

    return coins(spec)._replace(init=lambda key: (jnp.full(64, -1), jnp.int32(0)), update=update)


@pytest.mark.every_day("6-2-1-6-3")
@pytest.mark.parametrize(
    ("num_envs", "opt_interval", "updates", "env_steps", "opt_steps"),
    [(6, 2, 1, 6, 3), (2, 6, 3, 6, 3), (2, 6, 1, 6, 1), (6, 2, 2, 6, 6)],
)
def test_updates_and_environment_steps_are_in_the_ratio_asked_for(
    num_envs, opt_interval, updates, env_steps, opt_steps
):
    """Of more environment steps than updates and of fewer; with several updates each time that one is due, too."""
    strategy = make(agent=writes_down, num_envs=num_envs, opt_interval=opt_interval, updates=updates)
    assert (strategy.env_steps_per_step, strategy.opt_steps_per_step) == (env_steps, opt_steps)
    assert updates * env_steps / opt_steps == opt_interval
    assert strategy.info.settings["updates"] == updates
    first, last, _ = stepped(strategy, 2)
    rows = lambda state: int(state.buffer.items.weight.sum())
    assert rows(last) - rows(first) == 2 * env_steps
    (log, n), (blank, _) = last.agent, first.agent
    assert (blank == -1).all()
    assert log[: int(n)].tolist() == list(range(2 * opt_steps))


@cache
def sampler():
    """Return a compiled `seed -> [200, 3, 8]`, the indices of all batches of a ring of 40, three of them a step."""

    def writer(spec):
        def update(state, batch, key, opt_step):
            return state.at[opt_step].set(batch.index), {}, jnp.zeros(batch.weight.shape)

        return coins(spec)._replace(init=lambda key: jnp.zeros((600, 8), jnp.int32), update=update)

    strategy = make(agent=writer, capacity=40, batch_size=8, warmup=8, updates=3)
    init, run = jax.jit(strategy.init), runner(strategy)
    return lambda seed: np.asarray(run(init(jax.random.key(seed)), 0, 200).agent).reshape(-1, 3, 8)


def test_every_update_samples_anew_from_the_same_items():
    """Three a step: the items of both pushes are there for all, and no two batches are alike."""
    index = sampler()(seed=1)[:60]
    assert len({tuple(batch) for batch in index[30:].reshape(90, 8).tolist()}) == 90
    # Every one of the three reaches all of the full ring.
    for turn in range(3):
        assert set(index[20:, turn].ravel().tolist()) == set(range(40))


@pytest.mark.slow
def test_updates_change_nothing_but_how_many_there_are():
    """Two updates at every fourth step are, bit for bit, one at every second where four steps are taken at once."""
    often, twice = make(num_envs=4, opt_interval=2), make(num_envs=4, opt_interval=4, updates=2)
    a, b = (runner(s)(jax.jit(s.init)(KEY), 0, 5) for s in (often, twice))
    assert same_bits(a, b)


@pytest.mark.parametrize(
    ("num_envs", "opt_interval", "fits"),
    [(10, 25, "20 or 30"), (10, 15, "10 or 20"), (10, 3, "2 or 5"), (10, 7, "5 or 10"), (7, 3, "1 or 7")],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(num_envs, opt_interval, fits):
    said = f"opt_interval {opt_interval} and num_envs {num_envs} do not divide one another.*nearest.* {fits}$"
    with pytest.raises(SettingsError, match=said):
        make(num_envs=num_envs, opt_interval=opt_interval)
    for fit in map(int, fits.split(" or ")):
        make(num_envs=num_envs, opt_interval=fit)


@pytest.mark.parametrize(
    "settings",
    [{"num_envs": 0}, {"opt_interval": 0}, {"updates": 0}, {"updates": 1.5}, {"warmup": -1}, {"num_envs": 2.5}],
)
def test_counts_that_make_no_sense_are_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        make(**settings)


def test_a_processor_without_transitions_is_refused():
    with pytest.raises(SettingsError, match=r"makes no transitions; end it with .*one_step\(\)\) or n_step\(n\)"):
        off_policy(counting_env(), dqn(), buffer=uniform(64, 8), processor=reward_scale(2.0))


@pytest.mark.parametrize(
    ("warmup", "n", "opt_interval", "env_steps", "note"),
    [
        (0, 1, 2, 8, "takes 8 environment steps instead of 0: at least one batch"),
        (20, 3, 2, 20, None),
        (8, 3, 2, 12, "takes 12 environment steps instead of 8"),
        (13, 1, 2, 14, "takes 14 environment steps instead of 13: at least one batch of 8, in whole iterations of 2"),
    ],
)
def test_warm_up_takes_the_steps_asked_for_and_says_where_it_does_not(warmup, n, opt_interval, env_steps, note):
    strategy = make(agent=coins, warmup=warmup, n=n, opt_interval=opt_interval)
    assert strategy.warmup_env_steps == env_steps  # that these are taken is asserted below, of true trajectories
    assert [note in said for said in strategy.info.notes] == ([True] if note else [])


def test_frames_that_the_processor_does_not_stack_are_refused_and_those_of_an_environment_noted():
    framed = lambda frames, processor: off_policy(
        jaxrl.make_env("CartPole-v1"), coins, buffer=uniform(64, 8, compact=True, frames=frames), processor=processor
    )
    stacked = jaxrl.chain(jaxrl.frame_stack(4), n_step(1))
    with pytest.raises(SettingsError, match=r"buffer\.frames is 2, but processor\.frame_stack is 4; set both alike"):
        framed(2, stacked)
    about = lambda strategy: ["frames" in note for note in strategy.info.notes]
    assert not any(about(framed(4, stacked)))
    assert about(framed(4, n_step(1))).count(True) == 1


def test_a_capacity_that_was_rounded_is_said():
    (said,) = make(num_envs=6, opt_interval=6, capacity=64, warmup=12).info.notes
    assert said == "buffer capacity rounded up from 64 to 66, a multiple of 6 items per push"
    assert make(num_envs=2, capacity=64).info.notes == ()
    state = jax.eval_shape(make(num_envs=6, opt_interval=6, capacity=64, warmup=12).init, KEY)
    assert len(state.buffer) == 66


def test_warm_up_is_random_or_explores_as_told():
    ones = lambda spec: coins(spec)._replace(act=lambda state, obs, *rest: (jnp.ones(len(obs), jnp.int32), ()))
    settings = {"agent": ones, "capacity": 512, "warmup": 512, "num_envs": 8, "opt_interval": 8}
    actions = {
        flag: np.asarray(jax.jit(make(random_warmup=flag, **settings).init)(KEY).buffer.items.action)
        for flag in (True, False)
    }
    assert (actions[False] == 1).all()
    # 512 fair coins: a standard deviation of 11.
    assert abs(int(actions[True].sum()) - 256) < 60


# --- transitions ------------------------------------------------------------------------------------------------


def n_step_by_hand(steps, n):
    """Return `obs, action, reward, discount, next_obs` of every step whose `n` rewards are known."""
    rows = []
    for first in range(len(steps) - n + 1):
        reward, discount = 0.0, 1.0
        for _, _, paid, terminated, truncated, after in steps[first : first + n]:
            reward, discount, end = reward + discount * paid, discount * GAMMA * (not terminated), after
            if terminated or truncated:
                break
        rows.append((steps[first][0], steps[first][1], reward, discount, end))
    return np.array(rows, np.float64)


def actions_taken(state, env, num_envs, pushes, slots):
    """Read the actions of one environment from the buffer and from the window before it; in order."""
    rows = np.asarray(state.buffer.items.action).reshape(slots, num_envs)
    pending = [np.asarray(t.action) for t in state.processor.pending]
    return [int(rows[p % slots, env]) for p in range(pushes)] + [int(a[env]) for a in pending]


@cache
def walked(n, opt_interval):
    """Return a strategy of three environments, how many steps each took before the first iteration, and all after."""
    iterations = 10 if opt_interval == 6 else 20
    strategy = make(agent=coins, n=n, num_envs=3, opt_interval=opt_interval, capacity=120, warmup=12)
    first, state, metrics = stepped(strategy, iterations)
    pushes = strategy.warmup_env_steps // 3 - (n - 1) + iterations * strategy.env_steps_per_step // 3
    assert pushes <= 40
    warmup = int(first.buffer.items.weight.sum()) // 3 + n - 1
    walks = [walk(actions_taken(state, env, 3, pushes, 40)) for env in range(3)]
    return state, metrics, walks, pushes, warmup


@pytest.mark.every_day("3-6")
@pytest.mark.parametrize(("n", "opt_interval"), [(1, 6), (3, 1), (1, 3), (3, 3), (3, 6)])
def test_the_buffer_holds_exactly_the_transitions_of_the_true_trajectory(n, opt_interval):
    state, _, walks, pushes, _ = walked(n, opt_interval)
    held, ends = state.buffer.items, set()
    for env, steps in enumerate(walks):
        expected = n_step_by_hand(steps, n)
        columns = (held.obs[:, 0], held.action, held.reward, held.discount, held.next_obs[:, 0])
        came = np.stack([np.asarray(x, np.float64).reshape(40, 3)[:pushes, env] for x in columns], axis=1)
        np.testing.assert_array_equal(came, expected)
        ends |= {(step.terminated, step.truncated) for step in steps}
        last = steps[-1]
        assert float(state.env.env[env, 0]) == (0 if last.terminated or last.truncated else last.after)
    assert ends == {(False, False), (True, False), (False, True)}
    assert int(held.weight.sum()) == pushes * 3


def test_episode_metrics_are_those_of_the_true_trajectory():
    _, metrics, walks, _, warmup = walked(3, 6)
    seen = reduce_metrics({name: x for name, x in metrics.items() if name.startswith(("episode", "termi", "trunc"))})
    assert int(seen["episodes"].count) == int(seen["terminated"].count) + int(seen["truncated"].count)
    require_episodes(seen, walks, warmup)


def test_sampling_reaches_every_row_of_the_ring_and_none_that_was_not_written():
    index = np.concatenate([sampler()(seed)[:, 0] for seed in range(30)], axis=1)
    # Eight rows from the warm-up and two more an iteration, until the ring of 40 is full.
    np.testing.assert_array_equal(index[:20].max(axis=1), np.minimum(8 + 2 * (np.arange(20) + 1), 40) - 1)
    assert all(set(row.tolist()) >= set(range(8)) for row in index[:20])
    assert set(index[100:].ravel().tolist()) == set(range(40))


# --- a run is a function of its settings and its seed ---------------------------------------------------------


@jax.jit
def iterated(start, stop):
    """Return what a loop has written down of its iterations, their random bits, and how many there were."""

    def body(carry, key, t):
        log, n = carry
        return log.at[n].set(jnp.stack([t, jax.random.bits(key)])), n + 1

    return iterate(body, KEY, (jnp.zeros((256, 2), jnp.uint32), jnp.int32(0)), start, stop)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 200), (63, 65), (5, 5), (2**31 - 3, 2**31 + 70), (2**32 - 70, 2**32 - 1)]
)
def test_iterate_goes_through_every_iteration_once_and_in_order(start, stop):
    log, n = iterated(jnp.uint32(start), jnp.uint32(stop))
    t = np.arange(start, stop, dtype=np.uint32)
    assert int(n) == len(t)
    bits = jax.vmap(lambda t: jax.random.bits(jax.random.fold_in(KEY, t)))(t)
    np.testing.assert_array_equal(np.asarray(log)[: len(t)], np.stack([t, bits], axis=1))


@pytest.fixture(scope="module")
def small_run():
    strategy = make(capacity=10, warmup=8)
    return jax.jit(strategy.init), stepper(strategy)


@pytest.mark.parametrize("start", [2**31 + 5, 2**32 - 40])
def test_slots_targets_and_exploration_are_right_at_large_iteration_numbers(small_run, start):
    (init, step), slots, warm = small_run, 5, 4
    state = init(KEY)
    for t in range(start, start + 12):
        new, metrics = step(state, jnp.uint32(t))
        slot = (warm + t) % slots
        held, before = (np.asarray(s.buffer.items.reward).reshape(slots, 2) for s in (new, state))
        count = np.asarray(state.env.env)[:, 0]
        np.testing.assert_array_equal(np.asarray(new.buffer.items.obs).reshape(slots, 2)[slot], count)
        np.testing.assert_array_equal(np.delete(held, slot, 0), np.delete(before, slot, 0))
        if (t + 1) % 5 == 0:  # XLA may compute the new parameters twice, and round the last bit of each in its own way
            chex.assert_trees_all_close(new.agent.target, new.agent.params, rtol=1e-6, atol=1e-7)
        else:
            assert same_bits(new.agent.target, state.agent.target)
        assert not same_bits(new.agent.params, state.agent.params)
        np.testing.assert_allclose(np.asarray(metrics["epsilon"].sum), 0.05, rtol=1e-6)
        assert int(metrics["skipped_updates"].count) == 0
        state = new


# --- what is not finite -----------------------------------------------------------------------------------------

POISONS = {2: "loss", 3: "params", 4: "target", 9: "opt_state"}
"""What is NaN, by optimisation step."""


def poisoned(poisons):
    """Make DQN of which a part is NaN at the optimisation steps of `poisons`."""

    def bind(spec):
        agent = dqn(features=(8,), lr=1e-2, target_interval=5, epsilon_decay=20)(spec)

        def update(state, batch, key, opt_step):
            new, metrics, priorities = agent.update(state, batch, key, opt_step)
            for bad_step, part in poisons.items():
                spoil = lambda x: (
                    jnp.where(opt_step == bad_step, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: B023
                )
                if part == "loss":
                    metrics = {**metrics, "loss": spoil(metrics["loss"])}
                else:
                    new = new._replace(**{part: jax.tree.map(spoil, getattr(new, part))})
            return new, metrics, priorities

        return agent._replace(update=update)

    return bind


def test_an_update_that_is_not_finite_leaves_the_agent_bitwise_as_it_was():
    strategy = make(agent=poisoned(POISONS))
    state, step = begun(strategy), stepper(strategy)
    in_a_row, stacked = [], []
    for t in range(12):
        new, metrics = step(state, jnp.uint32(t))
        assert same_bits(new.agent, state.agent) == (t in POISONS)
        assert int(metrics["skipped_updates"].count) == (t in POISONS)
        assert int(metrics["loss"].count) == (t not in POISONS)
        in_a_row.append(int(new.health.skipped_in_a_row))
        stacked.append(metrics)
        state = new
    assert in_a_row == [0, 0, 1, 2, 3, 0, 0, 0, 0, 1, 0, 0]
    seen = reduce_metrics(jax.tree.map(lambda *xs: np.stack(xs), *stacked))
    assert int(seen["skipped_updates"].count) == 4
    for name in ("loss", "q", "td_error", "grad_norm"):
        good = [float(m[name].sum) for t, m in enumerate(stacked) if t not in POISONS]
        assert (int(seen[name].count), float(seen[name].min), float(seen[name].max)) == (8, min(good), max(good))
        np.testing.assert_allclose(seen[name].sum, sum(good), rtol=1e-5)
    assert int(seen["episodes"].count) == sum(int(m["episodes"].count) for m in stacked) > 0


def test_several_updates_in_one_iteration_are_skipped_one_by_one():
    """Of an agent that counts its updates; of the eight, two are not finite."""

    def counting(spec):
        def update(state, batch, key, opt_step):
            loss = jnp.where(opt_step == 6, jnp.nan, 1.0)
            return state + jnp.where(opt_step == 1, jnp.nan, 1.0), {"loss": loss}, jnp.zeros(batch.weight.shape)

        return coins(spec)._replace(update=update)

    strategy = make(agent=counting, num_envs=4, opt_interval=1)
    state, step = begun(strategy), stepper(strategy)
    for t in range(2):
        state, metrics = step(state, jnp.uint32(t))
        assert (int(metrics["skipped_updates"].count), int(metrics["loss"].count)) == (1, 3)
        assert float(state.agent) == 3 * (t + 1)


def stub(metrics):
    """Make an agent whose every update adds 1 to its state and reports `metrics`."""
    nothing = lambda *args: ()
    update = lambda state, batch, key, opt_step: (state + 1.0, metrics, jnp.ones(2))
    return Agent("stub", nothing, nothing, update, nothing)


@jax.jit
def guarded(metrics, state):
    batch = Batch(Transition(*(jnp.zeros(2),) * 5), jnp.arange(2), jnp.ones(2))
    return guarded_update(stub(metrics), state, init_health(), batch, (), jnp.uint32(0))


def test_a_metric_without_a_single_measurement_is_no_reason_to_skip():
    metrics = {"loss": jnp.float32(1.0), "rare": stat(jnp.ones(3), False), "hits": Total(jnp.int32(2))}
    new, health, seen, _ = guarded(metrics, jnp.zeros(1))
    assert (new == 1.0).all()
    assert int(health.skipped_in_a_row) == 0
    assert int(seen["skipped_updates"].count) == 0
    assert int(seen["rare"].count) == 0
    assert int(seen["hits"].count) == 2


@pytest.mark.parametrize(
    ("bad", "size"),
    [(np.nan, 1), (-np.inf, LARGE // 4), (stat(jnp.array([1.0, np.inf])), LARGE // 4)],
    ids=["nan", "minus infinity, of a large state", "of several measurements"],
)
def test_a_bad_metric_of_any_kind_is_a_reason_to_skip_and_is_not_reported(bad, size):
    metrics = {"loss": bad if isinstance(bad, Stat) else jnp.float32(bad), "hits": Total(jnp.int32(2))}
    new, health, seen, priorities = guarded(metrics, jnp.zeros(size))
    assert (new == 0.0).all()
    assert int(health.skipped_in_a_row) == 1
    assert int(seen["skipped_updates"].count) == 1
    assert isinstance(seen["loss"], Stat)
    assert (int(seen["loss"].count), float(seen["loss"].sum)) == (0, 0.0)
    assert int(seen["hits"].count) == 0
    # Below 0: not known, so that a buffer keeps those it has.
    np.testing.assert_array_equal(priorities, [-1.0, -1.0])


@pytest.mark.parametrize("size", [1, LARGE // 4])
def test_of_a_population_each_member_lets_go_of_its_own_bad_updates(size):
    """Their states are the numbers 0, 1 and 2; the update of the second is bad."""
    states = jnp.broadcast_to(jnp.arange(3.0)[:, None], (3, size))
    update = jax.jit(jax.vmap(lambda state, luck: guarded({"loss": luck}, state)[0]))
    new = update(states, jnp.array([0.0, jnp.nan, 0.0]))
    np.testing.assert_array_equal(new, jnp.broadcast_to(jnp.array([1.0, 1.0, 3.0])[:, None], (3, size)))


def broken_env(part):
    """Count steps from 0; the observation or the reward of every fifth step is NaN. Never ends by itself."""
    spec = EnvSpec("Broken", Box(0.0, 100.0, (1,)), Discrete(2))

    def step(count, action, key):
        count = count + 1
        nan = jnp.where(count % 5 == 0, jnp.nan, 0.0)
        obs = count[None].astype(jnp.float32) + (nan if part == "obs" else 0.0)
        return count, TimeStep(obs, 1.0 + (nan if part == "reward" else 0.0), False)

    return Env(spec, lambda key: (jnp.int32(0), jnp.zeros(1)), step)


# Every day, observations that are broken are met in `tests/reliability/test_isolation.py`.
@pytest.mark.every_day("reward-3")
@pytest.mark.parametrize(("part", "n"), [("obs", 1), ("reward", 3)])
def test_a_broken_step_cuts_the_episode_and_leaves_rows_of_weight_zero(part, n):
    strategy = make(broken_env(part), coins, n, num_envs=1, opt_interval=1, warmup=18 + n)
    _, state, metrics = stepped(strategy, 20)
    assert int(metrics["invalid_steps"].count.sum()) == 4
    np.testing.assert_array_equal(metrics["truncated"].count, metrics["invalid_steps"].count)
    assert not np.any(metrics["terminated"].count)
    pushes = 19 + 20
    held = jax.tree.map(lambda x: np.asarray(x)[:pushes], state.buffer.items)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(held))
    # Five steps an episode, of which the fifth is broken: no transition that takes it in counts.
    place = np.arange(pushes) % 5
    np.testing.assert_array_equal(held.obs[:, 0], place)
    np.testing.assert_array_equal(held.weight, (place < 5 - n).astype(np.float32))
    good = held.weight > 0
    np.testing.assert_array_equal(held.next_obs[good, 0], place[good] + n)
    np.testing.assert_array_equal(held.reward[good], np.full(good.sum(), 1 + (0.75 if n == 3 else 0)))
    assert np.asarray(state.buffer.items.weight)[pushes:].sum() == 0


def test_means_over_steps_are_those_of_all_shards_also_where_one_has_no_step_to_learn_from():
    """Of two agents one dies at once, and all observations are the same, as is then what a step contributes."""
    spec = EnvSpec("two", Box(-1.0, 1.0, (2,)), Discrete(2), time_limit=20)
    obs = jnp.full((2, 2), 0.5)
    step = lambda state, action, key: (state, TimeStep(obs, jnp.ones(2), jnp.array([False, True])))
    env = Env(spec, lambda key: (jnp.int32(0), obs), step, agents=2)
    strategy = off_policy(
        env, dqn(features=(4,), lr=1e-9), buffer=uniform(400, 2), num_envs=4, opt_interval=4, warmup=200, shards=2
    )
    state, step, found = jax.jit(strategy.init)(KEY), jax.jit(strategy.step), []
    for t in range(10):
        state, metrics = step(state, jax.random.fold_in(KEY, t), jnp.uint32(t))
        found.append(metrics["q"])
    learnt = [q for q in found if q.sum != 0]  # a batch of two may have no step either
    assert learnt
    for q in learnt:
        np.testing.assert_allclose([q.sum / q.count, q.min, q.max], learnt[0].max, rtol=1e-3)
