"""`python -m jaxrl.evaluate RUN_DIR`: evaluate a run's best policy on fresh greedy episodes."""

from jaxrl.cli import Parser, cache_compilations, require_devices, run_main  # first, for it takes the signals

# isort: split
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl.envs import Env, HostEnv, make_env
from jaxrl.envs.base import require_same_spaces
from jaxrl.envs.registry import require_plain
from jaxrl.errors import SettingsError, check_between, check_count, print_line
from jaxrl.loading import load_policy
from jaxrl.own_envs import admit
from jaxrl.training import GreedyPolicy
from jaxrl.training.evaluator import evaluator_for
from jaxrl.written import read_value


def main(args: Sequence[str]) -> int:
    """Parse, load, run, print; return the exit code."""
    parser = Parser(
        "python -m jaxrl.evaluate",
        description="Judge the best policy of a run by fresh greedy episodes.",
        epilog="Example: python -m jaxrl.evaluate runs/cartpole --episodes 200 --table",
    )
    parser.add_argument("run_dir", help="directory of the run")
    parser.add_argument("--member", type=int, help="which of a population (default: the one with the best score)")
    add_env_options(parser)
    parser.add_argument("--episodes", type=int, default=100, help="greedy episodes, all in parallel (default: 100)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the episodes (default: 1000000)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="print quantiles of returns and lengths as a table")
    form.add_argument("--json", action="store_true", help="print the same as one JSON object")
    options = parser.parse_args(args)
    check_count("--episodes", options.episodes)
    check_between("--seed", options.seed, 0, 2**32 - 1)
    cache_compilations()
    require_devices()
    policy = load_policy(options.run_dir, member=options.member)
    evaluate = evaluator_for(env_of(policy, options.env, options.env_args), policy.policy, options.episodes)
    result = evaluate(policy.params, jax.random.key(options.seed))
    if options.table or options.json:
        report = result.report()
        print(report.to_json() if options.json else report)
        return 0
    returns = result.returns
    print_line(
        f"return {returns.mean():.6g} +- {returns.std():.6g} (min {returns.min():.6g}, max {returns.max():.6g}), "
        f"length {result.lengths.mean():.6g}, over {len(returns)} episodes, {result.unfinished} unfinished"
    )
    return 0


def add_env_options(parser: Parser) -> None:
    """Let a front door be told another environment than that of the training."""
    parser.add_argument("--env", help="another environment with the same spaces (default: that of the training)")
    parser.add_argument(
        "--env-args", nargs="*", default=[], metavar="NAME VALUE", help="its parameters, as in --env-args gravity 9"
    )


def env_of(policy: GreedyPolicy, env: str | None = None, env_args: Sequence[str] = ()) -> Env | HostEnv:
    """Build the environment that a person named, or else the one that a loaded policy was trained in.

    Raises:
      SettingsError: its spaces are not the policy's, or it was made by hand and none is named.
    """
    if len(env_args) % 2:
        raise SettingsError(f"--env-args is {' '.join(env_args)!r}; expected names with values, as in gravity 9.8")
    given = {name: read_value(value) for name, value in zip(env_args[::2], env_args[1::2], strict=True)}
    admit([env])
    if env is None:
        env, trained = _env_of(policy)
        given = {**trained, **given}
    made: Env | HostEnv = make_env(env, **given)
    require_same_spaces(made.spec, policy.policy.spec)
    return made


def _env_of(policy: GreedyPolicy) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the parameters of the environment that a policy was trained in."""
    settings = policy.facts["settings"]
    if "env" in settings.get("custom", []):
        raise SettingsError(
            f"the environment {settings['env']} was made in Python; use load_policy and Evaluator there"
        )
    if "data" in settings and settings.get("env") is None:
        raise SettingsError("the policy was learnt from data, and no env was named then; use load_policy in Python")
    name, params = settings.get("env"), settings.get("env_args", {})
    if not isinstance(name, str):
        raise SettingsError(f"the best policy's environment is {name!r}; expected a name")
    return name, require_plain(params, "the best policy")


if __name__ == "__main__":
    run_main(main)
