"""DQN of jaxrl on the settings of the peers: `python jaxrl_dqn.py OPT_STEPS`."""

import settings as s

import jaxrl
from benchmarks import loops


def main() -> None:
    """Warm up, then time one stretch; evaluation comes after it."""
    steps = s.opt_steps()
    strategy = jaxrl.off_policy(
        jaxrl.make_env(s.ENV),
        jaxrl.dqn(
            lr=s.LR,
            features=s.HIDDEN,
            double=False,
            loss="squared",
            max_grad_norm=1e9,
            target_interval=s.TARGET_INTERVAL,
            epsilon_start=s.EPSILON_START,
            epsilon_end=s.EPSILON_END,
            epsilon_decay=s.EPSILON_DECAY,
        ),
        buffer=jaxrl.uniform(s.CAPACITY, s.BATCH_SIZE),
        processor=jaxrl.one_step(s.DISCOUNT),
        num_envs=s.NUM_ENVS,
        opt_interval=s.OPT_INTERVAL,
        warmup=s.WARMUP,
    )
    training = loops.Training(strategy)
    training.us(steps)
    us = training.us(steps)
    learnt = training.learnt()
    s.tell(us, learnt["mean_return"], int(learnt["opt_steps"]), jaxrl=jaxrl.__version__)


main()
