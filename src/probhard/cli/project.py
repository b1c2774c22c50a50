"""``probhard project``: options of the command that makes a trained model's fields feasible."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def project(
    fields: Annotated[Path, typer.Argument(help="An .npz, .zarr or HDF5 file of means, bands or draws.")],
    constraints: Annotated[Path, typer.Option(help="A YAML file that names the constraints.")],
    metric: Annotated[
        str | None, typer.Option(help="oblique (by variances; the default where there are any) or orthogonal.")
    ] = None,
    draws: Annotated[int, typer.Option(min=2, help="Draws of each field, where the input has none.")] = 100,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-projected.npz beside the input.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    grid_dims: Annotated[
        int | None, typer.Option(min=1, max=3, help="Space axes of the grid, where coordinates do not tell.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="A picture of the worst field before and after.")] = None,
) -> None:
    """Make a trained model's fields feasible, certified."""
    from probhard.cli._project import Request

    Request(fields, constraints, metric, draws, output, seed, grid_dims, figure).run()
