"""The walk of `toys_objects` as an environment of stoa, as a user would write it."""

from typing import Any

import jax.numpy as jnp
import stoa
from stoa.core_wrappers.optimistic_auto_reset import OptimisticResetVmapWrapper
from stoa.core_wrappers.vmap import VmapWrapper
from toys_objects import advance, begin, seen


class Walk(stoa.Environment):  # type: ignore[misc]
    def reset(self, rng_key: Any, env_params: Any = None) -> Any:
        state = begin(rng_key)
        return state, stoa.TimeStep(stoa.StepType.FIRST, jnp.float32(0), jnp.float32(1), seen(state), {})

    def step(self, state: Any, action: Any, env_params: Any = None) -> Any:
        state, out = advance(state, action)
        kind = jnp.where(out["truncated"], stoa.StepType.TRUNCATED, stoa.StepType.MID)
        kind = jnp.where(out["terminated"], stoa.StepType.TERMINATED, kind)
        discount = jnp.where(out["terminated"], 0.0, 1.0)
        extras = {"slipped": out["slipped"], "inner": {"place": out["place"]}, "row": jnp.zeros(2), "key": state.key}
        return state, stoa.TimeStep(kind, out["reward"], discount, seen(state), extras)

    def observation_space(self, env_params: Any = None) -> Any:
        return stoa.BoundedArraySpace((2,), jnp.float32, 0.0, 9.0)

    def action_space(self, env_params: Any = None) -> Any:
        return stoa.DiscreteSpace(2, jnp.int32)

    def state_space(self, env_params: Any = None) -> Any:
        raise NotImplementedError


class Masked(Walk):
    """The walk, of which one is told that the action `env_params` (else 0) is not allowed."""

    def reset(self, rng_key: Any, env_params: Any = None) -> Any:
        state, out = super().reset(rng_key)
        return state, out.replace(extras=self._mask(env_params))

    def step(self, state: Any, action: Any, env_params: Any = None) -> Any:
        state, out = super().step(state, action)
        return state, out.replace(extras={**out.extras, **self._mask(env_params)})

    def _mask(self, env_params: Any) -> Any:
        return {"action_mask": jnp.arange(2) != (0 if env_params is None else env_params["closed"])}


class MaskedLate(Masked):
    def reset(self, rng_key: Any, env_params: Any = None) -> Any:
        return Walk.reset(self, rng_key)


class Growing(Walk):
    """A state that changes its dtype on the way."""

    def step(self, state: Any, action: Any, env_params: Any = None) -> Any:
        state, out = super().step(state, action)
        return state._replace(place=state.place + 0.5), out


class Broken(Walk):
    def step(self, state: Any, action: Any, env_params: Any = None) -> Any:
        raise RuntimeError("no\nlicence")


def make_walk(limit: int = 0) -> Any:
    return stoa.EpisodeStepLimitWrapper(Walk(), limit) if limit else Walk()


def make_reset_by_itself() -> Any:
    return stoa.AutoResetWrapper(stoa.AddRNGKey(Walk()))


def make_many() -> Any:
    return VmapWrapper(Walk(), 4)


def make_optimistic() -> Any:
    return stoa.RecordEpisodeMetrics(OptimisticResetVmapWrapper(stoa.AddRNGKey(Walk()), 4, 2))
