"""Kill, interrupt and starve one run at random for a while, then see whether it ended in the same bits as its twin.

`python soak.py MINUTES DIR [SEED]` prints a report as JSON; it ends with 1 if anything was lost or went wrong.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

RUN = (
    *("--env", "CartPole-v1", "--agent.features", "256", "128", "--save-interval", "400", "--eval-interval", "1000"),
    *("--eval-episodes", "5", "--record-interval", "200", "--keep", "3", "--seed", "11", "--quiet"),
    # Given, as the preset's would follow the length, which the twin has another of.
    *("--agent.lr-decay", "20000", "--agent.epsilon-decay", "5000"),
)
FOREVER = 50_000_000
UNLIMITED = resource.RLIM_INFINITY


class Soak:
    """One run and what was done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.run, self.chance = folder / "run", random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.lost: list[int] = []
        self.wrong: list[str] = []

    def disturb(self, until: float) -> None:
        """Start the run again and again until `until` on the monotonic clock, and end it each time in some way."""
        while time.monotonic() < until:
            before, resumed = last_step(self.run), resumption(self.run)
            process = self.start()
            self.torment(process)
            _, errors = process.communicate()
            self.counts[f"exit code {process.returncode}"] += 1
            if process.returncode not in (-signal.SIGKILL, 130, 143, 5) or "Traceback" in errors:
                self.wrong.append(f"exit code {process.returncode}: {errors[-500:]}")
            if before is not None and (anew := resumption(self.run)) not in (None, resumed):
                self.lost.append(max(0, before - anew["opt_steps"]))

    def start(self) -> "subprocess.Popen[str]":
        self.counts["processes"] += 1
        if (self.run / "config.yaml").exists():
            return train("--resume", str(self.run))
        return train(*RUN, "--max-opts", str(FOREVER), "--run-dir", str(self.run))

    def torment(self, process: "subprocess.Popen[str]") -> None:
        """Let the run go on for a random time, perhaps with a disk that is full for some of it, then end it."""
        self.wait(process, self.chance.uniform(0.5, 20.0))
        if self.chance.random() < 0.4 and process.poll() is None:
            self.counts["full disks"] += 1
            limit = self.chance.choice([0, 100, 4_000, 60_000, 200_000])
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, UNLIMITED))
            self.wait(process, self.chance.uniform(0.1, 5.0))
            if self.chance.random() < 0.7 and process.poll() is None:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
                self.wait(process, self.chance.uniform(0.1, 5.0))
        number = self.chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        self.counts[signal.Signals(number).name] += 1
        process.send_signal(number)
        if number != signal.SIGKILL and self.chance.random() < 0.3:
            self.counts["second signals"] += 1
            process.send_signal(number)

    def wait(self, process: "subprocess.Popen[str]", seconds: float) -> None:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return

    def compare(self) -> dict[str, Any]:
        """Bring the run to an end a little further on, train its twin as far, and compare their digests."""
        steps = (last_step(self.run) or 0) + 1_000
        # Saved anew, the last checkpoint of both is at the same step.
        for args in (("--resume", str(self.run)), (*RUN, "--run-dir", f"{self.run}-twin")):
            code = train(*args, "--max-opts", str(steps)).wait()
            if code:
                self.wrong.append(f"exit code {code} of the last stretch")
        mine, twin = (verified(path) for path in (self.run, Path(f"{self.run}-twin")))
        rows = [metric_rows(path) for path in (self.run, Path(f"{self.run}-twin"))]
        return {
            "opt_steps": steps,
            "digest": mine[-1] if mine else None,
            "bit-equal": bool(mine) and mine[-1] == twin[-1],
            "same rows": rows[0] == rows[1],
            "bad checkpoints": [line for line in mine if " ok " not in line],
        }


def train(*args: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "jaxrl.train", *args]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def verified(run: Path) -> list[str]:
    """Return the lines of `jaxrl.verify` on checkpoints, of which the last is that of the newest."""
    done = subprocess.run([sys.executable, "-m", "jaxrl.verify", str(run)], stdout=subprocess.PIPE, text=True)
    return [line for line in done.stdout.splitlines() if line[:1].isdigit()]


def last_step(run: Path) -> int | None:
    """Return the newest optimisation step that the log tells of."""
    rows = read_rows(run / "metrics.jsonl")
    return rows[-1]["opt_steps"] if rows else None


def resumption(run: Path) -> Any:
    """Return the row that tells where a process last took the run up, if one came so far."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("event") == "resume"]
    return rows[-1] if rows else None


def metric_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the log less events and what the clock measured."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] != "event"]
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.endswith(("_per_sec", "_mb"))} for row in rows]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole rows of a log."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def main(minutes: float, folder: Path, seed: int = 0) -> int:
    """Disturb, compare, report; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XDG_CACHE_HOME", str(folder / "cache"))
    soak = Soak(folder, seed)
    soak.disturb(time.monotonic() + 60 * minutes)
    outcome = soak.compare()
    report = {
        "minutes": minutes,
        **dict(sorted(soak.counts.items())),
        "most optimisation steps lost at once": max(soak.lost, default=0),
        "optimisation steps lost in all": sum(soak.lost),
        **outcome,
        "went wrong": soak.wrong,
    }
    print(json.dumps(report, indent=2))
    good = outcome["bit-equal"] and outcome["same rows"] and not soak.wrong and not outcome["bad checkpoints"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))
