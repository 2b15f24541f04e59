"""Masks of actions: what is forbidden is never done, and counts in no target, probability or entropy."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import DISCRETE, KEY, begun, seeing, updated
from toys_masks import TEMPTING, is_allowed, minefield

import jaxrl
from jaxrl.agents import cql_dqn, dqn, pqn, rainbow
from jaxrl.distributions import Categorical, make_head, mask_distribution
from jaxrl.errors import SettingsError
from jaxrl.masks import apply_mask, get_mask, random_action
from jaxrl.metrics import as_stat
from jaxrl.registry import algorithm_maker, algorithm_names
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, sample_space
from jaxrl.strategies.off_policy import ReplayLearner
from jaxrl.strategies.replay import UpdateSchedule
from jaxrl.strategies.stepwise import Stepwise, act
from jaxrl.training.evaluator import run_episodes
from jaxrl.trees import row_struct
from jaxrl.types import Batch, RecurrentObs, Rollout, Step, Transition

MIN = float(jnp.finfo(jnp.float32).min)
TWO_OF_THREE = np.array([True, False, True])


def draw(space: Any, key: Any, rows: int) -> Any:
    """Draw elements of `space`, in one program."""
    return jax.jit(lambda key: sample_space(space, key, rows))(key)


# --- the equations ----------------------------------------------------------------------------------------------


def test_a_forbidden_value_is_the_smallest_number_and_a_row_that_allows_nothing_allows_everything() -> None:
    rows = apply_mask(jnp.array([[1.0, 9.0, 2.0], [1.0, 9.0, 2.0]]), jnp.array([[True, False, True], [False] * 3]))
    np.testing.assert_array_equal(rows, [[1.0, MIN, 2.0], [1.0, 9.0, 2.0]])


def test_the_entropy_of_two_allowed_actions_of_three_is_log_two_and_its_gradient_is_finite() -> None:
    of = jax.jit(jax.value_and_grad(lambda logits: mask_distribution(Categorical(logits), TWO_OF_THREE).entropy()))
    value, slope = of(jnp.array([0.5, 80.0, 0.5]))
    np.testing.assert_allclose(value, math.log(2), rtol=1e-6)
    np.testing.assert_allclose(slope, [0.0, 0.0, 0.0], atol=1e-6)
    p = 1 / (1 + math.e)  # logits 0 and 1
    value, slope = of(jnp.array([0.0, 80.0, 1.0]))
    np.testing.assert_allclose(value, -p * math.log(p) - (1 - p) * math.log(1 - p), rtol=1e-6)
    np.testing.assert_allclose(slope, [p * (1 - p), 0.0, -p * (1 - p)], rtol=1e-5)


def test_log_probabilities_are_those_among_the_allowed_actions_and_their_gradients_are_finite() -> None:
    log_prob = lambda logits, action: mask_distribution(Categorical(logits), TWO_OF_THREE).log_prob(action)
    of, logits = jax.jit(jax.value_and_grad(log_prob)), jnp.array([0.0, 80.0, 0.0])
    allowed, slope = of(logits, jnp.int32(2))
    np.testing.assert_allclose(allowed, -math.log(2), rtol=1e-6)
    np.testing.assert_allclose(slope, [-0.5, 0.0, 0.5], rtol=1e-6)
    forbidden, slope = of(logits, jnp.int32(1))
    assert forbidden < -1e30
    assert np.isfinite([forbidden, *slope]).all()


def test_each_number_of_an_action_has_a_mask_of_its_own() -> None:
    head = make_head(EnvSpec("Toy", Box(0.0, 1.0, (1,)), MultiDiscrete((3, 2))))
    mask = jnp.array([[True, False, True, False, True], [False, False, False, True, True]])
    outputs = np.tile(np.array([0, 50, 0, 0, 0], np.float32), (2, 1))

    @jax.jit
    def told(keys: Any) -> Any:
        choice = mask_distribution(head.distribution(outputs), mask)
        return choice.entropy(), choice.mode(), jax.vmap(choice.sample)(keys)

    spread, mode, drawn = told(jax.random.split(KEY, 200))
    np.testing.assert_allclose(spread, [math.log(2), math.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(mode, [[0, 1], [1, 0]])
    assert {tuple(x) for x in np.asarray(drawn)[:, 0].tolist()} == {(0, 1), (2, 1)}


PARTS = {"aim": (Box(-1.0, 1.0, (1,)), MultiDiscrete((2, 3))), "move": Discrete(3)}
MASKED_PARTS = {"aim": ((), Box(0, 1, (5,), bool)), "move": Box(0, 1, (3,), bool)}


def test_each_part_of_a_dict_of_actions_has_a_mask_of_its_own_and_may_have_none() -> None:
    head = make_head(EnvSpec("Toy", Box(0.0, 1.0, (1,)), PARTS))
    joint = lambda: head.distribution(jnp.zeros((1, head.outputs)))
    entropy = jax.jit(lambda mask: mask_distribution(joint(), mask).entropy())
    buttons = np.array([[False, True, True, False, True]])
    normal = 0.5 * math.log(2 * math.pi * math.e)
    for mask, wanted in (
        (None, math.log(2) + 2 * math.log(3)),
        ({}, math.log(2) + 2 * math.log(3)),
        ({"move": TWO_OF_THREE[None]}, 2 * math.log(2) + math.log(3)),
        ({"aim": ((), buttons)}, math.log(2) + math.log(3)),
        ({"aim": ((), buttons), "move": TWO_OF_THREE[None]}, 2 * math.log(2)),
        ({"aim": (), "move": np.zeros((1, 3), bool)}, math.log(2) + 2 * math.log(3)),  # nothing allowed is all allowed
    ):
        np.testing.assert_allclose(entropy(mask), [normal + wanted], rtol=1e-6)


def test_random_actions_of_several_parts_are_uniform_among_those_allowed_in_each() -> None:
    rows = 4_000
    spec = EnvSpec("Toy", {"action_mask": MASKED_PARTS, "seen": Box(0.0, 1.0, (1,))}, PARTS)
    buttons = jnp.tile(jnp.array([False, True, True, False, True]), (rows, 1))
    obs = {
        "action_mask": {"aim": ((), buttons), "move": jnp.tile(TWO_OF_THREE, (rows, 1))},
        "seen": jnp.zeros((rows, 1)),
    }
    drawn = jax.jit(lambda key: random_action(spec, key, obs))(KEY)
    (where, pressed), move = drawn["aim"], drawn["move"]
    assert move.dtype == "int32"
    np.testing.assert_allclose(np.bincount(move, minlength=3) / rows, [0.5, 0.0, 0.5], atol=0.03)
    assert (pressed[:, 0] == 1).all()
    np.testing.assert_allclose(np.bincount(pressed[:, 1], minlength=3) / rows, [0.5, 0.0, 0.5], atol=0.03)
    np.testing.assert_allclose(np.histogram(where, 4, (-1, 1))[0] / rows, 0.25, atol=0.03)
    together = np.asarray(move == 2) & np.asarray(pressed[:, 1] == 2)
    np.testing.assert_allclose(together.mean(), 0.25, atol=0.03)


def test_random_actions_without_a_mask_are_as_ever() -> None:
    plain = jax.jit(lambda key: random_action(DISCRETE, key, jnp.zeros((9, 3))))(KEY)
    np.testing.assert_array_equal(plain, draw(DISCRETE.action_space, KEY, 9))


# --- whole agents -------------------------------------------------------------------------------------------------

OFF: dict[str, Any] = {"num_envs": 8, "opt_interval": 8, "warmup": 64}
ON: dict[str, Any] = {"num_envs": 8, "rollout": 8, "epochs": 1, "minibatches": 1}
SMALL: dict[str, Any] = {"features": (8,)}
PAIRS = MultiDiscrete((3, 2))
SQUARE = MultiDiscrete((3, 3))
often = {"epsilon_start": 0.5, "epsilon_end": 0.5}


def off(agent: Any, env: Any) -> Any:
    return jaxrl.off_policy(env, agent, buffer=jaxrl.uniform(256, batch_size=16), **OFF)


def on(agent: Any, env: Any) -> Any:
    return jaxrl.on_policy(env, agent, **ON)


AGENTS = [
    pytest.param(off, jaxrl.dqn(**SMALL, **often), minefield(), id="dqn"),
    pytest.param(off, jaxrl.dqn(**SMALL, **often, munchausen=0.9), minefield(), id="munchausen"),
    pytest.param(off, jaxrl.dqn(**SMALL, values="qr", dueling=True, atoms=5), minefield(), id="qr"),
    pytest.param(off, jaxrl.dqn(features=(8, 8), values="iqn", atoms=5), minefield(), id="iqn"),
    pytest.param(off, jaxrl.rainbow(**SMALL, atoms=5), minefield(), id="rainbow"),
    pytest.param(off, jaxrl.sac(**SMALL), minefield(), id="sac"),
    pytest.param(on, jaxrl.pqn(**SMALL, **often), minefield(), id="pqn"),
    pytest.param(on, jaxrl.reppo(**SMALL), minefield(), id="reppo"),
    pytest.param(on, jaxrl.ppo(**SMALL), minefield(PAIRS), id="ppo"),
    pytest.param(on, jaxrl.ppo(**SMALL, core="gru", core_features=8), minefield(SQUARE, (2, 3)), id="ppo-gru"),
    pytest.param(on, jaxrl.a2c(**SMALL), minefield(), id="a2c"),
    pytest.param(on, jaxrl.reinforce(**SMALL), minefield(), id="reinforce"),
    pytest.param(on, jaxrl.impala(**SMALL), minefield(SQUARE), id="impala"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("compose", "agent", "env"), AGENTS)
def test_no_agent_ever_does_what_is_forbidden(compose: Any, agent: Any, env: Any) -> None:
    strategy = compose(agent, env)
    stream = jax.random.key(1)

    def train(key: Any) -> Any:
        def body(state: Any, t: Any) -> Any:
            state, metrics = strategy.step(state, jax.random.fold_in(stream, t), t)
            return state, metrics["loss"]

        state, losses = jax.lax.scan(body, strategy.init(key), jnp.arange(60, dtype=jnp.uint32))
        returns, *_ = run_episodes(env, strategy.policy, 8, 50, strategy.policy.params(state), key)
        return state.env.env.mistakes, state.env.episode_length, losses, returns

    mistakes, steps, losses, returns = jax.jit(train)(KEY)
    assert steps.min() >= 60  # the warm-up's included
    assert mistakes.max() == 0
    assert np.isfinite(losses).all()
    assert np.abs(returns).max() < TEMPTING / 2


def test_the_toy_tells_mistakes() -> None:
    env = minefield()
    step = jax.jit(lambda action: env.step(env.reset(KEY)[0]._replace(mask=jnp.asarray(TWO_OF_THREE)), action, KEY))
    after, out = step(jnp.int32(1))
    assert (int(after.mistakes), float(out.reward)) == (1, TEMPTING)
    after, out = step(jnp.int32(2))
    assert (int(after.mistakes), float(out.reward) < TEMPTING) == (0, True)


@pytest.mark.parametrize("random", [True, False])
def test_actors_and_sessions_keep_to_the_mask(random: bool) -> None:
    env, make = minefield(), jaxrl.dqn(**SMALL, **often)
    strategy = jaxrl.off_policy(env, make, num_envs=50, opt_interval=50, actors=jaxrl.ActorsConfig(actors=1))
    actor_fns, agent = strategy.actor_fns, make(env.spec)
    schedule, processor = UpdateSchedule(50, 1, 1, 0, 1, random), jaxrl.one_step()
    stepwise = Stepwise(
        env.spec, agent, processor, schedule, ReplayLearner(agent, processor, jaxrl.uniform(), schedule)
    )

    def run(key: Any) -> Any:
        obs, state = sample_space(env.spec.observation_space, key, 50), agent.init(key)
        window = actor_fns.begin(state, (), obs, jnp.ones(50, bool), key)
        acted = actor_fns.first(random, state, window, key, jnp.zeros(2, jnp.uint32))[1].action
        return obs, acted, act(stepwise, "fill" if random else "train", state, obs, key, jnp.zeros(3, jnp.uint32))[0]

    obs, *actions = jax.jit(run)(KEY)
    assert all(spared(env.spec.action_space, obs, action) for action in actions)
    assert len(np.unique(actions[1])) == 3


def spared(space: Any, obs: Any, action: Any) -> bool:
    """Return whether all actions are allowed where any is."""
    mask = get_mask(obs)
    assert mask is not None
    return bool((is_allowed(space, mask, action) | ~mask.any(axis=-1)).all())


@pytest.mark.every_day("dqn", "ppo", "sac")
@pytest.mark.parametrize("name", algorithm_names(actions="discrete"))
def test_every_agent_acts_within_the_mask(name: str) -> None:
    spec = minefield(Discrete(4)).spec
    agent = algorithm_maker(name)(features=(8,))(spec)
    obs = draw(spec.observation_space, KEY, 64)

    def run(state: Any) -> Any:
        explored = agent.act(state, obs, KEY, jnp.uint32(10_000), "explore")[0]
        return explored, agent.act(state, obs, None, jnp.uint32(0), "exploit")[0]

    assert all(spared(spec.action_space, obs, action) for action in jax.jit(run)(begun(agent.init)))


@pytest.mark.every_day("cql")
@pytest.mark.parametrize("name", ["bc", "cql", "awac", "cql_dqn", "iql"])
def test_agents_for_data_learn_with_finite_gradients(name: str) -> None:
    # Among the rows there are some that allow nothing.
    spec = minefield(Discrete(4)).spec
    agent = algorithm_maker(name)(features=(8,))(spec)
    new, metrics = jax.jit(lambda state: updated(agent, spec, state))(begun(agent.init))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((metrics, agent.strip(new))))


def two_steps(*actions: int) -> Batch:
    """Return two steps that saw the same and by whose masks action 1 is forbidden."""
    obs = {"action_mask": jnp.stack([TWO_OF_THREE, TWO_OF_THREE]), "seen": jnp.ones((2, 2))}
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    return Batch(Transition(obs, np.array(actions, np.int32), zeros, zeros, obs, (), ones), np.arange(2), ones)


def test_nothing_is_learnt_of_data_in_which_a_forbidden_action_was_taken() -> None:
    spec = minefield().spec
    agent = jaxrl.bc(**SMALL)(spec)
    state = begun(agent.init)
    update = jax.jit(lambda batch: agent.update(state, batch, (), jnp.uint32(0)))

    def learnt(*actions: int) -> tuple[float, float]:
        _, metrics, _ = update(two_steps(*actions))
        return float(metrics["loss"]), float(metrics["grad_norm"])

    assert learnt(1, 1) == (0.0, 0.0)
    (alone, half), (both, whole) = learnt(1, 2), learnt(2, 2)
    np.testing.assert_allclose([2 * alone, 2 * half], [both, whole], rtol=1e-5)


@pytest.mark.every_day("bc")
@pytest.mark.parametrize("name", ["bc", "awac", "iql"])
def test_the_reported_log_probability_is_that_of_the_allowed_actions_in_the_data(name: str) -> None:
    agent = algorithm_maker(name)(**SMALL)(minefield().spec)
    state = begun(agent.init)
    update = jax.jit(lambda batch: agent.update(state, batch, KEY, jnp.uint32(0)))

    def reported(*actions: int) -> tuple[int, float]:
        log_prob = as_stat(update(two_steps(*actions))[1]["log_prob"])
        return int(log_prob.count), float(log_prob.sum)

    assert reported(2, 2)[1] < 0.0
    assert reported(1, 2) == pytest.approx(reported(2, 2), rel=1e-5)
    assert reported(1, 1) == (0, 0.0)


# --- targets by hand ----------------------------------------------------------------------------------------------

SPACE = {"action_mask": Box(0, 1, (3,), bool), "place": Discrete(2)}
SPEC = EnvSpec("Table", SPACE, Discrete(3))


class Table(nn.Module):
    """A network whose parameters are its outputs, a row a place; it is given no mask."""

    shape: tuple[int, ...] = (2, 3)

    @nn.compact
    def __call__(self, obs: Any) -> Any:
        assert set(obs) == {"place"}
        return self.param("q", nn.initializers.zeros, self.shape)[obs["place"]]


def at(place: int, *mask: int, rows: int = 1) -> Any:
    return {"action_mask": np.tile(np.array(mask, bool), (rows, 1)), "place": np.full(rows, place, np.int32)}


def flat(table: Any) -> Any:
    return {"params": {"q": np.array(table, np.float32)}}


def updated_once(agent: Any) -> Any:
    return jax.jit(lambda state, batch: agent.update(state, batch, KEY, jnp.uint32(0)))


def one_step(obs: Any, next_obs: Any) -> Batch:
    """Return a batch of one step by action 0 with reward 1 and discount 0.5."""
    one = np.ones(1, np.float32)
    return Batch(Transition(obs, np.zeros(1, np.int32), one, one / 2, next_obs, (), one), np.arange(1), one)


def error_of(agent: Any, online: Any, target: Any, **told: Any) -> Any:
    """Return the error of one step from place 0 by action 0 with reward 1, discount 0.5, and the metrics."""
    state = jax.jit(agent.init)(KEY)._replace(params=flat(online), target=flat(target))
    row = {"obs": at(0, 1, 1, 1), "next_obs": at(1, 1, 0, 1), **told}
    _, metrics, priorities = updated_once(agent)(state, one_step(**row))
    return float(priorities[0]), {name: float(value) for name, value in metrics.items()}


TARGET = [[0.0, 0.0, 0.0], [2.0, 100.0, 3.0]]


@pytest.mark.parametrize(("double", "error"), [(False, 1 + 0.5 * 3), (True, 1 + 0.5 * 2)])
def test_targets_of_dqn_are_of_the_best_allowed_action(double: bool, error: float) -> None:
    agent = dqn(make_network=lambda spec: Table(), optimizer="sgd", double=double)(SPEC)
    # The online network prefers the forbidden action 1, then action 0.
    online = [[0.0, 7.0, 5.0], [4.0, 50.0, 1.0]]
    found, metrics = error_of(agent, online, TARGET, obs=at(0, 1, 0, 1))
    np.testing.assert_allclose(found, error, rtol=1e-6)
    assert metrics["q"] == 5.0
    # Of a successor that allows nothing, everything counts.
    found, _ = error_of(agent, online, TARGET, next_obs=at(1, 0, 0, 0))
    np.testing.assert_allclose(found, 1 + 0.5 * 100, rtol=1e-6)


def test_targets_of_munchausen_are_of_the_policy_over_allowed_actions() -> None:
    agent = dqn(make_network=lambda spec: Table(), munchausen=0.9, munchausen_temperature=2.0)(SPEC)
    table = [[1.0, 60.0, 1.0], [2.0, 100.0, 2.0]]
    found, _ = error_of(agent, table, table, obs=at(0, 1, 0, 1))
    # log p is -log 2 at both; clipped at -1 the scaled -2 log 2, and the soft value is 2 + 2 log 2.
    np.testing.assert_allclose(found, 1 - 0.9 + 0.5 * (2 + 2 * math.log(2)) - 1, rtol=1e-6)


def test_targets_of_c51_are_of_the_best_allowed_distribution() -> None:
    make = lambda spec: Table((2, 3, 3))
    agent = rainbow(make_network=make, double=False, atoms=3, v_min=-10.0, v_max=10.0, noisy=0.0)(SPEC)
    sure = lambda atom: [40.0 if i == atom else 0.0 for i in range(3)]
    table = [[[0.0] * 3] * 3, [sure(0), sure(2), sure(1)]]
    # The best allowed return is 0 for sure, the target 1 + 0.5 * 0: 0.9 of it on the atom 0 and 0.1 on 10.
    found, metrics = error_of(agent, table, table)
    np.testing.assert_allclose(metrics["loss"], math.log(3), rtol=1e-5)
    np.testing.assert_allclose(found, math.log(3) + 0.9 * math.log(0.9) + 0.1 * math.log(0.1), rtol=1e-4)


def test_the_conservative_penalty_is_over_allowed_actions() -> None:
    agent = cql_dqn(make_network=lambda spec: Table(), cql=1.0)(SPEC)
    _, metrics = error_of(agent, [[0.0, 60.0, 0.0], [0.0] * 3], np.zeros((2, 3)), obs=at(0, 1, 0, 1))
    np.testing.assert_allclose(metrics["loss"], 0.5 + math.log(2), rtol=1e-5)


def test_lambda_returns_of_pqn_bootstrap_from_the_best_allowed_action() -> None:
    agent = pqn(make_network=lambda spec: Table(), q_lambda=0.5)(SPEC)
    state = jax.jit(agent.init)(KEY)._replace(params=flat(TARGET))
    two = lambda *obs: jax.tree.map(lambda *x: np.stack(x), *obs)
    items = Transition(
        two(at(0, 1, 1, 1), at(1, 1, 0, 1)), jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), jnp.full((2, 1), 0.5),
        two(at(1, 1, 0, 1), at(1, 1, 0, 0)), (), jnp.ones((2, 1)),
    )  # fmt: skip
    prepared = jax.jit(agent.prepare)(state, Rollout(items, jnp.zeros((2, 1), bool)))
    last = 1 + 0.5 * 2
    np.testing.assert_allclose(prepared.target, [1 + 0.5 * (0.5 * 3 + 0.5 * last), last], rtol=1e-6)


def test_discrete_sac_values_and_its_target_entropy_are_of_allowed_actions() -> None:
    zeros = lambda *given: Table((2, 3))
    agent = jaxrl.sac(make_policy=zeros, make_critic=zeros, num_critics=1, temperature=1.0, temperature_lr=0.5)(SPEC)
    state, critic = jax.jit(agent.init)(KEY), flat([TARGET])
    batch = one_step(at(0, 1, 0, 1), at(1, 1, 0, 1))
    update = updated_once(agent)
    _, metrics, priorities = update(state._replace(critic=critic, target=critic), batch)
    # A mean of 2 and 3, and log 2 of entropy.
    np.testing.assert_allclose(priorities, [1 + 0.5 * (2.5 + math.log(2))], rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], math.log(2), rtol=1e-6)
    # With one action allowed there is no entropy, and none is asked for: the temperature stays.
    alone = one_step(at(0, 0, 0, 1), at(1, 1, 0, 1))
    new, metrics, _ = update(state, alone)
    assert metrics["entropy"] == 0.0
    np.testing.assert_array_equal(new.log_temperature, state.log_temperature)
    # A target that a population gave to its member is meant as it is: Adam's first step towards it is the whole rate.
    swept = state._replace(hyper=state.hyper._replace(target_entropy=jnp.float32(0.6)))
    new, _, _ = update(swept, alone)
    np.testing.assert_allclose(new.log_temperature, state.log_temperature + 0.5, rtol=1e-5)


# --- what else sees observations ----------------------------------------------------------------------------------


def test_no_network_takes_the_mask_in() -> None:
    for make in (jaxrl.dqn, jaxrl.pqn, jaxrl.ppo, jaxrl.sac, jaxrl.bc):
        agent = make(**SMALL)(minefield().spec)
        plain = make(**SMALL)(seeing({"seen": Box(-1.0, 1.0, (2,))})._replace(action_space=Discrete(3)))
        assert jax.eval_shape(agent.init, KEY) == jax.eval_shape(plain.init, KEY)


def test_stacked_frames_and_normalisation_leave_the_mask_as_it_is() -> None:
    env = minefield()
    processor = jaxrl.chain(jaxrl.frame_stack(3), jaxrl.normalise_obs(), jaxrl.one_step())
    space = processor.space(env.spec.observation_space)
    assert space["action_mask"] == env.spec.observation_space["action_mask"]
    assert space["seen"].shape == (6,)
    zeros = jnp.zeros(2)
    obs = [draw(env.spec.observation_space, jax.random.key(i), 2) for i in range(3)]
    step = Step(zeros, (), zeros, zeros > 0, zeros < 1, final_obs=obs[1], obs=obs[2])
    window, items = jax.jit(lambda obs, step: processor.process(processor.init(obs), step))(obs[0], step)
    for came, wanted in ((items.obs, obs[0]), (items.next_obs, obs[1]), (processor.observe(window), obs[2])):
        np.testing.assert_array_equal(came["action_mask"], wanted["action_mask"])
        assert came["seen"].shape == (2, 6)
    with pytest.raises(SettingsError, match=r"buffer\.frames is 3, but the action_mask"):
        jaxrl.uniform(64, 8, compact=True, frames=3).init(row_struct(items), 2, 2, 2)


def test_a_recurrent_observation_has_the_mask_of_what_is_seen() -> None:
    np.testing.assert_array_equal(get_mask(RecurrentObs(at(0, 1, 0, 1), jnp.zeros((1, 4)))), [TWO_OF_THREE])
