"""The command line, ``probhard COMMAND``.

Each command has a module for its options, which imports nothing heavy, and a private one of the same name for its work.

Exit status: 0 on success, 2 for invalid input or lack of space (with a message on stderr), 3 if something is not
feasible, 4 if it is feasible but implausible, 130 after Ctrl-C, 143 after
SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from probhard import __version__
from probhard._util import memory
from probhard.cli.bench import bench
from probhard.cli.compare import compare
from probhard.cli.demo import INTERRUPTED, demo
from probhard.cli.forecast import forecast
from probhard.cli.predict import predict
from probhard.cli.project import project
from probhard.cli.reconcile import reconcile
from probhard.cli.train import train
from probhard.cli.verify import verify
from probhard.errors import MissingExtraError, ProbhardError

REFUSED, TERMINATED = 2, 143

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
app.command()(compare)
app.command()(verify)


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
        The exit status. Errors of probhard, and of files and memory, become a message on stderr; others are raised.
    """
    try:
        with _terminable():
            typer.main.get_command(app).main(arguments, prog_name="probhard")
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:  # before or after the command itself
        return INTERRUPTED
    except (ProbhardError, MissingExtraError) as error:
        return _refuse(str(error))
    except (OSError, MemoryError, RuntimeError) as error:
        text = _out_of_resources(error)
        if text is None:
            raise
        return _refuse(text)
    return 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command like an error does, so that temporary files are removed."""

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if own:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _refuse(text: str) -> int:
    print(f"probhard: {text}", file=sys.stderr)
    return REFUSED


def _out_of_resources(error: Exception) -> str | None:
    """What the system refused, in three parts; None if the error is of another kind."""
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        return (
            f"The system refused a file{place}: {error.strerror or error}. Files of the run may be missing, so no "
            "certificate was written. Check space, rights and path, then run the command again."
        )
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return (
            f"There is too little memory: {error or 'an allocation failed'}. Nothing more was written. "
            "Ask for fewer draws or a smaller batch, split the file, or use a larger machine."
        )
    return None
