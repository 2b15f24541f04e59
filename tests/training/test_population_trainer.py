"""Populations on their way: their members are the runs that they would be alone, whatever happens to the others."""

import json
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from toys_population import BEGUN, LENGTH, digests, go_on, two
from toys_runs import member_facts, read_lines, rows_about_all, rows_in, timeless, without_line
from toys_trainer import ByStep, counting, small_dqn

import jaxrl
from jaxrl.cli.algos import build
from jaxrl.cli.config import from_plain, preset
from jaxrl.cli.sweeps import PopulationConfig, build_population
from jaxrl.errors import NoCheckpointError, SettingsError, StorageError
from jaxrl.registry import algorithm_names
from jaxrl.strategies.population import Population, replace_settings, with_values
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.loop import Trainer
from jaxrl.training.population.rows import PopulationRows
from jaxrl.training.population.scores import MemberResult, PopulationResult, iqm, spread
from jaxrl.training.recorders import CSVRecorder
from jaxrl.training.storage.checkpoints import seal
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.population_files import PopulationFiles
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS, member_dir

SMALL = {"agent.features": [8]}


def evaluated(run: Path, members: int) -> list[list[dict]]:
    """Return the population's rows, and the evaluations of each member."""
    own = [[row for row in rows_in(run, number) if row["kind"] == "eval"] for number in range(members)]
    return [timeless(rows) for rows in (rows_about_all(run), *own)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PopulationResult]:
    """Return where two members have come to their end undisturbed, and the result; do not write there."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, Trainer(two(), **LENGTH, run_dir=run, quiet=True).train()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Population, Path, PopulationResult]:
    """Return four members, two of each setting, and where they have come to their end; do not write there."""
    made = jaxrl.population(small_dqn(), seeds=2, sweep={"agent.lr": [1e-2, 1e-3]})
    run = tmp_path_factory.mktemp("swept") / "run"
    return made, run, Trainer(made, **LENGTH, seed=5, run_dir=run, quiet=True, workers=2).train()


def test_members_are_the_runs_that_they_would_be_alone(
    swept: tuple[Population, Path, PopulationResult], tmp_path: Path
) -> None:
    made, run, result = swept
    for member in made.members[1:3]:  # one of each seed, and of each setting
        alone, path = with_values(small_dqn(), member.swept), tmp_path / f"alone-{member.number}"
        single = Trainer(alone, **LENGTH, seed=5 + member.seed, run_dir=path, quiet=True).train()
        own = result.members[member.number]
        assert state_digest(own.result.state) == state_digest(single.state)
        assert (own.best_score, own.last_score) == (single.best_score, single.summary["last_score"])
        for log in ("metrics.jsonl", "eval_episodes.jsonl"):
            assert timeless(rows_in(run, member.number, log)) == timeless(rows_in(path, log=log))
        assert member_facts(run, member.number) == yaml.safe_load((path / "config.yaml").read_text())
        assert jaxrl.load_policy(run, member=member.number)(np.zeros(4)) in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("algo", algorithm_names("off_policy", "on_policy"))
def test_a_swept_setting_does_what_the_setting_does(algo: str) -> None:
    """Train with every sweepable setting changed: as a member, and built with these settings from the first."""
    small = replace_settings({}, SMALL)
    config = from_plain(preset(algo), small)
    if hasattr(config, "rollout"):
        config = from_plain(config, {"rollout": 8})
    strategy = build(algo, config)
    values = {name: value * 0.75 if value else 0.25 for name, value in jaxrl.sweepable(strategy).items()}
    built = build(algo, from_plain(config, replace_settings({}, values)))
    length = {"max_opts": 64, "eval_interval": 0, "eval_episodes": 0, "quiet": True}
    (member,) = Trainer(jaxrl.population(strategy, sweep={n: [v] for n, v in values.items()}), **length).train().members
    assert state_digest(member.result.state) == state_digest(Trainer(built, **length).train().state)


def test_rows_of_the_population_are_its_members_and_what_they_come_to(whole: tuple[Path, PopulationResult]) -> None:
    run = whole[0]
    evaluations = [[row for row in rows_in(run, n) if row["kind"] == "eval"] for n in range(2)]
    rounds = rows_about_all(run)
    assert [(row["kind"], row["opt_steps"]) for row in rounds] == [("population", at) for at in (20, 40, 60)]
    for row, of_each in zip(rounds, zip(*evaluations, strict=True), strict=True):
        assert {one["opt_steps"] for one in of_each} == {row["opt_steps"]}
        assert row["wall_s"] == max(one["wall_s"] for one in of_each)
        scores = [one["score"] for one in of_each]
        assert row["mean"] == pytest.approx(np.mean(scores))
        assert row["best"] == max(scores)
        assert row["best_member"] == int(np.argmax(scores))
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["status"] == "done"
    assert [member["status"] for member in metadata["table"]] == ["max_opts"] * 2


def test_a_population_that_is_left_says_so_as_a_run_does(tmp_path: Path) -> None:
    population = jaxrl.population(counting(), seeds=2)
    for trained, name in ((population, "population"), (counting(), "run")):
        for _ in Trainer(trained, max_opts=8, record_interval=2, run_dir=tmp_path / name, quiet=True):
            break
        assert json.loads((tmp_path / name / "metadata.json").read_text())["status"] == "left"


@pytest.mark.parametrize("replay", [True, False])
def test_a_best_policy_is_on_disk_with_the_next_checkpoint_and_no_sooner(tmp_path: Path, replay: bool) -> None:
    """Judge every later policy better. A checkpoint without replay does not lead there again, so none waits for it."""
    there: dict[int, set[tuple[int, ...]]] = {}  # by the steps of a checkpoint that is whole, or less those before one

    def look(trainer: Trainer, at: int) -> None:
        trainer._storage.best.wait()
        there.setdefault(at, set()).add(tuple(open_store(Path(str(trainer.config.run_dir)), BEST).steps()))

    rising = iter(range(100))
    hooks = jaxrl.Hooks(
        before_evaluation=lambda trainer: look(trainer, -trainer.schedule.opt_steps(trainer.ledger.t)), save=look
    )
    length = {**LENGTH, "max_opts": 80, "save_interval": 60, "save_replay": replay}
    evaluator = lambda params, key: Evaluation(np.array([float(next(rising))]), np.array([1]), np.array([True]))
    Trainer(two(), **length, evaluator=evaluator, hooks=hooks, run_dir=tmp_path / "run", quiet=True, workers=1).train()
    assert [there[-at] for at in (20, 40, 60)] == ([{()}] * 3 if replay else [{()}, {(20,)}, {(40,)}])
    assert () not in there[60]
    assert there[80] == {(80,)}


def test_a_population_that_was_stopped_goes_on_to_the_same_bits(
    swept: tuple[Population, Path, PopulationResult], tmp_path: Path
) -> None:
    made, run, whole = swept
    how = {**LENGTH, "seed": 5, "run_dir": tmp_path / "cut", "quiet": True}
    stopped = Trainer(made, **how, workers=2)
    for place, _ in enumerate(stopped):
        if place == 5:
            stopped.interrupt.stop("enough")
    left = stopped.result()
    assert left.stop == "enough"
    assert {member.status for member in left.members} <= {"enough", "max_opts", "running"}
    assert any(member.last_score != other.last_score for member, other in zip(left.members, whole.members, strict=True))
    again = Trainer(made, **how, resume=True, workers=1).train()
    assert digests(again) == digests(whole)
    assert evaluated(tmp_path / "cut", 4) == evaluated(run, 4)
    with pytest.raises(jaxrl.SettingsError, match=r"holds the population .* not "):
        Trainer(two(), **how, resume=True).train()


def test_a_second_call_goes_on_from_where_it_is(whole: tuple[Path, PopulationResult], tmp_path: Path) -> None:
    trainer = Trainer(two(), **{**LENGTH, "max_opts": 40}, run_dir=tmp_path / "cut", quiet=True)
    assert [member.result.summary["opt_steps"] for member in trainer.train().members] == [40, 40]
    longer, again = trainer.train(max_opts=60), trainer.train()
    assert digests(longer) == digests(again) == digests(whole[1])
    assert evaluated(tmp_path / "cut", 2) == evaluated(whole[0], 2)
    assert "max_opts: 60" in (tmp_path / "cut" / "config.yaml").read_text()


@pytest.mark.every_day("spread")
@pytest.mark.parametrize("layout", ["spread", "together"])
def test_a_second_call_goes_on_in_memory_where_there_is_no_directory(layout: str) -> None:
    whole = Trainer(two(layout), **LENGTH, quiet=True).train()
    trainer = Trainer(two(layout), **BEGUN)
    first = trainer.train()
    before = digests(first)
    assert digests(trainer.train()) == before, "nothing is left to do"
    assert [member.result.summary["opt_steps"] for member in trainer.train(max_opts=40).members] == [40, 40]
    trainer.config = trainer.config.changed(max_opts=60)
    for _ in trainer:
        break  # which leaves the others where they are
    longer = trainer.train()
    assert digests(longer) == digests(whole)
    assert [m[3:6] for m in longer.members] == [m[3:6] for m in whole.members]
    assert digests(first) == before, "what was returned stays as it was"
    with pytest.raises(SettingsError, match="max_opts is 40, but the run has made 60 optimisation steps"):
        trainer.train(max_opts=40)


@pytest.mark.parametrize("saved", [False, True])
def test_a_length_that_is_refused_is_not_kept(saved: bool, tmp_path: Path) -> None:
    population = jaxrl.population(counting(), seeds=4, search=jaxrl.Halving(2))
    settings = {"eval_interval": 2, "evaluator": ByStep(range(9)), "confirm_best": False, "quiet": True}
    settings["run_dir"] = tmp_path / "run" if saved else None
    plain = jaxrl.population(counting(), seeds=2)
    for trained, refused in ((population, (16, 2, 0)), (plain, (4, 0))):
        trainer = Trainer(trained, **settings, max_opts=8, start_over=saved)
        first = [(m.status, m.last_score) for m in trainer.train().members]
        for max_opts in refused:
            with pytest.raises(SettingsError, match=f"max_opts is {max_opts}"):
                trainer.train(max_opts=max_opts)
        assert trainer.config.max_opts == 8
        assert [(m.status, m.last_score) for m in trainer.train().members] == first


def test_members_of_another_version_are_not_to_be_trained_anew(tmp_path: Path) -> None:
    settings = {"max_opts": 4, "run_dir": str(tmp_path / "run"), "quiet": True}
    members = jaxrl.population(counting(), seeds=2)
    Trainer(members, **settings).train()
    for file in (tmp_path / "run").glob("checkpoints/*/manifest.json"):
        manifest = json.loads(file.read_text())
        # As format 19 had it, without anything in common.
        manifest["facts"]["rows"][0]["facts"]["versions"] = manifest["facts"].pop("common")["versions"]
        file.write_text(json.dumps(seal({**manifest, "format": 19})))
        (file.parent / "files.json").unlink()
    with pytest.raises(
        NoCheckpointError, match=r"member [01]: .* by jaxrl [\d.]+, an earlier version .*; go on with that version"
    ) as refused:
        Trainer(members, **{**settings, "max_opts": 8}, resume=True).train()
    assert "remove" not in str(refused.value)
    assert "--start-over" not in str(refused.value)


def test_a_loop_that_is_left_has_saved_every_member_that_began(tmp_path: Path) -> None:
    for _ in (reports := iter(Trainer(two(), **LENGTH, run_dir=tmp_path / "run", quiet=True, workers=1))):
        break
    reports.close()
    assert open_store(member_dir(tmp_path / "run", 0), CHECKPOINTS).steps() == [20]
    done = Trainer(two(), **LENGTH, run_dir=tmp_path / "run", quiet=True, resume=True).train()
    assert [member.status for member in done.members] == ["max_opts"] * 2


def test_a_member_taken_out_is_a_run_that_goes_on(whole: tuple[Path, PopulationResult], tmp_path: Path) -> None:
    run, result = whole
    path = jaxrl.extract(run, 1, tmp_path / "own")
    longer = {**LENGTH, "max_opts": 80}
    alone = Trainer(small_dqn(), **longer, seed=1, run_dir=tmp_path / "alone", quiet=True).train()
    resumed = Trainer(small_dqn(), **longer, seed=1, run_dir=path, resume=True, quiet=True).train()
    assert state_digest(resumed.state) == state_digest(alone.state)
    no_number = [(member, f"member is {member}; expected a whole number of at least 0") for member in (-1, 1.0, True)]
    for member, said in ((7, "has no member 7; expected 0 to 1"), *no_number):
        with pytest.raises(jaxrl.SettingsError, match=said):
            jaxrl.extract(run, member, tmp_path / "other")
    with pytest.raises(jaxrl.SettingsError, match="exists already"):
        jaxrl.extract(run, 1, path)
    with pytest.raises(jaxrl.SettingsError, match="is a run of its own, and has no member 3"):
        jaxrl.load_policy(path, member=3)
    best = max(result.members, key=lambda member: member.best_score or 0)
    assert jaxrl.load_policy(run).facts["score"] == best.best_score
    assert jaxrl.find_runs(run.parent, "run") == [run]
    assert all("members" not in found.parts for found in jaxrl.find_runs(run.parent))


def test_groups_are_judged_by_the_middle_half_of_last_scores() -> None:
    assert iqm(np.array([100.0, 2, 3, 4, 5, 6, 7, -50])) == pytest.approx((3 + 4 + 5 + 6) / 4)
    one = spread([[4.0, 4.0, 4.0], [float("nan")]])
    assert (one.members, one.mean, one.iqm, one.low, one.high) == (3, 4.0, 4.0, 4.0, 4.0)
    wide = spread([list(range(100))])
    # The deviation of a mean of the middle half of 100 uniform numbers is about 3.3.
    assert 38 < wide.low < wide.iqm == 49.5 < wide.high < 61
    assert spread([[]]).members == 0
    assert spread([[3.0], [4.0]]).iqm == 3.5
    assert np.isnan(spread([[3.0], [4.0]]).low), "an interval of one score is unknown"


def test_the_best_setting_is_found_by_name() -> None:
    settings = [{"agent.lr": lr, "agent.tau": tau} for lr in (1e-2, 1e-3) for tau in (0.1, 0.2)]
    scores = [5.0, 6.0, 1.0, 2.0, 8.0, 9.0, 3.0, 4.0]
    members = [MemberResult(n, n % 2, settings[n // 2], "max_opts", x, x, None) for n, x in enumerate(scores)]
    result = PopulationResult(tuple(members), None)
    assert [setting.members for setting in result.by("agent.lr")] == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert result.best(by="agent.lr") == result.by("agent.lr")[0]
    assert len(result.table().splitlines()) == 1 + 4
    with pytest.raises(jaxrl.SettingsError, match=r"'agent.lrr' was not swept; did you mean agent.lr\?"):
        result.best(by="agent.lrr")


def test_members_do_not_begin_once_all_is_to_stop() -> None:
    interrupt = jaxrl.Interrupt()
    interrupt.stop("before")
    result = Trainer(jaxrl.population(counting(), seeds=3), max_opts=5, quiet=True, interrupt=interrupt).train()
    assert [(member.status, member.result) for member in result.members] == [("running", None)] * 3


def test_more_members_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.training.memory.device_bytes", lambda: 10**6)
    with pytest.raises(jaxrl.SettingsError, match=r"a population of 900 members takes .* at most \d+ members fit"):
        Trainer(jaxrl.population(small_dqn(), seeds=900), max_opts=20, quiet=True).train()


def test_the_handlers_of_signals_are_as_before() -> None:
    before = signal.getsignal(signal.SIGINT), threading.active_count()
    Trainer(jaxrl.population(counting(), seeds=2), max_opts=5, quiet=True).train()
    assert (signal.getsignal(signal.SIGINT), threading.active_count()) == before


def test_a_member_that_came_to_its_end_goes_no_further(tmp_path: Path) -> None:
    stops = {**LENGTH, "stop_reward": 1.0, "run_dir": tmp_path / "run", "quiet": True}
    results = [Trainer(two(), **stops, resume=resume).train() for resume in (False, True)]
    first, again = ([(one.status, one.last_score) for one in result.members] for result in results)
    assert {status for status, _ in first} == {"stop_reward"}
    assert again == first
    assert digests(results[1]) == digests(results[0])


def test_evaluations_of_some_members_alone_make_no_round(tmp_path: Path) -> None:
    """As with `eval_at_return`: a row of all is written where all were evaluated, or have ended before."""
    rows = PopulationRows(two(), quiet=True)
    files = PopulationFiles(tmp_path, None)
    rows.open(files, None)
    for number, step in ((1, 0), (0, 0), (1, 10), (0, 20), (1, 20), (1, 30), (0, 40), (1, 40)):
        rows.take(number, {"kind": "eval", "opt_steps": step, "score": 1.0})
    rows.remove(0)
    rows.take(1, {"kind": "eval", "opt_steps": 50, "score": 1.0})
    rounds = [(row["opt_steps"], row["members"]) for row in rows_about_all(tmp_path)]
    assert rounds == [(0, 2), (20, 2), (40, 2), (50, 1)]


def test_members_with_other_iterations_are_in_the_same_rounds(tmp_path: Path) -> None:
    """Iterations of 3 and of 5 optimisation steps, to evaluate every 20 and at the end, at 110 or 111."""
    config = from_plain(preset("ppo"), replace_settings({"num_envs": 4, "rollout": 4, "minibatches": 1}, SMALL))
    made = build_population("ppo", config, PopulationConfig(sweep={"epochs": [3, 5]}))
    length = {"max_opts": 110, "eval_interval": 20, "eval_episodes": 2, "confirm_best": False, "record_interval": 0}
    for resume in (False, True):
        Trainer(made, **length, run_dir=tmp_path / "run", resume=resume, quiet=True).train()
        rounds = [(row["opt_steps"], row["members"], row["env_steps"]) for row in rows_about_all(tmp_path / "run")]
        assert rounds == [(at, 2, None) for at in (21, 42, 60, 81, 102, 111)]


def test_an_evaluation_that_a_rollback_undid_is_in_no_round(tmp_path: Path) -> None:
    rows = PopulationRows(two(), quiet=True)
    rows.open(PopulationFiles(tmp_path, None), None)
    for number, score in ((0, 1.0), (0, 3.0), (1, 5.0)):
        rows.take(number, {"kind": "eval", "opt_steps": 10, "score": score})
    assert [(row["mean"], row["best"]) for row in rows_about_all(tmp_path)] == [(4.0, 5.0)]


def test_what_is_there_is_neither_taken_for_something_else_nor_filled(run: Path, tmp_path: Path) -> None:
    """A population for a run, the directory of `resume` for another, the inside of a population for a free place."""
    config = (run / "config.yaml").read_bytes()
    for trained, how, said in (
        (small_dqn(), {"allow_changes": True}, "is a population, and this trains one run"),
        (two(), {"run_dir": tmp_path / "other"}, "goes on in its own directory"),
        (two(), {"run_dir": tmp_path / "other", "from_step": 20}, "branch off from a member"),
    ):
        with pytest.raises(SettingsError, match=said):
            Trainer(trained, **BEGUN, resume=run, **how).train()
    with pytest.raises(SettingsError, match="lies inside"):
        jaxrl.extract(run, 0, member_dir(run, 2))
    assert (run / "config.yaml").read_bytes() == config
    assert not (run / "members").exists()
    assert Trainer(two(), **{**BEGUN, "max_opts": 40}, resume=run).train().members[1].result.summary["opt_steps"] == 40


def test_the_place_of_a_member_is_its_own(run: Path) -> None:
    """No run goes on or begins in it, alone, as a population or from a checkpoint; what is no member is named."""
    for trained, how in (
        (small_dqn(), {"resume": member_dir(run, 0), "seed": 0}),
        (small_dqn(), {"run_dir": member_dir(run, 9)}),
        (small_dqn(), {"resume": member_dir(run, 0), "from_step": 20, "run_dir": member_dir(run, 9)}),
        (two(), {"run_dir": member_dir(run, 9)}),
    ):
        with pytest.raises(SettingsError, match=r"is among the members of the population .*jaxrl.extract"):
            Trainer(trained, **BEGUN, **how).train()
    without_line(run / "members.jsonl", 0)
    assert len(go_on(run, max_opts=20).members) == 2


NO_NUMBERS = ('"x"', '"2"', "1", "-1", "2.5", "true", "1e999", "9" * 5000)
DAMAGED = [
    *("", "{", '{"member": 2}', "[]", '{"member": 2, "settings": null, "metadata": {}}'),
    *(f'{{"member": {number}, "settings": {{}}, "metadata": {{}}}}' for number in NO_NUMBERS),
]
"""Lines that are not about a member; an empty one stands for a file without any."""


def test_a_damaged_file_of_members_is_refused_and_costs_nothing(run: Path) -> None:
    whole = (run / "members.jsonl").read_text()
    for line in DAMAGED:
        (run / "members.jsonl").write_text(whole + line + "\n" if line else "")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(SettingsError, match=r"cannot read .*members.jsonl: line \d is not about a member"):
            go_on(run)
        assert {path: path.read_bytes() for path in before} == before, line
    (run / "members.jsonl").write_text(whole)
    assert len(go_on(run).members) == 2


def test_checkpoints_without_the_file_of_members_are_not_trained_over(run: Path, tmp_path: Path) -> None:
    (run / "members.jsonl").rename(tmp_path / "members.jsonl")
    with pytest.raises(SettingsError, match=r"has checkpoints, but no members.jsonl, .* begin again with --start-over"):
        go_on(run)
    (tmp_path / "members.jsonl").rename(run / "members.jsonl")
    assert [member.result.summary["opt_steps"] for member in go_on(run).members] == [40, 40]
    # Where members have directories, an earlier version has written them.
    (run / "members.jsonl").unlink()
    member_dir(run, 0).mkdir(parents=True)
    shutil.copy(run / "config.yaml", member_dir(run, 0))
    for read in (go_on, jaxrl.load_policy):
        with pytest.raises(SettingsError, match=r"have a directory each, as version 0\.29 wrote them"):
            read(run)


def test_a_refused_resume_changes_nothing_and_an_accepted_one_drops_what_is_not_saved(run: Path) -> None:
    (first,) = rows_about_all(run)
    unsaved = {"kind": "eval", "opt_steps": 30, "score": 1.0}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"member": 1, **unsaved}) + "\n" + json.dumps({"kind": "population", **unsaved}) + "\n")
        log.write('{"member": 0, "kind": "ev')
    files = [run / name for name in ("metrics.jsonl", "config.yaml", "metadata.json", "members.jsonl")]
    before = [file.read_bytes() for file in files]
    others = jaxrl.population(small_dqn(), seeds=3)
    for population, changed, said in (
        (two(), {"seed": 7}, "the seed decided all of it"),
        (two(), {"max_opts": 10}, "max_opts is 10, but .* has made 20 optimisation steps"),
        (others, {}, "holds the population"),
    ):
        with pytest.raises(SettingsError, match=said):
            Trainer(population, **{**BEGUN, **changed}, run_dir=run, resume=True).train()
    assert [file.read_bytes() for file in files] == before
    assert [member.status for member in go_on(run).members] == ["max_opts"] * 2
    assert "max_opts: 40" in (run / "config.yaml").read_text()
    rows = [row["opt_steps"] for row in rows_in(run, 1) if row["kind"] == "eval"]
    assert rows == [row["opt_steps"] for row in rows_about_all(run)] == [20, 40]
    assert rows_about_all(run)[0] == first


def test_a_resume_goes_on_from_what_a_kill_left_unsaid(run: Path) -> None:
    """Metadata that know of no checkpoint yet, and have no line of a member that is about to begin."""
    file = run / "members.jsonl"
    lines = read_lines(file)
    del lines[0]["common"]["metadata"]["saved_opt_steps"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    go_on(run)
    without_line(file, 1)
    (run / ".members.jsonl.tmp").write_text("")
    assert [member.status for member in go_on(run, max_opts=60).members] == ["max_opts"] * 2
    assert [row["opt_steps"] for row in rows_about_all(run)] == [20, 40, 60]


def test_a_member_is_taken_out_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    """On a disk that takes no large file, and where an earlier try was killed on its way."""
    own = tmp_path / "own"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*own: .*; nothing of it stays") as refused:
            jaxrl.extract(run, 1, own)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shutil.copytree(run / "checkpoints", tmp_path / f".own.{2**22 + 1}.tmp")  # of no living process
    assert jaxrl.extract(run, 1, own) == own
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "run"]
    files = {"config.yaml", "metadata.json", "metrics.jsonl", "eval_episodes.jsonl"}
    assert {path.name for path in own.iterdir()} == {*files, "checkpoints", "best"}


def test_what_recorders_import_is_imported_before_members_begin(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, make = [], CSVRecorder.__init__
    note = lambda self: (threads.append(threading.current_thread()), make(self))[1]
    monkeypatch.setattr(CSVRecorder, "__init__", note)
    go_on(run, recorders=("csv",))
    assert threads[0] is threading.main_thread()
    assert len(threads) == 3


@pytest.mark.parametrize("layout", ["spread", "together"])
def test_an_error_of_a_file_of_the_users_own_is_not_taken_for_one_of_the_run(layout: str, tmp_path: Path) -> None:
    def read_own(trainer: object, row: object) -> None:
        (tmp_path / "mine.json").read_text()

    hooks, run = jaxrl.Hooks(record=read_own), tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=r"mine\.json"):
        Trainer(two(layout), **LENGTH, run_dir=run, hooks=hooks, quiet=True).train()
    assert json.loads((run / "metadata.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop": 5}, "stop is 5; expected a function"),
        ({"score": 5}, "score is 5; expected a function"),
        ({"interrupt": 5}, "interrupt is int; expected jaxrl.Interrupt"),
    ],
)
def test_callbacks_of_another_type_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Trainer(two(), **LENGTH, **settings)


def test_a_file_of_the_run_that_cannot_be_written_is_told_as_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(two(), **BEGUN, run_dir=run).train()

    def spoil(trainer: object) -> None:
        if not (run / "config.yaml").is_dir():
            (run / "config.yaml").unlink()
            (run / "config.yaml").mkdir()

    trainer = Trainer(two(), **LENGTH, run_dir=run, resume=True, workers=1, quiet=True, hooks=jaxrl.Hooks(start=spoil))
    with pytest.raises(StorageError, match="cannot write the run directory"):
        trainer.train()


def test_a_population_that_trains_cannot_be_prolonged_meanwhile(tmp_path: Path) -> None:
    trainer = Trainer(two(), **LENGTH, run_dir=tmp_path / "run", quiet=True)
    for _ in trainer:
        with pytest.raises(SettingsError, match="this trainer is training already"):
            trainer.train(max_opts=300)
    assert trainer.config.max_opts == LENGTH["max_opts"]
