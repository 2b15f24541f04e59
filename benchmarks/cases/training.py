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
from benchmarks import harness, loops, plain_ppo
from benchmarks.harness import Row
from benchmarks.plain import Setting, plain_dqn
from jaxrl.algos import build
from jaxrl.config import preset
from jaxrl.strategies.base import BLOCK
from jaxrl.strategies.on_policy import minibatches_of
from jaxrl.strategies.shuffle import random_orders


class Effort(NamedTuple):
    """How much to measure."""

    repeats: int = 7
    opt_steps: int = 3_000
    """Optimisation steps of one call."""
    profile: Path | None = None
    """Folder for a trace of one call of the subject, of which the dearest kernels are told."""


class DQN(NamedTuple):
    """DQN as most peers have it: no double Q-learning, squared loss."""

    env: str = "CartPole-v1"
    num_envs: int = 10
    opt_interval: int = 10
    features: tuple[int, ...] = (120, 84)
    batch_size: int = 128
    capacity: int = 10_000
    warmup: int = 1_000
    slowness: int = 1
    """Divides the optimisation steps of a call, where one takes long."""

    def agent(self) -> Any:
        return jaxrl.dqn(features=self.features, double=False, loss="squared", max_grad_norm=1e9)

    def plain(self, seeds: int = 1) -> loops.Loop:
        shape = Setting(self.env, self.num_envs, self.opt_interval, self.features, self.batch_size, self.capacity)
        return plain_dqn(shape, seeds)


class SAC(NamedTuple):
    """SAC as published, but for the environment."""

    env: str = "Pendulum-v1"
    num_envs: int = 1
    opt_interval: int = 1
    features: tuple[int, ...] = (256, 256)
    batch_size: int = 256
    capacity: int = 100_000
    warmup: int = 1_000
    slowness: int = 30

    def agent(self) -> Any:
        return jaxrl.sac(features=self.features)

    def plain(self) -> loops.Loop | None:
        return None


def buffer_of(shape: DQN | SAC) -> Any:
    """Return the replay buffer of a case."""
    return jaxrl.uniform(shape.capacity, batch_size=shape.batch_size)


def replaying(shape: DQN | SAC, actors: jaxrl.ActorsConfig | None = None) -> jaxrl.Strategy:
    """Return the strategy of a case that learns from replay."""
    return jaxrl.off_policy(
        jaxrl.make_env(shape.env),
        shape.agent(),
        buffer=buffer_of(shape),
        num_envs=shape.num_envs,
        opt_interval=shape.opt_interval,
        warmup=shape.warmup,
        actors=actors,
    )


