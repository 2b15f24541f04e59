"""Replay in the host's memory: where it is, the same bits, and what is refused."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from toys_beside import QUIET
from toys_steps import summing

import jaxrl
from jaxrl.training import memory
from jaxrl.training.program import jit_run, state_shapes
from jaxrl.training.storage.leaves import state_digest
from jaxrl.trees import tree_bytes

BUFFERS: dict[str, Any] = {
    "uniform": jaxrl.uniform,
    "by priority": jaxrl.prioritised,
    "compact": lambda *args, **given: jaxrl.uniform(*args, compact=True, **given),
    "frames": lambda *args, **given: jaxrl.prioritised(*args, compact=True, frames=2, **given),
}


def wandering() -> jaxrl.Env:
    """Show four numbers that wander at random, in episodes of nine steps."""

    def step(place: Any, action: Any, key: Any) -> Any:
        place = place + jax.random.normal(key, (4,))
        return place, jaxrl.TimeStep(place, 1.0, False)

    spec = jaxrl.EnvSpec("Wandering", jaxrl.Box(-1e9, 1e9, (4,)), jaxrl.Discrete(2), 9)
    return jaxrl.Env(spec, lambda key: (jax.numpy.zeros(4), jax.numpy.zeros(4)), step)


@cache
def strategy(where: str, kind: str = "uniform", capacity: int = 400) -> jaxrl.Strategy:
    buffer = BUFFERS[kind](capacity, batch_size=16, memory=where)
    stack = jaxrl.frame_stack(2 if kind == "frames" else 1)
    processor = jaxrl.chain(stack, jaxrl.one_step())
    sizes = {"num_envs": 4, "opt_interval": 4, "warmup": 64}
    return jaxrl.off_policy(wandering(), summing, processor=processor, buffer=buffer, **sizes)


def trainer(made: jaxrl.Strategy, **given: Any) -> jaxrl.Trainer:
    return jaxrl.Trainer(made, **{**QUIET, "recorders": [], "max_opts": 120, **given})


def on_host(state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(state.buffer) if x.sharding.memory_kind == "pinned_host"]


@pytest.mark.every_day("compact")
@pytest.mark.parametrize("kind", BUFFERS)
def test_samples_are_those_of_the_device_to_the_bit(kind: str) -> None:
    states = {where: trainer(strategy(where, kind)).train().state for where in ("device", "host")}
    assert state_digest(states["host"]) == state_digest(states["device"])
    assert on_host(states["device"]) == []
    # Of a compact buffer the observations are there, and never the priorities.
    assert tree_bytes(on_host(states["host"])) > 0.5 * 400 * 4 * 4
    assert {x.ndim for x in on_host(states["host"])} == {2}


def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits_and_its_replay_is_there_again(tmp_path: Path) -> None:
    made, run = strategy("host", "compact"), str(tmp_path / "cut")
    whole = trainer(made).train().state
    trainer(strategy("device", "compact"), run_dir=run, max_opts=60).train()  # where replay was before does not matter
    state = trainer(made, run_dir=run, resume=True).train().state
    assert state_digest(state) == state_digest(whole)
    assert len(on_host(state)) == len(on_host(whole)) > 0


def test_a_program_never_copies_it() -> None:
    """Ten thousand transitions take 480 kB, and the program needs far less beside its arguments."""
    made, count = strategy("host", capacity=10_000), jax.ShapeDtypeStruct((), jax.numpy.uint32)
    shapes = state_shapes(made)
    compiled = jit_run(made).lower(*shapes, count, count).compile()
    held = memory.plan_of_state(shapes[0], 10_000).on_host
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < held / 4


def test_the_plan_tells_it_apart_and_refuses_what_the_host_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = (memory.plan_of_state(state_shapes(strategy(where))[0], 400) for where in ("device", "host"))
    assert device.on_host == 0
    assert host.on_host + host.state["buffer"] == device.state["buffer"]
    assert f"replay {memory.readable(host.on_host)} in the host's memory" in str(host)
    monkeypatch.setattr(memory, "host_bytes", lambda: host.on_host // 2)
    monkeypatch.setattr(memory, "device_bytes", lambda: 1 << 40)
    with pytest.raises(jaxrl.SettingsError, match=r"in the host's memory, .* lower buffer.capacity to at most 200$"):
        memory.require_fit(host)
    memory.require_fit(device)


def test_the_plan_of_a_population_has_replay_of_all_members_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = memory.plan_of_state(state_shapes(strategy("host"))[0], 400)
    monkeypatch.setattr(memory, "host_bytes", lambda: 3 * plan.on_host)
    monkeypatch.setattr(memory, "device_bytes", lambda: 1 << 40)
    memory.require_members_fit([[plan] * 2, [plan]])
    with pytest.raises(jaxrl.SettingsError, match=r"^replay of 4 members takes .*; .* train at most 3 members$"):
        memory.require_members_fit([[plan] * 2] * 2)


@pytest.mark.slow
def test_members_of_one_program_learn_from_it() -> None:
    digests, length = [], {"max_opts": 40, "eval_interval": 20, "eval_episodes": 2, "quiet": True}
    for where in ("device", "host"):
        members = jaxrl.population(strategy(where), seeds=2, layout="together")
        states = [member.result.state for member in jaxrl.Trainer(members, **length).train().members]
        digests.append([state_digest(state) for state in states])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
    assert all(on_host(state) for state in states)


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jaxrl
env, agent = jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(8,))
buffer = jaxrl.uniform(400, batch_size=16, memory="host")
strategy = jaxrl.off_policy(env, agent, buffer=buffer, num_envs=4, opt_interval=4, warmup=64)
length = {"max_opts": 40, "eval_interval": 20, "eval_episodes": 2, "quiet": True}
for layout in ({"layout": "spread"}, {"layout": "together", "width": 1}):
    how = {**layout, "seeds": 2, "sweep": {"agent.lr": [1e-3]}, "search": jaxrl.PBT(20, share=0.5)}
    members = jaxrl.Trainer(jaxrl.population(strategy, **how), **length, devices=2).train().members
    held = [[x for x in jax.tree.leaves(m.result.state.buffer) if x.ndim == 2] for m in members]
    print([(x.sharding.memory_kind, x.devices().pop().id) for leaves in held for x in leaves])
    print(sorted(str(m.parent) for m in members))
"""


@pytest.mark.slow
def test_it_is_beside_the_device_of_each_member_and_copies_of_members_keep_it_there() -> None:
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    placed, parents = "[('pinned_host', 0), ('pinned_host', 1)]", ["['0', 'None']", "['1', 'None']"]
    spread, copied, together, copied_together = done.stdout.splitlines()
    assert spread == together == placed
    assert copied in parents
    assert copied_together in parents


def test_another_memory_is_refused_and_so_are_shards_of_it() -> None:
    with pytest.raises(jaxrl.SettingsError, match=r"^buffer.memory is 'disk'; expected device or host$"):
        jaxrl.uniform(400, memory="disk")
    env, buffer = jaxrl.make_env("CartPole-v1"), jaxrl.uniform(400, batch_size=16, memory="host")
    with pytest.raises(jaxrl.SettingsError, match=r"^buffer.memory is host, where replay cannot be divided"):
        jaxrl.off_policy(env, jaxrl.dqn(), buffer=buffer, num_envs=4, opt_interval=4, shards=2)
