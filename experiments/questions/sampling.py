"""Training on draws against closed-form moments: the porous medium law with m in [2, 3], on a coarse grid.

All rows share data, network, seed, schedule and the score that selects the epoch: the closed form. Only the training
loss differs. The warm-up leaves the constraint out, as the projection of draws of an untrained network is slow and may
fail. A row's seconds are the processor time of one epoch after it. The prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import pictures, templates
from experiments.grid import Grid
from experiments.pde.measures import dataset
from experiments.pde.rows import TABLES
from experiments.pde.runs import Job
from experiments.pde.runs import grid as jobs
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError
from probhard.model import Batch
from probhard.pde.operators import VarianceNO

NAME = "sampling"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
SHAPE, SIZES, EPOCHS, RATE = (8, 40), (40, 10, 20), 200, 5e-3
NETWORK = {"width": 16, "modes": (4, 4)}  # as the coarse grid allows
CLOSED = "closed form"
REBUTTAL = {CLOSED: (5.04e-6, 8.65e-4, 1.54), "10 draws": (1.35e-2, None, 14.2), "50 draws": (2.93e-5, None, 70.7)}


def table(request: Request) -> Table:
    """The table: all rows, or those that are named."""

    def grid(path: Path) -> Grid:
        epochs = request.chosen_epochs(EPOCHS)
        found = jobs(NAME, path, epochs, request.chosen_seeds(), (), request.names("methods"), ("crps",), request.quick)
        units = [_timed(job, coarse=not request.quick) for job in found.units if isinstance(job, Job)]
        return Grid(units, Records(path, TABLES[NAME].keys))

    return Table(NAME, TABLES[NAME].keys, resumed(grid, request), render, plot)


@dataclass(frozen=True)
class TimedJob(Job):
    """A job that also measures the processor time of an epoch by the loss of its row."""

    def train(self, folder: Path, progress: bool) -> tuple[VarianceNO, dict[str, Any]]:
        """Return the trained network and facts about its training, as ``Job.train`` does."""
        backbone, about = super().train(folder, progress)
        return backbone, {**about, "epoch_seconds": self._epoch_seconds(backbone)}

    def _epoch_seconds(self, backbone: VarianceNO) -> float:
        """Processor time of loss and gradient for all training fields, with the trained network."""
        problem, size = self.problem_of(), self.schedule.batch_size
        data = dataset(problem, problem.split(self.seed, *self.sizes).train)
        model = self._model(TABLES[self.table].rows[self.trained], problem, backbone)
        assert data.target is not None
        parts = zip(data.inputs.split(size), data.target.split(size), data.context.split(size))
        batches = [Batch(inputs, target, context=context) for inputs, target, context in parts]
        model.loss(batches[0]).backward()  # fills caches
        start = time.process_time()
        for batch in batches:
            model.loss(batch).backward()
        return time.process_time() - start


def _timed(job: Job, coarse: bool) -> TimedJob:
    """The job with its time measured, and on the grid of this table unless it is a quick one."""
    given = {field.name: getattr(job, field.name) for field in fields(job)}
    if coarse:
        schedule = replace(job.schedule, lr=RATE)
        given |= {"shape": SHAPE, "sizes": SIZES, "network": NETWORK, "compiled": False, "schedule": schedule}
    return TimedJob(**given)


def _rows(lines: Lines) -> dict[str, list[Line]]:
    return {name: own for name in TABLES[NAME].rows if (own := [line for line in lines if line["method"] == name])}


def render(lines: Lines) -> str:
    """Return the page."""
    rows = []
    for name, own in _rows(lines).items():
        theirs = REBUTTAL.get(name, (None, None, None))
        rows.append(
            [
                name,
                *(f"{_mean(own, field):.3e}" for field in ("mse", "crps")),
                f"{_mean(own, 'energy'):.3g}",
                f"{_mean(own, 'covered_90'):.0%}",
                f"{_mean(own, 'epoch_seconds'):.2f}",
                *("" if value is None else f"{value:g}" for value in theirs),
            ]
        )
    seeds = {line["seed"] for line in lines}
    left = [name for name in TABLES[NAME].order if name not in _rows(lines)]
    columns = ["row", "MSE", "CRPS", "energy score", "coverage of 90 %", "s per epoch"]
    columns += ["paper: MSE", "paper: CRPS", "paper: s per epoch"]
    values = {
        "table": templates.table(columns, rows),
        "slices": SHAPE[0],
        "points": SHAPE[1],
        "fields": SIZES[0],
        "epochs": ", ".join(map(str, sorted({line["epochs"] for line in lines}))),
        "seeds": "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds",
        "gain": Figure(partial(_gain, lines)),
        "verdict": _verdict(lines),
        "missing": f"Rows not run: {', '.join(left)}." if left else "",
    }
    return templates.fill(PAGE, values)


def _mean(own: list[Line], field: str) -> float:
    return statistics.mean(line[field] for line in own)


def _gain(lines: Lines, row: str) -> str:
    """How many times longer an epoch of a row takes than one with closed-form moments."""
    found = _rows(lines)
    if row not in found or CLOSED not in found:
        raise MissingFigureError(row)
    return f"{_mean(found[row], 'epoch_seconds') / _mean(found[CLOSED], 'epoch_seconds'):.0f}"


def _verdict(lines: Lines) -> str:
    """Which of the trained rows has the smallest CRPS, and how far closed-form moments are behind."""
    own = {name: _mean(rows, "crps") for name, rows in _rows(lines).items()}
    best = min(own, key=lambda name: own[name])
    if best == CLOSED or CLOSED not in own:
        return f"The smallest CRPS is that of {best}."
    share = own[CLOSED] / own[best] - 1
    return (
        f"Against us: {best} has the smallest CRPS, {own[best]:.3e}; closed-form moments have {own[CLOSED]:.3e}, "
        f"{share:.1%} more. What they gain is time."
    )


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: CRPS over seconds per epoch."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, own in _rows(lines).items():
        if name in TABLES[NAME].order:
            place = (_mean(own, "epoch_seconds"), _mean(own, "crps"))
            axes.plot(*place, "o", color="#1baf7a" if name == CLOSED else "#9aa5b1")
            axes.annotate(name, place, textcoords="offset points", xytext=(6, 4))
    axes.set(xscale="log", yscale="log", xlabel="seconds per epoch, one thread", ylabel="CRPS on test fields")
    axes.margins(0.25)
    pictures.save(figure, path)
