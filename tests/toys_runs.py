"""Run directories written by hand, as small as a test needs them, in the files that training writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


def write_run(
    path: Path, seed: int = 0, scores: Sequence[float] = (), returns: Sequence[float] = (), **more: Any
) -> Path:
    """Write a run with a score and a mean return after every 10 optimisation steps; `more` are settings."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(settings_of(seed, **more)))
    (path / "metadata.json").write_text(json.dumps(METADATA))
    log(path, rows_of(scores, returns))
    return path


METADATA = {"format": 1, "status": "max_opts", "seconds": {"compile": 2.0, "train": 3.0}, "wall_s": 5.5}


def settings_of(seed: int = 0, lr: float = 0.001, **more: Any) -> dict[str, Any]:
    """Return settings of a run."""
    return {"algo": "ppo", "env": "CartPole-v1", "agent": {"lr": lr}, "seed": seed, "max_opts": 100, **more}


def rows_of(scores: Sequence[float] = (), returns: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Return rows of a log: scores, then mean returns."""
    rows = []
    for i, score in enumerate(scores, start=1):
        rows.append({"kind": "eval", **place(i), "eval_reward": score, "episodes": 2, "score": score})
    for i, value in enumerate(returns, start=1):
        rows.append({"kind": "train", **place(i), "episode_return": value, "skipped_updates": i, "invalid_steps": 0})
    return rows


def place(i: int) -> dict[str, Any]:
    """Return where the `i`th row stands."""
    return {"opt_steps": 10 * i, "env_steps": 40 * i, "wall_s": 0.5 * i}


def log(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to the log of a run."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_members(path: Path, members: Sequence[tuple[dict[str, Any], Sequence[float]]]) -> None:
    """Write the settings and scores of members into the files of a population."""
    path.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"common": {"settings": {}, "metadata": METADATA}}]
    for number, (settings, scores) in enumerate(members):
        lines.append({"member": number, "settings": settings, "metadata": {}})
        log(path, [{"member": number, **row} for row in rows_of(scores)])
    (path / "members.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_population(path: Path, scores: dict[float, Sequence[float]]) -> Path:
    """Write a population that sweeps the learning rate, with the last score of each member."""
    members = [(lr, seed, score) for lr, found in scores.items() for seed, score in enumerate(found)]
    write_members(path, [(settings_of(seed, lr), [0.0, score]) for lr, seed, score in members])
    sweep = {"population": {"seeds": 2, "sweep": {"agent.lr": list(scores)}}}
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", **sweep}))
    return path


def write_search(path: Path, taken: Sequence[tuple[int, int, int]]) -> Path:
    """Write a population of PBT, three members of one seed; `taken` are a step, a member and whom it goes on from."""
    write_members(path, [(settings_of(0, lr), [0.0, float(i)]) for i, lr in enumerate((0.1, 0.2, 0.1))])
    settings = {"seeds": 1, "sweep": {"agent.lr": "log_uniform(0.01,1)"}, "pbt": {"interval": 10}}
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", "population": settings}))
    rows = [{"kind": "lineage", "opt_steps": at, "member": own, "parent": of} for at, own, of in taken]
    log(path, [{**row, "values": {"agent.lr": 0.1}} for row in rows])
    return path


def full_disk(*args: Any) -> None:
    """Fail as what writes to a full disk does."""
    raise OSError(28, "No space left on device")


def contents(path: Path) -> dict[str, bytes | None]:
    """Return every entry below `path` with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


# --- what training has written ------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file in JSON Lines; the last may be on its way."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def rows_in(run: Path, member: int | None = None, log: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the rows of a run, or those of a member of a population as they would stand in a log of its own."""
    rows = read_lines(run / log)
    if member is None:
        return rows
    own = [row for row in rows if next(iter(row)) == "member" and row["member"] == member]
    return [{name: x for name, x in row.items() if name != "member"} for row in own]


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what clock and memory say, which no run repeats."""
    timed = lambda name: name == "wall_s" or name.endswith(("_per_sec", "_mb"))
    return [{name: x for name, x in row.items() if not timed(name)} for row in rows]


def repeated_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that a run must repeat: all but events, less what clock and memory say."""
    return timeless([row for row in rows if row.get("kind") != "event"])


def events_in(run: Path) -> list[tuple[str, int]]:
    """Return the events that a run's log has, but notes, each with its step."""
    told = [row for row in rows_in(run) if row["kind"] == "event" and row["event"] != "note"]
    return [(row["event"], row["opt_steps"]) for row in told]


def board_events(board: Path) -> list[Event]:
    """Read the events of TensorBoard's files in the order of their names, each as far as it is whole, with its sums."""
    found = []
    for path in sorted(board.iterdir()):
        data = path.read_bytes()
        while len(data) >= 12:
            length = int.from_bytes(data[:8], "little")
            record, rest = data[12 : 12 + length], data[12 + length :]
            if len(record) < length or len(rest) < 4:
                break
            sums = tuple(masked_crc32c(part).to_bytes(4, "little") for part in (data[:8], record))
            assert (data[8:12], rest[:4]) == sums
            found.append(Event.FromString(record))
            data = rest[4:]
    return found


def values_of(board: Path) -> list[tuple[int, Any]]:
    """Return the values of TensorBoard's files, each with its step, in their order."""
    return [(event.step, value) for event in board_events(board) for value in event.summary.value]


def shown_values(board: Path) -> list[tuple[int, Any]]:
    """Return the values that TensorBoard shows: all but what a later start of a session takes back."""
    found: list[tuple[int, Any]] = []
    for event in board_events(board):
        if event.session_log.status == SessionLog.START:
            found = [(step, value) for step, value in found if step < event.step]
        found += [(event.step, value) for value in event.summary.value]
    return found


def messages(run: Path, event: str) -> list[str]:
    """Return what a run's log says of an event, each time that it came."""
    return [row["message"] for row in rows_in(run) if row.get("event") == event]


def rows_about_all(population: Path) -> list[dict[str, Any]]:
    """Return the population's own rows."""
    return [row for row in read_lines(population / "metrics.jsonl") if next(iter(row)) == "kind"]


def member_facts(population: Path, member: int, part: str = "settings") -> dict[str, Any]:
    """Return the settings or the metadata of a member."""
    first, *members = read_lines(population / "members.jsonl")
    (own,) = (line for line in members if line["member"] == member)
    return {**first["common"][part], **own[part]}


def without_line(file: Path, member: int) -> None:
    """Remove the line of a member, as errors advise."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith(f'{{"member": {member}, ')))
