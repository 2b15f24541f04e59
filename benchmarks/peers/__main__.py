"""`python -m benchmarks.peers [PEER ...] [--opt-steps N] [--rounds N] [--json FILE]`: jaxrl beside its peers.

Each peer is installed from the package index into an environment of its own, which is kept for the next time. The
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

HERE = Path(__file__).parent


class Peer(NamedTuple):
    """How to install and run a peer."""

    requirements: tuple[str, ...]
    command: tuple[str, ...]
    """A script of this folder; its first argument, the optimisation steps, comes after its name."""


TORCH = "torch==2.13.0"
"""Named exactly, so that the wheel without CUDA is taken where there is one."""

PEERS = {
    "stable-baselines3": Peer(("stable-baselines3", TORCH), ("sb3.py", "stable_baselines3")),
    "sbx": Peer(("sbx-rl", TORCH), ("sb3.py", "sbx")),
    "tianshou": Peer(("tianshou>=2", TORCH), ("tianshou_dqn.py",)),
    "rejax": Peer(("rejax", "gymnax<1"), ("rejax_dqn.py",)),
}


def home() -> Path:
    """Return where the environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxrl" / "peers"


def install(name: str) -> Path:
    """Return the Python of the environment of peer `name`, made now if it is not there yet."""
    python = home() / name / "bin" / "python"
    installed = home() / name / "installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home() / name], check=True, capture_output=True)
        pip = [python, "-m", "pip", "install", "--quiet", *PEERS[name].requirements]
        subprocess.run(pip, check=True, capture_output=True, text=True)
        installed.touch()
    return python


def measure(python: Path | str, command: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Run a script of this folder once; return what it told."""
    script, *rest = command
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [python, HERE / script, str(steps), *rest],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths if python == sys.executable else str(HERE)},
    )
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
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
    pythons: dict[str, Path | str] = {"jaxrl": sys.executable}
    commands, failures = {"jaxrl": ("jaxrl_dqn.py",)}, {}
    for name in options.peers or PEERS:
        print(f"installing {name} ...", file=sys.stderr, flush=True)
        try:
            pythons[name], commands[name] = install(name), PEERS[name].command
        except subprocess.CalledProcessError as error:
            failures[name] = f"cannot be installed: {said(error)}"
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for turn in range(options.rounds):
        for name in [name for name in pythons if name not in failures]:
            print(f"round {turn + 1}: {name} ...", file=sys.stderr, flush=True)
            try:
                told[name].append(measure(pythons[name], commands[name], options.opt_steps))
            except subprocess.CalledProcessError as error:
                failures[name] = f"cannot be run: {said(error)}"
    rows = [row(name, results, told["jaxrl"]) for name, results in told.items() if name not in failures]
    print(harness.table(rows))
    for name, why in failures.items():
        print(f"{name:<22}{why}")
    if options.json:
        harness.write(
            options.json, [*rows, *({"case": "peers", "name": n, "failed": why} for n, why in failures.items())]
        )


def row(name: str, told: list[dict[str, Any]], jaxrl: list[dict[str, Any]]) -> harness.Row:
    """Return the row of a peer. Its `ceiling` is jaxrl in the same rounds: `ratio` says how many times slower it is."""
    ours = [result["us_per_opt_step"] for result in jaxrl]
    return harness.row(
        "peers",
        [result["us_per_opt_step"] for result in told],
        ours,
        10,
        name=name,
        versions=told[0]["versions"],
        learnt={
            "opt_steps": told[0]["learnt"]["opt_steps"],
            "mean_return": statistics.median(result["learnt"]["mean_return"] for result in told),
        },
    )


if __name__ == "__main__":
    main()
