"""How a layer treats points whose projection failed.

| ``on_failure`` | means                                           | draws                                    |
|----------------|-------------------------------------------------|------------------------------------------|
| ``"retry"``    | tried from more starts; then NaN, out of losses | tried from more starts; then drawn again |
| ``"raise"``    | an error                                        | an error                                 |
| ``"flag"``     | ``stats.converged`` is False                    | NaN, with a warning                      |
| ``"resample"`` | an error                                        | drawn again                              |

``"retry"`` raises, with the indices of the points, once more than 1 % of the last 1,000 points have failed, or all
points of one call; and at once if the set is proven empty. One failure among others never raises. Drawing again
conditions the law on the solver's success, so the share of failures is reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import ConvergenceError, ProbhardError
from probhard.projection.base import Projector, Solution, Stats

FAILURES = ("retry", "raise", "flag", "resample")
WINDOW, SHARE = 1000, 0.01  # number of points that are remembered, and the share of them that may fail
RESTARTS = {"retry": 8}  # shifted starts of a nonlinear projection
FEWER_RESTARTS = 2
NAMED = 10  # indices of points in an error


@dataclass
class Failures:
    """Counts of failed points: in total, and among the last ``WINDOW`` points or the last call.

    Args:
        redrawn: Number of draws that were drawn again.
        masked: Number of means that were left out.
    """

    redrawn: int = 0
    masked: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=deque)  # points and failures of calls

    @property
    def count(self) -> int:
        """Number of points that are remembered."""
        return sum(points for points, _ in self.recent)

    @property
    def share(self) -> float:
        """Share of recent points that failed."""
        return sum(failed for _, failed in self.recent) / max(1, self.count)

    def add(self, points: int, failed: int) -> bool:
        """Remember a call; whether too many points have failed."""
        self.recent.append((points, failed))
        while self.count - self.recent[0][0] >= WINDOW:
            self.recent.popleft()
        total = sum(failures for _, failures in self.recent)
        return failed > 0 and (total > max(1, SHARE * self.count) or failed == points)


@dataclass(frozen=True)
class Policy:
    """How a layer treats failures, and how many fixed draws give moments.

    Args:
        on_failure: One of ``FAILURES``.
        validate: Check values in eager mode.
        draws: Number of fixed draws.
        failures: Counts of ``"retry"``, kept by the layer.
        approximate: Means are those of a fixed number of iterations, so their residual is reported, not raised.
        as_is: Draws are returned as they are, too: those of corrections, which need not be feasible.
    """

    on_failure: str
    validate: bool
    draws: int
    failures: Failures = field(default_factory=Failures)
    approximate: bool = False
    as_is: bool = False

    @property
    def redraws(self) -> bool:
        """Whether failed draws are drawn again."""
        return self.on_failure in ("retry", "resample")

    def solved(self, projector: Projector, z: Tensor, start: Tensor | None = None) -> Solution:
        """Project points z (*samples, *batch, n), from an initial guess if ``start`` is not None, and check them.

        Raises:
            ProbhardError: As ``check``.
        """
        solution = projector.solve(z, start)
        failed = self.check(solution.stats, projector, z)
        if failed is None:
            return solution
        return replace(solution, value=blanked(solution.value, failed), stats=self.counted(solution.stats))

    def check(self, stats: Stats, projector: Projector, z: Tensor) -> Tensor | None:
        """Treat points z (*samples, *batch, n) that did not converge.

        Returns:
            Where points are to be left out, (*samples, *batch) bool; None for nowhere.

        Raises:
            ProbhardError: The error of ``Projector.explain``, or a ConvergenceError.
        """
        if self.approximate or self.on_failure == "flag" or not checking():
            return None
        bad = ~stats.converged
        number = int(bad.sum())
        if self.on_failure == "retry":
            many = self.failures.add(bad.numel(), number)
            if not number or not (self.validate and (many or self._empty(stats, projector, z))):
                self.failures.masked += number
                return bad if number else None
        if not number or not self.validate:
            return None  # a mean cannot be drawn again, so "resample" raises here too
        raise self.error(stats, projector, z, "points")

    def counted(self, stats: Stats, redrawn: int = 0) -> Stats:
        """The status with the counts of ``"retry"``.

        Args:
            stats: The status.
            redrawn: Number of draws that were drawn again.
        """
        if self.on_failure != "retry":
            return stats
        masked = int((~stats.converged).sum()) if checking() else 0
        return replace(stats, redrawn=redrawn, masked=masked, failure_share=self.failures.share)

    def error(self, stats: Stats, projector: Projector, z: Tensor, what: str) -> ProbhardError:
        """The error for points z, or draws, that failed."""
        error = projector.explain(z, stats) or self._unexplained(stats, what)
        if self.on_failure != "retry" or not isinstance(error, ConvergenceError):
            return error
        recent = self.failures
        share = f"Of the last {recent.count:,} points {100 * recent.share:.3g} % failed, from all starts."
        return ConvergenceError(error.what, f"{share} {error.why}", error.fix)

    @staticmethod
    def _unexplained(stats: Stats, what: str) -> ConvergenceError:
        why = "A point that is infeasible is never returned as a feasible one."
        return ConvergenceError(
            failure(stats, what),
            why,
            "Check the constraint, set a floor on the variances, or pass on_failure='flag' and read the stats.",
        )

    def _empty(self, stats: Stats, projector: Projector, z: Tensor) -> bool:
        """Whether a failure has a proven cause that no other start can change: never on sets that are not convex."""
        return not projector.local and projector.explain(z, stats) is not None


def blanked(value: Tensor, failed: Tensor | None) -> Tensor:
    """Points (*lead, n) with NaN, and without gradients, where they failed (*lead,)."""
    return value if failed is None else torch.where(failed.unsqueeze(-1), torch.nan, value)


def failure(stats: Stats, what: str) -> str:
    """How many failed and which, and the largest residual."""
    bad = ~stats.converged
    worst = float(stats.residual.nan_to_num(torch.inf).max())
    text = (
        f"{int(bad.sum())} of {bad.numel()} {what} are not feasible or not nearest; "
        f"the worst relative residual is {worst:.3g}."
    )
    if not bad.dim():
        return text
    index = [tuple(at) if len(at) > 1 else at[0] for at in bad.nonzero()[:NAMED].tolist()]
    more = ", ..." if int(bad.sum()) > NAMED else ""
    return f"{text} Failed: {', '.join(map(str, index))}{more}."
