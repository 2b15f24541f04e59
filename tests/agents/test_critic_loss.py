"""A loss of the critics' values of one's own, in place of half the squared error."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import CONTINUOUS, DISCRETE, KEY, begun, drawn_anew, five_steps, updated

import jaxrl
from jaxrl.errors import SettingsError

LINEAR: dict[str, Any] = {"features": (), "optimizer": "sgd", "lr": 0.25, "max_grad_norm": 1e9}
WEIGHT = np.array([1.0, 0.0, 0.5, 1.0, 2.0])


def huber(q: jax.Array, target: jax.Array) -> jax.Array:
    size = jnp.abs(target[None] - q)
    return jnp.where(size < 0.5, 0.5 * size**2, 0.5 * (size - 0.25))


def lower_expectile(q: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.where(target[None] < q, 0.9, 0.1) * (target[None] - q) ** 2


def squared(q: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * (target[None] - q) ** 2


def by_hand(name: str, error: float) -> tuple[float, float]:
    """Return the loss of an error `target - q`, and its slope in `q`."""
    if name == "huber":
        inside = abs(error) < 0.5
        return (0.5 * error**2, -error) if inside else (0.5 * abs(error) - 0.125, -0.5 * np.sign(error))
    share = 0.9 if error < 0 else 0.1
    return share * error**2, -2 * share * error


@pytest.mark.parametrize(
    ("make", "loss"), [(jaxrl.sac, huber), (jaxrl.td3, lower_expectile), (jaxrl.iql, huber)], ids=["sac", "td3", "iql"]
)
def test_an_update_is_that_worked_by_hand(make: Any, loss: Any) -> None:
    """Every episode ends, so that the target is the reward."""
    agent = make(**LINEAR, critic_loss=loss)(CONTINUOUS)
    state, batch = drawn_anew(agent, "critic"), five_steps()
    batch = batch._replace(items=batch.items._replace(discount=jnp.zeros(5)), weight=jnp.asarray(WEIGHT, jnp.float32))
    after, metrics, priorities = jax.jit(agent.update)(state, batch, KEY, jnp.uint32(0))
    x = np.concatenate([batch.items.obs, batch.items.action], axis=1).astype(np.float64)
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), state.critic["params"]["Dense_0"])
    error = np.asarray(batch.items.reward) - (x @ layer["kernel"] + layer["bias"][:, None])[..., 0]
    each = np.array([[by_hand(loss.__name__, one) for one in of_critic] for of_critic in error])
    np.testing.assert_allclose(metrics["loss"], (WEIGHT * each[..., 0].sum(0)).mean(), rtol=1e-5)
    gradient = np.einsum("kb,bd->kd", WEIGHT * each[..., 1], x) / 5
    moved = layer["kernel"][..., 0] - 0.25 * gradient
    np.testing.assert_allclose(after.critic["params"]["Dense_0"]["kernel"][..., 0], moved, rtol=1e-4, atol=1e-6)
    # Priorities are sizes of errors, whatever the loss.
    np.testing.assert_allclose(priorities, np.abs(error).mean(0), rtol=1e-4)
    assert agent.info.custom == ("critic_loss",)


def moved(make: Any, spec: jaxrl.EnvSpec, **settings: Any) -> Any:
    agent = make(features=(4,), critic_features=(4,), **settings)(spec)
    return jax.jit(lambda state: updated(agent, spec, state))(begun(agent.init))


@pytest.mark.every_day("cql")
@pytest.mark.parametrize(
    ("make", "spec"),
    [(jaxrl.cql, DISCRETE), (jaxrl.crossq, CONTINUOUS), (jaxrl.td3_bc, CONTINUOUS), (jaxrl.awac, CONTINUOUS)],
    ids=["cql", "crossq", "td3_bc", "awac"],
)
def test_half_the_squared_error_is_the_default_to_the_bit(make: Any, spec: jaxrl.EnvSpec) -> None:
    mine, usual = moved(make, spec, critic_loss=squared), moved(make, spec)
    jax.tree.map(np.testing.assert_array_equal, mine, usual)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda q, target: squared(q, target).sum(0), r"float32\[6\]; expected a number for each critic and step"),
        (lambda q, target: squared(q, target).mean(), r"critic_loss returned float32\[\]; .*, float32\[2, 6\]"),
        (lambda q, target: q > target[None], r"critic_loss returned bool\[2, 6\]"),
    ],
)
def test_a_result_of_another_shape_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        moved(jaxrl.sac, CONTINUOUS, critic_loss=loss)


def test_a_name_stays_the_setting_of_atoms() -> None:
    agent = jaxrl.td3(atoms=11, critic_loss="hl_gauss")(CONTINUOUS)
    assert agent.info.settings["critic_loss"] == "hl_gauss"
    assert agent.info.custom == ()
