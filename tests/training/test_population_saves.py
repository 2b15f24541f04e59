"""What members of a population save together: how little it is, who reads it, and what damage and kills cost."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl import verify
from jaxrl.errors import NoCheckpointError, StorageError
from jaxrl.training.loop import Trainer
from jaxrl.training.storage import population_saves
from jaxrl.training.storage.checkpoints import seal
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.opening import extract, open_store
from jaxrl.training.storage.population_saves import SaveBatcher
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS, member_dir

LENGTH = {"max_opts": 60, "eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "save_interval": 20}
PAGE = Path(__file__).parents[2] / "docs" / "populations.md"


def trained(run: Path, members: int = 3, **settings: object) -> list[str]:
    """Train a population in `run`; return the digests of its members' states."""
    made = jaxrl.population(small_dqn(), seeds=members)
    given = {**LENGTH, "quiet": True, "run_dir": run, **settings}
    return [state_digest(member.result.state) for member in Trainer(made, **given).train().members]


def shown(marker: str) -> str:
    """Return a block of code of the page."""
    found = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def saves(run: Path, name: str = CHECKPOINTS) -> list[Path]:
    """Return the saves of a population, the earliest first."""
    return sorted((run / name).iterdir(), key=lambda path: int(path.name))


def rows(save: Path) -> list[tuple[int, int]]:
    """Return member and step of each row of a save."""
    return [(row["member"], row["step"]) for row in json.loads((save / "manifest.json").read_text())["facts"]["rows"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where three members have come to their end, and the digests of their states; do not write there."""
    path = tmp_path_factory.mktemp("together") / "run"
    return path, trained(path, keep=2)


@pytest.fixture
def run(whole: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy of that for a test of its own."""
    return Path(shutil.copytree(whole[0], tmp_path / "runs" / "lr"))


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of members that went on to 80 optimisation steps undisturbed."""
    return trained(tmp_path_factory.mktemp("longer") / "run", max_opts=80)


def test_a_population_has_as_many_saves_as_a_single_member_and_few_files_in_each(run: Path, tmp_path: Path) -> None:
    trained(tmp_path / "one", 1, keep=2)
    last, of_one = saves(run), saves(tmp_path / "one")
    assert sorted(rows(last[-1])) == [(0, 60), (1, 60), (2, 60)]
    assert len(last) == len(of_one)
    arrays = json.loads((last[-1] / "manifest.json").read_text())["leaves"]
    assert sum(path.is_file() for path in last[-1].rglob("*")) < len(arrays)
    files = lambda directory: {path.name for path in directory.iterdir()}
    assert files(run) == files(tmp_path / "one")
    assert len(files(run / "tensorboard")) == 1


def test_the_page_reads_scores_and_a_save_as_it_stands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(shown("members-rows"), found := {})
    for number in range(3):
        _, facts = open_store(member_dir(run, number), CHECKPOINTS).newest_facts()
        assert found["scores"][number].keys() == {20, 40, 60}
        assert found["scores"][number][60] == facts["ledger"]["last_score"]
    capsys.readouterr()
    code = shown("members-orbax")
    assert "jaxrl" not in code
    exec(code, {})
    assert capsys.readouterr().out == "[(0, 60), (1, 60), (2, 60)]\n"


def test_a_process_with_orbax_and_numpy_alone_finds_every_members_network(whole: tuple[Path, list[str]]) -> None:
    (save,) = saves(whole[0], BEST)[-1:]
    network = ocp.PyTreeCheckpointer().restore(save / "arrays")["0"]["agent"]["params"]["params"]
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    for place, (member, _) in enumerate(rows(save)):
        first, head = (
            {name: array[place] for name, array in layer.items()}
            for layer in (network["MLP_0"]["Dense_0"], network["Dense_0"])
        )
        values = np.maximum(obs @ first["kernel"] + first["bias"], 0) @ head["kernel"] + head["bias"]
        assert values.argmax(-1).tolist() == jaxrl.load_policy(whole[0], member=member)(obs).tolist()


@pytest.mark.every_day("arrays/**/d/*")
@pytest.mark.parametrize("part", ["manifest.json", "arrays/**/d/*"])
def test_members_go_on_from_the_save_before_one_that_is_damaged(part: str, run: Path, longer: list[str]) -> None:
    save = saves(run)[-1]
    largest = max(save.glob(part), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert verify.main([str(run)]) == NoCheckpointError.exit_code
    with pytest.warns(UserWarning, match=rf"checkpoints/{save.name} is skipped"):
        assert trained(run, max_opts=80, resume=True) == longer


def test_with_all_saves_damaged_members_are_refused_until_all_begins_again(
    whole: tuple[Path, list[str]], run: Path
) -> None:
    for save in saves(run):
        (save / "manifest.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(NoCheckpointError, match=r"member \d: .*holds no valid checkpoint.*is whole: .*--start-over"),
    ):
        trained(run, max_opts=80, resume=True)
    assert [save.name for save in saves(run)] == [save.name for save in saves(whole[0])]
    assert trained(run, start_over=True) == whole[1]


IN_A_ROW = ({"member": -1}, {"member": "0"}, {"step": 1.5}, {"stack": "7"}, {"stack": ["0"]}, {"facts": None})


@pytest.mark.parametrize("wrong", [*IN_A_ROW, {"order": None}, "rows", [], 0, None], ids=str)
def test_rows_that_a_stranger_has_written_are_damage(wrong: object, run: Path) -> None:
    file = saves(run)[-1] / "manifest.json"
    manifest = json.loads(file.read_text())
    if isinstance(wrong, dict):
        manifest["facts"]["rows"][0] |= wrong
    elif wrong == 0:  # saves that are kept
        manifest["facts"]["keep"] = 0
    elif wrong is None:
        manifest["facts"]["common"] = None
    else:
        manifest["facts"]["rows"] = wrong
    file.write_text(json.dumps(seal(manifest)))
    (file.parent / "files.json").unlink()
    with pytest.warns(UserWarning, match="is skipped: it (does not say which|has other) members"):
        assert open_store(member_dir(run, 1), CHECKPOINTS).newest_facts()[0] == 40


# --- a collector by itself ------------------------------------------------------------------------------------------


def numbers(x: float) -> dict[str, np.ndarray]:
    return {"x": np.full((2, 3), x, np.float32)}


def begun(run: Path, members: int, keep: int = 1, **how: Any) -> SaveBatcher:
    """Return what collects the saves of a population in a directory that is one to all who read it."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("population: {}\n")
    return SaveBatcher(run, keep, range(members), **how)


def kept(run: Path, member: int) -> dict[int, float]:
    store = open_store(member_dir(run, member), CHECKPOINTS)
    return {step: float(store.read(step)[0]["x"][0, 0]) for step in store.steps()}


def test_a_member_that_goes_back_leaves_its_later_steps_behind(tmp_path: Path) -> None:
    collector = begun(tmp_path / "run", 2, keep=3)
    stores = [collector.store(CHECKPOINTS, member) for member in range(2)]
    for step in (10, 20, 30):
        for member, store in enumerate(stores):
            store.save(step, numbers(step + member), {"regular": True})
    stores[0].drop_after(20)
    assert list(kept(tmp_path / "run", 0)) == [10, 20], "a kill now does not find what was undone"
    stores[0].save(25, numbers(5), {"regular": True})
    collector.close()
    assert kept(tmp_path / "run", 0) == {10: 10, 20: 20, 25: 5}
    assert kept(tmp_path / "run", 1) == {10: 11, 20: 21, 30: 31}


def test_saves_of_few_members_are_not_kept_for_each_of_them(tmp_path: Path) -> None:
    """Every member hands in its last at another time than the others, as where each has ended by itself."""
    collector = begun(tmp_path / "run", 20)
    for member in range(20):
        store = collector.store(CHECKPOINTS, member)
        store.save(member + 1, numbers(member), {})
        store.wait()
    collector.close()
    assert len(saves(tmp_path / "run")) < 8
    assert [kept(tmp_path / "run", member) for member in range(20)] == [{m + 1: float(m)} for m in range(20)]


def test_verify_says_the_same_of_saves_that_do_not_fit_into_memory_together(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> str:
        assert verify.main([str(run)]) == 0
        return capsys.readouterr().out

    whole = said()
    assert len(re.findall(r"^\d+ ok ", whole, re.MULTILINE)) == 6
    monkeypatch.setattr(population_saves, "MAX_CACHED_BYTES", 0)
    assert said() == whole


def test_members_with_arrays_of_other_shapes_are_in_one_save(tmp_path: Path) -> None:
    collector = begun(tmp_path / "run", 3)
    for member in range(3):
        collector.store(CHECKPOINTS, member).save(7, {"x": np.arange(4 + member % 2)}, {"own": member})
    collector.close()
    (save,) = saves(tmp_path / "run")
    assert ocp.PyTreeCheckpointer().restore(save / "arrays")["1"]["x"].tolist() == [[0, 1, 2, 3, 4]]
    stores = [open_store(member_dir(tmp_path / "run", member), CHECKPOINTS) for member in range(3)]
    own = [(store.read(7)[0]["x"].size, store.newest_facts()[1]["own"]) for store in stores]
    assert own == [(4, 0), (5, 1), (4, 2)]


def test_facts_that_members_share_are_written_once_and_read_as_each_has_them(tmp_path: Path) -> None:
    shared = {"spec": {"name": "x" * 50}, "score": math.nan}
    own = [(0, 1, True, {}), (1, 1.0, 1, {"more": {}}), (2, -0.0, 1.0, {"more": 3})]
    facts = [
        {"settings": {"seed": seed, "agent": {"lr": lr, "clip": 0.2}}, "t": t, **shared, **more}
        for seed, lr, t, more in own
    ]
    saves = begun(tmp_path / "run", 3)
    jobs = [saves.store(CHECKPOINTS, member) for member in range(3)]
    for member, job in enumerate(jobs):
        job.save(10, numbers(member), facts[member])
    saves.close()
    read = [open_store(member_dir(tmp_path / "run", member), CHECKPOINTS).manifest(10)["facts"] for member in range(3)]
    text = lambda told: json.dumps(told, sort_keys=True)
    assert list(map(text, read)) == list(map(text, facts))
    assert (tmp_path / "run" / CHECKPOINTS / "1" / "manifest.json").read_text().count("x" * 50) == 1


def test_what_could_not_be_written_is_told_to_each_and_written_the_next_time(tmp_path: Path) -> None:
    told = list[str]()
    collector = begun(tmp_path / "run", 2, report=told.append)
    stores = [collector.store(CHECKPOINTS, member) for member in range(2)]
    (tmp_path / "run" / CHECKPOINTS).write_text("in the way")
    for store in stores:
        store.save(10, numbers(1), {})
    for store in stores:
        with pytest.raises(StorageError, match="could not be written"):
            store.wait()
    (tmp_path / "run" / CHECKPOINTS).unlink()
    for store in stores:
        store.save(10, numbers(2), {})
    collector.close()
    assert [kept(tmp_path / "run", member) for member in range(2)] == [{10: 2}] * 2
    warning, again = told  # once, and that it works again
    assert re.fullmatch("warning: .* could not be written: .*; training goes on", warning)
    assert again == f"{tmp_path / 'run' / CHECKPOINTS} could be written again"


def test_a_member_that_is_taken_out_leaves_what_is_damaged(run: Path, tmp_path: Path) -> None:
    (saves(run)[-1] / "arrays" / "_METADATA").write_text("{}")
    with pytest.warns(UserWarning, match="step 60 of the member is left out: its file arrays/_METADATA is damaged"):
        own = extract(run, 1, tmp_path / "own")
    assert open_store(own, CHECKPOINTS).steps() == [40]
    assert jaxrl.load_policy(own, step="latest").facts["opt_steps"] == 40
