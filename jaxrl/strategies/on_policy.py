"""On-policy training: collect a rollout, prepare it, and learn from it for some epochs, in one pure step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.agents.returns import last_steps
from jaxrl.buffers.dataset import Dataset
from jaxrl.envs.base import Env, VecEnvState
from jaxrl.envs.host import HostEnv
from jaxrl.envs.resets import resets_note
from jaxrl.errors import SettingsError, check_count
from jaxrl.metrics import Metrics, Total
from jaxrl.parsing import as_int
from jaxrl.processors.base import Processor
from jaxrl.registry import algorithm_names, defaults_for, join_names
from jaxrl.shards import shard_key
from jaxrl.strategies import guard, interaction
from jaxrl.strategies.base import CollectInfo, ComposedStep, LearnerState, StateFns, Strategy, StrategyInfo, repeat
from jaxrl.strategies.demos import RolloutDemos, custom_parts, note_of_demos, rollout_demos, settings_of_demos
from jaxrl.strategies.guard import Health
from jaxrl.strategies.host_actors import ActorsConfig, make_shard_envs, settings_of_actors, split_env, with_actors
from jaxrl.strategies.interaction import Collector, EnvLoopState
from jaxrl.strategies.policy import make_policy
from jaxrl.strategies.sharded import sharded
from jaxrl.strategies.teacher import TrainedPolicy, carry_teacher, make_teacher, settings_of_teacher
from jaxrl.trees import Array, Key, PyTree, tree_where
from jaxrl.types import Batch, Rollout, Transition
from jaxrl.xla.packing import make_gather
from jaxrl.xla.shuffle import random_orders


class OnPolicyState(NamedTuple):
    """Complete state of a run after an iteration; rollouts are not kept."""

    key: Key
    """Stream of iterations: folded with the iteration's number, never advanced."""
    agent: PyTree
    env: VecEnvState
    processor: PyTree
    health: Health
    demos: PyTree = ()
    """Demonstrations, see `RolloutDemos.init`; constant. `()` without any."""


State = TypeVar("State", bound=LearnerState)

ROLLOUT_SETTINGS = ("rollout", "epochs", "minibatches")
"""Settings of the minibatch schedule."""
MAX_ROLLOUT_STEPS = 2**31 - 1
"""Largest number of steps in a rollout; their indices are int32."""


class MinibatchSchedule(NamedTuple):
    """Size of rollouts, and their division into epochs and minibatches."""

    agent: Agent
    num_envs: int
    rollout: int
    """Vector steps per iteration."""
    epochs: int
    minibatches: int
    demos: RolloutDemos | None = None

    @property
    def num_items(self) -> int:
        """Number of items that are shuffled: steps, or environments if the agent has a memory."""
        # A memory is carried from step to step, so the sequence of an environment must stay intact.
        return self.num_envs if self.agent.memory is not None else self.rollout * self.num_envs

    @property
    def updates(self) -> int:
        """Optimisation steps per iteration."""
        return self.epochs * self.minibatches


