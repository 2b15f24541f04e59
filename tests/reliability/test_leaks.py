"""A long run holds no more than a short one, and a save never sees what came after it."""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_trainer import CountState, counting, short_ppo, small_dqn

import jaxrl
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.storage.checkpoints import Store

CHUNKS, WARM = 500, 150
"""Chunks of the run, each of one optimisation step; all that is made once is made within the first so many."""
RUNS = 9
"""Short runs after the long one, in the same process."""
EVERY = 5
"""Optimisation steps between evaluations, and between saves."""
PAGE = os.sysconf("SC_PAGE_SIZE")
FLAT_BYTES = 16 * 2**20
"""What the memory of the process may grow by, after the warm part."""
GROWTH = {"threads": 4, "own_threads": 0, "files": 0, "arrays": 0, "compilations": 0}
"""What else may, in 70 saves: the thread pools of the libraries fill up when they please."""

# --- what a process holds ---------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a process holds at a moment at which nothing is being written."""

    threads: int
    own_threads: int
    files: int
    arrays: int
    compilations: int
    memory: int


def held(compilations: int) -> Held:
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return Held(threads, threading.active_count(), files, len(jax.live_arrays()), compilations, memory)


def of_the_run(run: str) -> list[str]:
    """Return the open files of this process in the directory `run`, and its threads of Python but the first."""
    files = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue  # the list itself
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return [*(file for file in files if file.startswith(run)), *threads]


def judge(params: CountState, key: jax.Array) -> Evaluation:
    """Judge the counting strategy by a compiled program."""
    returns = jax.jit(_returns)(params.walk, key)
    return Evaluation(np.asarray(returns), np.ones(2, int), np.ones(2, bool))


def _returns(walk: jax.Array, key: jax.Array) -> jax.Array:
    return walk + jax.random.normal(key, (2,))


STRATEGIES: dict[str, Any] = {
    "toy": lambda: {"strategy": counting(), "evaluator": judge},
    "dqn": lambda: {"strategy": small_dqn(), "eval_episodes": 2},
    "ppo": lambda: {"strategy": short_ppo(), "eval_episodes": 2},
}


def long_run(directory: str, kind: str) -> None:
    """Train in one process, again and again; print what it held on the way, and after each run."""
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
    )
    seen: list[Held] = []
    counts = {"chunk": 0, "evaluation": 0, "save": 0}

    def count(what: str) -> Any:
        return lambda *_: counts.update({what: counts[what] + 1})

    def train(name: str, max_opts: int) -> list[str]:
        hooks = jaxrl.Hooks(chunk=count("chunk"), evaluation=count("evaluation"), save=count("save"))
        trainer = jaxrl.Trainer(
            **STRATEGIES[kind](),
            max_opts=max_opts,
            eval_interval=EVERY,
            record_interval=EVERY,
            save_interval=EVERY,
            run_dir=str(Path(directory, name)),
            quiet=True,
            max_chunk=1,
            hooks=hooks,
        )
        for report in trainer:
            if name == "long" and report.opt_steps % 50 == 0:
                trainer._storage.checkpoints._job.result()  # type: ignore[union-attr]
                seen.append(held(len(compilations)))
        return of_the_run(directory)

    left, after = [train("long", CHUNKS)], []
    for number in range(RUNS):
        left.append(train(f"short{number}", EVERY))
        after.append(len(os.listdir("/proc/self/task")))
    print(json.dumps({"seen": seen, "counts": counts, "left": left, "after": after}))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES])
def long(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), str(here.parents[1])])
    code = f"import {here.stem} as module; module.long_run({str(tmp_path_factory.mktemp('runs'))!r}, {request.param!r})"
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    found["seen"] = [Held(*each) for each in found["seen"]]
    return found


def test_after_a_warm_part_a_run_holds_no_more_and_no_more(long: dict[str, Any]) -> None:
    assert long["counts"]["chunk"] >= CHUNKS
    assert min(long["counts"].values()) >= CHUNKS // EVERY
    assert len(long["seen"]) == CHUNKS // 50
    warm = long["seen"][WARM // 50 - 1 :]
    for what, growth in GROWTH.items():
        counts = [getattr(each, what) for each in warm]
        assert max(counts) <= counts[0] + growth, (what, counts)
    sizes = [each.memory for each in warm]
    assert max(sizes) - sizes[0] < FLAT_BYTES, sizes


def test_nothing_of_a_run_is_left_open_or_running_after_it(long: dict[str, Any]) -> None:
    assert long["left"] == [[]] * (1 + RUNS)
    # One thread left by each run would be more than the pools of the libraries may still fill up by.
    assert long["after"][-1] - long["after"][0] <= GROWTH["threads"] < RUNS - 1, long["after"]


# --- saves beside training --------------------------------------------------------------------------------------


class Big(NamedTuple):
    key: jax.Array
    steps: jax.Array
    values: jax.Array


def big(size: int) -> jaxrl.Strategy:
    """Add 1 to a state of `size` bytes in every iteration, in place."""

    def init(key: jax.Array) -> Big:
        return Big(key, jnp.uint32(0), jnp.arange(size // 4, dtype=jnp.uint32))

    def step(state: Big, key: Any, t: jax.Array) -> tuple[Big, dict]:
        return Big(state.key, state.steps + 1, state.values + 1), {"t": t}

    return jaxrl.Strategy(init, step, 1, 1)


@pytest.mark.parametrize(
    ("saves", "size"),
    [(5, 20_000_000), pytest.param(20, 100_000_000, marks=pytest.mark.slow)],
    ids=["5 of 20 MB", "20 of 100 MB"],
)
def test_a_checkpoint_has_the_values_of_its_own_step_though_training_goes_on_in_place(
    tmp_path: Path, saves: int, size: int
) -> None:
    between = 7
    wrong: list[int] = []
    saved: dict[int, int] = {}

    def check(trainer: jaxrl.Trainer, opt_steps: int) -> None:
        saved[opt_steps] = trainer.ledger.t
        store = Store(tmp_path / "run" / "checkpoints", 1)
        leaves, _ = store.read(opt_steps)
        store.close()
        values = next(array for path, array in leaves.items() if path.endswith("/values"))
        if not (values == jnp.arange(size // 4, dtype=jnp.uint32) + opt_steps).all():
            wrong.append(opt_steps)

    donated: list[jax.Array] = []
    hooks = jaxrl.Hooks(save=check, start=lambda trainer: donated.append(trainer.state.values))
    jaxrl.Trainer(
        big(size),
        max_opts=saves * between,
        record_interval=0,
        save_interval=between,
        keep=2,
        run_dir=str(tmp_path / "run"),
        recorders=[],
        hooks=hooks,
        max_chunk=1,
    ).train()
    assert list(saved) == [between * n for n in range(1, saves + 1)]
    assert wrong == []
    assert donated[0].is_deleted()  # the memory of the first state was used again
    assert any(t > opt_steps for opt_steps, t in saved.items())  # training went on before the save was done
