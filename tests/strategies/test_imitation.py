"""Demonstrations beside rollouts: the loss and its gradient by hand, what is drawn, exact runs, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import CONTINUOUS, DISCRETE, KEY, draw_transitions
from toys_beside import COMMAND, MANY, MASKED, QUIET, SMALL, fresh, leaves_of, log_softmax, same
from toys_bits import same_bits
from toys_masks import minefield

import jaxrl
from benchmarks import demos as locks
from jaxrl import train, verify
from jaxrl.agents.actor_critic import Sample
from jaxrl.distributions import demonstrated_raw, make_head
from jaxrl.errors import SettingsError
from jaxrl.metrics import as_stat
from jaxrl.processors import Processor
from jaxrl.spaces import Box, Discrete, EnvSpec, sample_space
from jaxrl.strategies.demos import rollout_demos
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.leaves import state_digest
from jaxrl.types import Batch, Demonstrations, Rollout, Step

LENGTH = 6
ROWS, STEPS = 6, 2
COUNT = ROWS * STEPS


def imitating(demos: Any, agent: Any = None, **settings: Any) -> jaxrl.Strategy:
    settings = {"num_envs": 4, "rollout": 8, "epochs": 1, "minibatches": 2, **settings}
    env = settings.pop("env", None) or locks.lock(LENGTH)
    return jaxrl.on_policy(env, agent or jaxrl.ppo(imitation_coef=0.5, **SMALL), demos=demos, **settings)


# --- the loss -----------------------------------------------------------------------------------------------------


def gaussian(raw: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    mean, log_std = np.split(outputs, 2, axis=-1)
    return (-0.5 * ((raw - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=-1)


def picked(action: Any, outputs: np.ndarray, sizes: tuple[int, ...], mask: Any = None) -> np.ndarray:
    """Return the log-probability of actions of several numbers, those that the mask forbids left out."""
    action, total, at = np.asarray(action).reshape(len(outputs), -1), np.zeros(len(outputs)), 0
    for i, size in enumerate(sizes):
        part = outputs[:, at : at + size]
        part = part if mask is None else np.where(mask[:, at : at + size], part, -1e30)
        total += log_softmax(part)[np.arange(len(part)), action[:, i]]
        at += size
    return total


def squashed(action: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    # Of actions from -2 to 2, as the environment has them; beyond 0.995 of a bound is at 3 before `tanh`.
    raw = np.clip(np.arctanh(np.clip(action / 2, -0.9999999, 0.9999999)), -3, 3)
    return gaussian(raw, outputs) - np.log(1 - np.tanh(raw) ** 2).sum(axis=-1)


def joint(action: Any, outputs: np.ndarray) -> np.ndarray:
    # Log-scales come after the outputs of all parts.
    return gaussian(action["aim"] / 2, outputs[:, [0, 1, 5, 6]]) + picked(action["fire"], outputs[:, 2:5], (3,))


WIDE = CONTINUOUS._replace(action_space=Box(-2.0, 2.0, (2,)))
BOTH = WIDE._replace(action_space={"aim": WIDE.action_space, "fire": Discrete(3)})
HALF = lambda spec: (np.asarray(spec.action_space.high) - np.asarray(spec.action_space.low)) / 2
KINDS: dict[str, tuple[EnvSpec, dict[str, Any], Any]] = {
    "categorical": (DISCRETE, {}, lambda a, x, mask: picked(a, x, (4,))),
    "under a mask": (MASKED, {}, lambda a, x, mask: picked(a, x, (4,), mask)),
    "several": (MANY, {}, lambda a, x, mask: picked(a, x, (2, 3))),
    "gaussian": (CONTINUOUS, {}, lambda a, x, mask: gaussian(a / HALF(CONTINUOUS), x)),
    "squashed": (WIDE, {"squash": True}, lambda a, x, mask: squashed(a, x)),
    "joint": (BOTH, {}, lambda a, x, mask: joint(a, x)),
}


def drawn(agent: Any, spec: EnvSpec, key: Any) -> tuple[Any, Any, Demonstrations]:
    """Return a fresh state, the steps of a minibatch and demonstrations for them."""
    state = agent.init(key)
    items = draw_transitions(agent, spec, state, (STEPS, ROWS))
    sample = agent.prepare(state, Rollout(items, jnp.zeros((STEPS, ROWS), bool)))
    rows = lambda tree: jax.tree.map(lambda x: x.reshape(COUNT, *x.shape[2:]), tree)
    return state, sample, Demonstrations(jax.tree.map(lambda x: x[::-1], rows(items.obs)), rows(items.action))


def updated(agent: Any, state: Any, sample: Any, demos: Demonstrations, opt_step: Any) -> tuple[Any, Any]:
    """Return the state after an update by a minibatch and what is imitated beside it, and its metrics."""
    batch = Batch(agent.fns.imitate(sample, demos), jnp.arange(COUNT), jnp.ones(COUNT))
    return agent.update(state, batch, KEY, opt_step)[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_what_was_shown_are_those_worked_by_hand(kind: str) -> None:
    spec, more, by_hand = KINDS[kind]
    head = make_head(spec, **more)
    action = sample_space(spec.action_space, KEY, ROWS)
    if kind == "squashed":
        action = action.at[0, 0].set(2.0)
    outputs = np.random.default_rng(5).normal(size=(ROWS, head.outputs)).astype(np.float32)
    found = head.distribution(outputs).log_prob(demonstrated_raw(head, action))
    action = jax.tree.map(np.asarray, action)
    np.testing.assert_allclose(found, by_hand(action, outputs.astype(np.float64), None), rtol=1e-4)


@pytest.mark.every_day("under a mask")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_has_the_imitation_of_demonstrations_beside_its_own_terms(kind: str) -> None:
    spec, more, by_hand = KINDS[kind]
    agent = jaxrl.ppo(imitation_coef=0.7, policy_coef=0.3, ent_coef=0.2, vf_coef=0.4, **more, **SMALL)(spec)
    allowed = lambda mask: mask | ~mask.any(axis=-1, keepdims=True)

    @jax.jit
    def learnt(key: Any) -> Any:
        state, sample, demos = drawn(agent, spec, key)
        if kind == "under a mask":
            demos = demos._replace(action=allowed(demos.obs["action_mask"]).argmax(axis=-1))
        if kind == "squashed":
            demos = demos._replace(action=demos.action.at[0, 0].set(2.0))
        metrics = updated(agent, state, sample, demos, jnp.uint32(0))[1]
        return metrics, demos, agent.apply["params"](state.params, demos.obs)[0]

    metrics, demos, outputs = jax.tree.map(np.asarray, learnt(KEY))
    mask = allowed(demos.obs["action_mask"]) if kind == "under a mask" else None
    wanted = -by_hand(demos.action, outputs.astype(np.float64), mask).mean()
    np.testing.assert_allclose(metrics["imitation_loss"], wanted, rtol=1e-4)
    own = metrics["policy_loss"] - 0.2 * metrics["entropy"]
    whole = 0.3 * own + 0.4 * metrics["value_loss"] + 0.7 * wanted
    np.testing.assert_allclose(metrics["loss"], whole, rtol=1e-4)


WARMUP = 2
"""Updates in which the values are learnt alone."""


@pytest.fixture(scope="module")
def descent() -> Any:
    """Return of plain gradient descent the first minibatch, the policy's outputs there, and the compiled update.

    It learns by imitation alone, whose weight in the loss is the number of the update.
    """
    weights: dict[str, Any] = {"imitation_coef": jaxrl.linear(0.0, 4.0, 4), "policy_coef": 0.0, "vf_coef": 0.0}
    others: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": 1e9, "ent_coef": 0.0}
    maker = jaxrl.ppo(**weights, **others, critic_warmup=WARMUP, **SMALL)
    _, agent = build_processor_and_agent(maker, jaxrl.one_step(), DISCRETE)

    @jax.jit
    def begin(key: Any) -> Any:
        state, sample, demos = drawn(agent, DISCRETE, key)
        return (state, sample, demos), agent.apply["params"](state.params, demos.obs)[0]

    begun, outputs = begin(KEY)
    update = jax.jit(partial(updated, agent))
    return begun, np.asarray(outputs), lambda opt_step, *parts: update(*(parts or begun), np.uint32(opt_step))


def test_the_gradient_is_that_of_the_log_probability(descent: Any) -> None:
    # From zero features: the biases of the policy's last layer move alone, by
    # `lr * coef * mean(onehot(a) - softmax(logits))`.
    (state, sample, demos), outputs, update = descent
    push = np.eye(4)[demos.action] - np.exp(log_softmax(outputs))
    after, metrics = update(WARMUP)
    moved = jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), state.params, after.params)["params"]
    np.testing.assert_allclose(moved["policy"]["bias"], 0.1 * WARMUP * push.mean(axis=0), rtol=1e-4, atol=1e-7)
    assert not any(np.any(x) for x in jax.tree.leaves(moved["critic_torso"]))
    # Steps of weight 0 leave the demonstrations beside them as they are.
    blank, less = update(WARMUP, state, sample._replace(weight=np.zeros_like(sample.weight)), demos)
    assert less["imitation_loss"] == metrics["imitation_loss"]
    assert all(map(np.array_equal, jax.tree.leaves(blank.params), jax.tree.leaves(after.params)))


def test_the_weight_follows_a_schedule_and_no_policy_moves_while_values_are_learnt_alone(descent: Any) -> None:
    (state, *_), _, update = descent
    actor = lambda state: jax.tree.leaves(state.params["params"]["policy"])
    for opt_step in range(WARMUP + 2):
        after, metrics = update(opt_step)
        assert metrics["imitation_coef"] == opt_step
        moves = opt_step >= WARMUP
        np.testing.assert_allclose(metrics["loss"], moves * opt_step * metrics["imitation_loss"], rtol=1e-5)
        assert all(map(np.array_equal, actor(after), actor(state))) is not moves


# --- what is drawn ------------------------------------------------------------------------------------------------


class State(NamedTuple):
    demos: Any
    processor: Any


def normaliser() -> Processor:
    return jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step())


def test_beside_each_step_stands_a_step_that_was_shown_as_the_policy_sees_it_now() -> None:
    data, env = locks.shown(LENGTH, 3), locks.lock(LENGTH)
    processor, agent = build_processor_and_agent(jaxrl.ppo(imitation_coef=1.0, **SMALL), normaliser(), env.spec)
    demos: Any = rollout_demos(data, agent, processor, env, processor)
    walked = np.stack([np.arange(4.0 * LENGTH, dtype=np.float32).reshape(4, LENGTH) / 8] * 2)
    blanks = np.zeros(4, np.float32)
    step = Step(blanks, (), blanks, blanks > 0, blanks > 0, *walked)
    now = jax.jit(lambda step: processor.process(processor.init(step.obs), step)[0])(step)
    (moments,) = processor.get_stats(now)[0]
    held = jax.jit(demos.init)()

    @jax.jit
    def beside(blank: Any, key: Any) -> Any:
        batch = Batch(Sample(blank, blank, blank, blank, blank, blank, blank), blank, blank)
        return demos.beside(State(held, now), batch, key).items.demos

    for rows in (4, 50):  # fewer than there are demonstrations, and more
        drawn, counts = [], np.zeros(LENGTH)
        for seed in range(20):
            found = beside(np.zeros(rows, np.float32), jax.random.key(seed))
            raw = np.asarray(found.obs) * np.sqrt(np.asarray(moments.variance) + 1e-8) + np.asarray(moments.mean)
            at = raw.argmax(axis=1)
            np.testing.assert_allclose(raw, np.eye(LENGTH)[at], atol=1e-5)
            np.testing.assert_array_equal(found.action, at % 2)
            counts += np.bincount(at, minlength=LENGTH)
            drawn.append(at)
        assert counts.min() > 0.5 * counts.mean()
        assert not np.array_equal(drawn[0], drawn[1])


@pytest.mark.every_day("True")
@pytest.mark.parametrize("taught", [False, True])
def test_the_statistics_are_those_after_the_rollout_also_beside_a_teacher(taught: bool) -> None:
    env, data = locks.lock(LENGTH), locks.shown(LENGTH, 3)
    # All demonstrations are alike, so that it is known which are drawn.
    first = data.where(np.arange(data.rows) % LENGTH == 0)._replace(terminated=np.ones(3, bool))
    teacher = fresh(jaxrl.ppo(**SMALL), env.spec) if taught else None
    agent = jaxrl.ppo(imitation_coef=0.5, teacher_coef=0.5 if taught else 0.0, **SMALL)
    strategy = imitating(first, agent, minibatches=1, processor=normaliser(), teacher=teacher)
    network = build_processor_and_agent(agent, jaxrl.one_step(), env.spec)[1].apply["params"]

    @jax.jit
    def stepped(key: Any) -> Any:
        state = strategy.init(key)
        after, metrics = strategy.step(state, key, jnp.uint32(0))
        moments = after.processor[0].moments[0]
        seen = (jnp.eye(LENGTH)[0] - moments.mean) / jnp.sqrt(moments.variance + 1e-8)
        return metrics, network(state.agent.params, seen[None])[0]

    metrics, logits = stepped(KEY)
    np.testing.assert_allclose(
        as_stat(metrics["imitation_loss"]).sum, -log_softmax(np.asarray(logits))[0, 0], rtol=1e-4
    )
    assert ("teacher_kl" in metrics) == taught


def test_frames_are_stacked_over_the_episodes_of_the_demonstrations() -> None:
    strategy = imitating(locks.shown(LENGTH, 2), processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()))
    held = jax.jit(lambda key: strategy.init(key).demos.items)(KEY)
    eye = np.eye(LENGTH)
    before = eye[[0, *range(LENGTH - 1)]]
    np.testing.assert_array_equal(held.obs[:LENGTH], np.concatenate([before, eye], axis=1))
    np.testing.assert_array_equal(held.obs[:LENGTH], held.obs[LENGTH : 2 * LENGTH])


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_to_the_same_bits_beside_a_teacher_that_remembers_and_not_with_others(tmp_path: Path) -> None:
    file, other = tmp_path / "shown.npz", tmp_path / "other.npz"
    jaxrl.save_dataset(file, locks.shown(LENGTH, 3))
    jaxrl.save_dataset(other, locks.shown(LENGTH, 4))
    spec, frames = locks.lock(LENGTH).spec, jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step())
    teacher, stranger = (fresh(jaxrl.ppo(**SMALL), spec, frames, seed=seed) for seed in (7, 8))
    falling = jaxrl.linear(1.0, 0.0, 50)
    agent = jaxrl.ppo(imitation_coef=falling, teacher_coef=falling, **SMALL)

    def load(path: Path, teacher: GreedyPolicy = teacher) -> jaxrl.Strategy:
        data = jaxrl.load_dataset(path, spec=spec)
        return imitating(data, agent, processor=normaliser(), teacher=teacher)

    strategy, run = load(file), str(tmp_path / "run")
    # Whether a run goes on is decided by what is known of a strategy; the same programs need not be compiled again.
    known_as = lambda other: strategy._replace(info=other.info)
    whole = jaxrl.Trainer(strategy, max_opts=8, **QUIET).train().state
    jaxrl.Trainer(strategy, max_opts=4, run_dir=run, **QUIET).train()
    plain = imitating(None, jaxrl.ppo(**SMALL), processor=normaliser())
    for others, named in ((load(other), "demos"), (plain, "demos"), (load(file, stranger), "teacher")):
        with pytest.raises(SettingsError, match=f"{named}_sha256: "):
            jaxrl.Trainer(known_as(others), max_opts=8, resume=run, **QUIET).train()
    again = teacher.at(jax.tree.map(jnp.copy, teacher.params))
    moved = known_as(load(file.rename(tmp_path / "moved.npz"), again))
    assert state_digest(jaxrl.Trainer(moved, max_opts=8, resume=run, **QUIET).train().state) == state_digest(whole)


@pytest.mark.slow
def test_a_run_goes_on_with_other_demonstrations_where_that_is_allowed(tmp_path: Path) -> None:
    spec, shown = locks.lock(LENGTH).spec, locks.shown(LENGTH, 3)
    jaxrl.save_dataset(tmp_path / "shown.npz", shown)
    jaxrl.save_dataset(tmp_path / "other.npz", shown._replace(action=1 - shown.action))
    first, other = (imitating(jaxrl.load_dataset(tmp_path / f"{x}.npz", spec=spec)) for x in ("shown", "other"))
    jaxrl.Trainer(first, max_opts=4, run_dir=str(tmp_path / "run"), **QUIET).train()
    state = jaxrl.Trainer(other, max_opts=8, resume=str(tmp_path / "run"), allow_changes=True, **QUIET).train().state
    assert same_bits(state.demos, other.init(jax.random.key(0)).demos)


@pytest.fixture(scope="module")
def catches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of demonstrations in `Catch-bsuite`."""
    env = jaxrl.make_env("Catch-bsuite")
    strategy = imitating(None, jaxrl.ppo(**SMALL), env=env)
    policy: Any = strategy.policy
    params = policy.params(jax.jit(strategy.init)(KEY))
    file = tmp_path_factory.mktemp("catches") / "shown.npz"
    jaxrl.save_dataset(file, jaxrl.gather(env, policy, params, KEY, 90, random=1.0))
    return str(file)