def on_policy(
    env: Env | HostEnv,
    agent: AgentMaker,
    *,
    processor: Processor | None = None,
    num_envs: int | None = None,
    rollout: int | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
    actors: ActorsConfig | None = None,
    resets: str = "auto",
    stagger: bool | None = None,
    shards: int = 1,
    teacher: TrainedPolicy | None = None,
    demos: Dataset | None = None,
) -> Strategy:
    """Compose on-policy training, as for PPO.

    An iteration takes `rollout` steps in every environment and `epochs * minibatches` optimisation steps on them. Each
    epoch uses every step once, in a new order. An agent with a memory learns from whole sequences, so its minibatches
    consist of environments.

    Args:
      env: one environment, of which `num_envs` copies run in parallel.
      agent: as returned by `jaxrl.ppo(...)`, `a2c`, `reinforce`, `impala`, `pqn` or `reppo`.
      processor: turns steps into one-step transitions, and sets the discount. By default `one_step()`, for all agents
        but `pqn` and `reppo` behind `normalise_reward()`, which makes them insensitive to the scale of rewards.
      num_envs: number of environments `N` (default: 8).
      rollout: steps `T` of each environment per iteration.
      epochs: passes over each rollout.
      minibatches: equal parts of an epoch, one optimisation step each; 1: the whole rollout.
        The default of these three depends on the agent: 128, 4 and 4 for `ppo` and `pqn`; 128, 4 and 16 for `reppo`;
        one update of the whole rollout for `a2c`, `reinforce` and `impala`, which learn worse with several.
      actors: settings of actors, which step `num_envs` environments each on the host; a rollout has those of all. By
        default, an environment in JAX runs on the device, and any other with one actor.
      resets: how episodes start, see `jaxrl.vectorise`; environments on the host always use `fresh`.
      stagger: truncate first episodes after different times, see `jaxrl.vectorise` (default: for `reppo` alone). This
        affects only environments on the device that have a time limit.
      shards: number of parts into which environments and minibatches are divided. A run can use up to as many devices,
        with the same bits on any number of them. Steps are shuffled within a shard.
      teacher: a trained policy to learn from, as `jaxrl.load_policy(...)` returns it, for agents with the setting
        `teacher_coef`. It sees the environment's observations, or its `privileged_state` if that is what it was trained
        on; its actions must be the same.
      demos: demonstrations to imitate, as `jaxrl.load_dataset(...)` returns them, for agents with the setting
        `imitation_coef`: each update draws as many of them as it has steps.

    Raises:
      SettingsError: sizes do not divide (the message has the nearest that do), or the agent does not support the
        spaces, or teacher or demonstrations are of others.
    """
    # On-policy learning tolerates less lag of the actors' parameters than replay, whose default is 2.
    env, host_actors = split_env(env, actors, max_lag=1)
    built = interaction.build_agent(agent, processor, env.spec)
    defaults = defaults_for(built.name, "on_policy")
    num_envs = as_int(defaults["num_envs"] if num_envs is None else num_envs)
    stagger = bool(defaults["stagger"] if stagger is None else stagger)
    # Everything from here on is one shard's; `sharded` at the end combines them.
    vector, shards = make_shard_envs(env, num_envs, host_actors, resets, shards, stagger)
    processor = processor or interaction.make_default_processor(defaults)
    taught = processor
    if teacher is not None:
        taught = carry_teacher(processor, make_teacher(teacher, built, env.spec), env.spec)
    connected, built = interaction.connect(taught, built)
    collector = Collector(vector, connected, built)
    schedule = make_minibatch_schedule(
        collector.agent, collector.processor, vector.num_envs, rollout, epochs, minibatches, shards
    )
    schedule = schedule._replace(demos=rollout_demos(demos, built, processor, env, collector.processor))
    collect_fn, learn_fn = partial(collect, collector, schedule), partial(learn, schedule)
    strategy = Strategy(
        init=partial(_init, collector, schedule.demos),
        step=ComposedStep(collect_fn, learn_fn),
        env_steps_per_step=schedule.rollout * vector.num_envs,
        opt_steps_per_step=schedule.updates,
        env=env,
        policy=make_policy(collector.agent, collector.processor, env.spec),
        info=StrategyInfo(
            settings=interaction.settings_of(
                collector.agent,
                collector.processor,
                env.spec,
                env.settings,
                num_envs=num_envs,
                resets=vector.resets,
                stagger=stagger,
                **settings_of_actors(host_actors),
                **settings_of_schedule(schedule),
                **settings_of_teacher(teacher),
                # Runs without demonstrations have no such settings.
                **({} if demos is None else settings_of_demos(demos)),
                shards=shards,
                custom=(*(() if teacher is None else ("teacher",)), *custom_parts(demos)),
            ),
            notes=(*resets_note(resets, vector.resets), *note_of_demos(demos)),
            bounds_returns=collector.agent.info.bounds_returns,
        ),
        state_fns=StateFns(
            health=guard.get_health,
            reseed=guard.reseed,
            set_hyperparams=partial(_set_hyperparams, collector, schedule.demos),
        ),
    )
    if host_actors is not None:
        # Parameters of actors lag behind, so `behave` records the log-probability of each action at that time.
        behaviour = collector._replace(
            agent=collector.agent._replace(act=collector.agent.fns.behave or collector.agent.act)
        )
        return with_actors(
            strategy, behaviour, host_actors, steps=schedule.rollout, begin=partial(_init, behaviour, schedule.demos)
        )
    return sharded(strategy, shards, ("env", "processor"))


