"""Teachers: what they say of each step, the loss by hand, students that see less, exact runs, and what is refused."""

import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import CONTINUOUS, DISCRETE, KEY, draw_transitions
from toys_beside import COMMAND, MANY, MASKED, QUIET, SMALL, fresh, leaves_of, log_softmax, same

import jaxrl
from jaxrl import train
from jaxrl.envs.wrappers import transform_obs
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.population import sweepable
from jaxrl.strategies.teacher import label, make_teacher
from jaxrl.training.policy import GreedyPolicy
from jaxrl.tuning import Override, override
from jaxrl.types import Batch, Rollout

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
ROWS, STEPS = 6, 2


def taught(env: Any, teacher: GreedyPolicy, student: Any = None, **settings: Any) -> jaxrl.Strategy:
    settings = {"num_envs": 3, "rollout": 8, "epochs": 1, "minibatches": 1, **settings}
    env = jaxrl.make_env(env) if isinstance(env, str) else env
    return jaxrl.on_policy(env, student or jaxrl.ppo(teacher_coef=1.0, **SMALL), teacher=teacher, **settings)


def rollout(strategy: jaxrl.Strategy, iterations: int = 1) -> Any:
    """Return the transitions of the first iterations, leaves `[T, N, ...]`."""

    def collect(state: Any, t: Any) -> Any:
        state, items, _ = strategy.collect(state, jax.random.fold_in(KEY, t), t)  # type: ignore[misc]
        return state, items

    times = np.arange(iterations, dtype=np.uint32)
    found = jax.jit(lambda key: jax.lax.scan(collect, strategy.init(key), times)[1])(KEY)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), found)


# --- what a teacher says of a step --------------------------------------------------------------------------------


CARTS, SWINGS = (EnvSpec("Toy", Box(-9.0, 9.0, (3,)), actions) for actions in (Discrete(2), Box(-2.0, 2.0, (1,))))
OBS = np.asarray(jax.random.normal(jax.random.key(2), (20, 3)))


def softmax(x: Any) -> np.ndarray:
    return np.exp(log_softmax(np.asarray(x)))


def said(teacher: GreedyPolicy, spec: EnvSpec, **student: Any) -> np.ndarray:
    """Return what `teacher` tells a student at `OBS`, where episodes begin, `[N, K]`."""
    _, agent = build_processor_and_agent(jaxrl.ppo(teacher_coef=1.0, **student, **SMALL), jaxrl.one_step(), spec)
    made = make_teacher(teacher, agent, spec)
    return np.asarray(jax.jit(lambda params: label(made, teacher.policy.begin(params, OBS)))(made.params))


def test_discrete_actions_get_the_probabilities_of_the_teacher() -> None:
    teacher = fresh(jaxrl.ppo(**SMALL), CARTS, jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()))
    told = softmax(said(teacher, CARTS))
    np.testing.assert_allclose(told, teacher.probabilities(OBS), rtol=1e-5)
    assert np.ptp(told) > 0.05


def test_a_teacher_that_explores_is_followed_in_that_and_one_that_does_not_forbids_all_but_its_action() -> None:
    exploring = fresh(jaxrl.dqn(epsilon_end=0.0, epsilon_decay=10, **SMALL), CARTS, opt_steps=5)
    told = softmax(said(exploring, CARTS))
    np.testing.assert_allclose(told, exploring.probabilities(OBS), rtol=1e-5)
    np.testing.assert_allclose(told.min(axis=1), 0.25, rtol=1e-5)  # epsilon is a half, of which either has half
    teacher = exploring.at(exploring.params, opt_steps=10)
    told = said(teacher, CARTS)
    assert np.isfinite(told).all()
    np.testing.assert_array_equal(softmax(told), np.eye(2)[teacher(OBS)])


@pytest.mark.parametrize(("maker", "squash"), [(jaxrl.ppo, True), (jaxrl.bc, False)])
def test_gaussians_of_the_same_kind_are_handed_on(maker: Any, squash: bool) -> None:
    teacher = fresh(maker(**{"squash": True} if squash else {}, **SMALL), SWINGS)
    mean, log_std = np.split(said(teacher, SWINGS, squash=squash), 2, axis=-1)
    unit = np.tanh(mean) if squash else np.clip(mean, -1, 1)
    np.testing.assert_allclose(2 * unit, teacher(OBS), rtol=1e-5)
    # The density of the greedy action, per unit of the action space, which is twice as wide.
    wanted = -log_std[:, 0] - 0.5 * math.log(2 * math.pi) - math.log(2)
    within = np.abs(unit[:, 0]) < 0.99
    if squash:
        wanted = wanted - np.log(1 - np.square(np.where(within, unit[:, 0], 0.0)))
    assert within.sum() > 2
    np.testing.assert_allclose(teacher.log_prob(OBS, teacher(OBS))[within], wanted[within], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("maker", "squash"), [(jaxrl.td3, True), (jaxrl.sac, False)])
