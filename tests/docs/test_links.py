"""Links between pages, pictures and results point to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import PAGES, ROOT, without_code


def links(page: Path) -> list[str]:
    """Targets of links and pictures that stay within the repository."""
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_files_that_exist(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_leads_to_every_guide() -> None:
    linked = {(ROOT / target).resolve() for target in links(ROOT / "README.md")}
    guides = {page for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"}
    assert guides <= linked
