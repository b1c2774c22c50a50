"""The page of the table of reconciliation alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.forecasting.nine_sets import SETS
from experiments.forecasting.reconciliation import ALONE, HISTORY, KEYS, OURS, PAST, THEIRS
from experiments.grid import Grid
from experiments.table import Line, Request, Table, resumed

NAME = "reconciliation"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
WITHOUT = THEIRS[:2]  # methods that need no history
AGAINST = {PAST: THEIRS, HISTORY: THEIRS, ALONE: WITHOUT}


def table(request: Request) -> Table:
    """The table, with its data sets."""

    def grid(path: Path) -> Grid:
        from experiments.forecasting import reconciliation

        return reconciliation.grid(path, request.names("problems"))

    return Table(NAME, KEYS, resumed(grid, request), render)


def render(lines: Sequence[Line]) -> str:
    """Return the page."""
    sets = [name for name in SETS if any(line["dataset"] == name for line in lines)]
    missing = [name for name in SETS if name not in sets]
    bounded = [line["smallest_bounded"] for line in lines if "smallest_bounded" in line]
    return PAGE.read_text().format(
        count=len(lines),
        missing=f"Sets without lines: {', '.join(missing)}." if missing else "All sets have lines.",
        crps=_crps(lines, sets),
        ratios=_ratios(lines, sets),
        worst=_worst(lines, sets),
        seconds=_seconds(lines, sets),
        smallest=f"{min(bounded):.3g} over {len(bounded)} sets" if bounded else "not measured",
    )


def mean_crps(lines: Sequence[Line], dataset: str, row: str) -> float:
    """The mean CRPS of a row over the origins of a set."""
    return float(np.mean([x["crps"] for x in lines if (x["dataset"], x["method"]) == (dataset, row)]))


def log_ratio(lines: Sequence[Line], dataset: str, ours: str, theirs: str) -> float:
    """The logarithm of the ratio of two mean CRPS."""
    return float(np.log(mean_crps(lines, dataset, ours) / mean_crps(lines, dataset, theirs)))


def _crps(lines: Sequence[Line], sets: Sequence[str]) -> str:
    rows = ["| row |" + "".join(f" {name} |" for name in sets), "|---|" + "---|" * len(sets)]
    best = {name: min(mean_crps(lines, name, row) for row in (*OURS, *THEIRS)) for name in sets}
    for row in (*OURS, *THEIRS):
        cells = []
        for name in sets:
            score = mean_crps(lines, name, row)
            text = f"{100 * score:.3g}"
            cells.append(f" **{text}** |" if score == best[name] else f" {text} |")
        rows.append(f"| {row} |" + "".join(cells))
    return "\n".join(rows)


def _ratios(lines: Sequence[Line], sets: Sequence[str]) -> str:
    rows = ["| row |" + "".join(f" against {method} |" for method in THEIRS), "|---|" + "---|" * len(THEIRS)]
    for row, others in AGAINST.items():
        means = {m: 100 * np.mean([log_ratio(lines, name, row, m) for name in sets]) for m in others}
        rows.append(f"| {row} |" + "".join(f" {means[m]:+.1f} % |" if m in means else " |" for m in THEIRS))
    return "\n".join(rows)


def _worst(lines: Sequence[Line], sets: Sequence[str]) -> str:
    rows = ["| row |" + "".join(f" {name} |" for name in sets), "|---|" + "---|" * len(sets)]
    for row, others in AGAINST.items():
        behind = [max(log_ratio(lines, name, row, m) for m in others) for name in sets]  # to the best of them
        rows.append(f"| {row} |" + "".join(f" {100 * gap:+.1f} % |" for gap in behind))
    return "\n".join(rows)


def _seconds(lines: Sequence[Line], sets: Sequence[str]) -> str:
    def median(name: str, row: str) -> float:
        return float(np.median([x["seconds"] for x in lines if (x["dataset"], x["method"]) == (name, row)]))

    def learning(name: str) -> float:
        return float(np.max([x.get("seconds_learning", 0.0) for x in lines if x["dataset"] == name]))

    rows = ["| row |" + "".join(f" {name} |" for name in sets), "|---|" + "---|" * len(sets)]
    for row in (*OURS, *THEIRS):
        rows.append(f"| {row} |" + "".join(f" {1000 * median(name, row):.0f} |" for name in sets))
    rows.append("| learning on past windows |" + "".join(f" {1000 * learning(name):.0f} |" for name in sets))
    return "\n".join(rows)