def test_other_continuous_teachers_give_their_action_with_a_spread(maker: Any, squash: bool) -> None:
    teacher = fresh(maker(**SMALL), SWINGS)
    raw, log_std = np.split(said(teacher, SWINGS, squash=squash), 2, axis=-1)
    np.testing.assert_allclose(np.exp(log_std), np.full_like(log_std, 0.1), rtol=1e-6)
    # A bound lies at infinity behind `tanh`, so that 0.995 of it is asked for.
    unit = np.tanh(raw) if squash else raw
    np.testing.assert_allclose(2 * unit, teacher(OBS), atol=0.011 if squash else 1e-5)
    assert np.isfinite(raw).all()


@pytest.mark.every_day("student1")
@pytest.mark.parametrize("student", [{}, {"core": "gru", "core_features": 4}])
def test_a_teacher_remembers_and_forgets_by_episodes(student: dict[str, Any]) -> None:
    env = jaxrl.make_env("memory:Recall", length=3)  # all episodes are equally long
    teacher = fresh(jaxrl.ppo(core="gru", core_features=4, **SMALL), env.spec)
    items = rollout(taught(env, teacher, jaxrl.ppo(teacher_coef=1.0, **student, **SMALL)), iterations=2)
    obs = items.obs.obs if student else items.obs
    assert 2 < items.is_first.all(axis=1).sum() < 8
    for t in range(16):
        if items.is_first[t].all():
            teacher.reset()
        wanted = teacher.probabilities(obs[t])
        np.testing.assert_allclose(softmax(items.extras["teacher"][t]), wanted, rtol=1e-5)
        teacher(obs[t])


def masked(env: jaxrl.Env, shown: list[int]) -> jaxrl.Env:
    """Show policies some entries of an observation; the whole is the privileged state."""
    space: Any = env.spec.observation_space
    box = lambda part: Box(-math.inf, math.inf, (part,))
    view = lambda obs: {"seen": obs[jnp.array(shown)], "privileged_state": obs}
    return transform_obs(env, view, {"seen": box(len(shown)), "privileged_state": box(space.shape[0])})


def test_a_teacher_of_the_privileged_state_sees_that_in_stacks_of_its_own() -> None:
    env = jaxrl.make_env(CARTPOLE)
    teacher = fresh(jaxrl.ppo(**SMALL), env.spec, jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()))
    items = rollout(taught(masked(env, [0, 2]), teacher))
    for t in range(8):  # no episode of CartPole is over by then
        wanted = teacher.probabilities(items.obs["privileged_state"][t])
        np.testing.assert_allclose(softmax(items.extras["teacher"][t]), wanted, rtol=1e-5)
        teacher(items.obs["privileged_state"][t])


# --- the loss -----------------------------------------------------------------------------------------------------


def categorical_kl(teacher: np.ndarray, student: np.ndarray, sizes: tuple[int, ...], mask: Any = None) -> np.ndarray:
    total, at = np.zeros(len(teacher)), 0
    for size in sizes:
        part = slice(at, at + size)
        allowed = np.ones(teacher[:, part].shape, bool) if mask is None else mask[:, part]
        log_p, log_q = (log_softmax(np.where(allowed, x[:, part], -1e30)) for x in (teacher, student))
        total += np.where(allowed, np.exp(log_p) * (log_p - log_q), 0.0).sum(axis=-1)
        at += size
    return total


