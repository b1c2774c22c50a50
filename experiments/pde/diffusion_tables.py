"""ProbConserv's diffusion table: page and picture. The prose is in ``pages/diffusion.md``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import pictures, templates
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

if TYPE_CHECKING:
    from experiments.grid import Grid

NAME = "diffusion"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("row", "seed", "epochs")
PUBLISHED = {  # CE (1e-3), LL, MSE (1e-4)
    "ANP": (4.68, 2.72, 1.71),
    "SoftC-ANP": (3.47, 2.40, 2.24),
    "HardC-ANP": (0.0, 3.08, 1.37),
    "ProbConserv-ANP": (0.0, 2.74, 1.55),
}
ORDER = (
    "ANP",
    "SoftC-ANP",
    "HardC-ANP",
    "ProbConserv-ANP",
    "probhard-ob, ANP",
    "GP",
    "ProbConserv-GP",
    "probhard-ob, GP",
)
COLUMNS = {
    "ce": ("CE (1e-3)", 1e-3),
    "ce_draws": ("worst CE of draws (1e-3)", 1e-3),
    "ll": ("LL", 1.0),
    "mse": ("MSE (1e-4)", 1e-4),
    "crps": ("CRPS (1e-3)", 1e-3),
    "coverage": ("in 90 % bands (%)", 1e-2),
}


def table(request: Request) -> Table:
    """The table, with its networks and seeds."""

    def grid(path: Path) -> Grid:
        from experiments.pde import diffusion

        seeds, networks = request.chosen_seeds(), request.names("methods")
        return diffusion.grid(path, seeds=seeds, networks=networks, quick=request.quick)

    return Table(NAME, KEYS, resumed(grid, request), partial(render, quick=request.quick), plot)


def render(lines: Lines, quick: bool = False) -> str:
    """Return the page.

    Args:
        lines: Result lines.
        quick: Whether they are those of a quick run, of which no findings are told.
    """
    rows = []
    for line in _ordered(lines):
        published = PUBLISHED.get(line["row"])
        theirs = [""] * 3 if published is None else [f"{value:g}" for value in published]
        rows.append([line["row"], *(_cell(line[name] / unit) for name, (_, unit) in COLUMNS.items()), *theirs])
    head = ["row", *(title for title, _ in COLUMNS.values())]
    head += ["published CE (1e-3)", "published LL", "published MSE (1e-4)"]
    absent = [row for row in ORDER if row not in {line["row"] for line in lines}]
    missing = f"Not run yet: {'; '.join(absent)}." if absent else ""
    figure = Figure(partial(_figure, () if quick else lines))
    return templates.fill(
        PAGE, {"table": templates.table(head, rows), "figure": figure, "count": len(lines), "missing": missing}
    )


def _ordered(lines: Lines) -> list[Line]:
    return sorted(lines, key=lambda line: ORDER.index(line["row"]))


def _cell(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def _figure(lines: Lines, argument: str) -> str:
    """A cell for the prose; the argument is ``figure row``."""
    name, row = argument.split(maxsplit=1)
    for line in lines:
        if line["row"] == row:
            return _cell(line[name] / COLUMNS[name][1])
    raise MissingFigureError(argument)


def plot(path: Path, lines: Lines) -> None:
    """Write the picture: MSE of every row, beside the published ones."""
    from matplotlib.figure import Figure as Canvas

    lines = _ordered(lines)
    figure = Canvas(figsize=(8, 0.4 * len(lines) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [line["row"] for line in lines]
    axes.barh(
        [i - 0.2 for i in range(len(names))], [line["mse"] for line in lines], 0.38, color=pictures.GREEN, label="here"
    )
    theirs = [(i, 1e-4 * PUBLISHED[name][2]) for i, name in enumerate(names) if name in PUBLISHED]
    if theirs:
        places, values = zip(*theirs)
        axes.barh([i + 0.2 for i in places], values, 0.38, color=pictures.GREY, label="published")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="MSE at t = 1/2, k = 1")
    axes.legend(frameon=False)
    pictures.save(figure, path)
