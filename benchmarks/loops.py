"""Compiled loops to be timed: a strategy's training, whole, over several seeds, and each of its parts alone."""

import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.agents import Agent, AgentMaker
from jaxrl.buffers import Buffer
from jaxrl.strategies.base import Strategy, fold, iterate
from jaxrl.strategies.interaction import assemble, collect, draw_steps, open_scene
from jaxrl.strategies.on_policy import last_steps, minibatches_of
from jaxrl.strategies.shuffle import random_orders
from jaxrl.training.program import compile_all, compiler_options
from jaxrl.types import Array, PyTree, Rollout, sample_space

RESIDENT = 64
"""Batches between which the update alone goes round."""


class Loop:
    """A compiled `(carry, start, stop) -> carry` that is run on, a stretch at a time.

    It is compiled as jaxrl's own training is, or if `usual` with XLA's own settings.
    """

    def __init__(self, body: Callable[[PyTree, Array, Array], PyTree], carry: PyTree, *, usual: bool = False) -> None:
        counts = jax.ShapeDtypeStruct((), jnp.uint32)
        begun = time.perf_counter()
        program = jax.jit(body, donate_argnums=0, compiler_options=None if usual else compiler_options())
        self.compiled = program.lower(carry, counts, counts).compile()
        self.compile_s = time.perf_counter() - begun
        self.carry, self.t = carry, 0

    def us(self, iterations: int, steps: float = 1) -> float:
        """Run `iterations`; return microseconds for one of the `steps` that an iteration is counted as."""
        begun, stop = time.perf_counter(), self.t + iterations
        self.carry = jax.block_until_ready(self.compiled(self.carry, np.uint32(self.t), np.uint32(stop)))
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
        policy = self.strategy.policy
        assert policy is not None
        assert self.strategy.env is not None
        evaluate = jaxrl.Evaluator(self.strategy.env, policy, episodes)
        returns = evaluate(policy.params(self.state), jax.random.key(1)).returns
        return {"opt_steps": self.t * self.strategy.opt_steps_per_step, "mean_return": float(returns.mean())}


class Learner:
    """The learner of a strategy with actors by itself: its compiled iterations, over one and the same arrival."""

    def __init__(self, strategy: Strategy) -> None:
        assert strategy.remote is not None
        self.training = Training(strategy)
        self.arrival = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), strategy.remote.arrival)

    def us(self, iterations: int) -> float:
        """Make `iterations`; return microseconds per optimisation step."""
        whole, begun = self.training, time.perf_counter()
        for _ in range(iterations):
            whole.state, whole.sums = whole.compiled(whole.state, whole.sums, self.arrival, np.uint32(whole.t))
            whole.t += 1
        jax.block_until_ready((whole.state, whole.sums))
        return (time.perf_counter() - begun) / (iterations * whole.strategy.opt_steps_per_step) * 1e6


class GymnasiumThreads:
    """Vectors of a Gymnasium environment, each stepped by a thread of its own with random actions: nothing else."""

    def __init__(self, name: str, threads: int, num_envs: int) -> None:
        import gymnasium

        mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        make = lambda: gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=mode)
        self.vectors = [make() for _ in range(threads)]
        for seed, vector in enumerate(self.vectors):
            vector.reset(seed=seed)
            vector.action_space.seed(seed)

    def us(self, steps: int) -> float:
        """Take `steps` steps of each vector; return microseconds for one of them all."""
        actions = [[vector.action_space.sample() for _ in range(steps)] for vector in self.vectors]
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(self.vectors)) as pool:
            for done in [pool.submit(_walk, vector, own) for vector, own in zip(self.vectors, actions, strict=True)]:
                done.result()
        return (time.perf_counter() - begun) / steps * 1e6


def _walk(vector: Any, actions: list[np.ndarray]) -> None:
    for action in actions:
        vector.step(action)


def population(strategy: Strategy, seeds: int) -> Loop:
    """Return the training of `seeds` seeds in one program, all at once by `vmap`; they share the iteration number."""
    state = jax.jit(jax.vmap(strategy.init))(jax.random.split(jax.random.key(0), seeds))
    step = jax.vmap(lambda state, noise, t: strategy.step(state, noise, t)[0], in_axes=(0, 0, None))
    draw = jax.vmap(strategy.draw, in_axes=(0, None))

    def run(state: PyTree, start: Array, stop: Array) -> PyTree:
        return iterate(draw, step, state.key, state, start, stop)

    return Loop(run, state)


