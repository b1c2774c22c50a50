"""A grid of experiments, unit by unit, over any number of processes.

Every process walks through the same list and takes the first unit that is neither done nor claimed. What is done is
known from the result lines alone, so more processes may join, and any may be stopped, at any time.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from probhard.records import Records


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

    def run(self, workers: int = 1, progress: bool = True) -> int:
        """Work until nothing is left to take; returns the number of units that are done."""
        context = multiprocessing.get_context("spawn")
        others = [context.Process(target=_work, args=(self, False)) for _ in range(workers - 1)]
        try:
            for process in others:
                process.start()
            _work(self, progress)
            for process in others:
                process.join()
            if others:
                _work(self, progress)  # what a process that died has left
        finally:
            for process in others:
                if process.pid is not None:
                    process.terminate()
                    process.join()
        return self.done()

    def done(self) -> int:
        """How many units have all their lines."""
        return self.records.count([unit.expected() for unit in self.units])


def _work(grid: Grid, progress: bool) -> None:
    """Walk through the units once and do those that are neither done nor claimed."""
    torch.set_num_threads(1)  # several processes of one thread each beat one process of several threads
    records = grid.records
    bar = tqdm(total=len(grid.units), initial=grid.done(), disable=not progress, unit="unit", file=sys.stderr)
    with bar:
        for unit in grid.units:
            if records.has(*unit.expected()):
                continue
            with records.claim(unit.name) as mine:
                if not mine or records.has(*unit.expected()):
                    continue
                bar.set_description(unit.name)
                folder = records.folder(unit.name)
                folder.mkdir(parents=True, exist_ok=True)
                records.append(*unit.run(folder, progress))
                shutil.rmtree(folder, ignore_errors=True)
            bar.n = grid.done()
            bar.refresh()
