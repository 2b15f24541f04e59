"""A term of the loss of one's own: it is a term like the agent's, in every mode, and needs nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import KEY, begun, updated, vector_of

import jaxrl
from jaxrl.errors import SettingsError


def on_policy(**settings: Any) -> jaxrl.Strategy:
    agent = jaxrl.ppo(**{"features": (8,), "core_features": 4, **settings})
    return jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), agent, num_envs=4, rollout=4, epochs=1, minibatches=1)


def off_policy(**settings: Any) -> jaxrl.Strategy:
    agent = jaxrl.dqn(**{"features": (8,), "core_features": 4, "sequence": 3, "burn_in": 1, **settings})
    buffer = jaxrl.uniform(500, batch_size=16)
    return jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), agent, buffer=buffer, num_envs=4, opt_interval=4, warmup=100)


def traced(strategy: jaxrl.Strategy) -> None:
    """Trace an iteration, which is where a function that does not fit is found."""
    state = jax.eval_shape(strategy.init, KEY)
    jax.eval_shape(strategy.step, state, KEY, jnp.uint32(0))


def trained(strategy: jaxrl.Strategy, iterations: int = 5) -> tuple[Any, Any]:
    """Return the network's parameters, and the metrics of the last iteration."""
    state = jax.jit(strategy.init)(jax.random.key(0))
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t))
    for t in range(iterations):
        state, metrics = step(state, jnp.uint32(t))
    return state.agent.params, metrics


BOX = jaxrl.EnvSpec("Toy", jaxrl.Box(-1.0, 1.0, (3,)), jaxrl.Box(-2.0, 2.0, (2,)))
DISCRETE = BOX._replace(action_space=jaxrl.Discrete(3))
SMALL: dict[str, Any] = {"features": (8,), "optimizer": "sgd", "lr": 0.1}


def learnt(make: Any, spec: jaxrl.EnvSpec = DISCRETE, **settings: Any) -> Any:
    """Return an agent's state before and after one update on the same batch, and the update's metrics."""
    agent = make(**{**SMALL, **settings})(spec)
    state = begun(agent.init)
    return state, *jax.jit(lambda state: updated(agent, spec, state))(state)


def moved(make: Any, spec: jaxrl.EnvSpec = DISCRETE, **settings: Any) -> Any:
    """Return an agent's state before and after one update on the same batch."""
    return learnt(make, spec, **settings)[:2]


def bonus(params: Any, sample: Any, outputs: Any) -> jax.Array:
    """A tenth of the entropy."""
    return -0.1 * outputs.policy.entropy()


def gap(params: Any, items: Any, q: jax.Array) -> jax.Array:
    """Half the penalty of conservative Q-learning."""
    return 0.5 * (jax.nn.logsumexp(q, axis=-1) - jnp.take_along_axis(q, items.action[:, None], axis=-1)[:, 0])


# What a setting does is tested where it is; what does the same as the setting is thus taken into account.


def test_an_entropy_bonus_may_be_given_as_an_extra_loss() -> None:
    _, mine, metrics = learnt(jaxrl.ppo, BOX, ent_coef=0.0, extra_loss=bonus)
    _, usual, _ = learnt(jaxrl.ppo, BOX, ent_coef=0.1)
    chex.assert_trees_all_close(mine.params, usual.params, rtol=1e-5, atol=1e-6)
    assert float(metrics["extra_loss"]) == pytest.approx(-0.1 * float(metrics["entropy"]), rel=1e-5)


