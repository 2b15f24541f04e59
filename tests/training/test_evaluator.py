"""Evaluation: whole greedy episodes, whatever their lengths, and unfinished ones counted."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_gymnasium import Counting

import jaxrl
from jaxrl.envs.host import gymnasium_spec
from jaxrl.errors import SettingsError
from jaxrl.training.evaluator import Evaluation, HostEvaluator, evaluator_of


def countdown(time_limit: int | None = 50) -> jaxrl.Env:
    """An episode lasts as many steps as its first observation says, and pays 1 for action 1; action 0 pays nothing."""

    def reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = jax.random.randint(key, (), 1, 30).astype(jnp.float32)
        return left, left[None]

    def step(left: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, jaxrl.TimeStep]:
        left = left - 1
        return left, jaxrl.TimeStep(left[None], action.astype(jnp.float32), left <= 0)

    spec = jaxrl.EnvSpec("Countdown", jaxrl.Box(-100.0, 30.0, (1,)), jaxrl.Discrete(2), time_limit)
    return jaxrl.Env(spec, reset, step)


def always(action: int) -> jaxrl.Policy:
    """A policy that does not look, and remembers how many steps it has taken."""

    def act(params, carry):  # type: ignore[no-untyped-def]
        return carry, jnp.full(carry.shape, action)

    return jaxrl.Policy(
        spec=countdown().spec,
        params=lambda state: state,
        begin=lambda params, obs: jnp.zeros(obs.shape[0], jnp.int32),
        act=act,
        observe=lambda params, carry, step: carry + 1,
    )


def first_lengths(episodes: int, key: jax.Array) -> np.ndarray:
    """Return the lengths that the episodes of an evaluation with `key` must have."""
    reset_key, _ = jax.random.split(key)
    return np.asarray(jax.vmap(countdown().reset)(jax.random.split(reset_key, episodes))[0])


def test_each_episode_runs_to_its_own_end_and_nothing_is_added_after_it() -> None:
    key = jax.random.key(3)
    evaluation = jaxrl.Evaluator(countdown(), always(1), 16)((), key)
    expected = first_lengths(16, key)
    assert len(set(expected)) > 5
    np.testing.assert_array_equal(evaluation.lengths, expected)
    np.testing.assert_array_equal(evaluation.returns, expected)
    assert evaluation.finished.all()


def test_unfinished_episodes_are_counted_with_what_they_gathered() -> None:
    key = jax.random.key(3)
    evaluation = jaxrl.Evaluator(countdown(time_limit=None), always(1), 16, max_steps=10)((), key)
    expected = first_lengths(16, key)
    np.testing.assert_array_equal(evaluation.finished, expected <= 10)
    np.testing.assert_array_equal(evaluation.returns, np.minimum(expected, 10))


def test_the_scalars_of_an_environment_are_as_of_the_last_step_of_each_episode() -> None:
    """Episodes last as long as they say, but for a limit of ten: of longer ones, the rest is left."""
    plain, key = countdown(time_limit=10), jax.random.key(3)

    def step(state: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, jaxrl.TimeStep]:
        state, out = plain.step(state, action, key)
        info = {"left": state, "episode_half": state.astype(jnp.int32) // 2, "map": jnp.zeros(3)}
        return state, out._replace(info=info)

    env = plain._replace(step=step)
    evaluation = jaxrl.Evaluator(env, always(1), 16)((), key)
    left = np.maximum(first_lengths(16, key) - 10, 0)
    np.testing.assert_array_equal(evaluation.lengths, np.minimum(first_lengths(16, key), 10))
    assert evaluation.finished.all()
    assert 0 < np.sum(left > 0) < 16
    assert evaluation.columns.keys() == {"info/left", "episode_half"}
    np.testing.assert_array_equal(evaluation.columns["info/left"], left)
    np.testing.assert_array_equal(evaluation.columns["episode_half"], left // 2)
    assert str(evaluation.report()).splitlines()[4].split()[:2] == ["info/left", f"{left.mean():.5g}"]
    assert json.loads(evaluation.report().to_json())["columns"]["info/left"]["max"] == left.max()
    on_host = HostEvaluator(jaxrl.on_host(env), always(1), 3)((), key).columns
    assert on_host.keys() == evaluation.columns.keys()
    np.testing.assert_array_equal(on_host["episode_half"], on_host["info/left"] // 2)


def test_the_policy_is_what_is_judged() -> None:
    assert not jaxrl.Evaluator(countdown(), always(0), 4)((), jax.random.key(0)).returns.any()


@pytest.mark.every_day("device")
@pytest.mark.parametrize("where", ["device", "host"])
def test_sampled_evaluation_acts_as_at_the_end_of_exploration_and_greedy_evaluation_ignores_it(where: str) -> None:
    """Which is at random here, though it begins without: each action then pays 1 with a probability of a half."""
    agent = jaxrl.dqn(features=(8,), epsilon_start=0.0, epsilon_end=1.0, epsilon_decay=1_000_000)
    settings = {"buffer": jaxrl.uniform(64, batch_size=8), "num_envs": 2, "opt_interval": 2, "warmup": 0}
    strategy = jaxrl.off_policy(countdown(), agent, **settings)
    if where == "host":
        strategy = strategy._replace(evaluation=jaxrl.EvalFns(env=jaxrl.on_host(countdown())))
    assert strategy.policy is not None
    params = strategy.policy.params(jax.jit(strategy.init)(jax.random.key(0)))
    evaluate = evaluator_of(strategy, 200, True)
    first, again, other = (evaluate(params, jax.random.key(seed)) for seed in (1, 1, 2))
    taken = int(first.lengths.sum())
    assert abs(first.returns.sum() / taken - 0.5) < 4 * 0.5 / taken**0.5  # four deviations
    np.testing.assert_array_equal(first.returns, again.returns)
    assert not np.array_equal(first.returns, other.returns)
    greedy = evaluator_of(strategy, 200)
    assert greedy is not evaluate
    still = params.agent._replace(hyper=params.agent.hyper._replace(epsilon_end=jnp.float32(0)))
    by_the_best = evaluate(params._replace(agent=still), jax.random.key(1))
    np.testing.assert_array_equal(greedy(params, jax.random.key(1)).returns, by_the_best.returns)


def test_sampling_is_refused_where_nothing_can_be_drawn() -> None:
    with pytest.raises(SettingsError, match="made by hand without a way to sample"):
        jaxrl.Evaluator(countdown(), always(1), 4, sampled=True)
    with pytest.raises(SettingsError, match="eval_actions is 'random'; expected greedy or sampled"):
        jaxrl.TrainerConfig(eval_actions="random").check()


def test_an_episode_that_is_not_finite_ends_there_with_a_return_that_is_never_best() -> None:
    """Whose first observation says that it would last 10 steps or more."""
    env, key = countdown(), jax.random.key(3)

    def reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, obs = env.reset(key)
        return left, jnp.where(obs >= 10, jnp.nan, obs)

    def step(left: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, jaxrl.TimeStep]:
        left, out = env.step(left, action, key)
        return left, out._replace(obs=jnp.where(left == 7, jnp.nan, out.obs))

    expected = first_lengths(16, key)
    for spoilt, bad, lengths in (
        (env._replace(reset=reset), expected >= 10, np.where(expected >= 10, 0, expected)),
        (env._replace(step=step), expected >= 8, np.where(expected >= 8, expected - 7, expected)),
    ):
        evaluation = jaxrl.Evaluator(spoilt, always(1), 16)((), key)
        assert 3 < bad.sum() < 13
        np.testing.assert_array_equal(evaluation.lengths, lengths)
        np.testing.assert_array_equal(evaluation.returns, np.where(bad, np.nan, expected))
        assert evaluation.finished.all()


@pytest.mark.parametrize(
    ("bad", "length", "returns"), [({}, 3, 6.0), ({"bad_reset": 1}, 0, np.nan), ({"bad_step": 2}, 2, np.nan)]
)
def test_on_the_host_too(bad: dict[str, int], length: int, returns: float) -> None:
    env = jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(Counting, **bad))
    evaluation = HostEvaluator(env, always(1), 2)((), jax.random.key(0))
    np.testing.assert_array_equal(evaluation.returns, [returns] * 2)
    np.testing.assert_array_equal(evaluation.lengths, [length] * 2)
    assert evaluation.finished.all()


@pytest.mark.parametrize("episodes", [0, -1, 1.5])
def test_episodes_must_be_a_count(episodes: float) -> None:
    with pytest.raises(SettingsError, match="eval_episodes"):
        jaxrl.Evaluator(countdown(), always(1), episodes)  # type: ignore[arg-type]


def test_a_report_is_a_table_and_a_json_object() -> None:
    evaluation = Evaluation(np.array([1.0, 2.0, 3.0, 6.0, 8.0]), np.array([5, 5, 5, 5, 5]), np.arange(5) > 0)
    report = evaluation.report()
    assert (report.episodes, report.unfinished) == (5, 1)
    assert report.returns["mean"] == 4.0
    assert report.returns["std"] == pytest.approx(np.sqrt(34 / 5))
    assert [report.returns[name] for name in ("min", "25%", "median", "75%", "max")] == [1.0, 2.0, 3.0, 6.0, 8.0]
    assert json.loads(report.to_json())["lengths"]["median"] == 5.0
    heading, returns, lengths, last = str(report).splitlines()
    assert heading.split()[:3] == ["mean", "std", "min"]
    assert returns.split()[:2] == ["return", "4"]
    assert lengths.split()[-1] == "5"
    assert last == "5 episodes, 1 unfinished"
    spoilt = Evaluation(np.array([1.0, np.nan]), np.array([1, 1]), np.ones(2, bool)).report()
    assert json.loads(spoilt.to_json())["returns"]["mean"] is None
