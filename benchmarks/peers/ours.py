"""jaxrl on the settings of the peers: `python ours.py OPT_STEPS TASK`."""

import settings as s

import jaxrl
from benchmarks import loops


def dqn(p: s.DQN) -> jaxrl.Strategy:
    """Return DQN."""
    return jaxrl.off_policy(
        jaxrl.make_env(p.env),
        jaxrl.dqn(
            lr=p.lr,
            features=p.hidden,
            double=False,
            loss="squared",
            max_grad_norm=1e9,
            target_interval=p.target_interval,
            epsilon_start=p.epsilon_start,
            epsilon_end=p.epsilon_end,
            epsilon_decay=p.epsilon_decay,
        ),
        buffer=jaxrl.uniform(p.capacity, p.batch_size),
        processor=jaxrl.one_step(p.discount),
        num_envs=p.num_envs,
        opt_interval=p.opt_interval,
        warmup=p.warmup,
    )


def ppo(p: s.PPO) -> jaxrl.Strategy:
    """Return PPO."""
    agent = jaxrl.ppo(
        lr=p.lr,
        features=p.hidden,
        gae_lambda=p.gae_lambda,
        clip_eps=p.clip,
        vf_clip_eps=p.clip,
        vf_coef=p.value,
        ent_coef=p.entropy,
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
    asked = s.task()
    strategy = ppo(asked) if isinstance(asked, s.PPO) else sac(asked) if isinstance(asked, s.SAC) else dqn(asked)
    training = loops.Training(strategy)
    iterations = -(-s.opt_steps() // strategy.opt_steps_per_step)
    training.us(iterations)
    us = training.us(iterations)
    learnt = training.learnt()
    s.tell(us, learnt["mean_return"], int(learnt["opt_steps"]), jaxrl=jaxrl.__version__)


main()
