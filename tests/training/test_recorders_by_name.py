"""Recorders by name: the table, messages, CSV, TensorBoard's settings; and services that hang, refuse or fill up."""

import csv
import json
import resource
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from test_videos import learning
from toys_gymnasium import Counting
from toys_runs import rows_in, values_of
from toys_session import Script, drive, single
from toys_trainer import ByStep, counting, small_dqn

import jaxrl
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError
from jaxrl.registry import RECORDERS, import_name
from jaxrl.training import program
from jaxrl.training.recorders import CSVRecorder, RunInfo, ServiceRecorder

ROOT = Path(__file__).parents[2]
SHORT: dict[str, Any] = {"max_opts": 8, "eval_interval": 4, "record_interval": 2, "save_interval": 4, "quiet": True}


def train(run: Path, recorders: Any = None, **settings: Any) -> jaxrl.Trainer:
    """Train the counting strategy, which evaluates to its step."""
    evaluator = ByStep([float(step) for step in range(1, 101)])
    made = jaxrl.Trainer(
        counting(), evaluator=evaluator, recorders=recorders, run_dir=str(run), **{**SHORT, **settings}
    )
    made.train()
    return made


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_in(run) if row["kind"] in ("train", "eval")]


# --- the table, and what it leads to ----------------------------------------------------------------------------


