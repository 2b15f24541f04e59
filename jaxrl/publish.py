"""`python -m jaxrl.publish RUN_DIR --out DIR`: write a folder ready for a model hub; nothing is uploaded."""

from jaxrl.cli.main import Parser, path_arg, run_main  # first: it installs signal handlers

# isort: split
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from jaxrl.envs import Env, HostEnv
from jaxrl.errors import NoCheckpointError, SettingsError, print_line, print_stderr
from jaxrl.evaluate import add_env_options, add_episodes, add_which, check_episodes, env_of, evaluate_policy, load_named
from jaxrl.exporting.card import EvalOptions, card, portable, repeat, results, training_env, weights
from jaxrl.exporting.formats import files_of, require_room, write
from jaxrl.training import GreedyPolicy
from jaxrl.training.film import FPS, player, write_film
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.members import resolve
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS, CONFIG, read_metadata, read_settings

RESULTS = "results.json"


def main(args: Sequence[str]) -> int:
    """Parse, load, evaluate, write; return the exit code."""
    parser = Parser(
        "publish",
        "runs/cartpole --out cartpole-dqn",
        description="Write a folder ready for a model hub: a card with the results of fresh episodes, settings, "
        "weights, the policy as StableHLO, and an episode as a picture. It only writes, and uploads nothing.",
    )
    add_which(parser)
    add_env_options(parser)
    add_episodes(parser)
    parser.add_argument("--out", type=path_arg, required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace that directory if it was written like this")
    options = parser.parse(args)
    check_episodes(options)
    out, run = Path(options.out), resolve(options.run_dir, options.member)
    require_room(out, options.run_dir, options.overwrite, RESULTS)
    policy = load_named(options)
    env = env_of(policy, options.env, options.env_args)
    report, film = evaluate_policy(policy, env, options).report(), _film(env, policy)
    versions = {name: str(value) for name, value in dict(read_metadata(run).get("versions") or {}).items()}
    asked = EvalOptions(options.env, options.env_args, options.episodes, options.seed)
    settings, best = read_settings(run), policy.facts["kept_as"] == "best"
    where = asked.where(settings)
    again = repeat(settings, policy.facts["opt_steps"], best, _may_have_changed(run), asked)
    digest = state_digest(policy.params)
    files = {
        "README.md": card(policy, report, versions.get("jaxrl", ""), where, again, bool(film)).encode(),
        RESULTS: results(policy, report, versions, where or training_env(policy), options.seed, digest).encode(),
        "weights.npz": weights(policy),
        CONFIG: yaml.safe_dump(portable(settings), sort_keys=False).encode(),
        **{f"policy/{name}": content for name, content in files_of(policy, "stablehlo").items()},
        **({"episode.gif": film} if film else {}),
    }
    write(files, out)
    print_line(f"{out}: return {report.returns['mean']:.6g} over {report.episodes} episodes; nothing was uploaded")
    return 0


def _may_have_changed(run: Path) -> bool:
    """Return whether settings or versions may have changed during the run, according to its newest checkpoint."""
    try:
        return bool(open_store(run, CHECKPOINTS).newest_facts()[1]["ledger"]["changed_at"])
    except (NoCheckpointError, KeyError, TypeError):
        return True


def _film(env: Env | HostEnv, policy: GreedyPolicy) -> bytes:
    """Return an episode as a GIF, empty if the environment cannot be rendered."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode.gif"
        try:
            write_film(player(env)(policy, 0, 500)[0], path, FPS, "gif")
        except SettingsError as error:
            print_stderr(f"without a picture: {error}")
            return b""
        return path.read_bytes()


if __name__ == "__main__":
    run_main(main)
