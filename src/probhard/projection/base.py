"""A constraint and a metric weight, made ready to project points: what every projector offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.tensors import safe_sqrt
from probhard.errors import ProbhardError
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.tangent import Differential


@dataclass(frozen=True)
class Stats:
    """How a projection went, per point (*samples, *batch)."""

    steps: Tensor
    residual: Tensor  # relative to the terms that should cancel
    converged: Tensor  # feasible and, where it was iterated for, stationary
    local: bool = False  # whether the set is not convex, so that a nearer point may exist elsewhere


@dataclass(frozen=True)
class Solution:
    """Projected points with the tangent at them and their status."""

    value: Tensor
    tangent: Differential
    stats: Stats


class Projector(ABC):
    """Projects points on one constraint under one weight."""

    moments_from = "delta"  # where "auto" takes moments from: "delta", "censored" or "monte-carlo"
    has_equalities = True  # whether there are equalities among the constraints
    local = False  # whether the set is not convex: means of its points may lie outside

    @abstractmethod
    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        """Project points z (*samples, *batch, n); ``start`` is a guess of the answer, where it is iterated for."""

    def projected_shape(self, base: LocationScale) -> torch.Size:
        """``(*batch, n)`` of the projected law, where constraint and weight may add batch dimensions to the base's."""
        return base.loc.shape

    def censored(self, base: LocationScale) -> CensoredMarginals:
        """The marginals of the law projected on the equalities, clipped at the bounds."""
        raise NotImplementedError

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        """The error of points that failed, where more can be said than that they did."""
        return None

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        """Status (None if it need not be looked at), mean, root of the variances, and tangent at a mean z."""
        solution = self.solve(z)
        return solution, solution.value, safe_sqrt(solution.tangent.variance(cov)).to(z.dtype), solution.tangent


@dataclass(frozen=True)
class Options:
    """How a layer wants its projections done.

    Args:
        oblique: The weight is the covariance of the law that is projected.
        exact: Exact curvature in derivatives.
        dense: Ignore the structure of linear rows.
        hessian: Exact Hessians in every step of a nonlinear projection.
        validate: Check values in eager mode.
    """

    oblique: bool = False
    exact: bool = False
    dense: bool = False
    hessian: bool = False
    validate: bool = True
