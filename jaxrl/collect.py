"""`python -m jaxrl.collect RUN_DIR --transitions N --out FILE`: collect a data set with a run's best policy."""

from jaxrl.cli.main import Parser, path_arg, run_main  # first: it installs signal handlers

# isort: split
from collections.abc import Sequence
from pathlib import Path

from jaxrl.buffers import summarise
from jaxrl.envs import HostEnv
from jaxrl.errors import SettingsError, check_between, print_line
from jaxrl.evaluate import add_env_options, add_which, env_of, load_named
from jaxrl.paths import require_writable_file
from jaxrl.reports.exports import require_outside
from jaxrl.training.data.collect import check_settings, gather
from jaxrl.training.data.files import save_dataset
from jaxrl.trees import make_key


def main(args: Sequence[str]) -> int:
    """Parse, load, gather, write, print; return the exit code."""
    parser = Parser(
        "collect",
        "runs/cartpole --transitions 20000 --out cartpole.npz --random 0.3",
        description="Gather a data set with the best policy of a run.",
    )
    add_which(parser)
    add_env_options(parser)
    parser.add_argument("--transitions", type=int, required=True, help="environment steps to take")
    parser.add_argument("--out", type=path_arg, required=True, help="data set to write, an .npz file")
    parser.add_argument("--random", type=float, default=0.0, help="share of steps taken at random (default: 0)")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="deviation of the noise on actions, of half their range (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=2_000_000, help="seed of the episodes (default: 2000000)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments side by side (default: 16)")
    options = parser.parse(args)
    check_between("--seed", options.seed, 0, 2**32 - 1)
    check_settings(options.transitions, options.random, options.noise, options.num_envs)
    require_outside(Path(options.out), [options.run_dir])
    require_writable_file(Path(options.out))
    policy = load_named(options)
    env = env_of(policy, options.env, options.env_args)
    if isinstance(env, HostEnv):
        raise SettingsError(
            f"{env.spec.name} is stepped on the host, where nothing is gathered; use Minari's DataCollector"
        )
    data = gather(
        env,
        policy.policy,
        policy.params,
        make_key(options.seed),
        options.transitions,
        random=options.random,
        noise=options.noise,
        num_envs=options.num_envs,
    )
    save_dataset(options.out, data)
    print_line(f"{options.out}: {summarise(data)}")
    return 0


if __name__ == "__main__":
    run_main(main)
