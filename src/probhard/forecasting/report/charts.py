"""Charts of the report page: SVG paths, axes and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probhard.forecasting.reconciliation.columns import probabilities

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 270, 52, 14, 10, 28  # of a chart and its margins
UNITS = ((1e9, 1e9, "bn"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))  # smallest value, size, suffix


@dataclass(frozen=True, eq=False)
class Fan:
    """Mean and interval bands of draws over consecutive rows of a chart.

    Args:
        css_class: ``"backtest"`` or ``"forecast"``.
        rows: Numbers of the k rows, (k,).
        mean: Mean, (k,).
        ends: Ends of the bands in ascending order, (2 levels, k).
    """

    css_class: str
    rows: np.ndarray
    mean: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, css_class: str, start: int, before: np.ndarray, draws: np.ndarray, levels: Sequence[float]) -> Fan:
        """Summarize draws.

        Args:
            css_class: ``"backtest"`` or ``"forecast"``.
            start: Number of the first row.
            before: Observed values before it; the fan opens at the last one if it is known.
            draws: Draws of one node, (S, H).
            levels: Interval levels in percent.
        """
        ends = np.quantile(draws, probabilities(levels), axis=0)  # (2 levels, H)
        mean, rows = draws.mean(0), np.arange(start, start + draws.shape[1])
        if len(before) and np.isfinite(before[-1]):
            mean, ends = np.append(before[-1], mean), np.concatenate([np.full((len(ends), 1), before[-1]), ends], 1)
            rows = np.append(start - 1, rows)
        return cls(css_class, rows, mean, ends)

    @property
    def bands(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Lower and upper end of each band, the widest first, (k,) each."""
        return [(self.ends[i], self.ends[-1 - i]) for i in range(len(self.ends) // 2)]


@dataclass(frozen=True)
class Frame:
    """The plot area of a chart, which maps rows and values to SVG coordinates.

    Args:
        rows: Number of rows on the horizontal axis.
        low, high: Values at the lower and the upper edge.
    """

    rows: int
    low: float
    high: float

    def place(self, row: Any, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the x and y coordinates of rows and values of the same shape."""
        x = LEFT + np.asarray(row) / (self.rows - 1) * (WIDTH - LEFT - RIGHT)
        share = (np.asarray(value) - self.low) / (self.high - self.low)  # of the height
        return x, HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def paths(self, fan: Fan) -> dict[str, Any]:
        """Return the SVG paths of a fan: its CSS class, bands and mean."""
        return {
            "css_class": fan.css_class,
            "bands": [area(*self.place(fan.rows, lower), self.place(fan.rows, upper)[1]) for lower, upper in fan.bands],
            "mean": line(*self.place(fan.rows, fan.mean)),
        }


def line(x: np.ndarray, y: np.ndarray) -> str:
    """Return an SVG path through the finite points of (k,) coordinates; an isolated point is a dot."""
    commands, broken = [], True
    for i, (across, down) in enumerate(zip(x, y)):
        if np.isfinite(down):
            commands.append(f"{'M' if broken else 'L'}{across:.1f},{down:.1f}")
            if broken and (i + 1 == len(y) or not np.isfinite(y[i + 1])):
                commands.append("h0")
        broken = not np.isfinite(down)
    return "".join(commands)


def area(x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> str:
    """Return a closed SVG path between two lines of (k,) points."""
    return line(np.append(x, x[::-1]), np.append(upper, lower[::-1])) + "Z"


def axis(low: float, high: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Choose an axis that holds a range.

    Returns:
        Its lower end, its upper end, and its ticks with their labels.
    """
    span = high - low or abs(high) or 1.0
    low, high = low - 0.04 * span, high + 0.04 * span
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    ticks = np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step
    largest = float(np.abs(ticks).max(initial=0.0))
    unit, suffix = next((size, suffix) for start, size, suffix in UNITS if largest >= start)
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return low, high, [(float(tick), f"{tick / unit:,.{digits}f}{suffix}") for tick in ticks]


def strip(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Lay out one row of dots per name on a shared axis from 0, for the template.

    Args:
        values: Numbers of each row; those that are not finite are left out.

    Returns:
        ``rows`` (name, places of the dots, place of their mean) and ``ticks`` (place, value), places in percent.
    """
    known = {name: [x for x in row if math.isfinite(x)] for name, row in values.items()}
    top = max((max(row) for row in known.values() if row), default=0.0) * 1.04 or 1.0
    _, _, ticks = axis(0.0, 100 * top)
    places = [(tick / top, label) for tick, label in ticks if 0 <= tick <= 100 * top]
    rows = [(name, [100 * x / top for x in row], 100 * float(np.mean(row)) / top) for name, row in known.items() if row]
    return {"rows": rows, "ticks": places}


def histogram(counts: np.ndarray) -> dict[str, Any]:
    """Lay out a histogram of counts (bins,) in a box of 100 by 100.

    Returns:
        ``bars`` (left, width, height), the height ``even`` of equal counts, and the ``shares``.
    """
    shares = counts / max(1, counts.sum())
    top = max(float(shares.max()), 2 / len(shares))
    bars = [(100 * i / len(shares), 100 / len(shares), 100 * share / top) for i, share in enumerate(shares)]
    return {"bars": bars, "even": 100 / len(shares) / top, "shares": shares.tolist()}
