"""Hindsight: goals that the same episode reached later, and the rewards and ends that follow from them, by hand."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import require_same_bits
from toys_draws import drawn
from toys_goals import places

import jaxrl
from benchmarks.goals import bit_flipping
from jaxrl.buffers import Buffer
from jaxrl.buffers.hindsight import count_later_steps, hindsight
from jaxrl.errors import SettingsError
from jaxrl.processors import map_reward
from jaxrl.types import RecurrentObs, Transition

KEY = jax.random.key(0)
GAMMA = 0.9
LANES = ([(4, "cut"), (3, "end"), (5, "cut")], [(2, "end"), (6, "cut"), (4, "crash")])
"""For each of two environments its episodes: how many steps, and whether the last one terminates by the goal, for
another reason, or is cut off."""
STEPS = 12
NOWHERE = -1.0


def pays(achieved: Any, desired: Any) -> Any:
    """Pay 10 where the goal is reached, which terminates, and else minus the distance."""
    reached = achieved[0] == desired[0]
    return jnp.where(reached, 10.0, -jnp.abs(achieved[0] - desired[0])), reached


def seen(place: float, goal: float) -> dict[str, np.ndarray]:
    parts = {"observation": [place, 0.5], "achieved_goal": [place], "desired_goal": [goal]}
    return {name: np.asarray(part, np.float32) for name, part in parts.items()}


def walk(lane: int) -> list[tuple[int, Transition]]:
    """Return an environment's steps with the numbers of their episodes; the place after step `k` of episode `e` is
    `100 e + k`."""
    made = []
    for episode, (length, how) in enumerate(LANES[lane]):
        for k in range(length):
            last = k == length - 1
            place = 100.0 * (episode + 1) + k + 1
            goal = 100.0 * (episode + 1) + length if how == "end" else NOWHERE
            stops = last and how != "cut"
            reward, _ = pays(np.array([place]), np.array([goal]))
            fields = (np.int32(k), np.float32(reward), np.float32(0.0 if stops else GAMMA))
            made.append((episode, Transition(seen(place - 1, goal), *fields, seen(place, goal), (), np.float32(1))))
    return made


def block(step: int, steps: int = 1) -> Transition:
    """Return the rows of vector steps from `step` on; beyond the last one they begin anew."""
    rows = [walk(lane)[t % STEPS][1] for t in range(step, step + steps) for lane in range(2)]
    return jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *rows)


def made(ring: Buffer | None = None, share: float = 1.0, goal: Any = pays) -> Buffer:
    return hindsight(ring or jaxrl.uniform(24, batch_size=24), share, goal).with_goal_fn(None, "Walk")


def filled(buffer: Buffer, pushes: int, steps: int = 1, change: Any = lambda items: items) -> Any:
    """Return the state after so many pushes of blocks, each as `change` leaves it."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), change(block(0)))
    state, push = buffer.init(example, 2 * steps, 2, 2), jax.jit(buffer.push)
    for t in range(pushes):
        state = push(state, change(block(t * steps, steps)), jnp.uint32(t))
    return state


@pytest.fixture(scope="module")
def full() -> Any:
    """Return the state after all steps."""
    return filled(made(), 12)


