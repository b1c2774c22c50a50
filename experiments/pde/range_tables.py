"""Out-of-range PDE tables: page and picture. The prose is in ``pages/out-of-range.md``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import pictures, templates
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

if TYPE_CHECKING:
    from experiments.grid import Grid

NAME = "out-of-range"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("problem", "row", "range", "seed", "epochs")
EPOCHS = 60
COLUMNS = {  # title, unit
    "mse": ("MSE (1e-5)", 1e-5),
    "relative": ("relative L2 (%)", 1e-2),
    "n_merci": ("n-MeRCI", 1.0),
    "crps": ("CRPS (1e-3)", 1e-3),
    "coverage": ("in 90 % bands (%)", 1e-2),
    "ce": ("CE", 1.0),
}
MARKS = {"VarianceNO": "o", "BayesianNO": "s", "DiverseNO": "^", "MCDropoutNO": "v", "EnsembleNO": "D"}


def table(request: Request) -> Table:
    """The table, with its problems, rows and seeds; ``--epochs`` other than its default is that of the rows."""

    def grid(path: Path) -> Grid:
        from experiments.pde import out_of_range

        return out_of_range.grid(path, request)

    return Table(NAME, KEYS, resumed(grid, request), partial(render, quick=request.quick), plot)


def render(lines: Lines, quick: bool = False) -> str:
    """Return the page.

    Args:
        lines: Result lines.
        quick: Whether they are those of a quick run, of which no findings are told.
    """
    values = {
        "parts": "\n\n".join(_part(lines, span) for span in _ranges(lines)),
        "best": _best(lines),
        "missing": _missing(lines),
        "figure": Figure(partial(_figure, () if quick else lines)),
        "count": len(lines),
    }
    return templates.fill(PAGE, values)


def _missing(lines: Lines) -> str:
    """A sentence on rows that were not run."""
    there = {line["row"] for line in lines}
    absent = [row for row in (*MARKS, "probhard-ob") if row not in there]
    return f"Not run yet: {', '.join(absent)}." if absent else ""


def _ranges(lines: Lines) -> list[tuple[float, ...]]:
    return sorted({tuple(line["range"]) for line in lines})


def _part(lines: Lines, span: tuple[float, ...]) -> str:
    """All rows on a range, in the order of their MSE."""
    chosen = sorted((line for line in lines if tuple(line["range"]) == span), key=lambda line: line["mse"])
    rows = [[line["row"], *(_cell(line, name) for name in COLUMNS)] for line in chosen]
    known = " (the range of training)" if span == _ranges(lines)[0] else ""
    title = f"### k in [{span[0]:g}, {span[1]:g}]{known}"
    return f"{title}\n\n{templates.table(['row', *(title for title, _ in COLUMNS.values())], rows)}"


def _best(lines: Lines) -> str:
    """Per range, the row with the smallest figure of each kind."""
    rows = []
    for span in _ranges(lines):
        own = [line for line in lines if tuple(line["range"]) == span]
        cells = [min(own, key=lambda line: line[name]) for name in ("mse", "n_merci", "crps")]
        shown = [f"{line['row']}: {_cell(line, name)}" for line, name in zip(cells, ("mse", "n_merci", "crps"))]
        rows.append([f"[{span[0]:g}, {span[1]:g}]", *shown])
    return templates.table(["k", *(COLUMNS[name][0] for name in ("mse", "n_merci", "crps"))], rows)


def _cell(line: Line, name: str) -> str:
    value = line[name] / COLUMNS[name][1]
    return f"{value:.0e}" if 0 < value < 1e-6 else f"{value:.3g}"


def _figure(lines: Lines, argument: str) -> str:
    """A cell for the prose; the argument is ``figure lower row``."""
    name, lower, row = argument.split(maxsplit=2)
    for line in lines:
        if line["row"] == row and line["range"][0] == float(lower):
            return _cell(line, name)
    raise MissingFigureError(argument)


def plot(path: Path, lines: Lines) -> None:
    """Write the picture: MSE and n-MeRCI by range, free (dashed) and projected."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(11, 3.8), layout="constrained")
    spans = _ranges(lines)
    for axes, name in zip(figure.subplots(1, 2), ("mse", "n_merci")):
        for row in dict.fromkeys(line["row"] for line in lines):
            base = row.split(" + ")[0]
            if "joint" in row:
                continue
            values = {tuple(line["range"]): line[name] for line in lines if line["row"] == row}
            style = "-" if "+" in row or base == "probhard-ob" else "--"
            colour = f"C{list(dict.fromkeys(line['row'].split(' + ')[0] for line in lines)).index(base)}"
            shown = [values.get(span, float("nan")) for span in spans]
            label = row if base == "probhard-ob" else f"{base}, mass at inference" if style == "-" else base
            axes.plot(range(len(spans)), shown, style, color=colour, marker=MARKS.get(base, "*"), label=label)
        axes.set_xticks(range(len(spans)), [f"{low:g}-{high:g}" for low, high in spans])
        axes.set(xlabel="k of the test fields", ylabel="MSE" if name == "mse" else "n-MeRCI")
        axes.set_yscale("log" if name == "mse" else "linear")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    pictures.save(figure, path)