def in_turn(strategy: Strategy, seeds: int) -> Loop:
    """Return the same, but each seed makes all iterations of a call before the next begins: it has the caches alone."""
    state = jax.jit(jax.vmap(strategy.init))(jax.random.split(jax.random.key(0), seeds))
    step = lambda state, noise, t: strategy.step(state, noise, t)[0]

    def run(state: PyTree, start: Array, stop: Array) -> PyTree:
        return jax.lax.map(lambda one: iterate(strategy.draw, step, one.key, one, start, stop), state)

    return Loop(run, state)


# --- the parts, each alone -----------------------------------------------------------------------------------


def environment(env: jaxrl.Env, num_envs: int) -> Loop:
    """Return the stepping of `num_envs` environments with random actions; one iteration is one vector step."""
    vec = jaxrl.vectorise(env, num_envs)
    state, _ = vec.reset(jax.random.key(0))

    def draw(key: Array, t: Array) -> PyTree:
        action_key, env_key = jax.random.split(fold(key, t))
        return sample_space(env.spec.action_space, action_key, num_envs), vec.draw(env_key)

    def step(carry: PyTree, noise: PyTree, t: Array) -> PyTree:
        state, seen = carry
        state, out = vec.step(state, *noise)
        return state, seen + out.reward.sum() + sum(x.sum() for x in jax.tree.leaves((out.obs, out.final_obs)))

    run = lambda carry, start, stop: iterate(draw, step, jax.random.key(1), carry, start, stop)
    return Loop(run, (state, jnp.float32(0)))


def acting(env: jaxrl.Env, agent: AgentMaker, num_envs: int) -> Loop:
    """Return the agent's choice of actions for observations that change; one iteration is one vector step."""
    bound = agent(env.spec)
    _, obs = jaxrl.vectorise(env, num_envs).reset(jax.random.key(0))
    state = bound.init(jax.random.key(0))

    def act(carry: PyTree, noise: PyTree, t: Array) -> PyTree:
        obs, seen = carry
        action, _ = bound.act(state, obs, noise, t, "explore")
        total = sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(action))
        return jax.tree.map(lambda x: x + (1e-3 * total).astype(x.dtype), obs), seen + total

    draw = lambda key, t: bound.draw_act(fold(key, t), num_envs)
    run = lambda carry, start, stop: iterate(draw, act, jax.random.key(1), carry, start, stop)
    return Loop(run, (obs, jnp.float32(0)))


def replay(buffer: Buffer, held: PyTree, rows: int, updates: int) -> Loop:
    """Return pushing `rows` transitions, sampling `updates` batches and telling priorities, with the buffer `held`."""
    items = jax.tree.map(lambda x: x[:rows], held.items)
    full = jnp.uint32(buffer.capacity(rows) // rows)

    def draw(key: Array, t: Array) -> PyTree:
        keys = jax.random.split(fold(key, t), updates)
        return jax.vmap(lambda k: buffer.draw(k, full + t + 1, rows))(keys)

    def turn(carry: PyTree, noise: PyTree, t: Array) -> PyTree:
        ring, seen = carry
        ring = buffer.push(ring, jax.tree.map(lambda x: x + t.astype(x.dtype), items), full + t)
        for i in range(updates):
            batch = buffer.sample(ring, jax.tree.map(lambda x, i=i: x[i], noise), t)
            ring = buffer.reprioritise(ring, batch.index, jnp.abs(batch.items.reward) * batch.weight)
            seen = seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(batch.items))
        return ring, seen

    run = lambda carry, start, stop: iterate(draw, turn, jax.random.key(1), carry, start, stop)
    return Loop(run, (jax.tree.map(jnp.copy, held), jnp.float32(0)))


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
        run = lambda carry, start, stop, turn=turn: iterate(fold, turn, jax.random.key(1), carry, start, stop)
        loops[name] = Loop(run, (full, jnp.float32(0)), usual=True)
    return loops


