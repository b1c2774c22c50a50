"""``probhard bench``: the experiments behind the tables, in pieces that can be stopped and gone on with at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from probhard.errors import check_choice

RESULTS = Path("results")
PDE = ("pde-linear", "pde-nonlinear", "tvd")


def bench(
    table: str = typer.Argument(help=f"One of {', '.join(PDE)}."),
    epochs: int = typer.Option(150, min=1, help="Training epochs; the learning rate is halved ten times."),
    seeds: str = typer.Option("0", help="Comma-separated."),
    problems: str = typer.Option("", help="Comma-separated; default: all of the table."),
    methods: str = typer.Option("", help="Rows to train, comma-separated; default: all."),
    scores: str = typer.Option("crps,nll", help="Scores to train with."),
    workers: int = typer.Option(1, min=1, help="Processes of one thread each; more may be started beside them."),
    output: Annotated[Path, typer.Option(help="Folder of result lines, tables and figures.")] = RESULTS,
    quick: bool = typer.Option(False, "--quick", help="Minutes, not hours; rough results go to OUTPUT/quick."),
    render: bool = typer.Option(False, "--render", help="Only render the lines that are there."),
) -> None:
    """Run the experiments behind a table, render it, and go on where an earlier run stopped."""
    check_choice("table", table, PDE)
    from probhard.pde import experiments, tables

    folder = output / "quick" if quick else output
    small: dict[str, Any] = (
        {"sizes": (20, 10, 10), "network": {"width": 8, "modes": (4, 4)}, "compiled": False} if quick else {}
    )
    grid = experiments.grid(
        table,
        folder / f"{table}.jsonl",
        2 if quick else epochs,
        [int(seed) for seed in _listed(seeds)],
        _listed(problems),
        _listed(methods),
        _listed(scores),
        **small,
    )
    if not render:
        done = grid.run(workers)
        typer.echo(f"{done} of {len(grid.units)} units done; lines in {grid.records.path}")
    for path in tables.write(folder, table, grid.records.read()):
        typer.echo(f"Written: {path}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
