"""The page as a browser gets it, and the files for other programs."""

import csv
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_groups_and_curves import groups_of
from toys_runs import log, place, write_population, write_run, write_search

from jaxrl import report
from jaxrl.errors import SettingsError
from jaxrl.reports.exports import to_aggregate_csv, to_csv, to_marl_eval
from jaxrl.reports.groups import Group, remarks
from jaxrl.reports.page import page
from jaxrl.reports.picture import write_png
from jaxrl.reports.populations import populations
from jaxrl.reports.read import read_runs

VOID = {"meta", "img", "br", "input", "link"}


class Reader(HTMLParser):
    """Takes a page apart, and holds it against its closing tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)


@pytest.fixture
def two(tmp_path: Path) -> list[Group]:
    """A group of two seeds, and a run by itself."""
    a = write_run(tmp_path / "a", seed=0, scores=[1.0, 3.0], returns=[0.5, 2.5])
    b = write_run(tmp_path / "b", seed=1, scores=[3.0, 5.0], returns=[1.5, 3.5])
    return groups_of(a, b, write_run(tmp_path / "c", lr=0.1, scores=[9.0, 8.0]))


def test_the_table_has_a_line_for_each_place(two: list[Group]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(two))))
    assert [row["run"] for row in rows] == ["a", "a", "b", "b", "c", "c"]
    assert rows[1] == {
        "run": "a",
        "group": "ppo CartPole-v1 agent.lr=0.001",
        "seed": "0",
        "member": "",
        "opt_steps": "20",
        "env_steps": "80",
        "seconds": "1.0",
        "score": "3.0",
        "return": "2.5",
    }
    assert rows[5]["return"] == ""


def test_the_table_has_all_scores_of_a_step(tmp_path: Path) -> None:
    """A session may score a policy as often as its user likes."""
    path = write_run(tmp_path / "a", scores=[1.0, 3.0], returns=[0.5, 2.5])
    log(path, [{"kind": "eval", **place(2), "score": score} for score in (4.0, 3.0)])
    rows = csv.DictReader(io.StringIO(to_csv(groups_of(path))))
    assert [(row["opt_steps"], row["score"], row["return"]) for row in rows] == [
        ("10", "1.0", "0.5"), ("20", "3.0", "2.5"), ("20", "4.0", ""), ("20", "3.0", ""),
    ]  # fmt: skip


def test_evaluations_are_laid_out_for_marl_eval(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", env="Catch-bsuite", scores=[1.0, 3.0])
    b = write_run(tmp_path / "b", seed=1, env="Catch-bsuite", scores=[4.0])
    episodes = [{"opt_steps": 20, "episode": i, "return": float(2 + 2 * i)} for i in range(2)]
    (a / "eval_episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    assert json.loads(to_marl_eval(groups_of(a, b))) == {
        "bsuite": {
            "Catch": {
                "ppo": {
                    "run_0": {
                        "step_0": {"step_count": 40, "elapsed_time": 0.5, "return": [1.0]},
                        "step_1": {"step_count": 80, "elapsed_time": 1.0, "return": [2.0, 4.0]},
                        "absolute_metrics": {"return": [3.0]},
                    },
                    "run_1": {
                        "step_0": {"step_count": 40, "elapsed_time": 0.5, "return": [4.0]},
                        "absolute_metrics": {"return": [4.0]},
                    },
                }
            }
        }
    }


def test_the_page_is_whole_and_asks_for_nothing(two: list[Group]) -> None:
    found = Reader(page(two, ["<b>odd</b>"], "const library = 1;"))
    assert not [attrs for _, attrs in found.tags if {"src", "href"} & attrs.keys()]
    said = "\n".join(found.texts)
    assert "3 runs, 2 settings" in said
    assert "<b>odd</b>" in said  # as text
    assert {"viewport", "color-scheme"} <= {attrs.get("name") for tag, attrs in found.tags if tag == "meta"}
    data = json.loads(found.scripts[0])
    band, alone = data["curves"]["score"]["bands"][0]
    assert (band["x"], band["mean"], band["iqm"]) == ([10, 20], [2, 4], [2, 4])
    assert alone is None
    assert data["curves"]["score"]["runs"][2] == {
        "group": 1,
        "name": "c",
        "x": [[10, 20], [40, 80], [0.5, 1]],
        "y": [9, 8],
    }


def test_text_of_a_run_cannot_break_out(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    path = write_run(tmp_path / "a", scores=[1.0], env=bad)
    log(path, [{"kind": "event", **place(1), "event": "rollback", "message": bad}])
    found = Reader(page(groups_of(path), [], ""))
    assert "img" not in [tag for tag, _ in found.tags]
    assert bad in found.texts


def test_a_film_is_in_the_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", scores=[1.0])
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 200)]
    frames[0].save(path / "episode.gif", save_all=True, append_images=frames[1:])
    (film,) = [attrs for tag, attrs in Reader(page(groups_of(path), [], "")).tags if tag == "img"]
    assert str(film["src"]).startswith("data:image/gif;base64,R0lGOD")
    assert film["alt"] == "a: episode.gif"


STAGE = """
const nodes = {}, drawn = {};
const node = (id) => nodes[id] ||= { value: { metric: "score", axis: "opt_steps", shown: "iqm" }[id], listeners: [],
  addEventListener(_, f) { this.listeners.push(f); }, insertAdjacentHTML() {} };
