"""Parts of networks that no update changes, or none at first."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxrl
from jaxrl.errors import SettingsError


def off_policy(maker: Any, **settings: Any) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        jaxrl.make_env("Pendulum-v1" if maker is jaxrl.crossq else "CartPole-v1"),
        maker(features=(8,), **settings),
        buffer=jaxrl.uniform(200, batch_size=8),
        num_envs=2,
        opt_interval=2,
        warmup=20,
    )


def changes(strategy: jaxrl.Strategy, iterations: int) -> list[set[str]]:
    """Train a little; return the paths of the leaves of networks that have changed by the end of each iteration."""
    state = jax.jit(strategy.init)(jax.random.key(0))
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t)[0])
    names = lambda keys: "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
    leaves_of = lambda state: jax.tree_util.tree_leaves_with_path(state.agent._replace(hyper=()))
    before, found = leaves_of(state), []
    for t in range(iterations):
        state = step(state, np.uint32(t))
        pairs = zip(before, leaves_of(state), strict=True)
        paths = {names(keys) for (keys, old), (_, new) in pairs if not np.array_equal(old, new)}
        found.append({path for path in paths if not path.startswith("opt_state")})
    return found


def changed(strategy: jaxrl.Strategy, iterations: int = 12) -> set[str]:
    """Train a little; return the paths of the leaves of networks that have changed."""
    return changes(strategy, iterations)[-1]


def test_a_frozen_torso_stays_and_the_head_learns() -> None:
    """Of the network and of its target, which follows it in every update."""
    moved = changed(off_policy(jaxrl.dqn, tau=0.5, target_interval=1, freeze=("*/params/MLP_0",)))
    heads = {f"{field}/params/Dense_0/{leaf}" for field in ("params", "target") for leaf in ("kernel", "bias")}
    assert moved == heads
    assert changed(off_policy(jaxrl.dqn, tau=0.5, target_interval=1)) > heads


def test_statistics_of_a_batch_are_frozen_along() -> None:
    small = {"critic_features": (8,), "policy_interval": 1}
    free = changed(off_policy(jaxrl.crossq, **small))
    assert {"policy/batch_stats/BatchNorm_0/mean", "policy/params/Dense_1/kernel"} <= free
    moved = changed(off_policy(jaxrl.crossq, freeze=("policy",), **small))
    assert moved == {name for name in free if not name.startswith("policy/")}


def test_on_policy_agents_freeze_too() -> None:
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.ppo(features=(8,), freeze=("params.params.actor_torso", "params/params/critic_*")),
        num_envs=2,
        rollout=4,
    )
    moved = changed(strategy, 2)
    assert moved == {f"params/params/{part}/{leaf}" for part in ("policy", "value") for leaf in ("kernel", "bias")}


def test_at_first_the_value_learns_alone() -> None:
    """An iteration is 16 updates: in the first the policy stays, in the second it moves with its 5th."""
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,), critic_warmup=20), num_envs=2, rollout=8
    )
    first, second = ({path.split("/")[2] for path in paths} for paths in changes(strategy, 2))
    assert first == {"critic_torso", "value"}
    assert second == {"critic_torso", "value", "actor_torso", "policy"}


@pytest.mark.parametrize("pattern", ["parms", "opt_state", "hyper/lr", "params/params/MLP_1"])
def test_what_is_no_part_of_a_network_is_refused(pattern: str) -> None:
    with pytest.raises(SettingsError, match=f"agent.freeze: {pattern} is no part of the networks of dqn; "):
        off_policy(jaxrl.dqn, freeze=(pattern,))
