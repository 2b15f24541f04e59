"""A trained policy, ready to be called."""

import copy
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxrl import spaces
from jaxrl.errors import SettingsError, error_text
from jaxrl.masks import PRIVILEGED, fill_privileged, has_entry
from jaxrl.parsing import format_repr
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl.strategies.base import Policy
from jaxrl.training.storage.leaves import state_digest
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Step
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.equations import find_dependencies, read


class GreedyPolicy:
    """Call it with an observation, or a batch `[N, ...]` of them; it returns the action, or `[N, ...]` of them.

    Discrete observations and actions are elements of the environment's spaces, which may start at other numbers than 0.

    A policy that remembers (stacked frames) takes the calls as one episode; `reset()` begins the next. One that does
    not may also be called inside `jax.jit`, `jax.vmap` and the like.
    """

    def __init__(self, policy: Policy, params: PyTree, facts: dict[str, Any] | None = None) -> None:
        self.policy, self.params = policy, params
        self.facts = facts or {}
        """Facts saved with it: `score`, `opt_steps`, `env_steps`."""
        # The same functions for all policies made by `at`, so nothing is compiled again.
        self._begin, self._follow = jax.jit(partial(begin, policy)), jax.jit(partial(follow, policy))
        self._outputs: dict[str, Any] = {}
        self._opt_steps = np.uint32(self.facts.get("opt_steps") or 0)
        self._remembers: bool | None = None
        self.reset()

    def __repr__(self) -> str:
        score, steps = self.facts.get("score"), self.facts.get("opt_steps")
        known = None if score is None else f"score {score:.6g}"
        return format_repr(
            "GreedyPolicy", self.policy.spec.name, known, None if steps is None else f"optimisation step {steps:,}"
        )

    @property
    def sha256(self) -> str:
        """The SHA-256 of its parameters and of the settings of agent and processor; equal policies have the same."""
        settings = self.facts.get("settings") or {}
        decisive = {name: settings.get(name) for name in ("algo", "agent", "processor")}
        words = json.dumps([decisive, int(self._opt_steps)], sort_keys=True, default=str)
        return hashlib.sha256(f"{state_digest(self.params)} {words}".encode()).hexdigest()

    def at(self, params: PyTree, **facts: Any) -> "GreedyPolicy":
        """Return the same policy with other `params` and changed `facts`, at the beginning of an episode.

        Nothing is compiled again.
        """
        # The compiled functions are shared; the memory of the episode is not.
        other = copy.copy(self)
        other.params, other.facts = params, {**self.facts, **facts}
        other._opt_steps = np.uint32(other.facts.get("opt_steps") or 0)
        other.reset()
        return other

    def reset(self) -> None:
        """Begin a new episode."""
        self._memory: Any = None

    def __call__(self, obs: PyTree, *, key: Key | None = None) -> Any:
        """Return the greedy action, or with a `key`, which is consumed, one chosen as in training.

        Policies with a distribution draw from it; others explore as at the optimisation step at which they were saved.

        Raises:
          SettingsError: the policy remembers, and is called inside `jax.jit` or the like; or it cannot sample.
        """
        if key is not None and self.policy.sample is None:
            raise SettingsError("the policy was made by hand without a way to sample; leave the key out")
        drawn = () if key is None else (key, self._opt_steps)
        batch, rows, single = self._batch(obs)
        # Another number of rows cannot be the same episodes: they begin anew.
        if self._memory is None or self._memory[0] != rows:
            carry, action = self._begin(self.params, batch, *drawn)
        else:
            carry, action = self._follow(self.params, *self._memory[1:], batch, *drawn)
        # Inside of a trace nothing can be remembered from call to call, so the policy must not need it.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(action)):
            self._require_no_memory(batch)
        else:
            self._memory = (rows, carry, action)
        action = spaces.to_elements(self.policy.spec.action_space, action)
        return jax.tree.map(lambda x: x[0], action) if single else action

    def probabilities(self, obs: PyTree) -> Any:
        """Return the probability of each discrete action at `obs`, `[A]`, or `[N, A]` of a batch, the first one first.

        `policy(obs, key=...)` acts with these probabilities: those of the policy's distribution, or, with action
        values, of exploration at the optimisation step of the save. Actions of several numbers have a tuple of such
        arrays, one for each; a dict or tuple of actions has such a dict or tuple, with `None` for continuous parts.
        With memory, `obs` is taken as the next observation of the episode, and the memory is not advanced: query
        before acting.

        Raises:
          SettingsError: actions are continuous, or the agent has no probabilities.
        """
        return self._ask("probabilities", obs)

    def log_prob(self, obs: PyTree, action: PyTree) -> Any:
        """Return the log-probability of `action` at `obs`, a number, or `[N]` of a batch; as for `probabilities`.

        Of continuous actions it is the log-density, per unit of the action space. Where actions are clipped to bounds,
        it is the density before clipping; where `tanh` maps between them, an action at a bound counts as just inside.

        Raises:
          SettingsError: the agent has none, or `action` is no action of this environment.
        """
        return self._ask("log_prob", obs, action)

    def values(self, obs: PyTree, action: PyTree | None = None) -> Any:
        """Return what the agent expects of `obs`: the discounted sum of rewards, as they were learnt from.

        Agents with values of discrete actions (DQN, SAC, ...) return them all, `[A]` or `[N, A]` of a batch, and minus
        infinity for what a mask forbids; with critics of continuous actions (SAC, TD3, ...) it is that of the greedy
        action, a number or `[N]`. With `action`, it is that of the action given. Policy gradients (PPO, ...) return the
        value of the observation, and so does IQL where no `action` is given, which learns both. Of several critics it
        is the lowest, or the mean for agents whose policy improves the mean (REDQ, DroQ, TQC, FastSAC). As for
        `probabilities`, nothing is remembered.

        Raises:
          SettingsError: the agent has no values, its critics were not kept, the privileged state that they see was
            left out of `obs`, or `action` is no action of this environment.
        """
        struct = spaces.space_struct(self.policy.spec.observation_space)
        outputs = self.policy.outputs
        if (
            outputs is not None
            and outputs.privileged
            and has_entry(struct, PRIVILEGED)
            and not has_entry(obs, PRIVILEGED)
        ):
            raise SettingsError(f"the observation has no {PRIVILEGED}, which values are made of; add it")
        return self._ask("values", obs, action)

    def _ask(self, what: str, obs: PyTree, action: PyTree | None = None) -> Any:
        """Return what `PolicyOutputs` of this name says at `obs`, as though it came after the calls before."""
        outputs = self.policy.outputs
        if outputs is None:
            raise SettingsError(f"the policy was made by hand, and has no {what}")
        batch, rows, single = self._batch(obs)
        given: PyTree = () if action is None else self._actions(action, rows, single)
        if what not in self._outputs:
            self._outputs[what] = jax.jit(partial(_query, self.policy, getattr(outputs, what)))
        before = () if self._memory is None or self._memory[0] != rows else self._memory[1:]
        answer = self._outputs[what](self.params, batch, before, self._opt_steps, given)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(answer)):
            self._require_no_memory(batch)
        return jax.tree.map(lambda x: x[0], answer) if single else answer

    def _batch(self, obs: PyTree) -> tuple[PyTree, int, bool]:
        """Return `obs` as a batch, its rows, and whether it was a single observation."""
        space = self.policy.spec.observation_space
        struct = spaces.space_struct(space)
        obs = spaces.to_indices(space, _as_observation(self.policy.spec.name, space, obs))
        # One axis more than the space has is that of a batch.
        single = jnp.ndim(jax.tree.leaves(obs)[0]) == len(jax.tree.leaves(struct)[0].shape)
        batch = jax.tree.map(lambda x: x[None], obs) if single else obs
        return batch, jax.tree.leaves(batch)[0].shape[0], single

    def _actions(self, action: PyTree, rows: int, single: bool) -> PyTree:
        """Return `action`, one for each row; raise `SettingsError` if they are others."""
        space, name = self.policy.spec.action_space, self.policy.spec.name
        arrays = _as_arrays("action", name, space, action)
        struct = spaces.space_struct(space)
        wanted = jax.tree.map(lambda like: like.shape if single else (rows, *like.shape), struct)
        came = jax.tree.map(jnp.shape, arrays)
        if came != wanted:
            raise SettingsError(f"the action has shape {came}; expected {wanted}, one for each observation of {name}")
        arrays = spaces.to_indices(space, arrays)
        return jax.tree.map(lambda x: x[None], arrays) if single else arrays

    def _require_no_memory(self, batch: PyTree) -> None:
        """Raise `SettingsError` if the action for `batch` `[N, ...]` may depend on the calls before."""
        if self._remembers is None:
            given = jax.tree.map(jnp.asarray, (self.params, batch))
            self._remembers = bool(memory_leaves(self.policy, *given))
        if self._remembers:
            raise SettingsError(
                "the policy remembers its episode, and a call inside jax.jit cannot change what it remembers; call it "
                "outside, or carry its memory yourself by policy.policy.begin, act and observe"
            )


