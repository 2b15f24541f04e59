"""Policies inside other people's compiled functions."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.exporting.function import function_of
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.strategies.base import Policy
from jaxrl.training.policy import GreedyPolicy

OBS = np.linspace(-0.5, 0.5, 12, dtype=np.float32).reshape(3, 4)


def policy_of(strategy: jaxrl.Strategy) -> GreedyPolicy:
    assert strategy.policy is not None
    return GreedyPolicy(strategy.policy, strategy.policy.params(jax.jit(strategy.init)(jax.random.key(1))))


def test_a_policy_without_a_memory_works_inside_jit_and_vmap_and_after() -> None:
    policy = policy_of(small_dqn())
    plain = [int(policy(obs)) for obs in OBS]
    assert [int(jax.jit(policy)(obs)) for obs in OBS] == plain
    assert jax.vmap(policy)(OBS).tolist() == plain
    compiled: Any = jax.jit(lambda params, obs: policy.at(params)(obs))
    assert compiled(policy.params, OBS).tolist() == plain
    assert [int(policy(obs)) for obs in OBS] == plain
    assert policy(OBS).tolist() == plain
    assert policy(OBS[:0]).shape == (0,)


def test_a_policy_with_a_memory_refuses_and_is_as_before() -> None:
    env = jaxrl.make_env("CartPole-v1")
    strategy = jaxrl.off_policy(
        env,
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(64, batch_size=8),
        processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()),
        num_envs=4,
        opt_interval=4,
        warmup=16,
    )
    policy, twin = policy_of(strategy), policy_of(strategy)
    assert [int(policy(obs)) for obs in OBS[:2]] == [int(twin(obs)) for obs in OBS[:2]]
    with pytest.raises(jaxrl.SettingsError, match="remembers its episode"):
        jax.jit(policy)(jnp.asarray(OBS[0]))
    assert [int(policy(obs)) for obs in OBS] == [int(twin(obs)) for obs in OBS]


@pytest.mark.slow
def test_a_key_draws_from_the_distribution_and_without_one_the_mode_is_chosen() -> None:
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,)), num_envs=2, rollout=4, epochs=1, minibatches=1
    )
    policy = policy_of(strategy)
    obs = np.broadcast_to(OBS[0], (400, 4))
    greedy, drawn = policy(obs), policy(obs, key=jax.random.key(0))
    assert len(set(greedy.tolist())) == 1
    assert 100 < int(drawn.sum()) < 300  # fresh weights: both actions about as likely
    assert drawn.tolist() == policy(obs, key=jax.random.key(0)).tolist()
    assert drawn.tolist() != policy(obs, key=jax.random.key(1)).tolist()
    assert policy(OBS[0], key=jax.random.key(0)).shape == ()


@pytest.mark.slow
def test_an_agent_without_a_distribution_explores_as_it_did_when_it_was_saved() -> None:
    strategy = small_dqn()
    assert strategy.policy is not None
    params = strategy.policy.params(strategy.init(jax.random.key(1)))
    obs = np.broadcast_to(OBS[0], (400, 4))
    early, late = (GreedyPolicy(strategy.policy, params, {"opt_steps": steps}) for steps in (0, 20))
    other = [int((p(obs, key=jax.random.key(0)) != p(obs)).sum()) for p in (early, late)]
    assert other[0] > 150  # epsilon 1 at first: half of the actions are the other one
    assert other[1] < 40  # and 0.05 after 20 optimisation steps


def test_a_policy_made_by_hand_that_cannot_sample_says_so() -> None:
    policy = policy_of(small_dqn())
    by_hand = GreedyPolicy(policy.policy._replace(sample=None), policy.params)
    with pytest.raises(jaxrl.SettingsError, match="leave the key out"):
        by_hand(OBS[0], key=jax.random.key(0))


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
        ({**whole, "season": 10**40}, "too large"),
    ):
        with pytest.raises(SettingsError, match=f"^the observation does not match Inventory: .*{message}") as told:
            policy(given)
        assert "ShapeDtypeStruct" not in str(told.value)
        assert "\n" not in str(told.value)


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
    policy = policy_of(jaxrl.off_policy(env, agent, buffer=jaxrl.uniform(16, batch_size=4), warmup=16))
    jaxrl.save_dataset(tmp_path / "data.npz", jaxrl.gather(env, policy.policy, policy.params, jax.random.key(0), 8))
    data = jaxrl.load_dataset(tmp_path / "data.npz")
    strategy = jaxrl.off_policy(env, agent, buffer=jaxrl.uniform(16, batch_size=4), warmup=16, demos=data)
    state = jax.jit(strategy.init)(jax.random.key(0))
    jax.eval_shape(strategy.step, state, state.key, jnp.uint32(0))  # a batch has both
    assert isinstance(state.buffer.demos.items.obs, Seen)
