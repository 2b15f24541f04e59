"""Promises 1, 13 and 28 of sessions: exact resume, nothing that is not finite in an update, never half-updated."""

import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_runs import contents
from toys_session import SPEC, Script, digest, drive, reached, single, small

import jaxrl

STEPS = 44


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """The digest of a session after each of its steps."""
    session, script, digests = small(), Script(), []
    for _ in range(STEPS):
        drive(session, script, 1)
        digests.append(digest(session))
    assert len(set(digests)) == STEPS
    return digests


@pytest.mark.every_day("15", "24")
@pytest.mark.parametrize("stop", [1, 9, 15, 24, 35])  # in priming, in warm-up, after ends (15, 35), between updates
def test_a_resumed_session_goes_on_to_the_same_bits(stop: int, undisturbed: list[str], tmp_path: Path) -> None:
    run, script = str(tmp_path / "run"), Script()
    with small(run_dir=run) as session:
        drive(session, script, stop)
    with small(run_dir=run, resume=True) as session:
        assert digest(session) == undisturbed[stop - 1]
        drive(session, script, STEPS - stop)
        assert digest(session) == undisturbed[-1]


def test_a_session_saved_between_acting_and_observing_acts_again(undisturbed: list[str], tmp_path: Path) -> None:
    run, script = str(tmp_path / "run"), Script()
    session = small(run_dir=run)
    drive(session, script, 20)
    obs = script.obs(session.ended)
    wanted = session.act(obs)
    session.close()
    session = small(run_dir=run, resume=True)
    with pytest.raises(jaxrl.SettingsError, match="without an act"):
        session.observe(np.zeros(2), np.zeros((2, 2)), np.zeros(2, bool), np.zeros(2, bool))
    actions = session.act(obs)
    assert actions.tolist() == wanted.tolist()
    session.observe(*script.advance(actions))
    drive(session, script, STEPS - 21)
    assert digest(session) == undisturbed[-1]
    session.close()


def test_a_resumed_session_begins_episodes_anew_where_its_environments_do(tmp_path: Path) -> None:
    run, episodes = str(tmp_path / "run"), list[Any]()
    with single(run_dir=run) as session:
        session.act([0.0, 0.0])
        session.observe(5.0, [1.0, 0.0], False, False)
    with single(run_dir=run, resume=True, hooks=jaxrl.SessionHooks(episode=episodes.append)) as session:
        session.act([7.0, 7.0])
        session.observe(1.0, [8.0, 7.0], True, False)
    # The episode that was running when the process ended is not told; nor does its reward belong to the next one.
    assert [(e.episode_return, e.length) for e in episodes] == [(1.0, 1)]


class Boom(Exception):
    pass


@pytest.mark.parametrize("hook", ["episode", "learnt", "save"])
def test_an_exception_in_a_callback_leaves_the_state_after_the_step(
    hook: str, undisturbed: list[str], tmp_path: Path
) -> None:
    calls = []

    def boom(*told: Any) -> None:
        calls.append(told)
        raise Boom

    session = small(run_dir=str(tmp_path / "run"), save_interval=5, hooks=jaxrl.SessionHooks(**{hook: boom}))
    script = Script()
    for step in range(STEPS):
        actions = session.act(script.obs(session.ended))
        told = script.advance(actions)
        try:
            session.observe(*told)
        except Boom:
            assert calls
        assert digest(session) == undisturbed[step]
    assert calls
    session.hooks = jaxrl.SessionHooks()
    session.close()


def test_an_interrupt_at_any_moment_leaves_the_state_before_or_after(undisturbed: list[str]) -> None:
    session, script, interrupted, ended = small(), Script(), 0, threading.Event()
    rng, armed = random.Random(0), set[int]()

    def disturb() -> None:
        while not ended.wait(rng.uniform(0.0005, 0.004)):
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(*_: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    old, thread = signal.signal(signal.SIGINT, interrupt), threading.Thread(target=disturb)
    thread.start()
    try:
        while reached(session).steps < STEPS:
            try:
                armed.add(1)
                attempt(session, script)
                armed.clear()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, old)
    assert interrupted > 3
    assert digest(session) == undisturbed[-1]


