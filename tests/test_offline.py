"""No network at import or in tests, and the bill of materials of a release."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import offline

ROOT = Path(__file__).parents[1]
IMPORTS = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import offline
offline.guard()
import probhard
for module in pkgutil.walk_packages(probhard.__path__, "probhard."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from probhard.cli import main
main(["--help"])
print(len(sys.modules), offline.ATTEMPTS)
"""


def test_importing_every_module_opens_no_connection():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, str(ROOT / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" []")


def test_the_guard_refuses_other_machines_only():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        assert socket.getaddrinfo("localhost", 80)
    assert not offline.ATTEMPTS
    with socket.socket() as client, pytest.raises(OSError, match="no network"):
        client.connect(("192.0.2.1", 80))
    with pytest.raises(OSError, match="no network"):
        socket.getaddrinfo("example.org", 80)
    assert offline.ATTEMPTS == ["socket.connect 192.0.2.1", "socket.getaddrinfo example.org"]
    offline.ATTEMPTS.clear()


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    pytest.importorskip("packaging")
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "release" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_has_every_dependency(sbom: ModuleType, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sbom.py", "--output", str(tmp_path)])
    sbom.main()
    content = json.loads((tmp_path / "sbom.json").read_text())
    assert content["bomFormat"] == "CycloneDX"
    assert content["metadata"]["component"]["name"] == "probhard"
    names = {part["name"] for part in content["components"]}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {sbom.key(re.split(r"[<>=\\[;! ]", text)[0]) for text in declared} <= names
    for part in content["components"]:
        assert part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}"
        assert part["licenses"][0]["license"]["name"]
    known = {part["bom-ref"] for part in [content["metadata"]["component"], *content["components"]]}
    for node in content["dependencies"]:
        assert {node["ref"], *node["dependsOn"]} <= known
    torch = next(node for node in content["dependencies"] if node["ref"].startswith("pkg:pypi/torch@"))
    assert any(name.startswith("pkg:pypi/sympy@") for name in torch["dependsOn"])
    table = (tmp_path / "licences.md").read_text()
    assert table.count("\n|") == 2 + len(names) + 1
