"""One way to time and one way to print: peer, ours, their ratio and the worst violation of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same work, timed in turn in one process."""

    case: str
    peer: str
    peer_seconds: float
    our_seconds: float
    peer_violation: float
    our_violation: float
    goal: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.peer_seconds / self.our_seconds

    def line(self) -> str:
        """A row of the report."""
        return (
            f"{self.case:<58} {self.peer:<28} {self.peer_seconds * 1e3:>10.3f} {self.our_seconds * 1e3:>10.3f} "
            f"{self.ratio:>8.2f} {self.peer_violation:>10.1e} {self.our_violation:>10.1e}  {self.goal}"
        )


HEADER = (
    f"{'case':<58} {'peer':<28} {'peer ms':>10} {'ours ms':>10} {'ratio':>8} {'peer |h|':>10} {'our |h|':>10}  goal"
)


def interleaved(*work: Callable[[], object], repeats: int = 30, warm_up: int = 3) -> list[float]:
    """Median seconds of each piece of work, run in turn so that all see the same machine."""
    for _ in range(warm_up):
        for piece in work:
            piece()
    seconds: list[list[float]] = [[] for _ in work]
    for _ in range(repeats):
        for piece, found in zip(work, seconds):
            start = time.perf_counter()
            piece()
            found.append(time.perf_counter() - start)
    return [sorted(found)[len(found) // 2] for found in seconds]