def replayed(buffer: Buffer, state: PyTree, rows: int) -> PyTree:
    """Return `RESIDENT` batches sampled from the buffer of a training `state`, leaves `[RESIDENT, B, ...]`."""
    pushes = jnp.uint32(buffer.capacity(rows) // rows)
    keys = jax.random.split(jax.random.key(2), RESIDENT)
    return jax.vmap(lambda k: buffer.sample(state.buffer, buffer.draw(k, pushes, rows), jnp.uint32(0)))(keys)


def update(agent: Agent, state: PyTree, batches: PyTree) -> Loop:
    """Return the agent's update on batches that are there already, and change from one step to the next."""
    resident, rows = batches.weight.shape

    def learn(carry: PyTree, noise: PyTree, t: Array) -> PyTree:
        agent_state, seen = carry
        place = (t % resident).astype(jnp.int32)
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), batches)
        agent_state, metrics, _ = agent.update(agent_state, batch, noise, t)
        return agent_state, seen + metrics["loss"]

    draw = lambda key, t: agent.draw_update(fold(key, t), rows)
    run = lambda carry, start, stop: iterate(draw, learn, jax.random.key(1), carry, start, stop)
    return Loop(run, (jax.tree.map(jnp.copy, state), jnp.float32(0)))


# --- the parts of on-policy training -------------------------------------------------------------------------


def rollout_of(env: jaxrl.Env, agent: AgentMaker, num_envs: int, steps: int) -> tuple[Agent, PyTree, Rollout]:
    """Return an agent, a fresh state of it, and a rollout that it took."""
    actors = assemble(env, agent, jaxrl.one_step(), num_envs)
    state = actors.agent.init(jax.random.key(0))

    def take(state: PyTree) -> Rollout:
        scene, _ = open_scene(actors, state, jax.random.key(1))
        noise = draw_steps(actors, jax.random.key(2), steps)
        _, items, seen = collect(actors, state, jnp.uint32(0), scene, noise)
        return Rollout(items, last_steps(items, seen))

    return actors.agent, state, jax.jit(take)(state)


def preparing(agent: Agent, state: PyTree, rollout: Rollout) -> Loop:
    """Return the making of advantages and targets, for a rollout whose rewards change."""
    assert agent.prepare is not None
    prepare = agent.prepare

    def turn(t: Array, carry: PyTree) -> PyTree:
        # Carried and changed, lest XLA work it out once and for all.
        rollout, seen = jax.tree.map(lambda x: x + (1e-6 * t).astype(x.dtype), carry)
        made = prepare(state, rollout._replace(last=rollout.last > 0))
        return rollout, seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(made))

    run = lambda carry, start, stop: jax.lax.fori_loop(start, stop, turn, carry)
    return Loop(run, (rollout._replace(last=rollout.last.astype(jnp.float32)), jnp.float32(0)))


def shuffling(prepared: PyTree, epochs: int, minibatches: int) -> Loop:
    """Return the drawing of the orders of all epochs, and the gathering of their minibatches."""
    units = jax.tree.leaves(prepared)[0].shape[0]

    def turn(carry: PyTree, noise: PyTree, t: Array) -> PyTree:
        items = jax.tree.map(lambda x: x + (1e-6 * t).astype(x.dtype), carry[0])
        take, index = minibatches_of(items, minibatches), noise.reshape(epochs * minibatches, -1)

        def part(seen: Array, index: Array) -> tuple[Array, None]:
            return seen + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(take(index).items)), None

        return items, jax.lax.scan(part, carry[1], index)[0]

    draw = lambda key, t: random_orders(fold(key, t), epochs, units)
    run = lambda carry, start, stop: iterate(draw, turn, jax.random.key(1), carry, start, stop)
    return Loop(run, (jax.tree.map(jnp.copy, prepared), jnp.float32(0)))


# --- what a profiler sees ------------------------------------------------------------------------------------


def profile(loop: Loop | Training, iterations: int, folder: Path) -> list[tuple[str, float, float]]:
    """Trace one call of `loop` into `folder`; return its kernels: name, microseconds and runs an iteration.

    The dearest come first. On a GPU these are the events of the device; on a CPU those of XLA's threads, which run side
    by side, so that their times may add up to more than the iteration's.
    """
    loop.us(iterations)
    with jax.profiler.trace(folder):
        loop.us(iterations)
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(newest)).planes)
    planes = [plane for plane in planes if plane.name.startswith("/device:")] or planes
    spent: dict[str, list[float]] = {}
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        if not re.search(r"^\$|::|^end: |\(|^while", event.name):  # Python's frames, XLA's own functions, whole loops
            spent.setdefault(event.name, []).append(event.duration_ns / 1e3)
    kernels = [(name, sum(us) / iterations, len(us) / iterations) for name, us in spent.items()]
    return sorted(kernels, key=lambda kernel: -kernel[1])


