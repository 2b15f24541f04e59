"""Special entries of observations: masks of allowed actions, and privileged state for critics.

A dict observation may have the entries `action_mask`, true for each allowed action, and `privileged_state`. No network
sees the mask; policies, and action values that act as policies, do not see the privileged state. The space determines
which entries exist, so programs without them do no extra work.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, is_leaf, sample_space, space_struct, to_elements
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import RecurrentObs
from jaxrl.xla.reductions import argmax

MASK = "action_mask"
"""Entry for allowed actions: `[n]` for `Discrete(n)`; `[n1 + n2 + ...]` for `MultiDiscrete`, or `[k, n]` if all `k`
entries have the same `n`. Of a dict or tuple of actions it is a dict or tuple too, see `masks_of_parts`."""
PRIVILEGED = "privileged_state"
"""Entry that only critics see."""

# --- views of observations --------------------------------------------------------------------------------------


def for_policy(tree: PyTree) -> PyTree:
    """Return the policy's view of an observation or its space: without mask and privileged state."""
    return _drop_entries(tree, MASK, PRIVILEGED)


def for_critic(tree: PyTree) -> PyTree:
    """Return the critic's view of an observation or its space: without mask."""
    return _drop_entries(tree, MASK)


def _drop_entries(tree: PyTree, *names: str) -> PyTree:
    if isinstance(tree, RecurrentObs):
        return tree._replace(obs=_drop_entries(tree.obs, *names))
    if not any(has_entry(tree, name) for name in names):
        return tree
    return {name: part for name, part in tree.items() if name not in names}


def has_entry(tree: PyTree, name: str) -> bool:
    """Return whether an observation or its space has the entry `name`."""
    return isinstance(tree, Mapping) and name in tree


def view_spec(spec: EnvSpec, view: Callable[[PyTree], PyTree]) -> EnvSpec:
    """Return `spec` with its observation space mapped by `view`: `for_policy` or `for_critic`."""
    return spec._replace(observation_space=view(spec.observation_space))


def zero_privileged(obs: PyTree) -> PyTree:
    """Return `obs` with the privileged state set to zeros."""
    return {**obs, PRIVILEGED: jax.tree.map(jnp.zeros_like, obs[PRIVILEGED])}


def fill_privileged(space: Space, obs: PyTree) -> PyTree:
    """Add a privileged state to observations of `space` without one, single or batched, for acting outside training.

    Networks see it as zeros.
    """
    struct = space_struct(space)
    if not (has_entry(struct, PRIVILEGED) and isinstance(obs, Mapping)) or PRIVILEGED in obs:
        return obs
    name = next((name for name in for_critic(struct) if name in obs), None)
    first, parts = cast(Any, jax.tree.flatten(struct.get(name)))
    if not first or name is None:
        return obs
    try:
        given = np.shape(parts.flatten_up_to(obs[name])[0])  # a list is one array
    except ValueError:
        return obs  # another structure; the error is raised where it is read
    batch = given[: len(given) - len(first[0].shape)]
    zeros = jax.tree.map(lambda x: np.zeros((*batch, *x.shape), x.dtype), struct[PRIVILEGED])
    return {**obs, PRIVILEGED: to_elements(cast(Any, space)[PRIVILEGED], zeros)}


def map_except_mask(function: Callable[..., Any], *trees: PyTree, **options: Any) -> PyTree:
    """Map `function` over leaves of observations or spaces, except the mask, which is that of the last tree."""
    mapped = jax.tree.map(function, *map(for_critic, trees), **options)
    return {**mapped, MASK: trees[-1][MASK]} if has_entry(trees[-1], MASK) else mapped


# --- masks ------------------------------------------------------------------------------------------------------


def check_observation_entries(spec: EnvSpec) -> None:
    """Raise `SettingsError` if the mask does not fit the actions, or observations have nothing for policies."""
    space: Any = spec.observation_space
    if not has_entry(space, MASK) and not has_entry(space, PRIVILEGED):
        return
    if not jax.tree.leaves(for_policy(space), is_leaf=is_leaf):
        raise SettingsError(
            f"observations of {spec.name} are {', '.join(space)}, none of which a policy sees; add an entry"
        )
    if has_entry(space, MASK):
        _check_masks(spec.name, spec.action_space, space[MASK])


def _check_masks(name: str, actions: Space, mask: Space, at: str = "") -> None:
    """Raise `SettingsError` unless `mask` fits the entry `at` of the actions of environment `name`."""
    if is_leaf(actions):
        _check_mask(name, actions, mask, at)
        return
    parts = _entries(actions)
    if isinstance(mask, Mapping) != isinstance(actions, Mapping) or not isinstance(mask, Mapping | tuple):
        kind = "dict" if isinstance(actions, Mapping) else "tuple"
        raise SettingsError(f"the {MASK}{at} of {name} is {mask}; expected a {kind} of masks, as its actions are")
    given = _entries(mask)
    if isinstance(actions, tuple) and len(given) != len(parts):
        raise SettingsError(
            f"the {MASK}{at} of {name} is a tuple of {len(given)}; expected {len(parts)}, as its actions have, with () "
            "for those without a mask"
        )
    if odd := [word for word in given if word not in parts]:
        raise SettingsError(
            f"the {MASK}{at} of {name} has an entry {odd[0]!r}, which its actions have not; leave it out"
        )
    for word, part in given.items():
        if not _is_empty(part):
            _check_masks(name, parts[word], part, f"{at}[{word!r}]")


def _entries(tree: Any) -> dict[Any, Any]:
    """Return the parts of a dict or tuple by name or number, in the order of `jax.tree.leaves`."""
    return {word: tree[word] for word in sorted(tree)} if isinstance(tree, Mapping) else dict(enumerate(tree))


