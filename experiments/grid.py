"""A grid of experiments, unit by unit, over any number of processes.

Every process walks through the same list and takes the first unit that is neither done nor claimed. What is done is
known from the result lines alone, so more processes may join, and any may be stopped, at any time.

Workers of a Ray or Dask cluster need not see that file: one process, with the claims, hands out units and writes the
lines that come back, so that a unit which ran twice still counts once.
"""

from __future__ import annotations

import getpass
import hashlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from experiments.records import Records
from probhard.executors import Executor, executor


class Unit(Protocol):
    """A piece of work that gives one or more result lines."""

    @property
    def name(self) -> str:
        """Tells it from the others; fit for a file name."""

    def expected(self) -> list[dict[str, Any]]:
        """The key fields of the lines it will give."""

    def run(self, folder: Path, progress: bool) -> list[dict[str, Any]]:
        """Do the work, with checkpoints in a folder, and return the lines."""


@dataclass(frozen=True)
class Grid:
    """Units of work and the file of their results."""

    units: Sequence[Unit]
    records: Records

    def run(self, workers: int = 1, progress: bool = True, engine: str = "joblib", address: str | None = None) -> int:
        """Work until nothing is left to take; returns the number of units that are done.

        Args:
            workers: Units at a time, each in a process of one thread; one of joblib's is this process.
            progress: Show a bar.
            engine: One of ``executors.EXECUTORS``.
            address: Of a running Ray or Dask cluster; None starts one here.
        """
        if engine == "joblib":
            with executor(engine, workers, address, retries=0) as pool:
                others = [pool.submit(_work, self, False) for _ in range(workers - 1)]
                _work(self, progress)
                wait(others)
            if others:
                _work(self, progress)  # what a process that died has left
        else:
            with executor(engine, workers, address) as pool:
                _hand_out(self, pool, progress)
        return self.done()

    def done(self) -> int:
        """How many units have all their lines."""
        return self.records.count([unit.expected() for unit in self.units])


def _bar(grid: Grid, progress: bool) -> Any:
    return tqdm(total=len(grid.units), initial=grid.done(), disable=not progress, unit="unit", file=sys.stderr)


def _work(grid: Grid, progress: bool) -> None:
    """Walk through the units once and do those that are neither done nor claimed."""
    records = grid.records
    with _bar(grid, progress) as bar:
        for unit in grid.units:
            with ExitStack() as claim:
                if _taken(records, unit, claim):
                    bar.set_description(unit.name)
                    folder = records.folder(unit.name)
                    records.append(*_run(unit, folder, progress))
                    shutil.rmtree(folder, ignore_errors=True)
                    bar.n = grid.done()
                    bar.refresh()


def _hand_out(grid: Grid, pool: Executor, progress: bool) -> None:
    """Have the units that are neither done nor claimed done elsewhere, claimed here meanwhile."""
    records = grid.records
    claims: dict[str, ExitStack] = {}

    def free() -> Iterator[Unit]:
        for unit in grid.units:
            claim = ExitStack()
            if _taken(records, unit, claim):
                claims[unit.name] = claim
                yield unit
            else:
                claim.close()

    place = f"{getpass.getuser()} {socket.gethostname()} {records.path.resolve()}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    try:
        with _bar(grid, progress) as bar:
            for unit, lines in pool.unordered(partial(_run_there, digest), free()):
                records.append(*lines)
                claims.pop(unit.name).close()
                bar.n = grid.done()
                bar.refresh()
    finally:
        for claim in claims.values():
            claim.close()


def _taken(records: Records, unit: Unit, claim: ExitStack) -> bool:
    """Whether the unit is to be done and now claimed, until ``claim`` is closed."""
    if records.has(*unit.expected()):
        return False
    return claim.enter_context(records.claim(unit.name)) and not records.has(*unit.expected())


def _run(unit: Unit, folder: Path, progress: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)  # several processes of one thread each beat one process of several threads
    folder.mkdir(parents=True, exist_ok=True)
    return unit.run(folder, progress)


def _run_there(digest: str, unit: Unit) -> list[dict[str, Any]]:
    """Run a unit with checkpoints on the worker's own disk, where a second attempt may find them."""
    folder = Path(tempfile.gettempdir()) / f"probhard-{digest}-{unit.name}"
    lines = _run(unit, folder, False)
    shutil.rmtree(folder, ignore_errors=True)
    return lines