def off_policy(case: str, shape: DQN | SAC, effort: Effort) -> list[Row]:
    """Training against the sum of its parts, each measured alone beside it."""
    strategy, buffer = replaying(shape), buffer_of(shape)
    whole, plain = loops.Training(strategy), shape.plain()
    env, updates = jaxrl.make_env(shape.env), strategy.opt_steps_per_step
    rows = strategy.env_steps_per_step
    vector_steps = rows // shape.num_envs
    iterations = max(1, effort.opt_steps // (updates * shape.slowness))
    parts = {
        "environment": (loops.environment(env, shape.num_envs), vector_steps),
        "acting": (loops.acting(env, shape.agent(), shape.num_envs), vector_steps),
        "replay": (loops.replay(buffer, whole.state.buffer, rows, updates), 1),
        "update": (
            loops.update(shape.agent()(env.spec), whole.state.agent, loops.replayed(buffer, whole.state, rows)),
            updates,
        ),
    }
    calls: dict[str, harness.Sample] = {"whole": lambda: whole.us(iterations)}
    if plain:
        calls["plain"] = lambda: plain.us(iterations * vector_steps) * vector_steps / updates
    for name, (loop, times) in parts.items():
        calls[name] = lambda loop=loop, times=times: loop.us(iterations * times) * times / updates
    samples = harness.interleave(calls, effort.repeats)
    profile(case, whole, iterations, effort)
    ceiling = [sum(column) for column in zip(*(samples[name] for name in parts), strict=True)]
    return [
        harness.row(
            case,
            samples["whole"],
            ceiling,
            rows / updates,
            parts_us={name: harness.spread(samples[name])[1] for name in parts},
            **beside_plain(samples),
            ratio_to_update=harness.median_ratio(samples["whole"], samples["update"]),
            kernels_per_iteration=loops.kernels_per_iteration(whole.compiled),
            copies_per_iteration=loops.copies_per_iteration(whole.compiled),
            **loops.memory(whole.compiled),
            compile_s=whole.compile_s,
            learnt=whole.learnt(),
            settings=dict(strategy.settings or {}),
        )
    ]


def beside_plain(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return how the whole compares with the plain loop, where there is one."""
    if "plain" not in samples:
        return {}
    return {
        "plain_us": harness.spread(samples["plain"])[1],
        "times_faster_than_plain": 1 / harness.median_ratio(samples["whole"], samples["plain"]),
    }


class PPO(NamedTuple):
    """PPO as most peers have it."""

    env: str = "CartPole-v1"
    num_envs: int = 4
    rollout: int = 128
    epochs: int = 4
    minibatches: int = 4
    features: tuple[int, ...] = (64, 64)
    slowness: int = 1
    """Divides the optimisation steps of a call, where one takes long."""

    def agent(self) -> Any:
        return jaxrl.ppo(features=self.features)

    def plain(self) -> plain_ppo.Setting:
        return plain_ppo.Setting(self.env, self.num_envs, self.rollout, self.epochs, self.minibatches, self.features)

    def strategy(self) -> jaxrl.Strategy:
        return jaxrl.on_policy(
            jaxrl.make_env(self.env),
            self.agent(),
            num_envs=self.num_envs,
            rollout=self.rollout,
            epochs=self.epochs,
            minibatches=self.minibatches,
        )


def ppo(case: str, shape: PPO, effort: Effort) -> list[Row]:
    """Training against the sum of its parts, each measured alone beside it."""
    strategy, env = shape.strategy(), jaxrl.make_env(shape.env)
    whole, plain = loops.Training(strategy), plain_ppo.plain_ppo(shape.plain())
    updates, steps = strategy.opt_steps_per_step, strategy.env_steps_per_step
    iterations = max(1, effort.opt_steps // (updates * shape.slowness))
    agent, state, rollout = loops.rollout_of(env, shape.agent(), shape.num_envs, shape.rollout)
    assert agent.prepare is not None
    prepared = jax.jit(agent.prepare)(state, rollout)
    take = minibatches_of(prepared, shape.minibatches)
    orders = random_orders(jax.random.key(3), 1, steps).reshape(shape.minibatches, -1)
    parts = {
        "environment": (loops.environment(env, shape.num_envs), shape.rollout),
        "acting": (loops.acting(env, shape.agent(), shape.num_envs), shape.rollout),
        "prepare": (loops.preparing(agent, state, rollout), 1),
        "shuffle": (loops.shuffling(prepared, shape.epochs, shape.minibatches), 1),
        "update": (loops.update(agent, state, jax.jit(jax.vmap(take))(orders)), updates),
    }
    calls: dict[str, harness.Sample] = {
        "whole": lambda: whole.us(iterations),
        "plain": lambda: plain.us(iterations) / updates,
    }
    for name, (loop, times) in parts.items():
        calls[name] = lambda loop=loop, times=times: loop.us(iterations * times) * times / updates
    samples = harness.interleave(calls, effort.repeats)
    profile(case, whole, iterations, effort)
    ceiling = [sum(column) for column in zip(*(samples[name] for name in parts), strict=True)]
    return [
        harness.row(
            case,
            samples["whole"],
            ceiling,
            steps / updates,
            parts_us={name: harness.spread(samples[name])[1] for name in parts},
            **beside_plain(samples),
            ratio_to_update=harness.median_ratio(samples["whole"], samples["update"]),
            share_of_shuffle=harness.median_ratio(samples["shuffle"], samples["whole"]),
            kernels_per_iteration=loops.kernels_per_iteration(whole.compiled),
            copies_per_iteration=loops.copies_per_iteration(whole.compiled),
            **loops.memory(whole.compiled),
            compile_s=whole.compile_s,
            learnt=whole.learnt(),
            settings=dict(strategy.settings or {}),
        )
    ]


def profile(case: str, loop: loops.Loop | loops.Training, iterations: int, effort: Effort) -> None:
    """Where asked for, trace one call and print the kernels that take 1 us and more of an iteration."""
    if effort.profile:
        for name, us, runs in loops.profile(loop, min(iterations, 1_000), effort.profile / case):
            if us >= 1:
                print(f"{case:<12}{us:>10.1f} us {runs:>8.2f} runs  {name}")


def seeds(case: str, count: int, effort: Effort) -> list[Row]:
    """Several seeds in one program against as many times one seed alone; steps are those of all seeds together.

    Once one after the other, which suits a CPU, and once all at once, which suits what has thousands of lanes.
    """
    shape = DQN()
    strategy = replaying(shape)
    one, plain = loops.Training(strategy), shape.plain(count)
    many = {"": (loops.in_turn(strategy, count), 3), " at once": (loops.population(strategy, count), 2)}
    iterations = max(BLOCK, effort.opt_steps // count)
    calls: dict[str, harness.Sample] = {
        "one": lambda: one.us(effort.opt_steps),
        "plain": lambda: plain.us(iterations, count),
    }
    for name, (loop, _) in many.items():
        calls[name] = lambda loop=loop: loop.us(iterations, count)
        profile(case + name, loop, iterations, effort)
    samples = harness.interleave(calls, effort.repeats)
    return [
        harness.row(
            case,
            samples[name],
            samples["one"],
            strategy.env_steps_per_step,
            name=case + name,
            seeds=count,
            **beside_plain({"whole": samples[name], "plain": samples["plain"]}),
            **loops.memory(loop.compiled),
            kernels_per_iteration=loops.kernels_per_iteration(loop.compiled, depth),
            compile_s=loop.compile_s,
            settings=dict(strategy.settings or {}),
        )
        for name, (loop, depth) in many.items()
    ]


def environment(case: str, num_envs: int, effort: Effort) -> list[Row]:
    """Stepping with auto-reset and random actions, against gymnax's own step in a scan of the usual style."""
    env = jaxrl.make_env("CartPole-v1")
    ours, theirs = loops.environment(env, num_envs), gymnax_loop(num_envs)
    iterations = max(10 * BLOCK, effort.opt_steps * 10 // num_envs)
    samples = harness.interleave(
        {"jaxrl": lambda: ours.us(iterations), "gymnax": lambda: theirs.us(iterations)}, effort.repeats
    )
    profile(case, ours, iterations, effort)
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
    """Return gymnax's own vmapped `step` with random actions, a key split per use, as its README has it."""
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    _, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(jax.random.key(0), num_envs), params)

    def step(t: Any, carry: Any) -> Any:
        state, key, seen = carry
        key, action_key, step_key = jax.random.split(key, 3)
        action = jax.vmap(env.action_space(params).sample)(jax.random.split(action_key, num_envs))
        keys = jax.random.split(step_key, num_envs)
        obs, state, reward, _, _, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state, action, params)
        return state, key, seen + reward.sum() + obs.sum() + info["final_observation"].sum()

    def run(carry: Any, start: Any, stop: Any) -> Any:
        return jax.lax.fori_loop(start, stop, step, carry)

    return loops.Loop(run, (state, jax.random.key(1), jnp.float32(0)), usual=True)


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


def actors(case: str, effort: Effort) -> list[Row]:
    """Two actors and a learner by `Trainer`, against the slower of the two sides alone.

    That is the limit if the sides hindered one another in nothing: the learner's compiled iterations, or as many steps
    of Gymnasium's own vectors with random actions, in as many threads. The steps that the actors take ahead of a call
    end with it, for the learner falls behind by no more than `max_lag` rounds.
    """
    try:
        import gymnasium  # noqa: F401
    except ImportError:
        print(f"{case}: left out, it needs Gymnasium: pip install 'jaxrl[gymnasium]'", file=sys.stderr)
        return []
    threads, shape = 2, DQN("gymnasium:CartPole-v1", num_envs=5)
    strategy = replaying(shape, jaxrl.ActorsConfig(actors=threads))
    iterations = max(1, effort.opt_steps // strategy.opt_steps_per_step)
    opts = iterations * strategy.opt_steps_per_step
    vector_steps = opts * shape.opt_interval // (threads * shape.num_envs)
    learner = loops.Learner(strategy)
    envs = loops.GymnasiumThreads("CartPole-v1", threads, shape.num_envs)
    # A row for each call: actors wait between them, once they are as far ahead as they may be.
    trainer = jaxrl.Trainer(
        strategy,
        max_opts=(effort.repeats + 1) * opts,
        eval_interval=0,
        eval_episodes=50,
        record_interval=opts,
        save_interval=0,
        recorders=[],
    )
    reports = iter(trainer)

    def whole() -> float:
        row = next(reports).train
        assert row is not None
        return 1e6 / float(row["opt_steps_per_sec"])

    samples = harness.interleave(
        {
            "whole": whole,
            "learner": lambda: learner.us(iterations),
            "environments": lambda: envs.us(vector_steps) * vector_steps / opts,
        },
        effort.repeats,
    )
    for _ in reports:
        pass
    result = trainer.result()
    ceiling = [max(sides) for sides in zip(samples["learner"], samples["environments"], strict=True)]
    return [
        harness.row(
            case,
            samples["whole"],
            ceiling,
            shape.opt_interval,
            parts_us={name: harness.spread(samples[name])[1] for name in ("learner", "environments")},
            compile_s=learner.training.compile_s,
            learnt={"opt_steps": trainer.config.max_opts, "mean_return": result.best_score},
            staleness=result.summary["staleness"],
            settings=dict(strategy.settings or {}),
        )
    ]


def capacity(case: str, effort: Effort) -> list[Row]:
    """Training with full buffers of 10^4, 10^5 and 10^6 items, against the first: neither time nor memory may grow."""
    sizes = (10**4, 10**5, 10**6)
    whole = {size: loops.Training(replaying(DQN(capacity=size, warmup=size))) for size in sizes}
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
            **loops.memory(loop.compiled),
            kernels_per_iteration=loops.kernels_per_iteration(loop.compiled),
            compile_s=loop.compile_s,
            settings=dict(loop.strategy.settings or {}),
        )
        for size, loop in whole.items()
    ]


