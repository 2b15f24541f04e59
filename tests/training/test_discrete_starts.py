"""Whole numbers of an environment that starts elsewhere than at 0: what is seen, done, kept and exported is its own."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from toys_gymnasium import Locks

import jaxrl
from jaxrl.envs.host import gymnasium_spec
from jaxrl.errors import SettingsError
from jaxrl.export import main as export

DOORS = [2, 3, 4, 5]
RIGHT = [door - 3 for door in DOORS]
DQN = jaxrl.dqn(lr=1e-2, features=(16,), epsilon_decay=400, target_interval=20)
PAGE = """
import sys, json
sys.modules["jax"] = sys.modules["jaxrl"] = None
sys.path.insert(0, "{out}")
import policy
seen = [{{"door": door, "hint": [7 + door % 2, door % 3]}} for door in {doors}]
print(json.dumps([int(policy.act(obs)) for obs in seen]))
"""


def batch(doors: list[int]) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *x: np.stack(x), *map(Locks.shown, doors))


def drive(session: jaxrl.Session, env: Locks) -> None:
    obs, _ = env.reset(seed=0)
    while not session.is_done:
        next_obs, reward, terminated, truncated, _ = env.step(session.act(obs))
        session.observe(reward, next_obs, terminated, truncated)
        obs = env.reset()[0] if terminated else next_obs


@pytest.mark.slow
def test_a_session_its_policies_and_their_exports_act_in_the_environment_s_own_numbers(tmp_path: Path) -> None:
    env, run = Locks(), tmp_path / "run"
    buffer = jaxrl.uniform(2_000, batch_size=32)
    session = jaxrl.Session(env, DQN, buffer=buffer, opt_interval=1, warmup=50, max_opts=700, run_dir=str(run))
    with session:
        drive(session, env)
        assert [int(session.act(Locks.shown(door), explore=False)) for door in DOORS] == RIGHT
        assert [int(session.policy(Locks.shown(door))) for door in DOORS] == RIGHT
    policy = jaxrl.load_policy(run)
    assert policy(batch(DOORS)).tolist() == RIGHT
    assert jax.jit(policy)(batch(DOORS)).tolist() == RIGHT
    assert policy.values(batch(DOORS)).argmax(1).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(policy.values(batch(DOORS), np.array(RIGHT)), policy.values(batch(DOORS)).max(1))
    for form in ("numpy", "stablehlo"):
        assert export([str(run), "--format", form, "--out", str(tmp_path / form)]) == 0
    code = PAGE.format(out=tmp_path / "numpy", doors=DOORS)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(made.stdout) == RIGHT
    call = jax.export.deserialize(bytearray((tmp_path / "stablehlo" / "policy.jax").read_bytes())).call
    seen = jax.tree.map(lambda x: x.astype(np.int32), batch(DOORS))
    assert call(seen["door"], seen["hint"])[0].tolist() == RIGHT
    with pytest.raises(
        SettingsError, match=r"act: obs\['door'\] is 6; expected whole numbers of Discrete\(n=4.*start=2"
    ):
        session.act({"door": 6, "hint": [7, 0]}, explore=False)


@pytest.mark.slow
def test_a_run_of_actors_and_its_evaluations_do_too() -> None:
    env = jaxrl.gymnasium_envs(gymnasium_spec(Locks()), Locks)
    buffer = jaxrl.uniform(2_000, batch_size=32)
    strategy = jaxrl.off_policy(env, DQN, buffer=buffer, num_envs=4, opt_interval=4, warmup=100)
    trainer = jaxrl.Trainer(strategy, max_opts=700, eval_interval=700, eval_episodes=4, quiet=True)
    result = trainer.train()
    assert result.best_score == 8
    assert result.policy(batch(DOORS)).tolist() == RIGHT


@pytest.mark.slow
def test_data_are_learnt_from_in_those_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    doors = rng.integers(2, 6, 401)
    seen, ends = batch(doors.tolist()), np.arange(400) % 8 == 7
    rows = lambda at: jax.tree.map(lambda x: x[at].astype(np.int32), seen)
    spec = gymnasium_spec(Locks())
    arrays = {"action": (doors[:400] - 3).astype(np.int32), "reward": np.ones(400, np.float32), "terminated": ends}
    for name, at in (("obs", slice(400)), ("next_obs", slice(1, 401))):
        arrays |= {f"{name}/{key}": part for key, part in rows(at).items()}
    np.savez(tmp_path / "locks.npz", **arrays)
    data = jaxrl.load_dataset(tmp_path / "locks.npz", spec=spec)
    strategy = jaxrl.offline(data, jaxrl.bc(lr=1e-2, features=(16,)), batch_size=64)
    trainer = jaxrl.Trainer(strategy, max_opts=300, eval_interval=0, eval_episodes=0, quiet=True)
    assert trainer.train().policy(batch(DOORS)).tolist() == RIGHT


def test_actions_with_one_bound_come_from_beyond_it() -> None:
    spec = jaxrl.EnvSpec("tank", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Box(5.0, np.inf, (1,)))
    session = jaxrl.Session(spec, jaxrl.ppo(features=()), max_opts=0, record_interval=0)
    drawn = []
    for _ in range(20):
        drawn.append(float(session.act(np.zeros(1, np.float32))[0]))
        session.observe(0.0, np.zeros(1, np.float32), False, False)
    assert min(drawn) >= 5
    assert len({round(x, 3) for x in drawn}) > 10
    assert 5.5 < np.mean(drawn) < 7
