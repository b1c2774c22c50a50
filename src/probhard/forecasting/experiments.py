"""The table of hierarchical forecasts: every method on every data set, trained and scored alike.

Two windows: ``paper`` is the last H rows, one forecast. ``rolling`` has several origins, the last with the same rows:
networks are trained once before the first origin and then rolled, classical rows are fitted anew at each. Figures are
those of ``evaluation``; a line is one (data set, method, seed, window, origin).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probhard.forecasting import baselines, classical
from probhard.forecasting.data import HierarchicalData
from probhard.forecasting.datasets import load
from probhard.forecasting.evaluation import evaluate
from probhard.grid import Grid, Unit
from probhard.method import METHODS, Method
from probhard.records import Records

DATASETS = ("labour", "tourism", "tourism_large", "traffic", "wiki")
SAMPLES = 400  # paths per forecast
KEYS = ("dataset", "method", "seed", "window", "origin")


@dataclass(frozen=True)
class Setting:
    """How DeepVAR is trained on a data set, the same for all methods (the reference code's settings)."""

    epochs: int
    batch_size: int
    lr: float
    context: int
    origins: int = 8  # of the rolling evaluation
    step: int | None = None  # rows between origins; None is the horizon
    arima_origins: int = 8


SETTINGS = {
    "labour": Setting(5, 32, 1e-2, 24),
    "tourism": Setting(10, 32, 1e-2, 24, step=1),  # 36 rows in all
    "tourism_large": Setting(10, 4, 1e-3, 36, arima_origins=2),
    "traffic": Setting(10, 32, 1e-3, 40),
    "wiki": Setting(25, 32, 1e-3, 15),
}


def _nll(name: str) -> Method:
    return METHODS[name].replace(score="nll")


TRAINED: dict[str, dict[str, Method]] = {  # what is trained, and the rows that are made of it
    "base": {"base": METHODS["base"], "probconserv": METHODS["probconserv"]},
    "base-nll": {"base-nll": _nll("base"), "probconserv-nll": _nll("probconserv")},
    **{name: {name: METHODS[name]} for name in ("probhard-or", "probhard-ob", "hier-e2e", "hardc", "softc")},
}
ROLLED = ("base", "probhard-or", "probhard-ob", "hier-e2e")
NAIVE = ("last-value", "seasonal-naive", "seasonal-bootstrap")
CLASSICAL = tuple(f"{model}-{row}" for model in classical.MODELS for row in classical.ROWS)
TREELIKE = ("labour", "tourism", "traffic", "wiki")  # permbu needs a tree


@dataclass(frozen=True)
class Origin:
    """A forecast's place in time: what is known, what is to come."""

    number: int
    known: HierarchicalData
    future: HierarchicalData


def origins(dataset: str, window: str, count: int | None = None) -> list[Origin]:
    """The origins of a window, the earliest first."""
    data, setting = load(dataset), SETTINGS[dataset]
    numbers = [0] if window == "paper" else range((count or setting.origins) - 1, -1, -1)
    return [Origin(number, *data.train_test(origin=number, step=setting.step)) for number in numbers]


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
        """A file name."""
        return f"{self.dataset}-{self.kind}-{self.window}-{self.seed}"

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows it gives."""
        if self.kind == "naive":
            return NAIVE
        if self.kind in classical.MODELS:
            rows = [row for row in classical.ROWS if row != "permbu-mint" or self.dataset in TREELIKE]
            return tuple(f"{self.kind}-{row}" for row in rows)
        return tuple(TRAINED[self.kind])

    def expected(self) -> list[dict[str, Any]]:
        """The keys of the lines that this job gives."""
        return [self._key(row, origin) for origin in self._numbers() for row in self.rows]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Fit, forecast, score; one line per origin and row."""
        lines = []
        for origin, row, samples, seconds in self._forecasts(progress):
            scored = evaluate(samples, origin.future).record()
            lines.append({**self._key(row, origin.number), **scored, "seconds": seconds})
        return lines

    def _forecasts(self, progress: bool) -> Iterator[tuple[Origin, str, np.ndarray, float]]:
        places = origins(self.dataset, self.window, len(self._numbers()))
        if self.kind in TRAINED:
            yield from self._neural(places, progress)
            return
        for place in places:
            started, horizon = time.perf_counter(), len(place.future.index)
            if self.kind in classical.MODELS:
                fitted = classical.base_forecast(place.known, horizon, self.kind)
            for row in self.rows:
                if self.kind == "naive":
                    samples = _naive(row, place.known, horizon, self.seed)
                else:
                    samples = classical.reconcile(fitted, row.removeprefix(f"{self.kind}-"), SAMPLES, self.seed)
                yield place, row, samples, time.perf_counter() - started

    def _neural(self, places: Sequence[Origin], progress: bool) -> Iterator[tuple[Origin, str, np.ndarray, float]]:
        from probhard.forecasting.estimator import DeepVAREstimator
        from probhard.forecasting.predictor import DeepVARPredictor
        from probhard.forecasting.training import DeepVARModule

        first, setting, rows = places[0], SETTINGS[self.dataset], TRAINED[self.kind]
        started = time.perf_counter()
        estimator = DeepVAREstimator(
            first.known.freq,
            len(first.future.index),
            first.known.hierarchy,
            method=next(iter(rows.values())),
            context_length=setting.context,
            batch_size=setting.batch_size,
            lr=setting.lr,
            num_batches_per_epoch=2 if self.quick else 50,
            trainer_kwargs={
                "max_epochs": 1 if self.quick else setting.epochs,
                "enable_progress_bar": progress,
                "accelerator": "cpu",
            },
            seed=self.seed,
        )
        trained: DeepVARModule = estimator.train(first.known.to_gluonts()).prediction_net
        seconds = time.perf_counter() - started
        for place in places:
            for row, method in rows.items():
                module = DeepVARModule(trained.network, first.known.hierarchy, method)
                predictor = DeepVARPredictor(module, SAMPLES, self.seed)
                (forecast,) = predictor.predict(place.known.to_gluonts())
                yield place, row, forecast.samples, seconds

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
    """All jobs of the table, the paper's window first, slow classical fits last."""
    known = ("naive", *TRAINED, *classical.MODELS)
    jobs: list[Unit] = []
    for window in windows:
        for kind in kinds or known:
            if window == "rolling" and kind in TRAINED and kind not in ROLLED:
                continue
            count = len(seeds) if window == "paper" else rolling_seeds
            drawn = seeds[:count] if kind in TRAINED else seeds[:1]
            jobs += [Job(dataset, kind, window, seed, quick) for seed in drawn for dataset in datasets or DATASETS]
    return Grid(jobs, Records(path, KEYS))
