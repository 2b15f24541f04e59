"""What an iteration of training is made of, in one bare scan: no guard, no metrics, nothing that a record would tell.

Between such a scan and the sum of its parts, each alone, is what it costs that they stand in one loop; between it and
training is what jaxrl does beside the algorithm.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxrl
from benchmarks.cases.shapes import DQN, PPO, SAC, buffer_of
from benchmarks.loops import Loop, make_collector
from jaxrl.agents.returns import last_steps
from jaxrl.strategies.base import Strategy, iterate
from jaxrl.strategies.interaction import Collector, EnvLoopState, take_steps
from jaxrl.strategies.on_policy import make_minibatches
from jaxrl.trees import Array, PyTree
from jaxrl.types import Rollout
from jaxrl.xla.shuffle import random_orders


def off_policy(shape: DQN | SAC, strategy: Strategy, state: PyTree) -> Loop:
    """Return the scan of a case that learns from replay, from a training `state` on, with the same random numbers."""
    collector, buffer, updates = _collector(shape), buffer_of(shape), strategy.opt_steps_per_step
    vector_steps = strategy.env_steps_per_step // shape.num_envs
    filled = jnp.uint32(strategy.warmup_env_steps // strategy.env_steps_per_step)

    def turn(carry: PyTree, key: Array, t: Array) -> PyTree:
        loop, ring, agent = carry
        first = t * updates
        collect_key, learn_key = jax.random.split(key)
        loop, items, _ = take_steps(collector, agent, first, loop, collect_key, vector_steps)
        items = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), items._replace(is_first=(), is_last=()))
        ring = buffer.push(ring, items, filled + t)
        keys = jax.random.split(learn_key, updates)
        for i in range(updates):
            sample_key, agent_key = jax.random.split(keys[i])
            batch = buffer.sample(ring, sample_key, filled + t + 1, first + i)
            agent, _, priorities = collector.agent.update(agent, batch, agent_key, first + i)
            ring = buffer.reprioritise(ring, batch.index, priorities)
        return loop, ring, agent

    return _scan(strategy, turn, state, (EnvLoopState(state.env, state.processor), state.buffer, state.agent))


def on_policy(shape: PPO, strategy: Strategy, state: PyTree) -> Loop:
    """Return the scan of a case that learns from rollouts, from a training `state` on, with the same random numbers."""
    collector = _collector(shape)
    updates, prepare = strategy.opt_steps_per_step, collector.agent.prepare
    assert prepare is not None

    def turn(carry: PyTree, key: Array, t: Array) -> PyTree:
        loop, agent = carry
        collect_key, learn_key = jax.random.split(key)
        loop, items, _ = take_steps(collector, agent, t * updates, loop, collect_key, shape.rollout)
        take = make_minibatches(prepare(agent, Rollout(items, last_steps(items))), shape.minibatches)
        order_key, update_key = jax.random.split(learn_key)
        units = shape.rollout * shape.num_envs if shape.minibatches > 1 else 1
        order = random_orders(order_key, shape.epochs, units).reshape(updates, -1)

        def update(agent: PyTree, given: PyTree) -> tuple[PyTree, None]:
            index, key, i = given
            return collector.agent.update(agent, take(index), key, t * updates + i)[0], None

        given = (order, jax.random.split(update_key, updates), jnp.arange(updates, dtype=jnp.uint32))
        return loop, jax.lax.scan(update, agent, given)[0]

    return _scan(strategy, turn, state, (EnvLoopState(state.env, state.processor), state.agent))


def _collector(shape: DQN | SAC | PPO) -> Collector:
    return make_collector(jaxrl.make_env(shape.env), shape.agent(), shape.num_envs)


def _scan(strategy: Strategy, turn: Callable[[PyTree, PyTree, Array], PyTree], state: PyTree, carry: PyTree) -> Loop:
    def run(carried: PyTree, start: Array, stop: Array) -> PyTree:
        key, *carry = carried  # carried as training does; closed over, it would be donated with the training's state
        return key, *iterate(turn, key, tuple(carry), start, stop)

    return Loop(run, (state.key, *carry))
