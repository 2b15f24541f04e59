"""Cases of single parts, each against what others have for it: environments, replay, a step of a session."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from benchmarks import harness, inside, loops, outside
from benchmarks.cases.shapes import DQN, buffer_of, replaying
from benchmarks.cases.training import profile
from benchmarks.harness import Effort, Row
from jaxrl.xla.ahead import BLOCK


def environment(case: str, num_envs: int, effort: Effort) -> list[Row]:
    """Stepping with auto-reset and random actions, against gymnax's own step in a scan of the usual style."""
    env = jaxrl.make_env("CartPole-v1")
    ours, theirs = loops.environment(env, num_envs), gymnax_loop(num_envs)
    iterations = max(10 * BLOCK, effort.opt_steps * 100 // num_envs)  # shorter calls are mostly their own beginning
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
            settings={"env": "CartPole-v1", "num_envs": num_envs},
            **inside.figures(ours.compiled),
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
                settings={"capacity": size, "pushed": 10, "batch_size": 128},
                capacity=size,
                **inside.figures(loop.compiled),
                compile_s=loop.compile_s,
            )
            for name, loop in contestants.items()
        ]
    return told


def session(case: str, effort: Effort) -> list[Row]:
    """A step of a session, `act` and `observe` without the optimisation, against its two programs alone."""
    shape = DQN(num_envs=1)
    spec = jaxrl.make_env(shape.env).spec
    stepwise = jaxrl.Session(
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
            **outside.session_us(stepwise, steps, effort.repeats),
            env_steps=1,
            unit="one environment step",
            settings=stepwise.settings(),
        )
    ]
