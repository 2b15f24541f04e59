"""Offline training from a fixed data set, without environment or exploration."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spaces, streams
from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset, check_dataset, split_holdout, summarise
from jaxrl.buffers.uniform import read_batch, uniform
from jaxrl.envs.base import Env
from jaxrl.envs.host import HostEnv
from jaxrl.errors import SettingsError, check_count, check_type
from jaxrl.metrics import Metrics
from jaxrl.processors.base import Processor, init_processor
from jaxrl.processors.n_step import one_step
from jaxrl.registry import algorithm_names, defaults_for, join_names
from jaxrl.spaces import Box, Space, is_leaf
from jaxrl.strategies import guard, interaction
from jaxrl.strategies.base import BufferRefill, EvalFns, StateFns, Strategy, StrategyInfo, fold
from jaxrl.strategies.guard import Health
from jaxrl.strategies.host_actors import require_env
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.strategies.replay import optimise
from jaxrl.trees import Array, Key, PyTree, make_key, row_struct
from jaxrl.types import NextAction, Step, Transition
from jaxrl.xla.shuffle import permute


class OfflineState(NamedTuple):
    """Complete state of a run after an iteration."""

    key: Key
    """Stream of iterations: folded with the iteration's number, never advanced."""
    agent: PyTree
    processor: PyTree
    """Statistics of the data, such as means and deviations; constant."""
    buffer: PyTree
    """The data as transitions; constant."""
    health: Health
    reward_factor: PyTree = ()
    """Float32 factor of the data's rewards; `()` without one."""


class _Parts(NamedTuple):
    agent: Agent
    processor: Processor
    buffer: Buffer
    data: Dataset
    updates: int
    epochs: bool = False
    """Whether batches are drawn without replacement."""
    factor: float | None = None
    """Factor that is already applied to the rewards of `data`."""


def offline(
    data: Dataset,
    agent: AgentMaker,
    *,
    batch_size: int | None = None,
    env: Env | HostEnv | None = None,
    processor: Processor | None = None,
    updates: int = 1,
    holdout: float = 0.0,
    replacement: bool = True,
    scale_rewards_by: str = "none",
) -> Strategy:
    """Compose offline training, as for IQL.

    `processor` treats the data as steps of an environment: n-step returns, stacked frames and scaled rewards are as
    online, and nothing bootstraps across the end of an episode. Only its statistics, such as the mean of observations,
    are computed in advance, from all data that are not held out.

    Args:
      data: as returned by `jaxrl.load_dataset(...)`.
      agent: as returned by `jaxrl.iql(...)`, another offline agent, or any agent that learns from replay.
      batch_size: transitions in a batch, drawn uniformly with replacement; 0: all of the data in every update (default:
        1024 for `rebrac`, 256 for all other agents).
      env: environment for evaluation. Without it, the score is minus the distance of greedy actions to those of
        held-out episodes.
      processor: turns steps into transitions (default: `one_step()`).
      updates: optimisation steps per iteration.
      holdout: fraction of episodes held out from training.
      replacement: if false, training uses every transition exactly once per epoch, in a new random order each. A batch
        at the end of an epoch is completed from the next one.
      scale_rewards_by: scale of rewards, applied first: none; range (times 1000, divided by the largest minus
        the smallest episode return, as IQL does on D4RL); or std (divided by the returns' standard deviation).

    Raises:
      SettingsError: the data are from another environment or smaller than a batch, or the agent cannot learn from them.
    """
    check_count("updates", updates)
    data = check_dataset("data", data)
    if env is not None:
        require_env(env)
    check_type("processor", processor, Processor, "what jaxrl.one_step() or another of jaxrl's processors returns")
    check_type("replacement", replacement, bool, "True or False")
    processor = processor or one_step()
    check_env(data, env)
    train, held = split_holdout(data, holdout)
    bound = _build_agent(agent, processor, data)
    if batch_size is None:
        batch_size = int(defaults_for(bound.name, "offline").get("batch_size", 256))
    check_count("batch_size", batch_size, least=0)
    factor = compute_reward_factor(train, scale_rewards_by)
    if factor is not None:
        train = train._replace(reward=train.reward * np.float32(factor))
    if train.rows < batch_size:
        raise SettingsError(
            f"batch_size is {batch_size}, but there are {train.rows} transitions to learn from; lower batch_size"
        )
    buffer = _buffer(train.rows, batch_size)
    parts = _Parts(bound, processor, buffer, train, updates, not replacement and batch_size > 0, factor)
    settings = interaction.settings_of(
        bound,
        processor,
        env and env.spec,
        {} if env is None else env.settings,
        offline=True,
        batch_size=batch_size,
        updates=updates,
        holdout=holdout,
        replacement=replacement,
        scale_rewards_by=scale_rewards_by,
    )
    custom = [] if data.settings else ["data"]
    return Strategy(
        init=partial(_init, parts),
        step=partial(_step, parts),
        env_steps_per_step=0,
        opt_steps_per_step=updates,
        env=env,
        policy=make_policy(bound, processor, data.spec if env is None else env.spec),
        evaluation=EvalFns(evaluate=held and partial(_evaluate_holdout, parts, held)),
        info=StrategyInfo(
            settings={**settings, **(data.settings or {}), "custom": [*settings["custom"], *custom]},
            notes=_notes(parts, scale_rewards_by),
            bounds_returns=bound.info.bounds_returns,
        ),
        state_fns=StateFns(
            health=guard.get_health,
            reseed=guard.reseed,
            set_hyperparams=partial(_set_hyperparams, parts),
            # Only of data that the settings name: a resumed run may be given other arrays.
            refill=BufferRefill(lambda t: range(0), partial(_refill, parts)) if data.settings else None,
            capacity=parts.buffer.capacity(train.rows),
        ),
    )


