"""Actors in threads: exact counts, nothing lost, the same bits again, and a clear end whatever goes wrong."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_policy import Linear
from toys_actors import (
    DISCOUNT,
    MAKE,
    counted,
    counter,
    events,
    replaying,
    rollouts,
    shared,
    shared_state,
    with_settings,
)
from toys_closed_form import clock_truncates
from toys_gymnasium import Counting, Telling

import jaxrl
import jaxrl.training.actors.pool
from jaxrl.agents import Agent, AgentInfo
from jaxrl.agents.schedules import follow
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.distributions import Gaussian, TanhGaussian, apply_temperature, make_head
from jaxrl.envs.host import gymnasium_spec
from jaxrl.errors import ActorError, SettingsError
from jaxrl.nn import ActorCritic, QNetwork
from jaxrl.strategies.host_actors import HostActors, resolve_exploration
from jaxrl.training.actors.pool import ParameterServer
from jaxrl.training.actors.stats import ActorStats, HangDetector
from jaxrl.training.settings import unused_settings
from jaxrl.training.storage.leaves import state_digest

QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True}


def train(strategy: jaxrl.Strategy, max_opts: int, **settings: Any) -> tuple[Any, dict[str, Any]]:
    memory = jaxrl.MemoryRecorder()
    result = jaxrl.Trainer(strategy, max_opts=max_opts, recorders=[memory], **{**QUIET, **settings}).train()
    return result, [row for row in memory.rows if row["kind"] == "train"][-1]


def test_every_transition_reaches_the_buffer_once_and_none_crosses_an_end():
    result, row = train(counted(), 40)
    items = jax.tree.map(np.asarray, result.state.buffer.items)
    pushed = row["env_steps"]
    assert pushed == 32 + 40 * 4
    assert len(items.reward) == 128
    went_on = items.discount > 0
    np.testing.assert_array_equal(items.next_obs[:, 0], items.obs[:, 0] + 1)
    np.testing.assert_array_equal(items.next_obs[:, 1], items.obs[:, 1])
    np.testing.assert_array_equal(items.reward, items.next_obs[:, 0])
    # Only odd episodes terminate, at 3; truncation at 5 goes on in worth.
    np.testing.assert_array_equal(went_on, ~((items.obs[:, 1] % 2 == 1) & (items.next_obs[:, 0] == 3)))
    assert (items.next_obs[:, 0] == 5).any()


def test_what_is_counted_is_what_was_taken_up_in_the_whole_run_however_it_goes_on(tmp_path: Path):
    memory, run = jaxrl.MemoryRecorder(), {"run_dir": str(tmp_path), **QUIET}
    trainer = jaxrl.Trainer(counted(), max_opts=20, recorders=[memory], **run)
    first = trainer.train().summary
    (row,) = (row for row in memory.rows if row["kind"] == "train")
    assert row["actor0/env_steps"] == row["actor1/env_steps"] == 40
    assert row["episodes"] == row["actor0/episodes"] + row["actor1/episodes"] == row["terminated"] + row["truncated"]
    assert (row["actor0/episode_return_min"], row["actor0/episode_return_max"]) == (6, 15)
    assert {"learner_waits", "actors_wait"} < row.keys()
    assert (first["staleness"], first["staleness_max"]) == ((2 + 4 * 8) / 10, 4)
    in_memory = trainer.train(max_opts=40).summary
    resumed = jaxrl.Trainer(counted(), max_opts=60, resume=True, recorders=[], **run).train().summary
    assert json.loads((tmp_path / "metadata.json").read_text())["actors"] == resumed["actors"]
    for number in range(2):
        told = [summary["actors"][number] for summary in (first, in_memory, resumed)]
        # Of two environments each, 8 steps of the warm-up and 10 rounds of 2; then 10 more rounds, each time.
        assert [one["env_steps"] for one in told] == [56, 96, 136]
        assert told[0]["episodes"] < told[1]["episodes"] < told[2]["episodes"]
        assert told[0]["waited_s"] < told[1]["waited_s"] < told[2]["waited_s"]


def test_actors_wait_at_most_all_the_time_also_during_an_evaluation(monkeypatch: pytest.MonkeyPatch):
    """A row that is made while actors wait has its part of that wait, and the next row the rest."""
    clock, passed, memory = time.perf_counter, [0.0], jaxrl.MemoryRecorder()
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    def evaluate(params: Any, key: Any) -> Any:
        jax.block_until_ready(jax.random.normal(key, (1_000, 1_000)))  # actors have taken their steps meanwhile
        passed[0] += 1_000.0
        return jaxrl.Evaluation(np.zeros(1), np.ones(1), np.ones(1, bool))

    settings = {**QUIET, "eval_interval": 4, "eval_episodes": 1, "record_interval": 2, "recorders": [memory]}
    jaxrl.Trainer(with_settings(counted(), max_lag=0), max_opts=16, evaluator=evaluate, **settings).train()
    waits = [row["actors_wait"] for row in memory.rows if row["kind"] == "train"]
    assert max(waits) <= 1.0
    assert max(waits) > 0.9  # the evaluation is in the row of its step


def test_what_environments_tell_reaches_the_rows_of_the_rounds_that_were_learnt_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MAKE, "make", Telling)
    memory = jaxrl.MemoryRecorder()
    jaxrl.Trainer(counted(), max_opts=8, record_interval=4, recorders=[memory], **QUIET).train()
    rows = [row for row in memory.rows if row["kind"] == "train"]
    # Of 32 steps of warm-up, each of the four environments has taken 8: all of an episode of 3 and one of 5 steps. Then
    # 16 steps a row: an episode of 3 steps, and the first step of the next one; its other 4 steps.
    assert [row["info/left"] for row in rows] == [(9 + 8 + 7 + 9) / 4, (8 + 7 + 6 + 5) / 4]
    assert [(row["info/left_min"], row["info/left_max"]) for row in rows] == [(7, 9), (5, 8)]
    assert [row["info/parts/half_max"] for row in rows] == [4.5, 4]
    assert [row["info/won"] for row in rows] == [1, None]  # told by odd episodes, at their end
    assert [row["episode_steps"] for row in rows] == [3, 5]  # of whole episodes, at their end
    assert "info/word" not in rows[0]


def test_what_environments_tell_at_a_step_that_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """It is the second of four training steps; it cuts its episode, and the next one begins."""
    monkeypatch.setitem(MAKE, "make", partial(Telling, bad_step=10))
    _, row = train(counted(), 4)
    assert row["invalid_steps"] == 4
    assert row["info/left"] == pytest.approx((9 + 9 + 8) / 3)
    assert (row["episode_steps"], row["episode_length"]) == (None, 2)


# The second takes up new parameters after 6, 12 and 18 optimisation steps only.
@pytest.mark.parametrize(
    ("max_lag", "sync_interval", "staleness"), [(2, 1, [0, 2] + [4] * 8), (0, 6, [0, 2, 4] * 3 + [0])]
)
def test_parameters_are_as_old_as_said_to_the_step(max_lag: int, sync_interval: int, staleness: list[int]):
    strategy = with_settings(counted(), max_lag=max_lag, sync_interval=sync_interval)
    memory = jaxrl.MemoryRecorder()
    jaxrl.Trainer(strategy, max_opts=20, record_interval=2, recorders=[memory], **QUIET).train()
    assert [row["staleness"] for row in memory.rows if row["kind"] == "train"] == staleness


MAKERS = {
    "replay in lockstep, of several steps": partial(
        replaying, processor=jaxrl.n_step(3, discount=0.5), max_lag=0, actors=1
    ),
    "replay in sequences of an actor and its critics": partial(
        replaying, agent=jaxrl.sac(features=(8,), core="gru", core_features=4, burn_in=1, sequence=3), max_lag=3
    ),
    "rollouts with memory": partial(rollouts, agent=jaxrl.ppo(features=(8,), core="gru", core_features=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_settings_and_seed_make_the_same_bits(name: str):
    strategy = MAKERS[name](counter())
    digests = {state_digest(train(strategy, 24)[0].state) for _ in range(3)}
    assert len(digests) == 1


def test_with_statistics_and_a_lag_the_same_bits_are_made_whatever_the_threads_do():
    strategy, state, _ = shared_state(2, 2, 6, 3)
    assert {state_digest(train(strategy, 24)[0].state) for _ in range(2)} == {state_digest(state)}


def test_actors_merge_the_statistics_of_each_of_their_rounds_once():
    """Parameters stay those of the end of the warm-up, so that all statistics since are merged by the actors."""
    strategy, merges = with_settings(shared(3), max_lag=0, sync_interval=10**6), list[int]()
    fns = strategy.actor_fns
    assert fns is not None

    def merge_stats(*stats: Any) -> Any:
        jax.debug.callback(lambda: merges.append(1))
        return fns.merge_stats(*stats)

    train(strategy._replace(actor_fns=fns._replace(merge_stats=merge_stats)), 24)
    jax.effects_barrier()
    rounds = 24 // strategy.opt_steps_per_step
    assert len(merges) == 2 * (rounds - 1)  # by each of two actors, before each round but the first


def taken_by_one(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what an environment that counts shows, pays, and its discounted sums so far, in so many steps."""
    env, rewards, sums, total = Counting(), [], [], 0.0
    seen = [env.reset()[0]]
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(5)
        total = DISCOUNT * total + reward
        rewards.append(reward)
        sums.append(total)
        ended = terminated or truncated
        seen.append(env.reset()[0] if ended else obs)
        total = 0.0 if ended else total
    return np.array(seen, np.float32), np.array(rewards), np.array(sums)


