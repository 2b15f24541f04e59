"""DQN of Stable-Baselines3, or of SBX, which has its interface: `python with_sb3.py OPT_STEPS TASK MODULE`."""

import importlib
import importlib.metadata
import sys
from typing import Any

import settings as s
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


def main() -> None:
    """Train twice as long as asked for, and time the second half."""
    name, steps = sys.argv[3], s.opt_steps()
    module = importlib.import_module(name)
    kwargs: dict[str, Any] = {"net_arch": list(s.HIDDEN)}
    total = s.WARMUP + 2 * steps * s.OPT_INTERVAL
    model = module.DQN(
        "MlpPolicy",
        make_vec_env(s.ENV, s.NUM_ENVS),
        learning_rate=s.LR,
        buffer_size=s.CAPACITY,
        learning_starts=s.WARMUP,
        batch_size=s.BATCH_SIZE,
        gamma=s.DISCOUNT,
        train_freq=s.OPT_INTERVAL // s.NUM_ENVS,
        gradient_steps=1,
        target_update_interval=s.TARGET_INTERVAL * s.OPT_INTERVAL,
        exploration_fraction=s.EPSILON_DECAY * s.OPT_INTERVAL / total,
        exploration_initial_eps=s.EPSILON_START,
        exploration_final_eps=s.EPSILON_END,
        policy_kwargs=kwargs,
        seed=0,
        device="cpu",
    )
    model.learn(s.WARMUP + steps * s.OPT_INTERVAL)
    watch = s.Watch()
    model.learn(steps * s.OPT_INTERVAL, reset_num_timesteps=False)
    us = watch.us(steps)
    score, _ = evaluate_policy(model, make_vec_env(s.ENV, s.NUM_ENVS), n_eval_episodes=20)
    package = {"stable_baselines3": "stable-baselines3", "sbx": "sbx-rl"}[name]
    s.tell(us, float(score), 2 * steps, **{package: importlib.metadata.version(package)})


main()
