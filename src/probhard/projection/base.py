"""The interface of all projectors, their options and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from probhard._util.tensors import safe_sqrt
from probhard.errors import ProbhardError
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals, Marginals
from probhard.tangent import Differential


@dataclass(frozen=True)
class Stats:
    """Status of a projection, per point.

    Args:
        steps: Number of iterations, (*samples, *batch).
        residual: Largest violation relative to the terms that cancel, (*samples, *batch).
        converged: Whether the point is feasible and, for iterative methods, stationary, (*samples, *batch).
        local: Whether the set is not convex, so that a nearer point may exist.
        redrawn: Number of draws that were drawn again, with ``on_failure="retry"``.
        masked: Number of points that failed and are NaN, with ``on_failure="retry"``.
        failure_share: Share of failures among the last 1,000 points of the layer, with ``on_failure="retry"``.
    """

    steps: Tensor
    residual: Tensor
    converged: Tensor
    local: bool = False
    redrawn: int = 0
    masked: int = 0
    failure_share: float = 0.0


@dataclass(frozen=True)
class Solution:
    """Projected points.

    Args:
        value: The points, (*samples, *batch, n).
        tangent: The derivative ``du*/dz`` at them.
        stats: Their status.
    """

    value: Tensor
    tangent: Differential
    stats: Stats


class MomentRule(Protocol):
    """Marginals of a projected law without projecting points: the rule ``"mean-field"``."""

    @property
    def cheap(self) -> bool:
        """Whether "auto" takes the rule."""

    def fits(self, base: LocationScale) -> bool:
        """Whether the rule handles this law."""

    def laws(self, base: LocationScale) -> Marginals:
        """The marginals of the projected law, batch (*batch, n)."""


class Projector(ABC):
    """Projects points on one constraint under one weight.

    Attributes:
        moments_from: The choice of ``covariance="auto"`` without a mean field: ``"delta"``, ``"censored"`` or
            ``"monte-carlo"``.
        mean_field: The rules ``"mean-field"``, the fastest first; empty if the set has none.
        has_equalities: Whether there are equalities among the parts.
        local: Whether the set is not convex, so that a mean of feasible points may be infeasible.
        guaranteed: Whether its points are feasible; False for corrections, which may only come near the set.
    """

    moments_from = "delta"
    has_equalities = True
    local = False
    guaranteed = True
    mean_field: tuple[MomentRule, ...] = ()

    @abstractmethod
    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        """Project points.

        Args:
            z: Points, (*samples, *batch, n).
            start: Initial guess for iterative methods, (*samples, *batch, n).

        Returns:
            The nearest points; ``stats.converged`` is False where none was computed.
        """

    def projected_shape(self, base: LocationScale) -> torch.Size:
        """Shape (*batch, n) of the projected law; constraint and weight may add batch dimensions."""
        return base.loc.shape

    def censored(self, base: LocationScale) -> CensoredMarginals:
        """Marginals of the base law projected on the equalities, clipped at the bounds.

        Raises:
            NotImplementedError: ``moments_from`` is not ``"censored"``.
        """
        raise NotImplementedError

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        """Explain why points failed.

        Args:
            z: The points, (*samples, *batch, n).
            stats: Their status, with at least one failure.

        Returns:
            A specific error; None if the cause is unknown.
        """
        return None

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        """First two moments by the delta method.

        Args:
            z: The mean, (*batch, n).
            cov: The covariance.

        Returns:
            The projection of z (None if it needs no check), mean and standard deviation (*batch, n), and tangent.
        """
        solution = self.solve(z)
        return solution, solution.value, safe_sqrt(solution.tangent.variance(cov)).to(z.dtype), solution.tangent


@dataclass(frozen=True)
class Options:
    """Options of a layer for its projectors.

    Args:
        oblique: Whether the weight is the covariance of the projected law.
        exact: Use exact curvature in derivatives.
        dense: Ignore the structure of linear rows.
        hessian: Use exact Hessians in every step of a nonlinear projection.
        validate: Check values in eager mode.
        restarts: Number of shifted starts for points that a nonlinear projection does not find from z.
        iterations: Number of branch-free iterations for polyhedral sets; None for exact methods.
        last_resort: Whether points that a polyhedral method flags are found again by slower ones; not inside the steps
            of another method, which has slower ones of its own.
    """

    oblique: bool = False
    exact: bool = False
    dense: bool = False
    hessian: bool = False
    validate: bool = True
    restarts: int = 2
    iterations: int | None = None
    last_resort: bool = True
