"""What differs between the settings of two runs, and which of them decide what."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.agents.fields import SequenceConfig
from jaxrl.training.settings import TrainerConfig

HARMLESS = frozenset(TrainerConfig.__dataclass_fields__) - {"seed"} | {
    "processes",
    "actor_timeout",
    "actor_engine",
    "actor_restarts",
    "open_in_turn",
    "data",
    "demos",
    "teacher",
    "eval_env",
    "eval_env_args",
    "buffer.memory",
}
"""Settings that may change on resume. No bit of the training depends on them, unless training diverges and is rolled
back.

The location of a data set (`data`, `demos`) or a `teacher` is one of them; what it holds is pinned by `data_sha256`,
`demos_sha256`, `teacher_sha256`.
"""


YARDSTICK = frozenset({"env", "env_args", "eval_env", "eval_env_args", "eval_actions"})
"""Settings that decide what a score means: those under others cannot be compared."""


def unread(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the settings that nothing reads under `settings`.

    Of an agent with other values than c51, they are the ends of its support; without a core, what says how sequences of
    replay are learnt from.
    """
    agent = settings.get("agent")
    known = agent if isinstance(agent, Mapping) else {}
    support = () if known.get("values", "c51") == "c51" else ("v_min", "v_max")
    of_core = () if known.get("core", "none") != "none" else SequenceConfig.__dataclass_fields__
    return frozenset(f"agent.{name}" for name in (*support, *of_core) if name != "core")


class Change(NamedTuple):
    """A setting or a version that differs from the saved one."""

    name: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"

    @property
    def only_names(self) -> bool:
        """Whether the change may only be another name for the same network; it is if the saved parameters fit."""
        if self.name == "agent.torso":
            return "auto" in (self.old, self.new) or {self.old, self.new} == {"conv", "minatar"}
        return self.name == "agent.channels" and [self.old, self.new] in ([[], [16]], [[16], []])


def changes(old: object, new: object, name: str = "") -> list[Change]:
    """List the differences between the nested settings `old` and `new`, or with a `name`, of what is called so."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {key: f"{name}.{key}" if name else str(key) for key in [*old, *new]}
        parts = [changes(old.get(key), new.get(key), path) for key, path in keys.items()]
        return [change for part in parts for change in part]
    return [] if old == new else [Change(name, old, new)]


def evaluation_changes(found: Sequence[Change]) -> list[Change]:
    """Return those of the changes found under which scores mean something else."""
    return [change for change in found if change.name.partition(".")[0] in YARDSTICK]
