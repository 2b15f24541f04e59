"""jaxrl on the settings of the peers: `python ours.py OPT_STEPS TASK`."""

import settings as s

import jaxrl
from benchmarks import loops


def dqn() -> jaxrl.Strategy:
    """Return DQN."""
    return jaxrl.off_policy(
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


def ppo(p: s.PPO) -> jaxrl.Strategy:
    """Return PPO."""
    agent = jaxrl.ppo(
        lr=p.lr,
        features=p.hidden,
        gae_lambda=p.gae_lambda,
        clip=p.clip,
        clip_value=p.clip,
        value=p.value,
        entropy=p.entropy,
        max_grad_norm=p.max_grad_norm,
    )
    return jaxrl.on_policy(
        jaxrl.make_env(p.env),
        agent,
        processor=jaxrl.one_step(p.discount),
        num_envs=p.num_envs,
        rollout=p.rollout,
        epochs=p.epochs,
        minibatches=p.minibatches,
    )


def sac(p: s.SAC) -> jaxrl.Strategy:
    """Return SAC."""
    return jaxrl.off_policy(
        jaxrl.make_env(p.env),
        jaxrl.sac(lr=p.lr, features=p.hidden, tau=p.tau),
        buffer=jaxrl.uniform(p.capacity, p.batch_size),
        processor=jaxrl.one_step(p.discount),
        num_envs=p.num_envs,
        opt_interval=p.num_envs,
        warmup=p.warmup,
    )


def main() -> None:
    """Warm up, then time one stretch; evaluation comes after it."""
    asked = s.TASKS[s.task()]
    strategy = ppo(asked) if isinstance(asked, s.PPO) else sac(asked) if isinstance(asked, s.SAC) else dqn()
    training = loops.Training(strategy)
    iterations = -(-s.opt_steps() // strategy.opt_steps_per_step)
    training.us(iterations)
    us = training.us(iterations)
    learnt = training.learnt()
    s.tell(us, learnt["mean_return"], int(learnt["opt_steps"]), jaxrl=jaxrl.__version__)


main()
