"""Base forecasts of every node at rolling origins, made once and kept on disk.

    origins of a data set:   calibration windows | test windows,   ``step`` rows apart, the last ends at the last row.

Daily sets are forecast over a week: a sum over one step is no sum. Fits are in the folder ``*.work/fits`` beside the
result lines, so that laws can be compared without fitting again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.forecasting.origins import Origin
from probhard._util.atomic import replacing
from probhard.forecasting.data.datasets import load
from probhard.forecasting.models import classical


@dataclass(frozen=True)
class Plan:
    """Origins of a data set: horizon, rows between origins, and windows of calibration and test."""

    horizon: int
    step: int
    calibration: int
    test: int


PLANS = {
    "labour": Plan(8, 8, 6, 12),
    "tourism": Plan(8, 1, 8, 8),  # 36 rows in all: windows overlap
    "tourism_large": Plan(12, 12, 4, 8),
    "traffic": Plan(7, 7, 4, 8),
    "wiki": Plan(7, 7, 4, 8),
}


@dataclass(frozen=True)
class Place(Origin):
    """An origin of a plan; number 0 is the last."""

    @property
    def start(self) -> int:
        """Number of known rows."""
        return len(self.known.index)

    @property
    def end(self) -> int:
        """Number of rows that are known when the window is over."""
        return self.start + len(self.future.index)


def places(dataset: str, quick: bool = False) -> tuple[list[Place], list[Place]]:
    """Return the windows of calibration and of test, each the earliest first; two of each if ``quick``."""
    data, plan = load(dataset), PLANS[dataset]
    count, test = plan.calibration + plan.test, plan.test
    if quick:
        count, test = 4, 2
    made = [Place(k, *data.train_test(plan.horizon, k, plan.step)) for k in range(count - 1, -1, -1)]
    return made[:-test], made[-test:]


def ets(dataset: str, place: Place, fits: Path) -> classical.BaseForecast:
    """Return the AutoETS forecast of every node, from the folder ``fits`` if it is there."""
    horizon = len(place.future.index)
    path = fits / f"{dataset}-ets-{place.start}-{horizon}.npz"
    if not path.exists():
        started = time.perf_counter()
        made = classical.base_forecast(place.known, horizon, "ets")
        seconds = time.perf_counter() - started
        fits.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, mean=made.mean, stddev=made.stddev, fitted=made.fitted, seconds=seconds)
    with np.load(path, allow_pickle=False) as kept:
        return classical.BaseForecast(place.known, kept["mean"], kept["stddev"], kept["fitted"])
