"""The version stands in one place, the changelog has a head, and the workflows and hooks can be read."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

import probhard
from docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, flags=re.M) == [probhard.__version__]


def test_the_changelog_starts_with_what_is_not_released() -> None:
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert heads[0] == "Unreleased"
    assert any(head.split()[0] == probhard.__version__ for head in heads)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid(path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) >= {"name", True, "permissions", "jobs"}  # YAML reads the key "on" as true
    for job in workflow["jobs"].values():
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_hooks_use_the_installed_tools() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
    assert {hook["id"] for hook in repo["hooks"]} == {"ruff-check", "ruff-format", "mypy", "lint-imports"}
    recipes = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in repo["hooks"]:
        assert hook["id"] == "lint-imports" or f"\t{hook['entry']}\n" in recipes
