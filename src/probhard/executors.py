"""Independent tasks on the processes of this machine (joblib's loky), on Ray or on Dask, behind one interface.

An executor is one of ``concurrent.futures``, with results as they come and tasks that survive their process:

    with executor("ray", workers=8, address="auto") as pool:
        for item, result in pool.unordered(function, items): ...

A task whose process is killed is started again. It must therefore be able to run twice: its effect is what it returns.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import Executor as Futures
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

from probhard._util import memory
from probhard.errors import ParameterError, check_choice, optional

EXECUTORS = ("joblib", "ray", "dask")
RETRIES = 3
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
Item = TypeVar("Item")
Result = TypeVar("Result")


def executor(kind: str = "joblib", workers: int = 1, address: str | None = None, retries: int = RETRIES) -> Executor:
    """Open an executor; leave it as a context manager.

    Args:
        kind: One of ``EXECUTORS``.
        workers: Tasks at a time, of one thread each.
        address: Of a running Ray or Dask cluster; None starts one on this machine.
        retries: How often a task is started again after its process was killed; a cluster at an address may have
            a limit of its own.
    """
    check_choice("executor", kind, EXECUTORS)
    if workers < 1 or retries < 0 or (address is not None and kind == "joblib"):
        raise ParameterError(
            f"Got the executor {kind!r} with workers={workers}, retries={retries} and address={address!r}.",
            "Somebody has to do the work, and the processes of joblib are on this machine.",
            "Pass workers >= 1 and retries >= 0, and an address for ray or dask only.",
        )
    if kind == "joblib":
        return JoblibExecutor(workers, retries)
    return (RayExecutor if kind == "ray" else DaskExecutor)(workers, address, retries)


class Executor(Futures):
    """Runs functions elsewhere; ``submit`` and ``map`` are those of ``concurrent.futures``."""

    workers: int

    @abstractmethod
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start ``function(*args, **kwargs)`` when a worker is free."""

    def send(self, value: Any) -> Any:
        """A stand-in for ``value``, usable as the function or an argument of ``submit``, that travels only once."""
        return value

    def unordered(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Items with their results, as they come; an item is taken only when a worker is free for it."""
        there, source = self.send(function), iter(items)
        running: dict[Future[Result], Item] = {}
        while True:
            for item in islice(source, self.workers - len(running)):
                running[self.submit(there, item)] = item
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


class JoblibExecutor(Executor):
    """Processes of this machine. Each is a pool of its own, so one that is killed takes no other's work with it."""

    def __init__(self, workers: int, retries: int) -> None:
        self.workers, self.retries = workers, retries
        self._loky = importlib.import_module("joblib.externals.loky")
        self._threads = ThreadPoolExecutor(workers)
        self._pools: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made: list[Any] = []
        self._lock, self._ending = Lock(), False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._run, function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            pool = self._pools.get_nowait()
        except queue.Empty:
            pool = self._pool()
        try:
            for left in reversed(range(self.retries + 1)):
                try:
                    return pool.submit(function, *args, **kwargs).result()
                except self._loky.process_executor.TerminatedWorkerError:
                    pool = self._pool()
                    if not left:
                        raise
        finally:
            self._pools.put(pool)

    def _pool(self) -> Any:
        with self._lock:
            if self._ending:
                raise CancelledError
            pool = self._loky.ProcessPoolExecutor(1, env=THREADS | memory.environment())
            self._made.append(pool)
            return pool

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, after what is under way or at once."""
        with self._lock:
            self._ending = not wait
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for pool in self._made:
            pool.shutdown(wait=wait, kill_workers=not wait)


class RayExecutor(Executor):
    """Tasks on a Ray cluster, each on one CPU; Ray starts those of a killed worker or a lost machine again."""

    def __init__(self, workers: int, address: str | None, retries: int) -> None:
        self.workers, self._ray = workers, _require("ray")
        self._mine = not self._ray.is_initialized()
        if self._mine:
            found = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # modules of this program
            local = {"num_cpus": workers, "include_dashboard": False, "runtime_env": found}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = local if address is None else {}
            self._ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
        self._call = self._ray.remote(num_cpus=1, max_retries=retries)(_call)
        self._running: dict[Future[Any], Any] = {}

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._running[future] = self._call.remote(function, *args, **kwargs)
        self._running[future].future().add_done_callback(lambda done: self._pass(done, future))
        return future

    def _pass(self, done: Future[Any], future: Future[Any]) -> None:
        """Hand on a result, or the error that a task raised without Ray's wrapping."""
        del self._running[future]
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            cause = getattr(error, "cause", None)
            future.set_exception(cause if isinstance(cause, BaseException) else error)

    def send(self, value: Any) -> Any:
        return self._ray.put(value)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here."""
        if not wait:
            for reference in list(self._running.values()):
                self._ray.cancel(reference, force=True)
        if self._mine:
            self._ray.shutdown()


class DaskExecutor(Executor):
    """Tasks on a Dask cluster; its scheduler gives those of a killed worker to another."""

    def __init__(self, workers: int, address: str | None, retries: int) -> None:
        self.workers, distributed = workers, _require("distributed", "dask")
        if address is None:
            dask = importlib.import_module("dask")
            with dask.config.set({"distributed.scheduler.allowed-failures": retries}):
                self._cluster = distributed.LocalCluster(
                    workers, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
        else:
            self._cluster = None
        self._client = distributed.Client(address or self._cluster, set_as_default=False)
        self._futures = self._client.get_executor(pure=False)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._futures.submit(_call, function, *args, **kwargs)

    def send(self, value: Any) -> Any:
        # a task's result, unlike scattered data, is made again when the workers that held it are lost
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # it travels only once
            return self._client.submit(_same, value, pure=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here."""
        self._futures.shutdown(wait)
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may have been sent before."""
    return function(*args, **kwargs)


def _same(value: Any) -> Any:
    return value


def _require(module: str, extra: str | None = None) -> Any:
    """An optional package, or an error that names the extra that brings it."""
    return optional(module, extra or module, f"The executor {extra or module!r}")
