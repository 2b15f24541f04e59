"""jaxrl on the settings of the peers: `python ours.py OPT_STEPS TASK`. Several seeds are a population."""

from collections.abc import Callable

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


Timed = tuple[float, Callable[[], dict[str, float]]]
"""Microseconds per optimisation step, and what tells what was learnt."""


def one(strategy: jaxrl.Strategy, iterations: int) -> Timed:
    """Train as long as asked for twice, and time the second stretch."""
    training = loops.Training(strategy)
    training.us(iterations)
    return training.us(iterations), training.learnt


def several(strategy: jaxrl.Strategy, iterations: int, seeds: int) -> Timed:
    """Train a population twice as long, from its warm-up to its result, and time the second: it compiles nothing."""
    opts = 2 * iterations * strategy.opt_steps_per_step
    never = dict.fromkeys(("eval_interval", "eval_episodes", "record_interval", "save_interval"), 0)
    make = lambda: jaxrl.Trainer(jaxrl.population(strategy, seeds=seeds), max_opts=opts, quiet=True, **never)
    make().train()
    again, watch = make(), s.Watch()
    result = again.train()
    us = watch.us(opts * seeds)
    states = [member.result.state for member in result.members if member.result]
    return us, lambda: loops.learnt(strategy, states, 2 * iterations)


def main() -> None:
    """Warm up, then time one stretch; evaluation comes after it."""
    asked = s.task()
    strategy = ppo(asked) if isinstance(asked, s.PPO) else sac(asked) if isinstance(asked, s.SAC) else dqn(asked)
    iterations = -(-s.opt_steps() // strategy.opt_steps_per_step)
    us, told = one(strategy, iterations) if asked.seeds == 1 else several(strategy, iterations, asked.seeds)
    learnt = told()
    s.tell(us, learnt["mean_return"], int(learnt["opt_steps"]), jaxrl=jaxrl.__version__)


main()
