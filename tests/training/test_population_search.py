"""Populations that search: who ends, who takes over, and the same bits however often they are stopped or killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_runs import rows_about_all, rows_in, without_line
from toys_trainer import ByStep, counting, small_dqn

import jaxrl
from jaxrl import train, verify
from jaxrl.errors import SettingsError, StorageError
from jaxrl.strategies.guard import Health, get_health, init_health, reseed
from jaxrl.strategies.population import Member, Population, set_values, with_values
from jaxrl.strategies.search import Copy, Verdict
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.loop import Trainer
from jaxrl.training.population.members import Gates
from jaxrl.training.population.rows import PopulationRows
from jaxrl.training.population.scores import MemberResult, PopulationResult
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.leaves import digest, state_digest
from jaxrl.training.storage.members import Membership
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS, member_dir, read_members, read_settings
from jaxrl.tuning import tunable

LENGTH = {"max_opts": 80, "eval_interval": 20, "eval_episodes": 8, "record_interval": 40, "save_interval": 40}
SWEEP = {"agent.lr": jaxrl.log_uniform(1e-4, 1e-1)}


def made(search: object, members: int = 5) -> Population:
    return jaxrl.population(small_dqn(), members=members, sweep=SWEEP, search=search)


def lineage(run: Path) -> list[dict]:
    return [row for row in rows_about_all(run) if row["kind"] == "lineage"]


def told(result: PopulationResult) -> list[tuple]:
    digests = [member.result and state_digest(member.result.state) for member in result.members]
    return [
        (m.number, m.status, m.last_score, m.values, m.parent, d) for m, d in zip(result.members, digests, strict=True)
    ]


PBT = jaxrl.PBT(20, share=0.4)


def settings_and_state(run: Path) -> tuple[float, float, float]:
    """Return the learning rate of a run in its settings, in those of its newest checkpoint, and in the state there."""
    store = open_store(run, CHECKPOINTS)
    step, facts = store.newest_facts()
    held = float(store.read(step)[0]["state/agent/hyper/lr"])
    return read_settings(run)["agent"]["lr"], facts["settings"]["agent"]["lr"], held


@pytest.mark.slow
def test_what_a_member_took_over_is_what_its_settings_say_and_stays(tmp_path: Path) -> None:
    """Also where it goes on with other changes, in the population, by itself, or from a checkpoint."""
    result = Trainer(made(PBT), **LENGTH, run_dir=tmp_path / "run", quiet=True).train()
    taken = {member.number: member.values["agent.lr"] for member in result.members}
    assert any(member.values != member.swept for member in result.members)
    for number, lr in taken.items():
        assert settings_and_state(tmp_path / f"run/members/{number:05d}") == (lr, lr, np.float32(lr))
    number = next(member.number for member in result.members if member.values != member.swept)
    assert verify.main([str(tmp_path / "run"), "--replay"]) == 0
    for store in (open_store(path, CHECKPOINTS) for path in tmp_path.glob("run/members/*")):
        assert all(store.manifest(step)["facts"]["spec"] for step in store.steps())
    alone = jaxrl.extract(tmp_path / "run", number, tmp_path / "alone")
    longer = {**LENGTH, "max_opts": 100, "quiet": True}
    clipped = with_values(small_dqn(), {"agent.max_grad_norm": 3.0})
    strategy = with_values(clipped, {"agent.lr": taken[number]})
    Trainer(strategy, **longer, run_dir=alone, resume=True, allow_changes=True).train()
    assert settings_and_state(alone) == (taken[number], taken[number], np.float32(taken[number]))

    other = jaxrl.population(clipped, members=5, sweep=SWEEP, search=PBT)
    changed = {"resume": True, "allow_changes": True, "run_dir": tmp_path / "run"}
    result = Trainer(other, **{**longer, "max_opts": 90}, **changed).train()
    now = {member.number: member.values["agent.lr"] for member in result.members}
    assert now != taken
    for number, lr in now.items():
        assert settings_and_state(tmp_path / f"run/members/{number:05d}") == (lr, lr, np.float32(lr))


@pytest.mark.slow
@pytest.mark.parametrize("search", [PBT, jaxrl.Halving(2)], ids=["pbt", "halving"])
def test_stopped_anywhere_it_goes_on_to_the_same_end(search: Any, tmp_path: Path) -> None:
    whole = Trainer(made(search), **LENGTH, run_dir=tmp_path / "whole", quiet=True).train()
    assert any(member.parent is not None or member.status == "halved" for member in whole.members)
    run = tmp_path / "cut"
    for stop in (7, 14):  # reports until the run is left
        trainer = Trainer(made(search), **LENGTH, run_dir=run, quiet=True, resume=run.exists())
        for count, _ in enumerate(trainer):
            if count == stop:
                break
    cut = Trainer(made(search), **LENGTH, run_dir=run, quiet=True, resume=True).train()
    assert told(cut) == told(whole)
    assert lineage(run) == lineage(tmp_path / "whole")


def member(number: int, status: str, last: float, now: float) -> MemberResult:
    return MemberResult(number, 0, {"agent.lr": 0.1}, status, last, last, None, {"agent.lr": now})


def test_the_table_names_the_settings_that_members_ended_with_and_those_that_were_halved_last() -> None:
    ended = member(0, "halved", 9.0, 0.1), member(1, "max_opts", 3.0, 0.2), member(2, "max_opts", 5.0, 0.3)
    result = PopulationResult(ended, None)
    assert [setting.values["agent.lr"] for setting in result.by()] == [0.3, 0.2, 0.1]
    assert result.best(by="agent.lr").members == (2,)
    lines = result.table().splitlines()
    assert [line.split("  ")[-1] for line in lines[1:]] == ["agent.lr=0.3", "agent.lr=0.2", "agent.lr=0.1, halved"]
    both = PopulationResult((ended[0], member(1, "max_opts", 3.0, 0.1)), None)
    assert both.table().endswith("agent.lr=0.1, 1 of them halved")
    diverged = PopulationResult((member(0, "diverged", 9.0, 0.1), member(1, "max_opts", 3.0, 0.1)), None)
    assert diverged.table().endswith("agent.lr=0.1, 1 of them diverged")


def test_what_halved_members_scored_counts_for_no_setting_of_which_another_went_on() -> None:
    """They were trained for less: by all members the second setting would be the better one."""
    first = [member(0, "max_opts", 500.0, 0.1), *(member(i, "halved", 60.0, 0.1) for i in (1, 2, 3))]
    second = [member(4, "max_opts", 300.0, 0.2), *(member(i, "halved", 400.0, 0.2) for i in (5, 6, 7))]
    result = PopulationResult((*first, *second), None)
    scores = [(setting.last.iqm, setting.best, setting.halved) for setting in result.by()]
    assert scores == [(500, 500, 3), (300, 300, 3)]
    assert (result.best().members, result.best_member().number) == ((0, 1, 2, 3), 0)
    assert PopulationResult(tuple(second), None).best_member().number == 4


@pytest.mark.parametrize("order", [1, -1])
def test_a_member_ends_where_its_own_iterations_end_whatever_the_order_of_members(order: int) -> None:
    """At 100 for one, at 104 for the other, whose patience ends it there: it is behind no gate, and stays as it is."""
    strategies = [
        jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), num_envs=4, rollout=32, epochs=n, minibatches=4)
        for n in (5, 2)
    ]
    members = [Member(number, 0, {}, strategy) for number, strategy in enumerate(strategies[::order])]
    config = TrainerConfig(max_opts=800, eval_interval=100, eval_episodes=2)
    gates = Gates(jaxrl.Halving(2, 0.125), members, config)
    goes_on, ends = (0, 1) if order == 1 else (1, 0)
    gates.record_score(ends, 104, 1.0)
    gates.remove(ends, 104)
    gates.record_score(goes_on, 100, 9.0)
    assert not gates.is_behind(0)
    verdict = gates.verdict({goes_on: 100})
    assert verdict.ended == ()


def test_of_scores_those_first_at_gates_are_kept_and_the_newest() -> None:
    place = Membership(0)
    place.gates = [10, 20, 22, 40]
    for step, kept in (
        (5, [5]),
        (12, [12]),
        (15, [12, 15]),
        (25, [12, 25]),
        (30, [12, 25, 30]),
        (18, [12, 25, 18]),  # after a rollback
        (21, [12, 25, 21]),
        (25, [12, 25, 21]),
        (45, [12, 25, 21, 45]),
        (50, [12, 25, 21, 45, 50]),
    ):
        place.record_score(step, float(len(place.scores)))
        assert [*place.scores] == kept
    assert place.scores[25] == 2.0, "of two at the same step the first counts"


def test_it_is_said_who_stops_and_who_goes_on_as_whom(capsys: pytest.CaptureFixture[str]) -> None:
    rows = PopulationRows(made(PBT), quiet=False)
    verdict = Verdict(copies=(Copy(3, 1, {"agent.lr": 0.02}),))
    rows.log_decision(20, verdict, is_new=True)
    rows.log_decision(20, verdict, is_new=False)  # done before, when the run was stopped
    assert capsys.readouterr().out == "       20 opts  pbt: member 3 goes on as member 1 stands, with agent.lr=0.02\n"
    for number in range(5):
        rows.take(number, {"kind": "eval", "opt_steps": 20, "score": float(number)})
    assert capsys.readouterr().out.split("of")[1].split() == ["5", "all", "members"]  # no longer of the first settings
    PopulationRows(made(jaxrl.Halving(2)), quiet=False).log_decision(40, Verdict(ended=tuple(range(14))), is_new=True)
    said = "halving: 14 members stop here: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 ..."
    assert capsys.readouterr().out == f"       40 opts  {said}\n"


def walked(params: Any, key: jax.Array) -> Evaluation:
    """Score a strategy of `counting` by how far it has walked."""
    return Evaluation(np.array([float(params.walk)]), np.array([1]), np.array([True]))


def size_of(params: Any, key: jax.Array) -> Evaluation:
    """Score a policy by the size of its parameters, which grows as it learns: all biases begin at 0."""
    total = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(params))
    return Evaluation(np.array([round(total, 6)]), np.array([1]), np.array([True]))


@pytest.mark.every_day("pbt")
@pytest.mark.parametrize("search", [jaxrl.PBT(40), jaxrl.Halving(2, first=0.5)], ids=["pbt", "halving"])
def test_a_member_whose_patience_ends_where_the_search_decides_stays_as_it_is(search: Any, tmp_path: Path) -> None:
    """Member 0 does not learn: it is the worst of all after 40 steps, where its patience ends as well."""
    population = jaxrl.population(small_dqn(), sweep={"agent.lr": [1e-30, 1e-3, 1e-2]}, search=search)
    settings = {**LENGTH, "patience": 1, "confirm_best": False, "evaluator": size_of, "quiet": True}
    result = Trainer(population, **settings, run_dir=tmp_path / "run").train()
    ended = result.members[0]
    assert (ended.status, ended.values, ended.parent) == ("patience", {"agent.lr": 1e-30}, None)
    assert max(m.result.summary["opt_steps"] for m in result.members if m.result) > 40
    assert lineage(tmp_path / "run") == []
    assert settings_and_state(tmp_path / "run/members/00000") == (1e-30, 1e-30, np.float32(1e-30))
    for count, _ in enumerate(Trainer(population, **settings, run_dir=tmp_path / "cut")):
        if count == 5:  # all have been evaluated after 40 steps, and nothing is decided
            break
    for run in (tmp_path / "cut", tmp_path / "run"):
        assert told(Trainer(population, **settings, run_dir=run, resume=True).train()) == told(result)


@pytest.mark.slow
def test_in_memory_a_search_goes_on_to_the_same_end() -> None:
    whole = Trainer(made(PBT), **LENGTH, quiet=True).train()
    trainer = Trainer(made(PBT), **{**LENGTH, "max_opts": 40}, quiet=True)
    trainer.train()
    assert told(trainer.train(max_opts=80)) == told(whole)


def test_in_memory_a_loop_that_is_left_at_once_keeps_the_training_of_every_member() -> None:
    population = jaxrl.population(counting(), seeds=2, search=jaxrl.Halving(2, first=0.5))
    length = {"max_opts": 8, "eval_interval": 1, "confirm_best": False}
    trainer = Trainer(population, **length, evaluator=ByStep(range(8)), quiet=True, workers=1)
    for _, report in trainer:
        if report.opt_steps == 3:
            break
    for number, report in trainer:
        assert (number, report.opt_steps) == (0, 3)
        break
    first = dict[int, int]()
    for number, report in trainer:
        first.setdefault(number, report.opt_steps)
    assert first == {0: 3, 1: 2}


@pytest.mark.slow
def test_alone_without_a_gate_no_bit_of_a_member_changes(tmp_path: Path) -> None:
    """Halving ends members, and does nothing to the others."""
    free = Trainer(made(None), **LENGTH, quiet=True).train()
    halved = Trainer(made(jaxrl.Halving(2)), **LENGTH, run_dir=tmp_path / "run", quiet=True).train()
    assert [m.status for m in halved.members].count("halved") == 3  # 5 -> 3 after 20, -> 2 after 40
    for a, b in zip(free.members, halved.members, strict=True):
        if b.status == "max_opts":
            assert state_digest(a.result.state) == state_digest(b.result.state)
    ended = [m for m in halved.members if m.status == "halved"]
    assert sorted(m.result.summary["opt_steps"] for m in ended if m.result) == [20, 20, 40]
    again = Trainer(made(jaxrl.Halving(2)), **LENGTH, run_dir=tmp_path / "run", quiet=True, resume=True).train()
    assert told(again) == told(halved)
    for member in ended:
        assert jaxrl.load_policy(tmp_path / "run", member=member.number)(np.zeros(4)) in (0, 1)


def checkpoints(run: Path) -> dict[str, str]:
    """Return the digest of every checkpoint of every member."""
    found = {}
    for number in read_members(run):
        member = member_dir(run, number)
        store = open_store(member, CHECKPOINTS)
        for step in store.steps():
            found[f"{member.name} {step}"] = digest(store.read(step)[0])
    return found


def adoptions(run: Path) -> list[tuple[int, int]]:
    """Return which member says that it took over, and at which optimisation step."""
    rows = [(number, row) for number in range(5) for row in rows_in(run, number)]
    return [(number, row["opt_steps"]) for number, row in rows if row.get("event") == "adopted"]


def digits_of(params: Any, key: jax.Array) -> Evaluation:
    """Score a policy by the later digits of a sum, so that no two members are equals, and all take over in turn."""
    total = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(params))
    return Evaluation(np.array([1e4 * total % 1.0]), np.array([1]), np.array([True]))


SAVED = {**LENGTH, "save_interval": 20, "keep": 4, "quiet": True, "evaluator": digits_of}
"""Members save at every gate, as well as at the end, and keep all of it."""


class Searched(NamedTuple):
    """A search that went to its end undisturbed, for all tests to compare with and none to change."""

    population: Population
    run: Path
    checkpoints: dict[str, str]
    adoptions: list[tuple[int, int]]

    def cut(self, gate: int, to: Path) -> Path:
        """Copy it as a kill leaves it behind a gate, before any member has saved again."""
        shutil.copytree(self.run, to)
        for save in to.glob("checkpoints/*"):
            rows = json.loads((save / "manifest.json").read_text())["facts"]["rows"]
            if any(row["step"] > gate for row in rows):
                shutil.rmtree(save)
        return to

    def go_on(self, run: Path) -> None:
        Trainer(self.population, **SAVED, run_dir=run, resume=True).train()

    def require_same(self, run: Path) -> None:
        assert checkpoints(run) == self.checkpoints
        assert lineage(run) == lineage(self.run)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Five members with gates at 20, 40 and 60."""
    population, run = made(PBT), tmp_path_factory.mktemp("searched") / "run"
    Trainer(population, **SAVED, run_dir=run).train()
    taken = adoptions(run)
    assert {step for _, step in taken} == {20, 40, 60}
    assert any((name, step + 20) in taken for name, step in taken), "a member that takes over twice in a row"
    return Searched(population, run, checkpoints(run), taken)


