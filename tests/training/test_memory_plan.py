"""What a run takes of the memory: planned by hand's arithmetic, told, and refused where it is too much."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_data import walk
from toys_envs import counting
from toys_session import SPEC
from toys_trainer import small_dqn

import jaxrl
from jaxrl.cli.config import preset
from jaxrl.cli.sweeps import PopulationConfig, build_population
from jaxrl.errors import SettingsError
from jaxrl.training import memory
from jaxrl.training.memory import Plan, fitting, largest_rows, plan_of_state
from jaxrl.training.program import check_step

MB = 10**6


def ppo(num_envs: int = 8, rollout: int = 16, ballast: int = 0) -> jaxrl.Strategy:
    env = counting(ballast=ballast)
    return jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=num_envs, rollout=rollout, minibatches=1, epochs=1)


def test_the_nearest_settings_that_fit_are_worked_out_by_hand() -> None:
    """In MB: agent 1, buffer 100 of 1000 transitions, environments 40, an iteration 20, an evaluation 10."""
    state = {"agent": MB, "buffer": 100 * MB, "env": 40 * MB}
    plan = Plan(state, {"random numbers": 20 * MB}, 10 * MB, capacity=1_000)
    assert (plan.state_bytes, plan.extra_bytes, plan.total) == (141 * MB, 20 * MB, 161 * MB)
    assert plan.notes() == [str(plan)]
    assert plan._replace(capacity=None).notes() == []
    assert plan._replace(state={**state, "buffer": MB}).notes() == []  # 62 MB
    block = memory.BLOCK_BYTES
    # A buffer of 100 - 31 = 69 MB; or 29 of the 60 MB that grow with the environments.
    assert fitting(plan, 130 * MB + block, num_envs=60, episodes=10) == {"buffer.capacity": 690, "num_envs": 29}
    # Nothing helps alone.
    assert fitting(plan, 30 * MB + block, num_envs=60, episodes=10) == {}
    # The evaluation is what is too much.
    large = plan._replace(evaluation=50 * MB)
    assert fitting(large, 171 * MB + block, 60, 10)["eval_episodes"] == 6


def test_members_fit_where_those_of_each_device_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sweep of capacities, in MB: 10 and 40, on devices of 60."""
    monkeypatch.setattr(memory, "device_bytes", lambda: 60 * MB)
    small, large = (Plan({"agent": MB, "buffer": (size - 1) * MB}, capacity=100) for size in (10, 40))
    memory.require_members_fit([[small, large, small]])
    memory.require_members_fit([[large, small], [small, large]])
    for plans in ([large, small, small, small], [small, small, small, large]):
        with pytest.raises(
            SettingsError, match=r"takes 70 MB on the device \(up to 40 MB each\), .* at most 1 members"
        ):
            memory.require_members_fit([plans])
    with pytest.raises(SettingsError, match=r"3 members takes 80 MB on one of its 2 devices \(40 MB each\), which has"):
        memory.require_members_fit([[small], [large, large]])


@pytest.mark.slow
def test_members_of_several_sizes_are_counted_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 10 * MB)
    for capacities in ([1_000, 1_000_000], [1_000_000, 1_000]):
        config = preset("dqn").changed(max_opts=20, quiet=True)
        members = build_population("dqn", config, PopulationConfig(sweep={"buffer.capacity": capacities}))
        with pytest.raises(SettingsError, match=r"2 members takes .* \(up to .* each\), which has 10 MB"):
            jaxrl.Trainer(members, max_opts=20, eval_interval=0, eval_episodes=0, quiet=True).train()


def test_what_learns_from_data_is_not_told_to_lower_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 1_000)
    with pytest.raises(SettingsError, match=r"lower the size of the networks, or the number of steps in the data$"):
        check_step(jaxrl.offline(walk(), jaxrl.dqn(features=(8,)), batch_size=4), None, lambda state: state)


