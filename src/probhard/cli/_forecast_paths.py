"""What a run keeps of its draws, which are made and checked some steps at a time.

Means and quantiles of all nodes, whole paths of the nodes with a chart, and the first paths of all nodes if they are to
be written. Every draw is checked against the constraint of its step before it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.cli._certificate import Certificate
from probhard.cli._forecast_checks import Checks, Constraints
from probhard.cli._forecast_data import is_file
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.limits import Limits
from probhard.forecasting.reconciliation.columns import summary

if TYPE_CHECKING:
    from probhard.forecasting.forecaster import HierarchicalForecaster


@dataclass
class Paths:
    """The forecast of n nodes over H steps.

    Args:
        model: Name of the column of means.
        checks: What was found wrong.
        columns: Means and ends of intervals, (H, n) each.
        charted: Draws of the nodes with a chart, (S, H, k).
        written: The first draws of all nodes, (D, H, n).
    """

    model: str
    checks: Checks
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    charted: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))
    written: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))

    @classmethod
    def of(
        cls,
        model: HierarchicalForecaster,
        data: HierarchicalData,
        limits: Limits,
        options: Mapping[str, Any],
        nodes: Sequence[int],
    ) -> Paths:
        """Draw, project onto plans and caps, check and summarise.

        Args:
            model: The fitted forecaster.
            data: The history.
            limits: What the draws must obey.
            options: Options of the run: horizon, num_samples, level, draws, upper.
            nodes: Numbers of the nodes with a chart.

        Raises:
            ParameterError: If the draws of a step do not fit into memory.
        """
        from probhard.forecasting.members.streamed import check_memory

        horizon, count, written = options["horizon"], options["num_samples"], options["draws"] or 0
        kept = horizon * (count * len(nodes) + written * len(data.names))
        check_memory(count, len(data.names), kept)
        planned = limits.fixed is not None or bool(data.ended.any()) or is_file(options["upper"])
        paths, columns, charted, first = cls(model.model, Checks(data, horizon)), [], [], []
        for steps, draws in model.steps(horizon, count):
            constraints: Constraints = []
            if planned:
                result = limits.at(steps).apply(draws, data, "flag")
                draws, constraints = np.asarray(result.draws), result.constraints
            else:
                constraints = [(np.arange(draws.shape[1]), model.constraint)]
            paths.checks.add(steps, draws, constraints)
            columns.append(summary(draws, model.model, options["level"]))
            charted.append(draws[..., list(nodes)])
            first.append(draws[:written].copy())
        paths.columns = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
        paths.charted, paths.written = np.concatenate(charted, 1), np.concatenate(first, 1)
        return paths

    @property
    def mean(self) -> np.ndarray:
        """Means, (1, H, n), as a point forecast."""
        return self.columns[self.model][None]

    def certificate(self, setting: dict[str, Any]) -> Certificate:
        """The certificate of all draws, with the facts of the run."""
        return self.checks.certificate(setting)

    def draws(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number and the values (H, n) of every draw that is written."""
        yield from enumerate(self.written)
