"""Complete DQN on CartPole in plain JAX, Flax, Optax and gymnax: what `jaxrl.dqn` computes, in one file.

Mnih et al. 2015, https://doi.org/10.1038/nature14236, with double Q-learning (van Hasselt et al. 2016,
https://arxiv.org/abs/1509.06461). jaxrl is not imported. With equal settings jaxrl draws the same random numbers, takes
the same actions and has the same parameters, up to how XLA rounds fused products; a test compares them. Comments name
the counterpart of each part in the package.

    python examples/dqn_in_one_file.py
"""

from typing import NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

NUM_ENVS = 4
CAPACITY = 1_000  # transitions in the ring buffer; a multiple of NUM_ENVS
BATCH = 32
WARMUP = 200  # environment steps with random actions, before the first update
DISCOUNT = 0.99
LR = 1e-3
TARGET_INTERVAL = 50  # updates between copies of the parameters to the target network
EPSILON_START, EPSILON_END, EPSILON_DECAY = 1.0, 0.05, 2_000  # the last in updates

env, env_params = gymnax.make("CartPole-v1")
ACTIONS = env.action_space(env_params).n


# jaxrl.nn.QNetwork


class MLP(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.relu(nn.Dense(width)(x))
        return x


class QNetwork(nn.Module):
    """Action values, `[B, 4] -> [B, ACTIONS]`."""

    @nn.compact
    def __call__(self, obs):
        return nn.Dense(ACTIONS)(MLP()(obs))


network, optimizer = QNetwork(), optax.adam(LR)

# jaxrl.Transition, jaxrl.strategies.off_policy.OffPolicyState


class Transition(NamedTuple):
    """One step of each environment; `discount` is 0 where the episode terminated, and only there."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_obs: jax.Array


class State(NamedTuple):
    """Complete state of training."""

    key: jax.Array  # base key: iteration t uses fold_in(key, t)
    params: dict
    target: dict
    opt_state: tuple
    env: gymnax.EnvState  # leaves [N, ...]
    obs: jax.Array  # [N, 4]
    ring: Transition  # leaves [CAPACITY, ...]


# --- environments -------------------------------------------------------------------------------------------------
# jaxrl.make_env, jaxrl.vectorise


def reset(key):
    """Start an episode in each environment."""
    obs, state = jax.vmap(env.reset_env, in_axes=(0, None))(jax.random.split(key, NUM_ENVS), env_params)
    return state, obs


def step(state, action, key):
    """Take a step in each environment, and start the next episode where one ended.

    `next_obs` is the true successor, also at the end of an episode. An episode that ends at the time limit is
    truncated, not terminated, so its value is bootstrapped.
    """
    _, reset_key = jax.random.split(key)  # CartPole's step is deterministic
    stepped = jax.vmap(env.step_env, in_axes=(None, 0, 0, None))(reset_key, state, action, env_params)
    next_obs, state, reward, terminated, _ = stepped
    terminated = jax.vmap(env.is_terminated, in_axes=(0, None))(state, env_params)
    ended = terminated | (state.time >= env_params.max_steps_in_episode)
    fresh_state, fresh_obs = reset(reset_key)
    choose = lambda fresh, old: jnp.where(ended.reshape(-1, *(1,) * (old.ndim - 1)), fresh, old)
    after, obs = jax.tree.map(choose, (fresh_state, fresh_obs), (state, next_obs))
    return after, obs, jnp.float32(reward), terminated, next_obs


# --- collect: act, step, push ---------------------------------------------------------------------------------------
# jaxrl.strategies.off_policy.collect, jaxrl.strategies.interaction.take_steps, jaxrl.uniform


def collect(state, key, epsilon, pushes):
    """Take one step in all environments, and write its transitions into the ring, after `pushes` earlier blocks."""
    # As jaxrl does, split the key of each vector step into one to act and one for the environments, to draw the same
    # numbers.
    act_key, env_key = jax.random.split(jax.random.split(key, 1)[0])
    agent_key, random_key = jax.random.split(act_key)
    if epsilon is None:  # warm-up
        action = random_actions(random_key)
    else:
        # The agent splits its key into 3: for the coin, NoisyNet and Boltzmann exploration. Epsilon-greedy splits the
        # first of these: whether to explore, and the random action.
        coin_key, other_key = jax.random.split(jax.random.split(agent_key, 3)[0])
        greedy = network.apply(state.params, state.obs).argmax(axis=-1).astype(jnp.int32)
        explore = jax.random.uniform(coin_key, (NUM_ENVS,)) < epsilon
        action = jnp.where(explore, random_actions(other_key), greedy)
    env_state, obs, reward, terminated, next_obs = step(state.env, action, env_key)
    discount = jnp.where(terminated, 0.0, DISCOUNT)
    items = Transition(state.obs, action, reward, discount, next_obs)
    # A block is one contiguous update, so the ring is written in place.
    start = (pushes % (CAPACITY // NUM_ENVS)).astype(jnp.int32) * NUM_ENVS
    write = lambda ring, rows: jax.lax.dynamic_update_slice_in_dim(ring, rows, start, axis=0)
    return state._replace(env=env_state, obs=obs, ring=jax.tree.map(write, state.ring, items))


def random_actions(key):
    return (jax.random.bits(key, (NUM_ENVS,), jnp.uint32) % ACTIONS).astype(jnp.int32)


# --- learn: sample, update ------------------------------------------------------------------------------------------
# jaxrl.strategies.replay.optimise, jaxrl.agents.dqn.action_value_loss, jaxrl.agents.optimizers.gradient_update


def loss(params, target, batch):
    """Return the mean of `(r + discount * Q_target(s', argmax_a Q(s', a)) - Q(s, a))^2 / 2` over a batch."""
    q_tm1, q_t = network.apply(params, batch.obs), network.apply(target, batch.next_obs)
    best = network.apply(jax.lax.stop_gradient(params), batch.next_obs).argmax(axis=-1)
    policy = jax.nn.one_hot(best, ACTIONS)
    value = jnp.sum(policy * q_t, axis=-1)
    chosen = jnp.sum(jax.nn.one_hot(batch.action, ACTIONS) * q_tm1, axis=-1)
    error = batch.reward + batch.discount * value - chosen
    return jnp.mean(0.5 * error**2)


def learn(state, key, t, pushes):
    """Take update number `t` on a batch sampled uniformly from the ring."""
    # One key for each update of the iteration, here a single one; split to sample, and to update with noise.
    sample_key, _ = jax.random.split(jax.random.split(key, 1)[0])
    size = jnp.minimum(pushes, CAPACITY // NUM_ENVS) * NUM_ENVS
    index = jax.random.bits(sample_key, (BATCH,), jnp.uint32) % size
    batch = jax.tree.map(lambda ring: ring[index.astype(jnp.int32)], state.ring)
    grads = jax.grad(loss)(state.params, state.target, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    due = (t + 1) % TARGET_INTERVAL == 0
    target = jax.tree.map(lambda new, old: jnp.where(due, new, old), params, state.target)
    return state._replace(params=params, target=target, opt_state=opt_state)


# --- the loop -------------------------------------------------------------------------------------------------------
# jaxrl.off_policy, jaxrl.strategies.base.ComposedStep, jaxrl.Trainer, jaxrl.training.evaluator.run_episodes

FILL = WARMUP // NUM_ENVS  # blocks pushed before the first update


def init(key):
    """Initialise the networks, reset the environments, and fill the ring with random steps."""
    # The fourth is for the steps before the first complete transition, of which n-step returns have some.
    stream, agent_key, env_key, _, fill_key = jax.random.split(key, 5)
    params = network.init(agent_key, jnp.zeros((1, 4)))
    env_state, obs = reset(env_key)
    zeros = lambda dtype, *shape: jnp.zeros((CAPACITY, *shape), dtype)
    floats = zeros(jnp.float32)
    ring = Transition(zeros(jnp.float32, 4), zeros(jnp.int32), floats, floats, zeros(jnp.float32, 4))
    state = State(stream, params, params, optimizer.init(params), env_state, obs, ring)
    fill = lambda t, state: collect(state, jax.random.fold_in(fill_key, t), None, t)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(FILL), fill, state)


def iterate(state, start, stop):
    """Run iterations `start .. stop-1`, each a step of all environments and an update."""

    def body(t, state):
        collect_key, update_key = jax.random.split(jax.random.fold_in(state.key, t))
        done = jnp.minimum(t, EPSILON_DECAY).astype(jnp.float32) / EPSILON_DECAY
        epsilon = jnp.float32(EPSILON_START) + jnp.float32(EPSILON_END - EPSILON_START) * done
        state = collect(state, collect_key, epsilon, FILL + t)
        return learn(state, update_key, t, FILL + t + 1)

    return jax.lax.fori_loop(jnp.uint32(start), jnp.uint32(stop), body, state)


def evaluate(params, key, steps=500):
    """Return the mean length of greedy episodes, one in each environment."""

    def body(carry, key):
        state, obs, alive, total = carry
        action = network.apply(params, obs).argmax(axis=-1).astype(jnp.int32)
        state, obs, reward, terminated, _ = step(state, action, key)
        return (state, obs, alive & ~terminated, total + alive * reward), None

    state, obs = reset(key)
    begin = (state, obs, jnp.ones(NUM_ENVS, bool), jnp.zeros(NUM_ENVS))
    return jax.lax.scan(body, begin, jax.random.split(key, steps))[0][3].mean()


def main(iterations=10_000, seed=0):
    """Train, and print how long the pole stays up."""
    state = jax.jit(init)(jax.random.key(seed))
    run, look = jax.jit(iterate, donate_argnums=0), jax.jit(evaluate)
    held = 0.0
    for stop in range(2_500, iterations + 1, 2_500):
        state = run(state, stop - 2_500, stop)
        held = float(look(state.params, jax.random.key(1)))
        print(f"{stop} updates: the pole stays up for {held:.0f} steps")
    return held


if __name__ == "__main__":
    main()
