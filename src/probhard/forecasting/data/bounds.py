"""Bounds on all nodes of a hierarchy, checked against its history."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from probhard.constraints import Box
from probhard.errors import ParameterError
from probhard.forecasting.data.table import HierarchicalData


def history_box(data: HierarchicalData, nonnegative: bool, upper: float | Mapping[str, float] | None) -> Box | None:
    """Build the box of all n nodes.

    Args:
        data: The history.
        nonnegative: Whether all nodes are at least 0.
        upper: Upper bound of all nodes, or by node name.

    Returns:
        The box; None without bounds.

    Raises:
        ParameterError: If a node is unknown, or the history lies outside the box.
    """
    if not nonnegative and upper is None:
        return None
    high = np.full(len(data.names), np.inf)
    if isinstance(upper, Mapping):
        for node, bound in upper.items():
            high[data.hierarchy.index(node)] = bound
    elif upper is not None:
        high[:] = upper
    low = 0.0 if nonnegative else -np.inf
    outside = (data.values < low) | (data.values > high)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ParameterError(
            f"Series {data.names[column]!r} is {data.values[row, column]:.6g} at {data.index[row]}, outside its bounds "
            f"[{low:g}, {high[column]:g}].",
            "Forecasts within bounds cannot follow a history outside of them.",
            "Correct the value, or leave out the bound.",
        )
    return Box(low, torch.from_numpy(high))