def memory(compiled: Any) -> dict[str, int]:
    """Return the bytes of a program's arguments, and what it needs beside them."""
    analysis = compiled.memory_analysis()
    return {"state_bytes": analysis.argument_size_in_bytes, "temp_bytes": analysis.temp_size_in_bytes}


# --- the compiled program ------------------------------------------------------------------------------------

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
"""Instructions that run nothing."""


def kernels_per_iteration(compiled: Any, depth: int = 2) -> int:
    """Count the instructions that one iteration of `iterate` runs: its kernels, a figure without noise.

    On a GPU each is a launch, on a CPU a thunk. A loop inside counts with its body once, a branch with its larger side.
    `depth` is that of the loop over iterations: 2 where only the one over blocks is around it.
    """
    computations = _computations(compiled.as_text())
    return _size(computations, _iteration(computations, depth))


def copies_per_iteration(compiled: Any) -> int:
    """Count the copies among them."""
    computations = _computations(compiled.as_text())
    return sum(1 for line in computations[_iteration(computations)] if re.search(r" copy\(", line))


def _iteration(computations: dict[str, list[str]], depth: int = 2) -> str:
    """Return the body of an iteration: the largest loop in the loop over blocks, itself the largest of the program."""
    name = next(iter(reversed(computations)))  # the entry comes last
    for _ in range(depth):
        inside = [body for line in computations[name] for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]
        name = max(inside, key=lambda body: _size(computations, body), default=name)
    return name


def _computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of each computation of an HLO module."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = opened[1]
            found[name] = []
        elif " = " in line and name:
            found[name].append(line)
    return found


def _size(computations: dict[str, list[str]], name: str) -> int:
    total = 0
    for line in computations.get(name, []):
        operation = re.search(r" = .*? ([a-z][\w\-]*)\(", line)
        kind = operation[1] if operation else ""
        if kind == "while":
            (body,) = re.findall(r"body=%?([\w.\-]+)", line)
            total += _size(computations, body)
        elif kind == "conditional":
            sides = re.findall(r"(?:branch_computations=\{|_computation=)([^},]*(?:, [^}]*)?)", line)
            names = [part.strip(" %") for side in sides for part in side.split(",")]
            total += max((_size(computations, side) for side in names), default=0)
        elif kind == "call":
            (target,) = re.findall(r"to_apply=%?([\w.\-]+)", line)
            total += _size(computations, target)
        elif kind not in _FREE:
            total += 1
    return total


def session_us(session: jaxrl.Session, steps: int, repeats: int) -> dict[str, list[float]]:
    """Time `steps` steps of a session of one environment, those left out at which it learnt or waited for that.

    Returns the median microseconds of a step for each repeat, as `subject`; as `ceiling` those of the two compiled
    programs in it alone.
    """
    obs = np.ones(session._outside.spec.observation_space.shape, np.float32)
    while not session.opt_steps:
        _session_step(session, obs)
    samples: dict[str, list[float]] = {"subject": [], "ceiling": []}
    for repeat in range(repeats + 1):
        told = [us for us, learnt in (_session_step(session, obs) for _ in range(steps)) if not learnt]
        alone = _session_programs(session, obs, steps // 4)
        if repeat:
            samples["subject"].append(statistics.median(told))
            samples["ceiling"].append(alone)
    return samples


def _session_step(session: jaxrl.Session, obs: np.ndarray) -> tuple[float, bool]:
    begun = time.perf_counter()
    session.act(obs)
    learnt = session.observe(1.0, obs, False, False) is not None
    us = (time.perf_counter() - begun) * 1e6
    if learnt:
        jax.block_until_ready(session._now.state)
    return us, learnt


def _session_programs(session: jaxrl.Session, obs: np.ndarray, times: int) -> float:
    """Return the median microseconds of choosing an action and taking a step in, on a copy of the buffer."""
    now = session._now
    drawn, place = session._stepper.randomness(now.steps)
    told, buffer, us = now.state.last.told, jax.tree.map(jnp.copy, now.state.buffer), []
    for _ in range(times):
        begun = time.perf_counter()
        action, extras = session._stepper.act(now.state.agent, now.state.window.shown, drawn, place)
        np.array(action)
        buffer, window = session._stepper.take_in[True](buffer, now.state.window, action, extras, told, np.uint32(0))
        us.append((time.perf_counter() - begun) * 1e6)
    jax.block_until_ready((buffer, window))
    return statistics.median(us)
