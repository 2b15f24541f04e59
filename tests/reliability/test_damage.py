"""Damage on the disk: it is named and passed over, never read as wrong values, and nothing that is left gets lost."""

import json
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_run import BEFORE, LAST, NEWEST, SMALL, SmallRun, Taken, contents, rewrite_manifest, take_up

from jaxrl import train
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError, StorageError
from jaxrl.loading import load_policy
from jaxrl.training import Trainer
from jaxrl.training.settings import unread
from jaxrl.training.storage import checkpoints, run_dir
from jaxrl.training.storage.checkpoints import FILES, Store, file_sums
from jaxrl.training.storage.run import Storage

# --- the newest checkpoint ---------------------------------------------------------------------------------------


def assert_right(small: SmallRun, run: Path, taken: Taken) -> None:
    """Check that what was loaded is exactly what was saved, and that whatever was passed over was named."""
    assert (taken.digest, taken.facts) == (small.digests[taken.step], small.facts[taken.step])
    passed = [step for step in small.facts if step > taken.step]
    assert len(taken.warnings) == len(passed)
    for step in passed:
        assert any(f"{run / 'checkpoints' / str(step)} is passed over" in said for said in taken.warnings)


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


@pytest.mark.slow
def test_an_undamaged_run_goes_on_from_its_newest_checkpoint_without_a_warning(small: SmallRun, run: Path) -> None:
    taken = take_up(small, run)
    assert (taken.step, taken.warnings) == (NEWEST, [])
    assert_right(small, run, taken)


@pytest.mark.every_day("missing", "truncated")
@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
def test_any_damaged_file_of_the_newest_checkpoint_is_noticed_and_the_one_before_is_taken(
    small: SmallRun, run: Path, how: str
) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    whole = shutil.copytree(newest, run.parent / "whole")
    arrays = {"arrays/_METADATA", "arrays/sums.max/.zarray", "arrays/sums.max/0"}
    names = [Path(name) for name in ("manifest.json", FILES, *arrays)]
    assert {*names} <= {file.relative_to(newest) for file in files_of(newest)}
    for name in names:
        damage(newest / name, how)
        taken = take_up(small, run)
        # Without its list of files a checkpoint is what a kill just before the list was written leaves: whole.
        assert taken.step == (NEWEST if (str(name), how) == (FILES, "missing") else BEFORE), name
        assert_right(small, run, taken)
        shutil.copy(whole / name, newest / name)


MANY = [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)]
"""Seeds of random flips, some for the ordinary run."""


@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_any_flipped_bit_of_the_newest_checkpoint_is_noticed_and_the_one_before_is_taken(
    small: SmallRun, run: Path, seeds: range
) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    files = [file for file in files_of(newest) if file.stat().st_size]
    for seed in seeds:
        choice = random.Random(seed)
        file = choice.choice(files)
        bit = choice.randrange(8 * file.stat().st_size)
        flip(file, bit)
        taken = take_up(small, run)
        assert taken.step == BEFORE, (file, bit)
        assert_right(small, run, taken)
        flip(file, bit)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_without_the_list_of_files_no_flipped_bit_gives_wrong_values(small: SmallRun, run: Path, seeds: range) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    (newest / FILES).unlink()
    files = [file for file in files_of(newest) if file.stat().st_size]
    decisive = [file for file in files if file.name not in (".zarray", "_METADATA")]
    used = set()
    for seed in seeds:
        choice = random.Random(seed)
        file = choice.choice(decisive if seed % 2 else files)  # most bytes of the others are never read
        bit = choice.randrange(8 * file.stat().st_size)
        flip(file, bit)
        taken = take_up(small, run)
        assert_right(small, run, taken)
        used.add(taken.step)
        flip(file, bit)
    assert BEFORE in used <= {BEFORE, NEWEST}


@pytest.mark.every_day("missing-12")
@pytest.mark.parametrize(("how", "every"), [("truncated", 1), ("empty", 1), ("missing", 1), ("missing", 12)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_the_list_of_files_no_damaged_file_gives_wrong_values(
    small: SmallRun, run: Path, how: str, every: int
) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    (newest / FILES).unlink()
    whole, used = shutil.copytree(newest, run.parent / "whole"), []
    for name in [file.relative_to(newest) for file in files_of(newest)][::every]:
        damage(newest / name, how)
        used.append(take_up(small, run))
        assert_right(small, run, used[-1])
        shutil.copy(whole / name, newest / name)
    assert BEFORE in [taken.step for taken in used]


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "a file"])
def test_a_checkpoint_that_is_hardly_there_is_passed_over(small: SmallRun, run: Path, left: str) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    shutil.rmtree(newest)
    if left == "an empty directory":
        newest.mkdir()
    elif left == "a file":
        newest.write_text("not a checkpoint")
    taken = take_up(small, run)
    assert taken.step == BEFORE
    assert (taken.digest, taken.facts) == (small.digests[BEFORE], small.facts[BEFORE])
    assert len(taken.warnings) == (left != "nothing")


