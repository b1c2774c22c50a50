"""How a layer treats points that have no projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import ConvergenceError
from probhard.projection.base import Projector, Solution, Stats


@dataclass(frozen=True)
class Policy:
    """How a layer treats failures, and how many fixed draws give moments.

    Args:
        on_failure: ``"raise"``, ``"flag"`` or ``"resample"``.
        validate: Check values in eager mode.
        draws: Number of fixed draws.
        approximate: Means are those of a fixed number of iterations, so their residual is reported, not raised.
    """

    on_failure: str
    validate: bool
    draws: int
    approximate: bool = False

    def solved(self, projector: Projector, z: Tensor, start: Tensor | None = None) -> Solution:
        """Project points z (*samples, *batch, n), from an initial guess if ``start`` is not None, and check them.

        Raises:
            ProbhardError: As ``check``.
        """
        solution = projector.solve(z, start)
        self.check(solution.stats, projector, z)
        return solution

    def check(self, stats: Stats, projector: Projector, z: Tensor) -> None:
        """Raise for points z (*samples, *batch, n) that did not converge, unless they are flagged.

        Raises:
            ProbhardError: The error of ``Projector.explain``, or a ConvergenceError.
        """
        if (
            self.approximate
            or self.on_failure == "flag"
            or not self.validate
            or not checking()
            or bool(stats.converged.all())
        ):
            return  # a mean cannot be drawn again, so "resample" raises here too
        raise projector.explain(z, stats) or ConvergenceError(
            failure(stats, "points"),
            "The set may be empty, or the variances may range over too many orders of magnitude.",
            "Check the constraint, set a floor on the variances, or pass on_failure='flag' and read the stats.",
        )


def failure(stats: Stats, what: str) -> str:
    """How many failed, and the largest residual."""
    bad = ~stats.converged
    worst = float(stats.residual.nan_to_num(torch.inf).max())
    return (
        f"{int(bad.sum())} of {bad.numel()} {what} are not feasible or not nearest; "
        f"the worst relative residual is {worst:.3g}."
    )
