"""Recurrent SAC on sequences of replay: a walk step by step, memories, and where gradients end."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import drawn_anew
from toys_data import bandit
from toys_envs import counting
from toys_goals import places
from toys_sequences import (
    BURN,
    KEY,
    WIDTH,
    B,
    L,
    T,
    Walk,
    batch_of,
    learns_nothing_from_rows_of_weight_zero,
    one_of,
    updating,
)

import jaxrl
from jaxrl.agents import Agent
from jaxrl.distributions import make_head
from jaxrl.errors import SettingsError
from jaxrl.nn import Core, Critic, PolicyNetwork, Recurrent
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.training.storage.leaves import state_digest
from jaxrl.types import Batch, RecurrentObs, Transition

OBS = Box(-1.0, 1.0, (2,))
SPECS = {
    "discrete": EnvSpec("Toy", OBS, Discrete(3)),
    "continuous": EnvSpec("Toy", OBS, Box((-2.0, 0.0), (4.0, 0.5), (2,))),
}
CRITICS, STEPS, TEMPERATURE = 2, 3, 0.5


# --- an update against the same worked out step by step ----------------------------------------------------------


@cache
def agent_of(name: str, **settings: Any) -> Agent:
    plain = {"features": (5,), "core": "gru", "core_features": WIDTH, "burn_in": BURN, "sequence": T, "n_step": STEPS}
    rates = {"lr": 0.05, "policy_lr": 0.05, "optimizer": "sgd", "temperature": TEMPERATURE, "num_critics": CRITICS}
    return jaxrl.sac(**{**plain, **rates, **settings})(SPECS[name])


def state_of(agent: Agent) -> Any:
    """Return a state whose target is another network."""
    return drawn_anew(agent, "policy", "critic", "target")


@cache
def policy_of(name: str, core: str) -> Any:
    """Return the plain call of the policy's network, `(params, RecurrentObs) -> (outputs, memory)`, compiled."""
    outputs = make_head(SPECS[name], squash=True).outputs
    head = PolicyNetwork(Box(-jnp.inf, jnp.inf, (WIDTH,)), outputs, "mlp", ())
    return jax.jit(Recurrent(head, OBS, Core(core, WIDTH), features=(5,)).apply)


@cache
def critic_of(name: str, core: str) -> Any:
    """Return that of one critic; continuous actions join it before the last layer."""
    discrete = name == "discrete"
    head = Critic(Box(-jnp.inf, jnp.inf, (WIDTH,)), 3 if discrete else 1, "mlp", () if discrete else (5,))
    return jax.jit(Recurrent(head, OBS, Core(core, WIDTH), features=(5,) if discrete else ()).apply)


@cache
def squashed(name: str) -> Any:
    """Return `(outputs, noise) -> (action from -1 to 1, its log-probability)`, compiled."""
    head = make_head(SPECS[name], squash=True)

    def draw(outputs: Any, noise: Any) -> Any:
        chosen = head.distribution(outputs)
        raw = chosen.at(noise)
        return jnp.tanh(raw), chosen.log_prob(raw)

    return jax.jit(draw)


class Walks:
    """A policy and critics along sequence `b`."""

    def __init__(self, name: str, core: str, policy: Any, critic: Any, items: Transition, b: int) -> None:
        self.discrete, self.name = name == "discrete", name
        memory = jax.tree.map(lambda x: x[b, 0], items.obs.memory)
        action = () if self.discrete else (jnp.zeros((1, 2)),)
        self.policy = Walk(policy_of(name, core), policy, memory.policy, items, b)
        self.critics = [
            Walk(critic_of(name, core), one_of(critic, k), one_of(memory.critic, k), items, b, *action)
            for k in range(CRITICS)
        ]

    def value(self, t: int, noise: Any, then: bool) -> tuple[float, float]:
        """Return the value without entropy, and the entropy, before step `t` or after it."""
        look = lambda walk: walk.then if then else walk.now
        outputs = look(self.policy)(t)[None]
        if self.discrete:
            q = np.min([look(critic)(t) for critic in self.critics], axis=0)
            share = np.exp(outputs[0]) / np.exp(outputs[0]).sum()
            return float(share @ q), float(-share @ np.log(share))
        action, log_prob = squashed(self.name)(outputs, noise[None])
        q = min(float(look(critic)(t, action)[0]) for critic in self.critics)
        return q, -float(log_prob[0])


