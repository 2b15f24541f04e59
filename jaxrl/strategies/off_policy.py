"""Off-policy training: act, step the environments, process, push, sample and update, in one pure step."""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl import streams
from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset, summarise
from jaxrl.buffers.hindsight import hindsight
from jaxrl.buffers.prioritised import prioritised
from jaxrl.buffers.uniform import uniform
from jaxrl.envs.base import Env, GoalFn, VecEnvState
from jaxrl.envs.host import HostEnv
from jaxrl.envs.resets import resets_note
from jaxrl.errors import SettingsError, check_type
from jaxrl.metrics import Metrics
from jaxrl.parsing import as_int
from jaxrl.processors.base import Processor
from jaxrl.registry import defaults_for
from jaxrl.shards import shard_key
from jaxrl.strategies import guard, interaction
from jaxrl.strategies.base import (
    BufferRefill,
    CollectInfo,
    ComposedStep,
    ReplayLearnerState,
    StateFns,
    Strategy,
    StrategyInfo,
    fold,
)
from jaxrl.strategies.demos import custom_parts, settings_of_demos, with_demos
from jaxrl.strategies.guard import Health
from jaxrl.strategies.host_actors import ActorsConfig, make_shard_envs, settings_of_actors, split_env, with_actors
from jaxrl.strategies.interaction import Collector, EnvLoopState, StepInfo
from jaxrl.strategies.policy import make_policy
from jaxrl.strategies.replay import (
    UpdateSchedule,
    adapt_buffer,
    check_frames,
    make_replay_transform,
    make_update_schedule,
    min_items,
    note_of_frames,
    optimise,
    set_goal_fn,
)
from jaxrl.strategies.sharded import sharded
from jaxrl.trees import Array, Key, PyTree, row_struct
from jaxrl.types import Transition


class OffPolicyState(NamedTuple):
    """Complete state of a run after an iteration."""

    key: Key
    """Stream of iterations: folded with the iteration's number, never advanced."""
    agent: PyTree
    env: VecEnvState
    processor: PyTree
    buffer: PyTree
    health: Health


State = TypeVar("State", bound=ReplayLearnerState)


class ReplayLearner(NamedTuple):
    """The learning half of `off_policy`, which does not depend on where steps are taken."""

    agent: Agent
    processor: Processor
    buffer: Buffer
    schedule: UpdateSchedule


