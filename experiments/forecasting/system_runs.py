"""The jobs behind the table of published systems: CLOVER, DPMN and COPDeepVAR, trained and scored as the other rows.

Data sets, windows, origins, epochs, batches, draws and scores are those of ``runs``. COPDeepVAR sees blocks of steps;
horizons of one step have no sums over time, so it has no row there. A line is one (data set, method, seed, window,
origin).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.forecasting.origins import Origin, origins, rolled, trained
from experiments.forecasting.rows import DATASETS, KEYS, SAMPLES, SETTINGS
from experiments.grid import Grid, Unit
from experiments.records import Records
from probhard.errors import check_choices
from probhard.forecasting.models.systems import SYSTEMS
from probhard.forecasting.report.evaluation import evaluate
from probhard.method import Method

WINDOWS = ("paper", "rolling")
COUNT_UNITS = {"labour": 0.1, "traffic": 0.1}  # their values vary less than whole counts would
PERIODS = {"labour": (4, 2, 1), "tourism": (4, 2, 1), "tourism_large": (3, 1)}  # steps of the temporal hierarchies
SIZES = ("labour", "tourism", "traffic", "tourism_large", "wiki")  # cheap sets first
ORDER = ("dpmn", "clover", "copdeepvar")  # cheap ones first


@dataclass(frozen=True)
class Job:
    """A system on a data set, at all origins of a window."""

    dataset: str
    system: str  # a name in SYSTEMS
    window: str = "paper"
    seed: int = 0
    quick: bool = False  # one epoch of a few batches

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.dataset}-{self.system}-{self.window}-{self.seed}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        count = 1 if self.window == "paper" else SETTINGS[self.dataset].origins
        return [self._key(number) for number in range(count - 1, -1, -1)]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train before the first origin, forecast and score at all; returns one line per origin."""
        del folder
        places, started = origins(self.dataset, self.window), time.process_time()
        forecasts = self._draws(places, progress)
        spent = time.process_time() - started
        lines = []
        for place, draws in zip(places, forecasts):
            scored = evaluate(draws, place.future).record()
            lines.append({**self._key(place.number), **scored, "cpu_seconds": spent})
        return lines

    def _draws(self, places: Sequence[Origin], progress: bool) -> list[np.ndarray]:
        """Draws (S, H, n) at every place."""
        options = dict(SYSTEMS[self.system])
        method = options.pop("method")
        if self.system == "copdeepvar":
            return self._blocks(places, method, progress)
        if self.system == "dpmn":
            options["count_unit"] = COUNT_UNITS.get(self.dataset, 1.0)
        network = trained(self.dataset, places[0], method, self.seed, self.quick, progress, **options)
        return [rolled(network, method, place, self.seed) for place in places]

    def _blocks(self, places: Sequence[Origin], method: Method, progress: bool) -> list[np.ndarray]:
        """Draws (S, H, n) of a network of blocks at every place."""
        from probhard.forecasting.models.blocks import TemporalBlocks
        from probhard.forecasting.models.predictor import DeepVARPredictor

        first, horizon = places[0], len(places[0].future.index)
        blocks = TemporalBlocks(first.known.hierarchy, PERIODS[self.dataset])
        options = blocks.options(first.known, horizon, SETTINGS[self.dataset].context)
        options["data"] = blocks.entries(first.known)
        module = trained(self.dataset, first, method, self.seed, self.quick, progress, **options)
        predictor = DeepVARPredictor(module, SAMPLES, self.seed)
        draws = []
        for place in places:
            (forecast,) = predictor.predict(blocks.last(place.known, horizon))
            draws.append(blocks.steps(forecast.samples, horizon).numpy())
        return draws

    def _key(self, origin: int) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "method": self.system,
            "seed": self.seed,
            "window": self.window,
            "origin": origin,
        }


def grid(
    path: str | os.PathLike[str],
    seeds: Sequence[int] = (0,),
    windows: Sequence[str] = WINDOWS,
    datasets: Sequence[str] = (),
    systems: Sequence[str] = (),
    quick: bool = False,
) -> Grid:
    """Return all jobs of the table, the paper's window first.

    Args:
        path: The file of result lines.
        seeds: Of networks.
        windows: Some of ``WINDOWS``.
        datasets: Names of data sets; empty for all.
        systems: Names in ``SYSTEMS``; empty for all.
        quick: Train one epoch of a few batches.
    """
    check_choices("method", systems, ORDER)
    check_choices("window", windows, WINDOWS)
    check_choices("data set", datasets, DATASETS)
    jobs: list[Unit] = [
        Job(dataset, system, window, seed, quick)
        for seed in seeds
        for window in windows
        for dataset in datasets or SIZES
        for system in systems or ORDER
        if system != "copdeepvar" or dataset in PERIODS
    ]
    return Grid(jobs, Records(path, KEYS))