@pytest.mark.every_day("2-2-6-3")
@pytest.mark.parametrize(("actors", "lag", "sync", "n"), [(1, 2, 6, 1), (2, 1, 1, 1), (2, 2, 6, 3)])
def test_statistics_are_of_all_that_was_taken_up_and_replay_keeps_what_environments_gave(
    actors: int, lag: int, sync: int, n: int
):
    """All environments show and pay the same, so that the means and deviations of all are those of one.

    Of several actors each knows its own steps, and those of the others as far as they were taken up.
    """
    strategy, state, steps = shared_state(actors, lag, sync, n)
    envs, (seen, rewards, sums) = 2 * actors, taken_by_one(steps)
    ((of_obs,), *others) = strategy.policy.params(state).processor
    assert others == [(), ()]  # a policy sees no rewards, and its parameters have none of their statistics
    of_rewards = state.processor[1].moments
    assert (float(of_obs.count), float(of_rewards.count)) == (envs * (steps + 1), envs * steps)
    for moments, values in ((of_obs, seen), (of_rewards, sums)):
        np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-5)
        np.testing.assert_allclose(moments.variance, values.var(0), rtol=1e-4)
    if actors > 1:
        return
    items = jax.tree.map(np.asarray, state.buffer.items)
    np.testing.assert_array_equal(items.obs[: steps * envs].reshape(-1, 2), np.repeat(seen[:-1], envs, axis=0))
    np.testing.assert_array_equal(items.reward[: steps * envs].reshape(-1), np.repeat(rewards, envs))


