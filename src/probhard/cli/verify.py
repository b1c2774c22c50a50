"""Options of ``probhard verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(
    certificate: Annotated[Path, typer.Argument(help="The .json file that a command wrote beside its output.")],
) -> None:
    """Check that the files beside a certificate are those that it vouches for; the status is that of their command."""
    from probhard.cli import _outputs
    from probhard.cli._certificate import IMPLAUSIBLE, INFEASIBLE

    content = _outputs.verify(certificate)
    for name in content.get(_outputs.FILES, {}):
        typer.echo(f"{name}: unchanged")
    verdict = "all feasible" if content["feasible"] else f"{content['infeasible']} NOT feasible"
    typer.echo(f"{content['checked']} points were checked: {verdict}.")
    if not content["feasible"]:
        raise typer.Exit(INFEASIBLE)
    if not content.get("plausible", True):
        typer.echo("They are feasible, but implausible.")
        raise typer.Exit(IMPLAUSIBLE)
