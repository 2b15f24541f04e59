"""The policy of a training state: an agent behind a processor with frozen statistics."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, StripFn
from jaxrl.processors.base import Processor, init_processor
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.strategies.base import Policy
from jaxrl.strategies.insights import make_policy_outputs
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Step


class PolicyParams(NamedTuple):
    """The part of a training state that is needed to act greedily."""

    agent: PyTree
    processor: PyTree
    """Statistics of the processor, such as running means; `()` for most."""


def make_policy(agent: Agent, processor: Processor, spec: EnvSpec) -> Policy:
    """Compose the policy of `agent` behind `processor` with frozen statistics."""

    def begin_policy(params: PolicyParams, obs: PyTree) -> PyTree:
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
        return processor.freeze(params.processor).process(state, step._replace(extras=extras))[0], extras

    def extract(keep: StripFn, state: Any) -> PolicyParams:
        return PolicyParams(keep(state.agent), processor.get_stats(state.processor))

    critics = agent.insight and agent.insight.keep
    outputs = make_policy_outputs(agent, processor)
    params_with_critic = critics and partial(extract, critics)
    return Policy(spec, partial(extract, agent.strip), begin_policy, act, observe, sample, outputs, params_with_critic)


def policy_params_like(agent: Agent, processor: Processor, spec: EnvSpec) -> PolicyParams:
    """Return the shapes of the parameters of a policy from `make_policy`."""

    def params(key: Key) -> PolicyParams:
        obs = space_zeros(spec.observation_space, 1)
        return PolicyParams(agent.strip(agent.init(key)), processor.get_stats(processor.init(obs)))

    like: PolicyParams = jax.eval_shape(params, make_key(0))
    return like
