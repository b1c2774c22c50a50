"""``probhard bench``: runs the experiments behind the tables; a run can be stopped and resumed at any time.

The experiments are part of the repository, not of the wheel. They are imported from the checkout of the package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from probhard.errors import ParameterError

RESULTS = Path("results")
TABLES = (
    *("pde-linear", "pde-nonlinear", "tvd", "joint-fields", "out-of-range", "diffusion", "pde-cl"),
    *("forecasting", "forecasting-rolling"),
    *("reconciliation", "joint-forecasting", "conformal", "first-order", "alarms", "optimisation", "timing", "speed"),
    *("multivariate", "multimodal", "sampling", "inference", "metrics", "reliability"),
)


def bench(
    table: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.")],
    epochs: Annotated[int, typer.Option(min=1, help="Of PDE tables; the learning rate is halved ten times.")] = 150,
    seeds: Annotated[str, typer.Option(help="Comma-separated; default: 0, for forecasting 0 to 4.")] = "",
    problems: Annotated[str, typer.Option(help="Problems, data sets, groups or speed suites; default: all.")] = "",
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
    """Run the experiments behind a table, render it, and resume where an earlier run stopped."""
    command, tables = (_from_checkout(f"experiments.{name}") for name in ("command", "table"))
    if not render:
        from probhard.cli._outputs import check_writable

        check_writable(output, "--output")
    request = tables.Request(
        table=table,
        epochs=epochs,
        seeds=seeds,
        problems=problems,
        methods=methods,
        scores=scores,
        windows=windows,
        workers=workers,
        engine=engine,
        address=address,
        folder=output / "quick" if quick else output,
        quick=quick,
        render=render,
    )
    for message in command.run(request):
        typer.echo(message)


def _from_checkout(module: str) -> Any:
    """Import a module from the checkout of the package, never from the current directory."""
    root = Path(__file__).parents[3]
    file = root / module.replace(".", "/")
    if not file.with_suffix(".py").exists():
        raise ParameterError(
            f"'bench' found no {file.parent.name}/ beside the package, in {root}.",
            "The experiments and comparisons are part of the repository, not of the installed package.",
            "Run it from a checkout of the repository, installed there by pip install -e '.[peers]'.",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(module)