def off_policy(
    env: Env | HostEnv,
    agent: AgentMaker,
    *,
    buffer: Buffer | None = None,
    processor: Processor | None = None,
    num_envs: int | None = None,
    opt_interval: int | None = None,
    updates: int | None = None,
    warmup: int | None = None,
    random_warmup: bool | None = None,
    actors: ActorsConfig | None = None,
    resets: str = "auto",
    stagger: bool | None = None,
    demos: Dataset | None = None,
    demo_share: float = 0.5,
    shards: int = 1,
) -> Strategy:
    """Compose off-policy training, as for DQN.

    Args:
      env: one environment, of which `num_envs` copies run in parallel.
      agent: as returned by `jaxrl.dqn(...)` or another off-policy agent.
      buffer: as returned by `jaxrl.uniform(...)` or `jaxrl.prioritised(...)`.
      processor: turns steps into transitions.
      num_envs: number of environments `N`.
      opt_interval: environment steps per optimisation step. At or above `num_envs` it must be a multiple of it (several
        vector steps, then one update); below, it must divide it (one vector step, then several updates).
        The defaults of `buffer`, `processor`, `num_envs` and `opt_interval` depend on the agent: `uniform()`,
        `one_step()`, 10 and 10; for `rainbow` prioritised replay of 3 steps; for `sac`, `td3` and `ddpg` a larger
        buffer and batch, and one environment with an update for every step; for `xqc` also normalised rewards, for
        `simba` normalised observations; for `fast_td3` and `fast_sac` those, 128 environments and still larger batches.
      updates: optimisation steps each time one is due (default: redq and droq 20, fast_sac 8, simba, xqc and fast_td3
        2, others 1).
      warmup: environment steps before the first optimisation step, rounded up to at least one batch (default: 1 000).
      random_warmup: whether actions during the warm-up are uniformly random (default), or those of the exploring agent.
      actors: settings of actors, which step `num_envs` environments each on the host. By default, an environment in JAX
        runs on the device, and any other with one actor.
      resets: how episodes start, see `jaxrl.vectorise`; environments on the host always use `fresh`.
      stagger: truncate first episodes after different times, see `jaxrl.vectorise` (default: no). This affects only
        environments on the device that have a time limit.
      demos: demonstrations, as returned by `jaxrl.load_dataset(...)`. They are added to the batches of the buffer,
        which keep their size.
      demo_share: share of `demos` in each batch, above 0 and below 1; shards must divide their number.
      shards: number of parts into which environments, buffer and batches are divided. A run can use up to as many
        devices, with the same bits on any number of them.

    Raises:
      SettingsError: sizes do not divide (the message has the nearest that do), or the agent does not support the
        spaces.
    """
    goal = env.goal if isinstance(env, Env) else None
    # With actors, `env` becomes a placeholder with the same spaces, which the learner never steps.
    env, host_actors = split_env(env, actors, max_lag=2)
    built = interaction.build_agent(agent, processor, env.spec)
    defaults = defaults_for(built.name, "off_policy")
    num_envs = as_int(defaults["num_envs"] if num_envs is None else num_envs)
    opt_interval = as_int(defaults["opt_interval"] if opt_interval is None else opt_interval)
    updates = as_int(defaults["updates"] if updates is None else updates)
    warmup = as_int(defaults["warmup"] if warmup is None else warmup)
    random_warmup = defaults["random_warmup"] if random_warmup is None else random_warmup
    check_type("buffer", buffer, Buffer, "what jaxrl.uniform(...) or another of jaxrl's buffers returns")
    buffer = make_default_buffer(defaults) if buffer is None else buffer
    stagger = bool(defaults["stagger"] if stagger is None else stagger)
    # Everything from here on is one shard's; `sharded` at the end combines them.
    vector, shards = make_shard_envs(env, num_envs, host_actors, resets, shards, stagger, batch_size=buffer.batch_size)
    # Replay holds raw items, which are scaled when they are sampled, see `make_replay_transform`.
    processor = (processor or interaction.make_default_processor(defaults)).for_replay
    processor, built = interaction.connect(processor, built)
    collector = Collector(vector, processor, built)
    # The schedule follows from the buffer of one shard before demonstrations are mixed in: those need no warm-up.
    ring = _make_shard_buffer(buffer, collector, env.spec.name, goal, shards)
    replay_buffer = with_demos(ring, demos, demo_share, collector.agent, collector.processor, env, shards)
    # Planned for all shards together, since settings count the environments of all; each shard then runs its part.
    schedule = make_update_schedule(
        horizon=collector.processor.horizon,
        min_transitions=min_items(ring, vector.num_envs) * shards,
        num_envs=vector.num_envs * shards,
        opt_interval=opt_interval,
        updates=updates,
        warmup=warmup,
        random_warmup=random_warmup,
        iterations_per_send=host_actors.config.send if host_actors else 1,
    )
    learner = ReplayLearner(
        collector.agent, collector.processor, replay_buffer, schedule._replace(num_envs=vector.num_envs)
    )
    collect_fn, learn_fn = partial(collect, collector, learner.schedule), partial(learn, learner)
    capacity = replay_buffer.capacity(learner.schedule.transitions_per_iteration)
    strategy = Strategy(
        init=partial(_init, collector, learner),
        step=ComposedStep(collect_fn, learn_fn),
        env_steps_per_step=learner.schedule.transitions_per_iteration,
        opt_steps_per_step=learner.schedule.updates,
        warmup_env_steps=learner.schedule.warmup_env_steps,
        env=env,
        policy=make_policy(collector.agent, collector.processor, env.spec),
        info=StrategyInfo(
            settings=interaction.settings_of(
                collector.agent,
                collector.processor,
                env.spec,
                env.settings,
                num_envs=num_envs,
                resets=collector.env.resets,
                stagger=stagger,
                **settings_of_actors(host_actors),
                opt_interval=opt_interval,
                updates=updates,
                warmup=warmup,
                random_warmup=random_warmup,
                shards=shards,
                buffer=buffer.settings,
                **settings_of_demos(demos),
                # Without demonstrations the share is its default, since nothing uses it.
                demo_share=0.5 if demos is None else demo_share,
                custom=custom_parts(demos),
            ),
            notes=(
                *schedule.notes(buffer._replace(window=ring.window), schedule.transitions_per_iteration, warmup),
                *note_of_frames(buffer, collector.processor),
                *resets_note(resets, collector.env.resets),
                *_notes_of_demos(demos, replay_buffer.batch_size * shards, buffer.batch_size),
            ),
            bounds_returns=collector.agent.info.bounds_returns,
        ),
        state_fns=StateFns(
            health=guard.get_health,
            reseed=guard.reseed,
            set_hyperparams=partial(_set_hyperparams, collector, learner),
            # A memory depends on the networks also where actions do not.
            warm_up=partial(_rerun_warm_up, collector, learner)
            if not random_warmup or collector.agent.memory is not None
            else None,
            refill=BufferRefill(partial(learner.schedule.blocks, capacity), partial(_refill, collector, learner)),
            capacity=capacity,
        ),
    )
    # Actors also take the steps of the warm-up, and refill the buffer of a resumed run.
    if host_actors is not None:
        return with_actors(
            strategy,
            collector,
            host_actors,
            steps=schedule.vector_steps,
            begin=partial(_begin, collector, learner),
            fill=schedule.warmup_iterations,
            random_fill=random_warmup,
            push=partial(push, learner),
            empty=partial(_reset_buffer, collector, learner),
        )
    return sharded(strategy, shards, ("env", "processor", "buffer"))


