"""Recurrent DQN on sequences of replay: errors found by a walk, the memory of acting, and where gradients end."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import drawn_anew, vector_of
from toys_closed_form import hyperbolic, parabolic
from toys_envs import counting
from toys_sequences import (
    BURN,
    KEY,
    WIDTH,
    B,
    L,
    T,
    anew,
    batch_of,
    learns_nothing_from_rows_of_weight_zero,
    one_of,
    updating,
)

import jaxrl
from jaxrl.agents import Agent
from jaxrl.agents.returns import n_step_return
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Batch, RecurrentObs

SPEC = EnvSpec("Toy", Box(-1.0, 1.0, (2,)), Discrete(3))

# --- returns within a sequence, by hand -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "discount", "wanted"),
    [
        (1, 0.5, ((1, 2, 4, 8, 16), (0.5,) * 5, (0, 1, 2, 3, 4))),
        (9, 1.0, ((31, 30, 28, 24, 16), (1,) * 5, (4,) * 5)),
    ],
    ids=["one step", "longer than the sequence"],
)
def test_returns_over_several_steps(n: int, discount: float, wanted: Any) -> None:
    reward = np.array([1, 2, 4, 8, 16], np.float32)
    made = jax.jit(n_step_return, static_argnums=3)(reward, np.full(5, discount, np.float32), np.zeros(5, bool), n)
    for part, values in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(part, values)


# --- an update against the same worked out step by step ----------------------------------------------------------


def agent_of(**settings: Any) -> Agent:
    settings = {"features": (5,), "core_features": WIDTH, "burn_in": BURN, "sequence": T, "n_step": 3, **settings}
    return jaxrl.dqn(**{"core": "gru", "max_grad_norm": 1.0, "lr": 0.01, **settings})(SPEC)


def state_of(agent: Agent) -> Any:
    """Return a state whose target network is another one."""
    return drawn_anew(agent, "params", "target")


@cache
def applied(core: str) -> Any:
    """Return the plain call of the network, `(params, RecurrentObs) -> (values, memory)`, compiled."""
    head = jaxrl.nn.QNetwork(Box(-jnp.inf, jnp.inf, (WIDTH,)), 3, "mlp", ())
    return jax.jit(jaxrl.nn.Recurrent(head, SPEC.observation_space, jaxrl.nn.Core(core, WIDTH), features=(5,)).apply)


def walked(
    core: str, online: Any, target: Any, blank: Any, batch: Batch, h: Any = float, inverse: Any = float
) -> tuple[np.ndarray, np.ndarray]:
    """Return errors and values of the learnt steps `[B, T]`, from the network's plain calls, a step at a time.

    Networks output `h` of the values.
    """
    items, apply = jax.tree.map(np.asarray, batch.items), applied(core)

    def values(params: Any, b: int) -> tuple[np.ndarray, np.ndarray]:
        memory, now, then = jax.tree.map(lambda x: x[b, :1], items.obs.memory), [], []
        for t in range(L):
            if bool(items.is_first[b, t]):
                memory = jax.tree.map(lambda x: x[None], blank)
            q, memory = apply(params, RecurrentObs(items.obs.obs[b, t : t + 1], memory))
            now.append(np.asarray(q)[0])
            then.append(np.asarray(apply(params, RecurrentObs(items.next_obs.obs[b, t : t + 1], memory))[0])[0])
        return np.asarray(now), np.asarray(then)

    errors, held = np.zeros((B, T)), np.zeros((B, T))
    for b in range(B):
        (now, choose), (_, worth) = values(online, b), values(target, b)
        for t in range(BURN, L):
            total, factor, end = 0.0, 1.0, t
            for end in range(t, min(t + 3, L)):
                total += factor * float(items.reward[b, end])
                factor *= float(items.discount[b, end])
                if end + 1 < L and (bool(items.is_first[b, end + 1]) or items.weight[b, end + 1] == 0):
                    break
            aim = h(total + factor * inverse(worth[end, choose[end].argmax()]))
            held[b, t - BURN] = now[t, int(items.action[b, t])]
            errors[b, t - BURN] = (aim - held[b, t - BURN]) * float(items.weight[b, t])
    return errors, held


@pytest.mark.every_day("gru")
@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_an_update_sees_the_errors_that_a_walk_through_the_sequences_finds(core: str) -> None:
    agent = agent_of(core=core)
    state, batch = state_of(agent), batch_of(agent, SPEC.action_space)
    _, metrics, priorities = updating(agent)(state, batch)
    errors, _ = walked(core, state.params, state.target, agent.memory, batch)
    sizes = np.abs(errors)
    assert (sizes > 0).sum() == B * T - 1
    np.testing.assert_allclose(priorities, 0.9 * sizes.max(1) + 0.1 * sizes.mean(1), rtol=2e-4)
    np.testing.assert_allclose(metrics["td_error"], sizes[sizes > 0].mean(), rtol=2e-4)
    weighed = (np.asarray(batch.weight)[:, None] * errors**2 / 2).mean()
    np.testing.assert_allclose(metrics["loss"], weighed, rtol=2e-4)


def test_an_update_of_rescaled_values_sees_the_errors_that_a_walk_through_the_sequences_finds() -> None:
    """As in R2D2: all of the rewards and the bootstrap are those of returns, and their sum is rescaled."""
    agent = agent_of(core="lstm", value_rescaling=True)
    state, batch = state_of(agent), batch_of(agent, SPEC.action_space)
    batch = batch._replace(items=batch.items._replace(reward=100 * batch.items.reward))
    _, metrics, priorities = updating(agent)(state, batch)
    errors, held = walked("lstm", state.params, state.target, agent.memory, batch, hyperbolic, parabolic)
    sizes = np.abs(errors)
    np.testing.assert_allclose(priorities, 0.9 * sizes.max(1) + 0.1 * sizes.mean(1), rtol=2e-4)
    weighed = (np.asarray(batch.weight)[:, None] * errors**2 / 2).mean()
    np.testing.assert_allclose(metrics["loss"], weighed, rtol=2e-4)
    returns = np.abs(parabolic(held + errors) - parabolic(held))
    np.testing.assert_allclose(metrics["td_error"], returns[sizes > 0].mean(), rtol=2e-4)


def test_the_burn_in_makes_the_memory_but_takes_no_gradient() -> None:
    """With its outcome as stored memory, and no burn-in, the update is the same."""
    agent, without = agent_of(lr=0.05, optimizer="sgd"), agent_of(lr=0.05, optimizer="sgd", burn_in=0)
    state, batch = state_of(agent), batch_of(agent, SPEC.action_space)

    @jax.jit
    def brought(params: Any) -> Any:
        (memory,) = jax.tree.map(lambda x: x[:, 0], batch.items.obs.memory)
        for t in range(BURN):
            memory = jnp.where(batch.items.is_first[:, t, None], 0.0, memory)
            (memory,) = applied("gru")(params, RecurrentObs(batch.items.obs.obs[:, t], (memory,)))[1]
        return memory

    same = state._replace(target=state.params)  # for both networks the memory is then one
    obs = jax.tree.map(lambda x: x[:, BURN:], batch.items.obs)
    memory = (obs.memory[0].at[:, 0].set(brought(same.params)),)
    late = jax.tree.map(lambda x: x[:, BURN:], batch.items)._replace(obs=obs._replace(memory=memory))
    wanted = vector_of(updating(without)(same, batch._replace(items=late))[0].params)
    made = vector_of(updating(agent)(same, batch)[0].params)
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-7)
    assert float(np.abs(made - vector_of(same.params)).max()) > 1e-3
    again = batch.items._replace(reward=batch.items.reward.at[:, :BURN].add(100.0))
    np.testing.assert_array_equal(vector_of(updating(agent)(same, batch._replace(items=again))[0].params), made)


VARIANTS: dict[str, dict[str, Any]] = {
    "gru": {},
    "lstm, dueling, huber, soft": {"core": "lstm", "dueling": True, "loss": "huber", "tau": 0.1, "target_interval": 1},
    "c51, noisy": {"values": "c51", "atoms": 5, "noisy": 0.5},
    "iqn": {"values": "iqn", "atoms": 4, "features": (5, 6)},
    "qr with munchausen": {"values": "qr", "atoms": 4, "munchausen": 0.9},
    "cql": {"cql": 1.0},
    "rescaled, dueling, noisy": {"value_rescaling": True, "dueling": True, "noisy": 0.5},
}


@pytest.mark.every_day("lstm, dueling, huber, soft")
@pytest.mark.parametrize("settings", [pytest.param(x, id=name) for name, x in VARIANTS.items()])
def test_every_variant_learns_keeps_its_shapes_and_nothing_from_rows_of_weight_zero(settings: dict) -> None:
    agent = agent_of(**settings)
    state, batch = state_of(agent), batch_of(agent, SPEC.action_space)
    learns_nothing_from_rows_of_weight_zero(agent, state, batch, "params")


@pytest.mark.slow
def test_pieces_and_members_go_where_the_whole_and_each_alone_would() -> None:
    agent, pieces = agent_of(), agent_of(accumulate=2)
    state, batch = state_of(agent), batch_of(agent, SPEC.action_space)
    whole, _, priorities = updating(agent)(state, batch)
    made, _, same = updating(pieces)(state, batch)
    np.testing.assert_allclose(vector_of(made.params), vector_of(whole.params), rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(same, priorities, rtol=1e-4)
    other = state._replace(hyper=jax.tree.map(lambda x: x * 0.7, state.hyper))
    both = jax.tree.map(lambda *xs: jnp.stack(xs), state, other)
    together = jax.jit(jax.vmap(lambda s: agent.update(s, batch, KEY, jnp.uint32(3))[0]))(both)
    for i, member in enumerate((state, other)):
        alone = updating(agent)(member, batch)[0]
        np.testing.assert_allclose(vector_of(one_of(together.params, i)), vector_of(alone.params), rtol=2e-4, atol=2e-5)


# --- in training -------------------------------------------------------------------------------------------------

AGENTS = {
    "dqn": partial(jaxrl.dqn, lr=0.0),
    "sac": partial(jaxrl.sac, lr=0.0, policy_lr=0.0),
}
SMALL: dict[str, Any] = {"core": "gru", "core_features": WIDTH, "features": (5,), "burn_in": 2, "sequence": 4}


def strategy_of(buffer: Any, warmup: int = 30, name: str = "dqn") -> jaxrl.Strategy:
    return jaxrl.off_policy(counting(), AGENTS[name](**SMALL), buffer=buffer, num_envs=3, opt_interval=6, warmup=warmup)


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("name", AGENTS)
def test_what_replay_holds_is_the_memory_that_acting_had(name: str) -> None:
    """Also that which critics would have had. Parameters stay, at a learning rate of 0, so that a walk from a
    sequence's first memory meets all later ones."""
    buffer = jaxrl.uniform(90, batch_size=40)
    strategy = strategy_of(buffer, name=name)
    step = lambda t, s: strategy.step(s, jax.random.fold_in(s.key, t), t)[0]
    run = lambda key: jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(20), step, strategy.init(key))
    state = jax.jit(run)(KEY)
    fresh = AGENTS[name](**SMALL)(counting().spec)
    buffer = buffer.as_sequence_buffer(fresh.window, 3)
    sample = jax.jit(lambda state: buffer.sample(state, KEY, jnp.uint32(25), jnp.uint32(0)).items)
    items = jax.tree.map(np.asarray, sample(state.buffer))
    count, episode = items.obs.obs[..., 0], items.obs.obs[..., 1]
    np.testing.assert_array_equal(items.is_first, count == 0)
    np.testing.assert_array_equal(items.is_last, count == 4)
    follows = (count[:, 1:] == count[:, :-1] + 1) & (episode[:, 1:] == episode[:, :-1])
    assert np.all(follows | ((count[:, 1:] == 0) & (count[:, :-1] == 4)))
    assert 0 < np.mean(follows) < 1
    act = jax.jit(lambda obs: fresh.act(state.agent, obs, None, jnp.uint32(0), "exploit")[1]["memory"])
    memory = items.obs.memory
    now = jax.tree.map(lambda x: x[:, 0], memory)
    for t in range(5):
        now = anew(items.is_first[:, t + 1], act(RecurrentObs(items.obs.obs[:, t], now)))
        for made, held in zip(jax.tree.leaves(now), jax.tree.leaves(memory), strict=True):
            np.testing.assert_allclose(made, held[:, t + 1], rtol=1e-5, atol=1e-6)
    assert all(float(np.abs(x).max()) > 0.01 for x in jax.tree.leaves(memory))


def test_settings_that_cannot_work_are_refused_in_one_line() -> None:
    for buffer, said in (
        (jaxrl.uniform(17, batch_size=4), r"buffer\.capacity is 17, too few for a sequence of 6 steps.*at least 18"),
        (jaxrl.uniform(60, batch_size=4)._replace(as_sequence_buffer=None), "cannot sample; use jaxrl.uniform"),
    ):
        with pytest.raises(SettingsError, match=said):
            strategy_of(buffer)
    with pytest.raises(SettingsError, match=r"set processor\.n_step to 1"):
        jaxrl.off_policy(counting(), jaxrl.dqn(core="gru"), processor=jaxrl.n_step(3))


def test_the_warm_up_lasts_until_there_is_a_sequence_and_says_so() -> None:
    strategy = strategy_of(jaxrl.uniform(90, batch_size=4), warmup=0)
    assert strategy.warmup_env_steps == 18
    assert any("at least one sequence of 6 steps in each environment" in note for note in strategy.info.notes)
