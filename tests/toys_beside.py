"""What tests share of agents that learn from somebody beside their rollouts: a teacher, or demonstrations."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toys_agents import DISCRETE
from toys_masks import minefield

import jaxrl
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.opening import open_store

SMALL: dict[str, Any] = {"features": (8,)}
QUIET: dict[str, Any] = {
    "eval_interval": 0,
    "eval_episodes": 0,
    "record_interval": 0,
    "save_interval": 0,
    "quiet": True,
}
COMMAND = (
    *("ppo", "--env", "Catch-bsuite", "--num-envs", "4", "--rollout", "8", "--epochs", "1", "--minibatches", "2"),
    *("--agent.features", "8", "--processor.normalise-obs", "--eval-interval", "0", "--eval-episodes", "0"),
    *("--record-interval", "2", "--save-interval", "4", "--quiet"),
)
MASKED = minefield(jaxrl.Discrete(4)).spec
MANY = jaxrl.EnvSpec("Toy", DISCRETE.observation_space, jaxrl.MultiDiscrete((2, 3)))


def fresh(maker: Any, spec: EnvSpec, processor: Any = None, opt_steps: int = 0, seed: int = 7) -> GreedyPolicy:
    """Return the policy of a fresh agent, saved after so many optimisation steps."""
    processor, agent = build_processor_and_agent(maker, processor or jaxrl.one_step(), spec)

    @jax.jit
    def begin(key: Any) -> PolicyParams:
        state = agent.init(key)
        # Far from uniform: a fresh policy of PPO is close to it. Networks that are drawn here need not be compiled.
        networks = {name: getattr(state, name) for name in ("params", "policy") if hasattr(state, name)}
        rng = np.random.default_rng(seed)
        state = state._replace(**jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), x.dtype), networks))
        stats = processor.get_stats(processor.init(space_zeros(spec.observation_space, 1)))
        return PolicyParams(agent.strip(state), stats)

    params = begin(jax.random.key(seed))
    return GreedyPolicy(make_policy(agent, processor, spec), params, {"opt_steps": opt_steps})


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def leaves_of(run: Path, step: int) -> Any:
    """Return all arrays of a checkpoint by path."""
    return open_store(run, "checkpoints").read(step)[0]


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
