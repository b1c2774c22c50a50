"""The page and the figure of the conformal table, from its result lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import pictures, templates
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices

PAGE = Path(__file__).parent / "pages" / "conformal.md"
JOINT, FAMILY, EACH, PEER = "joint", "family", "each", "hierarchicalforecast"
KEYS = ("case", "sets", "level")
COLOURS = {JOINT: pictures.BLUE, FAMILY: pictures.GREEN, EACH: pictures.GREY, PEER: pictures.ORANGE}


def table(request: Request) -> Table:
    """The table: the named problems and data sets, by default all."""

    def pieces(_: Records) -> Iterator[Callable[[], Lines]]:
        from experiments.conformal import runs

        names = request.names("problems")
        check_choices("problem", names, runs.CASES)
        return runs.pieces(names, request.quick)

    return Table("conformal", KEYS, measured(pieces), render, plot)


def render(lines: Sequence[Line]) -> str:
    """Return the page.

    Args:
        lines: Result lines.
    """
    splits, origins = _by_kind(lines)
    peers = [line for line in lines if line["sets"] == PEER]
    values = {
        "wider": Figure(partial(_wider, lines)),
        "short": templates.of_lines(_short, origins),
        "gap": templates.of_lines(_gap, splits),
        "splits": templates.of_lines(lambda known: str(max(line["splits"] for line in known)), splits),
        "units": templates.of_lines(lambda known: str(max(line["units"] for line in known)), splits),
        "scatter": templates.of_lines(_scatter, splits),
        "peer": templates.of_lines(lambda known: _range([_ratio(line, lines, EACH) for line in known]), peers),
        "once": Figure(partial(_once, splits)),
        "negative": templates.of_lines(lambda known: _percent([line["negative"] for line in known]), peers),
        "violation": f"{max(line['violation'] for line in lines):.1g}",
        "splits_table": templates.of_lines(_splits_table, splits),
        "origins_table": templates.of_lines(_origins_table, origins),
    }
    return templates.fill(PAGE, values)


def _by_kind(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Lines of exchangeable units, and those of rolling origins."""
    return [line for line in lines if line["exchangeable"]], [line for line in lines if not line["exchangeable"]]


def _ratio(line: Line, lines: Sequence[Line], other: str) -> float | None:
    """The width of a line over that of other sets of its case and level; None if one of them is unknown."""
    for one in lines:
        if (one["case"], one["level"], one["sets"]) == (line["case"], line["level"], other):
            return line["width"] / one["width"] if line["width"] and one["width"] else None
    return None


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    low, high = f"{min(known):.2g}", f"{max(known):.2g}"
    return low if low == high else f"{low} to {high}"


def _percent(values: Sequence[float]) -> str:
    low, high = f"{100 * min(values):.0f}", f"{100 * max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _wider(lines: Sequence[Line], sets: str) -> str:
    """How much wider sets are than intervals of single nodes, on hierarchies."""
    hierarchies = {line["case"] for line in lines if line["sets"] == PEER}
    ratios = [_ratio(line, lines, EACH) for line in lines if line["sets"] == sets and line["case"] in hierarchies]
    if not ratios:
        raise MissingFigureError("hierarchies")
    return _range(ratios)


def _short(origins: Sequence[Line]) -> str:
    """Which data sets fall short of the level by more than 0.05 with the sets of ``FAMILY``."""
    family = [line for line in origins if line["sets"] == FAMILY]
    low = [f"{line['case']} {line['at_once']:.2f} at {line['level']:g}" for line in family if _falls_short(line)]
    return f"bands fall short on {len(low)} of {len(family)} rows: {', '.join(low)}." if low else "no row falls short."


def _falls_short(line: Line) -> bool:
    return line["at_once"] < line["level"] - 0.05


def _gap(splits: Sequence[Line]) -> str:
    return f"{max(abs(line['measured'] - line['promised']) for line in _promised(splits)):.3f}"


def _promised(splits: Sequence[Line]) -> list[Line]:
    return [line for line in splits if line["sets"] in (JOINT, FAMILY)]


def _scatter(splits: Sequence[Line]) -> str:
    measured, expected = (
        f"{min(values):.3f} to {max(values):.3f}"
        for values in ([line[name] for line in _promised(splits)] for name in ("spread", "expected_spread"))
    )
    return f"{measured} (standard deviation; theory: {expected})"


def _once(splits: Sequence[Line], sets: str) -> str:
    values = [line["at_once"] for line in splits if line["sets"] == sets]
    if not values:
        raise MissingFigureError(sets)
    return _percent(values)


def _splits_table(splits: Sequence[Line]) -> str:
    rows = []
    for line in splits:
        range_ = f"{line['measured']:.3f} ({line['lowest']:.3f} to {line['highest']:.3f})"
        promised = "none" if line["sets"] == PEER else f"{line['promised']:.3f}"
        rows.append(
            [line["case"], line["sets"], f"{line['level']:g}", promised, range_, f"{line['at_once']:.3f}", _width(line)]
        )
    return templates.table(["case", "sets", "level", "promised", "measured", "all at once", "width"], rows)


def _origins_table(origins: Sequence[Line]) -> str:
    rows = [
        [
            line["case"],
            line["sets"],
            f"{line['level']:g}",
            f"{line['at_once']:.2f}",
            f"{line['each']:.2f}",
            _width(line),
            f"{line['unbounded']} of {line['origins']}",
        ]
        for line in origins
    ]
    return templates.table(["case", "sets", "level", "all at once", "single nodes", "width", "unbounded"], rows)


def _width(line: Line) -> str:
    return "unbounded" if line["width"] is None else f"{line['width']:.3g}"


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Write the figure: measured coverage over the level, on exchangeable units and on rolling origins.

    Args:
        path: The file.
        lines: Result lines.
    """
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    splits, origins = _by_kind(lines)
    _points(left, _promised(splits), "measured", "exchangeable units: promised and measured")
    shown = [line for line in origins if line["sets"] in (JOINT, FAMILY)]
    _points(right, shown, "at_once", "rolling origins: no promise")
    left.set_ylabel("share of units with all covered")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, frameon=False, loc="outside lower center")
    pictures.save(figure, path)


def _points(axes: Any, lines: Sequence[Line], field: str, title: str) -> None:
    names = list(dict.fromkeys(line["case"] for line in lines))
    labelled = set()
    for line in lines:
        place = (
            names.index(line["case"]) + 0.2 * (line["level"] - 0.85) / 0.05 + (0.05 if line["sets"] == JOINT else -0.05)
        )
        label = None if line["sets"] in labelled else line["sets"]
        labelled.add(line["sets"])
        if "lowest" in line:
            axes.plot([place, place], [line["lowest"], line["highest"]], color=COLOURS[line["sets"]], alpha=0.4, lw=3)
        axes.plot(place, line[field], "o", color=COLOURS[line["sets"]], label=label, ms=5)
        axes.plot([place - 0.06, place + 0.06], 2 * [line.get("promised", line["level"])], color="black", lw=1.2)
    axes.plot([], [], color="black", lw=1.2, label="promised, or the level where nothing is")
    axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set_title(title, fontsize=10)
