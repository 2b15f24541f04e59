"""`python -m benchmarks.scale [D] [--repeats R] [--quick] [--json FILE]`: several devices of a CPU.

PPO with 1024 environments in one shard, in D shards on one device, and in D shards on D devices; and 2 D members, DQN
with 10 environments each, one at a time and D at a time on one device, and on D devices. All in turn, in one process,
so that ratios are of pairs. Compiling is left out, warm-up and set-up of members are not.

A single device of a CPU computes on all cores. What D devices gain over one that has as much as each of them is seen
where all threads of the process are held on one core for the latter.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Effort(NamedTuple):
    """How much to measure."""

    opts: int = 3_000
    """Optimisation steps of each member."""
    iterations: int = 4
    """Of PPO in a call."""
    num_envs: int = 1_024
    """Of PPO."""


QUICK = Effort(10, 1, 64)


class Pair(NamedTuple):
    """What is held against what."""

    subject: str
    reference: str


PAIRS = {
    "PPO-1024, D devices on D cores against one on one core": Pair("shards on D", "shards on 1, one core"),
    "PPO-1024, D devices against one, both on all cores": Pair("shards on D", "shards on 1"),
    "PPO-1024, D shards on one device against none": Pair("shards on 1", "no shards"),
    "PPO-1024, D shards on one device against none, on one core": Pair("shards on 1, one core", "no shards, one core"),
    "members on D devices against one at a time, on one core": Pair("members on D", "members in turn, one core"),
    "members on D devices against one at a time, on all cores": Pair("members on D", "members in turn"),
    "members on D devices against D at a time on one": Pair("members on D", "members on 1"),
}


def subjects(devices: int, effort: Effort) -> dict[str, Callable[[], float]]:
    """Return what is timed, each of which returns microseconds an optimisation step."""
    from benchmarks import loops
    from benchmarks.cases import DQN, ppo_shape
    from benchmarks.cases.shapes import replaying
    from jaxrl.training.devices import on_devices

    shape = ppo_shape(effort.num_envs)
    spread = {
        "no shards": loops.Training(ppo(shape, 1)),
        "shards on 1": loops.Training(ppo(shape, devices)),
        "shards on D": loops.Training(on_devices(ppo(shape, devices), devices)),
    }
    dqn = replaying(DQN())
    members: dict[str, Callable[[], float]] = {
        "members in turn": lambda: members_us(dqn, 2 * devices, effort.opts, workers=1),
        "members on 1": lambda: members_us(dqn, 2 * devices, effort.opts, workers=devices),
        "members on D": lambda: members_us(dqn, 2 * devices, effort.opts, workers=devices, devices=devices),
    }
    all_cores = {name: lambda loop=loop: loop.us(effort.iterations) for name, loop in spread.items()} | members
    alone = ("no shards", "shards on 1", "members in turn")
    return all_cores | {f"{name}, one core": partial(on_one_core, all_cores[name]) for name in alone}


def on_one_core(sample: Callable[[], float]) -> float:
    """Take a sample with all threads of this process on one core."""
    cores = os.sched_getaffinity(0)
    _hold({min(cores)})
    try:
        return sample()
    finally:
        _hold(cores)


def _hold(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


def ppo(shape: Any, shards: int) -> Any:
    """Return the training of the case `ppo-1024` in so many shards."""
    import jaxrl

    env, how = jaxrl.make_env(shape.env), {"epochs": shape.epochs, "minibatches": shape.minibatches}
    return jaxrl.on_policy(env, shape.agent(), num_envs=shape.num_envs, rollout=shape.rollout, shards=shards, **how)


def members_us(strategy: Any, count: int, opts: int, **how: int) -> float:
    """Train so many members from warm-up to result; return microseconds per optimisation step of all."""
    import jaxrl

    quiet = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 0, "save_interval": 0, "quiet": True}
    population = jaxrl.population(strategy, seeds=count, layout="spread")
    trainer = jaxrl.PopulationTrainer(population, max_opts=opts, **quiet, **how)
    begun = time.perf_counter()
    trainer.train()
    return (time.perf_counter() - begun) / (count * opts) * 1e6


def rows(samples: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row for each of `PAIRS`; `times_faster` of one is how often as fast the subject is."""
    from benchmarks import harness

    return [
        {
            "case": case,
            "us_per_opt_step": harness.spread(samples[pair.subject]),
            "reference_us": harness.spread(samples[pair.reference]),
            "times_faster": harness.ratio_spread(samples[pair.reference], samples[pair.subject]),
            "repeats": len(samples[pair.subject]),
        }
        for case, pair in PAIRS.items()
    ]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as the table of the documentation."""
    from benchmarks.harness import markdown  # late: it imports JAX

    lines = []
    for row in found:
        least, median, most = row["times_faster"]
        times = [f"{row[name][1]:,.0f}" for name in ("us_per_opt_step", "reference_us")]
        lines.append([row["case"], *times, f"{median:.2f}", f"{least:.2f}", f"{most:.2f}"])
    return markdown(["", "us an update", "against", "times as fast", "from", "to"], lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale", description=__doc__)
    parser.add_argument("devices", nargs="?", type=int, default=2, metavar="D")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="the smallest form, to see that it runs; its figures mean nothing"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", asked.devices)  # before JAX looks for devices
    from benchmarks import harness

    calls = subjects(asked.devices, QUICK if asked.quick else Effort())
    found = rows(harness.interleave(calls, 1 if asked.quick else asked.repeats))
    if asked.json:
        harness.write(asked.json, found)
    print(table(found))


if __name__ == "__main__":
    main()
