"""Result lines of the forecasting experiments as a page of tables, beside the paper's figures.

The pooled CRPS is shown times 1000, as in the paper. On rolling origins, methods are compared origin by origin: the
difference of two rows has one value per origin, a mean over seeds, and is tested by a paired t-test. The prose is in
``pages/``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from experiments import templates
from experiments.forecasting.rows import CLASSICAL, DATASETS, DEFAULT, KEYS, NAIVE, POOL, SETTINGS
from experiments.grid import Grid
from experiments.table import Line, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError
from probhard.method import METHODS

PAGE = Path(__file__).parent / "pages" / "forecasting.md"
TITLES = {"labour": "Labour", "tourism": "Tourism", "tourism_large": "Tourism-L", "traffic": "Traffic", "wiki": "Wiki"}
PAPER: dict[str, tuple[float | None, ...]] = {  # CRPS times 1000, in the order of DATASETS
    "probhard-ob": (36.1, 98.9, 155.2, 55.0, 212.1),
    "probhard-or": (28.6, 82.4, 156.4, 60.6, 215.8),
    "probconserv": (45.8, 100.7, 176.9, 71.0, 264.7),
    "hier-e2e": (50.5, 103.1, 161.3, 41.8, 216.5),
    "arima-naivebu": (45.3, 113.8, 174.1, 80.8, 377.0),
    "ets-naivebu": (43.2, 100.8, 169.0, 66.5, 467.0),
    "ets-permbu-mint": (39.3, 77.1, None, 67.7, 281.0),
    "base": (38.2, 92.5, 158.1, 40.0, 229.4),
}
BEST = (28.6, 77.1, 155.2, 40.0, 212.1)
SIGNIFICANT = 0.05
TRAFFIC_PERIOD = 267  # rows after which Traffic repeats; checked in the tests


def table(request: Request) -> Table:
    """The table, with its data sets, rows, windows and seeds."""

    def grid(path: Path) -> Grid:
        from experiments.forecasting import runs

        windows, datasets, kinds = (request.names(option) for option in ("windows", "problems", "methods"))
        return runs.grid(path, request.chosen_seeds(range(5)), windows, datasets, kinds, quick=request.quick)

    return Table("forecasting", KEYS, resumed(grid, request), render)


def render(lines: Sequence[Line]) -> str:
    """Return the page of both windows, and of what the draws obey."""
    paper = [line for line in lines if line["window"] == "paper"]
    rolling = [line for line in lines if line["window"] == "rolling"]
    values = {
        "count": len(lines),
        "penalty": METHODS["softc"].penalty,
        "period": TRAFFIC_PERIOD,
        "level": SIGNIFICANT,
        "rolling_count": Figure(lambda _: f"{len(_some(rolling))}"),
        "behind": Figure(lambda _: _behind(paper)),
        "paper": _scores(paper, PAPER),
        "obeyed": _certificates(paper),
        "rolling": Figure(lambda _: _scores(_some(rolling), {})),
        "tests": Figure(lambda _: _tests(_some(rolling))),
    }
    return templates.fill(PAGE, values)


def _some(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines, of which there must be some."""
    if not lines:
        raise MissingFigureError("lines of the rolling window")
    return lines


def _behind(lines: Sequence[Line]) -> str:
    """Data sets on which our rows are not below the paper's best figure, or the network without constraint."""
    best: dict[str, float | None] = dict(zip(DATASETS, BEST))
    base = {dataset: _mean(lines, "base", dataset) for dataset in DATASETS}
    pairs: list[tuple[str, str, Mapping[str, float | None]]]
    pairs = [
        (DEFAULT, "best of the paper", best),
        (POOL, "best of the paper", best),
        ("probhard-or", "base", base),
        ("probhard-ob", "base", base),
    ]
    rows = []
    for method, other, bars in pairs:
        own = {dataset: _mean(lines, method, dataset) for dataset in DATASETS}
        both = {dataset: (own[dataset], bars[dataset]) for dataset in DATASETS}
        worse = [
            f"{TITLES[dataset]} ({value:.1f}, {bar:.1f})"
            for dataset, (value, bar) in both.items()
            if value is not None and bar is not None and value >= bar
        ]
        if any(value is not None for value in own.values()):
            rows.append((method, other, ", ".join(worse) or "none"))
    if not rows:
        raise MissingFigureError("rows of the paper's window")
    return templates.table(("row", "compared with", "no better on (its figure, the other's)"), rows)


