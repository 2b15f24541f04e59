"""`python -m benchmarks.peers [PEER ...] [--opt-steps N] [--rounds N] [--json FILE]`: jaxrl beside its peers.

A peer trains one of the tasks of `settings.py`, DQN unless its name says otherwise, and jaxrl the same in each round.
Each peer is installed from the package index, or from its repository, into an environment of its own, which is kept for
the next time. The
processes take turns, a round at a time; each trains as long again before what is timed, so that nothing is compiled or
warmed up within. A peer that cannot be installed or run is reported with what it said last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.peers import settings

HERE = Path(__file__).parent


class Peer(NamedTuple):
    """How to install and run a peer."""

    requirements: tuple[str, ...]
    command: tuple[str, ...]
    """A script of this folder; the optimisation steps and the task come after its name."""
    task: str = "dqn"
    home: str = ""
    """The name of its environment, where that is not the peer's own."""
    source: tuple[str, str] | None = None
    """Repository and commit, where there is no package; cloned into `source` of its environment."""


TORCH = "torch==2.13.0"
"""Named exactly, so that the wheel without CUDA is taken where there is one."""

REJAX = Peer(("rejax", "gymnax<1"), ("with_rejax.py",), home="rejax")
PUREJAXRL = Peer(
    ("gymnax<1", "flashbax", "distrax", "optax"),
    ("with_purejaxrl.py",),
    home="purejaxrl",
    source=("https://github.com/luchris429/purejaxrl", "31756b197773a52db763fdbe6d635e4b46522a73"),
)

PEERS = {
    "stable-baselines3": Peer(("stable-baselines3", TORCH), ("with_sb3.py", "stable_baselines3")),
    "sbx": Peer(("sbx-rl", TORCH), ("with_sb3.py", "sbx")),
    "tianshou": Peer(("tianshou>=2", TORCH), ("with_tianshou.py",)),
    "rejax": REJAX,
    **{f"rejax-{task}": REJAX._replace(task=task) for task in settings.TASKS if task != "dqn"},
    "purejaxrl": PUREJAXRL,
    **{f"purejaxrl-{task}": PUREJAXRL._replace(task=task) for task in settings.TASKS if task not in ("dqn", "sac")},
}


def home() -> Path:
    """Return where the environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxrl" / "peers"


def install(name: str, peer: Peer) -> Path:
    """Return the Python of the environment of a peer, made now if it is not there yet."""
    place = home() / (peer.home or name)
    python, installed = place / "bin" / "python", place / "installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True, capture_output=True)
        pip = [python, "-m", "pip", "install", "--quiet", *peer.requirements]
        subprocess.run(pip, check=True, capture_output=True, text=True)
        if source := peer.source:
            clone(place / "source", *source)
        installed.touch()
    return python


def clone(place: Path, repository: str, commit: str) -> None:
    """Check out a commit of a repository in `place`."""
    for git in (["clone", "--quiet", repository, place], ["-C", place, "checkout", "--quiet", commit]):
        subprocess.run(["git", *git], check=True, capture_output=True, text=True)


def measure(python: Path | str, command: tuple[str, ...], task: str, steps: int) -> dict[str, Any]:
    """Run a script of this folder once; return what it told."""
    script, *rest = command
    steps = max(1, steps // settings.TASKS[task].slowness)
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [python, HERE / script, str(steps), task, *rest],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths if python == sys.executable else str(HERE)},
    )
    try:
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        why = f"{script} told no result as its last line"
        raise subprocess.CalledProcessError(done.returncode, script, stderr=why) from None
    return told


def said(error: subprocess.CalledProcessError) -> str:
    """Return the last line of what a failed process said."""
    text = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {error.returncode}"


def main() -> None:
    """Install, measure in turn, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--opt-steps", type=int, default=3_000, help="optimisation steps timed in one turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    unknown = sorted(set(options.peers) - set(PEERS))
    if unknown:
        parser.error(f"unknown peer {unknown[0]}; known: {', '.join(PEERS)}")
    names, failures = options.peers or list(PEERS), {}
    tasks = dict.fromkeys(PEERS[name].task for name in names)
    peers = {ours(task): Peer((), ("ours.py",), task) for task in tasks}
    pythons: dict[str, Path | str] = dict.fromkeys(peers, sys.executable)
    for name in names:
        print(f"installing {name} ...", file=sys.stderr, flush=True)
        try:
            pythons[name], peers[name] = install(name, PEERS[name]), PEERS[name]
        except subprocess.CalledProcessError as error:
            failures[name] = f"cannot be installed: {said(error)}"
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for turn in range(options.rounds):
        for name in [name for name in pythons if name not in failures]:
            print(f"round {turn + 1}: {name} ...", file=sys.stderr, flush=True)
            try:
                told[name].append(measure(pythons[name], peers[name].command, peers[name].task, options.opt_steps))
            except subprocess.CalledProcessError as error:
                failures[name] = f"cannot be run: {said(error)}"
    for name in [name for name in peers if name not in failures and ours(peers[name].task) in failures]:
        failures[name] = f"has nothing to be compared with: {ours(peers[name].task)} failed"
    rows = [
        row(name, peers[name].task, results, told[ours(peers[name].task)])
        for name, results in told.items()
        if name not in failures
    ]
    print(harness.table(rows))
    for name, why in failures.items():
        print(f"{name:<22}{why}")
    if options.json:
        harness.write(
            options.json, [*rows, *({"case": "peers", "name": n, "failed": why} for n, why in failures.items())]
        )


def ours(task: str) -> str:
    """Return the name of jaxrl's own row of a task."""
    return "jaxrl" if task == "dqn" else f"jaxrl-{task}"


def row(name: str, task: str, told: list[dict[str, Any]], jaxrl: list[dict[str, Any]]) -> harness.Row:
    """Return the row of a peer. Its `ceiling` is jaxrl in the same rounds: `ratio` says how many times slower it is."""
    return harness.row(
        "peers",
        [result["us_per_opt_step"] for result in told],
        [result["us_per_opt_step"] for result in jaxrl],
        settings.TASKS[task].env_steps,
        name=name,
        task=task,
        versions=told[0]["versions"],
        settings=settings.TASKS[task]._asdict(),
        learnt={
            "opt_steps": told[0]["learnt"]["opt_steps"],
            "mean_return": statistics.median(result["learnt"]["mean_return"] for result in told),
        },
    )


if __name__ == "__main__":
    main()
