"""Count the functions that a reader crosses: those of jaxrl that tracing one iteration calls.

    python -m benchmarks.walk [dqn] [ppo]

For each algorithm, under plain forms and under those of the platform: functions and files of one iteration, by room,
and the deepest stack of them. Lambdas, comprehensions and methods of networks count as functions.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.registry import ALGORITHMS, algorithm_maker
from jaxrl.xla import forms

ROOT = Path(jaxrl.__file__).parent


def strategy_of(name: str) -> jaxrl.Strategy:
    """Return `name` on CartPole, with the defaults of the library."""
    train = jaxrl.on_policy if ALGORITHMS[name].kind == "on_policy" else jaxrl.off_policy
    return train(jaxrl.make_env("CartPole-v1"), algorithm_maker(name)())


def walk(strategy: jaxrl.Strategy) -> tuple[set[CodeType], int]:
    """Return the functions of jaxrl that tracing one step calls, and how many stand in the deepest stack."""
    state = jax.eval_shape(strategy.init, jax.random.key(0))
    called, depth, deepest = set[CodeType](), 0, 0

    def look(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal depth, deepest
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        called.add(frame.f_code)
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)

    sys.setprofile(look)
    try:
        jax.eval_shape(strategy.step, state, jax.random.key(0), jnp.uint32(0))
    finally:
        sys.setprofile(None)
    return called, deepest


def room_of(code: CodeType) -> str:
    """Return the folder of jaxrl in which a function stands."""
    place = Path(code.co_filename).relative_to(ROOT)
    return place.parts[0] if len(place.parts) > 1 else "beside"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__.splitlines()[0])
    parser.add_argument("algo", nargs="*", default=["dqn", "ppo"], help="algorithms (default: dqn ppo)")
    for name in parser.parse_args(argv).algo:
        for which in ("plain", "auto"):
            with forms(which):
                called, deepest = walk(strategy_of(name))
            rooms = Counter(map(room_of, called))
            files = len({code.co_filename for code in called})
            by_room = ", ".join(f"{room} {count}" for room, count in rooms.most_common())
            print(f"{name:8} {which:6} {len(called):4} functions in {files} files, {deepest} deep: {by_room}")


if __name__ == "__main__":
    main()
