"""What a history carries beside its values, as arrays of a saved forecaster: mended values and regressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from probhard.forecasting.data.mending import Mending
from probhard.forecasting.data.regressors import Regressors
from probhard.forecasting.data.table import HierarchicalData

MENDING, REGRESSORS = "mending_", "regressors_"  # prefixes of the arrays


def extra_arrays(data: HierarchicalData) -> dict[str, np.ndarray]:
    """Return the mending and the regressors of a history as plain arrays by name."""
    arrays: dict[str, Any] = {}
    if data.mending is not None:
        arrays |= {MENDING + field.name: getattr(data.mending, field.name) for field in fields(Mending)}
    if data.regressors is not None:
        arrays |= {
            f"{REGRESSORS}names": np.array(data.regressors.names, dtype=str),
            f"{REGRESSORS}values": data.regressors.values,
        }
    return arrays


def with_extras(data: HierarchicalData, arrays: Mapping[str, np.ndarray]) -> HierarchicalData:
    """Return a history with the mending and the regressors of ``extra_arrays``, if there are any."""
    if f"{MENDING}filled" in arrays:
        data = replace(data, mending=Mending(**{field.name: arrays[MENDING + field.name] for field in fields(Mending)}))
    if f"{REGRESSORS}values" in arrays:
        names = tuple(map(str, arrays[f"{REGRESSORS}names"]))
        data = replace(data, regressors=Regressors(names, arrays[f"{REGRESSORS}values"]))
    return data
