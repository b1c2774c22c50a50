"""Scores of one forecast over several windows, for all nodes and by level.

CRPS      pooled over steps and nodes, relative to the summed |y| (``report.evaluation``), a number per window
MASE      mean over nodes of |y - median| / (mean |change over a season| in the rows before), a number per window
coverage  share of observed values inside central intervals, over all windows
PIT       ranks of observed values among the draws, counted in tenths, over all windows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.report.evaluation import calibration, crps_levels, pit_counts

ALL = "All nodes"
BINS = 10


@dataclass(frozen=True, eq=False)
class WindowScores:
    """Scores of one forecast on one window, by level with ``ALL`` first.

    Args:
        crps, mase: By level; NaN where nothing was observed but 0.
        coverage: Share inside, by level and probability.
        pit: Counts by level, (BINS,).
        nodes: CRPS of every node, (n,).
        count: Number of values behind the coverage, by level.
    """

    crps: dict[str, float]
    mase: dict[str, float]
    coverage: dict[str, dict[float, float]]
    pit: dict[str, np.ndarray]
    nodes: np.ndarray
    count: dict[str, int]


def score_window(
    draws: np.ndarray, train: HierarchicalData, test: HierarchicalData, probabilities: Sequence[float]
) -> WindowScores:
    """Score draws on a test window; filled values are not scored.

    Args:
        draws: The forecast, (S, H, n).
        train: The rows before.
        test: The H observed rows.
        probabilities: Of the intervals whose coverage is measured.

    Raises:
        ProbhardError: If shapes do not fit, or draws are not finite.
    """
    y, levels = test.observed, {ALL: np.arange(len(test.names)), **test.levels}
    uncertain = np.where((draws == y).all(0), np.nan, y)
    seen = ~np.isnan(uncertain)
    counted = {level: nodes for level, nodes in levels.items() if seen[:, nodes].any()}
    singles = {str(i): np.array([i]) for i in range(len(test.names))}
    errors = np.abs(y - np.median(draws, axis=0)) / scales(train)
    shares = calibration(draws, uncertain, counted, probabilities)
    return WindowScores(
        crps=crps_levels(draws, y, levels),
        mase={level: _mean(errors[:, nodes]) for level, nodes in levels.items()},
        coverage={level: shares.get(level, dict.fromkeys(probabilities, float("nan"))) for level in levels},
        pit={level: pit_counts(draws[..., nodes], uncertain[:, nodes], BINS) for level, nodes in levels.items()},
        nodes=np.array(list(crps_levels(draws, y, singles).values())),
        count={level: int(seen[:, nodes].sum()) for level, nodes in levels.items()},
    )


def scales(train: HierarchicalData) -> np.ndarray:
    """Mean absolute change over a season of every node, (n,); NaN where it is 0 or unknown."""
    season = train.season if len(train.index) > train.season else 1
    changes = np.abs(train.observed[season:] - train.observed[:-season])
    known = ~np.isnan(changes)
    size = np.where(known, changes, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    return np.where(size > 0, size, np.nan)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of one forecast on several windows.

    Args:
        windows: Scores of each window, the earliest first.
    """

    windows: Sequence[WindowScores]

    @property
    def crps(self) -> float:
        """Mean CRPS of all nodes."""
        return self.mean_crps(ALL)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest CRPS of a window, all nodes."""
        values = [window.crps[ALL] for window in self.windows]
        return float(np.nanmin(values)), float(np.nanmax(values))

    @property
    def nodes(self) -> np.ndarray:
        """Mean CRPS of every node, (n,)."""
        return _column_mean(np.stack([window.nodes for window in self.windows]))

    def mean_crps(self, level: str) -> float:
        """Mean CRPS of a level over the windows."""
        return _mean(np.array([window.crps[level] for window in self.windows]))

    def mean_mase(self, level: str) -> float:
        """Mean MASE of a level over the windows."""
        return _mean(np.array([window.mase[level] for window in self.windows]))

    def coverage(self, level: str, probability: float) -> float:
        """Share of observed values of a level inside the interval, over all windows."""
        counts = np.array([window.count[level] for window in self.windows], dtype=float)
        shares = np.array([window.coverage[level][probability] for window in self.windows])
        return float(np.nansum(counts * shares) / counts.sum()) if counts.sum() else float("nan")

    def pit(self, level: str = ALL) -> np.ndarray:
        """Counts of a level over all windows, (BINS,)."""
        return np.sum([window.pit[level] for window in self.windows], axis=0)

    def record(self, levels: Sequence[str], probabilities: Sequence[float]) -> dict[str, Any]:
        """Return plain values for JSON, with None for NaN."""
        everywhere = (ALL, *levels)
        return {
            "crps": _plain(self.crps),
            "crps_windows": [_plain(window.crps[ALL]) for window in self.windows],
            "crps_levels": {level: _plain(self.mean_crps(level)) for level in levels},
            "mase": _plain(self.mean_mase(ALL)),
            "mase_levels": {level: _plain(self.mean_mase(level)) for level in levels},
            "coverage": {
                level: {f"{100 * p:g}": _plain(self.coverage(level, p)) for p in probabilities} for level in everywhere
            },
        }


def ranking(scores: Mapping[str, Scores]) -> list[str]:
    """Names of forecasts, the smallest mean CRPS first."""
    return sorted(scores, key=lambda name: scores[name].crps)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _column_mean(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0).sum(0)
    return np.where(known.any(0), sums / np.maximum(known.sum(0), 1), np.nan)