def _mean(lines: Sequence[Line], method: str, dataset: str) -> float | None:
    values = _values(lines, method, dataset, "seed")
    return statistics.fmean(values) if values else None


def _methods(lines: Sequence[Line]) -> list[str]:
    """Neural rows first, then classical and naive ones, each in a fixed order."""
    names = {line["method"] for line in lines}
    fixed = [*CLASSICAL, *NAIVE]
    return [*sorted(names - set(fixed)), *(name for name in fixed if name in names)]


def _values(lines: Sequence[Line], method: str, dataset: str, over: str) -> list[float]:
    """One value for each seed or origin, the mean over the other."""
    groups: dict[Any, list[float]] = {}
    for line in lines:
        if line["method"] == method and line["dataset"] == dataset:
            groups.setdefault(line[over], []).append(1000 * line["crps"])
    return [statistics.fmean(groups[key]) for key in sorted(groups)]


def _scores(lines: Sequence[Line], paper: Mapping[str, Sequence[float | None]]) -> str:
    """The CRPS of every method on every data set, beside the paper's if it is given."""
    over = "seed" if all(line["window"] == "paper" for line in lines) else "origin"
    rows = []
    for method in _methods(lines):
        cells = []
        for index, dataset in enumerate(DATASETS):
            values = _values(lines, method, dataset, over)
            cell = f"{statistics.fmean(values):.1f}" if values else ""
            cell += f" +- {statistics.pstdev(values):.1f}" if len(values) > 1 else ""
            few = over == "origin" and 0 < len(values) < SETTINGS[dataset].origins
            cell += f" ({len(values)} origins)" if few else ""
            printed = paper[method][index] if method in paper else None
            cells.append(cell + (f" ({printed:g})" if printed is not None else ""))
        rows.append([method, *cells])
    if paper:
        rows.append(["best of the paper", *(f"{value:g}" for value in BEST)])
    return templates.table(_head(), rows)


def _certificates(lines: Sequence[Line]) -> str:
    """The largest incoherence and the smallest value of the draws of every method."""
    rows = []
    for method in _methods(lines):
        cells = []
        for dataset in DATASETS:
            own = [line for line in lines if line["method"] == method and line["dataset"] == dataset]
            worst = max((line["incoherence_relative"] for line in own), default=None)
            smallest = min((line["smallest_draw"] for line in own), default=None)
            cells.append("" if worst is None else f"{worst:.0e}, {smallest:.3g}")
        rows.append([method, *cells])
    return templates.table(_head(), rows)


def _tests(lines: Sequence[Line]) -> str:
    """For every neural row, the classical and naive rows that it does not beat significantly."""
    neural = [method for method in _methods(lines) if method not in (*CLASSICAL, *NAIVE)]
    others = [method for method in _methods(lines) if method in (*CLASSICAL, *NAIVE)]
    rows = []
    for method in neural:
        cells = []
        for dataset in DATASETS:
            if SETTINGS[dataset].step is not None:  # windows overlap
                cells.append("not tested" if _by_origin(lines, method, dataset) else "")
                continue
            left = [other for other in others if not _beats(lines, method, other, dataset)]
            cells.append((", ".join(left) or "none") if _by_origin(lines, method, dataset) else "")
        rows.append([method, *cells])
    return templates.table(_head(), rows)


def _beats(lines: Sequence[Line], method: str, other: str, dataset: str) -> bool:
    pairs = [_by_origin(lines, name, dataset) for name in (method, other)]
    shared = sorted(set(pairs[0]) & set(pairs[1]))
    if len(shared) < 2:
        return not pairs[1]  # a row without lines is not listed
    first, second = ([pair[origin] for origin in shared] for pair in pairs)
    return bool(stats.ttest_rel(first, second, alternative="less").pvalue < SIGNIFICANT)


def _by_origin(lines: Sequence[Line], method: str, dataset: str) -> dict[int, float]:
    own = [line for line in lines if line["method"] == method and line["dataset"] == dataset]
    return {
        origin: statistics.fmean(line["crps"] for line in own if line["origin"] == origin)
        for origin in {line["origin"] for line in own}
    }


def _head() -> list[str]:
    return ["method", *(TITLES[name] for name in DATASETS)]
