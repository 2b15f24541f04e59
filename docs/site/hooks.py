"""What the site has beside the pages in `docs/`: a reference of the public names, and the changelog."""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each room of public names, and the changelog."""
    for room, names in public_names().items():
        body = "\n\n".join(f"::: {names[name]}" for name in sorted(names, key=str.lower))
        files.append(File.generated(config, f"reference/{room}.md", content=f"# Reference: {room}\n\n{body}\n"))
    files.append(File.generated(config, "changelog.md", content=changelog()))
    return files


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