def test_two_damaged_checkpoints_are_both_named_and_the_third_is_taken(small: SmallRun, run: Path) -> None:
    for step in (BEFORE, NEWEST):
        damage(run / "checkpoints" / str(step) / "manifest.json", "truncated")
    taken = take_up(small, run)
    assert taken.step == 10
    assert_right(small, run, taken)


# --- a checkpoint that is whole, but another's -------------------------------------------------------------------


def test_a_checkpoint_of_another_step_is_passed_over(small: SmallRun, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / str(NEWEST))
    (run / "checkpoints" / "10").rename(run / "checkpoints" / str(NEWEST))
    taken = take_up(small, run)
    assert taken.step == BEFORE
    assert taken.digest == small.digests[BEFORE]
    assert any(f"checkpoints/{NEWEST} is passed over: it was saved as step 10" in said for said in taken.warnings)


def test_a_checkpoint_of_a_newer_format_is_no_damage_and_none_before_it_takes_its_place(run: Path) -> None:
    newer = checkpoints.FORMAT + 1
    rewrite_manifest(run / "checkpoints" / str(NEWEST), lambda manifest: manifest.update(format=newer))
    before = contents(run)
    with pytest.raises(
        NoCheckpointError, match=f"{NEWEST} cannot be read: it was written by .*newer .*format {newer}"
    ) as no:
        train.main(["--resume", str(run)])
    assert "--start-over" not in str(no.value)
    assert contents(run) == before


def test_a_manifest_that_was_altered_without_its_seal_is_passed_over(small: SmallRun, run: Path) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    rewrite_manifest(newest, lambda manifest: manifest["facts"]["ledger"].update(t=7), reseal=False)
    taken = take_up(small, run)
    assert taken.step == BEFORE
    assert_right(small, run, taken)


def test_arrays_of_another_checkpoint_under_its_manifest_are_passed_over(small: SmallRun, run: Path) -> None:
    newest = run / "checkpoints" / str(NEWEST)
    shutil.rmtree(newest / "arrays")
    shutil.copytree(run / "checkpoints" / "10" / "arrays", newest / "arrays")
    (newest / FILES).write_text(json.dumps(file_sums(newest)))
    taken = take_up(small, run)
    assert taken.step == BEFORE
    assert_right(small, run, taken)


def another_seed(manifest: dict[str, Any]) -> None:
    """Make a manifest that of a run with another seed."""
    manifest["facts"]["settings"]["seed"] = 5


def test_a_checkpoint_of_another_run_is_refused(run: Path) -> None:
    rewrite_manifest(run / "checkpoints" / str(NEWEST), another_seed)
    before = contents(run)
    with pytest.raises(SettingsError, match="seed: 5 -> 0"):
        train.main(["--resume", str(run)])
    assert contents(run) == before


@pytest.mark.parametrize("damaged", ["a file", "the values alone"])
@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
def test_a_checkpoint_of_another_run_below_a_damaged_one_is_refused(run: Path, damaged: str) -> None:
    rewrite_manifest(run / "checkpoints" / str(BEFORE), another_seed)
    newest = run / "checkpoints" / str(NEWEST)
    if damaged == "a file":
        damage(newest / "arrays" / "sums.max" / "0", "truncated")
    else:
        # Its manifest can be read and is of this run; that the arrays are not its own shows only when they are read.
        shutil.rmtree(newest / "arrays")
        shutil.copytree(run / "checkpoints" / "10" / "arrays", newest / "arrays")
        (newest / FILES).write_text(json.dumps(file_sums(newest)))
    with pytest.raises(SettingsError, match="seed: 5 -> 0"):
        train.main(["--resume", str(run)])


# --- going on after it -------------------------------------------------------------------------------------------


def test_a_run_whose_newest_checkpoint_is_damaged_ends_in_the_same_bits(small: SmallRun, run: Path) -> None:
    damage(run / "checkpoints" / str(NEWEST) / "manifest.json", "flipped")
    with pytest.warns(UserWarning, match=f"checkpoints/{NEWEST} is passed over"):
        train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]
    assert small.digest(run, NEWEST) == small.digests[NEWEST]


