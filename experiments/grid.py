"""A grid of experiments, unit by unit, over any number of processes.

Every process walks through the same list and takes the first unit that is neither done nor claimed. The result lines
alone say which units are done. Processes may therefore join or stop at any time.

Workers of a Ray or Dask cluster need not see that file. One process holds the claims, hands out units and writes the
lines that come back. A unit that ran twice counts once.
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
        """Identifies the unit; a valid file name."""

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of the lines that it will give."""

    def run(self, folder: Path, progress: bool) -> list[dict[str, Any]]:
        """Do the work, with checkpoints in ``folder``, and return the lines."""


@dataclass(frozen=True)
class Grid:
    """Units of work and the file of their results."""

    units: Sequence[Unit]
    records: Records

    def run(self, workers: int = 1, progress: bool = True, engine: str = "joblib", address: str | None = None) -> int:
        """Work until no unit is left to take.

        Args:
            workers: Processes of one thread each; with joblib, this process is one of them.
            progress: Show a bar.
            engine: One of ``executors.EXECUTORS``.
            address: Of a running Ray or Dask cluster; None starts one here.

        Returns:
            The number of units that are done.
        """
        if engine == "joblib":
            with executor(engine, workers, address, retries=0) as pool:
                others = [pool.submit(_work, self, False) for _ in range(workers - 1)]
                _work(self, progress)
                wait(others)
            if others:
                _work(self, progress)  # units of processes that died
        else:
            with executor(engine, workers, address) as pool:
                _hand_out(self, pool, progress)
        return self.done()

    def done(self) -> int:
        """Return how many units have all their lines."""
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
    """Run units that are neither done nor claimed in a pool; this process holds their claims meanwhile."""
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
    """Whether the unit is not done and now claimed, until ``claim`` is closed."""
    if records.has(*unit.expected()):
        return False
    return claim.enter_context(records.claim(unit.name)) and not records.has(*unit.expected())


def _run(unit: Unit, folder: Path, progress: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)  # several processes of one thread are faster than one process of several
    folder.mkdir(parents=True, exist_ok=True)
    return unit.run(folder, progress)


def _run_there(digest: str, unit: Unit) -> list[dict[str, Any]]:
    """Run a unit with checkpoints on the worker's own disk, for a second attempt on the same machine."""
    folder = Path(tempfile.gettempdir()) / f"probhard-{digest}-{unit.name}"
    lines = _run(unit, folder, False)
    shutil.rmtree(folder, ignore_errors=True)
    return lines
