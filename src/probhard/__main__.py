"""The command line: ``python -m probhard demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from probhard import __version__
from probhard.errors import ProbhardError

INTERRUPTED = 130  # what a shell expects after Ctrl-C


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = argparse.ArgumentParser(prog="probhard", description="Probabilistic models that obey hard constraints.")
    top.add_argument("--version", action="version", version=f"probhard {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small network with every method and compare them (a minute)")
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="default: %(default)s")
    demo.add_argument("--epochs", type=int, help="training epochs per method; default: 120, with --quick 10")
    demo.add_argument("--seed", type=int, default=0, help="of data, weights and draws; default: %(default)s")
    demo.add_argument("--quick", action="store_true", help="a few seconds: little data, a tiny network, rough results")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    from probhard import demo  # here, so that --help needs no plotting library

    epochs = options.epochs if options.epochs is not None else 10 if options.quick else demo.EPOCHS
    try:
        rows = demo.run(options.output, epochs, options.seed, size=demo.QUICK if options.quick else demo.FULL)
    except ProbhardError as error:
        print(f"probhard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if len(rows) == len(demo.NAMES) else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
