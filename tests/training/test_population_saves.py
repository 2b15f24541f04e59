"""What members of a population save together: how little it is, who reads it, and what damage and kills cost."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl import verify
from jaxrl.errors import NoCheckpointError, StorageError
from jaxrl.training.storage.checkpoints import seal
from jaxrl.training.storage.group import BEST, CHECKPOINTS, Collector, extract, open_store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run_dir import member_dir
from jaxrl.training.trainer import Trainer

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
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("together") / "run"
    trained(path, keep=2)
    return path


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of members that went on to 80 optimisation steps undisturbed."""
    return trained(tmp_path_factory.mktemp("longer") / "run", max_opts=80)


def test_one_save_has_all_members_and_as_many_files_as_that_of_one(run: Path, tmp_path: Path) -> None:
    *_, last = saves(run)
    assert sorted(rows(last)) == [(0, 60), (1, 60), (2, 60)]
    trained(tmp_path / "one", 1, keep=2)
    count = lambda save: len(list(save.rglob("*")))
    assert count(last) == count(saves(tmp_path / "one")[-1])
    assert len(saves(run)) == len(saves(tmp_path / "one"))


def test_a_run_directory_has_as_many_files_whatever_the_number_of_members(run: Path, tmp_path: Path) -> None:
    trained(tmp_path / "one", 1, keep=2)
    files = lambda directory: {path.relative_to(directory).as_posix() for path in directory.iterdir()}
    assert files(run) == files(tmp_path / "one")
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_the_scores_of_members_are_read_as_the_page_shows(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "runs" / "lr")
    monkeypatch.chdir(tmp_path)
    exec(shown("members-rows"), found := {})
    for number in range(3):
        _, facts = open_store(member_dir(run, number), CHECKPOINTS).newest_facts()
        assert found["scores"][number].keys() == {20, 40, 60}
        assert found["scores"][number][60] == facts["ledger"]["last_score"]


@pytest.mark.parametrize("layout", ["spread", "together"])
def test_members_that_end_at_different_times_are_saved_where_they_ended(layout: str, tmp_path: Path) -> None:
    """By rewards that all policies reach, or none: two members end at once, the others go on to the end."""
    made = jaxrl.population(small_dqn(), seeds=4, layout=layout)
    stop = lambda report: report.opt_steps == 20 and next(ends)
    ends = iter([True, False, True, False])
    result = Trainer(made, **LENGTH, run_dir=tmp_path / "run", quiet=True, stop=stop, workers=1).train()
    made_opts = [member.result.summary["opt_steps"] for member in result.members]
    assert sorted(made_opts) == [20, 20, 60, 60]
    for number, member in enumerate(result.members):
        store = open_store(member_dir(tmp_path / "run", number), CHECKPOINTS)
        assert store.steps()[-1] == made_opts[number]
        weights = store.read(made_opts[number])[0]["state/agent/params/params/Dense_0/kernel"]
        assert np.array_equal(weights, member.result.state.agent.params["params"]["Dense_0"]["kernel"])


def test_a_process_with_orbax_and_numpy_alone_finds_every_members_network(run: Path) -> None:
    (save,) = saves(run, BEST)[-1:]
    network = ocp.PyTreeCheckpointer().restore(save / "arrays")["0"]["agent"]["params"]["params"]
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    for place, (member, _) in enumerate(rows(save)):
        hidden = np.maximum(
            obs @ network["MLP_0"]["Dense_0"]["kernel"][place] + network["MLP_0"]["Dense_0"]["bias"][place], 0
        )
        values = hidden @ network["Dense_0"]["kernel"][place] + network["Dense_0"]["bias"][place]
        assert values.argmax(-1).tolist() == jaxrl.load_policy(run, member=member)(obs).tolist()


def test_the_page_reads_a_save_as_it_stands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs" / "lr")
    monkeypatch.chdir(tmp_path)
    code = shown("members-orbax")
    assert "jaxrl" not in code
    exec(code, {})
    assert capsys.readouterr().out == "[(0, 60), (1, 60), (2, 60)]\n"