def walked(name: str, core: str, state: Any, critic: Any, batch: Batch, noise: Any = ((), ())) -> dict[str, np.ndarray]:
    """Return absolute errors and losses of the critics, values of the policy and its entropies, `[B, T]` each.

    The policy is judged by `critic`, the critics after the update.
    """
    items, (noise_tm1, noise_t) = jax.tree.map(np.asarray, batch.items), noise
    told = {part: np.zeros((B, T)) for part in ("error", "loss", "value", "entropy")}
    for b in range(B):
        policy, weight = state.policy, items.weight[b]
        online = Walks(name, core, policy, state.critic, items, b)
        target = Walks(name, core, policy, state.target, items, b)
        judges = Walks(name, core, policy, critic, items, b)
        row = lambda noise, t, b=b: () if name == "discrete" else noise[b * T + t - BURN]
        futures = {t: target.value(t, row(noise_t, t), then=True) for t in range(BURN, L)}
        for t in range(BURN, L):
            aim, factor = 0.0, 1.0
            for end in range(t, min(t + STEPS, L)):
                q, entropy = futures[end]
                aim += factor * float(items.reward[b, end])
                factor *= float(items.discount[b, end])
                cut = end + 1 == L or bool(items.is_first[b, end + 1]) or weight[end + 1] == 0
                if cut or end + 1 == t + STEPS:
                    aim += factor * (q + TEMPERATURE * entropy)
                    break
                aim += factor * TEMPERATURE * entropy
            if name == "discrete":
                held = [float(critic.now(t)[int(items.action[b, t])]) for critic in online.critics]
            else:
                unit = (items.action[b, t] - np.array([1.0, 0.25])) / np.array([3.0, 0.25])
                held = [float(critic.now(t, jnp.asarray(unit[None], jnp.float32))[0]) for critic in online.critics]
            errors = (aim - np.array(held)) * weight[t]
            place = (b, t - BURN)
            told["error"][place], told["loss"][place] = np.abs(errors).mean(), np.square(errors).sum() / 2
            q, told["entropy"][place] = judges.value(t, row(noise_tm1, t), then=False)
            told["value"][place] = (q + TEMPERATURE * told["entropy"][place]) * weight[t]
    return told


CASES = [("continuous", "gru"), ("discrete", "gru"), ("continuous", "lstm")]


@pytest.mark.every_day("continuous-gru")
@pytest.mark.parametrize(("name", "core"), CASES)
def test_an_update_sees_what_a_walk_through_the_sequences_finds(name: str, core: str) -> None:
    agent = agent_of(name, core=core)
    state, batch = state_of(agent), batch_of(agent, SPECS[name].action_space)
    new, metrics, priorities = updating(agent)(state, batch)
    # The first key of an update is that of the policy's loss, the second that of the targets.
    noise = [np.asarray(jax.random.normal(key, (B * T, 2))) for key in jax.random.split(KEY, 3)[:2]]
    told = walked(name, core, state, new.critic, batch, noise)
    error, share = told["error"], np.asarray(batch.weight)[:, None]
    assert (error > 0).sum() == B * T - 1
    np.testing.assert_allclose(priorities, 0.9 * error.max(1) + 0.1 * error.mean(1), rtol=2e-4)
    counted = np.asarray(batch.items.weight)[:, BURN:] > 0
    np.testing.assert_allclose(metrics["td_error"], error[counted].mean(), rtol=2e-4)
    np.testing.assert_allclose(metrics["loss"], (share * told["loss"]).mean(), rtol=2e-4)
    np.testing.assert_allclose(metrics["policy_loss"], -(share * told["value"]).mean(), rtol=2e-4)
    np.testing.assert_allclose(metrics["entropy"], told["entropy"][counted].mean(), rtol=2e-4)
    # The temperature goes down by the gradient of its own loss, to which the step of weight 0 adds nothing.
    target = 0.3 * np.log(3) if name == "discrete" else -2.0
    slope = ((told["entropy"] - target) * np.asarray(batch.items.weight)[:, BURN:]).mean()
    assert np.sign(new.log_temperature - state.log_temperature) == -np.sign(slope)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("discrete", {}),
    "lstm, layer norm, three critics": ("continuous", {"core": "lstm", "layer_norm": True, "num_critics": 3}),
    "cql": ("continuous", {"cql": 1.0, "cql_actions": 2}),
    "discrete cql": ("discrete", {"cql": 1.0, "learn_temperature": False}),
    "nothing beside the core": ("continuous", {"features": ()}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [pytest.param(*x, id=which) for which, x in VARIANTS.items()])
