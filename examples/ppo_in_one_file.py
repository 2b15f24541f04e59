"""Complete PPO on CartPole in plain JAX, Flax, Optax and gymnax: what `jaxrl.ppo` computes, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347. jaxrl is not imported. With equal settings jaxrl draws the same
random numbers, takes the same actions and has the same parameters, up to how XLA rounds fused products; a test compares
them. Comments name the counterpart of each part in the package. One difference: jaxrl shuffles large rollouts without
sorting, and so into another order.

    python examples/ppo_in_one_file.py
"""

from typing import NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

NUM_ENVS = 8
ROLLOUT = 128  # steps of each environment in an iteration
EPOCHS, MINIBATCHES = 4, 4  # passes over a rollout, and equal parts of each pass
DISCOUNT, GAE_LAMBDA = 0.99, 0.95
LR, MAX_GRAD_NORM = 1e-3, 0.5
CLIP_EPS, ENT_COEF, VF_COEF = 0.2, 0.01, 0.5

env, env_params = gymnax.make("CartPole-v1")
ACTIONS = env.action_space(env_params).n


# jaxrl.nn.ActorCritic


class Torso(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
        return x


class ActorCritic(nn.Module):
    """Action logits `[B, ACTIONS]` and values `[B]`; the initial policy is nearly uniform."""

    def setup(self):
        self.actor_torso, self.critic_torso = Torso(), Torso()
        self.policy = nn.Dense(ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))
        self.value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))

    def __call__(self, obs):
        return self.policy(self.actor_torso(obs)), self.value(self.critic_torso(obs))[:, 0]


network, optimizer = ActorCritic(), optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(LR))


# jaxrl.types.Rollout, jaxrl.agents.actor_critic.Sample, jaxrl.strategies.on_policy.OnPolicyState


class Rollout(NamedTuple):
    """Steps of the environments, leaves `[T, N, ...]`."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    discount: jax.Array  # 0 where the episode terminated, and only there
    next_obs: jax.Array  # the successor, also at the end of an episode
    last: jax.Array  # the episode ended with this step, terminated or truncated


class Sample(NamedTuple):
    """Training data of an update, leaves `[B, ...]`."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array  # under the parameters that chose the action
    advantage: jax.Array
    target: jax.Array


class State(NamedTuple):
    """Complete state of training."""

    key: jax.Array  # base key: iteration t uses fold_in(key, t)
    params: dict
    opt_state: tuple
    env: gymnax.EnvState  # leaves [N, ...]
    obs: jax.Array  # [N, 4]


# --- environments -------------------------------------------------------------------------------------------------
# jaxrl.make_env, jaxrl.vectorise


def reset(key):
    """Start an episode in each environment."""
    obs, state = jax.vmap(env.reset_env, in_axes=(0, None))(jax.random.split(key, NUM_ENVS), env_params)
    return state, obs


def step(state, action, key):
    """Take a step in each environment, and start the next episode where one ended."""
    _, reset_key = jax.random.split(key)  # CartPole's step is deterministic
    stepped = jax.vmap(env.step_env, in_axes=(None, 0, 0, None))(reset_key, state, action, env_params)
    next_obs, state, reward, _, _ = stepped
    terminated = jax.vmap(env.is_terminated, in_axes=(0, None))(state, env_params)
    last = terminated | (state.time >= env_params.max_steps_in_episode)
    fresh_state, fresh_obs = reset(reset_key)
    choose = lambda fresh, old: jnp.where(last.reshape(-1, *(1,) * (old.ndim - 1)), fresh, old)
    after, obs = jax.tree.map(choose, (fresh_state, fresh_obs), (state, next_obs))
    return after, obs, jnp.float32(reward), terminated, last, next_obs


# jaxrl.strategies.on_policy.collect, jaxrl.strategies.interaction.take_steps


def collect(state, key):
    """Take `ROLLOUT` steps in all environments with the current policy."""

    def act(carry, key):
        env_state, obs = carry
        act_key, env_key = jax.random.split(key)
        logits, _ = network.apply(state.params, obs)
        # Half of the key is the agent's; the other would draw the random actions of a warm-up.
        action = jax.random.categorical(jax.random.split(act_key)[0], logits).astype(jnp.int32)
        env_state, next_obs, reward, terminated, last, successor = step(env_state, action, env_key)
        discount = jnp.where(terminated, 0.0, DISCOUNT)
        return (env_state, next_obs), Rollout(obs, action, reward, discount, successor, last)

    (env_state, obs), rollout = jax.lax.scan(act, (state.env, state.obs), jax.random.split(key, ROLLOUT))
    return state._replace(env=env_state, obs=obs), rollout


# --- learn ----------------------------------------------------------------------------------------------------------
# jaxrl.strategies.on_policy.learn, jaxrl.agents.returns.gae, jaxrl.agents.actor_critic.actor_critic_loss


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]