def attempt(session: jaxrl.Session, script: Script) -> None:
    """Take a step, which may be interrupted anywhere; the script is put where the session says it is."""
    script.step, fresh = reached(session).steps, session.ended
    script.actions = np.asarray(reached(session).state.last.action)
    # Without an end it has perhaps begun an episode already, and then has to be shown the same first observation.
    obs = script.obs(fresh) if fresh.any() else reached(session).host.seen
    session.observe(*script.advance(session.act(obs)))


@pytest.mark.parametrize("where", ["reward", "next_obs", "first obs"])
def test_what_is_not_finite_reaches_no_update(where: str) -> None:
    session, other = single(), single()
    spoilt = 12
    for step in range(30):
        for each in (session, other):
            bad = np.nan if each is session and step == spoilt else 0.0
            each.act(np.array([np.sin(step), 0.0]) if step != spoilt + 1 or each is other else _after(where, step))
            each.observe(
                1.0 + (bad if where == "reward" else 0.0),
                np.array([np.sin(step + 1), bad if where == "next_obs" else 0.0]),
                where == "first obs" and step == spoilt,
                False,
            )
    summary = session.summary()
    assert summary["invalid_steps"] == 1 + (where == "next_obs")  # the step into it, and the one out of it
    assert summary["skipped_updates"] == 0
    for leaf in jax.tree.leaves((reached(session).state, reached(session).host)):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert np.isfinite(np.asarray(leaf, float)).all()
    pushed = 28  # two of the transitions over three steps are still open
    weights, whole = (np.asarray(reached(each).state.buffer.items.weight)[:pushed] for each in (session, other))
    spoilt_rows = {"reward": [10, 11, 12], "next_obs": [10, 11, 12, 13], "first obs": [13]}[where]
    assert np.flatnonzero(weights == 0).tolist() == spoilt_rows
    assert (whole == 1).all()
    assert summary["episode_return_count"] == 1 + (where == "next_obs") + (where == "first obs")


@pytest.mark.slow
def test_first_observations_that_are_not_finite_are_not_in_the_running_mean() -> None:
    session = single(processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()))
    shown = []
    for step in range(12):
        obs = np.array([float(step), 1.0])
        session.act(np.full(2, np.nan) if step in (0, 5) else obs)
        session.observe(0.0, np.array([step + 1.0, 1.0]), step == 4, False)
        shown += [obs] if step not in (0, 5) else []
    session.act(np.array([12.0, 1.0]))
    assert session.summary()["invalid_steps"] == 2
    policy = session._stepper.params(reached(session))
    moments = policy.processor[0][0]
    np.testing.assert_allclose(moments.count, len(shown) + 1)
    np.testing.assert_allclose(moments.mean, np.mean([*shown, [12.0, 1.0]], axis=0), rtol=1e-5)


def _after(where: str, step: int) -> np.ndarray:
    """What a loop that knows of nothing passes next."""
    return np.array([np.sin(step), 0.0 if where == "reward" else np.nan])


def test_the_best_policy_of_a_session_can_be_loaded(tmp_path: Path) -> None:
    run, script = str(tmp_path / "run"), Script()
    with small(run_dir=run) as session:
        drive(session, script, 20)
        assert session.evaluate_score(1.0)
        best = session.policy
        drive(session, script, 20)
        session.evaluate_score(0.5)
    loaded = jaxrl.load_policy(run)
    obs = np.random.default_rng(0).normal(size=(50, 2))
    assert loaded(obs).tolist() == best(obs).tolist()
    with small(run_dir=run, resume=True) as session:
        assert session.best_score == 1.0
        assert not session.evaluate_score(0.9)


