"""`python -m jaxrl.evaluate RUN_DIR`: evaluate a run's best policy, or another, on fresh greedy episodes."""

from jaxrl.cli.main import (  # first: it installs signal handlers
    Parser,
    cache_compilations,
    path_arg,
    require_devices,
    run_main,
)

# isort: split
from argparse import Namespace
from collections.abc import Sequence

from jaxrl import loading
from jaxrl.cli.arguments import parse_pairs
from jaxrl.cli.outside import admit, admit_algorithm, require_algorithm
from jaxrl.envs import Env, HostEnv, make_env
from jaxrl.envs.base import require_same_spaces
from jaxrl.envs.registry import NAME_TAKEN
from jaxrl.errors import SettingsError, check_between, check_count, print_line, print_stderr
from jaxrl.loading import load_policy
from jaxrl.parsing import parse_value
from jaxrl.training import GreedyPolicy
from jaxrl.training.evaluator import Evaluation, evaluator_for
from jaxrl.training.settings import MAX_SIDE_BY_SIDE
from jaxrl.training.storage.members import resolve
from jaxrl.trees import make_key


def main(args: Sequence[str]) -> int:
    """Parse, load, run, print; return the exit code."""
    parser = Parser(
        "evaluate",
        "runs/cartpole --episodes 200 --table",
        description="Judge the best policy of a run, or another, by fresh episodes.",
    )
    add_which(parser)
    add_env_options(parser)
    add_episodes(parser)
    parser.add_argument(
        "--actions", choices=("greedy", "sampled"), default="greedy", help="sampled: as in training (default: greedy)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="print quantiles of returns and lengths as a table")
    form.add_argument("--json", action="store_true", help="print the same as one JSON object")
    options = parser.parse(args)
    check_episodes(options)
    policy = load_named(options)
    env = env_of(policy, options.env, options.env_args)
    result = evaluate_policy(policy, env, options, options.actions == "sampled")
    if options.json:
        print(result.report().to_json())
        return 0
    if options.table:
        print(result.report())
        print_line(of_what(policy, options, env.spec.name))
        return 0
    returns = result.returns
    print_line(
        f"return {returns.mean():.6g} +- {returns.std():.6g} (min {returns.min():.6g}, max {returns.max():.6g}), "
        f"length {result.lengths.mean():.6g}, over {len(returns)} episodes, {result.unfinished} unfinished"
    )
    for name, numbers in result.report().columns.items():
        print_line(f"{name} {numbers['mean']:.6g} +- {numbers['std']:.6g}")
    print_line(of_what(policy, options, env.spec.name))
    return 0


def of_what(policy: GreedyPolicy, options: Namespace, env: str) -> str:
    """Return a line that names the policy of `load_named`, its run and the environment."""
    which = "best" if policy.facts["kept_as"] == "best" else "latest" if options.step is None else "saved"
    run = resolve(options.run_dir, options.member)
    return f"of the {which} policy of {run}, after {policy.facts['opt_steps']} optimisation steps, in {env}"


def add_which(parser: Parser) -> None:
    """Add the arguments that select a policy."""
    parser.add_argument("run_dir", type=path_arg, help="directory of the run")
    parser.add_argument("--member", type=int, help="which of a population (default: the one with the best score)")
    parser.add_argument(
        "--step", help="best, latest, final, or the optimisation steps of a checkpoint (default: best, else latest)"
    )
    parser.add_argument("--algo", help="the algorithm, where it is your own, as in my_package.algos:make")


def add_episodes(parser: Parser) -> None:
    """Add the arguments of `evaluate_policy`."""
    parser.add_argument("--episodes", type=int, default=100, help="greedy episodes, all in parallel (default: 100)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the episodes (default: 1000000)")


def check_episodes(options: Namespace) -> None:
    """Raise `SettingsError` if the arguments of `evaluate_policy` are invalid."""
    check_count("--episodes", options.episodes, most=MAX_SIDE_BY_SIDE)
    check_between("--seed", options.seed, 0, 2**32 - 1)


def evaluate_policy(policy: GreedyPolicy, env: Env | HostEnv, options: Namespace, sampled: bool = False) -> Evaluation:
    """Evaluate a policy in fresh episodes, as specified by the arguments."""
    evaluate = evaluator_for(env, policy.policy, options.episodes, sampled)
    return evaluate(policy.params, make_key(options.seed))


def load_named(options: Namespace) -> GreedyPolicy:
    """Load the policy selected by the arguments of `add_which`; print a note if it is, by default, not the best.

    Raises:
      SettingsError: there is no such policy, or the configured platform is not available.
    """
    cache_compilations()
    require_devices()
    admit_algorithm(options.algo)
    policy = load_policy(options.run_dir, member=options.member, step=options.step)
    require_algorithm(options.algo, policy.facts["settings"].get("algo"), options.run_dir)
    if options.step is None and policy.facts["kept_as"] != "best":
        print_stderr(
            f"{options.run_dir} has no best policy: the latest is used, of checkpoint {policy.facts['opt_steps']}"
        )
    return policy


def add_env_options(parser: Parser) -> None:
    """Add the arguments that select another environment than that of the training."""
    parser.add_argument(
        "--env", help="another environment with the same spaces (default: that of the training, with its parameters)"
    )
    parser.add_argument(
        "--env-args", nargs="*", default=[], metavar="NAME VALUE", help="its parameters, as in --env-args gravity 9"
    )


def env_of(policy: GreedyPolicy, env: str | None = None, env_args: Sequence[str] = ()) -> Env | HostEnv:
    """Build the environment `env`, or by default the one that a loaded policy was trained in.

    The latter has the parameters of the training, overridden by `env_args`, even if it has to be named again.

    Raises:
      SettingsError: its spaces differ from the policy's, none is given and that of the training cannot be rebuilt, or
        a parameter is called `name`.
    """
    given = {name: parse_value(value) for name, value in parse_pairs("--env-args", env_args).items()}
    settings = policy.facts["settings"]
    env = admit(env, settings.get("env"))
    if env is None or (env == settings.get("env") and "env" not in settings.get("custom", [])):
        env, trained = loading.env_in(settings, given)
        given = {**trained, **given}
    if "name" in given:
        raise SettingsError(f"env_args.name: {NAME_TAKEN}")
    made: Env | HostEnv = make_env(env, **given)
    require_same_spaces(made.spec, policy.policy.spec)
    return made


if __name__ == "__main__":
    run_main(main)
