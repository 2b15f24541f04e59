"""A run that is quickly compiled, for `test_processes`.

`python processes_toy.py DIR SEED ADDRESS N I` trains half of it, and goes on with it twice, as process `I` of `N`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxrl
import jaxrl.training.processes as processes
from jaxrl.cli.joining import join, report_failures
from jaxrl.cli.main import run_main
from jaxrl.strategies.guard import Health, init_health
from jaxrl.strategies.sharded import sharded
from jaxrl.training.storage.leaves import state_digest

SHARDS, HALF, ILL = 4, 40, 55


class State(NamedTuple):
    key: jax.Array
    steps: jax.Array
    mended: jax.Array
    walk: jax.Array


def strategy() -> jaxrl.Strategy:
    """Return what adds random bits up, in each shard others: whole numbers, which no compiler rounds.

    After `ILL` steps it diverges, until it has been rolled back.
    """

    def init(key: jax.Array) -> State:
        return State(key, jnp.uint32(0), jnp.uint32(0), jnp.zeros(3, jnp.uint32))

    def step(state: State, key: jax.Array, t: jax.Array) -> tuple[State, dict]:
        walk = state.walk + jax.random.bits(key, (3,))
        return state._replace(steps=state.steps + 1, walk=walk), {"t": t}

    def health(state: State) -> Health:
        ill = (state.steps > ILL) & (state.mended == 0)
        return Health(*(jnp.where(ill, x, y) for x, y in zip((3, 0, 3, ILL), init_health(), strict=True)))

    def reseed(state: State, rollbacks: int) -> State:
        return state._replace(mended=state.mended + rollbacks)

    one = jaxrl.Strategy(init, step, 1, 1, state_fns=jaxrl.StateFns(health, reseed))
    return sharded(one, SHARDS, ["walk"])


def train(path: str, max_opts: int, resume: bool = False, **settings: int) -> str:
    how = {
        "quiet": True,
        "save_interval": 10,
        "record_interval": 8,
        "eval_interval": 0,
        "recorders": ["jsonl"],
        "max_skips": 3,
    }
    trainer = jaxrl.Trainer(strategy(), run_dir=path, max_opts=max_opts, resume=resume, **how, **settings)
    state = trainer.train().state
    here = sum(len(shard.data) for shard in state.walk.addressable_shards)
    assert here == SHARDS // processes.processes()  # each has its part, and no other
    return state_digest(processes.whole(state))


def go_on() -> None:
    """Train without a directory, and on: what was returned first stays, and the end is as of one training."""
    how = {"quiet": True, "eval_interval": 0, "eval_episodes": 0, "devices": SHARDS}
    trainer = jaxrl.Trainer(strategy(), max_opts=8, **how)
    first = trainer.train()
    assert trainer.train(16).summary["opt_steps"] == 16
    digests = [
        state_digest(processes.whole(jaxrl.Trainer(strategy(), max_opts=n, **how).train().state)) for n in (8, 16)
    ]
    assert [state_digest(processes.whole(state)) for state in (first.state, trainer.state)] == digests


def main(args: Sequence[str]) -> int:
    path, address = args[0], args[2]
    seed, number, own = (int(args[i]) for i in (1, 3, 4))
    join({"coordinator_address": address, "num_processes": number, "process_id": own}, SHARDS)
    with report_failures(joined=True):
        train(path, HALF, seed=seed, devices=SHARDS)
        train(path, 2 * HALF, resume=True, seed=seed, devices=SHARDS)
        go_on()
        print(train(path, 2 * HALF, resume=True, seed=seed, devices=SHARDS))  # when nothing is left to do
    return 0


if __name__ == "__main__":
    run_main(main)
