"""``probhard reconcile``: options of the command that makes anyone's forecasts coherent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reconcile(
    forecasts: Annotated[
        Path, typer.Argument(help="A .csv or .parquet file: unique_id, ds, models; see docs/files.md.")
    ],
    keys: Annotated[
        str | None, typer.Option(help="Key columns, coarse to fine, empty for aggregates; else ids joined by '/'.")
    ] = None,
    summing: Annotated[Path | None, typer.Option(help="A .csv or .parquet file of S: unique_id, bottom ids.")] = None,
    nonnegative: Annotated[bool, typer.Option("--nonnegative", help="No value below 0.")] = False,
    upper: Annotated[str | None, typer.Option(help="A number, or a column of upper bounds.")] = None,
    fixed: Annotated[str | None, typer.Option(help="A column of values that nodes must have, else empty.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="middle, oblique, orthogonal or structural; default: learned on --past, else middle."),
    ] = None,
    covariance: Annotated[
        str | None,
        typer.Option(help="Joint law: errors (default with --history or --past), hierarchy (without) or independent."),
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Observed and fitted values, for the joint law: unique_id, ds, y, models.")
    ] = None,
    past: Annotated[
        Path | None, typer.Option(help="Past forecasts with cutoff and y, on which the metric is learned.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="Nodes, separated by commas: what moved them, in NAME-explained.")
    ] = None,
    level: Annotated[str | None, typer.Option(help="Intervals to add, in percent, such as 80,95.")] = None,
    models: Annotated[str | None, typer.Option(help="Models to reconcile; default: all columns of numbers.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-reconciled beside the input.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Draws to write, where the input has none.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    engine: Annotated[
        str | None,
        typer.Option("--executor", help="joblib, ray or dask: in pieces, by subtree or step; default: here."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Of the executor: processes of one thread each.")] = 2,
    address: Annotated[str | None, typer.Option(help="Of a running Ray or Dask cluster; default: one here.")] = None,
) -> None:
    """Make anyone's forecasts coherent, certified."""
    given = dict(locals())
    from probhard.cli._reconcile import Request

    Request(**given).run()
