"""Executors with killed processes, and grids of work on them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import pytest
from experiments.grid import Grid
from experiments.records import Records

import probhard as ph
from probhard.errors import MissingExtraError
from probhard.executors import Executor, executor
from waiting import wait_for, wait_until_gone


def note(path: Path) -> None:
    with open(path, "a") as file:
        file.write("x")


def calls(path: Path) -> int:
    return len(path.read_text()) if path.exists() else 0


@dataclass(frozen=True)
class Work:
    """A unit that records its runs, and waits for another's death, dies in its first run, or fails."""

    name: str
    notes: Path
    kind: str = "plain"

    def expected(self) -> list[dict]:
        return [{"name": self.name, "seed": seed} for seed in range(2)]

    def run(self, folder: Path, progress: bool) -> list[dict]:
        note(self.notes / self.name)
        if self.kind == "waits":
            wait_for(self.notes / "died")
        if self.kind == "fails":
            raise ph.ParameterError("This unit fails.", "It was told to.", "Tell it not to.")
        if self.kind == "dies":
            if not (folder / "checkpoint").exists():
                (folder / "checkpoint").touch()
                (self.notes / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            assert calls(self.notes / self.name) == 2
        return self.expected()


def tasks(notes: Path) -> tuple[Callable, Callable]:
    """Functions pickled by value: one that may fail, and one that kills its process in the first call with 2."""

    def square(x: float) -> float:
        if x < 0:
            raise ValueError(f"got {x}")
        return x * x

    def fatal(x: int) -> int:
        while x == 1 and not (notes / "2").exists():
            time.sleep(0.01)  # running when the other is killed
        first = not (notes / str(x)).exists()
        with open(notes / str(x), "a") as file:
            file.write("x")
        if x == 2 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return -x

    return square, fatal


def check_tasks(pool: Executor, notes: Path) -> None:
    """All tasks are done, although one process was killed."""
    square, fatal = tasks(notes)
    assert sorted(pool.unordered(square, range(5))) == [(x, x * x) for x in range(5)]
    assert list(pool.map(square, [3, 1, 2])) == [9, 1, 4]
    assert sorted(pool.unordered(fatal, [1, 2, 3])) == [(1, -1), (2, -2), (3, -3)]
    assert [calls(notes / str(x)) for x in (1, 2, 3)] == [1, 2, 1]  # nothing else ran twice
    assert pool.submit(sum, pool.send([1, 2]), 4).result() == 7
    with pytest.raises(ValueError, match=r"^got -1$") as caught:
        list(pool.unordered(square, [1, -1]))
    assert type(caught.value) is ValueError


def check_grid(notes: Path, **options) -> None:
    """Every line is there once although a worker was killed, claimed units are left alone, errors are raised here."""
    notes.mkdir()
    records = Records(notes / "lines.jsonl", ("name", "seed"))
    kinds = {"a": "waits", "b": "dies", "c": "plain", "d": "plain"}
    units = [Work(name, notes, kind) for name, kind in kinds.items()]
    with records.claim("d") as mine:
        assert mine
        assert Grid(units, records).run(2, progress=False, **options) == 3
    assert Grid(units, records).run(2, progress=False, **options) == 4
    lines = [(line["name"], line["seed"]) for line in records.read()]
    assert sorted(lines) == [(name, seed) for name in "abcd" for seed in range(2)]
    assert len(records.path.read_text().splitlines()) == 8
    assert [calls(notes / name) for name in "abcd"] == [1, 2, 1, 1]
    failing = Grid([*units, Work("e", notes, "fails")], records)
    with pytest.raises(ph.ParameterError, match="This unit fails"):
        failing.run(2, progress=False, **options)
    with records.claim("e") as mine:
        assert mine  # free again
    assert failing.done() == 4


def test_joblib_survives_a_killed_process(tmp_path):
    with executor("joblib", 2) as pool:
        check_tasks(pool, tmp_path)
        items = iter(range(10))
        assert next(pool.unordered(abs, items))[0] in (0, 1)
        assert next(items) == 2  # taken only when a worker is free


def test_joblib_gives_up_on_what_always_kills(tmp_path):
    path = tmp_path / "tries"
    deadly = f"import os; open({str(path)!r}, 'a').write('x'); os._exit(1)"
    with executor("joblib", 1, retries=1) as pool:
        with pytest.raises(BrokenProcessPool):
            list(pool.unordered(exec, [deadly]))
        assert calls(path) == 2
        assert pool.submit(abs, -3).result() == 3


def test_leaving_by_an_error_ends_the_processes(tmp_path):
    pool, path = executor("joblib", 1), tmp_path / "started"
    sleeping = pool.submit(exec, f"import pathlib, time; pathlib.Path({str(path)!r}).touch(); time.sleep(600)")
    later = pool.submit(abs, 1)
    wait_for(path)
    (process,) = [process for single in pool._all_pools for process in single._processes.values()]
    with pytest.raises(KeyError), pool:
        raise KeyError
    assert later.cancelled()
    assert isinstance(sleeping.exception(timeout=60), RuntimeError)
    wait_until_gone(process.pid)


def test_a_grid_on_joblib_loses_nothing(tmp_path):
    check_grid(tmp_path / "grid")


def test_a_grid_on_ray_loses_nothing(tmp_path):
    pytest.importorskip("ray")
    with executor("ray", 2):  # the grids join it
        check_grid(tmp_path / "grid", engine="ray")


def test_a_grid_on_dask_loses_nothing(tmp_path):
    pytest.importorskip("distributed")
    with executor("dask", 2) as pool:
        check_grid(tmp_path / "grid", engine="dask", address=pool._client.scheduler.address)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_clusters_survive_a_killed_worker(kind, package, tmp_path):
    pytest.importorskip(package)
    with executor(kind, 2) as pool:
        check_tasks(pool, tmp_path)


@pytest.mark.slow
def test_what_was_sent_to_dask_outlives_its_workers():
    pytest.importorskip("distributed")
    with executor("dask", 2) as pool:
        sent = pool.send(bytes(2**24))
        assert pool.submit(len, sent).result() == 2**24
        for process in pool._client.run(os.getpid).values():
            os.kill(process, signal.SIGKILL)
        assert pool.submit(len, sent).result(timeout=120) == 2**24


@pytest.mark.parametrize(("kind", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}.*probhard\[{kind}\]"):
        executor(kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "slurm"}, "executor='slurm' is not known"),
        ({"workers": 0}, "workers=0"),
        ({"retries": -1}, "retries=-1"),
        ({"address": "auto"}, "address='auto'"),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ph.ParameterError, match=message):
        executor(**options)
