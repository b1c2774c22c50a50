"""Conformal bands of a trained run: the file with their threshold, and the bands of new samples.

A band holds all cells of a sample at once with the promised probability, if samples are exchangeable with the held-out
ones of the run. It is written beside the quantiles of draws, which promise nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probhard._calibration.data import observed
from probhard._util.atomic import write_text
from probhard.calibration import ConformalModel, ConformalSet, CoverageReport, Promise
from probhard.errors import ParameterError, ProbhardError
from probhard.model import ConstrainedModel
from probhard.pde.joint import every_cell
from probhard.pde.samples import SOLUTIONS, Samples

BANDS = "conformal.json"
CHUNK = 200_000  # cells at a time


def write_bands(path: Path, promise: Promise, report: CoverageReport) -> None:
    """Write a promise and what was measured, as JSON."""
    text = json.dumps({"promise": {**promise.record(), "functionals": None}, "report": asdict(report)}, indent=2)
    write_text(path, text + "\n")


@dataclass(frozen=True, eq=False)
class RunBands:
    """The conformal bands of a run.

    Args:
        promise: Threshold, and what it promises.
        report: Coverage of the run's held-out samples.
        grid: Grid of the run's samples.
    """

    promise: Promise
    report: CoverageReport
    grid: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, grid: Any) -> RunBands | None:
        """The bands of a run, or None if it has none.

        Raises:
            ParameterError: The file is not one that ``write_bands`` wrote.
        """
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text("utf-8"))
            return cls(Promise.from_record(content["promise"]), CoverageReport(**content["report"]), tuple(grid))
        except (ValueError, KeyError, TypeError, ParameterError) as error:
            raise ParameterError(
                f"{path} is not a file of conformal bands ({error}).",
                "'probhard train' writes it; it was changed, or is of another version.",
                "Restore it, or remove it to predict without these bands.",
            ) from error

    def of(self, model: ConstrainedModel, samples: Samples) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The bands of samples, and what the certificate says about them.

        Args:
            model: The model of the run.
            samples: The samples; their solutions, if there are some, are compared with the bands.

        Returns:
            Arrays ``band_lower`` and ``band_upper``, NaN where there is no forecast; and plain values. There are no
            arrays if the grid is not that of the run.
        """
        about: dict[str, Any] = {"promised": self.promise.coverage, "level": self.promise.level}
        about |= {"units": self.promise.units, "held_out": asdict(self.report)}
        cells = samples.cells
        if cells.grid != self.grid:
            return {}, {**about, "promised": None, "why": "The grid is not that of the run, so nothing is promised."}
        conformal = ConformalModel(model, self.promise, every_cell(cells))
        arrays = {name: np.full(cells.batch + cells.grid, np.nan) for name in ("band_lower", "band_upper")}
        reports = []
        size = max(1, CHUNK // cells.index.size)
        for first in range(0, len(samples), size):
            for numbers, region in _regions(conformal, samples, np.arange(len(samples))[first : first + size]):
                for array, values in zip(arrays.values(), region.intervals()):
                    cells.scatter(array, samples.events(numbers), values.numpy())
                if samples.solutions is not None:
                    reports.append(region.report(observed(samples.batch(numbers))))
        if reports:
            about["measured"] = asdict(CoverageReport.joined(reports))
        return arrays, about


def with_solutions(samples: Samples) -> Samples:
    """The samples with the solutions of their file, if it has complete ones."""
    solutions, cells = samples.data.arrays.get(SOLUTIONS), samples.cells
    if solutions is None or solutions.shape != cells.batch + cells.grid:
        return samples
    inside = cells.gather(solutions, np.arange(cells.fields))
    return Samples(samples.inputs, solutions, samples.data, samples.spec) if np.isfinite(inside).all() else samples


def bands_text(about: dict[str, Any]) -> str:
    """Lines of a summary: promised and measured coverage."""
    if "why" in about:
        return f"No conformal bands: {about['why']}"
    promised = f"promised coverage {about['promised']:.4f}, if the samples are exchangeable with those of the run."
    lines = [f"Conformal bands (band_lower, band_upper), all cells of a sample at once: {promised}"]
    for name, where in (("held_out", "held-out samples of the run"), ("measured", "samples with solutions here")):
        if name in about:
            lines.append(f"  Measured: {about[name]['measured']:.4f} of {about[name]['units']} {where}.")
    return "\n".join(lines)


def _regions(
    conformal: ConformalModel, samples: Samples, numbers: np.ndarray
) -> Iterator[tuple[np.ndarray, ConformalSet]]:
    """Samples with their sets; those whose constraint cannot be met are left out, as the certificate flags them."""
    try:
        region = conformal.region(samples.batch(numbers))
    except ProbhardError:
        for half in np.array_split(numbers, 2) if len(numbers) > 1 else ():
            yield from _regions(conformal, samples, half)
    else:
        yield numbers, region
