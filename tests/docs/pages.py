"""The pages of the documentation, for the tests of this folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
