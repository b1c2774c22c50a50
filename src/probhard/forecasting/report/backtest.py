"""A forecast of rows that were held out, beside forecasts that need no network.

Seasonal naive is a point forecast, whose CRPS is its absolute error; ETS bottom-up is a normal law of every bottom
series, summed as if they were independent (the row ``bu-normal`` of ``classical``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probhard.errors import MissingExtraError, ParameterError, ProbhardError
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.models.baselines import seasonal_naive
from probhard.forecasting.models.classical import base_forecast, reconcile
from probhard.forecasting.report.evaluation import Evaluation, calibration, crps_levels, evaluate, pit_counts

NAIVE, ETS = "seasonal naive", "ETS bottom-up"


@dataclass(frozen=True, eq=False)
class Backtest:
    """What a forecast and its rivals did on held-out rows.

    Args:
        test: The held-out rows.
        draws: The forecast, (S, H, n).
        scores: By name, the forecast first.
        nodes: CRPS of every node by name, (n,), NaN where nothing but zeros was observed.
        coverage: By level, the share of targets inside each central interval.
        pit: Counts of the probability integral transform in equal bins.
        left_out: Rivals that could not be fitted, and why.
    """

    test: HierarchicalData
    draws: np.ndarray
    scores: dict[str, Evaluation]
    nodes: dict[str, np.ndarray]
    coverage: dict[str, dict[float, float]]
    pit: np.ndarray
    left_out: dict[str, str]

    def record(self) -> dict[str, Any]:
        """The scores as plain values."""
        rows = {"first": str(self.test.index[0]), "last": str(self.test.index[-1])}
        scores = {name: found.record() for name, found in self.scores.items()}
        for score in scores.values():  # NaN has no place in JSON
            score["crps_levels"] = {level: None if x != x else x for level, x in score["crps_levels"].items()}
        return {**rows, "scores": scores, "left_out": self.left_out}


def held_out(data: HierarchicalData, horizon: int) -> tuple[HierarchicalData, HierarchicalData]:
    """The rows to train on and the last ``horizon`` ones, checked before anything is trained."""
    rows = len(data.index)
    if horizon < 1 or rows <= 2 * horizon:
        raise ParameterError(
            f"The history has {rows} rows and the horizon {horizon}.",
            "One horizon is held out, and a training window needs another and at least one row before it.",
            f"Use at least {2 * max(horizon, 1) + 1} rows, or a horizon of at most {max(1, (rows - 1) // 2)}.",
        )
    train, test = data.train_test(horizon)
    if not (np.nan_to_num(test.values) != 0).any():
        raise ParameterError(
            f"The last {horizon} rows hold nothing but zeros or gaps.",
            "Forecasts are scored on them, relative to their size.",
            "End the history with rows that were observed.",
        )
    silent = np.flatnonzero(np.isnan(train.bottom).all(0))
    if len(silent):
        raise ParameterError(
            f"Series {data.names[data.hierarchy.aggregates + silent[0]]!r} starts within the last {horizon} rows.",
            "These are held out, and nothing is left to learn from.",
            "Leave out the series, or choose a shorter horizon.",
        )
    return train, test


def rivals(
    train: HierarchicalData, horizon: int, samples: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Draws of the forecasts to beat, and the reasons why one is left out."""
    found, left_out = {NAIVE: seasonal_naive(train, horizon)}, {}
    try:
        found[ETS] = reconcile(base_forecast(train, horizon), "bu-normal", samples, seed)
    except (ProbhardError, MissingExtraError) as error:
        left_out[ETS] = str(error)
    return found, left_out


def backtest(
    model: str,
    draws: np.ndarray,  # (S, H, n), made from train
    train: HierarchicalData,
    test: HierarchicalData,
    probabilities: Sequence[float],
    seed: int = 0,
) -> Backtest:
    """Score draws and their rivals on held-out rows."""
    others, left_out = rivals(train, len(test.index), len(draws), seed)
    singles = {name: np.array([i]) for i, name in enumerate(test.names)}
    scores, nodes = {}, {}
    for name, forecast in {model: draws, **others}.items():
        scores[name] = evaluate(forecast, test)
        nodes[name] = np.array(list(crps_levels(forecast, test.values, singles).values()))
    coverage = calibration(draws, test.values, test.levels, probabilities)
    return Backtest(test, draws, scores, nodes, coverage, pit_counts(draws, test.values), left_out)
