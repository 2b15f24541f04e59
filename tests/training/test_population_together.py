"""Members in one program: close to the runs alone, the same bits over repeats and resumptions, independent."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_runs import rows_in
from toys_trainer import small_dqn

import jaxrl
from jaxrl.cli.config import parse
from jaxrl.strategies.population import PopulationLayout, resolve_layout
from jaxrl.training.population.scores import PopulationResult
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.trainer import Trainer
from jaxrl.xla import forms

LENGTH = {"max_opts": 60, "eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "save_interval": 20}
SWEEP = {"agent.lr": [1e-2, 1e-3]}
STRATEGY = small_dqn()
"""One for all tests, compiled once."""


def train(layout: str = "together", sweep: Any = None, **how: Any) -> PopulationResult:
    made = jaxrl.population(STRATEGY, seeds=2, sweep=sweep or SWEEP, layout=layout)
    result: PopulationResult = Trainer(made, quiet=True, **{**LENGTH, **how}).train()
    return result


def digests(result: PopulationResult) -> list[str]:
    return [state_digest(member.result.state) for member in result.members if member.result is not None]


@pytest.fixture(scope="module")
def whole() -> PopulationResult:
    return train()


@pytest.mark.slow
def test_members_are_close_to_the_runs_that_they_would_be_alone(whole: PopulationResult) -> None:
    """After 60 updates, from the same randomness: all that rounds otherwise is the product of several at once."""
    alone = train("spread")
    for one, other in zip(whole.members, alone.members, strict=True):
        assert one.result is not None
        assert other.result is not None
        pairs = zip(*(jax.tree.leaves(r.result.state.agent.params) for r in (one, other) if r.result), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        key = lambda r: np.asarray(jax.random.key_data(r.state.key))
        np.testing.assert_array_equal(key(one.result), key(other.result))
        assert one.result.summary["opt_steps"] == other.result.summary["opt_steps"] == 60


@pytest.mark.slow
def test_bits_are_the_same_over_repeats_calls_and_resumptions(whole: PopulationResult, tmp_path: Path) -> None:
    assert digests(train(max_chunk=7)) == digests(whole)
    begun = train(max_opts=20, run_dir=tmp_path / "run")
    assert set(digests(begun)).isdisjoint(digests(whole))
    gone_on = train(run_dir=tmp_path / "run", resume=True)
    assert digests(gone_on) == digests(whole)
    assert [m.last_score for m in gone_on.members] == [m.last_score for m in whole.members]
    population = rows_in(tmp_path / "run")
    assert [row["opt_steps"] for row in population if row["kind"] == "population"] == [20, 40, 60]


def test_one_that_goes_back_to_a_checkpoint_catches_up_and_changes_no_other(
    whole: PopulationResult, tmp_path: Path
) -> None:
    """Member 3 gets parameters that are no numbers: its updates are skipped, it goes back to 20, and on from there."""
    made = jaxrl.population(STRATEGY, seeds=2, sweep=SWEEP, layout="together")
    trainer = Trainer(made, **LENGTH, quiet=True, max_skips=3, run_dir=tmp_path / "run")
    for number, report in trainer:
        if (number, report.opt_steps) == (3, 20):
            member = trainer._runs[number].trainer
            assert member is not None
            spoilt = jax.tree.map(lambda x: x * np.nan, member.state.agent.params)
            member.state = member.state._replace(agent=member.state.agent._replace(params=spoilt))
    result = trainer.result()
    assert digests(result)[:3] == digests(whole)[:3]
    assert digests(result)[3] != digests(whole)[3]
    last = result.members[3].result
    assert last is not None
    assert (last.summary["opt_steps"], last.summary["rollbacks"]) == (60, 1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(last.state.agent.params))


def test_one_that_stops_keeps_what_it_had_and_the_others_go_on(whole: PopulationResult) -> None:
    short = digests(train(max_opts=20))
    made = jaxrl.population(STRATEGY, seeds=2, sweep=SWEEP, layout="together")
    trainer = Trainer(made, **LENGTH, quiet=True)
    stopped = None
    for number, report in trainer:
        if stopped is None and report.opt_steps == 20:
            stopped = number
            member = trainer._runs[number].trainer
            assert member is not None
            member.interrupt = jaxrl.Interrupt()
            member.interrupt.stop("enough")
    found = digests(trainer.result())
    assert stopped is not None
    for number, digest in enumerate(found):
        assert digest == (short if number == stopped else digests(whole))[number]


@pytest.mark.slow
def test_a_search_decides_as_before_and_copies_are_exact() -> None:
    how = {"seeds": 4, "sweep": {"agent.lr": [1e-3]}, "layout": "together"}
    made = lambda search: jaxrl.population(STRATEGY, **how, search=search)
    halved = Trainer(made(jaxrl.Halving(2)), **LENGTH, quiet=True).train()
    assert sorted(m.status for m in halved.members) == ["halved"] * 3 + ["max_opts"]
    steps = sorted(m.result.summary["opt_steps"] for m in halved.members)
    assert steps == [20, 20, 40, 60]
    copied = [Trainer(made(jaxrl.PBT(20, share=0.5)), **LENGTH, quiet=True).train() for _ in range(2)]
    assert digests(copied[0]) == digests(copied[1])
    assert len(set(digests(copied[0]))) == 4
    assert [m.parent for m in copied[0].members] == [m.parent for m in copied[1].members]


@pytest.mark.slow
def test_a_width_makes_several_programs_of_which_the_last_is_as_wide() -> None:
    made = jaxrl.population(STRATEGY, seeds=3, layout="together", width=2)
    trainer = Trainer(made, **{**LENGTH, "max_opts": 20}, quiet=True)
    result = trainer.train()
    assert len(trainer._places.teams) == 2
    assert len(set(digests(result))) == 3


def test_the_layout_follows_the_platform_and_is_a_setting(tmp_path: Path) -> None:
    assert resolve_layout("auto", None) == PopulationLayout("spread")
    with forms("cuda"):
        assert resolve_layout("auto", 4) == PopulationLayout("together", 4)
        assert resolve_layout("spread", None) == PopulationLayout("spread")
    run = tmp_path / "run"
    train("spread", max_opts=20, run_dir=run)
    with pytest.raises(jaxrl.SettingsError, match=r"'layout': 'spread'.*not.*'layout': 'together'"):
        train("together", max_opts=40, run_dir=run, resume=True)
    asked = parse(["dqn", "--seeds", "4", "--layout", "together", "--width", "2"]).population
    assert asked == {"seeds": 4, "layout": "together", "width": 2}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"layout": "togehter"}, "layout is 'togehter'; did you mean together?"),
        ({"layout": "spread", "width": 2}, "width is 2, but members are spread, one in each call"),
        ({"layout": "together", "width": 0}, "width is 0; expected a whole number of at least 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: dict, said: str) -> None:
    with pytest.raises(jaxrl.SettingsError) as refused:
        jaxrl.population(STRATEGY, seeds=4, **layout)
    assert said in str(refused.value)


@pytest.mark.parametrize("left", [7, pytest.param(40, marks=pytest.mark.slow)])
def test_stopped_anywhere_it_goes_on_to_the_same_bits(left: int, whole: PopulationResult, tmp_path: Path) -> None:
    """The first that has made `left` iterations asks all to stop; others may be a call behind."""
    stop = jaxrl.Interrupt()
    hooks = jaxrl.Hooks(chunk=lambda trainer, _: stop.stop("enough") if trainer.ledger.t >= left else None)
    made = jaxrl.population(STRATEGY, seeds=2, sweep=SWEEP, layout="together")
    how = {**LENGTH, "quiet": True, "run_dir": tmp_path / "run"}
    cut = Trainer(made, **how, max_chunk=5, hooks=hooks, interrupt=stop).train()
    assert {member.status for member in cut.members} == {"enough"}
    assert digests(train(run_dir=tmp_path / "run", resume=True)) == digests(whole)


def test_one_that_diverges_is_frozen_and_the_others_go_on(whole: PopulationResult, tmp_path: Path) -> None:
    """Member 1 gets parameters that are no numbers, and may not go back to a checkpoint."""
    made = jaxrl.population(STRATEGY, seeds=2, sweep=SWEEP, layout="together")
    how = {**LENGTH, "quiet": True, "max_skips": 3, "max_rollbacks": 0, "run_dir": tmp_path / "run"}
    trainer = Trainer(made, **how)
    for number, report in trainer:
        if (number, report.opt_steps) == (1, 20):
            member = trainer._runs[1].trainer
            assert member is not None
            spoilt = jax.tree.map(lambda x: x * np.nan, member.state.agent.params)
            member.state = member.state._replace(agent=member.state.agent._replace(params=spoilt))
    others = [digest for number, digest in enumerate(digests(whole)) if number != 1]
    for result in (trainer.result(), Trainer(made, **how, resume=True).train()):  # it stays so
        assert [member.status for member in result.members] == ["max_opts", "diverged", "max_opts", "max_opts"]
        assert result.members[1].result is None
        assert digests(result) == others


@pytest.mark.slow
def test_ppo_trains_together_as_well_close_to_alone_and_the_same_again() -> None:
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,)), num_envs=2, rollout=8, epochs=1, minibatches=2
    )
    made = lambda layout: jaxrl.population(strategy, seeds=3, layout=layout)
    length = {"max_opts": 12, "eval_interval": 6, "eval_episodes": 2, "quiet": True}
    once, again, alone = (Trainer(made(name), **length).train() for name in ("together", "together", "spread"))
    assert digests(once) == digests(again)
    assert len(set(digests(once))) == 3
    for one, other in zip(once.members, alone.members, strict=True):
        assert one.result is not None
        assert other.result is not None
        pairs = zip(*(jax.tree.leaves(r.state.agent.params) for r in (one.result, other.result)), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 3)
import jaxrl
from toys_trainer import small_dqn
from jaxrl.training.storage.leaves import state_digest
strategy = small_dqn()
length = {"max_opts": 20, "eval_interval": 20, "eval_episodes": 3, "quiet": True}
for layout in ({"layout": "spread"}, {"layout": "together", "width": 2}):
    made = jaxrl.population(strategy, seeds=5, **layout)
    for devices in (1, 3):
        result = jaxrl.Trainer(made, **length, devices=devices).train()
        print([state_digest(m.result.state) for m in result.members], [m.last_score for m in result.members])
    longer, where = {**length, "max_opts": 40}, f"{sys.argv[2]}/{layout['layout']}"
    jaxrl.Trainer(made, **length, devices=3, run_dir=where).train()
    on = jaxrl.Trainer(made, **longer, devices=2, run_dir=where, resume=True).train()
    once = jaxrl.Trainer(made, **longer).train()
    print(*([state_digest(m.result.state) for m in result.members] for result in (on, once)), sep=" and ")
for layout, devices in (({"layout": "together"}, 3), ({"layout": "spread"}, 4)):
    try:
        jaxrl.Trainer(jaxrl.population(strategy, seeds=5, **layout), **length, devices=devices)
    except jaxrl.SettingsError as error:
        print(error)
"""


@pytest.mark.slow
def test_bits_of_a_member_do_not_depend_on_the_number_of_devices(tmp_path: Path) -> None:
    """Not where it runs on one or on three, nor where it begins on three and is resumed on two."""
    command = [sys.executable, "-c", DEVICES, str(Path(__file__).parents[1]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spread_1, spread_3, spread_on, together_1, together_3, together_on, *refused = done.stdout.splitlines()
    one_program, missing = refused
    assert spread_1 == spread_3
    assert together_1 == together_3 != spread_1
    for resumed, at_once in (spread_on.split(" and "), together_on.split(" and ")):
        assert resumed == at_once
    assert "members train together in 1 program, each on one device; set width to 1" in one_program
    assert missing.startswith("devices is 4, but JAX has 3 here")
