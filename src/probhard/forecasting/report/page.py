"""The report page of a forecast: one HTML file without network, its charts as SVG inside.

A chart has the node's last rows, the fan of the backtest over those that were held out, and the fan of the forecast
after them. Names are the user's own texts: everything is escaped, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.reconciliation.nixtla import probabilities
from probhard.forecasting.report.backtest import Backtest

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 270, 52, 14, 10, 28  # of a chart and its margins
MOST_NODES = 2000  # that can be looked at; a chart takes about 3 kB
SHOWN_LEVELS = 4  # with charts of their own, besides the top
NOTHING = "\N{EN DASH}"
UNITS = ((1e9, 1e9, "bn"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))  # from where on, size, letters


@dataclass(frozen=True, eq=False)
class Report:
    """What the page shows.

    Args:
        data: The whole history.
        model: Name of the forecast.
        levels: Of the intervals, in percent.
        draws: The forecast, (S, H, n).
        tested: Its backtest.
        certificate: As it is written to the certificate's file.
        settings: Of the run, by name.
        notes: Remarks for the reader, such as what was left out.
    """

    data: HierarchicalData
    model: str
    levels: Sequence[float]
    draws: np.ndarray
    tested: Backtest
    certificate: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()

    def html(self) -> str:
        """The page."""
        jinja2 = require("jinja2", "A report")
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters |= {"number": number, "percent": percent, "count": count, "digest": digest, "words": words}
        nodes = self.listed
        return environment.get_template("report.html").render(
            report=self,
            nodes=[(level, [i for i in positions if i in nodes]) for level, positions in self.data.levels.items()],
            omitted=len(self.data.names) - len(nodes),
            chart=self.chart,
            pit=_histogram(self.tested.pit),
            gaps=int(np.isnan(self.data.bottom).sum()),
        )

    @cached_property
    def size(self) -> np.ndarray:
        """Mean absolute value of every node, (n,)."""
        seen = ~np.isnan(self.data.values)
        return np.abs(np.where(seen, self.data.values, 0.0)).sum(0) / np.maximum(seen.sum(0), 1)

    @cached_property
    def listed(self) -> set[int]:
        """Nodes that can be looked at: all, or the largest."""
        return {int(i) for i in np.argsort(-self.size, kind="stable")[:MOST_NODES]}

    @cached_property
    def best_rival(self) -> str:
        """The rival with the smallest pooled CRPS."""
        return min(list(self.tested.scores)[1:], key=lambda name: self.tested.scores[name].crps)

    @cached_property
    def picked(self) -> list[tuple[int, str, str]]:
        """Nodes that matter, their level and why: the top, and of each level the largest and the most improved."""
        ours, theirs = (self.tested.nodes[name] for name in (self.model, self.best_rival))
        gain = np.where(np.isnan(ours), -np.inf, theirs - ours)
        found: dict[int, tuple[str, str]] = {}
        for number_, (level, nodes) in enumerate(self.data.levels.items()):
            if number_ > SHOWN_LEVELS:
                break
            largest, improved = (int(nodes[np.argmax(x[nodes])]) for x in (self.size, gain))
            found.setdefault(largest, (level, "largest" if len(nodes) > 1 else ""))
            if gain[improved] > 0:
                found.setdefault(improved, (level, "most improved"))
        return [(node, *why) for node, why in found.items()]

    def rows(self) -> Iterator[tuple[str, list[tuple[float, float, bool]]]]:
        """Scores of all nodes and by level: CRPS, length of its bar, whether it is the smallest."""
        scores = list(self.tested.scores.values())
        table = {"All nodes": [score.crps for score in scores]}
        table |= {level: [score.crps_levels[level] for score in scores] for level in self.data.levels}
        for level, values in table.items():
            longest, smallest = (f(values) for f in (max, min))
            yield level, [(x, x / longest if longest > 0 else 0.0, x == smallest) for x in values]

    def chart(self, node: int) -> dict[str, Any]:
        """Everything that the drawing of one node needs: paths, ticks, words."""
        tested, horizon = self.tested, self.draws.shape[1]
        tail = min(len(self.data.index), max(3 * horizon, 2 * self.data.season, 24), 72 + horizon)
        y, index = self.data.values[-tail:, node], self.data.index[-tail:].append(self.data.future(horizon))
        held = len(tested.test.index)
        fans = [
            _fan("backtest", tail - held, y[: tail - held], tested.draws[..., node], self.levels),
            _fan("forecast", tail, y, self.draws[..., node], self.levels),
        ]
        everything = np.concatenate([y, *(values for fan in fans for values in fan["values"])])
        low, high, ticks = _axis(float(np.nanmin(everything)), float(np.nanmax(everything)))

        def place(x: Any, value: Any) -> tuple[np.ndarray, np.ndarray]:
            across = LEFT + np.asarray(x) / (len(index) - 1) * (WIDTH - LEFT - RIGHT)
            return across, HEIGHT - BOTTOM - (np.asarray(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

        drawn = [
            {
                "kind": fan["kind"],
                "bands": [_area(*place(fan["x"], lower), place(fan["x"], upper)[1]) for lower, upper in fan["bands"]],
                "mean": _line(*place(fan["x"], fan["mean"])),
            }
            for fan in fans
        ]
        marks = np.unique(np.linspace(0, len(index) - 1, 4).round().astype(int))
        return {
            "name": self.data.names[node],
            "fans": drawn,
            "observed": _line(*place(np.arange(tail), y)),
            "now": float(place(tail - 1, low)[0]),
            "ticks": [(float(place(0, tick)[1]), label) for tick, label in ticks],
            "periods": [(float(place(i, low)[0]), str(index[i])) for i in marks],
            "anchors": ["start", *["middle"] * (len(marks) - 2), "end"],
            "words": f"{self.data.names[node]}: observed to {self.data.index[-1]}, then the forecast, from a mean of "
            f"{number(self.draws[:, 0, node].mean())} to {number(self.draws[:, -1, node].mean())} at {index[-1]}.",
            "box": (WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM),
        }


def _fan(kind: str, start: int, before: np.ndarray, draws: np.ndarray, levels: Sequence[float]) -> dict[str, Any]:
    """Mean and bands of draws (S, H) from row ``start`` on, opening at the last value before them if there is one."""
    ends = np.quantile(draws, probabilities(levels), axis=0)  # (2 levels, H), ascending
    mean, x = draws.mean(0), np.arange(start, start + draws.shape[1])
    if len(before) and np.isfinite(before[-1]):
        mean, ends = np.append(before[-1], mean), np.concatenate([np.full((len(ends), 1), before[-1]), ends], 1)
        x = np.append(start - 1, x)
    bands = [(ends[i], ends[-1 - i]) for i in range(len(ends) // 2)]  # the widest first
    return {"kind": kind, "x": x, "mean": mean, "bands": bands, "values": [mean, *ends]}


def _line(x: np.ndarray, y: np.ndarray) -> str:
    """An SVG path through the finite points; a point without neighbours is a dot."""
    parts, broken = [], True
    for i, (across, down) in enumerate(zip(x, y)):
        if np.isfinite(down):
            parts.append(f"{'M' if broken else 'L'}{across:.1f},{down:.1f}")
            if broken and (i + 1 == len(y) or not np.isfinite(y[i + 1])):
                parts.append("h0")
        broken = not np.isfinite(down)
    return "".join(parts)


def _area(x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> str:
    return _line(np.append(x, x[::-1]), np.append(upper, lower[::-1])) + "Z"


def _axis(low: float, high: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Ends of an axis that holds a range, and its ticks with their labels."""
    span = high - low or abs(high) or 1.0
    low, high = low - 0.04 * span, high + 0.04 * span
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    ticks = np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step
    largest = float(np.abs(ticks).max(initial=0.0))
    unit, letters = next((size, letters) for start, size, letters in UNITS if largest >= start)
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return low, high, [(float(tick), f"{tick / unit:,.{digits}f}{letters}") for tick in ticks]


def _histogram(counts: np.ndarray) -> dict[str, Any]:
    """Bars of a histogram in a box of 100 by 100, the height of equal counts, and the shares."""
    shares = counts / max(1, counts.sum())
    top = max(float(shares.max()), 2 / len(shares))
    bars = [(100 * i / len(shares), 100 / len(shares), 100 * share / top) for i, share in enumerate(shares)]
    return {"bars": bars, "even": 100 / len(shares) / top, "shares": shares.tolist()}


def number(value: float | None) -> str:
    """Four significant digits, thousands apart; powers of ten where it is tiny or huge."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 12:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 3 - power)}f}"


def percent(value: float, unit: str = " %") -> str:
    """A share in percent with three significant digits."""
    if not math.isfinite(value):
        return NOTHING
    power = math.floor(math.log10(abs(100 * value))) if value else 0
    return f"{100 * value:,.{min(4, max(0, 2 - power))}f}{unit}"


def count(value: int) -> str:
    """A whole number, thousands apart."""
    return f"{value:,}"


def words(value: Any) -> str:
    """A setting as a reader would write it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def digest(text: str) -> str:
    """The hash by which a page's policy knows its own script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
