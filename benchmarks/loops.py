"""Compiled loops to be timed: a strategy's training, whole, over several seeds, and each of its parts alone."""

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.agents import Agent, AgentMaker
from jaxrl.agents.returns import last_steps
from jaxrl.buffers import Buffer
from jaxrl.spaces import sample_space
from jaxrl.strategies.base import Strategy, iterate
from jaxrl.strategies.interaction import Collector, build_processor_and_agent, reset_envs, take_steps
from jaxrl.strategies.on_policy import make_minibatches
from jaxrl.training.program import compile_all
from jaxrl.trees import Array, PyTree
from jaxrl.types import Rollout
from jaxrl.xla.options import compiler_options
from jaxrl.xla.shuffle import random_orders

RESIDENT = 64
"""Batches between which the update alone goes round."""


class Loop:
    """A `(carry, start, stop) -> carry`, compiled when first asked for, that is run on, a stretch at a time.

    It is compiled as jaxrl's own training is, or if `usual` with XLA's own settings. Its carry is a copy of what it is
    given, for every call donates it; so a `body` may close over no array that another loop carries.
    """

    def __init__(self, body: Callable[[PyTree, Array, Array], PyTree], carry: PyTree, *, usual: bool = False) -> None:
        self.body, self.carry, self.t = body, jax.tree.map(jnp.copy, carry), 0
        self.usual = usual
        self.compile_s = 0.0

    @cached_property
    def compiled(self) -> Any:
        """The program."""
        counts = jax.ShapeDtypeStruct((), jnp.uint32)
        begun = time.perf_counter()
        program = jax.jit(self.body, donate_argnums=0, compiler_options=None if self.usual else compiler_options())
        compiled = program.lower(self.carry, counts, counts).compile()
        self.compile_s = time.perf_counter() - begun
        return compiled

    def us(self, iterations: int, steps: float = 1) -> float:
        """Run `iterations`; return microseconds for one of the `steps` that an iteration is counted as."""
        program, stop = self.compiled, self.t + iterations
        begun = time.perf_counter()
        self.carry = jax.block_until_ready(program(self.carry, np.uint32(self.t), np.uint32(stop)))
        self.t = stop
        return (time.perf_counter() - begun) / (iterations * steps) * 1e6


class Training:
    """The compiled loop of a strategy by itself: no trainer, record or evaluation."""

    def __init__(self, strategy: Strategy) -> None:
        key = jax.random.key(0)
        begun = time.perf_counter()
        made = compile_all(strategy, key, None, lambda state: state, resume=False)
        self.compile_s = time.perf_counter() - begun
        self.strategy, self.compiled = strategy, made.run
        self.state, self.sums = made.init(key)
        self.t = 0

    def us(self, iterations: int) -> float:
        """Run `iterations` in one call; return microseconds per optimisation step."""
        begun, stop = time.perf_counter(), self.t + iterations
        self.state, self.sums = self.compiled(self.state, self.sums, np.uint32(self.t), np.uint32(stop))
        jax.block_until_ready((self.state, self.sums))
        self.t = stop
        return (time.perf_counter() - begun) / (iterations * self.strategy.opt_steps_per_step) * 1e6

    def learnt(self, episodes: int = 50) -> dict[str, float]:
        """Return the mean greedy return of what has been trained by now, and after how many optimisation steps."""
        return learnt(self.strategy, [self.state], self.t, episodes)


def learnt(strategy: Strategy, states: list[PyTree], iterations: int, episodes: int = 50) -> dict[str, float]:
    """Return the mean greedy return of one or several seeds, and after how many optimisation steps of each."""
    policy = strategy.policy
    assert policy is not None
    assert strategy.env is not None
    evaluate = jaxrl.Evaluator(strategy.env, policy, episodes)
    returns = [evaluate(policy.params(state), jax.random.key(1)).returns.mean() for state in states]
    return {"opt_steps": iterations * strategy.opt_steps_per_step, "mean_return": float(np.mean(returns))}


def population(strategy: Strategy, seeds: int) -> Loop:
    """Return the training of `seeds` seeds in one program, all at once by `vmap`; they share the iteration number."""
    state = jax.jit(jax.vmap(strategy.init))(jax.random.split(jax.random.key(0), seeds))
    step = lambda state, key, t: strategy.step(state, key, t)[0]
    alone = lambda state, start, stop: iterate(step, state.key, state, start, stop)
    return Loop(jax.vmap(alone, in_axes=(0, None, None)), state)


