"""Learning curves: downsampled for each run, and aggregated for each group as mean, IQM and interval."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxrl.reports.rows import AXES, Curve
from jaxrl.training.population.scores import RESAMPLES, interval, iqm

POINTS = 100
"""Maximum number of points at which the runs of a group are aggregated."""
AT_ONCE = 2**21
"""Approximate number of values that the bootstrap draws at once."""


class Band(NamedTuple):
    """Statistics of a group's runs along an axis; each `[N]`, NaN where unknown."""

    x: np.ndarray
    runs: np.ndarray
    """Number of runs with a value."""
    mean: np.ndarray
    iqm: np.ndarray
    low: np.ndarray
    high: np.ndarray


def thin(curve: Curve, points: int) -> Curve:
    """Downsample a curve to at most `points`, 4 or more: its ends, and minimum and maximum of each of equal parts.

    This keeps every visible peak and dip.
    """
    count = len(curve.y)
    if count <= points:
        return curve
    parts = max((points - 2) // 2, 1)
    edges = np.linspace(0, count, parts + 1).astype(int)
    ends = [0, count - 1]
    lows = [a + int(curve.y[a:b].argmin()) for a, b in pairwise(edges)]
    highs = [a + int(curve.y[a:b].argmax()) for a, b in pairwise(edges)]
    kept = np.unique([*ends, *lows, *highs])
    return Curve(curve.x[:, kept], curve.y[kept])


def band(curves: Sequence[Curve], axis: str, least: int = 2) -> Band | None:
    """Aggregate the curves of a group over `axis`, one of `AXES`; return `None` if fewer than `least` have points.

    Curves are interpolated linearly and not extrapolated: beyond its end, a run no longer counts.
    """
    lines = [_sort_points(curve.x[AXES.index(axis)], curve.y) for curve in curves]
    lines = [line for line in lines if len(line[0])]
    if len(lines) < least:
        return None
    x = _grid([line[0] for line in lines])
    values = np.stack([np.interp(x, *line, left=np.nan, right=np.nan) for line in lines], axis=1)
    return Band(x, np.isfinite(values).sum(axis=1), *_numbers(values))


def _sort_points(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points with finite `x`, sorted; of several with equal `x`, the last."""
    x, y = x[np.isfinite(x)], y[np.isfinite(x)]
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    last = np.append(x[1:] != x[:-1], True)[: len(x)]
    return x[last], y[last]


def _grid(places: Sequence[np.ndarray]) -> np.ndarray:
    """Return the grid for aggregation: the points of all curves, or an even selection if they exceed `POINTS`."""
    x = np.unique(np.concatenate(places))
    return x if len(x) <= POINTS else x[np.linspace(0, len(x) - 1, POINTS).round().astype(int)]


def _numbers(values: np.ndarray) -> np.ndarray:
    """Return mean, IQM and the bounds of its interval, `[4, N]`, of `values [N, runs]`, ignoring NaN."""
    statistics = np.full((4, len(values)), np.nan)
    known = np.isfinite(values)
    # Points at which the same runs have values are resampled together.
    for pattern in np.unique(known, axis=0):
        rows = np.flatnonzero((known == pattern).all(axis=1))
        several = max(AT_ONCE // (RESAMPLES * max(int(pattern.sum()), 1)), 1)
        for some in np.split(rows, range(several, len(rows), several)):
            statistics[:, some] = _of_known(values[np.ix_(some, np.flatnonzero(pattern))])
    return statistics


def _of_known(values: np.ndarray) -> np.ndarray:
    """Return the same for finite `values [N, runs]`; the interval of a single run is NaN."""
    if not values.shape[1]:
        return np.full((4, len(values)), np.nan)
    ends = interval([values]) if values.shape[1] > 1 else np.full((2, len(values)), np.nan)
    return np.stack([values.mean(axis=1), iqm(values), *ends])
