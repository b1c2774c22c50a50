"""The runs behind the page of reliability: cases, peers on the first of them, damaged files; all resumable."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.records import Records
from experiments.reliability.peers import PEERS, beside, expresses
from experiments.reliability.readers import READERS, attempt
from experiments.reliability.recipes import numbered
from experiments.reliability.trial import COUNTS, broken, failed, trial

CASES, PEER_CASES, FILES = 10_000, 2_000, 500  # numbers of cases, of cases for peers, and of files for each reader
PIECE = 20  # cases in a piece of work
OURS = "cases"
READING = "reader "  # groups of files
GROUPS = (OURS, *PEERS, *(READING + name for name in READERS))

Piece = Callable[[], list[dict[str, Any]]]


def pieces(records: Records, groups: Sequence[str] = (), cases: int = CASES) -> Iterator[Piece]:
    """Pieces of work that are not done yet.

    Args:
        records: The result lines.
        groups: Some of ``GROUPS``; all if empty.
        cases: Number of cases; peers and readers take their share of it.
    """
    share = cases / CASES
    for group in groups or GROUPS:
        count = cases
        if group in PEERS:
            count = round(PEER_CASES * min(share, 1.0))
        elif group != OURS:
            count = round(FILES * share)
        done = {line["number"] for line in records.read() if line["group"] == group}
        left = [number for number in range(count) if number not in done]
        for start in range(0, len(left), PIECE):
            yield partial(_lines, group, left[start : start + PIECE])


def _lines(group: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    work = _case if group == OURS else _file if group.startswith(READING) else _peer
    return [{"group": group, "number": number} | work(group, number) for number in numbers]


def _case(group: str, number: int) -> dict[str, Any]:
    """Counts that are not 0, and what is needed to try a case again if it did not end well."""
    recipe = numbered(number)
    record = trial(recipe, compare=True)
    line = {"ordinary": recipe.ordinary, "parts": recipe.parts, "seconds": record["seconds"]}
    line |= {name: record[name] for name in COUNTS if record[name]}
    if broken(record) or failed(record) or record["refused"]:
        line |= {name: record.get(name) for name in ("raised", "why", "text", "refused", "bare") if record.get(name)}
    return line


def _peer(group: str, number: int) -> dict[str, Any]:
    recipe = numbered(number)
    line: dict[str, Any] = {"expressed": expresses(group, recipe), "ordinary": recipe.ordinary}
    return line | beside(group, recipe) if line["expressed"] else line


def _file(group: str, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        record = attempt(group.removeprefix(READING), number, Path(folder))
    return {name: value for name, value in record.items() if value is not None}
