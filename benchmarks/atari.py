"""`python -m benchmarks.atari [GAME] [--num-envs N ...] [--steps T] [--repeats R] [--quick] [--json FILE]`: its speed.

Vector steps with random actions, and the auto-reset that training has: of `ale:GAME` in a compiled loop, and of the
vectors that actors step on the host, of ALE's own threads, of Gymnasium in one process and in one each, and of EnvPool
where it is installed. All give one frame of 84 x 84 of each four, with sticky actions. They take turns in one process:
believe the ratios. Policies and learning are left out.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from jaxrl.envs import HostEnv, make_env
from jaxrl.envs.host import HostVectorEnv
from jaxrl.spaces import sample_space

COMPILED = "ale, compiled"


def compiled(env: HostEnv, num_envs: int, steps: int) -> harness.Sample:
    """Return a sample of `steps` vector steps in one compiled loop, in microseconds each."""
    assert env.vectorise is not None
    vector = env.vectorise(num_envs)

    @jax.jit
    def loop(state: Any, key: Any) -> Any:
        def one(state: Any, key: Any) -> tuple[Any, Any]:
            act_key, step_key = jax.random.split(key)
            state, step = vector.step(state, sample_space(env.spec.action_space, act_key, num_envs), step_key)
            return state, step.reward.sum()

        return jax.lax.scan(one, state, jax.random.split(key, steps))

    now, count = jax.jit(vector.reset)(jax.random.key(0))[0], itertools.count()

    def sample() -> float:
        nonlocal now
        begun = perf_counter()
        now, _ = jax.block_until_ready(loop(now, jax.random.key(next(count))))
        return 1e6 * (perf_counter() - begun) / steps

    return sample


@contextmanager
def stepped(env: HostEnv, num_envs: int, steps: int, processes: bool = False) -> Iterator[harness.Sample]:
    """Yield a sample of `steps` vector steps on the host, as an actor takes them, in microseconds each."""
    envs = HostVectorEnv(env, num_envs, 0, processes)
    envs.reset()
    actions = np.random.default_rng(0).integers(0, env.spec.action_space.n, (steps, num_envs)).astype(np.int32)

    def sample() -> float:
        begun = perf_counter()
        for action in actions:
            envs.step(action)
        return 1e6 * (perf_counter() - begun) / steps

    try:
        yield sample
    finally:
        envs.close()


def measured(game: str, num_envs: int, steps: int, repeats: int) -> harness.Row:
    """Return what a vector step of `num_envs` games takes by each way, and how many times that of the compiled loop."""
    ale, gymnasium = make_env(f"ale:{game}"), make_env(f"gymnasium:ALE/{game}-v5")
    ways: dict[str, Any] = {
        "ale, host": partial(stepped, ale),
        "gymnasium": partial(stepped, gymnasium),
        "gymnasium, processes": partial(stepped, gymnasium, processes=True),
    }
    if find_spec("envpool"):
        alike = {"stack_num": 1, "repeat_action_probability": 0.25}
        ways["envpool"] = partial(stepped, make_env(f"envpool:{game}-v5", **alike))
    with ExitStack() as opened:
        subjects = {COMPILED: compiled(ale, num_envs, steps)}
        subjects |= {name: opened.enter_context(way(num_envs, steps)) for name, way in ways.items()}
        samples = harness.interleave(subjects, repeats)
    return {
        "game": game,
        "num_envs": num_envs,
        "steps": steps,
        "repeats": repeats,
        "us": {name: harness.spread(found) for name, found in samples.items()},
        "ratio_to_compiled": {name: harness.ratio_spread(us, samples[COMPILED]) for name, us in samples.items()},
    }


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print a line for each way, and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.atari", description=__doc__, allow_abbrev=False)
    parser.add_argument("game", nargs="?", default="Pong")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=int, default=200, help="vector steps of one sample (default: 200)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    rows = []
    for num_envs in [2] if options.quick else options.num_envs:
        short = (5, 1) if options.quick else (options.steps, options.repeats)
        rows.append(measured(options.game, num_envs, *short))
        for name, (low, median, high) in rows[-1]["us"].items():
            ratio = rows[-1]["ratio_to_compiled"][name][1]
            print(f"{num_envs:>4} {name:<22} {median:>10,.0f} us ({low:,.0f} to {high:,.0f}), {ratio:.2f} of compiled")
        if options.json:
            harness.write(options.json, rows)


if __name__ == "__main__":
    main()
