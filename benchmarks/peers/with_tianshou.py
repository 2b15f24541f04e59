"""DQN of Tianshou 2: `python with_tianshou.py OPT_STEPS TASK`."""

import importlib.metadata

import gymnasium
import settings as s
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net


def main() -> None:
    """Train twice as long as asked for, and time the second half."""
    steps, p = s.opt_steps(), s.task()
    assert isinstance(p, s.DQN)
    env = gymnasium.make(p.env)
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=env.observation_space.shape, action_shape=env.action_space.n, hidden_sizes=p.hidden),
        action_space=env.action_space,
        observation_space=env.observation_space,
        eps_training=p.epsilon_start,
    )
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=p.lr),
        gamma=p.discount,
        target_update_freq=p.target_interval,
        is_double=False,
    )
    envs = DummyVectorEnv([lambda: gymnasium.make(p.env) for _ in range(p.num_envs)])
    collector = Collector(algorithm, envs, VectorReplayBuffer(p.capacity, p.num_envs), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=p.warmup)
    done = 0

    def explore(epoch: int, env_step: int) -> None:
        share = min(1.0, (done + env_step / p.opt_interval) / p.epsilon_decay)
        policy.set_eps_training(p.epsilon_start + (p.epsilon_end - p.epsilon_start) * share)

    params = OffPolicyTrainerParams(
        max_epochs=1,
        epoch_num_steps=steps * p.opt_interval,
        training_fn=explore,
        show_progress=False,
        verbose=False,
        training_collector=collector,
        collection_step_num_env_steps=p.opt_interval,
        batch_size=p.batch_size,
        update_step_num_gradient_steps_per_sample=1 / p.opt_interval,
    )
    algorithm.run_training(params)
    done = steps
    watch = s.Watch()
    algorithm.run_training(params)
    us = watch.us(steps)
    policy.set_eps_inference(0.0)
    test = Collector(algorithm, DummyVectorEnv([lambda: gymnasium.make(p.env) for _ in range(p.num_envs)]))
    test.reset()
    score = test.collect(n_episode=20).returns_stat
    s.tell(us, float(score.mean), 2 * steps, tianshou=importlib.metadata.version("tianshou"))


main()
