"""Actions that are dicts and tuples of several spaces: learnt, masked, loaded, exported, and on the host."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import KEY
from toys_composite import PLACES, SPACE, Strict, marksman
from toys_session import reached

import jaxrl
from jaxrl import evaluate, play
from jaxrl.agents.custom import Outputs
from jaxrl.distributions import kl_divergence
from jaxrl.envs import Env
from jaxrl.envs.host import convert_action, gymnasium_spec
from jaxrl.errors import SettingsError
from jaxrl.exporting import as_c
from jaxrl.exporting.formats import files_of
from jaxrl.exporting.function import function_of
from jaxrl.spaces import Box, Discrete, EnvSpec, space_from_plain, space_zeros
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.strategies.teacher import label, make_teacher
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.leaves import state_digest

UNJUDGED: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True}
ONE: dict[str, Any] = {"num_envs": 1, "rollout": 8, "epochs": 1, "minibatches": 1}
SMALL: dict[str, Any] = {"num_envs": 4, "rollout": 8, "epochs": 1, "minibatches": 2}


def strategy_of(env: Any, agent: Any = None, **settings: Any) -> jaxrl.Strategy:
    return jaxrl.on_policy(env, agent or jaxrl.ppo(features=(8,)), **{**SMALL, **settings})


def trained(strategy: jaxrl.Strategy, **settings: Any) -> jaxrl.Trainer:
    """Train for a few updates, none of which may be skipped for a number that is not finite."""
    trainer = jaxrl.Trainer(strategy, **{**UNJUDGED, "max_opts": 8, **settings})
    trainer.train()
    assert not np.any(trainer.state.health.most_in_a_row)
    return trainer


def fresh(spec: EnvSpec) -> GreedyPolicy:
    """Return the policy of a fresh agent for `spec`."""
    processor, agent = build_processor_and_agent(jaxrl.ppo(features=(4,)), jaxrl.one_step(), spec)
    stats = processor.get_stats(processor.init(space_zeros(spec.observation_space, 1)))
    params = PolicyParams(jax.jit(lambda key: agent.strip(agent.init(key)))(KEY), stats)
    return GreedyPolicy(make_policy(agent, processor, spec), params)


@cache
def drawn(masked: bool, squash: bool = False) -> GreedyPolicy:
    """Return a policy whose parameters are all drawn at random, so that each of them matters."""
    strategy = strategy_of(marksman(masked), jaxrl.ppo(features=(8,), squash=squash))
    assert strategy.policy is not None
    params = jax.eval_shape(lambda key: strategy.policy.params(strategy.init(key)), KEY)  # type: ignore[union-attr]
    rng = np.random.default_rng(1)
    spread = lambda x: (0.7 * rng.normal(size=x.shape)).astype(x.dtype)
    return GreedyPolicy(strategy.policy, jax.tree.map(spread, params))


# --- learning ---------------------------------------------------------------------------------------------------


def test_ppo_learns_each_part_from_one_reward() -> None:
    """The optimum is 1: the move that is seen, aimed at the place that belongs to it."""
    agent = jaxrl.ppo(lr=5e-3, features=(16,), ent_coef=1e-3)
    strategy = jaxrl.on_policy(marksman(), agent, num_envs=32, rollout=16)

    def train(key: Any) -> Any:
        step = lambda state, t: strategy.step(state, jax.random.fold_in(key, t), t)
        state, _ = jax.lax.scan(step, strategy.init(key), jnp.arange(60, dtype=jnp.uint32))
        return strategy.policy.params(state)  # type: ignore[union-attr]

    action = GreedyPolicy(strategy.policy, jax.jit(train)(KEY))({"seen": np.arange(3)})  # type: ignore[arg-type]
    np.testing.assert_array_equal(action["move"], [0, 1, 2])
    np.testing.assert_allclose(action["aim"][0][:, 0], PLACES, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "space"),
    [("CartPole-v1", Discrete(2)), ("Pendulum-v1", Box(-2.0, 2.0, (1,)))],
    ids=["CartPole-v1", "Pendulum-v1"],
)
def test_a_dict_of_one_space_is_trained_to_the_bits_of_the_space_itself(env: str, space: Any) -> None:
    plain = jaxrl.make_env(env)
    assert plain.spec.action_space == space
    nested = Env(
        plain.spec._replace(action_space={"only": (space,)}),
        plain.reset,
        lambda state, action, key: plain.step(state, action["only"][0], key),
    )
    digests = []
    for one in (plain, nested):
        strategy = strategy_of(one, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, minibatches=1)
        state, metrics = jax.jit(lambda key, s=strategy: s.step(s.init(key), key, jnp.uint32(0)))(KEY)
        assert int(metrics["skipped_updates"].count) == 0
        digests.append(state_digest(strategy.policy.params(state)))  # type: ignore[union-attr]
    assert digests[0] == digests[1]


def test_a_run_with_masks_a_memory_and_squashed_actions_learns_and_is_loaded(tmp_path: Path) -> None:
    """Forbidden moves are never taken, and all of the policy learns."""
    agent, run = jaxrl.ppo(features=(8,), squash=True, core="gru", core_features=4), str(tmp_path / "run")
    strategy = strategy_of(marksman(masked=True, length=5), agent)
    before = jax.tree.map(np.array, trained(strategy, max_opts=4, run_dir=run).state.agent.params)
    state = trained(strategy, run_dir=run, resume=True).state
    assert not np.any(state.env.env.mistakes)
    pairs = zip(*map(jax.tree.leaves, (before, state.agent.params)), strict=True)
    assert not any(np.array_equal(*pair) for pair in pairs)
    obs = {"action_mask": {"move": np.ones((3, 3), bool)}, "seen": np.arange(3)}
    policy = jaxrl.load_policy(run, strategy)
    action = policy(obs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), action) == {
        "aim": (((3, 1), "float32"), ((3, 2), "int32")),
        "move": ((3,), "int32"),
    }
    policy.reset()
    single = policy(jax.tree.map(lambda x: x[2], obs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[2], rtol=1e-6), single, action)
    assert policy.policy.spec.action_space == SPACE


@pytest.mark.slow
def test_a_term_of_the_loss_sees_the_distribution_of_each_part() -> None:
    """The entropy of the joint distribution is what all parts add up to; a penalty on it is finite and learnt from."""
    seen: list[Any] = []

    def term(params: Any, sample: Any, outputs: Outputs) -> Any:
        parts: Any = outputs.policy.parts  # type: ignore[attr-defined]
        seen.append(jax.tree.map(lambda part: type(part).__name__, parts, is_leaf=lambda x: hasattr(x, "entropy")))
        return 1e-3 * parts["move"].entropy()

    trained(strategy_of(marksman(), jaxrl.ppo(features=(8,), extra_loss=term)))
    assert seen[0] == {"aim": ("Gaussian", "MultiCategorical"), "move": "Categorical"}


def test_a_teacher_hands_on_the_distribution_of_each_part() -> None:
    """What the student is told has divergence 0 from the teacher itself."""
    teacher = drawn(masked=True)
    agent = jaxrl.ppo(features=(8,), teacher_coef=1.0)
    obs = {"action_mask": {"move": np.ones((3, 3), bool)}, "seen": np.arange(3, dtype=np.int32)}
    _, student = build_processor_and_agent(agent, jaxrl.one_step(), marksman(masked=True).spec)
    made = make_teacher(teacher, student, marksman(masked=True).spec)

    @jax.jit
    def divergence(params: Any) -> Any:
        begun = teacher.policy.begin(params, obs)
        own = teacher.policy.outputs.distribution(params, begun, jnp.uint32(0), ())  # type: ignore[union-attr, misc]
        return kl_divergence(own, made.head.distribution(label(made._replace(params=params), begun)))

    np.testing.assert_allclose(divergence(made.params), np.zeros(3), atol=1e-6)


def test_a_teacher_with_other_distributions_hands_on_its_actions() -> None:
    """A squashed teacher and a student that is not: the box gets the action with a spread, the rest is handed on."""
    teacher = drawn(masked=False, squash=True)
    _, student = build_processor_and_agent(jaxrl.ppo(teacher_coef=1.0), jaxrl.one_step(), marksman().spec)
    made, obs = make_teacher(teacher, student, marksman().spec), {"seen": np.arange(3, dtype=np.int32)}

    @jax.jit
    def told(params: Any) -> Any:
        said = label(made._replace(params=params), teacher.policy.begin(params, obs))
        parts: Any = made.head.distribution(said).parts  # type: ignore[attr-defined]
        return parts["aim"][0].mean, parts["aim"][0].log_std, jax.nn.softmax(parts["move"].logits)

    mean, log_std, moves = told(made.params)
    np.testing.assert_allclose(mean, teacher(obs)["aim"][0], rtol=1e-5)
    np.testing.assert_allclose(log_std, np.full((3, 1), np.log(0.1)), rtol=1e-5)
    np.testing.assert_allclose(moves, teacher.probabilities(obs)["move"], rtol=1e-5)


@pytest.mark.slow
def test_a_student_comes_close_to_its_teacher_in_all_parts() -> None:
    agent, memory = jaxrl.ppo(lr=1e-2, features=(8,), teacher_coef=1.0, policy_coef=0.0), jaxrl.MemoryRecorder()
    strategy = strategy_of(marksman(masked=True), agent, teacher=drawn(masked=True))
    jaxrl.Trainer(strategy, **UNJUDGED, max_opts=400, record_interval=100, recorders=[memory]).train()
    taught = [row["teacher_kl"] for row in memory.rows if "teacher_kl" in row]
    assert taught[-1] < 0.1 * taught[0]


# --- what a policy tells ------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_parts_and_the_log_density_is_their_sum() -> None:
    policy = drawn(masked=True)
    obs = {"action_mask": {"move": np.ones((3, 3), bool)}, "seen": np.arange(3)}
    action, told = policy(obs), policy.probabilities(obs)
    assert told["aim"][0] is None
    assert [x.shape for x in told["aim"][1]] == [(3, 2), (3, 2)]
    np.testing.assert_allclose(told["move"].sum(-1), 1, rtol=1e-5)
    # Other moves and buttons at the same place: the difference is that of their log-probabilities.
    other = {"aim": (action["aim"][0], 1 - action["aim"][1]), "move": (action["move"] + 1) % 3}
    chances = [np.asarray(x) for x in (told["move"], *told["aim"][1])]

    def log_of(action: Any) -> Any:
        taken = np.asarray(action["move"]), *np.asarray(action["aim"][1]).T
        return sum(np.log(chance[np.arange(3), x]) for chance, x in zip(chances, taken, strict=True))

    difference = policy.log_prob(obs, action) - policy.log_prob(obs, other)
    np.testing.assert_allclose(difference, log_of(action) - log_of(other), rtol=1e-4, atol=1e-5)
    assert policy.values(obs).shape == (3,)
    with pytest.raises(SettingsError, match=r"the action does not match Marksman: missing entries aim"):
        policy.log_prob(obs, {"move": action["move"]})


def test_the_log_density_of_boxes_in_a_dict_is_per_unit_of_their_own_spaces() -> None:
    """Each is twice as wide as raw actions, and the scale begins at 1: the density is `1 / (2 sqrt(2 pi))`."""
    wide = Box(-2.0, 2.0, (1,))
    policy = fresh(EnvSpec("Toy", Box(-1.0, 1.0, (1,)), {"a": wide, "b": (wide,)}))
    obs = np.zeros(1, np.float32)
    np.testing.assert_allclose(policy.log_prob(obs, policy(obs)), -2 * np.log(2 * np.sqrt(2 * np.pi)), rtol=1e-5)


# --- Gymnasium and sessions ---------------------------------------------------------------------------------------


def host_env(kind: str) -> Any:
    return jaxrl.gymnasium_envs(gymnasium_spec(Strict(kind)), lambda: Strict(kind))


@pytest.mark.slow  # every day, a session gives such an environment its actions
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_gymnasium_environments_get_what_is_in_their_space(kind: str) -> None:
    """The environment checks structure, dtypes, shapes and bounds of all parts."""
    state = trained(strategy_of(host_env(kind), num_envs=2)).state
    assert np.isfinite(jax.tree.leaves(state.agent.params)[0]).all()


def test_actions_at_a_bound_of_float64_are_in_the_space() -> None:
    """0.6 as float32 is above 0.6, and what is in a box of float64 is within its own bounds."""
    space = Strict.parts["aim"]
    where, buttons = convert_action(space, (np.full((2, 1), 0.6, np.float32), np.ones((2, 2), np.int32)))
    assert float(np.float32(0.6)) > 0.6
    assert where.tolist() == [[0.6], [0.6]]
    assert space.contains((where[0], buttons[0]))


@pytest.mark.every_day("tuple")
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_session_gives_a_gymnasium_environment_what_is_in_its_space(kind: str) -> None:
    env = Strict(kind)
    session = jaxrl.Session(env, jaxrl.ppo(features=(8,)), **ONE, max_opts=4)
    drive(session, env, env.reset(seed=0)[0], 40)
    assert session.opt_steps == 4
    assert session.summary()["skipped_updates"] == 0
    # What the greedy policy returns is counted as the environment does, in the containers of its space.
    action = session.policy({"seen": 5})
    move, turn = (action["move"], action["turn"]) if kind == "dict" else action[1:]
    assert int(move) in range(4, 7)
    assert [int(turn[0]) in (-1, 0), int(turn[1]) in range(5, 8)] == [True, True]


@pytest.mark.slow
def test_a_session_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """It is saved within a rollout, with the actions taken so far."""
    digests = []
    for parts in ((44,), (20, 24)):
        env, run = Strict(), str(tmp_path / f"run{len(parts)}")
        obs, _ = env.reset(seed=0)
        for i, steps in enumerate(parts):
            with jaxrl.Session(env, jaxrl.ppo(features=(8,)), **ONE, max_opts=9, run_dir=run, resume=i > 0) as session:
                obs = drive(session, env, obs, steps)
        digests.append(state_digest(reached(session).state))
    assert digests[0] == digests[1]


def drive(session: jaxrl.Session, env: Strict, obs: Any, steps: int) -> Any:
    """Take steps from `obs` until the session is done; return what is seen after them."""
    for _ in range(steps):
        if session.is_done:
            break
        action = session.act(obs)
        assert env.action_space.contains(action)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        session.observe(reward, next_obs, terminated, truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs
    return obs


def test_a_session_of_several_environments_gives_trees_of_rows_and_obeys_the_masks_of_parts() -> None:
    """One part has no mask."""
    mask = {"a": Box(0, 1, (3,), bool), "b": ((),)}
    actions = {"a": Discrete(3, start=5), "b": (Box(0.0, 1.0, (2,)),)}
    spec = EnvSpec("Outside", {"action_mask": mask, "seen": Box(-1.0, 1.0, (2,))}, actions)
    session = jaxrl.Session(spec, jaxrl.ppo(features=(4,)), **{**ONE, "num_envs": 3}, max_opts=2)
    obs = {"action_mask": {"a": np.array([[False, True, False]] * 3), "b": ((),)}, "seen": np.zeros((3, 2), np.float32)}
    while not session.is_done:
        action = session.act(obs)
        assert action["a"].tolist() == [6, 6, 6]
        assert action["b"][0].shape == (3, 2)
        assert ((action["b"][0] >= 0) & (action["b"][0] <= 1)).all()
        assert isinstance(action["a"], np.ndarray)
        done = np.zeros(3, bool)
        session.observe(np.ones(3), obs, done, done)
    assert session.summary()["skipped_updates"] == 0
    assert session.policy(obs)["a"].tolist() == [6, 6, 6]


@pytest.mark.slow
def test_evaluate_and_play_take_a_run_by_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gymnasium.register("Strict-v0", entry_point=Strict)
    run = tmp_path / "run"
    settings = {**UNJUDGED, "max_opts": 4, "run_dir": str(run)}
    jaxrl.Trainer(strategy_of(jaxrl.make_env("gymnasium:Strict-v0"), num_envs=2), **settings).train()
    assert evaluate.main([str(run), "--episodes", "4", "--json"]) == 0
    assert np.isfinite(json.loads(capsys.readouterr().out)["returns"]["mean"])
    assert play.main([str(run), "--out", str(tmp_path / "episode.gif"), "--max-steps", "4"]) == 0
    assert (tmp_path / "episode.gif").stat().st_size > 0


# --- exports ------------------------------------------------------------------------------------------------------


def test_names_of_outputs_in_c_are_words_of_c_and_differ_in_capitals() -> None:
    """Also where a part is called `mask`, beside the mask of all actions."""
    seen = {"action_mask": {}, "seen": Box(-1.0, 1.0, (2,))}
    actions = {"mask": Discrete(2), "Go": Discrete(2), "go": Discrete(2), "é": Discrete(2)}
    _, outputs = as_c.signature(function_of(fresh(EnvSpec("Toy", seen, actions))))
    names = [part.name for part in outputs]
    assert len({name.upper() for name in names}) == 4
    assert all(name.isidentifier() and name.isascii() for name in names)


C_NAMES = ["obs_action_mask_move", "obs_seen"], ["action_aim_0", "action_aim_1", "action_move"]
PYTHON_NAMES = (
    ["obs['action_mask']['move']", "obs['seen']"],
    ["action['aim'][0]", "action['aim'][1]", "action['move']"],
)


@pytest.mark.parametrize(("form", "names"), [("stablehlo", C_NAMES), ("numpy", PYTHON_NAMES), ("c", C_NAMES)])
def test_a_description_names_the_parts_of_an_action(form: str, names: tuple[list[str], list[str]]) -> None:
    told = json.loads(files_of(drawn(masked=True), form)["policy.json"])
    assert tuple([part["name"] for part in told[what]] for what in ("inputs", "outputs")) == names
    assert space_from_plain(told["spaces"]["action"]) == SPACE


def test_masks_may_leave_parts_out() -> None:
    mask = {"aim": ((), Box(0, 1, (2, 2), bool))}
    spec = EnvSpec("Toy", {"action_mask": mask, "seen": Box(-1.0, 1.0, (2,))}, SPACE)
    assert jaxrl.ppo(features=(4,))(spec).name == "ppo"
