"""XQC and its parts: kernels on the unit sphere, steps and next steps in a batch, normalisation before activations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys_agents
from toys_agents import CONTINUOUS, DISCRETE, KEY, drawn_anew, five_steps, updated, values_of_constant
from toys_by_hand import beside, project, softmax, squashed
from toys_draws import drawn

import jaxrl
from jaxrl.agents.optimizers import project_kernels

WIDTH, ATOMS, RATE = 4, 5, 0.25
SUPPORT = np.linspace(-5.0, 5.0, ATOMS)
NOISE = np.random.default_rng(3).normal(size=(2, 5, 2)).astype(np.float32)
"""What is drawn: for targets, and for the policy's loss."""
SMALL: dict[str, Any] = {
    "features": (WIDTH,), "critic_features": (WIDTH,), "atoms": ATOMS, "optimizer": "sgd", "lr": RATE,
    "policy_lr": RATE, "policy_interval": 1, "temperature": 0.5, "learn_temperature": False,
}  # fmt: skip


def begun(**settings: Any) -> tuple[Any, Any]:
    """Return an agent, and a state of it whose parameters are all drawn anew."""
    agent = jaxrl.xqc(**{**SMALL, **settings})(CONTINUOUS)
    return agent, drawn_anew(agent, "policy", "critic", "target", mean=0.2, scale=0.5)


def step(agent: Any, state: Any) -> tuple[Any, Any]:
    with drawn(normal=[*NOISE]):
        after, metrics, _ = jax.jit(agent.update)(state, five_steps(), KEY, jnp.uint32(0))
    return after, metrics


projected = jax.jit(project_kernels)


