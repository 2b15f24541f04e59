"""What the site has beside the pages in `docs/`: the tour, a reference of the public names, and the changelog."""

import ast
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
TOUR = "tour.ipynb"
"""A notebook, which the site shows as a page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tour, a page for each room of public names, and the changelog."""
    files.append(File.generated(config, "tour.md", content=page_of(ROOT / "docs" / TOUR)))
    for room, names in public_names().items():
        body = "\n\n".join(f"::: {names[name]}" for name in sorted(names, key=str.lower))
        files.append(File.generated(config, f"reference/{room}.md", content=f"# Reference: {room}\n\n{body}\n"))
    files.append(File.generated(config, "changelog.md", content=changelog()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to the tour lead to its page; that page itself links to the notebook."""
    return markdown if page.file.src_uri == "tour.md" else markdown.replace(f"]({TOUR})", "](tour.md)")


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
