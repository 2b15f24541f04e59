"""Damage on the disk: it is named and skipped, never read as wrong values, and nothing that is left gets lost.

Tables of spoilt run directories, by what becomes of them: the checkpoint before is taken; or the run is refused and
left as it is; or nothing is lost.
"""

import random
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_run import BEFORE, LAST, NEWEST, SMALL, SmallRun, Taken, mend, resume, rewrite_manifest
from toys_runs import contents, rows_in

from jaxrl import train, verify
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.errors import JaxrlError, NoCheckpointError, StorageError
from jaxrl.loading import load_policy
from jaxrl.training import Trainer
from jaxrl.training.settings import unused_settings
from jaxrl.training.storage.checkpoints import FILES, FORMAT, Store
from jaxrl.training.storage.logs import log_problems
from jaxrl.training.storage.run import Storage

Spoil = Callable[[Path], Any]


def assert_right(small: SmallRun, run: Path, taken: Taken) -> None:
    """Check that what was loaded is exactly what was saved, and that whatever was skipped was named."""
    assert (taken.digest, taken.facts) == (small.digests[taken.step], small.facts[taken.step])
    passed = [step for step in small.facts if step > taken.step]
    assert len(taken.warnings) == len(passed)
    for step in passed:
        assert any(f"{run / 'checkpoints' / str(step)} is skipped" in said for said in taken.warnings)


