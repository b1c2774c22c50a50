"""Result lines of joint laws of forecasts as a page of tables and a picture; the prose is in ``pages/``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import templates
from experiments.forecasting.joint_bases import PLANS
from experiments.forecasting.joint_laws import GROUPS
from experiments.forecasting.joint_measures import LEVEL
from experiments.forecasting.joint_runs import BASES, DRAWS, KEYS, LAWS, RANK
from experiments.forecasting.joint_statistics import Row, coverage, ratio, relative_score
from experiments.forecasting.rows import DATASETS, SAMPLES
from experiments.forecasting.tables import TITLES
from experiments.grid import Grid
from experiments.table import Line, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

NAME = "joint-forecasting"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
RANGE = (0.72, 0.88)  # goal of pooled coverage
WORSE = 1.0005  # ratios of CRPS above it are listed
KINDS = {"coverage": "steps", "coverage_sums": "sums"}


def table(request: Request) -> Table:
    """The table, with its data sets, base forecasts and seeds."""
    from experiments.forecasting.joint_figure import draw

    def grid(path: Path) -> Grid:
        from experiments.forecasting import joint_runs

        datasets, bases = request.names("problems"), request.names("methods")
        return joint_runs.grid(path, request.chosen_seeds(), datasets, bases, request.quick)

    return Table(NAME, KEYS, resumed(grid, request), render, draw)


def render(lines: Sequence[Line]) -> str:
    """Return the page."""
    values = {
        "count": len(lines),
        "level": LEVEL,
        "low": RANGE[0],
        "high": RANGE[1],
        "draws": DRAWS,
        "paths": SAMPLES,
        "rank": RANK,
        "plans": _plans(lines),
        "missed": _missed(lines),
        "worse": _worse(lines),
        "coverage": _coverage(lines, "coverage"),
        "sums": _coverage(lines, "coverage_sums"),
        "by_set": _by_set(lines),
        "ratios": _ratios(lines),
        "scores": _scores(lines, "crps"),
        "score_sums": _scores(lines, "crps_sums"),
        "energy": _energy(lines),
        "numbers": _numbers(lines),
        "seeds": Figure(lambda _: f"{len({line['seed'] for line in lines})}"),
    }
    return templates.fill(PAGE, values)


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """The rows that have lines, in a fixed order."""
    there = {(line["base"], line["law"], line["calibrated"]) for line in lines}
    return [
        Row(base, law, calibrated)
        for base in BASES
        for calibrated in (False, True)
        for law in LAWS
        if (base, law, calibrated) in there
    ]


def _pairs(lines: Sequence[Line]) -> Iterator[tuple[Row, Row]]:
    """Each row of the joint law with its independent one."""
    there = rows_of(lines)
    for row in there:
        other = Row(row.base, "independent", row.calibrated)
        if row.law == "joint" and other in there:
            yield row, other


def _sets(lines: Sequence[Line], base: str) -> list[str]:
    return [name for name in DATASETS if any(line["dataset"] == name and line["base"] == base for line in lines)]


def _missed(lines: Sequence[Line]) -> str:
    """Pooled coverages of the calibrated joint law outside the goal, beside those of the independent law."""
    rows = []
    for row, other in _pairs(lines):
        for field, kind in KINDS.items() if row.calibrated else ():
            for group in GROUPS:
                own, its = (coverage(lines, [one], group, field) for one in (row, other))
                if not RANGE[0] <= own.value <= RANGE[1]:
                    rows.append((row.base, kind, group, own.text(100), its.text(100)))
    return templates.table(("base", "of", "levels", "joint", "independent"), rows) if rows else "None."


def _worse(lines: Sequence[Line]) -> str:
    """Groups of levels of data sets where the calibrated joint law has the larger CRPS."""
    rows = []
    for row, other in _pairs(lines):
        for group in GROUPS if row.calibrated else ():
            cells = []
            for dataset in _sets(lines, row.base):
                found = ratio(lines, row, other, group, "crps", [dataset])
                if found.value > WORSE:
                    cells.append(f"{TITLES[dataset]} {found.text(1, 3)}")
            if cells:
                rows.append((row.base, group, ", ".join(cells)))
    return templates.table(("base", "levels", "data sets, and the ratio of CRPS"), rows) if rows else "None."


def _coverage(lines: Sequence[Line], field: str) -> str:
    """Pooled coverage of every row, in percent."""
    rows = []
    for row in rows_of(lines):
        cells = [coverage(lines, [row], group, field).text(100) for group in GROUPS]
        rows.append((row.base, row.law, "yes" if row.calibrated else "no", *cells))
    return templates.table(("base", "law", "calibrated", *GROUPS), rows)


def _by_set(lines: Sequence[Line]) -> str:
    """Coverage of steps / of sums by data set, of the calibrated independent and joint laws."""
    rows = []
    for row in rows_of(lines):
        if not row.calibrated or row.law == "nodes":
            continue
        for group in GROUPS:
            cells = []
            for dataset in DATASETS:
                own = [line for line in lines if line["dataset"] == dataset]
                try:
                    pair = [coverage(own, [row], group, field).value for field in KINDS]
                    cells.append(" / ".join(f"{100 * value:.0f}" for value in pair))
                except MissingFigureError:
                    cells.append("")
            rows.append((row.base, row.law, group, *cells))
    return templates.table(("base", "law", "levels", *(TITLES[name] for name in DATASETS)), rows)


def _ratios(lines: Sequence[Line]) -> str:
    """CRPS of the joint law over that of the independent one, pooled over data sets."""
    rows = []
    for row, other in _pairs(lines):
        for field, kind in (("crps", "steps"), ("crps_sums", "sums")):
            cells = [ratio(lines, row, other, group, field, DATASETS).text(1, 3) for group in GROUPS]
            rows.append((row.base, "yes" if row.calibrated else "no", kind, *cells))
    return templates.table(("base", "calibrated", "of", *GROUPS), rows)


def _scores(lines: Sequence[Line], field: str) -> str:
    """Relative CRPS times 1000 by data set and group, independent and joint, calibrated."""
    rows = []
    for row, other in _pairs(lines):
        for group in GROUPS if row.calibrated else ():
            cells = []
            for dataset in DATASETS:
                try:
                    pair = [1000 * relative_score(lines, one, dataset, group, field) for one in (other, row)]
                    cells.append(" / ".join(f"{value:.2f}" for value in pair))
                except MissingFigureError:
                    cells.append("")
            rows.append((row.base, group, *cells))
    return templates.table(("base", "levels", *(TITLES[name] for name in DATASETS)), rows)


def _energy(lines: Sequence[Line]) -> str:
    """Energy score of the joint law over that of the independent one, by data set and pooled."""
    rows = []
    for row, other in _pairs(lines):
        sets = _sets(lines, row.base)
        cells = [ratio(lines, row, other, "", "energy", [name]).text(1, 3) if name in sets else "" for name in DATASETS]
        pooled = ratio(lines, row, other, "", "energy", sets).text(1, 3)
        rows.append((row.base, "yes" if row.calibrated else "no", *cells, pooled))
    return templates.table(("base", "calibrated", *(TITLES[name] for name in DATASETS), "pooled"), rows)


def _numbers(lines: Sequence[Line]) -> str:
    """Numbers of calibration at the last origin: top, middle, bottom, and rho where there is one."""
    rows = []
    for row in rows_of(lines):
        if not row.calibrated or row.law == "nodes":
            continue
        cells = []
        for dataset in DATASETS:
            last = [
                line
                for line in lines
                if (line["dataset"], line["base"], line["law"], line["calibrated"], line["origin"])
                == (dataset, row.base, row.law, True, 0)
            ]
            cell = ", ".join(f"{number:.2f}" for number in last[0]["numbers"]) if last else ""
            cells.append(cell + (f"; {last[0]['rho']:g}" if last and last[0].get("rho") else ""))
        rows.append((row.base, row.law, *cells))
    return templates.table(("base", "law", *(TITLES[name] for name in DATASETS)), rows)


def _plans(lines: Sequence[Line]) -> str:
    """Horizon, step and windows of the data sets that have lines."""
    rows = []
    for name in DATASETS:
        plan, there = PLANS[name], [line for line in lines if line["dataset"] == name]
        if there:
            test = len({line["origin"] for line in there})
            rows.append((TITLES[name], str(plan.horizon), str(plan.step), str(plan.calibration), str(test)))
    return templates.table(
        ("data set", "horizon", "rows between origins", "windows before", "origins of the test"), rows
    )
