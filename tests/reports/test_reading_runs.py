"""What a report reads of runs, whole or damaged, and that it changes none of them."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from toys_runs import METADATA, log, place, write_population, write_run

from jaxrl.errors import SettingsError
from jaxrl.reports.groups import group_runs
from jaxrl.reports.read import Run, read_runs
from jaxrl.reports.rows import read_episodes
from jaxrl.reports.tables import run_table
from jaxrl.training.storage.run_dir import open_log


def one(path: Path) -> Run:
    (run,) = read_runs([str(path)])
    return run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = one(write_run(tmp_path / "a", seed=3, scores=[1.0, 7.0, 5.0], returns=[2.0, 4.0]))
    assert (run.name, run.seed, run.status, run.last) == ("a", 3, "max_opts", 5.0)
    assert run.log.score.x.tolist() == [[10, 20, 30], [40, 80, 120], [0.5, 1.0, 1.5]]
    assert run.log.returns.y.tolist() == [2.0, 4.0]
    assert run.log.skipped == 1 + 2
    assert run.settings["agent.lr"] == 0.001
    assert run.remarks == ()


def test_columns_are_found_by_their_whole_name_in_any_order(tmp_path: Path) -> None:
    row = {"kind": "train", **place(1), "info/episode_return": 1.0, "episode_return": 0.1 + 0.2, "skipped_updates": 3}
    speeds = {"opt_steps_per_sec": 1e-07, "env_steps_per_sec": 25.5}
    null = {**row, **place(2), "episode_return": None, **speeds}
    for name, written in (("last", {**row, **speeds}), ("first", {**speeds, **row})):
        path = write_run(tmp_path / name)
        log(path, [written, null])
        found = one(path).log
        assert found.returns.y.tolist() == [0.1 + 0.2]
        assert (found.skipped, found.invalid, found.speeds) == (6, 0, (1e-07, 25.5))


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[1.0, 2.0], returns=[3.0])
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\xff\n[1]\n{"kind": "train", "opt_steps": 5, "env_steps": 2, "wall_s": 1, "episode_re}\n')
        file.write(b'{"kind": "eval", "opt_steps": -1, "score": 9.0}\n{"kind": "eval", "opt_steps": 40, "sco')
    (path / "metadata.json").write_text("{")
    run = one(path)
    assert run.log.score.y.tolist() == [1.0, 2.0]
    metadata, lines, torn = run.remarks
    assert "metadata.json" in metadata
    assert lines == "4 lines of metrics.jsonl are no rows (4, 5, 6, 7)"
    assert torn == "the last line of metrics.jsonl is half-written"


def test_numbers_that_are_none_do_not_stop_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[1.0])
    huge = 10**400
    log(path, [{"kind": "eval", "opt_steps": 20, "env_steps": huge, "wall_s": None, "score": 2.0}])
    log(path, [{"kind": "eval", **place(3), "score": None}, {"kind": "eval", **place(4), "score": huge}])
    log(path, [{"kind": "train", **place(5), "episode_return": "x", "skipped_updates": huge}])
    run = one(path)
    assert run.log.score.y.tolist() == [1.0, 2.0]
    assert np.isnan(run.log.score.x[1:, 1]).all()
    assert run.log.skipped == 0


def test_a_damaged_config_leaves_the_curves(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[1.0])
    (path / "config.yaml").write_text("a: [")
    run = one(path)
    assert (run.settings, run.last) == ({}, 1.0)
    assert "config.yaml" in run.remarks[0]


def test_runs_with_little_in_them_are_told_of(tmp_path: Path) -> None:
    empty, bare, blind = (write_run(tmp_path / name) for name in ("empty", "bare", "blind"))
    (bare / "metrics.jsonl").unlink()
    log(blind, [{"kind": "train", **place(1), "episode_return": 1.0}])
    assert one(empty).remarks == ("metrics.jsonl has no rows yet",)
    assert one(bare).remarks == ("there is no metrics.jsonl", "it has no evaluations")
    assert one(blind).remarks == ("it has no evaluations",)


def test_a_member_that_diverged_has_no_last_score(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[9.0])
    (path / "metadata.json").write_text(json.dumps({"status": "diverged", "best_score": 9.5}))
    assert np.isnan(one(path).last)
    assert one(path).best == 9.5


def test_a_last_evaluation_without_a_score_is_not_replaced_by_the_one_before(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[1.0, 2.0])
    log(path, [{"kind": "eval", **place(3), "eval_reward": None, "score": None}])
    assert np.isnan(one(path).last)
    assert one(path).log.score.y.tolist() == [1.0, 2.0]


def test_the_best_is_what_was_confirmed_or_else_the_score(tmp_path: Path) -> None:
    """With `confirm_best=False` the column is there, and empty."""
    for name, scores, best in (("a", [(5.0, 3.0, True), (9.0, 2.0, False)], 3.0), ("b", [(5.0, None, True)], 5.0)):
        path = write_run(tmp_path / name)
        log(path, [{"kind": "eval", **place(1), "score": s, "confirm_score": c, "is_best": b} for s, c, b in scores])
        assert one(path).best == best


@pytest.mark.parametrize(
    ("status", "events", "best"),
    [
        ("running", [], (400.0, 30)),  # it is running, or was killed, after its last save at 20
        ("running", [{"kind": "event", **place(3), "event": "best", "message": "reset"}], (20.0, 20)),
        ("max_opts", [], (20.0, 20)),
    ],
)
def test_the_best_of_a_run_is_no_older_than_its_rows(
    status: str, events: list[dict], best: tuple[float, int], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "a")
    facts = {**METADATA, "status": status, "best_score": 20.0, "best_opt_steps": 20}
    (path / "metadata.json").write_text(json.dumps(facts))
    log(
        path, [{"kind": "eval", **place(i), "score": s, "is_best": True} for i, s in ((1, 10.0), (2, 20.0), (3, 400.0))]
    )
    log(path, [*events, {"kind": "eval", **place(4), "score": 5.0, "is_best": bool(events)}])
    run = one(path)
    assert (run.last, run.best, run.best_opt_steps) == (5.0, *best)
    table = run_table(group_runs([run]))
    assert dict(zip(table.columns, table.rows[0], strict=True))["best at"] == str(best[1])


def test_a_population_is_its_members(tmp_path: Path) -> None:
    runs = read_runs([str(write_population(tmp_path / "pop", {0.1: [1.0, 2.0], 0.2: [3.0, 4.0]}))])
    assert [run.name for run in runs] == [f"pop/0000{i}" for i in range(4)]
    assert [(run.member, run.seed, run.last) for run in runs] == [(0, 0, 1.0), (1, 1, 2.0), (2, 0, 3.0), (3, 1, 4.0)]
    assert {(run.population, run.swept) for run in runs} == {("pop", ("agent.lr",))}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no run directory: it has no config\.yaml$"):
        read_runs([str(tmp_path)])
    run = write_run(tmp_path / "run")
    with pytest.raises(SettingsError, match=rf"it has no config\.yaml; runs are in it, such as {run}$"):
        read_runs([str(tmp_path)])


def test_a_run_given_twice_is_one_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    names = [run.name for run in read_runs([str(a), str(b), f"{a}/"])]
    assert names == [a.as_posix(), b.as_posix()]


def test_episodes_of_the_last_evaluation_or_of_all(tmp_path: Path) -> None:
    path = tmp_path / "eval_episodes.jsonl"
    rows = [{"opt_steps": t, "episode": i, "return": t + i} for t in (10, 20) for i in (0, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"opt_steps": 30, "ret')
    assert read_episodes(partial(open_log, tmp_path)) == {20: [20.0, 21.0]}
    assert read_episodes(partial(open_log, tmp_path), whole=True) == {10: [10.0, 11.0], 20: [20.0, 21.0]}
    assert read_episodes(partial(open_log, tmp_path / "none")) == {}
    with path.open("a") as file:
        file.write('urn": null}\n')
    assert read_episodes(partial(open_log, tmp_path)) == {}