def test_a_first_observation_that_is_not_finite_is_no_part_of_the_statistics(monkeypatch: pytest.MonkeyPatch):
    """In each of four environments that of the fourth episode is NaN: the next episode begins at once."""
    monkeypatch.setitem(MAKE, "make", partial(Counting, bad_reset=4))
    strategy, _, steps = shared_state(2, 2, 6, 3)
    result, row = train(strategy, 24)
    ((moments,), *_) = strategy.policy.params(result.state).processor
    assert (float(moments.count), row["invalid_steps"]) == (4 * steps, 4)
    assert np.isfinite(moments.mean).all()


@pytest.mark.slow
def test_what_was_learnt_of_observations_and_rewards_is_taken_up_again_by_a_run_that_goes_on(tmp_path: Path):
    normalised = jaxrl.chain(
        jaxrl.normalise_obs(), jaxrl.normalise_reward(DISCOUNT), jaxrl.n_step(1, discount=DISCOUNT)
    )
    strategy, settings = rollouts(counter(), processor=normalised), {**QUIET, "run_dir": str(tmp_path)}
    counts = []
    for max_opts in (8, 16):
        state = jaxrl.Trainer(strategy, max_opts=max_opts, resume=max_opts > 8, **settings).train().state
        of_obs = strategy.policy.params(state).processor[0][0]
        counts.append((float(of_obs.count), float(state.processor[1].moments.count)))
    # Two rounds of 8 steps in four environments, and their first observations: once at each beginning.
    assert counts == [(4 * 17, 4 * 16), (2 * 4 * 17, 2 * 4 * 16)]
    policy = jaxrl.load_policy(tmp_path, strategy, step="latest")
    assert float(policy.params.processor[0][0].count) == 2 * 4 * 17


