"""Demonstrations beside experience: as a share of the batches of replay, or one beside each step of a minibatch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset, check_dataset, summarise
from jaxrl.buffers.mixed import mix
from jaxrl.buffers.uniform import uniform
from jaxrl.distributions import demonstrated_raw, mask_distribution
from jaxrl.envs.base import Env
from jaxrl.envs.host import HostEnv
from jaxrl.errors import SettingsError
from jaxrl.masks import get_mask
from jaxrl.processors.base import Processor
from jaxrl.spaces import EnvSpec, space_struct, to_indices
from jaxrl.strategies.offline import check_env, check_memoryless, make_transitions
from jaxrl.trees import Key, PyTree, row_struct
from jaxrl.types import Batch, Demonstrations, Transition

# --- beside replay ----------------------------------------------------------------------------------------------


def with_demos(
    buffer: Buffer,
    demos: Dataset | None,
    share: float,
    agent: Agent,
    processor: Processor,
    env: Env | HostEnv,
    shards: int,
) -> Buffer:
    """Return `buffer`, that of one shard, mixed with `demos`, which make up `share` of each batch; without `demos`,
    `buffer` itself.

    The processor turns demonstrations into transitions, as it does steps of the environment.

    Raises:
      SettingsError: the demonstrations are from another environment, the agent or the processor does not support them,
        or `share` is out of range, or not divisible among the shards (the message has the nearest that are).
    """
    if demos is None:
        return buffer
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise SettingsError(f"demo_share is {share}; expected a share above 0 and below 1, as 0.5")
    demos = check_dataset("demos", demos)
    check_env(demos, env)
    check_memoryless(agent, "demos")
    demos = _in_tuples_of(env.spec, demos)
    if _has_stats(processor, demos) or processor.known.get("normalise_reward"):
        _require_apply(processor)
    count = _count_demos(buffer.batch_size * shards, share, shards)
    return mix(buffer, partial(make_transitions, processor, demos), demos.rows, count // shards)


def _count_demos(batch_size: int, share: float, shards: int) -> int:
    """Return how many demonstrations, beside `batch_size` other items, are `share` of a batch; they must divide."""
    count = max(1, round(batch_size * share / (1 - share)))
    if count % shards:
        below = count - count % shards
        nearest = " or ".join(f"{x / (batch_size + x):.6g}" for x in (below, below + shards) if x)
        raise SettingsError(
            f"demo_share is {share}, for which {count} demonstrations are added to a batch of {batch_size}: they do "
            f"not divide into {shards} shards; set it to {nearest}"
        )
    return count


def _in_tuples_of(spec: EnvSpec, demos: Dataset) -> Dataset:
    """Return `demos` with the environment's own classes of named tuples, beside which they are sampled."""
    arrange = lambda space, tree: jax.tree.unflatten(jax.tree.structure(space_struct(space)), jax.tree.leaves(tree))
    return demos._replace(
        spec=spec,
        obs=arrange(spec.observation_space, demos.obs),
        action=arrange(spec.action_space, demos.action),
        next_obs=arrange(spec.observation_space, demos.next_obs),
    )


def _require_apply(processor: Processor) -> None:
    """Raise `SettingsError` unless a processor with statistics can scale items that it has made before."""
    if processor.apply is None:
        raise SettingsError(
            "the processor learns what it scales by as it goes, so demos and experience would be scaled otherwise; "
            "leave normalise_obs and normalise_reward off, or demos out"
        )


def _has_stats(processor: Processor, demos: Dataset) -> bool:
    """Return whether the processor keeps statistics of observations."""
    obs = jax.tree.map(lambda x: x[:1], demos.obs)
    seen = jax.eval_shape(lambda: processor.get_stats(processor.init(obs)))
    return bool(jax.tree.leaves(seen))


def settings_of_demos(demos: Dataset | None) -> dict[str, Any]:
    """Return the settings of a run that reload the demonstrations; without any, or without a file, they are empty."""
    found: Mapping[str, Any] = {} if demos is None else demos.settings or {}
    return {"demos": found.get("data", []), "demos_sha256": found.get("data_sha256", "")}


def custom_parts(demos: Dataset | None) -> tuple[str, ...]:
    """Return the argument `demos` as one that settings cannot rebuild, if there are demonstrations without a file."""
    return () if demos is None or demos.settings else ("demos",)


# --- beside rollouts --------------------------------------------------------------------------------------------


