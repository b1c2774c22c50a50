"""Atomic writes: whole files or the ones before, and nothing left of killed writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from probhard._util.atomic import replacing, replacing_parts, write_text

WRITER = """
import sys, time
from pathlib import Path
from probhard._util.atomic import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_cleans_up(tmp_path: Path):
    path = tmp_path / "a[1].txt"
    write_text(path, "old")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    write_text(path, "meanwhile")  # another writer does not disturb one that is at work
    assert len(list(tmp_path.glob("*.partial"))) == 1
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    assert path.read_text() == "meanwhile"
    assert len(list(tmp_path.glob("*.partial"))) == 1
    write_text(path, "new")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "new"


def test_an_error_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(FileNotFoundError), replacing(path) as partial:
        partial.write_text((tmp_path / "missing").read_text())
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path):
    parts = ("data", "main")
    with replacing_parts(tmp_path / "model", parts) as new:
        (new / "data").mkdir()
        (new / "data" / "a").write_text("1")
        (new / "main").write_text("1")
    (tmp_path / "model" / "mine").write_text("kept")
    with pytest.raises(FileNotFoundError), replacing_parts(tmp_path / "model", parts) as new:
        (new / "main").write_text((tmp_path / "missing").read_text())
    assert (tmp_path / "model" / "main").read_text() == "1"
    assert (tmp_path / "model" / "data" / "a").read_text() == "1"
    with replacing_parts(tmp_path / "model", parts) as new:
        (new / "main").write_text("3")
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == {"main": "3", "mine": "kept"}
