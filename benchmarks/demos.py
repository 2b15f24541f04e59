"""`python -m benchmarks.demos [--lengths N ...] [--seeds S ...] [--json FILE]`: what demonstrations beside replay save.

The task is a combination lock of N turns: a wrong turn pays 0.1 and ends the episode, and the last right one pays 1.
Chance opens it once in 2^N episodes. DQN with generic settings, alone and with three episodes that somebody else has
shown, trains until an evaluation opens it, at most `MOST` environment steps; a row says after how many that was.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from benchmarks import harness
from benchmarks.harness import Row
from jaxrl.cli.main import cache_compilations

MOST = 400_000
SHOWN = 3
"""Episodes shown."""
EVERY = 100
"""Optimisation steps, of four environment steps each, between evaluations."""


def lock(length: int) -> jaxrl.Env:
    """Return the lock: turns right and left in alternation; the state is the number of turns made."""
    see = lambda at: jax.nn.one_hot(at, length)

    def reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.int32(0), see(jnp.int32(0))

    def step(at: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, jaxrl.TimeStep]:
        right = action == at % 2
        opened = right & (at + 1 == length)
        reward = jnp.where(opened, 1.0, jnp.where(right, 0.0, 0.1))
        at = jnp.minimum(at + 1, length - 1)
        return at, jaxrl.TimeStep(see(at), reward, ~right | opened)

    return jaxrl.Env(jaxrl.EnvSpec("Lock", jaxrl.Box(0.0, 1.0, (length,)), jaxrl.Discrete(2)), reset, step)


def shown(length: int, episodes: int = SHOWN) -> jaxrl.Dataset:
    """Return episodes that open it."""
    at = np.tile(np.arange(length), episodes)
    last, eye = at == length - 1, np.eye(length, dtype=np.float32)
    following = eye[np.minimum(at + 1, length - 1)]
    action, reward = (at % 2).astype(np.int32), last.astype(np.float32)
    return jaxrl.Dataset(lock(length).spec, eye[at], action, reward, following, last, np.zeros_like(last))


def learn(length: int, seed: int, demos: jaxrl.Dataset | None) -> Row:
    """Train until an evaluation opens the lock."""
    strategy = jaxrl.off_policy(
        lock(length),
        jaxrl.dqn(lr=1e-3, features=(64, 64)),
        buffer=jaxrl.uniform(50_000, batch_size=32),
        num_envs=4,
        opt_interval=4,
        warmup=128,
        demos=demos,
    )
    trainer = jaxrl.Trainer(
        strategy, max_opts=MOST // 4, eval_interval=EVERY, eval_episodes=4, stop_reward=1.0, seed=seed, quiet=True
    )
    summary = trainer.train().summary
    opened = summary["stop"] == "stop_reward"
    steps = summary["env_steps"] if opened else None
    return {"length": length, "seed": seed, "demos": demos is not None, "env_steps_to_open": steps}


def main() -> None:
    """Parse, train, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.demos", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[8, 14, 20], help="turns of locks (default: 8, 14, 20)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    cache_compilations()
    rows: list[Row] = []
    for length in options.lengths:
        for demos in (None, shown(length)):
            rows += [learn(length, seed, demos) for seed in options.seeds]
            told = ", ".join(str(row["env_steps_to_open"] or "never") for row in rows[-len(options.seeds) :])
            print(f"lock of {length}, {'shown' if demos else 'alone'}: {told}", file=sys.stderr, flush=True)
            if options.json:
                harness.write(options.json, rows)


if __name__ == "__main__":
    main()