@pytest.mark.slow
def test_a_run_of_the_command_line_is_verified_and_goes_on(catches: str, tmp_path: Path) -> None:
    shown = [*COMMAND, "--demos", catches, "--agent.imitation-coef", "linear(1,0,50)"]
    assert train.main([*shown, "--max-opts", "8", "--run-dir", str(tmp_path / "whole")]) == 0
    assert train.main([*shown, "--max-opts", "4", "--run-dir", str(tmp_path / "parts")]) == 0
    assert train.main(["--resume", str(tmp_path / "parts"), "--max-opts", "8"]) == 0
    assert same(leaves_of(tmp_path / "whole", 8), leaves_of(tmp_path / "parts", 8))
    assert verify.main([str(tmp_path / "whole"), "--replay"]) == 0
    rows = (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert "imitation_loss" in rows
    plain = [*COMMAND, "--max-opts", "4", "--run-dir", str(tmp_path / "plain")]
    assert train.main(plain) == 0
    assert "demos" not in (tmp_path / "plain" / "config.yaml").read_text()


@pytest.mark.slow
def test_members_imitate_and_learn_from_one_teacher_as_runs_of_their_own(catches: str, tmp_path: Path) -> None:
    teacher = str(tmp_path / "teacher")
    assert train.main([*COMMAND, "--max-opts", "2", "--run-dir", teacher]) == 0
    shown = [*COMMAND, "--demos", catches, "--teacher", teacher, "--max-opts", "8"]
    sweep = ["--sweep", "agent.imitation_coef=0.5,2", "--sweep", "agent.teacher_coef=0.5,2"]
    for layout in ("together", "spread"):
        assert train.main([*shown, *sweep, "--layout", layout, "--run-dir", str(tmp_path / layout)]) == 0
    alone = ["--agent.imitation-coef", "0.5", "--agent.teacher-coef", "2", "--run-dir", str(tmp_path / "alone")]
    assert train.main([*shown, *alone]) == 0
    for layout in ("together", "spread"):
        member = tmp_path / layout / "members" / "00001"
        assert same(leaves_of(member, 8), leaves_of(tmp_path / "alone", 8))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "a2c", "reinforce", "impala"])
