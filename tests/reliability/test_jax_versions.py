"""A release of JAX in which something is missing or has another name: a run may be slower, and comes to its end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_trainer import counting

import jaxrl
from jaxrl.xla import options

WALK = """
import builtins

found, plain = set(), builtins.__import__

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__") or ""
    if importer.split(".")[0] == "jaxrl" and not level:
        names = [name, *(f"{name}.{part}" for part in fromlist or ())]
        found.update(f"{importer}: {x}" for x in names if x.startswith(("jax._src", "jax.extend", "jax.experimental")))
    return plain(name, globals, locals, fromlist, level)

builtins.__import__ = watched
import jaxrl

env = jaxrl.make_env("CartPole-v1")
buffer = jaxrl.uniform(64, batch_size=8)
off = jaxrl.off_policy(env, jaxrl.dqn(features=(4,)), buffer=buffer, num_envs=2, opt_interval=2, warmup=8)
on = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=1, minibatches=1)
jaxrl.Trainer(off, max_opts=8, eval_interval=4, eval_episodes=2, run_dir="off", quiet=True).train()
jaxrl.Trainer(on, max_opts=8, eval_interval=0, eval_episodes=0, run_dir="on", quiet=True).train()
print(sorted(found))
"""


@pytest.mark.usefixtures("shared_programs")
def test_a_run_under_plain_forms_imports_what_is_public_of_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_FORMS", "plain")
    done = subprocess.run([sys.executable, "-c", WALK], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


class Renamed:
    """A part of a traced program as another release has it: with other names of the parameters of its equations."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.part, name)
        if name == "params":
            return {f"{key}_of_then": renamed(value) for key, value in found.items()}
        return renamed(found) if name in ("jaxpr", "eqns") else found


def renamed(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(renamed, value))
    return Renamed(value) if hasattr(value, "eqns") or hasattr(value, "primitive") or hasattr(value, "jaxpr") else value


@pytest.fixture
def other_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give whoever reads a traced program one with other names."""
    trace = jax.make_jaxpr

    def make_jaxpr(function: Any, **how: Any) -> Any:
        def traced(*args: Any) -> Any:
            made = trace(function, **how)(*args)
            return (renamed(made[0]), made[1]) if how.get("return_shape") else renamed(made)

        return traced

    monkeypatch.setattr(jax, "make_jaxpr", make_jaxpr)


def drifting() -> jaxrl.Env:
    """An environment of ten steps that draws a number in each."""

    def step(state: Any, action: Any, key: Any) -> tuple[Any, jaxrl.TimeStep]:
        state = state + jax.random.normal(key)
        return state, jaxrl.TimeStep(state[None], -jnp.abs(state), False)

    spec = jaxrl.EnvSpec("drifting", jaxrl.Box(-np.inf, np.inf, (1,)), jaxrl.Discrete(2), 10)
    return jaxrl.Env(spec, lambda key: (jnp.float32(0), jnp.zeros(1)), step)


def strategy(features: tuple[int, ...] = (4,), **how: Any) -> jaxrl.Strategy:
    buffer = jaxrl.uniform(64, batch_size=4)
    return jaxrl.off_policy(drifting(), jaxrl.dqn(features=features), buffer=buffer, num_envs=2, warmup=8, **how)


def trained(run: Path, eval_interval: int = 0, **how: Any) -> tuple[Any, dict[str, Any], list[str]]:
    """Train; return the parameters, what `metadata.json` says the run went without, and its notes."""
    state, *told = told_of(run, strategy(**how), eval_interval)
    return jax.device_get(state.agent.params), *told


def told_of(run: Path, trains: jaxrl.Strategy, eval_interval: int = 0) -> tuple[Any, dict[str, Any], list[str]]:
    """Train; return the state, what `metadata.json` says the run went without, and its notes."""
    settings = {"max_opts": 24, "eval_interval": eval_interval, "eval_episodes": 2 if eval_interval else 0}
    result = jaxrl.Trainer(trains, run_dir=str(run), quiet=True, **settings).train()
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    notes = [row["message"] for row in rows if row.get("event") == "note"]
    without = json.loads((run / "metadata.json").read_text()).get("without", {})
    assert len([note for note in notes if "does not allow" in note]) == bool(without)
    return result.state, without, notes


def test_a_program_that_cannot_be_read_is_run_as_it_is_and_no_large_update_in_place(
    tmp_path: Path, other_traces: None
) -> None:
    _, without, notes = trained(tmp_path / "run", eval_interval=12, features=(300, 300))
    assert {"hoist", "the memory plan of an iteration", "updates in place"} <= set(without)
    assert jax.__version__ in notes[-1]


@pytest.mark.slow
def test_shards_that_cannot_be_run_one_by_one_are_run_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, before, _ = trained(tmp_path / "before", shards=2)
    monkeypatch.setitem(sys.modules, "jax.experimental.xla_metadata", None)
    params, without, _ = trained(tmp_path / "run", shards=2)
    assert set(without) - set(before) == {"shards one by one"}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), params, expected)


def test_an_option_that_the_compiler_does_not_know_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "WIDTH", "xla_cpu_width_of_then")
    _, without, _ = told_of(tmp_path / "run", counting())
    assert "No such compile option" in without["the compiler's option xla_cpu_width_of_then"]