def make_minibatch_schedule(
    agent: Agent,
    processor: Processor,
    num_envs: int,
    rollout: int | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
    shards: int = 1,
) -> MinibatchSchedule:
    """Return the schedule of one of `shards` shards for rollouts of its `num_envs` environments.

    `None` selects the agent's default.

    Raises:
      SettingsError: the agent does not learn from rollouts, or sizes do not divide (the message has the nearest).
    """
    if agent.prepare is None:
        able = join_names(algorithm_names("on_policy"))
        raise SettingsError(f"{agent.name} does not learn on-policy; agents that do: {able}")
    if processor.horizon:
        raise SettingsError("processor: on-policy agents look ahead by themselves; set processor.n_step to 1")
    defaults = defaults_for(agent.name, "on_policy")
    given = {"rollout": rollout, "epochs": epochs, "minibatches": minibatches}
    counts = {name: as_int(defaults[name] if value is None else value) for name, value in given.items()}
    for name, value in counts.items():
        check_count(name, value)
    schedule = MinibatchSchedule(agent, num_envs, **counts)
    if agent.fns.refresh is not None and schedule.epochs == 1:
        raise SettingsError(
            "agent.recompute_advantage is set, but epochs is 1, which leaves nothing to recompute; set epochs above "
            "1, or recompute_advantage to false"
        )
    if schedule.rollout * num_envs > MAX_ROLLOUT_STEPS:
        raise SettingsError(
            f"a rollout of {schedule.rollout} steps in {num_envs * shards} environments has more than "
            f"{MAX_ROLLOUT_STEPS * shards} steps, which 32 bits can number; lower rollout to at most "
            f"{MAX_ROLLOUT_STEPS // num_envs} or num_envs to at most {MAX_ROLLOUT_STEPS // schedule.rollout * shards}"
        )
    what = "steps" if agent.memory is None else "environments"
    check_minibatches(schedule.num_items, schedule.minibatches, what, shards)
    return schedule


def settings_of_schedule(schedule: MinibatchSchedule) -> dict[str, Any]:
    """Return the settings of `schedule`, with the defaults filled in."""
    return {name: getattr(schedule, name) for name in ROLLOUT_SETTINGS}


def check_minibatches(num_items: int, minibatches: int, what: str, shards: int) -> None:
    """Raise `SettingsError`, naming the nearest settings, unless `minibatches` divides the `num_items` of a shard."""
    if num_items % minibatches == 0:
        return
    below = max(m for m in range(1, minibatches + 1) if num_items % m == 0)
    above = min((m for m in range(minibatches, num_items + 1) if num_items % m == 0), default=below)
    among = f" among {shards} shards" if shards > 1 else ""
    raise SettingsError(
        f"minibatches {minibatches} does not divide the {num_items * shards} {what} of a rollout{among}; "
        f"the nearest that does is {' or '.join(map(str, sorted({below, above})))}"
    )


def _init(collector: Collector, demos: RolloutDemos | None, key: Key) -> OnPolicyState:
    stream, agent_key, env_key = jax.random.split(key, 3)
    agent = collector.agent.init(agent_key)
    loop, _ = interaction.reset_envs(collector, agent, shard_key(env_key))
    demos_state = () if demos is None else demos.init()
    return OnPolicyState(stream, agent, loop.env, loop.processor, guard.init_health(), demos_state)


def _set_hyperparams(collector: Collector, demos: RolloutDemos | None, state: OnPolicyState) -> OnPolicyState:
    """Return `state` with hyperparameters and demonstrations of the settings."""
    tuned: OnPolicyState = interaction.set_hyperparams(collector, state)
    return tuned if demos is None else tuned._replace(demos=demos.init())


# --- the training step ------------------------------------------------------------------------------------------


def collect(
    collector: Collector, schedule: MinibatchSchedule, state: OnPolicyState, key: Key, t: Array
) -> tuple[OnPolicyState, Transition, CollectInfo]:
    """Collect the transitions `[T, N, ...]` of iteration `t`, as `CollectFn`."""
    loop = EnvLoopState(state.env, state.processor)
    loop, items, infos = interaction.take_steps(
        collector, state.agent, _first_opt_step(schedule, t), loop, key, schedule.rollout
    )
    return state._replace(env=loop.env, processor=loop.processor), items, interaction.make_collect_info(infos)


