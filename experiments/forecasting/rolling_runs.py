"""The jobs behind the rolling table: the default forecast, its members, its parts, and what others would use instead.

| row                        | law                                                                                    |
|----------------------------|----------------------------------------------------------------------------------------|
| probhard                   | the default of ``HierarchicalForecaster``                                              |
| ets, theta, ... alone      | one member with its scales and its learned projection                                   |
| seasonal naive             | normal intervals of every node, not coherent                                           |
| AutoETS bottom-up, + ...   | hierarchicalforecast's reconciliations of the same AutoETS fits, intervals by normality |
| without ...                | the default without one of its parts                                                   |

All rows of an origin share the fits of the members. Where a set says so, they are fitted before the first origin only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.forecasting.nine_sets import SETS, splits
from experiments.grid import Grid, Unit
from experiments.records import Records
from probhard.errors import ParameterError, check_choices
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.catalogue import default_members
from probhard.forecasting.members.coherent import groups
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.members.tuning import PoolRecipe, TunedPool
from probhard.forecasting.models.classical import BaseForecast
from probhard.forecasting.reconciliation.family import MetricWeights
from probhard.forecasting.report import rivals
from probhard.forecasting.report.evaluation import crps_levels, pooled_crps
from probhard.score import coverage

KEYS = ("dataset", "method", "origin")
DEFAULT, NO_POOL = "probhard", "without pool"
SAMPLES, LEVEL = 1000, 0.8
GROUPS = ("top", "middle", "bottom")
MINT = {f"AutoETS + {name}": name for name in ("mint_shrink", "wls_struct", "ols")}
RIVALS = (rivals.NAIVE, rivals.BOTTOM_UP, *MINT)
ABLATIONS = {
    "without learned metric": PoolRecipe(metric=MetricWeights()),
    "without correlation": PoolRecipe(correlation=False),
    "without scales and factor": PoolRecipe(scales=False, factor=False),
}
NO_STEPS, NO_NETWORK, NETWORK = "without learned steps", "without network", "deepvar"
ORDER = (  # cheap sets first
    *("tourism", "swiss_stays", "ercot_hourly", "aus_births", "nsw_offences"),
    *("wiki", "traffic", "labour", "tourism_large"),
)
Fits = dict[str, PooledForecast]


def alone(name: str) -> str:
    """Name of the row of a member alone."""
    return f"{name} alone"


@dataclass(frozen=True)
class Job:
    """All rows of a data set at one origin, or at all of them where parameters are carried forward."""

    dataset: str
    origin: int | None = None

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.dataset}-{'all' if self.origin is None else self.origin}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        numbers = range(SETS[self.dataset].origins) if self.origin is None else [self.origin]
        rows = (DEFAULT, *RIVALS, *ABLATIONS, NO_STEPS, NO_POOL)
        return [{"dataset": self.dataset, "method": row, "origin": number} for number in numbers for row in rows]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Fit, forecast and score; returns one line per origin and row."""
        del progress
        lines: list[dict[str, Any]] = []
        fits: Fits | None = None
        for number, known, future in splits(self.dataset):
            if self.origin not in (None, number):
                continue
            started = time.process_time()
            if fits is None:
                fits = fitted(known, len(future.index), folder.parent / "fits")
            else:
                fits = moved(fits, known)
            seconds = time.process_time() - started
            for row, draws, joint in _rows(fits, known):
                key = {"dataset": self.dataset, "method": row, "origin": number}
                lines.append({**key, **measured(draws, future, joint), "seconds": seconds})
        return lines


def fitted(known: HierarchicalData, horizon: int, folder: Path) -> Fits:
    """Fit the default and its ablations; fits of members are kept in a folder."""
    members = default_members(known, horizon)
    recipes = {DEFAULT: PoolRecipe(), **ABLATIONS}
    fits = {
        row: PooledForecast.fit(members, known, horizon, recipe=recipe, folder=folder)
        for row, recipe in recipes.items()
    }
    fits[NO_STEPS] = without_steps(fits[DEFAULT])
    if NETWORK in fits[DEFAULT].tuned.members:
        others = [member for member in members if member.name != NETWORK]
        fits[NO_NETWORK] = PooledForecast.fit(others, known, horizon, folder=folder)
    for name in fits[DEFAULT].tuned.members:
        fits[alone(name)] = only(fits[DEFAULT], name)
    scores = {name: score for name, score in fits[DEFAULT].tuned.scores.items() if name != "pool"}
    best = min(scores, key=scores.__getitem__) if scores else next(iter(fits[DEFAULT].tuned.members))
    fits[NO_POOL] = only(fits[DEFAULT], best)  # the best member on past windows
    return fits