@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
def test_with_one_checkpoint_to_keep_the_last_whole_one_stays_until_the_next_is_saved(
    small: SmallRun, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(run / "checkpoints" / str(NEWEST) / "manifest.json", "flipped")
    store = Store(run / "checkpoints", keep=1)
    step, tree, facts = store.load_newest(small.like)
    assert step == BEFORE
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_atomically", _no_room)
        store.save(35, tree, facts)
        with pytest.raises(StorageError):
            store.wait()
    assert small.digest(run, BEFORE) == small.digests[BEFORE]
    store.save(36, tree, facts)
    assert store.close() == 36
    assert store.steps() == [36]
    assert small.digest(run, 36) == small.digests[BEFORE]


def _no_room(path: Path, text: str) -> None:
    raise OSError(28, "No space left on device", str(path))


# --- no valid checkpoint at all ----------------------------------------------------------------------------------


def damage_all(run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        damage(checkpoint / "manifest.json", "flipped")


@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
def test_without_a_valid_checkpoint_resuming_is_refused_and_every_file_stays_as_it_is(run: Path) -> None:
    damage_all(run)
    before = contents(run)
    with pytest.raises(NoCheckpointError, match="no valid checkpoint") as refused:
        train.main(["--resume", str(run)])
    assert refused.value.exit_code == 6
    assert "--start-over" in str(refused.value)
    assert contents(run) == before


@pytest.mark.parametrize("metadata", ["whole", "missing", "empty", "flipped"])
def test_a_run_that_lost_all_its_checkpoints_is_refused_and_every_file_stays_as_it_is(run: Path, metadata: str) -> None:
    shutil.rmtree(run / "checkpoints")
    if metadata == "flipped":
        flip(run / "metadata.json", 0)
    elif metadata != "whole":
        damage(run / "metadata.json", metadata)
    before = contents(run)
    with pytest.raises(NoCheckpointError):
        train.main(["--resume", str(run)])
    assert contents(run) == before


def test_starting_over_moves_all_of_the_old_aside_and_ends_in_the_same_bits(small: SmallRun, run: Path) -> None:
    damage_all(run)
    before = contents(run)
    train.main(["--resume", str(run), "--start-over"])
    assert small.digest(run, LAST) == small.digests[LAST]
    aside = contents(run / "discarded-1")
    assert aside == {name: data for name, data in before.items() if name != ".lock"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["opt_steps"] for row in rows if row["kind"] == "train"] == [10, 20, 30, 40]
    train.main(["--resume", str(run), "--start-over"])
    assert contents(run / "discarded-1") == aside
    assert small.digest(run / "discarded-2", LAST) == small.digests[LAST]


# --- all other files ---------------------------------------------------------------------------------------------

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
)


@pytest.mark.every_day(*SEVERAL)
@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
@pytest.mark.parametrize("damaged", [*OTHERS, *SEVERAL])
def test_no_training_depends_on_any_other_file(small: SmallRun, run: Path, damaged: str) -> None:
    for words in damaged.split(", "):
        name, how = words.split()
        (file,) = run.glob(name)
        if file.is_dir():
            shutil.rmtree(file)
        else:
            damage(file, how)
    train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]


def test_a_run_directory_of_a_newer_format_is_refused(run: Path) -> None:
    (run / "metadata.json").write_text('{"format": 99}')
    before = contents(run)
    with pytest.raises(SettingsError, match=r"written by a newer version of jaxrl \(format 99"):
        train.main(["--resume", str(run)])
    assert contents(run) == before


@pytest.mark.filterwarnings("ignore:checkpoint .* is passed over")
def test_a_best_policy_of_a_newer_format_is_no_policy_and_hinders_no_training(small: SmallRun, run: Path) -> None:
    (best,) = (run / "best").iterdir()
    rewrite_manifest(best, lambda manifest: manifest.update(format=checkpoints.FORMAT + 1))
    with pytest.raises(NoCheckpointError, match="written by a newer version of jaxrl"):
        load_policy(run)
    train.main(["--resume", str(run)])
    assert small.digest(run, LAST) == small.digests[LAST]


@pytest.mark.parametrize("how", ["missing", "empty", "truncated"])
def test_without_its_settings_a_run_is_refused(run: Path, how: str) -> None:
    damage(run / "config.yaml", how)
    before = contents(run)
    with pytest.raises(SettingsError, match=r"config\.yaml|other settings") as refused:
        train.main(["--resume", str(run)])
    assert "\n" not in str(refused.value)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("line", "became", "said"),
    [
        ("seed: 0", "seed: 1", "seed: 0 -> 1"),
        ("lr: 0.00025", "lr: 0.00035", "agent.lr: 0.00025 -> 0.00035"),
        ("num_envs: 2", "num_env{: 2", "num_env{"),
    ],
)
def test_one_flipped_bit_that_changes_a_setting_is_refused(run: Path, line: str, became: str, said: str) -> None:
    config = run / "config.yaml"
    assert f"{line}\n" in config.read_text()
    assert sum((ord(a) ^ ord(b)).bit_count() for a, b in zip(line, became, strict=True)) == 1
    config.write_text(config.read_text().replace(f"{line}\n", f"{became}\n"))
    before = contents(run)
    with pytest.raises(SettingsError) as refused:
        train.main(["--resume", str(run)])
    assert said in str(refused.value)
    assert contents(run) == before


def read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without those that nothing reads under the others."""
    unread_there = {name.removeprefix("agent.") for name in unread(settings)}
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
