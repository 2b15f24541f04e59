"""What is trained in the cases, and at which size."""

from typing import Any, NamedTuple

import jaxrl
from benchmarks import loops, plain_ppo
from benchmarks.plain import Setting, plain_dqn


class DQN(NamedTuple):
    """DQN as most peers have it: no double Q-learning, squared loss."""

    env: str = "CartPole-v1"
    num_envs: int = 10
    opt_interval: int = 10
    features: tuple[int, ...] = (120, 84)
    batch_size: int = 128
    capacity: int = 10_000
    warmup: int = 1_000
    slowness: int = 1
    """Divides the optimisation steps of a call, where one takes long."""

    def agent(self) -> Any:
        return jaxrl.dqn(features=self.features, double=False, loss="squared", max_grad_norm=1e9)

    def plain(self, seeds: int | None = None) -> loops.Loop:
        shape = Setting(self.env, self.num_envs, self.opt_interval, self.features, self.batch_size, self.capacity)
        return plain_dqn(shape, seeds)


class SAC(NamedTuple):
    """SAC as published, but for the environment."""

    env: str = "Pendulum-v1"
    num_envs: int = 1
    opt_interval: int = 1
    features: tuple[int, ...] = (256, 256)
    batch_size: int = 256
    capacity: int = 100_000
    warmup: int = 1_000
    slowness: int = 30

    def agent(self) -> Any:
        return jaxrl.sac(features=self.features)

    def plain(self) -> loops.Loop | None:
        return None


class PPO(NamedTuple):
    """PPO as most peers have it."""

    env: str = "CartPole-v1"
    num_envs: int = 4
    rollout: int = 128
    epochs: int = 4
    minibatches: int = 4
    features: tuple[int, ...] = (64, 64)
    slowness: int = 1
    """Divides the optimisation steps of a call, where one takes long."""

    def agent(self) -> Any:
        return jaxrl.ppo(features=self.features)

    def plain(self) -> plain_ppo.Setting:
        return plain_ppo.Setting(self.env, self.num_envs, self.rollout, self.epochs, self.minibatches, self.features)

    def strategy(self) -> jaxrl.Strategy:
        return jaxrl.on_policy(
            jaxrl.make_env(self.env),
            self.agent(),
            processor=jaxrl.one_step(),
            num_envs=self.num_envs,
            rollout=self.rollout,
            epochs=self.epochs,
            minibatches=self.minibatches,
        )


def buffer_of(shape: DQN | SAC) -> Any:
    """Return the replay buffer of a case."""
    return jaxrl.uniform(shape.capacity, batch_size=shape.batch_size)


def replaying(shape: DQN | SAC, actors: jaxrl.ActorsConfig | None = None) -> jaxrl.Strategy:
    """Return the strategy of a case that learns from replay."""
    return jaxrl.off_policy(
        jaxrl.make_env(shape.env),
        shape.agent(),
        buffer=buffer_of(shape),
        num_envs=shape.num_envs,
        opt_interval=shape.opt_interval,
        warmup=shape.warmup,
        actors=actors,
    )
