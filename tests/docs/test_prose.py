"""No sentence of the README and the guides is longer than 35 words; code and tables are not counted."""

from __future__ import annotations

import re

import pytest

from docs.pages import PAGES, ROOT, without_code

LONGEST = 35
GUIDES = [page for page in PAGES if page.name != "CONTRIBUTING.md"]


def sentences(text: str) -> list[str]:
    """Sentences end at ``.!?:`` and a space, at blank lines, and where a list's next item starts."""
    text = re.sub(r"^[ \t]*\|.*$", "", without_code(text), flags=re.M)
    pieces = re.split(r"(?<=[.!?:])\s+|\n\s*\n|^\s*(?:[-*]|\d+\.)\s+|^#+ .*$", text, flags=re.M)
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def test_sentences_are_counted() -> None:
    text = "# Head\nOne two. Three:\n- four\n- five\n\n| six |\n```\nseven. eight\n```\nnine"
    assert sentences(text) == ["One two.", "Three:", "four", "five", "nine"]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page) -> None:
    assert [s for s in sentences(page.read_text()) if len(s.split()) > LONGEST] == []