def later_steps(state: Any) -> np.ndarray:
    """Return how many later steps are known of each row, `[T, 2]`."""
    rows = jnp.arange(state.age.shape[0], dtype=jnp.int32)
    return np.asarray(jax.jit(count_later_steps)(state, rows)).reshape(-1, 2)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_left_of_an_episode_is_known_of_every_row(steps: int, full: Any) -> None:
    left = later_steps(full if steps == 1 else filled(made(), 12 // steps, steps))
    np.testing.assert_array_equal(left[:, 0], [3, 2, 1, 0, 2, 1, 0, 4, 3, 2, 1, 0])
    np.testing.assert_array_equal(left[:, 1], [1, 0, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0])


def test_an_invalid_step_ends_an_episode_before_it_and_its_zeros_are_no_goal() -> None:
    buffer = made()
    state, push = filled(buffer, 2), jax.jit(buffer.push)
    broken = block(2)
    zeros = jax.tree.map(lambda x: x.at[0].set(0), broken.next_obs)
    state = push(state, broken._replace(weight=jnp.array([0.0, 1.0]), next_obs=zeros), jnp.uint32(2))
    # Three steps of one episode, of which the last is broken.
    np.testing.assert_array_equal(later_steps(state)[:3, 0], [1, 0, 0])


def test_it_ends_with_the_newest_step_and_goes_around_the_end_of_the_ring() -> None:
    buffer = made(jaxrl.uniform(16, batch_size=8))
    state = filled(buffer, 11)  # eight vector steps are held, 3 to 10, the newest at place 2
    by_step = later_steps(state)[[t % 8 for t in range(3, 11)]]
    np.testing.assert_array_equal(by_step[:, 0], [0, 2, 1, 0, 3, 2, 1, 0])
    np.testing.assert_array_equal(by_step[:, 1], [4, 3, 2, 1, 0, 2, 1, 0])


def sample(state: Any, index: Any, later: float, goal: Any = pays) -> Transition:
    """Return what becomes of the rows `index`, for given draws."""
    return _sampler(len(index), goal)(state, jnp.asarray(index, jnp.uint32), jnp.full(len(index), later, jnp.float32))


def test_the_program_of_a_push_is_as_long_for_many_steps_as_for_a_few() -> None:
    buffer = made(jaxrl.uniform(480, batch_size=24))
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block(0))

    def length(steps: int) -> int:
        state = jax.eval_shape(lambda: buffer.init(example, 2 * steps, 2, 2))
        return len(jax.make_jaxpr(buffer.push)(state, block(0, steps), jnp.uint32(0)).eqns)

    assert length(2) == length(24)


@cache
def _sampler(rows: int, goal: Any) -> Any:
    buffer = made(jaxrl.uniform(24, batch_size=rows), goal=goal)

    @jax.jit
    def sample(state: Any, index: Any, later: Any) -> Transition:
        with drawn(bits=[index], uniform=[jnp.zeros(rows), later]):
            return buffer.sample(state, KEY, jnp.uint32(12), jnp.uint32(0)).items

    return sample


def test_rewards_and_ends_are_those_of_the_new_goal(full: Any) -> None:
    """Rows 2 t + lane, with the last step of each episode as the later one, and then with the step itself."""
    rows = [0, 4, 6, 8, 10, 12, 16, 22, 3, 5, 17, 23]
    items = sample(full, rows, later=0.999)
    goals = [104, 104, 104, 203, 203, 203, 305, 305, 102, 206, 304, 304]
    places = [101, 103, 104, 201, 202, 203, 302, 305, 102, 201, 301, 304]
    for obs in (items.obs, items.next_obs):
        np.testing.assert_array_equal(obs["desired_goal"][:, 0], goals)
    np.testing.assert_array_equal(items.next_obs["achieved_goal"][:, 0], places)
    np.testing.assert_array_equal(items.obs["achieved_goal"][:, 0], np.subtract(places, 1))
    np.testing.assert_array_equal(items.reward, [-3, -1, 10, -2, -1, 10, -3, 10, 10, -5, -3, 10])
    go_on = np.float32(GAMMA)
    np.testing.assert_array_equal(items.discount, [go_on, go_on, 0, go_on, go_on, 0, go_on, 0, 0, go_on, go_on, 0])
    itself = sample(full, rows, later=0.0)
    np.testing.assert_array_equal(itself.next_obs["desired_goal"], itself.next_obs["achieved_goal"])
    np.testing.assert_array_equal(itself.reward, [10] * len(rows))
    np.testing.assert_array_equal(itself.discount, [0] * len(rows))


def beyond(achieved: Any, desired: Any) -> Any:
    """Pay as `pays` does, of goals one place short of where they are reached: no step reaches where it led itself."""
    return pays(achieved, desired + 1)


def test_what_ended_for_another_reason_ends_under_any_goal_and_what_reached_its_goal_does_not() -> None:
    """Each step is given the place to which it led as its goal."""

    def short(obs: Any) -> Any:
        return {**obs, "desired_goal": obs["desired_goal"] - 1}

    change = lambda items: items._replace(obs=short(items.obs), next_obs=short(items.next_obs))
    state = filled(made(goal=beyond), 12, change=change)
    # Within an episode, where one was cut, where one had reached its goal, and where one crashed.
    items = sample(state, [0, 6, 12, 23], later=0.0, goal=beyond)
    np.testing.assert_array_equal(items.discount, np.float32([GAMMA, GAMMA, GAMMA, 0]))
    np.testing.assert_array_equal(items.reward, [-1] * 4)


@pytest.mark.parametrize(
    "ring",
    [
        jaxrl.uniform(16, batch_size=16),
        jaxrl.prioritised(16, batch_size=16),
        jaxrl.uniform(16, batch_size=16, compact=True, ends=1.0),
    ],
    ids=["uniform", "prioritised", "compact"],
)
@pytest.mark.every_day("prioritised", "compact")
def test_goals_are_of_the_same_episode_and_all_that_came_later_are_as_likely(ring: Buffer) -> None:
    buffer = made(ring)
    state = filled(buffer, 11)

    def draw(key: Any) -> Any:
        return buffer.sample(state, key, jnp.uint32(11), jnp.uint32(0))

    items = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 400)).items
    goal, place = (np.asarray(items.next_obs[name]).ravel() for name in ("desired_goal", "achieved_goal"))
    np.testing.assert_array_equal(goal // 100, place // 100)
    assert np.all(goal >= place)
    first = goal[place == 301]  # both environments have it; the ring ends at 304 and 303
    _, counts = np.unique(first, return_counts=True)
    assert len(counts) == 4
    assert counts[:3].max() / counts[:3].min() < 1.4


@pytest.mark.every_day("prioritised")
@pytest.mark.parametrize("ring", [jaxrl.uniform, jaxrl.prioritised], ids=["uniform", "prioritised"])
def test_where_a_compact_buffer_has_lost_the_end_of_an_episode_nothing_is_learnt_from_it(ring: Any) -> None:
    """Here each step leads one place further; without its end, a last step would seem to stay where it is."""
    buffer = made(ring(24, batch_size=24, compact=True, ends=0.1))
    state = filled(buffer, 12)
    items = jax.jit(lambda state: buffer.sample(state, KEY, jnp.uint32(12), jnp.uint32(0)))(state).items
    went = items.next_obs["achieved_goal"][:, 0] - items.obs["achieved_goal"][:, 0]
    assert (went == 0).any()
    np.testing.assert_array_equal(went[items.weight > 0], 1)


def test_a_share_of_the_batch_alone_is_changed_and_none_where_it_is_nought(full: Any) -> None:
    ring = jaxrl.uniform(24, batch_size=24)

    def both(share: float) -> Any:
        buffer = made(ring, share)

        def draw(key: Any) -> Any:
            inner = ring.sample(full.ring, jax.random.split(key, 3)[0], jnp.uint32(12), jnp.uint32(0))
            return buffer.sample(full, key, jnp.uint32(12), jnp.uint32(0)), inner

        return jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 100))

    for share in (0.8, 0.0):
        batch, as_it_was = both(share)
        mine = np.asarray(as_it_was.items.obs["desired_goal"] == NOWHERE)
        moved = np.asarray(batch.items.obs["desired_goal"] != NOWHERE)
        assert np.mean(moved[mine]) == pytest.approx(share, abs=0.03)
        np.testing.assert_array_equal(batch.index, as_it_was.index)
        if not share:
            require_same_bits(batch, as_it_was)


