"""``probhard predict``: options of the command that predicts fields with a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(help="The folder that 'probhard train' wrote.")],
    inputs: Annotated[Path, typer.Argument(help="Parameters or inputs, and what the constraints need by name.")],
    draws: Annotated[int, typer.Option(min=2, help="Draws of each field.")] = 100,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-predicted.npz beside the inputs.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="A picture of the first sample with its bands.")] = None,
) -> None:
    """Predict fields with a trained run, certified."""
    from probhard.cli._predict import Request

    Request(run, inputs, draws, output, seed, figure).predict()
