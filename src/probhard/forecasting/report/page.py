"""The report page of a forecast: one self-contained HTML file with charts as inline SVG.

It says first what speaks against the forecast: warnings, then a rival that was better. A chart shows the last rows of a
node, the backtest's fans over held-out rows, and the forecast's fan after them. Names come from the user: all text is
escaped, and the page's policy allows no script but its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData, require
from probhard.forecasting.report.backtest import TIE, Backtest
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
    strip,
)
from probhard.forecasting.report.formats import count, digest, number, percent, short, signed, words
from probhard.forecasting.report.moves import Move
from probhard.forecasting.report.scores import ALL

MOST_NODES = 2000  # nodes with a chart; one takes about 3 kB
SHOWN_LEVELS = 4  # levels below the top with charts of selected nodes
LONGEST = 96  # rows of a chart before the forecast


@dataclass(frozen=True, eq=False)
class Report:
    """The content of the page.

    Args:
        data: The whole history of n nodes.
        model: Name of the forecast.
        levels: Interval levels in percent.
        draws: The forecast, (S, H, n), or of some nodes only, (S, H, k).
        tested: Its backtest; None without one.
        certificate: The content of the certificate's file.
        settings: Settings of the run by name.
        notes: Remarks, such as missing values that were filled and rivals that were left out.
        warnings: What speaks against the forecast.
        learned: What was learned on past windows (weights of the pool, metric), a sentence each.
        weights: Weight of every member of the pool, by name.
        moves: Why nodes moved, by node number.
        drawn: Numbers of the k nodes that have draws; None for all. Nodes with a chart need them.
    """

    data: HierarchicalData
    model: str
    levels: Sequence[float]
    draws: np.ndarray
    tested: Backtest | None
    certificate: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    learned: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    moves: Mapping[int, Move] = field(default_factory=dict)
    drawn: Sequence[int] | None = None

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
        formats = (number, percent, count, digest, words, short, signed, histogram)
        environment.filters |= {function.__name__: function for function in formats}
        nodes = self.listed
        return environment.get_template("report.html").render(
            report=self,
            nodes=[(level, [i for i in positions if i in nodes]) for level, positions in self.data.levels.items()],
            omitted=len(self.data.names) - len(nodes),
            chart=self.chart,
            gaps=int(np.isnan(self.data.observed[:, self.data.hierarchy.aggregates :]).sum()),
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

    @property
    def charted(self) -> list[int]:
        """Numbers of all nodes with a chart, ascending; needs no draws."""
        return sorted(self.listed | {node for node, _, _ in self.picked})

    @cached_property
    def _column(self) -> Mapping[int, int]:
        """Position of every node in ``draws``."""
        nodes = range(len(self.data.names)) if self.drawn is None else self.drawn
        return {node: i for i, node in enumerate(nodes)}

    @property
    def verdict_class(self) -> str:
        """CSS class of the verdict: ``"bad"`` if a rival was better, ``"level"`` or ``"good"``."""
        assert self.tested is not None
        return "bad" if self.tested.ratio > 1 + TIE else "good" if self.tested.ratio < 1 - TIE else "level"

    @cached_property
    def gain(self) -> np.ndarray:
        """CRPS of the best rival less that of the forecast, by node, (n,); -inf where unknown."""
        if self.tested is None:
            return np.full(len(self.data.names), -np.inf)
        ours, theirs = (self.tested.scores[name].nodes for name in (self.model, self.tested.best_rival))
        return np.where(np.isnan(ours) | np.isnan(theirs), -np.inf, theirs - ours)

    @cached_property
    def picked(self) -> list[tuple[int, str, str]]:
        """Selected nodes, their level and why: the top, and the largest and the most improved node of each level."""
        picked: dict[int, tuple[str, str]] = {}
        for level, nodes in islice(self.data.levels.items(), SHOWN_LEVELS + 1):
            largest, improved = (int(nodes[np.argmax(x[nodes])]) for x in (self.size, self.gain))
            picked.setdefault(largest, (level, "largest" if len(nodes) > 1 else ""))
            if self.gain[improved] > 0:
                picked.setdefault(improved, (level, "most improved"))
        return [(node, *reason) for node, reason in picked.items()]

    def rows(self, score: str = "mean_crps") -> Iterator[tuple[str, list[tuple[float, float, bool]]]]:
        """Yield the rows of a table of scores: level, then score, length of its bar and whether it is the smallest.

        Args:
            score: A method of ``Scores``: ``"mean_crps"`` or ``"mean_mase"``.
        """
        assert self.tested is not None
        for level in (ALL, *self.data.levels):
            values = [getattr(scores, score)(level) for scores in self.tested.scores.values()]
            known = [x for x in values if np.isfinite(x)]
            longest, smallest = max(known, default=0.0), min(known, default=np.nan)
            yield level, [(x, x / longest if longest > 0 else 0.0, x == smallest) for x in values]

    def windows(self) -> dict[str, Any]:
        """Return the strips of the CRPS of each window, for the template."""
        assert self.tested is not None
        scores = self.tested.scores.items()
        return strip({name: [window.crps[ALL] for window in score.windows] for name, score in scores})

    def chart(self, node: int, windows: int = 1) -> dict[str, Any]:
        """Return the paths, ticks and texts of the chart of a node, for the template.

        Args:
            node: Number of the node.
            windows: Number of past windows whose fans are drawn, the last ones.
        """
        horizon, rows = self.draws.shape[1], len(self.data.index)
        past = [] if self.tested is None else list(zip(self.tested.tests, self.tested.draws))[-windows:]
        tail = min(rows, max((len(past) + 1) * horizon, 3 * horizon, 2 * self.data.season, 24), LONGEST + horizon)
        y, index = self.data.observed[-tail:, node], self.data.index[-tail:].append(self.data.future(horizon))
        values = self.data.values[-tail:, node]
        fans = []
        for test, draws in past:
            start = self.data.index.get_loc(test.index[0]) - (rows - tail)
            if start > 0:
                fans.append(Fan.of("backtest", start, y[:start], draws[..., node], self.levels))
        drawn = self.draws[..., self._column[node]]
        fans.append(Fan.of("forecast", tail, y, drawn, self.levels))
        everything = np.concatenate([values, *(part for fan in fans for part in (fan.mean, *fan.ends))])
        everything = everything if np.isfinite(everything).any() else np.zeros(1)
        low, high, ticks = axis(float(np.nanmin(everything)), float(np.nanmax(everything)))
        frame = Frame(len(index), low, high)
        marks = np.unique(np.linspace(0, len(index) - 1, 4).round().astype(int))
        return {
            "name": self.data.names[node],
            "fans": [frame.paths(fan) for fan in fans],
            "observed": line(*frame.place(np.arange(tail), y)),
            "filled": line(*frame.place(np.arange(tail), values)) if (np.isnan(y) & ~np.isnan(values)).any() else "",
            "now": float(frame.place(tail - 1, low)[0]),
            "ticks": [(float(frame.place(0, tick)[1]), label) for tick, label in ticks],
            "periods": [(float(frame.place(i, low)[0]), str(index[i])) for i in marks],
            "anchors": ["start", *["middle"] * (len(marks) - 2), "end"],
            "words": f"{self.data.names[node]}: observed to {self.data.index[-1]}, then the forecast, from a mean of "
            f"{number(drawn[:, 0].mean())} to {number(drawn[:, -1].mean())} at {index[-1]}.",
            "box": (WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM),
        }
