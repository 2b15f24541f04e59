"""`python -m jaxrl.verify`: a line for every checkpoint, computed from what is on the disk, and nothing changed."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRun, rewrite_manifest
from toys_runs import contents
from toys_trainer import counting

import jaxrl
from jaxrl import train, verify
from jaxrl.errors import SettingsError
from jaxrl.training.storage.checkpoints import FILES
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


def another_digit(rows: list[str]) -> list[str]:
    changed = re.sub(r'"(length|env_steps)": \d', r'"\1": 9', rows[0], count=1)
    assert changed != rows[0]
    return [changed, *rows[1:]]


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


def test_shapes_are_compared_with_the_settings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("capacity: 64", "capacity: 128"))
    code, lines, _ = verified(run, capsys)
    assert code == 6
    assert all(re.search(r"buffer.* \[64.* expected \[128", line) for line in lines)


def set_line(run: Path, line: str) -> None:
    """Change one setting in the file of a run."""
    config, name = (run / "config.yaml").read_text(), line.partition(":")[0]
    (run / "config.yaml").write_text(re.sub(rf"(?m)^( *){name}: .*$", rf"\1{line}", config, count=1))


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("capacity: 3", ()),
        ("warmup: -5", ()),
        ("batch_size: 0", ()),
        ("env: CartPole-v9", ()),
        ("keep: 0", ("--env", "CartPole-v1")),
    ],
)
def test_settings_that_cannot_work_are_damage_and_the_rest_is_checked(
    run: Path, capsys: pytest.CaptureFixture[str], line: str, flags: tuple[str, ...]
) -> None:
    set_line(run, line)
    code, lines, errors = verified(run, capsys, *flags)
    assert (code, len(lines)) == (6, 4)
    assert errors.startswith("config.yaml: ")


@pytest.mark.parametrize("env", ["my_package.envs:make", "gymnasium:my_package:Maze-v0", "pgx:go_9x9"])
def test_code_that_is_not_here_is_no_damage(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, env: str
) -> None:
    monkeypatch.setitem(sys.modules, "pgx", None)
    set_line(run, f"env: {env}")
    code, lines, errors = verified(run, capsys)
    assert (code, len(lines)) == (0, 4)
    assert "cannot be rebuilt here" in errors


Lines = list[str]
PROBLEMS: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "a row again": (lambda rows: [*rows, rows[-1]], "line .* repeats a row"),
    "the last row first": (lambda rows: [rows[-1], *rows], "line 2 goes back"),
    "no JSON": (lambda rows: [rows[0], "{]\n", *rows[1:]], "line 2 is no row"),
    "text": (lambda rows: [rows[0], '"torn"\n', *rows[1:]], "line 2 is no row"),
    "no UTF-8": (lambda rows: [*rows, '{"kind": "train", "opt_steps": 1, "name": "\udcff"}\n'], "line .* is no row"),
    "a kind that is none": (lambda rows: [*rows, '{"kind": [], "opt_steps": 1}\n'], "line .* is no row"),
    "an episode that is none": (lambda rows: [*rows, '{"opt_steps": 1, "episode": [1]}\n'], "line .* is no row"),
    "no step": (lambda rows: [*rows, '{"kind": "train"}\n'], "line .* is no row"),
    "another digit": (another_digit, "was changed: its first "),
    "a lost row": (lambda rows: rows[:-1], "has lost rows: "),
}
"""What becomes of the rows of a log, and what is said of it."""


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_log_that_no_run_writes_has_its_problem_named(
    run: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    change, said = PROBLEMS[what]
    logs = ("metrics.jsonl", "eval_episodes.jsonl")
    for name in logs:
        rows = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(change(rows)), errors="surrogateescape")
    code, lines, errors = verified(run, capsys)
    assert (code, len(lines)) == (6, 4)
    for name in logs:
        assert re.search(f"(?m)^{name}: {said}", errors)


def test_a_log_that_a_kill_tore_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "opt_s')
    assert verified(run, capsys)[0] == 0


def test_a_log_without_sums_is_not_compared_with_any(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    for checkpoint in (run / "checkpoints").iterdir():  # as version 0.3.0 wrote them
        rewrite_manifest(checkpoint, lambda manifest: manifest["facts"].pop("logs"))
    assert verified(run, capsys)[0] == 0


def test_a_run_that_goes_on_says_which_log_was_changed_and_sums_up_what_is_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run / "eval_episodes.jsonl"
    log.write_text("".join(another_digit(log.read_text().splitlines(keepends=True))))
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval_episodes.jsonl", ".lock"])
def test_a_directory_in_place_of_a_log_is_called_one(run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(SettingsError, match="is a directory; expected a file"):
        verify.main([str(run)])


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
def test_replay_finds_what_nothing_reads_as_the_settings_have_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(run.parent / "other")
    unread = ["--agent.epsilon-decay", "0", "--agent.epsilon-start", "0.7", "--save-interval", "0", "--keep", "1"]
    assert train.main(["--config", str(run / "config.yaml"), *unread, "--run-dir", other]) == 0
    assert train.main(["--resume", other, "--agent.epsilon-start", "0.5", "--max-opts", "50"]) == 0
    code, lines, _ = verified(Path(other), capsys, "--replay")
    assert (code, lines[1:]) == (0, ["0 -> 50 bit-equal"])


def test_replay_does_not_begin_anew_what_began_with_weights_of_another_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run.parent / "other"
    flags = ["--init-from", str(run), "--run-dir", str(other), "--save-interval", "0", "--max-opts", "10"]
    assert train.main(["--config", str(run / "config.yaml"), *flags]) == 0
    assert verified(other, capsys)[0] == 0
    with pytest.raises(SettingsError, match=r"no two checkpoints .* were trained in one go"):
        verify.main([str(other), "--replay"])


@pytest.mark.parametrize("strange", [{"settings": None}, {"settings": {"seed": 10**40}}, {"ledger": "x"}], ids=str)
def test_replay_refuses_facts_of_a_stranger(
    run: Path, strange: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_manifest(run / "checkpoints" / "40", lambda manifest: manifest["facts"].update(strange))
    code, lines, errors = verified(run, capsys, "--replay")
    assert code == 6
    assert "checkpoint 40 of" in errors
    assert "was not written by jaxrl" in errors
    assert lines[4:] == ["10 -> 20 bit-equal", "20 -> 30 bit-equal"]


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
