"""Metrics that add up over a scan, and spaces: bounds of what is drawn, and a round trip through plain data."""

import json
import math
from collections import namedtuple
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from scipy.stats import chisquare

from jaxrl.envs import make_env, vectorise
from jaxrl.errors import SettingsError
from jaxrl.metrics import stat, total, totals
from jaxrl.spaces import (
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    Space,
    sample_space,
    space_from_plain,
    space_struct,
    space_to_plain,
    space_zeros,
    spec_from_plain,
    spec_to_plain,
)
from jaxrl.trees import tree_bytes, tree_where
from jaxrl.xla.shuffle import below

NESTED = {
    "camera": Box(0.0, 1.0, (4, 4, 3), "bfloat16"),
    "pair": (Discrete(3), MultiDiscrete((2, 5))),
    "arm": Box((-1.0, -2.0), (1.0, 2.0), (2,)),
    "free": Box(-math.inf, math.inf, (2,)),
}


# --- metrics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "where", "wanted"),
    [
        ([1.0, 50.0, 3.0, -2.0], [True, False, True, True], [3, 2, -2, 3]),
        ([1.0, math.nan, math.inf], [True, False, False], [1, 1, 1, 1]),  # what is left out may be no number
        ([0.0, 0.0, 0.0], [False] * 3, [0, 0, math.inf, -math.inf]),  # which leaves others as they are
    ],
)
def test_a_stat_counts_only_where_it_is_told(values: Any, where: Any, wanted: Any) -> None:
    assert [float(x) for x in stat(jnp.array(values), jnp.array(where))] == wanted


def test_a_total_counts_events() -> None:
    assert int(total(jnp.array([True, False, True])).count) == 2


def test_several_totals_are_those_of_each() -> None:
    counts = totals({"all": jnp.ones(3, bool), "some": jnp.array([True, False, True])})
    assert {name: int(count.count) for name, count in counts.items()} == {"all": 3, "some": 2}


# --- spaces ---------------------------------------------------------------------------------------------------------


def draws(space: Space, count: int = 2000) -> Any:
    keys = jax.random.split(jax.random.key(0), count)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: sample_space(space, key)))(keys))


def at_once(space: Space, count: int) -> Any:
    return jax.tree.map(np.asarray, jax.jit(lambda key: sample_space(space, key, count))(jax.random.key(0)))


@pytest.mark.parametrize("bound", [1, 3, 8, 1000])
def test_numbers_below_a_bound_are_equally_likely(bound: int) -> None:
    drawn = np.asarray(jax.jit(lambda key: below(key, (50 * bound,), bound))(jax.random.key(1)))
    counts = np.bincount(drawn, minlength=bound)
    assert len(counts) == bound
    assert bound == 1 or chisquare(counts).pvalue > 1e-3


def test_many_elements_are_drawn_at_once_each_its_own() -> None:
    space = {"go": Discrete(3), "how": Box(0.0, 1.0, (2,)), "which": MultiDiscrete((2, 5))}
    drawn = at_once(space, 400)
    assert {name: x.shape for name, x in drawn.items()} == {"go": (400,), "how": (400, 2), "which": (400, 2)}
    assert {name: str(x.dtype) for name, x in drawn.items()} == {"go": "int32", "how": "float32", "which": "int32"}
    assert chisquare(np.bincount(drawn["go"])).pvalue > 1e-3
    for numbers, size in zip(drawn["which"].T, (2, 5), strict=True):
        assert chisquare(np.bincount(numbers, minlength=size)).pvalue > 1e-3
        assert numbers.max() == size - 1
    assert len(np.unique(drawn["how"])) > 790, "no number twice but by chance"


def test_boxes_are_filled_between_their_bounds_entry_by_entry() -> None:
    drawn = draws(Box((-1.0, 10.0, 0.0, 5.0), (1.0, 30.0, 0.5, 6.0), (2, 2)))
    low, high = np.array([[-1, 10], [0, 5]]), np.array([[1, 30], [0.5, 6]])
    assert (drawn >= low).all()
    assert (drawn <= high).all()
    np.testing.assert_allclose(drawn.min(0), low, atol=0.3)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.3)


