"""DQN learns the values of toys whose values are known in closed form, and so do its variants.

These are distributions of returns, noise, priorities, and Munchausen's bonus.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_closed_form import TOYS, clock_terminates, constant_reward
from toys_steps import trained

from jaxrl.agents import dqn
from jaxrl.agents.values import c51, expected, midpoints, quantiles, rescaled
from jaxrl.buffers import prioritised, uniform
from jaxrl.nn import QNetwork
from jaxrl.processors import n_step
from jaxrl.strategies import off_policy

DISCOUNT = 0.8
UPDATES = 2_000
ATOMS = 9
LOW, HIGH = -1.0, 5.0
"""Ends of a support within which returns of all toys stay, one step further too."""
PRIORITISED = prioritised(512, 32, beta_steps=UPDATES, normalise="all")
VARIANTS = {
    "c51": {"values": "c51", "v_min": LOW, "v_max": HIGH},
    "qr": {"values": "qr"},
    "iqn": {"values": "iqn"},
    "noisy": {"noisy": 0.2},
    "prioritised": {"buffer": PRIORITISED},
    "rescaled": {"value_rescaling": True},
    "rainbow": {"values": "c51", "v_min": LOW, "v_max": HIGH, "dueling": True, "noisy": 0.2, "buffer": PRIORITISED},
}


def learn(toy, n=1, updates=UPDATES, buffer=None, discount=DISCOUNT, **settings):
    """Train on `toy`; return the values that were learnt."""
    kind, dueling, noisy = settings.get("values", "expected"), settings.get("dueling", False), settings.get("noisy", 0)
    # Quantiles are drawn at random, which takes longer; and they enter behind a layer, which for them is one more.
    updates, features = (3 * updates, (16, 16)) if kind == "iqn" else (updates, (16,))
    settings = {"lr": 1e-2, "lr_decay": updates, "target_interval": 25, "atoms": ATOMS, "loss": "squared", **settings}
    agent = dqn(epsilon_start=1.0, epsilon_end=1.0, features=features, **settings)
    sizes = {"num_envs": 8, "opt_interval": 8, "warmup": 512}
    buffer = buffer or uniform(512, 32)
    strategy = off_policy(toy.env, agent, buffer=buffer, processor=n_step(n, discount), **sizes)
    options = {"dueling": dueling, "noisy": noisy, "atoms": ATOMS if kind in ("c51", "qr") else 0}
    network = QNetwork(toy.env.spec.observation_space, 2, features=features, **options)
    plain = rescaled("squared") if settings.get("value_rescaling") else expected("squared")
    values = {"expected": plain, "c51": c51(ATOMS, LOW, HIGH)}.get(kind, quantiles(ATOMS))

    @jax.jit
    def mean(params):
        taus = [jnp.broadcast_to(midpoints(ATOMS)[None], (len(toy.obs), ATOMS))] if kind == "iqn" else []
        # No noise is given, so there is none.
        out, _ = network.apply(params, toy.obs, *taus, mutable=["noise"])
        return jax.vmap(values.mean)(out if out.ndim == 3 else out[..., None])

    return np.asarray(mean(trained(strategy, updates).agent.params))


@pytest.mark.every_day("clock_truncates-3")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", TOYS)
def test_values_are_those_of_the_closed_form(name, n):
    toy = TOYS[name](DISCOUNT)
    np.testing.assert_allclose(learn(toy, n, updates=3_000), toy.values, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"double": False}, {"dueling": True}, {"tau": 0.2, "target_interval": 5}, {"accumulate": 4}],
    ids=lambda settings: " ".join(settings),
)
def test_settings_of_one_kind_of_values_learn_them_too(settings):
    toy = clock_terminates(DISCOUNT)
    np.testing.assert_allclose(learn(toy, updates=3_000, **settings), toy.values, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_them(variant, name):
    toy = TOYS[name](DISCOUNT)
    np.testing.assert_allclose(learn(toy, **VARIANTS[variant]), toy.values, atol=1e-2)


# Every day, one update of rescaled values is worked by hand in `tests/agents/test_dqn.py`.
@pytest.mark.slow
def test_rescaled_values_reach_returns_of_ten_thousand():
    """A reward of 100 for ever, at a discount of 0.99; the network itself outputs no more than 109."""
    toy = constant_reward(0.99, reward=100.0)
    learnt = learn(toy, discount=0.99, value_rescaling=True, target_interval=4)
    np.testing.assert_allclose(learnt, toy.values, rtol=0.03)


# --- Munchausen ---------------------------------------------------------------------------------------------------

WEIGHT = 0.9


@pytest.mark.slow
@pytest.mark.parametrize("values", ["expected", "qr", "iqn"])
def test_munchausen_takes_what_it_is_clipped_to_from_an_action_that_is_never_taken(values):
    """The better action is as good as certain: nothing is taken from its 1. The other's logarithm would be -70."""
    toy = TOYS["action_preference"](DISCOUNT)
    learnt = learn(toy, values=values, munchausen=WEIGHT)
    np.testing.assert_allclose(learnt, np.where(toy.values > 0, 1.0, -1.0 - WEIGHT), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["expected", "qr", "iqn"])
def test_munchausen_pays_for_chance_where_all_actions_are_alike(values):
    """Each has a logarithm of `log(1/2)`: `WEIGHT` of it is added to a reward, all of it taken from the next value."""
    temperature, length = 0.5, 4
    chance = temperature * np.log(0.5)
    worth = [1 + WEIGHT * chance]
    for _ in range(length - 1):
        worth.insert(0, WEIGHT * chance + DISCOUNT * (worth[0] - chance))
    toy = TOYS["delayed_reward"](DISCOUNT)
    learnt = learn(toy, values=values, munchausen=WEIGHT, munchausen_temperature=temperature)
    np.testing.assert_allclose(learnt, np.repeat(np.array(worth)[:, None], 2, axis=1), atol=1e-2)
    # By far not the values without.
    assert np.abs(np.array(worth) - toy.values[:, 0]).min() > 0.05
