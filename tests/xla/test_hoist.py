"""Randomness out of a loop's body: the same numbers, none of them drawn inside."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys_bits import require_same_bits

import jaxrl
from jaxrl.strategies.base import iterate
from jaxrl.training.program import run, state_shapes
from jaxrl.trees import tree_bytes
from jaxrl.xla import forms, hoist

KEY = jax.random.key(3)
TIMES = 5


def primitives(jaxpr: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the name of every primitive, and in how many `while` loops it stands."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, depth
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from primitives(value, depth + (eqn.primitive.name == "while"))


PASSED_ON = ("random_wrap", "random_unwrap", "random_seed")
"""Primitives on keys that work no random numbers out."""


def drawn_inside(jaxpr: Any, depth: int = 0) -> list[str]:
    """Return the primitives that draw, in at least `depth` loops."""
    draws = lambda name: name.startswith(("random_", "threefry")) and name not in PASSED_ON
    return [name for name, at in primitives(jaxpr) if at >= depth and draws(name)]


def left_in(body: Callable[..., Any], carry: Any) -> list[str]:
    """Return the primitives that draw in what is left of `body`."""
    hoisted = hoist.hoist(body, carry, KEY, jnp.uint32(0))
    return drawn_inside(jax.make_jaxpr(hoisted.behind)(carry, hoisted.drawn, KEY, jnp.uint32(0)))


def after(body: Callable[..., Any], carry: Any, which: str, key: Any = KEY, times: int = TIMES) -> Any:
    with forms(which):
        return jax.jit(lambda key, carry: iterate(body, key, carry, 2, 2 + times))(key, carry)


# --- toy bodies; none multiplies a drawn number by a constant, which XLA would join to those of the draw -----------


def straight(carry, key, t):
    """Draw a few kinds of numbers from the iteration's key."""
    first, second = jax.random.split(jax.random.fold_in(key, t))
    return jnp.maximum(carry * 0.5, jax.random.normal(first, (3,))) * jax.random.permutation(second, 3)


def rows(carry, key, t):
    """Scan over keys, with numbers put out that only the keys decide, and others."""

    def one(carry, key):
        number = jax.random.uniform(key, (3,))
        return jnp.maximum(carry * 0.5, number), (number[0], carry[1])

    carry, (numbers, seen) = jax.lax.scan(one, carry, jax.random.split(jax.random.fold_in(key, t), 4))
    return jnp.maximum(carry, numbers[1]) * seen[2]


def stacked(carry, key, t):
    """Scan over keys and numbers that are stacked first."""

    def one(carry, x):
        numbers = jnp.stack([jax.random.uniform(key) for key in x["keys"]])
        return jnp.maximum(carry * 0.5, numbers) * x["signs"], None

    keys = jax.random.split(jax.random.fold_in(key, t), (3, 4))
    signs = jnp.stack([jax.random.rademacher(key, (3,), float) for key in keys[0]])
    return jax.lax.scan(one, carry, {"keys": jnp.stack(list(keys), axis=1), "signs": signs})[0]


def split_on(carry, key, t):
    """Split the key inside the carry of a scan, beside a counter; use what is left of both."""

    def one(state, _):
        carry, key, count = state
        key, own = jax.random.split(key)
        number = jax.random.randint(own, (3,), 0, 9) + count
        return (jnp.where(number > 4, carry * 0.5, number), key, count + 1), None

    start = (carry, jax.random.fold_in(key, t), 0)
    (carry, key, count), _ = jax.lax.scan(one, start, None, length=4, reverse=True)
    return jnp.maximum(carry, jax.random.uniform(key)) * count


def nested(carry, key, t):
    """Split in two scans, one inside the other."""

    def outer(carry, key):
        def inner(state, x):
            carry, key = state
            key, own = jax.random.split(key)
            return (jnp.maximum(carry * 0.5, jax.random.normal(own, (3,)) * x), key), None

        (carry, _), _ = jax.lax.scan(inner, (carry, key), jnp.arange(3.0))
        return carry, None

    return jax.lax.scan(outer, carry, jax.random.split(jax.random.fold_in(key, t)))[0]


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda x, tangent: (x[0] * 2, tangent[0] * 2))


def called(carry, key, t):
    """Draw inside calls, one of them with a derivative of its own, and keep a number for the next iteration."""
    draw = jax.jit(lambda key, carry: jnp.maximum(carry[0] * 0.5, doubled(jax.random.uniform(key, (3,)))))
    number = draw(jax.random.fold_in(key, t), carry)
    return number, jax.nn.relu(jax.random.normal(jax.random.fold_in(key, t + 1), (3,))), carry[1]


def branches(carry, key, t):
    """Draw in branches and loops that nothing carried reaches."""
    key = jax.random.fold_in(key, t)
    number = jax.lax.cond(t > 3, lambda: jax.random.uniform(key), lambda: jnp.float32(2))
    return jnp.maximum(carry * 0.5, number) * jax.random.poisson(key, 3.0)


