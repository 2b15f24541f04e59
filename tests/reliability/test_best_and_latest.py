"""The best and the newest are kept, and no more than asked for; and the small rules that this rests on."""

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st
from toys_trainer import ByStep, Scripted, counting

import jaxrl
from jaxrl import verify
from jaxrl.errors import NoCheckpointError
from jaxrl.training.ledger import Ledger
from jaxrl.training.storage.checkpoints import Standing, Store, surplus
from jaxrl.training.storage.logs import RowLog, log_problems

# --- whole runs -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A run with one evaluation after every optimisation step, left and gone on with after `left`, if it is there."""

    scores: list[float]
    save_interval: int
    keep: int
    left: int | None

    def stay(self, end: int) -> list[int]:
        """Return what is kept once `end` is saved: it, then those of the interval, then the one where it was left."""
        turns = {step for step in range(1, end) if step % self.save_interval == 0}
        older = turns | ({self.left} if self.left and self.left < end else set())
        return sorted([*sorted(older, key=lambda step: (step in turns, step)), end][-self.keep :])


def plan(seed: int) -> Plan:
    """Return a random plan; few different scores, so that there are ties."""
    chance = random.Random(seed)
    odd = [math.nan, math.inf, -math.inf]
    some = [chance.uniform(-10, 10) for _ in range(3)]
    kinds = chance.choice([some, [*some, *odd], odd, [*some, math.nan], [*some, math.inf, math.inf]])
    scores = [chance.choice(kinds) for _ in range(chance.randint(2, 9))]
    left = chance.choice([None, chance.randint(1, len(scores) - 1)])
    return Plan(scores, chance.randint(1, 3), chance.randint(1, 4), left)


def best_of(scores: Sequence[float]) -> int | None:
    """Return the first step with the greatest of the finite scores."""
    finite = [score for score in scores if math.isfinite(score)]
    return 1 + list(scores).index(max(finite)) if finite else None


def bests(scores: Sequence[float]) -> list[bool]:
    """Say of each score whether it was the best when it came."""
    return [best_of(scores[:n]) == n for n in range(1, len(scores) + 1)]


def kept(run: Path, part: str) -> list[int]:
    """Return the steps that are kept, after a look into each for the state of just that step, and for anything else."""
    if not (run / part).is_dir():
        return []
    store = Store(run / part, 1)
    for step in store.steps():
        leaves, _ = store.read(step)
        assert [int(array) for path, array in leaves.items() if path.endswith("steps")] == [step]
    store.close()
    assert sorted(str(step) for step in store.steps()) == sorted(entry.name for entry in (run / part).iterdir())
    return store.steps()


@pytest.mark.every_day("0-4")
@pytest.mark.parametrize(
    "seeds",
    [
        *(pytest.param(range(5 * n, 5 * n + 5), id=f"{5 * n}-{5 * n + 4}") for n in range(4)),
        *(pytest.param(range(n, n + 20), id=f"{n}-{n + 19}") for n in range(20, 200, 20)),
    ],
)
def test_exactly_the_best_and_the_newest_are_kept(tmp_path: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        wanted, run = plan(seed), tmp_path / str(seed)
        for end in [*([wanted.left] if wanted.left else []), len(wanted.scores)]:
            trainer = trainer_of(wanted, run, resume=bool(bests_logged(run)))
            for report in trainer:
                if report.opt_steps == end:
                    break
            scores = wanted.scores[:end]
            best = best_of(scores)
            assert kept(run, "best") == ([] if best is None else [best]), (seed, scores)
            assert kept(run, "checkpoints") == wanted.stay(end), (seed, wanted)
            assert bests_logged(run) == bests(scores), (seed, scores)
            assert trainer.result().best_score == (None if best is None else scores[best - 1])
            assert json.loads((run / "metadata.json").read_text())["best_opt_steps"] == best


def test_a_better_policy_on_disk_is_the_one_to_beat_where_scores_come_out_differently_after_a_resume(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"eval_interval": 10, "save_interval": 20, "keep": 2, "confirm_best": False}
    settings |= {"max_opts": 40, "eval_at_start": False, "quiet": True, "run_dir": str(tmp_path)}
    jaxrl.Trainer(counting(), evaluator=Scripted([10.0], [20.0], [400.0], [30.0]), **settings).train()
    shutil.rmtree(tmp_path / "checkpoints/40")  # as if killed after the evaluation at 30
    result = jaxrl.Trainer(counting(), evaluator=Scripted([150.0], [160.0]), **settings, resume=True).train()
    assert kept(tmp_path, "best") == [30]
    assert bests_logged(tmp_path) == [True, True, False, False]
    assert result.best_score == 400.0
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    for facts in (result.summary, metadata):
        assert (facts["best_score"], facts["best_opt_steps"], facts["last_score"]) == (400.0, 30, 160.0)


def test_a_best_policy_that_is_gone_is_noticed_and_the_next_one_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"eval_interval": 10, "confirm_best": False, "eval_at_start": False, "quiet": True}
    settings |= {"run_dir": str(tmp_path)}
    jaxrl.Trainer(counting(), evaluator=Scripted([10.0], [400.0]), max_opts=20, **settings).train()
    shutil.rmtree(tmp_path / "best")
    assert verify.main([str(tmp_path)]) == NoCheckpointError.exit_code
    assert "best: the policy with the best score, 400.0, is gone" in capsys.readouterr().err
    trainer = jaxrl.Trainer(counting(), evaluator=Scripted([30.0], [20.0]), max_opts=40, **settings, resume=True)
    assert trainer.train().best_score == 30.0
    assert kept(tmp_path, "best") == [30]
    assert bests_logged(tmp_path) == [True, True, True, False]
    assert "the best policy is lost" in (tmp_path / "metrics.jsonl").read_text()
    assert verify.main([str(tmp_path)]) == 0


