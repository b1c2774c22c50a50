"""Calibration of the spread: one factor on the deviations of draws from their mean, fitted on held-out windows.

    y^(s)  ->  mean + c (y^(s) - mean),          c^2 = argmin of the pooled CRPS over past windows.

A network trained on a few years knows their noise, but not how far later years may depart from them. Its errors on
held-out rows show that. One factor for all nodes and steps keeps the sums, so coherent draws stay coherent. The errors
of a window are correlated across nodes and steps, so two windows carry little information: the factor c is the
geometric mean of 1 and the best factor, which ``calibration.draws_factor`` fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from probhard import calibration
from probhard.forecasting.data.table import HierarchicalData

WINDOWS = 2  # most past windows

Window = tuple[HierarchicalData, HierarchicalData]  # training rows and the test rows after them


def past_windows(data: HierarchicalData, horizon: int) -> list[Window]:
    """Return the last windows of the history, the earliest first.

    At least half of the rows, and one training window, come before the first. The list is empty if that is not
    possible, or if some bottom series has no value before the first window.

    Args:
        data: The history.
        horizon: Rows of a window.
    """
    rows = len(data.index)
    count = min(WINDOWS, (rows - max(rows // 2, 2 * horizon + 1)) // horizon)
    windows = [data.train_test(horizon, origin) for origin in range(count - 1, -1, -1)]
    starts_late = windows and bool(np.isnan(windows[0][0].bottom).all(0).any())
    return [] if starts_late else [window for window in windows if (np.nan_to_num(window[1].values) != 0).any()]


def spread_factor(draws: Sequence[np.ndarray], windows: Sequence[Window]) -> float:
    """Fit the factor c.

    Args:
        draws: Draws for each window, (S, H, n).
        windows: From ``past_windows``.

    Returns:
        The factor; 1 without windows.
    """
    return factor([torch.from_numpy(array) for array in draws], [torch.from_numpy(test.values) for _, test in windows])


def factor(draws: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> float:
    """Fit the factor c to draws (S, H, n) and what was observed, (H, n), in each window; 1 without windows."""
    return math.sqrt(calibration.draws_factor(draws, targets)) if draws else 1.0


def widened(draws: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the deviations of draws (S, H, n) from their mean by a factor; same shape."""
    mean = draws.mean(0)
    return draws if factor == 1 else mean + factor * (draws - mean)
