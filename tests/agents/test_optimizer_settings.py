"""The constants of an optimizer, by one step worked by hand; and what an optimizer does not have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys_agents import CONTINUOUS

import jaxrl
from jaxrl.agents import DQNConfig
from jaxrl.agents.optimizers import gradient_step, optimizer_of
from jaxrl.xla.flat import ravel


def stepped(gradients: list[float], **settings: Any) -> tuple[float, float]:
    """Return a kernel and a bias, both 1, after a step for each gradient with a learning rate of 0.5."""
    step = gradient_step(optimizer_of(DQNConfig(**settings)))
    params, lr = {"kernel": jnp.ones((1, 1)), "bias": jnp.ones(1)}, jnp.float32(0.5)
    state = step.init(params, lr)
    for g in gradients:
        grads = ravel({"kernel": jnp.full((1, 1), g), "bias": jnp.full(1, g)})
        params, state, _ = step.step(params, grads, state, lr, jnp.float32(1e9))
    return float(params["kernel"][0, 0]), float(params["bias"][0])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adams_first_step_is_the_sign_of_the_gradient_but_for_epsilon(optimizer: str) -> None:
    decay = {"adamw": {"weight_decay": 0.0}}.get(optimizer, {})
    np.testing.assert_allclose(stepped([3.0], optimizer=optimizer, **decay), 0.5, rtol=1e-5)
    np.testing.assert_allclose(
        stepped([3.0], optimizer=optimizer, optimizer_eps=1.0, **decay), 1 - 0.5 * 3 / (3 + 1), rtol=1e-5
    )


def test_adams_second_step_by_its_two_decays() -> None:
    """m = 0.5 (0.5 * 2) + 0.5 * 1, over 1 - 0.25; v = 0.75 (0.25 * 4) + 0.25 * 1, over 1 - 0.5625."""
    kernel, _ = stepped([2.0, 1.0], optimizer_b1=0.5, optimizer_b2=0.75, optimizer_eps=1e-30)
    m, v = (0.5 * 1.0 + 0.5) / 0.75, (0.75 * 1.0 + 0.25) / 0.4375
    assert kernel == pytest.approx(0.5 - 0.5 * m / v**0.5, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_kernels_decay_and_biases_do_not(optimizer: str) -> None:
    np.testing.assert_allclose(stepped([0.0], optimizer=optimizer, weight_decay=0.2), [1 - 0.5 * 0.2, 1.0], rtol=1e-6)


def test_only_kernels_of_several_critics_decay() -> None:
    """Biases, or the time scales of a core, of all critics are one array `[K, D]`, which is no kernel for all that."""
    step = gradient_step(optimizer_of(DQNConfig(optimizer="adamw", weight_decay=0.2)))
    agent = jaxrl.sac(num_critics=2, features=(4,), layer_norm=True, core="s5", core_features=4)(CONTINUOUS)
    critic = jax.eval_shape(agent.init, jax.random.key(0)).critic
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), critic)
    nothing, lr = ravel(jax.tree.map(jnp.zeros_like, critic)), jnp.float32(0.5)
    after, *_ = jax.jit(lambda: step.step(ones, nothing, step.init(ones, lr), lr, jnp.float32(1e9)))()
    decayed = {
        jax.tree_util.keystr(path[-1:], simple=True): x for path, x in jax.tree_util.tree_leaves_with_path(after)
    }
    assert {"bias", "kernel", "scale", "log_step", "real", "imag"} <= decayed.keys()
    for name, x in decayed.items():
        np.testing.assert_allclose(x, 0.9 if name == "kernel" else 1.0, rtol=1e-6)


def test_where_nothing_is_named_kernel_matrices_decay() -> None:
    step = gradient_step(optimizer_of(DQNConfig(optimizer="adamw", weight_decay=0.2)))
    params, lr = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, jnp.float32(0.5)
    nothing = ravel(jax.tree.map(jnp.zeros_like, params))
    after, *_ = step.step(params, nothing, step.init(params, lr), lr, jnp.float32(1e9))
    assert after["w"].tolist() == [[pytest.approx(0.9)] * 2] * 2
    assert after["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "other", "left"),
    [
        (jaxrl.crossq, {"optimizer": "rmsprop"}, {}),
        (jaxrl.crossq, {"optimizer": "nadam"}, {"optimizer_b1": 0.5}),
        (jaxrl.crossq, {"make_optimizer": optax.adamax}, {}),
        (jaxrl.simba, {"optimizer": "adam"}, {}),
        (jaxrl.fast_sac, {"optimizer": "adam"}, {"optimizer_b2": 0.95}),
        (jaxrl.fast_td3, {"make_optimizer": optax.adamax}, {}),
    ],
)
def test_the_constants_that_an_algorithm_has_by_default_give_way_to_another_optimizer(
    make: Any, other: dict[str, Any], left: dict[str, float]
) -> None:
    settings = make(**other)(CONTINUOUS).info.settings
    constants = ("optimizer_eps", "optimizer_b1", "optimizer_b2", "weight_decay")
    assert {name: settings[name] for name in constants if settings[name] is not None} == left