def test_a_member_that_takes_over_is_its_parent_with_other_settings_and_randomness(searched: Searched) -> None:
    keys = []
    for row in lineage(searched.run):
        step, parent = row["opt_steps"], row["parent"]
        stores = (open_store(member_dir(searched.run, number), CHECKPOINTS) for number in (row["member"], parent))
        own, other = (store.read(step)[0] for store in stores)
        for path in own:
            if path.startswith("state/agent/params/"):
                np.testing.assert_array_equal(own[path], other[path])
        assert own["state/agent/hyper/lr"] == np.float32(row["values"]["agent.lr"])
        keys += [array.tobytes() for path, array in own.items() if path.startswith("state/key")]
        told = json.dumps(rows_in(searched.run, row["member"]))
        assert f"goes on as member {parent} stood after {step} optimisation steps" in told
    assert len(keys) == len(lineage(searched.run)) > 4
    assert len(set(keys)) == len(keys), "members share a seed, but none that took over shares a stream"


@pytest.mark.every_day("40")
@pytest.mark.parametrize("gate", [20, 40, 60])
def test_killed_behind_a_gate_before_anyone_saves_again_it_comes_to_the_same_bits(
    searched: Searched, gate: int, tmp_path: Path
) -> None:
    run = searched.cut(gate, tmp_path / "run")
    searched.go_on(run)
    searched.require_same(run)
    assert adoptions(run) == searched.adoptions


