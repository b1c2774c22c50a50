"""The command line, ``probhard COMMAND``.

Each command has a module for its options, which imports nothing heavy, and a private one of the same name for its work.

Exit status: 0 on success, 2 for invalid input (with a message on stderr), 130 after Ctrl-C. Commands add their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from probhard import __version__
from probhard._util import memory
from probhard.cli.bench import bench
from probhard.cli.demo import demo
from probhard.cli.forecast import forecast
from probhard.cli.predict import predict
from probhard.cli.project import project
from probhard.cli.reconcile import reconcile
from probhard.cli.train import train
from probhard.errors import MissingExtraError, ProbhardError

REFUSED = 2

app = typer.Typer(
    name="probhard",
    help="Probabilistic models that obey hard constraints.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(bench)
app.command()(project)
app.command()(reconcile)
app.command()(forecast)
app.command()(train)
app.command()(predict)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"probhard {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of the command itself."""
    memory.keep_freed()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Command and options; those of the process unless given.

    Returns:
        The exit status. Errors of probhard become a message on stderr, all others are raised.
    """
    try:
        typer.main.get_command(app).main(arguments, prog_name="probhard")
    except SystemExit as end:
        return int(end.code or 0)
    except (ProbhardError, MissingExtraError) as error:
        print(f"probhard: {error}", file=sys.stderr)
        return REFUSED
    return 0
