"""How runs are grouped, what differs between them, and what groups come to, by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys_runs import METADATA, write_population, write_run, write_search

from jaxrl.reports.curves import band, thin
from jaxrl.reports.groups import Group, differences, group_runs, remarks
from jaxrl.reports.populations import axis, lineages, populations, takeovers
from jaxrl.reports.read import read_runs
from jaxrl.reports.rows import Curve
from jaxrl.reports.tables import group_table, run_table, setting_table, time_table
from jaxrl.training.population.scores import spread


def groups_of(*paths: Path) -> list[Group]:
    return group_runs(read_runs(map(str, paths)))


def curve(y: list[float], start: int = 10) -> Curve:
    x = np.arange(start, start + 10 * len(y), 10.0)
    return Curve(np.stack([x, 4 * x, x / 20]), np.array(y))


def test_runs_of_equal_settings_but_for_the_seed_are_one_group(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1, max_opts=200)
    c = write_run(tmp_path / "c", seed=0, lr=0.003)
    groups = groups_of(a, c, b)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["c"]]
    assert [group.name for group in groups] == ["ppo CartPole-v1 agent.lr=0.001", "ppo CartPole-v1 agent.lr=0.003"]
    assert differences(groups) == {
        "agent.lr": ["0.001", "0.003"],
        "max_opts": ["100, 200", "100"],
        "seed": ["0, 1", "0"],
    }


def test_settings_that_differ_in_the_last_digits_are_not_averaged(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.99912341), ("b", 0.99912339)))
    names = [group.name for group in groups_of(a, b)]
    assert names == ["ppo CartPole-v1 agent.lr=0.999123 (1)", "ppo CartPole-v1 agent.lr=0.999123 (2)"]


def test_only_settings_that_tell_groups_of_one_algorithm_apart_are_in_their_names(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", algo="dqn", lr=0.5)
    assert [group.name for group in groups_of(a, b)] == ["ppo CartPole-v1", "dqn CartPole-v1"]


def test_scores_that_mean_something_else_are_not_averaged(tmp_path: Path) -> None:
    greedy = {"eval_env": None, "eval_env_args": {}, "eval_actions": "greedy"}
    more = [{}, {}, {"eval_actions": "sampled"}, {"eval_env": "CartPole-v0"}, {"eval_env_args": {"gravity": 5}}]
    paths = [write_run(tmp_path / f"{i}", seed=i, scores=[i], **{**greedy, **own}) for i, own in enumerate(more)]
    assert [[run.name for run in group.runs] for group in groups_of(*paths)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_runs_that_begin_with_the_networks_of_others_are_not_averaged_with_those_that_do_not(tmp_path: Path) -> None:
    old, none = {}, {"init_from": None, "init_parts": []}
    whole, part = ({"init_from": "runs/cloned", "init_parts": parts} for parts in ([], ["processor"]))
    begun = [old, none, whole, part, whole]
    paths = [write_run(tmp_path / f"{i}", seed=i, scores=[i], **own) for i, own in enumerate(begun)]
    groups = groups_of(*paths)
    assert [[run.name for run in group.runs] for group in groups] == [["0", "1"], ["2", "4"], ["3"]]
    assert [group.name.removeprefix("ppo CartPole-v1 ") for group in groups] == [
        "init_from=- init_parts=-",
        "init_from=runs/cloned init_parts=-",
        'init_from=runs/cloned init_parts=["processor"]',
    ]


def test_runs_whose_settings_are_unknown_are_groups_of_their_own(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name) for name in "ab"]
    for path in paths:
        (path / "config.yaml").write_text("[]")
    assert [group.name for group in groups_of(*paths)] == ["a", "b"]


def test_the_same_training_twice_is_remarked_on(tmp_path: Path) -> None:
    groups = groups_of(*[write_run(tmp_path / name, scores=[1.0]) for name in "ab"])
    assert remarks(groups) == ["b: has the settings and the seed of a; both count"]


def test_a_group_is_told_by_mean_and_middle_half(tmp_path: Path) -> None:
    scores = (1.0, 2.0, 3.0, 10.0)
    paths = [write_run(tmp_path / str(i), seed=i, scores=[0.0, score]) for i, score in enumerate(scores)]
    (group,) = groups_of(*paths)
    assert (group.last.mean, group.last.iqm) == (4.0, 2.5)
    told = spread([scores])
    row = ("ppo CartPole-v1", "4 of 4", "4", "2.5", f"{told.low:.5g} to {told.high:.5g}", "-")
    assert group_table([group]).rows == (row,)
    assert (spread([[2.0, 2.0]]).interval, spread([[2.0]]).interval) == ("[2, 2]", "-")


def test_members_that_were_halved_count_only_where_no_other_is_left(tmp_path: Path) -> None:
    """Their scores are of less training, and the table of a population leaves them out too."""
    ran = [("max_opts", 0.1, 0, 8.0), ("halved", 0.1, 1, 2.0), ("halved", 0.2, 0, 1.0), ("halved", 0.2, 1, 3.0)]
    for i, (status, lr, seed, score) in enumerate(ran):
        path = write_run(tmp_path / str(i), seed=seed, lr=lr, scores=[score])
        (path / "metadata.json").write_text(json.dumps({**METADATA, "status": status}))
    groups = groups_of(*(tmp_path / str(i) for i in range(4)))
    assert [(group.last.members, group.last.iqm) for group in groups] == [(1, 8.0), (2, 2.0)]


def test_bands_are_what_scores_of_members_are(tmp_path: Path) -> None:
    """At every point mean, middle half and interval are those of `spread`; a curve that has ended does not count."""
    curves = [curve([1.0, 2.0, 3.0]), curve([3.0, 6.0, 9.0]), curve([2.0, 10.0]), curve([4.0, 4.0, 4.0])]
    told = band(curves, "opt_steps")
    assert told is not None
    assert told.x.tolist() == [10, 20, 30]
    for i, scores in enumerate(([1, 3, 2, 4], [2, 6, 10, 4], [3, 9, 4])):
        alone = spread([scores])
        assert (told.mean[i], told.iqm[i]) == pytest.approx((alone.mean, alone.iqm))
        assert (told.low[i], told.high[i]) == pytest.approx((alone.low, alone.high))
    assert told.iqm[:2].tolist() == [2.5, 5.0]


def test_curves_are_straight_between_their_points_and_nothing_beyond() -> None:
    told = band([curve([0.0, 10.0]), curve([7.0], start=15)], "opt_steps")
    assert told is not None
    assert told.x.tolist() == [10, 15, 20]
    assert told.mean.tolist() == [0.0, 6.0, 10.0]
    assert np.isnan(told.low).tolist() == [True, False, True]
    assert band([curve([1.0, 2.0]), curve([])], "seconds") is None


def test_a_thinned_curve_keeps_peaks_dips_and_ends() -> None:
    y = np.zeros(100_000)
    y[[0, 777, 50_123, 99_999]] = [3.0, 100.0, -50.0, 4.0]
    thinned = thin(curve(y.tolist()), 500)
    assert len(thinned.y) <= 500
    assert set(thinned.y.tolist()) == {0.0, 3.0, 100.0, -50.0, 4.0}
    assert thinned.x[0, thinned.y == 100.0].tolist() == [10 + 7770.0]
    assert thin(thinned, 500) is thinned


def test_tables_are_longer_than_wide(tmp_path: Path) -> None:
    few = groups_of(*[write_run(tmp_path / f"few{i}", lr=i, seed=i) for i in range(2)])
    assert setting_table(few).columns == ("setting", *(group.name for group in few))
    many = groups_of(*[write_run(tmp_path / f"many{i}", lr=i) for i in range(3)])
    assert setting_table(many).columns == ("runs", "agent.lr")
    assert [row[1] for row in setting_table(many).rows] == ["0", "1", "2"]


def test_runs_are_told_with_what_went_wrong_and_where_time_went(tmp_path: Path) -> None:
    groups = groups_of(write_run(tmp_path / "a", scores=[4.0], returns=[1.0, 2.0]))
    told = dict(zip(run_table(groups).columns, run_table(groups).rows[0], strict=True))
    names = ("last", "skipped updates", "optimisation steps", "rollbacks")
    assert [told[name] for name in names] == ["4", "3", "20", "0"]
    seconds = dict(zip(time_table(groups).columns, time_table(groups).rows[0], strict=True))
    names = ("seconds in all", "compile", "train", "save")
    assert [seconds[name] for name in names] == ["5.5", "2.00", "3.00", "-"]


@pytest.mark.parametrize("reason", ["max_opts", "max_env_steps", "stop_reward", "patience", "stop", "SIGINT"])
def test_whatever_ends_a_run_but_a_signal_finishes_it(tmp_path: Path, reason: str) -> None:
    path = write_run(tmp_path / "a", scores=[4.0])
    (path / "metadata.json").write_text(json.dumps({**METADATA, "status": reason}))
    table = run_table(groups_of(path))
    status = dict(zip(table.columns, table.rows[0], strict=True))["status"]
    assert status == (reason if reason == "SIGINT" else f"finished ({reason})")


def test_a_population_stands_on_parallel_axes(tmp_path: Path) -> None:
    (found,) = populations(read_runs([str(write_population(tmp_path / "pop", {0.1: [1.0, 2.0], 0.2: [3.0, 5.0]}))]))
    assert found["members"] == [0, 1, 2, 3]
    rate, score = found["axes"]
    assert (rate["name"], rate["heights"]) == ("agent.lr", [0, 0, 1, 1])
    assert (score["name"], score["heights"]) == ("last score", [0, 0.25, 0.5, 1])


def test_axes_of_wide_ranges_are_logarithmic_and_names_stand_apart() -> None:
    assert axis([1e-4, 1e-3, 1e-2])["heights"] == pytest.approx([0, 0.5, 1])
    assert axis([1.0, 2.0, None])["heights"] == [0, 1, None]
    assert axis(["relu", "tanh", "relu"])["heights"] == [0, 1, 0]
    assert axis([0.5, float("inf")])["ticks"] == [[0, "0.5"], [1, "inf"]]
    assert axis([None])["heights"] == [None]


def test_members_whose_settings_vary_on_the_way_are_one_group_and_none_is_another_one_twice(tmp_path: Path) -> None:
    paths = [write_search(tmp_path / "pbt", [(10, 2, 0)]), write_run(tmp_path / "alone", lr=0.1)]
    groups = group_runs(read_runs(map(str, paths)))
    assert [group.name for group in groups] == ["ppo CartPole-v1 agent.lr=varied", "ppo CartPole-v1 agent.lr=0.1"]
    assert [len(group.runs) for group in groups] == [3, 1]
    assert not [line for line in remarks(groups) if "seed" in line]


def test_a_member_that_took_over_is_drawn_from_its_parent_on(tmp_path: Path) -> None:
    taken = [(5, 2, 0), (10, 1, 2), (10, 2, 1)]  # at last two take each other's place
    (told,) = lineages(read_runs([str(write_search(tmp_path / "pbt", taken))]))
    assert (told["name"], told["members"]) == ("pbt", [0, 1, 2])
    first, second, third = told["lines"]
    assert [line["alive"] for line in (first, second, third)] == [True, True, False]
    own, adopted = [[(0, 0), (20, 0)]], [[(5, 0), (5, 2)], [(5, 2), (10, 2)]]
    assert parts(first) == [*own, *adopted, [(10, 1), (20, 1)], [(10, 2), (10, 1)]]
    assert parts(second) == [[(0, 1), (10, 1)], [(10, 1), (10, 2)], [(10, 2), (20, 2)]]
    assert parts(third) == [[(0, 2), (5, 2)]]
    assert first["text"][0] == "member 2, from member 0, agent.lr=0.1"


def parts(line: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Return the pieces of a line between its gaps, in order."""
    points = list(zip(line["x"], line["y"], strict=True))
    return sorted(points[i : i + 2] for i in range(0, len(points), 3))


def test_a_lineage_that_is_damaged_tells_what_is_whole(tmp_path: Path) -> None:
    path = write_search(tmp_path / "pbt", [(5, 2, 0), (5, 1, 7)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "lineage", "opt_steps": null, "member": 1, "parent": 0}\n{"kind": "lineage", "opt_st')
    assert [one[:3] for one in takeovers(path)] == [(5, 1, 7), (5, 2, 0)]
    (told,) = lineages(read_runs([str(path)]))
    assert [line["founder"] for line in told["lines"]] == [0, 1, 2]  # of a member that is not there nothing is drawn
    assert lineages(read_runs([str(write_search(tmp_path / "none", []))])) == []


def test_a_member_whose_steps_are_no_number_has_no_end(tmp_path: Path) -> None:
    path = write_search(tmp_path / "pbt", [(5, 2, 0)])
    members = path / "members.jsonl"
    members.write_text(members.read_text().replace('"metadata": {}', '"metadata": {"opt_steps": Infinity}'))
    (told,) = lineages(read_runs([str(path)]))
    assert [parts(line) for line in told["lines"]] == [[[(5, 0), (5, 2)]], [[(0, 2), (5, 2)]]]
