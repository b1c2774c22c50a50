"""Timing, memory and printing of comparisons: peer, ours, their ratio and the worst violation of each.

    ratio = peer_seconds / our_seconds,        factor = our_seconds / base_seconds.

Pieces of work run in turn, so that all see the same machine. The median counts. With one thread on both sides, seconds
are processor time, which other work on the machine does not change. Memory is the largest growth of the resident set
while a piece runs (Linux), without memory that the allocator already held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from probhard.constraints.base import Constraint
from probhard.errors import ParameterError

WRONG = 1e-5  # relative violation or error from which a result is wrong; float32 rounds below it
WRONG_GRADIENT = 0.01
SLOW = 20.0  # seconds from which the peer's first run is its only one
STRETCH = 0.1  # seconds that a quick piece is repeated for before the next has its turn
MOST = 50  # repeats in such a stretch
HEADER = (
    f"{'case':<54} {'peer':<24} {'peer ms':>10} {'ours ms':>10} {'ratio':>8} {'peer viol.':>10} {'our viol.':>10} "
    f"{'peer MB':>8} {'our MB':>8}"
)


@dataclass(frozen=True)
class Run:
    """Time, memory and value of one piece of work."""

    seconds: float
    memory: int | None  # bytes
    value: Any = None


def no_judge(value: Any) -> None:
    """Judge of work whose values have no constraint."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same work, timed in turn in one process.

    Args:
        case: What is done.
        peer: By whom else.
        peer_seconds: Median of the peer's runs.
        our_seconds: Median of ours.
        peer_violation: Worst relative violation of the peer's result, its relative error if it has no constraint, None
            if there is nothing to judge.
        our_violation: The same of ours.
        goal: The least ratio that was asked for.
        explanation: Why the ratio is what it is; needed where it is below 1.
        memory: Peak bytes, ``peer`` and ``ours``.
        gradient: Relative errors of the peer's gradient and ours against finite differences.
        threads: For both.
    """

    case: str
    peer: str
    peer_seconds: float
    our_seconds: float
    peer_violation: float | None
    our_violation: float | None
    goal: float | None = None
    explanation: str = ""
    memory: Mapping[str, int | None] = field(default_factory=dict)
    gradient: tuple[float, float] | None = None
    threads: int = field(default_factory=torch.get_num_threads)

    @classmethod
    def of(
        cls, case: str, name: str, peer: Run, ours: Run, judge: Callable[[Any], float | None] = no_judge, **more: Any
    ) -> Comparison:
        """Build a comparison from two runs and a function that returns the violation or error of a value."""
        memory = {"peer": peer.memory, "ours": ours.memory}
        return cls(case, name, peer.seconds, ours.seconds, judge(peer.value), judge(ours.value), memory=memory, **more)

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.peer_seconds / self.our_seconds

    def faults(self) -> list[str]:
        """Return what is wrong with the peer's result."""
        faults = []
        if self.peer_violation is not None and not self.peer_violation <= WRONG:  # NaN is wrong too
            faults.append(f"it is off by {self.peer_violation:.1e} (relative)")
        if self.gradient is not None and not self.gradient[0] <= WRONG_GRADIENT:
            faults.append(f"its gradient is off by {100 * self.gradient[0]:.2g} %")
        return faults

    def record(self) -> dict[str, Any]:
        """Return the result line.

        Raises:
            ParameterError: If the ratio is below 1 and not explained.
        """
        if self.ratio < 1 and not self.explanation:
            raise ParameterError(
                f"{self.case!r} against {self.peer} has the ratio {self.ratio:.2f} and no explanation.",
                "The table does not show a slower case without saying why.",
                "Find the cause and pass explanation=...",
            )
        faults = self.faults()
        wrong = f"{self.peer} is wrong: {' and '.join(faults)}." if faults else ""
        line = {**asdict(self), "ratio": self.ratio, "wrong": bool(faults)}
        return {**line, "explanation": " ".join(filter(None, (wrong, self.explanation)))}

    def line(self) -> str:
        """Return a row to print."""
        memory = [_megabytes(self.memory.get(name)) for name in ("peer", "ours")]
        return (
            f"{self.case:<54} {self.peer:<24} {self.peer_seconds * 1e3:>10.3f} {self.our_seconds * 1e3:>10.3f} "
            f"{self.ratio:>8.2f} {_small(self.peer_violation):>10} {_small(self.our_violation):>10} "
            f"{memory[0]:>8} {memory[1]:>8}"
            + (f"  goal {self.goal:g}" if self.goal is not None else "")
            + "".join(f"; peer: {fault}" for fault in self.faults())
        )


@dataclass(frozen=True)
class Overhead:
    """Cost of the layer on top of other work; ``goal`` is the largest allowed factor."""

    case: str
    base_seconds: float
    our_seconds: float
    goal: float | None = None
    explanation: str = ""
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def factor(self) -> float:
        """How many times longer it takes."""
        return self.our_seconds / self.base_seconds

    def record(self) -> dict[str, Any]:
        """Return the result line."""
        return {**asdict(self), "factor": self.factor}

    def line(self) -> str:
        """Return a row to print."""
        goal = f"  goal at most {self.goal:g}" if self.goal is not None else ""
        times = f"{self.base_seconds * 1e3:>10.3f} {self.our_seconds * 1e3:>10.3f} {self.factor:>8.2f}"
        return f"{self.case:<54} {'(without the layer)':<24} {times}{goal}"


def worst(constraint: Constraint, points: Tensor) -> float:
    """Return the largest violation of points ``(*batch, n)``, relative to the largest number in each point.

    ``relative_violation`` would judge solvers that stop at a tolerance by rounding errors at bounds of 0.
    """
    size = points.abs().amax(-1).clamp(min=1e-300 if points.dtype == torch.float64 else 1e-37)
    return float((constraint.violation(points) / size).max())


def measured(*work: Callable[[], Any]) -> list[Run]:
    """Return time and memory of pieces of work that run in turn, after a warm-up.

    All together take about ``BENCH_SECONDS`` (6). Fast pieces are repeated within their turn. The first piece, the
    peer, runs only once if its first run is slow; the others may have spent theirs on compiling.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    runs = [_watched(piece, clock) for piece in work]
    again = [k for k, run in enumerate(runs) if k > 0 or run.seconds <= SLOW]
    for k in again:
        runs[k] = _watched(work[k], clock)
    seconds = [[run.seconds] for run in runs]
    repeats = [min(MOST, max(1, int(STRETCH / run.seconds))) for run in runs]
    end = time.perf_counter() + float(os.environ.get("BENCH_SECONDS", "6"))
    while time.perf_counter() < end:
        for k in again:
            seconds[k] += [_clocked(work[k], clock) for _ in range(repeats[k])]
    return [Run(_median(values), run.memory, run.value) for values, run in zip(seconds, runs)]


def _watched(piece: Callable[[], Any], clock: Callable[[], float]) -> Run:
    """One run with its memory."""

    def timed() -> tuple[Any, float]:
        start = clock()
        value = piece()
        return value, clock() - start

    (value, seconds), memory = machine.peak(timed)
    return Run(seconds, memory, value)


def _clocked(piece: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    piece()
    return clock() - start


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
