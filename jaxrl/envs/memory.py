"""Tasks that require memory, with best returns in closed form: `memory:Recall` and others.

Without a memory, an agent chooses by the current observation alone; the difference between the best returns with and
without one is the value of remembering. Every episode has the same number of steps, which is also the time limit, and
terminates with the last one, after which nothing is shown. Actions are discrete; observations are small float32
vectors.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import check_id, check_int, check_params
from jaxrl.errors import check_between
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree

PREFIX = "memory:"
"""Prefix of the names of the tasks, as in `memory:TMaze`."""
MOST = 100_000
"""Largest `length`, `wait` and `symbols`."""
UP, RIGHT, DOWN, LEFT = range(4)
"""Actions of `memory:TMaze`."""


def memory_env(name: str, **params: Any) -> Env:
    """Return the task `name` (with or without `memory:`), one of `TASKS`, with `params` in place of its defaults.

    Raises:
      SettingsError: the name or a parameter is unknown, or a parameter is out of range.
    """
    id_ = check_id(PREFIX, name, TASKS)
    name, task = PREFIX + id_, TASKS[id_]
    check_params(name, params, inspect.signature(task).parameters)
    return task(**params)._replace(settings={"env": name, "env_args": dict(params)})


def names() -> list[str]:
    """Return the names of all tasks, with their prefix."""
    return [PREFIX + id_ for id_ in TASKS]


# --- what all tasks share -----------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """State of a task."""

    hidden: PyTree
    """Hidden variables that determine the correct actions."""
    at: Array
    """Int32, steps taken in this episode."""


class Rules(NamedTuple):
    """A task by its rules. `at` is the number of steps taken so far, int32."""

    steps: int
    """Length of every episode."""
    begin: Callable[[Key], PyTree]
    """`key -> hidden`; the key is consumed."""
    show: Callable[[PyTree, Array, Key], tuple[PyTree, Array]]
    """`(hidden, at, key) -> (hidden, observation)`; the key is consumed."""
    act: Callable[[PyTree, Array, Array], tuple[PyTree, Array]]
    """`(hidden, at, action) -> (hidden, reward)`."""


def _make_env(id_: str, observations: Box, actions: int, rules: Rules) -> Env:
    spec = EnvSpec(PREFIX + id_, observations, Discrete(actions), time_limit=rules.steps)
    return Env(spec, partial(_reset, rules), partial(_step, rules), fixed_length=True)


def _reset(rules: Rules, key: Key) -> tuple[Trial, Array]:
    begin_key, show_key = jax.random.split(key)
    hidden, obs = rules.show(rules.begin(begin_key), jnp.int32(0), show_key)
    return Trial(hidden, jnp.int32(0)), obs


def _step(rules: Rules, state: Trial, action: Array, key: Key) -> tuple[Trial, TimeStep]:
    hidden, reward = rules.act(state.hidden, state.at, action)
    at = state.at + 1
    hidden, obs = rules.show(hidden, at, key)
    over = at == rules.steps
    return Trial(hidden, at), TimeStep(jnp.where(over, 0.0, obs), reward, over)


def _check_steps(id_: str, word: str, value: Any, least: int = 1) -> int:
    return check_int(f"{PREFIX}{id_}: {word}", value, least, MOST)


def _with_flag(values: Array, flag: Array) -> Array:
    """Return float32 `[D + 1]`: `values` `[D]` and a flag."""
    return jnp.concatenate([values, flag[None]]).astype(jnp.float32)


def _show_symbol(symbol: Array, symbols: int, shown: Array) -> Array:
    """Return `symbol` one-hot if it is `shown`, and zeros otherwise; float32 `[symbols]`."""
    return jnp.where(shown, jax.nn.one_hot(symbol, symbols), 0.0)


# --- the tasks ----------------------------------------------------------------------------------------------------


def recall(length: int = 10, symbols: int = 4) -> Env:
    """Show a symbol at the first step, and ask for it after `length` blank ones: 1 for the right answer, else 0.

    Observations are `[symbols + 1]`: the symbol one-hot, and whether it is asked for. An episode has `length + 2`
    steps. Symbols are equally likely.

    The best return is 1; without a memory it is `1 / symbols`.

    Raises:
      SettingsError: `length` is below 1 or `symbols` below 2, or one of them is above 100 000.
    """
    length, symbols = _check_steps("Recall", "length", length), _check_steps("Recall", "symbols", symbols, 2)

    def begin(key: Key) -> Array:
        return jax.random.randint(key, (), 0, symbols)

    def show(symbol: Array, at: Array, key: Key) -> tuple[Array, Array]:
        return symbol, _with_flag(_show_symbol(symbol, symbols, at == 0), at == length + 1)

    def act(symbol: Array, at: Array, action: Array) -> tuple[Array, Array]:
        return symbol, jnp.where((at == length + 1) & (action == symbol), 1.0, 0.0)

    return _make_env("Recall", Box(0.0, 1.0, (symbols + 1,)), symbols, Rules(length + 2, begin, show, act))


def copy(length: int = 5, symbols: int = 4, wait: int = 5) -> Env:
    """Show `length` symbols, then `wait` blank steps, and ask for all in order: `1 / length` for each right answer.

    Observations are `[symbols + 1]`: the symbol one-hot, and whether an answer is asked for. An episode has
    `2 * length + wait` steps. Symbols are independent and equally likely; which of them is asked for must be counted.

    The best return is 1; without a memory it is `1 / symbols`.

    Raises:
      SettingsError: `length` is below 1, `symbols` below 2 or `wait` below 0, or one of them is above 100 000.
    """
    length, symbols = _check_steps("Copy", "length", length), _check_steps("Copy", "symbols", symbols, 2)
    asked_from = length + _check_steps("Copy", "wait", wait, 0)

    def begin(key: Key) -> Array:
        return jax.random.randint(key, (length,), 0, symbols)

    def show(word: Array, at: Array, key: Key) -> tuple[Array, Array]:
        symbol = word[jnp.minimum(at, length - 1)]
        return word, _with_flag(_show_symbol(symbol, symbols, at < length), at >= asked_from)

    def act(word: Array, at: Array, action: Array) -> tuple[Array, Array]:
        symbol = word[jnp.maximum(at - asked_from, 0)]
        return word, jnp.where((at >= asked_from) & (action == symbol), 1 / length, 0.0)

    return _make_env("Copy", Box(0.0, 1.0, (symbols + 1,)), symbols, Rules(asked_from + length, begin, show, act))


def count(length: int = 20) -> Env:
    """Toss a fair coin at each of `length` steps, and ask at the last how many ones there were: 1 if exact, else 0.

    Observations are `[2]`: the coin, 0 or 1, and whether the answer is asked for, which is so with the last coin. The
    action is the number of ones, 0 to `length`.

    The best return is 1. Without a memory only the last coin is known. The other `n = length - 1` are binomial, and
    their most likely number, `n // 2`, has the probability `comb(n, n // 2) / 2**n`: 0.176 for 20 steps.

    Raises:
      SettingsError: `length` is below 2 or above 100 000.
    """
    length = _check_steps("Count", "length", length, 2)
    return _toss_coins("Count", length, length + 1, lambda ones: ones)


def parity(length: int = 20) -> Env:
    """Toss a fair coin at each of `length` steps, and ask at the last if the number of ones is odd: 1 if right, else 0.

    Observations are those of `memory:Count`. Action 1 answers odd, 0 even.

    The best return is 1; without a memory it is 1/2, because the last coin alone does not determine the parity.

    Raises:
      SettingsError: `length` is below 2 or above 100 000.
    """
    return _toss_coins("Parity", _check_steps("Parity", "length", length, 2), 2, lambda ones: ones % 2)


def _toss_coins(id_: str, length: int, actions: int, answer: Callable[[Array], Array]) -> Env:
    """Return the task of answering `answer` of the number of ones among `length` fair coins."""

    def begin(key: Key) -> Array:
        return jnp.int32(0)

    def show(ones: Array, at: Array, key: Key) -> tuple[Array, Array]:
        coin = jax.random.bernoulli(key).astype(jnp.int32)
        return ones + coin, _with_flag(coin[None], at == length - 1)

    def act(ones: Array, at: Array, action: Array) -> tuple[Array, Array]:
        return ones, jnp.where((at == length - 1) & (action == answer(ones)), 1.0, 0.0)

    return _make_env(id_, Box(0.0, 1.0, (2,)), actions, Rules(length, begin, show, act))


def t_maze(length: int = 10) -> Env:
    """Show at the start which arm of a T-maze holds the goal; the arms are `length` steps to the east.

    This is the T-maze of Bakker (2001) in the passive form of Ni et al. (2023, https://arxiv.org/abs/2307.03864,
    section 4): an episode has exactly `length + 1` steps, so that none may be lost. Actions are 0 up, 1 right, 2 down
    and 3 left; a move into a wall stays. Each step but the last costs `1 / length` if the agent is behind, further west
    than it could be, which guides exploration. The last pays 1 in the arm of the goal; the other arm pays 0.

    Observations are `[4]`: goal up and goal down, at the first step only, in the corridor, and at the junction.

    The best return is 1. Without a memory it is 1/2: always to the east, then into either arm.

    Raises:
      SettingsError: `length` is below 1 or above 100 000.
    """
    length = _check_steps("TMaze", "length", length)

    def begin(key: Key) -> tuple[Array, Array]:
        up = jax.random.bernoulli(key)
        return jnp.where(up, jnp.int32(UP), jnp.int32(DOWN)), jnp.int32(0)

    def show(maze: tuple[Array, Array], at: Array, key: Key) -> tuple[tuple[Array, Array], Array]:
        goal, place = maze
        start, junction = at == 0, place == length
        return maze, jnp.stack([start & (goal == UP), start & (goal == DOWN), ~junction, junction]).astype(jnp.float32)

    def act(maze: tuple[Array, Array], at: Array, action: Array) -> tuple[tuple[Array, Array], Array]:
        goal, place = maze
        # Only the last step can begin at the junction, so an agent in an arm never moves again.
        found = (place == length) & (action == goal)
        east = jnp.where(action == RIGHT, 1, 0) - jnp.where(action == LEFT, 1, 0)
        place = jnp.clip(place + east, 0, length)
        late = jnp.where(place < at + 1, -1 / length, 0.0)
        return (goal, place), jnp.where(at == length, found.astype(jnp.float32), late)

    return _make_env("TMaze", Box(0.0, 1.0, (4,)), 4, Rules(length + 1, begin, show, act))


def noisy_cue(length: int = 20, noise: float = 2.0) -> Env:
    """Show a hidden sign, -1 or 1, with new Gaussian noise at each of `length` steps, and ask for it at the last.

    Observations are `[2]`: the sign plus noise of standard deviation `noise`, and whether the answer is asked for,
    which is so with the last of them. Action 1 answers 1, action 0 answers -1; the right one pays 1, else 0.

    With `Phi` the normal distribution function, the best return is `Phi(sqrt(length) / noise)`, by the sign of the sum
    of all that was shown: 0.987 by default. Without a memory, by the sign of the last, it is `Phi(1 / noise)`: 0.691.

    Raises:
      SettingsError: `length` is below 2 or above 100 000, or `noise` is not from 0 to 1000.
    """
    length = _check_steps("NoisyCue", "length", length, 2)
    noise = check_between(f"{PREFIX}NoisyCue: noise", noise, 0.0, 1000.0)

    def begin(key: Key) -> Array:
        return jax.random.bernoulli(key).astype(jnp.int32)

    def show(answer: Array, at: Array, key: Key) -> tuple[Array, Array]:
        cue = 2.0 * answer - 1.0 + noise * jax.random.normal(key, (), jnp.float32)
        return answer, _with_flag(cue[None], at == length - 1)

    def act(answer: Array, at: Array, action: Array) -> tuple[Array, Array]:
        return answer, jnp.where((at == length - 1) & (action == answer), 1.0, 0.0)

    space = Box((-np.inf, 0.0), (np.inf, 1.0), (2,))
    return _make_env("NoisyCue", space, 2, Rules(length, begin, show, act))


TASKS: dict[str, Callable[..., Env]] = {
    "Recall": recall,
    "Copy": copy,
    "Count": count,
    "Parity": parity,
    "TMaze": t_maze,
    "NoisyCue": noisy_cue,
}
"""Functions that make the tasks, by name."""
