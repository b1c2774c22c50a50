"""The jobs behind the table of hierarchical forecasts: every method on every data set, trained and scored alike.

There are two windows. ``paper`` is one forecast of the last H rows. ``rolling`` has several origins, the last with the
same rows. Networks are trained once, before the first origin; classical rows are fitted at every origin. A line is one
(data set, method, seed, window, origin).

``probhard-default`` is the default of ``HierarchicalForecaster``, in the paper's window only: the rolling table has its
own rows. ``probhard-pool`` mixes one list of members for all data sets, with weights fitted on the windows before the
first origin. Its draws are coherent and non-negative.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.forecasting.origins import Origin, origins, rolled, trained
from experiments.forecasting.rows import (
    DATASETS,
    DEFAULT,
    KEYS,
    NAIVE,
    POOL,
    POOL_STEPS,
    POOL_WINDOWS,
    POOLED,
    POOLED_ROWS,
    ROLLED,
    SAMPLES,
    SCALINGS,
    SETTINGS,
    TRAINED,
    TREELIKE,
)
from experiments.grid import Grid, Unit
from experiments.records import Records
from probhard._util.atomic import replacing
from probhard.errors import check_choices
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.catalogue import default_members
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.models import baselines, classical, pool
from probhard.forecasting.report.evaluation import evaluate
from probhard.method import Method

if TYPE_CHECKING:
    from probhard.forecasting.models.training import DeepVARModule


Forecast = tuple[Origin, str, np.ndarray, dict[str, Any]]  # place, row, draws (S, H, n), more fields of its line


@dataclass(frozen=True)
class Job:
    """Forecasts of one kind for a data set, a window and a seed."""

    dataset: str
    kind: str  # "naive", a name in classical.MODELS, or one in TRAINED
    window: str = "paper"
    seed: int = 0
    quick: bool = False  # one epoch of a few batches

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.dataset}-{self.kind}-{self.window}-{self.seed}"

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows that it gives."""
        if self.kind == "naive":
            return NAIVE
        if self.kind in (POOL, DEFAULT):
            return (self.kind,)
        if self.kind in classical.MODELS:
            rows = [row for row in classical.ROWS if row != "permbu-mint" or self.dataset in TREELIKE]
            return tuple(f"{self.kind}-{row}" for row in rows)
        return tuple(TRAINED[self.kind])

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        return [self._key(row, origin) for origin in self._numbers() for row in self.rows]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Fit, forecast and score; returns one line per origin and row."""
        lines, places = [], origins(self.dataset, self.window, len(self._numbers()))
        if self.kind in TRAINED:
            forecasts = self._neural(places, progress)
        elif self.kind == DEFAULT:
            forecasts = self._default(places, folder.parent / "fits")
        elif self.kind == POOL:
            forecasts = self._pool(places, folder.parent / "fits", progress)
        else:
            forecasts = self._classical(places, folder.parent / "fits")
        for origin, row, samples, about in forecasts:
            scored = evaluate(samples, origin.future).record()
            lines.append({**self._key(row, origin.number), **scored, **about})
        return lines

    def _classical(self, places: Sequence[Origin], fits: Path) -> Iterator[Forecast]:
        for place in places:
            horizon, spent = len(place.future.index), 0.0
            if self.kind != "naive":
                fitted, spent = self._fitted(place.known, horizon, self.kind, fits)
            for row in self.rows:
                started = time.perf_counter()
                if self.kind == "naive":
                    samples = _naive(row, place.known, horizon, self.seed)
                else:
                    samples = classical.reconcile(fitted, row.removeprefix(f"{self.kind}-"), SAMPLES, self.seed)
                yield place, row, samples, {"seconds": spent + time.perf_counter() - started}

    def _fitted(
        self, known: HierarchicalData, horizon: int, model: str, fits: Path
    ) -> tuple[classical.BaseForecast, float]:
        """Base forecasts and the seconds that they took, cached in a folder: they do not depend on rows or seeds."""
        path = fits / f"{self.dataset}-{model}-{len(known.index)}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                seconds = float(kept["seconds"]) if "seconds" in kept else math.nan
                return classical.BaseForecast(known, kept["mean"], kept["stddev"], kept["fitted"]), seconds
        started = time.perf_counter()
        made = classical.base_forecast(known, horizon, model)
        seconds = time.perf_counter() - started
        fits.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, mean=made.mean, stddev=made.stddev, fitted=made.fitted, seconds=seconds)
        return made, seconds

    def _default(self, places: Sequence[Origin], fits: Path) -> Iterator[Forecast]:
        """The default members, tuned on the windows before each place."""
        for place in places:
            started, horizon = time.process_time(), len(place.future.index)
            members = default_members(place.known, horizon)
            fit = PooledForecast.fit(members, place.known, horizon, folder=fits)
            draws = fit.sample(place.known, SAMPLES, self.seed)
            about = {"weights": fit.tuned.weights, "seconds": time.process_time() - started}
            yield place, DEFAULT, draws, about

    def _pool(self, places: Sequence[Origin], fits: Path, progress: bool) -> Iterator[Forecast]:
        """The pool: members at every place, weighted on the windows before the first."""
        started, first = time.perf_counter(), places[0]
        windows = max(POOL_WINDOWS, POOL_STEPS // len(first.future.index))
        step = SETTINGS[self.dataset].step
        past = [Origin(k, *first.known.train_test(origin=k, step=step)) for k in range(windows - 1, -1, -1)]
        members = self._members(past, fits, progress)
        weights = pool.best_weights([pool.scores(draws, place.future.values) for draws, place in zip(members, past)])
        names = [*POOLED, *POOLED_ROWS, "seasonal-bootstrap"]
        about: dict[str, Any] = {"weights": {name: float(weight) for name, weight in zip(names, weights)}}
        members = self._members(places, fits, progress)
        about["seconds"] = time.perf_counter() - started
        for place, draws in zip(places, members):
            mixed = pool.pooled(draws, weights, SAMPLES, self.seed)
            yield place, POOL, pool.nonnegative(mixed, place.known.hierarchy), about

    def _members(self, places: Sequence[Origin], fits: Path, progress: bool) -> list[list[np.ndarray]]:
        """Draws of every member of the pool at every place."""
        members: list[list[np.ndarray]] = [[] for _ in places]
        for method, scaling in POOLED.values():
            network = self._train(places[0], method, progress, scaling)
            for draws, place in zip(members, places):
                draws.append(rolled(network, method, place, self.seed))
        for draws, place in zip(members, places):
            fitted, _ = self._fitted(place.known, len(place.future.index), "ets", fits)
            draws += [classical.reconcile(fitted, row, SAMPLES, self.seed) for row in POOLED_ROWS]
            draws.append(_naive("seasonal-bootstrap", place.known, len(place.future.index), self.seed))
        return members

    def _neural(self, places: Sequence[Origin], progress: bool) -> Iterator[Forecast]:
        rows, started = TRAINED[self.kind], time.perf_counter()
        network = self._train(places[0], next(iter(rows.values())), progress, SCALINGS.get(self.kind, "mean"))
        seconds = time.perf_counter() - started
        for place in places:
            for row, method in rows.items():
                yield place, row, rolled(network, method, place, self.seed), {"seconds": seconds}

    def _train(self, first: Origin, method: Method, progress: bool, scaling: str = "mean") -> DeepVARModule:
        return trained(self.dataset, first, method, self.seed, self.quick, progress, scaling=scaling)

    def _numbers(self) -> list[int]:
        setting = SETTINGS[self.dataset]
        if self.window == "paper":
            return [0]
        count = setting.arima_origins if self.kind == "arima" else setting.origins
        return list(range(count - 1, -1, -1))

    def _key(self, row: str, origin: int) -> dict[str, Any]:
        return {"dataset": self.dataset, "method": row, "seed": self.seed, "window": self.window, "origin": origin}


def _naive(row: str, data: HierarchicalData, horizon: int, seed: int) -> np.ndarray:
    if row == "last-value":
        return baselines.last_value(data, horizon)
    if row == "seasonal-naive":
        return baselines.seasonal_naive(data, horizon)
    return baselines.seasonal_bootstrap(data, horizon, SAMPLES, seed)


def grid(
    path: str | os.PathLike[str],
    seeds: Sequence[int] = range(5),
    windows: Sequence[str] = ("paper", "rolling"),
    datasets: Sequence[str] = (),
    kinds: Sequence[str] = (),
    rolling_seeds: int = 3,
    quick: bool = False,
) -> Grid:
    """Return all jobs of the table, the paper's window first, slow classical fits last.

    Args:
        path: The file of result lines.
        seeds: Of networks; other rows use the first one.
        windows: Some of ``paper`` and ``rolling``.
        datasets: Names of data sets; empty for all.
        kinds: Kinds of jobs; empty for all.
        rolling_seeds: How many seeds the rolling window uses.
        quick: Train one epoch of a few batches.
    """
    known = ("naive", *TRAINED, *classical.MODELS, POOL, DEFAULT)
    check_choices("method", kinds, known)
    check_choices("window", windows, ("paper", "rolling"))
    check_choices("data set", datasets, DATASETS)
    jobs: list[Unit] = []
    for window in windows:
        for kind in kinds or known:
            if window == "rolling" and (kind == DEFAULT or (kind in TRAINED and kind not in ROLLED)):
                continue
            count = len(seeds) if window == "paper" else rolling_seeds
            drawn = seeds[:count] if kind in TRAINED or kind == POOL else seeds[:1]
            jobs += [Job(dataset, kind, window, seed, quick) for seed in drawn for dataset in datasets or DATASETS]
    return Grid(jobs, Records(path, KEYS))