def test_each_name_is_known_to_help_docs_and_packaging(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["ppo", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    docs = (ROOT / "docs" / "recorders.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, row in RECORDERS.items():
        assert callable(import_name(row.module, row.maker))
        assert f"| `{name}` |" in docs
        assert f"{name} ({row.about})" in shown
        assert row.package is None or row.package in extras


def test_names_come_from_flags_and_files(tmp_path: Path) -> None:
    assert parse([]).config.recorders == ("console", "jsonl", "tensorboard")
    assert parse(["--recorders", "console", "csv", "--seed", "3"]).config.recorders == ("console", "csv")
    (tmp_path / "mine.yaml").write_text("recorders: [csv]")
    assert parse(["--config", str(tmp_path / "mine.yaml")]).config.recorders == ("csv",)
    with pytest.raises(SettingsError, match="unknown argument --wandb; did you mean --recorders"):
        parse(["--wandb"])


def test_names_and_objects_take_in_the_same_rows(tmp_path: Path) -> None:
    memory = jaxrl.MemoryRecorder()
    train(tmp_path / "run", ["csv", memory])
    assert [row for row in memory.rows if row["kind"] != "event"] == rows_of(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["recorders"] == ["csv"]


def test_a_session_takes_names_and_its_console_tells_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = jaxrl.MemoryRecorder()
    with single(recorders=["console", "csv", memory], run_dir=str(tmp_path / "run"), record_interval=4) as session:
        session.evaluate_score(1.5)
    (line,) = csv.DictReader((tmp_path / "run" / "metrics.csv").open())
    assert (line["kind"], line["eval_reward"]) == ("eval", "1.5")
    assert [row["eval_reward"] for row in memory.rows if row["kind"] == "eval"] == [1.5]
    assert not (tmp_path / "run" / "tensorboard").exists()
    said = capsys.readouterr()
    assert "score       1.5  best" in said.out
    assert "failed" not in said.err


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": (["wandbb"], "unknown recorder 'wandbb'; did you mean wandb?"),
    "a bare name": ("csv", r"recorders is 'csv'; expected a list of names or objects"),
    "no directory": (["csv"], "recorder 'csv' writes into the directory of the run; set run_dir as well"),
    "missing": (["wandb"], r"runs recorded by wandb need the extra `wandb`: pip install 'jaxrl\[wandb\]'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_compiles(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(program, "check_step", lambda *args: pytest.fail("it began to trace"))
    recorders, said = REFUSED[case]
    with pytest.raises(SettingsError, match=said):
        jaxrl.Trainer(counting(), recorders=recorders)


def test_members_of_a_population_take_names_alone(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="recorders has MemoryRecorder in it; here it takes names"):
        jaxrl.Trainer(jaxrl.population(counting(), seeds=2), recorders=[jaxrl.MemoryRecorder()])


def test_rows_tell_the_memory_of_process_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrl.training import logbook

    monkeypatch.setattr(logbook, "STATM", tmp_path / "statm")
    monkeypatch.setattr(logbook.os, "sysconf", lambda name: 4096)
    assert "rss_mb" not in logbook.memory()  # where the system does not tell
    (tmp_path / "statm").write_text("9000 1000 5 1 0 8 0\n")
    monkeypatch.setattr(logbook.jax, "local_devices", lambda: [Device()])
    assert logbook.memory() == {"rss_mb": 4.096, "device_mb": 2.5}
    train(tmp_path / "run", [])
    assert {row["rss_mb"] for row in rows_of(tmp_path / "run") if row["kind"] == "train"} == {4.096}


class Device:
    """A device that tells how much of its memory is in use."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 2_500_000}


class Asking(jaxrl.MemoryRecorder):
    """Keep what it is told of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[RunInfo] = []

    def begin(self, run: RunInfo) -> None:
        assert self.rows == []
        self.told.append(run)


def test_recorders_are_told_of_the_run_and_from_where_it_goes_on(tmp_path: Path) -> None:
    first, second = Asking(), Asking()
    train(tmp_path / "run", [first])
    train(tmp_path / "run", [second], resume=True, max_opts=12)
    (begun,), (gone_on,) = first.told, second.told
    assert (begun.name, begun.directory, begun.opt_steps) == ("run", tmp_path / "run", 0)
    assert (begun.settings["max_opts"], begun.settings["algo"], begun.tags) == (8, "custom", ("custom",))
    assert (gone_on.opt_steps, gone_on.changed, gone_on.settings["max_opts"]) == (8, False, 12)


def test_settings_are_told_by_their_paths_and_members_by_their_group(tmp_path: Path) -> None:
    from jaxrl.parsing import flatten_settings
    from jaxrl.training.storage.run_dir import population_dir

    assert flatten_settings({"agent": {"lr": 0.1, "sizes": [1, 2]}, "seed": 0}) == {
        "agent.lr": 0.1,
        "agent.sizes": [1, 2],
        "seed": 0,
    }
    member = tmp_path / "all" / "members" / "00003"
    assert population_dir(member) is None
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "config.yaml").write_text("{}")
    assert population_dir(member) == tmp_path / "all"


def test_the_one_link_that_wandb_makes_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, ["csv"])
    logs = run / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "elsewhere.log")
    train(run, resume=True, max_opts=12)
    (logs / "other.log").symlink_to(tmp_path / "elsewhere.log")
    with pytest.raises(SettingsError, match=r"other\.log is a link"):
        train(run, resume=True, max_opts=16)
    (logs / "other.log").unlink()
    (tmp_path / "second").hardlink_to(run / "metrics.csv")
    with pytest.raises(SettingsError, match=r"metrics\.csv has a second name"):
        train(run, resume=True, max_opts=16)


# --- CSV --------------------------------------------------------------------------------------------------------


def table(run: Path) -> list[dict[str, str]]:
    """Read `metrics.csv`; what is empty is left out."""
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    return [{name: value for name, value in row.items() if value} for row in rows]


def as_text(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: str(value) for name, value in row.items() if value is not None} for row in rows]


def test_the_table_is_that_of_the_log_also_after_kills_and_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, ["csv"])
    assert table(run) == as_text(rows_of(run))
    assert {row["kind"] for row in table(run)} == {"train", "eval"}
    with (run / "metrics.csv").open("a") as file:
        file.write('train,99,"torn')
    train(run, ["csv"], resume=True, max_opts=12)
    assert table(run) == as_text(rows_of(run))
    assert [row["opt_steps"] for row in table(run) if row["kind"] == "train"] == ["2", "4", "6", "8", "10", "12"]


def test_a_resumed_run_that_had_no_table_gets_a_whole_one(tmp_path: Path) -> None:
    train(tmp_path, [])
    train(tmp_path, ["csv"], resume=True, max_opts=12)
    assert table(tmp_path) == as_text(rows_of(tmp_path))