def test_the_penalty_of_conservative_q_learning_may_be_given_as_an_extra_loss() -> None:
    _, mine, metrics = learnt(jaxrl.dqn, extra_loss=gap)
    _, usual, same = learnt(jaxrl.dqn, cql=0.5)
    chex.assert_trees_all_close((mine.params, metrics["loss"]), (usual.params, same["loss"]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_entropy_bonus_may_be_given_to_an_agent_with_a_memory() -> None:
    mine, metrics = trained(on_policy(core="gru", ent_coef=0.0, extra_loss=bonus))
    usual, _ = trained(on_policy(core="gru", ent_coef=0.1))
    chex.assert_trees_all_close(mine, usual, rtol=1e-4, atol=1e-6)
    assert float(metrics["extra_loss"].sum) == pytest.approx(-0.1 * float(metrics["entropy"].sum), rel=1e-5)


def test_it_may_be_about_the_parameters() -> None:
    """A penalty that outweighs all else takes the parameters to 0."""
    penalty = lambda params, sample, outputs: jnp.broadcast_to(
        1e6 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params)), sample.weight.shape
    )
    agent = jaxrl.ppo(features=(8,), lr=1e-2, extra_loss=penalty)(DISCRETE)
    before = begun(agent.init)
    after = jax.jit(lambda state: jax.lax.fori_loop(0, 200, lambda _, s: updated(agent, DISCRETE, s)[0], state))(before)
    size = lambda tree: max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))
    assert size(after.params) < 0.1 < size(before.params)
    assert agent.info.custom == ("extra_loss",)


# --- the losses of agents with critics, and of regressions ------------------------------------------------------


