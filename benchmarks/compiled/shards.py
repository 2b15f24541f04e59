"""Compile runs in shards for several devices, and say what an update exchanges between them.

python -m benchmarks.compiled.shards [CASE ...] [--target 8-h200|16-v5e|8-cpu] [--json FILE] [--text DIR]

There are as many shards as devices. A device gives what is counted, and receives as much from each of the others.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.compiled.targets import SEVERAL, Target, prepare

SMALL = 256
"""Bytes below which an array that a device gives is taken for moments or metrics; parts of a batch are larger."""
CASES = ("dqn-1024", "rainbow-1024", "sac-1024", "ppo-1024", "ppo-normalised-1024")
Row = dict[str, Any]


def strategy_of(case: str, shards: int) -> Any:
    """Return what is trained: with 1024 environments, and of replay batches of 1024.

    Raises:
      KeyError: there is no such case.
    """
    import jaxrl

    env = jaxrl.make_env("Pendulum-v1" if case.startswith("sac") else "CartPole-v1")
    buffer = {"capacity": 1 << 20, "batch_size": 1024}
    how = {"num_envs": 1024, "opt_interval": 1024, "shards": shards}
    rollout = {"num_envs": 1024, "rollout": 32, "epochs": 4, "minibatches": 4, "shards": shards}
    normalised = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(0.99), jaxrl.one_step())
    makers = {
        "dqn-1024": lambda: jaxrl.off_policy(env, jaxrl.dqn(), buffer=jaxrl.uniform(**buffer), **how),
        "rainbow-1024": lambda: jaxrl.off_policy(env, jaxrl.rainbow(), buffer=jaxrl.prioritised(**buffer), **how),
        "sac-1024": lambda: jaxrl.off_policy(env, jaxrl.sac(), buffer=jaxrl.uniform(**buffer), **how),
        "ppo-1024": lambda: jaxrl.on_policy(env, jaxrl.ppo(), **rollout),
        "ppo-normalised-1024": lambda: jaxrl.on_policy(env, jaxrl.ppo(), processor=normalised, **rollout),
    }
    return makers[case]()


def measure(case: str, target: str, text: Path | None = None) -> Row:
    """Compile a case for a target; return its row."""
    import numpy as np
    from jax.sharding import Mesh

    from jaxrl.training import devices
    from jaxrl.xla import forms

    to = SEVERAL[target]
    mesh = Mesh(np.array(_devices(to)[: to.devices]), ("envs",))
    # The devices are not there, so the run cannot find them among JAX's.
    with forms(to.forms), mock.patch.object(devices, "_mesh", return_value=mesh):
        strategy = strategy_of(case, to.devices)
        strategy = strategy._replace(placement=strategy.placement._replace(devices=to.devices))
        begun = time.perf_counter()
        compiled = _compiled(strategy, mesh)
        seconds = time.perf_counter() - begun
    if text is not None:
        text.mkdir(parents=True, exist_ok=True)
        (text / f"{case}-{target}.txt").write_text(compiled.as_text())
    return {"case": case, "target": target, **figures(compiled, strategy), "compile_s": seconds}


def _devices(target: Target) -> Sequence[Any]:
    import jax
    from jax.experimental import topologies

    return topologies.get_topology_desc(**target.topology).devices if target.topology else jax.devices()


def _compiled(strategy: Any, mesh: Any) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl.training import devices, program
    from jaxrl.xla.options import compiler_options, product_options, spread_options

    state, sums = program.state_shapes(strategy)
    same = NamedSharding(mesh, PartitionSpec())
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=same)
    count = put(jax.ShapeDtypeStruct((), jnp.uint32))
    spread = devices.over_devices(strategy, partial(program.run, strategy), state)
    shapes = (devices.shard_state(strategy, state), jax.tree.map(put, sums), count, count)
    traced = jax.jit(spread, donate_argnums=(0, 1)).trace(*shapes)
    options = {
        **(spread_options(compiler_options()) or {}),
        **product_options(lambda: program.longest_sum(traced.jaxpr)),
    }
    return traced.lower().compile(compiler_options=options)


def figures(compiled: Any, strategy: Any) -> Row:
    """Return what is counted in a program, per optimisation step unless it says otherwise."""
    from benchmarks import hlo
    from jaxrl.training.program import state_shapes
    from jaxrl.trees import tree_bytes

    found, steps = hlo.collectives(compiled), strategy.opt_steps_per_step
    arrays = [(size, one.times) for one in found for size in one.given]
    memory = compiled.memory_analysis()
    return {
        "devices": strategy.placement.devices,
        "collectives_per_opt_step": sum(one.times for one in found) / steps,
        "kinds": {
            kind: sum(one.times for one in found if one.kind == kind) / steps for kind in {x.kind for x in found}
        },
        "given_bytes_per_opt_step": sum(size * times for size, times in arrays) / steps,
        "small_bytes_per_opt_step": sum(size * times for size, times in arrays if size < SMALL) / steps,
        "large_bytes_per_opt_step": sum(size * times for size, times in arrays if size >= SMALL) / steps,
        "parameter_bytes": tree_bytes(learnt(state_shapes(strategy)[0])),
        "state_bytes_per_device": memory.argument_size_in_bytes,
        "temp_bytes_per_device": memory.temp_size_in_bytes,
        "opt_steps_per_iteration": steps,
    }


def learnt(state: Any) -> Any:
    """Return what the optimizers of an agent move: the parameters of which it has moments."""
    import optax

    found = optax.tree_utils.tree_get_all_with_path(state.agent.opt_state, "mu")
    return [moments for _, moments in found]


COLUMNS = {
    "collectives_per_opt_step": ("collectives an update", 1.0),
    "given_bytes_per_opt_step": ("kB given", 1e3),
    "parameter_bytes": ("kB of gradients", 1e3),
    "small_bytes_per_opt_step": ("bytes of moments and metrics", 1.0),
    "state_bytes_per_device": ("MB of state", 1e6),
    "temp_bytes_per_device": ("MB beside", 1e6),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as the table of the documentation."""
    from benchmarks.harness import markdown  # late: it imports JAX

    lines = []
    for row in rows:
        cells = (f"{row[name] / unit:,.1f}".removesuffix(".0") for name, (_, unit) in COLUMNS.items())
        lines.append([row["target"], f"`{row['case']}`", *cells])
    return markdown(["target", "case", *(title for title, _ in COLUMNS.values())], lines)


def main(argv: Sequence[str]) -> int:
    """Print the table of what was asked for, or without a case of all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled.shards", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--target", choices=SEVERAL, default="8-h200")
    parser.add_argument("--json", type=Path, help="file to write; rows of other cases in it stay")
    parser.add_argument("--text", type=Path, help="folder for the text of each program")
    asked = parser.parse_args(argv)
    prepare(SEVERAL[asked.target])  # before the first import of JAX
    from benchmarks import harness

    cases = asked.cases or CASES
    if unknown := [case for case in cases if case not in CASES]:
        print(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    rows = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    for case in cases:
        try:
            row = measure(case, asked.target, asked.text)
        except (ImportError, RuntimeError) as error:
            print(f"cannot compile for {SEVERAL[asked.target].title}: {error}", file=sys.stderr)
            return 2
        rows = sorted([*(r for r in rows if r["case"] != case), row], key=lambda row: CASES.index(row["case"]))
        if asked.json:
            harness.write(asked.json, rows)
        print(table([row]).splitlines()[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