def gaussian_kl(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    (m_p, s_p), (m_q, s_q) = (np.split(x, 2, axis=-1) for x in (teacher, student))
    return (s_q - s_p + (np.exp(2 * s_p) + (m_p - m_q) ** 2) / (2 * np.exp(2 * s_q)) - 0.5).sum(axis=-1)


KINDS: dict[str, tuple[EnvSpec, dict[str, Any], Any]] = {
    "categorical": (DISCRETE, {}, lambda p, q, mask: categorical_kl(p, q, (4,))),
    "under a mask": (MASKED, {}, lambda p, q, mask: categorical_kl(p, q, (4,), mask)),
    "several": (MANY, {}, lambda p, q, mask: categorical_kl(p, q, (2, 3))),
    "gaussian": (CONTINUOUS, {}, lambda p, q, mask: gaussian_kl(p, q)),
    "squashed": (CONTINUOUS, {"squash": True}, lambda p, q, mask: gaussian_kl(p, q)),
}


@pytest.mark.every_day("under a mask")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_has_the_divergence_from_the_teacher_beside_its_own_terms(kind: str) -> None:
    spec, more, by_hand = KINDS[kind]
    agent = jaxrl.ppo(teacher_coef=0.7, policy_coef=0.3, ent_coef=0.2, vf_coef=0.4, **more, **SMALL)(spec)
    outputs = agent.policy_fns.head.outputs  # type: ignore[union-attr]
    said = np.random.default_rng(5).normal(size=(STEPS, ROWS, outputs)).astype(np.float32)
    count = STEPS * ROWS

    @jax.jit
    def learnt(key: Any) -> Any:
        state = agent.init(key)
        items = draw_transitions(agent, spec, state, (STEPS, ROWS))
        items = items._replace(extras={**items.extras, "teacher": said})
        sample = agent.prepare(state, Rollout(items, jnp.zeros((STEPS, ROWS), bool)))  # type: ignore[misc]
        _, metrics, _ = agent.update(state, Batch(sample, jnp.arange(count), jnp.ones(count)), KEY, jnp.uint32(0))
        return sample, metrics, agent.apply["params"](state.params, sample.obs)[0]

    sample, metrics, student = learnt(KEY)
    mask = None
    if kind == "under a mask":
        mask = np.asarray(sample.obs["action_mask"])
        mask = mask | ~mask.any(axis=-1, keepdims=True)  # where nothing is allowed, all is
    divergence = by_hand(np.asarray(sample.teacher), np.asarray(student), mask).mean()
    assert divergence > 0.1
    np.testing.assert_allclose(metrics["teacher_kl"], divergence, rtol=1e-4)
    own = metrics["policy_loss"] - 0.2 * metrics["entropy"]
    wanted = 0.3 * own + 0.4 * metrics["value_loss"] + 0.7 * divergence
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-4)


def test_the_weight_follows_a_schedule_and_distillation_leaves_the_rewards_out() -> None:
    weights: dict[str, Any] = {"teacher_coef": jaxrl.linear(4.0, 0.0, 2), "policy_coef": 0.0, "max_grad_norm": 1e9}
    _, agent = build_processor_and_agent(jaxrl.ppo(**weights, **SMALL), jaxrl.one_step(), DISCRETE)
    blank = jnp.zeros((STEPS, ROWS), bool)

    @jax.jit
    def learnt(key: Any, scale: Any) -> Any:
        state = agent.init(key)
        items = draw_transitions(agent, DISCRETE, state, (STEPS, ROWS))
        items = items._replace(extras={"teacher": jax.random.normal(KEY, (STEPS, ROWS, 4))})
        sample = agent.prepare(state, Rollout(items._replace(reward=scale * items.reward), blank))  # type: ignore[misc]
        batch = Batch(sample, jnp.arange(STEPS * ROWS), jnp.ones(STEPS * ROWS))
        return agent.update(state, batch, KEY, jnp.uint32(1))[:2]

    (one, metrics), (other, _) = learnt(KEY, 1.0), learnt(KEY, -5.0)
    leaves = lambda state, name: jax.tree.leaves(state.params["params"][name])
    assert all(map(np.array_equal, leaves(one, "actor_torso"), leaves(other, "actor_torso")))
    assert not all(map(np.array_equal, leaves(one, "critic_torso"), leaves(other, "critic_torso")))
    assert metrics["teacher_coef"] == 2.0  # after one of two steps
    wanted = 0.5 * metrics["value_loss"] + 2.0 * metrics["teacher_kl"]
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


