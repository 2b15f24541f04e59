"""Evaluations in the loop of a session: whole greedy episodes, of which training knows nothing."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_session import Script, drive, reached, single, small

import jaxrl


def play(session: jaxrl.Session, script: Script) -> list[int]:
    """Take steps until no evaluation is going on; return the actions."""
    taken = []
    while session.is_evaluating:
        actions = session.act(script.obs(session.ended))
        taken.append(int(np.asarray(actions).reshape(-1)[0]))
        assert session.observe(*script.advance(actions)) is None
    return taken


def test_an_evaluation_counts_whole_episodes_and_each_environment_plays_its_share(tmp_path: Path) -> None:
    """Episodes end where `step + env` divides by 5 or 7; rewards are the action less a half."""
    told: list[jaxrl.Evaluation] = []
    session = small(run_dir=str(tmp_path), hooks=jaxrl.SessionHooks(evaluated=told.append))
    script = Script()
    drive(session, script, 22)  # environment 0 ended at 21, environment 1 at 20
    counters, params = (session.opt_steps, session.env_steps), jax.device_get(reached(session).state.agent.params)
    session.evaluate_episodes(3)
    assert not session.is_done
    with pytest.raises(jaxrl.SettingsError, match="an evaluation is going on"):
        session.evaluate_episodes(3)
    play(session, script)
    # Environment 0 plays on to step 25, then counts 25-28 and 28-30; environment 1 to 24, then counts 24-27.
    assert script.step == 30
    assert sorted(told[0].lengths.tolist()) == [2, 3, 3]
    assert (session.opt_steps, session.env_steps) == counters
    after = jax.device_get(reached(session).state.agent.params)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True))
    assert session.best_score == pytest.approx(told[0].returns.mean())
    session.close()
    (row,) = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"eval"' in x]
    assert row["eval_length"] == pytest.approx(8 / 3)
    assert row["score"] == pytest.approx(told[0].returns.mean())


def test_its_actions_are_those_of_the_greedy_policy_over_whole_episodes() -> None:
    session = single(processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()))
    script, told = Script(1), []
    drive(session, script, 30)
    assert session.ended.all()
    policy = session.policy
    session.evaluate_episodes(2)
    while session.is_evaluating:
        if session.ended.all():
            policy.reset()
        obs = script.obs(session.ended)
        action = session.act(obs[0])
        told.append((int(action), int(policy(obs[0]))))
        session.observe(*(x[0] for x in script.advance(action)))
    assert len(told) == 10  # steps 30 to 35 and to 40
    assert [a for a, _ in told] == [b for _, b in told]


def test_to_act_once_more_on_the_same_observations_takes_no_step() -> None:
    session = single(processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()))
    script = Script(1)
    drive(session, script, 30)
    policy = session.policy
    session.evaluate_episodes(1)
    while session.is_evaluating:
        obs = script.obs(session.ended)[0]
        action = session.act(obs)
        assert [int(session.act(obs)) for _ in range(3)] == [int(action)] * 3
        assert int(policy(obs)) == int(action)
        session.observe(*(x[0] for x in script.advance(action)))


def test_the_rest_of_an_episode_that_an_evaluation_began_is_none_of_training() -> None:
    """Episodes take exactly 3 steps in the first environment, and exactly 10 in the second."""
    told: list[jaxrl.Episode] = []
    scores: list[jaxrl.Evaluation] = []
    session = small(hooks=jaxrl.SessionHooks(episode=told.append, evaluated=scores.append))
    limits, steps = np.array([3, 10]), np.zeros(2, int)

    def take() -> None:
        nonlocal steps
        session.act(np.stack([steps, limits], axis=1).astype(np.float32))
        steps = steps + 1
        done = steps == limits
        session.observe(np.ones(2), np.stack([steps, limits], axis=1).astype(np.float32), done, ~done & done)
        steps = np.where(done, 0, steps)

    for _ in range(30):
        take()
    for _ in range(2):
        session.evaluate_episodes(2)
        while session.is_evaluating:
            take()
    assert steps.tolist() == [2, 0]
    for _ in range(30):
        take()
    lengths = [[episode.length for episode in told if episode.env == i] for i in range(2)]
    assert lengths == [[3] * 19, [10] * 6]
    assert session.summary()["episode_return_count"] == 25
    assert [sorted(score.lengths.tolist()) for score in scores] == [[3, 10]] * 2


def test_training_goes_on_as_if_its_episodes_had_been_cut() -> None:
    """The step out of an evaluation is not taken for one that follows the step into it."""
    one, other = single(), single()
    for session in (one, other):
        script = Script(1)
        drive(session, script, 12)
        if session is one:
            session.evaluate_episodes(1)
            play(session, Script(1, step=12))
        else:
            session.cut()
        drive(session, script, 10)
    assert one.env_steps == other.env_steps == 22
    for a, b in zip(*(jax.tree.leaves(reached(each).state.agent) for each in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.summary()["episode_return_count"] == other.summary()["episode_return_count"]


def test_a_session_at_its_limit_waits_for_its_last_evaluation_and_stops_by_it() -> None:
    session, script = single(max_opts=4, stop_reward=-100.0), Script(1)
    while not session.is_done:
        learnt = session.observe(*script.advance(session.act(script.obs(session.ended))))
        if learnt and session.opt_steps == 4:
            session.evaluate_episodes(2)
    assert (session.opt_steps, session.is_evaluating) == (4, False)
    assert session.summary()["last_score"] is not None
    with pytest.raises(jaxrl.SettingsError, match="after max_opts 4 was reached"):
        session.act(np.zeros(2))


def test_an_evaluation_that_is_cut_off_is_forgotten(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": str(tmp_path)}
    script = Script(1)
    with single(**settings) as session:
        drive(session, script, 12)
        session.evaluate_episodes(5)
        drive(session, script, 3)
    with single(**settings, resume=True) as session:
        assert not session.is_evaluating
        assert session.env_steps == 12
        drive(session, script, 3)
        session.evaluate_episodes(1)
        session.act([0.0, 0.0])
        session.observe(np.nan, [0.0, 0.0], True, False)  # ends the episode from before
        session.act([0.0, 0.0])
        session.observe(np.nan, [0.0, 0.0], True, False)
        assert session.best_score is None
        assert not session.is_evaluating
