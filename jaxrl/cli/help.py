"""The text of `train --help`: a first page with the most used settings, then all settings."""

import ast
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

from jaxrl.cli.arguments import no
from jaxrl.registry import ALGORITHMS

WIDTH = 24
NARROW = 60
"""Terminal width below which the explanation of a flag is printed below it."""
FIRST = {
    "how long": ("max_opts", "max_env_steps", "stop_reward"),
    "how it learns": (
        "agent.lr", "processor.discount", "num_envs", "opt_interval", "warmup", "buffer.batch_size", "buffer.capacity",
        "rollout", "epochs", "minibatches", "batch_size", "agent.ent_coef", "agent.epsilon_end", "agent.features",
        "agent.torso",
    ),
    "logging and checkpoints": ("eval_interval", "eval_episodes", "save_interval", "run_dir", "recorders", "quiet"),
}  # fmt: skip
"""Settings in each group of the first page, in order; those that an algorithm lacks are skipped."""
MANY = {
    "--seeds N": "train N seeds in one run",
    "--sweep NAME=A,B": "train each value of a setting, as in agent.lr=1e-4,1e-3",
    "--halving, --pbt": "search: only the best go on; or copy them and vary",
    "--members N": "how many, where a range is drawn from; --draw-seed N draws others",
    "--layout, --width": "auto, spread or together: how many share a program",
    "--devices, --mesh": "spread them over devices, as 8 or members=4,envs=2",
}
GO_ON = {
    "--config FILE": "settings from a YAML file; flags win over it",
    "--resume RUN": "go on with a run, exactly; needs no other flag",
    "--init-from RUN": "begin with the networks of another run",
    "--help, --version": "this page; the version of jaxrl",
}


def first_page(algo: str, config: Any, prog: str) -> str:
    """Return the first page for an algorithm, with the values of `config` as defaults.

    It has at most 60 lines of 80 characters for every algorithm.
    """
    settings, known = settings_of(config), f"one of {', '.join(ALGORITHMS)}; here {algo}"
    lines = [
        f"usage: {prog} [ALGO] [--env NAME] [SETTINGS]",
        "",
        f"  {prog} ppo --env CartPole-v1 --seed 3",
        f"  {prog} --resume runs/NAME",
        *_group("what to train", [("ALGO", known)]),
        *_row("--env NAME", f"environment ({_plain(settings['env'].value)}); --list-envs names those there are"),
        *_row("--seed N", f"{_about(settings['seed'])} ({settings['seed'].value})"),
    ]
    for title, names in FIRST.items():
        there = [(name, settings[name]) for name in names if name in settings]
        lines += _group(title, [(_flag(name), f"{_about(each)} ({_plain(each.value)})") for name, each in there])
    lines += [*_group("seeds and sweeps", MANY.items()), *_group("resuming and initialising", GO_ON.items())]
    return "\n".join([*lines, "", "all settings", ""])


def wrap_paragraphs(*paragraphs: str) -> str:
    """Wrap paragraphs to the width of the terminal, at most 100 characters."""
    return "\n".join(textwrap.fill(each, _width(), break_on_hyphens=False) for each in paragraphs)


def _group(title: str, rows: Any) -> list[str]:
    return ["", title, *(line for row in rows for line in _row(*row))]


def _row(flag: str, about: str) -> list[str]:
    """Return the lines of a setting: in two columns, or on a narrow terminal one below the other."""
    width = _width()
    gap = "" if len(flag) < WIDTH else "  "
    left, indent = (f"  {flag:<{WIDTH}}{gap}", WIDTH + 2) if width >= NARROW else (f"  {flag}  ", 6)
    return textwrap.wrap(left + about, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _width() -> int:
    return max(30, min(shutil.get_terminal_size().columns, 100))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Setting(NamedTuple):
    """A setting of a run."""

    owner: type
    """Dataclass that has it as a field."""
    name: str
    """Name of the field."""
    value: Any


def settings_of(config: Any, prefix: str = "") -> dict[str, Setting]:
    """Return all settings by dotted name, such as `agent.lr`."""
    found: dict[str, Setting] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= settings_of(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = Setting(type(config), field.name, value)
    return found


def _plain(value: Any) -> str:
    """Format a value as it is typed after its flag."""
    if value in (None, "", (), [], {}):
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _about(setting: Setting) -> str:
    """Return the first clause of a setting's docstring, with a lower-case initial."""
    said = re.split(r"[;:.(]", _text(setting.owner, setting.name))[0].strip() or setting.name.replace("_", " ")
    return said[0].lower() + said[1:]


def all_settings(config: Any) -> str:
    """Return the help on all settings, with full text and defaults, grouped by part of the run."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, each in settings_of(config).items():
        part, _, _ = name.rpartition(".")
        text = " ".join(_text(each.owner, each.name).split())
        groups.setdefault(part, []).append((_flag_usage(name, each), f"{text} ({_plain(each.value)})"))
    return "\n".join(line for part, rows in groups.items() for line in _group(f"of the {part or 'run'}", rows))


def _flag_usage(name: str, setting: Setting) -> str:
    """Return a flag with its `no-` form or its arguments."""
    if isinstance(setting.value, bool):
        return f"{_flag(name)}, {no(_flag(name))}"
    if isinstance(setting.value, Mapping):
        return f"{_flag(name)} NAME VALUE ..."
    return _flag(name)


def _text(kind: type, name: str) -> str:
    """Return the docstring of a setting, from the first class in the MRO that has one."""
    classes = [each for each in kind.__mro__ if is_dataclass(each)]
    return next(filter(None, (_docstrings(each).get(name) for each in classes)), "")


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, below in itertools.pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = str(below.value.value)
    return found
