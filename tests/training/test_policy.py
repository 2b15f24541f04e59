"""Policies: in compiled functions, and what they tell beside actions: probabilities and values, worked by hand."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import decided, vector_of
from toys_closed_form import hyperbolic, parabolic
from toys_data import bandit
from toys_trainer import small_dqn

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.exporting.function import function_of
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.strategies.base import Policy
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.training.policy import GreedyPolicy
from jaxrl.types import RecurrentObs

KEY = jax.random.key(0)
SEEN = Box(-9.0, 9.0, (1,))
ONE = np.ones(1, np.float32)
BOUNDED = Box(-2.0, 2.0, (1,))


class Linear:
    """A network without biases: its outputs are the observation, and the action behind it, times these weights."""

    def __init__(self, *rows: list[float], beside: float | None = None) -> None:
        self.rows, self.beside = rows, beside

    def init(self, key: Any, *args: Any) -> Any:
        return {"params": {"w": jnp.asarray(self.rows, jnp.float32)}}

    def apply(self, variables: Any, *args: Any) -> Any:
        leaves = [jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(args)]
        out = jnp.concatenate(leaves, axis=-1) @ variables["params"]["w"]
        return out if self.beside is None else (out, self.beside * leaves[0][:, 0])


def policy_of(
    maker: Any, actions: Any, obs: Any = SEEN, processor: Any = None, opt_steps: int = 0, critics: bool = False
) -> GreedyPolicy:
    """Return the policy of a fresh agent, saved after so many optimisation steps."""
    spec = EnvSpec("Toy", obs, actions)
    processor, agent = build_processor_and_agent(maker, processor or jaxrl.one_step(), spec)
    policy, state = make_policy(agent, processor, spec), jax.jit(agent.init)(KEY)
    kept = agent.policy_fns.keep_critic if critics else agent.strip
    zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), obs, is_leaf=lambda x: isinstance(x, Box))
    params = PolicyParams(kept(state), processor.get_stats(processor.init(zeros)))
    return GreedyPolicy(policy, params, {"opt_steps": opt_steps})


def q_network(*rows: list[float]) -> dict[str, Any]:
    return {"make_network": lambda spec: Linear(*rows)}


def actor(*rows: list[float], value: float = 0.0) -> dict[str, Any]:
    return {"make_network": lambda spec, head: Linear(*rows, beside=value)}


# --- in compiled functions, and on what does not fit ---------------------------------------------------------------

THREE = np.float32([[1.0], [-1.0], [2.0]])


def test_a_policy_without_a_memory_works_inside_jit_and_vmap_and_after() -> None:
    policy = policy_of(jaxrl.dqn(**q_network([1.0, 3.0, 2.0])), Discrete(3))
    plain = [1, 0, 1]
    assert [int(policy(obs)) for obs in THREE] == plain
    assert [int(jax.jit(policy)(obs)) for obs in THREE] == plain
    assert jax.vmap(policy)(THREE).tolist() == plain
    compiled: Any = jax.jit(lambda params, obs: policy.at(params)(obs))
    assert compiled(policy.params, THREE).tolist() == plain
    assert [int(policy(obs)) for obs in THREE] == plain
    assert policy(THREE).tolist() == plain
    assert policy(THREE[:0]).shape == (0,)


def test_a_policy_with_a_memory_refuses_and_is_as_before() -> None:
    """It takes the first action where the last frame is larger than this one; of a first frame it has two."""
    processor = jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step())
    policy = policy_of(jaxrl.dqn(**q_network([1.0, 0.0], [0.0, 1.0])), Discrete(2), processor=processor)
    assert [int(policy(obs)) for obs in THREE[:2]] == [0, 0]
    with pytest.raises(SettingsError, match="remembers its episode"):
        jax.jit(policy)(jnp.asarray(THREE[0]))
    assert [int(policy(obs)) for obs in THREE] == [1, 0, 1]


def test_a_policy_made_by_hand_that_cannot_sample_says_so() -> None:
    policy = policy_of(jaxrl.dqn(**q_network([1.0, 3.0])), Discrete(2))
    by_hand = GreedyPolicy(policy.policy._replace(sample=None), policy.params)
    with pytest.raises(SettingsError, match="leave the key out"):
        by_hand(ONE, key=KEY)


def test_entries_that_are_missing_or_unexpected_are_named() -> None:
    space = {"pipeline": Box(-1, 1, (2,)), "season": Discrete(4), "stock": (Box(0, 9, ()), {"left": Box(0, 9, ())})}
    spec = EnvSpec("Inventory", space, Discrete(2))
    act = lambda params, obs: (obs, jnp.zeros(obs["season"].shape, jnp.int32))
    policy = GreedyPolicy(Policy(spec, lambda state: state, lambda _, obs: obs, act, lambda *_: _[-1]), ())
    whole = {"pipeline": [0.0, 1.0], "season": 3, "stock": (1.0, {"left": 2.0})}
    assert int(policy(whole)) == 0
    for given, message in (
        ({"stock": whole["stock"], "colour": 1}, "missing entries pipeline, season; unexpected colour"),
        (
            {**whole, "stock": (1.0, {"right": 2.0})},
            r"missing entries in \['stock'\]\[1\] left; unexpected in .* right",
        ),
        ({**whole, "stock": 1.0}, r"\['stock'\] is float, not a tuple of 2"),
        ([0.0, 1.0], "it is a list of 2, not a dict of pipeline, season, stock"),
        ({**whole, "season": 10**40}, r"\['season'\] is 1000"),
    ):
        with pytest.raises(SettingsError, match=f"^the observation does not match Inventory: .*{message}") as told:
            policy(given)
        assert "ShapeDtypeStruct" not in str(told.value)
        assert "\n" not in str(told.value)


def test_numbers_outside_a_discrete_space_are_refused_as_observations_and_as_actions() -> None:
    """Seen is one of `3 .. 5`; the actions are `1, 2` and `-1, 0, 1`."""
    space = {"seen": Discrete(3, start=3), "way": MultiDiscrete((2, 4))}
    policy = policy_of(jaxrl.ppo(features=(4,)), MultiDiscrete((2, 3), start=(1, -1)), space)
    obs = {"seen": 5, "way": [1, 3]}
    assert policy(obs).shape == (2,)
    assert np.isfinite(policy.log_prob(obs, [2, 1]))
    assert policy({"seen": [3, 5], "way": [[0, 0], [True, 3]]}).shape == (2, 2)
    for name, wrong in (("seen", 6), ("seen", 2), ("seen", 3.7), ("seen", math.nan), ("seen", "4"), ("way", [2, 0])):
        with pytest.raises(SettingsError, match=rf"^the observation .*\['{name}'\] is .*; expected whole numbers of"):
            policy({**obs, name: wrong})
    for action in ([3, 0], [1, 2], [0, 0], [1, -2], [1.5, 0.0], jnp.asarray([3, 0])):
        with pytest.raises(SettingsError, match=r"^the action .*it is \[.*\]; expected whole numbers of MultiDiscrete"):
            policy.log_prob(obs, action)
    with pytest.raises(SettingsError, match="it is 7; expected whole numbers of Discrete"):
        policy_of(jaxrl.dqn(features=(4,)), Discrete(3)).values(ONE, 7)


def test_parts_of_an_observation_are_batched_together() -> None:
    policy = policy_of(jaxrl.ppo(features=(4,)), Discrete(2), {"left": SEEN, "right": Box(0, 1, ())})
    three, two = np.zeros((3, 1)), np.zeros(2)
    for left, right, said in (
        (three, two, r"\['left'\] \[3, 1\], \['right'\] \[2\]"),
        (three, 0.0, r"\['left'\] \[3, 1\], \['right'\] \[\]"),
        (three[0], two[:1], r"\['left'\] \[1\], \['right'\] \[1\]"),
    ):
        with pytest.raises(SettingsError, match=f"has parts {said}; expected one observation, or a batch"):
            policy({"left": left, "right": right})
    assert policy({"left": three[:2], "right": two}).shape == (2,)


# --- named tuples of spaces --------------------------------------------------------------------------------------


class Seen(NamedTuple):
    place: Any
    goal: Any


class Move(NamedTuple):
    steps: Any
    speed: Any


def walk(actions: Any) -> jaxrl.Env:
    """Return an environment of named tuples, which reads actions by name: as many steps, or one, to a goal."""
    box = Box(-9.0, 9.0, (1,))
    show = lambda place: Seen(place[None], jnp.ones(1))

    def step(place: Any, action: Any, key: Any) -> Any:
        place = place + 0.1 * getattr(action, "steps", action)
        return place, jaxrl.TimeStep(show(place), reward=-jnp.abs(place - 1), terminated=False)

    reset = lambda key: (jax.random.uniform(key), show(jax.random.uniform(key)))
    return jaxrl.Env(EnvSpec("Walk", Seen(box, box), actions, time_limit=4), reset, step)


def test_a_policy_of_named_tuples_is_loaded_with_their_names(tmp_path: Path) -> None:
    env = walk(Move(Discrete(2), Box(-1.0, 1.0, (1,))))
    strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=1, minibatches=1)
    settings: dict[str, Any] = {"max_opts": 1, "eval_interval": 1, "eval_episodes": 2, "quiet": True}
    own = jaxrl.Trainer(strategy, run_dir=tmp_path, **settings).train().policy
    loaded = jaxrl.load_policy(tmp_path)
    seen = Seen(np.array([0.5], np.float32), np.array([1.0], np.float32))
    want = own(seen)
    for given in (seen, tuple(seen), [*seen]):
        action = loaded(given)
        assert (int(action.steps), float(action.speed[0])) == (int(want.steps), float(want.speed[0]))
    judged = [jaxrl.Evaluator(env, policy.policy, 2)(own.params, jax.random.key(0)) for policy in (own, loaded)]
    assert judged[0].returns.tolist() == judged[1].returns.tolist()
    assert function_of(loaded).entries == ["obs[0]", "obs[1]"]


def test_data_of_named_tuples_are_learnt_from_beside_experience(tmp_path: Path) -> None:
    env, agent = walk(Discrete(2)), jaxrl.dqn(features=(4,))
    policy = policy_of(agent, env.spec.action_space, env.spec.observation_space)
    jaxrl.save_dataset(tmp_path / "data.npz", jaxrl.gather(env, policy.policy, policy.params, jax.random.key(0), 8))
    data = jaxrl.load_dataset(tmp_path / "data.npz")
    strategy = jaxrl.off_policy(env, agent, buffer=jaxrl.uniform(16, batch_size=4), warmup=16, demos=data)
    state = jax.jit(strategy.init)(jax.random.key(0))
    jax.eval_shape(strategy.step, state, state.key, jnp.uint32(0))  # a batch has both
    assert isinstance(state.buffer.demos.items.obs, Seen)


# --- action values ------------------------------------------------------------------------------------------------

STILL = {"epsilon_start": 0.3, "epsilon_end": 0.3}


def test_action_values_and_the_probabilities_of_epsilon_greedy_choices() -> None:
    policy = policy_of(jaxrl.dqn(**STILL, **q_network([1.0, 3.0, 2.0])), Discrete(3))
    np.testing.assert_allclose(policy.values(ONE), [1, 3, 2])
    np.testing.assert_allclose(policy.values(2 * ONE, 1), 6)
    np.testing.assert_allclose(policy.values([[1.0], [2.0]], [2, 0]), [2, 2])
    np.testing.assert_allclose(policy.probabilities([[1.0], [-1.0]]), [[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]], rtol=1e-5)
    np.testing.assert_allclose(policy.log_prob(ONE, 1), math.log(0.8), rtol=1e-5)
    assert jax.jit(policy.values)(ONE).tolist() == jax.vmap(policy.values)(ONE[None])[0].tolist() == [1, 3, 2]


@pytest.mark.parametrize("make", [jaxrl.dqn, jaxrl.pqn])
def test_what_a_mask_forbids_has_no_probability_and_the_least_value(make: Any) -> None:
    masked = {"action_mask": Box(0, 1, (3,), bool), "seen": SEEN}
    policy = policy_of(make(**STILL, **q_network([1.0, 3.0, 2.0])), Discrete(3), masked)
    obs = {"action_mask": [True, False, True], "seen": ONE}
    np.testing.assert_allclose(policy.values(obs), [1, -math.inf, 2])
    np.testing.assert_allclose(policy.probabilities(obs), [0.15, 0, 0.85], rtol=1e-5)
    assert float(policy.log_prob(obs, 1)) == -math.inf
    nothing = {"action_mask": [False] * 3, "seen": ONE}  # which allows everything
    np.testing.assert_allclose(policy.probabilities(nothing), [0.1, 0.8, 0.1], rtol=1e-5)


def test_rescaled_values_are_returned_as_returns_also_to_boltzmann_exploration() -> None:
    held = hyperbolic(np.array([500.0, 500.0 + 2 * math.log(3), -2e4]))
    make = jaxrl.dqn(value_rescaling=True, epsilon_start=0.0, epsilon_end=0.0, boltzmann=2.0, **q_network(list(held)))
    policy = policy_of(make, Discrete(3))
    np.testing.assert_allclose(policy.values(ONE), parabolic(held), rtol=1e-5)
    np.testing.assert_allclose(policy.probabilities(ONE), [0.25, 0.75, 0.0], atol=1e-3)
    assert policy(ONE) == 1


def test_exploration_is_that_of_the_step_at_which_the_policy_was_saved_and_follows_schedules() -> None:
    decays = jaxrl.dqn(epsilon_start=1.0, epsilon_end=0.0, epsilon_decay=10, **q_network([1.0, 0.0]))
    follows = jaxrl.dqn(epsilon=jaxrl.linear(1.0, 0.0, 10), **q_network([1.0, 0.0]))
    for make in (decays, follows):
        policies = [policy_of(make, Discrete(2), opt_steps=steps) for steps in (0, 4, 10)]
        told = [policy.probabilities(ONE)[0] for policy in policies]
        np.testing.assert_allclose(told, [0.5, 0.7, 1.0], rtol=1e-5)
        drawn = [1 - float(policy(np.ones((2000, 1)), key=KEY).mean()) for policy in policies]
        np.testing.assert_allclose(drawn, told, atol=0.04)
        assert [int(policy(ONE)) for policy in policies] == [0, 0, 0]


@pytest.mark.slow
def test_policies_of_results_and_of_sessions_explore_as_they_do_at_that_step() -> None:
    """Epsilon falls from 1 to 0.05 in 20 optimisation steps; half of its choices are the other action."""
    trainer = jaxrl.Trainer(small_dqn(), max_opts=10, eval_interval=0, eval_episodes=0, quiet=True)
    other = float(trainer.train().policy.probabilities(np.zeros(4)).min())
    assert other == pytest.approx((1 - 0.95 / 2) / 2, rel=1e-5)
    agent, buffer = jaxrl.dqn(features=(4,), epsilon_decay=4, epsilon_end=0.5), jaxrl.uniform(16, batch_size=2)
    session = jaxrl.Session(EnvSpec("Toy", SEEN, Discrete(2)), agent, buffer=buffer, opt_interval=1, warmup=2)
    with session:
        for _ in range(4):
            session.act(ONE)
            session.observe(0.0, ONE, False, False)
        done = session.opt_steps
        assert done > 0
        assert session.policy.probabilities(ONE).min() == pytest.approx((1 - done / 8) / 2, rel=1e-5)


class Atoms(Linear):
    """Two atoms of the return of each of two actions."""

    def apply(self, variables: Any, *args: Any) -> Any:
        return super().apply(variables, *args).reshape(-1, 2, 2)


def test_distributions_of_returns_tell_their_means() -> None:
    network = {"make_network": lambda spec: Atoms([1.0, 3.0, 4.0, 6.0])}
    policy = policy_of(jaxrl.dqn(values="qr", atoms=2, **network), Discrete(2))
    np.testing.assert_allclose(policy.values(ONE), [2, 5])


# --- policies with a distribution ---------------------------------------------------------------------------------


def test_policy_gradients_tell_their_probabilities_and_the_value_of_the_observation() -> None:
    policy = policy_of(jaxrl.ppo(**actor([0.0, math.log(3)], value=5.0)), Discrete(2))
    np.testing.assert_allclose(policy.probabilities(ONE), [0.25, 0.75], rtol=1e-5)
    np.testing.assert_allclose(policy.log_prob(ONE, 0), math.log(0.25), rtol=1e-5)
    obs = np.ones((2000, 1))
    drawn, greedy = policy(obs, key=KEY), policy(obs)
    assert abs(float(drawn.mean()) - 0.75) < 0.04
    assert set(greedy.tolist()) == {1}
    assert drawn.tolist() == policy(obs, key=KEY).tolist() != policy(obs, key=jax.random.key(1)).tolist()
    assert policy(ONE, key=KEY).shape == ()
    assert float(policy.values(2 * ONE)) == 10
    assert policy.values([[1.0], [3.0]]).tolist() == [5, 15]
    with pytest.raises(SettingsError, match="those of observations, whatever the action; leave action out"):
        policy.values(ONE, 1)


def test_actions_of_several_numbers_have_probabilities_each() -> None:
    logits = [0.0, math.log(3), 0.0, 0.0, math.log(2)]
    policy = policy_of(jaxrl.ppo(**actor(logits)), MultiDiscrete((2, 3)))
    first, second = policy.probabilities(ONE)
    np.testing.assert_allclose(first, [0.25, 0.75], rtol=1e-5)
    np.testing.assert_allclose(second, [0.25, 0.25, 0.5], rtol=1e-5)
    np.testing.assert_allclose(policy.log_prob(ONE, [1, 2]), math.log(0.75 * 0.5), rtol=1e-5)


def test_densities_are_per_unit_of_the_action_space() -> None:
    """Bounds of -2 and 2: a raw action of 0.5 is an action of 1, and a density half as large."""
    clipped = policy_of(jaxrl.ppo(**actor([0.5, 0.0])), BOUNDED)
    np.testing.assert_allclose(clipped.log_prob(ONE, [1.0]), math.log(1 / math.sqrt(2 * math.pi) / 2), rtol=1e-5)
    squashed = policy_of(jaxrl.sac(make_policy=lambda spec, head: Linear([0.0, 0.0]), features=(2,)), BOUNDED)
    slope = 1 - 0.5**2  # of tanh, where it is one half
    by_hand = -0.5 * math.atanh(0.5) ** 2 - math.log(math.sqrt(2 * math.pi)) - math.log(slope) - math.log(2)
    np.testing.assert_allclose(squashed.log_prob(ONE, [1.0]), by_hand, rtol=1e-5)
    inside = np.linspace(-2, 2, 4001, dtype=np.float32)[1:-1, None]
    for policy in (squashed, policy_of(jaxrl.bc(make_network=lambda spec, head: Linear([0.0, -3.0])), BOUNDED)):
        density = np.exp(policy.log_prob(np.ones_like(inside), inside))
        np.testing.assert_allclose(density.sum() * 4 / 4000, 1, rtol=1e-2)
    assert np.isfinite(squashed.log_prob(ONE, [2.0]))


# --- critics ------------------------------------------------------------------------------------------------------


def test_the_lowest_of_the_critics_values_of_the_greedy_action_or_of_the_given_one() -> None:
    """A critic of `10 s + 3 a`, with actions from -1 to 1, which are half of those of the space."""
    own = {"make_policy": lambda spec, head: Linear([math.atanh(0.5), 0.0][: head.outputs])}
    for make in (jaxrl.sac, jaxrl.td3, jaxrl.cql):
        maker = make(**own, make_critic=lambda spec: Linear([10.0], [3.0]))
        policy = policy_of(maker, BOUNDED, critics=True)
        np.testing.assert_allclose(policy(ONE), [1.0], rtol=1e-5)
        np.testing.assert_allclose(policy.values(ONE), 11.5, rtol=1e-5)
        np.testing.assert_allclose(policy.values([[1.0], [2.0]], [[2.0], [0.0]]), [13, 20], rtol=1e-5)
    discrete = jaxrl.sac(make_policy=lambda spec, head: Linear([0.0, 0.0]), make_critic=lambda spec: Linear([4.0, 7.0]))
    policy = policy_of(discrete, Discrete(2), critics=True)
    np.testing.assert_allclose(policy.values(ONE), [4, 7])
    np.testing.assert_allclose(policy.values(ONE, 1), 7)


@pytest.mark.parametrize("space", [BOUNDED, Discrete(2)])
def test_iql_tells_the_value_of_the_observation_and_that_of_an_action_that_is_given(space: Any) -> None:
    """A state value of `5 s`, and critics of `10 s + 3 a`, or of 4 and 7."""
    critic = Linear([10.0], [3.0]) if space == BOUNDED else Linear([4.0, 7.0])
    nets = {"make_critic": lambda spec: critic, "make_value": lambda spec: Linear([5.0])}
    policy = policy_of(
        jaxrl.iql(**nets, make_policy=lambda spec, head: Linear([0.0] * head.outputs)), space, critics=True
    )
    np.testing.assert_allclose(policy.values(ONE), 5, rtol=1e-5)
    np.testing.assert_allclose(policy.values([[1.0], [2.0]]), [5, 10], rtol=1e-5)
    action, value = ([2.0], 13) if space == BOUNDED else (1, 7)
    np.testing.assert_allclose(policy.values(ONE, action), value, rtol=1e-5)


def test_of_two_critics_the_lower_counts() -> None:
    policy = policy_of(jaxrl.sac(features=(4,)), Discrete(2), critics=True)
    critic = policy.params.agent.critic
    spec = EnvSpec("Toy", SEEN, Discrete(2))
    network = jaxrl.nn.Ensemble(jaxrl.nn.Critic(spec.observation_space, 2, features=(4,)), 2)
    both = network.apply(critic, ONE[None])
    assert not np.array_equal(both[0], both[1])
    np.testing.assert_allclose(policy.values(ONE), np.min(both, axis=0)[0], rtol=1e-5)


@pytest.mark.slow
def test_critics_are_loaded_from_checkpoints_where_they_are_asked_for(tmp_path: Path) -> None:
    data = bandit([0, 1, 0, 1], [1.0, 2.0, 1.0, 2.0])
    strategy = jaxrl.offline(data, jaxrl.iql(features=(4,)), batch_size=3, holdout=0.25)
    trainer = jaxrl.Trainer(strategy, max_opts=2, eval_interval=2, eval_episodes=1, run_dir=str(tmp_path), quiet=True)
    trainer.train()
    policy = jaxrl.load_policy(tmp_path, strategy, step="latest", critics=True)
    np.testing.assert_array_equal(vector_of(policy.params.agent.critic), vector_of(trainer.state.agent.critic))
    np.testing.assert_array_equal(vector_of(policy.params.agent.value), vector_of(trainer.state.agent.value))
    assert policy.values(ONE).shape == policy.values(ONE, 1).shape == ()
    assert policy(ONE) == jaxrl.load_policy(tmp_path, strategy, step="latest")(ONE)
    with pytest.raises(SettingsError, match=r"kept without the critics of iql.*critics=True"):
        jaxrl.load_policy(tmp_path, strategy).values(ONE)
    with pytest.raises(SettingsError, match="is kept without critics; name a checkpoint: step='latest'"):
        jaxrl.load_policy(tmp_path, strategy, critics=True)


# --- episodes that are remembered ---------------------------------------------------------------------------------


def test_what_is_learnt_of_observations_is_applied_before_anything_is_told() -> None:
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.frame_stack(2), jaxrl.one_step())
    policy = policy_of(jaxrl.dqn(**q_network([1.0, 0.0], [0.0, 1.0])), Discrete(2), processor=processor)
    (moments,) = policy.params.processor[0]
    learnt = (moments._replace(count=jnp.float32(4), mean=jnp.ones(1), squares=jnp.full(1, 16.0)),)
    policy.params = policy.params._replace(processor=(learnt, *policy.params.processor[1:]))
    np.testing.assert_allclose(policy.values([3.0]), [1, 1], rtol=1e-5)  # twice the first frame, (3 - 1) / 2
    policy([3.0])
    for _ in range(2):  # being asked, it remembers nothing
        np.testing.assert_allclose(policy.values([5.0]), [1, 2], rtol=1e-5)
    with pytest.raises(SettingsError, match="remembers its episode"):
        jax.jit(policy.values)(ONE)
    policy.reset()
    np.testing.assert_allclose(policy.values([5.0]), [2, 2], rtol=1e-5)


@pytest.mark.slow
def test_a_recurrent_policy_tells_the_odds_of_the_action_that_it_draws_next() -> None:
    make = jaxrl.ppo(core="gru", core_features=8, features=(8,), layer_norm=False)
    policy = policy_of(make, Discrete(2), Box(-9.0, 9.0, (3,)))
    params = decided(policy.params)
    policy, twin = policy.at(params), policy.at(params)
    rows, obs = 4000, np.array([1.0, -2.0, 0.5], np.float32)
    policy(np.tile(obs, (rows, 1))), twin(np.tile(obs, (rows, 1)))
    fresh, told = (p.probabilities(np.tile(obs, (rows, 1))) for p in (policy.at(params), policy))
    assert np.abs(told - fresh).max() > 1e-3  # the first step is remembered
    drawn = policy(np.tile(obs, (rows, 1)), key=KEY)
    assert abs(float(drawn.mean()) - float(told[0, 1])) < 0.03
    assert drawn.tolist() == twin(np.tile(obs, (rows, 1)), key=KEY).tolist()
    assert policy.values(np.tile(obs, (rows, 1))).shape == (rows,)


@pytest.mark.slow
def test_critics_with_memories_tell_what_each_of_them_makes_of_the_episode() -> None:
    """Followed by plain calls of the two networks, of which the lower value counts."""
    maker = jaxrl.sac(core="gru", core_features=4, features=(4,))
    policy = policy_of(maker, Discrete(2), Box(-9.0, 9.0, (3,)), critics=True)
    head = jaxrl.nn.Critic(Box(-np.inf, np.inf, (4,)), 2, "mlp", ())
    network = jaxrl.nn.Recurrent(head, Box(-9.0, 9.0, (3,)), jaxrl.nn.Core("gru", 4), features=(4,))
    memories = [(np.zeros((1, 4), np.float32),)] * 2
    for obs in np.random.default_rng(0).normal(size=(3, 1, 3)).astype(np.float32):
        own = [jax.tree.map(lambda x, k=k: x[k], policy.params.agent.critic) for k in range(2)]
        made = [network.apply(p, RecurrentObs(obs, m)) for p, m in zip(own, memories, strict=True)]
        memories = [memory for _, memory in made]
        lower = np.min([value[0] for value, _ in made], axis=0)
        np.testing.assert_allclose(policy.values(obs[0]), lower, rtol=1e-4, atol=1e-6)
        policy(obs[0])


# --- what has none ------------------------------------------------------------------------------------------------

IDLE = {"make_policy": lambda spec, head: Linear([0.0] * head.outputs)}
BY_HAND = lambda spec: jaxrl.dqn(**q_network([0.0, 1.0]))(spec)._replace(name="mine", policy_fns=None)
CLONED = jaxrl.bc(make_network=lambda spec, head: Linear([0.0, 0.0]))
NONE: dict[str, tuple[Any, Any, str, tuple[Any, ...], str]] = {
    "noisy": (jaxrl.rainbow(features=(4,)), Discrete(2), "probabilities", (), "noise in its network"),
    "one action": (
        *(jaxrl.td3(**IDLE, make_critic=lambda spec: Linear([1.0], [1.0])), BOUNDED),
        *("log_prob", ([0.0],), "td3 acts deterministically"),
    ),
    "continuous": (jaxrl.ppo(**actor([0.0, 0.0])), BOUNDED, "probabilities", (), r"policy\.log_prob\(obs, action\)"),
    "no values": (CLONED, Discrete(2), "values", (), "bc learns actions alone"),
    "stripped": (jaxrl.sac(**IDLE, features=(2,)), Discrete(2), "values", (), "critics=True"),
    "of one's own": (BY_HAND, Discrete(2), "values", (), "mine has no field policy_fns"),
    "no action": (jaxrl.ppo(**actor([0.0, 0.0])), BOUNDED, "log_prob", ([0.0, 1.0],), r"shape \(2,\); expected \(1,\)"),
}


@pytest.mark.parametrize("case", NONE)
def test_what_an_agent_has_none_of_is_one_clear_line(case: str) -> None:
    make, actions, what, given, said = NONE[case]
    with pytest.raises(SettingsError, match=said) as refused:
        getattr(policy_of(make, actions), what)(ONE, *given)
    assert "\n" not in str(refused.value)


def test_values_want_the_privileged_state_and_probabilities_do_without() -> None:
    obs = {"privileged_state": SEEN, "seen": SEEN}
    policy = policy_of(jaxrl.ppo(features=(4,)), Discrete(2), obs)
    assert policy.probabilities({"seen": ONE}).shape == (2,)
    assert policy.values({"privileged_state": ONE, "seen": ONE}).shape == ()
    with pytest.raises(SettingsError, match="no privileged_state"):
        policy.values({"seen": ONE})
