"""The walk of `toys_objects` as an environment of envelope, as a user would write it."""

from functools import cached_property
from typing import Any

import envelope
import jax.numpy as jnp
from toys_objects import advance, begin, seen


class Walk(envelope.Environment):  # type: ignore[misc]
    pay: Any = 1.0

    def init(self, key: Any) -> Any:
        state = begin(key)
        return state, self._info(state, {"reward": 0.0, "terminated": False, "truncated": False, "slipped": False})

    def step(self, state: Any, action: Any) -> Any:
        state, out = advance(state, action)
        return state, self._info(state, out)

    def _info(self, state: Any, out: Any) -> Any:
        flags = {"terminated": out["terminated"], "truncated": out["truncated"]}
        info = envelope.InfoContainer(obs=seen(state), reward=self.pay * out["reward"], **flags)
        inner = envelope.Container().update(place=state.place)
        return info.update(slipped=out["slipped"], inner=inner, row=jnp.zeros(2), key=state.key)

    @cached_property
    def observation_space(self) -> Any:
        return envelope.Continuous.from_shape(0.0, 9.0, (2,))

    @cached_property
    def action_space(self) -> Any:
        return envelope.Discrete(2)


class Masked(Walk):
    """The walk, whose observation says that the action 0 is not allowed, as adapters of envelope say it."""

    def _info(self, state: Any, out: Any) -> Any:
        mask = jnp.array([0, 1], jnp.int8)
        return super()._info(state, out).update(obs={"place": state.place, "action_mask": mask})

    @cached_property
    def observation_space(self) -> Any:
        mask = envelope.Discrete(jnp.full(2, 2, jnp.int8))
        return envelope.PyTreeSpace({"place": envelope.Discrete(6), "action_mask": mask})


class Growing(Walk):
    """A state that changes its dtype on the way."""

    def step(self, state: Any, action: Any) -> Any:
        state, info = super().step(state, action)
        return state._replace(place=state.place + 0.5), info


class Broken(Walk):
    def step(self, state: Any, action: Any) -> Any:
        raise RuntimeError("no\nlicence")


def make_walk(limit: int = 0) -> Any:
    return envelope.TruncationWrapper(env=Walk(), max_steps=limit) if limit else Walk()


def make_reset_by_itself() -> Any:
    return envelope.AutoResetWrapper(env=Walk())


def make_many() -> Any:
    return envelope.VmapWrapper(env=Walk(), batch_size=4)


def make_pooled() -> Any:
    return envelope.EpisodeStatisticsWrapper(env=envelope.PooledInitVmapWrapper(env=Walk(), batch_size=4, pool_size=2))


def make_normalised() -> Any:
    return envelope.ObservationNormalizationWrapper(env=Walk())