def _make_shard_buffer(buffer: Buffer, collector: Collector, name: str, goal: GoalFn | None, shards: int) -> Buffer:
    """Return the buffer of one shard, adapted to the agent and to the `goal` of the environment of this name."""
    _require_replay(collector.agent)
    check_frames(buffer, collector.processor)
    # Divided only once it is known to suit the agent as a whole, so that errors name the numbers that were given.
    adapt_buffer(collector.agent, buffer, collector.env.num_envs * shards)
    ring = set_goal_fn(_divide_buffer(buffer, shards), collector.processor, name, goal)
    return adapt_buffer(collector.agent, ring, collector.env.num_envs)


def _require_replay(agent: Agent) -> None:
    """Raise `SettingsError` if the agent learns from rollouts."""
    if agent.prepare is not None:
        name = agent.name
        raise SettingsError(f"{name} learns on-policy, without a buffer; compose it by on_policy(env, {name}(...))")


def make_default_buffer(settings: Mapping[str, Any]) -> Buffer:
    """Return the default buffer of an agent, from `registry.defaults_for`."""
    parts = dict(settings.get("buffer", {}))
    relabelled = parts.pop("hindsight", 0)
    if parts.pop("prioritised", False):
        made = prioritised(**parts)
    else:
        # A run has settings of prioritised replay also without it, and an algorithm those of the one that it is like.
        others = signature(prioritised).parameters.keys() - signature(uniform).parameters.keys()
        made = uniform(**{name: value for name, value in parts.items() if name not in others})
    return hindsight(made, relabelled) if relabelled else made


def _divide_buffer(buffer: Buffer, shards: int) -> Buffer:
    """Return the buffer of one of `shards` shards; raise `SettingsError` if it cannot be divided."""
    if shards == 1:
        return buffer
    if (buffer.settings or {}).get("memory") == "host":
        raise SettingsError("buffer.memory is host, where replay cannot be divided into shards; leave one of the two")
    if buffer.shard is None:
        raise SettingsError("a buffer of your own cannot be divided into shards; leave shards at 1")
    return buffer.shard(shards)


def _notes_of_demos(demos: Dataset | None, batch: int, ring: int) -> tuple[str, ...]:
    """Return a note on the demonstrations in a `batch`, of which `ring` items are from the buffer."""
    return () if demos is None else (f"{batch - ring} of {batch} transitions in a batch are from {summarise(demos)}",)


