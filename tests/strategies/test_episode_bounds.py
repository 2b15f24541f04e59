"""Where episodes begin and end, as agents see it: in sequences of replay, and over several steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_beside import QUIET
from toys_closed_form import counting_env
from toys_steps import KEY, stepped, watched

import jaxrl
from jaxrl.agents import Agent, AgentInfo
from jaxrl.processors.base import Processor, init_processor
from jaxrl.types import SequenceSpec, Step

RING = jaxrl.uniform(120, batch_size=16)


def toss(state: Any, obs: Any, key: Any, opt_step: Any, mode: str) -> Any:
    return jax.random.randint(key, obs.shape[:1], 0, 2), ()


def watching(window: SequenceSpec | None) -> Any:
    """Make an agent that tosses a coin, and keeps as its state the last batch that it was given."""

    def make(spec: jaxrl.EnvSpec) -> Any:
        number = lambda dtype: jnp.zeros((16, 6), dtype)
        seen = jnp.zeros((16, 6, 1))
        flags = (number(bool), number(bool)) if window else ()

        def update(state: Any, batch: Any, key: Any, opt_step: Any) -> Any:
            items = batch.items
            kept = items.obs, items.next_obs, items.discount, *((items.is_first, items.is_last) if window else ())
            return kept, {}, batch.weight

        shapes = (seen, seen, number(jnp.float32), *flags)
        start = shapes if window else jax.tree.map(lambda x: x[:, 0], shapes)
        return jaxrl.dqn()(spec)._replace(
            init=lambda key: start, act=toss, update=update, strip=lambda state: state, window=window, info=AgentInfo()
        )

    return make


@pytest.mark.every_day("6")
@pytest.mark.parametrize("opt_interval", [3, 6])
def test_sequences_say_of_each_step_whether_an_episode_begins_ends_or_is_cut_with_it(opt_interval: int) -> None:
    """Episodes end at a count of 7 or, with four steps taken, are cut; all begin at 0, and nothing else is 0."""
    strategy = jaxrl.off_policy(
        counting_env(),
        watching(SequenceSpec(6)),
        buffer=RING,
        num_envs=3,
        opt_interval=opt_interval,
        warmup=60,
    )
    _, state, _ = stepped(strategy, 30)
    obs, next_obs, discount, is_first, is_last = map(np.asarray, state.agent)
    np.testing.assert_array_equal(is_first, obs[..., 0] == 0)
    np.testing.assert_array_equal(is_first[:, 1:], is_last[:, :-1])
    terminated = next_obs[..., 0] >= 7
    np.testing.assert_array_equal(discount == 0, terminated)
    assert np.all(is_last[terminated])
    cut = is_last & (discount > 0)
    assert 0 < cut.mean() < 1
    assert 0 < terminated.mean() < 1
    # An episode that is cut has taken four steps, and none goes on beyond that.
    for row in range(len(obs)):
        for t in np.flatnonzero(is_first[row])[:-1]:
            length = int(np.argmax(is_last[row, t:])) + 1
            assert length == 4 or terminated[row, t + length - 1]


def test_single_items_of_replay_hold_no_such_flags() -> None:
    strategy = jaxrl.off_policy(counting_env(), watching(None), buffer=RING, num_envs=3, opt_interval=3, warmup=60)
    items = jax.eval_shape(lambda key: strategy.init(key).buffer.items, KEY)
    assert (items.is_first, items.is_last) == ((), ())


def silent() -> Processor:
    """Make transitions of single steps that say nothing of where episodes begin and end, as of an own processor."""
    usual = jaxrl.one_step(0.9)

    def process(state: Any, step: Step) -> Any:
        state, items = usual.process(state, step)
        return state, items._replace(is_first=(), is_last=())

    return usual._replace(process=process)


def rolling(spec: jaxrl.EnvSpec) -> Agent:
    """Make an agent that tosses a coin, and keeps as its state what it saw in a rollout, and which steps were last."""
    return Agent(
        "rolling",
        init=lambda key: (jnp.zeros(24), jnp.zeros(24, bool)),
        act=toss,
        update=lambda state, batch, key, opt_step: (batch.items, {}, batch.weight),
        strip=lambda state: state,
        prepare=lambda state, rollout: (rollout.items.obs.reshape(-1), rollout.last.reshape(-1)),
    )


def test_rollouts_of_a_processor_without_these_flags_end_where_the_steps_say_so() -> None:
    settings = {"num_envs": 3, "rollout": 8, "epochs": 1, "minibatches": 1}
    strategy = jaxrl.on_policy(counting_env(), rolling, processor=silent(), **settings)
    (obs, last), _ = watched(strategy, 3, lambda state: state.agent)
    begins, ends = obs.reshape(24, 3) == 0, last.reshape(24, 3)
    np.testing.assert_array_equal(ends[:-1], begins[1:])
    assert 0 < ends.mean() < 1


def test_an_agent_that_learns_from_sequences_needs_them() -> None:
    strategy = jaxrl.off_policy(
        counting_env(),
        watching(SequenceSpec(6)),
        buffer=RING,
        processor=silent(),
        num_envs=3,
        opt_interval=3,
    )
    with pytest.raises(jaxrl.SettingsError, match="processor: its transitions have no is_first and is_last, and dqn"):
        jax.eval_shape(strategy.init, KEY)


def test_a_strategy_trains_with_another_half_of_its_step() -> None:
    strategy = jaxrl.off_policy(counting_env(), watching(None), buffer=RING, num_envs=2, opt_interval=2, warmup=20)
    collect, learn = strategy.collect, strategy.learn
    assert collect is not None
    assert learn is not None

    def counted(state: Any, items: Any, key: Any, t: Any) -> Any:
        state, metrics = learn(state, items, key, t)
        return state, {**metrics, "mine": jnp.float32(3)}

    memory = jaxrl.MemoryRecorder()
    whole = strategy._replace(step=jaxrl.ComposedStep(collect, counted))
    jaxrl.Trainer(whole, max_opts=10, **{**QUIET, "record_interval": 10}, recorders=[memory]).train()
    assert [row["mine"] for row in memory.rows if row["kind"] == "train"] == [3]


def test_a_transition_over_two_steps_begins_with_the_first_and_ends_with_the_last_of_them() -> None:
    """Four steps of one environment, of which the second ends an episode; transitions come a step late."""
    processor = jaxrl.n_step(2, discount=0.5)
    flags = lambda x: jnp.array([x])
    zero = jnp.zeros((1, 1))

    def step(ends: bool) -> Step:
        return Step(jnp.zeros(1, jnp.int32), (), jnp.ones(1), flags(False), flags(ends), zero, zero)

    state, made = init_processor(processor, zero, jnp.zeros(1, jnp.int32), ()), []
    for ends in (False, True, False, False):
        state, item = processor.process(state, step(ends))
        made.append((bool(item.is_first[0]), bool(item.is_last[0])))
    # The first is out of the blank step before the episode; then the steps 1 and 2; 2 alone, which ends; 3 and 4.
    assert made[1:] == [(True, True), (False, True), (True, False)]