def _query(
    policy: Policy, look: Any, params: PyTree, obs: PyTree, before: PyTree, opt_step: Array, action: PyTree
) -> PyTree:
    """Return what `look` says at `obs` `[N, ...]`, after what was remembered and done `before`, if anything was."""
    carry = _observe(policy, params, before[0], before[1], obs) if before else policy.begin(params, obs)
    return look(params, carry, opt_step, action)


def memory_leaves(policy: Policy, params: PyTree, obs: PyTree) -> list[int]:
    """Return which leaves of `(carry, action)`, what `policy` remembers and did, affect its actions, now or later.

    `obs` `[N, ...]` may be shapes: the traced program of a step decides.
    """
    memory = jax.eval_shape(partial(begin, policy), params, obs)
    traced = jax.make_jaxpr(lambda params, obs, memory: follow(policy, params, *memory, obs))(params, obs, memory)
    count, actions = len(jax.tree.leaves(memory)), len(jax.tree.leaves(memory[1]))
    return with_fallback(
        "what a policy remembers", lambda: _deciding(traced, count, actions), lambda: list(range(count))
    )


def _deciding(traced: Any, memory: int, actions: int) -> list[int]:
    """Return which of the last `memory` inputs affect the last `actions` of the outputs, now or later."""
    code = read(traced)
    inputs = code.ins[-memory:]
    wanted = set(range(memory - actions, memory))
    while True:
        # Whatever affects a kept part of the memory must be kept as well.
        needed = find_dependencies(code, [code.outs[i] for i in wanted])
        found = {i for i, number in enumerate(inputs) if number in needed}
        if found <= wanted:
            return sorted(found)
        wanted |= found


