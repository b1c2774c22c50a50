"""``probhard demo``: every method on one small network, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WRITTEN = 1e6  # bytes of picture and numbers
INTERRUPTED = 130  # what a shell expects after Ctrl-C


def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the picture and the numbers.")] = Path(
        "demo-output"
    ),
    epochs: Annotated[
        int | None, typer.Option(help="Training epochs per method; default: 120, with --quick 10.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, weights and draws.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: little data, a tiny network, rough results.")
    ] = False,
) -> None:
    """Compare every method on a small network (a minute)."""
    from probhard._util.atomic import check_space
    from probhard.cli._outputs import check_seed, check_writable
    from probhard.pde import demo  # --help needs no plotting library

    check_seed(seed)
    if not output.is_file():  # the run says so
        check_writable(output, "--output")
    check_space(output, WRITTEN, "The picture", "Pass another folder, or make room in it.")
    epochs = epochs if epochs is not None else 10 if quick else demo.EPOCHS
    rows = demo.run(output, epochs, seed, size=demo.QUICK if quick else demo.FULL)
    if len(rows) < len(demo.NAMES):
        raise typer.Exit(INTERRUPTED)
