"""Result lines under several writers, and grids of work whose workers may die."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.grid import Grid
from experiments.records import Records

import probhard as ph
from waiting import wait_for

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path / "results" / "lines.jsonl", ("name", "seed"))


def line(name: str, seed: int = 0, **more) -> dict:
    return {"name": name, "seed": seed, **more}


def test_lines_are_read_as_they_were_written(records):
    assert records.read() == []
    assert not records.has(line("a"))
    records.append(line("a", mse=1 / 3, bad=float("nan")), line("b", scores=[1 / 3, 2], deep={"x": (float("inf"),)}))
    records.append(line("c", tensor=torch.tensor(2.0), array=np.arange(2.0), count=np.int64(3)))
    first, second, third = records.read()
    assert first == line("a", mse=0.333333333, bad=None)
    assert second == line("b", scores=[0.333333333, 2], deep={"x": [None]})
    assert third == line("c", tensor=2.0, array=[0.0, 1.0], count=3)
    assert all(json.loads(text) for text in records.path.read_text().splitlines())


def test_the_last_line_of_a_key_counts(records):
    records.append(line("a", mse=1), line("b", mse=1))
    records.append(line("a", mse=2), line("a", seed=1, mse=3))
    assert records.read() == [line("a", mse=2), line("b", mse=1), line("a", seed=1, mse=3)]
    assert records.has(line("a"), line("b"))
    assert not records.has(line("a"), line("b", seed=1))
    assert records.count([[line("a")], [line("z")], [line("b"), line("z")], []]) == 2


def test_keys_are_compared_as_they_are_written(tmp_path):
    records = Records(tmp_path / "lines.jsonl", ("range", "rate"))
    key = {"range": (2, 3), "rate": 1 / 3}
    records.append({**key, "mse": 1})
    assert records.has(key)


@pytest.mark.parametrize("tail", ['{"name": "b", "se', '{"name": "b"}', "\x00\x00"])
def test_a_torn_last_line_is_survived(records, tail):
    records.append(line("a"))
    with open(records.path, "a") as file:
        file.write(tail)
    assert records.read() == [line("a")]
    assert not records.has(line("b"))
    records.append(line("b"), line("c"))
    assert records.read() == [line("a"), line("b"), line("c")]


def test_a_whole_last_line_without_its_end_is_kept(records):
    records.append(line("a"))
    records.path.write_text(records.path.read_text() + json.dumps(line("b")))
    assert records.read() == [line("a"), line("b")]
    records.append(line("c"))
    assert records.read() == [line("a"), line("b"), line("c")]


def test_a_bad_line_in_the_middle_is_named(records):
    records.append(line("a"))
    with open(records.path, "a") as file:
        file.write('\n{"name": "b"}\n')
    records.append(line("c"))
    with pytest.raises(ph.ParameterError, match=r"Line 3 of .*lines.jsonl is not a result"):
        records.read()


def _append_many(records: Records, name: str) -> None:
    for seed in range(40):
        records.append(line(name, seed, text="x" * 3000), line(name + "2", seed))


def test_several_processes_append_whole_lines(records):
    processes = [FORK.Process(target=_append_many, args=(records, name)) for name in "abcd"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(records.path.read_text().splitlines()) == len(records.read()) == 320


def _hold(records: Records, ready: Path) -> None:
    with records.claim("unit") as mine:
        assert mine
        ready.touch()
        time.sleep(120)


def test_a_claim_ends_with_its_process(records, tmp_path):
    holder = FORK.Process(target=_hold, args=(records, tmp_path / "ready"))
    holder.start()
    wait_for(tmp_path / "ready")
    with records.claim("unit") as mine, records.claim("other") as other:
        assert (mine, other) == (False, True)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    for _ in range(2):
        with records.claim("unit") as mine:
            assert mine


WITHOUT_FCNTL = """
import sys, warnings
sys.modules["fcntl"] = None  # as on Windows
warnings.simplefilter("ignore")  # filelock says that it falls back to soft locks
from experiments.records import Records
records = Records(sys.argv[1], ("name", "seed"))
records.append({"name": "a", "seed": 0, "mse": 1}, {"name": "b", "seed": 0})
records.append({"name": "a", "seed": 0, "mse": 2})
with records.claim("unit") as mine, records.claim("unit") as again:
    assert (mine, again) == (True, False)
with records.claim("unit") as mine:
    assert mine