def _is_empty(mask: Any) -> bool:
    return mask is None or (isinstance(mask, Mapping | tuple) and not mask)


def _check_mask(name: str, actions: Discrete | MultiDiscrete | Box, mask: Space, at: str) -> None:
    if isinstance(actions, Box):
        raise SettingsError(
            f"observations of {name} have an {MASK}{at}, but its actions{at} are Box; a mask is for Discrete and "
            "MultiDiscrete actions: leave it out"
        )
    sizes = action_sizes(actions)
    shapes = {(sum(sizes),)} | ({(len(sizes), sizes[0])} if actions.shape and len({*sizes}) == 1 else set())
    if isinstance(mask, Discrete) or not isinstance(mask, Box | MultiDiscrete) or mask.shape not in shapes:
        came = mask if isinstance(mask, Mapping | tuple) else list(mask.shape)
        raise SettingsError(
            f"the {MASK}{at} of {name} is {came}; expected {' or '.join(str(list(x)) for x in sorted(shapes))}, "
            "true for each allowed action"
        )
    if jnp.issubdtype(mask.dtype, jnp.floating):
        raise SettingsError(f"the {MASK}{at} of {name} is {mask.dtype}; expected bool")


def masks_of_parts(actions: PyTree, mask: PyTree, is_part: Callable[[Any], bool] = is_leaf) -> list[PyTree]:
    """Return the mask of each part of `actions`, a tree with leaves `is_part`, in the order of `jax.tree.leaves`.

    A dict of masks may leave entries out, and a tuple may have `()` for them; these parts have the mask `None`.
    """
    return list(_masks_of_parts(actions, mask, is_part))


def _masks_of_parts(actions: PyTree, mask: PyTree, is_part: Callable[[Any], bool]) -> Iterator[PyTree]:
    if is_part(actions):
        yield None if _is_empty(mask) else mask
        return
    given = {} if _is_empty(mask) else _entries(mask)
    for word, part in _entries(actions).items():
        yield from _masks_of_parts(part, given.get(word), is_part)


def action_sizes(space: Discrete | MultiDiscrete) -> tuple[int, ...]:
    """Return the number of choices for each entry of an action."""
    return (space.n,) if isinstance(space, Discrete) else tuple(space.n)


def get_mask(obs: PyTree, axes: int = 1) -> PyTree:
    """Return the mask of allowed actions, bool `[B, A]`, entries of a `MultiDiscrete` concatenated; `None` without one.

    Of a dict or tuple of actions it is a dict or tuple of such. `axes` is the number of leading axes; all are kept.
    """
    obs = obs.obs if isinstance(obs, RecurrentObs) else obs
    if not has_entry(obs, MASK):
        return None
    flat = lambda mask: mask.reshape(*mask.shape[:axes], -1).astype(bool)
    mask = obs[MASK]
    return jax.tree.map(flat, mask) if isinstance(mask, Mapping | tuple) else flat(jnp.asarray(mask))


def unmask_empty_rows(mask: Array) -> Array:
    """Allow all actions in rows of `mask` `[..., A]` that allow none."""
    return mask | ~mask.any(axis=-1, keepdims=True)


def entropy_share(mask: Array) -> Array:
    """Return the entropy of the uniform policy over what `mask` `[..., A]` allows, as a share of that over all `A`."""
    return jnp.log(unmask_empty_rows(mask).sum(axis=-1)) / math.log(mask.shape[-1])


def apply_mask(x: Array, mask: Array | None) -> Array:
    """Set values or logits `[..., A]` of forbidden actions to the smallest finite number.

    With infinity, probabilities and gradients could be NaN; with a finite number they are 0. Rows that allow nothing
    are unchanged.
    """
    return x if mask is None else jnp.where(unmask_empty_rows(mask), x, jnp.finfo(x.dtype).min)


def greedy_actions(space: Discrete | MultiDiscrete, scores: Array, mask: Array | None) -> Array:
    """Return the allowed actions `[N, ...]` with the highest `scores` `[N, A]`."""
    if isinstance(space, Discrete):
        return argmax(apply_mask(scores, mask)).astype(space.dtype)
    ends = np.cumsum(space.n)[:-1]
    masks = [None] * len(space.n) if mask is None else jnp.split(mask, ends, axis=-1)
    pairs = zip(jnp.split(scores, ends, axis=-1), masks, strict=True)
    return jnp.stack([argmax(apply_mask(*pair)) for pair in pairs], axis=-1).astype(space.dtype)


def random_action(spec: EnvSpec, key: Key, obs: PyTree) -> PyTree:
    """Draw uniform actions `[N, ...]` among those allowed by `obs` `[N, ...]`; the key is consumed."""
    space, num_envs = spec.action_space, jax.tree.leaves(obs)[0].shape[0]
    if not has_entry(spec.observation_space, MASK):
        return sample_space(space, key, num_envs)
    form: Any
    parts, form = jax.tree.flatten(space, is_leaf=is_leaf)
    keys = jax.random.split(key, len(parts)) if len(parts) > 1 else [key]
    allowed = masks_of_parts(space, get_mask(obs))
    return form.unflatten([_random_part(*each, num_envs) for each in zip(parts, keys, allowed, strict=True)])


def _random_part(space: Discrete | MultiDiscrete | Box, key: Key, mask: Array | None, num_envs: int) -> Array:
    if mask is None or isinstance(space, Box):
        return sample_space(space, key, num_envs)
    # The maximum of uniform scores is a uniform choice. The scores do not depend on the mask, so that they can be drawn
    # ahead of a loop.
    scores = jax.random.uniform(key, (num_envs, sum(action_sizes(space))), jnp.float32)
    return greedy_actions(space, scores, mask)