@pytest.mark.slow
def test_a_run_begun_from_its_teacher_is_held_to_its_first_policy(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_envs": 3, "rollout": 8, "epochs": 1, "minibatches": 1}
    plain = jaxrl.on_policy(jaxrl.make_env(CARTPOLE), jaxrl.ppo(**SMALL), **sizes)
    jaxrl.Trainer(plain, max_opts=3, run_dir=str(tmp_path / "first"), **QUIET).train()
    teacher = jaxrl.load_policy(tmp_path / "first")
    divergence = {}
    for coef in (1e-6, 100.0):
        strategy = taught(CARTPOLE, teacher, jaxrl.ppo(teacher_coef=coef, lr=0.01, **SMALL))
        rows = jaxrl.Trainer(
            strategy, max_opts=20, init_from=str(tmp_path / "first"), **{**QUIET, "record_interval": 1}
        )
        divergence[coef] = [report.train["teacher_kl"] for report in rows if report.train]
        assert divergence[coef][0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[100.0][-1] < divergence[1e-6][-1] / 10


# --- runs; one goes on to the same bits in `test_imitation.py` -------------------------------------------------------


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run to learn from."""
    run = tmp_path_factory.mktemp("teachers") / "old"
    assert train.main([*COMMAND, "--max-opts", "8", "--run-dir", str(run)]) == 0
    return run


@pytest.mark.slow
def test_a_run_of_the_command_line_goes_on_and_says_that_it_misses_its_teacher(old_run: Path, tmp_path: Path) -> None:
    shutil.copytree(old_run, tmp_path / "old")
    with_teacher = [*COMMAND, "--teacher", str(tmp_path / "old"), "--agent.teacher-coef", "linear(1,0,50)"]
    assert train.main([*with_teacher, "--max-opts", "8", "--run-dir", str(tmp_path / "whole")]) == 0
    assert train.main([*with_teacher, "--max-opts", "4", "--run-dir", str(tmp_path / "parts")]) == 0
    assert train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "8"]) == 0
    whole = leaves_of(tmp_path / "whole", 8)
    assert same(whole, leaves_of(tmp_path / "parts", 8))
    # The checkpoint has what the teacher remembers, and none of its parameters; all else has its usual place.
    old = leaves_of(old_run, 8)
    more = whole.keys() - old.keys()
    assert {path.rpartition("/")[0] for path in more if "/agent/" in path} == {"state/agent/hyper"}
    assert not any("params" in path for path in more)
    assert old.keys() < whole.keys()
    # The student's policy needs no teacher.
    shutil.rmtree(tmp_path / "old")
    assert int(jaxrl.load_policy(tmp_path / "whole")(np.zeros((10, 5), np.float32))) in range(3)
    with pytest.raises(SettingsError, match=f"teacher: {tmp_path / 'old'} is no run directory: there is no such"):
        train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "12"])
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    with pytest.raises(SettingsError, match=r"not the one that the run began with .*bring that one back"):
        train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "12"])
    shutil.copytree(old_run, tmp_path / "elsewhere")
    moved = ["--teacher", str(tmp_path / "elsewhere"), "--max-opts", "12"]
    assert train.main(["--resume", str(tmp_path / "parts"), *moved]) == 0


@pytest.mark.slow
def test_a_checkpoint_can_be_the_teacher_and_what_a_run_begins_from(old_run: Path, tmp_path: Path) -> None:
    checkpoint = str(old_run / "checkpoints" / "4")
    begun = ["--teacher", checkpoint, "--agent.teacher-coef", "1", "--init-from", checkpoint]
    assert train.main([*COMMAND, *begun, "--max-opts", "2", "--run-dir", str(tmp_path / "begun")]) == 0
    early, late = (jaxrl.load_policy(old_run, step=step).sha256 for step in (4, 8))
    found = (tmp_path / "begun" / "config.yaml").read_text()
    assert early in found
    assert late not in found


def test_a_sweep_is_of_the_students_settings() -> None:
    env = jaxrl.make_env(CARTPOLE)
    teacher = fresh(jaxrl.ppo(**SMALL), env.spec, jaxrl.one_step(0.5))
    strategy = taught(env, teacher, jaxrl.ppo(teacher_coef=0.3, **SMALL), processor=jaxrl.one_step(0.5))
    known = sweepable(strategy)
    assert (known["processor.discount"], known["agent.teacher_coef"]) == (0.5, 0.3)
    of_its_own = taught(env, teacher, jaxrl.ppo(teacher_coef=0.3, **SMALL), processor=jaxrl.one_step(0.9))
    assert sweepable(of_its_own)["processor.discount"] == 0.9
    with override({"processor.discount": Override(0.5, 0.7)}):
        processor = jax.jit(lambda key: strategy.init(key).processor)(KEY)
    assert float(processor[0].discount) == np.float32(0.7)
    assert {float(x) for x in jax.tree.leaves(processor[-1]) if x.ndim == 0 and x.dtype == np.float32} == {0.5}


@pytest.mark.slow
def test_shards_and_actors_learn_from_a_teacher() -> None:
    env = jaxrl.make_env(CARTPOLE)
    teacher = fresh(jaxrl.ppo(**SMALL), env.spec)
    for more in ({"num_envs": 4, "shards": 2}, {"actors": jaxrl.ActorsConfig(actors=1)}):
        strategy = taught(env, teacher, jaxrl.ppo(teacher_coef=1.0, policy_coef=0.0, lr=0.01, **SMALL), **more)
        rows = jaxrl.Trainer(strategy, max_opts=40, **{**QUIET, "record_interval": 10})
        found = [report.train["teacher_kl"] for report in rows if report.train]
        assert found[-1] < found[0] / 2


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_teacher_of_something_else_is_refused_with_both_shapes() -> None:
    cart, pole = jaxrl.make_env(CARTPOLE), jaxrl.make_env(PENDULUM)
    teacher = fresh(jaxrl.ppo(**SMALL), cart.spec)
    of = lambda spec: GreedyPolicy(teacher.policy._replace(spec=spec), teacher.params)
    refuse = lambda message, *args, **how: pytest.raises(SettingsError, match=message)
    with refuse(r"CartPole-v1, has actions Discrete\(n=2,.*but Pendulum-v1 Box\(.*; choose"):
        taught(pole, teacher)
    with refuse(r"CartPole-v1, sees observations \[4\], but Acrobot-v1 has \[6\]; expected the same"):
        taught("Acrobot-v1", of(cart.spec._replace(action_space=Discrete(3))))
    with refuse(r"sees observations \[3\], but CartPole-v1 has \{privileged_state: \[4\], seen: \[2\]\}; expected"):
        taught(masked(cart, [0, 2]), of(DISCRETE._replace(action_space=Discrete(2))))
    with refuse("agent.teacher_coef, its weight in the loss, is 0; set it"):
        taught(cart, teacher, jaxrl.ppo(**SMALL))
    with refuse("pqn does not learn from a teacher; ppo, a2c, reinforce and impala do"):
        taught(cart, teacher, jaxrl.pqn(**SMALL))
    with refuse("agent.policy_coef weighs the policy objective beside a teacher"):
        jaxrl.ppo(policy_coef=0.5)
    alone = jaxrl.on_policy(cart, jaxrl.ppo(teacher_coef=1.0, **SMALL), num_envs=2, rollout=8)
    with refuse("agent.teacher_coef is set, but there is no teacher; name its run, as in --teacher RUN"):
        jaxrl.Trainer(alone, max_opts=4, **QUIET).train()


def test_a_run_without_a_policy_is_refused(tmp_path: Path) -> None:
    command = [*COMMAND, "--teacher", str(tmp_path), "--agent.teacher-coef", "1", "--run-dir", str(tmp_path / "a")]
    with pytest.raises(SettingsError, match=f"teacher: {tmp_path} is no run directory: it has no config.yaml"):
        train.main(command)


# --- what students come to ----------------------------------------------------------------------------------------


HIDDEN: dict[str, tuple[Any, list[int], int, float]] = {
    CARTPOLE: (
        lambda env: jaxrl.on_policy(env, jaxrl.ppo(lr_decay=2_000), num_envs=8),
        [0, 2],  # places, without velocities
        2_000,
        10.0,
    ),
    PENDULUM: (
        lambda env: jaxrl.off_policy(
            env, jaxrl.sac(features=(64, 64)), buffer=jaxrl.uniform(50_000, batch_size=128), num_envs=4, opt_interval=4
        ),
        [0, 1],  # the angle, without its velocity
        2_400,
        -1_200.0,
    ),
}
"""Of each task how its teacher is trained, what students see, how long they learn, and the return of random actions."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_a_student_that_sees_no_velocities_comes_up_to_its_teacher_by_remembering(name: str, tmp_path: Path) -> None:
    make, shown, updates, random = HIDDEN[name]
    env, hidden = jaxrl.make_env(name), masked(jaxrl.make_env(name), shown)
    trained = {"max_opts": 2_000 if name == CARTPOLE else 8_000, "eval_interval": 1_000, "quiet": True}
    jaxrl.Trainer(make(env), run_dir=str(tmp_path), **trained).train()
    teacher = jaxrl.load_policy(tmp_path)
    distil: dict[str, Any] = {"teacher_coef": 1.0, "policy_coef": 0.0, "lr": jaxrl.linear(1e-3, 0, updates)}
    student = jaxrl.ppo(core="gru", core_features=32, features=(64,), **distil)
    rollouts = {"num_envs": 32, "rollout": 50, "epochs": 2, "minibatches": 4}
    strategy = taught(hidden, teacher, student, **rollouts)
    state = jaxrl.Trainer(strategy, max_opts=updates, **QUIET).train().state
    mean = lambda env, policy, params: np.mean(jaxrl.Evaluator(env, policy, 200)(params, KEY).returns)
    policy: Any = strategy.policy
    wanted, come_to = mean(env, teacher.policy, teacher.params), mean(hidden, policy, policy.params(state))
    assert wanted > random + 0.8 * ((500.0 if name == CARTPOLE else -150.0) - random)
    assert come_to - random >= 0.95 * (wanted - random)
