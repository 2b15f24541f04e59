"""Parameters of episodes: how they are distributed, that schedules and sweeps reach them, and exact resumes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_envs import rollout

import jaxrl
from jaxrl.envs import randomise, vectorise
from jaxrl.envs.wrappers import time
from jaxrl.errors import SettingsError
from jaxrl.training.storage.leaves import state_digest

LENGTH = 3


def weights() -> jaxrl.Env:
    """Show the weight that an episode of three steps was begun with; the reward is the weight."""

    def reset(key: Any, params: Any) -> Any:
        return (params["weight"], jnp.int32(0)), params["weight"][None]

    def step(state: Any, action: Any, key: Any) -> Any:
        weight, steps = state
        return (weight, steps + 1), jaxrl.TimeStep(weight[None], weight, steps == LENGTH - 1)

    spec = jaxrl.EnvSpec("weights", jaxrl.Box(-9.0, 9.0, (1,)), jaxrl.Discrete(2), time_limit=9)
    return jaxrl.Env(spec, reset, step)  # type: ignore[arg-type]


def draw(key: Any, width: Any) -> Any:
    return {"weight": 1.0 + width * jax.random.uniform(key, minval=-1.0), "row": jnp.zeros(2)}


def spread(width: Any) -> jaxrl.Env:
    return randomise(weights(), draw, width=width)


@pytest.mark.parametrize("resets", ["fresh", "pool:300"])
def test_each_episode_has_parameters_of_its_own_from_the_distribution(resets: str) -> None:
    episodes = 8
    first, steps = rollout(vectorise(spread(0.5), 256, resets), np.zeros((episodes * LENGTH, 256), np.int32))
    weight = np.asarray(steps.info["params/weight"]).reshape(episodes, LENGTH, 256)
    np.testing.assert_array_equal(weight[0, 0], first[:, 0])
    np.testing.assert_array_equal(weight, np.repeat(weight[:, :1], LENGTH, axis=1))
    np.testing.assert_array_equal(steps.final_obs[..., 0].reshape(weight.shape), weight)
    drawn = weight[:, 0].ravel()  # 2048 numbers, uniform from 0.5 to 1.5
    assert len(np.unique(drawn)) > 0.99 * drawn.size
    assert (np.abs(drawn - 1) <= 0.5).all()
    deviation = np.sqrt(1 / 12)
    assert abs(drawn.mean() - 1) < 4 * deviation / np.sqrt(drawn.size)
    assert [round(float((drawn < 0.5 + share).mean()), 1) for share in (0.1, 0.3, 0.7)] == [0.1, 0.3, 0.7]
    assert "params/row" not in steps.info
    assert (steps.info["values/width"] == 0.5).all()


def learner(env: jaxrl.Env, resets: str = "fresh") -> jaxrl.Strategy:
    agent = jaxrl.a2c(features=(4,))
    return jaxrl.on_policy(env, agent, num_envs=8, rollout=LENGTH, epochs=1, minibatches=1, resets=resets)


def rows_of(strategy: jaxrl.Strategy, max_opts: int, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    memory = jaxrl.MemoryRecorder()
    given = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 1, "quiet": True, **settings}
    result = jaxrl.Trainer(strategy, max_opts=max_opts, recorders=[memory], **given).train()
    return result, [row for row in memory.rows if row["kind"] == "train"]


@pytest.mark.slow
def test_a_schedule_widens_what_is_drawn_with_every_step_and_evaluation_is_under_its_end() -> None:
    strategy = learner(spread(jaxrl.linear(0.0, 1.0, 10)))
    result, rows = rows_of(strategy, 20)
    np.testing.assert_allclose(
        [row["info/values/width"] for row in rows], [min(t / 10, 1) for t in range(20)], rtol=1e-6
    )
    # Episodes fill a rollout each: those of row t + 1 began at the end of rollout t, under its width.
    far = [max(row["info/params/weight_max"] - 1, 1 - row["info/params/weight_min"]) for row in rows]
    assert far[0] == far[1] == 0
    assert all(0 < found <= min((t - 1) / 10, 1) + 1e-6 for t, found in enumerate(far) if t > 1)
    assert strategy.policy is not None
    judge = jaxrl.Evaluator(strategy.env, strategy.policy, 64)
    evaluated = judge(strategy.policy.params(result.state), jax.random.key(0))
    # Three times a weight that lies up to 1 from 1.
    assert evaluated.returns.min() < 0.5
    assert evaluated.returns.max() > 5.5
    np.testing.assert_allclose(3 * evaluated.columns["info/params/weight"], evaluated.returns, rtol=1e-5)


@pytest.mark.slow
def test_members_of_a_population_differ_in_them_and_each_is_the_run_of_its_own() -> None:
    settings: dict[str, Any] = {"max_opts": 6, "eval_interval": 0, "eval_episodes": 0, "quiet": True}
    strategy = learner(spread(0.5))
    found = jaxrl.population(strategy, sweep={"env_args.width": [0.25, 1.0]})
    assert all(member.strategy.step is strategy.step for member in found.members)  # one program
    states = [member.result.state for member in jaxrl.Trainer(found, **settings).train().members]
    for width, state in zip((0.25, 1.0), states, strict=True):
        own = jaxrl.Trainer(learner(spread(width)), **settings).train().state
        assert state_digest(own) == state_digest(state)
        assert float(state.env.values["width"]) == width
    narrow, wide = (np.asarray(state.env.env.params["weight"]) for state in states)
    np.testing.assert_allclose((wide - 1) / (narrow - 1), 4, rtol=1e-4)  # both of the same draws


@pytest.mark.slow
@pytest.mark.parametrize("resets", ["fresh", "pool:20", "optimistic:2"])
def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(resets: str, tmp_path: Path) -> None:
    make = lambda: learner(spread(jaxrl.linear(0.0, 1.0, 10)), resets)
    whole, _ = rows_of(make(), 8)
    run = str(tmp_path / "run")
    rows_of(make(), 4, run_dir=run)
    parts, _ = rows_of(make(), 8, run_dir=run, resume=True)
    assert state_digest(whole.state) == state_digest(parts.state)


@pytest.mark.slow
def test_wrappers_outside_leave_the_values_in_reach() -> None:
    _, rows = rows_of(learner(time(spread(jaxrl.linear(0.0, 1.0, 4)))), 3)
    assert [row["info/values/width"] for row in rows] == [0, 0.25, 0.5]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"randomise: width is 'wide'; expected a finite number or a schedule"):
        spread("wide")
    with pytest.raises(SettingsError, match=r"weights draws parameters already"):
        randomise(spread(0.5), draw, width=1.0)
    with pytest.raises(SettingsError, match=r"weights has values that follow a schedule"):
        jaxrl.on_policy(spread(jaxrl.linear(0, 1, 5)), jaxrl.a2c(), actors=jaxrl.ActorsConfig(actors=1))
    with pytest.raises(SettingsError, match=r"'env_args.widht' cannot be swept; did you mean env_args.width"):
        jaxrl.population(learner(spread(0.5)), sweep={"env_args.widht": [1.0]})