def _buffer(rows: int, batch_size: int) -> Buffer:
    """Return a buffer for the data; a `batch_size` of 0 samples all of them, in order."""
    buffer = uniform(rows, batch_size or rows)
    if batch_size:
        return buffer
    return buffer._replace(
        sample=lambda ring, key, pushes, opt_step: read_batch(ring, jnp.arange(rows, dtype=jnp.int32))
    )


RANGE = 1000.0
"""Range of the returns after scaling by `range` (Kostrikov et al. 2021)."""


def compute_reward_factor(data: Dataset, by: str) -> float | None:
    """Return the factor for the rewards of `data` by their undiscounted returns, `None` for `none`.

    Raises:
      SettingsError: `by` is unknown, or all episodes have the same return.
    """
    if by not in ("none", "range", "std"):
        raise SettingsError(f"scale_rewards_by is {by!r}; expected none, range or std")
    if by == "none":
        return None
    returns = summarise(data).returns
    spread = float(np.ptp(returns) if by == "range" else returns.std())
    if not spread > 0:
        raise SettingsError(
            f"scale_rewards_by is {by}, but all episodes of the data have the return {returns[0]:g}; set it to none, "
            "or use processor.reward_scale"
        )
    return (RANGE if by == "range" else 1.0) / spread


def _notes(parts: _Parts, by: str) -> tuple[str, ...]:
    """Return notes for the beginning of the log."""
    rows, batch = parts.data.rows, parts.buffer.batch_size
    notes = [f"learns from {summarise(parts.data)}"]
    if parts.factor is not None:
        notes.append(f"rewards are multiplied by {parts.factor:.6g}, by the {by} of the returns in the data")
    if parts.epochs:
        notes.append(f"an epoch, in which each of {rows} transitions is learnt from once, is {rows / batch:g} updates")
    return tuple(notes)


def check_env(data: Dataset, env: Env | HostEnv | None) -> None:
    """Raise `SettingsError` unless `data` match `env`, if there is one."""
    if env is None:
        return
    if data.spec.name != env.spec.name:
        raise SettingsError(f"the data were gathered in {data.spec.name}, not in {env.spec.name}; name that one as env")
    for what in ("observation_space", "action_space"):
        came, wanted = getattr(data.spec, what), getattr(env.spec, what)
        # A tuple is learnt from as one whose parts have names.
        if spaces.without_names(came) != spaces.without_names(wanted):
            raise SettingsError(
                f"the data have {what.replace('_', ' ')} {came}, but {env.spec.name} has {wanted}; "
                "give the parameters with which they were gathered as env_args"
            )


def _build_agent(agent: AgentMaker, processor: Processor, data: Dataset) -> Agent:
    if processor.known.get("normalise_reward"):
        raise SettingsError(
            "processor.normalise_reward goes by what was seen so far; use scale_rewards_by, or processor.reward_scale"
        )
    _, bound = interaction.build_processor_and_agent(agent, processor, data.spec)
    if bound.prepare is not None:
        able = join_names(algorithm_names("offline"))
        raise SettingsError(f"{bound.name} learns from its own rollouts alone; agents for data: {able}")
    check_memoryless(bound, "data")
    return bound


def check_memoryless(agent: Agent, what: str) -> None:
    """Raise `SettingsError` for an agent with a memory, which `what` (data or demos) lack."""
    if agent.memory is not None:
        given = [name for name in ("noise_memory", "noise_min") if (agent.info.settings or {}).get(name)]
        off = f"agent.{' and agent.'.join(given)} to 0" if given else "agent.core to none"
        raise SettingsError(f"{agent.name} remembers, and {what} do not tell what; set {off}")


# --- the training step ------------------------------------------------------------------------------------------


