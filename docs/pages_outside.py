"""MkDocs hook: files outside ``docs/`` become pages of the site, and links are those of the repository.

Pages are written for a reader of the repository, so that their links are paths between its files. The site has another
root: ``docs/X`` is ``X`` there, ``README.md`` is ``index.md``, and all else keeps its path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "results/**/*.md", "results/**/*.png")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs/``."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            if "quick" not in place.split("/"):
                files.append(File.generated(config, in_site(place), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    return relinked(markdown, page.file.src_uri)


def in_site(place: str) -> str:
    """The path in the site of a file of the repository."""
    return "index.md" if place == "README.md" else place.removeprefix("docs/")


def in_repository(place: str) -> str:
    """The path in the repository of a file of the site."""
    if place == "index.md":
        return "README.md"
    return place if (ROOT / place).exists() else f"docs/{place}"


def relinked(markdown: str, place: str) -> str:
    """The text of the page at ``place`` in the site, with its links as the site has them."""
    here = posixpath.dirname(in_repository(place))

    def link(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        file = in_site(posixpath.normpath(posixpath.join(here, target)))
        return before + posixpath.relpath(file, posixpath.dirname(place) or ".") + after

    return LINK.sub(link, markdown)