node("data").textContent = DATA;
globalThis.document = { getElementById: node, documentElement: {} };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#1a1a1a" });
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.Plotly = { react: (id, traces, layout) => { drawn[id] = { traces, layout }; } };
"""


def drawn(groups: list[Group], after: str = "") -> Any:
    """Run the page's own JavaScript over a stage of cardboard; return what it has drawn."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    data, _, script = Reader(page(groups, [], "0;")).scripts
    program = f"{STAGE.replace('DATA', json.dumps(data))}\n{script}\n{after}\nconsole.log(JSON.stringify(drawn));"
    return json.loads(subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=True).stdout)


def test_the_page_draws_groups_with_their_interval_and_single_runs(two: list[Group]) -> None:
    low, high, middle, alone = drawn(two)["curves"]["traces"]
    assert (low["y"], high["y"], high["fill"]) == ([1, 3], [3, 5], "tonexty")
    assert middle["y"] == [2, 4]
    assert (alone["x"], alone["y"]) == ([10, 20], [9, 8])
    assert middle["line"]["color"] != alone["line"]["color"]
    assert middle["line"]["dash"] != alone["line"]["dash"]


def test_the_switches_draw_anew(two: list[Group]) -> None:
    chosen = 'node("axis").value = "seconds"; node("metric").value = "return"; node("shown").value = "runs";'
    told = drawn(two, f'{chosen} node("axis").listeners.forEach((f) => f());')["curves"]
    assert [trace["x"] for trace in told["traces"]] == [[0.5, 1], [0.5, 1]]
    assert [trace["y"] for trace in told["traces"]] == [[0.5, 2.5], [1.5, 3.5]]
    assert told["layout"]["xaxis"]["title"]["text"] == "seconds"


def test_the_page_draws_populations(tmp_path: Path) -> None:
    traces = drawn(groups_of(write_population(tmp_path / "pop", {0.1: [1.0], 0.2: [3.0]})))["population-0"]["traces"]
    assert [(trace["x"], trace["y"]) for trace in traces] == [(["agent.lr", "last score"], y) for y in ([0, 0], [1, 1])]


def test_the_page_draws_who_went_on_from_whom(tmp_path: Path) -> None:
    plot = drawn(groups_of(write_search(tmp_path / "pbt", [(10, 2, 0)])))["lineage-0"]
    first, second, third = plot["traces"]
    assert (first["y"][:5], first["x"][:5]) == ([0, 2, None, 0, 0], [10, 10, None, 0, 20])
    assert [trace["showlegend"] for trace in (first, second, third)] == [True, True, False]
    assert len({trace["line"]["color"] for trace in (first, second, third)}) == 3


