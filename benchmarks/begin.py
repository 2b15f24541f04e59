"""`python -m benchmarks.begin [--pay P ...] [--how H ...] [--seeds S ...] [--env-steps N] [--json FILE]`.

What a beginning saves, on MountainCar-v0, whose hill chance hardly ever reaches: as it is, it pays -1 `each step` until
then; or it pays `on the hill` alone, 1 less 0.9 of the share of the time limit that has passed. `EPISODES` episodes
are shown, of a rule that pushes the way the car moves and is random in one step of ten. PPO with the settings of its
preset trains until 100 episodes of an evaluation take `GOOD` steps on average: alone; begun with the policy that BC has
cloned, values learnt alone at first; the same, held to its first policy; and from scratch with the imitation of what
was shown. A row has the evaluations by environment steps; the first are before any of them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from benchmarks import harness
from benchmarks.harness import Row
from jaxrl.cli.main import cache_compilations
from jaxrl.envs.wrappers import transform_reward
from jaxrl.processors import Processor
from jaxrl.strategies.base import Policy

ENV = "MountainCar-v0"
LIMIT = 200
GOOD = 110
"""Steps of an episode at which a run ends, and from which Gym called the task solved; what was shown takes more."""
EPISODES, RANDOM = 20, 0.1
"""Episodes shown, and the share of random actions in them."""
OPTS = 15_616
"""Optimisation steps of the preset, after which the learning rate is 0; each goes with 64 environment steps."""
EVERY = 128
"""Optimisation steps between evaluations."""
WARMUP = 1_024
"""Optimisation steps in which values are learnt alone."""
HOW = {
    "alone": {},
    "from BC": {"critic_warmup": WARMUP},
    "from BC, held to it": {"critic_warmup": WARMUP, "teacher_coef": jaxrl.linear(1.0, 0.0, 2_000)},
    "imitating": {"imitation_coef": jaxrl.linear(1.0, 0.0, 2_000)},
}
"""Settings of the agent, beside those of the preset."""
PAYS: dict[str, Callable[[Any], Any]] = {
    "each step": lambda steps: -1.0 * steps,
    "on the hill": lambda steps: 1.0 - 0.9 * steps / LIMIT,
}
"""The return of an episode that comes to the hill after so many steps."""
PARTS = ["processor/0", "params/params/actor_torso=policy/params/MLP_0", "params/params/policy=policy/params/Dense_0"]


def normaliser() -> Processor:
    """Return the processor of BC, whose statistics PPO begins with."""
    return jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step())


def car(pay: str) -> jaxrl.Env:
    """Return the car, paid as `pay` says."""
    env = jaxrl.make_env(ENV)
    if pay == "each step":
        return env
    paid = lambda state, action, step: jnp.where(step.terminated, PAYS[pay](state.time + 1.0), 0.0)
    return transform_reward(env, paid)


def shown(env: jaxrl.Env, seed: int) -> jaxrl.Dataset:
    """Return the episodes that are shown."""
    rule = Policy(
        spec=env.spec,
        params=lambda state: (),
        begin=lambda params, obs: obs,
        act=lambda params, obs: (obs, jnp.where(obs[:, 1] > 0, 2, 0)),
        observe=lambda params, obs, step: step.obs,
    )
    data = jaxrl.gather(env, rule, (), jax.random.key(1_000 + seed), LIMIT * EPISODES, random=RANDOM)
    return data.where(data.episode < EPISODES)


def clone(env: jaxrl.Env, data: jaxrl.Dataset, seed: int, run_dir: str) -> None:
    """Clone what was shown, into a run."""
    agent = jaxrl.bc(features=(64, 64), activation="tanh")
    strategy = jaxrl.offline(data, agent, processor=normaliser(), env=env)
    jaxrl.Trainer(strategy, max_opts=2_000, eval_interval=0, run_dir=run_dir, seed=seed, quiet=True).train()


def learn(pay: str, how: str, seed: int, env_steps: int) -> Row:
    """Train until an evaluation takes `GOOD` steps, at most `env_steps` environment steps."""
    env, begun = car(pay), time.perf_counter()
    data = shown(env, seed)
    agent = jaxrl.ppo(lr=1e-3, lr_decay=OPTS, gae_lambda=0.98, ent_coef=0.0, **HOW[how])
    settings: dict[str, Any] = {"num_envs": 16, "rollout": 64, "epochs": 4, "minibatches": 4}
    settings["processor"] = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(), jaxrl.one_step())
    limits: dict[str, Any] = {"max_opts": min(OPTS, env_steps // 64), "eval_interval": EVERY, "eval_episodes": 100}
    rules: dict[str, Any] = {"stop_reward": PAYS[pay](GOOD), "confirm_best": False, "eval_at_start": True}
    with tempfile.TemporaryDirectory() as folder:
        cloned = str(Path(folder) / "cloned")
        start: dict[str, Any] = {}
        if "from BC" in how:
            clone(env, data, seed, cloned)
            start = {"init_from": cloned, "init_parts": PARTS}
        if "held" in how:
            settings["teacher"] = jaxrl.load_policy(cloned, step="latest")
        strategy = jaxrl.on_policy(env, agent, demos=data if how == "imitating" else None, **settings)
        memory = jaxrl.MemoryRecorder()
        trainer = jaxrl.Trainer(strategy, recorders=[memory], seed=seed, quiet=True, **limits, **rules, **start)
        trainer.train()
    curve = [[row["env_steps"], round(row["eval_reward"], 3)] for row in memory.rows if row["kind"] == "eval"]
    return {
        "pay": pay,
        "how": how,
        "seed": seed,
        "curve": curve,
        "shown_steps": data.rows,
        "shown_length": data.rows / EPISODES,
        "seconds": time.perf_counter() - begun,
    }


def steps_to_good(row: Row) -> int | None:
    """Return the environment steps after which an evaluation took `GOOD` steps; `None`: none did."""
    steps, score = row["curve"][-1]
    return steps if score >= PAYS[row["pay"]](GOOD) else None


def main() -> None:
    """Parse, train, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.begin", description=__doc__, allow_abbrev=False)
    parser.add_argument("--pay", nargs="+", choices=[*PAYS], default=[*PAYS], help="what is paid (default: both)")
    parser.add_argument("--how", nargs="+", choices=[*HOW], default=[*HOW], help="beginnings (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--env-steps", type=int, default=OPTS * 64, help="environment steps of a run, at most")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    cache_compilations()
    rows: list[Row] = []
    for pay, how, seed in product(options.pay, options.how, options.seeds):
        rows.append(row := learn(pay, how, seed, options.env_steps))
        begins, told = row["curve"][0][1], steps_to_good(row) or "never"
        print(f"paid {pay}, {how}, seed {seed}: {begins:g} at first, good after {told}", file=sys.stderr, flush=True)
        if options.json:
            harness.write(options.json, rows)


if __name__ == "__main__":
    main()
