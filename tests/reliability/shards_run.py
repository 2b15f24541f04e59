"""`python shards_run.py SHARDS NAME DEVICES...`: train one of `COMBINATIONS` on so many devices; print each digest."""

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import agents

import jaxrl
from jaxrl.training.storage.leaves import state_digest


def main(shards: int, name: str, *devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", max(devices))
    agents.SPREAD.update(num_envs=2 * shards, shards=shards)
    for number in devices:
        trainer = jaxrl.Trainer(
            agents.COMBINATIONS[name](), max_opts=24, eval_episodes=0, eval_interval=0, devices=number, quiet=True
        )
        print(number, state_digest((trainer.train().state, trainer._sums)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
