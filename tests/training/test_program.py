"""Running sums: means, smallest and largest by hand, and no growth or drift over long intervals."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys_envs
from toys_agents import vector_of
from toys_trainer import small_dqn

import jaxrl
from jaxrl.metrics import stat, total
from jaxrl.training import program
from jaxrl.training.memory import plan_of_state
from jaxrl.training.program import add, summarise, zero_sums
from jaxrl.training.storage.leaves import state_digest
from jaxrl.xla import forms
from jaxrl.xla.ahead import block_lengths


def test_members_together_share_the_memory_of_numbers_drawn_ahead() -> None:
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), num_envs=4)
    drawn = {}
    for members in (1, 8, 512):
        wide = lambda x, members=members: jax.ShapeDtypeStruct((members, *x.shape), x.dtype)
        state, sums = jax.tree.map(wide, program.state_shapes(strategy))
        with block_lengths() as lengths:
            jax.eval_shape(partial(program.run_together, strategy, False), state, sums, jnp.uint32(0), jnp.uint32(1))
        drawn[members] = max(lengths)
    assert drawn[1] > drawn[8] > drawn[512] == 1


class State(NamedTuple):
    """The least that can be trained."""

    key: Any


def test_means_totals_and_extremes_by_hand() -> None:
    rows = [
        {
            "a": jnp.float32(1),
            "b": stat(jnp.array([2.0, 4.0]), jnp.array([True, False])),
            "c": total(jnp.array([1, 0])),
        },
        {"a": jnp.float32(4), "b": stat(jnp.array([6.0, 8.0])), "c": total(jnp.array([1, 1]))},
    ]
    sums = zero_sums(3)
    for row in rows:
        sums = add(sums, row)
    assert summarise(rows[0], sums) == {
        "a": 2.5, "a_min": 1.0, "a_max": 4.0, "b": 16 / 3, "b_min": 2.0, "b_max": 8.0, "c": 3,
    }  # fmt: skip


def test_what_was_never_measured_is_none() -> None:
    row = {"episode_return": stat(jnp.array([5.0]), jnp.array([False])), "episodes": total(jnp.array([False]))}
    columns = summarise(row, add(zero_sums(2), row))
    assert columns == {"episode_return": None, "episode_return_min": None, "episode_return_max": None, "episodes": 0}


def test_a_sum_of_a_million_terms_does_not_drift() -> None:
    # 0.1 added a million times in plain float32 gives 100958.34.
    sums = jax.jit(lambda s: jax.lax.fori_loop(0, 10**6, lambda i, s: add(s, {"x": jnp.float32(0.1)}), s))(zero_sums(1))
    mean = summarise({"x": jnp.float32(0)}, sums)["x"]
    assert mean is not None
    assert math.isclose(mean, float(np.float32(0.1)), rel_tol=1e-6)


def test_what_trains_is_compiled_with_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask CPUs and CUDA for what no flag has said, and other devices for nothing."""
    other, width = "--xla_cpu_enable_fast_math=false", "--xla_cpu_prefer_vector_width=256"
    graphs = "--xla_gpu_enable_command_buffer="
    cases = [("cpu", "", True), ("cpu", other, True), ("cpu", f"{other} {width}", False)]
    cases += [("cuda", "", True), ("cuda", graphs, False), ("tpu", "", False)]
    for platform, flags, asked in cases:
        with monkeypatch.context() as patch, forms(platform):
            patch.setenv("XLA_FLAGS", flags)
            assert bool(program.compiler_options()) == asked
    step = lambda state, key, t: (state, {"t": jnp.float32(t)})
    strategy = jaxrl.Strategy(State, step, env_steps_per_step=1, opt_steps_per_step=1)
    monkeypatch.setattr(program, "compiler_options", lambda: {"no_such_option": 1})
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        program.jit_run(strategy).lower(*program.state_shapes(strategy), count, count).compile()


def test_a_second_run_of_the_same_strategy_compiles_nothing_and_trains_alike() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    # Of its own, so that no other test has compiled it.
    agent = jaxrl.reinforce(features=(4,), baseline=False)
    strategy = jaxrl.on_policy(toys_envs.counting(length=10), agent, num_envs=2, rollout=4)
    train = lambda strategy, seed=0: jaxrl.Trainer(strategy, max_opts=6, eval_episodes=3, seed=seed, quiet=True).train()
    first, after_first = train(strategy), len(compiled)
    second = train(strategy)
    assert after_first > 0
    assert len(compiled) == after_first
    assert first.best_score == second.best_score == 10 * 11 / 2
    assert state_digest(first.state) == state_digest(second.state)
    # Another seed is the same program, another environment another one.
    other = train(strategy, seed=1)
    assert len(compiled) == after_first
    assert not np.array_equal(vector_of(other.state.agent.params), vector_of(first.state.agent.params))
    # The seeds of a population are trained by that program one after the other.
    train(jaxrl.population(strategy, seeds=2))
    assert len(compiled) == after_first
    shorter = strategy.env._replace(spec=strategy.env.spec._replace(time_limit=5))
    assert train(strategy._replace(env=shorter)).best_score == 5 * 6 / 2
    assert len(compiled) > after_first


def test_what_tells_of_health_and_what_gives_it_back_go_together() -> None:
    for given, lacking in (("health", "reseed"), ("reseed", "health")):
        strategy = small_dqn()
        half = strategy._replace(state_fns=strategy.state_fns._replace(**{lacking: None}))
        with pytest.raises(jaxrl.SettingsError, match=f"has {given} but no {lacking}; give both"):
            jaxrl.Trainer(half)


def test_the_parts_of_any_state_are_told_of() -> None:
    wide = jax.ShapeDtypeStruct((1_000,), np.float32)
    plan = "the training state takes 0.008 MB (buffer 0.004 MB, agent 0.004 MB), 40 bytes for each of 100 transitions"
    assert str(plan_of_state({"agent": wide, "buffer": wide}, 100)) == plan
    assert str(plan_of_state(wide)) == "the training state takes 0.004 MB"