def damage(file: Path, how: str) -> None:
    """Delete, empty or truncate a file, or flip a bit in its middle."""
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "flipped":
        flip(file, len(data) // 2 * 8 + 1)
    else:
        file.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


# --- any file, and any bit, of the newest checkpoint ---------------------------------------------------------------


LISTED, NOT_LISTED, ALL = "listed", "not listed", "all, not listed"
"""Some files with or without the list of files, or all files without it: then their own checksums remain.

With the list, all files are emptied too.
"""
SOME = ("manifest.json", FILES, "arrays/_METADATA", "arrays/sums.max/.zarray", "arrays/sums.max/0")


@pytest.mark.every_day(f"{LISTED}-missing", f"{LISTED}-truncated", f"{LISTED}-empty", f"{NOT_LISTED}-missing")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
@pytest.mark.parametrize("which", [LISTED, NOT_LISTED, ALL])
def test_any_damaged_file_of_the_newest_checkpoint_is_noticed_and_the_one_before_is_taken(
    small: SmallRun, run: Path, which: str, how: str
) -> None:
    newest, used = run / "checkpoints" / str(NEWEST), []
    if which != LISTED:
        (newest / FILES).unlink()
    whole = shutil.copytree(newest, run.parent / "whole")
    names = [str(file.relative_to(newest)) for file in files_of(newest)]
    assert {*SOME} - {FILES} <= {*names}
    every = which == ALL or (which, how) == (LISTED, "empty")
    for name in names if every else [name for name in SOME if name in names]:
        damage(newest / name, how)
        used.append(resume(small, run))
        assert_right(small, run, used[-1])
        # Without its list of files a checkpoint is what a kill just before the list was written leaves: whole.
        if which == LISTED:
            assert used[-1].step == (NEWEST if (name, how) == (FILES, "missing") else BEFORE), name
        shutil.copy(whole / name, newest / name)
    assert BEFORE in [taken.step for taken in used]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("listed", [True, False], ids=[LISTED, NOT_LISTED])
def test_no_flipped_bit_of_the_newest_checkpoint_gives_wrong_values_and_with_the_list_of_files_none_is_missed(
    small: SmallRun, run: Path, listed: bool, seeds: range
) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    if not listed:
        (newest / FILES).unlink()
    files = [file for file in files_of(newest) if file.stat().st_size]
    decisive = [file for file in files if file.name not in (".zarray", "_METADATA")]
    used = set()
    for seed in seeds:
        choice = random.Random(seed)
        # Without the list, most bytes of the others are never read.
        file = choice.choice(files if listed or seed % 2 == 0 else decisive)
        bit = choice.randrange(8 * file.stat().st_size)
        flip(file, bit)
        taken = resume(small, run)
        assert_right(small, run, taken)
        assert taken.step == BEFORE or not listed, (file, bit)
        used.add(taken.step)
        flip(file, bit)
    assert BEFORE in used


# --- what is no checkpoint of this step ----------------------------------------------------------------------------


def instead(checkpoint: Path, put: Callable[[Path], object]) -> None:
    """Put something else in place of a checkpoint."""
    shutil.rmtree(checkpoint)
    put(checkpoint)


def take_arrays_of_another(checkpoint: Path, listed: bool = True) -> None:
    """Put the arrays of another step under a manifest of this one."""
    shutil.rmtree(checkpoint / "arrays")
    shutil.copytree(checkpoint.parent / "10" / "arrays", checkpoint / "arrays")
    mend(checkpoint)
    if not listed:
        (checkpoint / FILES).unlink()


def list_leaves_twice(checkpoint: Path) -> None:
    """Let a manifest list each leaf twice, above arrays that cannot be read: nobody is to come to them."""
    rewrite_manifest(checkpoint, lambda manifest: manifest.update(leaves=manifest["leaves"] * 2))
    damage(checkpoint / "arrays" / "_METADATA", "empty")
    mend(checkpoint)


def another_time(manifest: dict[str, Any]) -> None:
    manifest["facts"]["ledger"]["t"] = 7


PASSED_OVER: dict[str, tuple[Spoil, str]] = {
    "an empty directory": (lambda at: instead(at, Path.mkdir), "manifest"),
    "a file": (lambda at: instead(at, Path.touch), "manifest"),
    "another step": (lambda at: instead(at, (at.parent / "10").rename), "it was saved as step 10"),
    "altered without its seal": (lambda at: rewrite_manifest(at, another_time, reseal=False), "manifest is damaged"),
    "a damaged array": (lambda at: damage(at / "arrays/sums.max/0", "flipped"), "its file arrays/sums.max/0"),
    "arrays of another step": (take_arrays_of_another, "the data of .* is damaged: its checksum differs"),
    "arrays of another step, no list": (lambda at: take_arrays_of_another(at, listed=False), "its checksum differs"),
    "leaves listed twice": (list_leaves_twice, "its manifest lists a leaf more than once"),
}
"""What the newest checkpoint becomes, and what is said of it."""


def verified(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """Return the exit code of `verify`, and what it says of each checkpoint."""
    capsys.readouterr()
    code = verify.main([str(run)])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]
    return code, dict(lines)


@pytest.mark.parametrize("what", PASSED_OVER)
def test_what_is_no_checkpoint_of_its_step_is_named_the_one_before_is_taken_and_verify_says_the_same(
    small: SmallRun, run: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    spoil, said = PASSED_OVER[what]
    _, before = verified(run, capsys)
    spoil(run / "checkpoints" / str(NEWEST))
    taken = resume(small, run)
    assert (taken.step, taken.digest, taken.facts) == (BEFORE, small.digests[BEFORE], small.facts[BEFORE])
    (warning,) = taken.warnings
    assert re.search(f"checkpoints/{NEWEST} is skipped: .*{said}", warning)
    code, after = verified(run, capsys)
    assert code == 6
    assert re.search(f"{said}.* -$", after.pop(str(NEWEST)))
    assert str(BEFORE) in after
    assert after.items() <= before.items()


def test_two_damaged_checkpoints_are_both_named_and_the_third_is_taken(small: SmallRun, run: Path) -> None:
    for step in (BEFORE, NEWEST):
        damage(run / "checkpoints" / str(step) / "manifest.json", "truncated")
    taken = resume(small, run)
    assert taken.step == 10
    assert_right(small, run, taken)


def test_a_newest_checkpoint_that_is_gone_is_missed_by_nobody(small: SmallRun, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / str(NEWEST))
    assert resume(small, run) == (BEFORE, small.digests[BEFORE], small.facts[BEFORE], [])


def test_a_run_whose_newest_checkpoint_is_damaged_ends_in_the_same_bits(small: SmallRun, run: Path) -> None:
    damage(run / "checkpoints" / str(NEWEST) / "manifest.json", "flipped")
    with pytest.warns(UserWarning, match=f"checkpoints/{NEWEST} is skipped"):
        train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]
    assert small.digest(run, NEWEST) == small.digests[NEWEST]


@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
def test_with_one_checkpoint_to_keep_the_last_whole_one_stays_until_the_next_is_saved(
    small: SmallRun, run: Path
) -> None:
    damage(run / "checkpoints" / str(NEWEST) / "manifest.json", "flipped")
    store = Store(run / "checkpoints", keep=1)
    step, tree, facts = store.load_newest(small.like)
    assert step == BEFORE
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        store.save(35, tree, facts)
        with pytest.raises(StorageError):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert small.digest(run, BEFORE) == small.digests[BEFORE]
    store.save(36, tree, facts)
    assert store.close() == 36
    assert store.steps() == [36]
    assert small.digest(run, 36) == small.digests[BEFORE]


# --- what is refused -----------------------------------------------------------------------------------------------


def damage_all(run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        damage(checkpoint / "manifest.json", "flipped")


def lose_all(run: Path, metadata: str = "whole") -> None:
    """Remove all checkpoints, and spoil the file that says there were some."""
    shutil.rmtree(run / "checkpoints")
    if metadata == "flipped":
        flip(run / "metadata.json", 0)
    elif metadata != "whole":
        damage(run / "metadata.json", metadata)


def newer_format(manifest: dict[str, Any]) -> None:
    manifest["format"] = FORMAT + 1


def another_seed(manifest: dict[str, Any]) -> None:
    """Make a manifest that of a run with another seed."""
    manifest["facts"]["settings"]["seed"] = 5


def of(step: int, change: Callable[[dict[str, Any]], None]) -> Spoil:
    """Change the manifest of a checkpoint."""
    return lambda run: rewrite_manifest(run / "checkpoints" / str(step), change)


def another_below(run: Path, spoil: Spoil) -> None:
    """Have a checkpoint of another run below a newest one that cannot be used."""
    of(BEFORE, another_seed)(run)
    spoil(run / "checkpoints" / str(NEWEST))


def flip_setting(run: Path, line: str, became: str) -> None:
    """Flip the one bit of a file of settings that makes a line another."""
    assert sum((ord(a) ^ ord(b)).bit_count() for a, b in zip(line, became, strict=True)) == 1
    text = (run / "config.yaml").read_text()
    assert f"{line}\n" in text
    (run / "config.yaml").write_text(text.replace(f"{line}\n", f"{became}\n"))


NO_CHECKPOINT = "no valid checkpoint.*--start-over"
NO_SETTINGS = r"config\.yaml|other settings"
REFUSED: dict[str, tuple[Spoil, int, str]] = {
    "all damaged": (damage_all, 6, NO_CHECKPOINT),
    **{
        f"all lost, metadata {how}": (lambda run, how=how: lose_all(run, how), 6, "checkpoint")
        for how in ("whole", "missing", "empty", "flipped")
    },
    # Newer formats are no damage: none before takes their place, and nobody is told to start over.
    "the newest of a newer format": (
        of(NEWEST, newer_format), 6, f"{NEWEST} cannot be read: it was written by .*newer .*format {FORMAT + 1}",
    ),
    "a run of a newer format": (
        lambda run: (run / "metadata.json").write_text('{"format": 99}'), 2, "a newer version of jaxrl .format 99",
    ),
    "the newest of another run": (of(NEWEST, another_seed), 2, "seed: 5 -> 0"),
    "one of another run below a damaged one": (
        lambda run: another_below(run, lambda at: damage(at / "arrays/sums.max/0", "truncated")), 2, "seed: 5 -> 0",
    ),
    # That its arrays are not its own shows only when they are read.
    "one of another run below arrays of another step": (
        lambda run: another_below(run, take_arrays_of_another), 2, "seed: 5 -> 0",
    ),
    **{
        f"settings {how}": (lambda run, how=how: damage(run / "config.yaml", how), 2, NO_SETTINGS)
        for how in ("missing", "empty", "truncated")
    },
    "a bit of the seed": (lambda run: flip_setting(run, "seed: 0", "seed: 1"), 2, "seed: 0 -> 1"),
    "a bit of a rate": (
        lambda run: flip_setting(run, "lr: 0.00025", "lr: 0.00035"), 2, "agent.lr: 0.00025 -> 0.00035",
    ),
    "a bit of a name": (lambda run: flip_setting(run, "num_envs: 2", "num_env{: 2"), 2, "num_env{"),
}  # fmt: skip
"""What becomes of a run, with which exit code it is refused, and what is said."""


@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
@pytest.mark.parametrize("what", REFUSED)
def test_a_run_that_cannot_be_gone_on_with_is_refused_in_one_line_and_every_file_stays_as_it_is(
    run: Path, what: str
) -> None:
    spoil, code, said = REFUSED[what]
    spoil(run)
    before = contents(run)
    with pytest.raises(JaxrlError, match=said) as refused:
        train.main(["--resume", str(run)])
    assert refused.value.exit_code == code
    assert "\n" not in str(refused.value)
    if "newer format" in what:
        assert not re.search("damaged|--start-over", str(refused.value))
        with pytest.raises(JaxrlError, match=said):
            load_policy(run, step="latest")
    assert contents(run) == before


def test_starting_over_moves_all_of_the_old_aside_and_ends_in_the_same_bits(small: SmallRun, run: Path) -> None:
    damage_all(run)
    before = contents(run)
    train.main(["--resume", str(run), "--start-over"])
    assert small.digest(run, LAST) == small.digests[LAST]
    aside = contents(run / "discarded-1")
    assert aside == {name: data for name, data in before.items() if name != ".lock"}
    assert [row["opt_steps"] for row in rows_in(run) if row["kind"] == "train"] == [10, 20, 30, 40]
    train.main(["--resume", str(run), "--start-over"])
    assert contents(run / "discarded-1") == aside
    assert small.digest(run / "discarded-2", LAST) == small.digests[LAST]


def read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without those that nothing reads under the others."""
    unread_there = {name.removeprefix("agent.") for name in unused_settings(settings)}
    agent = {name: value for name, value in settings["agent"].items() if name not in unread_there}
    return {**settings, "agent": agent}


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=str)
def test_no_flipped_bit_of_the_settings_changes_the_training(run: Path, seeds: range) -> None:
    config, went_on, wanted = run / "config.yaml", 0, read(build("dqn", SMALL).info.settings or {})
    text = config.read_bytes()
    assert read(decide(run).strategy.info.settings or {}) == wanted
    for seed in seeds:
        flip(config, random.Random(seed).randrange(8 * len(text)))
        with suppress(JaxrlError):
            decided = decide(run)
            assert (read(decided.strategy.info.settings or {}), decided.config.seed) == (wanted, SMALL.seed)
            went_on += 1
        config.write_bytes(text)
    assert went_on < len(seeds)


def decide(run: Path) -> Trainer:
    """Do all that decides whether a run goes on, and return what would go on."""
    request = parse(["--resume", str(run)])
    decided = Trainer(build(request.algo, request.config), train.trainer_config(request.config), resume=True)
    Storage(decided.config.run_dir, decided.config.keep, decided.settings(), decided.resume).close()
    return decided


# --- what hinders no training --------------------------------------------------------------------------------------


def spoil_others(run: Path, damaged: str) -> None:
    """Spoil files as said: `FILE HOW`, several with commas."""
    for words in damaged.split(", "):
        name, how = words.split(maxsplit=1)
        (file,) = run.glob(name)
        if how in ("of another run", "of a newer format"):
            rewrite_manifest(file, newer_format if "newer" in how else another_seed)
        elif file.is_dir():
            shutil.rmtree(file)
            if how == "a file":
                file.write_text("none")
        elif how == "garbage":
            file.write_bytes(random.Random(0).randbytes(500))
        else:
            damage(file, how)


OTHERS = [
    *(
        f"{name} {how}"
        for name in ("metadata.json", "metrics.jsonl")
        for how in ("missing", "empty", "truncated", "flipped")
    ),
    *(f"{name} {how}" for name in ("eval_episodes.jsonl", ".lock") for how in ("missing", "flipped")),
    *(f"{name} {how}" for name in ("tensorboard/*", "best/*/files.json") for how in ("empty", "flipped")),
    *(f"{name} flipped" for name in ("best/*/manifest.json", "best/*/arrays/agent.hyper.lr/0")),
    *("tensorboard missing", "best missing"),
]
SEVERAL = (
    "metrics.jsonl flipped, metadata.json missing, eval_episodes.jsonl missing, tensorboard/* flipped",
    "tensorboard missing, best missing",
    "tensorboard/* garbage, best/* of another run",
    "tensorboard a file, best/* of a newer format",
)


@pytest.mark.every_day(*SEVERAL)
@pytest.mark.filterwarnings("ignore:checkpoint .* is skipped")
@pytest.mark.parametrize("damaged", [*OTHERS, *SEVERAL])
def test_no_training_depends_on_any_other_file(
    small: SmallRun, run: Path, recwarn: pytest.WarningsRecorder, damaged: str
) -> None:
    spoil_others(run, damaged)
    if "newer format" in damaged:
        with pytest.raises(NoCheckpointError, match="written by a newer version of jaxrl"):
            load_policy(run)
    train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]
    said = [str(warning.message) for warning in recwarn]
    passed = [line for line in said if re.search("best policy .* is skipped: it is of a run with seed 5, not 0", line)]
    assert len(passed) == ("best/* of another run" in damaged)
    if "metrics" not in damaged:
        assert [row["opt_steps"] for row in rows_in(run) if row["kind"] == "train"] == [10, 20, 30, 40]
        assert log_problems(run, "metrics.jsonl") == []
