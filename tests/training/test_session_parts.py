"""Sessions with every kind of replay and agent: they learn, go on to the same bits, and push what a trainer would."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_envs import counting
from toys_session import BOX, Script, digest, drive, drive_as_trainer, small

import jaxrl
from jaxrl.spaces import Box

STACKED = jaxrl.chain(jaxrl.frame_stack(2), jaxrl.n_step(3))
RAINBOW = jaxrl.rainbow(lr=1e-2, features=(8,), atoms=11, v_min=-5.0, v_max=5.0, target_interval=5)
TD3 = jaxrl.td3(lr=1e-2, features=(8,), noise_memory=0.5)
KINDS: dict[str, dict[str, Any]] = {
    "prioritised": {"buffer": jaxrl.prioritised(48, 8, normalise="all")},
    "compact": {"buffer": jaxrl.uniform(48, 8, compact=True)},
    "frames": {"buffer": jaxrl.prioritised(48, 8, compact=True, frames=2), "processor": STACKED},
    "rainbow": {"agent": RAINBOW, "buffer": jaxrl.prioritised(48, 8)},
    "td3": {"spec": BOX, "agent": TD3, "processor": jaxrl.one_step()},
    "sac": {"spec": BOX, "agent": jaxrl.sac(features=(8,)), "processor": jaxrl.one_step()},
}
"""What differs from the usual small session: DQN over three steps with uniform replay."""


ORDINARY = ("rainbow",)
"""Those of which the others are parts, or near kin."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ORDINARY else pytest.mark.slow) for kind in KINDS]
)
def test_it_learns_and_a_resumed_session_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    settings, script = {"run_dir": str(tmp_path / "run"), **KINDS[kind]}, Script()
    whole = small(**KINDS[kind])
    before = jax.tree.map(np.array, whole.policy.params)
    drive(whole, script, 21)
    halfway = digest(whole)
    drive(whole, script, 12)
    script = Script()
    with small(**settings) as session:
        drive(session, script, 21)  # between two optimisation steps, where an episode has just ended
        assert digest(session) == halfway
        assert session.opt_steps > 0
    with small(**settings, resume=True) as session:
        assert digest(session) == halfway
        drive(session, script, 12)
        assert digest(session) == digest(whole) != halfway
        assert session.opt_steps == whole.opt_steps > 8
        assert session.summary()["skipped_updates"] == 0
        learnt = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, session.policy.params)
        assert any(jax.tree.leaves(learnt))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_pushes_and_learns_what_a_trainer_does(kind: str) -> None:
    settings = {**KINDS[kind]}
    env, agent = counting(length=5), jaxrl.dqn(features=(8,), epsilon_decay=8)
    if settings.pop("spec", None):
        env = env._replace(spec=env.spec._replace(action_space=Box(-2.0, 2.0, (1,))))
    parts = {"buffer": jaxrl.uniform(48, 8), "processor": jaxrl.n_step(3), **settings}
    agent, counts = parts.pop("agent", agent), {"num_envs": 2, "opt_interval": 4, "warmup": 24}
    strategy = jaxrl.off_policy(env, agent, **parts, **counts)
    session = jaxrl.Session(env, agent, **parts, **counts, seed=7, max_opts=100)
    state = jax.jit(strategy.init)(jax.random.key(7))
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t)[0])
    iterations = 12  # until the buffer has begun to be written over
    for t in range(iterations):
        state = step(state, np.uint32(t))
    env_steps = strategy.warmup_env_steps + iterations * strategy.env_steps_per_step
    drive_as_trainer(session, env, 7, env_steps // 2)
    ours, theirs = session._now.state, state
    rounded = ("action",) if env.spec.action_space != counting().spec.action_space else ()
    for name in theirs.buffer.items._fields:
        for a, b in zip(*(jax.tree.leaves(getattr(x.buffer.items, name)) for x in (ours, theirs)), strict=True):
            # Two programs may round differently, and a real action is computed.
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 if name in rounded else 0)
    if hasattr(theirs.buffer, "sums"):
        np.testing.assert_allclose(ours.buffer.sums[0], theirs.buffer.sums[0], rtol=1e-3)
        assert len(np.unique(theirs.buffer.sums[0])) > 8  # updates have told priorities
    for a, b in zip(jax.tree.leaves(ours.agent), jax.tree.leaves(theirs.agent), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_a_gymnasium_vector_that_resets_itself_is_driven_live() -> None:
    """With the autoreset mode `SAME_STEP` the true successor of a last step is in `final_obs`."""
    gymnasium = pytest.importorskip("gymnasium")
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs=mode)
    told, episodes = [], list[Any]()
    session = jaxrl.Session(
        envs,
        jaxrl.dqn(features=(8,), epsilon_decay=20),
        buffer=jaxrl.uniform(200, 16),
        num_envs=2,
        opt_interval=2,
        warmup=20,
        max_opts=40,
        hooks=jaxrl.SessionHooks(episode=episodes.append),
    )
    obs, _ = envs.reset(seed=0)
    while not session.is_done:
        action = session.act(obs)
        assert action in envs.action_space
        before = obs
        obs, reward, terminated, truncated, info = envs.step(action)
        successor, ended = obs.copy(), terminated | truncated
        for i in np.flatnonzero(ended):
            successor[i] = info["final_obs"][i]
        session.observe(reward, successor, terminated, truncated)
        told.append((before, successor, terminated))
    envs.close()
    items, steps = session._now.state.buffer.items, len(told)
    obs, successor, terminated = (np.concatenate(column) for column in zip(*told, strict=True))
    np.testing.assert_array_equal(items.obs[: 2 * steps], obs)
    np.testing.assert_array_equal(items.next_obs[: 2 * steps], successor)
    np.testing.assert_array_equal(items.discount[: 2 * steps] == 0, terminated)
    assert len(episodes) == terminated.sum() > 0
    fallen = np.abs(successor[:, [0, 2]]) > (2.4, 12 * 2 * np.pi / 360)
    np.testing.assert_array_equal(fallen.any(axis=1), terminated)  # what is called an end looks like one
    assert session.summary()["skipped_updates"] == 0