def moved(fits: Fits, known: HierarchicalData) -> Fits:
    """Forecast from the end of another history with the same parameters; rows share the members' forecasts."""
    made = {one.name: one for one in fits[DEFAULT].moved(known).made}
    return {row: replace(fit, made=[made[one.name] for one in fit.made]) for row, fit in fits.items()}


def without_steps(fit: PooledForecast) -> PooledForecast:
    """A pool whose correlation of steps is the one that deviations and one-step errors imply."""
    members = {name: replace(tuned, rho=None, own_rho=None) for name, tuned in fit.tuned.members.items()}
    return replace(fit, tuned=replace(fit.tuned, members=members))


def only(fit: PooledForecast, name: str) -> PooledForecast:
    """One member of a pool, with what was learned of it."""
    at = next(k for k, made in enumerate(fit.made) if made.name == name)
    tuned = TunedPool({name: fit.tuned.members[name]}, {name: 1.0}, 1.0, fit.tuned.windows)
    return replace(fit, members=[fit.members[at]], made=[fit.made[at]], tuned=tuned)


def _rows(fits: Fits, known: HierarchicalData) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Name, draws (S, H, n), and whether draws are joint over the steps."""
    for row, fit in fits.items():
        yield row, fit.sample(known, SAMPLES, 0), True
    ets = next(made.bases[-1] for made in fits[DEFAULT].made if made.name == "ets")
    base = recent(ets)
    horizon = len(base.mean)
    yield rivals.NAIVE, rivals.seasonal_naive(known, horizon).draws(), False
    yield rivals.BOTTOM_UP, rivals.bottom_up(base).draws(), False
    for row, method in MINT.items():
        try:
            yield row, rivals.reconciled(base, method).draws(), False
        except ParameterError:
            yield (
                row,
                rivals.bottom_up(base).draws(),
                False,
            )  # singular errors: as hierarchicalforecast's users would do


def recent(base: BaseForecast) -> BaseForecast:
    """A base forecast with the rows that have one-step forecasts of all series; long histories are cut."""
    complete = np.isfinite(base.fitted).all(1)
    first = int(complete.argmax()) if complete.any() else 0
    return replace(base, data=base.data.window(first), fitted=base.fitted[first:])


def measured(draws: np.ndarray, future: HierarchicalData, joint: bool) -> dict[str, Any]:
    """Scores of draws (S, H, n): CRPS, counts inside the interval by group, and the same for sums over the horizon."""
    labels, y = groups(future), future.values
    scores: dict[str, Any] = {
        "crps": pooled_crps(draws, y),
        "crps_levels": crps_levels(draws, y, future.levels),
        "inside": _inside(draws, y, labels),
    }
    if joint and len(y) > 1:
        total, observed = draws.sum(1, keepdims=True), y.sum(0, keepdims=True)
        scores |= {"crps_sums": pooled_crps(total, observed), "inside_sums": _inside(total, observed, labels)}
    return scores


def _inside(draws: np.ndarray, y: np.ndarray, labels: np.ndarray) -> dict[str, list[float]]:
    """Number of observations inside the interval, and of all, by group."""
    seen = ~np.isnan(y)
    inside = coverage(torch.from_numpy(draws), torch.from_numpy(np.nan_to_num(y)), LEVEL).numpy() * seen
    return {
        name: [float(inside[:, labels == k].sum()), float(seen[:, labels == k].sum())] for k, name in enumerate(GROUPS)
    }


def grid(path: str | os.PathLike[str], datasets: Sequence[str] = ()) -> Grid:
    """Return all jobs of the table, cheap sets first.

    Args:
        path: The file of result lines.
        datasets: Names of data sets; empty for all.
    """
    check_choices("data set", datasets, tuple(SETS))
    jobs: list[Unit] = []
    for name in datasets or ORDER:
        chosen = SETS[name]
        jobs += [Job(name, number) for number in range(chosen.origins - 1, -1, -1)] if chosen.refit else [Job(name)]
    return Grid(jobs, Records(path, KEYS))
