"""Conformal sets around a forecast: all feasible points whose deviation scores at most a threshold.

    ellipsoid:   score = |u - center| in the pseudo-inverse norm of the projected covariance
    band:        score = max over functionals f of |f . (u - center)| / sigma_f,         sigma_f > 0

The projected covariance is that of the law on the linear equalities; bounds and other inequalities cut the set. Any
score that is fixed before the calibration units are seen gives a valid set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from probhard._calibration.norm import deviation_norm
from probhard._calibration.promise import CoverageReport, Promise
from probhard._util.tensors import divide, safe_sqrt
from probhard.constraints.base import Constraint
from probhard.errors import ShapeError
from probhard.laws.covariance import Covariance
from probhard.rows.maps import SparseMap
from probhard.tangent import ProjectedCovariance
from probhard.tangent.linear import Tangent

TOLERANCE = 1e-6  # relative violation up to which a target obeys the constraint


@dataclass(frozen=True, eq=False)
class Deviations:
    """What a forecast says about deviations from its mean.

    Args:
        center: The mean of the forecast, (*batch, n).
        cov: Covariance before the projection.
        tangent: Projection on the linear equalities; None if there are none.
        oblique: Whether the weight of the projection is a multiple of ``cov``.
        rows: Functionals F (k, n); None for the joint norm.
    """

    center: Tensor
    cov: Covariance
    tangent: Tangent | None
    oblique: bool
    rows: SparseMap | None

    @cached_property
    def scales(self) -> Tensor:
        """Half-widths at threshold 1: of functionals (*batch, k), or of variables (*batch, n)."""
        cov = self.cov if self.tangent is None else ProjectedCovariance(self.tangent, self.cov)
        variance = cov.diagonal() if self.rows is None else cov.functional_variance(self.rows)
        return safe_sqrt(variance).expand(*self.center.shape[:-1], -1)

    @cached_property
    def centers(self) -> Tensor:
        """Functionals of the center (*batch, k), or the center."""
        return self.center if self.rows is None else self.rows.at(self.center).apply(self.center)

    def checked(self, y: Tensor) -> Tensor:
        """Targets (*batch, n) in the dtype of the center; models of slices flatten samples and slices.

        Raises:
            ShapeError: They do not fit the center.
        """
        shape = self.center.shape
        if y.shape != shape and (y.numel() != shape.numel() or y.shape[-1:] != shape[-1:]):
            raise ShapeError(
                f"The targets have shape {tuple(y.shape)}, the sets {tuple(shape)}.",
                "Each unit has one set.",
                "Pass the targets of the same batch.",
            )
        return y.reshape(shape).to(self.center)

    def score(self, y: Tensor) -> Tensor:
        """Scores (*batch,) of targets y (*batch, n)."""
        v = self.checked(y) - self.center
        if self.rows is None:
            return deviation_norm(v, self.cov, self.tangent, self.oblique)
        return divide(self.rows.at(v).apply(v).abs(), self.scales).amax(-1)


@dataclass(frozen=True, eq=False)
class ConformalSet:
    """The sets of a batch, one for each unit, intersected with the constraint.

    Args:
        deviations: Center and shape of the sets.
        promise: Their threshold and what it promises.
        constraint: The constraint of the batch.
        lower: Lower bounds of the variables, broadcasting with (*batch, n); None if there are no bounds.
        upper: Upper bounds.
    """

    deviations: Deviations
    promise: Promise
    constraint: Constraint
    lower: Tensor | None = None
    upper: Tensor | None = None

    @property
    def guarantee(self) -> str:
        """What exactly is covered, and when."""
        return str(self.promise)

    @property
    def left_out(self) -> int:
        """Number of functionals that the constraint fixes; they have width 0 and no part in the score."""
        if self.deviations.rows is None:
            return 0
        return int((self.deviations.scales == 0).sum(-1).max())

    def score(self, y: Tensor) -> Tensor:
        """Scores (*batch,) of targets y (*batch, n)."""
        return self.deviations.score(y)

    def obeys(self, y: Tensor, tolerance: float = TOLERANCE) -> Tensor:
        """Whether targets y (*batch, n) obey the constraint up to a relative tolerance, (*batch,) bool."""
        y = self.deviations.checked(y)
        return self.constraint.relative_violation(y, y.abs().amax(-1, keepdim=True)) <= tolerance

    def contains(self, y: Tensor, tolerance: float = TOLERANCE) -> Tensor:
        """Whether points lie in their sets.

        Args:
            y: Points, (*batch, n).
            tolerance: Relative violation of the constraint up to which a point counts as feasible.

        Returns:
            (*batch,) bool.
        """
        return (self.score(y) <= self.promise.threshold) & self.obeys(y, tolerance)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """The extent of the sets along functionals or, for joint sets, along variables.

        Returns:
            Lower and upper ends, (*batch, k) or (*batch, n), within the bounds of the variables; infinite if there
            were too few units.
        """
        center, scale = self.deviations.centers, self.deviations.scales
        half = torch.where(scale > 0, scale * self.promise.threshold, 0.0)
        lower, upper = center - half, center + half
        if self.lower is None or self.upper is None:
            return lower, upper
        least, most = self.lower.expand_as(self.deviations.center), self.upper.expand_as(self.deviations.center)
        if self.deviations.rows is not None:
            least, most = _ranges(self.deviations.rows, least, most)
        return torch.maximum(lower, least), torch.minimum(upper, most)

    @property
    def size(self) -> Tensor:
        """Mean width of the intervals that the constraint leaves free, (*batch,)."""
        lower, upper = self.intervals()
        free = self.deviations.scales > 0
        return torch.where(free, upper - lower, 0.0).sum(-1) / free.sum(-1).clamp(min=1)

    def report(self, y: Tensor, tolerance: float = TOLERANCE) -> CoverageReport:
        """Promised and measured coverage of targets y (*batch, n); for rolling origins only the latter counts."""
        inside, obey = (
            found.flatten().unflatten(0, (-1, self.promise.elements)).all(-1).double()
            for found in (self.contains(y, tolerance), self.obeys(y, tolerance))
        )
        promised = self.promise.coverage if self.promise.exchangeable else None
        return CoverageReport(
            promised,
            float(inside.mean()),
            self.promise.level,
            inside.numel(),
            float(obey.mean()),
            float(self.size.mean()),
            self.left_out,
        )


def _ranges(rows: SparseMap, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The range (*batch, k) of functionals of variables within bounds (*batch, n)."""
    rows = rows.at(lower)
    positive, column = rows.value > 0, rows.column
    least, most = (
        torch.zeros(*lower.shape[:-1], rows.row_count, dtype=lower.dtype, device=lower.device).index_add(
            -1, rows.row, torch.where(positive, first, second) * rows.value
        )
        for first, second in (
            (lower[..., column], upper[..., column]),
            (upper[..., column], lower[..., column]),
        )
    )
    return least, most
