"""The memory tasks: their best returns, with and without a memory, are those of the closed forms."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from math import comb, erf, sqrt
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_suites import checked

from jaxrl.envs import Env, make_env, vectorise
from jaxrl.envs.memory import DOWN, LEFT, RIGHT, TASKS, UP, names

EPISODES = 4_000
DEFAULT_STEPS = {
    "memory:Recall": 10 + 2,
    "memory:Copy": 5 + 5 + 5,
    "memory:Count": 20,
    "memory:Parity": 20,
    "memory:TMaze": 10 + 1,
    "memory:NoisyCue": 20,
}
"""Length of an episode of each task as it is made by default."""

Policy = Callable[[np.ndarray], Any]
"""All observations of the episode so far `[t + 1, N, D]` -> actions `[N]`; without a memory, only the last is used."""


@cache
def programs(name: str, params: tuple[tuple[str, Any], ...]) -> tuple[int, Any, Any]:
    """Return the length of an episode, and the compiled reset and step of `EPISODES` copies of a task."""
    env = make_env(f"memory:{name}", **dict(params))
    venv = vectorise(env, EPISODES)
    assert env.spec.time_limit is not None
    return env.spec.time_limit, jax.jit(venv.reset), jax.jit(venv.step)


def played(name: str, params: Mapping[str, Any], policy: Policy) -> np.ndarray:
    """Return the returns by `policy`, after a check that all episodes terminate with the last step, not before."""
    length, reset, step = programs(name, tuple(params.items()))
    key, reset_key = jax.random.split(jax.random.key(7))
    state, obs = reset(reset_key)
    seen, total = [np.asarray(obs)], np.zeros(EPISODES)
    for at in range(length):
        action = np.broadcast_to(policy(np.stack(seen)), EPISODES).astype(np.int32)
        state, out = step(state, action, jax.random.fold_in(key, at))
        seen.append(np.asarray(out.final_obs))
        total += np.asarray(out.reward)
        assert (np.asarray(out.terminated) == (at + 1 == length)).all()
        assert not np.asarray(out.truncated).any()
    assert not seen[-1].any()
    return total


def assert_mean(returns: np.ndarray, expected: float) -> None:
    """Assert that the mean is `expected`, within four standard errors of it."""
    assert abs(returns.mean() - expected) < 4 * returns.std() / sqrt(len(returns))


def normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


# --- the best returns, with a memory and without --------------------------------------------------------------------


def first_symbol(seen: np.ndarray) -> np.ndarray:
    return seen[0, :, :-1].argmax(-1)


def symbols_in_order(seen: np.ndarray) -> np.ndarray:
    symbols = seen[..., :-1]
    asked = int(seen[:, 0, -1].sum())
    return symbols[max(asked - 1, 0)].argmax(-1)


def sum_of_coins(seen: np.ndarray) -> np.ndarray:
    return seen[..., 0].sum(0)


def parity(seen: np.ndarray) -> np.ndarray:
    return sum_of_coins(seen) % 2


def to_the_cue(seen: np.ndarray) -> np.ndarray:
    return np.where(seen[-1, :, 3] == 1, np.where(seen[0, :, 0] == 1, UP, DOWN), RIGHT)


def into_one_arm(seen: np.ndarray) -> np.ndarray:
    return np.where(seen[-1, :, 3] == 1, UP, RIGHT)


def sign_of_the_sum(seen: np.ndarray) -> np.ndarray:
    return seen[..., 0].sum(0) > 0


def sign_of_the_last(seen: np.ndarray) -> np.ndarray:
    return seen[-1, :, 0] > 0


def last_coin(seen: np.ndarray) -> np.ndarray:
    return seen[-1, :, 0]


def always(action: int) -> Policy:
    return lambda seen: action


def likeliest_count(length: int) -> Policy:
    """Take the most likely number of ones among the coins that are no longer seen, and add the last."""
    return lambda seen: seen[-1, :, 0] + (length - 1) // 2


BEST: dict[tuple[str, str], tuple[Policy, float, Policy, float]] = {
    ("Recall", "symbols=3"): (first_symbol, 1, always(0), 1 / 3),
    ("Copy", "symbols=2 length=2 wait=0"): (symbols_in_order, 1, always(1), 1 / 2),
    ("Count", "length=5"): (sum_of_coins, 1, likeliest_count(5), 6 / 16),
    ("Parity", "length=2"): (parity, 1, last_coin, 1 / 2),
    ("TMaze", ""): (to_the_cue, 1, into_one_arm, 1 / 2),
    # Noisy cues are right as often as the normal distribution says.
    ("NoisyCue", "length=5 noise=3"): (sign_of_the_sum, normal(sqrt(5) / 3), sign_of_the_last, normal(1 / 3)),
    ("NoisyCue", "length=5 noise=0"): (sign_of_the_sum, 1, sign_of_the_last, 1),
    ("Recall", ""): (first_symbol, 1, always(2), 1 / 4),
    ("Copy", ""): (symbols_in_order, 1, always(1), 1 / 4),
    ("Count", ""): (sum_of_coins, 1, likeliest_count(20), comb(19, 9) / 2**19),
    ("Parity", ""): (parity, 1, always(1), 1 / 2),
    ("TMaze", "length=1"): (to_the_cue, 1, into_one_arm, 1 / 2),
    ("NoisyCue", ""): (sign_of_the_sum, normal(sqrt(20) / 2), sign_of_the_last, normal(1 / 2)),
}
"""Tasks with parameters: the best policy and its mean return, and the same of those that see only the present."""
EVERY_DAY = list(BEST)[:6]


@pytest.mark.every_day(*("-".join(case) for case in EVERY_DAY))
@pytest.mark.parametrize("case", BEST, ids="-".join)
def test_the_best_returns_with_a_memory_and_without_are_those_that_are_stated(case: tuple[str, str]) -> None:
    name, given = case
    params = {word: float(number) for word, number in (pair.split("=") for pair in given.split())}
    with_memory, best, without, chance = BEST[case]
    for policy, mean in ((with_memory, best), (without, chance)):
        returns = played(name, params, policy)
        if mean == 1:
            np.testing.assert_allclose(returns, 1.0, rtol=1e-6)
        else:
            assert_mean(returns, mean)


def test_no_answers_without_a_memory_count_better_than_the_stated() -> None:
    """Of four coins, answers by the last one are tried against all sixteen sequences."""
    coins = np.array(list(product((0, 1), repeat=4)))
    ones, last = coins.sum(1), coins[:, -1]
    right = [np.mean(np.where(last == 1, after_one, after_zero) == ones) for after_zero, after_one in PAIRS]
    assert max(right) == comb(3, 1) / 2**3


PAIRS = list(product(range(5), repeat=2))
"""An answer after a last coin of 0, and one after a last coin of 1."""


def test_no_policy_without_a_memory_is_better_in_the_maze_than_the_stated() -> None:
    """An action for each of the four observations there are: all 256 policies, with both goals."""
    env = make_env("memory:TMaze", length=2)
    policies = np.array(list(product(range(4), repeat=4)), np.int32)
    both, step = [], jax.jit(jax.vmap(env.step, (0, 0, None)))
    for state, obs in both_goals(env):
        total = np.zeros(len(policies))
        states = jax.tree.map(lambda x: np.broadcast_to(x, (len(policies), *np.shape(x))), state)
        shown = np.broadcast_to(obs, (len(policies), 4))
        for _ in range(3):
            # The cues come before what else is seen at the first step.
            action = policies[np.arange(len(policies)), shown.argmax(1)]
            states, out = step(states, action, jax.random.key(0))
            shown, total = np.asarray(out.obs), total + np.asarray(out.reward)
        both.append(total)
    assert np.mean(both, axis=0).max() == 1 / 2


def both_goals(env: Env) -> list[tuple[Any, np.ndarray]]:
    """Return a start `(state, observation)` with the goal up, and one with the goal down."""
    reset = jax.jit(env.reset)
    starts = [reset(jax.random.key(seed)) for seed in range(20)]
    return [next((s, np.asarray(obs)) for s, obs in starts if np.asarray(obs)[cue] == 1) for cue in (0, 1)]


# --- what is shown ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "cue"),
    [
        ("Recall", {"length": 4, "symbols": 3}, 1),
        ("Copy", {"length": 3, "symbols": 2, "wait": 2}, 3),
        ("TMaze", {"length": 4}, 1),
    ],
)
def test_episodes_with_different_cues_look_alike_after_them(name: str, params: Any, cue: int) -> None:
    env = make_env(f"memory:{name}", **params)
    assert env.spec.time_limit is not None
    step = jax.jit(jax.vmap(env.step))
    states, obs = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
    seen = [np.asarray(obs)]
    for at in range(env.spec.time_limit):
        action = np.full(64, RIGHT % env.spec.action_space.n, np.int32)
        states, out = step(states, action, jax.random.split(jax.random.key(at), 64))
        seen.append(np.asarray(out.obs))
    kinds = [len(np.unique(shown, axis=0)) for shown in seen]
    assert min(kinds[:cue]) > 1
    assert set(kinds[cue:]) == {1}


def test_a_question_is_asked_when_it_is_due() -> None:
    def flags(name: str, **params: Any) -> list[float]:
        env = make_env(f"memory:{name}", **params)
        assert env.spec.time_limit is not None
        step, (state, obs) = jax.jit(env.step), jax.jit(env.reset)(jax.random.key(0))
        found = [float(np.asarray(obs)[-1])]
        for at in range(env.spec.time_limit - 1):
            state, out = step(state, 0, jax.random.key(at))
            found.append(float(np.asarray(out.obs)[-1]))
        return found

    assert flags("Recall", length=3) == [0, 0, 0, 0, 1]
    assert flags("Copy", length=2, wait=1) == [0, 0, 0, 1, 1]
    assert flags("Count", length=3) == flags("Parity", length=3) == flags("NoisyCue", length=3) == [0, 0, 1]


def test_the_maze_pays_by_hand() -> None:
    env = make_env("memory:TMaze", length=4)
    goals, step = both_goals(env), jax.jit(env.step)

    def paid(cue: int, *actions: int) -> list[float]:
        state, _ = goals[cue]
        rewards = []
        for action in actions:
            state, out = step(state, action, jax.random.key(0))
            rewards.append(float(out.reward))
        assert bool(out.terminated)
        return rewards

    up, down = 0, 1
    assert paid(up, RIGHT, RIGHT, RIGHT, RIGHT, UP) == [0, 0, 0, 0, 1]
    assert paid(up, RIGHT, RIGHT, RIGHT, RIGHT, DOWN) == [0, 0, 0, 0, 0]
    assert paid(down, RIGHT, RIGHT, RIGHT, RIGHT, DOWN) == [0, 0, 0, 0, 1]
    assert paid(down, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT) == [0, 0, 0, 0, 0]
    # One step lost, at the wall of the corridor, is never made up for: the agent only just comes to the junction.
    assert paid(up, RIGHT, UP, RIGHT, RIGHT, RIGHT) == [0, -0.25, -0.25, -0.25, 0]
    assert paid(up, RIGHT, RIGHT, LEFT, RIGHT, UP) == [0, 0, -0.25, -0.25, 0]
    assert paid(up, LEFT, LEFT, LEFT, LEFT, LEFT) == [-0.25] * 4 + [0]


# --- as an environment --------------------------------------------------------------------------------------------


@pytest.mark.every_day("memory:Copy")
@pytest.mark.parametrize("name", names())
def test_every_task_passes_the_check(name: str) -> None:
    assert checked(make_env(name)) == []


@pytest.mark.parametrize("name", names())
def test_every_task_has_the_length_that_is_stated(name: str) -> None:
    env = make_env(name)
    assert (env.spec.name, env.spec.time_limit) == (name, DEFAULT_STEPS[name])
    assert env.settings == {"env": name, "env_args": {}}


def test_the_time_that_is_left_can_be_shown() -> None:
    env = make_env("memory:Recall", length=2, wrap="time")
    step, (state, obs) = jax.jit(env.step), jax.jit(env.reset)(jax.random.key(0))
    left = [float(np.asarray(obs["time"])[0])]
    for at in range(4):
        state, out = step(state, 0, jax.random.key(at))
        left.append(float(np.asarray(out.obs["time"])[0]))
    assert left == [1, 0.75, 0.5, 0.25, 0]
    assert bool(out.terminated)


def documented() -> dict[str, list[str]]:
    """Return the cells of the documentation's table, by the name of the task."""
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `memory:")]
    return {name.strip(" `"): [cell.strip() for cell in cells] for name, *cells in rows}


def test_the_documentation_tells_the_returns_of_the_closed_forms() -> None:
    numbers = {name: tuple(cell.rpartition(" ")[2] for cell in cells[-2:]) for name, cells in documented().items()}
    assert numbers == {
        "memory:Recall": ("1", "0.250"),
        "memory:Copy": ("1", "0.250"),
        "memory:Count": ("1", f"{comb(19, 9) / 2**19:.3f}"),
        "memory:Parity": ("1", "0.500"),
        "memory:TMaze": ("1", "0.500"),
        "memory:NoisyCue": (f"{normal(sqrt(20) / 2):.3f}", f"{normal(1 / 2):.3f}"),
    }


@pytest.mark.parametrize("name", names())
def test_the_documentation_tells_the_arguments_and_their_defaults(name: str) -> None:
    told = dict(pair.split() for pair in re.findall(r"`(.+?)`", documented()[name][0]))
    known = inspect.signature(TASKS[name.removeprefix("memory:")]).parameters
    assert told == {word: f"{parameter.default:g}" for word, parameter in known.items()}
