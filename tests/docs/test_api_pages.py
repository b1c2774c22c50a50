"""The API reference: every public name is on a page, and no page names what is not there."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import probhard
from docs.pages import ROOT

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
SHOWN = re.findall(r"^::: (\S+)", TEXT, flags=re.M)
ROOMS = ("laws", "constraints", "projection", "corrections", "tangent", "rows", "solvers", "io", "pde", "forecasting")


def resolved(name: str) -> Any:
    """A module, or an attribute of one."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(import_module(module), attribute)


@pytest.mark.parametrize("name", SHOWN)
def test_pages_name_what_is_there(name: str) -> None:
    if name.startswith("probhard.forecasting"):
        pytest.importorskip("gluonts")
    assert resolved(name).__doc__


def test_every_room_has_a_page() -> None:
    rooms = {
        module.name
        for module in pkgutil.iter_modules(probhard.__path__)
        if module.ispkg and not module.name.startswith("_")
    }
    assert rooms - {"cli"} == set(ROOMS)
    assert {page.stem for page in PAGES} == {"index", *ROOMS}


@pytest.mark.parametrize("package", ["probhard", *(f"probhard.{room}" for room in ROOMS)])
def test_every_public_name_is_on_a_page(package: str) -> None:
    if package == "probhard.forecasting":
        pytest.importorskip("gluonts")
    modules = [resolved(name) for name in SHOWN if isinstance(resolved(name), type(re))]
    for name in getattr(import_module(package), "__all__", []):
        value = getattr(import_module(package), name)
        listed = any(shown.endswith(f".{name}") for shown in SHOWN)
        home = getattr(value, "__module__", None) in {module.__name__ for module in modules}
        assert listed or home or f"`{name}`" in TEXT, name


def test_the_site_lists_every_guide() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {Path(page).relative_to(ROOT / 'docs').as_posix()}\n" in text
