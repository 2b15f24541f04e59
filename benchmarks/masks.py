"""`python -m benchmarks.masks ENV [--episodes N] [--json FILE]`: what random actions reach, of those that are allowed.

Beside it, `pgx_2048` and `snake_unmasked` are environments without their masks, for comparison, and `snake` has a board
that two cores of a CPU fill in minutes:
`python -m benchmarks.learning --algo ppo --env benchmarks.masks:pgx_2048`.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

import jaxrl
from benchmarks import harness
from jaxrl.cli.outside import admit
from jaxrl.envs.wrappers import transform_obs
from jaxrl.masks import MASK, for_critic, random_action
from jaxrl.strategies.base import Policy
from jaxrl.training.evaluator import Evaluation, Evaluator


def pgx_2048() -> jaxrl.Env:
    """Make Pgx's 2048 without the mask of legal moves."""
    return unmasked(jaxrl.make_env("pgx:2048"))


def snake(side: float = 6) -> jaxrl.Env:
    """Make Jumanji's Snake on `side` x `side` fields, of which the snake can fill all but one."""
    return jaxrl.make_env("jumanji:Snake-v1", num_rows=side, num_cols=side)


def snake_unmasked(side: float = 6) -> jaxrl.Env:
    """Make `snake` without the mask of legal moves."""
    return unmasked(snake(side))


def unmasked(env: jaxrl.Env) -> jaxrl.Env:
    """Hide which actions are allowed; what else is observed stays."""
    assert isinstance(env.spec.observation_space, dict)
    assert MASK in env.spec.observation_space
    return transform_obs(env, for_critic, for_critic(env.spec.observation_space))


def chance(env: jaxrl.Env, episodes: int, seed: int = 0) -> Evaluation:
    """Play whole episodes with random actions, uniform among the allowed ones."""

    def sample(params: Any, obs: Any, key: Any, t: Any) -> tuple[Any, Any]:
        return obs, random_action(env.spec, key, obs)

    policy = Policy(
        env.spec,
        params=lambda state: (),
        begin=lambda params, obs: obs,
        act=lambda params, obs: sample(params, obs, jax.random.key(0), 0),
        observe=lambda params, obs, step: step.obs,
        sample=sample,
    )
    return Evaluator(env, policy, episodes, sampled=True)((), jax.random.key(seed))


def main() -> None:
    """Parse, play, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.masks", description=__doc__, allow_abbrev=False)
    parser.add_argument("env", nargs="+", help="environments in JAX")
    parser.add_argument("--episodes", type=int, default=100, help="episodes (default: 100)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    for env in options.env:
        admit(env)
    rows: list[harness.Row] = []
    for name in options.env:
        report = chance(jaxrl.make_env(name), options.episodes).report()
        rows.append({"env": name, "episodes": options.episodes, "returns": report.returns, "lengths": report.lengths})
        print(f"{name}: {report.returns['mean']:.2f} ± {report.returns['std']:.2f}")
    if options.json:
        harness.write(options.json, rows)


if __name__ == "__main__":
    main()