def test_every_variant_learns_keeps_its_shapes_and_nothing_from_rows_of_weight_zero(name: str, settings: dict) -> None:
    agent = agent_of(name, **settings)
    state, batch = state_of(agent), batch_of(agent, SPECS[name].action_space)
    learns_nothing_from_rows_of_weight_zero(agent, state, batch, "policy", "critic")


# --- in training -------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"core": "gru", "core_features": WIDTH, "features": (5,), "burn_in": 2, "sequence": 4}


def strategy_of(buffer: Any = None, env: Any = None, **settings: Any) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        env or counting(length=5, time_limit=None),
        jaxrl.sac(**{**SMALL, "lr": 0.0, "policy_lr": 0.0, **settings}),
        buffer=buffer or jaxrl.uniform(90, batch_size=4),
        num_envs=3,
        opt_interval=6,
        warmup=30,
    )


@pytest.mark.slow
def test_acting_alone_needs_no_critics_and_their_memories_change_nothing() -> None:
    agent = agent_of("continuous")
    state = jax.jit(agent.init)(KEY)
    kept = jax.tree.map(lambda x: jnp.full((3, *x.shape), 0.5, x.dtype), agent.memory)
    seen = RecurrentObs(jnp.array([[0.1, 0.2], [0.3, -0.4], [-0.5, 0.6]]), kept)
    whole, alone = (agent.act(s, seen, None, jnp.uint32(0), "exploit") for s in (state, agent.strip(state)))
    np.testing.assert_array_equal(whole[0], alone[0])
    np.testing.assert_array_equal(whole[1]["memory"].policy, alone[1]["memory"].policy)
    np.testing.assert_array_equal(alone[1]["memory"].critic, kept.critic)
    assert not np.array_equal(whole[1]["memory"].critic, kept.critic)


def test_buffers_and_data_that_do_not_have_sequences_are_refused() -> None:
    said = r"sac with a core learns from sequences, which this buffer cannot sample"
    with pytest.raises(SettingsError, match=said):
        strategy_of(jaxrl.hindsight(jaxrl.uniform(90, batch_size=4), 0.5), places())
    said = r"cql remembers, and data do not tell what; set agent\.core to none"
    with pytest.raises(SettingsError, match=said):
        jaxrl.offline(bandit([0, 1], [0.0, 1.0]), jaxrl.cql(core="gru"), batch_size=2)


@pytest.mark.slow
def test_members_of_a_population_are_the_runs_alone_and_go_on_with_replay_filled_anew(tmp_path: Path) -> None:
    """Each saves no replay, stops half-way, and goes on: as a member it comes to the bits that it comes to alone."""
    settings: dict[str, Any] = {"save_interval": 10, "save_replay": False, "quiet": True}
    settings |= {"eval_interval": 0, "eval_episodes": 0}

    def trained(strategy: Any, path: Path, **more: Any) -> Any:
        for length in (10, 20):
            kwargs = {**settings, **more, "max_opts": length, "resume": length > 10}
            result = jaxrl.Trainer(strategy, run_dir=str(path), **kwargs).train()
        return result

    strategy = strategy_of(lr=0.01, policy_lr=0.01)
    all_of_them = trained(jaxrl.population(strategy, seeds=2), tmp_path / "all", seed=5)
    digests = [state_digest(member.result.state) for member in all_of_them.members]
    alone = [state_digest(trained(strategy, tmp_path / f"{seed}", seed=seed).state) for seed in (5, 6)]
    assert digests == alone
    assert digests[0] != digests[1]
    rows = [json.loads(line) for line in (tmp_path / "5" / "metrics.jsonl").read_text().splitlines()]
    assert any("with replay filled anew" in row.get("message", "") for row in rows)
