"""The cases: what is timed, against which limit."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl
from benchmarks import harness, loops
from benchmarks.harness import Row
from jaxrl.config import build, preset
from jaxrl.strategies.base import BLOCK, fold


class Effort(NamedTuple):
    """How much to measure."""

    repeats: int = 7
    opt_steps: int = 3_000
    """Optimisation steps of one call."""


class DQN(NamedTuple):
    """DQN as the peers run it: one Q network, no double Q-learning."""

    env: str = "CartPole-v1"
    num_envs: int = 10
    opt_interval: int = 10
    features: tuple[int, ...] = (120, 84)
    batch_size: int = 128
    capacity: int = 10_000
    warmup: int = 1_000

    def agent(self) -> Any:
        return jaxrl.dqn(features=self.features, double=False, max_grad_norm=1e9)

    def buffer(self) -> Any:
        return jaxrl.uniform(self.capacity, batch_size=self.batch_size)

    def strategy(self) -> jaxrl.Strategy:
        return jaxrl.off_policy(
            jaxrl.make_env(self.env),
            self.agent(),
            buffer=self.buffer(),
            num_envs=self.num_envs,
            opt_interval=self.opt_interval,
            warmup=self.warmup,
        )


def dqn(case: str, shape: DQN, effort: Effort) -> list[Row]:
    """Training against the sum of its parts, each measured alone beside it."""
    strategy = shape.strategy()
    whole = loops.Training(strategy)
    env, updates = jaxrl.make_env(shape.env), strategy.opt_steps_per_step
    rows = strategy.env_steps_per_step
    vector_steps = rows // shape.num_envs
    iterations = max(1, effort.opt_steps // updates)
    parts = {
        "environment": (loops.environment(env, shape.num_envs), vector_steps),
        "acting": (loops.acting(env, shape.agent(), shape.num_envs), vector_steps),
        "replay": (loops.replay(shape.buffer(), whole.state, rows, updates), 1),
        "update": (loops.update(env, shape.agent(), shape.buffer(), whole.state, rows), updates),
    }
    calls: dict[str, harness.Sample] = {"whole": lambda: whole.us(iterations)}
    for name, (loop, times) in parts.items():
        calls[name] = lambda loop=loop, times=times: loop.us(iterations * times) * times / updates
    samples = harness.interleave(calls, effort.repeats)
    ceiling = [sum(column) for column in zip(*(samples[name] for name in parts), strict=True)]
    return [
        harness.row(
            case,
            samples["whole"],
            ceiling,
            rows / updates,
            parts_us={name: harness.spread(samples[name])[1] for name in parts},
            ratio_to_update=harness.median_ratio(samples["whole"], samples["update"]),
            kernels_per_iteration=loops.kernels_per_iteration(whole.compiled),
            copies_per_iteration=loops.copies_per_iteration(whole.compiled),
            temp_bytes=whole.compiled.memory_analysis().temp_size_in_bytes,
            compile_s=whole.compile_s,
            learnt=whole.learnt(),
            settings=dict(strategy.settings or {}),
        )
    ]


def seeds(case: str, count: int, effort: Effort) -> list[Row]:
    """Several seeds in one program against as many times one seed alone; steps are those of all seeds together."""
    strategy = DQN().strategy()
    one, many = loops.Training(strategy), loops.population(strategy, count)
    iterations = max(1, effort.opt_steps // count)
    samples = harness.interleave(
        {"many": lambda: many.us(iterations, count), "one": lambda: one.us(iterations)}, effort.repeats
    )
    return [
        harness.row(
            case,
            samples["many"],
            samples["one"],
            strategy.env_steps_per_step,
            seeds=count,
            kernels_per_iteration=loops.kernels_per_iteration(many.compiled),
            compile_s=many.compile_s,
            settings=dict(strategy.settings or {}),
        )
    ]


def environment(case: str, num_envs: int, effort: Effort) -> list[Row]:
    """Stepping with auto-reset and random actions, against gymnax's own step in a scan of the usual style."""
    env = jaxrl.make_env("CartPole-v1")
    ours, theirs = loops.environment(env, num_envs), gymnax_loop(num_envs)
    iterations = max(10 * BLOCK, effort.opt_steps * 10 // num_envs)
    samples = harness.interleave(
        {"jaxrl": lambda: ours.us(iterations), "gymnax": lambda: theirs.us(iterations)}, effort.repeats
    )
    return [
        harness.row(
            case,
            samples["jaxrl"],
            samples["gymnax"],
            num_envs,
            unit="one vector step",
            kernels_per_iteration=loops.kernels_per_iteration(ours.compiled),
            compile_s=ours.compile_s,
            times_faster=1 / harness.median_ratio(samples["jaxrl"], samples["gymnax"]),
        )
    ]


def gymnax_loop(num_envs: int) -> loops.Loop:
    """Return gymnax's own vmapped `step` with random actions, keys split in the loop."""
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    _, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(jax.random.key(0), num_envs), params)

    def step(carry: Any, key: Any, t: Any) -> Any:
        del t
        state, seen = carry
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (num_envs,), 0, 2)
        keys = jax.random.split(step_key, num_envs)
        obs, state, reward, _, _, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state, action, params)
        return state, seen + reward.sum() + obs.sum() + info["final_observation"].sum()

    def run(carry: Any, start: Any, stop: Any) -> Any:
        return jax.lax.fori_loop(start, stop, lambda t, c: step(c, fold(jax.random.key(1), t), t), carry)

    return loops.Loop(run, (state, jnp.float32(0)))


