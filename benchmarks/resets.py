"""Time the kinds of resets of an environment: `python -m benchmarks.resets ENV [--num-envs N] [--json FILE]`.

Each kind steps `N` environments with random actions, all in one compiled loop, in turn with a loop that steps without
any reset, which is the limit. Suites need their packages, as in `craftax:Craftax-Classic-Symbolic-v1`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import Row, Sample, header, interleave, row
from jaxrl.envs import Env, HostEnv, make_env, vectorise
from jaxrl.errors import SettingsError
from jaxrl.spaces import sample_space

KINDS = ("fresh", "pool", "optimistic", "auto")


def bare(env: Env, n: int, steps: int) -> Sample:
    """Step `n` environments on and on, past the ends of their episodes."""

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        act, move = jax.random.split(key)
        actions = sample_space(env.spec.action_space, act, n)
        state, out = jax.vmap(env.step)(state, actions, jax.random.split(move, n))
        return state, out.reward.sum()

    return sampler(step, jax.vmap(lambda key: env.reset(key)[0])(jax.random.split(jax.random.key(0), n)), steps)


def with_resets(env: Env, n: int, steps: int, kind: str) -> Sample:
    """Step `n` environments that begin anew where an episode ends."""
    many = vectorise(env, n, kind)

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        act, move = jax.random.split(key)
        state, out = many.step(state, sample_space(env.spec.action_space, act, n), move)
        return state, out.reward.sum()

    return sampler(step, jax.jit(many.reset)(jax.random.key(0))[0], steps)


def sampler(step: Callable[[Any, jax.Array], tuple[Any, jax.Array]], state: Any, steps: int) -> Sample:
    """Compile a loop of `steps`; return what runs it once more and tells microseconds a vector step."""
    run = jax.jit(lambda state, key: jax.lax.scan(step, state, jax.random.split(key, steps)))
    held = [state, 0]

    def sample() -> float:
        begun = time.perf_counter()
        held[0] = jax.block_until_ready(run(held[0], jax.random.key(held[1])))[0]
        held[1] += 1
        return (time.perf_counter() - begun) / steps * 1e6

    sample()  # compiles
    return sample


def measure(name: str, n: int, steps: int, repeats: int) -> list[Row]:
    """Return a row for each kind of resets."""
    env = make_env(name)
    if isinstance(env, HostEnv):
        raise SettingsError(f"{name} is stepped on the host; resets are of environments on the device")
    subjects = {"without": bare(env, n, steps), **{kind: with_resets(env, n, steps, kind) for kind in KINDS}}
    times = interleave(subjects, repeats)
    return [
        row(f"{name} {kind}", times[kind], times["without"], n, resets=vectorise(env, n, kind).resets, num_envs=n)
        for kind in KINDS
    ]


def main() -> None:
    """Measure, print a table, and write the rows where asked to."""
    parser = argparse.ArgumentParser("python -m benchmarks.resets", description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.env, options.num_envs, options.steps, options.repeats)
    for found in rows:
        low, middle, high = found["ratio_spread"]
        print(f"{found['case']:60} {middle:6.2f} times stepping without resets ({low:.2f} to {high:.2f})")
    if options.json:
        options.json.write_text(json.dumps({"header": header(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
