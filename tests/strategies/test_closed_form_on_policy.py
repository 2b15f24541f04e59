"""On-policy agents learn the values of toys whose values are known in closed form, and to remember where they must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_by_hand import softmax
from toys_closed_form import TOYS
from toys_steps import trained

from jaxrl.agents import a2c, impala, ppo, pqn, reinforce, reppo
from jaxrl.envs import Env, TimeStep, vectorise
from jaxrl.nn import ActorCritic, QNetwork
from jaxrl.processors import one_step
from jaxrl.spaces import Discrete, EnvSpec
from jaxrl.strategies import on_policy

DISCOUNT = 0.8
FEATURES = (16,)
ACTION_INDEPENDENT = [name for name in TOYS if name != "action_preference"]
GRADIENTS = {
    "ppo": (ppo, {"iterations": 250, "epochs": 4, "minibatches": 2}),
    "a2c": (a2c, {"iterations": 2_000, "epochs": 1, "minibatches": 1}),
    "impala": (impala, {"iterations": 2_000, "epochs": 1, "minibatches": 1}),
    "reinforce": (reinforce, {"iterations": 2_000, "epochs": 1, "minibatches": 1}),
}


def learn(toy, make, iterations, epochs, minibatches, **settings):
    """Train on `toy`, the learning rate falling to 0; return the agent's state.

    A rollout takes 7 steps, so that its end comes at every place of an episode.
    """
    agent = make(lr=1e-2, lr_decay=iterations * epochs * minibatches, features=FEATURES, **settings)
    sizes = {"num_envs": 16, "rollout": 7, "epochs": epochs, "minibatches": minibatches}
    return trained(on_policy(toy.env, agent, processor=one_step(DISCOUNT), **sizes), iterations).agent


def policy_and_value(toy, make, **settings):
    """Return the probabilities of actions `[K, A]` and the values `[K]` that were learnt."""
    network = ActorCritic(toy.env.spec.observation_space, 2, features=FEATURES)
    outputs, value, _ = jax.jit(network.apply)(learn(toy, make, ent_coef=0.0, **settings).params, toy.obs)
    return softmax(np.asarray(outputs)), np.asarray(value)


@pytest.mark.every_day("clock_truncates-ppo")
@pytest.mark.parametrize("agent", GRADIENTS)
@pytest.mark.parametrize("name", ACTION_INDEPENDENT)
def test_the_critic_learns_the_closed_form(name, agent):
    toy, (make, settings) = TOYS[name](DISCOUNT), GRADIENTS[agent]
    _, value = policy_and_value(toy, make, **settings)
    np.testing.assert_allclose(value, toy.values[:, 0], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clock_truncates", "clock_terminates"])
def test_without_a_baseline_the_critic_learns_it_too(name):
    toy, (make, settings) = TOYS[name](DISCOUNT), GRADIENTS["a2c"]
    _, value = policy_and_value(toy, make, baseline=False, **settings)
    np.testing.assert_allclose(value, toy.values[:, 0], atol=1e-2)


@pytest.mark.every_day("a2c")
@pytest.mark.parametrize("agent", GRADIENTS)
def test_the_policy_learns_the_right_action_and_then_the_critic_its_value(agent):
    toy, (make, settings) = TOYS["action_preference"](DISCOUNT), GRADIENTS[agent]
    probability, value = policy_and_value(toy, make, **settings)
    assert np.diag(probability).min() > 0.9
    np.testing.assert_allclose(value, toy.values.max(axis=1), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_action_values_of_pqn_are_those_of_the_closed_form(name):
    """Acting at random, of episodes that no action changes (or that last one step) the return is that of the best."""
    toy = TOYS[name](DISCOUNT)
    settings = {"iterations": 500, "epochs": 2, "minibatches": 2, "epsilon_start": 1.0, "epsilon_end": 1.0}
    params = learn(toy, pqn, q_lambda=0.65, **settings).params
    network = QNetwork(toy.env.spec.observation_space, 2, features=FEATURES, layer_norm=True)
    np.testing.assert_allclose(jax.jit(network.apply)(params, toy.obs), toy.values, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_values_of_reppo_are_those_of_the_closed_form(name):
    """No policy has so little entropy as the target, so that the temperature falls from little to none.

    Values of actions that the policy has given up are not learnt any more, and have no weight in its own.
    """
    toy = TOYS[name](DISCOUNT)
    settings = {"activation": "tanh", "temperature": 1e-5, "target_entropy": -1.0}
    settings |= {"v_min": -3.0, "v_max": 7.0, "atoms": 101}
    state = learn(toy, reppo, iterations=300, epochs=4, minibatches=2, **settings)
    fns = reppo(features=FEATURES, **settings)(toy.env.spec).policy_fns
    learnt = lambda state, obs: (fns.value(state, obs, ()), fns.distribution(state, obs, jnp.uint32(0)).logits)
    values, logits = jax.tree.map(np.asarray, jax.jit(learnt)(state, toy.obs))
    probability = softmax(logits)
    if name == "action_preference":
        assert np.diag(probability).min() > 0.9
        np.testing.assert_allclose(np.diag(values), 1.0, atol=1e-2)
    else:
        np.testing.assert_allclose((probability * values).sum(axis=1), toy.values[:, 0], atol=1e-2)


# --- memory -----------------------------------------------------------------------------------------------------

WAIT = 4
BLANK = 2


def recall():
    """Show 0 or 1 at first and then nothing; pay 1 for the action of that number `WAIT` steps later, at the end."""

    def reset(key):
        cue = jax.random.randint(key, (), 0, 2)
        return (cue, jnp.int32(0)), cue

    def step(state, action, key):
        cue, waited = state
        end = waited == WAIT
        return (cue, waited + 1), TimeStep(jnp.int32(BLANK), jnp.where(end & (action == cue), 1.0, 0.0), end)

    return Env(EnvSpec("Recall", Discrete(3), Discrete(2)), reset, step)


def mean_reward(core):
    """Train PPO on `recall`; return the mean reward of its greedy policy over 400 episodes."""
    agent = ppo(lr=1e-2, ent_coef=0.01, features=FEATURES, core=core, core_features=16)
    strategy = on_policy(recall(), agent, num_envs=32, rollout=10, epochs=2, minibatches=2)
    params = strategy.policy.params(trained(strategy, 200))
    env, policy = vectorise(recall(), 400), strategy.policy

    @jax.jit
    def play(key):
        state, obs = env.reset(key)
        carry, total = policy.begin(params, obs), 0.0
        # A second episode, for its memory must not be that of the first.
        for step_key in jax.random.split(key, 2 * (WAIT + 1)):
            carry, action = policy.act(params, carry)
            state, step = env.step(state, action, step_key)
            carry, total = policy.observe(params, carry, step), total + step.reward.mean()
        return total / 2

    return float(play(jax.random.key(7)))


@pytest.mark.slow
def test_with_a_core_ppo_recalls_what_it_saw_and_without_one_it_stays_at_chance():
    assert mean_reward("gru") > 0.95
    # Of 800 coins the mean lies within 0.02 of a half, two thirds of the time.
    assert abs(mean_reward("none") - 0.5) < 0.1