def test_the_rows_of_a_rollout_are_counted() -> None:
    def rollout(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (c + 1, (c, c[0])), x, None, length=7)

    assert largest_rows(jax.make_jaxpr(rollout)(jnp.zeros(5))) == 7 * (5 + 1) * 4
    assert largest_rows(jax.make_jaxpr(lambda x: x + 1)(jnp.zeros(5))) == 0


@pytest.mark.every_day("off-policy")
@pytest.mark.parametrize("kind", ["on-policy", "off-policy", "offline"])
def test_every_strategy_has_a_plan_and_tells_it(kind: str, tmp_path: Path) -> None:
    settings = dict[str, Any](max_opts=4, eval_episodes=3, eval_interval=0, quiet=True)
    if kind == "on-policy":
        strategy = ppo()
    elif kind == "off-policy":
        strategy = small_dqn()
    else:
        strategy = jaxrl.offline(walk(), jaxrl.bc(features=(8,)), batch_size=8, holdout=0.5)
    trainer = jaxrl.Trainer(strategy, run_dir=str(tmp_path / "run"), **settings)
    trainer.train()
    told = json.loads((tmp_path / "run" / "metadata.json").read_text())["memory"]
    assert told["iteration"]["the largest array"] > 0
    assert told["state"]["agent"] > 0
    plan = trainer._memory
    assert told == plan.facts()
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert str(plan) not in log  # it is small
    assert (plan.evaluation > 0) is (kind != "offline")  # which is judged by its holdout


def test_a_rollout_that_cannot_fit_is_refused_and_the_number_named_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    large = ppo(num_envs=4_096, rollout=512)
    monkeypatch.setattr(memory, "device_bytes", lambda: 80 * MB)
    with pytest.raises(
        jaxrl.SettingsError, match=r"needs .* but the device has 80 MB: .*the steps it learns from"
    ) as said:
        check_step(large)
    found = re.search(r"lower num_envs to at most (\d+)$", str(said.value))
    assert found is not None
    check_step(ppo(num_envs=int(found[1]), rollout=512))
    with pytest.raises(jaxrl.SettingsError):
        check_step(ppo(num_envs=2 * int(found[1]), rollout=512))


def test_an_evaluation_that_cannot_fit_is_refused_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 40 * MB)
    monkeypatch.setattr("jaxrl.training.loop.compile_all", lambda *args: pytest.fail("it began to compile"))
    with pytest.raises(jaxrl.SettingsError, match=r"an evaluation .*lower eval_episodes to at most \d+$"):
        jaxrl.Trainer(ppo(ballast=10_000), max_opts=4, eval_episodes=4_000, quiet=True).train()


def test_a_run_in_shards_takes_of_each_device_what_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a buffer of 32 MB, 8 MB lie on each of four devices."""

    def on_four(capacity: int) -> jaxrl.Strategy:
        agent, buffer = jaxrl.dqn(features=(8,)), jaxrl.uniform(capacity, batch_size=8)
        made = jaxrl.off_policy(counting(), agent, buffer=buffer, num_envs=8, opt_interval=8, shards=4)
        return made._replace(placement=made.placement._replace(devices=4))

    monkeypatch.setattr(memory, "device_bytes", lambda: 10 * MB)
    plan = check_step(on_four(1_000_000))
    assert (plan.state["buffer"], plan.buffer) == (8 * MB, 32 * MB)
    monkeypatch.setattr(memory, "device_bytes", lambda: 6 * MB)
    with pytest.raises(SettingsError, match=r"needs 8 MB on each of 4 devices, which have 6 MB: .* to at most") as said:
        check_step(on_four(1_000_000))
    most = int(str(said.value).rpartition(" ")[2])
    check_step(on_four(most))
    with pytest.raises(SettingsError):
        check_step(on_four(4 * most))


def test_a_session_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 40 * MB)
    buffer = jaxrl.uniform(10_000_000, batch_size=8)
    with pytest.raises(
        jaxrl.SettingsError, match=r"lower buffer.capacity to at most \d+, or set buffer.memory to host$"
    ):
        jaxrl.Session(SPEC, jaxrl.dqn(features=(8,)), buffer=buffer)
    assert plan_of_state({"agent": jnp.zeros(4)}).total == 16
