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
    steps = s.opt_steps()
    env = gymnasium.make(s.ENV)
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=env.observation_space.shape, action_shape=env.action_space.n, hidden_sizes=s.HIDDEN),
        action_space=env.action_space,
        observation_space=env.observation_space,
        eps_training=s.EPSILON_START,
    )
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=s.LR),
        gamma=s.DISCOUNT,
        target_update_freq=s.TARGET_INTERVAL,
        is_double=False,
    )
    envs = DummyVectorEnv([lambda: gymnasium.make(s.ENV) for _ in range(s.NUM_ENVS)])
    collector = Collector(algorithm, envs, VectorReplayBuffer(s.CAPACITY, s.NUM_ENVS), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=s.WARMUP)
    done = 0

    def explore(epoch: int, env_step: int) -> None:
        share = min(1.0, (done + env_step / s.OPT_INTERVAL) / s.EPSILON_DECAY)
        policy.set_eps_training(s.EPSILON_START + (s.EPSILON_END - s.EPSILON_START) * share)

    params = OffPolicyTrainerParams(
        max_epochs=1,
        epoch_num_steps=steps * s.OPT_INTERVAL,
        training_fn=explore,
        show_progress=False,
        verbose=False,
        training_collector=collector,
        collection_step_num_env_steps=s.OPT_INTERVAL,
        batch_size=s.BATCH_SIZE,
        update_step_num_gradient_steps_per_sample=1 / s.OPT_INTERVAL,
    )
    algorithm.run_training(params)
    done = steps
    watch = s.Watch()
    algorithm.run_training(params)
    us = watch.us(steps)
    policy.set_eps_inference(0.0)
    test = Collector(algorithm, DummyVectorEnv([lambda: gymnasium.make(s.ENV) for _ in range(s.NUM_ENVS)]))
    test.reset()
    score = test.collect(n_episode=20).returns_stat
    s.tell(us, float(score.mean), 2 * steps, tianshou=importlib.metadata.version("tianshou"))


main()
