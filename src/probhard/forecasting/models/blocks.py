"""Blocks of steps as the rows of a table, so that a network forecasts a temporal hierarchy at once.

    row j of phase r:   all places in all periods of the steps  r + j B, ..., r + (j + 1) B - 1,

where B is the longest period. A network of such rows forecasts block after block. Under the constraint of places x time
its draws add up over both. Every phase gives an entry of its own, so no window of the history is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.constraints.hierarchy import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.data.seasons import cycle_features, default_time_features
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.reconciliation.temporal import CrossTemporal


@dataclass(frozen=True)
class TemporalBlocks:
    """Converts tables of steps to blocks, and forecasts of blocks to steps.

    Args:
        places: Sums over n places.
        periods: Block lengths in steps, all divisors of the longest, including 1.
    Periods that do not fit each other raise ParameterError.
    """

    places: Hierarchy
    periods: Sequence[int]

    def __post_init__(self) -> None:
        self.constraint  # noqa: B018  # raises for periods that do not fit

    @property
    def length(self) -> int:
        """Steps of a block B."""
        return max(self.periods)

    @cached_property
    def constraint(self) -> CrossTemporal:
        """Coherence over places and over the periods of a block, of N variables."""
        return CrossTemporal(self.places, self.length, self.periods)

    def count(self, horizon: int) -> int:
        """Number of blocks that cover a horizon of steps."""
        return -(-horizon // self.length)

    def options(self, data: HierarchicalData, horizon: int, context: int) -> dict[str, Any]:
        """Arguments of ``DeepVAREstimator`` for these blocks.

        Args:
            data: The history.
            horizon: Steps to forecast.
            context: Steps before them that the network sees.
        """
        season = data.season // self.length if data.season % self.length == 0 else 1
        return {
            "freq": data.freq,
            "prediction_length": self.count(horizon),
            "hierarchy": self.constraint,
            "context_length": max(self.count(context), 2),
            "lags_seq": sorted({1, max(season, 1)}),
            "time_features": (),
            "num_feat_dynamic_real": 2 * len(default_time_features(data.freq)),
        }

    def entries(self, data: HierarchicalData) -> list[dict[str, Any]]:
        """GluonTS entries of a history, one for each phase, with targets (N, blocks).

        Raises:
            ParameterError: If the history is shorter than a block.
        """
        phases = min(self.length, len(data.index) - self.length + 1)
        if phases < 1:
            raise ParameterError(
                f"The history has {len(data.index)} rows, a block {self.length} steps.",
                "A row of the table is a whole block.",
                "Pass shorter periods or a longer history.",
            )
        return [self._entry(data, phase, 0) for phase in range(phases)]

    def last(self, data: HierarchicalData, horizon: int) -> list[dict[str, Any]]:
        """The entry whose last block ends with the history, with features of the blocks of a horizon."""
        return [self._entry(data, len(data.index) % self.length, self.count(horizon))]

    def steps(self, samples: Any, horizon: int) -> Tensor:
        """Single steps of forecasts of blocks.

        Args:
            samples: Draws of blocks, (S, blocks, N).
            horizon: Number of steps H.

        Returns:
            (S, H, n).
        """
        single = self.constraint.split(torch.as_tensor(samples))[1]  # (S, blocks, B, n)
        return single.flatten(1, 2)[:, :horizon]

    def _entry(self, data: HierarchicalData, phase: int, future: int) -> dict[str, Any]:
        blocks = (len(data.index) - phase) // self.length
        rows = data.observed[phase : phase + blocks * self.length]
        steps = torch.from_numpy(np.ascontiguousarray(rows)).unflatten(0, (blocks, self.length))
        event = self.constraint.join(self.constraint.sums(steps))  # (blocks, N)
        index = data.index if not future else data.index.append(data.future(future * self.length))
        stamps = index[phase :: self.length][: blocks + future]
        features = cycle_features(default_time_features(data.freq), stamps)
        entry = {"start": data.index[phase], "target": event.numpy().T, "item_id": data.name}
        return entry | ({"feat_dynamic_real": features.T} if features.size else {})