@pytest.mark.every_day("True")
@pytest.mark.parametrize("initialised", [False, True])
def test_a_warm_up_that_was_stopped_is_in_the_statistics_of_the_resumed_run_once(
    initialised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a run that is initialised from another, they go on from those of the other."""
    handle = jaxrl.Interrupt()

    class Stopping(Counting):
        def step(self, action: Any) -> Any:
            if self.total == 5:
                handle.stop()
            return super().step(action)

    strategy, whole = with_settings(shared(3), max_lag=0), str(tmp_path / "whole")
    counts = np.array(moments_of(strategy, jaxrl.Trainer(strategy, max_opts=24, run_dir=whole, **QUIET).train().state))
    settings = {**QUIET, "run_dir": str(tmp_path / "stopped"), "init_from": whole if initialised else None}
    monkeypatch.setitem(MAKE, "make", Stopping)
    stopped = jaxrl.Trainer(strategy, max_opts=24, interrupt=handle, **settings).train()
    assert (stopped.summary["opt_steps"], moments_of(strategy, stopped.state)) == (0, [*(initialised * counts)])
    monkeypatch.setitem(MAKE, "make", Counting)
    resumed = jaxrl.Trainer(strategy, max_opts=24, resume=True, **settings).train()
    assert moments_of(strategy, resumed.state) == [*((1 + initialised) * counts)]


def test_the_rounds_by_which_actors_fill_replay_anew_are_in_no_statistics(tmp_path: Path):
    strategy, settings = shared(3), {**QUIET, "run_dir": str(tmp_path), "save_replay": False}
    before = jaxrl.Trainer(strategy, max_opts=24, **settings).train().state
    after = jaxrl.Trainer(strategy, max_opts=28, resume=True, **settings).train().state
    more = np.subtract(moments_of(strategy, after), moments_of(strategy, before))
    assert more.tolist() == [2 * strategy.env_steps_per_step] * 2


def moments_of(strategy: jaxrl.Strategy, state: Any) -> list[float]:
    """Return how many observations and rewards the statistics have seen."""
    assert strategy.policy is not None
    return [float(strategy.policy.params(state).processor[0][0].count), float(state.processor[1].moments.count)]


@pytest.mark.slow
def test_actors_send_the_memories_that_critics_have_of_their_episodes() -> None:
    """At a learning rate of 0, those after a step are what the learner's own critics make of the step."""
    agent = jaxrl.sac(features=(8,), core="gru", core_features=4, burn_in=1, sequence=3, lr=0.0, policy_lr=0.0)
    strategy = replaying(counter(), agent=agent)
    state = train(strategy, 8)[0].state
    written = strategy.warmup_env_steps + 8 // strategy.opt_steps_per_step * strategy.env_steps_per_step
    items = jax.tree.map(lambda x: x[: min(written, 128)], state.buffer.items)
    bound = agent(strategy.policy.spec)
    after = jax.jit(lambda s, obs: bound.act(s, obs, None, np.uint32(0), "exploit")[1])(state.agent, items.obs)
    for made, kept in zip(jax.tree.leaves(after["memory"]), jax.tree.leaves(items.next_obs.memory), strict=True):
        np.testing.assert_allclose(made, kept, rtol=1e-4, atol=1e-6)
    assert all(np.abs(x).max() > 0.01 for x in jax.tree.leaves(items.obs.memory))
    assert 0 < np.mean(items.is_first) < 1


class Diary(Counting):
    """Keeps what it was shown and told, in order."""

    kept: ClassVar[list[tuple[np.ndarray, int]]] = []

    def step(self, action: Any) -> Any:
        self.kept.append((self._obs().astype(np.float32) / 5, int(action) - 5))
        obs, *rest = super().step(action)
        return obs / 5, *rest

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs / 5, info


def test_ratios_are_those_to_the_parameters_that_acted_as_many_rounds_ago_as_said():
    Diary.kept.clear()
    lag = 2
    env = jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Diary)
    agent, config = jaxrl.ppo(features=(8,), lr=0.02), jaxrl.ActorsConfig(actors=1, max_lag=lag)
    strategy = jaxrl.on_policy(env, agent, num_envs=1, rollout=8, epochs=1, minibatches=1, actors=config)
    memory, hooks = jaxrl.MemoryRecorder(), jaxrl.Hooks(start=lambda trainer: params.append(now(trainer)))
    params: list[Any] = []
    now = lambda trainer: jax.tree.map(np.array, trainer.state.agent.params)
    trainer = jaxrl.Trainer(strategy, max_opts=6, record_interval=1, recorders=[memory], hooks=hooks, **QUIET)
    params.extend(now(trainer) for _ in trainer)
    network = ActorCritic(strategy.env.spec.observation_space, 2, features=(8,))

    @jax.jit
    def log_prob(params: Any, obs: Any, action: Any) -> Any:
        return jax.nn.log_softmax(network.apply(params, obs)[0])[np.arange(8), action]

    told = [row for row in memory.rows if row["kind"] == "train"]
    assert len(Diary.kept) == 8 * len(told)  # no step is taken that nobody learns from
    for t, row in enumerate(told):
        obs, action = (np.stack(x) for x in zip(*Diary.kept[8 * t : 8 * t + 8], strict=True))
        new, behaviour = log_prob(params[t], obs, action), log_prob(params[max(0, t - lag)], obs, action)
        ratio = np.exp(np.float64(new) - np.float64(behaviour))
        assert (np.abs(ratio - 1).max() > 0.01) == (t > 0)
        np.testing.assert_allclose(row["approx_kl"], (ratio - 1 - np.log(ratio)).mean(), rtol=1e-2, atol=1e-6)
        np.testing.assert_allclose(row["clip_fraction"], (np.abs(ratio - 1) > 0.2).mean(), atol=1e-6)
    assert len(told) == 6
    assert told[-1]["staleness"] == lag


