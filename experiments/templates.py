"""Result pages from Markdown templates.

A template lies in ``pages/`` beside the code that fills it. Its ``{placeholders}`` follow ``str.format``. A block is
text between two blank lines; one that ends with a colon includes the next. A block is left out if it asks for a figure
that the result lines do not have. A heading without text is left out too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.table import Lines


class MissingFigureError(LookupError):
    """The result lines do not have a figure that a block of a page asks for."""


@dataclass(frozen=True)
class Figure:
    """A placeholder with an argument: ``{name:argument}`` becomes ``text(argument)``."""

    text: Callable[[str], str]

    def __format__(self, argument: str) -> str:
        return self.text(argument)


def of_lines(text: Callable[[Lines], str], lines: Lines) -> Figure:
    """A placeholder without an argument: the text of some result lines; without any, its block is left out."""

    def filled(_: str) -> str:
        if not lines:
            raise MissingFigureError("lines")
        return text(lines)

    return Figure(filled)


def fill(template: Path, values: Mapping[str, object]) -> str:
    """Return a page: the template with its placeholders replaced.

    Args:
        template: The Markdown file.
        values: Texts, numbers and ``Figure`` objects by the names of the placeholders; an empty text drops its block.

    Raises:
        KeyError: If a placeholder has no value.
    """
    blocks = []
    for block in re.split(r"(?<!:)\n\n", template.read_text().strip()):
        try:
            text = block.format_map(values).strip("\n")
        except MissingFigureError:
            continue
        if text:
            blocks.append(text)
    kept = [block for block, following in zip(blocks, [*blocks[1:], ""]) if not _is_bare(block, following)]
    return "\n\n".join(kept) + "\n"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        names: Titles of the columns.
        rows: Cells of every row.
    """
    head = [f"| {' | '.join(names)} |", f"|---|{'---|' * (len(names) - 1)}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _is_bare(block: str, following: str) -> bool:
    """Whether a block is a heading with no text before the next heading of its level or above."""
    own, other = _level(block), _level(following)
    return bool(own) and "\n" not in block and (not following or 0 < other <= own)


def _level(block: str) -> int:
    return len(block) - len(block.lstrip("#"))
