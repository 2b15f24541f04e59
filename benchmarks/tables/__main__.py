"""`python -m benchmarks.tables [NAME ...] [--write]`: print what README and docs quote, or write it there.

They stand between `<!-- NAME -->` and `<!-- /NAME -->`, are made of the files in `results/` alone, and end with the
versions of jaxrl and the files that they are of. Where several files have a row of one name, the latest counts: measure
anew into a file of its own, write the tables, and delete the files that no page names any more.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.tables import reach, speed
from benchmarks.tables.results import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES: dict[str, Callable[[], str]] = {
    "default-command": reach.default_command,
    "speed": speed.in_short,
    "training-speed": speed.training,
    "parts-speed": speed.parts,
    "replay-speed": speed.replay,
    "actors-speed": speed.actors,
    "start-speed": speed.start,
    "peers-speed": partial(speed.peers, speed.TASKS),
    "peers-widths-speed": partial(speed.peers, speed.WIDTHS),
    "peers-seeds-speed": partial(speed.peers, speed.SEEDS),
    "gpu-speed": speed.gpu,
    "members-speed": speed.members,
    "recorders-speed": speed.recorders,
    "scale-speed": speed.spread,
    "atari-speed": speed.atari,
    "presets-reach": reach.reached,
    "dqn-reach": partial(reach.reached, "dqn", "rainbow"),
    "sac-reach": partial(reach.reached, "sac", "crossq", "xqc", "tqc", "redq", "droq", "simba", "fast_sac"),
    "td3-reach": partial(reach.reached, "td3", "ddpg", "fast_td3"),
    "pqn-reach": partial(reach.reached, "pqn"),
    "reppo-reach": partial(reach.reached, "reppo"),
    "policy-gradients-reach": partial(reach.reached, "ppo", "a2c", "reinforce", "impala"),
    "judging-reach": reach.judged,
    "without-preset-reach": reach.without_preset,
    "bfloat16-reach": reach.bfloat16,
    "suites-reach": reach.suites,
    "playground-reach": reach.playground,
    "craftax-reach": reach.craftax,
    "mujoco-reach": reach.mujoco,
    "mujoco-ppo-reach": reach.mujoco_ppo,
    "memory-reach": reach.memory,
    "cores-reach": reach.cores,
    "cores-cost": speed.cores,
    "demos-reach": reach.demonstrations,
    "begin-reach": reach.beginnings,
    "students-reach": reach.students,
    "offline-reach": reach.from_data,
    "offline-beside": reach.from_data_beside,
    "searches-reach": reach.searches,
    "counts": speed.compiled,
    "shards": speed.exchanged,
}
"""What makes each, by the name of its place."""


def places(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and present content of each place in a page."""
    for found in re.finditer(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- /\1 -->", text, re.DOTALL):
        yield found[1], found[2]


def written(text: str) -> str:
    """Return a page with all its places as they are to be."""
    for name, present in [*places(text)]:
        text = text.replace(f"<!-- {name} -->\n{present}\n", f"<!-- {name} -->\n{TABLES[name]()}\n")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Print tables, or write them into the pages."""
    parser = argparse.ArgumentParser("python -m benchmarks.tables", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)} (default: all)")
    parser.add_argument("--write", action="store_true", help="write all of them into README.md and docs/")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.names if name not in TABLES]:
        parser.error(f"unknown table {unknown[0]}; known: {', '.join(TABLES)}")
    for page in PAGES if asked.write else ():
        if (text := page.read_text()) != (new := written(text)):
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} is written", file=sys.stderr)
    for name in () if asked.write else asked.names or TABLES:
        print(f"<!-- {name} -->\n{TABLES[name]()}\n<!-- /{name} -->\n")


if __name__ == "__main__":
    main()
