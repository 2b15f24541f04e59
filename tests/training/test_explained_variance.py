"""The column `explained_variance` of actor-critics, worked by hand from rollouts whose values and returns are known."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from toys_agents import FirstAsValue
from toys_closed_form import clock_terminates
from toys_envs import counting, nan_at

import jaxrl
from jaxrl.strategies.population import with_values

THREE_STEPS = partial(counting, 3)
QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True}


@cache
def known(make: Any, make_env: Callable[[], jaxrl.Env] = THREE_STEPS, rollout: int = 6, **settings: Any) -> Any:
    """Return training on episodes of three steps that pay 1, 2 and 3, where values are 0, 1 and 2."""
    of_agent = {"make_network": lambda spec, head: FirstAsValue(head.outputs), "gae_lambda": 1.0}
    agent = {name: settings.pop(name) for name in ("baseline",) if name in settings}
    return jaxrl.on_policy(
        make_env(),
        make(**{**of_agent, **agent}),
        processor=jaxrl.one_step(0.5),
        num_envs=2,
        rollout=rollout,
        **settings,
    )


def columns(strategy: jaxrl.Strategy, rollouts: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """Train for some rollouts; return the rows, one for each."""
    memory, each = jaxrl.MemoryRecorder(), strategy.opt_steps_per_step
    how = {"max_opts": rollouts * each, "record_interval": each, **QUIET, **settings}
    jaxrl.Trainer(strategy, recorders=[memory], **how).train()
    return [row for row in memory.rows if row["kind"] == "train"]


# Returns 1 + 2/2 + 3/4, 2 + 3/2 and 3 have the variance 7/72; less the values 0, 1 and 2 they have 43/72.
@pytest.mark.every_day("a2c")
@pytest.mark.parametrize("make", [jaxrl.ppo, jaxrl.a2c, jaxrl.reinforce, jaxrl.impala], ids=lambda make: make.__name__)
def test_it_is_that_of_a_rollout_worked_by_hand(make: Any) -> None:
    for row in columns(known(make)):
        assert row["explained_variance"] == pytest.approx(-36 / 7, rel=1e-5)
        assert row["explained_variance_max"] == pytest.approx(-36 / 7, rel=1e-5)


def test_returns_are_those_that_the_update_learns_from() -> None:
    """One step ahead, they are 1 + 1/2, 2 + 2/2 and 3, of variance 1/2; less the values they have 1/6."""
    ahead = with_values(known(jaxrl.a2c), {"agent.gae_lambda": 0.0})
    assert columns(ahead)[0]["explained_variance"] == pytest.approx(2 / 3, rel=1e-5)


@pytest.mark.slow
def test_rollouts_of_an_interval_are_averaged_and_shards_are_one_rollout() -> None:
    strategy = known(jaxrl.a2c, rollout=3, shards=2)
    (row,) = columns(strategy, rollouts=4, record_interval=4)
    assert row["explained_variance"] == pytest.approx(-36 / 7, rel=1e-5)
    assert row["explained_variance_min"] == pytest.approx(-36 / 7, rel=1e-5)


@pytest.mark.slow
def test_steps_that_are_not_learnt_from_do_not_count() -> None:
    """The third step is NaN. The returns before it are 1 + 3/2 and 2 + 2/2; less 0 and 1 they are 5/2 and 2."""
    row = columns(known(jaxrl.a2c, partial(nan_at, 3), rollout=3), rollouts=1)[0]
    assert row["invalid_steps"] == 2
    assert row["explained_variance"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_where_returns_do_not_vary_there_is_none_and_no_update_is_skipped() -> None:
    """Episodes of one step all return 1."""
    for row in columns(known(jaxrl.a2c, partial(counting, 1))):
        assert row["explained_variance"] is None
        assert row["skipped_updates"] == 0


@pytest.mark.slow
def test_without_a_baseline_there_is_no_column() -> None:
    assert not [name for name in columns(known(jaxrl.reinforce, baseline=False))[0] if "explained" in name]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"core": "gru", "core_features": 16}, {"dtype": "bfloat16"}], ids=["gru", "bf16"])
def test_it_goes_to_1_as_values_are_learnt(settings: dict[str, Any]) -> None:
    """A clock's hours have the values 1.75, 1.5 and 1."""
    strategy = jaxrl.on_policy(
        clock_terminates(0.5).env,
        jaxrl.ppo(lr=1e-2, features=(16,), **settings),
        processor=jaxrl.one_step(0.5),
        num_envs=4,
        rollout=12,
        epochs=4,
        minibatches=1,
    )
    first, *_, last = columns(strategy, rollouts=60)
    assert first["explained_variance"] < 0.7
    assert 0.98 < last["explained_variance"] <= 1.0
