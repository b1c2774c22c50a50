"""Effects of regressors on every node, by least squares on changes over a season.

    y_t - y_(t-m) = c + (x_t - x_(t-m)) beta + e_t,        effect_t = (x_t - mean of x) beta,

with beta shrunk by the positive part of ``1 - k s^2 / |fit|^2`` (James and Stein): k regressors that explain no more
than noise get 0. Series models are fitted to ``y - effect``; the effect of the future is added to their forecasts.
"""

from __future__ import annotations

import numpy as np

from probhard.forecasting.data.table import HierarchicalData

FEWEST = 5  # changes beyond three for each regressor that a fit needs
RIDGE = 1e-6  # of the size of the changes of a regressor


def effects(data: HierarchicalData, horizon: int) -> np.ndarray | None:
    """Estimate the effects on n nodes in the history and the steps after it.

    Args:
        data: The history of T rows.
        horizon: Number of steps H.

    Returns:
        Effects, (T + H, n), 0 for nodes with too few rows; None without regressors that are known ahead.
    """
    known = data.known_ahead(horizon)
    if not known.feature_names:
        return None
    assert known.regressors is not None
    rows, season = len(data.index), data.season if len(data.index) > 2 * data.season else 1
    features = known.regressors.values  # (T + H, k)
    centred = (features - features[:rows].mean(0)) / features[:rows].std(0)
    steps = centred[season:rows] - centred[: rows - season]
    changes = data.observed[season:] - data.observed[:-season]
    result = np.zeros((rows + horizon, len(data.names)))
    complete = ~np.isnan(changes).any(0)
    groups = [np.flatnonzero(complete), *(np.array([j]) for j in np.flatnonzero(~complete))]
    for group in groups:
        if len(group):
            seen = ~np.isnan(changes[:, group]).any(1)
            result[:, group] = centred @ _coefficients(steps[seen], changes[seen][:, group])
    return result


def _coefficients(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Shrunk least squares with a constant: x (T, k) and y (T, n) to (k, n)."""
    rows, count = x.shape
    if rows < 3 * count + FEWEST:
        return np.zeros((count, y.shape[1]))
    x, y = x - x.mean(0), y - y.mean(0)
    gram = x.T @ x + RIDGE * rows * np.eye(count)
    beta = np.linalg.solve(gram, x.T @ y)
    fit = x @ beta
    noise = count * (np.square(y - fit).sum(0) / (rows - count - 1))
    strength = np.square(fit).sum(0)
    return beta * (1 - np.divide(noise, strength, out=np.ones_like(noise), where=strength > noise))
