"""What a memory and what hindsight teach, and plain DQN and SAC cannot learn, in three seeds each."""

from functools import cache
from typing import Any

import pytest

import jaxrl
from benchmarks.goals import bit_flipping
from benchmarks.hidden import recall

SEEDS = (0, 1, 2)
pytestmark = pytest.mark.slow


def scores(strategy: jaxrl.Strategy, max_opts: int) -> list[float]:
    """Return the last score of each seed, over 100 episodes."""
    options: dict[str, Any] = {"max_opts": max_opts, "eval_interval": max_opts, "eval_episodes": 100, "recorders": []}
    return [jaxrl.Trainer(strategy, seed=seed, **options).train().summary["last_score"] for seed in SEEDS]


@cache
def recalling(core: str) -> list[float]:
    """A cue is shown once and asked for 20 steps later: 1 for the right answer, -1 for the wrong one."""
    agent = jaxrl.dqn(
        core=core, core_features=32, burn_in=4, sequence=24, lr=1e-3, features=(32,), epsilon_decay=1_000,
        target_interval=50,
    )  # fmt: skip
    env = jaxrl.make_env("MemoryChain-bsuite", memory_length=20)
    buffer = jaxrl.uniform(50_000, batch_size=32)
    return scores(jaxrl.off_policy(env, agent, buffer=buffer, num_envs=16, opt_interval=16), 3_000)


@cache
def naming(core: str) -> list[float]:
    """A number is shown once and named 10 steps later: 0 at best, and without a memory at best -1/3."""
    agent = jaxrl.sac(
        core=core, core_features=32, burn_in=0, sequence=11, n_step=1, features=(32,), tau=0.02, lr=3e-3,
        policy_lr=3e-3, temperature_lr=3e-3,
    )  # fmt: skip
    buffer = jaxrl.uniform(20_000, batch_size=32)
    return scores(jaxrl.off_policy(recall(10), agent, buffer=buffer, num_envs=16, opt_interval=16), 2_000)


@cache
def flipping(share: float) -> list[float]:
    """Ten bits: a return of -4 on average at best, and of -10 where no goal is ever reached."""
    ring = jaxrl.uniform(50_000, batch_size=128)
    strategy = jaxrl.off_policy(
        bit_flipping(10),
        jaxrl.dqn(lr=1e-3, features=(128,), epsilon_decay=2_000),
        buffer=jaxrl.hindsight(ring, share) if share else ring,
        processor=jaxrl.one_step(0.98),
        num_envs=8,
        opt_interval=8,
    )
    return scores(strategy, 4_000)


def test_a_core_recalls_what_was_shown_long_before() -> None:
    assert min(recalling("gru")) > 0.9


def test_without_a_core_it_is_a_guess() -> None:
    assert max(abs(score) for score in recalling("none")) < 0.5


def test_an_actor_and_critics_with_cores_name_a_number_shown_long_before() -> None:
    assert min(naming("gru")) > -0.1


def test_without_cores_they_name_its_mean() -> None:
    assert max(naming("none")) < -0.25


def test_hindsight_teaches_goals_that_are_never_reached_by_chance() -> None:
    assert min(flipping(0.8)) > -5.0


def test_without_hindsight_they_are_hardly_reached() -> None:
    assert max(flipping(0.0)) < -7.0
