"""`python -m jaxrl.evaluate RUN_DIR`: judge the best policy of a run by fresh greedy episodes."""

from collections.abc import Sequence

from jaxrl.cli import Parser, cache_compilations, run_main  # first, for it takes the signals

# isort: split
import jax
import numpy as np

from jaxrl.envs import Env, make_env
from jaxrl.errors import SettingsError, check_between, check_count
from jaxrl.loading import load_policy
from jaxrl.training import Evaluator, GreedyPolicy


def main(args: Sequence[str]) -> int:
    """Parse, load, run, print; return the exit code."""
    parser = Parser("python -m jaxrl.evaluate", description=__doc__)
    parser.add_argument("run_dir", help="directory of the run")
    parser.add_argument("--episodes", type=int, default=100, help="greedy episodes, all in parallel (default: 100)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the episodes (default: 1000000)")
    options = parser.parse_args(args)
    check_count("--episodes", options.episodes)
    check_between("--seed", options.seed, 0, 2**32 - 1)
    cache_compilations()
    policy = load_policy(options.run_dir)
    result = Evaluator(env_of(policy), policy.policy, options.episodes)(policy.params, jax.random.key(options.seed))
    returns, unfinished = result.returns, int(np.sum(~result.finished))
    print(
        f"return {returns.mean():.6g} +- {returns.std():.6g} (min {returns.min():.6g}, max {returns.max():.6g}), "
        f"length {result.lengths.mean():.6g}, over {len(returns)} episodes, {unfinished} unfinished"
    )
    return 0


def env_of(policy: GreedyPolicy) -> Env:
    """Build the environment that a loaded policy was trained in; raise `SettingsError` if it was made by hand."""
    settings = policy.facts["settings"]
    if "env" in settings.get("custom", []):
        raise SettingsError(
            f"the environment {settings['env']} was made in Python; use load_policy and Evaluator there"
        )
    if "data" in settings and settings.get("env") is None:
        raise SettingsError("the policy was learnt from data, and no env was named then; use load_policy in Python")
    name, params = settings.get("env"), settings.get("env_args", {})
    if not isinstance(name, str) or not isinstance(params, dict):
        raise SettingsError(
            f"the best policy's environment is {name!r} with {params!r}; expected a name and parameters"
        )
    return make_env(name, **params)


if __name__ == "__main__":
    run_main(main)
