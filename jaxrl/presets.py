"""Settings that suit an environment: what `--env` alone brings along. A name with `*` stands for a family."""

from typing import Any

Presets = dict[str, dict[str, Any]]

DQN_PRESETS: Presets = {
    # Found by trying: tanh and a small buffer make DQN far steadier here than the usual ReLU and 50 000 or more.
    # The run ends at 100 000 environment steps.
    "CartPole-v1": {
        "max_opts": 19_800,
        "eval_episodes": 50,
        "num_envs": 5,
        "opt_interval": 5,
        "agent": {"lr": 1e-3, "activation": "tanh", "target_interval": 50, "epsilon_decay": 5_000},
        "buffer": {"capacity": 10_000},
    },
    "Catch-bsuite": {
        "max_opts": 5_000,
        "num_envs": 8,
        "opt_interval": 8,
        "agent": {"lr": 1e-3, "epsilon_decay": 2_000},
        "buffer": {"batch_size": 64},
    },
    # After Young and Tian 2019, https://arxiv.org/abs/1903.03176, with Adam and more environments at once.
    "*-MinAtar": {
        "max_opts": 30_000,
        "eval_interval": 5_000,
        "save_interval": 10_000,
        "num_envs": 16,
        "opt_interval": 16,
        "warmup": 5_008,
        "agent": {"lr": 1e-3, "target_interval": 250, "epsilon_decay": 10_000},
        "buffer": {"capacity": 100_000, "batch_size": 32},
    },
}

PPO_PRESETS: Presets = {}
A2C_PRESETS: Presets = {}
REINFORCE_PRESETS: Presets = {}
PQN_PRESETS: Presets = {}