def test_the_penalty_of_cql_may_be_given_as_an_extra_loss_of_the_critics() -> None:
    def gap(params: Any, items: Any, q: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(q, items.action[None, :, None], axis=-1)[..., 0]
        return 0.5 * (jax.nn.logsumexp(q, axis=-1) - taken).sum(0)

    _, mine, metrics = learnt(jaxrl.cql, cql=0.0, extra_loss=gap)
    _, usual, same = learnt(jaxrl.cql, cql=0.5)
    chex.assert_trees_all_close((mine.critic, metrics["loss"]), (usual.critic, same["loss"]), rtol=1e-5, atol=1e-6)


@pytest.mark.every_day("td3", "iql")
@pytest.mark.parametrize(
    "make",
    [jaxrl.sac, jaxrl.td3, jaxrl.ddpg, jaxrl.td3_bc, jaxrl.awac, jaxrl.iql],
    ids=lambda make: make.__name__,
)
def test_a_penalty_moves_the_critics_and_another_the_policy_each_by_its_own_slope(make: Any) -> None:
    """By gradient descent, a term that is `sum(params^2) / 2` takes `lr * params` off the parameters, exactly."""
    more = {"policy_lr": 0.1, "max_grad_norm": 1e9, **({"policy_interval": 1} if make is jaxrl.td3 else {})}

    def term(weight: Any) -> Any:
        half = lambda params: weight * sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) / 2
        return lambda params, items, outputs: jnp.broadcast_to(half(params), items.reward.shape)

    @jax.jit
    def update(state: Any, of_critics: Any, of_policy: Any) -> Any:
        terms = {"extra_loss": term(of_critics), "extra_policy_loss": term(of_policy)}
        return updated(make(**SMALL, **more, **terms)(BOX), BOX, state)[0]

    before = begun(make(**SMALL, **more)(BOX).init)
    plain, of_critics, of_policy = (update(before, *weights) for weights in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    made = vector_of(of_critics.critic) - vector_of(plain.critic)
    chex.assert_trees_all_close(made, -0.1 * vector_of(before.critic), rtol=1e-3, atol=1e-5)
    made = vector_of(of_policy.policy) - vector_of(plain.policy)
    chex.assert_trees_all_close(made, -0.1 * vector_of(before.policy), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(vector_of(of_policy.critic), vector_of(plain.critic))


def test_an_entropy_bonus_may_be_given_as_an_extra_loss_of_sacs_policy() -> None:
    """Critics stay as they are, at a rate of 0: what the temperature does to their targets is no matter."""
    fixed = {"lr": 0.0, "policy_lr": 0.1, "learn_temperature": False, "max_grad_norm": 1e9}
    bonus = lambda params, items, outputs: -0.1 * outputs.entropy()
    _, mine = moved(jaxrl.sac, **fixed, temperature=0.2, extra_policy_loss=bonus)
    _, usual = moved(jaxrl.sac, **fixed, temperature=0.3)
    _, without = moved(jaxrl.sac, **fixed, temperature=0.2)
    chex.assert_trees_all_close(mine.policy, usual.policy, rtol=1e-5, atol=1e-6)
    assert float(np.abs(vector_of(mine.policy) - vector_of(without.policy)).max()) > 1e-4


def test_a_term_that_is_minus_the_agents_own_leaves_nothing_to_learn() -> None:
    cancel = lambda params, items, outputs: outputs.log_prob(items.action)
    before, after = moved(jaxrl.bc, extra_loss=cancel)
    chex.assert_trees_all_close(vector_of(after.policy), vector_of(before.policy), atol=1e-7)

    def minus(params: Any, sample: Any, q: jax.Array) -> jax.Array:
        error = sample.target - jnp.take_along_axis(q, sample.action[:, None], axis=-1)[:, 0]
        return -0.5 * error**2

    before, after = moved(jaxrl.pqn, extra_loss=minus)
    chex.assert_trees_all_close(vector_of(after.params), vector_of(before.params), atol=1e-7)


@pytest.mark.parametrize("make", [on_policy, off_policy])
def test_one_number_for_all_steps_is_refused(make: Any) -> None:
    said = r"extra_loss returned float32\[\]; expected a number for each step, float32\["
    with pytest.raises(SettingsError, match=said):
        traced(make(extra_loss=lambda params, sample, outputs: jnp.float32(1)))


def test_a_function_that_does_not_tell_its_arguments_is_taken() -> None:
    jaxrl.sac(extra_policy_loss=partial(max, 1))


@pytest.mark.slow
def test_a_run_names_it_and_its_policy_does_without(tmp_path: Path) -> None:
    strategy, run = on_policy(extra_loss=lambda params, sample, outputs: outputs.value), str(tmp_path / "run")
    assert strategy.info.settings is not None
    assert strategy.info.settings["custom"] == ["extra_loss"]
    jaxrl.Trainer(strategy, max_opts=4, eval_interval=0, eval_episodes=0, run_dir=run, quiet=True).train()
    assert jaxrl.load_policy(run)([0.0, 0.0, 0.1, 0.5]) in (0, 1)


def taken(q: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]


def double(items: Any, values: Any) -> jax.Array:
    return items.reward + items.discount * taken(values.target_t, values.online_t.argmax(axis=1))


def munchausen(items: Any, values: Any) -> jax.Array:
    """Equation 3 of Vieillard et al. 2020."""
    soft = lambda q: jax.nn.log_softmax(q / 0.03)
    bonus = jnp.clip(0.03 * taken(soft(values.target_tm1), items.action), -1.0, 0.0)
    value = jnp.sum(jnp.exp(soft(values.target_t)) * (values.target_t - 0.03 * soft(values.target_t)), axis=1)
    return items.reward + 0.9 * bonus + items.discount * value


@pytest.mark.every_day("munchausen")
@pytest.mark.parametrize(
    ("target", "settings"), [(double, {}), (munchausen, {"munchausen": 0.9})], ids=["double", "munchausen"]
)
def test_a_target_of_ones_own_may_be_that_of_a_setting(target: Any, settings: dict[str, float]) -> None:
    _, mine, metrics = learnt(jaxrl.dqn, target=target)
    _, usual, same = learnt(jaxrl.dqn, **settings)
    chex.assert_trees_all_close(mine.params, usual.params, rtol=1e-4, atol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-3)
    _, other = moved(jaxrl.dqn, target=lambda items, values: items.reward)
    assert float(np.abs(vector_of(mine.params) - vector_of(other.params)).max()) > 1e-3


def operations(**settings: Any) -> float:
    """Return the floating-point operations of a compiled update of DQN."""
    agent = jaxrl.dqn(**{**SMALL, **settings})(DISCRETE)
    state = jax.eval_shape(agent.init, KEY)
    return jax.jit(lambda state: updated(agent, DISCRETE, state)).lower(state).compile().cost_analysis()["flops"]


def test_networks_that_a_target_of_ones_own_does_not_read_are_not_computed() -> None:
    rewards = operations(target=lambda items, values: items.reward)
    best = operations(target=lambda items, values: items.reward + items.discount * values.target_t.max(axis=1))
    assert rewards < operations(double=False)  # which applies the target network to the next observations
    assert rewards < best < operations(target=double)


def test_a_target_that_is_no_number_for_each_step_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"target returned float32\[16, 2\]; expected a number for"):
        traced(off_policy(target=lambda items, values: values.target_t))