def once(agent: Any, spec: Any, state: Any) -> Any:
    return jax.jit(lambda state: updated(agent, spec, state))(state)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def lengths(variables: Any) -> np.ndarray:
    """Return the lengths of the weights of all outputs of dense layers, one after the other."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(variables["params"]):
        if "kernel" in jax.tree_util.keystr(path):
            found.append(np.sqrt(np.square(np.asarray(x, np.float64)).sum(-2)).ravel())
    return np.concatenate(found)


# --- kernels on the sphere ----------------------------------------------------------------------------------------


def test_the_weights_of_each_output_are_brought_to_length_one_and_nothing_else_is_touched() -> None:
    params = {
        "dense": {"kernel": np.array([[3.0, 0.0], [4.0, 0.0]]), "bias": np.array([2.0, 7.0])},
        "two critics": {"kernel": np.array([[[2.0], [0.0]], [[-3.0], [4.0]]]), "bias": np.ones((2, 1))},
        "convolution": {"kernel": np.full((2, 2, 1, 3), -5.0)},
        "two of them": {"kernel": np.stack([np.full((3, 3, 1, 2), 2.0), np.full((3, 3, 1, 2), 8.0)])},
        "norm": {"scale": np.full((2, 3), 4.0), "bias": np.full((2, 3), 5.0)},
    }
    stats = {"norm": {"mean": np.full((2, 3), 6.0), "var": np.full((2, 3), 7.0)}}
    got = projected(jax.tree.map(jnp.float32, {"params": params, "batch_stats": stats}))
    wanted = jax.tree.map(np.copy, params)
    # The second output has no weights at all, and keeps them.
    wanted["dense"]["kernel"] = np.array([[0.6, 0.0], [0.8, 0.0]])
    wanted["two critics"]["kernel"] = np.array([[[1.0], [0.0]], [[-0.6], [0.8]]])
    wanted["convolution"]["kernel"] = np.full((2, 2, 1, 3), -0.5)
    wanted["two of them"]["kernel"] = np.full((2, 3, 3, 1, 2), 1 / 3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got["params"], wanted)
    jax.tree.map(np.testing.assert_array_equal, got["batch_stats"], stats)
    # Once there, they stay to the bit.
    random = {"params": {"kernel": jax.random.normal(KEY, (2, 300, 70))}}
    there = projected(random)
    np.testing.assert_array_equal(projected(there)["params"]["kernel"], there["params"]["kernel"])


@pytest.mark.every_day("td3", "iql")
@pytest.mark.parametrize("name", ["sac", "simba", "td3", "iql"])
def test_every_agent_with_critics_can_have_its_kernels_there_from_the_start(name: str) -> None:
    settings = {"features": (WIDTH,), "critic_features": (WIDTH,), "lr": 0.1, "policy_lr": 0.1, "weight_norm": True}
    agent = getattr(jaxrl, name)(**settings)(CONTINUOUS)
    state = jax.jit(agent.init)(KEY)
    after, _ = once(agent, CONTINUOUS, state)
    parts = [part for part in ("policy", "critic", "value") if part in state._fields and getattr(state, part)]
    assert len(parts) == (3 if name == "iql" else 2)
    for part in parts:
        old, new = getattr(state, part), getattr(after, part)
        np.testing.assert_allclose(np.concatenate([lengths(old), lengths(new)]), 1.0, rtol=2e-6)
        assert not np.array_equal(*(jax.tree.leaves(x["params"])[-1] for x in (old, new)))


def test_a_step_ends_where_the_optimizer_s_does_brought_to_length_one() -> None:
    free, state = begun(weight_norm=False, tau=0.1)
    onto, _ = begun(tau=0.1)
    moved, there = step(free, state)[0], step(onto, state)[0]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6)
    jax.tree.map(close, there.critic, projected(moved.critic))
    assert np.abs(lengths(moved.critic) - 1).max() > 0.1
    # The policy learns from critics that were projected before it.
    np.testing.assert_allclose(lengths(there.policy), 1.0, rtol=2e-6)
    assert not np.allclose(there.policy["params"]["Dense_1"]["bias"], moved.policy["params"]["Dense_1"]["bias"])
    # Targets are means, which nothing brings there.
    mean = lambda critic, target, after: np.testing.assert_allclose(after, 0.1 * critic + 0.9 * target, rtol=1e-5)
    jax.tree.map(mean, there.critic["params"], state.target["params"], there.target["params"])


# --- an update by hand --------------------------------------------------------------------------------------------


def normed(x: np.ndarray, layer: Any, stats: Any = None) -> np.ndarray:
    """Normalise `[..., B, D]` by its own statistics, or by running ones."""
    mean, var = (x.mean(-2), x.var(-2)) if stats is None else (stats["mean"], stats["var"])
    scaled = (x - mean[..., None, :]) / np.sqrt(var + 1e-3)[..., None, :]
    return np.asarray(scaled * layer["scale"][..., None, :] + layer["bias"][..., None, :])


def hidden(variables: Any, x: np.ndarray, *, learns: bool) -> np.ndarray:
    """Return what the last layer sees: inputs normalised, a matrix, normalisation, the activation."""
    params, stats = wide(variables["params"]), wide(variables["batch_stats"])
    assert "bias" not in params["Dense_0"]
    of = lambda name: None if learns else stats[name]
    x = normed(x, params["BatchNorm_0"], of("BatchNorm_0"))
    return np.maximum(normed(x @ params["Dense_0"]["kernel"], params["BatchNorm_1"], of("BatchNorm_1")), 0)


def head(variables: Any, x: np.ndarray) -> np.ndarray:
    layer = wide(variables["params"])["Dense_1"]
    return np.asarray(x @ layer["kernel"] + layer["bias"][..., None, :])


def test_an_update_of_the_critics_is_that_worked_by_hand() -> None:
    """Targets and critics are normalised by the steps and the next ones together; all in NumPy, in double precision."""
    agent, state = begun()
    after, metrics = step(agent, state)
    items = wide(five_steps().items._asdict())
    action, log_p = squashed(head(state.policy, hidden(state.policy, items["next_obs"], learns=False)), NOISE[0])
    x = np.concatenate([beside(items["obs"], items["action"]), beside(items["next_obs"], action)])
    p_t = softmax(head(state.target, hidden(state.target, x, learns=True)))[:, 5:]
    target = np.zeros((5, ATOMS))
    for b in range(5):
        lowest = int(np.argmin(p_t[:, b] @ SUPPORT))
        z = items["reward"][b] + items["discount"][b] * (SUPPORT - 0.5 * log_p[b])
        target[b] = project(z, p_t[lowest, b], SUPPORT)
    seen = hidden(state.critic, x, learns=True)[:, :5]
    p = softmax(head(state.critic, seen))
    np.testing.assert_allclose(metrics["loss"], -(target[None] * np.log(p)).sum((0, 2)).mean(), rtol=1e-5)
    # The gradient of a cross-entropy for its logits is the difference of the probabilities.
    slope = (p - target[None]) / 5
    layer = wide(state.critic["params"])["Dense_1"]
    moved = layer["kernel"] - RATE * np.einsum("kbd,kbn->kdn", seen, slope)
    moved /= np.sqrt(np.square(moved).sum(1, keepdims=True))
    np.testing.assert_allclose(after.critic["params"]["Dense_1"]["kernel"], moved, rtol=1e-4, atol=1e-5)
    bias = layer["bias"] - RATE * slope.sum(1)
    np.testing.assert_allclose(after.critic["params"]["Dense_1"]["bias"], bias, rtol=1e-4, atol=1e-5)
    # Running statistics are of both as well; those of the policy are of the steps alone.
    for of_critic in np.asarray(after.critic["batch_stats"]["BatchNorm_0"]["mean"]):
        np.testing.assert_allclose(of_critic, 0.01 * x.mean(0), rtol=1e-4, atol=1e-7)
    of_policy = after.policy["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(of_policy, 0.01 * items["obs"].mean(0), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_targets_of_means_share_a_pass_with_the_steps_as_those_without_a_target_network_do() -> None:
    """A target that equals the critics, both normalised by the same rows, is what critics alone bootstrap from."""
    settings = {"features": (WIDTH,), "batch_norm": "batch", "optimizer": "sgd", "lr": 0.1}
    by_target = jaxrl.sac(**settings, joint_batch=True)(DISCRETE)
    by_pass = jaxrl.sac(**settings, target_network=False)(DISCRETE)
    state = toys_agents.begun(by_target.init)
    (one, told), (other, again) = (
        once(agent, DISCRETE, begin) for agent, begin in ((by_target, state), (by_pass, state._replace(target=())))
    )
    np.testing.assert_allclose(told["loss"], again["loss"], rtol=1e-6)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (one.critic, one.policy), (other.critic, other.policy))
    apart, _ = once(jaxrl.sac(**settings)(DISCRETE), DISCRETE, state)
    assert not np.allclose(apart.critic["params"]["Dense_1"]["kernel"], one.critic["params"]["Dense_1"]["kernel"])


@pytest.mark.slow
def test_the_value_of_a_constant_reward_is_that_of_the_closed_form() -> None:
    """A reward of 0.5 a step for ever, discounted by 0.8, is worth 2.5; its entropy is worth next to nothing."""
    agent = jaxrl.xqc(
        features=(), critic_features=(16,), lr=1e-2, lr_decay=600, policy_interval=1, tau=0.05
    )(CONTINUOUS)  # fmt: skip
    np.testing.assert_allclose(values_of_constant(agent, reward=0.5, updates=600), 2.5, atol=0.15)
