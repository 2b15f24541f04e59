"""The pages of the documentation: a newcomer finds the way, what they claim is so, their code runs, and they build."""

import ast
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_readme import block, run, run_alone
from toys_runs import read_lines

from benchmarks.reports import chromium, visited
from jaxrl.cli.algos import general
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError
from jaxrl.registry import ALGORITHMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
QUESTIONS = {
    "How do I install it on a GPU machine?": ".[cuda13]",
    "Which algorithm for my environment?": "| discrete |",
    "How do I bring my own environment": "jaxrl.gymnasium_envs(",
    "How do I change the network?": "make_network",
    "How do I train ten seeds and plot them": "--seeds 10",
    "How do I sweep a hyperparameter?": "--sweep agent.lr=",
    "What do the numbers in the log mean": "| `episode_return`",
    "How do I load a policy and deploy it?": "jaxrl export",
    "Why did it stop or diverge, and how do I go on?": "--resume",
    "How do I use several GPUs or machines?": "CUDA_VISIBLE_DEVICES",
}
"""What a newcomer asks, and words of the answer."""


def links(page: Path) -> dict[str, Path]:
    """Return the pages that `page` links to, by the words of the link."""
    found = re.findall(r"\[([^\]]+)\]\((?!https?:)([^)#]+\.(?:md|ipynb))", page.read_text())
    return {words: (page.parent / target).resolve() for words, target in found}


# --- the way ------------------------------------------------------------------------------------------------------


def test_each_question_of_a_newcomer_is_answered_one_click_from_the_first_page() -> None:
    first = links(DOCS / "index.md")
    for question, words in QUESTIONS.items():
        (page,) = [target for told, target in first.items() if told.startswith(question)]
        assert words in page.read_text(), (question, page.name)


