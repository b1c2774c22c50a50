"""``probhard bench``: the experiments behind the tables, in pieces that can be stopped and gone on with at any time."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from probhard.errors import ParameterError, check_choice, check_choices
from probhard.records import Records

RESULTS = Path("results")
PDE = ("pde-linear", "pde-nonlinear", "tvd")
PROBLEMS = ("heat", "pme", "advection", "stefan")  # of the timing figure
TABLES = (*PDE, "forecasting", "timing", "speed")


def bench(
    table: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.")],
    epochs: Annotated[int, typer.Option(min=1, help="Of PDE tables; the learning rate is halved ten times.")] = 150,
    seeds: Annotated[str, typer.Option(help="Comma-separated; default: 0, for forecasting 0 to 4.")] = "",
    problems: Annotated[str, typer.Option(help="Problems, data sets or speed suites; default: all.")] = "",
    methods: Annotated[str, typer.Option(help="Rows to train or fit, comma-separated; default: all.")] = "",
    scores: Annotated[str, typer.Option(help="Of PDE tables: scores to train with.")] = "crps,nll",
    windows: Annotated[str, typer.Option(help="Of forecasting.")] = "paper,rolling",
    workers: Annotated[int, typer.Option(min=1, help="Processes of one thread each; more may join.")] = 1,
    engine: Annotated[str, typer.Option("--executor", help="joblib (here), ray or dask.")] = "joblib",
    address: Annotated[str | None, typer.Option(help="Of a running Ray or Dask cluster; default: one here.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of result lines, tables and figures.")] = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes; rough results go to OUTPUT/quick.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Only render the lines that are there.")] = False,
) -> None:
    """Run the experiments behind a table, render it, and go on where an earlier run stopped."""
    check_choice("table", table, TABLES)
    folder = output / "quick" if quick else output
    if table == "timing":
        _timing(folder, _listed(problems), quick, render)
        return
    if table == "speed":
        _speed(folder / "speed", _listed(problems), quick, render)
        return
    path = folder / f"{table}.jsonl"
    chosen = _seeds(seeds)
    if table in PDE:
        from probhard.pde import experiments, tables

        grid = experiments.grid(
            table,
            path,
            epochs,
            chosen or [0],
            _listed(problems),
            _listed(methods),
            _listed(scores),
            quick,
        )
    else:
        from probhard.forecasting import experiments as forecasts
        from probhard.forecasting import tables as forecast_tables

        few = [0] if quick else range(5)
        grid = forecasts.grid(path, chosen or few, _listed(windows), _listed(problems), _listed(methods), quick=quick)
    if not grid.units:
        raise ParameterError(
            "These options leave nothing to run.",
            "Rows that are trained on draws have no likelihood, rows of jumps want a problem that has one, and some "
            "tables have one score or window only.",
            "Leave out --scores, --problems or --windows.",
        )
    if not render:
        done = grid.run(workers, engine=engine, address=address)
        typer.echo(f"{done} of {len(grid.units)} units done; lines in {grid.records.path}")
    lines = _found(grid.records)
    for written in tables.write(folder, table, lines, quick) if table in PDE else forecast_tables.write(folder, lines):
        typer.echo(f"Written: {written}")


def _speed(folder: Path, suites: list[str], quick: bool, render: bool) -> None:
    """The comparisons of ``benchmarks/``, each suite in a process of its own."""
    roots = [root for root in (Path(__file__).parents[3], Path.cwd()) if (root / "benchmarks" / "runner.py").exists()]
    if not roots:
        raise ParameterError(
            f"'bench speed' found no benchmarks/runner.py, neither beside the package nor in {Path.cwd()}.",
            "The comparisons with other packages are part of the repository, not of the installed package.",
            "Run it in a checkout of the repository, installed there by pip install -e '.[peers]'.",
        )
    if str(roots[0]) not in sys.path:
        sys.path.insert(0, str(roots[0]))
    runner = import_module("benchmarks.runner")
    for written in runner.render(folder) if render else runner.run(suites, folder, quick):
        typer.echo(f"Written: {written}")


def _timing(folder: Path, chosen: list[str], quick: bool, render: bool) -> None:
    """Seconds per epoch of the PDE problems and of the data sets that are named; by default of all."""
    from probhard import timing
    from probhard.forecasting.experiments import DATASETS

    path = folder / "timing.jsonl"
    if not render:
        check_choices("problem", chosen, (*PROBLEMS, *DATASETS))
        problems = [name for name in chosen or PROBLEMS if name not in DATASETS]
        datasets = [name for name in chosen or DATASETS if name in DATASETS]
        timing.run(path, [timing.pde_cases(problems), timing.forecast_cases(datasets)], 1.0 if quick else 20.0)
    for written in timing.write(folder, _found(Records(path, timing.KEYS))):
        typer.echo(f"Written: {written}")


def _found(records: Records) -> list[dict[str, Any]]:
    """The lines, of which there must be some: a page without any would replace one that had."""
    lines = records.read()
    if not lines:
        raise ParameterError(
            f"{records.path} holds no result lines.", "There is nothing to render.", "Run without --render first."
        )
    return lines


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in _listed(text)]
    except ValueError as error:
        raise ParameterError(f"--seeds {text} are not numbers.", "Seeds are integers.", "Pass 0,1,2.") from error


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
