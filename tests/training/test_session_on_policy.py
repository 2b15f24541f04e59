"""Sessions of agents that learn from rollouts: the same learning as a trainer's, and no rollout is lost or doubled."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_envs import counting
from toys_session import BOX, SPEC, Script, digest, drive, drive_as_trainer

import jaxrl
from jaxrl.agents.returns import last_steps
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.training.policy import GreedyPolicy
from jaxrl.types import Rollout

SMALL: dict[str, Any] = {"num_envs": 2, "rollout": 4, "epochs": 2, "minibatches": 2}
PPO = jaxrl.ppo(features=(8,))


def session_of(agent: Any = PPO, **settings: Any) -> jaxrl.Session:
    return jaxrl.Session(SPEC, agent, **{"max_opts": 1_000, "save_interval": 0, **SMALL, **settings})


@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        # Every day, one with a teacher is.
        pytest.param(jaxrl.ppo(features=(8,), target_kl=1e-4), {}, marks=pytest.mark.slow),
        pytest.param(jaxrl.ppo(features=(8,), core="gru", core_features=4), {}, marks=pytest.mark.slow),
        pytest.param(jaxrl.a2c(features=(8,)), {"epochs": 1, "minibatches": 1}, marks=pytest.mark.slow),
        pytest.param(jaxrl.pqn(features=(8,), epsilon_decay=8), {}, marks=pytest.mark.slow),
        pytest.param(jaxrl.reppo(features=(8,)), {}, marks=pytest.mark.slow),
        pytest.param(jaxrl.reinforce(features=(8,)), {"num_envs": 1, "epochs": 1}, marks=pytest.mark.slow),
    ],
    ids=["ppo", "recurrent ppo", "a2c", "pqn", "reppo", "reinforce"],
)
def test_a_session_is_the_on_policy_trainer_one_step_at_a_time(agent: Any, settings: dict[str, Any]) -> None:
    """Episodes of 3 and rollouts of 4 steps: ends fall on every place of a rollout, its last among them."""
    env, counts = counting(length=3), {**SMALL, **settings}
    strategy = jaxrl.on_policy(env, agent, **counts)
    session = jaxrl.Session(env, agent, seed=7, max_opts=1_000, **counts)
    state = jax.jit(strategy.init)(jax.random.key(7))
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t)[0])
    for t in range(6):
        state = step(state, np.uint32(t))
    drive_as_trainer(session, env, 7, 6 * counts["rollout"])
    assert session.opt_steps == 6 * strategy.opt_steps_per_step
    assert session.env_steps == 6 * strategy.env_steps_per_step
    first = jax.tree.leaves(jax.jit(strategy.init)(jax.random.key(7)).agent)
    ours, theirs = jax.tree.leaves(session._now.state.agent), jax.tree.leaves(state.agent)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(first, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)  # two programs may round differently


def fresh_policy(spec: Any, maker: Any, seed: int = 3) -> GreedyPolicy:
    """Return the policy of a fresh agent, further from uniform than such are."""
    processor, agent = build_processor_and_agent(maker, jaxrl.one_step(), spec)
    state = jax.jit(agent.init)(jax.random.key(seed))
    state = state._replace(params=jax.tree.map(lambda x: 20 * x, state.params))
    return GreedyPolicy(make_policy(agent, processor, spec), PolicyParams(agent.strip(state), ()), {})


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.slow), "gru"])
def test_a_teacher_says_in_a_session_what_it_says_in_the_trainer(core: str) -> None:
    """A teacher with a memory forgets where episodes end: after 3 steps, at any place of a rollout of 4."""
    env = counting(length=3)
    teacher = fresh_policy(env.spec, jaxrl.ppo(features=(), core=core, core_features=4))
    agent = jaxrl.ppo(features=(), teacher_coef=0.5, target_kl=1e-4)
    strategy = jaxrl.on_policy(env, agent, teacher=teacher, **SMALL)
    session = jaxrl.Session(env, agent, teacher=teacher, seed=7, max_opts=1_000, **SMALL)
    state = jax.jit(strategy.init)(jax.random.key(7))
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t))
    for t in range(6):
        state, metrics = step(state, np.uint32(t))
    told = drive_as_trainer(session, env, 7, 6 * SMALL["rollout"])
    kl = metrics["teacher_kl"].sum / metrics["teacher_kl"].count
    assert kl > 1e-3
    np.testing.assert_allclose(told["teacher_kl"], kl, rtol=1e-3)
    for a, b in zip(jax.tree.leaves(session._now.state.agent), jax.tree.leaves(state.agent), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)  # two programs may round differently


@pytest.mark.slow  # every day it is that which the trainer reports
def test_the_divergence_that_a_session_reports_is_that_from_its_teacher() -> None:
    """One update on one rollout: the student is the fresh one, and its observations are known."""
    teacher = fresh_policy(SPEC, jaxrl.ppo(features=(8,)))
    settings: dict[str, Any] = {"epochs": 1, "minibatches": 1}
    session = session_of(jaxrl.ppo(features=(8,), teacher_coef=1.0), teacher=teacher, **settings)
    student, script, seen, learnt = session.policy, Script(), [], None
    while learnt is None:
        seen.append(script.obs(session.ended))
        learnt = session.observe(*script.advance(session.act(seen[-1])))
    p, q = (np.asarray(policy.probabilities(np.concatenate(seen)), np.float64) for policy in (teacher, student))
    np.testing.assert_allclose(learnt["teacher_kl"], (p * np.log(p / q)).sum(axis=1).mean(), rtol=1e-3)


@pytest.mark.slow
def test_a_session_goes_on_with_its_teacher_and_with_no_other(tmp_path: Path) -> None:
    agent, run = jaxrl.ppo(features=(8,), teacher_coef=1.0), str(tmp_path / "run")
    teacher = fresh_policy(SPEC, jaxrl.ppo(features=(8,), core="gru", core_features=4))
    whole = session_of(agent, teacher=teacher)
    drive(whole, Script(), 13)
    script = Script()
    with session_of(agent, teacher=teacher, run_dir=run) as session:
        drive(session, script, 6)
    for other in (None, fresh_policy(SPEC, jaxrl.ppo(features=(8,)))):
        with pytest.raises(jaxrl.SettingsError, match="teacher"):
            session_of(agent, teacher=other, run_dir=run, resume=True)
    with session_of(agent, teacher=teacher, run_dir=run, resume=True) as session:
        drive(session, script, 7)
    assert digest(session) == digest(whole)
    # Its policy needs no teacher.
    assert jaxrl.load_policy(run, step="latest")(np.zeros(2)) == session.policy(np.zeros(2))


def test_agents_that_take_no_teacher_are_refused_in_a_session() -> None:
    teacher = fresh_policy(SPEC, jaxrl.ppo(features=(8,)))
    for agent, more in ((jaxrl.pqn(), {}), (jaxrl.dqn(), {"buffer": jaxrl.uniform(40, batch_size=8)})):
        with pytest.raises(jaxrl.SettingsError, match="does not learn from a teacher; ppo, a2c, reinforce and impala"):
            jaxrl.Session(SPEC, agent, teacher=teacher, **more)


@pytest.mark.slow
def test_what_is_learnt_comes_once_a_rollout_is_whole() -> None:
    session, script, told = session_of(), Script(), []
    for _ in range(12):
        told.append(session.observe(*script.advance(session.act(script.obs(session.ended)))))
    assert [i for i, learnt in enumerate(told) if learnt is not None] == [3, 7, 11]
    assert (session.opt_steps, session.env_steps) == (12, 24)
    assert told[3] is not None
    assert np.isfinite(told[3]["loss"])


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
    state = session._now.state
    items = jax.tree.map(lambda x: x[:5], state.items)  # the sixth step is still to come
    assert np.asarray(items.is_last)[:2, 0].tolist() == [False, True]
    assert np.asarray(items.is_first)[:3, 0].tolist() == [True, False, True]
    prepare = session._stepwise.agent.prepare
    assert prepare is not None
    sample = prepare(state.agent, Rollout(items, last_steps(items)))
    value = dict(zip((0.0, 1.0, -1.0), np.asarray(sample.value), strict=False))
    beyond = prepare(state.agent, Rollout(jax.tree.map(lambda x: x[1:2], items), np.ones((1, 1), bool)))
    at_two = float(beyond.target[0] - 1.0) / 0.5  # the target of a step that is cut: 1 + V / 2
    raw = np.asarray(sample.target)
    np.testing.assert_allclose(raw[1], 1 + at_two / 2, rtol=1e-5)
    np.testing.assert_allclose(raw[0], 1 + 1 / 2 + at_two / 4, rtol=1e-5)
    np.testing.assert_allclose(raw[2], 1 + 1 / 2 + 1 / 4 + at_two / 8, rtol=1e-5)
    assert len(set(np.round(list(value.values()), 5))) == 3  # a value of each place, so that places are told apart


@pytest.mark.slow
def test_a_session_that_is_saved_within_a_rollout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = session_of()
    drive(whole, Script(), 22)
    script, run = Script(), str(tmp_path / "run")
    with session_of(run_dir=run) as session:
        drive(session, script, 9)
    with pytest.raises(jaxrl.SettingsError, match=r"'opt_steps': 8, .*would be .*'opt_steps': 4, .*minibatches"):
        session_of(run_dir=run, resume=True, allow_changes=True, epochs=1)
    with session_of(run_dir=run, resume=True) as session:
        drive(session, script, 13)
    assert digest(session) == digest(whole)
    assert jaxrl.load_policy(run, step="latest")(np.zeros(2)) == session.policy(np.zeros(2))


def test_settings_of_the_other_kind_are_refused_and_lengths_are_rounded(tmp_path: Path) -> None:
    replay = jaxrl.uniform(40, batch_size=8)
    for message, agent, settings in (
        ("warmup is 5, but ppo learns from rollouts", PPO, {"warmup": 5}),
        ("keeps no replay; leave buffer out", PPO, {"buffer": replay}),
        ("rollout is 4, but dqn learns from replay", jaxrl.dqn(), {"buffer": replay}),
        ("minibatches 3 does not divide the 8 steps", PPO, {"minibatches": 3}),
        ("set processor.n_step to 1", PPO, {"processor": jaxrl.n_step(3)}),
    ):
        with pytest.raises(jaxrl.SettingsError, match=message):
            session_of(agent, **settings)
    with pytest.raises(jaxrl.SettingsError, match="dqn learns from replay; give buffer"):
        jaxrl.Session(SPEC, jaxrl.dqn())
    with session_of(jaxrl.ppo(features=()), max_opts=5, run_dir=str(tmp_path)) as session:
        assert session.config.max_opts == 8
    assert "max_opts 5 is rounded up to 8" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_session_without_a_limit_goes_on(tmp_path: Path) -> None:
    with session_of(max_opts=0, run_dir=str(tmp_path)) as session:
        drive(session, Script(), 10)
        assert not session.is_done
    assert session.summary()["stop"] == "running"
    with session_of(max_opts=0, run_dir=str(tmp_path), resume=True) as session:
        assert session.opt_steps == 8
        session.stop()
        assert session.is_done
    with session_of(max_opts=12, run_dir=str(tmp_path), resume=True) as session:
        assert not session.is_done


@pytest.mark.slow
def test_actions_of_a_box_are_learnt_by_rollouts() -> None:
    session = jaxrl.Session(BOX, PPO, **{**SMALL, "num_envs": 1}, max_opts=8)
    while not session.is_done:
        action = session.act([0.0, 0.0])
        session.observe(-float(action[0] ** 2), [0.0, 0.0], True, False)
    assert session.opt_steps == 8
    assert session.summary()["skipped_updates"] == 0