# --- the training step ------------------------------------------------------------------------------------------


def collect(
    collector: Collector, schedule: UpdateSchedule, state: OffPolicyState, key: Key, t: Array
) -> tuple[OffPolicyState, Transition, CollectInfo]:
    """Collect the transitions `[T, N, ...]` of iteration `t`, as `CollectFn`."""
    # Schedules of exploration are evaluated once per iteration, at its first optimisation step.
    state, items, infos = _take_steps(
        collector, state, key, schedule.vector_steps, _first_opt_step(schedule, t), random=False
    )
    return state, items, interaction.make_collect_info(infos)


def learn(learner: ReplayLearner, state: State, items: Transition, key: Key, t: Array) -> tuple[State, Metrics]:
    """Push the transitions `[T, N, ...]` of iteration `t`, then sample and update `schedule.updates` times.

    The key is consumed.
    """
    # The warm-up pushed the first `warmup_iterations` blocks; those of training continue the count.
    pushes = learner.schedule.warmup_iterations + jnp.asarray(t, jnp.uint32)
    # Push before sampling: in the other order, XLA keeps the old buffer for the reads and copies it every iteration.
    state = push(learner, state, items, pushes)
    # Statistics include the steps of this iteration, and apply to old and new items alike.
    normalise = make_replay_transform(learner.processor, state.processor)
    first_opt = _first_opt_step(learner.schedule, t)
    updates = learner.schedule.updates
    return optimise(learner.agent, learner.buffer, state, key, pushes + 1, first_opt, updates, normalise)


def push(learner: ReplayLearner, state: State, items: Transition, pushes: Array) -> State:
    """Push the transitions `[T, N, ...]` of an iteration or warm-up round, after `pushes` earlier blocks."""
    # Time-major rows: successive steps of one environment are `N` rows apart, see `UpdateSchedule.lag`.
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), _drop_bounds(learner.agent, items))
    return state._replace(buffer=learner.buffer.push(state.buffer, rows, pushes))


def _drop_bounds(agent: Agent, items: Transition) -> Transition:
    """Return `items` without `is_first` and `is_last`, unless the agent learns from sequences.

    Items sampled singly have no neighbours; leaving the two out saves memory.
    """
    return items if agent.window is not None else items._replace(is_first=(), is_last=())


def _first_opt_step(schedule: UpdateSchedule, t: Array) -> Array:
    return jnp.asarray(t, jnp.uint32) * schedule.updates


def _take_steps(
    collector: Collector, state: OffPolicyState, key: Key, steps: int, opt_step: Array, random: bool
) -> tuple[OffPolicyState, Transition, StepInfo]:
    loop = EnvLoopState(state.env, state.processor)
    loop, items, infos = interaction.take_steps(collector, state.agent, opt_step, loop, key, steps, random)
    return state._replace(env=loop.env, processor=loop.processor), items, infos


# --- initialisation ---------------------------------------------------------------------------------------------


def _init(collector: Collector, learner: ReplayLearner, key: Key) -> OffPolicyState:
    """Reset the environments, fill the processor's windows, and warm up the buffer."""
    return _warm_up(collector, learner, _begin(collector, learner, key), key)


def _rerun_warm_up(collector: Collector, learner: ReplayLearner, state: OffPolicyState, key: Key) -> OffPolicyState:
    """Do the same with the agent and the processor's statistics of `state`."""
    start, processor = _begin(collector, learner, key), collector.processor.for_actors
    stats = processor.set_stats(start.processor, processor.get_stats(state.processor))
    return _warm_up(collector, learner, start._replace(agent=state.agent, processor=stats), key)


