"""Policies inside other people's compiled functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl.training.policy import GreedyPolicy

OBS = np.linspace(-0.5, 0.5, 12, dtype=np.float32).reshape(3, 4)


def policy_of(strategy: jaxrl.Strategy) -> GreedyPolicy:
    assert strategy.policy is not None
    return GreedyPolicy(strategy.policy, strategy.policy.params(strategy.init(jax.random.key(1))))


def test_a_policy_without_a_memory_works_inside_jit_and_vmap_and_after() -> None:
    policy = policy_of(small_dqn())
    plain = [int(policy(obs)) for obs in OBS]
    assert [int(jax.jit(policy)(obs)) for obs in OBS] == plain
    assert jax.vmap(policy)(OBS).tolist() == plain
    compiled: Any = jax.jit(lambda params, obs: policy.at(params)(obs))
    assert compiled(policy.params, OBS).tolist() == plain
    assert [int(policy(obs)) for obs in OBS] == plain
    assert policy(OBS).tolist() == plain


def test_a_policy_with_a_memory_refuses_and_is_as_before() -> None:
    env = jaxrl.make_env("CartPole-v1")
    strategy = jaxrl.off_policy(
        env,
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(64, batch_size=8),
        processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()),
        num_envs=4,
        opt_interval=4,
        warmup=16,
    )
    policy, twin = policy_of(strategy), policy_of(strategy)
    assert [int(policy(obs)) for obs in OBS[:2]] == [int(twin(obs)) for obs in OBS[:2]]
    with pytest.raises(jaxrl.SettingsError, match="remembers its episode"):
        jax.jit(policy)(jnp.asarray(OBS[0]))
    assert [int(policy(obs)) for obs in OBS] == [int(twin(obs)) for obs in OBS]
