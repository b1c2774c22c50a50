"""Naive forecasts, the baselines of every model.

    last value:          x_(T+k) = b_T
    seasonal naive:      x_(T+k) = b_(T+k-m j),       the last observed value of the same season, m steps long
    seasonal bootstrap:  x_(T+k) = seasonal naive + (b_t - b_(t-m)),      t drawn for every step and draw

for the bottom series ``b``. All series are sums of these, so every draw is coherent. A change ``b_t - b_(t-m)`` is
taken from all series at the same t, which keeps their dependence.
"""

from __future__ import annotations

import numpy as np

from probhard.errors import ParameterError
from probhard.forecasting.data.table import HierarchicalData, summed


def last_value(data: HierarchicalData, horizon: int) -> np.ndarray:
    """Forecast the last observed values.

    Args:
        data: The history of n series.
        horizon: Number of steps H.

    Returns:
        One draw, (1, H, n).

    Raises:
        ParameterError: If the horizon is below 1.
    """
    _check(horizon)
    bottom = _carried(data.bottom)[-1]
    return summed(data.hierarchy, np.broadcast_to(bottom, (1, horizon, len(bottom))))


def seasonal_naive(data: HierarchicalData, horizon: int) -> np.ndarray:
    """Forecast the last observed values of the same season.

    Args:
        data: The history of n series.
        horizon: Number of steps H.

    Returns:
        One draw, (1, H, n).

    Raises:
        ParameterError: If the horizon is below 1.
    """
    return summed(data.hierarchy, _same_season(data, horizon)[None])


def seasonal_bootstrap(data: HierarchicalData, horizon: int, samples: int = 200, seed: int = 0) -> np.ndarray:
    """Add past changes over a season to the seasonal naive forecast; draws may be negative.

    Args:
        data: The history of n series.
        horizon: Number of steps H.
        samples: Number of draws S.
        seed: Seed of the draws.

    Returns:
        Draws, (S, H, n).

    Raises:
        ParameterError: If the horizon is below 1, or the history has no complete change over a season.
    """
    changes = data.bottom[data.season :] - data.bottom[: -data.season]  # (T - m, bottoms)
    changes = changes[~np.isnan(changes).any(1)]
    if not len(changes):
        raise ParameterError(
            f"The history of {len(data.index)} rows has no two complete rows {data.season} apart.",
            "Changes over a season are drawn from the past.",
            "Use a longer history, a shorter season, or seasonal_naive.",
        )
    drawn = np.random.default_rng(seed).integers(len(changes), size=(samples, horizon))
    return summed(data.hierarchy, _same_season(data, horizon) + changes[drawn])


def _check(horizon: int) -> None:
    if horizon < 1:
        raise ParameterError(f"Got a horizon of {horizon}.", "A forecast has at least one step.", "Pass a larger one.")


def _carried(values: np.ndarray) -> np.ndarray:
    """Carry each column's last observed value forward, (T, m); NaN before its first."""
    seen = np.where(np.isnan(values), -1, np.arange(len(values))[:, None])
    seen = np.maximum.accumulate(seen, axis=0)
    return np.where(seen < 0, np.nan, np.take_along_axis(values, np.maximum(seen, 0), axis=0))


def _same_season(data: HierarchicalData, horizon: int) -> np.ndarray:
    """Return the last observed value of each step's season, (H, m); of any season if there is none."""
    _check(horizon)
    bottom, season = data.bottom, data.season
    last = _carried(bottom)[-1]
    steps = []
    for k in range(horizon):
        same = bottom[(len(bottom) + k) % season :: season]
        value = _carried(same)[-1] if len(same) else last
        steps.append(np.where(np.isnan(value), last, value))
    return np.stack(steps)
