"""``probhard train``: options of the command that trains a neural operator on a user's own fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    data: Annotated[Path, typer.Argument(help="An .npz, .zarr or HDF5 file of parameters or inputs, and solutions.")],
    config: Annotated[Path, typer.Option(help="A YAML file that names constraints, method, epochs, ...")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run; goes on with one that is there.")],
) -> None:
    """Train a neural operator on your own fields under hard constraints."""
    from probhard.cli._train import run

    run(data, config, output)
