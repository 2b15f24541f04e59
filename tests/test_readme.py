"""The code blocks of README and docs, run as they stand; those that train, for what they reach on three seeds."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl
from benchmarks.learning import steadiness

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


def block(name: str) -> str:
    """Return the code block that follows the marker `name`, in README or docs."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", PAGES, re.DOTALL)
    assert found, name
    return found.group(1)


def run(code: str, directory: Path) -> str:
    """Run `code` in this process, as a notebook does; return what it printed."""
    with contextlib.chdir(directory), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def run_alone(code: str, directory: Path) -> str:
    """Run `code` in a fresh process, where JAX promotes ranks; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seeded(name: str, seed: int) -> str:
    """Return the block `name` with another seed for what it trains."""
    code, count = re.subn(r"(Trainer\(\w+, |epsilon_decay=2_000\), )", rf"\1seed={seed}, ", block(name))
    assert count, name
    return code


def scores(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["eval_reward"] for row in rows if row["kind"] == "eval"]


def fresh(run_dir: Path) -> float:
    """Return the mean return of 100 fresh episodes of the best policy, as the command line tells it."""
    command = [sys.executable, "-m", "jaxrl.evaluate", str(run_dir)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1])


def steady(run_dir: Path) -> bool:
    """Return whether a run on CartPole has learnt for good: ten evaluations and more follow the first good one."""
    told = steadiness(scores(run_dir), 475.0)
    return told["later"] >= 10 and told["steady"] >= 0.9 and told["last_good"] and fresh(run_dir) >= 475


def pendulum(line: str, path: Path) -> bool:
    """Doing nothing comes to some -1200; published results are -150 to -172. Upright, hardly anything is to be done."""
    best, action = line.split(maxsplit=1)
    return float(best) > -220 and abs(float(action.strip("[]"))) < 2.0


def masks(line: str, path: Path) -> bool:
    """Whoever never takes the last action comes to 10, who takes it as long as there is fuel to 10, 11 or 12."""
    best, action = line.split()
    return 10 < float(best) <= 12 and int(action) == 1


def composite(line: str, path: Path) -> bool:
    best, move, where = line.split()
    return 0.98 < float(best) <= 1 and int(move) == 2 and 0.5 < float(where.strip("[]")) < 0.7


def privileged(line: str, path: Path) -> bool:
    """Doing nothing comes to some -9: a third for each of 20 steps, and what the wind adds. The aim is to the left."""
    return max(scores(path / "runs" / "wind")) > -2 and -1 <= float(line.strip("[]")) < 0


LEARNT: dict[str, Callable[[str, Path], bool]] = {
    "library": lambda line, path: steady(path / "runs" / "cartpole"),
    # The best action stays near 0, where the reward is 1; random actions drift off to half of it.
    "environment": lambda line, path: 40 < float(line.split()[0]) <= 50,
    "strategy": lambda line, path: eval(line)[2] > 180,
    "on-policy": pendulum,
    "off-policy": pendulum,
    "session": lambda line, path: min(map(float, line.split())) >= 475,
    "offline": lambda line, path: float(line.split()[0]) >= 475 and int(line.split()[1]) in (0, 1),
    "masks": masks,
    "composite": composite,
    "privileged": privileged,
    "hooks": lambda line, path: float(line.split()[1]) > 100,  # a push at random holds the pole for some 22 steps
    "schedules": lambda line, path: min(map(float, line.split()[-2:])) >= 475,
}
"""Blocks that train, with whether the last line that they print and what they leave shows that it was learnt."""


@pytest.mark.every_day("environment-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LEARNT)
def test_an_example_learns(name: str, seed: int, tmp_path: Path) -> None:
    code = seeded(name, seed)
    line = (run_alone if name == "strategy" else run)(code, tmp_path).splitlines()[-1:]
    assert LEARNT[name]("".join(line), tmp_path), line


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_first_command_learns_for_good(seed: int, tmp_path: Path) -> None:
    assert "-m jaxrl.train\n" in block("train-command")
    command = [sys.executable, "-m", "jaxrl.train", "--seed", str(seed), "--run-dir", "run"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    assert steady(tmp_path / "run")


# --- that they run, and that what is short learns already -------------------------------------------------------


@pytest.mark.slow
def test_a_core_of_ones_own_remembers(tmp_path: Path) -> None:
    """Chance names one symbol of four."""
    assert float(run_alone(block("core"), tmp_path)) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_networks_of_ones_own_learn(seed: int, tmp_path: Path) -> None:
    code = seeded("networks", seed)
    run(code, tmp_path)
    assert max(scores(tmp_path / "runs" / "own")) > 100
    assert float(run(seeded("networks-nnx", seed), tmp_path).splitlines()[-1]) > 200
    assert float(run(seeded("networks-train", seed), tmp_path).split()[-1]) > 200


@pytest.mark.slow
def test_session(tmp_path: Path) -> None:
    code = block("session")
    short = code.replace("1_000 == 0", "100 == 0").replace("range(20)", "range(2)").replace("range(100)", "range(3)")
    best, over_fresh = run(short.replace("max_opts=20_000", "max_opts=200"), tmp_path).split()
    assert min(float(best), float(over_fresh)) >= 8
    # Once more, with more to do: it goes on from there.
    run(short.replace("max_opts=20_000", "max_opts=300"), tmp_path)
    steps = [int(path.name) for path in (tmp_path / "runs" / "mine" / "checkpoints").iterdir()]
    assert {200, 300} <= set(steps)


@pytest.mark.slow
def test_parts_of_a_network_learn_at_rates_of_their_own() -> None:
    """The first step of Adam is as long as its rate, in each parameter that has a gradient."""
    names: dict[str, Any] = {}
    exec(block("networks-rates"), names)
    env = jaxrl.make_env("CartPole-v1")
    strategy = jaxrl.on_policy(env, names["agent"], num_envs=2, rollout=8, epochs=1, minibatches=1)
    begun: list[Any] = []
    keep = jaxrl.Hooks(start=lambda trainer: begun.append(jax.tree.map(np.array, trainer.state.agent.params["params"])))
    trainer = jaxrl.Trainer(strategy, hooks=keep, max_opts=1, eval_interval=0, eval_episodes=0, quiet=True)
    after = trainer.train().state.agent.params["params"]
    for part, old in begun[0].items():
        moved = max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), old, after[part])))
        assert moved == pytest.approx(2.5e-5 if "torso" in part else 2.5e-4, rel=0.01), part


def training() -> list[str]:
    """Return the names of the blocks that train in a directory."""
    blocks = re.findall(r"<!-- ([\w-]+) -->\n```python\n(.*?)```", PAGES, re.DOTALL)
    return [name for name, code in blocks if "run_dir" in code and name != "session"]


@pytest.mark.slow
@pytest.mark.parametrize("name", training())
def test_a_block_that_trains_can_be_run_again(name: str, tmp_path: Path) -> None:
    code = re.sub(r"((?:max_opts|eval_interval|record_interval)\W+)[\d_]+", r"\g<1>64", block(name))
    run_alone(f"{code}\n\n{code}", tmp_path)


@pytest.mark.slow
def test_recorders_of_ones_own(tmp_path: Path) -> None:
    told = run(block("recorders"), tmp_path).splitlines()
    assert told[0] == "mine ('ppo', 'CartPole-v1') 0.001 0"
    assert float(told[1].split()[1]) > 8
    assert told[-1] == "done"
    assert (tmp_path / "runs" / "mine" / "metrics.csv").read_text().startswith("kind,opt_steps,env_steps,")


@pytest.mark.slow
def test_a_service_of_ones_own(tmp_path: Path) -> None:
    code = block("recorders-service")
    run(code, tmp_path)
    run(code.replace('"max_opts": 640', '"max_opts": 960').replace('"start_over"', '"resume"'), tmp_path)
    told = [f"{kind} {step}" for step in (320, 640, 960) for kind in ("eval", "train")]
    assert (tmp_path / "server.txt").read_text().splitlines() == told
    assert json.loads((tmp_path / "runs" / "mine" / "lab.json").read_text())["id"] == "mine"


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_whoever_cites_it_cites_this_version() -> None:
    told = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert told is not None
    assert told.group(1) == jaxrl.__version__
    assert f"## {jaxrl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len([line for line in block("library").splitlines() if line.strip()]) <= 12


@pytest.mark.slow
def test_the_population_example_finds_the_better_setting(tmp_path: Path) -> None:
    *table, told = run(block("population"), tmp_path).splitlines()
    assert [line.split()[-1] for line in table[1:]] == ["agent.lr=0.001", "agent.lr=1e-05"]
    assert told.startswith("{'agent.lr': 0.001} ")
    assert float(told.split()[2]) > 400
    assert told.endswith("(4, 5, 6, 7)")
    assert (tmp_path / "runs/lr/best").is_dir()


@pytest.mark.slow
def test_optuna_finds_a_setting_that_learns_and_ends_others_early(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    best, pruned = run_alone(block("optuna"), tmp_path).splitlines()
    assert float(best.split()[-1]) >= 475
    assert 1e-4 < eval(best.rsplit(maxsplit=1)[0])["agent.lr"] < 5e-2
    assert int(pruned.split()[0]) >= 1


@pytest.mark.slow
def test_ray_tune_runs_trials_in_processes_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    best = run_alone(block("ray"), tmp_path).splitlines()[-1]
    assert float(best.split()[-1]) >= 475
    assert 1e-5 <= eval(best.rsplit(maxsplit=1)[0])["agent.lr"] <= 1e-1
    assert len(list((tmp_path / "ray").glob("*/trial_*"))) == 4


@pytest.mark.slow
def test_the_report_example_tells_both_runs(tmp_path: Path) -> None:
    assert run(block("report"), tmp_path).splitlines()[-1] == "iqm.csv: 2 runs, 1 setting, over environment steps"
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == {"seed-0", "seed-1"}
    assert len(lines) == 1 + 2 * 2


@pytest.mark.slow
def test_an_exported_policy_acts(tmp_path: Path) -> None:
    in_numpy = run_alone(block("export"), tmp_path).splitlines()[-1]
    assert in_numpy in ("0", "1")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc")
    (tmp_path / "main.c").write_text(block("export-main"))
    commands = "set -e\n" + re.sub(r"^python ", f"{sys.executable} ", block("export-c"), flags=re.MULTILINE)
    done = subprocess.run(["sh", "-c", commands], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == in_numpy


@pytest.mark.slow
def test_hooks_and_columns(tmp_path: Path) -> None:
    lines = [line.split() for line in run(block("hooks"), tmp_path).splitlines() if line[0].isdigit()]
    assert [int(step) for step, _, _ in lines] == [500, 1_000, 1_500, 2_000]
    assert all(0 <= float(held) <= 1 and (float(reward) < 200 or float(held) > 0) for _, reward, held in lines)
    rows = map(json.loads, (tmp_path / "held" / "metrics.jsonl").read_text().splitlines())
    assert [row["norm"] > 1 for row in rows if "norm" in row] == [True, True]


@pytest.mark.slow
def test_a_student_learns_from_the_teacher_of_another_run(tmp_path: Path) -> None:
    env = jaxrl.make_env("CartPole-v1")
    teacher = jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=8, rollout=64, epochs=1, minibatches=1)
    jaxrl.Trainer(teacher, max_opts=2, eval_interval=2, run_dir=str(tmp_path / "runs" / "teacher"), quiet=True).train()
    (tmp_path / "hidden.py").write_text(block("hidden"))
    code = block("teacher").replace("max_opts=1_600, eval_interval=400", "max_opts=16, eval_interval=16")
    assert float(run_alone(code, tmp_path).splitlines()[-1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "long", "short", "most"),
    [
        ("randomise", "max_opts=4_000, eval_interval=1_000", "max_opts=64, eval_interval=64", 50),
        ("init-tree", "max_opts=1_600", "max_opts=16", 500),
    ],
)
def test_a_block_runs_in_short_form(name: str, long: str, short: str, most: float, tmp_path: Path) -> None:
    assert long in block(name)
    assert 0 < float(run_alone(block(name).replace(long, short), tmp_path).splitlines()[-1]) <= most
