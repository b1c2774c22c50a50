"""Result lines of published systems as a page, beside our rows and the default forecast at the same origins.

The lines of our rows are those of ``forecasting.jsonl`` (the same networks, settings and draws), the default's those of
``forecasting-rolling.jsonl``. Rows are compared at the seeds that the systems have; the mean over all seeds of a row is
shown beside it. The prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments import templates
from experiments.forecasting.rows import DATASETS, KEYS
from experiments.forecasting.tables import TITLES
from experiments.grid import Grid
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

PAGE = Path(__file__).parent / "pages" / "systems-forecasting.md"
NAME = "systems-forecasting"
SYSTEM_ROWS = ("clover", "dpmn", "copdeepvar")
NETWORKS = ("probhard-or", "probhard-ob", "hier-e2e", "base")
DEFAULT = "probhard"
ROWS = (*SYSTEM_ROWS, *NETWORKS, DEFAULT)
OURS = ("probhard-or", "probhard-ob", DEFAULT)
ROLLING_KEYS = ("dataset", "method", "origin")


def table(request: Request) -> Table:
    """The table, with its data sets, systems, windows and seeds."""

    def grid(path: Path) -> Grid:
        from experiments.forecasting import system_runs

        windows, datasets, systems = (request.names(option) for option in ("windows", "problems", "methods"))
        return system_runs.grid(path, request.chosen_seeds(), windows, datasets, systems, quick=request.quick)

    return Table(NAME, KEYS, resumed(grid, request), lambda lines: render([*lines, *companions(request.folder)]))


def companions(folder: Path) -> list[Line]:
    """Lines of our rows and of the default, which has one seed."""
    networks = Records(folder / "forecasting.jsonl", KEYS).read()
    found: list[Line] = [line for line in networks if line["method"] in NETWORKS]
    for line in Records(folder / "forecasting-rolling.jsonl", ROLLING_KEYS).read():
        if line["method"] == DEFAULT and line["dataset"] in DATASETS:
            found.append({**line, "seed": 0, "window": "rolling"})
            found += [{**line, "seed": 0, "window": "paper"}] if line["origin"] == 0 else []
    return found


def render(lines: Lines) -> str:
    """Return the page of both windows."""
    own = [line for line in lines if line["method"] in SYSTEM_ROWS]
    seeds = {line["seed"] for line in own}
    shared = [line for line in lines if line["seed"] in seeds]
    values = {
        "count": len(own),
        "seeds": ", ".join(map(str, sorted(seeds))),
        "missing": _missing(own),
        "behind": Figure(lambda window: _behind(_window(shared, window))),
        "crps": Figure(lambda window: _scores(_window(shared, window), _window(lines, window))),
        "against": Figure(lambda window: _against(_window(shared, window))),
        "obeyed": _obeyed(own),
    }
    return templates.fill(PAGE, values)


def _window(lines: Lines, window: str) -> list[Line]:
    """Lines of a window, which must have some of a system."""
    found = [line for line in lines if line["window"] == window]
    if not any(line["method"] in SYSTEM_ROWS for line in found):
        raise MissingFigureError(f"systems in the {window} window")
    return found


def _missing(own: Lines) -> str:
    """Says which rows have not been run; nothing if all have."""
    absent = []
    for window in ("paper", "rolling"):
        for system in SYSTEM_ROWS:
            done = {line["dataset"] for line in own if line["method"] == system and line["window"] == window}
            sets = [TITLES[name] for name in DATASETS if name not in done and _expected(system, name)]
            absent += [f"- {system}, {window} window: {', '.join(sets)}"] if sets else []
    if not absent:
        return ""
    return "Not run yet; `probhard bench systems-forecasting` resumes there:\n\n" + "\n".join(absent)


def _expected(system: str, dataset: str) -> bool:
    return system != "copdeepvar" or dataset not in ("traffic", "wiki")  # one step has no sums over time


def _mean(lines: Lines, method: str, dataset: str) -> float | None:
    """Mean CRPS times 1000 of a row over origins and seeds; None if it has no lines."""
    found = [1000 * line["crps"] for line in lines if line["method"] == method and line["dataset"] == dataset]
    return statistics.fmean(found) if found else None


def _behind(lines: Lines) -> str:
    """Sets on which a published system has a smaller CRPS than each of our rows."""
    rows = []
    for ours in OURS:
        cells = []
        for system in SYSTEM_ROWS:
            better = []
            for dataset in DATASETS:
                theirs, own = _mean(lines, system, dataset), _mean(lines, ours, dataset)
                if theirs is not None and own is not None and theirs < own:
                    better.append(f"{TITLES[dataset]} ({theirs:.1f}, {own:.1f})")
            run = any(_mean(lines, system, dataset) is not None for dataset in DATASETS)
            cells.append(", ".join(better) or ("none of those run" if run else ""))
        rows.append([ours, *cells])
    return templates.table(["our row", *(f"{system} is better on" for system in SYSTEM_ROWS)], rows)


def _scores(lines: Lines, every: Lines) -> str:
    """The CRPS of every row on every set that a system was run on, and in brackets that over all seeds of the row."""
    rows = []
    for method in ROWS:
        cells = []
        for dataset in DATASETS:
            value = _mean(lines, method, dataset)
            if value is None or not _ran(lines, dataset):
                cells.append("")
                continue
            overall = _mean(every, method, dataset)
            cells.append(f"{value:.1f}" if overall == value else f"{value:.1f} ({overall:.1f})")
        rows.append([method, *cells])
    return templates.table(["row", *(TITLES[name] for name in DATASETS)], rows)


def _ran(lines: Lines, dataset: str) -> bool:
    return any(_mean(lines, system, dataset) is not None for system in SYSTEM_ROWS)


def _against(lines: Lines) -> str:
    """Relative change of the CRPS of each system against the network rows, in percent."""
    rows = []
    for system in SYSTEM_ROWS:
        for other in ("hier-e2e", "base"):
            changes = [_change(lines, system, other, dataset) for dataset in DATASETS]
            known = [change for change in changes if change is not None]
            if known:
                cells = ["" if change is None else f"{change:+.1f}" for change in changes]
                rows.append([f"{system} against {other}", *cells, f"{statistics.fmean(known):+.1f}"])
    return templates.table(["rows", *(TITLES[name] for name in DATASETS), "mean"], rows)


def _change(lines: Lines, system: str, other: str, dataset: str) -> float | None:
    theirs, bar = _mean(lines, system, dataset), _mean(lines, other, dataset)
    return None if theirs is None or bar is None else 100 * (theirs / bar - 1)


def _obeyed(own: Sequence[Line]) -> str:
    """The largest incoherence and the smallest value of the draws of every system."""
    rows = []
    for system in SYSTEM_ROWS:
        cells = []
        for dataset in DATASETS:
            found = [line for line in own if line["method"] == system and line["dataset"] == dataset]
            worst = max((line["incoherence_relative"] for line in found), default=None)
            smallest = min((line["smallest_draw"] for line in found), default=None)
            cells.append("" if worst is None else f"{worst:.0e}, {smallest:.3g}")
        rows.append([system, *cells])
    return templates.table(["row", *(TITLES[name] for name in DATASETS)], rows)
