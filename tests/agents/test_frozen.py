"""Parts of networks that no update changes, or none at first."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from toys_agents import CONTINUOUS, DISCRETE, begun, updated

import jaxrl
from jaxrl.agents import Agent
from jaxrl.errors import SettingsError
from jaxrl.nn import from_nnx
from jaxrl.strategies.interaction import build_agent

SMALL: dict[str, Any] = {"features": (8,), "lr": 0.1}


def in_training(maker: Any, spec: Any) -> Agent:
    """Return the agent as strategies and sessions build it."""
    return build_agent(maker, None, spec)


def changed(maker: Any, spec: Any, *opt_steps: int) -> list[set[str]]:
    """Update once at each of these steps; return the paths of the leaves of networks that have changed by then."""
    agent = in_training(maker, spec)
    state = begun(agent.init)
    step = jax.jit(lambda state, t: updated(agent, spec, state, t)[0])
    names = lambda keys: "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
    leaves_of = lambda state: jax.tree_util.tree_leaves_with_path(state._replace(hyper=(), opt_state=()))
    before, found = leaves_of(state), []
    for t in opt_steps or (1,):
        state = step(state, np.uint32(t))
        pairs = zip(before, leaves_of(state), strict=True)
        found.append({names(keys) for (keys, old), (_, new) in pairs if not np.array_equal(old, new)})
    return found


def test_a_frozen_torso_stays_and_the_head_learns() -> None:
    """Of the network and of its target, which follows it in every update."""
    following = {"tau": 0.5, "target_interval": 1}
    (moved,) = changed(jaxrl.dqn(**SMALL, **following, freeze=("*/params/MLP_0",)), DISCRETE)
    heads = {f"{field}/params/Dense_0/{leaf}" for field in ("params", "target") for leaf in ("kernel", "bias")}
    assert moved == heads
    assert changed(jaxrl.dqn(**SMALL, **following), DISCRETE)[0] > heads


def test_statistics_of_a_batch_are_frozen_along() -> None:
    small = {**SMALL, "critic_features": (8,), "policy_interval": 1}
    (free,) = changed(jaxrl.crossq(**small), CONTINUOUS)
    assert {"policy/batch_stats/BatchNorm_0/mean", "policy/params/Dense_1/kernel"} <= free
    (moved,) = changed(jaxrl.crossq(**small, freeze=("policy",)), CONTINUOUS)
    assert moved == {name for name in free if not name.startswith("policy/")}


def test_on_policy_agents_freeze_too() -> None:
    agent = jaxrl.ppo(**SMALL, freeze=("params.params.actor_torso", "params/params/critic_*"))
    (moved,) = changed(agent, DISCRETE)
    assert moved == {f"params/params/{part}/{leaf}" for part in ("policy", "value") for leaf in ("kernel", "bias")}


def test_at_first_the_value_learns_alone() -> None:
    agent = jaxrl.ppo(**SMALL, critic_warmup=20)
    last, first = ({path.split("/")[2] for path in paths} for paths in changed(agent, DISCRETE, 19, 20))
    assert last == {"critic_torso", "value"}
    assert first == {"critic_torso", "value", "actor_torso", "policy"}


def test_at_first_a_core_of_the_values_own_learns_and_the_policys_does_not() -> None:
    agent = jaxrl.ppo(**SMALL, core="gru", core_features=4, critic_core="separate", critic_warmup=20)
    (moved,) = ({path.split("/")[2] for path in paths} for paths in changed(agent, DISCRETE, 0))
    assert moved == {"critic_torso", "value_core", "value"}


class Normalised(nn.Module):
    """Batch normalisation before the policy, and in what belongs to the value alone."""

    outputs: int

    def setup(self) -> None:
        self.seen, self.policy = nn.BatchNorm(), nn.Dense(self.outputs)
        self.critic_torso, self.value = nn.BatchNorm(), nn.Dense(1)

    def __call__(self, obs: Any, train: bool = False) -> Any:
        seen, read = (norm(obs, use_running_average=not train) for norm in (self.seen, self.critic_torso))
        return self.policy(seen), self.value(read)


def test_at_first_statistics_of_the_value_alone_move_as_well() -> None:
    agent = jaxrl.ppo(make_network=lambda spec, head: Normalised(head.outputs), lr=0.1, critic_warmup=20)
    (moved,) = changed(agent, DISCRETE, 0)
    of = lambda part, *names: {f"params/{part}/{name}" for name in names}
    params = of("params/critic_torso", "scale", "bias") | of("params/value", "kernel", "bias")
    assert moved == params | of("batch_stats/critic_torso", "mean", "var")


class Both(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.policy, self.value = nnx.Linear(inputs, outputs, rngs=rngs), nnx.Linear(inputs, 1, rngs=rngs)

    def __call__(self, obs: Any) -> Any:
        return self.policy(obs), self.value(obs)


def test_at_first_the_value_of_a_module_of_nnx_learns_alone() -> None:
    make = lambda spec, head: from_nnx(lambda rngs: Both(*spec.observation_space.shape, head.outputs, rngs))
    (moved,) = changed(jaxrl.ppo(make_network=make, lr=0.1, critic_warmup=20), DISCRETE, 0)
    assert moved == {"params/params/value/kernel", "params/params/value/bias"}


@pytest.mark.parametrize("pattern", ["parms", "opt_state", "hyper/lr", "params/params/MLP_1"])
def test_what_is_no_part_of_a_network_is_refused(pattern: str) -> None:
    with pytest.raises(SettingsError, match=f"agent.freeze: {pattern} is no part of the networks of dqn; "):
        in_training(jaxrl.dqn(**SMALL, freeze=(pattern,)), DISCRETE)
