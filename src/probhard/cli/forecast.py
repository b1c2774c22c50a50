"""``probhard forecast``: options of the command that fits a hierarchy of series and forecasts coherently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EMBEDDED = "us-employment"
METHOD_NAMES = (  # of probhard.method.METHODS, which needs torch
    "base",
    "probhard-ob",
    "probhard-or",
    "hardc",
    "probconserv",
    "probhard-inf",
    "softc",
    "hier-e2e",
    "hardnet-aff",
    "hardnet++",
    "dc3",
    "completion",
)
MEMBERS = (  # of probhard.forecasting.members.catalogue, which needs torch
    "ets",
    "theta",
    "ces",
    "arima",
    "naive",
    "croston",
    "mstl",
    "smoothing",
    "bootstrap",
    "deepvar",
)


def forecast(
    data: Annotated[
        str, typer.Argument(help="A .csv or .parquet file, one row per bottom series and time, or a data set's name.")
    ] = EMBEDDED,
    keys: Annotated[
        str | None, typer.Option(help="Key columns: state,region (nested) or 'state,region * purpose' (crossed).")
    ] = None,
    horizon: Annotated[int | None, typer.Option(min=1, help="Steps to forecast; default: one season.")] = None,
    nonnegative: Annotated[bool | None, typer.Option("--nonnegative", help="No draw below 0.")] = None,
    level: Annotated[str | None, typer.Option(help="Intervals in percent. Default: 80,95.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with these and further options.")] = None,
    models: Annotated[str | None, typer.Option(help=f"Members: {', '.join(MEMBERS)}. Default: by the data.")] = None,
    fast: Annotated[bool | None, typer.Option("--fast", help="One member only.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that fit series. Default: 1.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Saved model: forecast without training.")] = None,
    method: Annotated[str | None, typer.Option(help=f"DeepVAR alone, by {', '.join(METHOD_NAMES)}.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: NAME-forecast.")] = None,
    draws: Annotated[int | None, typer.Option(min=2, help="Draws to write; 1000 are made without it.")] = None,
    format: Annotated[str | None, typer.Option(help="csv (the default) or parquet.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, windows and draws. Default: 0.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: by the size of the data.")] = None,
    time_column: Annotated[str | None, typer.Option(help="Default: ds, date, month, ...")] = None,
    target_column: Annotated[str | None, typer.Option(help="Default: y, value, or the only other numbers.")] = None,
    upper: Annotated[str | None, typer.Option(help="Cap: a number, or a file of unique_id, ds, value.")] = None,
    fixed: Annotated[str | None, typer.Option(metavar="FILE", help="Plan: a file of unique_id, ds, value.")] = None,
    immutable: Annotated[str | None, typer.Option(help="Nodes whose own forecasts are kept.")] = None,
    regressors: Annotated[str | None, typer.Option(help="Columns known ahead. Default: those in --future.")] = None,
    future: Annotated[str | None, typer.Option(metavar="FILE", help="Regressors after the history.")] = None,
    country_holidays: Annotated[str | None, typer.Option(help="Public holidays as regressor: CH, DE-BY.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Past windows of the backtest. Default: 3.")] = None,
    backtest: Annotated[bool | None, typer.Option("--backtest/--no-backtest", help="Default: --backtest.")] = None,
) -> None:
    """Fit a hierarchy of series, backtest, and forecast coherently, certified."""
    given = dict(locals())
    from probhard.cli._forecast import ForecastRun
    from probhard.cli._forecast_options import read_configuration

    data, config = given.pop("data"), given.pop("config")
    options = {name: value for name, value in given.items() if value is not None}
    ForecastRun.of(data, options, read_configuration(config)).run()
