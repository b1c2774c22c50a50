"""The PDE-CL table: page and picture. The prose is in ``pages/pde-cl.md``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import pictures, templates
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

if TYPE_CHECKING:
    from experiments.grid import Grid

NAME = "pde-cl"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("problem", "row", "seed", "epochs")
EPOCHS = 10
PROBLEMS = ("heat", "burgers", "darcy")
ROWS = (
    *("solver", "PDE-CL untrained", "soft", "PDE-CL", "VarianceNO base", "VarianceNO probhard-ob"),
    *("PDE-CL law probhard-ob", "PDE-CL 4 experts"),
)
COLUMNS = {
    "relative": ("relative L2 (%)", 1e-2),
    "worst": ("worst (%)", 1e-2),
    "residual": ("residual, rms", 1.0),
    "known": ("worst known value", 1.0),
    "crps": ("CRPS (1e-3)", 1e-3),
    "coverage": ("in 90 % bands (%)", 1e-2),
    "milliseconds": ("ms per field", 1.0),
}


def table(request: Request) -> Table:
    """The table, with its problems, rows and seeds; ``--epochs`` other than its default is that of the rows."""

    def grid(path: Path) -> Grid:
        from experiments.pde import cl

        return cl.grid(path, request)

    return Table(NAME, KEYS, resumed(grid, request), partial(render, quick=request.quick), plot)


def render(lines: Lines, quick: bool = False) -> str:
    """Return the page.

    Args:
        lines: Result lines.
        quick: Whether they are those of a quick run, of which no findings are told.
    """
    problems = dict.fromkeys(line["problem"] for line in lines)
    return templates.fill(
        PAGE,
        {
            "parts": "\n\n".join(_part(lines, problem) for problem in problems),
            "figure": Figure(partial(_figure, () if quick else lines)),
            "count": len(lines),
            "missing": _missing(lines),
        },
    )


def _missing(lines: Lines) -> str:
    """A sentence on rows that were not run."""
    there = {(line["problem"], line["row"]) for line in lines}
    absent = [f"{row} on {problem}" for problem in PROBLEMS for row in ROWS if (problem, row) not in there]
    return f"Not run yet: {'; '.join(absent)}." if absent else ""


def _part(lines: Lines, problem: str) -> str:
    chosen = sorted((line for line in lines if line["problem"] == problem), key=lambda line: line["relative"])
    rows = [[line["row"], *(_cell(line, name) for name in COLUMNS), f"{line['epochs']}"] for line in chosen]
    head = ["row", *(title for title, _ in COLUMNS.values()), "epochs"]
    return f"### {problem}\n\n{templates.table(head, rows)}"


def _cell(line: Line, name: str) -> str:
    value = line[name]
    if value is None:
        return ""
    value /= COLUMNS[name][1]
    return f"{value:.0e}" if 0 < value < 1e-3 else f"{value:.3g}"


def _figure(lines: Lines, argument: str) -> str:
    """A cell for the prose; the argument is ``figure problem row``."""
    name, problem, row = argument.split(maxsplit=2)
    for line in lines:
        if line["row"] == row and line["problem"] == problem:
            return _cell(line, name)
    raise MissingFigureError(argument)


def plot(path: Path, lines: Lines) -> None:
    """Write the picture: error and residual of every row, one panel per problem."""
    from matplotlib.figure import Figure as Canvas

    problems = list(dict.fromkeys(line["problem"] for line in lines))
    figure = Canvas(figsize=(3.6 * len(problems), 3.6), layout="constrained")
    for axes, problem in zip(figure.subplots(1, len(problems), squeeze=False)[0], problems):
        own = sorted((line for line in lines if line["problem"] == problem), key=lambda line: line["relative"])
        axes.barh(range(len(own)), [line["relative"] for line in own], color=pictures.GREEN)
        axes.set_yticks(range(len(own)), [line["row"] for line in own], fontsize=7)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="relative L2", title=problem)
    pictures.save(figure, path)
