"""A population by plain `vmap`: one program, and members that learn as they would alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_closed_form import action_preference

from jaxrl.agents import dqn
from jaxrl.buffers import uniform
from jaxrl.nn import QNetwork
from jaxrl.processors import n_step
from jaxrl.strategies import off_policy
from jaxrl.strategies.base import iterate

MEMBERS = 3
LRS = (1e-2, 7e-3, 5e-3)
TOY = action_preference(0.9)


def make(**settings):
    agent = dqn(**{"features": (8,), "lr": 5e-3, "target_interval": 20, "epsilon_decay": 100, **settings})
    return off_policy(
        TOY.env,
        agent,
        buffer=uniform(1_024, 16),
        processor=n_step(1, 0.9),
        num_envs=8,
        opt_interval=8,
        warmup=64,
    )


def populate(strategy):
    """Return a function from keys `[P]` and learning rates `[P]` to the state of a population."""

    def init(keys, lrs):
        state = jax.vmap(strategy.init)(keys)
        return state._replace(agent=state.agent._replace(hyper=state.agent.hyper._replace(lr=lrs)))

    return jax.jit(init)


@pytest.mark.slow
def test_members_with_their_own_learning_rates_run_in_one_program_and_learn_what_is_right():
    strategy = make(lr_decay=1_500, target_interval=25, loss="squared", epsilon_end=1.0)
    keys, lrs = jax.random.split(jax.random.key(0), MEMBERS), jnp.array(LRS)
    start = populate(strategy)(keys, lrs)
    np.testing.assert_array_equal(start.agent.hyper.lr, lrs)

    def alone(state, first, stop):
        return iterate(lambda state, key, t: strategy.step(state, key, t)[0], state.key, state, first, stop)

    run = jax.jit(jax.vmap(alone, in_axes=(0, None, None)))

    network = QNetwork(TOY.env.spec.observation_space, 2, features=(8,))
    halfway = run(start, jnp.uint32(0), jnp.uint32(700))
    end = run(halfway, jnp.uint32(700), jnp.uint32(1_500))
    values = jax.vmap(lambda params: network.apply(params, TOY.obs))(end.agent.params)
    np.testing.assert_allclose(values, np.broadcast_to(TOY.values, (MEMBERS, 2, 2)), atol=2e-2)

    for rates in (lrs, lrs[::-1], jnp.zeros(MEMBERS)):
        state = start._replace(agent=start.agent._replace(hyper=start.agent.hyper._replace(lr=rates)))
        moved = run(state, jnp.uint32(0), jnp.uint32(1))
        before, after = (jax.vmap(lambda p: p["params"]["Dense_0"]["bias"])(s.agent.params) for s in (start, moved))
        # The first step of Adam is as long as the learning rate.
        np.testing.assert_allclose(np.abs(after - before).max(axis=1), rates, rtol=1e-3, atol=1e-9)
    assert run._cache_size() == 1
