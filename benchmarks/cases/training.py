"""Cases of the compiled training loop: against its parts, over several seeds, with larger buffers."""

from collections.abc import Mapping
from typing import Any

import jax

import jaxrl
from benchmarks import harness, inside, loops, outside, plain_ppo
from benchmarks.cases import scans
from benchmarks.cases.shapes import DQN, PPO, SAC, buffer_of, replaying
from benchmarks.harness import Effort, Row
from jaxrl.strategies.on_policy import make_minibatches
from jaxrl.xla.ahead import BLOCK
from jaxrl.xla.shuffle import random_orders

Parts = Mapping[str, tuple[loops.Loop, int]]
"""A loop for each part of an iteration, and how often the part runs in it."""


def off_policy(case: str, shape: DQN | SAC, effort: Effort) -> list[Row]:
    """Training against the sum of its parts, each measured alone beside it."""
    strategy, buffer = replaying(shape), buffer_of(shape)
    whole, plain = loops.Training(strategy), shape.plain()
    scan = scans.off_policy(shape, strategy, whole.state)
    env, updates, rows = jaxrl.make_env(shape.env), strategy.opt_steps_per_step, strategy.env_steps_per_step
    vector_steps = rows // shape.num_envs
    batches = loops.replayed(buffer, whole.state, rows)
    parts = {
        "environment": (loops.environment(env, shape.num_envs), vector_steps),
        "acting": (loops.acting(env, shape.agent(), shape.num_envs), vector_steps),
        "replay": (loops.replay(buffer, whole.state.buffer, rows, updates), 1),
        "update": (loops.update(shape.agent()(env.spec), whole.state.agent, batches), updates),
    }
    return [against_parts(case, whole, scan, plain, vector_steps, parts, effort, shape.slowness)]


def ppo(case: str, shape: PPO, effort: Effort) -> list[Row]:
    """Training against the sum of its parts, each measured alone beside it."""
    strategy, env = shape.strategy(), jaxrl.make_env(shape.env)
    whole, plain = loops.Training(strategy), plain_ppo.plain_ppo(shape.plain())
    scan = scans.on_policy(shape, strategy, whole.state)
    agent, state, rollout = loops.rollout_of(env, shape.agent(), shape.num_envs, shape.rollout)
    assert agent.prepare is not None
    prepared = jax.jit(agent.prepare)(state, rollout)
    take = make_minibatches(prepared, shape.minibatches)
    orders = random_orders(jax.random.key(3), 1, strategy.env_steps_per_step).reshape(shape.minibatches, -1)
    batches = jax.jit(jax.vmap(take))(orders)
    parts = {
        "environment": (loops.environment(env, shape.num_envs), shape.rollout),
        "acting": (loops.acting(env, shape.agent(), shape.num_envs), shape.rollout),
        "prepare": (loops.preparing(agent, state, rollout), 1),
        "shuffle": (loops.shuffling(prepared, shape.epochs, shape.minibatches), 1),
        "update": (loops.update(agent, state, batches), strategy.opt_steps_per_step),
    }
    return [against_parts(case, whole, scan, plain, 1, parts, effort, shape.slowness)]