def test_memories_beside_observations_stay_as_they_are() -> None:
    remembered = lambda obs: RecurrentObs(obs, obs["achieved_goal"] * 2)
    beside = lambda items: items._replace(obs=remembered(items.obs), next_obs=remembered(items.next_obs))
    items = sample(filled(made(), 3, change=beside), [0, 2], later=0.999)
    np.testing.assert_array_equal(items.obs.memory[:, 0], [200, 202])
    np.testing.assert_array_equal(items.next_obs.memory[:, 0], [202, 204])
    np.testing.assert_array_equal(items.obs.obs["desired_goal"][:, 0], [103, 103])


# --- put together, and refused ------------------------------------------------------------------------------------


def strategy_of(env: Any = None, agent: Any = None, **settings: Any) -> jaxrl.Strategy:
    settings.setdefault("buffer", jaxrl.hindsight(jaxrl.uniform(64, batch_size=8)))
    return jaxrl.off_policy(env or bit_flipping(3), agent or jaxrl.dqn(features=(4,)), num_envs=2, **settings)


def test_an_environment_that_tells_what_goals_pay_needs_no_more_and_another_is_given_it() -> None:
    own = strategy_of()
    assert own.info.settings["buffer"]["hindsight"] == 0.8
    assert "buffer" not in own.info.settings["custom"]
    given = jaxrl.hindsight(jaxrl.uniform(64, batch_size=8), goal=bit_flipping(3).goal)
    for env in (bit_flipping(3), bit_flipping(3)._replace(goal=None)):
        assert "buffer" in strategy_of(env, buffer=given).info.settings["custom"]
    assert strategy_of(buffer=given, opt_interval=2, shards=2).placement.shards == 2


