"""``probhard bench``: runs one table at a time, its result lines first and then its page.

A table's code is imported when that table is asked for. Rendering forecasts, times and speed needs neither GluonTS nor
Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.grid import Grid
from experiments.records import Records
from probhard.errors import ParameterError, check_choice, check_choices

PDE = ("pde-linear", "pde-nonlinear", "tvd")
FIELDS, FORECASTS, ROLLING = "joint-fields", "joint-forecasting", "forecasting-rolling"
RECONCILIATION = "reconciliation"
FORECASTING = ("forecasting", ROLLING, RECONCILIATION, FORECASTS)
TABLES = (*PDE, FIELDS, *FORECASTING, "conformal", "first-order", "alarms", "optimisation", "timing", "speed")


@dataclass(frozen=True)
class Request:
    """The options of ``probhard bench``; lists are comma-separated, and empty for all."""

    table: str
    folder: Path
    epochs: int = 150
    seeds: str = ""
    problems: str = ""
    methods: str = ""
    scores: str = "crps,nll"
    windows: str = "paper,rolling"
    workers: int = 1
    engine: str = "joblib"
    address: str | None = None
    quick: bool = False
    render: bool = False


def run(request: Request) -> Iterator[str]:
    """Run the experiments behind a table, unless only its page is asked for, and write the page.

    Args:
        request: The options of the command.

    Yields:
        Messages for the user.

    Raises:
        ParameterError: If an option names something unknown, or there is nothing to run or to render.
    """
    check_choice("table", request.table, TABLES)
    if request.table == "timing":
        yield from map(_written, _timing(request))
    elif request.table == "conformal":
        yield from map(_written, _conformal(request))
    elif request.table == "first-order":
        yield from map(_written, _first_order(request))
    elif request.table == "optimisation":
        yield from map(_written, _optimisation(request))
    elif request.table == "alarms":
        yield from map(_written, _alarms(request))
    elif request.table == "speed":
        yield from map(_written, _speed(request))
    else:
        yield from _table(request)


def _table(request: Request) -> Iterator[str]:
    """Run and render a table whose units of work are resumable."""
    grid = _grid(request)
    if not grid.units:
        raise ParameterError(
            "These options leave nothing to run.",
            "Rows trained on draws have no likelihood, rows of jumps want a problem that has one, and some tables "
            "have one score or window only.",
            "Leave out --scores, --problems or --windows.",
        )
    if not request.render:
        done = grid.run(request.workers, engine=request.engine, address=request.address)
        yield f"{done} of {len(grid.units)} units done; lines in {grid.records.path}"
    lines = _lines(grid.records)
    if request.table in PDE:
        from experiments.pde import tables as pde

        yield from map(_written, pde.write(request.folder, request.table, lines, request.quick))
    elif request.table == FIELDS:
        from experiments.pde import joint_tables

        yield from map(_written, joint_tables.write(request.folder, lines, request.quick))
    elif request.table == FORECASTS:
        from experiments.forecasting import joint_tables as joint_forecasts

        yield from map(_written, joint_forecasts.write(request.folder, lines))
    elif request.table == ROLLING:
        from experiments.forecasting import rolling_tables

        yield from map(_written, rolling_tables.write(request.folder, lines))
    elif request.table == RECONCILIATION:
        from experiments.forecasting import reconciliation_tables

        yield from map(_written, reconciliation_tables.write(request.folder, lines))
    else:
        from experiments.forecasting import tables as forecasting

        yield from map(_written, forecasting.write(request.folder, lines))


def _grid(request: Request) -> Grid:
    path = request.folder / f"{request.table}.jsonl"
    seeds, problems, methods = _seeds(request.seeds), _listed(request.problems), _listed(request.methods)
    if request.table in PDE:
        from experiments.pde import runs as pde

        scores = _listed(request.scores)
        return pde.grid(request.table, path, request.epochs, seeds or [0], problems, methods, scores, request.quick)
    if request.table == FIELDS:
        from experiments.pde import joint

        return joint.grid(path, seeds or ([0] if request.quick else [0, 1, 2]), problems, methods, quick=request.quick)
    if request.table == FORECASTS:
        from experiments.forecasting import joint_runs

        return joint_runs.grid(path, seeds or [0], problems, methods, request.quick)
    if request.table == ROLLING:
        from experiments.forecasting import rolling_runs

        return rolling_runs.grid(path, problems)
    if request.table == RECONCILIATION:
        from experiments.forecasting import reconciliation

        return reconciliation.grid(path, problems)
    from experiments.forecasting import runs as forecasting

    few = [0] if request.quick else range(5)
    return forecasting.grid(path, seeds or few, _listed(request.windows), problems, methods, quick=request.quick)


def _speed(request: Request) -> list[Path]:
    """Run the comparisons of ``benchmarks/``, each suite in a process of its own, and write their page."""
    from benchmarks import runner

    folder = request.folder / "speed"
    return runner.render(folder) if request.render else runner.run(_listed(request.problems), folder, request.quick)


def _conformal(request: Request) -> list[Path]:
    """Measure conformal sets on the named problems and data sets, by default all, and write their page."""
    from experiments.conformal import tables

    records = Records(request.folder / "conformal.jsonl", tables.KEYS)
    if not request.render:
        from experiments.conformal import runs

        names = _listed(request.problems)
        check_choices("problem", names, runs.CASES)
        runs.run(records, names, request.quick)
    return tables.write(request.folder, _lines(records))


def _first_order(request: Request) -> list[Path]:
    """Compare the rules for moments with exact laws, on the named groups of cases, and write their page."""
    from experiments import first_order
    from experiments.first_order_cases import GROUPS

    groups = _listed(request.problems)
    check_choices("problem", groups, GROUPS)
    path = request.folder / "first-order.jsonl"
    if not request.render:
        first_order.run(path, groups, request.quick)
    return first_order.write(request.folder, _lines(Records(path, first_order.KEYS)))


def _optimisation(request: Request) -> list[Path]:
    """Train networks on the named problems, by default all, compare them with solvers, and write their page."""
    from experiments.optimisation import tables

    records = Records(request.folder / "optimisation.jsonl", tables.KEYS)
    if not request.render:
        from experiments.optimisation import runs

        names = _listed(request.problems)
        check_choices("problem", names, runs.CASES)
        runs.run(records, names, request.quick)
    return tables.write(request.folder, _lines(records))


def _alarms(request: Request) -> list[Path]:
    """Project points near and far on nonlinear constraints, of the named cases, and write their page."""
    from experiments import alarms

    names = _listed(request.problems)
    check_choices("problem", names, alarms.NAMES)
    path = request.folder / "alarms.jsonl"
    if not request.render:
        alarms.run(path, names, request.quick)
    return alarms.write(request.folder, _lines(Records(path, alarms.KEYS)))


def _timing(request: Request) -> list[Path]:
    """Measure seconds per epoch on the named PDE problems and data sets, by default all, and write their page."""
    from experiments import timing

    chosen = _listed(request.problems)
    path = request.folder / "timing.jsonl"
    if not request.render:
        from experiments.forecasting.rows import DATASETS

        check_choices("problem", chosen, (*timing.PROBLEMS, *DATASETS))
        fields = [name for name in chosen or timing.PROBLEMS if name not in DATASETS]
        series = [name for name in chosen or DATASETS if name in DATASETS]
        timing.run(path, [timing.pde_cases(fields), timing.forecast_cases(series)], 1.0 if request.quick else 20.0)
    return timing.write(request.folder, _lines(Records(path, timing.KEYS)))


def _lines(records: Records) -> list[dict[str, Any]]:
    """The lines; an error if there are none, because an empty page would replace a full one."""
    lines = records.read()
    if not lines:
        raise ParameterError(
            f"{records.path} holds no result lines.", "There is nothing to render.", "Run without --render first."
        )
    return lines


def _written(path: Path) -> str:
    return f"Written: {path}"


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in _listed(text)]
    except ValueError as error:
        raise ParameterError(f"--seeds {text} are not numbers.", "Seeds are integers.", "Pass 0,1,2.") from error


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
