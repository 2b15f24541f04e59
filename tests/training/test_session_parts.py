"""Sessions with every kind of replay, rollout and agent: they learn what a trainer does, and go on to the same bits."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_bits import require_same_bits
from toys_envs import counting
from toys_session import BOX, Script, beside_trainer, digest, drive, fresh_policy, reached, single, small

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
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


# --- what a trainer does ------------------------------------------------------------------------------------------


def require_close(ours: Any, theirs: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Fail unless two trees are the same but for rounding, which two programs may do differently."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def with_box(env: jaxrl.Env) -> jaxrl.Env:
    return env._replace(spec=env.spec._replace(action_space=Box(-2.0, 2.0, (1,))))


SEQUENCES = {"sequence": 4, "burn_in": 2}
DQN = jaxrl.dqn(features=(8,), lr=jaxrl.linear(1e-3, 0, 40), epsilon_decay=8, target_interval=3)
GRU_DQN = jaxrl.dqn(features=(8,), epsilon_decay=8, target_interval=3, core="gru", **SEQUENCES)
GRU_SAC = jaxrl.sac(features=(8,), core="gru", core_features=8, **SEQUENCES)
REPLAYS: dict[str, dict[str, Any]] = {
    "dqn": {"processor": STACKED},
    "an update a step": {"num_envs": 1, "opt_interval": 1, "processor": jaxrl.n_step(2)},
    "greedy warm-up": {"num_envs": 4, "processor": jaxrl.n_step(1), "random_warmup": False},
    "two updates a step": {"num_envs": 4, "opt_interval": 2, "processor": jaxrl.n_step(2)},
    "gru": {"agent": GRU_DQN, "processor": jaxrl.n_step(1)},
    "gru for each": {"agent": GRU_SAC, "processor": jaxrl.n_step(1)},  # of an actor and two critics
    **KINDS,
}


@pytest.mark.every_day("dqn")
@pytest.mark.parametrize("kind", REPLAYS)
def test_it_pushes_and_learns_what_a_trainer_does(kind: str) -> None:
    usual = {"buffer": jaxrl.uniform(48, 8), "processor": jaxrl.n_step(3), "num_envs": 2, "opt_interval": 4}
    parts = {**usual, "warmup": 24, **REPLAYS[kind]}
    env, agent = counting(length=5), parts.pop("agent", DQN)
    has_box = parts.pop("spec", None) is not None
    # Twelve iterations: until the buffer has begun to be written over.
    session, theirs, told, _ = beside_trainer(with_box(env) if has_box else env, agent, 12, **parts)
    ours = reached(session).state
    if kind == "dqn":  # it follows the schedule to the step
        np.testing.assert_allclose(told["lr"], 1e-3 * (1 - (session.opt_steps - 1) / 40), rtol=1e-5)
    for name in theirs.buffer.items._fields:
        computed = {"atol": 2e-3} if has_box and name == "action" else {"atol": 0.0}
        close = {} if "gru" in kind else {"rtol": 0.0, **computed}
        require_close(getattr(ours.buffer.items, name), getattr(theirs.buffer.items, name), **close)
    if hasattr(theirs.buffer, "sums"):
        require_close(ours.buffer.sums[0], theirs.buffer.sums[0], rtol=1e-3, atol=0.0)
        assert len(np.unique(theirs.buffer.sums[0])) > 8  # updates have told priorities
    require_close(ours.agent, theirs.agent, **({"rtol": 2e-3, "atol": 2e-4} if kind in KINDS else {}))


def test_the_last_observation_of_an_episode_enters_no_statistics() -> None:
    """No policy sees it, neither the one that is learnt at this step nor any later one."""
    session = single(processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()))
    mean = lambda: np.asarray(session.policy.params.processor[0][0].mean)
    usual = np.array([1.0, 2.0], np.float32)
    for t in range(12):
        session.act(usual)
        ended = t % 4 == 3
        session.observe(0.0, 9 * usual if ended else usual, ended, False)
        np.testing.assert_allclose(mean(), usual, rtol=1e-6)


PPO = jaxrl.ppo(features=(8,))
TAUGHT = jaxrl.ppo(features=(), teacher_coef=0.5, target_kl=1e-4)
ROLLOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (jaxrl.ppo(features=(8,), target_kl=1e-4), {}),
    "recurrent ppo": (jaxrl.ppo(features=(8,), core="gru", core_features=4), {}),
    "ppo in a box": (PPO, {"env": with_box(counting(length=3))}),
    "a2c": (jaxrl.a2c(features=(8,)), {"epochs": 1, "minibatches": 1}),
    "pqn": (jaxrl.pqn(features=(8,), epsilon_decay=8), {}),
    "reppo": (jaxrl.reppo(features=(8,)), {}),
    "reinforce": (jaxrl.reinforce(features=(8,)), {"num_envs": 1, "epochs": 1}),
    "taught": (TAUGHT, {"core": "none"}),
    "taught by one with a memory": (TAUGHT, {"core": "gru"}),  # which forgets where episodes end
}


@pytest.mark.every_day("ppo")
@pytest.mark.parametrize("kind", ROLLOUTS)
def test_it_learns_from_rollouts_what_a_trainer_does(kind: str) -> None:
    """Episodes of 3 and rollouts of 4 steps: ends fall on every place of a rollout, its last among them."""
    agent, more = ROLLOUTS[kind]
    parts = {"env": counting(length=3), "num_envs": 2, "rollout": 4, "epochs": 2, "minibatches": 2, **more}
    env, core = parts.pop("env"), parts.pop("core", None)
    if core is not None:
        parts["teacher"] = fresh_policy(env.spec, jaxrl.ppo(features=(), core=core, core_features=4))
    session, theirs, told, metrics = beside_trainer(env, agent, 6, **parts)
    require_close(reached(session).state.agent, theirs.agent)
    if core is not None:
        kl = metrics["teacher_kl"].sum / metrics["teacher_kl"].count
        assert kl > 1e-3
        np.testing.assert_allclose(told["teacher_kl"], kl, rtol=1e-3)


def test_memory_is_reset_in_learning_also_where_a_processor_of_ones_own_does_not_say_where_episodes_begin() -> None:
    usual = jaxrl.one_step()

    def process(state: Any, step: Any) -> Any:
        state, items = usual.process(state, step)
        return state, items._replace(is_first=(), is_last=())

    def learnt(processor: Any) -> Any:
        spec = jaxrl.EnvSpec("Ones", jaxrl.Box(-1.0, 1.0, (1,)), jaxrl.Discrete(2))
        agent = jaxrl.pqn(core="mingru", core_features=4, features=(4,))
        passes = {"rollout": 6, "epochs": 1, "minibatches": 1, "max_opts": 2}
        session = jaxrl.Session(spec, agent, processor=processor, num_envs=1, **passes)
        obs, place = np.zeros(1, np.float32), 0
        while not session.is_done:
            session.act(obs)
            place += 1
            ended = place % 4 == 0
            obs = np.full(1, 0.1 * (place % 4), np.float32)
            session.observe(float(place % 3), obs, ended, False)
            obs = np.zeros(1, np.float32) if ended else obs
        return session.policy.params

    require_same_bits(learnt(usual._replace(settings=None, process=process)), learnt(usual))