def session(case: str, effort: Effort) -> list[Row]:
    """A step of a session, `act` and `observe` without the optimisation, against its two programs alone."""
    shape = DQN(num_envs=1)
    spec = jaxrl.make_env(shape.env).spec
    driven = jaxrl.Session(
        spec,
        shape.agent(),
        buffer=buffer_of(shape),
        processor=jaxrl.n_step(3),
        opt_interval=shape.opt_interval,
        warmup=shape.warmup,
        max_opts=10**9,
    )
    steps = max(100, effort.opt_steps)
    return [
        harness.row(
            case,
            **loops.session_us(driven, steps, effort.repeats),
            env_steps=1,
            unit="one environment step",
            settings=driven.settings(),
        )
    ]


def replay(case: str, effort: Effort) -> list[Row]:
    """A push of 10 items, a sample of 128 and new priorities: prioritised against uniform, flashbax's beside both."""
    told = []
    state: Any = jax.jit(replaying(DQN()).init)(jax.random.key(0))
    example = jax.tree.map(lambda x: x[0], state.buffer.items)
    for size in (10**4, 10**6):
        ours = {
            "prioritised": jaxrl.prioritised(size, 128),
            "prioritised, weights over all": jaxrl.prioritised(size, 128, normalise="all"),
            "uniform": jaxrl.uniform(size, 128),
        }
        contestants = {
            name: loops.replay(buffer, loops.filled(buffer, example, 10), 10, 1) for name, buffer in ours.items()
        }
        contestants |= loops.flashbax_replay(size, 128, example, 10)
        calls: dict[str, harness.Sample] = {
            name: lambda loop=loop: loop.us(effort.opt_steps) for name, loop in contestants.items()
        }
        samples = harness.interleave(calls, effort.repeats)
        told += [
            harness.row(
                case,
                samples[name],
                samples["uniform"],
                10,
                name=f"{case} {size:,} {name}",
                unit="a push, a sample and new priorities",
                capacity=size,
                kernels_per_iteration=loops.kernels_per_iteration(loop.compiled),
                **loops.memory(loop.compiled),
                compile_s=loop.compile_s,
            )
            for name, loop in contestants.items()
        ]
    return told


