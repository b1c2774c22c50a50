"""``probhard bench``: the experiments behind the tables, in pieces that can be stopped and gone on with at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from probhard.errors import check_choice

RESULTS = Path("results")
PDE = ("pde-linear", "pde-nonlinear", "tvd")
TABLES = (*PDE, "forecasting")


def bench(
    table: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.")],
    epochs: Annotated[int, typer.Option(min=1, help="Of PDE tables; the learning rate is halved ten times.")] = 150,
    seeds: Annotated[str, typer.Option(help="Comma-separated; default: 0, for forecasting 0 to 4.")] = "",
    problems: Annotated[str, typer.Option(help="Problems or data sets, comma-separated; default: all.")] = "",
    methods: Annotated[str, typer.Option(help="Rows to train or fit, comma-separated; default: all.")] = "",
    scores: Annotated[str, typer.Option(help="Of PDE tables: scores to train with.")] = "crps,nll",
    windows: Annotated[str, typer.Option(help="Of forecasting.")] = "paper,rolling",
    workers: Annotated[int, typer.Option(min=1, help="Processes of one thread each; more may join.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of result lines, tables and figures.")] = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes; rough results go to OUTPUT/quick.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Only render the lines that are there.")] = False,
) -> None:
    """Run the experiments behind a table, render it, and go on where an earlier run stopped."""
    check_choice("table", table, TABLES)
    folder = output / "quick" if quick else output
    path = folder / f"{table}.jsonl"
    chosen = [int(seed) for seed in _listed(seeds)]
    if table in PDE:
        from probhard.pde import experiments, tables

        small: dict[str, Any] = {"sizes": (20, 10, 10), "network": {"width": 8, "modes": (4, 4)}, "compiled": False}
        grid = experiments.grid(
            table,
            path,
            2 if quick else epochs,
            chosen or [0],
            _listed(problems),
            _listed(methods),
            _listed(scores),
            **(small if quick else {}),
        )
    else:
        from probhard.forecasting import experiments as forecasts
        from probhard.forecasting import tables as forecast_tables

        few = [0] if quick else range(5)
        grid = forecasts.grid(path, chosen or few, _listed(windows), _listed(problems), _listed(methods), quick=quick)
    if not render:
        done = grid.run(workers)
        typer.echo(f"{done} of {len(grid.units)} units done; lines in {grid.records.path}")
    lines = grid.records.read()
    for written in tables.write(folder, table, lines) if table in PDE else forecast_tables.write(folder, lines):
        typer.echo(f"Written: {written}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