def test_unset_the_lag_is_one_of_rollouts_and_two_of_replay():
    settings = lambda strategy: strategy.info.settings["max_lag"]
    assert (settings(replaying(counter())), settings(replaying(counter(), max_lag=3))) == (2, 3)
    config = parse(["ppo", "--env", "gymnasium:CartPole-v1"]).config
    assert (config.max_lag, settings(build("ppo", config))) == (None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_values_of_a_clock_that_only_cuts_are_those_of_the_closed_form(lag: int):
    toy, updates = clock_truncates(0.8), 2_000
    always_random = {"epsilon_start": 1.0, "epsilon_end": 1.0}
    agent = jaxrl.dqn(lr=1e-2, lr_decay=updates, features=(16,), target_interval=25, loss="squared", **always_random)
    config, sizes = jaxrl.ActorsConfig(actors=2, max_lag=lag, send=50), {"num_envs": 4, "opt_interval": 8}
    parts = {"buffer": jaxrl.uniform(512, 32), "processor": jaxrl.n_step(1, 0.8), "actors": config, **sizes}
    strategy = jaxrl.off_policy(toy.env, agent, warmup=512, **parts)
    result, _ = train(strategy, updates)
    network = QNetwork(toy.env.spec.observation_space, 2, features=(16,))
    values = np.asarray(network.apply(result.state.agent.params, toy.obs))
    np.testing.assert_allclose(values, toy.values, atol=1e-2)


@pytest.mark.slow
def test_v_trace_learns_the_values_of_a_clock_that_only_cuts_from_old_parameters():
    toy, updates = clock_truncates(0.8), 2_000
    agent = jaxrl.impala(lr=1e-2, lr_decay=updates, features=(16,), ent_coef=0.0)
    config = jaxrl.ActorsConfig(actors=2, max_lag=3)
    sizes = {"num_envs": 8, "rollout": 7, "epochs": 1, "minibatches": 1}
    strategy = jaxrl.on_policy(toy.env, agent, processor=jaxrl.one_step(0.8), actors=config, **sizes)
    result, row = train(strategy, updates)
    assert row["staleness"] == 3
    network = ActorCritic(toy.env.spec.observation_space, 2, features=(16,))
    value = np.asarray(network.apply(result.state.agent.params, toy.obs)[1])
    np.testing.assert_allclose(value, toy.values[:, 0], atol=1e-2)


def test_one_number_spreads_exploration_over_the_actors_as_ape_x_does():
    host_actors = lambda *numbers, actors=3: HostActors(
        counter(), jaxrl.ActorsConfig(actors, exploration=numbers), actors
    )
    box = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Box(-1.0, 1.0, (1,)))
    spread = resolve_exploration(host_actors(0.4), jaxrl.td3()(box))
    assert [round(x["noise"], 6) for x in spread] == [0.4, round(0.4**4.5, 6), round(0.4**8, 6)]
    agent = jaxrl.dqn()(box._replace(action_space=jaxrl.Discrete(2)))
    both = [(x["epsilon_start"], x["epsilon_end"]) for x in resolve_exploration(host_actors(0.1, 0.2, 0.3), agent)]
    assert both == [(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]
    assert resolve_exploration(host_actors(), agent) == [{}, {}, {}]
    of_sac = resolve_exploration(host_actors(0.4), jaxrl.sac()(box))
    assert [round(x["exploration"], 6) for x in of_sac] == [0.4, round(0.4**4.5, 6), round(0.4**8, 6)]
    with pytest.raises(SettingsError, match="mine has no setting by which it explores; leave exploration unset"):
        resolve_exploration(host_actors(0.1), agent._replace(name="mine", info=agent.info._replace(exploration=())))
    with pytest.raises(SettingsError, match=r"exploration sets agent\.noise of each actor, which also"):
        resolve_exploration(host_actors(0.1), follow(jaxrl.td3(noise=jaxrl.linear(0.5, 0.1, 100))(box)))


class Own(NamedTuple):
    """The only hyperparameter of `showing`."""

    own: Any


class Bare(NamedTuple):
    """The state of an agent that has nothing but hyperparameters."""

    hyper: Own


def showing(spec: Any) -> Agent:
    """Return an agent whose action is ten times the number by which it explores."""
    chosen = lambda state, obs: jnp.full(obs.shape[0], jnp.round(10 * state.hyper.own), jnp.int32)
    act = lambda state, obs, key, opt_step, mode: (chosen(state, obs), ())
    update = lambda state, batch, key, opt_step: (state, {"loss": jnp.float32(0)}, batch.weight)
    init, info = lambda key: Bare(Own(jnp.float32(0))), AgentInfo(exploration=("own",))
    return Agent("showing", init, act, update, strip=lambda state: state, info=info)


class Noting(Counting):
    """Keep the actions that each actor takes."""

    action_space = gymnasium.spaces.Discrete(11)
    taken: ClassVar[dict[str, list[int]]] = {}

    def step(self, action: Any) -> Any:
        self.taken.setdefault(threading.current_thread().name, []).append(int(action))
        return super().step(action)


def test_each_actor_explores_by_its_number_times_the_schedule_at_the_step_of_its_parameters():
    Noting.taken.clear()
    schedule, env = jaxrl.linear(1.0, 0.5, 10), jaxrl.gymnasium_envs(gymnasium_spec(Noting()), Noting)
    strategy = replaying(env, agent=showing, max_lag=0, exploration=(0.2, 1.0), exploration_schedule=schedule)
    assert strategy.info.settings["exploration_schedule"] == str(schedule) == "linear(1.0,0.5,10)"
    train(strategy, 14)
    # After 8 steps of warm-up, rounds of 2 steps in two environments, with parameters of steps 0, 2, 4, ...
    rounds = {actor: np.reshape(taken[16:], (-1, 4)) for actor, taken in Noting.taken.items()}
    np.testing.assert_array_equal(rounds["actor 0"], np.repeat([[2], [2], [2], [1], [1], [1], [1]], 4, axis=1))
    np.testing.assert_array_equal(rounds["actor 1"], np.repeat([[10], [9], [8], [7], [6], [5], [5]], 4, axis=1))


TWICE = [0.0, math.log(2)]
"""Logits under which one action is twice as likely as the other."""
TO_TWO = {
    "ppo": jaxrl.ppo(make_network=lambda spec, head: Linear(TWICE, beside=0.0)),
    "sac": jaxrl.sac(make_policy=lambda spec, head: Linear(TWICE), features=(2,)),
    "bc": jaxrl.bc(make_network=lambda spec, head: Linear(TWICE)),
    "awac": jaxrl.awac(make_policy=lambda spec, head: Linear(TWICE), features=(2,)),
}


@pytest.mark.every_day("ppo", "sac")
@pytest.mark.parametrize("name", TO_TWO)
def test_a_policy_with_a_distribution_is_drawn_from_at_the_temperature_of_the_actor(name: str):
    agent = TO_TWO[name](jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Discrete(2)))
    state, obs = jax.jit(agent.init)(jax.random.key(1)), np.ones((4000, 1), np.float32)
    noise, act = jax.random.key(2), jax.jit(agent.fns.behave or agent.act, static_argnums=4)

    def drawn_at(temperature: Any) -> tuple[np.ndarray, Any]:
        hot = state._replace(hyper=state.hyper._replace(exploration=temperature))
        return act(hot, obs, noise, np.uint32(0), "explore")

    (one, _), (half, extras), (none, _) = map(drawn_at, np.float32([1.0, 0.5, 0.0]))
    np.testing.assert_array_equal(one, drawn_at(())[0])
    np.testing.assert_allclose([one.mean(), half.mean()], [2 / 3, 4 / 5], atol=0.03)
    assert set(none.tolist()) == {1}
    if name == "ppo":  # what is sent is the log-probability with which the actor chose
        np.testing.assert_allclose(np.exp(extras["log_prob"]), np.where(half, 4 / 5, 1 / 5), rtol=1e-4)