def _step(parts: _Parts, state: OfflineState, key: Key, t: Array) -> tuple[OfflineState, Metrics]:
    first_opt = jnp.asarray(t, jnp.uint32) * parts.updates
    buffer = parts.buffer
    if parts.epochs:
        rows, batch = parts.data.rows, buffer.batch_size
        orders = fold(state.key, streams.EPOCHS)
        # Nothing is drawn: the batch is a function of the optimisation step, and the key is unused.
        in_order = lambda ring, key, pushes, step: read_batch(ring, epoch_indices(orders, step, batch, rows))
        buffer = buffer._replace(sample=in_order)
    # All data are one block, which was pushed once.
    state, metrics = optimise(parts.agent, buffer, state, key, jnp.uint32(1), first_opt, parts.updates)
    if parts.epochs:
        # In floating point, since the number of transitions may exceed 32 bits.
        passed = (first_opt + parts.updates).astype(jnp.float32)
        metrics = {**metrics, "epochs": passed * (parts.buffer.batch_size / parts.data.rows)}
    return state, metrics if parts.factor is None else {**metrics, "reward_factor": state.reward_factor}


# --- epochs -----------------------------------------------------------------------------------------------------


def epoch_indices(key: Key, opt_step: Array, batch_size: int, rows: int) -> Array:
    """Return the indices `[B]` of the batch of optimisation step `opt_step` (from 0), out of `rows >= B` items.

    The permutations of all epochs are concatenated and cut into batches, so a batch may span two epochs. The result
    depends on the arguments alone: there is no state to keep, and a resumed run gets the same batches.
    """
    epoch, first = mul_divmod(opt_step, batch_size, rows)
    position = first + jnp.arange(batch_size, dtype=jnp.uint32)
    inside = position < rows
    # Places past the end of this epoch count as 0 here, and those before it as 0 in the next one.
    now = permute(jax.random.fold_in(key, epoch), jnp.where(inside, position, 0), rows)
    if rows % batch_size == 0:  # no batch spans two epochs
        return now
    then = permute(jax.random.fold_in(key, epoch + 1), jnp.where(inside, 0, position - rows), rows)
    return jnp.where(inside, now, then)


def mul_divmod(count: Array, size: int, rows: int) -> tuple[Array, Array]:
    """Return quotient and remainder of `count * size / rows` as uint32, though the product may exceed 32 bits.

    Long division, one bit of `count` at a time; requires `size <= rows < 2^31`, so that a doubled remainder fits.
    """
    count = jnp.asarray(count, jnp.uint32)

    def digit(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        # One bit of `count`, highest first: double quotient and remainder, then add `size` if the bit is set. After
        # each of the two the remainder is brought below `rows` again.
        whole, rest = done[0] * 2, done[1] * 2
        over = rest >= rows
        whole, rest = whole + over, rest - jnp.where(over, rows, 0).astype(jnp.uint32)
        rest = rest + jnp.where((count >> (31 - i)) & 1, size, 0).astype(jnp.uint32)
        over = rest >= rows
        return whole + over, rest - jnp.where(over, rows, 0).astype(jnp.uint32)

    zero = jnp.zeros_like(count)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), digit, (zero, zero))


# --- initialisation ---------------------------------------------------------------------------------------------


def _init(parts: _Parts, key: Key) -> OfflineState:
    stream, agent_key = jax.random.split(key)
    processor = fit_processor(parts.processor, parts.data)
    # Statistics of all data first, which then apply to every transition alike.
    buffer = _fill_buffer(parts, processor)
    factor: PyTree = () if parts.factor is None else jnp.float32(parts.factor)
    return OfflineState(stream, parts.agent.init(agent_key), processor, buffer, guard.init_health(), factor)


def _fill_buffer(parts: _Parts, processor: PyTree) -> PyTree:
    """Return the data as transitions, given the statistics in the state of the processor."""
    frozen = parts.processor.freeze(parts.processor.get_stats(processor))
    items = make_transitions(frozen, parts.data, parts.agent.info.next_actions)
    empty = parts.buffer.init(row_struct(items), parts.data.rows)
    return parts.buffer.push(empty, items, jnp.uint32(0))


def _refill(parts: _Parts, state: OfflineState, first: Array, stop: Array) -> OfflineState:
    del first, stop  # the data are no blocks of exploration
    return state._replace(buffer=_fill_buffer(parts, state.processor))


def _set_hyperparams(parts: _Parts, state: OfflineState) -> OfflineState:
    """Return `state` with the hyperparameters of the settings; transitions are recomputed with them."""
    # Stream, agent and counters are kept, so the key does not matter.
    fresh = _init(parts, make_key(0))
    return fresh._replace(
        key=state.key, agent=interaction.set_hyperparams_of(parts.agent, state.agent), health=state.health
    )


