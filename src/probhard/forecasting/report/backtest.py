"""Backtest of a forecast at several past origins, beside its rivals.

At each origin the forecast is made from the rows before it alone, and so are the rivals (``report.rivals``). Windows
do not overlap and end with the last row. The scores are those of ``report.scores``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probhard.errors import ParameterError
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.report.rivals import NAMES, rivals
from probhard.forecasting.report.scores import Scores, WindowScores, ranking, score_window

WINDOWS = 3
TIE = 0.01  # relative difference of CRPS that counts as level
Window = tuple[HierarchicalData, HierarchicalData]  # rows before the origin, and the horizon after it
Made = np.ndarray | tuple[np.ndarray, BaseForecast | None]  # draws (S, H, n), with AutoETS forecasts if at hand


@dataclass(frozen=True, eq=False)
class Backtest:
    """Scores of a forecast and its rivals on past windows.

    Args:
        model: Name of the forecast.
        tests: The held-out rows of each window, the earliest first.
        draws: The forecast of each window, (S, H, n).
        scores: Scores by name, the forecast first.
        probabilities: Of the intervals whose coverage is measured.
        left_out: Rivals that could not be fitted, with the reason.
    """

    model: str
    tests: Sequence[HierarchicalData]
    draws: Sequence[np.ndarray]
    scores: dict[str, Scores]
    probabilities: Sequence[float]
    left_out: dict[str, str]

    @property
    def best_rival(self) -> str:
        """Name of the rival with the smallest mean CRPS."""
        return next(name for name in ranking(self.scores) if name != self.model)

    @property
    def ratio(self) -> float:
        """Mean CRPS of the forecast, relative to the best rival's."""
        return self.scores[self.model].crps / max(self.scores[self.best_rival].crps, np.finfo(float).tiny)

    @property
    def wins(self) -> int:
        """Number of windows in which the forecast has a smaller CRPS than the best rival."""
        pairs = zip(self.scores[self.model].windows, self.scores[self.best_rival].windows)
        return sum(ours.crps["All nodes"] < theirs.crps["All nodes"] for ours, theirs in pairs)

    @property
    def verdict(self) -> str:
        """Who was better, in a sentence."""
        ours, theirs, count = self.scores[self.model].crps, self.scores[self.best_rival].crps, len(self.tests)
        numbers = f"CRPS {100 * ours:.3g} % against {100 * theirs:.3g} %"
        windows = f"{count} past windows" if count > 1 else "one past window"
        if abs(self.ratio - 1) <= TIE:
            return f"Level with the best rival, {self.best_rival}, on {windows}: {numbers}."
        if self.ratio > 1:
            return (
                f"A rival was better: {self.best_rival} beats this forecast on {windows}, {numbers}; this forecast "
                f"was ahead in {self.wins} of {count}."
            )
        return f"Better than its {len(self.scores) - 1} rivals on {windows}: {numbers} of {self.best_rival}."

    def record(self) -> dict[str, Any]:
        """Return the scores as plain values for JSON, with None for NaN."""
        levels = list(self.tests[-1].levels)
        windows = [{"first": str(test.index[0]), "last": str(test.index[-1])} for test in self.tests]
        scores = {name: score.record(levels, self.probabilities) for name, score in self.scores.items()}
        return {"verdict": self.verdict, "windows": windows, "scores": scores, "left_out": self.left_out}

    def table(self) -> str:
        """The mean CRPS by level as text, in percent, and the range over the windows."""
        names, levels = list(self.scores), list(self.tests[-1].levels)
        width = max(14, *(len(level) + 2 for level in levels))
        first, last = self.tests[0].index[0], self.tests[-1].index[-1]
        windows = "1 window" if len(self.tests) == 1 else f"{len(self.tests)} windows"
        lines = [f"CRPS, % of values, mean of {windows}, {first} to {last}:"]
        heads = [name.replace("AutoETS", "ETS") for name in names]
        lines.append(" " * width + "".join(f"{head:>18s}" for head in heads))
        for level in ("All nodes", *levels):
            values = (100 * self.scores[name].mean_crps(level) for name in names)
            lines.append(f"{level:{width}s}" + "".join(f"{value:18.3f}" for value in values))
        if len(self.tests) > 1:
            ranges = (f"{100 * low:.3g}-{100 * high:.3g}" for low, high in (self.scores[n].spread for n in names))
            lines.append(f"{'range':{width}s}" + "".join(f"{text:>18s}" for text in ranges))
        return "\n".join([*lines, self.verdict])


def held_out(data: HierarchicalData, horizon: int, windows: int = WINDOWS) -> list[Window]:
    """Split off the last windows, the earliest first.

    Args:
        data: The history.
        horizon: Rows of a window.
        windows: Number of windows wanted; fewer where the history is short.

    Returns:
        Rows before each origin, and the rows after it.

    Raises:
        ParameterError: If not even one window fits, or the last rows hold nothing but zeros.
    """
    rows = len(data.index)
    if horizon < 1 or rows <= 2 * horizon:
        raise ParameterError(
            f"The history has {rows} rows and the horizon {horizon}.",
            "One horizon is held out; a training window needs another one and at least one row before it.",
            f"Use at least {2 * max(horizon, 1) + 1} rows, or a horizon of at most {max(1, (rows - 1) // 2)}.",
        )
    least = max(2 * horizon + 1, min(2 * data.season, rows - horizon))  # rows before the first origin
    count = int(np.clip((rows - least) // horizon, 1, windows))
    found = [data.train_test(horizon, origin) for origin in range(count - 1, -1, -1)]
    found = [pair for pair in found if (np.nan_to_num(pair[1].observed) != 0).any()]
    if not found:
        raise ParameterError(
            f"The last {count * horizon} rows hold nothing but zeros or gaps.",
            "Scores on these rows are relative to the observed values.",
            "End the history with observed rows.",
        )
    return found


def backtest(
    model: str,
    forecast: Callable[[HierarchicalData], Made],
    windows: Sequence[Window],
    probabilities: Sequence[float],
) -> Backtest:
    """Score a forecast and its rivals on past windows.

    Args:
        model: Name of the forecast.
        forecast: Makes draws (S, H, n) from the rows before an origin; with them it may return AutoETS forecasts of
            all nodes, which rivals then reuse.
        windows: Of ``held_out``.
        probabilities: Nominal probabilities of the intervals whose coverage is measured.

    Raises:
        ProbhardError: If a forecast has another shape or is not finite.
    """
    scored: dict[str, list[WindowScores]] = {name: [] for name in (model, *NAMES)}
    drawn, left_out = [], {}
    for train, test in windows:
        made = forecast(train)
        draws, base = made if isinstance(made, tuple) else (made, None)
        drawn.append(draws)
        scored[model].append(score_window(draws, train, test, probabilities))
        for name, other in rivals(train, len(test.index), base):
            if isinstance(other, str):
                left_out[name] = other
            else:
                scored[name].append(score_window(other, train, test, probabilities))
    scores = {name: Scores(parts) for name, parts in scored.items() if name not in left_out}
    return Backtest(model, [test for _, test in windows], drawn, scores, probabilities, left_out)
