"""The page as a browser gets it, and the files for other programs."""

import csv
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from toys_runs import log, place, write_population, write_run, write_search

from jaxrl import report
from jaxrl.errors import SettingsError
from jaxrl.reports.exports import to_csv, to_marl_eval
from jaxrl.reports.groups import Group, grouped, remarks
from jaxrl.reports.page import page
from jaxrl.reports.picture import write_png
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


def groups_of(*paths: Path) -> list[Group]:
    return grouped(read_runs(map(str, paths)))


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
    assert told.out == "report.html: 2 runs, 1 settings\nt.csv: 1 runs, 1 settings\nm.json: 1 runs, 1 settings\n"
    assert told.err == "warning: bare: metrics.jsonl has no rows yet\n"
    assert remarks(groups_of(bare))[0] in Path("report.html").read_text()
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + 2 + 3


def test_a_file_is_never_written_into_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(SettingsError, match="which is only read"):
        report.main([str(run), "--csv", str(run / "metrics.jsonl")])
