"""The policy of a training state: an agent behind a processor with frozen statistics; its probabilities and values."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, PolicyFns, StripFn
from jaxrl.distributions import Categorical, Distribution, Joint, MultiCategorical, is_distribution
from jaxrl.errors import SettingsError
from jaxrl.processors.base import Processor, init_processor
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.strategies.base import Policy, PolicyOutputs
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Step
from jaxrl.xla.reductions import entry


class PolicyParams(NamedTuple):
    """The part of a training state that is needed to act greedily."""

    agent: PyTree
    processor: PyTree
    """Statistics of the processor, such as running means; `()` for most."""


def make_policy(agent: Agent, processor: Processor, spec: EnvSpec) -> Policy:
    """Compose the policy of `agent` behind `processor` with frozen statistics."""

    def begin_policy(params: PolicyParams, obs: PyTree) -> PyTree:
        # Frozen in each call, because the statistics are an argument of the program, as the agent's parameters are.
        frozen = processor.freeze(params.processor)
        seen = frozen.observe(frozen.init(obs))
        shapes = jax.eval_shape(lambda p, o: agent.act(p, o, None, jnp.uint32(0), "exploit"), params.agent, seen)
        # A window of past steps starts with zero actions of the right shape; only `eval_shape` calls the agent here.
        action, extras = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return init_processor(frozen, obs, action, extras), extras

    def act(params: PolicyParams, carry: PyTree) -> tuple[PyTree, PyTree]:
        state, _ = carry
        obs = processor.freeze(params.processor).observe(state)
        action, extras = agent.act(params.agent, obs, None, jnp.uint32(0), "exploit")
        return (state, extras), action

    def sample(params: PolicyParams, carry: PyTree, key: Key, opt_step: Array) -> tuple[PyTree, PyTree]:
        state, _ = carry
        obs = processor.freeze(params.processor).observe(state)
        action, extras = agent.act(params.agent, obs, key, opt_step, "explore")
        return (state, extras), action

    def observe(params: PolicyParams, carry: PyTree, step: Step) -> PyTree:
        state, extras = carry
        # Acting needs no transitions; what they are made of is what the next observation depends on.
        return processor.freeze(params.processor).process(state, step._replace(extras=extras))[0], extras

    def extract(keep: StripFn, state: Any) -> PolicyParams:
        return PolicyParams(keep(state.agent), processor.get_stats(state.processor))

    critics = agent.policy_fns and agent.policy_fns.keep_critic
    outputs = _make_outputs(agent, processor)
    params_with_critic = critics and partial(extract, critics)
    return Policy(spec, partial(extract, agent.strip), begin_policy, act, observe, sample, outputs, params_with_critic)


def policy_params_like(agent: Agent, processor: Processor, spec: EnvSpec) -> PolicyParams:
    """Return the shapes of the parameters of a policy from `make_policy`."""

    def params(key: Key) -> PolicyParams:
        obs = space_zeros(spec.observation_space, 1)
        return PolicyParams(agent.strip(agent.init(key)), processor.get_stats(processor.init(obs)))

    return jax.eval_shape(params, make_key(0))


# --- probabilities and values -----------------------------------------------------------------------------------


_NO_POLICY_FNS = "has no field policy_fns, which would provide them"


def _get_policy_fns(agent: Agent) -> PolicyFns:
    """Return `agent.policy_fns`, or a stub with the reason why there is none."""
    return PolicyFns(_NO_POLICY_FNS, _NO_POLICY_FNS) if agent.policy_fns is None else agent.policy_fns


def _make_outputs(agent: Agent, processor: Processor) -> PolicyOutputs:
    """Return the `PolicyOutputs` of `agent` behind `processor`; `params` are those of `make_policy`."""
    fns = _get_policy_fns(agent)

    def distribution(params: Any, carry: PyTree, opt_step: Array, action: PyTree) -> Distribution:
        return _action_distribution(agent, processor, params, carry, opt_step)

    return PolicyOutputs(
        probabilities=partial(_probabilities, agent, processor),
        log_prob=partial(_log_prob, agent, processor),
        values=partial(_values, agent, processor),
        privileged=fns.privileged,
        distribution=None if isinstance(fns.distribution, str) else distribution,
    )


def _observe(processor: Processor, params: Any, carry: PyTree) -> PyTree:
    return processor.freeze(params.processor).observe(carry[0])


def _action_distribution(
    agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array
) -> Distribution:
    distribution = _get_policy_fns(agent).distribution
    if isinstance(distribution, str):
        raise SettingsError(f"the policy has no probabilities: {agent.name} {distribution}; ask for an action instead")
    return distribution(params.agent, _observe(processor, params, carry), opt_step)


def _probabilities(
    agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree
) -> PyTree:
    distribution = _action_distribution(agent, processor, params, carry, opt_step)
    if isinstance(distribution, Joint):
        found = jax.tree.map(_part_probabilities, distribution.parts, is_leaf=is_distribution)
    else:
        found = _part_probabilities(distribution)
    if jax.tree.leaves(found):
        return found
    raise SettingsError(
        f"actions of {agent.name} are continuous here, and have no probabilities; "
        "ask for the log-density of one by policy.log_prob(obs, action)"
    )


def _part_probabilities(distribution: Distribution) -> PyTree:
    """Return the probabilities of discrete actions, for each number of them; `None` if they are continuous."""
    if isinstance(distribution, Categorical):
        return jax.nn.softmax(distribution.logits)
    if isinstance(distribution, MultiCategorical):
        return tuple(jax.nn.softmax(part.logits) for part in distribution.parts())
    return None


def _log_prob(agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree) -> Array:
    distribution = _action_distribution(agent, processor, params, carry, opt_step)
    head = _get_policy_fns(agent).head
    if head is None:
        return distribution.log_prob(action)
    # `to_env` stretches raw actions by the half-widths, and densities shrink accordingly.
    return distribution.log_prob(head.to_raw(action)) - head.log_half_width


def _values(agent: Agent, processor: Processor, params: Any, carry: PyTree, opt_step: Array, action: PyTree) -> Array:
    fns, obs = _get_policy_fns(agent), _observe(processor, params, carry)
    value = fns.value
    if isinstance(value, str):
        raise SettingsError(f"the policy has no values: {agent.name} {value}")
    if fns.keep_critic is not None and not jax.tree.leaves(params.agent.critic):
        raise SettingsError(
            f"the policy was kept without the critics of {agent.name}, which acting does not need; load one with them "
            "from a checkpoint, by load_policy(run, step='latest', critics=True)"
        )
    given = bool(jax.tree.leaves(action))
    if fns.state_value is not None and not given:
        return fns.state_value(params.agent, obs, action)
    # Critics of continuous actions take one as input: where none is given, the greedy one.
    taken = action if given or fns.keep_critic is None else agent.act(params.agent, obs, None, opt_step, "exploit")[0]
    made = value(params.agent, obs, taken)
    if not given:
        return made
    # Values of all discrete actions, of which the given ones are selected.
    if made.ndim == 2:
        return jax.vmap(entry)(made, action)
    if fns.keep_critic is None:
        raise SettingsError(f"values of {agent.name} are those of observations, whatever the action; leave action out")
    return made
