"""`python -m jaxrl.verify`: a line for every checkpoint, computed from what is on the disk, and nothing changed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRun, contents, rewrite_manifest

import jaxrl
from jaxrl import train, verify
from jaxrl.errors import SettingsError
from jaxrl.training.storage import checkpoints
from jaxrl.training.storage.checkpoints import FILES, Store
from jaxrl.training.storage.leaves import state_digest


@pytest.fixture
def run(small: SmallRun, tmp_path: Path) -> Path:
    """A copy of a run that came to its end: a run may be moved."""
    return Path(shutil.copytree(small.whole, tmp_path / "moved"))


def of_checkpoints(out: str) -> list[str]:
    """Return the lines that are on checkpoints, not on the best policy and the logs."""
    return [line for line in out.splitlines() if not line.startswith(("best ", "logs "))]


def verified(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = verify.main([str(run), *flags])
    said = capsys.readouterr()
    return code, of_checkpoints(said.out), said.err


def change_a_length(log: Path) -> None:
    """Add one to the length of the first episode."""
    log.write_text(re.sub(r'"length": (\d+)', lambda found: f'"length": {int(found[1]) + 1}', log.read_text(), count=1))


def test_a_line_for_each_checkpoint_with_the_digest_of_its_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    code, lines, errors = verified(run, capsys)
    assert (code, errors) == (0, "")
    assert [line.split()[:2] for line in lines] == [[str(step), "ok"] for step in (10, 20, 30, 40)]
    assert contents(run) == before
    # The very digest of the state that the trainer holds at its end.
    strategy = train.build("dqn", train.parse(["--resume", str(run)]).config)
    config = train.trainer_config(train.parse(["--resume", str(run)]).config)
    state = jaxrl.Trainer(strategy, config, resume=True).train().state
    assert lines[-1].split()[2] == state_digest(state)


def test_a_damaged_checkpoint_is_named_and_the_others_are_still_checked(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = max((run / "checkpoints" / "20" / "arrays").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)
    code, lines, _ = verified(run, capsys)
    assert code == 6
    assert [line.split()[0] for line in lines] == ["10", "20", "30", "40"]
    assert [" ok " in line for line in lines] == [True, False, True, True]
    assert data.name in lines[1]
    assert lines[1].endswith(" -")


def test_the_digest_is_of_the_arrays_not_of_the_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = verified(run, capsys)
    # The arrays of 10 under the manifest of 20, without a list of files: only the arrays themselves tell.
    shutil.rmtree(run / "checkpoints" / "20" / "arrays")
    shutil.copytree(run / "checkpoints" / "10" / "arrays", run / "checkpoints" / "20" / "arrays")
    (run / "checkpoints" / "20" / FILES).unlink()
    code, now, _ = verified(run, capsys)
    assert code == 6
    assert "checksum differs" in now[1]
    assert (now[0], *now[2:]) == (lines[0], *lines[2:])


def test_shapes_are_compared_with_the_settings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("capacity: 64", "capacity: 128"))
    code, lines, _ = verified(run, capsys)
    assert code == 6
    assert all(re.search(r"buffer.* \[64.* expected \[128", line) for line in lines)


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval_episodes.jsonl"])
def test_logs_are_checked(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    log = run / name
    rows = log.read_text().splitlines(keepends=True)
    for text, said in [
        ("".join([*rows, rows[-1]]), "repeats a row"),
        ("".join([rows[-1], *rows]), "goes back"),
        ("".join([rows[0], "{]\n", *rows[1:]]), "line 2 is no row"),
    ]:
        log.write_text(text)
        code, lines, errors = verified(run, capsys)
        assert code == 6
        assert len(lines) == 4
        assert f"{name}: " in errors
        assert said in errors
    log.write_text("".join(rows) + rows[-1][:-5])  # torn by a kill: a resume mends it
    assert verified(run, capsys)[0] == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", b'{"kind": [], "opt_steps": 1}'),
        ("metrics.jsonl", b'{"kind": "train", "opt_steps": 1, "name": "\xff"}'),
        ("eval_episodes.jsonl", b'{"opt_steps": 1, "episode": [1]}'),
    ],
)
def test_a_line_that_is_no_row_is_named(run: Path, capsys: pytest.CaptureFixture[str], name: str, line: bytes) -> None:
    with open(run / name, "ab") as log:
        log.write(line + b"\n")
    code, lines, errors = verified(run, capsys)
    rows = (run / name).read_bytes().count(b"\n")
    assert (code, len(lines)) == (6, 4)
    assert errors == f"{name}: line {rows} is no row\n"


def test_a_flipped_digit_in_a_log_is_seen_by_the_sums_of_the_newest_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes, metrics = (run / name for name in ("eval_episodes.jsonl", "metrics.jsonl"))
    rows = episodes.read_text()
    change_a_length(episodes)
    code, _, errors = verified(run, capsys)
    assert code == 6
    assert errors.startswith("eval_episodes.jsonl: was changed: its first ")
    episodes.write_text(rows)
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    code, _, errors = verified(run, capsys)
    assert code == 6
    assert errors.startswith("metrics.jsonl: has lost rows: ")
    for checkpoint in (run / "checkpoints").iterdir():  # as version 0.3.0 wrote them
        rewrite_manifest(checkpoint, lambda manifest: manifest["facts"].pop("logs"))
    assert verified(run, capsys)[0] == 0


def test_a_run_that_goes_on_says_which_log_was_changed_and_sums_up_what_is_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_a_length(run / "eval_episodes.jsonl")
    with pytest.warns(UserWarning, match=r"eval_episodes\.jsonl: was changed"):
        assert train.main(["--resume", str(run), "--max-opts", "50"]) == 0
    assert verified(run, capsys)[0] == 0


def test_what_a_stranger_named_is_shown_without_lines_and_escapes_of_its_own(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\n500 ok " + "0" * 64 + "\n\x1b]0;owned\x07\x1b[2J" + "\u202e" + "x" * 10_000
    files = run / "checkpoints" / "20" / FILES
    files.write_text(json.dumps({**json.loads(files.read_text()), evil: [1, 2]}))

    def rename(manifest: dict[str, Any]) -> None:
        manifest["leaves"][0].update(path=evil, crc32=1)

    rewrite_manifest(run / "checkpoints" / "30", rename)
    rewrite_manifest(next((run / "best").iterdir()), rename)
    code, lines, errors = verified(run, capsys)
    assert code == 6
    assert [line.split()[0] for line in lines] == ["10", "20", "30", "40"]
    assert errors.startswith("best/")
    assert errors.count("\n") == 1
    for line in (*lines, errors[:-1]):
        assert line.isprintable()
        assert len(line) < 1_200


def test_a_leaf_that_is_listed_more_than_once_is_refused_before_its_arrays_are_read(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Store(run / "best", 1).steps()[0]
    rewrite_manifest(run / "best" / str(step), lambda manifest: manifest.update(leaves=manifest["leaves"] * 2))
    read, seen = checkpoints.read_arrays, []

    def note(path: Path, like: Any) -> Any:
        seen.append(f"{path.parent.parent.name}/{path.parent.name}")
        return read(path, like)

    monkeypatch.setattr(checkpoints, "read_arrays", note)
    code, _, errors = verified(run, capsys)
    assert (code, errors) == (6, f"best/{step}: its manifest lists a leaf more than once\n")
    assert seen == [f"checkpoints/{step}" for step in (10, 20, 30, 40)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval_episodes.jsonl", ".lock"])
def test_a_directory_in_place_of_a_log_is_called_one(run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(SettingsError, match="is a directory; expected a file"):
        verify.main([str(run)])


def test_a_damaged_best_policy_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Store(run / "best", 1).steps()[0]
    (run / "best" / str(step) / "manifest.json").write_text("{}")
    code, _, errors = verified(run, capsys)
    assert code == 6
    assert f"best/{step}: " in errors


def test_replay_trains_again_to_the_same_bits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = verified(run, capsys, "--replay")
    assert code == 0
    assert lines[4:] == [f"{step} -> {step + 10} bit-equal" for step in (10, 20, 30)]


@pytest.mark.slow
def test_replay_of_a_single_checkpoint_is_from_the_beginning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in ("20", "30", "40"):
        shutil.rmtree(run / "checkpoints" / step)
    code, lines, _ = verified(run, capsys, "--replay")
    assert code == 0
    assert lines[1:] == ["0 -> 10 bit-equal"]


@pytest.mark.slow
def test_replay_sees_a_checkpoint_that_this_run_did_not_make(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.parent / "other"
    assert train.main(["--config", str(run / "config.yaml"), "--run-dir", str(other), "--seed", "5"]) == 0
    shutil.rmtree(run / "checkpoints" / "30")
    shutil.copytree(other / "checkpoints" / "30", run / "checkpoints" / "30")
    code, lines, _ = verified(run, capsys, "--replay")
    assert code == 6
    assert lines[4:] == ["10 -> 20 bit-equal", "20 -> 30 differs", "30 -> 40 differs"]


def test_a_run_of_parts_made_by_hand_is_checked_without_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from toys_trainer import counting

    run = tmp_path / "run"
    jaxrl.Trainer(counting(), max_opts=20, save_interval=10, run_dir=str(run), quiet=True).train()
    code, lines, errors = verified(run, capsys)
    assert code == 0
    assert [line.split()[:2] for line in lines] == [["10", "ok"], ["20", "ok"]]
    assert "made in Python" in errors
    with pytest.raises(SettingsError, match=r"--replay: .* has parts made in Python \(strategy\).* must be left out"):
        verify.main([str(run), "--replay"])


def test_no_checkpoint_is_bad_and_no_run_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    code, lines, errors = verified(run, capsys)
    assert (code, lines) == (6, [])
    assert "no checkpoint" in errors
    with pytest.raises(SettingsError, match="no run directory"):
        verify.main([str(run.parent / "nowhere")])


@pytest.mark.slow
def test_as_a_process_it_prints_the_lines_and_ends_with_its_code(run: Path) -> None:
    (run / "checkpoints" / "40" / FILES).write_text("[]")
    done = subprocess.run([sys.executable, "-m", "jaxrl.verify", str(run)], capture_output=True, text=True)
    assert done.returncode == 6
    assert [line.split()[0] for line in of_checkpoints(done.stdout)] == ["10", "20", "30", "40"]
    assert "Traceback" not in done.stderr
    assert json.loads((run / "metadata.json").read_text())["status"] == "max_opts"
