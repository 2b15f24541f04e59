"""Rejax: `python with_rejax.py OPT_STEPS TASK`. It compiles a whole run, so the same run is made twice.

Several seeds are its own way: `vmap` of the whole run.
"""

import importlib.metadata
from typing import Any

import jax
import rejax
import settings as s
from flax import linen as nn
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy


def whole(total: int) -> dict[str, Any]:
    """Return the settings of a run of `total` environment steps without evaluations on the way."""
    return {"total_timesteps": total, "eval_freq": total, "skip_initial_evaluation": True}


def dqn(p: s.DQN, steps: int) -> tuple[Any, int]:
    """Return DQN for a run of `steps` optimisation steps, and how many it makes."""
    total = p.warmup + steps * p.opt_interval
    algorithm = rejax.DQN.create(
        env=p.env,
        num_envs=p.num_envs,
        num_epochs=1,
        buffer_size=p.capacity,
        fill_buffer=p.warmup,
        batch_size=p.batch_size,
        learning_rate=p.lr,
        gamma=p.discount,
        target_update_freq=p.target_interval * p.opt_interval,
        polyak=0.0,
        max_grad_norm=1e9,
        eps_start=p.epsilon_start,
        eps_end=p.epsilon_end,
        exploration_fraction=p.epsilon_decay * p.opt_interval / total,
        ddqn=False,
        **whole(total),
    )
    # The widths cannot be given to `create`.
    network = EpsilonGreedyPolicy(DiscreteQNetwork)(hidden_layer_sizes=p.hidden, action_dim=2, activation=nn.relu)
    return algorithm.replace(agent=network), steps


def ppo(p: s.PPO, steps: int) -> tuple[Any, int]:
    """Return PPO likewise. It clips each entry of a gradient, and has no other way."""
    updates = p.epochs * p.minibatches
    rollouts = -(-steps // updates)
    total = rollouts * p.rollout * p.num_envs
    algorithm = rejax.PPO.create(
        env=p.env,
        num_envs=p.num_envs,
        num_steps=p.rollout,
        num_epochs=p.epochs,
        num_minibatches=p.minibatches,
        learning_rate=p.lr,
        gamma=p.discount,
        gae_lambda=p.gae_lambda,
        clip_eps=p.clip,
        vf_coef=p.value,
        ent_coef=p.entropy,
        max_grad_norm=p.max_grad_norm,
        agent_kwargs={"hidden_layer_sizes": p.hidden, "activation": "tanh"},
        **whole(total),
    )
    return algorithm, rollouts * updates


def sac(p: s.SAC, steps: int) -> tuple[Any, int]:
    """Return SAC likewise."""
    total = p.warmup + steps * p.num_envs
    algorithm = rejax.SAC.create(
        env=p.env,
        num_envs=p.num_envs,
        num_epochs=1,
        hidden_layer_sizes=p.hidden,
        buffer_size=p.capacity,
        fill_buffer=p.warmup,
        batch_size=p.batch_size,
        learning_rate=p.lr,
        gamma=p.discount,
        polyak=1 - p.tau,
        **whole(total),
    )
    return algorithm, steps


def main() -> None:
    """Compile, then time one run; evaluation comes after it."""
    asked, steps = s.task(), 2 * s.opt_steps()
    if isinstance(asked, s.PPO):
        algorithm, made = ppo(asked, steps)
    else:
        algorithm, made = sac(asked, steps) if isinstance(asked, s.SAC) else dqn(asked, steps)
    evaluate = algorithm.eval_callback
    algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
    train = jax.jit(jax.vmap(algorithm.train) if asked.seeds > 1 else algorithm.train)
    keys = lambda key: jax.random.split(key, asked.seeds) if asked.seeds > 1 else key
    jax.block_until_ready(train(keys(jax.random.PRNGKey(0))))
    watch = s.Watch()
    state, _ = jax.block_until_ready(train(keys(jax.random.PRNGKey(1))))
    us = watch.us(made * asked.seeds)
    judge = lambda state: evaluate(algorithm, state, jax.random.PRNGKey(2))[1]
    returns = jax.vmap(judge)(state) if asked.seeds > 1 else judge(state)
    versions = {name: importlib.metadata.version(name) for name in ("rejax", "gymnax", "jax")}
    s.tell(us, float(returns.mean()), made, **versions)


main()
