"""Time a report on ten long runs: `python -m benchmarks.reports [ROWS] [RUNS]`.

Where a Chromium is installed, also how long it takes to open the page and draw it.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

from jaxrl.reports.groups import group_runs, remarks
from jaxrl.reports.page import page, plotly
from jaxrl.reports.read import read_runs

METRICS = ("approx_kl", "clip_fraction", "entropy", "episode_length", "episode_return", "grad_norm", "loss", "value")
"""Each with its least and largest value in a row, which makes it some 1.2 kB, as a row of PPO is."""

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
SHOWN = """<script>
requestAnimationFrame(() => requestAnimationFrame(() => console.log(`shown after ${performance.now()} ms`)));
</script></body>"""
"""Tells when the page stands, counted from when it was asked for: a picture later than it was drawn."""


class Opened(NamedTuple):
    """A page as a browser has drawn it."""

    seconds: float
    """From asking for it to its first whole picture; NaN if there was none."""
    dom: str
    console: tuple[str, ...]
    """What else the browser's console says, errors among it."""


def chromium() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def opened(browser: str, text: str, folder: Path) -> Opened:
    """Open the page `text` in a headless browser, whose profile goes into `folder`.

    Raises:
      subprocess.SubprocessError: the browser failed, or took more than two minutes.
    """
    file = folder / "opened.html"
    file.write_text(SHOWN.join(text.rsplit("</body>", 1)))
    return visited(browser, file, folder)


def visited(browser: str, file: Path, folder: Path) -> Opened:
    """Open the page in `file` as `opened` does; it has taken no time that is known unless it tells."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *QUIET]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    shown = [float(found[1]) / 1000 for line in said if (found := re.search(r"shown after ([\d.]+) ms", line))]
    errors = tuple(line for line in said if "shown after" not in line)
    return Opened(shown[0] if shown else float("nan"), done.stdout, errors)


def write(path: Path, seed: int, rows: int) -> None:
    """Write a run of `rows` rows of metrics and a tenth as many evaluations."""
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", "env": "CartPole-v1", "seed": seed}))
    (path / "metadata.json").write_text(json.dumps({"format": 1, "status": "running"}))
    columns = {f"{name}{part}": 0.5426123456789 for name in METRICS for part in ("", "_min", "_max")}
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(1, rows + 1):
            place = {"opt_steps": 10 * i, "env_steps": 320 * i, "wall_s": round(0.01 * i, 3)}
            columns["episode_return"] = (i * (seed + 7)) % 501
            row = {"kind": "train", **place, "opt_steps_per_sec": 2194.485, **columns, "skipped_updates": 0}
            file.write(json.dumps(row) + "\n")
            if i % 10 == 0:
                file.write(json.dumps({"kind": "eval", **place, "episodes": 20, "score": 500 * i / rows}) + "\n")


def sixty(folder: Path) -> list[str]:
    """Write sixty runs of 2,000 rows, three seeds of twenty settings, and return their paths."""
    paths = [folder / f"run{i}" for i in range(60)]
    for i, path in enumerate(paths):
        write(path, i % 3, 2_000)
        settings = yaml.safe_load((path / "config.yaml").read_text())
        (path / "config.yaml").write_text(yaml.safe_dump({**settings, "agent": {"lr": 1e-4 * (1 + i // 3)}}))
        rows = [{"opt_steps": 20_000, "episode": k, "return": (37 * k + 11 * i) % 501} for k in range(20)]
        (path / "eval_episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(map(str, paths))


def browse(browser: str, times: int = 5) -> None:
    """Open a page of sixty runs some times, and print how long that takes."""
    with tempfile.TemporaryDirectory() as folder:
        found = group_runs(read_runs(sixty(Path(folder))))
        text = page(found, remarks(found), plotly())
        seconds = sorted(opened(browser, text, Path(folder)).seconds for _ in range(times))
    print(f"page of 60 runs, {len(text) / 2**20:.1f} MiB, open and drawn in {seconds[0]:.2f} to {seconds[-1]:.2f} s")


def main(rows: int = 100_000, runs: int = 10) -> None:
    """Write runs, read them, make a page; print the seconds of each, by the wall and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"run{i}" for i in range(runs)]
        for seed, path in enumerate(paths):
            write(path, seed, rows)
        size = sum(file.stat().st_size for path in paths for file in path.iterdir())
        begun = time.perf_counter(), time.process_time()
        found = group_runs(read_runs(map(str, paths)))
        read = time.perf_counter(), time.process_time()
        text = page(found, remarks(found), "")
        done = time.perf_counter(), time.process_time()
    for what, start, end in (("read", begun, read), ("page", read, done), ("both", begun, done)):
        print(f"{what}: {end[0] - start[0]:.2f} s, of the processor {end[1] - start[1]:.2f} s")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{runs} runs of {rows} rows, {size / 2**20:.0f} MiB; page {len(text) / 2**20:.1f} MiB; memory {most:.0f} MiB"
    )
    if (browser := chromium()) is not None:
        browse(browser)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