def test_every_page_is_two_clicks_from_the_first_page_at_most_and_has_its_place_in_the_navigation() -> None:
    one = {*links(DOCS / "index.md").values()}
    two = one.union(*(links(page).values() for page in one))
    pages = {page.resolve() for page in (*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"))}
    assert pages - two <= {(DOCS / "index.md").resolve()}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in pages if f": {page.stem}.md\n" not in navigation] == []


def test_links_to_a_heading_lead_to_one() -> None:
    """As GitHub and the site name it: lower case, spaces as hyphens, nothing but letters and digits else."""
    for page in DOCS.glob("*.md"):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            text = re.sub(r"```.*?```", "", (page.parent / target if target else page).read_text(), flags=re.DOTALL)
            headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
            assert anchor in [heading.replace(" ", "-") for heading in headings], (page.name, target, anchor)


# --- what is claimed ----------------------------------------------------------------------------------------------


def test_the_matrix_of_truncation_has_every_agent_and_every_cell_a_test_that_exists() -> None:
    matrix, proofs = (DOCS / "truncation.md").read_text().split("## The tests")
    rows = [line.split("|")[1:-1] for line in matrix.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == sorted(ALGORITHMS)
    letters = {letter for row in rows for cell in row[1:] for letter in re.findall(r"\[(\w)\]", cell)}
    assert [cell for row in rows for cell in row[1:] if "[" not in cell and "looks at no value" not in cell] == []
    assert letters <= set(re.findall(r"^\| (\w) \|", proofs, re.MULTILINE))
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", proofs)
    assert len(named) > 20
    for file, function in named:
        tests = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert function in ("", *tests), (file, function)


def defaults() -> list[tuple[str, str, str]]:
    """Return `(algorithm, settings, values)` of the tables of defaults on the pages of the algorithms."""
    found = []
    for page in DOCS.glob("*.md"):
        for table in re.findall(r"^\| default of \|.+\n\|[-|]+\|\n(?:\|.+\n?)+", page.read_text(), re.MULTILINE):
            head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
            cells = [(algo, row[0], cell) for row in rows for algo, cell in zip(head[1:], row[1:], strict=True)]
            found += [(algo.strip("`"), names, values) for algo, names, values in cells if values]
    return found


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_defaults_on_the_page_of_an_algorithm_are_those_of_the_code(algo: str) -> None:
    told = [(names, values) for name, names, values in defaults() if name == algo]
    assert told
    run = general(algo)
    for names, values in told:
        fields = re.findall(r"`([\w.]+)`", names)
        for field, value in zip(fields, values.split(", "), strict=True):
            part, _, name = field.rpartition(".")
            of = getattr(run, part) if part else run.agent if field in run.agent.__dataclass_fields__ else run
            assert plain(getattr(of, name)) == value, (field, value)


def plain(value: object) -> str:
    """Write a default as the pages do."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float | int):
        return f"{value:.10f}".rstrip("0").rstrip(".")
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_every_algorithm_has_a_page_with_equations_differences_and_results_to_be_repeated() -> None:
    families = re.findall(r"^\| (`.+`) \| \[.+\]\((\w+\.md)\)", (DOCS / "algorithms.md").read_text(), re.MULTILINE)
    pages = {name: DOCS / page for names, page in families for name in re.findall(r"`(\w+)`", names)}
    assert sorted(pages) == sorted(ALGORITHMS)
    for name, page in pages.items():
        parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        equations, differs, results = (
            next(part for part in parts if part.startswith(head)) for head in ("Equations", "What differs", "Results")
        )
        assert "```text" in equations, page.name
        assert "```sh\npython -m " in results, page.name
        siblings = [other for other, place in pages.items() if place == page]
        assert len(siblings) == 1 or f"`{name}`" in differs, name


def foreign() -> list[tuple[str, str, str]]:
    """Return `(algorithm, jaxrl's flag, name elsewhere)` of the tables of names."""
    told = (DOCS / "coming_from.md").read_text().split("## Equivalent settings")[1]
    general, rollouts, replay = re.split(r"From rollouts:|From replay:", told.split("## Different units")[0])
    found = []
    for algorithm, text in (("ppo", general), ("ppo", rollouts), ("dqn", replay)):
        for line in text.splitlines():
            cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
            found += [(algorithm, cells[0][0], name) for cell in cells[1:] for name in cell] if any(cells) else []
    return sorted(set(found))


def accepted() -> dict[str, str]:
    """Return jaxrl's flag for each flag of another library that is taken for it."""
    table = (DOCS / "coming_from.md").read_text().split("## Equivalent settings")[0]
    found = {}
    for ours, theirs in re.findall(r"^\| (`--.+?) \| (.+) \|$", table, re.MULTILINE):
        flags, others = (re.findall(r"`(--[\w.-]+)`", cell.split(";")[0]) for cell in (ours, theirs))
        same = {flag.replace("agent.", ""): flag for flag in flags}
        found |= dict.fromkeys(others, flags[0]) if others else same
    return found


@pytest.mark.parametrize(("algorithm", "flag", "name"), foreign())
def test_a_name_of_another_library_is_taken_for_ours_or_answered_with_it(algorithm: str, flag: str, name: str) -> None:
    theirs = f"--{name.replace('_', '-').lower()}"
    if theirs == flag or flag.startswith("--env"):
        return  # the same
    if accepted().get(theirs) == flag:
        assert parse([algorithm, f"--{name}", "1"]).notes[0].endswith(f" 1 taken as {flag} 1")
        return
    with pytest.raises(SettingsError) as refused:
        parse([algorithm, f"--{name}", "1"])
    assert flag in str(refused.value)


@pytest.mark.parametrize(("theirs", "ours"), accepted().items())
def test_a_flag_of_another_library_that_the_page_has_as_taken_is_taken(theirs: str, ours: str) -> None:
    algorithm = "dqn" if ours.startswith(("--buffer", "--warmup")) else "ppo"
    value = "CartPole-v1" if ours == "--env" else "1"
    found, same = (parse([algorithm, flag, value]) for flag in (theirs, ours))
    assert found.notes[0] == f"{theirs} {value} taken as {ours} {value}"
    longer = {"max_opts": found.config.max_opts} if ours == "--max-env-steps" else {}  # which makes room for its steps
    assert vars(found.config) == {**vars(same.config), **longer}


def test_what_is_said_of_another_library_has_its_source_at_the_commit_that_was_read() -> None:
    versions, claims = (DOCS / "comparison.md").read_text().split("## What other libraries offer that jaxrl does not")
    commits = dict(re.findall(r"^\| ([\w-]+) \| [\w.]* \| (\w{7}) \|", versions, re.MULTILINE))
    assert len(commits) == 5
    tables = re.findall(r"^\|.+\| source \|\n\|[-|]+\n((?:\|.+\n)+)", claims.split("## Speed")[0], re.MULTILINE)
    rows = [line.split("|")[1:-1] for table in tables for line in table.splitlines()]
    assert len(rows) > 15
    library = ""
    for name, *_, source in rows:
        library = name.strip() or library
        read = re.findall(r"https://github\.com/[\w./-]+?/(?:blob|tree)/(\w{40})/", source)
        wanted = [commits[each] for each in library.split(", ")]
        assert read, (library, source)
        assert {commit[:7] for commit in read} == set(wanted), (library, source)


def explained() -> set[str]:
    return set(re.findall(r"`([a-z_0-9/]+)`", (DOCS / "numbers.md").read_text()))


def assert_explained(run_dir: Path) -> None:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    names = {re.sub(r"_(min|max)$", "", name) for row in rows for name in row}
    assert names - explained() - {"event", "message"} == set()


# --- the code of the pages ----------------------------------------------------------------------------------------


def tour() -> list[dict]:
    cells: list[dict] = json.loads((DOCS / "tour.ipynb").read_text())["cells"]
    return cells


def test_the_tour_is_a_notebook_that_shows_what_its_code_prints_and_links_to_pages_that_exist() -> None:
    notebook = json.loads((DOCS / "tour.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    assert len({cell["id"] for cell in tour()}) == len(tour())
    for cell in tour():
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            kinds = [output["output_type"] for output in cell["outputs"]]
            assert kinds.count("stream") == ("print(" in source), source
            assert kinds.count("display_data") == ("plt.show()" in source or ".plot()" in source), source
        for target, anchor in re.findall(r"\]\((\w+\.md)(?:#([\w-]+))?\)", source):
            headings = re.findall(r"^#+ (.+)$", (DOCS / target).read_text(), re.MULTILINE)
            assert anchor in ("", *(heading.lower().replace(" ", "-") for heading in headings)), (target, anchor)


@pytest.mark.slow
def test_the_tour_can_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    code = ["".join(cell["source"]) for cell in tour() if cell["cell_type"] == "code"]
    said = run("\n\n".join(code), tmp_path)
    assert_explained(tmp_path / "runs" / "tour")
    lines = said.splitlines()
    best, env_steps, stop = next(line for line in lines if line.endswith(" max_opts")).split()
    assert float(best) >= 475
    assert (env_steps, stop) == ("51200", "max_opts")
    assert lines[2] == "1"  # it pushes right
    assert float(lines[3]) >= 475  # an episode by hand
    assert lines[4] == "2400"  # it went on
    assert lines[6] == "[]"  # nothing is wrong with the environment
    assert 45 < float(lines[7]) <= 50
    assert lines[-1].endswith("agent.lr=1e-05")  # the worse one is the last of the table
    assert (tmp_path / "runs/three/best").is_dir()


def seeds(lines: list[str], path: Path) -> bool:
    mean, iqm, low, high = map(float, lines[-1].split())
    members = {row["member"] for row in read_lines(path / "runs/ten/members.jsonl")[1:]}
    return 8 < low <= iqm <= high <= 500 and 8 < mean <= 500 and members == {*range(10)}


def better(lines: list[str], path: Path) -> bool:
    first, last = ast.literal_eval(lines[-1])
    return 50 < first <= last <= 200


SHOWN: dict[str, Callable[[list[str], Path], bool]] = {
    "seeds": seeds,
    "deploy": lambda lines, path: lines[-2] in ("0", "1") and lines[-1] == "(3,)",
    # From the places 0 to 3 the way takes 4 to 1 steps: -0.3 to 0 on the way, and 1 at the end.
    "extend-environment": lambda lines, path: lines[0] == "[]" and 0.7 <= float(lines[1]) <= 1.0,
    "agents": lambda lines, path: lines[-1] == "5.0 [0 1 1]",
    # Acting at random holds the pole for some 22 steps.
    **{
        f"extend-{part}": lambda lines, path: 60 < float(lines[-1]) <= 500
        for part in ("loss", "prior", "target", "update", "step", "agent", "buffer", "processor")
    },
    "extend-recorder": lambda lines, path: lines == ["closed", "[20480, 40960]"],
    "extend-strategy": better,
}
"""Blocks with what they print."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_block_does_what_is_said(name: str, tmp_path: Path) -> None:
    lines = run_alone(block(name), tmp_path).splitlines()
    assert SHOWN[name](lines, tmp_path), lines


def test_the_agent_of_the_page_is_that_of_the_example() -> None:
    agent = block("extend-agent").split("\n\n\nenv, buffer =")[0]
    assert f"{agent}\n\n\ndef main" in (ROOT / "examples" / "own_agent.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("registered", [False, True])
def test_an_agent_with_settings_has_the_commands_of_the_page(registered: bool, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_agent.py", tmp_path)
    code = [block("extend-flags"), block("extend-register")] if registered else [block("extend-flags")]
    (tmp_path / "algos.py").write_text("\n\n".join(code))
    short = ["--eval-interval", "32", "--eval-episodes", "2", "--agent.tau", "0.02"]
    for command in (
        ["train", "--env", "CartPole-v1", "--run-dir", "run", "--max-opts", "32", *short],
        ["train", "--resume", "run", "--max-opts", "64"],
        ["evaluate", "run", "--episodes", "2"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"jaxrl.{command[0]}", *command[1:], "--algo", "algos:make"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_links_to_the_source_lead_to_names_of_it() -> None:
    """On the site they lead to the reference."""
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./(jaxrl/[\w/]+)\.py\)", "".join(p.read_text() for p in DOCS.glob("*.md")))
    assert links
    for name, path in links:
        pkgutil.resolve_name(f"{path.replace('/', '.')}.{name.rpartition('.')[2]}")


def test_the_table_of_where_things_are_names_files_and_what_stands_in_them() -> None:
    table = (DOCS / "design.md").read_text().partition("## Where to find it")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for _, code, tests in rows:
        for folder, cell in (("jaxrl", code), ("tests", tests)):
            path = Path()
            for name in re.findall(r"`([^`]+)`", cell):
                if "/" in name:
                    path = ROOT / folder / name
                    assert path.exists(), name
                else:
                    found = ROOT / "jaxrl/training/loop.py" if name.startswith("Trainer.") else path
                    assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", found.read_text()), name


# --- the site -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    def call(*command: object) -> str:
        done = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stderr

    call(sys.executable, "-m", "venv", "fresh")
    fresh = tmp_path / "fresh" / "bin" / "python"
    call(fresh, "-m", "pip", "install", "-q", f"{ROOT}[docs]")
    told = call(fresh, "-m", "mkdocs", "build", "-f", ROOT / "mkdocs.yml", "-d", tmp_path / "site")
    assert "WARNING" not in told
    site = tmp_path / "site"
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    assert len(pages) > 40
    assert "data:image/png" in pages["tour.html"]
    assert 'href="tour.html"' in pages["index.html"]
    if (browser := chromium()) is not None:
        opened = visited(browser, site / "offline.html", tmp_path)
        assert [line for line in opened.console if "search/worker.js" not in line] == []  # which a file may not start
        assert re.search(r'data-bs-theme-value="auto"[^>]*aria-pressed="true"', opened.dom)  # the switch of colours
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="([^"]+)|<link[^>]*\bhref="([^"]+)', text)
        assert [part for pair in loaded for part in pair if re.match(r"(https?:)?//", part)] == [], name
        # A list that does not follow an empty line is a list on GitHub, and a paragraph here.
        assert not re.search(r"<p>(?:(?!</p>).)*\n(?:[*-]|\d\.) ", text, re.DOTALL), name
    reference = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    stub = (ROOT / "jaxrl" / "__init__.pyi").read_text()
    public = re.findall(r"^    \w+ as (\w+),$", stub, re.MULTILINE)
    assert len(public) > 100
    headings = set(re.findall(r'<h2 id="jaxrl[\w.]*\.(\w+)"', reference))
    types = {"ActFn", "ExtraLoss", "TargetFn", "Batch", "Rollout", "PolicyFns", "Ensemble", "gradient_update"}
    assert types <= headings
    assert [name for name in public if name not in headings] == []