@pytest.mark.parametrize("more", [{}, {"shards": 2}, {"actors": jaxrl.ActorsConfig(actors=1)}], ids=str)
def test_the_family_imitates_on_devices_and_beside_actors(algo: str, more: dict[str, Any]) -> None:
    agent = getattr(jaxrl, algo)(imitation_coef=1.0, policy_coef=0.0, lr=0.02, **SMALL)
    strategy = imitating(locks.shown(LENGTH, 3), agent, **more)
    rows = jaxrl.Trainer(strategy, max_opts=100, **{**QUIET, "record_interval": 20})
    found = [report.train["imitation_loss"] for report in rows if report.train]
    assert found[0] < 0.8
    assert found[-1] < 0.1


@pytest.mark.slow
def test_a_lock_that_chance_does_not_open_is_opened_after_what_was_shown() -> None:
    found = {}
    for name, demos, coef in (("alone", None, 0.0), ("shown", locks.shown(12, 3), 0.5)):
        agent = jaxrl.ppo(lr=3e-3, imitation_coef=coef, **SMALL)
        strategy = imitating(demos, agent, env=locks.lock(12), rollout=32, epochs=4)
        trainer = jaxrl.Trainer(strategy, max_opts=800, eval_interval=800, eval_episodes=2, quiet=True)
        found[name] = trainer.train().best_score
    assert found == {"alone": pytest.approx(0.1), "shown": 1.0}