def start(case: str, effort: Effort) -> list[Row]:
    """Seconds from the command to the first optimisation, with an empty compilation cache and with a warm one."""
    seconds: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(max(2, effort.repeats // 2)):
        with tempfile.TemporaryDirectory() as folder:
            for kind in seconds:
                seconds[kind].append(_seconds_to_first_step(Path(folder)))
    first = {kind: [1e6 * one for one, _ in both] for kind, both in seconds.items()}
    return [
        harness.row(
            case,
            first[kind],
            first["cold"],
            0,
            name=f"{case} {kind}",
            unit="from the command to the first optimisation step",
            whole_command_s=harness.spread([whole for _, whole in seconds[kind]])[1],
        )
        for kind in seconds
    ]


def _seconds_to_first_step(cache: Path) -> tuple[float, float]:
    """Return the seconds from the command to the row of its only optimisation step, and to its end."""
    command = [sys.executable, "-m", "jaxrl.train", "--max-opts", "1", "--eval-interval", "0", "--eval-episodes", "0"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        subprocess.run([*command, "--quiet", "--run-dir", f"{folder}/run"], check=True, env=env)
        # The log is last written to for that row.
        return Path(folder, "run", "metrics.jsonl").stat().st_mtime - begun, time.time() - begun


Case = Callable[[Effort], list[Row]]


def _dqn(case: str, num_envs: int, effort: Effort) -> list[Row]:
    """One optimisation per 10 environment steps where that divides, per vector step otherwise."""
    opt_interval = num_envs if 10 % num_envs else 10
    warmup = max(1_000, 2 * num_envs)
    shape = DQN(num_envs=num_envs, opt_interval=opt_interval, warmup=warmup - warmup % -num_envs)
    return off_policy(case, shape, effort)


def _ppo(case: str, num_envs: int, effort: Effort) -> list[Row]:
    return ppo(case, PPO(num_envs=num_envs, slowness=max(1, num_envs // 16)), effort)


SIZES: dict[str, Callable[[str, int, Effort], list[Row]]] = {
    "dqn": _dqn,
    "ppo": _ppo,
    "seeds": seeds,
    "env": environment,
}
"""Cases that there are of every size: environments, or seeds."""


def sized(name: str) -> Case:
    """Return the case `KIND-SIZE`; raise `KeyError` if there is none."""
    kind, _, size = name.partition("-")
    if not (size.isdecimal() and int(size)):
        raise KeyError(name)
    return partial(SIZES[kind], name, int(size))


def case_named(name: str) -> Case:
    """Return the case `name`; raise `KeyError` if there is none."""
    return CASES.get(name) or sized(name)


CASES: dict[str, Case] = {
    **{name: sized(name) for name in ("dqn-1", "dqn-10", "dqn-128", "dqn-1024")},
    **{
        name: partial(off_policy, name, shape)
        for name, shape in {
            "dqn-small": DQN(features=(64, 64), batch_size=32),
            "dqn-conv": DQN("Breakout-MinAtar", 16, 16, batch_size=32, warmup=1_008, slowness=10),
            "sac": SAC(),
        }.items()
    },
    **{name: sized(name) for name in ("ppo-4", "ppo-64", "ppo-1024", "seeds-8", "seeds-32")},
    "session": partial(session, "session"),
    "capacity": partial(capacity, "capacity"),
    "replay": partial(replay, "replay"),
    "host": partial(host, "host"),
    "actors": partial(actors, "actors"),
    "start": partial(start, "start"),
    **{name: sized(name) for name in ("env-10", "env-1024")},
}
