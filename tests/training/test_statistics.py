"""Running statistics: numbers worked by hand."""

import json
import math

import numpy as np
import pytest

import jaxrl


def test_each_aggregation_of_a_few_numbers() -> None:
    statistics = jaxrl.Statistics(window=2)
    for value in (2.0, 4.0, 9.0):
        statistics = statistics.add({"x": value})
    told = statistics.summary()
    assert told.pop("x_std") == pytest.approx(math.sqrt(26 / 3))
    assert told == {"x_mean": 5.0, "x_min": 2.0, "x_max": 9.0, "x_last": 9.0, "x_rolling": 6.5, "x_count": 3}


def test_what_is_missing_or_not_finite_is_counted_apart() -> None:
    statistics = jaxrl.Statistics({"x": ["mean"], "y": ["last"]})
    for values in ({"x": 1.0}, {"x": float("nan"), "y": None}, {"x": 3.0, "y": float("-inf")}, {"y": 5.0}):
        statistics = statistics.add(values)
    assert statistics.summary() == {
        "x_mean": 2.0,
        "x_count": 2,
        "x_missing": 1,
        "x_not_finite": 1,
        "y_last": 5.0,
        "y_count": 1,
        "y_missing": 2,
        "y_not_finite": 1,
    }


def test_there_is_none_of_nothing() -> None:
    assert jaxrl.Statistics({"x": ["mean", "std"]}).summary() == {"x_mean": None, "x_std": None, "x_count": 0}


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
    other = jaxrl.Statistics({"never": ["mean"]}, window=3).take_up(json.loads(json.dumps(one.facts())))
    assert other.add({"x": 5.0}).summary() == one.add({"x": 5.0}).summary()
    with pytest.raises(ValueError, match=r"no statistics|unpack"):
        one.take_up({"x": [1, 2]})


@pytest.mark.parametrize(
    ("message", "settings"),
    [("unknown aggregation 'men'; did you mean mean", {"others": ["men"]}), ("window is 0", {"window": 0})],
)
def test_what_cannot_be_is_refused(message: str, settings: dict) -> None:
    with pytest.raises(jaxrl.SettingsError, match=message):
        jaxrl.Statistics(**settings)


def test_sums_are_given_where_asked_for() -> None:
    one = jaxrl.Statistics({"x": ["sum"]}).add({"x": 2.0}).add({"x": 4.5})
    assert one.summary() == {"x_sum": 6.5, "x_count": 2}
