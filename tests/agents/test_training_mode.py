"""Networks that learn and act in different ways: batch normalisation and dropout."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys_agents import ACTIONS, CONTINUOUS, DISCRETE, KEY, ROWS, begun, transitions, updated

import jaxrl
from jaxrl.nn import from_nnx
from jaxrl.types import Batch, Rollout

STEP = jnp.uint32(1)


class Normed(nn.Module):
    """Batch normalisation of the inputs and, unless `rate` is 0, dropout; then a layer for each of `widths`."""

    widths: tuple[int, ...]
    rate: float = 0.0

    @nn.compact
    def __call__(self, obs, *action, train: bool = False):
        x = jnp.concatenate([obs, *action], axis=-1)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, use_bias=False, use_scale=False)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        heads = [nn.Dense(max(1, width))(x) for width in self.widths]
        heads = [x if width else x[:, 0] for x, width in zip(heads, self.widths, strict=True)]
        return heads[0] if len(heads) == 1 else tuple(heads)


def of(widths, rate=0.0):
    return lambda spec: Normed(widths, rate)


def of_policy(*more, rate=0.0):
    return lambda spec, head: Normed((head.outputs, *more), rate)


def networks_of(name: str, rate: float = 0.0) -> tuple[Any, jaxrl.EnvSpec, dict[str, Any]]:
    """Return an algorithm, an environment that suits it, and networks that normalise their inputs."""
    make = getattr(jaxrl, name.removeprefix("discrete "))
    if name in ("dqn", "cql_dqn", "pqn"):
        return make, DISCRETE, {"make_network": of((ACTIONS,), rate)}
    if name in ("ppo", "a2c", "reinforce", "impala"):
        return make, DISCRETE, {"make_network": of_policy(0, rate=rate)}
    if name == "bc":
        return make, CONTINUOUS, {"make_network": of_policy(rate=rate)}
    discrete = name.startswith("discrete")
    # The critic of REPPO puts out logits of its 151 bins.
    outputs = ACTIONS if discrete else 151 if name == "reppo" else 0
    own = {"make_policy": of_policy(rate=rate), "make_critic": of((outputs,), rate)}
    if name == "iql":
        own["make_value"] = of((0,), rate)
    return make, DISCRETE if discrete else CONTINUOUS, own


EVERY_DAY = ("dqn", "ppo", "sac", "td3", "iql")
OTHERS = (
    *("cql_dqn", "pqn", "reppo", "a2c", "reinforce", "impala", "bc", "discrete sac", "ddpg", "td3_bc", "awac"),
    *("rebrac", "edac"),
)


def stats_of(variables):
    (stats,) = variables["batch_stats"].values()
    return stats


def inputs_of(agent, spec, state):
    """Return what the networks of `agent` see in the update that `updated` makes: observations, and with actions."""
    shape = (ROWS,) if agent.prepare is None else (2, ROWS)
    items = transitions(agent, spec, state, *shape)
    obs = np.asarray(items.obs).reshape(-1, 3)
    if spec is DISCRETE:
        return obs, obs
    return obs, np.concatenate([obs, np.asarray(items.action).reshape(len(obs), -1)], axis=1)


@pytest.mark.every_day("dqn", "ppo", "iql")
@pytest.mark.parametrize("name", EVERY_DAY + OTHERS)
def test_an_update_moves_every_network_and_takes_in_the_statistics_of_its_batch(name):
    make, spec, own = networks_of(name)
    agent = make(**own)(spec)
    assert agent.info.custom == tuple(own)
    state = begun(agent.init)
    new, metrics = jax.jit(lambda state: updated(agent, spec, state))(state)
    alone, with_action = inputs_of(agent, spec, state)
    networks = [x for x in ("params", "policy", "critic", "value") if getattr(state, x, ())]
    assert len(networks) == len(own)
    for entry in networks:
        seen, stats = with_action if entry == "critic" else alone, stats_of(getattr(new, entry))
        rows = getattr(new, entry)["batch_stats"]
        assert jax.tree.structure(rows) == jax.tree.structure(getattr(state, entry)["batch_stats"])
        for mean in stats["mean"].reshape(-1, seen.shape[1]):  # of each of several critics
            np.testing.assert_allclose(mean, 0.1 * seen.mean(0), atol=1e-6)
        for var in stats["var"].reshape(-1, seen.shape[1]):
            np.testing.assert_allclose(var, 0.9 + 0.1 * seen.var(0), rtol=1e-5)
        before, after = (jax.tree.leaves(getattr(s, entry)["params"]) for s in (state, new))
        assert all(np.isfinite(moved).all() for moved in after)
        # TD3 moves its policy at every other step, of which this was the second.
        assert any((old != moved).any() for old, moved in zip(before, after, strict=True))
    assert np.isfinite(metrics["loss"])


def test_statistics_of_the_batch_make_its_loss_and_running_ones_the_action_and_the_target():
    agent = jaxrl.dqn(make_network=of((ACTIONS,)), double=False, tau=0.25, target_interval=1)(DISCRETE)
    state = begun(agent.init)
    mean, std, mean_t, std_t = (
        np.float32([1, 2, 3]),
        np.float32([1, 2, 4]),
        np.float32([-1, 0, 1]),
        np.float32([2, 2, 1]),
    )
    of_stats = lambda mean, std: {"BatchNorm_0": {"mean": jnp.asarray(mean), "var": jnp.asarray(std**2)}}
    state = state._replace(
        params={**state.params, "batch_stats": of_stats(mean, std)},
        target={**state.target, "batch_stats": of_stats(mean_t, std_t)},
    )
    kernel, bias = (np.asarray(state.params["params"]["Dense_0"][x]) for x in ("kernel", "bias"))
    q = lambda obs, mean, std: (np.asarray(obs) - mean) / std @ kernel + bias
    items = transitions(agent, DISCRETE, state, ROWS)

    action = jax.jit(lambda state, obs: agent.act(state, obs, None, STEP, "exploit")[0])(state, items.obs)
    assert action.tolist() == q(items.obs, mean, std).argmax(1).tolist()
    np.testing.assert_allclose(agent.apply["params"](state.params, items.obs), q(items.obs, mean, std), atol=1e-5)

    batch = Batch(items, jnp.arange(ROWS), jnp.ones(ROWS))
    new, metrics, priority = jax.jit(agent.update)(state, batch, KEY, STEP)
    obs = np.asarray(items.obs)
    learnt = q(obs, obs.mean(0), obs.std(0))
    target = np.asarray(items.reward) + 0.9 * q(items.next_obs, mean_t, std_t).max(1)
    np.testing.assert_allclose(metrics["q"], learnt.max(1).mean(), rtol=1e-3)
    np.testing.assert_allclose(
        priority, np.abs(target - learnt[np.arange(ROWS), np.asarray(items.action)]), rtol=1e-3, atol=1e-4
    )
    # The target's own statistics follow those of the network as its parameters do.
    moved = 0.9 * mean + 0.1 * obs.mean(0)
    np.testing.assert_allclose(stats_of(new.params)["mean"], moved, rtol=1e-5)
    np.testing.assert_allclose(stats_of(new.target)["mean"], 0.25 * moved + 0.75 * mean_t, rtol=1e-5)


def test_pieces_of_a_batch_take_their_turns_at_the_statistics():
    agent = jaxrl.dqn(make_network=of((ACTIONS,)), accumulate=2)(DISCRETE)
    state = begun(agent.init)
    new, _ = jax.jit(lambda state: updated(agent, DISCRETE, state))(state)
    first, last = np.split(inputs_of(agent, DISCRETE, state)[0], 2)
    np.testing.assert_allclose(stats_of(new.params)["mean"], 0.09 * first.mean(0) + 0.1 * last.mean(0), atol=1e-6)


def test_shards_share_the_means_of_their_statistics():
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.ppo(make_network=of_policy(0)),
        num_envs=8,
        rollout=1,
        epochs=1,
        minibatches=1,
        shards=2,
    )
    first = begun(strategy.init)
    state, _ = jax.jit(strategy.step)(first, jax.random.fold_in(first.key, 0), np.uint32(0))
    cart = first.env.env
    seen = np.stack([cart.x, cart.x_dot, cart.theta, cart.theta_dot], axis=-1)  # [2, 4, 4]: of shards, environments
    stats = stats_of(state.agent.params)
    np.testing.assert_allclose(stats["mean"], 0.1 * seen.mean((0, 1)), atol=1e-7)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * seen.var(1).mean(0), rtol=1e-6)


# --- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.every_day("dqn", "sac")
@pytest.mark.parametrize("name", EVERY_DAY + OTHERS)
def test_dropout_is_drawn_from_the_key_of_an_update_and_never_to_act(name):
    make, spec, own = networks_of(name, rate=0.5)
    agent = make(**own)(spec)
    state = begun(agent.init)
    items = transitions(agent, spec, state, *((ROWS,) if agent.prepare is None else (2, ROWS)))
    if agent.prepare is not None:
        items = agent.prepare(state, Rollout(items, jnp.zeros((2, ROWS), bool)))
    rows = jax.tree.leaves(items)[0].shape[0]
    batch = Batch(items, jnp.arange(rows), jnp.ones(rows))
    update = jax.jit(lambda state, key: agent.update(state, batch, key, STEP)[1]["loss"])
    one, again, other = (float(update(state, jax.random.key(seed))) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    obs = jax.tree.leaves(batch.items.obs)[0]
    act = lambda state, obs: agent.act(state, obs, None, STEP, "exploit")[0]
    np.testing.assert_array_equal(*jax.jit(lambda *given: (act(*given), act(*given)))(state, obs))


def test_what_is_dropped_of_a_constant_input_is_told_by_the_loss():
    class Dropped(nn.Module):
        """The sum of four ones, of which a half is dropped and the rest doubled, times a parameter that is 1."""

        @nn.compact
        def __call__(self, obs, train: bool = False):
            ones = nn.Dropout(0.5, deterministic=not train)(jnp.ones((obs.shape[0], 4)))
            return ones.sum(1, keepdims=True) * self.param("scale", nn.initializers.ones, (1, ACTIONS))

    agent = jaxrl.dqn(make_network=lambda spec: Dropped(), accumulate=2)(DISCRETE)
    state = begun(agent.init)
    items = transitions(agent, DISCRETE, state, 64)
    batch = Batch(items._replace(discount=jnp.zeros(64), reward=jnp.zeros(64)), jnp.arange(64), jnp.ones(64))
    _, _, values = jax.jit(agent.update)(state, batch, KEY, STEP)  # the absolute error is the value itself
    assert set(values.tolist()) <= {0.0, 2.0, 4.0, 6.0, 8.0}
    assert len(set(values.tolist())) > 2
    assert values[:32].tolist() != values[32:].tolist()  # each piece of the batch draws for itself


# --- flax.nnx -----------------------------------------------------------------------------------------------------


class NNXNormed(nnx.Module):
    """`Normed` in Flax's other dialect."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, momentum=0.9, use_bias=False, use_scale=False, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.dense = nnx.Linear(3, ACTIONS, rngs=rngs)

    def __call__(self, obs):
        return self.dense(self.dropout(self.norm(obs)))


