"""Settings of a strategy, and the hyperparameters that its state holds as arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl.agents.base import Agent, Tunable
from jaxrl.processors.base import DISABLED, Processor
from jaxrl.processors.n_step import NStepState
from jaxrl.processors.normalise import RewardState
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.interaction import Acting
from jaxrl.trees import PyTree, make_key


def set_hyperparams(acting: Acting, state: Any) -> Any:
    """Return `state` with the hyperparameters of agent, processor and environments reset to the settings."""
    env, obs = acting.env.reset(make_key(0))
    fresh = acting.processor.init(obs)
    discounted = lambda part: isinstance(part, NStepState | RewardState)
    given = iter([part.discount for part in jax.tree.leaves(fresh, is_leaf=discounted) if discounted(part)])
    # Paired in order: the parts of a chain may have different discounts, as `normalise_reward` and `n_step` do.
    swap = lambda old: old._replace(discount=next(given)) if discounted(old) else old
    return state._replace(
        agent=set_hyperparams_of(acting.agent, state.agent),
        env=state.env._replace(values=env.values) if env.values else state.env,
        processor=jax.tree.map(swap, state.processor, is_leaf=discounted),
    )


def set_hyperparams_of(agent: Agent, state: PyTree) -> PyTree:
    """Return `state` of `agent` with its hyperparameters reset to the settings; unchanged if it has none.

    Scheduled ones keep their values: they are set before each action and update anyway.
    """
    if not isinstance(state, Tunable):
        return state
    fresh = agent.init(make_key(0)).hyper
    return state._replace(hyper=fresh._replace(**{name: getattr(state.hyper, name) for name in agent.info.scheduled}))


def settings_of(
    agent: Agent,
    processor: Processor,
    spec: EnvSpec | None,
    made: Mapping[str, Any] | None,
    *,
    offline: bool = False,
    by_hand: Sequence[str] = (),
    **others: Any,
) -> dict[str, Any]:
    """Return the settings that rebuild a strategy; `made` are those of the environment, if there is one.

    `custom` lists what settings cannot rebuild: arguments of the agent and parts made by hand, those in `by_hand`, and
    `training` if the command line would not train this agent as here (`offline` or not).
    """
    pieces = {
        "env": made,
        "agent": agent.info.settings,
        "processor": processor.settings and {**DISABLED, **processor.settings},
        **{name: piece for name, piece in others.items() if name == "buffer"},
        "training": {} if agent.info.offline == offline else None,
    }
    return {
        "algo": agent.name,
        "custom": [*agent.info.custom, *(name for name, piece in pieces.items() if piece is None), *by_hand],
        "env": spec and spec.name,
        "env_args": {},
        **(made or {}),
        **others,
        **{name: dict(piece or {}) for name, piece in pieces.items() if name not in ("env", "training")},
    }
