"""Means over data sets and origins, with block-bootstrap intervals.

    coverage:  mean over sets of the mean over origins,
    ratio:     geometric mean over sets of  (sum over origins of a score of one law) / (the same of another).

An interval holds 95 % of the values on resampled origins. Blocks are single origins; where windows overlap they are
consecutive origins, at most half of them. The same origins are drawn for all laws, so that ratios are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.forecasting.joint_bases import PLANS
from experiments.forecasting.rows import DATASETS
from experiments.table import Line
from experiments.templates import MissingFigureError

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """The value and its interval, such as ``81 [74, 87]``."""
        value, low, high = (f"{scale * number:.{digits}f}" for number in self)
        return f"{value} [{low}, {high}]"


@dataclass(frozen=True)
class Row:
    """A base forecast under a law."""

    base: str
    law: str
    calibrated: bool

    def by_origin(self, lines: Sequence[Line], dataset: str, group: str, field: str) -> dict[int, float]:
        """The field of a group at each origin, a mean over seeds; an empty group name means a field of the line."""
        values: dict[int, list[float]] = {}
        for line in lines:
            if (line["dataset"], line["base"], line["law"], line["calibrated"]) == (
                dataset,
                self.base,
                self.law,
                self.calibrated,
            ):
                values.setdefault(line["origin"], []).append(line[group][field] if group else line[field])
        return {origin: float(np.mean(several)) for origin, several in values.items()}


def coverage(lines: Sequence[Line], rows: Sequence[Row], group: str, field: str) -> Estimate:
    """Pooled coverage, a mean over rows and data sets.

    Raises:
        MissingFigureError: If there are no lines.
    """
    drawn = []
    for row in rows:
        for dataset in DATASETS:
            values = row.by_origin(lines, dataset, group, field)
            if values:
                array = np.array([values[origin] for origin in sorted(values)])
                drawn.append(_with_resamples(array, dataset).mean(1))
    return _estimate(drawn)


def ratio(lines: Sequence[Line], row: Row, other: Row, group: str, field: str, datasets: Sequence[str]) -> Estimate:
    """Geometric mean over data sets of the ratio of summed scores.

    Raises:
        MissingFigureError: If the rows share no data set.
    """
    drawn = []
    for dataset in datasets:
        first, second = (one.by_origin(lines, dataset, group, field) for one in (row, other))
        shared = sorted(set(first) & set(second))
        if shared:
            sums = [
                _with_resamples(np.array([values[origin] for origin in shared]), dataset).sum(1)
                for values in (first, second)
            ]
            drawn.append(np.log(sums[0] / sums[1]))
    estimate = _estimate(drawn)
    return Estimate(*(float(np.exp(value)) for value in estimate))


def relative_score(lines: Sequence[Line], row: Row, dataset: str, group: str, field: str) -> float:
    """The summed score of a group on a data set over the summed ``|y|``.

    Raises:
        MissingFigureError: If there are no lines.
    """
    scores, sizes = (row.by_origin(lines, dataset, group, name) for name in (field, "size"))
    if not scores:
        raise MissingFigureError(f"{row.base} on {dataset}")
    return sum(scores.values()) / sum(sizes.values())


def _estimate(drawn: Sequence[np.ndarray]) -> Estimate:
    """The mean of several quantities (1 + resamples,), the first of each being the value itself."""
    if not drawn:
        raise MissingFigureError("lines of joint laws")
    value, *resampled = np.mean(drawn, axis=0)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Estimate(float(value), float(low), float(high))


def _with_resamples(values: np.ndarray, dataset: str) -> np.ndarray:
    """The values of all origins, and of circular blocks of origins drawn with replacement, (1 + resamples, origins)."""
    count, plan = len(values), PLANS[dataset]
    length = max(1, min(-(-plan.horizon // plan.step), count // 2))
    random = np.random.default_rng(DATASETS.index(dataset))
    starts = random.integers(count, size=(RESAMPLES, -(-count // length)))
    index = (starts[..., None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    return np.concatenate([values[None], values[index]])