def test_a_picture_is_written(two: list[Group], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_png(two, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1500, 675)
    many = [two[0]._replace(name=f"{two[0].name} {i}") for i in range(30)]
    write_png(many, tmp_path / "many.png")
    with Image.open(tmp_path / "many.png") as picture:  # names do not take their room from the curves
        assert picture.height > 675 + 10 * 25
    with pytest.raises(SettingsError, match="cannot write"):
        write_png(two, tmp_path / "none" / "curves.png")


def test_the_console_tells_files_and_remarks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "plotly", lambda: "0;")
    run, bare = write_run(tmp_path / "a", scores=[1.0]), write_run(tmp_path / "bare", seed=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert report.main([str(run), str(bare)]) == 0
    assert report.main([str(run), "--csv", "t.csv", "--json", "m.json"]) == 0
    told = capsys.readouterr()
    assert told.out == "report.html: 2 runs, 1 setting\nt.csv: 1 run, 1 setting\nm.json: 1 run, 1 setting\n"
    assert told.err == "warning: bare: metrics.jsonl has no rows yet\n"
    assert remarks(groups_of(bare))[0] in Path("report.html").read_text()
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + 2 + 3


def test_mean_iqm_and_interval_of_each_setting_are_a_table(two: list[Group], tmp_path: Path) -> None:
    """Of two runs the IQM is the mean, and the bootstrap's interval reaches from the one to the other."""
    runs = [str(run.path) for group in two for run in group.runs]
    report.main([*runs, "--aggregate", str(tmp_path / "t.csv")])
    table = list(csv.reader((tmp_path / "t.csv").open()))
    assert table[0] == ["group", "metric", "env_steps", "runs", "mean", "iqm", "iqm_low", "iqm_high"]
    several, alone = (group.name for group in two)
    assert table[1:] == [
        [several, "score", "40", "2", "2.0", "2.0", "1.0", "3.0"],
        [several, "score", "80", "2", "4.0", "4.0", "3.0", "5.0"],
        [several, "return", "40", "2", "1.0", "1.0", "0.5", "1.5"],
        [several, "return", "80", "2", "3.0", "3.0", "2.5", "3.5"],
        [alone, "score", "40", "1", "9.0", "9.0", "", ""],
        [alone, "score", "80", "1", "8.0", "8.0", "", ""],
    ]


@pytest.mark.parametrize(("x", "first"), [("env_steps", "40"), ("opt_steps", "10"), ("seconds", "0.5")])
def test_what_curves_are_over_is_chosen_and_said(
    x: str, first: str, two: list[Group], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = str(two[1].runs[0].path), tmp_path / "t.csv"
    assert report.main([run, "--aggregate", str(file), "--x", x]) == 0
    name = {"env_steps": "environment steps", "opt_steps": "optimisation steps", "seconds": "seconds"}[x]
    assert capsys.readouterr().out == f"{file}: 1 run, 1 setting, over {name}\n"
    assert next(row[x] for row in csv.DictReader(file.open())) == first
    pages = Reader(page(two, [], "0;", x=x)).tags
    assert [attrs["value"] for tag, attrs in pages if tag == "option" and "selected" in attrs] == [x]


BOMB = "a: &a [0]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))
HUGE = "0x" + "f" * 5_000
"""A whole number that Python does not write out."""
DAMAGED = {
    "a count beyond all floats": ("metrics.jsonl", '{"kind": "train", "opt_steps": 1, "skipped_updates": 1e308}\n' * 2),
    "a negative count": ("metrics.jsonl", '{"kind": "train", "opt_steps": 1, "invalid_steps": -1e300}\n' * 2),
    "numbers that are none": (
        "metrics.jsonl",
        '{"kind": "eval", "opt_steps": 7, "env_steps": Infinity, "wall_s": NaN, "score": 1e308, "is_best": true}\n'
        '{"kind": "eval", "opt_steps": 8, "env_steps": -1e308, "wall_s": "9", "score": -1e308, "is_best": 3}\n'
        '{"kind": "event", "opt_steps": 9, "event": [[]], "message": {"a": NaN}}\n'
        '{"kind": "train", "opt_steps": 9, "env_steps": 9, "wall_s": 1e999, "episode_return": 1e308}\n',
    ),
    "a row of great depth": (
        "metrics.jsonl",
        '{"kind": "event", "opt_steps": 1, "event": ' + "[" * 900 + "]" * 900 + "}\n",
    ),
    "a rollback without end": (
        "metadata.json",
        '{"rollbacks": Infinity, "best_score": "x", "seconds": {"train": 1e400}}',
    ),
    "metadata of great depth": ("metadata.json", '{"status": ' + "[" * 950 + "]" * 950 + ', "best_opt_steps": [1]}'),
    "an episode without end": (
        "eval_episodes.jsonl",
        '{"opt_steps": 1e400, "return": 1}\n{"opt_steps": 10, "return": 1e308}\n',
    ),
    "an alias of itself": ("config.yaml", "a: &a\n  b: *a\n"),
    "an alias bomb": ("config.yaml", BOMB),
    "settings of great depth": ("config.yaml", "a: " + "[" * 900 + "]" * 900),
    "a seed of thousands of digits": ("config.yaml", f"algo: {HUGE}\nenv: [1]\nseed: {HUGE}\nagent: {{1: {HUGE}}}\n"),
    "keys that are dates": ("config.yaml", "algo: [{2001-01-01: 1}]\nenv: {2001-01-01: .inf}\n2: 3\nseed: {}\n"),
    "a population of anything": ("config.yaml", f"population: {{sweep: {{1: {HUGE}}}, pbt: [{{2001-01-01: 1}}]}}\n"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_whatever_a_file_holds_the_other_runs_are_reported(name: str, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", scores=[12.5])
    file, held = DAMAGED[name]
    bad = write_run(tmp_path / "bad", seed=1, scores=[1.0, 2.0], returns=[3.0])
    with (bad / file).open("a" if file.endswith(".jsonl") else "w") as opened:
        opened.write(held)
    groups = groups_of(bad, whole)
    text = page(groups, remarks(groups), "0;")
    Reader(text)
    assert "12.5" in text
    assert "whole" in to_csv(groups)
    assert "12.5" in to_aggregate_csv(groups, "env_steps")
    assert "12.5" in to_marl_eval(groups)
    if file == "config.yaml" and "alias" in name:
        assert "alias" in remarks(groups)[0]


@pytest.mark.parametrize("values", [[-1e308, 1e308], [0.0, 1e308]])
def test_a_sweep_over_all_floats_is_drawn(values: list[float], tmp_path: Path) -> None:
    members = dict(zip(values, ([1.0], [2.0]), strict=True))
    (drawn,) = populations(read_runs([str(write_population(tmp_path / "pop", members))]))
    assert drawn["axes"][0]["heights"] == [0.0, 1.0]


def test_a_file_is_never_written_into_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(SettingsError, match="which is only read"):
        report.main([str(run), "--csv", str(run / "metrics.jsonl")])
