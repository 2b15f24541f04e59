"""n-step transitions: a plain NumPy reference, with ends of both kinds, and what may be set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_processors import processed, random_steps

from jaxrl.errors import SettingsError
from jaxrl.processors import Processor, init_processor, n_step
from jaxrl.spaces import Box
from jaxrl.types import Step, Transition

GAMMA = 0.5
"""With a half and whole rewards every sum is exact in float32: the tests below compare bit for bit."""


def transitions(processor: Processor, first: Any, steps: Step) -> Transition:
    """Return the transitions of `steps`, leaves `[T, N, ...]`; drop what precedes the processor's horizon."""
    _, out, _ = processed(processor, first, steps)
    return jax.tree.map(lambda x: x[processor.horizon :], out)


def one_env(rewards: list[float]) -> tuple[Any, Step]:
    """Steps of one environment whose observation is the time, and whose episode goes on."""
    time = np.arange(len(rewards))
    seen, never = (time + 1).astype(np.float32)[:, None, None], np.zeros((len(time), 1), bool)
    steps = Step(
        action=time[:, None].astype(np.int32),
        extras=(),
        reward=np.array(rewards, np.float32)[:, None],
        terminated=never,
        truncated=never,
        final_obs=seen,
        obs=seen,
        valid=~never,
    )
    return np.zeros((1, 1), np.float32), steps


def column(x: np.ndarray) -> list:
    return x.reshape(len(x), -1)[:, 0].tolist()


# --- by hand ----------------------------------------------------------------------------------------------------


def test_extras_are_those_of_the_first_step() -> None:
    first, steps = one_env([1, 2, 3, 4])
    steps = steps._replace(extras={"log_prob": steps.reward * 10})
    assert column(transitions(n_step(2, GAMMA), first, steps).extras["log_prob"]) == [10, 20, 30]


def test_the_discount_may_vary_without_compiling_again() -> None:
    processor = n_step(2, 0.9)
    first, steps = one_env([1, 2, 4])
    state = init_processor(processor, first, steps.action[0], ())
    run = jax.jit(lambda state: jax.lax.scan(processor.process, state, steps)[1].reward[1:, 0])
    rewards = [run(state._replace(discount=jnp.float32(gamma))).tolist() for gamma in (0.0, 0.5, 1.0)]
    assert rewards == [[1, 2], [2, 4], [3, 6]]
    assert run._cache_size() == 1


# --- against a plain reference ------------------------------------------------------------------------------------


def reference(n: int, gamma: float, first: np.ndarray, steps: Step) -> dict[str, np.ndarray]:
    """Equation by equation, environment by environment, window by window."""
    count, num_envs = steps.reward.shape
    rows: dict[str, list] = {name: [] for name in ("obs", "reward", "discount", "next_obs", "weight")}
    for start in range(count - n + 1):
        for name in rows:
            rows[name].append([None] * num_envs)
        for i in range(num_envs):
            reward, discount, weight, at = 0.0, 1.0, 1.0, start
            while True:
                reward += discount * steps.reward[at, i]
                discount *= gamma
                weight *= steps.valid[at, i]
                if steps.terminated[at, i]:
                    discount = 0.0
                if steps.terminated[at, i] or steps.truncated[at, i] or at == start + n - 1:
                    break
                at += 1
            seen = first[i] if start == 0 else steps.obs[start - 1, i]
            found = {"obs": seen, "reward": reward, "discount": discount, "next_obs": steps.final_obs[at, i]}
            for name, value in {**found, "weight": weight}.items():
                rows[name][-1][i] = value
    return {name: np.array(value, np.float32) for name, value in rows.items()}


@pytest.mark.every_day("1", "3", "7")
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_random_steps_agree_with_the_reference(n: int) -> None:
    """Of three seeds, side by side."""
    several = [random_steps(steps=30, num_envs=5, seed=seed, invalid=0.05) for seed in range(3)]
    first = np.concatenate([first for first, _ in several])
    steps = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(steps for _, steps in several))
    out = transitions(n_step(n, GAMMA), first, steps)
    for name, expected in reference(n, GAMMA, first, steps).items():
        np.testing.assert_array_equal(getattr(out, name), expected, err_msg=name)
    np.testing.assert_array_equal(out.action, steps.action[: len(out.action)])


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "discount", "named"),
    [(0, 0.9, "n_step"), (1.5, 0.9, "n_step"), (2, -0.1, "discount"), (2, 1.1, "discount"), (2, np.nan, "discount")],
)
def test_n_is_a_count_and_the_discount_between_0_and_1(n: Any, discount: float, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        n_step(n, discount)


def test_the_policy_sees_the_environments_own_observations() -> None:
    space = Box(-1.0, 1.0, (3,))
    processor = n_step(3)
    assert processor.space(space) == space
    np.testing.assert_array_equal(processor.observe(processor.init(jnp.ones((2, 3)))), np.ones((2, 3)))
