"""Runs in shards, on devices that the CPU is divided into, for `test_shards`.

`python shards_run.py train NAME DEVICES...` trains one of `COMBINATIONS`, or `LARGE`, on so many devices and prints
each digest.
`python shards_run.py resume NAME DIR DEVICES...` stops and goes on with it, on each pair of numbers.
`python shards_run.py mesh DIR MESHES...` trains members on meshes, as `2x1`, saves and resumes them; prints digests.
`python shards_run.py program` prints what a compiled training call gathers.
"""

import itertools
import re
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import agents

import jaxrl
from jaxrl.training import program
from jaxrl.training.devices import on_devices, shard_state
from jaxrl.training.storage.leaves import state_digest
from jaxrl.trees import tree_bytes

SHARDS = 4
LARGE = "dqn with a large ring"
"""A ring so large that its rows are read in another form on each platform."""
QUIET = {"quiet": True, "eval_interval": 0, "eval_episodes": 0}


def strategy(name: str) -> jaxrl.Strategy:
    if name == LARGE:
        return large_dqn()
    agents.SPREAD.update(num_envs=2 * SHARDS, shards=SHARDS)
    return agents.COMBINATIONS[name]()


def train(name: str, *devices: str) -> None:
    for number in map(int, devices):
        trainer = jaxrl.Trainer(strategy(name), max_opts=24, devices=number, **QUIET)
        print(number, state_digest((trainer.train().state, trainer._sums)), flush=True)


def resume(name: str, directory: str, *devices: str) -> None:
    how = {"max_opts": 48, "save_interval": 24, **QUIET}
    whole = jaxrl.Trainer(strategy(name), **how).train()
    print(0, 0, state_digest(whole.state), flush=True)
    for first, then in itertools.product(map(int, devices), repeat=2):
        place = f"{directory}/{first}-{then}"
        jaxrl.Trainer(strategy(name), run_dir=place, devices=first, **{**how, "max_opts": 24}).train()
        resumed = jaxrl.Trainer(strategy(name), run_dir=place, devices=then, resume=True, **how).train()
        print(first, then, state_digest(resumed.state), flush=True)


def small_dqn(lr: float = 1e-3) -> jaxrl.Strategy:
    buffer, how = jaxrl.uniform(256, batch_size=16), {"num_envs": 8, "opt_interval": 8, "warmup": 64}
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.dqn(lr=lr, features=(8,)), buffer=buffer, shards=SHARDS, **how
    )


def large_dqn() -> jaxrl.Strategy:
    env, buffer = jaxrl.make_env("CartPole-v1"), jaxrl.uniform(100_000, batch_size=64)
    return jaxrl.off_policy(env, jaxrl.dqn(), buffer=buffer, num_envs=8, opt_interval=8, shards=SHARDS)


def told(name: str, result: object) -> None:
    """Print the digest of each member, and the devices on which it was, in one line."""
    digests = [state_digest(member.result.state) for member in result.members]
    where = [sorted({d.id for x in jax.tree.leaves(m.result.state) for d in x.devices()}) for m in result.members]
    print(name, ",".join(digests), ",".join("+".join(map(str, ids)) for ids in where), flush=True)


def meshes(directory: str, *meshes: str) -> None:
    """Four members, two settings with two seeds each: alone, on each mesh, on each after another, and as a search."""
    made = lambda **how: jaxrl.population(small_dqn(), seeds=2, sweep={"agent.lr": [1e-3, 1e-2]}, **how)
    how = {"quiet": True, "eval_interval": 24, "eval_episodes": 2, "max_opts": 48}
    alone = [jaxrl.Trainer(small_dqn(lr), seed=seed, **how).train() for lr in (1e-3, 1e-2) for seed in (0, 1)]
    print("alone", ",".join(state_digest(result.state) for result in alone), flush=True)
    shapes = [dict(zip(("members", "envs"), map(int, mesh.split("x")), strict=True)) for mesh in meshes]
    on = [{"mesh": shape, "devices": shape["members"] * shape["envs"]} for shape in shapes]
    for name, here in zip(meshes, on, strict=True):
        told(f"on {name}", jaxrl.Trainer(made(), **how, **here).train())
    for first, then in ((0, -1), (-2, 2), (-1, 1)):
        place, here, there = f"{directory}/{meshes[first]}", on[first], on[then]
        jaxrl.Trainer(made(), run_dir=place, **{**how, "max_opts": 24}, **here).train()
        told(f"resumed {meshes[then]}", jaxrl.Trainer(made(), run_dir=place, resume=True, **how, **there).train())
    for name, here in zip((meshes[0], meshes[-1]), (on[0], on[-1]), strict=True):
        told(f"search {name}", jaxrl.Trainer(made(search=jaxrl.PBT(24)), **how, **here).train())


def gathering() -> None:
    """Print the bytes that a shard gives in one update, of its parameters, of all rings, and of temporary memory."""
    spread = on_devices(large_dqn(), SHARDS)
    state, sums = program.state_shapes(spread)
    count = jax.ShapeDtypeStruct((), np.uint32)
    compiled = program.jit_run(spread).lower(shard_state(spread, state), sums, count, count).compile()
    made = re.findall(r"= \(?(\w\d+)\[([\d,]*)\][^=]* all-gather\(", compiled.as_text())
    assert made
    gathered = sum(4 * int(np.prod([int(n) for n in shape.split(",") if n])) for _, shape in made)
    ring = tree_bytes(state.buffer) // SHARDS
    print(gathered // SHARDS, tree_bytes(state.agent.params), ring, compiled.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8 if sys.argv[1] == "mesh" else SHARDS)
    {"mesh": meshes, "train": train, "resume": resume, "program": gathering}[sys.argv[1]](*sys.argv[2:])
