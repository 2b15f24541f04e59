"""DQN learns the values of toys whose values are known in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_closed_form import TOYS, action_preference, clock_terminates, clock_truncates

from jaxrl.agents import dqn
from jaxrl.buffers import uniform
from jaxrl.nn import QNetwork
from jaxrl.processors import n_step
from jaxrl.strategies import off_policy
from jaxrl.strategies.base import iterate

DISCOUNT = 0.8
UPDATES = 3_000


def learn(toy, n, **settings):
    """Train on `toy` for `UPDATES` updates in one compiled program; return the values that were learnt."""
    settings = {"lr": 1e-2, "lr_decay": UPDATES, "features": (16,), "target_interval": 25, **settings}
    agent = dqn(epsilon_start=1.0, epsilon_end=1.0, loss="squared", **settings)
    strategy = off_policy(
        toy.env,
        agent,
        buffer=uniform(512, 32),
        processor=n_step(n, DISCOUNT),
        num_envs=8,
        opt_interval=8,
        warmup=512,
    )

    @jax.jit
    def train(key):
        state = strategy.init(key)
        body = lambda state, key, t: strategy.step(state, key, t)[0]
        return iterate(body, state.key, state, jnp.uint32(0), jnp.uint32(UPDATES)).agent

    network = QNetwork(toy.env.spec.observation_space, 2, features=(16,), dueling=settings.get("dueling", False))
    return np.asarray(jax.jit(network.apply)(train(jax.random.key(0)).params, toy.obs))


@pytest.mark.every_day("clock_truncates-3")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", TOYS)
def test_values_are_those_of_the_closed_form(name, n):
    toy = TOYS[name](DISCOUNT)
    np.testing.assert_allclose(learn(toy, n), toy.values, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"double": False}, {"dueling": True}, {"tau": 0.2, "target_interval": 5}, {"accumulate": 4}],
    ids=lambda settings: " ".join(settings),
)
def test_every_variant_learns_them(settings):
    toy = clock_terminates(DISCOUNT)
    np.testing.assert_allclose(learn(toy, 1, **settings), toy.values, atol=1e-2)


def test_the_toys_tell_a_cut_from_an_end():
    cut, ended = clock_truncates(DISCOUNT).values, clock_terminates(DISCOUNT).values
    assert np.abs(cut - ended).min() > 1
    assert np.abs(np.diff(action_preference(DISCOUNT).values)).min() == 2
