"""The command behind ``probhard bench``: what it imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RENDER = """
import sys
from pathlib import Path
sys.modules["gluonts"] = sys.modules["lightning"] = None
from experiments.command import run
from experiments.table import Request
for message in run(Request(sys.argv[1], Path(sys.argv[2]), render=True)):
    print(message)
"""


@pytest.mark.parametrize("table", ["forecasting", "conformal", "timing", "first-order", "alarms", "speed"])
def test_pages_without_gluonts_and_lightning(tmp_path: Path, table: str) -> None:
    for path in (ROOT / "results").glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    arguments = [sys.executable, "-c", RENDER, table, str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Written" in done.stdout
