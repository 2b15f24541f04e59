"""What only Linux has may be missing: trained, saved and gone on from without it, as on macOS."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_LINUX = """
import builtins, ctypes, io, os, select

for module, names in {os: ["sched_getaffinity", "posix_fallocate", "pidfd_open", "eventfd"], select: ["epoll"]}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library

def without_proc(function):
    def wrapped(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)
    return wrapped

builtins.open = io.open = without_proc(open)
os.listdir = without_proc(os.listdir)
"""
TRAINING = """
import sys
import jaxrl
sys.path.insert(0, sys.argv[2])
from toys_trainer import counting

run, settings = sys.argv[1], {"eval_interval": 10, "eval_episodes": 2, "save_interval": 10, "quiet": True}
env = jaxrl.make_env("CartPole-v1")
agent = jaxrl.dqn(features=(4,))
strategy = jaxrl.off_policy(env, agent, buffer=jaxrl.uniform(64, batch_size=8), warmup=16)
jaxrl.Trainer(strategy, max_opts=20, run_dir=run, **settings).train()
result = jaxrl.Trainer(strategy, max_opts=40, run_dir=run, resume=True, **settings).train()
assert result.summary["opt_steps"] == 40
assert int(jaxrl.load_policy(run)([0.0, 0.0, 0.0, 0.0])) in (0, 1)
members, settings = jaxrl.population(counting(), seeds=2), {**settings, "eval_interval": 0, "eval_episodes": 0}
assert len(jaxrl.Trainer(members, max_opts=20, run_dir=f"{run}-members", **settings).train().members) == 2
"""


@pytest.mark.usefixtures("shared_programs")
def test_a_run_and_a_population_need_nothing_that_only_linux_has(tmp_path: Path) -> None:
    args = [sys.executable, "-c", WITHOUT_LINUX + TRAINING, str(tmp_path / "run"), str(Path(__file__).parents[1])]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"opt_steps": 40' in rows
    assert "rss_mb" not in rows
