"""Parts of an agent's state that no update changes, as a torso that was trained elsewhere.

An agent does not know of them: `freeze` puts back what an update has changed.
"""

import jax

from jaxrl.agents.base import Agent
from jaxrl.errors import SettingsError, suggest
from jaxrl.metrics import Metrics
from jaxrl.trees import Array, Key, PyTree, is_part, make_key, parts_of, path_of
from jaxrl.types import Batch

MOVING = ("opt_state", "hyper", "lr_scale")
"""Fields of an agent's state that are no network's, and that another run does not begin with."""


def freeze(agent: Agent) -> Agent:
    """Return `agent` with what its setting `freeze` names left as it is at the start.

    The gradients of frozen parameters are still worked out, and count in the norm that `max_grad_norm` bounds.

    Raises:
      SettingsError: a name is none of a part of the agent's networks.
    """
    patterns = [pattern.replace(".", "/").strip("/") for pattern in (agent.info.settings or {}).get("freeze", ())]
    if not patterns:
        return agent
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: make_key(0)))
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    paths = [path for path in paths if path.partition("/")[0] not in MOVING]
    for pattern in patterns:
        if not any(is_part(path, pattern) for path in paths):
            hint = suggest(pattern, parts_of(paths))
            raise SettingsError(f"agent.freeze: {pattern} is no part of the networks of {agent.name}; {hint}")
    frozen = {path for path in paths if any(is_part(path, pattern) for pattern in patterns)}

    def update(state: PyTree, batch: Batch, key: Key, opt_step: Array) -> tuple[PyTree, Metrics, Array]:
        new, metrics, priorities = agent.update(state, batch, key, opt_step)
        keep = lambda keys, old, made: old if path_of(keys) in frozen else made
        return jax.tree_util.tree_map_with_path(keep, state, new), metrics, priorities

    return agent._replace(update=update)