@pytest.mark.parametrize("how", ["restored", "killed"])
def test_a_session_that_goes_back_knows_the_score_of_the_best_on_disk(how: str, tmp_path: Path) -> None:
    run, script = tmp_path / "run", Script()
    session = small(run_dir=str(run))
    drive(session, script, 20)
    session.evaluate_score(1.0)
    session.save()
    drive(session, script, 10)
    assert session.evaluate_score(5.0)
    session.evaluate_score(0.0)  # waits until that policy is written
    if how == "restored":
        session.restore()
    else:
        run = Path(shutil.copytree(run, tmp_path / "killed"))
        session.close()
        session = small(run_dir=str(run), resume=True)
    with session:
        assert session.best_score == 5.0
        assert not session.evaluate_score(3.0)
    assert jaxrl.load_policy(run).facts["score"] == session.summary()["best_score"] == 5.0


def test_checkpoints_come_by_their_interval_and_the_newest_stay(tmp_path: Path) -> None:
    saved = list[int]()
    with small(
        run_dir=str(tmp_path / "run"), save_interval=5, keep=2, hooks=jaxrl.SessionHooks(save=saved.append)
    ) as session:
        drive(session, Script(), 44)
    assert saved == [5, 10, 15, 17]
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [15, 17]


def test_changes_that_would_falsify_the_counts_are_refused_and_every_checkpoint_stays(tmp_path: Path) -> None:
    with single(run_dir=str(tmp_path)) as session:
        drive(session, Script(1), 14)
        assert (session.opt_steps, session.env_steps) == (4, 14)  # after a warm-up of 2 + 8 steps
    before = contents(tmp_path / "checkpoints")
    for name, value in (("updates", 2), ("warmup", 12), ("warmup", 20)):
        with pytest.raises(jaxrl.SettingsError, match=rf"\({name}: \d+ -> {value}\); {name} cannot change"):
            single(run_dir=str(tmp_path), resume=True, allow_changes=True, **{name: value})
        assert contents(tmp_path / "checkpoints") == before
    with pytest.raises(jaxrl.SettingsError, match="warmup: 8 -> 12"):
        single(run_dir=str(tmp_path), resume=True, warmup=12)
    with single(run_dir=str(tmp_path), resume=True, max_opts=9) as session:
        assert (session.opt_steps, session.env_steps) == (4, 14)


@pytest.mark.slow
def test_allowed_changes_take_effect_but_not_those_of_the_processor(tmp_path: Path) -> None:
    run, other = str(tmp_path / "run"), jaxrl.dqn(lr=0.5, features=(8,), epsilon_decay=20, target_interval=5)
    with small(run_dir=run) as session:
        drive(session, Script(), 30)
    with pytest.raises(jaxrl.SettingsError, match=r"agent.lr: 0.01 -> 0.5.*allow_changes=True"):
        small(run_dir=run, resume=True, agent=other)
    with pytest.raises(jaxrl.SettingsError, match=r"discount: 0.99 -> 0.5: a session keeps its processor"):
        small(run_dir=run, resume=True, allow_changes=True, processor=jaxrl.n_step(3, discount=0.5))
    with pytest.raises(jaxrl.SettingsError, match="set resume as well"):
        jaxrl.Session(SPEC, other, buffer=jaxrl.uniform(40, batch_size=8), allow_changes=True)
    with small(run_dir=run, resume=True, allow_changes=True, agent=other) as session:
        assert float(reached(session).state.agent.hyper.lr) == 0.5
        assert reached(session).ledger.changed_at == session.opt_steps > 0


def test_a_closed_session_says_so_and_writes_nothing(tmp_path: Path) -> None:
    with small(run_dir=str(tmp_path)) as session:
        drive(session, Script(), 3)
    before = contents(tmp_path)
    calls: dict[str, Any] = {
        "act": lambda: session.act(np.zeros((2, 2))),
        "observe": lambda: session.observe(np.zeros(2), np.zeros((2, 2)), np.zeros(2, bool), np.zeros(2, bool)),
        "cut": session.cut,
        "note": lambda: session.note(battery=0.5),
        "describe": lambda: session.describe(operator="Ada"),
        "evaluate_score": lambda: session.evaluate_score(1.0),
        "evaluate_episodes": session.evaluate_episodes,
        "save": session.save,
        "restore": session.restore,
    }
    for name, call in calls.items():
        with pytest.raises(jaxrl.SettingsError, match=f"^{name} was called on a session that is closed; resume it"):
            call()
    assert contents(tmp_path) == before
