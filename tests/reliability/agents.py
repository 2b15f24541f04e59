"""Every agent with every buffer, small: what the promises are tested over. A new agent or buffer is added here."""

from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from toys_data import bandit, walk
from toys_goals import places

import jaxrl

ENV = "Catch-bsuite"
SPREAD: dict[str, int] = {}
"""Settings in place of those below, of all that have environments: a process sets them before it makes a strategy."""


def _off_policy(
    agent: object, processor: object = None, env: Any = ENV, buffer: object = None, **settings: object
) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        jaxrl.make_env(env) if isinstance(env, str) else env,
        agent,
        buffer=buffer or jaxrl.uniform(96, batch_size=8),
        processor=processor,
        **{"num_envs": 4, "opt_interval": 4, "warmup": 16, **settings, **SPREAD},
    )


def _on_policy(agent: object, processor: object = None, env: str = ENV, **settings: int) -> jaxrl.Strategy:
    return jaxrl.on_policy(
        jaxrl.make_env(env),
        agent,
        processor=processor,
        **{"num_envs": 4, "rollout": 6, "epochs": 2, **settings, **SPREAD},
    )


def _offline(agent: object, processor: object = None, **settings: Any) -> jaxrl.Strategy:
    options = {"batch_size": 8, "holdout": 0.25, **settings}
    return jaxrl.offline(walk((5,) * 12, (True, False) * 6), agent, processor=processor, **options)


def _offline_box(agent: object, processor: object = None, length: int = 1) -> jaxrl.Strategy:
    data = bandit([i / 20 - 1 for i in range(40)], [i / 20 - 1 for i in range(40)], jaxrl.Box(-1.0, 1.0, (1,)))
    data = data._replace(terminated=np.arange(1, 41) % length == 0)
    return jaxrl.offline(data, agent, processor=processor, batch_size=8, holdout=0.25)


