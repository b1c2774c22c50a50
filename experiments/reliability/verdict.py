"""Where trials of commands and of load keep their lines, and how they report those that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.records import Records

KEYS = ("kind", "case")
FILE = "reliability-load.jsonl"


def kept(folder: Path) -> Records:
    """The records of all such trials in a folder of results."""
    return Records(folder / FILE, KEYS)


def conclude(lines: Sequence[dict[str, Any]], passed: Callable[[dict[str, Any]], bool], what: str, folder: Path) -> int:
    """Keep the lines of all trials and print those that failed.

    Args:
        lines: One for each trial.
        passed: Whether a trial passed, of its line.
        what: The trials in the plural, for the message.
        folder: Of the results.

    Returns:
        The exit status: 1 if a trial failed.
    """
    kept(folder).append(*lines)
    failed = [line for line in lines if not passed(line)]
    print(f"{len(lines)} {what}, {len(failed)} failed.")
    for line in failed:
        print(line)
    return 1 if failed else 0
