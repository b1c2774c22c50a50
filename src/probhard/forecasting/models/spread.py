"""How wide draws should be: one factor on their deviations from the mean, learned on windows that were held out.

    y^(s)  ->  mean + c (y^(s) - mean),          c^2 = argmin of the pooled CRPS over past windows.

A network that is trained on a few years knows its own noise, not how far the next years may leave what it has seen; its
errors on rows that it has not learned from say that. One factor for all nodes and steps keeps sums, so that coherent
draws stay coherent. The errors of one window go together across nodes and steps: two of them say about as much as the
network itself, so the factor is the geometric mean of 1 and of the best one. That one is the minimum of a convex
function, since quantiles are linear in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import torch

from probhard import score
from probhard.forecasting.data.table import HierarchicalData

WINDOWS = 2  # at most as many past windows
LIMITS = (0.1, 10.0)  # of the best factor

Window = tuple[HierarchicalData, HierarchicalData]  # what is known, and what followed


def past_windows(data: HierarchicalData, horizon: int) -> list[Window]:
    """The last windows of the history, the earliest first; none where they would leave too little to learn from.

    At least half of the rows, and a training window, come before the first, with a value of every bottom series.
    """
    rows = len(data.index)
    count = min(WINDOWS, (rows - max(rows // 2, 2 * horizon + 1)) // horizon)
    found = [data.train_test(horizon, origin) for origin in range(count - 1, -1, -1)]
    silent = found and bool(np.isnan(found[0][0].bottom).all(0).any())
    return [] if silent else [window for window in found if (np.nan_to_num(window[1].values) != 0).any()]


def spread_factor(draws: Sequence[np.ndarray], windows: Sequence[Window]) -> float:
    """The factor c for draws (S, H, n) of each of these windows; 1 without windows."""
    if not windows:
        return 1.0
    parts = []
    for paths, (_, test) in zip(draws, windows):
        y, samples = torch.from_numpy(test.values), torch.from_numpy(paths)
        mean = samples.mean(0)
        parts.append((mean, score.sample_quantiles(samples, score.LEVELS) - mean, y.nan_to_num(), ~y.isnan()))

    def loss(log_factor: float) -> float:
        total = 0.0
        for mean, deviation, y, seen in parts:
            losses = score.quantile_loss(mean + math.exp(log_factor) * deviation, y, score.LEVELS, seen)
            total += float(losses.sum() / (y * seen).abs().sum())
        return total

    found = scipy.optimize.minimize_scalar(loss, bounds=[math.log(limit) for limit in LIMITS], method="bounded")
    return math.exp(float(found.x) / 2)


def widened(draws: np.ndarray, factor: float) -> np.ndarray:
    """Draws (S, H, n) with their deviations from the mean multiplied."""
    mean = draws.mean(0)
    return draws if factor == 1 else mean + factor * (draws - mean)
