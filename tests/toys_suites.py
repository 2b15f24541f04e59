"""What is asked of every environment of another library."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from toys_envs import rollout

import jaxrl
from jaxrl import evaluate, train
from jaxrl.cli.algos import build
from jaxrl.cli.config import preset
from jaxrl.cli.presets import PRESETS
from jaxrl.envs import Env, make_env, vectorise
from jaxrl.registry import matching_presets
from jaxrl.spaces import sample_space, space_struct
from jaxrl.training.storage.leaves import state_digest
from jaxrl.types import Step

STEPS = 6


def keeps_its_contract(env: Env) -> Step:
    """Take a few random steps in two copies of `env`; return them, `[STEPS, 2]`, after a check of their forms."""
    with jax.numpy_rank_promotion("allow"):  # the suites' own code relies on it
        venv = vectorise(env, 2)
        keys = jax.random.split(jax.random.key(1), (STEPS, 2))
        actions = jax.vmap(jax.vmap(lambda key: sample_space(env.spec.action_space, key)))(keys)
        first, steps = rollout(venv, actions)

    def declared(*lead: int) -> Any:
        return jax.tree.map(lambda x: (*lead, *x.shape, x.dtype), space_struct(env.spec.observation_space))

    assert jax.tree.map(lambda x: (*x.shape, x.dtype), first) == declared(2)
    assert jax.tree.map(lambda x: (*x.shape, x.dtype), steps.obs) == declared(STEPS, 2)
    assert steps.valid.all()
    assert not (steps.terminated & steps.truncated).any()
    assert steps.reward.shape == (STEPS, 2)
    return steps


def checked(env: Env) -> list[str]:
    """Return what `check_env` finds."""
    with jax.numpy_rank_promotion("allow"):
        return jaxrl.check_env(env)


def played(env: Env, actions: Any, seed: int = 0) -> Step:
    """Play `actions` `[T, ...]` in one copy of `env`; leaves `[T, ...]`."""
    with jax.numpy_rank_promotion("allow"):
        _, steps = rollout(vectorise(env, 1), np.asarray(actions)[:, None], seed)
    return jax.tree.map(lambda x: x[:, 0], steps)


def resumes_to_the_same_bits(name: str, path: Path, num_envs: int = 4, **params: Any) -> None:
    """Train PPO on environment `name` in one piece and in two; compare every bit."""

    def trainer(max_opts: int, run: str, **resume: bool) -> jaxrl.Trainer:
        env = make_env(name, **params)
        strategy = jaxrl.on_policy(env, jaxrl.ppo(), num_envs=num_envs, rollout=8, epochs=1, minibatches=1)
        settings = {"max_opts": max_opts, "eval_interval": 0, "eval_episodes": 0, "recorders": []}
        return jaxrl.Trainer(strategy, run_dir=str(path / run), **settings, **resume)

    with jax.numpy_rank_promotion("allow"):
        whole = trainer(8, "whole").train()
        trainer(4, "parts").train()
        parts = trainer(8, "parts", resume=True).train()
    assert state_digest(whole.state) == state_digest(parts.state)


def presets_fit(algo: str, name: str) -> None:
    """Assert that an algorithm has a preset for `name`, of which a run can be made and comes out even."""
    assert matching_presets(PRESETS[algo], name)
    config = preset(algo, name)
    config.check()
    with jax.numpy_rank_promotion("allow"):
        schedule = config.schedule(build(algo, config))
    assert schedule.opt_steps(schedule.last) == config.max_opts
    assert config.agent.lr_decay in (0, config.max_opts)


def trains_by_command(name: str, path: Path, *more: str) -> str:
    """Train and evaluate by the command line; return what the evaluation says."""
    tiny = {"max-opts": 8, "num-envs": 4, "rollout": 8, "epochs": 1, "minibatches": 1, "eval-episodes": 4}
    flags = [word for flag, value in tiny.items() for word in (f"--{flag}", str(value))]
    _ran(train.main, "ppo", "--env", name, *flags, "--quiet", "--run-dir", str(path / "run"), *more)
    return _ran(evaluate.main, str(path / "run"), "--episodes", "4")


def _ran(command: Callable[[list[str]], int], *args: str) -> str:
    """Go through a command in this process; return what it prints."""
    with jax.numpy_rank_promotion("allow"), contextlib.redirect_stdout(io.StringIO()) as out:
        assert command(list(args)) == 0
    return out.getvalue()