class RolloutDemos(NamedTuple):
    """Demonstrations for an agent that learns from rollouts."""

    data: Dataset
    agent: Agent
    processor: Processor
    """The processor for replay: observations are stored unscaled, and scaled as they are drawn."""
    get_stats: Callable[[PyTree], PyTree]
    """`(processor) -> stats`: of the processor of the rollouts."""

    def init(self) -> PyTree:
        """Return the demonstrations as part of a training state, constant."""
        items = make_transitions(self.processor, self.data)
        rows = Demonstrations(items.obs, items.action)
        # All of them are one block, written by a single push.
        buffer = self._buffer(self.data.rows)
        return buffer.push(buffer.init(row_struct(rows), self.data.rows), rows, jnp.uint32(0))

    def beside(self, state: Any, batch: Batch, key: Key) -> Batch:
        """Return a minibatch with a demonstration beside each item, drawn uniformly with replacement.

        `state` is a `NamedTuple` with the fields `demos`, what `init` has returned, and `processor`, by whose
        statistics observations are scaled. The key is consumed.
        """
        assert self.agent.fns.imitate is not None
        drawn = self._buffer(batch.weight.shape[0]).sample(state.demos, key, jnp.uint32(1), jnp.uint32(0)).items
        demos = drawn._replace(obs=self._scale(self.get_stats(state.processor), drawn.obs))
        return batch._replace(items=self.agent.fns.imitate(batch.items, demos))

    def _buffer(self, batch_size: int) -> Buffer:
        return uniform(max(self.data.rows, batch_size), batch_size)

    def _scale(self, stats: PyTree, obs: PyTree) -> PyTree:
        """Return observations `[B, ...]` as the policy sees them now."""
        if self.processor.apply is None:
            return obs
        # The statistics are all that is read of a processor's state.
        raw = jax.tree.map(lambda x: x[:1], self.data.obs)
        state = self.processor.set_stats(self.processor.init(raw), stats)
        nothing = jnp.zeros(jax.tree.leaves(obs)[0].shape[0], jnp.float32)
        return self.processor.apply(state, Transition(obs, (), nothing, nothing, obs)).obs


def rollout_demos(
    demos: Dataset | None, agent: Agent, processor: Processor, env: Env | HostEnv, whole: Processor
) -> RolloutDemos | None:
    """Return `demos` for `agent`, or `None` without any.

    `whole` is the `processor` with what is carried beside it, such as a teacher.

    Raises:
      SettingsError: the demonstrations are from another environment, the agent or the processor does not support them,
        or an action is one that its mask forbids.
    """
    if demos is None:
        return None
    settings = agent.info.settings
    if agent.fns.imitate is None:
        raise SettingsError(
            f"{agent.name} learns from its own rollouts alone; ppo, a2c, reinforce and impala learn from demos as well"
        )
    if settings is not None and not settings.get("imitation_coef", True):
        raise SettingsError(
            "there are demos, but agent.imitation_coef, their weight in the loss, is 0; set it, as to 0.1"
        )
    demos = check_dataset("demos", demos)
    check_env(demos, env)
    check_memoryless(agent, "demos")
    processor = processor.for_replay
    if _has_stats(processor, demos):
        _require_apply(processor)
    _check_allowed(demos, agent)
    return RolloutDemos(demos, agent, processor, whole.get_stats)


def _check_allowed(demos: Dataset, agent: Agent) -> None:
    """Raise `SettingsError` if a mask forbids a demonstrated action, whose probability is 0 then."""
    head = None if agent.policy_fns is None else agent.policy_fns.head
    mask = get_mask(to_indices(demos.spec.observation_space, demos.obs))
    if head is None or mask is None:
        return
    uniform_policy = mask_distribution(head.distribution(jnp.zeros((demos.rows, head.outputs))), mask)
    raw = demonstrated_raw(head, to_indices(demos.spec.action_space, demos.action))
    bad = np.asarray(uniform_policy.log_prob(raw) < -1e30)
    if bad.any():
        raise SettingsError(
            f"demos: the action of step {int(np.argmax(bad))} is forbidden by its mask; leave the step's episode out, "
            "or mend it"
        )


def note_of_demos(demos: Dataset | None) -> tuple[str, ...]:
    """Return a note for the log on demonstrations beside rollouts."""
    return () if demos is None else (f"imitates {summarise(demos)}",)