@pytest.mark.every_day("arrays/0.state.agent.params.params.Dense_0.kernel/0.0.0")
@pytest.mark.parametrize("part", ["manifest.json", "arrays/0.state.agent.params.params.Dense_0.kernel/0.0.0"])
def test_members_go_on_from_the_save_before_one_that_is_damaged(
    part: str, run: Path, longer: list[str], tmp_path: Path
) -> None:
    there = tmp_path / "run"
    shutil.copytree(run, there)
    file = saves(there)[-1] / part
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert verify.main([str(there)]) == NoCheckpointError.exit_code
    with pytest.warns(UserWarning, match=rf"checkpoints/{file.relative_to(there / CHECKPOINTS).parts[0]} is passed"):
        assert trained(there, max_opts=80, resume=True) == longer


def test_with_all_saves_damaged_members_are_refused_until_all_begins_again(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "run"
    shutil.copytree(run, there)
    for save in saves(there):
        (save / "manifest.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="is passed over"),
        pytest.raises(NoCheckpointError, match=r"member \d: .*holds no valid checkpoint.*is whole: .*--start-over"),
    ):
        trained(there, max_opts=80, resume=True)
    assert [save.name for save in saves(there)] == [save.name for save in saves(run)]
    assert trained(there, start_over=True) == trained(tmp_path / "fresh")


@pytest.mark.parametrize(
    "wrong",
    [
        {"member": -1},
        {"member": "0"},
        {"step": 1.5},
        {"stack": "7"},
        {"stack": ["0"]},
        {"facts": None},
        {"order": None},
        "rows",
        [],
        0,
    ],
    ids=str,
)
def test_rows_that_a_stranger_has_written_are_damage(wrong: object, run: Path, tmp_path: Path) -> None:
    there = tmp_path / "run"
    shutil.copytree(run, there)
    file = saves(there)[-1] / "manifest.json"
    manifest = json.loads(file.read_text())
    if isinstance(wrong, dict):
        manifest["facts"]["rows"][0] |= wrong
    elif wrong == 0:
        manifest["facts"]["keep"] = 0
    else:
        manifest["facts"]["rows"] = wrong
    file.write_text(json.dumps(seal(manifest)))
    (file.parent / "files.json").unlink()
    store = open_store(member_dir(there, 1), CHECKPOINTS)
    with pytest.warns(UserWarning, match="is passed over: it (does not say which|has other) members"):
        assert store.newest_facts()[0] == 40


# --- a collector by itself ------------------------------------------------------------------------------------------


def numbers(x: float) -> dict[str, np.ndarray]:
    return {"x": np.full((2, 3), x, np.float32)}


def begun(run: Path, members: int, keep: int = 1) -> Collector:
    """Return what collects the saves of a population in a directory that is one to all who read it."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("population: {}\n")
    return Collector(run, keep, range(members))


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


def test_members_with_arrays_of_other_shapes_are_in_one_save(tmp_path: Path) -> None:
    collector = begun(tmp_path / "run", 3)
    for member in range(3):
        collector.store(CHECKPOINTS, member).save(7, {"x": np.arange(4 + member % 2)}, {"own": member})
    collector.close()
    (save,) = saves(tmp_path / "run")
    assert ocp.PyTreeCheckpointer().restore(save / "arrays")["1"]["x"].tolist() == [[0, 1, 2, 3, 4]]
    stores = [open_store(member_dir(tmp_path / "run", member), CHECKPOINTS) for member in range(3)]
    assert [(store.read(7)[0]["x"].size, store.newest_facts()[1]["own"]) for store in stores] == [
        (4, 0),
        (5, 1),
        (4, 2),
    ]


def test_what_could_not_be_written_is_told_to_each_and_written_the_next_time(tmp_path: Path) -> None:
    collector = begun(tmp_path / "run", 2)
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


def test_a_member_that_is_taken_out_leaves_what_is_damaged(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "run"
    shutil.copytree(run, there)
    (saves(there)[-1] / "arrays" / "_METADATA").write_text("{}")
    with pytest.warns(UserWarning, match="step 60 of the member is left out: its file arrays/_METADATA is damaged"):
        own = extract(there, 1, tmp_path / "own")
    assert open_store(own, CHECKPOINTS).steps() == [40]
    assert jaxrl.load_policy(own, step="latest").facts["opt_steps"] == 40
