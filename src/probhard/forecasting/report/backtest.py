"""Backtest of a forecast on held-out rows, next to two baselines.

seasonal naive:  a point forecast; its CRPS is its absolute error;
ETS bottom-up:   normal laws of the bottom series, summed as if independent (``bu-normal`` of ``models.classical``).
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
    """Scores of a forecast and the baselines on held-out rows.

    Args:
        test: The held-out rows.
        draws: The forecast, (S, H, n).
        scores: Scores by name, the forecast first.
        nodes: CRPS of every node by name, (n,); NaN if its observed values are all 0.
        coverage: Share of targets inside each central interval, by level and probability.
        pit: Counts of the probability integral transform in equal bins, (bins,).
        left_out: Baselines that could not be fitted, with the reason.
    """

    test: HierarchicalData
    draws: np.ndarray
    scores: dict[str, Evaluation]
    nodes: dict[str, np.ndarray]
    coverage: dict[str, dict[float, float]]
    pit: np.ndarray
    left_out: dict[str, str]

    def record(self) -> dict[str, Any]:
        """Return the scores as plain values for JSON, with None for NaN."""
        rows = {"first": str(self.test.index[0]), "last": str(self.test.index[-1])}
        scores = {name: evaluation.record() for name, evaluation in self.scores.items()}
        for score in scores.values():
            score["crps_levels"] = {level: None if np.isnan(x) else x for level, x in score["crps_levels"].items()}
        return {**rows, "scores": scores, "left_out": self.left_out}


def held_out(data: HierarchicalData, horizon: int) -> tuple[HierarchicalData, HierarchicalData]:
    """Split off the last rows, and check that both parts suffice for a backtest.

    Args:
        data: The history.
        horizon: Number of held-out rows.

    Returns:
        The training rows and the held-out rows.

    Raises:
        ParameterError: If there are too few rows, or held-out rows or a training series have no values.
    """
    rows = len(data.index)
    if horizon < 1 or rows <= 2 * horizon:
        raise ParameterError(
            f"The history has {rows} rows and the horizon {horizon}.",
            "One horizon is held out; a training window needs another one and at least one row before it.",
            f"Use at least {2 * max(horizon, 1) + 1} rows, or a horizon of at most {max(1, (rows - 1) // 2)}.",
        )
    train, test = data.train_test(horizon)
    if not (np.nan_to_num(test.values) != 0).any():
        raise ParameterError(
            f"The last {horizon} rows hold nothing but zeros or gaps.",
            "Scores on these rows are relative to the observed values.",
            "End the history with observed rows.",
        )
    empty = np.flatnonzero(np.isnan(train.bottom).all(0))
    if len(empty):
        raise ParameterError(
            f"Series {data.names[data.hierarchy.aggregates + empty[0]]!r} starts within the last {horizon} rows.",
            "These are held out, so it has no training rows.",
            "Leave out the series, or choose a shorter horizon.",
        )
    return train, test


def rivals(
    train: HierarchicalData, horizon: int, samples: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Forecast with the baselines.

    Args:
        train: The training rows of n series.
        horizon: Number of steps H.
        samples: Number of draws S.
        seed: Seed of the draws.

    Returns:
        Draws by name, (S, H, n), and the reasons for baselines that are left out.
    """
    draws, left_out = {NAIVE: seasonal_naive(train, horizon)}, {}
    try:
        draws[ETS] = reconcile(base_forecast(train, horizon), "bu-normal", samples, seed)
    except (ProbhardError, MissingExtraError) as error:
        left_out[ETS] = str(error)
    return draws, left_out


def backtest(
    model: str,
    draws: np.ndarray,  # (S, H, n)
    train: HierarchicalData,
    test: HierarchicalData,
    probabilities: Sequence[float],
    seed: int = 0,
) -> Backtest:
    """Score a forecast and the baselines on held-out rows.

    Args:
        model: Name of the forecast.
        draws: Its draws from the training rows, (S, H, n).
        train: The training rows.
        test: The held-out rows.
        probabilities: Nominal probabilities of the intervals whose coverage is measured.
        seed: Seed of the baselines.

    Raises:
        ProbhardError: As in ``evaluate``.
    """
    others, left_out = rivals(train, len(test.index), len(draws), seed)
    singles = {name: np.array([i]) for i, name in enumerate(test.names)}
    scores, nodes = {}, {}
    for name, forecast in {model: draws, **others}.items():
        scores[name] = evaluate(forecast, test)
        nodes[name] = np.array(list(crps_levels(forecast, test.values, singles).values()))
    coverage = calibration(draws, test.values, test.levels, probabilities)
    return Backtest(test, draws, scores, nodes, coverage, pit_counts(draws, test.values), left_out)
