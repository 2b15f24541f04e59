"""Long runs: all of it at once, kills, signals and full disks over one; and one of PPO that nobody disturbs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from soak import read_rows, verified


@pytest.mark.slow
def test_a_run_ends_in_the_same_bits_whatever_is_done_to_it(tmp_path: Path) -> None:
    minutes = os.environ.get("SOAK_MINUTES", "30")
    command = [sys.executable, str(Path(__file__).parent / "soak.py"), minutes, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_run_of_ppo_that_nobody_disturbs_holds_no_more_and_misses_no_row(tmp_path: Path) -> None:
    minutes, run, every = float(os.environ.get("SOAK_MINUTES", "10")), tmp_path / "run", 2_000
    args = [
        *("ppo", "--env", "CartPole-v1", "--max-opts", "4000000000", "--run-dir", str(run), "--quiet"),
        *("--record-interval", str(every), "--eval-interval", str(every), "--save-interval", str(every)),
    ]
    process = subprocess.Popen([sys.executable, "-m", "jaxrl.train", *args], stderr=subprocess.PIPE, text=True)
    sizes = []
    for _ in range(10):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6 * minutes)
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (143, "")
    end = json.loads((run / "metadata.json").read_text())["opt_steps"]
    for kind in ("train", "eval"):
        rows = [row["opt_steps"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == kind]
        # The first boundary at or past each multiple of the interval, each once.
        assert [step // every for step in rows] == list(range(1, end // every + 1))
    assert all(" ok " in line for line in verified(run))
    # After the first two tenths of the time all is compiled and every buffer has been used.
    assert max(sizes[2:]) - sizes[2] < 32 << 20, sizes