def test_continuous_actions_are_spread_wider_by_the_temperature():
    for squash, of in ((False, Gaussian), (True, TanhGaussian)):
        spec = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Box(-2.0, 2.0, (1,)))
        plain = make_head(spec, squash).distribution(np.float32([[0.5, -1.0]]))
        wide = apply_temperature(plain, np.float32(3.0))
        assert isinstance(wide, of)
        np.testing.assert_allclose(wide.at(np.ones((1, 1))) - wide.mode(), 3 * math.exp(-1.0), rtol=1e-5)
        np.testing.assert_array_equal(wide.mode(), plain.mode())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"send": 0}, "send is 0; expected a whole number of at least 1"),
        ({"max_lag": -1}, "max_lag is -1; expected a whole number of at least 0"),
        ({"exploration": (0.1, 0.2, 0.3)}, "exploration has 3 numbers for 2 actors; give one, or one an actor"),
        ({"exploration": 0.4}, "exploration is 0.4; expected a tuple of one number, or of one an actor"),
        ({"exploration": (0.4, -0.5)}, "exploration is -0.5; expected a number from 0 to 1e"),
        ({"exploration": (math.nan,)}, "exploration is nan; expected a number from 0"),
        ({"exploration": ("a",)}, "exploration is 'a'; expected a number from 0"),
        ({"exploration": (5.0,)}, "exploration is 5.0; expected a number from 0 to 1$"),
        ({"exploration_schedule": "linear(1,0.1,9)"}, "what exploration is multiplied by, which is unset"),
        ({"exploration": (0.1,), "exploration_schedule": "fast"}, "cannot read the schedule 'fast'"),
    ],
)
def test_settings_that_do_not_fit_actors_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(SettingsError, match=said):
        replaying(counter(), **settings)