def learn(schedule: MinibatchSchedule, state: State, items: Transition, key: Key, t: Array) -> tuple[State, Metrics]:
    """Run all epochs over the rollout of iteration `t`, transitions `[T, N, ...]`.

    With demonstrations, `state` has the fields that they need as well, see `RolloutDemos.beside`. The key is consumed.
    """
    assert schedule.agent.prepare is not None
    rollout = Rollout(items, last_steps(items))
    # Advantages and targets are of the parameters at the beginning of the iteration, unless the agent has `refresh`.
    prepared = schedule.agent.prepare(state.agent, rollout)  # leaves `[num_items, ...]`
    measured = schedule.agent.fns.measure(prepared) if schedule.agent.fns.measure else {}

    def update(take: Callable[[Array], Batch], carry: tuple[Any, Array], xs: tuple[Array, Key], opt_step: Array) -> Any:
        index, key = xs
        batch = take(index)
        if schedule.demos is not None:
            key, demo_key = jax.random.split(key)
            batch = schedule.demos.beside(state, batch, demo_key)
        return _update(schedule.agent, carry, batch, key, opt_step)

    order_key, update_key = jax.random.split(key)
    # A single minibatch ignores its indices, so nothing is drawn for their order.
    order = random_orders(order_key, schedule.epochs, schedule.num_items if schedule.minibatches > 1 else 1)
    # `[epochs, num_items] -> [epochs * minibatches, items per minibatch]`: one row per update.
    indices = order.reshape(schedule.updates, -1)
    update_keys = jax.random.split(update_key, schedule.updates)
    first = _first_opt_step(schedule, t)
    # The flag of a requested stop is carried over the updates of this rollout alone.
    begun = (state, jnp.bool_(False))
    refresh, minibatches = schedule.agent.fns.refresh, schedule.minibatches
    if refresh is None:
        take = make_minibatches(prepared, minibatches)
        (new_state, _), metrics = repeat(partial(update, take), begun, (indices, update_keys), first, schedule.updates)
    else:
        # Before the first epoch this repeats what `prepare` has done, so that all epochs are one program.
        def epoch(carry: tuple[Any, Array], xs: tuple[Array, Key], number: Array) -> Any:
            take = make_minibatches(refresh(carry[0].agent, rollout, prepared), minibatches)
            return repeat(partial(update, take), carry, xs, first + number * minibatches, minibatches)

        by_epoch = jax.tree.map(lambda x: x.reshape(schedule.epochs, minibatches, *x.shape[1:]), (indices, update_keys))
        (new_state, _), metrics = repeat(epoch, begun, by_epoch, jnp.uint32(0), schedule.epochs)
    return new_state, {**guard.return_bound_metrics(items), **measured, **metrics}


def _first_opt_step(schedule: MinibatchSchedule, t: Array) -> Array:
    return jnp.asarray(t, jnp.uint32) * schedule.updates


def make_minibatches(prepared: PyTree, minibatches: int) -> Callable[[Array], Batch]:
    """Return a function that gathers the batch at indices `[B]` of `prepared` items `[R, ...]`.

    With one minibatch it ignores the indices and returns all items, without a gather.
    """
    num_items = jax.tree.leaves(prepared)[0].shape[0]
    if minibatches == 1:
        return lambda index: Batch(prepared, jnp.arange(num_items, dtype=jnp.int32), jnp.ones(num_items, jnp.float32))
    # The indices of a minibatch are part of a permutation, hence unique, as `make_gather` requires.
    take = make_gather(prepared)
    return lambda index: Batch(take(index), index, jnp.ones(index.shape, jnp.float32))


def _update(
    agent: Agent, carry: tuple[State, Array], batch: Batch, key: Key, opt_step: Array
) -> tuple[tuple[State, Array], Metrics]:
    """Update the agent, unless an earlier update on this rollout requested a stop, as PPO's `target_kl` does."""
    state, stopped = carry
    new, health, metrics, _ = guard.guarded_update(agent, state.agent, state.health, batch, key, opt_step)
    if agent.fns.stop is None:
        return (state._replace(agent=new, health=health), stopped), metrics
    # The update that requests the stop still counts. Later ones run too, since shapes are fixed, but are discarded.
    requested = agent.fns.stop(new, metrics)
    agent_state, health = tree_where(stopped, (state.agent, state.health), (new, health))
    metrics = {name: guard.mask(metric, ~stopped) for name, metric in metrics.items()}
    metrics["stopped_updates"] = Total(stopped.astype(jnp.int32))
    return (state._replace(agent=agent_state, health=health), stopped | requested), metrics