def host(case: str, effort: Effort) -> list[Row]:
    """Training by `Trainer` with evaluation, records and saves, against the same iterations in one bare call."""
    config = preset("dqn")
    strategy = build("dqn", config)
    bare = loops.Training(strategy)
    opts = config.max_opts if effort.opt_steps >= 3_000 else effort.opt_steps
    told: list[dict[str, Any]] = []

    def trainer() -> float:
        with tempfile.TemporaryDirectory() as folder:
            summary = jaxrl.Trainer(
                strategy,
                max_opts=opts,
                eval_interval=config.eval_interval,
                eval_episodes=config.eval_episodes,
                record_interval=config.record_interval,
                save_interval=config.save_interval,
                run_dir=f"{folder}/run",
                quiet=True,
            ).train()
        told.append(summary.summary)
        return float(summary.summary["seconds"]["train"]) / opts * 1e6

    samples = harness.interleave({"trainer": trainer, "bare": lambda: bare.us(opts)}, effort.repeats)
    steps = strategy.env_steps_per_step / strategy.opt_steps_per_step
    best = max(float(summary["best_score"] or 0.0) for summary in told)
    return [
        harness.row(
            case,
            samples["trainer"],
            samples["bare"],
            steps,
            compile_s=bare.compile_s,
            kernels_per_iteration=loops.kernels_per_iteration(bare.compiled),
            learnt={"opt_steps": opts, "mean_return": best},
            seconds=told[-1]["seconds"],
            settings=dict(strategy.settings or {}),
        )
    ]


def capacity(case: str, effort: Effort) -> list[Row]:
    """Training with full buffers of 10^4, 10^5 and 10^6 items, against the first: neither time nor memory may grow."""
    sizes = (10**4, 10**5, 10**6)
    whole = {size: loops.Training(DQN(capacity=size, warmup=size).strategy()) for size in sizes}
    calls: dict[str, harness.Sample] = {
        str(size): lambda loop=loop: loop.us(effort.opt_steps) for size, loop in whole.items()
    }
    samples = harness.interleave(calls, effort.repeats)
    return [
        harness.row(
            case,
            samples[str(size)],
            samples[str(sizes[0])],
            loop.strategy.env_steps_per_step,
            name=f"{case} {size:,}",
            capacity=size,
            temp_bytes=loop.compiled.memory_analysis().temp_size_in_bytes,
            kernels_per_iteration=loops.kernels_per_iteration(loop.compiled),
            compile_s=loop.compile_s,
            settings=dict(loop.strategy.settings or {}),
        )
        for size, loop in whole.items()
    ]


def start(case: str, effort: Effort) -> list[Row]:
    """Seconds from the command to the first optimisation, with an empty compilation cache and with a warm one."""
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(max(2, effort.repeats // 2)):
        with tempfile.TemporaryDirectory() as folder:
            for kind in samples:
                samples[kind].append(_seconds_to_first_step(Path(folder)))
    unit = "the whole command, of one optimisation step"
    micro = {kind: [1e6 * second for second in seconds] for kind, seconds in samples.items()}
    return [
        harness.row(case, micro[kind], micro["cold"], 0, name=f"{case} {kind}", unit=unit) for kind in ("cold", "warm")
    ]


def _seconds_to_first_step(cache: Path) -> float:
    command = [sys.executable, "-m", "jaxrl.train", "--max-opts", "1", "--eval-interval", "0", "--eval-episodes", "0"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        subprocess.run([*command, "--quiet", "--run-dir", f"{folder}/run"], check=True, env=env)
        return time.perf_counter() - begun


CASES: dict[str, Callable[[Effort], list[Row]]] = {
    **{
        name: partial(dqn, name, shape)
        for name, shape in {
            "dqn-1": DQN(num_envs=1),
            "dqn-10": DQN(),
            "dqn-128": DQN(num_envs=128, opt_interval=128, warmup=1_280),
            "dqn-1024": DQN(num_envs=1024, opt_interval=1024, warmup=2_048),
            "dqn-small": DQN(features=(64, 64), batch_size=32),
            "dqn-conv": DQN("Breakout-MinAtar", 16, 16, batch_size=32, warmup=1_008),
        }.items()
    },
    "seeds-8": partial(seeds, "seeds-8", 8),
    "seeds-32": partial(seeds, "seeds-32", 32),
    "capacity": partial(capacity, "capacity"),
    "host": partial(host, "host"),
    "start": partial(start, "start"),
    "env-10": partial(environment, "env-10", 10),
    "env-1024": partial(environment, "env-1024", 1024),
}
