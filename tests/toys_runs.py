"""Run directories written by hand, as small as a test needs them, in the files that training writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run(
    path: Path, seed: int = 0, scores: Sequence[float] = (), returns: Sequence[float] = (), **more: Any
) -> Path:
    """Write a run with a score and a mean return after every 10 optimisation steps; `more` are settings."""
    agent = {"lr": more.pop("lr", 0.001)}
    metadata = {"format": 1, "status": "max_opts", "seconds": {"compile": 2.0, "train": 3.0}, "wall_s": 5.5}
    path.mkdir(parents=True)
    settings = {"algo": "ppo", "env": "CartPole-v1", "agent": agent, "seed": seed, "max_opts": 100, **more}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    (path / "metadata.json").write_text(json.dumps(metadata))
    rows = []
    for i, score in enumerate(scores, start=1):
        rows.append({"kind": "eval", **place(i), "eval_reward": score, "episodes": 2, "score": score})
    for i, value in enumerate(returns, start=1):
        rows.append({"kind": "train", **place(i), "episode_return": value, "skipped_updates": i, "invalid_steps": 0})
    log(path, rows)
    return path


def place(i: int) -> dict[str, Any]:
    """Return where the `i`th row stands."""
    return {"opt_steps": 10 * i, "env_steps": 40 * i, "wall_s": 0.5 * i}


def log(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to the log of a run."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_population(path: Path, scores: dict[float, Sequence[float]]) -> Path:
    """Write a population that sweeps the learning rate, with the last score of each member."""
    members = [(lr, seed, score) for lr, found in scores.items() for seed, score in enumerate(found)]
    for i, (lr, seed, score) in enumerate(members):
        write_run(path / "members" / f"{i:05d}", seed, [0.0, score], lr=lr)
    sweep = {"population": {"seeds": 2, "sweep": {"agent.lr": list(scores)}}}
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", **sweep}))
    return path


def write_search(path: Path, taken: Sequence[tuple[int, int, int]]) -> Path:
    """Write a population of PBT, three members of one seed; `taken` are a step, a member and whom it goes on from."""
    for i, lr in enumerate((0.1, 0.2, 0.1)):
        write_run(path / "members" / f"{i:05d}", 0, [0.0, float(i)], lr=lr)
    settings = {"seeds": 1, "sweep": {"agent.lr": "log_uniform(0.01,1)"}, "pbt": {"interval": 10}}
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", "population": settings}))
    rows = [{"kind": "lineage", "opt_steps": at, "member": own, "parent": of} for at, own, of in taken]
    log(path, [{**row, "values": {"agent.lr": 0.1}} for row in rows])
    return path
