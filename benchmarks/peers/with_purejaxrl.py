"""PureJaxRL: `python with_purejaxrl.py OPT_STEPS TASK`. It compiles a whole run, so the same run is made twice.

Its sources lie beside the environment that this runs in. Several seeds are its own way: `vmap` of the whole run. What
is told as learnt are the last returns of its training, for it has no evaluation. Weights of PPO begin as normal numbers
of the same size: on two cores the QR factorisations of orthogonal ones, for several seeds at once, wait for each other
for ever.
"""

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import jax
import settings as s
from flax import linen
from flax.linen import initializers

UNUSED = ("wandb", "navix", "brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training")
"""What its files import beside what these tasks need."""


def dqn(p: s.DQN, steps: int) -> tuple[dict[str, Any], int]:
    """Return the settings of DQN for a run of `steps` optimisation steps, and how many it makes."""
    config = {
        "NUM_ENVS": p.num_envs,
        "BUFFER_SIZE": p.capacity,
        "BUFFER_BATCH_SIZE": p.batch_size,
        "TOTAL_TIMESTEPS": p.warmup + steps * p.opt_interval,
        "EPSILON_START": p.epsilon_start,
        "EPSILON_FINISH": p.epsilon_end,
        "EPSILON_ANNEAL_TIME": p.epsilon_decay * p.opt_interval,
        "TARGET_UPDATE_INTERVAL": p.target_interval * p.opt_interval,
        "LR": p.lr,
        "LEARNING_STARTS": p.warmup,
        "TRAINING_INTERVAL": p.opt_interval,
        "GAMMA": p.discount,
        "TAU": 1.0,
        "ENV_NAME": p.env,
    }
    return config, steps


def ppo(p: s.PPO, steps: int) -> tuple[dict[str, Any], int]:
    """Return those of PPO likewise."""
    updates = p.epochs * p.minibatches
    rollouts = -(-steps // updates)
    config = {
        "LR": p.lr,
        "NUM_ENVS": p.num_envs,
        "NUM_STEPS": p.rollout,
        "TOTAL_TIMESTEPS": rollouts * p.rollout * p.num_envs,
        "UPDATE_EPOCHS": p.epochs,
        "NUM_MINIBATCHES": p.minibatches,
        "GAMMA": p.discount,
        "GAE_LAMBDA": p.gae_lambda,
        "CLIP_EPS": p.clip,
        "ENT_COEF": p.entropy,
        "VF_COEF": p.value,
        "MAX_GRAD_NORM": p.max_grad_norm,
        "ACTIVATION": "tanh",
        "ENV_NAME": p.env,
        "ANNEAL_LR": False,
    }
    return config, rollouts * updates


def theirs(name: str) -> ModuleType:
    """Return a file of theirs as a module."""
    sys.path.insert(0, str(Path(sys.prefix) / "source" / "purejaxrl"))
    sys.modules.update({unused: MagicMock() for unused in UNUSED})
    jax.tree_map = jax.tree.map  # its name when they wrote
    initializers.orthogonal = lambda gain: initializers.variance_scaling(gain**2, "fan_in", "normal")
    return importlib.import_module(name)


def widen(module: ModuleType, hidden: tuple[int, ...]) -> None:
    """Give its networks hidden layers of the widths asked for; theirs are written out, 120 and 84, or 64."""
    widths = {120: hidden[0], 84: hidden[1], 64: hidden[0]}

    class Layers:
        def __getattr__(self, name: str) -> Any:
            return getattr(linen, name)

        def Dense(self, features: int, **options: Any) -> linen.Dense:
            return linen.Dense(widths.get(features, features), **options)

    module.nn = Layers()  # type: ignore[attr-defined]


def main() -> None:
    """Compile, then time one run."""
    asked, steps = s.task(), 2 * s.opt_steps()
    assert isinstance(asked, s.DQN | s.PPO)
    module = theirs("ppo" if isinstance(asked, s.PPO) else "dqn")
    config, made = ppo(asked, steps) if isinstance(asked, s.PPO) else dqn(asked, steps)
    widen(module, asked.hidden)
    train = jax.jit(jax.vmap(module.make_train(config)))
    keys = lambda seed: jax.random.split(jax.random.PRNGKey(seed), asked.seeds)
    jax.block_until_ready(train(keys(0)))
    watch = s.Watch()
    metrics = jax.block_until_ready(train(keys(1)))["metrics"]
    us = watch.us(made * asked.seeds)
    returns = metrics["returns"] if "returns" in metrics else metrics["returned_episode_returns"]
    versions = {name: importlib.metadata.version(name) for name in ("flashbax", "gymnax", "jax")}
    s.tell(us, float(returns[:, -1].mean()), made, **versions)


main()
