"""Cases of whole runs: training by `Trainer`, with actors, and the start of the command."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jaxrl
from benchmarks import harness, inside, loops, outside
from benchmarks.cases.shapes import DQN, replaying
from benchmarks.harness import Effort, Row
from jaxrl.cli.algos import build
from jaxrl.cli.config import preset
from jaxrl.training.report import Result


class Length(NamedTuple):
    """How long a run is, and how often it does something else than train."""

    max_opts: int
    eval_interval: int
    record_interval: int


def host(case: str, effort: Effort) -> list[Row]:
    """Training by `Trainer` with evaluation, records and saves, against the same iterations in one bare call.

    Once as the default command has it, a run of seconds, and once five times as long, with intervals to match.
    """
    config = preset("dqn")
    bare = loops.Training(build("dqn", config))
    opts = config.max_opts if effort.opt_steps >= 3_000 else effort.opt_steps
    default = Length(opts, config.eval_interval, config.record_interval)
    lengths = {case: default, f"{case} five times": Length(*(5 * number for number in default))}
    return [_host(case, name, length, config.eval_episodes, bare, effort) for name, length in lengths.items()]


def _host(case: str, name: str, length: Length, episodes: int, bare: loops.Training, effort: Effort) -> Row:
    strategy = bare.strategy
    told: list[dict[str, Any]] = []

    def trainer() -> float:
        with tempfile.TemporaryDirectory() as folder:
            settings = {**length._asdict(), "eval_episodes": episodes, "run_dir": f"{folder}/run", "quiet": True}
            told.append(jaxrl.Trainer(strategy, **settings).train().summary)
        return float(told[-1]["seconds"]["train"]) / length.max_opts * 1e6

    samples = harness.interleave({"trainer": trainer, "bare": lambda: bare.us(length.max_opts)}, effort.repeats)
    return harness.row(
        case,
        samples["trainer"],
        samples["bare"],
        strategy.env_steps_per_step / strategy.opt_steps_per_step,
        name=name,
        compile_s=bare.compile_s,
        **inside.figures(bare.compiled, updates=strategy.opt_steps_per_step),
        learnt={"opt_steps": length.max_opts, "mean_return": max(float(run["best_score"] or 0.0) for run in told)},
        seconds=told[-1]["seconds"],
        share_of_training=harness.spread([_share_of_training(run["seconds"]) for run in told])[1],
        settings={**(strategy.info.settings or {}), **length._asdict()},
    )


def _share_of_training(seconds: dict[str, float]) -> float:
    """Return what training takes of the seconds of a run, its preparations left out."""
    return seconds["train"] / (sum(seconds.values()) - seconds["compile"] - seconds["init"])


def actors(case: str, effort: Effort) -> list[Row]:
    """Two actors and a learner by `Trainer`, in threads and in processes, against the slower of the two sides alone.

    That is the limit if the sides hindered one another in nothing: the learner's compiled iterations, or as many steps
    of Gymnasium's own vectors with random actions, in as many threads. The steps that the actors take ahead of a call
    end with it, for the learner falls behind by no more than `max_lag` rounds.
    """
    try:
        import gymnasium  # noqa: F401
    except ImportError:
        print(f"{case}: left out, it needs Gymnasium: pip install 'jaxrl[gymnasium]'", file=sys.stderr)
        return []
    count, shape = 2, DQN("gymnasium:CartPole-v1", num_envs=5)
    with_actors = lambda engine: replaying(shape, jaxrl.ActorsConfig(actors=count, actor_engine=engine))
    strategies = {case: with_actors("threads"), f"{case}-processes": with_actors("processes")}
    strategy = strategies[case]
    iterations = max(1, effort.opt_steps // strategy.opt_steps_per_step)
    opts = iterations * strategy.opt_steps_per_step
    vector_steps = opts * shape.opt_interval // (count * shape.num_envs)
    learner = outside.Learner(strategy)
    envs = outside.GymnasiumThreads("CartPole-v1", count, shape.num_envs)
    wholes = {name: _Chunks(each, opts, effort.repeats + 1) for name, each in strategies.items()}
    samples = harness.interleave(
        {
            **{name: whole.us for name, whole in wholes.items()},
            "learner": lambda: learner.us(iterations),
            "environments": lambda: envs.us(vector_steps) * vector_steps / opts,
        },
        effort.repeats,
    )
    ceiling = [max(sides) for sides in zip(samples["learner"], samples["environments"], strict=True)]
    rows = []
    for name, whole in wholes.items():
        result = whole.end()
        rows.append(
            harness.row(
                name,
                samples[name],
                ceiling,
                shape.opt_interval,
                parts_us={side: harness.spread(samples[side])[1] for side in ("learner", "environments")},
                compile_s=learner.training.compile_s,
                learnt={"opt_steps": whole.trainer.config.max_opts, "mean_return": result.best_score},
                staleness=result.summary["staleness"],
                settings=dict(strategies[name].info.settings or {}),
            )
        )
    return rows


class _Chunks:
    """A run with actors that goes on by so many optimisation steps at a time.

    Actors wait between these, once they are as far ahead as they may be.
    """

    def __init__(self, strategy: jaxrl.Strategy, opts: int, times: int) -> None:
        self.trainer = jaxrl.Trainer(
            strategy,
            max_opts=times * opts,
            eval_interval=0,
            eval_episodes=50,
            record_interval=opts,
            save_interval=0,
            recorders=[],
        )
        self._reports = iter(self.trainer)

    def us(self) -> float:
        """Go on; return microseconds per optimisation step."""
        row = next(self._reports).train
        assert row is not None
        return 1e6 / float(row["opt_steps_per_sec"])

    def end(self) -> Result:
        """Make the rest, and return the result."""
        for _ in self._reports:
            pass
        return self.trainer.result()


START = ("--max-opts", "1", "--eval-interval", "0", "--eval-episodes", "0")
"""What the command is given whose start is timed."""


def start(case: str, effort: Effort) -> list[Row]:
    """Seconds from the command to the first optimisation, with an empty compilation cache and with a warm one."""
    seconds: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(min(5, effort.repeats)):  # each takes some 15 seconds
        with tempfile.TemporaryDirectory() as folder:
            for kind in seconds:
                seconds[kind].append(_seconds_to_first_step(Path(folder)))
    first = {kind: [1e6 * one for one, _ in both] for kind, both in seconds.items()}
    return [
        harness.row(
            case,
            first[kind],
            first["cold"],
            0,
            name=f"{case} {kind}",
            unit="from the command to the first optimisation step",
            settings={"command": " ".join(["python -m jaxrl.train", *START])},
            whole_command_s=harness.spread([whole for _, whole in seconds[kind]])[1],
        )
        for kind in seconds
    ]


def _seconds_to_first_step(cache: Path) -> tuple[float, float]:
    """Return the seconds from the command to the row of its only optimisation step, and to its end."""
    command = [sys.executable, "-m", "jaxrl.train", *START]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_COMPILATION_CACHE_DIR": ""}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        subprocess.run([*command, "--quiet", "--run-dir", f"{folder}/run"], check=True, env=env)
        # The log is last written to for that row.
        return Path(folder, "run", "metrics.jsonl").stat().st_mtime - begun, time.time() - begun