def prepare(params, rollout):
    """Return the steps of a rollout `[T * N]` with advantages (GAE, Schulman et al. 2016, equation 16)."""
    flat = lambda x: x.reshape(ROLLOUT * NUM_ENVS, *x.shape[2:])
    square = lambda x: x.reshape(ROLLOUT, NUM_ENVS)
    logits, value = network.apply(params, flat(rollout.obs))
    # Not `value` shifted by a step: where an episode ends, the successor is not the rollout's next observation.
    v_tm1, v_t = square(value), square(network.apply(params, flat(rollout.next_obs))[1])
    delta = rollout.reward + rollout.discount * v_t - v_tm1
    decay = rollout.discount * GAE_LAMBDA * (1 - rollout.last)

    def backwards(after, now):
        advantage = now[0] + now[1] * after
        return advantage, advantage

    advantage = jax.lax.scan(backwards, jnp.zeros(NUM_ENVS), (delta, decay), reverse=True)[1]
    log_prob = log_prob_of(logits, flat(rollout.action))
    return Sample(flat(rollout.obs), flat(rollout.action), log_prob, flat(advantage), flat(advantage + v_tm1))


def loss(params, sample):
    """Return the negated clipped objective (equation 7) plus the value loss, less the entropy bonus (equation 9)."""
    logits, value = network.apply(params, sample.obs)
    log_p = jax.nn.log_softmax(logits)
    ratio = jnp.exp(log_prob_of(logits, sample.action) - sample.log_prob)
    clipped = jnp.clip(ratio, 1 - CLIP_EPS, 1 + CLIP_EPS)
    of_policy = -jnp.minimum(ratio * sample.advantage, clipped * sample.advantage)
    of_value = 0.5 * (value - sample.target) ** 2
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.mean(of_policy + VF_COEF * of_value - ENT_COEF * entropy)


def learn(state, rollout, key):
    """Pass over a rollout `EPOCHS` times, each time in another order, with an update per minibatch."""
    samples = prepare(state.params, rollout)

    def update(carry, index):
        params, opt_state = carry
        sample = jax.tree.map(lambda x: x[index], samples)
        apart = sample.advantage - sample.advantage.mean()
        sample = sample._replace(advantage=apart * jax.lax.rsqrt(jnp.square(apart).mean() + 1e-8))
        updates, opt_state = optimizer.update(jax.grad(loss)(params, sample), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    # Half of the key orders the steps; the updates would use the other for dropout.
    words = jax.random.bits(jax.random.split(key)[0], (EPOCHS, ROLLOUT * NUM_ENVS), jnp.uint32)
    order = jnp.argsort(words, axis=-1).reshape(EPOCHS * MINIBATCHES, -1)
    (params, opt_state), _ = jax.lax.scan(update, (state.params, state.opt_state), order)
    return state._replace(params=params, opt_state=opt_state)


# --- the loop -------------------------------------------------------------------------------------------------------
# jaxrl.on_policy, jaxrl.strategies.base.ComposedStep, jaxrl.Trainer, jaxrl.training.evaluator.run_episodes


def init(key):
    """Initialise the network and reset the environments."""
    stream, agent_key, env_key = jax.random.split(key, 3)
    params = network.init(agent_key, jnp.zeros((1, 4)))
    env_state, obs = reset(env_key)
    return State(stream, params, optimizer.init(params), env_state, obs)


def iterate(state, start, stop):
    """Run iterations `start .. stop-1`, each a rollout and the updates on it."""

    def body(t, state):
        collect_key, learn_key = jax.random.split(jax.random.fold_in(state.key, t))
        state, rollout = collect(state, collect_key)
        return learn(state, rollout, learn_key)

    return jax.lax.fori_loop(jnp.uint32(start), jnp.uint32(stop), body, state)


def evaluate(params, key, steps=500):
    """Return the mean length of greedy episodes, one in each environment."""

    def body(carry, key):
        state, obs, alive, total = carry
        action = network.apply(params, obs)[0].argmax(axis=-1).astype(jnp.int32)
        state, obs, reward, _, last, _ = step(state, action, key)
        return (state, obs, alive & ~last, total + alive * reward), None

    state, obs = reset(key)
    begin = (state, obs, jnp.ones(NUM_ENVS, bool), jnp.zeros(NUM_ENVS))
    return jax.lax.scan(body, begin, jax.random.split(key, steps))[0][3].mean()


def main(iterations=100, seed=0):
    """Train, and print how long the pole stays up."""
    state = jax.jit(init)(jax.random.key(seed))
    run, look = jax.jit(iterate, donate_argnums=0), jax.jit(evaluate)
    held = 0.0
    for stop in range(25, iterations + 1, 25):
        state = run(state, stop - 25, stop)
        held = float(look(state.params, jax.random.key(1)))
        print(f"{stop * EPOCHS * MINIBATCHES} updates: the pole stays up for {held:.0f} steps")
    return held


if __name__ == "__main__":
    main()
