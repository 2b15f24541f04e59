"""Whole numbers shown one-hot: which flags are true, and what is left alone."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.processors import one_hot

SPACE: dict[str, Any] = {
    "board": jaxrl.Box(-1, 2, (2, 2), "int8"),
    "tiles": jaxrl.Box(0, (2.0, 1.0), (1, 1, 2), "int32"),
    "place": jaxrl.Box(-np.inf, np.inf, (2,), "int32"),
    "steps": jaxrl.Box(0, 99, (), "int32"),
    "photo": jaxrl.Box(0, 255, (3, 3, 1), "uint8"),
    "speed": jaxrl.Box(-1.0, 1.0, (2,)),
    "tools": jaxrl.MultiDiscrete((3, 2)),
    "action_mask": jaxrl.Box(0, 1, (2,), bool),
}


def test_each_number_is_the_flag_of_its_value_and_what_is_no_grid_or_row_is_left_alone() -> None:
    obs = {
        "board": jnp.array([[[0, 2], [-1, 1]]], "int8"),
        "tiles": jnp.array([[[[2, 1]]]], "int32"),
        "place": jnp.array([[1, 7]], "int32"),
        "steps": jnp.array([42], "int32"),
        "photo": jnp.full((1, 3, 3, 1), 2, "uint8"),
        "speed": jnp.array([[0.5, -0.5]]),
        "tools": jnp.array([[2, 0]], "int32"),
        "action_mask": jnp.array([[True, False]]),
    }
    processor = one_hot(3)
    seen = processor.observe(processor.init(obs))
    a, b, c, none = [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]
    assert seen["board"].astype(int).tolist() == [[[a, c], [none, b]]]
    assert seen["tiles"].astype(int).tolist() == [[[[*c, *b]]]]
    assert seen["place"].astype(int).tolist() == [[*b, *none]]
    assert seen["tools"].astype(int).tolist() == [[*c, *a]]
    for name in ("steps", "photo", "speed", "action_mask"):
        np.testing.assert_array_equal(seen[name], obs[name])
    space: Any = processor.space(SPACE)
    assert space == {
        **SPACE,
        "board": jaxrl.Box(0, 1, (2, 2, 3), bool),
        "tiles": jaxrl.Box(0, 1, (1, 1, 6), bool),
        "place": jaxrl.Box(0, 1, (6,), bool),
        "tools": jaxrl.Box(0, 1, (6,), bool),
    }
    assert {name: (x.shape[1:], x.dtype) for name, x in seen.items()} == {
        name: (x.shape, x.dtype) for name, x in space.items()
    }


@pytest.mark.parametrize(
    ("values", "space", "said"),
    [
        (2, SPACE, r"one_hot is 2, but observations have integers up to 2; raise it"),
        (9, jaxrl.Box(0.0, 1.0, (3,)), r"for grids and vectors of integers, but observations have none"),
    ],
)
def test_what_it_cannot_show_is_refused(values: int, space: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        one_hot(values).space(space)
    with pytest.raises(SettingsError, match="one_hot is 1; expected a whole number"):
        one_hot(1)