def in_turn(strategy: Strategy, seeds: int) -> Loop:
    """Return the same, but each seed makes all iterations of a call before the next begins: it has the caches alone."""
    state = jax.jit(jax.vmap(strategy.init))(jax.random.split(jax.random.key(0), seeds))
    step = lambda state, key, t: strategy.step(state, key, t)[0]

    def run(state: PyTree, start: Array, stop: Array) -> PyTree:
        return jax.lax.map(lambda one: iterate(step, one.key, one, start, stop), state)

    return Loop(run, state)


# --- the parts, each alone -----------------------------------------------------------------------------------


def environment(env: jaxrl.Env, num_envs: int) -> Loop:
    """Return the stepping of `num_envs` environments with random actions; one iteration is one vector step."""
    vec = jaxrl.vectorise(env, num_envs)
    state, _ = vec.reset(jax.random.key(0))

    def step(carry: PyTree, key: Array, t: Array) -> PyTree:
        state, seen = carry
        action_key, env_key = jax.random.split(key)
        state, out = vec.step(state, sample_space(env.spec.action_space, action_key, num_envs), env_key)
        return state, seen + out.reward.sum() + sum(x.sum() for x in jax.tree.leaves((out.obs, out.final_obs)))

    run = lambda carry, start, stop: iterate(step, jax.random.key(1), carry, start, stop)
    return Loop(run, (state, jnp.float32(0)))


def acting(env: jaxrl.Env, agent: AgentMaker, num_envs: int) -> Loop:
    """Return the agent's choice of actions for observations that change; one iteration is one vector step."""
    bound = agent(env.spec)
    _, obs = jaxrl.vectorise(env, num_envs).reset(jax.random.key(0))
    state = bound.init(jax.random.key(0))

    def act(carry: PyTree, key: Array, t: Array) -> PyTree:
        obs, seen = carry
        action, _ = bound.act(state, obs, key, t, "explore")
        total = sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(action))
        return jax.tree.map(lambda x: x + (1e-3 * total).astype(x.dtype), obs), seen + total

    run = lambda carry, start, stop: iterate(act, jax.random.key(1), carry, start, stop)
    return Loop(run, (obs, jnp.float32(0)))


def replay(buffer: Buffer, held: PyTree, rows: int, updates: int) -> Loop:
    """Return pushing `rows` transitions, sampling `updates` batches and telling priorities, with the buffer `held`."""
    items = jax.tree.map(lambda x: x[:rows], held.items)
    full = jnp.uint32(buffer.capacity(rows) // rows)

    def turn(carry: PyTree, key: Array, t: Array) -> PyTree:
        ring, seen = carry
        ring = buffer.push(ring, jax.tree.map(lambda x: x + t.astype(x.dtype), items), full + t)
        for sample_key in jax.random.split(key, updates):
            batch = buffer.sample(ring, sample_key, full + t + 1, t)
            ring = buffer.reprioritise(ring, batch.index, jnp.abs(batch.items.reward) * batch.weight)
            seen = seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(batch.items))
        return ring, seen

    run = lambda carry, start, stop: iterate(turn, jax.random.key(1), carry, start, stop)
    return Loop(run, (held, jnp.float32(0)))


