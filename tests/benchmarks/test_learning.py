"""The script that says what presets learn: its arithmetic by hand, and one small run from end to end."""

import json
import re
import sys
from pathlib import Path

import pytest
from toys_masks import minefield

import jaxrl
from benchmarks import learning, learnt, masks, offline
from jaxrl.cli.presets import PRESETS
from jaxrl.registry import algorithm_names


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ([10, 500, 480, 470, 490], (1, 3, 2 / 3, True)),
        ([480, 100, 100], (0, 2, 0.0, False)),
        ([10, 20, 475], (2, 0, None, True)),  # none came later
        ([10, 20, 474.9], (None, 0, None, False)),
        ([], (None, 0, None, False)),
    ],
)
def test_steady_is_the_share_of_good_evaluations_after_the_first(scores: list[float], told: tuple[object, ...]) -> None:
    row = learning.steadiness(scores, 475.0)
    assert (row["good_from"], row["later"], row["steady"], row["last_good"]) == told
    assert learning.steadiness(scores, None)["last_good"] is None


def test_without_a_choice_each_named_preset_is_a_task_and_families_are_not() -> None:
    tasks = learning.tasks(["dqn", "ppo"], None)
    assert ("dqn", "CartPole-v1") in tasks
    assert ("ppo", "Pendulum-v1") in tasks
    assert not [env for _, env in tasks if "*" in env]
    assert learning.tasks(["ppo"], ["Breakout-MinAtar"]) == [("ppo", "Breakout-MinAtar")]
    assert {env for algo, env in tasks if algo == "dqn"} == {name for name in PRESETS["dqn"] if "*" not in name}


def test_the_reference_is_that_of_the_algorithm() -> None:
    assert learning.reference("dqn", "Acrobot-v1") == (-76.6, 100_000)
    assert learning.reference("ppo", "gymnasium:Acrobot-v1") == (-73.5, 1_000_000)
    assert learning.reference("ppo", "Breakout-MinAtar") == (22.9, 9_920_000)
    assert learning.reference("dqn", "Breakout-MinAtar") is None


@pytest.mark.slow
def test_a_run_leaves_a_row_and_a_table_and_a_failed_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--algo", "dqn", "--env", "CartPole-v1", "--seeds", "3", "--json", str(tmp_path / "x.json")]
    small = ["--max-opts", "40", "--eval-interval", "20", "--eval-episodes", "2", "--agent.features", "8"]
    monkeypatch.setattr(learning, "cache_compilations", lambda: None)  # tests have a cache of their own
    monkeypatch.setattr(sys, "argv", ["learning", *asked, *small])
    learning.main()
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["algo"], row["env"], row["seed"], row["preset"]) == ("dqn", "CartPole-v1", 3, True)
    assert row["opt_steps"] == 40
    assert row["env_steps"] == row["settings"]["warmup"] + 40 * row["settings"]["opt_interval"]
    assert [steps for steps, _ in row["curve"]] == [1_100, 1_200]
    assert (row["later"], row["last_good"]) == (0, False)
    assert 8 <= row["last"] <= 500
    assert row["best"] >= 8
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("dqn CartPole-v1 ")
    assert line.endswith("500 @ 50,000")

    failed = learning.learn("dqn", "CartPole-v1", 3, ["--opt-interval", "7"])
    assert "opt_interval" in failed["failed"]
    assert learning.told(failed).endswith(failed["failed"])
    assert learning.table([row, failed]).splitlines()[1].split()[2] == "1/2"


@pytest.mark.slow
def test_a_run_that_was_stopped_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **settings: object) -> jaxrl.Trainer:
        trainer = jaxrl.Trainer(*args, **settings)
        trainer.interrupt.stop("SIGTERM")
        return trainer

    monkeypatch.setattr(learning, "Trainer", stopped)
    with pytest.raises(SystemExit, match="stopped by SIGTERM in dqn CartPole-v1 seed 3"):
        learning.learn("dqn", "CartPole-v1", 3, ["--max-opts", "40", "--eval-episodes", "2", "--agent.features", "8"])