@pytest.mark.filterwarnings("ignore:.*eval_episodes.jsonl. cannot be read")
def test_scores_at_gates_outlive_the_logs_of_members(searched: Searched, tmp_path: Path) -> None:
    run = searched.cut(60, tmp_path / "run")
    for log in ("metrics.jsonl", "eval_episodes.jsonl"):
        (run / log).unlink()
    with pytest.warns(UserWarning, match=r"metrics.jsonl: cannot be read"):
        searched.go_on(run)
    searched.require_same(run)


@pytest.mark.slow
def test_rows_under_another_members_number_are_told_and_all_go_on_as_themselves(
    searched: Searched, tmp_path: Path
) -> None:
    run = searched.cut(60, tmp_path / "run")
    log = (run / "metrics.jsonl").read_text()
    for old, new in ((0, 9), (2, 0), (9, 2)):
        log = log.replace(f'{{"member": {old}, ', f'{{"member": {new}, ')
    (run / "metrics.jsonl").write_text(log)
    with pytest.warns(UserWarning, match=r"members/0000[02]: metrics.jsonl: .*recorded in the newest checkpoint"):
        searched.go_on(run)
    assert checkpoints(run) == searched.checkpoints


ARGS = (
    *("ppo", "--num-envs", "2", "--rollout", "8", "--epochs", "1", "--minibatches", "1", "--agent.features", "4"),
    *("--eval-interval", "20", "--eval-episodes", "2", "--save-interval", "20", "--max-opts", "400", "--members", "4"),
    *("--sweep", "agent.lr=log_uniform(1e-4,1e-1)", "--pbt", "20", "share=0.5"),
)