def test_a_best_policy_older_than_the_best_score_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"eval_interval": 10, "confirm_best": False, "eval_at_start": False, "quiet": True}
    settings |= {"evaluator": Scripted([10.0], [400.0]), "max_opts": 10, "run_dir": str(tmp_path / "run")}
    trainer = jaxrl.Trainer(counting(), **settings)
    trainer.train()
    shutil.copytree(tmp_path / "run" / "best", tmp_path / "older")
    trainer.train(max_opts=20)
    assert verify.main([str(tmp_path / "run")]) == 0
    shutil.rmtree(tmp_path / "run" / "best")
    (tmp_path / "older").rename(tmp_path / "run" / "best")
    assert verify.main([str(tmp_path / "run")]) == NoCheckpointError.exit_code
    said = "the policy with the best score, 400.0, is gone; the one saved scored 10.0"
    assert f"best: {said}" in capsys.readouterr().err
    # The older one is the one to beat.
    settings |= {"evaluator": Scripted([5.0], [30.0]), "max_opts": 40, "resume": True}
    assert jaxrl.Trainer(counting(), **settings).train().best_score == 30.0
    assert bests_logged(tmp_path / "run") == [True, True, False, True]
    lost = "the best policy is lost: the best is now the one after 10 optimisation steps"
    assert lost in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert kept(tmp_path / "run", "best") == [40]
    assert verify.main([str(tmp_path / "run")]) == 0


def test_a_fork_whose_best_policy_was_replaced_in_its_origin_goes_by_the_score_of_then(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_interval": 10, "save_interval": 10, "keep": 9, "confirm_best": False}
    settings |= {"eval_at_start": False, "patience": 3, "quiet": True}
    origin, fork = str(tmp_path / "origin"), tmp_path / "fork"
    scores = Scripted([50.0], [100.0], [20.0], [30.0], [200.0])
    jaxrl.Trainer(counting(), evaluator=scores, max_opts=50, run_dir=origin, **settings).train()
    trainer = jaxrl.Trainer(
        counting(), evaluator=Scripted([10.0]), max_opts=90, run_dir=str(fork), resume=origin, from_step=40, **settings
    )
    result = trainer.train()
    assert (result.summary["stop"], result.summary["opt_steps"]) == ("patience", 50)
    assert (result.summary["best_score"], result.summary["best_opt_steps"]) == (100.0, 20)
    assert bests_logged(fork) == [True, True, False, False, False]
    assert "lost" not in (fork / "metrics.jsonl").read_text()
    shutil.rmtree(fork / "best")  # kept, as it is the best of those on the disk
    assert verify.main([str(fork)]) == 0


def test_a_session_whose_best_policy_is_gone_keeps_the_next_one(tmp_path: Path) -> None:
    def session(**settings: Any) -> jaxrl.Session:
        return jaxrl.Session(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,)), run_dir=str(tmp_path), **settings)

    with session() as first:
        assert first.evaluate_score(400.0)
    shutil.rmtree(tmp_path / "best")
    with session(resume=True) as second:
        assert second.best_score is None
        assert second.evaluate_score(30.0)
    assert kept_steps(tmp_path) == [0]


def kept_steps(run: Path) -> list[int]:
    """Return the steps of the best policies that are kept."""
    return [int(entry.name) for entry in (run / "best").iterdir()]


def trainer_of(wanted: Plan, run: Path, resume: bool) -> jaxrl.Trainer:
    """Return a trainer that begins the run, or goes on with it."""
    return jaxrl.Trainer(
        counting(),
        evaluator=ByStep(wanted.scores),
        score=lambda evaluation: float(evaluation.returns[0]),
        max_opts=len(wanted.scores),
        eval_interval=1,
        record_interval=0,
        save_interval=wanted.save_interval,
        keep=wanted.keep,
        run_dir=str(run),
        resume=resume,
        recorders=[],
    )


