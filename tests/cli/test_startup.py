"""The command starts without the libraries that it does not need, and on systems without Unix modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probhard.cli.forecast import METHOD_NAMES
from probhard.method import METHODS

HEAVY = {
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "polars",
    "narwhals",
    "matplotlib",
    "lightning",
    "gluonts",
    "h5py",
    "zarr",
}
COMMANDS = ("demo", "bench", "project", "reconcile", "forecast", "train", "predict")
PROGRAM = "import sys; from probhard.cli import main; status = main(sys.argv[1:]); print(status, *sys.modules)"
UNIX = ("fcntl", "resource", "grp", "pwd", "termios")
WITHOUT_UNIX = f"""
import os, signal, sys
for name in {UNIX}:
    sys.modules[name] = None
for module, name in ((os, "sched_getaffinity"), (os, "fork"), (signal, "SIGUSR1"), (signal, "SIGALRM")):
    if hasattr(module, name):
        delattr(module, name)
from probhard.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = run(PROGRAM, *arguments)
    assert done.returncode == 0, done.stderr
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert "probhard.cli" in modules
    assert not HEAVY & set(modules)


def test_the_version_loads_no_torch() -> None:
    done = run("import sys, probhard; print(probhard.__version__, *sys.modules)")
    assert not HEAVY & set(done.stdout.split())


def test_names_of_methods() -> None:
    assert tuple(METHODS) == METHOD_NAMES


def test_commands_without_unix_modules(tmp_path: Path) -> None:
    done = run(WITHOUT_UNIX, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "reconcile" in done.stdout
    source = tmp_path / "forecasts.csv"
    source.write_text("unique_id,ds,ETS\nTotal,1,7\nTotal/a,1,2\nTotal/b,1,3\n")
    done = run(WITHOUT_UNIX, "reconcile", str(source))
    assert done.returncode == 0, done.stderr
    assert "all feasible" in done.stdout
    assert source.with_name("forecasts-reconciled.csv").exists()
