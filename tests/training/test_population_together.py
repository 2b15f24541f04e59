"""Members in one program: close to the runs alone, the same bits over repeats and resumptions, independent."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_population import LENGTH, digests
from toys_runs import rows_about_all
from toys_trainer import counting, small_dqn

import jaxrl
from jaxrl.cli.config import parse
from jaxrl.strategies.population import Population, PopulationLayout, resolve_layout
from jaxrl.training.evaluator import CompiledEvaluator
from jaxrl.training.loop import Trainer
from jaxrl.training.population.scores import PopulationResult
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS, member_dir
from jaxrl.xla import forms

SWEEP = {"agent.lr": [1e-2, 1e-3]}
STRATEGY = small_dqn()
"""One for all tests, compiled once."""


def made(layout: str = "together") -> Population:
    return jaxrl.population(STRATEGY, seeds=2, sweep=SWEEP, layout=layout)


def train(layout: str = "together", **how: Any) -> PopulationResult:
    result: PopulationResult = Trainer(made(layout), quiet=True, **{**LENGTH, **how}).train()
    return result


@pytest.fixture(scope="module")
def whole() -> PopulationResult:
    return train()


def require_close(one: PopulationResult, other: PopulationResult) -> None:
    """Fail unless members are the same but for rounding, which the product of several at once does otherwise."""
    for a, b in zip(one.members, other.members, strict=True):
        ours, theirs = a.result.state, b.result.state
        for x, y in zip(*(jax.tree.leaves(state.agent.params) for state in (ours, theirs)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(*(jax.random.key_data(state.key) for state in (ours, theirs)))
        assert a.result.summary["opt_steps"] == b.result.summary["opt_steps"]


@pytest.mark.slow
def test_members_are_close_to_the_runs_that_they_would_be_alone(whole: PopulationResult) -> None:
    """After 60 updates, from the same randomness."""
    require_close(whole, train("spread"))


def spoil(number: int) -> dict[str, Any]:
    """Return settings by which a member gets parameters that are no numbers between its saves after 20 and 40 steps."""
    still = [number]

    def look(trainer: Any, row: dict[str, Any]) -> None:
        if row["opt_steps"] == 30 and int(Path(trainer.config.run_dir).name) in still:
            still.clear()
            nan = jax.tree.map(lambda x: x * np.nan, trainer.state.agent.params)
            trainer.state = trainer.state._replace(agent=trainer.state.agent._replace(params=nan))

    return {"hooks": jaxrl.Hooks(record=look), "record_interval": 30, "max_skips": 3}


def test_one_that_goes_back_to_a_checkpoint_catches_up_and_changes_no_other(
    whole: PopulationResult, tmp_path: Path
) -> None:
    result = train(**spoil(3), run_dir=tmp_path / "run")
    assert digests(result)[:3] == digests(whole)[:3]
    assert digests(result)[3] != digests(whole)[3]
    last = result.members[3].result
    assert (last.summary["opt_steps"], last.summary["rollbacks"]) == (60, 1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(last.state.agent.params))


def test_one_that_diverges_is_frozen_and_the_others_go_on(whole: PopulationResult, tmp_path: Path) -> None:
    how = {**spoil(1), "max_rollbacks": 0, "run_dir": tmp_path / "run"}
    others = [digest for number, digest in enumerate(digests(whole)) if number != 1]
    for resume in (False, True):  # it stays so
        result = train(**how, resume=resume)
        assert [member.status for member in result.members] == ["max_opts", "diverged", "max_opts", "max_opts"]
        assert result.members[1].result is None
        assert digests(result) == others


def test_those_that_stop_keep_and_save_what_they_had_and_the_others_go_on(
    whole: PopulationResult, tmp_path: Path
) -> None:
    ends = iter([True, False, True, False])
    stop = lambda report: report.opt_steps == 20 and next(ends)
    result = train(stop=stop, workers=1, run_dir=tmp_path / "run")
    at_20 = digests(train(max_opts=20))
    opts = [member.result.summary["opt_steps"] for member in result.members if member.result is not None]
    assert sorted(opts) == [20, 20, 60, 60]
    expected = [(at_20 if steps == 20 else digests(whole))[number] for number, steps in enumerate(opts)]
    assert digests(result) == expected
    for number, steps in enumerate(opts):
        store = open_store(member_dir(tmp_path / "run", number), CHECKPOINTS)
        assert store.steps()[-1] == steps
        weights = store.read(steps)[0]["state/agent/params/params/Dense_0/kernel"]
        state = result.members[number].result.state
        assert np.array_equal(weights, state.agent.params["params"]["Dense_0"]["kernel"])


@pytest.mark.slow
def test_a_search_decides_as_before_and_copies_are_exact() -> None:
    how = {"seeds": 4, "sweep": {"agent.lr": [1e-3]}, "layout": "together"}
    searched = lambda search: Trainer(jaxrl.population(STRATEGY, **how, search=search), **LENGTH, quiet=True).train()
    halved = searched(jaxrl.Halving(2))
    assert sorted(m.status for m in halved.members) == ["halved"] * 3 + ["max_opts"]
    assert sorted(m.result.summary["opt_steps"] for m in halved.members) == [20, 20, 40, 60]
    copied = [searched(jaxrl.PBT(20, share=0.5)) for _ in range(2)]
    assert digests(copied[0]) == digests(copied[1])
    assert len(set(digests(copied[0]))) == 4
    assert [m.parent for m in copied[0].members] == [m.parent for m in copied[1].members]


@pytest.mark.slow
def test_a_width_trains_so_many_at_a_time_and_the_rest_after(capsys: pytest.CaptureFixture[str]) -> None:
    members = jaxrl.population(STRATEGY, seeds=3, layout="together", width=2)
    result = Trainer(members, **{**LENGTH, "max_opts": 20}).train()
    assert "2 at a time (together)" in capsys.readouterr().out
    assert len(set(digests(result))) == 3


def test_an_evaluation_is_compiled_once_for_all_programs_of_a_strategy() -> None:
    traces = []

    def evaluate(state: Any, key: jax.Array) -> tuple[Any, ...]:
        traces.append(state)
        return state.walk[None], state.steps[None], jnp.ones(1, bool), {}

    counts, scores = [], []
    for width in (4, 1):
        members = jaxrl.population(counting(), seeds=4, layout="together", width=width)
        length = {"max_opts": 4, "eval_interval": 2, "confirm_best": False, "quiet": True}
        result = Trainer(members, **length, evaluator=CompiledEvaluator(evaluate)).train()
        scores.append([(m.last_score, m.last_score == m.result.state.walk) for m in result.members if m.result])
        counts.append(len(traces) - sum(counts))
    assert counts[0] == counts[1]
    assert scores[0] == scores[1]
    assert all(is_own for _, is_own in scores[0])


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


def test_stopped_anywhere_it_goes_on_to_the_same_bits(whole: PopulationResult, tmp_path: Path) -> None:
    """The first that has made 7 iterations asks all to stop; others may be a call behind."""
    stop = jaxrl.Interrupt()
    hooks = jaxrl.Hooks(chunk=lambda trainer, _: stop.stop("enough") if trainer.ledger.t >= 7 else None)
    cut = train(run_dir=tmp_path / "run", max_chunk=5, hooks=hooks, interrupt=stop)
    assert {member.status for member in cut.members} == {"enough"}
    gone_on = train(run_dir=tmp_path / "run", max_chunk=7, resume=True)
    assert digests(gone_on) == digests(whole)
    assert [m.last_score for m in gone_on.members] == [m.last_score for m in whole.members]
    assert [row["opt_steps"] for row in rows_about_all(tmp_path / "run")] == [20, 40, 60]


@pytest.mark.slow
def test_ppo_trains_together_as_well_close_to_alone_and_the_same_again() -> None:
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,)), num_envs=2, rollout=8, epochs=1, minibatches=2
    )
    length = {"max_opts": 12, "eval_interval": 6, "eval_episodes": 2, "quiet": True}
    layouts = ("together", "together", "spread")
    members = [jaxrl.population(strategy, seeds=3, layout=layout) for layout in layouts]
    once, again, alone = (Trainer(population, **length).train() for population in members)
    assert digests(once) == digests(again)
    assert len(set(digests(once))) == 3
    require_close(once, alone)


DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 3)
import jaxrl
from toys_trainer import small_dqn
from jaxrl.training.storage.leaves import state_digest
length = {"max_opts": 20, "eval_interval": 20, "eval_episodes": 3, "quiet": True}
longer = {**length, "max_opts": 40}
made = jaxrl.population(small_dqn(), seeds=5, layout="together", width=2)
told = lambda result: [(state_digest(m.result.state), m.last_score) for m in result.members]
for devices in (1, 3):
    print(told(jaxrl.Trainer(made, **length, devices=devices).train()))
jaxrl.Trainer(made, **length, devices=3, run_dir=sys.argv[2]).train()
print(told(jaxrl.Trainer(made, **longer, devices=2, run_dir=sys.argv[2], resume=True).train()))
print(told(jaxrl.Trainer(made, **longer).train()))
for layout, devices in (("together", 3), ("spread", 4)):
    try:
        jaxrl.Trainer(jaxrl.population(small_dqn(), seeds=5, layout=layout), **length, devices=devices)
    except jaxrl.SettingsError as error:
        print(error)
"""


@pytest.mark.slow  # of members that are spread, reliability/test_shards does it
def test_bits_of_a_member_do_not_depend_on_the_number_of_devices(tmp_path: Path) -> None:
    """Not where it runs on one or on three, nor where it begins on three and is resumed on two."""
    command = [sys.executable, "-c", DEVICES, str(Path(__file__).parents[1]), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on_1, on_3, resumed, at_once, one_program, missing = done.stdout.splitlines()
    assert on_1 == on_3
    assert resumed == at_once != on_1
    assert "members train together in 1 program, each on one device; set width to 1" in one_program
    assert missing.startswith("devices is 4, but JAX has 3 here")
