"""`python -m jaxrl.publish RUN_DIR --out DIR`: write a folder ready for a model hub; nothing is uploaded."""

from jaxrl.cli import Parser, cache_compilations, require_devices, run_main  # first, for it takes the signals

# isort: split
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl.envs import Env, HostEnv
from jaxrl.errors import SettingsError, check_between, check_count, print_line, say
from jaxrl.evaluate import add_env_options, add_which, env_of, load_named
from jaxrl.exporting import stablehlo
from jaxrl.exporting.card import card, results, weights
from jaxrl.exporting.function import described, function_of
from jaxrl.exporting.writing import MARK, require_room, write
from jaxrl.play import play, write_gif
from jaxrl.reports.exports import require_outside
from jaxrl.training import GreedyPolicy
from jaxrl.training.evaluator import evaluator_for
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.members import resolve
from jaxrl.training.storage.run_dir import CONFIG, read_metadata

RESULTS = "results.json"


def main(args: Sequence[str]) -> int:
    """Parse, load, evaluate, write; return the exit code."""
    parser = Parser(
        "python -m jaxrl.publish",
        description="Write a folder ready for a model hub: a card with the results of fresh episodes, settings, "
        "weights, the policy as StableHLO, and an episode as a picture. It only writes, and uploads nothing.",
        epilog="Example: python -m jaxrl.publish runs/cartpole --out cartpole-dqn",
    )
    add_which(parser)
    add_env_options(parser)
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace that directory if it was written like this")
    parser.add_argument("--episodes", type=int, default=100, help="fresh greedy episodes (default: 100)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the episodes (default: 1000000)")
    options = parser.parse_args(args)
    check_count("--episodes", options.episodes)
    check_between("--seed", options.seed, 0, 2**32 - 1)
    out, run = Path(options.out), resolve(options.run_dir, options.member)
    require_outside(out, [options.run_dir])
    require_room(out, options.overwrite, RESULTS)
    cache_compilations()
    require_devices()
    policy = load_named(options)
    env = env_of(policy, options.env, options.env_args)
    judged = evaluator_for(env, policy.policy, options.episodes)(policy.params, jax.random.key(options.seed))
    report, film = judged.report(), _film(env, policy)
    versions = {name: str(value) for name, value in dict(read_metadata(run).get("versions") or {}).items()}
    function = function_of(policy)
    told = json.dumps({"format": "stablehlo", **described(function, policy.facts)}, indent=2) + "\n"
    exported = {**stablehlo.files(function), MARK: told.encode()}
    files = {
        "README.md": card(policy, report, versions, options.seed, bool(film)).encode(),
        RESULTS: results(policy, report, versions, options.seed, state_digest(policy.params)).encode(),
        "weights.npz": weights(policy),
        CONFIG: (run / CONFIG).read_bytes(),
        **{f"policy/{name}": content for name, content in exported.items()},
        **({"episode.gif": film} if film else {}),
    }
    write(files, out)
    print_line(f"{out}: return {report.returns['mean']:.6g} over {report.episodes} episodes; nothing was uploaded")
    return 0


def _film(env: Env | HostEnv, policy: GreedyPolicy) -> bytes:
    """Return an episode as a GIF, or nothing where the environment draws no pictures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode.gif"
        try:
            write_gif(play(env, policy, 0, 500)[0], path, 30)
        except SettingsError as error:
            say(f"without a picture: {error}")
            return b""
        return path.read_bytes()


if __name__ == "__main__":
    run_main(main)
