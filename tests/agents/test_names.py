"""Agents that are another one with other defaults, and what a strategy does for them."""

from typing import Any

import pytest
from toys_agents import CONTINUOUS

import jaxrl

SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "ddpg": ("td3", {"num_critics": 1, "target_noise": 0.0, "policy_interval": 1}),
    "tqc": ("sac", {"num_critics": 5, "quantiles": 25, "critic_features": (512, 512, 512)}),
    "redq": ("sac", {"num_critics": 10, "critic_subset": 2, "policy_interval": 20}),
    "droq": ("sac", {"critic_subset": 2, "policy_interval": 20, "layer_norm": True, "dropout": 0.01}),
    "crossq": (
        "sac",
        {
            "lr": 1e-3, "policy_lr": 1e-3, "temperature_lr": 1e-3, "optimizer_b1": 0.5, "target_network": False,
            "batch_norm": "renorm", "policy_interval": 3, "critic_features": (2048, 2048),
        },
    ),
    "simba": (
        "sac",
        {
            "lr": 1e-4, "policy_lr": 1e-4, "temperature_lr": 1e-4, "temperature": 0.01, "optimizer": "adamw",
            "weight_decay": 0.01, "torso": "simba", "features": (128,), "critic_features": (512, 512),
        },
    ),
    "xqc": (
        "sac",
        {
            "temperature": 0.01, "joint_batch": True, "batch_norm": "batch", "pre_activation_norm": True,
            "weight_norm": True, "policy_interval": 3, "atoms": 101, "v_min": -5.0, "v_max": 5.0,
            "features": (256,) * 4, "critic_features": (512,) * 4,
        },
    ),
    "fast_sac": (
        "sac",
        {
            "optimizer": "adamw", "optimizer_b2": 0.95, "weight_decay": 0.001, "tau": 0.125, "temperature": 0.001,
            "policy_interval": 4, "critic_target": "mean", "atoms": 101, "activation": "silu", "layer_norm": True,
            "features": (512, 256, 128), "critic_features": (768, 384, 192),
        },
    ),
    "fast_td3": (
        "td3",
        {
            "optimizer": "adamw", "weight_decay": 0.1, "tau": 0.1, "atoms": 101, "noise": 0.4, "noise_min": 0.001,
            "target_noise": 0.001, "features": (512, 256, 128), "critic_features": (1024, 512, 256),
        },
    ),
    "rebrac": (
        "td3",
        {
            "lr": 1e-3, "policy_lr": 1e-3, "actor_bc_coef": 0.01, "critic_bc_coef": 0.01, "layer_norm": True,
            "features": (256, 256, 256),
        },
    ),
    "sac_n": ("sac", {"num_critics": 10, "features": (256, 256, 256)}),
    "edac": ("sac", {"num_critics": 10, "features": (256, 256, 256), "eta": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_each_is_another_agent_with_other_defaults(name: str) -> None:
    of, settings = SAME[name]
    agent, same = getattr(jaxrl, name)()(CONTINUOUS), getattr(jaxrl, of)(**settings)(CONTINUOUS)
    assert agent.info.settings == same.info.settings
    assert (agent.info.offline, same.info.offline) == (name in ("rebrac", "sac_n", "edac"), False)


def test_agents_for_data_say_so() -> None:
    of = lambda name: getattr(jaxrl, name)()(CONTINUOUS).info.offline
    assert all(of(name) for name in ("bc", "td3_bc", "cql", "awac", "iql"))
    assert not any(of(name) for name in ("sac", "td3", "ppo"))


@pytest.mark.parametrize(
    ("name", "updates", "normalised"), [("droq", 20, ""), ("simba", 2, "normalise_obs"), ("xqc", 2, "normalise_reward")]
)
def test_a_strategy_has_the_updates_of_each_and_normalises_what_each_needs(
    name: str, updates: int, normalised: str
) -> None:
    told: Any = jaxrl.off_policy(jaxrl.make_env("Pendulum-v1"), getattr(jaxrl, name)()).info.settings
    assert told["updates"] == updates
    assert [what for what in ("normalise_obs", "normalise_reward") if told["processor"][what]] == normalised.split()