def test_whole_number_boxes_reach_both_ends() -> None:
    drawn = draws(Box(-2.0, 2.0, (3,), "int32"))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2]
    assert counts.min() > 0.15 * drawn.size


@pytest.mark.parametrize(
    "bounds",
    [
        (-math.inf, math.inf),
        (0.0, math.inf),
        (5.0, math.inf),
        (-math.inf, -5.0),
        (-3.4028234663852886e38, 3.4028234663852886e38),  # as gymnax bounds what has no bound
    ],
)
def test_boxes_without_bounds_give_finite_numbers(bounds: tuple[float, float]) -> None:
    drawn = draws(Box(*bounds, (3,)), 100)
    assert np.isfinite(drawn).all()
    assert len(np.unique(drawn)) > 200 * np.isinf(bounds).all() + 90
    assert bounds[0] <= drawn.min() <= drawn.max() <= bounds[1]


def test_a_bounded_entry_stays_within_its_bounds_beside_an_unbounded_one() -> None:
    drawn = draws(Box((2.0, -math.inf), (3.0, math.inf), (2,)))
    assert 2 <= drawn[:, 0].min() < 2.1 < 2.9 < drawn[:, 0].max() <= 3
    assert drawn[:, 1].min() < -2 < 2 < drawn[:, 1].max()


def test_bytes_use_their_whole_range() -> None:
    drawn = draws(Box(0.0, 255.0, (8,), "uint8"))
    assert np.unique(drawn).tolist() == list(range(256))
    assert draws(Box(0.0, 1.0, (8,), "bool")).mean() == pytest.approx(0.5, abs=0.02)


def test_what_is_drawn_has_the_structure_of_its_space() -> None:
    struct = space_struct(NESTED)
    for element in (jax.eval_shape(lambda: sample_space(NESTED, jax.random.key(0))), space_zeros(NESTED)):
        assert jax.tree.structure(element) == jax.tree.structure(struct)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), element) == jax.tree.map(lambda x: (x.shape, x.dtype), struct)


def test_parts_of_a_space_are_drawn_independently() -> None:
    a, b = draws((Box(0.0, 1.0, ()), Box(0.0, 1.0, ())))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1


