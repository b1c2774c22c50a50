"""Default settings of a forecaster, from the frequency and size of its data.

Series whose typical change between steps is below ``SMOOTH`` of their level are learned as changes: a network that sees
levels cannot resolve changes of a thousandth of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from probhard.forecasting.data.seasons import default_lags
from probhard.forecasting.data.table import HierarchicalData

SMOOTH = 0.05  # typical change between steps, relative to the level, below which changes are learned
LONGEST_CONTEXT = 60  # steps besides the horizon; an LSTM learns no more from longer contexts, and takes longer


def default_horizon(data: HierarchicalData) -> int:
    """Return the usual horizon of the data: its own, or one season but at most a quarter of the rows."""
    return data.horizon or max(1, min(data.season, len(data.index) // 4))


def smooth(data: HierarchicalData) -> bool:
    """Return whether the series change so little from step to step that their changes are learned."""
    steps, level = np.abs(np.diff(data.values, axis=0)), np.abs(data.values[1:])
    known = ~np.isnan(steps)
    return bool(known.any() and steps[known].sum() < SMOOTH * level[known].sum())


def defaults(data: HierarchicalData, horizon: int, changes: bool) -> dict[str, Any]:
    """Choose settings of ``DeepVAREstimator`` for data of this frequency and size.

    Args:
        data: The history.
        horizon: Steps of a training window.
        changes: Whether changes are learned instead of levels.

    Returns:
        Options by name; ``max_epochs`` is an option of the trainer.
    """
    rows, nodes = data.values.shape
    lags = {1, *default_lags(data.freq), data.season}
    small = nodes < 100  # few series allow larger steps, and a large network would memorize their noise
    return {
        "context_length": min(2 * max(horizon, data.season, 12), LONGEST_CONTEXT + horizon),
        "lags_seq": sorted(lag for lag in lags if lag == 1 or lag <= rows // 2),
        "scaling": "centre",
        "hidden_size": 16 if small else 40,
        "lr": 1e-2 if small else 1e-3,
        "batch_size": 32 if nodes < 500 else 16,
        "num_batches_per_epoch": 50,
        "max_epochs": (3 if changes else 5) if small else 10,
    }
