"""The jobs behind the table of joint laws of forecasts: one base forecast of a data set under several laws.

| base               | laws that are compared                                                                          |
|--------------------|-------------------------------------------------------------------------------------------------|
| ets-<metric>       | independent; nodes (correlated nodes, independent steps); joint (nodes and steps)               |
| deepvar-or, -ob    | independent (rank 0); joint (rank 8, levels of the hierarchy in the loss)                       |

Each law is measured as it is and with the numbers of ``joint_calibration``, fitted on all windows that ended before the
origin. Networks are trained twice: before the windows of calibration, and before those of the test. A line is one (data
set, base, law, calibrated, seed, origin).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.forecasting.joint_bases import PLANS, Place, ets, places
from experiments.forecasting.joint_calibration import PastWindow, group_numbers, step_number
from experiments.forecasting.joint_laws import METRICS, Forecast, combined, group_masks, group_parts, weighted
from experiments.forecasting.joint_measures import measured
from experiments.forecasting.origins import rolled, trained
from experiments.forecasting.rows import DATASETS
from experiments.grid import Grid, Unit
from experiments.records import Records
from probhard import DPPL, METHODS, Levels
from probhard._util.atomic import replacing
from probhard.errors import check_choices

KEYS = ("dataset", "base", "law", "calibrated", "seed", "origin")
ETS = tuple(f"ets-{metric}" for metric in METRICS)
NETWORKS = {"deepvar-or": "probhard-or", "deepvar-ob": "probhard-ob"}
BASES = (*ETS, *NETWORKS)
LAWS = ("independent", "nodes", "joint")
DRAWS = 500  # paths of a base forecast
RANK = 8


@dataclass(frozen=True)
class JointJob:
    """One base forecast of a data set under all its laws."""

    dataset: str
    base: str
    seed: int = 0
    quick: bool = False  # two windows of each kind, and networks of one short epoch

    @property
    def name(self) -> str:
        """Identifies the job; a valid file name."""
        return f"{self.dataset}-{self.base}-{self.seed}"

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws that are compared."""
        return LAWS if self.base in ETS else ("independent", "joint")

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that this job gives."""
        count = 2 if self.quick else PLANS[self.dataset].test
        return [
            self._key(law, calibrated, origin)
            for law in self.laws
            for calibrated in (False, True)
            for origin in range(count - 1, -1, -1)
        ]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Forecast and score; returns one line per law, calibration and origin."""
        calibration, test = places(self.dataset, self.quick)
        if self.base in ETS:
            return list(self._classical(calibration, test, folder.parent / "fits"))
        return list(self._neural(calibration, test, folder.parent / "paths", progress))

    def _classical(self, calibration: Sequence[Place], test: Sequence[Place], fits: Path) -> Iterator[dict[str, Any]]:
        metric = self.base.removeprefix("ets-")
        past: dict[bool, list[PastWindow]] = {False: [], True: []}
        for place in (*calibration, *test):
            forecast = Forecast.of(ets(self.dataset, place, fits), metric)
            mean, masks, y = forecast.projected_mean(), group_masks(forecast.hierarchy), _values(place)
            for joint, windows in past.items() if place in test else ():
                over = [window for window in windows if window.end <= place.start]
                for calibrated in (False, True):
                    numbers = group_numbers(over if calibrated else [], shared=joint)
                    laws = {"nodes": 0.0, "joint": step_number(over, numbers)} if joint else {"independent": 0.0}
                    for law, rho in laws.items():
                        deviations = weighted(forecast.deviations(joint, rho, DRAWS, self.seed), numbers, masks)
                        scores = measured(forecast.project(forecast.mean + deviations), y, masks, _size(place))
                        about = {"numbers": numbers, "rho": rho, "windows": len(over)}
                        yield self._line(place, law, calibrated, scores, about)
            for joint, windows in past.items():
                terms = forecast.deviations(joint, 1.0, DRAWS, self.seed)
                parts = group_parts(terms, forecast.hierarchy, forecast.project)
                windows.append(PastWindow.of(place.start, mean, parts, y, masks))

    def _neural(
        self, calibration: Sequence[Place], test: Sequence[Place], kept: Path, progress: bool
    ) -> Iterator[dict[str, Any]]:
        for law, rank in (("independent", 0), ("joint", RANK)):
            past: list[PastWindow] = []
            for stage in (calibration, test):
                paths = self._paths(stage, law, rank, kept, progress)
                for place, draws in zip(stage, paths):
                    mean, masks, y = draws.mean(0), group_masks(place.known.hierarchy), _values(place)
                    parts = group_parts((draws - mean)[None], place.known.hierarchy, partial(_orthogonal, place))
                    over = [window for window in past if window.end <= place.start]
                    for calibrated in (False, True) if stage is test else ():
                        numbers = group_numbers(over if calibrated else [], shared=False)
                        scores = measured(combined(mean, parts, numbers), y, masks, _size(place))
                        yield self._line(place, law, calibrated, scores, {"numbers": numbers, "windows": len(over)})
                    past.append(PastWindow.of(place.start, mean, parts, y, masks))

    def _paths(self, stage: Sequence[Place], law: str, rank: int, kept: Path, progress: bool) -> list[Tensor]:
        """Sample paths (S, H, n) at every place by a network trained before the first, from a file if it is there."""
        file = kept / f"{self.name}-{law}-{stage[0].start}.npy"
        if not file.exists():
            method = METHODS[NETWORKS[self.base]]
            if law == "joint":
                method = method.replace(functionals=Levels(stage[0].known.hierarchy))
            module = trained(self.dataset, stage[0], method, self.seed, self.quick, progress, rank=rank)
            made = np.stack([rolled(module, method, place, self.seed) for place in stage])
            kept.mkdir(parents=True, exist_ok=True)
            with replacing(file) as written, written.open("wb") as stream:
                np.save(stream, made.astype(np.float32))
        return list(torch.from_numpy(np.load(file, allow_pickle=False)).double())

    def _key(self, law: str, calibrated: bool, origin: int) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "base": self.base,
            "law": law,
            "calibrated": calibrated,
            "seed": self.seed,
            "origin": origin,
        }

    def _line(
        self, place: Place, law: str, calibrated: bool, scores: dict[str, Any], about: dict[str, Any]
    ) -> dict[str, Any]:
        return {**self._key(law, calibrated, place.number), **scores, **about}


def _orthogonal(place: Place, points: Tensor) -> Tensor:
    return DPPL("orthogonal").project(points, place.known.hierarchy).value


def _values(place: Place) -> Tensor:
    return torch.from_numpy(place.future.values)


def _size(place: Place) -> Tensor:
    """Mean ``|y|`` of every node in the history, (n,)."""
    return torch.from_numpy(place.known.values).abs().nanmean(0)


def grid(
    path: str | os.PathLike[str],
    seeds: Sequence[int] = (0,),
    datasets: Sequence[str] = (),
    bases: Sequence[str] = (),
    quick: bool = False,
) -> Grid:
    """Return all jobs of the table.

    Args:
        path: The file of result lines.
        seeds: Of networks; other rows use the first one.
        datasets: Names of data sets; empty for all.
        bases: Names in ``BASES``; empty for all.
        quick: Two windows of each kind, and networks of one short epoch.
    """
    check_choices("method", bases, BASES)
    check_choices("data set", datasets, DATASETS)
    jobs: list[Unit] = [
        JointJob(dataset, base, seed, quick)
        for base in bases or BASES
        for seed in (seeds if base in NETWORKS else seeds[:1])
        for dataset in datasets or DATASETS
    ]
    return Grid(jobs, Records(path, KEYS))
