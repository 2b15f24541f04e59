"""What recorders are told beyond numbers: histograms of evaluations, events and notes as text."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_recorders_by_name import SHORT, train
from test_videos import Filmed, stepwise
from toys_runs import messages, rows_in, values_of
from toys_trainer import Scripted, counting

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.recorders import RunInfo, TensorBoardRecorder, histograms

BOTH = ("eval/returns", "eval/lengths")


class Told(jaxrl.MemoryRecorder):
    """Keep histograms, and the order in which they and rows come."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []
        self.histograms: list[jaxrl.Histogram] = []

    def write(self, row: Any) -> None:
        self.order.append((row["kind"], row["opt_steps"]))

    def histogram(self, histogram: jaxrl.Histogram) -> None:
        self.order.append((histogram.name, histogram.opt_steps))
        self.histograms.append(histogram)


def texts(board: Path, tag: str = "events") -> list[tuple[int, str]]:
    found = [(step, value) for step, value in values_of(board) if value.tag == tag]
    assert {value.metadata.plugin_data.plugin_name for _, value in found} <= {"text"}
    return [(step, value.tensor.string_val[0].decode()) for step, value in found]


def bars(board: Path) -> list[tuple[str, int]]:
    return [(value.tag, step) for step, value in values_of(board) if value.HasField("histo")]


# --- histograms -------------------------------------------------------------------------------------------------


def test_an_evaluation_is_told_as_histograms_after_its_row_without_what_is_not_finite() -> None:
    told = Told()
    evaluator = Scripted([1.0, float("nan"), 3.0, float("inf"), 1e300], [float("nan")])
    settings = {**SHORT, "confirm_best": False, "record_interval": 0}
    jaxrl.Trainer(counting(), evaluator=evaluator, recorders=[told], **settings).train()
    assert [x for x in told.order if x[0] not in ("event", "train")] == [
        ("eval", 4), ("eval/returns", 4), ("eval/lengths", 4), ("eval", 8), ("eval/lengths", 8),
    ]  # fmt: skip
    assert {x.env_steps - x.opt_steps for x in told.histograms} == {0}
    assert [x.values.tolist() for x in told.histograms] == [[1.0, 3.0], [1.0] * 5, [1.0]]


def test_a_session_tells_the_episodes_of_an_evaluation(tmp_path: Path) -> None:
    loop, told = Filmed(), Told()
    with stepwise(tmp_path, recorders=["tensorboard", told]) as session:
        session.evaluate_episodes(3)
        while session.is_evaluating:
            loop(session)
        session.evaluate_score(2.0)  # of which nobody knows the episodes
    assert [(x.name, x.values.tolist()) for x in told.histograms] == list(zip(BOTH, [[4.0] * 3] * 2, strict=True))
    assert bars(tmp_path / "tensorboard") == [(name, 0) for name in BOTH]


@pytest.mark.parametrize(
    "values", [[5.0], [0.0, 0.0], [1e17, 1e17 + 16], [-3.4e38, 3.4e38], [1e-30, 2e-30], range(100)]
)
def test_every_value_is_in_a_bin_of_a_width_that_is_none_of_zero(values: Any) -> None:
    given = np.asarray(values, np.float64)
    counts, edges = jaxrl.Histogram(1, 1, "x", given).bins()
    assert counts.sum() == len(given)
    assert (np.diff(edges) > 0).all()
    assert (edges[0] <= given.min(), edges[-1] >= given.max()) == (True, True)