REFUSED = {
    "no goal": (lambda: strategy_of(jaxrl.make_env("CartPole-v1")), "CartPole-v1 has no goal function"),
    "no goals to be seen": (
        lambda: jax.eval_shape(strategy_of(jaxrl.make_env("CartPole-v1")._replace(goal=pays)).init, jax.random.key(0)),
        r"needs observations with observation, achieved_goal, desired_goal, but they are",
    ),
    "several steps": (
        lambda: jax.eval_shape(strategy_of(processor=jaxrl.n_step(3)).init, jax.random.key(0)),
        r"set processor\.n_step to 1",
    ),
    "other rewards": (
        lambda: strategy_of(processor=jaxrl.chain(jaxrl.reward_scale(2.0), jaxrl.one_step())),
        r"leave processor\.reward_scale at 1\.0",
    ),
    "other rewards of one's own": (
        lambda: strategy_of(processor=jaxrl.chain(map_reward(jnp.tanh), jaxrl.one_step())),
        "rewards as the environment has them, which this processor changes",
    ),
    "sequences": (lambda: strategy_of(agent=jaxrl.dqn(core="gru")), "which this buffer cannot sample"),
    "a share that is none": (lambda: jaxrl.hindsight(jaxrl.uniform(9, 3), 1.5), r"buffer\.hindsight is 1\.5"),
    "twice": (
        lambda: jaxrl.hindsight(jaxrl.hindsight(jaxrl.uniform(9, 3))),
        r"expects a buffer made by jaxrl\.uniform",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(SettingsError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_a_processor_of_ones_own_that_leaves_rewards_as_they_are_says_so() -> None:
    processor = jaxrl.one_step()._replace(settings=None)
    assert strategy_of(processor=processor).policy is not None
    with pytest.raises(SettingsError, match="leave them as they are, and say so by the field changes"):
        strategy_of(processor=processor._replace(changes=("obs", "reward")))


def test_wrappers_that_change_what_a_step_pays_or_shows_forget_the_goal() -> None:
    from jaxrl.envs.wrappers import action_repeat, previous, sticky_actions, transform_reward

    assert sticky_actions(bit_flipping(3), 0.1).goal is not None
    assert action_repeat(bit_flipping(3), 2).goal is None
    assert previous(bit_flipping(3)).goal is None
    assert transform_reward(bit_flipping(3), lambda state, action, step: step.reward * 2).goal is None


def test_actors_keep_the_goal_function_of_an_environment_in_jax():
    settings = jaxrl.off_policy(
        places(),
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.hindsight(jaxrl.uniform(96, batch_size=8)),
        num_envs=2,
        opt_interval=2,
        actors=jaxrl.ActorsConfig(actors=1),
    ).info.settings
    assert settings["buffer"]["hindsight"] > 0