def test_send_is_read_with_replay_alone_so_that_a_run_with_rollouts_is_resumed_with_another():
    for strategy, is_read in ((replaying(counter(), send=2), True), (rollouts(counter(), send=2), False)):
        settings = strategy.info.settings
        assert settings is not None
        assert settings["send"] == 2
        assert ("send" not in unused_settings(settings)) == is_read


def test_an_environment_that_does_not_suit_the_agent_is_refused():
    with pytest.raises(SettingsError, match="dqn takes discrete actions, but gymnasium:Pendulum-v1 has Box actions"):
        replaying(jaxrl.make_env("gymnasium:Pendulum-v1"))


def test_statistics_that_cannot_be_merged_are_refused():
    normalise = jaxrl.normalise_obs()
    assert normalise.stats
    alone = normalise._replace(stats=normalise.stats._replace(merge=None))
    with pytest.raises(SettingsError, match="cannot be shared by actors; give its StatsFns a merge"):
        replaying(counter(), processor=jaxrl.chain(alone, jaxrl.one_step()))


# --- the end ----------------------------------------------------------------------------------------------------


class Spinning(Counting):
    """Comes to no end in its 40th step, within Python, whatever `Exception` it meets."""

    def step(self, action: Any) -> Any:
        while self.total == 40:
            with contextlib.suppress(Exception):
                time.sleep(0.001)
        return super().step(action)