assert records.read() == records.compact() == [{"name": "a", "seed": 0, "mse": 2}, {"name": "b", "seed": 0}]
import benchmarks.runner
"""


def test_records_need_no_fcntl(records):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    for _ in range(2):  # no lock outlives the process
        subprocess.run([sys.executable, "-c", WITHOUT_FCNTL, records.path], cwd=root, env=environment, check=True)
    assert records.read() == [line("a", mse=2), line("b")]


def test_compacting_drops_superseded_lines_and_keeps_locks_out_of_the_results(records):
    assert records.compact() == []
    assert not records.path.parent.exists()
    records.append(line("a", mse=1), line("b"), line("a", mse=2))
    assert records.compact() == [line("a", mse=2), line("b")]
    assert [json.loads(text) for text in records.path.read_text().splitlines()] == records.read()
    written = records.path.stat().st_mtime_ns
    assert len(records.compact()) == 2
    assert records.path.stat().st_mtime_ns == written  # nothing left to drop
    with records.claim("unit"):
        assert sorted(path.name for path in records.path.parent.iterdir()) == ["lines.jsonl", "lines.work"]


def _compact_many(records: Records) -> None:
    for _ in range(40):
        records.compact()


def test_compacting_loses_no_line_of_other_writers(records):
    records.append(line("z"))
    processes = [FORK.Process(target=_append_many, args=(records, name)) for name in "ab"]
    processes.append(FORK.Process(target=_compact_many, args=(records,)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert len(records.read()) == 161


@dataclass(frozen=True)
class Work:
    """A unit that notes each of its runs, and may wait for a sign, die in another process, or fail."""

    name: str
    notes: Path
    waits: bool = False
    dies: bool = False
    fails: bool = False

    def expected(self) -> list[dict]:
        return [line(self.name, seed) for seed in range(2)]

    def run(self, folder: Path, progress: bool) -> list[dict]:
        assert folder.is_dir()
        with open(self.notes / self.name, "a") as file:
            file.write("x")
        if self.waits:
            wait_for(self.notes / "died")
        if self.dies and multiprocessing.parent_process() is not None:
            (folder / "checkpoint").touch()
            (self.notes / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.dies:
            assert (folder / "checkpoint").exists()  # what the other process has left
        if self.fails:
            raise RuntimeError("this unit fails")
        return self.expected()

    @property
    def runs(self) -> int:
        note = self.notes / self.name
        return len(note.read_text()) if note.exists() else 0


def test_units_are_done_once_and_resumed(records, tmp_path, capfd):
    units = [Work(name, tmp_path) for name in "abc"]
    failing = [*units[:1], Work("b", tmp_path, fails=True), *units[2:]]
    with pytest.raises(RuntimeError, match="this unit fails"):
        Grid(failing, records).run(progress=False)
    assert capfd.readouterr().err == ""
    assert Grid(units, records).done() == 1
    assert Grid(units, records).run(progress=True) == 3
    assert "3/3" in capfd.readouterr().err
    assert [unit.runs for unit in units] == [1, 2, 1]
    assert not records.folder("a").exists()
    assert Grid(units, records).run(progress=False) == 3
    assert [unit.runs for unit in units] == [1, 2, 1]


def test_a_unit_with_half_of_its_lines_is_done_again(records, tmp_path):
    unit = Work("a", tmp_path)
    records.append(unit.expected()[0])
    assert Grid([unit], records).done() == 0
    assert Grid([unit], records).run(progress=False) == 1
    assert unit.runs == 1


def test_a_unit_claimed_elsewhere_is_left_alone(records, tmp_path):
    unit = Work("a", tmp_path)
    with records.claim("a"):
        assert Grid([unit], records).run(progress=False) == 0
    assert unit.runs == 0


def _walk(grid: Grid) -> None:
    grid.run(progress=False)


def test_several_processes_share_the_work(records, tmp_path):
    units = [Work(f"unit-{index}", tmp_path) for index in range(40)]
    processes = [FORK.Process(target=_walk, args=(Grid(units, records),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [unit.runs for unit in units] == [1] * 40
    assert len(records.path.read_text().splitlines()) == 80


def test_the_unit_of_a_killed_worker_is_taken_by_another(records, tmp_path):
    units = [Work("waits", tmp_path, waits=True), Work("dies", tmp_path, dies=True), Work("plain", tmp_path)]
    assert Grid(units, records).run(workers=2, progress=False) == 3
    assert [unit.runs for unit in units] == [1, 2, 1]


def test_a_unit_that_fails_in_a_worker_is_an_error_here(records, tmp_path, capfd):
    units = [Work("waits", tmp_path, waits=True), Work("dies", tmp_path, dies=True, fails=True)]
    with pytest.raises(RuntimeError, match="this unit fails"):
        Grid(units, records).run(workers=2, progress=False)
    assert Grid(units, records).done() == 1
