"""``probhard compare``: options of the command that trains every method on a user's own fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    data: Annotated[Path, typer.Argument(help="An .npz, .zarr or HDF5 file of parameters or inputs, and solutions.")],
    config: Annotated[Path, typer.Option(help="The YAML file of 'probhard train'; its method is not used.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for comparison.csv, .png and .json.")],
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: that of the configuration.")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Draws that are scored.")] = 100,
) -> None:
    """Compare methods on your own fields: accuracy, scores, violations and time."""
    from probhard.cli._compare import run

    run(data, config, output, methods, seeds, epochs, draws)
