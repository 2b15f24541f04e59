"""Runs of which one is refused, for `test_processes`.

`python processes_refused.py SEED ADDRESS N I` trains, as process `I` of `N`, with a seed that may differ from that of
the others, and then with one that all have; it prints what came of the first, and the digest of the second.
"""

import sys

import jax
from processes_toy import SHARDS, strategy

import jaxrl
import jaxrl.training.processes as processes
from jaxrl.errors import JaxrlError
from jaxrl.training.storage.leaves import state_digest


def train(seed: int) -> str:
    how = {"quiet": True, "eval_interval": 0, "eval_episodes": 0, "devices": SHARDS}
    return state_digest(processes.whole(jaxrl.Trainer(strategy(), max_opts=8, seed=seed, **how).train().state))


if __name__ == "__main__":
    own_seed, address, count, number = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", SHARDS // int(count))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(number))
    try:
        came = train(int(own_seed))
    except JaxrlError as error:
        came = type(error).__name__
    print(came, train(0))