def mixed(carry, key, t):
    """Draw in a branch and in a loop that what is carried decides about."""
    key = jax.random.fold_in(key, t)
    carry = jax.lax.cond(carry[0] > 0.5, lambda: carry * jax.random.uniform(key), lambda: carry + 2)
    grow = lambda x: (x[0] * 2, jax.random.split(x[1])[0])
    carry, key = jax.lax.while_loop(lambda x: x[0][0] < 5, grow, (carry, key))
    return carry * jax.random.randint(key, (3,), 1, 3)


START = jnp.arange(3.0)
TAKEN_OUT = {f.__name__: f for f in (straight, rows, stacked, split_on, nested, branches)}


# Every day, others are drawn below, by a population and by keys of the old style.
@pytest.mark.every_day("stacked", "nested", "branches", "called", "mixed")
@pytest.mark.parametrize("name", [*TAKEN_OUT, "called", "mixed"])
def test_numbers_are_those_of_the_plain_form(name: str) -> None:
    body, carry = globals()[name], (START,) * 3 if name == "called" else START
    require_same_bits(after(body, carry, "cpu"), after(body, carry, "plain"))


@pytest.mark.parametrize("name", [*TAKEN_OUT, "called"])
def test_nothing_is_drawn_in_what_is_left(name: str) -> None:
    body, carry = globals()[name], (START,) * 3 if name == "called" else START
    assert drawn_inside(jax.make_jaxpr(body)(carry, KEY, jnp.uint32(0)))
    assert left_in(body, carry) == []


def test_what_something_carried_decides_about_stays_whole() -> None:
    """The draw inside the branch, and the keys of the loop with the draw from the last of them."""
    inside = [name for name, _ in primitives(jax.make_jaxpr(mixed)(START, KEY, jnp.uint32(0)))]
    assert sorted(left_in(mixed, START)) == sorted(name for name in inside if name in ("random_bits", "random_split"))


def test_a_population_draws_its_own_numbers() -> None:
    keys, carry = jax.random.split(KEY, 3), jnp.arange(9.0).reshape(3, 3)
    together = jax.jit(jax.vmap(lambda key, carry: after(split_on, carry, "cpu", key)))(keys, carry)
    require_same_bits(together, jnp.stack([after(split_on, c, "plain", k) for k, c in zip(keys, carry, strict=True)]))


def test_keys_of_the_old_style_draw_the_same() -> None:
    old = jax.random.PRNGKey(3)
    require_same_bits(after(rows, START, "cpu", old), after(rows, START, "plain"))


def test_a_body_may_close_over_what_is_traced() -> None:
    def total(which: str) -> Any:
        body = lambda scale: (
            lambda carry, key, t: jnp.maximum(carry, scale * jax.random.uniform(jax.random.fold_in(key, t)))
        )
        return jax.jit(lambda scale: after(body(scale), jnp.float32(0), which))(jnp.float32(4))

    require_same_bits(total("cpu"), total("plain"))


# --- what is not taken out ----------------------------------------------------------------------------------------


def drawn_of(body: Callable[..., Any], carry: Any = START) -> list[Any]:
    return hoist.hoist(body, carry, KEY, jnp.uint32(0)).drawn


def test_what_is_not_random_is_left() -> None:
    assert drawn_of(lambda carry, key, t: carry + jnp.sin(t.astype(float)) + 3) == []


def test_nothing_is_kept_that_is_not_needed() -> None:
    """Of a number: neither its bits nor its key, nor a copy in another shape; unused numbers are not drawn."""

    def body(carry, key, t):
        unused, key = jax.random.split(jax.random.fold_in(key, t))
        del unused
        return carry + jnp.broadcast_to(jax.random.uniform(key), 3)

    assert [(x.shape, x.dtype.name) for x in drawn_of(body)] == [((), "float32")]


def test_a_draw_too_large_is_made_inside_from_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoist, "DRAW_BYTES", 1 << 16)

    def body(carry, key, t):
        small, large = jax.random.split(jax.random.fold_in(key, t))
        return jnp.maximum(carry * 0.5, jax.random.normal(small, (3,))) * jax.random.bits(large, (20_000,))[:3]

    assert tree_bytes(drawn_of(body)) < 100
    assert left_in(body, START) == ["random_bits"]
    require_same_bits(after(body, START, "cpu"), after(body, START, "plain"))


@pytest.mark.parametrize(("draws", "ahead"), [(6, 60_000_000), (7, 0)])
def test_what_is_drawn_ahead_is_bounded_in_sum(draws: int, ahead: int) -> None:
    """Each of these draws takes 10 MB."""

    def body(carry, key, t):
        small, *large = jax.random.split(jax.random.fold_in(key, t), draws + 1)
        carry = jnp.maximum(carry * 0.5, jax.random.normal(small, (3,)))
        return carry + sum(jax.random.bits(key, (2_500_000,))[carry.astype(jnp.int32)] for key in large)

    assert ahead <= tree_bytes(drawn_of(body)) < ahead + 1_000