def bests_logged(run: Path) -> list[bool]:
    """Return what the log says of each evaluation."""
    log = run / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [row["is_best"] for row in rows if row["kind"] == "eval"]


# --- which checkpoints go ---------------------------------------------------------------------------------------

STEPS = st.dictionaries(st.integers(0, 40), st.builds(Standing, st.booleans(), st.booleans()), min_size=1)


@given(steps=STEPS, keep=st.integers(1, 6), data=st.data())
def test_what_stays_are_the_newest_up_to_the_one_that_is_whole_and_the_one_to_go_back_to(
    steps: dict[int, Standing], keep: int, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    stay = {*steps} - surplus(steps, keep, newest)
    there = [step for step in steps if step <= newest]
    assert newest in stay
    assert stay <= {*there}
    assert min(keep, len(there)) <= len(stay) <= keep + 1
    healthy = [step for step in there if steps[step].healthy]
    assert not healthy or stay.intersection(healthy)
    if len(stay) > keep:
        (goal,) = stay.intersection(healthy)  # a rollback prefers regular ones
        assert goal == max(healthy, key=lambda step: (steps[step].regular, step))


@given(steps=STEPS, keep=st.integers(1, 6))
def test_no_regular_step_goes_while_an_older_or_an_irregular_one_stays(steps: dict[int, Standing], keep: int) -> None:
    alike = {step: Standing(True, regular) for step, (_, regular) in steps.items()}
    gone = surplus(alike, keep, max(alike))
    for old in (step for step in gone if alike[step].regular):
        assert all(alike[step].regular and old < step for step in {*alike} - gone - {max(alike)})


# --- which score is best ----------------------------------------------------------------------------------------

SCORES = st.lists(st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, -0.0, 1.0])))


@given(scores=SCORES)
def test_judging_agrees_with_looking_at_all_scores_at_once(scores: list[float]) -> None:
    ledger = Ledger()
    assert [ledger.record_score(score, 10 * n) for n, score in enumerate(scores, start=1)] == bests(scores)
    best = best_of(scores)
    assert ledger.best_opt_steps == (None if best is None else 10 * best)
    assert ledger.best_score == (None if best is None else scores[best - 1])
    assert ledger.evals_without_best == len(scores) - (best or 0)
    assert ledger.last_score == (scores[-1] if scores and math.isfinite(scores[-1]) else None)


@given(scores=SCORES, data=st.data())
def test_judging_goes_on_after_a_resume_as_if_there_had_been_none(scores: list[float], data: st.DataObject) -> None:
    whole, parts = Ledger(), Ledger()
    at = data.draw(st.integers(0, len(scores)))
    for n, score in enumerate(scores):
        if n == at:
            parts = Ledger().restore(json.loads(json.dumps(parts.facts())))
        assert parts.record_score(score, n) == whole.record_score(score, n)
    skipped = ("wall_s", "seconds")
    facts = [{k: v for k, v in ledger.facts().items() if k not in skipped} for ledger in (whole, parts)]
    assert facts[0] == facts[1]


# --- mending logs -----------------------------------------------------------------------------------------------


def metrics_log(steps: int) -> list[dict[str, Any]]:
    """Return rows as of a run that records every step and evaluates every other."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows += [{"kind": "eval", "opt_steps": step, "eval_reward": 0.5}] if step % 2 == 0 else []
        rows += [{"kind": "train", "opt_steps": step, "loss": None}]
        rows += [{"kind": "event", "opt_steps": step, "message": "é\n{"}] * (step % 3 == 0) * 2
    return rows


def episodes_log(steps: int) -> list[dict[str, Any]]:
    return [{"opt_steps": step, "episode": n, "return": -0.0} for step in range(1, steps + 1) for n in range(3)]


@pytest.mark.parametrize("rows_of", [metrics_log, episodes_log], ids=["metrics", "episodes"])
@given(steps=st.integers(0, 8), cut=st.integers(0, 3000), at=st.integers(-1, 9))
def test_a_log_cut_anywhere_is_mended_to_what_came_before(
    tmp_path_factory: pytest.TempPathFactory,
    rows_of: Callable[[int], list[dict[str, Any]]],
    steps: int,
    cut: int,
    at: int,
) -> None:
    rows = rows_of(steps)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    cut = min(cut, len(text))
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_bytes(text[:cut])
    assert log_problems(path.parent, path.name) == []
    RowLog(path).rewind(at)
    mended = [json.loads(line) for line in path.read_text().splitlines()]
    whole = text[:cut].count(b"\n") + (cut < len(text) and text[cut : cut + 1] == b"\n")
    assert mended == [row for row in rows[:whole] if row["opt_steps"] <= at]
    assert log_problems(path.parent, path.name) == []
    # The run goes on from there; had it lost none of the rows up to there, the log is as if it had never stopped.
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows if row["opt_steps"] > at)
    assert log_problems(path.parent, path.name) == []
    if whole == len(rows):
        assert path.read_bytes() == text