def test_named_tuples_of_spaces_keep_their_names_in_plain_data() -> None:
    pair = namedtuple("Pair", "b a")  # type: ignore[misc]
    first, again = (space_from_plain(json.loads(json.dumps(space_to_plain(pair(Discrete(2), ()))))) for _ in range(2))
    assert (repr(first), first.b) == (repr(pair(Discrete(2), ())), Discrete(2))
    assert type(first) is type(again)  # JAX takes them for one structure


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (Box(0, 255, (8, 8, 3), jnp.uint8), Box(0.0, 255.0, (8, 8, 3), "uint8")),  # type: ignore[arg-type]
        (Box(np.zeros((2, 2)), jnp.ones((2, 2)), [2, 2], np.dtype("f4")), Box(0.0, 1.0, (2, 2))),  # type: ignore[arg-type]
        (Box([-1, -2], np.array([1.0, 2.0]), 2), Box((-1.0, -2.0), (1.0, 2.0), (2,))),  # type: ignore[arg-type]
        (Box(-np.float32(np.inf), np.inf, np.array([3]), float), Box(-math.inf, math.inf, (3,))),  # type: ignore[arg-type]
        (Box(np.array([[0.0], [1.0]]), 2, (2, 2)), Box((0.0, 0.0, 1.0, 1.0), 2.0, (2, 2))),  # type: ignore[arg-type]
        (Box(0, 1, (), jnp.bfloat16), Box(0.0, 1.0, (), "bfloat16")),  # type: ignore[arg-type]
        (Discrete(np.int64(2), np.int32), Discrete(2)),  # type: ignore[arg-type]
        (Discrete(jnp.array(3)), Discrete(3)),  # type: ignore[arg-type]
        (MultiDiscrete(np.array([2, 3]), jnp.int32), MultiDiscrete((2, 3))),  # type: ignore[arg-type]
        (MultiDiscrete((2, 3), start=np.array([4, 4])), MultiDiscrete((2, 3), start=4)),  # type: ignore[arg-type]
        (MultiDiscrete((2, 3), start=[-1, 4]), MultiDiscrete((2, 3), start=(-1, 4))),  # type: ignore[arg-type]
    ],
)
def test_spaces_are_kept_as_plain_numbers_and_names_whatever_they_were_given_as(given: Any, plain: Any) -> None:
    assert given == plain
    assert repr(given) == repr(plain)
    assert hash(given) == hash(plain)
    assert space_from_plain(json.loads(json.dumps(space_to_plain(given)))) == plain
    assert space_from_plain(yaml.safe_load(yaml.safe_dump(space_to_plain(given)))) == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Discrete(0), "Discrete: n is 0; expected a whole number of at least 1"),
        (lambda: Discrete(-3), "n is -3"),
        (lambda: Discrete(2.0), "n is 2.0"),
        (lambda: Discrete(True), "n is True"),
        (lambda: Discrete(2, "colour"), "dtype is 'colour'; expected one of real numbers"),
        (lambda: Discrete(300, "uint8"), "n is 300, but uint8 holds 0 to 255; use fewer, or a wider dtype"),
        (lambda: Discrete(3, "bool"), "n is 3, but bool holds 0 to 1"),
        (lambda: Discrete(10**40), "0000, but int32 holds -2147483648 to 2147483647"),
        (lambda: Discrete(5, start=2**31 - 3), "n is 5 with start 2147483645, but int32 holds"),
        (lambda: Discrete(5, "uint8", start=-1), "n is 5 with start -1, but uint8 holds 0 to 255"),
        (lambda: Discrete(5, start=0.5), "start is 0.5; expected a whole number"),
        (lambda: MultiDiscrete((300, 2), "int8"), "n is 300, but int8 holds -128 to 127"),
        (
            lambda: MultiDiscrete((3, 2), start=(1, 2, 3)),
            r"start is \(1, 2, 3\); expected one .*, or one for each of 2",
        ),
        (lambda: Box(0, 2**40, (2,), "int64"), "bounds 0.0 to 1099511627776.0 do not fit int32.*use float32"),
        (
            lambda: EnvSpec("x", Box(0, 1, ()), Discrete(2), "long"),
            "x: time_limit is 'long'; expected at least 1 step",
        ),
        (lambda: MultiDiscrete((2, 0)), "MultiDiscrete: n is 0"),
        (lambda: MultiDiscrete(np.ones((2, 2), int)), "MultiDiscrete: n is array"),
        (lambda: Box(0, 1, (2,), object), "dtype is <class 'object'>"),
        (lambda: Box(0, 1, (2,), None), "dtype is None"),
        (lambda: Box(0, 1, (2.5,)), r"shape is \(2.5,\); expected whole numbers"),
        (lambda: Box(0, 1, (2, 0)), r"shape is \(2, 0\); expected whole numbers of at least 1"),
        (lambda: Box(0, 1, (-1,)), r"shape is \(-1,\)"),
        (lambda: Box(0, [1, 2, 3], (2,)), r"high has shape \[3\]; expected one number, or \[2\]"),
        (lambda: Box(float("nan"), 1, (2,)), "low is nan"),
        (lambda: Box("0", 1, (2,)), "low is '0'; expected a number"),
        (lambda: Box([0, 5], [1, 4], (2,)), "is above high"),
    ],
)
def test_what_is_no_space_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