def _warm_up(collector: Collector, learner: ReplayLearner, state: OffPolicyState, key: Key) -> OffPolicyState:
    schedule = learner.schedule
    # `_begin` splits the same key into five and uses the first three.
    prime_key, fill_key = map(shard_key, jax.random.split(key, 5)[3:])
    warm_up = partial(_take_steps, collector, opt_step=jnp.uint32(0), random=schedule.random_warmup)

    def prime(t: Array, state: OffPolicyState) -> OffPolicyState:
        """Take a vector step before the first n-step transition is complete."""
        return warm_up(state, fold(prime_key, t), 1)[0]

    def fill(t: Array, state: OffPolicyState) -> OffPolicyState:
        state, items, _ = warm_up(state, fold(fill_key, t), schedule.vector_steps)
        # Blocks of the warm-up are numbered from 0; those of training continue the count.
        return push(learner, state, items, t)

    if schedule.horizon:
        state = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(schedule.horizon), prime, state)
    # Plain loops instead of `iterate`: they run once, and compile in half the time.
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(schedule.warmup_iterations), fill, state)


def _begin(collector: Collector, learner: ReplayLearner, key: Key) -> OffPolicyState:
    """Return the state before the warm-up, with an empty buffer."""
    # The remaining two keys are for the warm-up, see `_warm_up`. Shards have the same agent and different
    # environments.
    stream, agent_key, env_key, *_ = jax.random.split(key, 5)
    agent = collector.agent.init(agent_key)
    loop, items = interaction.reset_envs(collector, agent, shard_key(env_key))
    return OffPolicyState(stream, agent, loop.env, loop.processor, init_buffer(learner, items), guard.init_health())


def init_buffer(learner: ReplayLearner, items: Transition) -> PyTree:
    """Return an empty buffer for transitions like `items`, the shapes `[N, ...]` of one vector step."""
    if learner.agent.window is not None and isinstance(items.is_first, tuple):
        raise SettingsError(
            f"processor: its transitions have no is_first and is_last, and {learner.agent.name} learns from sequences; "
            "set both, as jaxrl.one_step() does"
        )
    schedule = learner.schedule
    example = row_struct(_drop_bounds(learner.agent, items))
    return learner.buffer.init(example, schedule.transitions_per_iteration, schedule.lag, schedule.num_envs)


def _set_hyperparams(collector: Collector, learner: ReplayLearner, state: OffPolicyState) -> OffPolicyState:
    """Return `state` with the hyperparameters of the settings; demonstrations are processed anew with them."""
    tuned: OffPolicyState = interaction.set_hyperparams(collector, state)
    renew, is_saved = learner.buffer.renew, bool(jax.tree.leaves(tuned.buffer))  # a refill makes a new buffer anyway
    return tuned._replace(buffer=renew(tuned.buffer)) if renew is not None and is_saved else tuned


def _reset_buffer(collector: Collector, learner: ReplayLearner, state: OffPolicyState) -> OffPolicyState:
    """Return `state` with an empty buffer."""
    _, items = interaction.reset_envs(collector, state.agent, state.key)  # used for its shapes alone, so XLA drops it
    return state._replace(buffer=init_buffer(learner, items))


def _refill(
    collector: Collector, learner: ReplayLearner, state: OffPolicyState, first: Array, stop: Array
) -> OffPolicyState:
    """Fill an empty buffer with blocks `first .. stop-1`, by exploring from the current state of the environments.

    A resumed run thus has as much data as before, though not the same: it comes from the restored agent. The statistics
    of the processor stay as they were: these steps count nowhere.
    """
    # `stop` is folded in, so that runs resumed at different iterations draw different steps.
    schedule = learner.schedule
    key = fold(fold(state.key, streams.REFILL), stop)
    # Schedules, such as that of epsilon, continue where the run stopped.
    opt_step = _first_opt_step(schedule, jnp.asarray(stop, jnp.uint32) - schedule.warmup_iterations)

    def fill(number: Array, state: OffPolicyState) -> OffPolicyState:
        block_key = fold(key, number)
        state, items, _ = _take_steps(collector, state, block_key, schedule.vector_steps, opt_step, random=False)
        return push(learner, state, items, number)

    empty, processor = _reset_buffer(collector, learner, state), collector.processor.for_actors
    full = jax.lax.fori_loop(jnp.asarray(first, jnp.uint32), jnp.asarray(stop, jnp.uint32), fill, empty)
    return full._replace(processor=processor.set_stats(full.processor, processor.get_stats(state.processor)))
