"""TD3: targets and moves in NumPy, on linear networks; when they move; and how they explore."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import acting, begun, drawn_anew, equal, retuned, six_steps, vector_of
from toys_by_hand import beside, linear, numbers
from toys_draws import drawn

from jaxrl.agents import td3
from jaxrl.buffers import uniform
from jaxrl.envs import Env, TimeStep
from jaxrl.errors import SettingsError
from jaxrl.processors import n_step, one_step
from jaxrl.spaces import Box, EnvSpec, box_bounds
from jaxrl.strategies import off_policy
from jaxrl.types import RecurrentObs

KEY = jax.random.key(0)
OBS = Box(-1.0, 1.0, (3,))
SPEC = EnvSpec("Toy", OBS, Box((-2.0, 0.0), (4.0, 0.5), (2,)))
SIZE = 6
LR, POLICY_LR, TAU = 0.25, 0.125, 0.25


@functools.cache
def agent_of(**settings):
    """Make an agent with linear networks and plain gradient descent, all of which can be said again in NumPy."""
    plain = {"features": (), "optimizer": "sgd", "lr": LR, "policy_lr": POLICY_LR, "tau": TAU}
    return td3(**{**plain, **settings})(SPEC)


@functools.cache
def step_of(**settings):
    return jax.jit(agent_of(**settings).update)


@functools.cache
def beginning(**settings):
    """Return a state whose targets are not the networks, and whose parameters are all drawn anew."""
    return drawn_anew(agent_of(**settings), "policy", "critic", "target_policy", "target_critic")


WEIGHT, IMPORTANCE = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), np.array([1.0, 0.5, 0.7, 0.2, 1.0, 0.9])


def batch_of():
    return six_steps(SPEC.action_space, WEIGHT, IMPORTANCE)


NOISE = jnp.asarray(np.random.default_rng(2).normal(0, 2, (SIZE, 2)), jnp.float32)


def update(state, batch, opt_step=0, **settings):
    with drawn(normal=[NOISE]):
        return step_of(**settings)(state, batch, KEY, jnp.uint32(opt_step))


# --- the same in NumPy --------------------------------------------------------------------------------------------


def unit(action):
    """Bring actions of the box back to -1 to 1."""
    low, high, _ = box_bounds(SPEC.action_space)
    return (np.asarray(action, np.float64) - (low + high)[None] / 2) / ((high - low)[None] / 2)


def judged(critic, obs, action):
    """Return what critics say, `[K, B]`, and of what they are linear, `[B, D]`."""
    x = beside(obs, action)
    return linear(critic, x)[..., 0], x


def target_by_hand(state, items, noise, clip):
    blur = np.clip(noise * np.asarray(NOISE, np.float64), -clip, clip)
    raw = linear(numbers(state.target_policy), np.asarray(items.next_obs, np.float64))
    action = np.clip(np.tanh(raw) + blur, -1, 1)
    q, _ = judged(numbers(state.target_critic), items.next_obs, action)
    return np.asarray(items.reward) + np.asarray(items.discount) * q.min(0), blur, np.tanh(raw) + blur


@pytest.mark.parametrize(
    ("noise", "clip", "clipped", "beyond"),
    [(0.05, 0.5, False, False), (0.0, 0.5, False, False), (2.0, 0.5, True, False), (2.0, 20.0, False, True)],
)
def test_targets_are_the_lowest_value_of_the_target_policys_action_under_clipped_noise(noise, clip, clipped, beyond):
    state, batch = retuned(beginning(), target_noise=noise, target_noise_clip=clip), batch_of()
    target, blur, blurred = target_by_hand(state, batch.items, noise, clip)
    _, metrics, priorities = update(state, batch)
    q, _ = judged(numbers(state.critic), batch.items.obs, unit(batch.items.action))
    error = target[None] - q
    np.testing.assert_allclose(priorities, WEIGHT * np.abs(error).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], (WEIGHT * IMPORTANCE * 0.5 * (error**2).sum(0)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["td_error"], np.abs(error)[:, WEIGHT > 0].mean(), rtol=1e-5)
    np.testing.assert_array_equal(target[1::3], batch.items.reward[1::3])
    # Noise and action do meet their bounds, or this would say nothing about clipping.
    assert (np.abs(blur) == clip).any() == clipped
    assert (np.abs(blurred) > 1).any() == beyond


def test_critics_and_policy_move_as_worked_by_hand():
    state, batch = retuned(beginning(), target_noise=0.2), batch_of()
    new, _, _ = update(state, batch, opt_step=1)
    (kernel, bias), critic = numbers(new.critic), numbers(state.critic)
    q, x = judged(critic, batch.items.obs, unit(batch.items.action))
    pull = WEIGHT * IMPORTANCE * (target_by_hand(state, batch.items, 0.2, 0.5)[0][None] - q) / SIZE
    np.testing.assert_allclose(kernel[..., 0] - critic[0][..., 0], LR * np.einsum("kb,bd->kd", pull, x), atol=1e-5)
    np.testing.assert_allclose(bias[:, 0] - critic[1][:, 0], LR * pull.sum(1), atol=1e-5)
    # The policy climbs the first of the new critics, which is linear in the action, through tanh.
    policy, obs = numbers(state.policy), np.asarray(batch.items.obs, np.float64)
    slope = (1 - np.tanh(linear(policy, obs)) ** 2) * kernel[0, 3:, 0][None]
    slope = slope * (WEIGHT * IMPORTANCE)[:, None] / SIZE
    np.testing.assert_allclose(numbers(new.policy)[0] - policy[0], POLICY_LR * obs.T @ slope, atol=1e-5)
    np.testing.assert_allclose(numbers(new.policy)[1] - policy[1], POLICY_LR * slope.sum(0), atol=1e-5)


# --- when it moves ------------------------------------------------------------------------------------------------

LATE = ("policy", "target_policy", "target_critic")


def test_policy_and_targets_move_at_every_so_manyth_step_and_not_a_bit_between():
    state, batch = beginning(), batch_of()
    for opt_step in (*range(6), 2**31 + 1, 2**32 - 2):
        new, _, _ = update(state, batch, opt_step, policy_interval=3)
        assert not equal(new.critic, state.critic)
        due = (opt_step + 1) % 3 == 0
        for part in LATE:
            assert equal(getattr(new, part), getattr(state, part)) != due, (opt_step, part)
        assert equal(new.opt_state.policy, state.opt_state.policy)
        for target, online in (("target_policy", "policy"), ("target_critic", "critic")):
            was, after = (np.asarray(vector_of(getattr(s, target))) for s in (state, new))
            mixed = TAU * np.asarray(vector_of(getattr(new, online))) + (1 - TAU) * was
            np.testing.assert_allclose(after, mixed if due else was, atol=1e-6)
        state = new


def test_moments_of_the_policys_optimizer_wait_with_it():
    agent = td3(features=(), policy_interval=2)(SPEC)
    state, step = begun(agent.init), jax.jit(agent.update)
    first, _, _ = step(state, batch_of(), KEY, jnp.uint32(0))
    assert equal(first.opt_state.policy, state.opt_state.policy)
    second, _, _ = step(first, batch_of(), KEY, jnp.uint32(1))
    counts = [int(part[0].count) for part in (second.opt_state.policy, second.opt_state.critic)]
    assert counts == [1, 2]


def conditions(program, *args):
    """How often the compiled program chooses between two ways; what depends on the platform is no longer in it."""
    return program.lower(*args).compile().as_text().count(" conditional(")


@pytest.mark.slow
def test_in_a_population_of_whole_runs_the_policys_turn_is_still_a_condition():
    strategy = still(td3(features=(), policy_interval=2), updates=4)
    keys = jax.random.split(KEY, 2)
    state = jax.eval_shape(jax.vmap(strategy.init), keys)
    fold, step = jax.vmap(jax.random.fold_in, in_axes=(0, None)), jax.vmap(strategy.step, in_axes=(0, 0, None))
    assert conditions(jax.jit(lambda s, t: step(s, fold(s.key, t), t)), state, jnp.uint32(0)) == 1
    apart = jax.jit(jax.vmap(lambda s, t: strategy.step(s, jax.random.fold_in(s.key, t), t)))
    assert conditions(apart, state, jnp.arange(2, dtype=jnp.uint32)) == 0


# --- acting -------------------------------------------------------------------------------------------------------


def test_exploit_is_the_policys_action_and_needs_only_a_stripped_state():
    state, obs = beginning(), batch_of().items.obs
    bare = agent_of().strip(state)
    assert len(jax.tree.leaves(bare)) == len(jax.tree.leaves((state.policy, state.hyper)))
    action, extras = acting(agent_of())(bare, obs, None, jnp.uint32(0), "exploit")
    expected = np.tanh(linear(numbers(state.policy), np.asarray(obs, np.float64)))
    np.testing.assert_allclose(unit(action), expected, atol=1e-6)
    assert extras == ()


def test_exploration_is_noise_of_the_stated_deviation_about_the_policys_action():
    obs, act = jnp.zeros((20_000, 3)), acting(agent_of())
    for noise in (0.1, 0.02, 0.0):
        state = retuned(beginning(), noise=noise)
        action, extras = act(state, obs, jax.random.key(1), jnp.uint32(0), "explore")
        greedy, _ = act(state, obs, None, jnp.uint32(0), "exploit")
        apart = unit(action) - unit(greedy)
        # 20 000 numbers: half a percent of a deviation off, two thirds of the time.
        np.testing.assert_allclose(apart.std(0), noise, rtol=0.03, atol=1e-6)
        np.testing.assert_allclose(apart.mean(0), 0.0, atol=0.04 * noise + 1e-6)
        assert abs(np.corrcoef(apart.T)[0, 1]) < 0.04 if noise else equal(action, greedy)
        assert extras == ()


@pytest.mark.parametrize(("shape", "dtype"), [((), "float16"), ((2, 3), "float32")])
def test_actions_have_the_shape_of_the_box_and_keep_to_the_bounds_of_each_entry(shape, dtype):
    size = int(np.prod(shape))
    low, high = np.arange(size) - 3.0, np.arange(size) * 2.0 + 0.5
    space = Box(tuple(low), tuple(high), shape, dtype) if shape else Box(-3.0, 0.5, shape, dtype)
    agent = td3(features=(), noise=1.0)(EnvSpec("Toy", OBS, space))
    state = begun(agent.init)
    action, _ = acting(agent)(state, jnp.zeros((200, 3)), jax.random.key(1), jnp.uint32(0), "explore")
    assert action.shape == (200, *shape)
    assert action.dtype == dtype
    flat = np.asarray(action, np.float32).reshape(200, size)
    np.testing.assert_array_equal(flat.min(0), low)
    np.testing.assert_array_equal(flat.max(0), high)


# --- noise that lasts ---------------------------------------------------------------------------------------------

LENGTH = 200


def still(agent, length=LENGTH, **settings):
    """Train in an environment that always looks the same and ends after `length` steps."""
    zeros = jnp.zeros(3)

    def step(count, action, key):
        return count + 1, TimeStep(zeros, 0.0, count + 1 >= length)

    env = Env(SPEC, lambda key: (jnp.int32(0), zeros), step)
    settings = {"num_envs": 8, "opt_interval": 8, "warmup": 8, "random_warmup": False, **settings}
    return off_policy(env, agent, **{"buffer": uniform(6_400, 8), "processor": one_step(), **settings})


def quiet(spec, memory=0.8, noise=0.1, noise_min=0.0):
    """Make TD3 that does not learn; it compiles fast."""
    agent = td3(features=(), noise=noise, noise_memory=memory, noise_min=noise_min)(spec)
    keep = lambda state, batch, key, opt_step: (state, {}, jnp.zeros(batch.weight.shape))
    return agent._replace(update=keep)


@functools.cache
def noises(memory, length=LENGTH):
    """Return the noise of 800 steps in 8 environments, `[800, 8, 2]`, over its deviation in the long run."""
    strategy = still(functools.partial(quiet, memory=memory), length, warmup=6_400)
    state = jax.jit(strategy.init)(KEY)
    # With a policy that never moves and observations of zeros, its action is tanh of the biases.
    middle = np.tanh(np.asarray(state.agent.policy["params"]["Dense_0"]["bias"]))
    taken = np.asarray(state.buffer.items.action).reshape(800, 8, 2)
    return (unit(taken.reshape(-1, 2)).reshape(800, 8, 2) - middle[None, None]) / 0.1, state


def test_noise_with_a_memory_is_autoregressive_of_the_stated_deviation_and_correlation():
    memory = 0.8
    later = noises(memory)[0].reshape(4, LENGTH, 8, 2)[:, 20:]
    # 32 stretches of 180 steps, two numbers each; those of a run are alike, so that some 1200 tell something new.
    np.testing.assert_allclose(later.std(), 1.0, atol=0.08)
    np.testing.assert_allclose(later.mean(), 0.0, atol=0.12)
    for lag in (1, 2, 5):
        product = (later[:, lag:] * later[:, :-lag]).mean()
        np.testing.assert_allclose(product, memory**lag, atol=0.1)
    new = later[:, 1:] - memory * later[:, :-1]
    np.testing.assert_allclose(new.std(), (1 - memory**2) ** 0.5, rtol=0.03)
    # Nothing of what is new was in the noise before.
    assert abs((new * later[:, :-1]).mean()) < 0.04


def test_noise_begins_anew_with_an_episode():
    """The first noise of an episode owes nothing to the last of the one before: it has the deviation of what is new."""
    noise = noises(0.8, 10)[0].reshape(80, 10, 8, 2)
    first, before, second = noise[1:, 0], noise[:-1, -1], noise[1:, 1]
    np.testing.assert_allclose(first.std(), 0.6, rtol=0.07)
    assert abs((first * before).mean()) < 0.08
    assert (first * second).mean() > 0.2
    # The noise after `n` steps has the variance `1 - memory^(2 n)`.
    growing = 1 - 0.8 ** (2 * np.arange(1, 11))
    np.testing.assert_allclose((noise**2).mean((0, 2, 3)), growing, rtol=0.15)


def test_what_is_remembered_is_the_noise_itself_and_stands_beside_the_observations():
    noise, state = noises(0.8, 10)
    held = state.buffer.items
    remembered = np.asarray(held.next_obs.memory).reshape(800, 8, 2)
    np.testing.assert_allclose(remembered, noise, atol=1e-3)
    before = np.asarray(held.obs.memory).reshape(80, 10, 8, 2)
    assert not before[:, 0].any()
    # But for the last bit: XLA may compute the sum once for the ring and once for the next step, rounding differently.
    np.testing.assert_allclose(before[:, 1:], remembered.reshape(80, 10, 8, 2)[:, :-1], rtol=0, atol=5e-7)


@functools.cache
def scales(memory=0.0, length=20):
    """Return scale, noise and action of 800 steps in 8 environments, whose noise has a scale for each episode."""
    strategy = still(functools.partial(quiet, memory=memory, noise=0.4, noise_min=0.1), length, warmup=6_400)
    state = jax.jit(strategy.init)(KEY)
    middle = np.tanh(np.asarray(state.agent.policy["params"]["Dense_0"]["bias"]))
    taken = unit(np.asarray(state.buffer.items.action).reshape(6_400, 2)).reshape(800, 8, 2)
    scale = np.asarray(state.buffer.items.next_obs.memory.scale).reshape(800, 8)
    return scale, taken - middle[None, None]


@pytest.mark.every_day("0.0")
@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_each_episode_of_each_environment_has_noise_of_a_scale_of_its_own(memory):
    scale, noise = scales(memory)
    by_episode = scale.reshape(40, 20, 8)
    np.testing.assert_array_equal(by_episode, np.broadcast_to(by_episode[:, :1], by_episode.shape))
    drawn_scales = by_episode[:, 0].ravel()
    assert len(set(drawn_scales.tolist())) == 320
    # Uniform between 0.1 and 0.4: mean 0.25 and deviation 0.3 / sqrt(12), of 320 draws.
    assert 0.1 <= drawn_scales.min() < 0.11
    assert 0.39 < drawn_scales.max() <= 0.4
    np.testing.assert_allclose([drawn_scales.mean(), drawn_scales.std()], [0.25, 0.0866], atol=0.015)
    if not memory:
        np.testing.assert_allclose((noise / scale[..., None]).std(), 1.0, atol=0.03)


def test_the_scale_of_an_episode_that_goes_on_is_kept_and_greedy_actions_have_none():
    agent = agent_of(noise=0.4, noise_min=0.1)
    begin = jax.tree.map(lambda x: jnp.broadcast_to(x, (SIZE, *x.shape)), agent.memory)
    obs, state = batch_of().items.obs, beginning(noise=0.4, noise_min=0.1)
    act = lambda memory, key, mode: acting(agent)(state, RecurrentObs(obs, memory), key, jnp.uint32(0), mode)
    action, extras = act(begin, KEY, "explore")
    later, again = act(extras["memory"], jax.random.key(7), "explore")
    assert equal(again["memory"], extras["memory"])
    assert not equal(later, action)
    greedy, kept = act(extras["memory"], None, "exploit")
    assert equal(kept["memory"], extras["memory"])
    assert equal(greedy, acting(agent)(state, obs, None, jnp.uint32(0), "exploit")[0])


def test_the_memory_of_noise_is_not_shown_to_the_networks():
    agent = agent_of(noise_memory=0.5)
    batch, memory = batch_of(), jnp.asarray(np.random.default_rng(0).normal(size=(SIZE, 2)), jnp.float32)
    beside = lambda obs: RecurrentObs(obs, memory)
    items = batch.items._replace(obs=beside(batch.items.obs), next_obs=beside(batch.items.next_obs))
    plain = update(beginning(), batch, 1)
    assert equal(plain[0]._replace(hyper=()), update(beginning(), batch._replace(items=items), 1)[0]._replace(hyper=()))
    action, extras = acting(agent)(beginning(), items.obs, None, jnp.uint32(0), "exploit")
    assert equal(action, acting(agent)(beginning(), batch.items.obs, None, jnp.uint32(0), "exploit")[0])
    assert equal(extras["memory"], memory)


def test_noise_that_lasts_and_several_steps_do_not_go_together():
    with pytest.raises(SettingsError, match=r"set processor\.n_step to 1"):
        still(td3(noise_memory=0.5), processor=n_step(3))
