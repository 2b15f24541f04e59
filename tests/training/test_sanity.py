"""What is told of values that no return can have, and of a support that is too narrow: by hand, and in whole runs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_runs import rows_in
from toys_trainer import CountState, counting, small_dqn

import jaxrl
from jaxrl.strategies.guard import return_bound_metrics
from jaxrl.training.program import metric_shapes, state_shapes
from jaxrl.training.sanity import Extremes, extremes, support_missed, values_beyond


def row(q: float | None, reward: float = 1.0, discount: float = 0.99, **more: Any) -> dict[str, Any]:
    return {"q": q, "largest_reward_max": reward, "largest_discount_max": discount, **more}


DQN = {"loss": "huber", "tau": 1.0, "target_interval": 100}


def test_values_are_told_from_twice_the_bound_on() -> None:
    allowed = extremes(row(None, 3.0, 0.75), DQN, Extremes())
    assert (allowed, allowed.bound) == (Extremes(3.0, 0.75, 0.0), 12.0)
    assert values_beyond(row(24.0), DQN, allowed) is None
    assert values_beyond(row(-24.0), DQN, allowed) is None
    assert values_beyond(row(-24.5), DQN, allowed) == (
        "q reaches -24.5, but rewards up to 3 and discount 0.75 allow at most 12: training has probably diverged; "
        "try agent.loss squared, a lower agent.lr or a slower target (agent.tau, agent.target_interval)"
    )
    assert "value reaches 25" in str(values_beyond({"value": 25.0, "largest_reward_max": 3.0}, {}, allowed))


def test_the_bound_goes_by_all_that_came_and_is_at_least_1() -> None:
    allowed = extremes(row(None, 0.5, 0.5), {}, extremes(row(None, 3.0, 0.25), {}, Extremes()))
    assert allowed == Extremes(3.0, 0.5, 0.0)
    assert values_beyond(row(2.0, 0.0), {}, Extremes()) is None
    assert values_beyond(row(2.1, 0.0), {}, Extremes()) is not None
    # Of a strategy of one's own nothing is known of the rewards, so nothing is said of its values.
    assert values_beyond({"q": 1e9}, {}, Extremes()) is None
    # Under a discount of 1 there is no bound, and what is not finite tells nothing.
    assert values_beyond(row(1e9), {}, Extremes(1.0, 1.0)) is None
    assert extremes({"largest_reward_max": float("inf"), "largest_discount_max": None}, {}, Extremes()) == Extremes()


def test_the_entropy_of_soft_values_belongs_to_the_reward() -> None:
    soft = {"temperature_min": 0.0, "temperature_max": 0.5, "entropy_min": -4.0, "entropy_max": 1.0}
    assert extremes(row(None, 1.0, 0.5, **soft), {}, Extremes()).bound == 6.0
    munchausen = {"munchausen": 0.9, "munchausen_temperature": 0.01}
    assert extremes(row(None, 1.0, 0.5), munchausen, Extremes()).bound == pytest.approx(4.0)


def test_a_narrow_support_is_told_from_a_share_of_5_percent_on() -> None:
    bounds = {"v_min": 0.0, "v_max": None}
    assert support_missed({"out_of_support": 0.05}, bounds) is None
    assert support_missed({}, bounds) is None
    told = support_missed({"out_of_support": 0.25}, bounds)
    assert told is not None
    assert told.startswith("25% of the returns")
    assert "by agent.v_min 0.0;" in told
    derived = support_missed({"out_of_support": 0.25}, {"v_min": None, "v_max": None})
    assert derived is not None
    assert derived.endswith("set agent.v_min and agent.v_max")


def test_values_are_not_measured_against_rewards_where_a_penalty_of_unknown_size_is_taken_from_them() -> None:
    allowed = Extremes(1.0, 0.9)
    assert values_beyond(row(-50.0), {"critic_bc_coef": 0.0}, allowed) is not None
    assert values_beyond(row(-50.0), {"critic_bc_coef": 0.5}, allowed) is None


def diverging() -> jaxrl.Strategy:
    """Count; the value is 10 times the iteration's number, where rewards of 1 under a discount of 0.9 allow 10."""

    def step(state: CountState, key: Any, t: jax.Array) -> tuple[CountState, dict]:
        told = {
            "q": 10.0 * t,
            "largest_reward": jnp.float32(1),
            "largest_discount": jnp.float32(0.9),
            "out_of_support": t / 100,
        }
        return state._replace(steps=state.steps + 1), told

    return counting()._replace(step=step)


def told(run: Path) -> list[tuple[int, str]]:
    return [(row["opt_steps"], row["event"]) for row in rows_in(run) if row.get("event") in ("values", "support")]


def test_each_is_told_once_in_a_run_however_often_it_is_resumed(tmp_path: Path) -> None:
    settings = {"run_dir": str(tmp_path), "record_interval": 2, "recorders": []}
    for end in (2, 4, 6, 12, 14):
        jaxrl.Trainer(diverging(), max_opts=end, resume=end > 2, **settings).train()
    # The means of q are 5, 25, 45, ...; those of the share 0.5 %, 2.5 %, 4.5 %, 6.5 %.
    assert told(tmp_path) == [(4, "values"), (8, "support")]


def test_the_largest_reward_and_discount_are_told_of_rows_that_count() -> None:
    reward, discount, weight = ([1.0, -3.0, 100.0], [0.5, 0.0, 0.9], [1.0, 1.0, 0.0])
    items = jaxrl.Transition((), (), jnp.array(reward), jnp.array(discount), (), (), jnp.array(weight))
    made = return_bound_metrics(items)
    assert {name: float(size) for name, size in made.items()} == {"largest_reward": 3.0, "largest_discount": 0.5}


def test_both_kinds_of_training_tell_them() -> None:
    env = jaxrl.make_env("CartPole-v1")
    ppo = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), num_envs=2, rollout=4, epochs=1, minibatches=1)
    for strategy, value in ((ppo, "value"), (small_dqn(), "q")):
        assert {"largest_reward", "largest_discount", value} <= metric_shapes(
            strategy, state_shapes(strategy)[0]
        ).keys()
