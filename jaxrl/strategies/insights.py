"""Action probabilities, log-probabilities and values of a policy at the current observation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.base import Agent, Insight
from jaxrl.distributions import Categorical, Distribution, MultiCategorical
from jaxrl.errors import SettingsError
from jaxrl.processors.base import Processor
from jaxrl.strategies.base import PolicyOutputs
from jaxrl.trees import Array, PyTree
from jaxrl.xla.reductions import entry

NO_INSIGHT = "has no field insight, which would provide them"


def _get_insight(agent: Agent) -> Insight:
    """Return `agent.insight`, or a stub with the reason why there is none."""
    return Insight(NO_INSIGHT, NO_INSIGHT) if agent.insight is None else agent.insight


def make_policy_outputs(agent: Agent, processor: Processor) -> PolicyOutputs:
    """Return the `PolicyOutputs` of `agent` behind `processor`; `params` are those of `make_policy`."""
    return PolicyOutputs(
        probabilities=partial(_probabilities, agent, processor),
        log_prob=partial(_log_prob, agent, processor),
        values=partial(_values, agent, processor),
        privileged=_get_insight(agent).privileged,
    )


def _observe(processor: Processor, params: Any, carry: PyTree) -> PyTree:
    return processor.freeze(params.processor).observe(carry[0])


def _action_distribution(
    agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array
) -> Distribution:
    choice = _get_insight(agent).choice
    if isinstance(choice, str):
        raise SettingsError(f"the policy has no probabilities: {agent.name} {choice}; ask for an action instead")
    return choice(params.agent, _observe(processor, params, carry), opt_step)


def _probabilities(
    agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree
) -> PyTree:
    distribution = _action_distribution(agent, processor, params, carry, opt_step)
    if isinstance(distribution, Categorical):
        return jax.nn.softmax(distribution.logits)
    if isinstance(distribution, MultiCategorical):
        parts = jnp.split(distribution.logits, np.cumsum(distribution.n)[:-1], axis=-1)
        return tuple(map(jax.nn.softmax, parts))
    raise SettingsError(
        f"actions of {agent.name} are continuous here, and have no probabilities; "
        "ask for the log-density of one by policy.log_prob(obs, action)"
    )


def _log_prob(agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree) -> Array:
    distribution = _action_distribution(agent, processor, params, carry, opt_step)
    head = _get_insight(agent).head
    if head is None:
        return distribution.log_prob(action)
    return distribution.log_prob(head.to_raw(action)) - head.log_half_width


def _values(agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree) -> Array:
    insight, obs = _get_insight(agent), _observe(processor, params, carry)
    value = insight.value
    if isinstance(value, str):
        raise SettingsError(f"the policy has no values: {agent.name} {value}")
    if insight.keep is not None and not jax.tree.leaves(params.agent.critic):
        raise SettingsError(
            f"the policy was kept without the critics of {agent.name}, which acting does not need; load one with them "
            "from a checkpoint, by load_policy(run, step='latest', critics=True)"
        )
    given = bool(jax.tree.leaves(action))
    if insight.unasked is not None and not given:
        return insight.unasked(params.agent, obs, action)
    taken = action if given or insight.keep is None else agent.act(params.agent, obs, None, opt_step, "exploit")[0]
    made = value(params.agent, obs, taken)
    if not given:
        return made
    if made.ndim == 2:
        return jax.vmap(entry)(made, action)
    if insight.keep is None:
        raise SettingsError(f"values of {agent.name} are those of observations, whatever the action; leave action out")
    return made
