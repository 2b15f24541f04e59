"""Running sums: means, smallest and largest by hand, and no growth or drift over long intervals."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.training import program
from jaxrl.training.program import add, summarise, zero_sums
from jaxrl.types import stat, total


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
    """They ask CPUs for what no flag has said, and other devices for nothing, whose compilers might not know it."""
    other, width = "--xla_cpu_enable_fast_math=false", "--xla_cpu_prefer_vector_width=256"
    cases = [("cpu", "", True), ("cpu", other, True), ("cpu", f"{other} {width}", False), ("gpu", "", False)]
    for backend, flags, asked in cases:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda backend=backend: backend)
            patch.setenv("XLA_FLAGS", flags)
            assert bool(program.compiler_options()) == asked
    step = lambda state, noise, t: (state, {"t": jnp.float32(t)})
    strategy = jaxrl.Strategy(State, jaxrl.fold, step, env_steps_per_step=1, opt_steps_per_step=1)
    monkeypatch.setattr(program, "compiler_options", lambda: {"no_such_option": 1})
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        program.jit_run(strategy).lower(*program.state_shapes(strategy), count, count).compile()
