"""Fits of many series in several processes.

Results do not depend on the number of processes. Series of a process that dies are forecast by seasonal naive, like
those that a model cannot be fitted to. If the run is stopped, its processes are ended before the error goes on.
"""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard.forecasting.members.plain import to_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from probhard.forecasting.members.series import SeriesModel

CHUNKS = 4  # of series for each process

Task = tuple["SeriesModel", list[np.ndarray], int, tuple[int, ...]]


def run_series(
    model: SeriesModel, columns: Sequence[np.ndarray], horizon: int, origins: tuple[int, ...], jobs: int
) -> list[Any]:
    """Forecast all series.

    Args:
        model: How one series is fitted.
        columns: The series, (T,) each.
        horizon: Number of steps.
        origins: Past origins.
        jobs: Number of processes.

    Returns:
        For each series its forecasts, the fitted model as plain values, and whether it could be fitted; None if its
        process died.
    """
    if jobs < 2 or len(columns) <= jobs:
        return run_part((model, list(columns), horizon, origins))
    count = CHUNKS * jobs
    parts = [list(columns[k::count]) for k in range(count)]
    made: list[Any] = [None] * len(columns)
    with _processes(jobs) as pool:
        futures = [_submitted(pool, (model, part, horizon, origins)) for part in parts]
        for k, future in enumerate(futures):
            try:
                if future is None:
                    raise BrokenProcessPool
                made[k::count] = future.result()
            except BrokenProcessPool:
                made[k::count] = [(model.stand_in(values, horizon, origins), None, None) for values in parts[k]]
    return made


def run_part(task: Task) -> list[Any]:
    """Forecast some series in this process."""
    model, columns, horizon, origins = task
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        runs = [model.run(values, horizon, origins) for values in columns]
    return [(results, to_plain(final), fitted) for results, final, fitted in runs]


def _submitted(pool: ProcessPoolExecutor, task: Task) -> Future[list[Any]] | None:
    """Hand a task to the pool; None if a process has died already."""
    try:
        return pool.submit(run_part, task)
    except BrokenProcessPool:
        return None


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes, which are ended if the body is left by an error."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