def test_a_module_of_nnx_learns_and_acts_as_the_same_one_in_linen_does():
    nnx_agent, linen_agent = (
        jaxrl.dqn(make_network=make)(DISCRETE)
        for make in (lambda spec: from_nnx(lambda rngs: NNXNormed(0.0, rngs)), of((ACTIONS,)))
    )
    nnx_state, linen_state = begun(nnx_agent.init), begun(linen_agent.init)
    kernel = nnx_state.params["params"]["dense/kernel"]
    params = {**linen_state.params, "params": {"Dense_0": {"kernel": kernel, "bias": jnp.zeros(ACTIONS)}}}
    linen_state = linen_state._replace(params=params, target=params)
    found = []
    for agent, state in ((nnx_agent, nnx_state), (linen_agent, linen_state)):
        items = transitions(linen_agent, DISCRETE, linen_state, ROWS)
        new, metrics, _ = jax.jit(agent.update)(state, Batch(items, jnp.arange(ROWS), jnp.ones(ROWS)), KEY, STEP)
        found.append((agent.apply["params"](new.params, items.obs), metrics["loss"], new.params["batch_stats"]))
    (q, loss, stats), (linen_q, linen_loss, linen_stats) = found
    np.testing.assert_allclose(q, linen_q, rtol=1e-5)
    np.testing.assert_allclose(loss, linen_loss, rtol=1e-5)
    np.testing.assert_allclose(stats["norm/mean"], linen_stats["BatchNorm_0"]["mean"], rtol=1e-5)


