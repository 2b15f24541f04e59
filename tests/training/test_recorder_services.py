"""Weights & Biases and MLflow themselves, offline: settings, axes, tags, artifacts, resumes, and populations."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_recorders_by_name import ALL, MORE, train
from test_videos import trained
from toys_trainer import ByStep, counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.recorders import RunInfo
from jaxrl.training.storage.run_dir import require_run

BLOCK = 32_768
"""Bytes of a block of wandb's files, in which no record's part crosses into the next."""


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def records(path: Path) -> Iterator[Any]:
    """Read the records of a file of wandb: a log of LevelDB after seven bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def finished(path: Path) -> list[Any]:
    """Read the records of a run that has ended, the last of which wandb's process writes a moment later."""
    until, found = time.monotonic() + 30.0, list(records(path))
    while not any(record.HasField("exit") for record in found) and time.monotonic() < until:
        time.sleep(0.01)
        found = list(records(path))
    return found


def row_of(items: Any) -> dict[str, Any]:
    """Return what was logged in one call; of what is a dict, wandb has an item for each entry."""
    row: dict[str, Any] = {}
    for item in items:
        name, *entry = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        row[name] = {**row.get(name, {}), entry[0]: value} if entry else value
    return row


class Run:
    """What a directory of wandb's has of one process's run."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("*.wandb")
        found = finished(path)
        (self.about,) = [record.run for record in found if record.HasField("run")]
        self.rows = [row_of(record.history.item) for record in found if record.HasField("history")]
        self.axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
        self.artifacts = [record.artifact for record in found if record.HasField("artifact")]
        self.artifacts += [r.request.log_artifact.artifact for r in found if r.request.HasField("log_artifact")]
        updates = [self.about.config.update, *(record.config.update for record in found if record.HasField("config"))]
        self.config = {
            x.key: json.loads(x.value_json) for update in [self.about.config.update, *updates] for x in update
        }

    def told(self) -> list[tuple[str, int]]:
        kinds = [next((kind for kind in ("train", "eval") if f"{kind}/wall_s" in row), "") for row in self.rows]
        return [(kind, row["opt_steps"]) for kind, row in zip(kinds, self.rows, strict=True) if kind]

    def histograms(self, name: str) -> list[tuple[int, int, Any]]:
        return [(row["opt_steps"], row["env_steps"], row[name]) for row in self.rows if name in row]


def runs_of(directory: Path) -> list[Run]:
    return [Run(folder) for folder in sorted((directory / "wandb").glob("offline-run-*"))]


def noting(text: str) -> jaxrl.Hooks:
    """Note a text with each row, in which `{}` stands for its optimisation step."""
    return jaxrl.Hooks(record=lambda trainer, row: trainer.note(text.format(row["opt_steps"])))


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_wandb_has_settings_axes_tags_histograms_events_and_the_best_policy_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "walk"
    train(run, ["wandb"], hooks=noting("at {}"))
    (first,) = runs_of(run)
    assert (first.about.project, first.about.display_name, list(first.about.tags)) == ("jaxrl", "walk", ["custom"])
    assert first.config["max_opts"] == 8
    assert first.axes["*"] == "opt_steps"
    assert first.told() == ALL
    placed = {(row["opt_steps"], row["env_steps"]) for row in first.rows if "events" not in row}
    assert placed == {(n, n) for n in (2, 4, 6, 8)}
    assert [row["eval/eval_reward"] for row in first.rows if "eval/eval_reward" in row] == [4.0, 8.0]
    (artifact,) = [artifact for artifact in first.artifacts if artifact.type == "model"]
    names = {entry.path for entry in artifact.manifest.contents}
    assert artifact.name == "walk-best"
    assert {"config.yaml", "metadata.json"} <= names
    assert any(name.startswith("best/8/") for name in names)
    require_run(run)  # it holds no link that would keep it from going on
    train(run, ["wandb"], hooks=noting("at {}"), resume=True, max_opts=12)
    _, second = runs_of(run)
    assert (second.about.run_id, second.told()) == (first.about.run_id, MORE)
    assert second.config["max_opts"] == 12
    for found, steps in ((first, [4, 8]), (second, [12])):
        for name in ("eval/returns", "eval/lengths"):
            told = found.histograms(name)
            assert [(opt_steps, env_steps) for opt_steps, env_steps, _ in told] == [(step, step) for step in steps]
            assert {(bars["_type"], sum(bars["values"])) for _, _, bars in told} == {("histogram", 1)}
    tables = [json.loads(path.read_text()) for path in (run / "wandb").glob("*/files/media/table/events*.json")]
    assert {tuple(table["columns"]) for table in tables} == {("opt_steps", "env_steps", "wall_s", "event", "message")}
    notes = [[row[0] for row in table["data"] if row[4].startswith("at ")] for table in tables]
    assert sorted(notes, key=len) == [[2, 4, 6, 8], [2, 4, 6, 8, 10, 12]]  # the second takes the place of the first


def population(run: Path, recorder: str, **settings: Any) -> None:
    made = jaxrl.population(counting(), seeds=2)
    evaluator = ByStep([float(step) for step in range(1, 101)])
    trainer = jaxrl.Trainer(
        made, evaluator=evaluator, run_dir=str(run), recorders=[recorder], max_opts=4, eval_interval=2,
        save_interval=2, record_interval=2, quiet=True, workers=2, **settings,
    )  # fmt: skip
    trainer.train()


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_a_population_is_one_group_of_wandb(tmp_path: Path) -> None:
    population(tmp_path / "many", "wandb")
    found = [runs_of(tmp_path / "many" / "members" / name) for name in ("00000", "00001")]
    ((zero,), (one,)) = found
    assert (zero.about.run_group, one.about.run_group) == ("many", "many")
    assert (zero.about.display_name, one.about.display_name) == ("many-00000", "many-00001")
    assert zero.about.run_id != one.about.run_id
    assert (zero.config["seed"], one.config["seed"]) == (0, 1)
    assert zero.told() == one.told() == [("eval", 2), ("train", 2), ("eval", 4), ("train", 4)]


@pytest.mark.usefixtures("_offline")
def test_wandb_has_the_first_64_characters_of_a_tag_and_takes_a_name_with_a_slash(tmp_path: Path) -> None:
    from jaxrl.training.recorders.wandb_run import wandb_recorder

    for name in ("config.yaml", "metadata.json", "best/1/data"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    given = wandb_recorder()
    given.begin(RunInfo("lr/1e-3", tmp_path, {}, ("custom", "a" * 70, "a" * 80, "lr=1e-3"), opt_steps=0))
    given.write({"kind": "train", "opt_steps": 1, "env_steps": 1, "wheel(left)": 2.0})
    given.close()
    (found,) = runs_of(tmp_path)
    assert list(found.about.tags) == ["custom", "a" * 64, "lr=1e-3"]
    assert [row["train/wheel(left)"] for row in found.rows] == [2.0]
    assert (found.about.display_name, [artifact.name for artifact in found.artifacts]) == ("lr/1e-3", ["lr_1e-3-best"])


@pytest.mark.usefixtures("_offline")
def test_wandb_without_a_run_directory_writes_where_it_does_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl.training.recorders.wandb_run import wandb_recorder

    monkeypatch.chdir(tmp_path)
    alone = {"max_opts": 4, "record_interval": 2, "eval_interval": 0, "eval_episodes": 0, "quiet": True}
    jaxrl.Trainer(counting(), recorders=[wandb_recorder()], **alone).train()
    (found,) = runs_of(tmp_path)
    assert found.told() == [("train", 2), ("train", 4)]


@pytest.mark.usefixtures("_offline")
def test_wandb_without_a_key_for_its_server_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError, match=r"wandb has no key for api\.wandb\.ai; run `wandb login`"):
        jaxrl.Trainer(counting(), recorders=["wandb"], run_dir=str(tmp_path / "run"))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abc\n")
    jaxrl.Trainer(counting(), recorders=["wandb"], run_dir=str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.usefixtures("_files")
def test_mlflow_has_settings_metrics_by_step_events_and_the_best_policy_and_goes_on(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run, hooks = tmp_path / "walk", noting("\u00fc \udc80 {}")
    train(run, ["mlflow"], hooks=hooks)
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    train(run, ["mlflow"], hooks=hooks, resume=True, max_opts=12)
    experiment = client.get_experiment_by_name("jaxrl")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("walk", "FINISHED")
    assert (found.data.params["max_opts"], found.data.tags["now.max_opts"]) == ("8", "12")
    assert found.data.tags["algo"] == "custom"
    scores = client.get_metric_history(found.info.run_id, "eval/eval_reward")
    assert [(metric.step, metric.value) for metric in scores] == [(4, 4.0), (8, 8.0), (12, 12.0)]
    steps = client.get_metric_history(found.info.run_id, "train/env_steps")
    assert [metric.step for metric in steps] == [2, 4, 6, 8, 10, 12]
    artifacts = {entry.path for entry in client.list_artifacts(found.info.run_id)}
    assert {"best", "config.yaml", "metadata.json"} <= artifacts
    (events,) = (run / "mlruns").glob("*/*/artifacts/events.txt")
    lines = events.read_text().splitlines()
    assert [line.strip() for line in lines if "note" in line] == [
        f"{step} opts  note: \u00fc ? {step}" for step in (2, 4, 6, 8, 10, 12)
    ]
    assert sum("resume: " in line for line in lines) == 1
    require_run(run)


@pytest.mark.usefixtures("_files")
def test_mlflow_takes_as_many_rows_in_a_call_as_its_limit_of_metrics_allows(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from jaxrl.training.recorders.mlflow_run import mlflow_recorder

    uri, columns = (tmp_path / "mlruns").as_uri(), {f"x{i}": float(i) for i in range(299)}
    given = mlflow_recorder(tracking_uri=uri)
    given.begin(RunInfo("wide", tmp_path, {}, (), opt_steps=0))
    for step in range(1, 9):  # 2 400 metrics, of which a call takes 1 000
        given.write({"kind": "train", "opt_steps": step, "env_steps": step, **columns})
    given.close()
    client = MlflowClient(tracking_uri=uri)
    (experiment,) = client.search_experiments(filter_string="name = 'jaxrl'")
    (found,) = client.search_runs([experiment.experiment_id])
    for name in ("train/env_steps", "train/x298"):
        assert [metric.step for metric in client.get_metric_history(found.info.run_id, name)] == list(range(1, 9))


@pytest.mark.usefixtures("_files")
def test_names_that_mlflow_refuses_are_sent_as_it_accepts_them(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from jaxrl.training.recorders.mlflow_run import mlflow_recorder

    given = mlflow_recorder(tracking_uri=(tmp_path / "mlruns").as_uri())
    settings = {"algo": "custom", "env_args.a(b)": 1, "env_args.a[b]": 2, "x" * 260: 3}
    given.begin(RunInfo("lr=1e-3", tmp_path, settings, ("custom", "lr=1e-3", "../up//down/", "/"), opt_steps=0))
    given.write({"kind": "train", "opt_steps": 5, "env_steps": 5, "wheel(left)": 2.0, "räder: 2 /": 4.0})
    given.close()
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'jaxrl'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("lr=1e-3", "FINISHED")
    assert found.data.params == {"algo": "custom", "env_args.a_b_": "2", "x" * 250: "3"}
    assert {"lr_1e-3": "yes", "up/down": "yes", "_": "yes", "algo": "custom"}.items() <= found.data.tags.items()
    assert found.data.metrics == {"train/env_steps": 5.0, "train/wheel_left_": 2.0, "train/räder: 2 ": 4.0}


@pytest.mark.slow
@pytest.mark.usefixtures("_files")
def test_a_population_is_one_run_of_mlflow_with_its_members_inside(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = tmp_path / "many"
    population(run, "mlflow")
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("jaxrl")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [one for one in found if "mlflow.parentRunId" not in one.data.tags]
    members = {one.info.run_name: one for one in found if one is not parent}
    assert (parent.info.run_name, sorted(members)) == ("many", ["many-00000", "many-00001"])
    assert {one.data.tags["mlflow.parentRunId"] for one in members.values()} == {parent.info.run_id}
    assert [members[name].data.params["seed"] for name in sorted(members)] == ["0", "1"]
    assert {one.info.status for one in found} == {"FINISHED"}


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_wandb_has_the_episodes_filmed_on_the_way(tmp_path: Path) -> None:
    run = tmp_path / "filmed"
    trained(run, video_interval=32, recorders=["wandb"])
    (found,) = runs_of(run)
    films = [row for row in found.rows if any(name.startswith("video/episode") for name in row)]
    assert [(row["opt_steps"], row["env_steps"]) for row in films] == [(32, 128), (64, 256)]
    kept = list((run / "wandb").glob("offline-run-*/files/media/videos/**/*.gif"))
    assert {path.read_bytes() for path in kept} == {(run / "videos" / f"{step}.gif").read_bytes() for step in (32, 64)}
    require_run(run)


@pytest.mark.slow
@pytest.mark.usefixtures("_files")
def test_mlflow_has_the_episodes_filmed_on_the_way(tmp_path: Path) -> None:
    run = tmp_path / "filmed"
    trained(run, video_interval=32, recorders=["mlflow"])
    kept = list((run / "mlruns").glob("*/*/artifacts/videos/*.gif"))
    assert sorted(path.name for path in kept) == ["32.gif", "64.gif"]
