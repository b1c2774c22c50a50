"""Kills at random points and disturbed disks: a few of each here, all of them under ``make chaos``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def trial(module: str, folder: Path, *options: str) -> list[dict]:
    """Run trials in a process of their own, which forks; returns their lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-W", "ignore", "-m", f"experiments.reliability.{module}", "--output", str(folder)]
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "reliability-load.jsonl").read_text().splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_a_few_kills(tmp_path: Path):
    lines = trial("kills", tmp_path, "--count", "4", "--commands", "project,train")
    assert [line["command"] for line in lines] == ["project", "train"] * 2
    assert {line["signal"] for line in lines} == {"SIGKILL", "SIGTERM"}
    assert all(line["same"] and line["hit"] for line in lines)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_a_few_disks(tmp_path: Path):
    lines = trial("disks", tmp_path, "--commands", "project")
    assert lines
    assert all(line["message"].startswith("probhard: ") for line in lines)


@pytest.mark.slow
def test_all_kills(tmp_path: Path):
    assert len(trial("kills", tmp_path, "--count", "50")) == 50


@pytest.mark.slow
def test_all_disks(tmp_path: Path):
    assert trial("disks", tmp_path)


@pytest.mark.slow
def test_load(tmp_path: Path):
    lines = {line["kind"]: line for line in trial("load", tmp_path, "--seconds", "60", "--calls", "10")}
    assert lines["pool"]["different"] == 0
    assert lines["training"]["growth_megabytes"] < 20
