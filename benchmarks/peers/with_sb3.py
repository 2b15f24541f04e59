"""DQN of Stable-Baselines3, or of SBX, which has its interface: `python with_sb3.py OPT_STEPS TASK MODULE`."""

import importlib
import importlib.metadata
import sys
from typing import Any

import settings as s
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


class Half(BaseCallback):
    """Begin to count the seconds after so many environment steps."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin, self.watch = begin, s.Watch()

    def _on_step(self) -> bool:
        if self.num_timesteps <= self.begin:
            self.watch = s.Watch()
        return True


def main() -> None:
    """Train twice as long as asked for, in one call since epsilon falls by its length, and time the second half."""
    name, steps, p = sys.argv[3], s.opt_steps(), s.task()
    assert isinstance(p, s.DQN)
    module = importlib.import_module(name)
    kwargs: dict[str, Any] = {"policy_kwargs": {"net_arch": list(p.hidden)}}
    if name == "stable_baselines3":
        kwargs["max_grad_norm"] = 1e9  # SBX has none
    total = p.warmup + 2 * steps * p.opt_interval
    model = module.DQN(
        "MlpPolicy",
        make_vec_env(p.env, p.num_envs),
        learning_rate=p.lr,
        buffer_size=p.capacity,
        learning_starts=p.warmup,
        batch_size=p.batch_size,
        gamma=p.discount,
        train_freq=p.opt_interval // p.num_envs,
        gradient_steps=1,
        target_update_interval=p.target_interval * p.opt_interval,
        exploration_fraction=p.epsilon_decay * p.opt_interval / total,
        exploration_initial_eps=p.epsilon_start,
        exploration_final_eps=p.epsilon_end,
        seed=0,
        device="cpu",
        **kwargs,
    )
    half = Half(p.warmup + steps * p.opt_interval)
    model.learn(total, callback=half)
    us = half.watch.us(steps)
    score, _ = evaluate_policy(model, make_vec_env(p.env, p.num_envs), n_eval_episodes=20)
    package = {"stable_baselines3": "stable-baselines3", "sbx": "sbx-rl"}[name]
    s.tell(us, float(score), 2 * steps, **{package: importlib.metadata.version(package)})


main()