@pytest.mark.slow
def test_random_play_keeps_to_a_mask_unless_it_is_hidden() -> None:
    """A forbidden action pays a million, an allowed one at most 1."""
    env = minefield(time_limit=10)
    assert masks.chance(env, 8).returns.max() < 10
    hidden = masks.unmasked(env)
    assert list(hidden.spec.observation_space) == ["seen"]
    assert masks.chance(hidden, 8).returns.max() > 1e5


def test_random_play_of_several_agents_is_that_of_their_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["masks", "toys_several:squad", "--episodes", "2", "--json", str(tmp_path / "x")])
    masks.main()
    assert capsys.readouterr().out == "toys_several:squad: 13.67 ± 0.00\n"  # (3 + 20 + 18) / 3
    (row,) = json.loads((tmp_path / "x").read_text())["rows"]
    assert row["lengths"]["max"] == 4


def test_each_seed_counts_once_in_the_table_and_runs_with_flags_do_not() -> None:
    row = {"algo": "dqn", "env": "CartPole-v1", "preset": True, "flags": [], "env_steps": 1_000, "jaxrl": "0.9.0"}
    ends = [{**row, "seed": seed, "best": best, "last": 500.0} for seed, best in ((0, 1.0), (1, 2.0))]
    ends[1]["jaxrl"] = "0.17.0"
    others = [{**ends[0], "seed": 2, "flags": ["--num-envs", "3"]}, {**ends[0], "seed": 3, "failed": "why"}]
    line = "| CartPole-v1 | `dqn` | 1 000 | 2 | 1.5 ± 0.5 | 500 | 500 at 50 000 | 0.9.0 to 0.17.0 |"
    assert learning.documented([*ends, ends[0], *others]).splitlines()[2:] == [line]


def test_curves_are_of_presets_where_all_seeds_were_evaluated(tmp_path: Path) -> None:
    row = {"algo": "dqn", "env": "CartPole-v1", "preset": True, "flags": []}
    old = [{**row, "seed": 0, "curve": [[10, 7.0]]}, {**row, "seed": 2, "flags": ["--x"], "curve": [[10, 7.0]]}]
    new = [{**row, "seed": seed, "curve": [[10, 1.0 + seed], [20, 5.0]][: 2 - seed]} for seed in (0, 1)]
    for name, rows in (("a", old), ("b", new)):
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    found = learnt.learnt(learnt.stored([tmp_path / "b", tmp_path / "a"]), "dqn", "CartPole-v1")
    assert found is not None
    assert (found.steps.tolist(), found.returns.tolist()) == ([10], [[1.0], [2.0]])  # the later file's seed 0


def test_every_algorithm_has_a_picture_of_what_it_learnt_on_its_page() -> None:
    """It is of the agents that the page's command names, and shows the environments that result files have of them."""
    docs = Path(__file__).parents[2] / "docs"
    drawn: list[str] = []
    for page in docs.glob("*.md"):
        for algos, name in re.findall(
            r"benchmarks\.learnt ([a-z0-9_ ]+?) (?:--.*)?--out docs/(\S+\.svg)", page.read_text()
        ):
            assert f"]({name})" in page.read_text()
            assert [algo for algo in algos.split() if f">{algo}<" not in (docs / name).read_text()] == []
            drawn += algos.split()
    assert sorted(drawn) == sorted(algorithm_names())


def test_the_result_file_has_every_offline_agent() -> None:
    (file,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*-offline.json")
    assert {row["algo"] for row in json.loads(file.read_text())["rows"]} == {*algorithm_names("offline")}
    row = {"algo": "bc", "env": "CartPole-v1"}
    told = offline.documented([{**row, "last": 1.0}, {**row, "last": 3.0}])
    assert told.splitlines()[2:] == ["| CartPole-v1 | `bc` | 2 | 2.0 ± 1.0 | 1.0 |"]
