"""All to be known about a device, in one command: is it right, is it what was predicted, is it fast, does it learn.

python -m benchmarks.campaign [--quick] [--parts PART ...] [--agents A ...] [--cases CASE ...] --json FILE

The parts, each of rows of its own in one JSON, whose header names the hardware:

- `correct`: each agent twice from one key, of which every bit has to be the same; and one iteration from one state on
  this device and on the CPU in its plain form, with products in full precision, whose agents may be apart by rounding.
- `kernels`: those of an iteration as compiled here, beside those predicted without the device.
- `speed`: `benchmarks.run` of all cases at all sizes.
- `forms`: training compiled as it is, in its plain form, and without each file of `jaxrl/xla` and each of XLA's options
  that jaxrl sets, in turns: which of them pay on this device.
- `learning`: PPO on Breakout-MinAtar in float32 and in bfloat16, five seeds each.

`--quick` rehearses it: few and short repeats, small sizes, nothing learnt. The exit code is 1 where a row has failed.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, hlo
from benchmarks.cases import case_named, dqn_shape, ppo_shape
from benchmarks.cases.shapes import SAC, replaying
from benchmarks.compiled.cases import CASES as COMPILED, case_named as compiled_case, strategy_of
from benchmarks.compiled.measure import without
from benchmarks.device import shorten
from benchmarks.harness import Effort, Row
from benchmarks.loops import Training
from benchmarks.tables.results import compiled_for
from jaxrl.registry import ALGORITHMS
from jaxrl.strategies.base import Strategy
from jaxrl.training import program
from jaxrl.training.program import compile_all, metric_shapes, run, state_shapes, zero_sums
from jaxrl.trees import PyTree
from jaxrl.xla import forms, options as xla_options

TOLERANCE = 1e-2
"""How far apart two updates from one state may be, as a share of what they change: by the order of sums, of which an
iteration of PPO makes sixteen one after the other."""
SPEED = (
    *(f"dqn-{size}" for size in (1, 10, 128, 1_024, 4_096)),
    *(f"ppo-{size}" for size in (4, 64, 1_024, 16_384, 65_536)),
    *("sac", "dqn-small", "dqn-conv", "capacity", "replay", "host"),
    *(f"seeds-{size}" for size in (8, 32, 256)),
    *(f"env-{size}" for size in (10, 1_024, 65_536)),
)
QUICK = ("dqn-10", "ppo-4", "env-10")
KINDS = {"h100": "h200", "h200": "h200", "v5 lite": "v5e", "v5e": "v5e"}
"""Targets of predictions, by what is in the name of the device that they are for; an H100 has the H200's processor."""
FORMS = ("carry", "flat", "hoist", "orthogonal", "packing", "products", "reductions", "shuffle")
"""Files of `jaxrl/xla` that are left out, each in turn."""
LEARNT = {"float32": (), "bfloat16": ("--agent.dtype", "bfloat16")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--agents", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="default: all")
    parser.add_argument("--cases", nargs="+", help="of `benchmarks.run` (default: all, with --quick three)")
    parser.add_argument("--json", type=Path, required=True, help="file to write; rewritten after each row")
    asked = parser.parse_args(argv)
    if asked.quick:
        shorten()
    rows: list[Row] = []
    for part in asked.parts:
        for row in PARTS[part](asked):
            rows.append({"part": part, **row})
            print(told(rows[-1]), flush=True)
            harness.write(asked.json, rows, quick=asked.quick)
    return int(any(row.get("failed") for row in rows))


def told(row: Row) -> str:
    """Return a row in a line."""
    shown = ("repeated", "apart", "kernels_per_iteration", "predicted", "us_per_opt_step", "ratio", "best", "failed")
    figures = ", ".join(f"{name} {row[name]}" for name in shown if row.get(name) is not None)
    return f"{row['part']:<9} {row.get('name', row.get('case')):<16} {figures}"


# --- is it right ---------------------------------------------------------------------------------------------------


def correct(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each agent."""
    for algo in asked.agents:
        strategy = strategy_of(algo)
        yield {"case": algo, **repeats(strategy, 2 if asked.quick else 50), **beside_the_cpu(strategy)}


def repeats(strategy: Strategy, iterations: int) -> Row:
    """Train twice from one key; say whether every bit is the same, and their digest."""
    digests = [_digest(_train(strategy, iterations)) for _ in range(2)]
    same = digests[0] == digests[1]
    return {"digest": digests[0], "repeated": same, **({} if same else {"failed": "two runs of one key differ"})}


def _train(strategy: Strategy, iterations: int) -> PyTree:
    compiled = compile_all(strategy, jax.random.key(0), None, None, resume=False)
    return compiled.run(*compiled.init(jax.random.key(0)), np.uint32(0), np.uint32(iterations))


def _digest(tree: PyTree) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        raw = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found.update(np.asarray(raw).tobytes())
    return found.hexdigest()[:16]


def beside_the_cpu(strategy: Strategy) -> Row:
    """Make one iteration here and on the CPU; say by which share of what it changes their agents are apart."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), forms("plain"):
        begun, sums = (
            jax.jit(strategy.init)(jax.random.key(0)),
            zero_sums(len(metric_shapes(strategy, state_shapes(strategy)[0]))),
        )
        there = _one(strategy, begun, sums, cpu)
    here = _one(strategy, begun, sums, jax.devices()[0])
    before, one, other = (_numbers(state.agent) for state in (begun, here, there))
    apart = float(np.linalg.norm(one - other) / max(np.linalg.norm(other - before), 1e-12))
    wrong = not apart <= TOLERANCE
    return {"apart": apart, **({"failed": f"apart from the CPU by {apart:.2g}"} if wrong else {})}


def _one(strategy: Strategy, state: PyTree, sums: PyTree, device: Any) -> Any:
    """Make iteration 0 on a device, with products in full precision."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(partial(run, strategy))(*jax.device_put((state, sums), device), np.uint32(0), np.uint32(1))[0]


def _numbers(tree: PyTree) -> np.ndarray:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in floats])


# --- is it what was predicted ----------------------------------------------------------------------------------------


def kernels(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each case that was predicted, of the agents asked for."""
    kind = jax.devices()[0].device_kind.lower()
    target = next((target for name, target in KINDS.items() if name in kind), "")
    predicted = {row["case"]: row for row in (compiled_for(target)[0].rows if target else ())}
    others = [] if asked.quick else [case for case in COMPILED if case not in ALGORITHMS]
    cases = [*others, *asked.agents]
    for case in cases:
        made = compiled_case(case)()
        traced = jax.jit(made.function, donate_argnums=made.donated).trace(*made.shapes)
        compiled = traced.lower().compile(compiler_options=made.options(traced.jaxpr))
        count = sum(kernel.times for kernel in hlo.kernels(compiled, made.depth))
        told = predicted.get(case, {}).get("kernels_per_iteration")
        yield {"case": case, "kernels_per_iteration": count, "predicted": told}


# --- is it fast, and does it learn -----------------------------------------------------------------------------------


def speed(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of `benchmarks.run`; a case that fails is told, and the next begun."""
    effort = harness.QUICK if asked.quick else Effort()
    for case in asked.cases or (QUICK if asked.quick else SPEED):
        try:
            yield from case_named(case)(effort)
        except Exception as error:  # such as too little memory for the largest size
            yield {"case": case, "failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def ways(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way in which the training of a case can be compiled; `ratio` is to how it is compiled."""
    effort = harness.QUICK if asked.quick else Effort()
    cases: dict[str, Callable[[], Strategy]] = {
        "dqn-10": lambda: replaying(dqn_shape(10)),
        "sac": lambda: replaying(SAC()),
        "ppo-1024": lambda: ppo_shape(1_024).strategy(),
    }
    for case in ("dqn-10",) if asked.quick else cases:
        made = {}
        for name, way in _ways(asked.quick).items():
            with way:
                made[name] = Training(cases[case]())
        updates = next(iter(made.values())).strategy.opt_steps_per_step
        iterations = max(1, effort.opt_steps // updates)
        samples = harness.interleave({name: partial(x.us, iterations) for name, x in made.items()}, effort.repeats)
        for name, found in samples.items():
            ratios = harness.ratio_spread(found, samples["as it is"])
            yield {"case": case, "name": name, "us_per_opt_step": harness.spread(found)[1], "ratio": ratios}


def _ways(quick: bool) -> dict[str, AbstractContextManager[Any]]:
    """Return contexts in which to compile, by name."""
    loops = ",CONDITIONAL"  # begins what jaxrl has in graphs beside XLA's own kinds
    options = {
        "as it is": nullcontext(),
        "plain": forms("plain"),
        "sums split as XLA likes": mock.patch.object(program, "product_options", return_value={}),
        "no loops in graphs": mock.patch.object(xla_options, "KINDS", xla_options.KINDS.partition(loops)[0]),
        "without options": mock.patch.object(program, "compiler_options", return_value=None),
    }
    return {**options, **({} if quick else {f"without {name}": without([name]) for name in FORMS})}


def learning(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each type of computation and seed; nothing with `--quick`."""
    from benchmarks.learning import learn

    for seed in () if asked.quick else range(5):
        for dtype, flags in LEARNT.items():
            yield {"case": f"ppo-{dtype}-{seed}", **learn("ppo", "Breakout-MinAtar", seed, flags)}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "correct": correct,
    "kernels": kernels,
    "speed": speed,
    "forms": ways,
    "learning": learning,
}


if __name__ == "__main__":
    sys.exit(main())