def test_large_states_made_of_few_numbers_are_made_inside() -> None:
    """As those after the reset of a large environment: the few numbers are kept instead."""

    def body(carry, key, t):
        keys = jax.random.split(jax.random.fold_in(key, t), 6)
        place = jax.vmap(lambda key: jax.random.randint(key, (2,), 0, 80))(keys)
        return jnp.maximum(carry, jax.vmap(lambda at: jnp.zeros((80, 80)).at[at[0], at[1]].set(1.0))(place))

    assert tree_bytes(drawn_of(body, jnp.zeros((6, 80, 80)))) < 200
    assert left_in(body, jnp.zeros((6, 80, 80))) == []


def test_products_of_matrices_are_not_made_ahead() -> None:
    def body(carry, key, t):
        return carry + jax.random.normal(jax.random.fold_in(key, t), (3, 3)) @ jnp.ones(3)

    hoisted = hoist.hoist(body, START, KEY, jnp.uint32(0))
    names = lambda f, *args: [name for name, _ in primitives(jax.make_jaxpr(f)(*args))]
    assert "dot_general" in names(hoisted.behind, START, hoisted.drawn, KEY, jnp.uint32(0))
    assert "dot_general" not in names(hoisted.ahead, KEY, jnp.uint32(0))


def test_what_is_told_to_the_host_is_told_once_an_iteration() -> None:
    told: list[float] = []

    def body(carry, key, t):
        number = jax.random.uniform(key)
        jax.debug.callback(lambda x: told.append(float(x)), number)
        return jnp.maximum(carry, number)

    after(body, START, "cpu").block_until_ready()
    jax.effects_barrier()
    assert sorted(told) == sorted(float(jax.random.uniform(jax.random.fold_in(KEY, t))) for t in range(2, 2 + TIMES))


def test_a_body_is_traced_once() -> None:
    calls = []

    def body(carry, key, t):
        calls.append(1)
        return straight(carry, key, t)

    after(body, START, "cpu")
    assert len(calls) == 1


# --- in training --------------------------------------------------------------------------------------------------


def drifting() -> jaxrl.Env:
    """Draw in every step from the key that comes, as environments usually do."""

    def reset(key):
        place = jax.random.uniform(key, (2,))
        return place, place

    def step(place, action, key):
        place = jnp.clip(place + 0.1 * action + 0.1 * jax.random.normal(key, (2,)), 0.0, 1.0)
        return place, jaxrl.TimeStep(place, -place.sum(), place[0] > 0.9)

    return jaxrl.Env(jaxrl.EnvSpec("drifting", jaxrl.Box(0.0, 1.0, (2,)), jaxrl.Discrete(2)), reset, step)


def off_policy(
    env: jaxrl.Env, vector_steps: int, agent: Any = None, processor: Any = None, buffer: Any = None
) -> jaxrl.Strategy:
    sizes = {"num_envs": 4, "opt_interval": 4 * vector_steps, "warmup": 16}
    agent, buffer = agent or jaxrl.dqn(features=(8,)), buffer or jaxrl.uniform(96, batch_size=8)
    return jaxrl.off_policy(env, agent, buffer=buffer, processor=processor, **sizes)


TRAINED: dict[str, Callable[[], jaxrl.Strategy]] = {
    "an environment of one's own, 3 steps": lambda: off_policy(drifting(), 3),
    "MinAtar": lambda: off_policy(jaxrl.make_env("Breakout-MinAtar"), 1),
    "an environment of one's own, rollouts": lambda: jaxrl.on_policy(
        drifting(), jaxrl.ppo(features=(8,)), num_envs=4, rollout=6, epochs=2, minibatches=2
    ),
    "n steps": lambda: off_policy(jaxrl.make_env("CartPole-v1"), 1, jaxrl.dqn(features=(8,)), jaxrl.n_step(3)),
    "rainbow, prioritised": lambda: off_policy(
        jaxrl.make_env("Catch-bsuite"),
        1,
        jaxrl.rainbow(features=(8,), atoms=11, v_min=-1.0, v_max=1.0),
        jaxrl.n_step(3),
        jaxrl.prioritised(96, batch_size=8),
    ),
    "sac": lambda: off_policy(jaxrl.make_env("Pendulum-v1"), 1, jaxrl.sac(features=(8,))),
    "ppo": lambda: jaxrl.on_policy(
        jaxrl.make_env("Catch-bsuite"), jaxrl.ppo(features=(8,)), num_envs=4, rollout=6, epochs=2, minibatches=2
    ),
}


def assert_nothing_drawn_inside(strategy: jaxrl.Strategy) -> None:
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    jaxpr = jax.make_jaxpr(partial(run, strategy))(*state_shapes(strategy), count, count)
    assert len(drawn_inside(jaxpr, 1)) > len(drawn_inside(jaxpr, 2)) == 0


@pytest.mark.every_day("ppo")
@pytest.mark.parametrize("name", TRAINED)
def test_nothing_is_drawn_in_the_inner_loop_of_training(name: str) -> None:
    assert_nothing_drawn_inside(TRAINED[name]())


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_nor_with_the_forms_of_an_accelerator(platform: str) -> None:
    with forms(platform):
        assert_nothing_drawn_inside(TRAINED["an environment of one's own, rollouts"]())
