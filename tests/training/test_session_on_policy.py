"""Sessions of agents that learn from rollouts: no rollout is lost or doubled, and no other teacher is gone on with."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_session import SPEC, Script, digest, drive, fresh_policy, reached

import jaxrl
from jaxrl.agents.returns import last_steps
from jaxrl.types import Rollout

SMALL: dict[str, Any] = {"num_envs": 2, "rollout": 4, "epochs": 2, "minibatches": 2}
PPO = jaxrl.ppo(features=(8,))


def session_of(agent: Any = PPO, **settings: Any) -> jaxrl.Session:
    return jaxrl.Session(SPEC, agent, **{"max_opts": 1_000, "save_interval": 0, **SMALL, **settings})


@pytest.mark.slow
def test_a_session_goes_on_with_its_teacher_and_with_no_other(tmp_path: Path) -> None:
    agent, run = jaxrl.ppo(features=(8,), teacher_coef=1.0), str(tmp_path / "run")
    teacher = fresh_policy(SPEC, jaxrl.ppo(features=(8,), core="gru", core_features=4))
    whole = session_of(agent, teacher=teacher)
    drive(whole, Script(), 13)
    script = Script()
    with session_of(agent, teacher=teacher, run_dir=run) as session:
        drive(session, script, 6)
    for other in (None, fresh_policy(SPEC, PPO)):
        with pytest.raises(jaxrl.SettingsError, match="teacher"):
            session_of(agent, teacher=other, run_dir=run, resume=True)
    with session_of(agent, teacher=teacher, run_dir=run, resume=True) as session:
        drive(session, script, 7)
    assert digest(session) == digest(whole)
    # Its policy needs no teacher.
    assert jaxrl.load_policy(run, step="latest")(np.zeros(2)) == session.policy(np.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "resume"])
def test_no_return_reaches_over_an_episode_that_was_given_up(how: str, tmp_path: Path) -> None:
    """Rewards are 1, gamma 1/2, lambda 1: an advantage is the discounted sum up to the cut, and the value there."""
    settings: dict[str, Any] = {"num_envs": 1, "rollout": 6, "minibatches": 1, "run_dir": str(tmp_path)}
    agent, processor = jaxrl.ppo(features=(8,), gae_lambda=1.0), jaxrl.n_step(1, discount=0.5)
    session = session_of(agent, processor=processor, **settings)

    def take(session: jaxrl.Session, place: float) -> None:
        session.act([place, 0.0])
        session.observe(1.0, [place + 1, 0.0], False, False)

    take(session, 0.0)
    take(session, 1.0)
    if how == "cut":
        session.cut()
    else:
        session.close()
        session = session_of(agent, processor=processor, resume=True, **settings)
    for place in (-1.0, 0.0, 1.0):  # the environment begins anew
        take(session, place)
    state = reached(session).state
    items = jax.tree.map(lambda x: x[:5], state.items)  # the sixth step is still to come
    assert np.asarray(items.is_last)[:2, 0].tolist() == [False, True]
    assert np.asarray(items.is_first)[:3, 0].tolist() == [True, False, True]
    prepare = session._stepwise.agent.prepare
    sample = prepare(state.agent, Rollout(items, last_steps(items)))
    beyond = prepare(state.agent, Rollout(jax.tree.map(lambda x: x[1:2], items), np.ones((1, 1), bool)))
    at_two = float(beyond.target[0] - 1.0) / 0.5  # the target of a step that is cut: 1 + V / 2
    sums = [1 + 1 / 2 + at_two / 4, 1 + at_two / 2, 1 + 1 / 2 + 1 / 4 + at_two / 8]
    np.testing.assert_allclose(np.asarray(sample.target)[:3], sums, rtol=1e-5)
    assert len(set(np.round(np.asarray(sample.value)[:3], 5))) == 3  # a value of each place, so they are told apart


@pytest.mark.slow
def test_a_session_that_is_saved_within_a_rollout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = session_of()
    drive(whole, Script(), 22)
    script, run = Script(), str(tmp_path / "run")
    with session_of(run_dir=run) as session:
        drive(session, script, 9)
    with pytest.raises(jaxrl.SettingsError, match=r"\(epochs: 2 -> 1\); epochs cannot change, for what was saved"):
        session_of(run_dir=run, resume=True, allow_changes=True, epochs=1)
    with session_of(run_dir=run, resume=True) as session:
        drive(session, script, 13)
    assert digest(session) == digest(whole)
    assert jaxrl.load_policy(run, step="latest")(np.zeros(2)) == session.policy(np.zeros(2))


def test_settings_of_the_other_kind_are_refused_and_lengths_are_rounded(tmp_path: Path) -> None:
    replay, teacher = jaxrl.uniform(40, batch_size=8), fresh_policy(SPEC, PPO)
    for message, agent, settings in (
        ("warmup is 5, but ppo learns from rollouts", PPO, {"warmup": 5}),
        ("keeps no replay; leave buffer out", PPO, {"buffer": replay}),
        ("rollout is 4, but dqn learns from replay", jaxrl.dqn(), {"buffer": replay}),
        ("minibatches 3 does not divide the 8 steps", PPO, {"minibatches": 3}),
        ("set processor.n_step to 1", PPO, {"processor": jaxrl.n_step(3)}),
        ("pqn does not learn from a teacher; ppo, a2c, reinforce and impala", jaxrl.pqn(), {"teacher": teacher}),
    ):
        with pytest.raises(jaxrl.SettingsError, match=message):
            session_of(agent, **settings)
    with pytest.raises(jaxrl.SettingsError, match="dqn learns from replay; give buffer"):
        jaxrl.Session(SPEC, jaxrl.dqn())
    with pytest.raises(jaxrl.SettingsError, match="does not learn from a teacher; ppo, a2c, reinforce and impala"):
        jaxrl.Session(SPEC, jaxrl.dqn(), buffer=replay, teacher=teacher)
    with session_of(jaxrl.ppo(features=()), max_opts=5, run_dir=str(tmp_path)) as session:
        assert session.config.max_opts == 8
    assert "max_opts 5 is rounded up to 8" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_session_without_a_limit_goes_on(tmp_path: Path) -> None:
    with session_of(max_opts=0, run_dir=str(tmp_path)) as session:
        drive(session, Script(), 10)
        assert not session.is_done
    assert session.summary()["stop"] == "left"
    with session_of(max_opts=0, run_dir=str(tmp_path), resume=True) as session:
        assert session.opt_steps == 8
        session.stop()
        assert session.is_done
    with session_of(max_opts=12, run_dir=str(tmp_path), resume=True) as session:
        assert not session.is_done