def filled(buffer: Buffer, example: PyTree, rows: int) -> PyTree:
    """Return `buffer` full of items like `example`, `rows` of which are the steps of as many environments."""
    items = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), example)
    push = lambda t, state: buffer.push(state, items, jnp.uint32(t))
    return jax.lax.fori_loop(0, buffer.capacity(rows) // rows, push, buffer.init(example, rows, rows))


def flashbax_replay(capacity: int, batch_size: int, example: PyTree, rows: int) -> dict[str, Loop]:
    """Return what `replay` does by flashbax's item buffers; nothing where it is not installed."""
    try:
        import flashbax
    except ImportError:
        print("flashbax is not installed, and not measured: pip install flashbax")
        return {}
    settings = {"max_length": capacity, "min_length": 1, "sample_batch_size": batch_size, "add_batches": True}
    uniform = flashbax.make_item_buffer(**settings)
    prioritised = flashbax.make_prioritised_flat_buffer(
        capacity, 1, batch_size, add_sequences=False, add_batch_size=rows, priority_exponent=0.6
    )
    items = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), example)

    def by_uniform(carry: PyTree, key: Array, t: Array) -> PyTree:
        state, seen = carry
        state = uniform.add(state, jax.tree.map(lambda x: x + t.astype(x.dtype), items))
        batch = uniform.sample(state, key).experience
        return state, seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(batch))

    def by_prioritised(carry: PyTree, key: Array, t: Array) -> PyTree:
        state, seen = carry
        state = prioritised.add(state, jax.tree.map(lambda x: x + t.astype(x.dtype), items))
        sample = prioritised.sample(state, key)
        state = prioritised.set_priorities(state, sample.indices, jnp.abs(sample.experience.first.reward))
        return state, seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(sample.experience))

    loops = {}
    for name, buffer, turn in (
        ("flashbax uniform", uniform, by_uniform),
        ("flashbax prioritised", prioritised, by_prioritised),
    ):
        fill = lambda t, state, buffer=buffer: buffer.add(state, items)
        full = jax.lax.fori_loop(0, capacity // rows, fill, buffer.init(example))
        run = lambda carry, start, stop, turn=turn: iterate(turn, jax.random.key(1), carry, start, stop)
        loops[name] = Loop(run, (full, jnp.float32(0)), usual=True)
    return loops


def replayed(buffer: Buffer, state: PyTree, rows: int) -> PyTree:
    """Return `RESIDENT` batches sampled from the buffer of a training `state`, leaves `[RESIDENT, B, ...]`."""
    pushes = jnp.uint32(buffer.capacity(rows) // rows)
    keys = jax.random.split(jax.random.key(2), RESIDENT)
    return jax.vmap(lambda k: buffer.sample(state.buffer, k, pushes, jnp.uint32(0)))(keys)


def update(agent: Agent, state: PyTree, batches: PyTree) -> Loop:
    """Return the agent's update on batches that are there already, and change from one step to the next."""
    resident = batches.weight.shape[0]

    def learn(carry: PyTree, key: Array, t: Array) -> PyTree:
        agent_state, seen = carry
        place = (t % resident).astype(jnp.int32)
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), batches)
        agent_state, metrics, _ = agent.update(agent_state, batch, key, t)
        return agent_state, seen + metrics["loss"]

    run = lambda carry, start, stop: iterate(learn, jax.random.key(1), carry, start, stop)
    return Loop(run, (state, jnp.float32(0)))


# --- the parts of on-policy training -------------------------------------------------------------------------


def make_collector(env: jaxrl.Env, agent: AgentMaker, num_envs: int) -> Collector:
    """Return an agent with `num_envs` environments, from which it learns by single steps."""
    return Collector(jaxrl.vectorise(env, num_envs), *build_processor_and_agent(agent, jaxrl.one_step(), env.spec))


def rollout_of(env: jaxrl.Env, agent: AgentMaker, num_envs: int, steps: int) -> tuple[Agent, PyTree, Rollout]:
    """Return an agent, a fresh state of it, and a rollout that it took."""
    collector = make_collector(env, agent, num_envs)
    state = collector.agent.init(jax.random.key(0))

    def take(state: PyTree) -> Rollout:
        loop, _ = reset_envs(collector, state, jax.random.key(1))
        _, items, _ = take_steps(collector, state, jnp.uint32(0), loop, jax.random.key(2), steps)
        return Rollout(items, last_steps(items))

    return collector.agent, state, jax.jit(take)(state)


def preparing(agent: Agent, state: PyTree, rollout: Rollout) -> Loop:
    """Return the making of advantages and targets, for a rollout whose steps change, but not where episodes end."""
    assert agent.prepare is not None
    prepare = agent.prepare

    def turn(t: Array, carry: PyTree) -> PyTree:
        # Carried and changed, lest XLA work it out once and for all.
        items, seen = jax.tree.map(lambda x: x + (1e-6 * t).astype(x.dtype), carry)
        made = prepare(state, rollout._replace(items=items))
        return items, seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(made))

    run = lambda carry, start, stop: jax.lax.fori_loop(start, stop, turn, carry)
    return Loop(run, (rollout.items, jnp.float32(0)))


def shuffling(prepared: PyTree, epochs: int, minibatches: int) -> Loop:
    """Return the drawing of the orders of all epochs, and the gathering of their minibatches."""
    units = jax.tree.leaves(prepared)[0].shape[0]

    def turn(carry: PyTree, key: Array, t: Array) -> PyTree:
        items = jax.tree.map(lambda x: x + (1e-6 * t).astype(x.dtype), carry[0])
        take = make_minibatches(items, minibatches)
        index = random_orders(key, epochs, units).reshape(epochs * minibatches, -1)

        def part(seen: Array, index: Array) -> tuple[Array, None]:
            return seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(take(index).items)), None

        return items, jax.lax.scan(part, carry[1], index)[0]

    run = lambda carry, start, stop: iterate(turn, jax.random.key(1), carry, start, stop)
    return Loop(run, (prepared, jnp.float32(0)))
