"""The report page of a forecast: one self-contained HTML file with charts as inline SVG.

A chart shows the last rows of a node, the backtest's fan over the held-out rows, and the forecast's fan after them.
Names come from the user: all text is escaped, and the page's policy allows no script but its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.report.backtest import Backtest
from probhard.forecasting.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Fan,
    Frame,
    axis,
    histogram,
    line,
)
from probhard.forecasting.report.formats import count, digest, number, percent, words

MOST_NODES = 2000  # nodes with a chart; one takes about 3 kB
SHOWN_LEVELS = 4  # levels below the top with charts of selected nodes


@dataclass(frozen=True, eq=False)
class Report:
    """The content of the page.

    Args:
        data: The whole history of n nodes.
        model: Name of the forecast.
        levels: Interval levels in percent.
        draws: The forecast, (S, H, n).
        tested: Its backtest.
        certificate: The content of the certificate's file.
        settings: Settings of the run by name.
        notes: Remarks, such as baselines that were left out.
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
        """Render the page.

        Raises:
            MissingExtraError: If jinja2 is not installed.
        """
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
            pit=histogram(self.tested.pit),
            gaps=int(np.isnan(self.data.bottom).sum()),
        )

    @cached_property
    def size(self) -> np.ndarray:
        """Mean absolute value of every node, (n,)."""
        seen = ~np.isnan(self.data.values)
        return np.abs(np.where(seen, self.data.values, 0.0)).sum(0) / np.maximum(seen.sum(0), 1)

    @cached_property
    def listed(self) -> set[int]:
        """Numbers of the nodes with a chart: all, or the largest."""
        return {int(i) for i in np.argsort(-self.size, kind="stable")[:MOST_NODES]}

    @cached_property
    def best_rival(self) -> str:
        """Name of the baseline with the smallest pooled CRPS."""
        return min(list(self.tested.scores)[1:], key=lambda name: self.tested.scores[name].crps)

    @cached_property
    def picked(self) -> list[tuple[int, str, str]]:
        """Selected nodes, their level and why: the top, and the largest and the most improved node of each level."""
        ours, theirs = (self.tested.nodes[name] for name in (self.model, self.best_rival))
        gain = np.where(np.isnan(ours), -np.inf, theirs - ours)
        picked: dict[int, tuple[str, str]] = {}
        for level, nodes in islice(self.data.levels.items(), SHOWN_LEVELS + 1):
            largest, improved = (int(nodes[np.argmax(x[nodes])]) for x in (self.size, gain))
            picked.setdefault(largest, (level, "largest" if len(nodes) > 1 else ""))
            if gain[improved] > 0:
                picked.setdefault(improved, (level, "most improved"))
        return [(node, *reason) for node, reason in picked.items()]

    def rows(self) -> Iterator[tuple[str, list[tuple[float, float, bool]]]]:
        """Yield the rows of the table of scores: level, then CRPS, length of its bar and whether it is the smallest."""
        scores = list(self.tested.scores.values())
        table = {"All nodes": [score.crps for score in scores]}
        table |= {level: [score.crps_levels[level] for score in scores] for level in self.data.levels}
        for level, values in table.items():
            longest, smallest = (f(values) for f in (max, min))
            yield level, [(x, x / longest if longest > 0 else 0.0, x == smallest) for x in values]

    def chart(self, node: int) -> dict[str, Any]:
        """Return the paths, ticks and texts of the chart of a node, for the template."""
        tested, horizon = self.tested, self.draws.shape[1]
        tail = min(len(self.data.index), max(3 * horizon, 2 * self.data.season, 24), 72 + horizon)
        y, index = self.data.values[-tail:, node], self.data.index[-tail:].append(self.data.future(horizon))
        held_out = len(tested.test.index)
        fans = [
            Fan.of("backtest", tail - held_out, y[: tail - held_out], tested.draws[..., node], self.levels),
            Fan.of("forecast", tail, y, self.draws[..., node], self.levels),
        ]
        everything = np.concatenate([y, *(values for fan in fans for values in (fan.mean, *fan.ends))])
        low, high, ticks = axis(float(np.nanmin(everything)), float(np.nanmax(everything)))
        frame = Frame(len(index), low, high)
        marks = np.unique(np.linspace(0, len(index) - 1, 4).round().astype(int))
        return {
            "name": self.data.names[node],
            "fans": [frame.paths(fan) for fan in fans],
            "observed": line(*frame.place(np.arange(tail), y)),
            "now": float(frame.place(tail - 1, low)[0]),
            "ticks": [(float(frame.place(0, tick)[1]), label) for tick, label in ticks],
            "periods": [(float(frame.place(i, low)[0]), str(index[i])) for i in marks],
            "anchors": ["start", *["middle"] * (len(marks) - 2), "end"],
            "words": f"{self.data.names[node]}: observed to {self.data.index[-1]}, then the forecast, from a mean of "
            f"{number(self.draws[:, 0, node].mean())} to {number(self.draws[:, -1, node].mean())} at {index[-1]}.",
            "box": (WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM),
        }
