"""What logs and boards of a run hold, less what was measured by the clock."""

from pathlib import Path

from toys_runs import shown_values

LOGS = ("metrics.jsonl", "eval_episodes.jsonl")


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Read tag, step and value of what TensorBoard shows of `directory`, less events and what the clock measured."""
    by_the_clock = ("wall_s", "_per_sec", "_mb")
    found = [(value.tag, step, value.simple_value) for step, value in shown_values(directory)]
    return [scalar for scalar in found if scalar[0] != "events" and not scalar[0].endswith(by_the_clock)]