def _as_observation(env: str, space: Space, obs: PyTree) -> PyTree:
    """Return `obs`, one or a batch, as arrays; raise `SettingsError` if it does not fit the `space` of `env`."""
    struct = spaces.space_struct(space)
    arrays = _as_arrays("observation", env, space, fill_privileged(space, obs))
    arrays = jax.tree.map(lambda like, x: spaces.match_image_layout(x, like.shape), struct, arrays)
    pairs = list(zip(jax.tree.leaves(struct), jax.tree.leaves(arrays), strict=True))
    for like, x in pairs:
        if x.shape != like.shape and x.shape[1:] != like.shape:
            raise SettingsError(
                f"the observation has shape {list(x.shape)}; {env} has {list(like.shape)}, "
                f"or {['N', *like.shape]} of a batch".replace("'", "")
            )
    if len({x.shape[: x.ndim - len(like.shape)] for like, x in pairs}) > 1:
        parts = jax.tree.leaves_with_path(arrays)
        raise SettingsError(
            f"the observation of {env} has parts {', '.join(f'{keystr(path)} {list(x.shape)}' for path, x in parts)}; "
            "expected one observation, or a batch of the same N in every part"
        )
    return arrays


def _as_arrays(what: str, env: str, space: Space, given: PyTree) -> PyTree:
    """Return `given`, the `what` of `env`, as arrays in the dtypes of `space`.

    Raises:
      SettingsError: it has other parts than `space`, or numbers that no element of a discrete one has.
    """
    try:
        return jax.tree_util.tree_map_with_path(_as_array, space, _arrange(space, given), is_leaf=spaces.is_leaf)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingsError(f"the {what} does not match {env}: {error_text(error)}") from error


