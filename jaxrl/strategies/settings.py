"""Settings of a strategy: what rebuilds it, and how a state takes up those that it holds as arrays."""

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
    """Take what may be swept of agent, processor and environments from the settings, all else from `state`."""
    env, obs = acting.env.reset(make_key(0))
    fresh = acting.processor.init(obs)
    discounted = lambda part: isinstance(part, NStepState | RewardState)
    given = iter([part.discount for part in jax.tree.leaves(fresh, is_leaf=discounted) if discounted(part)])
    # Each part of a chain its own: rewards may be normalised by another discount than values are learnt with.
    swap = lambda old: old._replace(discount=next(given)) if discounted(old) else old
    return state._replace(
        agent=set_hyperparams_of(acting.agent, state.agent),
        env=state.env._replace(values=env.values) if env.values else state.env,
        processor=jax.tree.map(swap, state.processor, is_leaf=discounted),
    )


def set_hyperparams_of(agent: Agent, state: PyTree) -> PyTree:
    """Take the hyperparameters of an agent from its settings, all else from its `state`; one without keeps it all.

    Those that follow a schedule are set before each action and update, and stay as they are until then.
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
    """Return what rebuilds a strategy, in an environment that `made` rebuilds, or in none.

    Parts made by hand are named under `custom`, those of the agent by the arguments that made them, and further ones,
    `by_hand`. So is the training, where the command line does not know the agent to be trained like that.
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