# --- what is refused ----------------------------------------------------------------------------------------------


SHOWN = locks.shown(LENGTH)
FRAMES = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.frame_stack(2), jaxrl.one_step())
RISING, NOTHING = (jaxrl.ppo(imitation_coef=jaxrl.linear(first, 0, 5), **SMALL) for first in (1, 0))
REFUSED: dict[str, tuple[Any, str]] = {
    "a path": (
        lambda: imitating("shown.npz"),
        r"demos is 'shown.npz'; expected a data set, as jaxrl.load_dataset\('shown.npz'\)",
    ),
    "a path of a teacher": (
        lambda: imitating(None, jaxrl.ppo(teacher_coef=1.0, **SMALL), teacher="runs/teacher"),
        r"teacher is 'runs/teacher'; expected a policy, as jaxrl.load_policy\('runs/teacher'\)",
    ),
    "without a weight": (
        lambda: imitating(SHOWN, jaxrl.ppo(**SMALL)),
        "there are demos, but agent.imitation_coef, their weight in the loss, is 0; set it",
    ),
    "a weight that stays at nothing": (
        lambda: imitating(SHOWN, NOTHING),
        r"imitation_coef is 0 throughout linear\(0.0,0.0,5\); set it to 0, or give",
    ),
    "a weight without demonstrations": (
        lambda: jax.eval_shape(imitating(None).step, jax.eval_shape(imitating(None).init, KEY), KEY, jnp.uint32(0)),
        "imitation_coef is set, but there are no demonstrations; name them, as in",
    ),
    "a weight in a session": (
        lambda: jaxrl.Session(locks.lock(LENGTH).spec, RISING),
        "imitation_coef is set, but a session has no demonstrations; set it to 0",
    ),
    "of another family": (
        lambda: imitating(SHOWN, jaxrl.pqn(**SMALL)),
        "pqn learns from its own rollouts alone; ppo, a2c, reinforce and impala learn from demos as well",
    ),
    "with a memory": (
        lambda: imitating(SHOWN, jaxrl.ppo(imitation_coef=1.0, core="gru", **SMALL)),
        "ppo remembers, and demos do not tell what; set agent.core to none",
    ),
    "another lock": (
        lambda: imitating(locks.shown(LENGTH - 1)),
        r"the data have observation space Box.*5.*, but Lock has",
    ),
    "frames of normalised observations": (
        lambda: imitating(SHOWN, processor=FRAMES),
        "the processor learns what it scales by as it goes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, told = REFUSED[case]
    with pytest.raises(SettingsError, match=told):
        make()


def test_an_action_that_its_mask_forbids_is_refused_with_its_step() -> None:
    env = minefield(Discrete(3), time_limit=4)
    obs = {"action_mask": np.tile([True, False, True], (5, 1)), "seen": np.zeros((5, 2), np.float32)}
    ends = np.arange(5) == 4
    shown = lambda action: jaxrl.Dataset(
        env.spec, obs, np.array(action, np.int32), np.zeros(5, np.float32), obs, ends, ~ends & False
    )
    imitating(shown([0, 2, 0, 2, 2]), env=env)
    with pytest.raises(SettingsError, match="demos: the action of step 3 is forbidden by its mask"):
        imitating(shown([0, 2, 0, 1, 2]), env=env)
