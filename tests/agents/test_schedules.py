"""Schedules: values worked by hand, and every way to ask for one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.agents.schedules import Schedule, follow, read_schedule
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError
from jaxrl.strategies.population import with_values

SPEC = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Discrete(2))


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (jaxrl.linear(1.0, 0.5, 10), {0: 1.0, 4: 0.8, 10: 0.5, 99: 0.5}),
        (jaxrl.linear(0.0, 3.0, 3, warmup=2), {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0, 5: 3.0}),
        (jaxrl.cosine(1.0, 0.0, 4), {0: 1.0, 1: 0.5 + 0.25 * 2**0.5, 2: 0.5, 4: 0.0, 5: 0.0}),
        (jaxrl.cosine(2.0, 1.0, 4, warmup=4), {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0, 6: 1.5, 8: 1.0}),
        (jaxrl.exponential(1.0, 0.01, 2), {0: 1.0, 1: 0.1, 2: 0.01, 50: 0.01}),
        (jaxrl.exponential(-1.0, -4.0, 2), {0: -1.0, 1: -2.0, 2: -4.0}),
        (jaxrl.constant(0.5), {0: 0.5, 2**31: 0.5}),
        (jaxrl.constant(0.5, warmup=5), {0: 0.0, 1: 0.1, 4: 0.4, 5: 0.5, 6: 0.5}),
    ],
    ids=str,
)
def test_a_schedule_has_these_values_and_can_be_written_and_read(schedule: Schedule, values: dict[int, float]) -> None:
    steps = jnp.asarray(list(values), jnp.uint32)
    np.testing.assert_allclose(jax.vmap(schedule)(steps), list(values.values()), rtol=1e-6, atol=1e-7)
    assert read_schedule(str(schedule)) == schedule


def test_it_is_read_as_a_person_writes_it() -> None:
    assert read_schedule(" linear(1e-3, 0, 1e4) ") == jaxrl.linear(1e-3, 0.0, 10_000)
    assert read_schedule("cosine(1e-3,1e-5,500, warmup=5e1)") == jaxrl.cosine(1e-3, 1e-5, 500, 50)


def test_what_does_not_live_in_the_state_cannot_follow_one() -> None:
    with pytest.raises(SettingsError, match=r"agent\.munchausen of dqn cannot follow a schedule; .*lr"):
        follow(jaxrl.dqn(munchausen=jaxrl.constant(0.9))(SPEC))
    with pytest.raises(SettingsError, match=r"agent\.temperature is learnt, .*set learn_temperature=False"):
        jaxrl.sac(temperature=jaxrl.linear(1, 0.1, 10))
    jaxrl.sac(temperature=jaxrl.linear(1, 0.1, 10), learn_temperature=False)


def test_the_last_word_counts() -> None:
    """A schedule takes the place of a number and of `lr_decay`, a later number that of a schedule."""
    settings = lambda maker: maker(SPEC).info.settings
    first = settings(jaxrl.dqn(lr=jaxrl.linear(1e-3, 2e-3, 10), lr_decay=50))
    assert (first["lr"], first["lr_decay"], first["schedules"]) == (2e-3, 0, ("lr=linear(0.001,0.002,10)",))
    assert settings(jaxrl.sac(policy_lr=jaxrl.linear(1e-3, 2e-3, 10), lr_decay=50))["lr_decay"] == 0
    config = jaxrl.DQNConfig(schedules=("lr=constant(1e-3)", "tau=linear(0,1,5)"))
    assert settings(jaxrl.dqn(config, lr=0.5))["schedules"] == ("tau=linear(0.0,1.0,5)",)
    assert settings(jaxrl.dqn(config, lr=0.5))["lr"] == 0.5
    again = settings(jaxrl.dqn(config, lr=jaxrl.constant(3.0)))
    assert (again["lr"], again["schedules"]) == (3.0, ("tau=linear(0.0,1.0,5)", "lr=constant(3.0)"))
    both = jaxrl.DQNConfig(schedules=("epsilon=linear(1,0.1,100)",))
    assert settings(jaxrl.dqn(both, lr=0.5))["schedules"] == ("epsilon=linear(1.0,0.1,100)",)
    ended = settings(jaxrl.dqn(both, epsilon_end=0.01))
    assert (ended["epsilon_end"], ended["schedules"]) == (0.01, ())
    started = settings(jaxrl.dqn(both, epsilon_start=jaxrl.constant(0.5)))
    assert started["schedules"] == ("epsilon_start=constant(0.5)",)


def small(**settings: Any) -> jaxrl.Strategy:
    agent = jaxrl.dqn(features=(8,), **settings)
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        agent,
        buffer=jaxrl.uniform(200, batch_size=8),
        num_envs=2,
        opt_interval=2,
        warmup=20,
    )


@pytest.mark.slow
def test_a_population_sweeps_the_rest_and_members_keep_the_schedule() -> None:
    strategy = small(lr=jaxrl.constant(1e-2))
    assert "agent.lr" not in jaxrl.sweepable(strategy)
    assert "agent.tau" in jaxrl.sweepable(strategy)
    with pytest.raises(SettingsError, match=r"'agent\.lr' cannot be swept"):
        jaxrl.population(strategy, sweep={"agent.lr": [1e-3, 1e-4]})
    one = with_values(strategy, {"agent.tau": 0.25})
    assert one.info.settings["agent"]["schedules"] == ("lr=constant(0.01)",)
    state = one.state_fns.set_hyperparams(jax.jit(strategy.init)(jax.random.key(0)))
    assert (float(state.agent.hyper.tau), float(state.agent.hyper.lr)) == (0.25, np.float32(1e-2))


def test_flags_and_files_take_schedules(tmp_path: Path) -> None:
    asked = ["dqn", "--agent.lr", "cosine(1e-3, 0, 1e4)", "--agent.schedules", "tau=linear(0,1,1e3)"]
    agent = parse(asked).config.agent
    assert agent.schedules == ("tau=linear(0,1,1e3)", "lr=cosine(1e-3, 0, 1e4)")
    file = tmp_path / "run.yaml"
    file.write_text("algo: ppo\nagent:\n  lr: linear(1e-3,0,100)\n  ent_coef: constant(0.01,warmup=10)\n")
    read = parse(["--config", str(file)]).config.agent
    assert read.schedules == ("lr=linear(1e-3,0,100)", "ent_coef=constant(0.01,warmup=10)")
    over = parse(["--config", str(file), "--agent.lr", "0.1"]).config.agent
    assert (over.lr, over.schedules) == (0.1, ("ent_coef=constant(0.01,warmup=10)",))
    other = parse(["--config", str(file), "--agent.lr=exponential(1,0.1,5)"]).config.agent
    assert other.schedules == ("ent_coef=constant(0.01,warmup=10)", "lr=exponential(1,0.1,5)")
