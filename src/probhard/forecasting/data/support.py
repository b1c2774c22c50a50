"""Check of a forecast against the size of its history.

    ratio = sum over steps of the mean of the draws / sum over steps of the value one year before,

for every top node, without series that have ended. In histories shorter than a year, the smallest and the largest
value stand for the year before. A ratio below 1/2 or above 2 is outside what the history supports: usually a fault of
the data or of a model, sometimes news. It is reported, never corrected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData

YEARS = {"Y": 1, "Q": 4, "M": 12, "W": 52, "D": 365, "B": 261, "h": 8760, "min": 525600, "s": 31536000}  # steps
LOWEST, HIGHEST = 0.5, 2.0
SMALL = 0.1  # of the typical size of its parts: below it, a ratio says nothing


@dataclass(frozen=True)
class Unsupported:
    """A node whose forecast is far from its last year.

    Args:
        node: Its name.
        forecast, last_year: Sums of the mean forecast and of the same steps a year before.
        ratio: Their ratio.
        since: First period of the year before.
    """

    node: str
    forecast: float
    last_year: float
    ratio: float
    since: str

    @property
    def sentence(self) -> str:
        """The warning in words."""
        return (
            f"The forecast of {self.node!r} is {self.ratio:.2g} times its last year: {self.forecast:,.6g} against "
            f"{self.last_year:,.6g} in the same steps from {self.since} on. The history does not support this; check "
            "the last rows of the data."
        )

    def record(self) -> dict[str, Any]:
        """Return plain values for a certificate."""
        return asdict(self) | {"warning": self.sentence}


def unsupported(data: HierarchicalData, draws: np.ndarray) -> list[Unsupported]:
    """Compare the top nodes of a forecast with their last year.

    Args:
        data: The history of n nodes.
        draws: The forecast, (S, H, n).

    Returns:
        The nodes whose ratio is below 1/2 or above 2; nodes whose last year is near 0 are not judged.
    """
    horizon, rows = draws.shape[1], len(data.index)
    year = _year(data)
    steps = rows - min(year, rows) + np.arange(horizon) % min(year, rows)  # the same steps of the last year
    living = np.nan_to_num(data.bottom) * ~data.ended[data.hierarchy.aggregates :]
    found = []
    for node in _tops(data):
        parts = data.hierarchy.summation[[node]]
        history = np.asarray(parts @ living.T)[0] if data.ended.any() else np.nan_to_num(data.values[:, node])
        size = float((abs(parts) @ np.abs(living[-2 * year :]).T).mean())  # of its parts, which may cancel
        drawn = draws[~np.isnan(draws[..., node]).any(1)][..., node]
        base = float(history[steps].sum())
        if not len(drawn) or abs(base) <= SMALL * size * horizon:
            continue
        forecast = float(drawn.mean(0).sum())
        low, high = base, base
        if year > rows:  # no step has one a year before
            low, high = (horizon * float(limit(np.abs(history))) * np.sign(base) for limit in (np.min, np.max))
        if forecast / base < LOWEST * low / base or forecast / base > HIGHEST * high / base:
            since = str(data.index[int(steps.min())])
            found.append(Unsupported(data.names[node], forecast, base, forecast / base, since))
    return found


def _year(data: HierarchicalData) -> int:
    """Rows of a year, or of the longest season that the history holds; more than there are, if it holds none."""
    unit = re.sub(r"^\d+|-.*$", "", data.freq)
    year = max(1, YEARS.get(unit, data.season) // data.index.freq.n)
    return next((x for x in (year, *reversed(data.seasons)) if x <= len(data.index)), len(data.index) + 1)


def _tops(data: HierarchicalData) -> Sequence[int]:
    """Numbers of the nodes of the first level; of the largest node, where levels are not named."""
    if data.hierarchy.tags:
        return [int(i) for i in next(iter(data.levels.values()))]
    return [int(np.argmax(data.hierarchy.sizes.numpy()))]