def test_a_new_column_while_the_disk_is_full_waits_as_rows_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    rows = [{"kind": "train", "opt_steps": n, "env_steps": n, "loss": n / 2} for n in (1, 2, 4)]
    rows.insert(2, {"kind": "eval", "opt_steps": 3, "env_steps": 3, "eval_reward": 7.0})
    rows.insert(3, {**rows[1], "opt_steps": 3, "env_steps": 3, "entropy": 0.25})
    given = CSVRecorder()
    given.begin(RunInfo("run", tmp_path, {}, (), opt_steps=0))
    given.write(rows[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for row in rows[1:4]:
            given.write(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert table(tmp_path) == as_text(rows[:1])
    given.write(rows[4])
    given.close()
    assert table(tmp_path) == as_text(rows)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith("metrics.csv: File too large; its rows wait")


# --- TensorBoard ------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_settings_once_in_the_files_of_the_run(tmp_path: Path) -> None:
    train(tmp_path, ["tensorboard"])
    train(tmp_path, ["tensorboard"], resume=True, max_opts=12)
    board = tmp_path / "tensorboard"
    assert all(path.is_file() for path in board.iterdir())
    data = [(value.tag, value.metadata.plugin_data) for _, value in values_of(board)]
    told = [(tag, HParamsPluginData.FromString(x.content)) for tag, x in data if x.plugin_name == "hparams"]
    assert len(told) == len(dict(told))
    settings = dict(told)["_hparams_/session_start_info"].session_start_info.hparams
    assert (settings["max_opts"].number_value, settings["algo"].string_value) == (8, "custom")
    metrics = dict(told)["_hparams_/experiment"].experiment.metric_infos
    assert "eval/eval_reward" in [info.name.tag for info in metrics]


def test_tensorboard_that_a_resume_adds_has_settings_notes_and_all_rows(tmp_path: Path) -> None:
    train(tmp_path, [], notes="hello")
    train(tmp_path, ["tensorboard"], notes="hello", resume=True, max_opts=12)
    train(tmp_path, ["tensorboard"], notes="hello", resume=True, max_opts=16)
    found = values_of(tmp_path / "tensorboard")
    assert [value.tensor.string_val for _, value in found if value.tag == "notes"] == [[b"hello"]]
    assert [value.tag for _, value in found].count("_hparams_/session_start_info") == 1
    assert [(step, value.simple_value) for step, value in found if value.tag == "eval/score"] == [
        (step, step) for step in (4, 8, 12, 16)
    ]


# --- services ---------------------------------------------------------------------------------------------------


class Told(jaxrl.Service):
    """A service that keeps what it is told; each call goes through `gate` first."""

    def __init__(self, gate: Callable[[str], None] = lambda call: None) -> None:
        self.gate = gate
        self.rows: list[tuple[str, int]] = []
        self.kept: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        self.gate(call)

    def connect(self, run: RunInfo, kept: dict[str, Any]) -> dict[str, Any]:
        self._pass("connect")
        self.kept.append(kept)
        return {"id": "x"}

    def send(self, row: Any) -> None:
        self._pass("send")
        self.rows.append((row["kind"], row["opt_steps"]))

    def finish(self, run: RunInfo) -> None:
        self._pass("finish")

    def abandon(self) -> None:
        self.calls.append("abandon")


ALL = [("train", 2), ("eval", 4), ("train", 4), ("train", 6), ("eval", 8), ("train", 8)]
MORE = [("train", 10), ("eval", 12), ("train", 12)]


def recorder(service: Told, **limits: Any) -> ServiceRecorder:
    return ServiceRecorder("there", lambda: service, **{"limit_s": 60.0, "retry_s": 0.0, **limits})


def test_a_service_is_told_every_row_once_over_resumes(tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", Told(), Told()
    train(run, [recorder(first)])
    assert (first.rows, first.kept, first.calls[-1]) == (ALL, [{}], "finish")
    train(run, [recorder(second)], resume=True, max_opts=12)
    assert (second.rows, second.kept) == (MORE, [{"id": "x"}])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxrl-")]


def test_what_a_killed_process_told_beyond_its_checkpoint_is_not_told_again(tmp_path: Path) -> None:
    run, service = tmp_path / "run", Told()
    train(run, [])
    (run / "there.json").write_text(json.dumps({"id": "x", "sent": {"train": 10, "eval": 8}}))
    train(run, [recorder(service)], resume=True, max_opts=12)
    assert service.rows == [("eval", 12), ("train", 12)]


def test_rows_that_may_differ_are_told_again(tmp_path: Path) -> None:
    service = Told()
    given = recorder(service)
    (tmp_path / "there.json").write_text(json.dumps({"sent": {"train": 10}}))
    given.begin(RunInfo("run", tmp_path, {}, (), opt_steps=4, changed=True))
    given.rewind(4)  # as every run that goes on is told
    for step in (6, 8):
        given.write({"kind": "train", "opt_steps": step})
    given.rewind(6)  # it diverged, and goes on with other random numbers
    given.write({"kind": "train", "opt_steps": 8})
    given.close()
    assert service.rows == [("train", 6), ("train", 8), ("train", 8)]


def session_of(run: Path, **settings: Any) -> None:
    with single(run_dir=str(run), record_interval=4, **settings) as session:
        script = Script(1, session.env_steps)
        while not session.is_done:
            drive(session, script, 1)


def on_host(run: Path, **settings: Any) -> None:
    spec = jaxrl.EnvSpec("Counting", jaxrl.Box(0.0, np.inf, (2,)), jaxrl.Discrete(2))
    made = learning(jaxrl.gymnasium_envs(spec, Counting))
    alone = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 4, "quiet": True}
    jaxrl.Trainer(made, run_dir=str(run), **alone, **settings).train()


def refilled(run: Path, **settings: Any) -> None:
    alone = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 4, "save_replay": False, "quiet": True}
    jaxrl.Trainer(small_dqn(), run_dir=str(run), **alone, **settings).train()


@pytest.mark.parametrize(
    "trained",
    [session_of, pytest.param(on_host, marks=pytest.mark.slow), pytest.param(refilled, marks=pytest.mark.slow)],
)
def test_a_run_that_does_not_repeat_its_past_tells_the_rows_after_its_checkpoint_again(
    trained: Callable[..., None], tmp_path: Path
) -> None:
    first, second = Told(), Told()
    trained(tmp_path / "run", max_opts=8, recorders=[recorder(first)])
    # As if a process had told more, and was killed before its next checkpoint.
    (tmp_path / "run/there.json").write_text(json.dumps({"id": "x", "sent": {"train": 12}}))
    trained(tmp_path / "run", max_opts=16, recorders=[recorder(second)], resume=True)
    assert (first.rows, second.rows) == ([("train", 4), ("train", 8)], [("train", 12), ("train", 16)])


def test_a_score_at_a_step_that_an_earlier_session_has_scored_is_told(tmp_path: Path) -> None:
    first, second = Told(), Told()
    for service, resume in ((first, False), (second, True)):
        with single(run_dir=str(tmp_path), recorders=[recorder(service)], resume=resume, max_opts=8) as session:
            if not resume:
                script = Script(1, session.env_steps)
                while not session.is_done:
                    drive(session, script, 1)
            session.evaluate_score(2.0 if resume else 1.0)
    assert first.rows[-1] == ("eval", 8)
    assert second.rows == [("eval", 8)]


@pytest.mark.parametrize("damaged", ["", "[]", '{"sent": {"train": "x"}}', '{"sent": 3}'])
def test_without_its_file_a_service_is_told_all_of_the_log(tmp_path: Path, damaged: str) -> None:
    run, service = tmp_path / "run", Told()
    train(run, [])
    (run / "there.json").write_text(damaged)
    train(run, [recorder(service)], resume=True, max_opts=12)
    assert (service.rows, service.kept) == (ALL + MORE, [{}])


def test_a_service_that_hangs_holds_nothing_up_and_is_told_at_the_next_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, free = tmp_path / "run", threading.Event()
    hanging, later = Told(lambda call: free.wait() and None), Told()
    made = train(run, [recorder(hanging, limit_s=0.0)])
    assert made.stop_reason == "max_opts"
    assert [(row["kind"], row["opt_steps"]) for row in rows_of(run)] == ALL
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: there has not taken all rows within 0 s; metrics.jsonl has them")
    free.set()
    train(run, [recorder(later)], resume=True, max_opts=12)
    assert later.rows == ALL + MORE
    assert hanging.calls[:2] == ["connect", "abandon"]


def test_a_service_that_is_away_for_a_while_misses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = iter([True] * 5 + [False, True, False, True, True])

    def refuse(call: str) -> None:
        if next(away, False):
            raise ConnectionError("nobody there")

    service = Told(refuse)
    train(tmp_path / "run", [recorder(service, retry_s=0.001)])
    if service.calls[-1] == "finish":  # else the run was over before the service was back
        assert service.rows == ALL
    said = capsys.readouterr().err
    assert said.count("there does not take rows (ConnectionError: nobody there); training goes on") == 1
    assert len(said.splitlines()) == 1


def test_a_service_that_stays_away_costs_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, later = tmp_path / "run", Told()

    def refuse(call: str) -> None:
        raise SystemExit("no")

    refusing = Told(refuse)
    train(run, [recorder(refusing)])
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert refusing.calls[-1] == "abandon"
    train(run, [recorder(later)], resume=True, max_opts=12)
    assert later.rows == ALL + MORE


def test_without_a_directory_a_service_that_fails_is_told_of_as_losing_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = threading.Event()

    def refuse(call: str) -> None:
        raise ConnectionError("nobody there")

    hangs = recorder(Told(lambda call: free.wait() and None), limit_s=0.0)
    for given in (recorder(Told(refuse)), hangs):
        jaxrl.Trainer(counting(), recorders=[given], **{**SHORT, "eval_interval": 0, "eval_episodes": 0}).train()
    free.set()
    lost = "without a run_dir, those that it never takes are lost"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: there does not take rows (ConnectionError: nobody there); training goes on, and {lost}",
        f"warning: there has not taken all rows within 0 s; {lost}",
    ]


def test_what_finds_no_room_is_taken_from_the_log_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = threading.Event()
    service = Told(lambda call: free.wait() and None)
    run, hooks = tmp_path / "run", jaxrl.Hooks(save=lambda trainer, step: step == 8 and free.set())
    train(run, [recorder(service, capacity=2)], hooks=hooks)
    assert service.rows == ALL
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: there does not take rows (2 rows wait); training goes on")


def test_a_run_that_goes_back_while_a_service_has_no_room_tells_those_rows_again(tmp_path: Path) -> None:
    free, service = threading.Event(), Told(lambda call: free.wait() and None)
    given = recorder(service, capacity=2)
    log = tmp_path / "metrics.jsonl"
    write = lambda steps: log.write_text("".join(f'{{"kind": "train", "opt_steps": {n}}}\n' for n in steps))
    given.begin(RunInfo("run", tmp_path, {}, (), opt_steps=0))
    for step in (2, 4, 6):  # the last finds no room
        given.write({"kind": "train", "opt_steps": step})
    given.rewind(2)
    assert json.loads((tmp_path / "there.json").read_text())["sent"] == {}
    for step in (4, 6):
        given.write({"kind": "train", "opt_steps": step})
    write((2, 4, 6))
    free.set()
    given.close()
    assert service.rows == [("train", 2), ("train", 4), ("train", 4), ("train", 6)]
    assert json.loads((tmp_path / "there.json").read_text()) == {"id": "x", "sent": {"train": 6}}


def test_what_is_no_service_is_left_out_with_a_line_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", [ServiceRecorder("there", object)])
    assert "is no service; derive its class from jaxrl.Service" in capsys.readouterr().err
    assert rows_of(tmp_path / "run")


class Some(Told):
    """A service that takes up to two rows in a call."""

    def send_some(self, rows: Any) -> int:
        self._pass(f"some {len(rows)}")
        self.rows += [(row["kind"], row["opt_steps"]) for row in rows[:2]]
        return 2


def test_a_service_that_takes_several_rows_in_a_call_is_told_each_once_and_in_order(tmp_path: Path) -> None:
    def refuse(call: str) -> None:
        if call == "some 2":
            raise ConnectionError("no more")

    run, first, second = tmp_path / "run", Some(refuse), Some()
    train(run, [recorder(first, gather_s=60.0)])  # the end of the run does not wait for the minute
    assert first.rows == ALL[:4]
    assert first.calls == ["connect", "some 6", "some 4", "some 2", "abandon"]
    assert json.loads((run / "there.json").read_text()) == {"id": "x", "sent": {"train": 6, "eval": 4}}
    train(run, [recorder(second, gather_s=60.0)], resume=True, max_opts=12)
    assert second.rows == ALL[4:] + MORE


def test_rows_of_a_full_half_are_told_before_their_time(tmp_path: Path) -> None:
    told = threading.Event()
    service = Told(lambda call: told.set() if call == "send" else None)
    given = recorder(service, gather_s=600.0, capacity=4)
    given.begin(RunInfo("run", tmp_path, {}, (), opt_steps=0))
    given.write({"kind": "train", "opt_steps": 1})
    given.write({"kind": "train", "opt_steps": 2})
    assert told.wait(60.0)
    given.close()
    assert service.rows == [("train", 1), ("train", 2)]
