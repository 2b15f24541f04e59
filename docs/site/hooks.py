"""What the site has beside the pages in `docs/`: the tour, a reference of the public names, and the changelog."""

import ast
import json
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
TOUR = "tour.ipynb"
"""A notebook, which the site shows as a page."""
FOR_AUTHORS: dict[str, dict[str, tuple[str, ...]]] = {
    "interfaces": {
        "agents.base": (
            *("AgentInit", "ActFn", "UpdateFn", "StripFn", "PrepareFn", "RefreshFn", "StopFn", "MeasureFn"),
            *("ImitateFn", "PolicyFns", "DistributionFn", "ValueFn"),
        ),
        "agents.custom": ("ExtraLoss", "Outputs", "CriticLoss"),
        "agents.dqn": ("TargetFn", "ActionValues", "DQNState"),
        "agents.actor_critic": ("Sample", "ActorCriticState"),
        "agents.pqn": ("TargetSample", "PQNState"),
        "agents.reppo": ("Sample", "REPPOState"),
        "agents.sac": ("SACState",),
        "agents.td3": ("TD3State",),
        "agents.advantage": ("AdvantageState",),
        "agents.bc": ("BCState",),
        "types": ("Batch", "Rollout", "RecurrentObs", "SequenceSpec", "Demonstrations", "NextAction"),
        "distributions": (
            "Distribution",
            "Head",
            "Categorical",
            "MultiCategorical",
            "Gaussian",
            "TanhGaussian",
            "Joint",
        ),
        "buffers.base": ("Buffer", "BufferInit", "PushFn", "SampleFn", "ReprioritiseFn"),
        "buffers.uniform": ("num_items", "read_batch"),
        "processors.base": ("Processor", "ProcessorInit", "ProcessFn", "ObserveFn", "StatsFns"),
    },
    "learning_step": {
        "agents.optimizers": (
            *("optimizer_of", "gradient_step", "GradientStep", "gradient_update", "GradientUpdate", "Loss"),
            *("loss_gradient", "Gradient", "apply_gradient", "gradient_if", "polyak_update", "decay_lr"),
        ),
        "shards": ("pmean", "psum", "pmin", "pmax"),
    },
}
"""Pages of the reference for authors of agents, buffers and processors, beside those of the public names."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tour, the pages of the reference, and the changelog."""
    files.append(File.generated(config, "tour.md", content=page_of(ROOT / "docs" / TOUR)))
    for page, paths in reference().items():
        # Fields of interfaces matter even where their names say enough.
        options = "\n    options:\n      show_if_no_docstring: true" if page in FOR_AUTHORS else ""
        body = "\n\n".join(f"::: {path}{options}" for path in paths)
        title = page.replace("_", " ")
        files.append(File.generated(config, f"reference/{page}.md", content=f"# Reference: {title}\n\n{body}\n"))
    files.append(File.generated(config, "changelog.md", content=changelog()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to the tour lead to its page, and links to a name in the source, such as
    [`jaxrl.Agent`](../jaxrl/agents/base.py), to its entry in the reference. The tour itself links to the notebook."""
    markdown = re.sub(r"\[`([\w.]+)`\]\(\.\./(jaxrl/[\w/]+)\.py\)", linked, markdown)
    return markdown if page.file.src_uri == "tour.md" else markdown.replace(f"]({TOUR})", "](tour.md)")


def linked(source: re.Match[str]) -> str:
    """Return a link to the entry of the reference in place of one to the source."""
    path = f"{source[2].replace('/', '.')}.{source[1].rpartition('.')[2]}"
    (page,) = [page for page, paths in reference().items() if path in paths]
    return f"[`{source[1]}`](reference/{page}.md#{path})"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Put in the two styles that the theme's switch between light and dark turns on and off.

    They are those of its highlighter, which is left out; without them the switch ends in an error, and does nothing.
    """
    return output.replace("</head>", '<style id="hljs-light"></style><style id="hljs-dark"></style>\n</head>', 1)


def page_of(notebook: Path) -> str:
    """Return a notebook as Markdown: its text, its code, and what the code printed and drew."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + f"\n\n[This page as a notebook]({notebook.name}).\n"


def shown(output: dict) -> str:
    """Return what a cell printed or drew as Markdown."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    return f"![What the code above draws](data:image/png;base64,{''.join(output['data']['image/png']).strip()})"


def changelog() -> str:
    """Return the changelog with an empty line before each list, without which it would be no list here."""
    return re.sub(r"^(\w.*)\n(?=- )", r"\1\n\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


@cache
def reference() -> dict[str, list[str]]:
    """Return the pages of the reference: the paths of what each describes."""
    public = {room: [names[name] for name in sorted(names, key=str.lower)] for room, names in public_names().items()}
    networks = [home("jaxrl.nn", name) for name in sorted(exported("nn"), key=str.lower)]
    authors = {
        page: [f"jaxrl.{module}.{name}" for module, names in modules.items() for name in names]
        for page, modules in FOR_AUTHORS.items()
    }
    return {**public, "nn": networks, **authors}


def exported(room: str) -> list[str]:
    """Return the `__all__` of a package."""
    for node in ast.parse((ROOT / "jaxrl" / room / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"jaxrl.{room} has no __all__")


def public_names() -> dict[str, dict[str, str]]:
    """Return where each public name of `jaxrl/__init__.pyi` is defined, by the room that it comes from."""
    rooms: dict[str, dict[str, str]] = {}
    for node in ast.parse((ROOT / "jaxrl" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            room = rooms.setdefault(node.module.split(".")[0], {})
            room |= {alias.name: home(f"jaxrl.{node.module}", alias.name) for alias in node.names}
    return rooms


def home(module: str, name: str) -> str:
    """Return the path of the definition of `name`, which `module` has or imports.

    A room may have a module and a function of one name (`dqn`): only the whole path tells them apart.
    """
    path = ROOT / module.replace(".", "/")
    package = module if path.is_dir() else module.rpartition(".")[0]
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return home(f"{package}.{node.module}" if node.level else str(node.module), name)
    return f"{module}.{name}"
