"""Processors turn environment steps into transitions, and the environment's observations into the policy's."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, check_between, check_count
from jaxrl.masks import map_except_mask
from jaxrl.parsing import format_repr, format_settings
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space, is_leaf
from jaxrl.trees import Array, PyTree
from jaxrl.types import Step, Transition


class ProcessorInit(Protocol):
    def __call__(self, obs: PyTree, /) -> PyTree:
        """Return the initial state for the first observations `[N, ...]`."""
        ...


class ProcessFn(Protocol):
    def __call__(self, state: PyTree, step: Step, /) -> tuple[PyTree, Any]:
        """Process a step of `N` environments; return the state and a `Step`, or, last in a chain, a `Transition`."""
        ...


class ObserveFn(Protocol):
    def __call__(self, state: PyTree, /) -> PyTree:
        """Return the current observation of the policy, `[N, ...]`: the latest one, processed."""
        ...


class SpaceFn(Protocol):
    def __call__(self, space: Space, /) -> Space:
        """Map the environment's observation space to that of the policy's observations."""
        ...


class Processor(NamedTuple):
    """A processor as pure functions over `N` environments at once.

    Two kinds share this interface: those that change a `Step` (frame stack, reward scale and clip), and those at the
    end of a chain that turn it into a `Transition` (one-step, n-step) and so store the previous observation.
    """

    init: ProcessorInit
    process: ProcessFn
    observe: ObserveFn
    horizon: int = 0
    """Number of vector steps before the first complete transition; `n - 1` for n-step."""
    makes_transitions: bool = False
    """Whether `process` returns a `Transition`."""
    space: SpaceFn = lambda space: space
    settings: Mapping[str, Any] | None = None
    """Settings that rebuild the processor, named as in `ProcessorConfig`; `None` for a custom one."""
    merged: Mapping[str, Any] | None = None
    """Settings of the parts of a chain, also where they do not rebuild it; `None` if one of them is custom."""
    stats: "StatsFns | None" = None
    """Functions on its running statistics, such as means; `None`: it has none."""
    replay_fns: "ReplayFns | None" = None
    """Functions that differ with replay, which stores unscaled items and scales a batch when it is used, by the
    statistics at that time; `None`: the processor has no statistics, or can only scale steps as they come."""
    apply: Callable[[PyTree, Transition], Transition] | None = None
    """`(state, items) -> items`: scale items by the statistics in `state`; `None`: they are scaled already."""
    changes: tuple[str, ...] = ("obs", "reward")
    """Parts of a step that it changes. A normaliser of one of them earlier in a chain cannot be deferred to replay."""

    @property
    def known(self) -> Mapping[str, Any]:
        """What is known of what it does, named as in `ProcessorConfig`; empty for a custom one."""
        return self.merged or self.settings or {}

    @property
    def for_replay(self) -> "Processor":
        """The processor for use with replay, see `replay_fns`."""
        return self if self.replay_fns is None else self._replace(**self.replay_fns._asdict(), replay_fns=None)

    @property
    def for_actors(self) -> "Processor":
        """The processor for actors: its statistics are all that they share."""
        if self.stats is None or self.stats.get_shared is None:
            return self
        return self._replace(stats=self.stats._replace(get=self.stats.get_shared, get_shared=None))

    def get_stats(self, state: PyTree) -> PyTree:
        """Return the statistics in `state` that policies need; `()` without statistics."""
        return () if self.stats is None else self.stats.get(state)

    def freeze(self, stats: PyTree) -> "Processor":
        """Return the processor with constant `stats`, for acting."""
        return self if self.stats is None or self.stats.freeze is None else self.stats.freeze(stats)

    def set_stats(self, state: PyTree, stats: PyTree) -> PyTree:
        """Return `state` with its statistics replaced by `stats`."""
        leaves, treedef = jax.tree.flatten(state)
        # `get_stats` of leaf indices shows which leaves it selects, whatever the structure of the state.
        places = jax.tree.leaves(self.get_stats(jax.tree.unflatten(treedef, range(len(leaves)))))
        for place, leaf in zip(places, jax.tree.leaves(stats), strict=True):
            leaves[place] = leaf
        return jax.tree.unflatten(treedef, leaves)

    def merge_stats(self, stats: PyTree, more: PyTree) -> PyTree:
        """Merge two statistics, see `StatsFns.merge`.

        Raises:
          SettingsError: there are statistics, but the processor, or one in a chain, has no function to merge them.
        """
        if self.stats is not None and self.stats.merge is not None:
            return self.stats.merge(stats, more)
        if jax.tree.leaves(stats):
            raise SettingsError("processor: its statistics cannot be shared by actors; give its StatsFns a merge")
        return stats

    def __repr__(self) -> str:
        return format_repr("Processor", format_settings(self.settings))


class StatsFns(NamedTuple):
    """Functions on the running statistics of a processor; see `Processor.stats`."""

    get: Callable[[PyTree], PyTree] = lambda state: ()
    """`(state) -> stats`: the statistics that policies need. They must be leaves of the state."""
    freeze: Callable[[PyTree], Processor] | None = None
    """`(stats) -> processor`: the same processor with constant `stats`, for acting; `None`: policies need none."""
    merge: Callable[[PyTree, PyTree], PyTree] | None = None
    """`(stats, stats) -> stats`: the statistics of both together, collected by separate actors; `None`: unsupported."""
    get_shared: Callable[[PyTree], PyTree] | None = None
    """`(state) -> stats`: statistics that actors share, if more than policies need; `None`: those of `get`."""


class ReplayFns(NamedTuple):
    """Functions of a processor that makes unscaled transitions, on the same state; see `Processor.replay_fns`."""

    init: ProcessorInit
    process: ProcessFn
    observe: ObserveFn
    apply: Callable[[PyTree, Transition], Transition]


DISABLED = {
    "one_hot": 0,
    "frame_stack": 1,
    "normalise_obs": False,
    "reward_scale": 1.0,
    "reward_clip": 0.0,
    "normalise_reward": False,
}
"""Values of settings that switch a part of the processor off, in the order of the parts that settings build."""


def chain(*processors: Processor) -> Processor:
    """Chain `processors`: each takes the output of the previous one, and the last one makes transitions.

    Raises:
      SettingsError: the last makes no transitions, or an earlier one does.
    """
    for processor in processors:
        if not isinstance(processor, Processor):
            raise SettingsError(f"chain: {processor!r:.60} is no processor; expected some as from jaxrl.one_step()")
    makes = [p.makes_transitions for p in processors]
    if not makes or makes != [False] * (len(makes) - 1) + [True]:
        raise SettingsError(
            "chain: the last processor, and only that, must make transitions; end with one_step() or n_step(n)"
        )
    if len(processors) == 1:
        return processors[0]
    processor = _make_chain(processors)
    if not _can_defer(processors):
        return processor
    # All statistics of a chain move to the batches of replay, or none do.
    raw = tuple(processor.for_replay for processor in processors)
    return processor._replace(
        replay_fns=ReplayFns(
            partial(_init, raw), partial(_process, raw), partial(_observe_applied, raw), partial(_apply, raw)
        )
    )


def _can_defer(processors: tuple[Processor, ...]) -> bool:
    """Return whether all statistics of a chain can be applied to its transitions instead of its steps.

    That needs that no later processor changes the same part: normalised frames are stacked, for example, so scaling
    cannot move behind the stack.
    """
    learners = [p for p in processors if p.stats is not None]
    changed: set[str] = set()  # by later processors
    # From the end, so that `changed` holds what processors further down change without deferring it.
    for processor in reversed(processors):
        if processor.replay_fns is None:
            changed.update(processor.changes)
        elif not changed.isdisjoint(processor.changes):
            return False
    return bool(learners) and all(p.replay_fns is not None for p in learners)


def _make_chain(processors: tuple[Processor, ...]) -> Processor:
    settings = [p.settings for p in processors if p.settings is not None]
    # One custom part leaves the chain without settings to rebuild it from.
    merged = {k: v for part in settings for k, v in part.items()} if len(settings) == len(processors) else None
    return Processor(
        init=partial(_init, processors),
        process=partial(_process, processors),
        observe=partial(_observe, processors),
        horizon=sum(p.horizon for p in processors),
        makes_transitions=True,
        space=partial(_space, processors),
        settings=merged if _rebuilds(settings) else None,
        merged=merged,
        changes=tuple(sorted({part for p in processors for part in p.changes})),
        stats=StatsFns(
            get=lambda states: tuple(p.get_stats(state) for p, state in zip(processors, states, strict=True)),
            freeze=lambda stats: chain(*(p.freeze(x) for p, x in zip(processors, stats, strict=True))),
            merge=lambda a, b: tuple(p.merge_stats(x, y) for p, x, y in zip(processors, a, b, strict=True)),
            get_shared=lambda states: tuple(
                p.for_actors.get_stats(state) for p, state in zip(processors, states, strict=True)
            ),
        ),
    )


def _rebuilds(settings: list[Mapping[str, Any]]) -> bool:
    """Return whether the settings of parts, merged, rebuild their chain: in one order, each once, with one discount."""
    order = list(DISABLED)
    places = [order.index(name) for part in settings for name in part if name in order]
    discounts = {part["discount"] for part in settings if "discount" in part}
    return places == sorted(set(places)) and len(discounts) <= 1


def _apply(processors: tuple[Processor, ...], states: tuple[PyTree, ...], items: Transition) -> Transition:
    for processor, state in zip(processors, states, strict=True):
        items = items if processor.apply is None else processor.apply(state, items)
    return items


def _observe_applied(processors: tuple[Processor, ...], states: tuple[PyTree, ...]) -> PyTree:
    """Return the current observation scaled by the statistics, as policies see it."""
    obs = _observe(processors, states)
    # `_apply` takes transitions; only `obs` of this one is read.
    nothing = jnp.zeros(jax.tree.leaves(obs)[0].shape[0], jnp.float32)
    return _apply(processors, states, Transition(obs, (), nothing, nothing, obs)).obs


def _init(processors: tuple[Processor, ...], obs: PyTree) -> tuple[PyTree, ...]:
    states = []
    for processor in processors:
        states.append(processor.init(obs))
        # The next processor starts from the observations that this one returns.
        obs = processor.observe(states[-1])
    return tuple(states)


def _process(
    processors: tuple[Processor, ...], states: tuple[PyTree, ...], step: Step
) -> tuple[tuple[PyTree, ...], Transition]:
    new_states, result = [], step
    for processor, state in zip(processors, states, strict=True):
        state, result = processor.process(state, result)
        new_states.append(state)
    return tuple(new_states), result  # type: ignore[return-value]


def _observe(processors: tuple[Processor, ...], states: tuple[PyTree, ...]) -> PyTree:
    return processors[-1].observe(states[-1])


def _space(processors: tuple[Processor, ...], space: Space) -> Space:
    for processor in processors:
        space = processor.space(space)
    return space


def init_processor(
    processor: Processor, obs: PyTree, action: PyTree, extras: PyTree, obs_valid: Array | tuple[()] = ()
) -> PyTree:
    """Return a state of `processor` at the first observations `[N, ...]`, with the structure that it keeps.

    `Processor.init` does not know the shapes of actions and extras, which n-step windows hold. So the processor first
    takes a dummy step that ends an earlier episode, made from `action` and `extras` (any values, `[N, ...]`); it has
    weight 0. `obs_valid` is that of `Step`.
    """
    return processor.process(processor.init(obs), dummy_step(obs, action, extras, obs_valid))[0]


def dummy_step(obs: PyTree, action: PyTree, extras: PyTree, obs_valid: Array | tuple[()] = ()) -> Step:
    """Return an invalid step that ends an episode and is followed by `obs` `[N, ...]`."""
    num_envs = jax.tree.leaves(obs)[0].shape[0]
    # Truncated and invalid: its transition has weight 0, and statistics of rewards leave it out.
    ended = jnp.ones(num_envs, bool)
    return Step(
        action,
        extras,
        jnp.zeros(num_envs, jnp.float32),
        ~ended,
        ended,
        final_obs=obs,
        obs=obs,
        valid=~ended,
        obs_valid=obs_valid,
    )


def map_reward(function: Any, settings: Mapping[str, Any] | None = None) -> Processor:
    """Apply `function` to rewards `[N]`; recorded returns are those of the environment.

    Raises:
      SettingsError: `function` cannot be called.
    """
    if not callable(function):
        raise SettingsError(f"map_reward: {function!r:.60} is no function; expected one of rewards [N]")
    return Processor(
        # The state is the current observation, passed on unchanged.
        init=lambda obs: obs,
        process=lambda state, step: (step.obs, step._replace(reward=function(step.reward))),
        observe=lambda state: state,
        settings=settings,
        changes=("reward",),
    )


def reward_scale(scale: float) -> Processor:
    """Multiply every reward by `scale`."""
    check_between("reward_scale", scale, -1e30, 1e30)
    return map_reward(lambda reward: reward * scale, {"reward_scale": scale})


def reward_clip(bound: float) -> Processor:
    """Clip every reward to `[-bound, bound]`."""
    check_between("reward_clip", bound, 0.0, 1e30)
    return map_reward(lambda reward: jnp.clip(reward, -bound, bound), {"reward_clip": bound})


def frame_stack(frames: int) -> Processor:
    """Stack the last `frames` observations along the last axis, oldest first.

    An observation `[N, ..., C]` becomes `[N, ..., frames * C]`. At an episode's start its first observation fills the
    whole stack, so that the previous episode is invisible; the successor of a last step still belongs to the old stack.
    Action masks are not stacked.
    """
    check_count("frame_stack", frames)
    return Processor(
        init=lambda obs: _repeat_obs(obs, frames),
        process=partial(_stack, frames),
        observe=lambda state: state,
        space=partial(_stack_space, frames),
        settings={"frame_stack": frames},
        changes=("obs",),
    )


def _stack_space(frames: int, space: Space) -> Space:
    def stacked(leaf: Box | Discrete | MultiDiscrete) -> Space:
        if not isinstance(leaf, Box):
            return MultiDiscrete(tuple(np.atleast_1d(leaf.n).tolist()) * frames, leaf.dtype)
        shape = leaf.shape or (1,)
        low, high = (_stack_bound(bound, shape, frames) for bound in (leaf.low, leaf.high))
        return Box(low, high, (*shape[:-1], shape[-1] * frames), leaf.dtype)

    return map_except_mask(stacked, space, is_leaf=is_leaf)


def _stack_bound(bound: Any, shape: tuple[int, ...], frames: int) -> Any:
    if not isinstance(bound, tuple):
        return bound
    return tuple(np.concatenate([np.reshape(bound, shape)] * frames, axis=-1).ravel().tolist())


def _repeat_obs(obs: PyTree, frames: int) -> PyTree:
    return map_except_mask(lambda x: jnp.concatenate([_with_channel(x)] * frames, axis=-1), obs)


def _with_channel(obs: Array) -> Array:
    """Give scalar observations `[N]` an axis to stack along."""
    return obs[:, None] if obs.ndim == 1 else obs


def _stack(frames: int, stack: PyTree, step: Step) -> tuple[PyTree, Step]:
    def push(old: Array, new: Array) -> Array:
        new = _with_channel(new)
        return jnp.concatenate([old[..., new.shape[-1] :], new], axis=-1)

    def restart(fresh: Array, continued: Array) -> Array:
        done = (step.terminated | step.truncated).reshape(-1, *(1,) * (continued.ndim - 1))
        return jnp.where(done, fresh, continued)

    # Within an episode the two observations are the same, so only one of them is pushed.
    final_obs = map_except_mask(push, stack, step.final_obs)
    obs = jax.tree.map(restart, _repeat_obs(step.obs, frames), final_obs)
    return obs, step._replace(final_obs=final_obs, obs=obs)
