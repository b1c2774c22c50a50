"""Training on draws against closed-form moments: the porous medium law with m in [2, 3], on a coarse grid.

All rows share data, network, seed and schedule. A row's seconds per epoch are those of its projected epochs and its
warm-up together, so the gain in time is a lower bound. The prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments import pictures, templates
from experiments.grid import Grid
from experiments.pde.rows import TABLES
from experiments.pde.runs import Job
from experiments.pde.runs import grid as jobs
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

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
        if request.quick:
            return found
        units = [_coarse(job) for job in found.units if isinstance(job, Job)]
        return Grid(units, Records(path, TABLES[NAME].keys))

    return Table(NAME, TABLES[NAME].keys, resumed(grid, request), render, plot)


def _coarse(job: Job) -> Job:
    schedule = replace(job.schedule, lr=RATE)
    return replace(job, shape=SHAPE, sizes=SIZES, network=NETWORK, compiled=False, schedule=schedule)


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
                *(f"{_mean(own, field):.2e}" for field in ("mse", "crps")),
                f"{_mean(own, 'energy'):.3g}",
                f"{_mean(own, 'covered_90'):.0%}",
                f"{_mean(own, 'seconds') / own[0]['epochs']:.2f}",
                *("" if value is None else f"{value:g}" for value in theirs),
            ]
        )
    columns = ["row", "MSE", "CRPS", "energy score", "coverage of 90 %", "s per epoch"]
    columns += ["paper: MSE", "paper: CRPS", "paper: s per epoch"]
    values = {
        "table": templates.table(columns, rows),
        "slices": SHAPE[0],
        "points": SHAPE[1],
        "fields": SIZES[0],
        "epochs": ", ".join(map(str, sorted({line["epochs"] for line in lines}))),
        "seeds": len({line["seed"] for line in lines}),
        "gain": Figure(partial(_gain, lines)),
        "verdict": _verdict(lines),
        "missing": ", ".join(name for name in TABLES[NAME].order if name not in _rows(lines)) or "none",
    }
    return templates.fill(PAGE, values)


def _mean(own: list[Line], field: str) -> float:
    return statistics.mean(line[field] for line in own)


def _gain(lines: Lines, row: str) -> str:
    """How many times longer an epoch of a row takes than one with closed-form moments."""
    found = _rows(lines)
    if row not in found or CLOSED not in found:
        raise MissingFigureError(row)
    return f"{_mean(found[row], 'seconds') / _mean(found[CLOSED], 'seconds'):.1f}"


def _verdict(lines: Lines) -> str:
    """Which of the trained rows has the smallest CRPS."""
    own = {name: _mean(rows, "crps") for name, rows in _rows(lines).items()}
    best = min(own, key=lambda name: own[name])
    if best == CLOSED or CLOSED not in own:
        return f"The smallest CRPS is that of {best}."
    return f"Against us: {best} has a smaller CRPS ({own[best]:.2e}) than closed-form moments ({own[CLOSED]:.2e})."


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: CRPS over seconds per epoch."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, own in _rows(lines).items():
        if name in TABLES[NAME].order:
            place = (_mean(own, "seconds") / own[0]["epochs"], _mean(own, "crps"))
            axes.plot(*place, "o", color="#1baf7a" if name == CLOSED else "#9aa5b1")
            axes.annotate(name, place, textcoords="offset points", xytext=(6, 4))
    axes.set(xscale="log", yscale="log", xlabel="seconds per epoch, one thread", ylabel="CRPS on test fields")
    axes.margins(0.25)
    pictures.save(figure, path)
