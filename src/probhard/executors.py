"""One interface for independent tasks on local processes (joblib's loky), Ray or Dask.

An executor is one of ``concurrent.futures`` that also yields results as they are done and restarts killed tasks:

    with executor("ray", workers=8, address="auto") as pool:
        for item, result in pool.unordered(function, items): ...

A task whose process is killed runs again. Tasks must therefore have no effect but their result.
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
    """Open an executor, to be used as a context manager.

    Args:
        kind: One of ``EXECUTORS``.
        workers: Number of parallel tasks, of one thread each.
        address: Address of a running Ray or Dask cluster; None starts one on this machine.
        retries: How often a task runs again after its process was killed; an existing cluster may have its own limit.

    Raises:
        ParameterError: If the kind is unknown or an argument is out of range.
        MissingExtraError: If Ray or Dask is not installed.
    """
    check_choice("executor", kind, EXECUTORS)
    if workers < 1 or retries < 0 or (address is not None and kind == "joblib"):
        raise ParameterError(
            f"Got the executor {kind!r} with workers={workers}, retries={retries} and address={address!r}.",
            "At least one worker is needed, and joblib runs on this machine only.",
            "Pass workers >= 1 and retries >= 0, and an address for ray or dask only.",
        )
    if kind == "joblib":
        return JoblibExecutor(workers, retries)
    return (RayExecutor if kind == "ray" else DaskExecutor)(workers, address, retries)


class Executor(Futures):
    """Runs functions on workers; ``submit`` and ``map`` are those of ``concurrent.futures``."""

    workers: int

    @abstractmethod
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` when a worker is free; return its future."""

    def send(self, value: Any) -> Any:
        """Send ``value`` to the workers once; return a reference to pass to ``submit`` as function or argument."""
        return value

    def unordered(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield items with their results as they are done.

        Args:
            function: Called with each item.
            items: Taken only when a worker is free.

        Raises:
            Exception: The first error that a task raised.
        """
        sent, source = self.send(function), iter(items)
        running: dict[Future[Result], Item] = {}
        while True:
            for item in islice(source, self.workers - len(running)):
                running[self.submit(sent, item)] = item
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=error_type is None, cancel_futures=error_type is not None)


class JoblibExecutor(Executor):
    """Processes of this machine, each in its own pool, so that a killed process loses no other's work.

    Args:
        workers: Number of processes.
        retries: How often a task runs again after its process was killed.
    """

    def __init__(self, workers: int, retries: int) -> None:
        self.workers, self.retries = workers, retries
        self._loky = importlib.import_module("joblib.externals.loky")
        self._threads = ThreadPoolExecutor(workers)
        self._pools: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._all_pools: list[Any] = []
        self._lock, self._ending = Lock(), False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` in the next free process; return its future."""
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
            self._all_pools.append(pool)
            return pool

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, after running tasks if ``wait``, otherwise at once."""
        with self._lock:
            self._ending = not wait
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for pool in self._all_pools:
            pool.shutdown(wait=wait, kill_workers=not wait)


class RayExecutor(Executor):
    """Tasks on a Ray cluster, one CPU each; Ray restarts those of a killed worker or a lost machine.

    Args:
        workers: Number of parallel tasks.
        address: Address of a running cluster; None starts one on this machine.
        retries: How often a task runs again after its process was killed.
    """

    def __init__(self, workers: int, address: str | None, retries: int) -> None:
        self.workers, self._ray = workers, _require("ray")
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # modules of this program
            local = {"num_cpus": workers, "include_dashboard": False, "runtime_env": environment}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = local if address is None else {}
            self._ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
        self._call = self._ray.remote(num_cpus=1, max_retries=retries)(_call)
        self._running: dict[Future[Any], Any] = {}

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` on the cluster; return its future."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._running[future] = self._call.remote(function, *args, **kwargs)
        self._running[future].future().add_done_callback(lambda done: self._pass(done, future))
        return future

    def _pass(self, done: Future[Any], future: Future[Any]) -> None:
        """Pass on a result, or the error of a task without Ray's wrapping."""
        del self._running[future]
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            cause = getattr(error, "cause", None)
            future.set_exception(cause if isinstance(cause, BaseException) else error)

    def send(self, value: Any) -> Any:
        """Put ``value`` into Ray's object store; return the reference."""
        return self._ray.put(value)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here; without ``wait``, running tasks are cancelled."""
        if not wait:
            for reference in list(self._running.values()):
                self._ray.cancel(reference, force=True)
        if self._owns_ray:
            self._ray.shutdown()


class DaskExecutor(Executor):
    """Tasks on a Dask cluster; its scheduler moves those of a killed worker to another one.

    Args:
        workers: Number of parallel tasks.
        address: Address of a running scheduler; None starts a cluster on this machine.
        retries: How often a task runs again after its process was killed; only for a cluster started here.
    """

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
        """Run ``function(*args, **kwargs)`` on the cluster; return its future."""
        return self._futures.submit(_call, function, *args, **kwargs)

    def send(self, value: Any) -> Any:
        """Send ``value`` as the result of a task; return its future."""
        # unlike scattered data, a task's result is recomputed when the workers that held it are lost
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # it is sent only once
            return self._client.submit(_same, value, pure=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end it if it was started here."""
        self._futures.shutdown(wait)
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, which may be a reference from ``send`` that the worker has resolved."""
    return function(*args, **kwargs)


def _same(value: Any) -> Any:
    """Return the value, as the task behind ``DaskExecutor.send``."""
    return value


def _require(module: str, extra: str | None = None) -> Any:
    """Import an optional package; the error names its extra."""
    return optional(module, extra or module, f"The executor {extra or module!r}")