def test_spaces_of_gymnasium_in_a_spec_become_ours() -> None:
    spaces = gymnasium.spaces
    seen = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "mode": spaces.MultiBinary(3)})
    spec = EnvSpec("crane", seen, spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 4])]))
    assert spec.observation_space == {"camera": Box(0.0, 255.0, (8, 8, 3), "uint8"), "mode": MultiDiscrete((2, 2, 2))}
    assert spec.action_space == (Discrete(3), MultiDiscrete((2, 4)))
    mixed = spec._replace(observation_space={"a": spaces.Box(-1, 1, (2,), np.float64), "b": [Discrete(2)]})
    assert mixed.observation_space == {"a": Box(-1.0, 1.0, (2,)), "b": (Discrete(2),)}
    for one in (spec, mixed):
        assert spec_from_plain(json.loads(json.dumps(spec_to_plain(one)))) == one
        assert isinstance(one, EnvSpec)
    for wrong, message in (
        (spaces.Text(3), r"environment crane has a space Text.*expected Box, Discrete"),
        ({1: Discrete(2)}, "the key 1; expected names"),
        (3, "environment crane has a space 3"),
        (None, "environment crane has a space None"),
    ):
        with pytest.raises(SettingsError, match=message):
            EnvSpec("crane", wrong, Discrete(2))


def test_an_environment_in_jax_counts_from_0_and_one_elsewhere_as_gymnasium_does() -> None:
    spaces = gymnasium.spaces
    seen = spaces.Dict(a=spaces.Discrete(3, start=-1), b=spaces.MultiDiscrete([2, 4], start=[1, 5]))
    spec = EnvSpec("crane", seen, spaces.Discrete(3, start=1))
    assert spec.observation_space == {"a": Discrete(3, start=-1), "b": MultiDiscrete((2, 4), start=(1, 5))}
    assert spec.action_space == Discrete(3, start=1)
    assert spec_from_plain(json.loads(json.dumps(spec_to_plain(spec)))) == spec
    env = make_env("CartPole-v1")
    env = env._replace(spec=env.spec._replace(action_space=Discrete(2, start=1)))
    with pytest.raises(SettingsError, match=r"has a space Discrete\(n=2.* count from 0; leave start out"):
        vectorise(env, 1)


def test_whole_numbers_of_gymnasium_that_do_not_fit_become_floats() -> None:
    boxes = gymnasium.spaces.Dict(
        small=gymnasium.spaces.Box(0, 2**31 - 1, (2,), np.int64),
        large=gymnasium.spaces.Box(0, 2**40, (2,), np.int64),
        any=gymnasium.spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64),
        bits=gymnasium.spaces.Box(0, 2**32 - 1, (1,), np.uint32),
    )
    space = EnvSpec("counter", boxes, Discrete(2)).observation_space
    dtypes = {name: part.dtype for name, part in space.items()}
    assert dtypes == {"small": "int32", "large": "float32", "any": "float32", "bits": "uint32"}
    with pytest.raises(SettingsError, match=r"environment counter has a space Discrete\(1099.*but int32 holds"):
        EnvSpec("counter", gymnasium.spaces.Discrete(2**40), Discrete(2))


@pytest.mark.parametrize("time_limit", [None, 200])
def test_a_spec_is_read_back_as_it_was_written(time_limit: int | None) -> None:
    spec = EnvSpec("Crane-v0", NESTED, Discrete(5), time_limit)
    assert spec_from_plain(json.loads(json.dumps(spec_to_plain(spec)))) == spec


# --- pytrees ----------------------------------------------------------------------------------------------------------


def test_tree_where_chooses_row_by_row() -> None:
    new, old = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    got = tree_where(jnp.array([True, False]), new, old)
    assert got["a"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert got["b"].tolist() == [1, 0]
    assert tree_where(jnp.array(False), new, old)["a"].sum() == 0


def test_tree_where_takes_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    got = tree_where(jnp.array([True, False]), keys[:2], keys[2:])
    assert (got == keys[jnp.array([0, 3])]).all()


def test_bytes_of_a_tree() -> None:
    tree = (jnp.zeros((3, 2)), jnp.zeros(5, jnp.int8), jnp.zeros(2, jnp.bfloat16), jnp.zeros((), bool))
    assert tree_bytes(tree) == 24 + 5 + 4 + 1
    assert tree_bytes(jax.eval_shape(lambda: tree)) == 34
