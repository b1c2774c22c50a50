"""Reconciliation alone: one AutoETS forecast of every node, made coherent by us and by MinTrace.

| row                    | metric and law                                                                           |
|------------------------|------------------------------------------------------------------------------------------|
| probhard, past         | metric and a factor of deviations learned on past windows; correlation of in-sample errors |
| probhard, history      | metric learned on in-sample errors, and their correlation                                |
| probhard, no history   | the middle without correlation; law fitted to the spreads along the hierarchy             |
| ols, wls_struct, ...   | hierarchicalforecast's MinTrace with intervals by normality                              |

All rows have the same means and deviations of every node. Every law is normal, and is scored by its quantiles. The same
origins and the same fits as in ``rolling_runs``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.forecasting.nine_sets import SETS, splits
from experiments.forecasting.rolling_runs import ORDER, recent
from experiments.grid import Grid, Unit
from experiments.records import Records
from probhard.errors import ParameterError, check_choices
from probhard.forecasting import (
    Forecasts,
    MetricWeights,
    PastForecast,
    PathLaw,
    Reconciled,
    Reconciliation,
    learn_reconciliation,
)
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast, past_origins
from probhard.forecasting.members.catalogue import named_member
from probhard.forecasting.members.kept import kept_forecast
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.reconciliation.family import middle
from probhard.forecasting.report import rivals
from probhard.forecasting.report.evaluation import pooled_crps

KEYS = ("dataset", "method", "origin")
PAST, HISTORY, ALONE = "probhard, past", "probhard, history", "probhard, no history"
OURS, THEIRS = (PAST, HISTORY, ALONE), ("ols", "wls_struct", "wls_var", "mint_shrink")
ERRORS = 2000  # rows of errors that count, the latest
BOUNDED_DRAWS = 50


@dataclass(frozen=True)
class Job:
    """All rows of a data set at all origins."""

    dataset: str

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return self.dataset

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        numbers = range(SETS[self.dataset].origins)
        return [self._key(row, number) for number in numbers for row in (*OURS, *THEIRS)]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Reconcile and score; returns one line per origin and row."""
        del progress
        lines: list[dict[str, Any]] = []
        learned: tuple[MetricWeights, float] | None = None
        made: MemberForecast | None = None
        for number, known, future in splits(self.dataset):
            horizon, y = len(future.index), future.values
            member = named_member("ets", known)
            if made is None or SETS[self.dataset].refit:
                origins = past_origins(known, horizon)
                made = kept_forecast(member, known, horizon, origins, folder.parent / "fits")
                started = time.process_time()
                windows = [_window(base, known) for base in made.bases[:-1]]
                learned = learn_reconciliation(windows, known.hierarchy, middle(len(_errors(made.bases[-1]))))
                learning = time.process_time() - started
            else:
                made, learning = member.resume(known, horizon, made.state), 0.0
            base = made.bases[-1]
            for row, margins, about in reconciled(base, learned):
                about["seconds_learning"] = learning if row == PAST else 0.0
                lines.append({**self._key(row, number), "crps": pooled_crps(margins, y), **about})
            if number == 0 and float(np.nanmin(known.values)) >= 0:
                lines[-1]["smallest_bounded"] = smallest_bounded(base)
        return lines

    def _key(self, row: str, number: int) -> dict[str, Any]:
        return {"dataset": self.dataset, "method": row, "origin": number}


def _window(base: BaseForecast, known: HierarchicalData) -> PastForecast:
    """A past forecast and what was observed."""
    start = len(base.data.index)
    law = PathLaw.of_errors(torch.from_numpy(base.mean), torch.from_numpy(base.stddev), torch.from_numpy(_errors(base)))
    return PastForecast(law, torch.from_numpy(known.values[start : start + len(base.mean)]))


def _errors(base: BaseForecast) -> np.ndarray:
    return (base.data.values - base.fitted)[-ERRORS:]


def reconciled(
    base: BaseForecast, learned: tuple[MetricWeights, float] | None
) -> list[tuple[str, np.ndarray, dict[str, Any]]]:
    """Name, quantiles (Q, H, n) and details of every row."""
    weights, scale = learned or (MetricWeights(), 1.0)
    plain = Forecasts(base.mean, base.stddev)
    joint = Forecasts(base.mean, base.stddev, errors=_errors(base))
    hierarchy = base.data.hierarchy
    rows: dict[str, Callable[[], rivals.Margins]] = {
        PAST: lambda: _margins(Reconciliation(hierarchy, weights)(joint.scaled(scale), samples=1)),
        HISTORY: lambda: _margins(Reconciliation(hierarchy)(joint, samples=1)),
        ALONE: lambda: _margins(Reconciliation(hierarchy)(plain, samples=1)),
    }
    complete = recent(base)
    for method in THEIRS:
        rows[method] = lambda method=method: rivals.reconciled(complete, method)  # type: ignore[misc]
    found = []
    for row, make in rows.items():
        started = time.process_time()
        try:
            margins, failed = make(), ""
        except ParameterError as error:  # singular errors: as hierarchicalforecast's users would do
            margins, failed = rivals.bottom_up(base), str(error)
        about: dict[str, Any] = {"seconds": time.process_time() - started, "failed": failed}
        about |= {"metric": asdict(weights), "scale": scale} if row == PAST else {}
        found.append((row, margins.draws(), about))
    return found


def _margins(result: Reconciled) -> rivals.Margins:
    assert result.spread is not None
    return rivals.Margins(result.mean, result.spread)


def smallest_bounded(base: BaseForecast) -> float:
    """The smallest mean, draw or quantile of all nodes where non-negative forecasts are asked for."""
    rules = Reconciliation(base.data.hierarchy, nonnegative=True)
    result = rules(Forecasts(base.mean, base.stddev), samples=BOUNDED_DRAWS)
    assert result.draws is not None
    return float(min(result.mean.min(), result.draws.min(), result.quantiles([0.05]).min()))


def grid(path: str | os.PathLike[str], datasets: Sequence[str] = ()) -> Grid:
    """Return all jobs of the table, cheap sets first.

    Args:
        path: The file of result lines.
        datasets: Names of data sets; empty for all.
    """
    check_choices("data set", datasets, tuple(SETS))
    jobs: list[Unit] = [Job(name) for name in datasets or ORDER]
    return Grid(jobs, Records(path, KEYS))