def _as_array(path: Any, space: Box | Discrete | MultiDiscrete, x: Any) -> Array:
    what, array = keystr(path) or "it", x if isinstance(x, jax.Array) else np.asarray(x)
    # Values inside of a trace are unknown. Other shapes are refused by the callers, of all parts together.
    known = not isinstance(x, jax.core.Tracer) and array.shape[array.ndim - len(space.shape) :] == space.shape
    if known and not isinstance(space, Box) and not _in_space(space, np.asarray(array)):
        raise SettingsError(
            f"{what} is {spaces.short_repr(np.asarray(array).tolist())}; expected whole numbers of {space}"
        )
    return jnp.asarray(
        array if isinstance(array, jax.Array) else spaces.to_dtype(what, array, space.dtype), space.dtype
    )


def _in_space(space: Discrete | MultiDiscrete, array: np.ndarray) -> bool:
    """Return whether `array` `[..., *shape]` holds whole numbers of `space` alone, and as integers if they are due."""
    integers = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer)
    if not (integers or jnp.issubdtype(space.dtype, jnp.floating)):
        return array.size == 0
    start = np.asarray(space.start)
    return bool(np.all((array >= start) & (array < start + np.asarray(space.n)) & (array == np.floor(array))))


def _arrange(space: Space, given: PyTree, at: str = "") -> PyTree:
    """Return `given`, the part `at` a path, in the dicts and tuples of `space`; tuples may be lists, or have names.

    Raises:
      ValueError: it has other parts, named here.
    """
    if isinstance(space, Box | Discrete | MultiDiscrete):
        if isinstance(given, Mapping):
            raise ValueError(f"{at or 'it'} is {_kind(given)}, not an array")
        return given
    if isinstance(space, Mapping):
        if not isinstance(given, Mapping):
            raise ValueError(f"{at or 'it'} is {_kind(given)}, not a dict of {', '.join(space)}")
        where = f" in {at}" if at else ""
        odd = {"missing entries": space.keys() - given.keys(), "unexpected": given.keys() - space.keys()}
        if any(odd.values()):
            raise ValueError(
                "; ".join(f"{what}{where} {', '.join(sorted(map(str, x)))}" for what, x in odd.items() if x)
            )
        return {name: _arrange(part, given[name], f"{at}[{name!r}]") for name, part in space.items()}
    if not isinstance(given, tuple | list) or len(given) != len(space):
        raise ValueError(f"{at or 'it'} is {_kind(given)}, not a tuple of {len(space)}")
    parts = [_arrange(part, x, f"{at}[{i!r}]") for i, (part, x) in enumerate(zip(space, given, strict=True))]
    return type(space)(*parts) if hasattr(space, "_fields") else tuple(parts)


def _kind(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"a dict of {', '.join(map(str, given))}"
    if isinstance(given, tuple | list):
        return f"a {type(given).__name__} of {len(given)}"
    return f"an array {list(jnp.shape(given))}" if isinstance(given, np.ndarray | jax.Array) else type(given).__name__


def begin(policy: Policy, params: PyTree, obs: PyTree, *drawn: Any) -> tuple[PyTree, PyTree]:
    """Return memory and actions of the policy at the first observations of `N` episodes, `obs` `[N, ...]`."""
    return _choose(policy, params, policy.begin(params, obs), *drawn)


def follow(
    policy: Policy, params: PyTree, carry: PyTree, action: PyTree, obs: PyTree, *drawn: Any
) -> tuple[PyTree, PyTree]:
    """Return memory and actions at the next observations, from the memory and actions before."""
    return _choose(policy, params, _observe(policy, params, carry, action, obs), *drawn)


def _observe(policy: Policy, params: PyTree, carry: PyTree, action: PyTree, obs: PyTree) -> PyTree:
    """Return the memory after `action` has led to `obs`."""
    zeros = jnp.zeros(jax.tree.leaves(obs)[0].shape[0], jnp.float32)
    return policy.observe(params, carry, Step(action, (), zeros, zeros > 0, zeros > 0, final_obs=obs, obs=obs))


def _choose(policy: Policy, params: PyTree, carry: PyTree, *drawn: Any) -> tuple[PyTree, PyTree]:
    """Choose greedily, or with a key and an optimisation step `drawn` as in training."""
    if not drawn:
        return policy.act(params, carry)
    assert policy.sample is not None
    return policy.sample(params, carry, *drawn)


def spec_facts(policy: Policy | None) -> dict[str, Any] | None:
    """Return the spaces that `policy` acts in, for JSON."""
    return None if policy is None else spaces.spec_to_plain(policy.spec)
