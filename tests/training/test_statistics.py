"""Running statistics: numbers worked by hand."""

import json
import math
from typing import Any

import numpy as np
import pytest

import jaxrl

NAN, INF = float("nan"), float("inf")
TOLD: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "each of a few numbers": (
        *({"window": 2}, [{"x": 2.0}, {"x": 4.0}, {"x": 9.0}]),
        {"x_mean": 5, "x_std": math.sqrt(26 / 3), "x_min": 2, "x_max": 9, "x_last": 9, "x_rolling": 6.5, "x_count": 3},
    ),
    "what is missing or not finite is counted apart": (
        {"chosen": {"x": ["mean"], "y": ["last"]}},
        [{"x": 1.0}, {"x": NAN, "y": None}, {"x": 3.0, "y": -INF}, {"y": 5.0}],
        {"x_mean": 2, "x_count": 2, "x_missing": 1, "x_not_finite": 1}
        | {"y_last": 5, "y_count": 1, "y_missing": 2, "y_not_finite": 1},
    ),
    "none of nothing": ({"chosen": {"x": ["mean", "std"]}}, [], {"x_mean": None, "x_std": None, "x_count": 0}),
    "sums where asked for": ({"chosen": {"x": ["sum"]}}, [{"x": 2.0}, {"x": 4.5}], {"x_sum": 6.5, "x_count": 2}),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_statistics_tell_is_that_worked_by_hand(case: str) -> None:
    settings, rows, told = TOLD[case]
    statistics = jaxrl.Statistics(**settings)
    for row in rows:
        statistics = statistics.add(row)
    assert statistics.summary() == pytest.approx(told)


def test_it_never_changes_itself() -> None:
    one = jaxrl.Statistics().add({"x": 1.0})
    other = one.add({"x": 2.0})
    assert (one.summary()["x_count"], other.summary()["x_count"]) == (1, 2)


def test_a_large_mean_costs_no_digits() -> None:
    statistics, values = jaxrl.Statistics(), 1e9 + np.arange(10.0)
    for value in values:
        statistics = statistics.add({"x": value})
    assert statistics.summary()["x_std"] == pytest.approx(values.std())


def test_written_and_read_back_they_go_on_as_if_nothing_had_happened() -> None:
    one = jaxrl.Statistics({"never": ["mean"]}, window=3)
    for value in (0.1, 0.2, float("nan"), 0.7):
        one = one.add({"x": value})
    other = jaxrl.Statistics({"never": ["mean"]}, window=3).restore(json.loads(json.dumps(one.facts())))
    assert other.add({"x": 5.0}).summary() == one.add({"x": 5.0}).summary()
    with pytest.raises(ValueError, match=r"no statistics|unpack"):
        one.restore({"x": [1, 2]})


@pytest.mark.parametrize("values", [(1e200, -1e200), (1.5e308, 1.5e308), (1.5e308, -1.5e308)])
def test_sums_that_overflow_are_written_and_read_back(values: tuple[float, float]) -> None:
    one = jaxrl.Statistics(others=["std", "min", "max", "rolling", "sum"])
    for value in values:
        one = one.add({"x": value})
    summary = one.summary()
    assert [summary[f"x_{what}"] for what in ("min", "max", "rolling")] == [
        min(values),
        max(values),
        values[0] / 2 + values[1] / 2,
    ]
    written = json.dumps(one.facts(), allow_nan=False)
    assert str(jaxrl.Statistics(others=one.others).restore(json.loads(written)).summary()) == str(summary)


@pytest.mark.parametrize(
    ("message", "settings"),
    [("unknown aggregation 'men'; did you mean mean", {"others": ["men"]}), ("window is 0", {"window": 0})],
)
def test_what_cannot_be_is_refused(message: str, settings: dict) -> None:
    with pytest.raises(jaxrl.SettingsError, match=message):
        jaxrl.Statistics(**settings)