def _steps(data: Dataset) -> tuple[Step, PyTree, PyTree]:
    """Return the data as steps of one environment, leaves `[R, 1, ...]`, and its first observation and action.

    Integers of the data start where those of their environment do, and are converted to start at 0.
    """
    seen, done = data.spec.observation_space, data.spec.action_space
    data = data._replace(
        obs=spaces.to_indices(seen, data.obs),
        action=spaces.to_indices(done, data.action),
        next_obs=spaces.to_indices(seen, data.next_obs),
    )
    # At the end of an episode, `obs` of a step is the first of the next one, and `final_obs` the last of the old one.
    # The last step has no next one: its `obs` is filled in, but no transition is made from it.
    following = jax.tree.map(lambda x: np.concatenate([x[1:], x[-1:]]), data.obs)
    ends: tuple[Any, Any, Any] = data.terminated, data.truncated, np.ones_like(data.terminated)
    reward: Any = data.reward
    steps = Step(data.action, (), reward, *ends[:2], final_obs=data.next_obs, obs=following, valid=ends[2])
    first = jax.tree.map(lambda x: x[:1], (data.obs, data.action))
    return jax.tree.map(lambda x: x[:, None], steps), *first


def fit_processor(processor: Processor, data: Dataset) -> PyTree:
    """Return the state of `processor` after every observation of `data`, each seen once."""
    steps, obs, action = _steps(data)
    start = init_processor(processor, obs, action, ())
    if not jax.tree.leaves(processor.get_stats(start)):
        return start
    # `init_processor` saw the first observation, and each step has the next one.
    before_last = jax.tree.map(lambda x: x[:-1], steps)
    return jax.lax.scan(lambda state, step: (processor.process(state, step)[0], None), start, before_last)[0]


def make_transitions(processor: Processor, data: Dataset, next_actions: bool = False) -> Transition:
    """Return the transitions of `data`, leaves `[R, ...]`, in the order of the steps at which they start.

    With `next_actions`, their `extras` are each a `NextAction`.

    Raises:
      SettingsError: `next_actions` is set, and the processor does not mark the ends of episodes.
    """
    steps, obs, action = _steps(data)
    # An n-step transition comes out n - 1 steps late: padding steps, whose own transitions are cut off, flush the last.
    blank = jax.tree.map(lambda x: np.repeat(np.zeros_like(x[:1]), processor.horizon, axis=0), steps)
    steps = jax.tree.map(lambda x, y: np.concatenate([x, y]), steps, blank)
    _, items = jax.lax.scan(processor.process, init_processor(processor, obs, action, ()), steps)
    if next_actions:
        items = items._replace(extras=_next_action(items, processor.horizon + 1))
    return jax.tree.map(lambda x: x[processor.horizon :, 0], items._replace(is_first=(), is_last=()))


def _next_action(items: Transition, lag: int) -> NextAction:
    """Return the action after each of `items`: within an episode, that of the item `lag` later."""
    if isinstance(items.is_last, tuple):
        raise SettingsError(
            "processor: its transitions have no is_last, so what follows them is unknown; use one_step()"
        )
    # `roll` wraps around for the last items, but these end their episode, as the data do.
    return NextAction(jax.tree.map(lambda x: jnp.roll(x, -lag, axis=0), items.action), ~items.is_last)


# --- evaluation without an environment --------------------------------------------------------------------------


def _evaluate_holdout(parts: _Parts, held: Dataset, params: PolicyParams, key: Key) -> tuple[Array, Array, Array]:
    """Return the score of each held-out episode: minus the mean distance of greedy actions from those in the data.

    The result is `(scores, lengths, finished)`, as of `EvalFns.evaluate`.
    """
    del key
    episode, lengths = held.episode, np.bincount(held.episode)
    items = make_transitions(parts.processor.freeze(params.processor), held)
    action, _ = parts.agent.act(params.agent, items.obs, None, jnp.uint32(0), "exploit")
    distances = action_distance(held.spec.action_space, action, items.action)
    sums = jax.ops.segment_sum(distances, episode, len(lengths))
    # Negated, since a higher score is better everywhere.
    return -sums / lengths.astype(np.float32), jnp.asarray(lengths, jnp.int32), jnp.ones(len(lengths), bool)


def action_distance(space: Space, a: PyTree, b: PyTree) -> Array:
    """Return `[B]`: the mean squared difference in half widths of the bounds (`Box`), or the share that differs."""
    leaves = jax.tree.leaves(space, is_leaf=is_leaf)
    pairs = zip(leaves, jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.stack([_leaf_distance(leaf, x, y) for leaf, x, y in pairs]).mean(0)


def _leaf_distance(space: Any, a: Array, b: Array) -> Array:
    if isinstance(space, Box):
        distances = jnp.square(spaces.from_box(space, a) - spaces.from_box(space, b))
    else:
        distances = (a != b).astype(jnp.float32)
    return distances.reshape(a.shape[0], -1).mean(1)