def test_tensorboard_has_the_bars_of_an_evaluation(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path / "board")
    recorder.histogram(jaxrl.Histogram(7, 70, "eval/returns", np.array([0.0, 0.0, 30.0])))
    recorder.close()
    ((step, value),) = values_of(tmp_path / "board")
    histo = value.histo
    assert (step, value.tag) == (7, "eval/returns")
    assert (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (0.0, 30.0, 3.0, 30.0, 900.0)
    assert list(histo.bucket_limit) == pytest.approx(range(31))
    assert list(histo.bucket) == [0, 2, *[0] * 28, 1]  # that before the first limit is empty


def test_tensorboard_has_numbers_beside_bars_and_infinity_for_what_float32_cannot_hold(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path / "board")
    row = {"kind": "eval", "opt_steps": 70_000, "eval_reward": 2.5, "a": 1e300, "b": -3.5e38, "c": 7, "is_best": True}
    recorder.scored(row, histograms(70_000, 1, returns=[2.0, 3.0], lengths=[1]))
    recorder.close()
    numbers = [(value.tag, value.simple_value) for _, value in values_of(tmp_path / "board")[:4]]
    assert numbers == [("eval/eval_reward", 2.5), ("eval/a", np.inf), ("eval/b", -np.inf), ("eval/c", 7.0)]
    assert bars(tmp_path / "board") == [(name, 70_000) for name in BOTH]


class Lab(jaxrl.Service):
    """A service that keeps the histograms that it is told."""

    def __init__(self, broken: bool = False) -> None:
        self.told: list[Any] = []
        self.broken = broken

    def connect(self, run: RunInfo, kept: dict[str, Any]) -> dict[str, Any]:
        return {}

    def send(self, row: Any) -> None:
        self.told.append((row["kind"], row["opt_steps"]))

    def histogram(self, histogram: jaxrl.Histogram) -> None:
        self.told.append((histogram.name, histogram.opt_steps))
        if self.broken:
            raise OSError("away")


def test_a_service_is_told_each_once_also_if_a_killed_process_had_told_more(tmp_path: Path) -> None:
    first, second = Lab(broken=True), Lab()
    train(tmp_path, [jaxrl.ServiceRecorder("lab", lambda: first, limit_s=60.0)])
    at = lambda *steps: [(name, step) for step in steps for name in BOTH]
    assert [x for x in first.told if x[0] in BOTH] == at(4, 8)
    assert [x for x in first.told if x[0] == "train"] == [("train", step) for step in (2, 4, 6, 8)]
    kept = json.loads((tmp_path / "lab.json").read_text())
    kept["sent"]["histogram/eval/returns"] = 12
    (tmp_path / "lab.json").write_text(json.dumps(kept))
    train(tmp_path, [jaxrl.ServiceRecorder("lab", lambda: second, limit_s=60.0)], resume=True, max_opts=16)
    assert [x for x in second.told if x[0] in BOTH] == [("eval/lengths", 12), *at(16)]


# --- text -------------------------------------------------------------------------------------------------------


def test_events_and_notes_are_texts_of_tensorboard_once(tmp_path: Path) -> None:
    tell = jaxrl.Hooks(
        record=lambda trainer, row: trainer.note(f"at {row['opt_steps']}") if row["opt_steps"] % 4 else None
    )
    train(tmp_path, ["tensorboard"], hooks=tell, notes="*mine*")
    train(tmp_path, ["tensorboard"], hooks=tell, notes="*mine*", resume=True, max_opts=12)
    assert texts(tmp_path / "tensorboard", "notes") == [(0, "*mine*")]
    events = rows_in(tmp_path)
    logged = [(row["opt_steps"], f"{row['event']}: {row['message']}") for row in events if row["kind"] == "event"]
    assert texts(tmp_path / "tensorboard") == logged
    assert [text for text in logged if text[1].startswith("note: at")] == [(n, f"note: at {n}") for n in (2, 6, 10)]
    assert any(text.startswith("resume: ") for _, text in logged)


def test_bytes_that_are_no_text_do_not_end_a_recorder(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path / "board")
    recorder.write({"kind": "event", "opt_steps": 1, "env_steps": 1, "event": "note", "message": "a\udc80b"})
    recorder.close()
    assert texts(tmp_path / "board") == [(1, "note: a?b")]


def test_a_session_notes_a_text(tmp_path: Path) -> None:
    told = jaxrl.MemoryRecorder()
    with stepwise(tmp_path, recorders=[told]) as session:
        session.note("a new tyre", wear=0.5)
    assert ("note", "a new tyre") in [(row["event"], row["message"]) for row in told.rows if row["kind"] == "event"]
    with pytest.raises(SettingsError, match="note was called on a session that is closed"):
        session.note("too late")


def test_a_note_that_is_no_text_is_refused_with_how_a_number_is_noted(tmp_path: Path) -> None:
    said: list[str] = []

    def note(trainer: Any, row: Any) -> None:
        for given in (3.5, ""):
            with pytest.raises(SettingsError) as refused:
                trainer.note(given)
            said.append(str(refused.value))

    train(tmp_path, [], hooks=jaxrl.Hooks(record=note), max_opts=2, eval_interval=0)
    assert said == [f"note: {given!r} is no text; numbers have names, as in note(norm=3.5)" for given in (3.5, "")]
    assert all(message.startswith("max_opts") for message in messages(tmp_path, "note"))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_reader_of_tensorboard_finds_histograms_and_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, ["tensorboard"], notes="mine")
    train(tmp_path, ["tensorboard"], notes="mine", resume=True, max_opts=12)
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0, "tensors": 0})
    found.Reload()
    told = found.Histograms("eval/returns")
    assert [(event.step, event.histogram_value.num, event.histogram_value.min) for event in told] == [
        (4, 1.0, 4.0), (8, 1.0, 8.0), (12, 1.0, 12.0),
    ]  # fmt: skip
    assert {"events", "notes"} <= {*found.PluginTagToContent("text")}
    assert found.Tensors("notes")[0].tensor_proto.string_val[0] == b"mine"