def against_parts(
    case: str,
    whole: loops.Training,
    scan: loops.Loop,
    plain: loops.Loop | None,
    plain_iterations: int,
    parts: Parts,
    effort: Effort,
    slowness: int,
) -> Row:
    """Time training, a bare scan, a plain loop and each part in turn; return the row of the case.

    Args:
      case: its name.
      whole: the training.
      scan: what it is made of, in one scan.
      plain: the plain loop, where there is one.
      plain_iterations: how many of its iterations make one of the training's.
      parts: the parts of an iteration.
      effort: how much to measure.
      slowness: divides the optimisation steps of a call.
    """
    strategy = whole.strategy
    updates = strategy.opt_steps_per_step
    iterations = max(1, effort.opt_steps // (updates * slowness))
    calls: dict[str, harness.Sample] = {
        "whole": lambda: whole.us(iterations),
        "scan": lambda: scan.us(iterations, updates),
    }
    others = {**parts, **({"plain": (plain, plain_iterations)} if plain else {})}
    for name, (loop, times) in others.items():
        calls[name] = lambda loop=loop, times=times: loop.us(iterations * times) * times / updates
    samples = harness.interleave(calls, effort.repeats)
    profile(case, whole, iterations, effort)
    return harness.row(
        case,
        samples["whole"],
        [sum(column) for column in zip(*(samples[name] for name in parts), strict=True)],
        strategy.env_steps_per_step / updates,
        parts_us={name: harness.spread(samples[name])[1] for name in parts},
        **beside_plain(samples),
        scan_us=harness.spread(samples["scan"])[1],
        ratio_to_scan=harness.median_ratio(samples["whole"], samples["scan"]),
        ratio_to_update=harness.median_ratio(samples["whole"], samples["update"]),
        **inside.figures(whole.compiled, updates=updates),
        compile_s=whole.compile_s,
        learnt=whole.learnt(),
        settings=dict(strategy.info.settings or {}),
    )


def beside_plain(samples: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return how the whole compares with the plain loop, where there is one."""
    if "plain" not in samples:
        return {}
    return {
        "plain_us": harness.spread(samples["plain"])[1],
        "plain_ratio_spread": harness.ratio_spread(samples["whole"], samples["plain"]),
        "times_faster_than_plain": 1 / harness.median_ratio(samples["whole"], samples["plain"]),
    }


def profile(case: str, loop: loops.Loop | loops.Training, iterations: int, effort: Effort) -> None:
    """Where asked for, trace one call and print the kernels that take 1 us and more of an iteration."""
    if effort.profile:
        for name, us, runs in inside.profile(loop, min(iterations, 1_000), effort.profile / case):
            if us >= 1:
                print(f"{case:<12}{us:>10.1f} us {runs:>8.2f} runs  {name}")


def seeds(case: str, count: int, effort: Effort) -> list[Row]:
    """Several seeds against as many times one seed alone; steps are those of all seeds together.

    In one program, once one after the other, which suits one core, and once all at once, which suits what has thousands
    of lanes; and as users train them, by `Trainer` from the warm-up on, side by side on all cores.
    """
    shape = DQN()
    strategy = replaying(shape)
    one, plain = loops.Training(strategy), shape.plain(count)
    # Beside each loop: how deep in it an iteration stands, and how many optimisation steps that is.
    many = {"": (loops.in_turn(strategy, count), 3, 1), " at once": (loops.population(strategy, count), 2, count)}
    iterations = max(BLOCK, effort.opt_steps // count)
    calls: dict[str, harness.Sample] = {
        "one": lambda: one.us(effort.opt_steps),
        "plain": lambda: plain.us(iterations, count),
    }
    for name, (loop, _, _) in many.items():
        calls[name] = lambda loop=loop: loop.us(iterations, count)
        profile(case + name, loop, iterations, effort)
    calls["members"] = lambda: outside.population_us(strategy, count, max(effort.opt_steps, 1))
    samples = harness.interleave(calls, effort.repeats)
    told = harness.row(
        case,
        samples["members"],
        samples["one"],
        strategy.env_steps_per_step,
        name=f"{case} members",
        seeds=count,
        **beside_plain({"whole": samples["members"], "plain": samples["plain"]}),
        settings=dict(strategy.info.settings or {}),
    )
    return [
        told,
        *[
            harness.row(
                case,
                samples[name],
                samples["one"],
                strategy.env_steps_per_step,
                name=case + name,
                seeds=count,
                **beside_plain({"whole": samples[name], "plain": samples["plain"]}),
                **inside.figures(loop.compiled, depth, updates),
                compile_s=loop.compile_s,
                learnt=loops.learnt(
                    strategy, [jax.tree.map(lambda x, i=i: x[i], loop.carry) for i in range(count)], loop.t
                ),
                settings=dict(strategy.info.settings or {}),
            )
            for name, (loop, depth, updates) in many.items()
        ],
    ]


def capacity(case: str, effort: Effort) -> list[Row]:
    """Training with full buffers of 10^4, 10^5 and 10^6 items, against the first: neither time nor memory may grow.

    A row in which one of them did says so as `failed`.
    """
    sizes = (10**4, 10**5, 10**6)
    whole = {size: loops.Training(replaying(DQN(capacity=size, warmup=size))) for size in sizes}
    calls: dict[str, harness.Sample] = {
        str(size): lambda loop=loop: loop.us(effort.opt_steps) for size, loop in whole.items()
    }
    samples = harness.interleave(calls, effort.repeats)
    rows = [
        harness.row(
            case,
            samples[str(size)],
            samples[str(sizes[0])],
            loop.strategy.env_steps_per_step,
            name=f"{case} {size:,}",
            capacity=size,
            **inside.figures(loop.compiled),
            compile_s=loop.compile_s,
            learnt=loop.learnt(),
            settings=dict(loop.strategy.info.settings or {}),
        )
        for size, loop in whole.items()
    ]
    return [{**row, "failed": growth(rows[0], row)} for row in rows]


GROWTH = 1.1
"""Times as long as with the smallest buffer that an iteration may take, beyond the noise of the repeats."""


def growth(smallest: Row, row: Row) -> str | None:
    """Say what grew with the capacity, in a row with a larger buffer than that of `smallest`; None if nothing did.

    Of one repeat nobody knows the noise, so its time is not judged.
    """
    more = row["temp_bytes"] - smallest["temp_bytes"]
    if more > (row["state_bytes"] - smallest["state_bytes"]) // 100:
        return f"needs {more:,} bytes more beside its state than with {smallest['capacity']:,} items"
    if row["repeats"] > 1 and row["ratio_to_ceiling"] > GROWTH and row["spread"][0] > smallest["spread"][2]:
        return f"takes {row['ratio_to_ceiling']:.2f} times as long as with {smallest['capacity']:,} items"
    return None
