"""The seasonal bootstrap as a member: paths of past changes over a season, drawn jointly from all bottom series."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.models.baselines import seasonal_bootstrap
from probhard.forecasting.models.classical import BaseForecast

SAMPLES = 400


@dataclass(frozen=True)
class BootstrapMember:
    """Seasonal naive plus past changes over a season; draws are coherent."""

    name: str = "bootstrap"
    settings: dict[str, Any] = field(default_factory=lambda: {"samples": SAMPLES})
    kept: bool = True

    def forecast(self, data: HierarchicalData, horizon: int, origins: Sequence[int], jobs: int = 1) -> MemberForecast:
        """Draw at every origin. See ``Member``."""
        del jobs
        started = time.process_time()
        known = [data.window(0, end) for end in (*origins, len(data.index))]
        draws = [seasonal_bootstrap(rows, horizon, SAMPLES) for rows in known]
        bases = [summary_of(rows, paths) for rows, paths in zip(known, draws)]
        return MemberForecast(self.name, bases, draws, [], None, time.process_time() - started)

    def resume(self, data: HierarchicalData, horizon: int, state: Any) -> MemberForecast:
        """Draw from a new history. See ``Member``."""
        del state
        return self.forecast(data, horizon, ())


def summary_of(known: HierarchicalData, draws: np.ndarray) -> BaseForecast:
    """Means and deviations of paths (S, H, n), without one-step errors."""
    return BaseForecast(known, draws.mean(0), draws.std(0), np.full(known.values.shape, np.nan))
