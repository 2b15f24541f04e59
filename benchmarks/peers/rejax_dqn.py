"""DQN of Rejax: `python rejax_dqn.py OPT_STEPS`. It compiles a whole run, so the same run is made twice."""

import importlib.metadata

import jax
import rejax
import settings as s
from flax import linen as nn
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy


def main() -> None:
    """Compile, then time one run."""
    steps = s.opt_steps()
    total = s.WARMUP + 2 * steps * s.OPT_INTERVAL
    algorithm = rejax.DQN.create(
        env=s.ENV,
        num_envs=s.NUM_ENVS,
        num_epochs=1,
        buffer_size=s.CAPACITY,
        fill_buffer=s.WARMUP,
        batch_size=s.BATCH_SIZE,
        learning_rate=s.LR,
        gamma=s.DISCOUNT,
        target_update_freq=s.TARGET_INTERVAL * s.OPT_INTERVAL,
        polyak=0.0,
        max_grad_norm=1e9,
        eps_start=s.EPSILON_START,
        eps_end=s.EPSILON_END,
        exploration_fraction=s.EPSILON_DECAY * s.OPT_INTERVAL / total,
        ddqn=False,
        total_timesteps=total,
        eval_freq=total,
        skip_initial_evaluation=True,
    )
    # The widths cannot be given to `create`.
    network = EpsilonGreedyPolicy(DiscreteQNetwork)(hidden_layer_sizes=s.HIDDEN, action_dim=2, activation=nn.relu)
    algorithm = algorithm.replace(agent=network)
    train = jax.jit(algorithm.train)
    jax.block_until_ready(train(jax.random.PRNGKey(0)))
    watch = s.Watch()
    _, (_, returns) = jax.block_until_ready(train(jax.random.PRNGKey(1)))
    us = watch.us(2 * steps)
    versions = {name: importlib.metadata.version(name) for name in ("rejax", "gymnax", "jax")}
    s.tell(us, float(returns[-1].mean()), 2 * steps, **versions)


main()
