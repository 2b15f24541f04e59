"""Sequences of replay for tests of recurrent agents, and updates from them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toys_agents import vector_of

from jaxrl.agents import Agent
from jaxrl.spaces import Box, Discrete
from jaxrl.types import Batch, RecurrentObs, Transition

KEY = jax.random.key(0)
B, BURN, T, WIDTH = 4, 2, 5, 4
"""How many sequences; steps of the burn-in and learnt ones of each; numbers in a memory."""
L = BURN + T


def batch_of(agent: Agent, actions: Discrete | Box) -> Batch:
    """Return sequences with ends of both kinds, memories that no one would have, and one step of weight 0."""
    rng, shape = np.random.default_rng(0), (B, L)
    begins, terminated = np.zeros(shape, bool), np.zeros(shape, bool)
    begins[0, 4] = begins[1, 1] = begins[2, 5] = begins[3, 3] = True
    terminated[0, 3] = terminated[3, 2] = True
    draw = lambda *dims: rng.normal(size=(*shape, *dims)).astype(np.float32)
    kept = lambda: jax.tree.map(lambda x: draw(*x.shape), agent.memory)
    weight = np.ones(shape, np.float32)
    weight[1, 4] = 0.0
    if isinstance(actions, Discrete):
        action = rng.integers(0, actions.n, shape).astype(np.int32)
    else:
        action = np.asarray(rng.uniform(actions.low, actions.high, (*shape, *actions.shape)), np.float32)
    discount = np.where(terminated, 0.0, 0.9).astype(np.float32)
    ends = np.concatenate([begins[:, 1:], np.zeros((B, 1), bool)], axis=1)
    now, then = RecurrentObs(draw(2), kept()), RecurrentObs(draw(2), kept())
    items = Transition(now, action, draw(), discount, then, (), weight, begins, ends)
    return jax.tree.map(jnp.asarray, Batch(items, np.arange(B, dtype=np.int32), np.array([1.0, 0.5, 1.0, 0.25])))


def _with_last_steps_of_no_weight(batch: Batch) -> tuple[Batch, Batch]:
    """Return the batch with a weight of 0 for the last step of each sequence, as it is and with other things in it."""

    def with_last(x: Any, value: float) -> np.ndarray:
        x = np.array(x)
        x[:, -1] = value
        return x

    dead = batch.items._replace(weight=with_last(batch.items.weight, 0.0))
    spoilt = dead._replace(
        reward=with_last(dead.reward, 7.0),
        action=with_last(dead.action, 0),
        next_obs=jax.tree.map(lambda x: with_last(x, 0.0), dead.next_obs),
    )
    return batch._replace(items=dead), batch._replace(items=spoilt)


def learns_nothing_from_rows_of_weight_zero(agent: Agent, state: Any, batch: Batch, *parts: str) -> None:
    """Assert that an update moves these `parts` of the state, keeps its shapes, and goes by no row of weight 0."""
    new, metrics, priorities = updating(agent)(state, batch)
    assert jax.eval_shape(lambda: new) == jax.eval_shape(lambda: state)
    assert priorities.shape == (B,)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    dead, spoilt = _with_last_steps_of_no_weight(batch)
    (first, told, _), (second, again, _) = (updating(agent)(state, b) for b in (dead, spoilt))
    assert float(told["loss"]) == float(again["loss"])
    for part in parts:
        before, after, one, other = (vector_of(getattr(s, part)) for s in (state, new, first, second))
        assert not np.array_equal(after, before)
        assert np.isfinite(after).all()
        np.testing.assert_array_equal(one, other)


def updating(agent: Agent) -> Any:
    """Return `(state, batch) -> (state, metrics, priorities)`, compiled once for an agent."""
    return _updating(agent.update)


@cache
def _updating(update: Any) -> Any:
    return jax.jit(lambda state, batch: update(state, batch, KEY, jnp.uint32(3)))


def one_of(params: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], params)


def anew(begins: Any, memory: Any) -> Any:
    """Return memories `[B, ...]` with zeros where an episode begins."""
    return jax.tree.map(lambda x: jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0.0, x), memory)


class Walk:
    """Plain calls of one network through sequence `b`, a step at a time: what it says now, and of the successor."""

    def __init__(self, apply: Any, params: Any, memory: Any, items: Transition, b: int, *action: Any) -> None:
        items = jax.tree.map(np.asarray, items)
        self.apply, self.params, self.items, self.b = apply, params, items, b
        self.before, self.after = [], []
        memory = jax.tree.map(lambda x: np.asarray(x)[None], memory)
        blank = jax.tree.map(np.zeros_like, memory)
        for t in range(L):
            memory = blank if bool(items.is_first[b, t]) else memory
            self.before.append(memory)
            memory = self._call(items.obs.obs, t, memory, *action)[1]
            self.after.append(memory)

    def _call(self, obs: Any, t: int, memory: Any, *action: Any) -> Any:
        return self.apply(self.params, RecurrentObs(obs[self.b, t : t + 1], memory), *action)

    def now(self, t: int, *action: Any) -> np.ndarray:
        return np.asarray(self._call(self.items.obs.obs, t, self.before[t], *action)[0][0])

    def then(self, t: int, *action: Any) -> np.ndarray:
        return np.asarray(self._call(self.items.next_obs.obs, t, self.after[t], *action)[0][0])