def troubled(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> jaxrl.Strategy:
    """Return actors that may be late by a second, of which the first has environments of another kind."""
    first = lambda: threading.current_thread().name == "actor 0"
    monkeypatch.setitem(MAKE, "make", lambda: make() if first() else Counting())
    return with_settings(counted(), actor_timeout=1.0)


def test_an_actor_that_raises_stops_the_run_with_a_checkpoint_and_its_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    strategy = troubled(monkeypatch, partial(Counting, raise_step=40))
    trainer = jaxrl.Trainer(strategy, max_opts=4_000, run_dir=str(tmp_path / "run"), **QUIET)
    with pytest.raises(ActorError, match=r"^actor 0 failed: RuntimeError: the motor is on fire$") as caught:
        trainer.train()
    assert caught.value.exit_code == 1
    (event,) = events(tmp_path / "run", "actor")
    assert "toys_gymnasium.py" in event["traceback"]
    assert "raise RuntimeError" in event["traceback"]
    saved = trainer.ledger.counters(trainer.schedule)["opt_steps"]
    assert (tmp_path / "run" / "checkpoints" / str(saved) / "manifest.json").exists()
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert metadata["status"] == "actor"
    # It goes on from there, in new environments, and says so.
    monkeypatch.setitem(MAKE, "make", Counting)
    more = jaxrl.Trainer(strategy, max_opts=saved + 8, run_dir=str(tmp_path / "run"), resume=True, **QUIET)
    assert more.train().summary["opt_steps"] == saved + 8
    (event,) = events(tmp_path / "run", "resume")
    assert event["message"].startswith(f"resumed at {saved} optimisation steps with environments that start anew")


def slow_act(monkeypatch: pytest.MonkeyPatch, **waits: Callable[[], Any]) -> None:
    """Let the first choice of actions wait in the threads named, as it does for a compilation."""

    usual = jaxrl.training.actors.pool.programs

    def programs(actor_fns: Any, run: Any) -> Any:
        made = usual(actor_fns, run)

        def first(*args: Any) -> Any:
            waits.pop(threading.current_thread().name.replace(" ", ""), lambda: None)()
            return made.first(*args)

        return made._replace(first=first)

    monkeypatch.setattr(jaxrl.training.actors.pool, "programs", programs)


@pytest.mark.slow
def test_compiling_what_an_actor_does_is_no_hanging(monkeypatch: pytest.MonkeyPatch):
    slow_act(monkeypatch, actor0=lambda: time.sleep(4.0))
    result, _ = train(replaying(counter(), actors=1, actor_timeout=2.0), 4)
    assert result.summary["opt_steps"] == 4


def test_an_actor_is_late_once_one_call_has_been_watched_for_too_long():
    stats = [ActorStats(), ActorStats(), ActorStats()]
    watch, (first, second, third) = HangDetector(stats), stats
    with first.calling(2.5), second.calling(2.5), third.calling(math.inf):
        for seconds in (0.5, 1.0, 1.0):  # the first look only sees that there is a call
            assert watch.late(seconds) == {}
        with second.calling(2.5):  # another call
            # That the process stood still for an hour is not the actor's fault: it counts as a second.
            assert watch.late(3600.0) == {0: 2.5}
            assert watch.late(1.0) == {0: 2.5}
    assert watch.late(1.0) == {}


class Stuck(Counting):
    """Hangs in the first actor until it is let go."""

    go_on = threading.Event()

    def step(self, action: Any) -> Any:
        if self.total == 40 and threading.current_thread().name == "actor 0":
            self.go_on.wait()
        return super().step(action)


@pytest.mark.slow
def test_of_a_run_that_hangs_only_the_thread_that_is_stuck_is_left(monkeypatch: pytest.MonkeyPatch):
    Stuck.go_on.clear()
    before = set(threading.enumerate())
    # The other actor is still at work when the run no longer waits for the stuck one.
    closed = threading.Event()
    monkeypatch.setattr(jaxrl.training.actors.pool, "PATIENCE_S", 0.2)
    monkeypatch.setattr(ParameterServer, "close", lambda self, close=ParameterServer.close: (close(self), closed.set()))
    slow_act(monkeypatch, actor1=lambda: (closed.wait(), time.sleep(2.0)))
    with pytest.raises(ActorError, match="actor 0: a call of"):
        train(replaying(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Stuck), actor_timeout=0.5, max_lag=40), 400)
    (left,) = set(threading.enumerate()) - before
    assert left.name == "actor 0"
    # Let go, it closes its environments and ends by itself.
    Stuck.go_on.set()
    left.join(60)
    assert not left.is_alive()


def test_an_actor_that_hangs_is_named_and_a_loop_without_end_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = set(threading.enumerate())
    monkeypatch.setattr(jaxrl.training.actors.pool, "PATIENCE_S", 0.2)
    strategy = troubled(monkeypatch, Spinning)
    said = r"^actor 0: a call of gymnasium:Counting takes more than 1 s; it hangs, or raise actor_timeout$"
    with pytest.raises(ActorError, match=said):
        train(strategy, 4_000, run_dir=str(tmp_path))
    assert set(threading.enumerate()) <= before
    (event,) = events(tmp_path, "actor")
    assert "test_actors.py" in event["traceback"]


class Opened(Counting):
    """Takes note of how many are being opened at once."""

    lock, opening, most = threading.Lock(), 0, 0

    def __init__(self) -> None:
        with Opened.lock:
            Opened.opening += 1
            Opened.most = max(Opened.most, Opened.opening)
        time.sleep(0.05)  # long enough for the others to come
        with Opened.lock:
            Opened.opening -= 1
        super().__init__()


@pytest.mark.slow
@pytest.mark.parametrize("open_in_turn", [True, False])
def test_environments_are_opened_one_at_a_time_where_that_is_asked(open_in_turn: bool):
    Opened.most = 0
    env = jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Opened)
    train(replaying(env, actors=4, open_in_turn=open_in_turn), 4)
    assert (Opened.most == 1) is open_in_turn


@pytest.mark.slow
def test_a_learner_that_waits_can_be_stopped(tmp_path: Path):
    handle = jaxrl.Interrupt()

    class Stopping(Counting):
        def step(self, action: Any) -> Any:
            if self.total == 40:
                handle.stop()
                time.sleep(1e6)
            return super().step(action)

    strategy = replaying(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), Stopping), actors=1)
    trainer = jaxrl.Trainer(strategy, max_opts=4_000, run_dir=str(tmp_path / "run"), interrupt=handle, **QUIET)
    assert trainer.train().summary["stop"] == "handle"
    assert (tmp_path / "run" / "checkpoints" / str(trainer.ledger.t * 2) / "manifest.json").exists()