class Normed(nn.Module):
    """Batch normalisation, dropout and two layers: a network that learns and acts in different ways."""

    outputs: int

    @nn.compact
    def __call__(self, obs: jax.Array, *action: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(8)(jnp.concatenate([obs.reshape(obs.shape[0], -1), *action], axis=-1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(self.outputs)(nn.Dropout(0.2, deterministic=not train)(x))


_MAKERS: dict[str, Callable[[], jaxrl.Strategy]] = {
    "dqn, uniform": lambda: _off_policy(jaxrl.dqn(features=(8,), target_interval=7)),
    "dueling and soft, accumulated, n-step, uniform": lambda: _off_policy(
        jaxrl.dqn(features=(8,), dueling=True, tau=0.1, target_interval=1, accumulate=2, double=False),
        jaxrl.n_step(3, discount=0.9),
        "CartPole-v1",
    ),
    "dqn, compact": lambda: _off_policy(
        jaxrl.dqn(features=(8,), accumulate=2), jaxrl.n_step(3), buffer=jaxrl.uniform(96, batch_size=8, compact=True)
    ),
    "dqn on stacked frames, each kept once": lambda: _off_policy(
        jaxrl.dqn(features=(8,), lr_decay=40),
        jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()),
        buffer=jaxrl.uniform(96, batch_size=8, compact=True, frames=2),
    ),
    "rainbow, n-step, prioritised over all": lambda: _off_policy(
        jaxrl.rainbow(features=(8,), atoms=11, v_min=-1.0, v_max=1.0),
        jaxrl.n_step(3),
        buffer=jaxrl.prioritised(96, batch_size=8, normalise="all", beta_steps=50),
        resets="pool:6",
    ),
    "dqn with a memory, sequences by priority, compact": lambda: _off_policy(
        jaxrl.dqn(features=(8,), core="lstm", core_features=8, burn_in=2, sequence=4, sequence_interval=2, n_step=3),
        buffer=jaxrl.prioritised(96, batch_size=8, compact=True),
    ),
    "dqn with goals in hindsight": lambda: _off_policy(
        jaxrl.dqn(features=(8,)), env=places(), buffer=jaxrl.hindsight(jaxrl.uniform(96, batch_size=8), 0.8)
    ),
    "iqn with munchausen": lambda: _off_policy(jaxrl.dqn(features=(8, 8), values="iqn", atoms=4, munchausen=0.9)),
    "dqn whose network has running statistics and dropout": lambda: _off_policy(
        jaxrl.dqn(make_network=lambda spec: Normed(spec.action_space.n), target_interval=7, accumulate=2)
    ),
    "sac with running statistics and without a target network, several updates": lambda: _off_policy(
        jaxrl.sac(features=(8,), batch_norm="renorm", target_network=False, policy_interval=3, critic_features=(6, 6)),
        env="Pendulum-v1",
        updates=2,
    ),
    "xqc, rewards normalised": lambda: _off_policy(
        jaxrl.xqc(features=(8,), critic_features=(8, 8), atoms=11, accumulate=2),
        jaxrl.chain(jaxrl.normalise_reward(), jaxrl.one_step()),
        "Pendulum-v1",
        updates=2,
    ),
    "sac, normalised, several updates, targets by two of three critics": lambda: _off_policy(
        jaxrl.sac(features=(8,), num_critics=3, critic_subset=2, layer_norm=True, accumulate=2),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
        "Pendulum-v1",
        updates=2,
    ),
    "sac with dropout, accumulated": lambda: _off_policy(
        jaxrl.droq(features=(8,), dropout=0.2, policy_interval=3, accumulate=2), env="Pendulum-v1", updates=2
    ),
    "simba, normalised": lambda: _off_policy(
        jaxrl.simba(features=(8,), critic_features=(8, 8)),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
        "Pendulum-v1",
        updates=2,
    ),
    "sac of quantiles whose noise remembers": lambda: _off_policy(
        jaxrl.sac(features=(8,), noise_memory=0.9, quantiles=4), env="Pendulum-v1"
    ),
    "sac with memories, sequences by priority, compact": lambda: _off_policy(
        jaxrl.sac(features=(8,), core="gru", core_features=8, burn_in=2, sequence=4, sequence_interval=2, n_step=3),
        env="Pendulum-v1",
        buffer=jaxrl.prioritised(96, batch_size=8, compact=True),
    ),
    "discrete sac, prioritised": lambda: _off_policy(
        jaxrl.sac(features=(8,)), buffer=jaxrl.prioritised(96, batch_size=8)
    ),
    "td3 whose noise remembers": lambda: _off_policy(
        jaxrl.td3(features=(8,), noise_memory=0.9, lr_decay=60), env="Pendulum-v1"
    ),
    "ddpg, n-step": lambda: _off_policy(jaxrl.ddpg(features=(8,)), jaxrl.n_step(3), "Pendulum-v1"),
    "td3 of atoms, noise of a scale for each episode that remembers": lambda: _off_policy(
        jaxrl.fast_td3(features=(8,), critic_features=(8,), atoms=11, noise_memory=0.5, accumulate=2),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
        "Pendulum-v1",
        updates=2,
    ),
    "sac of atoms on a support that is given": lambda: _off_policy(
        jaxrl.fast_sac(features=(8,), critic_features=(8,), atoms=11, v_min=-100.0, critic_loss="hl_gauss"),
        env="Pendulum-v1",
        buffer=jaxrl.prioritised(96, batch_size=8),
    ),
    "td3 with scans": lambda: _off_policy(
        jaxrl.td3(features=(8,), core="lru", core_features=8, burn_in=2, sequence=4),
        env="Pendulum-v1",
        buffer=jaxrl.uniform(96, batch_size=8),
    ),
    "pqn with attention": lambda: _on_policy(
        jaxrl.pqn(features=(8,), core="gtrxl", core_features=8, core_layers=2, core_window=3), minibatches=2
    ),
    "ppo with scans": lambda: _on_policy(
        jaxrl.ppo(features=(8,), core="mingru", core_features=8, core_layers=2), minibatches=2
    ),
    "ppo": lambda: _on_policy(jaxrl.ppo(features=(8,), lr_decay=80), minibatches=2),
    "ppo, continuous and squashed, normalised": lambda: _on_policy(
        jaxrl.ppo(
            features=(8,),
            squash=True,
            free_scale=False,
            vf_clip_eps=0.2,
            normalise_advantage="batch",
            recompute_advantage=True,
            accumulate=2,
        ),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(0.9), jaxrl.one_step(0.9)),
        "Pendulum-v1",
        minibatches=2,
    ),
    "ppo with a memory, stopped by divergence": lambda: _on_policy(
        jaxrl.ppo(features=(8,), core="lstm", core_features=8, target_kl=1e-5, lr=1e-2), minibatches=2
    ),
    "a2c": lambda: _on_policy(jaxrl.a2c(features=(8,)), epochs=1, minibatches=1),
    "reinforce without a baseline": lambda: _on_policy(
        jaxrl.reinforce(features=(8,), baseline=False, core="gru", core_features=8), epochs=1, minibatches=1
    ),
    "impala": lambda: _on_policy(
        jaxrl.impala(features=(8,), optimizer="rmsprop", rho_clip=2.0, gae_lambda=0.9), epochs=1, minibatches=1
    ),
    "iql from data, n-step, normalised, several updates": lambda: _offline(
        jaxrl.iql(features=(8,), accumulate=2),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(3)),
        updates=2,
    ),
    "iql from data in epochs, rewards scaled": lambda: _offline(
        jaxrl.iql(features=(8,)), replacement=False, scale_rewards_by="range"
    ),
    "bc from data, all of them at once": lambda: _offline(jaxrl.bc(features=(8,)), batch_size=0),
    "bc from data": lambda: _offline(jaxrl.bc(features=(8,), lr_decay=60)),
    "awac from data": lambda: _offline_box(jaxrl.awac(features=(8,))),
    "td3_bc from data": lambda: _offline_box(jaxrl.td3_bc(features=(8,))),
    "rebrac from data, n-step": lambda: _offline_box(jaxrl.rebrac(features=(8,)), jaxrl.n_step(3), length=5),
    "edac from data": lambda: _offline_box(jaxrl.edac(features=(8,), num_critics=3, accumulate=2)),
    "cql from data": lambda: _offline_box(jaxrl.cql(features=(8,), cql_actions=3)),
    "cql_dqn from data": lambda: _offline(jaxrl.cql_dqn(features=(8,))),
    "reppo, normalised": lambda: _on_policy(
        jaxrl.reppo(features=(8,), atoms=11, accumulate=2),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
        "Pendulum-v1",
        minibatches=2,
    ),
    "reppo, discrete actions": lambda: _on_policy(
        jaxrl.reppo(features=(8,), atoms=11, v_min=-1.0, v_max=1.0, lr_decay=80), minibatches=2
    ),
    "pqn": lambda: _on_policy(jaxrl.pqn(features=(8,), epsilon_decay=40), minibatches=4, epochs=1),
}

COMBINATIONS = {name: cache(make) for name, make in _MAKERS.items()}
"""Makers by name; each returns the same strategy every time, so that its programs are compiled once a process."""