@pytest.mark.slow
def test_killed_inside_generations_it_comes_to_the_same_bits(tmp_path: Path) -> None:
    assert train.main([*ARGS, "--quiet", "--run-dir", str(tmp_path / "whole")]) == 0
    run, rng = tmp_path / "killed", np.random.default_rng(0)
    command = [sys.executable, "-m", "jaxrl.train", *ARGS, "--run-dir", str(run)]
    for _ in range(10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
        begun = time.monotonic()
        while not list(run.glob("checkpoints/*")) and time.monotonic() - begun < 120:
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 4.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        command = [sys.executable, "-m", "jaxrl.train", "--resume", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole, killed = (json.loads((path / "metadata.json").read_text())["table"] for path in (tmp_path / "whole", run))
    assert killed == whole
    assert lineage(run) == lineage(tmp_path / "whole")


@pytest.mark.slow
def test_a_member_that_is_taken_out_is_trained_anew_unless_it_had_taken_over(
    searched: Searched, tmp_path: Path
) -> None:
    taken = {number for number, step in searched.adoptions if step < 60}
    for number in (min({*range(5)} - taken), min(taken)):
        run = searched.cut(60, tmp_path / str(number))
        without_line(run / "members.jsonl", number)
        if number not in taken:
            searched.go_on(run)
            searched.require_same(run)
            continue
        with pytest.raises(
            StorageError, match=rf"member {number} took over from member \d .*no checkpoint of that is left"
        ):
            searched.go_on(run)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [jaxrl.dqn, jaxrl.ppo, jaxrl.sac])
def test_every_setting_of_an_agent_that_can_be_swept_can_be_moved(maker: object) -> None:
    env = jaxrl.make_env("Pendulum-v1" if maker is jaxrl.sac else "CartPole-v1")
    compose = jaxrl.on_policy if maker is jaxrl.ppo else jaxrl.off_policy
    strategy = compose(env, maker(features=(4,)))
    known = jaxrl.sweepable(strategy)
    state = jax.eval_shape(strategy.init, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.full(x.shape, 0.123, np.float32) if x.dtype == np.float32 else x, state)
    for name, value in known.items():
        if not (name.startswith("agent.") or name == "processor.discount"):
            continue
        new = value * 0.5 or 0.5
        (member,) = jaxrl.population(strategy, sweep={name: [value or 0.25]}).members
        after = jax.tree.leaves(set_values(member, zeros, {name: new}))
        assert any(np.shape(x) == () and np.asarray(x) == np.float32(new) for x in after if hasattr(x, "dtype")), name


@pytest.mark.parametrize(
    ("search", "length", "error"),
    [
        (PBT, {"eval_interval": 0}, "pbt goes by evaluations"),
        (PBT, {"eval_interval": 15}, "interval 20 is not a multiple of eval_interval 15.* 15 or 30"),
        (jaxrl.PBT(80), {}, "pbt has no evaluation to decide at before the end at 80"),
        (jaxrl.PBT(40), {"max_env_steps": 160}, "pbt has no evaluation to decide at before the end at 24"),
        (jaxrl.Halving(3), {"eval_episodes": 0, "eval_interval": 0}, "halving goes by evaluations"),
    ],
)
def test_a_search_without_scores_is_refused(search: object, length: dict, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        Trainer(made(search), **{**LENGTH, **length})


def test_members_that_cannot_take_each_others_places_are_refused() -> None:
    with pytest.raises(SettingsError, match="halving chooses among members, and there is one"):
        Trainer(made(jaxrl.Halving(), members=1), **LENGTH)
    single = ARGS[: ARGS.index("--members")]
    for population, said in (
        (["--sweep", "rollout=8,16", "--pbt", "20"], "pbt cannot change rollout"),
        (["--seeds", "4", "--pbt", "20"], "pbt changes swept settings, and none is"),
        (["--seeds", "4", "--sweep", "agent.activation=tanh", "--pbt", "20"], "pbt cannot change agent.activation on"),
    ):
        with pytest.raises(SettingsError, match=said):
            train.main([*single, *population])


def test_an_initial_value_of_what_is_learnt_is_swept_but_not_changed_on_the_way() -> None:
    swing, pole = jaxrl.make_env("Pendulum-v1"), jaxrl.make_env("CartPole-v1")
    learnt, fixed = (jaxrl.sac(features=(4,), learn_temperature=learns) for learns in (True, False))
    off, on = (lambda agent: jaxrl.off_policy(swing, agent)), jaxrl.on_policy(pole, jaxrl.reppo(features=(4,)))
    for strategy, names in ((off(learnt), ["temperature"]), (on, ["temperature", "kl_weight"])):
        for name in names:
            sweep = {"agent.lr": [1e-4, 1e-3], f"agent.{name}": [0.01, 0.1]}
            Trainer(jaxrl.population(strategy, sweep=sweep), **LENGTH)
            with pytest.raises(SettingsError, match=rf"pbt cannot change agent\.{name} on the way: it is only"):
                Trainer(jaxrl.population(strategy, sweep=sweep, search=PBT), **LENGTH)
    sweep = {"agent.temperature": [0.01, 0.1], "agent.target_entropy": [-1.0, -0.5]}
    Trainer(jaxrl.population(off(fixed), sweep=sweep, search=PBT), **LENGTH)


def test_the_rungs_of_a_run_stay_where_they_were(tmp_path: Path) -> None:
    population = jaxrl.population(counting(), seeds=4, search=jaxrl.Halving(2))
    settings = {"eval_interval": 20, "evaluator": walked, "run_dir": tmp_path / "run", "quiet": True}
    trainer = Trainer(population, **settings, max_opts=80)
    trainer.train()
    with pytest.raises(SettingsError, match="max_opts is 160, but the rungs of this population follow from 80"):
        trainer.train(max_opts=160)
    for other, said in (
        ({"max_opts": 160}, "max_opts is 160, but the rungs of .* follow from 80"),
        ({"max_env_steps": 70}, "max_env_steps is 70, but the rungs of .* follow from 0"),
        ({"eval_interval": 30}, "eval_interval is 30, but the rungs of .* follow from 20"),
    ):
        with pytest.raises(SettingsError, match=said):
            Trainer(population, **{**settings, "max_opts": 80, **other}, resume=True).train()


@pytest.mark.parametrize("search", [jaxrl.PBT(20), jaxrl.Halving(2)], ids=["pbt", "halving"])
def test_a_search_goes_on_with_the_rules_by_which_members_end(search: Any, tmp_path: Path) -> None:
    population = jaxrl.population(walking(never), sweep={"agent.lr": [0.01, 0.02, 0.03, 0.5]}, search=search)
    settings = {"max_opts": 80, "eval_interval": 20, "evaluator": walked, "run_dir": tmp_path / "run", "quiet": True}
    ends = {"stop_reward": 5.0, "patience": 3}
    whole = Trainer(population, **settings, **ends).train()
    for other, said in (
        ({"stop_reward": None}, f"stop_reward is None, but {search.name} in .*run has decided with 5.0; keep it"),
        ({"patience": 0}, f"patience is 0, but {search.name} in .*run has decided with 3; keep it"),
    ):
        with pytest.raises(SettingsError, match=said):
            Trainer(population, **settings, **{**ends, **other}, resume=True, allow_changes=True).train()
    assert told(Trainer(population, **settings, **ends, resume=True).train()) == told(whole)


def test_halving_ends_members_before_the_limit_of_environment_steps_does() -> None:
    """Of 4 members 2 go on after a quarter of the 40 steps that they have, and 1 after half of them."""
    population = jaxrl.population(counting(), seeds=4, search=jaxrl.Halving(2))
    length = {"max_opts": 1_000, "max_env_steps": 40, "eval_interval": 10}
    result = Trainer(population, **length, evaluator=walked, quiet=True).train()
    ends = sorted((m.result.summary["opt_steps"], m.status) for m in result.members if m.result)
    assert ends == [(10, "halved"), (10, "halved"), (20, "halved"), (40, "max_env_steps")]


@pytest.mark.parametrize("search", [None, jaxrl.Halving(2)], ids=["stop_reward", "halving"])
def test_killed_before_the_checkpoint_of_its_end_is_on_disk_a_member_comes_to_that_end(
    search: Any, tmp_path: Path
) -> None:
    """At 0.5 a step the last member walks 10 in 20 steps; halving ends two after 20 steps, and another after 40."""
    population = jaxrl.population(walking(never), sweep={"agent.lr": [0.01, 0.02, 0.03, 0.5]}, search=search)
    length = {"max_opts": 80, "eval_interval": 10, "save_interval": 15, "confirm_best": False}
    settings = {**length, "evaluator": walked, "quiet": True, "stop_reward": 9.0 if search is None else None}
    run = tmp_path / "run"
    whole = Trainer(population, **settings, run_dir=run).train()
    ends = lambda result: [(m.status, m.result.summary["opt_steps"], m.best_score) for m in result.members if m.result]
    assert ("stop_reward" if search is None else "halved", 20) in [(status, steps) for status, steps, _ in ends(whole)]
    for save in run.glob("checkpoints/*"):  # members.jsonl, written before each save, knows of the ends already
        rows = json.loads((save / "manifest.json").read_text())["facts"]["rows"]
        if any(row["step"] % 15 for row in rows):
            shutil.rmtree(save)
    assert told(Trainer(population, **settings, run_dir=run, resume=True).train()) == told(whole)
    assert ends(whole) == ends(Trainer(population, **settings, run_dir=run, resume=True).train())


# --- members that go back -----------------------------------------------------------------------------------------


class Walker(NamedTuple):
    key: jax.Array
    walk: jax.Array
    lr: jax.Array
    tries: jax.Array
    health: Health


def walking(fails: Callable[[Walker, jax.Array], jax.Array]) -> jaxrl.Strategy:
    """Walk by the learning rate in each step, after a rollback back by 1; diverge where it `fails` after a step."""
    init = lambda key: Walker(key, jnp.float32(0), tunable("agent.lr", 0.5), jnp.int32(0), init_health())

    def step(state: Walker, key: jax.Array, t: jax.Array) -> tuple[Walker, dict]:
        in_a_row = jnp.where(fails(state, t + 1), state.health.skipped_in_a_row + 1, 0)
        most = jnp.maximum(in_a_row, state.health.most_in_a_row)
        health = Health(in_a_row, state.health.bad_name, most, jnp.uint32(t))
        return state._replace(walk=state.walk + jnp.where(state.tries, -1.0, state.lr), health=health), {"t": t}

    state_fns = jaxrl.StateFns(
        get_health,
        lambda state, number: reseed(state, number)._replace(tries=jnp.int32(number)),
        lambda state: state._replace(lr=tunable("agent.lr", 0.5)),
    )
    return jaxrl.Strategy(init, step, 1, 1, state_fns=state_fns)


def never(state: Walker, steps: jax.Array) -> jax.Array:
    return jnp.bool_(False)


def three(fails: Callable[[Walker, jax.Array], jax.Array]) -> Population:
    """Return three members, of which the first takes over from the last after 4 steps, with the second's rate."""
    search = jaxrl.PBT(4, share=0.34, resample=0.0, factors=(0.5,))
    return jaxrl.population(walking(fails), sweep={"agent.lr": [0.125, 0.25, 0.5]}, search=search)


BACK = {"max_opts": 8, "eval_interval": 4, "max_skips": 1, "evaluator": walked, "confirm_best": False, "quiet": True}


def test_a_member_goes_back_to_where_it_took_over_and_no_further(tmp_path: Path) -> None:
    """Whatever `save_interval`."""
    population, run = three(lambda state, steps: (steps > 4) & (state.tries == 0)), tmp_path / "run"
    result = Trainer(population, **BACK, save_interval=3, run_dir=run).train()
    assert result.members[0].parent == 2
    back = [row["opt_steps"] for number in range(3) for row in rows_in(run, number) if row.get("event") == "rollback"]
    assert back == [4, 3, 3]


def test_a_member_goes_back_to_where_it_took_over_from_one_that_had_just_skipped_an_update(tmp_path: Path) -> None:
    """The last skips the fourth update; the first, then at 2.0 with its rate halved, diverges there once."""
    at_its_parent = lambda state, steps: (steps > 4) & (state.lr == 0.25) & (state.walk >= 2.0) & (state.tries == 0)
    population = three(lambda state, steps: ((steps == 4) & (state.lr == 0.5)) | at_its_parent(state, steps))
    settings = {**BACK, "max_skips": 2, "save_interval": 3, "run_dir": tmp_path / "run"}
    member = Trainer(population, **settings).train().members[0]
    back = [row["opt_steps"] for row in rows_in(tmp_path / "run", 0) if row.get("event") == "rollback"]
    assert (member.parent, back) == (2, [4])
    assert member.result.state.walk == 2.0 - 4 * 1.0


def test_in_memory_a_member_that_begins_again_has_the_settings_that_it_took_over() -> None:
    result = Trainer(three(lambda state, steps: (steps > 4) & (state.tries == 0)), **BACK).train()
    for member in result.members:
        assert member.result is not None
        assert member.result.summary["rollbacks"] == 1
        assert member.values["agent.lr"] == member.result.state.lr
    assert [member.parent for member in result.members] == [2, None, None]


def test_scores_at_gates_outlive_a_member_that_goes_back_and_then_diverges(tmp_path: Path) -> None:
    """The last is the best after 4 steps, goes back to 3, is the worst of all after 4, and diverges."""
    population = three(lambda state, steps: (steps > 4) & (state.lr == 0.5))
    settings = {**BACK, "save_interval": 3, "max_rollbacks": 1, "run_dir": tmp_path / "run"}
    result = Trainer(population, **settings).train()
    outcome = lambda result: [(m.status, m.values["agent.lr"], m.parent) for m in result.members]
    assert outcome(result) == [("max_opts", 0.25, 2), ("max_opts", 0.25, None), ("diverged", 0.5, None)]
    assert outcome(Trainer(population, **settings, resume=True).train()) == outcome(result)
