"""`python -m jaxrl.play RUN_DIR --out episode.gif`: render one greedy episode of a run's best policy."""

from jaxrl.cli.main import Parser, path_arg, run_main  # first: it installs signal handlers

# isort: split
from collections.abc import Sequence
from pathlib import Path

from jaxrl.errors import SettingsError, check_between, print_line
from jaxrl.evaluate import add_env_options, add_which, env_of, load_named
from jaxrl.paths import require_writable_file
from jaxrl.training.film import player, require_writer, write_film
from jaxrl.training.settings import FORMATS


def main(args: Sequence[str]) -> int:
    """Parse, load, play, write; return the exit code."""
    parser = Parser(
        "play",
        "runs/cartpole --out episode.gif",
        description="Film one greedy episode of the best policy of a run.",
    )
    add_which(parser)
    add_env_options(parser)
    parser.add_argument(
        "--out", type=path_arg, default="episode.gif", help="GIF or MP4 to write, by its name (default: episode.gif)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the episode (default: 0)")
    parser.add_argument("--max-steps", type=int, default=1_000, help="environment steps at most (default: 1000)")
    parser.add_argument("--fps", type=int, default=30, help="frames per second (default: 30; a GIF shows at most 50)")
    options = parser.parse(args)
    check_between("--seed", options.seed, 0, 2**32 - 1)
    if options.max_steps < 1 or not 1 <= options.fps <= 100:
        raise SettingsError("--max-steps must be at least 1 and --fps from 1 to 100")
    require_writable(Path(options.out))
    policy = load_named(options)
    play = player(env_of(policy, options.env, options.env_args))
    frames, total = play(policy, options.seed, options.max_steps)
    write_film(frames, Path(options.out), options.fps, format_of(options.out))
    print_line(f"{options.out}: {len(frames)} frames, return {total:.6g}")
    return 0


def require_writable(path: Path) -> None:
    """Raise `SettingsError` unless `path` has a film's suffix and is writable; an existing file is not changed."""
    if (form := format_of(path)) not in FORMATS:
        raise SettingsError(f"--out is {str(path)!r}; expected a name that ends with .gif or .mp4")
    require_writer(form)
    require_writable_file(path)


def format_of(path: str | Path) -> str:
    """Return the format of a film by its suffix."""
    return Path(path).suffix.lower()[1:]


if __name__ == "__main__":
    run_main(main)