def test_dropout_of_nnx_is_drawn_from_the_key_of_an_update():
    agent = jaxrl.dqn(make_network=lambda spec: from_nnx(lambda rngs: NNXNormed(0.5, rngs)))(DISCRETE)
    state = begun(agent.init)
    items = transitions(agent, DISCRETE, state, ROWS)
    batch = Batch(items, jnp.arange(ROWS), jnp.ones(ROWS))
    update = jax.jit(agent.update)
    losses = [float(update(state, batch, jax.random.key(seed), STEP)[1]["loss"]) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


# --- refused ------------------------------------------------------------------------------------------------------


class NoTrain(nn.Module):
    """Running statistics, and no way to say whether they are to be updated."""

    @nn.compact
    def __call__(self, obs):
        return nn.Dense(ACTIONS)(nn.BatchNorm(use_running_average=True)(obs))


class OtherStats(nn.Module):
    """Statistics that change their shape when the network learns."""

    @nn.compact
    def __call__(self, obs, train: bool = False):
        seen = self.variable("batch_stats", "seen", jnp.zeros, (3,))
        if train:
            seen.value = obs
        return nn.Dense(ACTIONS)(obs)


class OtherOutputs(nn.Module):
    """Other outputs to learn from than to act by."""

    @nn.compact
    def __call__(self, obs, train: bool = False):
        q = nn.Dense(ACTIONS)(obs)
        return q[:, :2] if train else q


@pytest.mark.parametrize(
    ("network", "parts"),
    [
        (NoTrain(), ["variables batch_stats beside params, but no argument train", "use_running_average=not train"]),
        (OtherStats(), ["[3, 3] and train=True", "other variables than it was initialised with", "(3, 3)", "(3,)"]),
        (OtherOutputs(), ["called with [3, 3] and train=True, the network returns [3, 2]", "expected [3, 4]"]),
    ],
)
def test_a_network_that_cannot_be_told_to_learn_is_refused_in_one_line(network, parts):
    with pytest.raises(jaxrl.SettingsError) as refused:
        jaxrl.dqn(make_network=lambda spec: network)(DISCRETE)
    assert "\n" not in str(refused.value)
    for part in parts:
        assert part in str(refused.value)


class Constant(nn.Module):
    """A critic of the value 0, or `learning` where it learns."""

    learning: float

    @nn.compact
    def __call__(self, obs, action, train: bool = False):
        bias = self.param("bias", nn.initializers.zeros, ())
        return bias + (self.learning if train else 0.0) + jnp.zeros(obs.shape[0])


def test_cql_values_actions_of_the_data_and_others_by_the_network_as_it_learns():
    """A constant value has no gap but that of the densities, which no constant changes; a mixture of two would."""
    gaps = []
    for learning in (0.0, 5.0):
        agent = jaxrl.cql(make_critic=lambda spec, learning=learning: Constant(learning))(CONTINUOUS)
        gaps.append(updated(agent, CONTINUOUS, begun(agent.init))[1]["cql_gap"])
    np.testing.assert_allclose(gaps[1], gaps[0], rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"batch_norm": "batch"}, {"make_critic": of((0,))}], ids=["built in", "made in Python"]
)
def test_statistics_of_a_batch_that_would_be_of_sampled_actions_are_refused(settings):
    with pytest.raises(jaxrl.SettingsError, match=r"agent.cql is .* cql to 0"):
        jaxrl.cql(**settings)(CONTINUOUS)


class Unnamed(nn.Module):
    """A linear critic whose kernel and bias have names of their own."""

    @nn.compact
    def __call__(self, obs, action):
        w = self.param("w", nn.initializers.lecun_normal(), (obs.shape[1] + action.shape[1], 1))
        return (jnp.concatenate([obs, action], axis=1) @ w)[:, 0] + self.param("b", nn.initializers.ones, ())


@pytest.mark.parametrize("settings", [{"weight_norm": True}, {"optimizer": "adamw", "weight_decay": 0.1}])
def test_what_acts_on_kernels_is_refused_for_critics_that_do_not_name_them(settings):
    """Several critics have biases that are matrices, and would be taken for kernels."""
    (name, *_) = [name for name in settings if name != "optimizer"]
    with pytest.raises(jaxrl.SettingsError, match=f"agent.{name} is .* no parameter whose name begins with kernel"):
        jaxrl.sac(make_critic=lambda spec: Unnamed(), **settings)(CONTINUOUS)
    jaxrl.sac(make_critic=lambda spec: Unnamed())(CONTINUOUS)
