"""What a library may do to its process: nothing that stays."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from toys_trainer import counting

import jaxrl
from jaxrl.cli.main import run_main
from jaxrl.errors import StorageError
from jaxrl.hush import hushed


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Spare collections what tests before have left: there are millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def of_the_process() -> tuple[object, ...]:
    return sys.unraisablehook, *(tuple(logging.getLogger(name).filters) for name in ("absl", "asyncio"))


def test_a_run_that_saves_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = of_the_process()
    trainer = jaxrl.Trainer(counting(), max_opts=3, run_dir=str(tmp_path / "run"), quiet=True)
    trainer.train()
    jaxrl.Trainer(trainer.strategy, max_opts=5, run_dir=str(tmp_path / "run"), quiet=True, resume=True).train()
    assert of_the_process() == before


def test_only_the_tales_of_orbax_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with hushed():
        logging.getLogger("asyncio").error("task of orbax failed")
        logging.getLogger("asyncio").error("task of mine failed")
    logging.getLogger("asyncio").error("orbax, afterwards")
    assert [record.getMessage() for record in caplog.records] == ["task of mine failed", "orbax, afterwards"]


@pytest.mark.usefixtures("few_objects")
def test_an_event_loop_that_gets_no_file_descriptors_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_more() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", no_more)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's own prints nothing
    with hushed():
        with pytest.raises(OSError, match="Too many open files"):
            asyncio.new_event_loop()
        gc.collect()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("few_objects")
def test_what_a_failure_leaves_behind_is_gone_before_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loop:
        def __init__(self) -> None:
            self.me = self  # as loops are: only a collection finds them

        def __del__(self) -> None:
            raise RuntimeError("Event loop is closed")

    def main(args: Sequence[str]) -> int:
        Loop()
        raise StorageError("no room")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    gc.disable()  # until the command does
    try:
        with pytest.raises(SystemExit) as ended:
            run_main(main, [])
        gc.collect()
    finally:
        gc.enable()
    assert ended.value.code == StorageError.exit_code
    assert capsys.readouterr().err == "error: no room\n"
