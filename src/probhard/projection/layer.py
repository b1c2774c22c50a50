"""The differentiable probabilistic projection layer, DPPL (paper, section of that name).

    u*(z) = argmin_{u feasible} |u - z|_Q^2,     Y ~ F(u*(mu), P Sigma P^T),     P = du*/dz at mu.

The layer takes a distribution and a constraint and returns the projected distribution: mean and variance for training
without sampling, and draws that are projected one by one, so that every one of them is feasible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from probhard._util.tensors import broadcast_batch, check_finite, checking, no_autocast
from probhard.constraints.base import Constraint
from probhard.constraints.equality import LinearEquality
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.metric import Metric, as_metric
from probhard.projection.base import Options, Projector, Solution
from probhard.projection.dispatch import projector_of
from probhard.projection.projected import Policy, Projected

COVARIANCES = ("auto", "delta", "censored", "monte-carlo", "keep")
CURVATURES = ("gauss-newton", "exact")
FAILURES = ("raise", "flag", "resample")


class DPPL(nn.Module):
    """Projects distributions, points and samples onto constraints.

    Args:
        metric: ``"oblique"``, ``"orthogonal"`` or a ``Metric``, fixed or learned.
        covariance: ``"delta"`` uses the tangent at the mean; ``"censored"`` clips the marginals of the law projected on
            the equalities; ``"monte-carlo"`` takes moments from fixed antithetic draws; ``"auto"`` is the first for
            equalities, the second where bounds are added, the third otherwise. ``"keep"`` promises nothing about draws.
        curvature: Of derivatives through nonlinear equalities: ``"gauss-newton"``, the paper's, or ``"exact"``.
        on_failure: What to do with draws that are not feasible: ``"raise"``, ``"flag"`` or ``"resample"``.
        validate_args: Check values (NaN, negative variances, feasibility) in eager mode.
        solver: None chooses; ``"dense"`` ignores the structure of linear rows; ``"newton"`` uses exact Hessians in
            every step of a nonlinear projection, where the default does so only for points that are slow.
        draws: Number of fixed draws of ``"monte-carlo"``.
    """

    def __init__(
        self,
        metric: str | Metric = "oblique",
        covariance: str = "auto",
        curvature: str = "gauss-newton",
        on_failure: str = "raise",
        validate_args: bool = True,
        solver: str | None = None,
        draws: int = 100,
    ) -> None:
        super().__init__()
        check_choice("covariance", covariance, COVARIANCES)
        check_choice("curvature", curvature, CURVATURES)
        check_choice("on_failure", on_failure, FAILURES)
        if solver is not None:
            check_choice("solver", solver, ("dense", "newton"))
        if draws < 2:
            raise ParameterError(
                f"DPPL got draws={draws}.", "Moments come from pairs of fixed draws.", "Pass at least 2; 100 is usual."
            )
        self.metric = as_metric(metric)
        self.covariance, self.curvature, self.on_failure = covariance, curvature, on_failure
        self.validate_args, self.solver, self.draws = validate_args, solver, draws

    def extra_repr(self) -> str:
        return f"covariance={self.covariance!r}, on_failure={self.on_failure!r}"

    def forward(self, dist: Any, constraint: Constraint) -> Projected | LocationScale:
        """The projected distribution; a plain LocationScale, not feasible, with ``covariance="keep"``."""
        base = _full_precision(as_location_scale(dist, validate_args=False))
        if self.validate_args:
            base.validate()
        with no_autocast(base.loc):
            projector = self._projector(base.loc, base.cov, constraint)
            kind = self._kind(projector, constraint)
            if kind == "censored":
                return Projected(base, constraint, self._policy, projector, censored=True)
            if kind in ("keep", "monte-carlo"):
                solution: Solution | None = projector.solve(base.loc)
                assert solution is not None
                mean, scale, tangent = solution.value, None, solution.tangent
            else:
                solution, mean, scale, tangent = projector.moments(base.loc, base.cov)
        if solution is not None:
            self._policy.check(solution.stats, projector, base.loc)
        if kind == "keep":
            return LocationScale(mean, base.cov, base.family, validate_args=False)
        return Projected(base, constraint, self._policy, projector, mean, tangent, scale, solution)

    def _kind(self, projector: Projector, constraint: Constraint) -> str:
        """Where the moments come from."""
        if self.covariance == "auto":
            return projector.moments_from
        if self.covariance == "censored" and projector.moments_from != "censored":
            raise ParameterError(
                f"covariance='censored' got the constraint {constraint!r}.",
                "Marginals are clipped in closed form where bounds are the only inequalities.",
                "Use covariance='auto', which takes fixed draws here.",
            )
        return self.covariance

    def project(self, z: Tensor, constraint: Constraint, dist: Any = None, start: Tensor | None = None) -> Solution:
        """Project points z (*samples, *batch, n).

        ``dist`` gives the oblique metric its covariance; ``start`` is a guess of the answer for nonlinear constraints.
        """
        z = _at_least_single(z)
        if self.validate_args and checking():
            check_finite("The point", z)
        cov = None if dist is None else as_location_scale(dist, validate_args=False).cov
        with no_autocast(z):
            return self._policy.solved(self._projector(z, cov, constraint), z, start)

    def project_samples(self, samples: Tensor, constraint: Constraint) -> Solution:
        """Project an empirical law, samples (S, *batch, n); the oblique metric takes their own variances."""
        if samples.dim() < 2 or (samples.shape[0] < 2 and not self.metric.fixed):
            raise ShapeError(
                f"The samples have shape {tuple(samples.shape)}.",
                "Samples lead, (S, *batch, n), and the oblique metric needs at least two for their variance.",
                "Stack the members of the ensemble along a new first dimension.",
            )
        samples = _at_least_single(samples)
        if self.validate_args and checking():
            check_finite("The sample", samples)
        with no_autocast(samples):
            cov = None if self.metric.fixed else Diagonal(samples.var(0))
            return self._policy.solved(self._projector(samples, cov, constraint), samples)

    def freeze(self, constraint: Constraint) -> FrozenProjection:
        """A fixed metric and shared rows as one matrix product, for export."""
        if not self.metric.fixed or not isinstance(constraint, LinearEquality):
            raise ParameterError(
                f"freeze() got the metric {type(self.metric).__name__} and a {type(constraint).__name__}.",
                "Only a fixed metric and linear rows give one matrix for all inputs.",
                "Use metric='orthogonal' or a DiagonalMetric, LowRankMetric or DenseMetric.",
            )
        like = torch.zeros(constraint.variables, dtype=constraint.b.dtype, device=constraint.b.device)
        with torch.no_grad():
            solution = self._projector(like, None, constraint).solve(like)
            matrix = solution.tangent.apply(torch.eye(constraint.variables).to(like)).mT
        return FrozenProjection(matrix.contiguous(), solution.value)

    def _projector(self, z: Tensor, cov: Covariance | None, constraint: Constraint) -> Projector:
        """The constraint under this layer's metric, ready for points like z."""
        if cov is not None:
            _check_cov(z, cov)
        weight = cov if self.metric.oblique and cov is not None else self.metric.weight(z, cov)
        broadcast_batch(z.shape[:-1], weight.shape[:-1], "the distribution", "the metric")
        options = Options(
            oblique=self.metric.oblique and cov is not None,
            exact=self.curvature == "exact",
            dense=self.solver == "dense",
            hessian=self.solver == "newton",
            validate=self.validate_args,
        )
        return projector_of(constraint, z, weight, options)

    @property
    def _policy(self) -> Policy:
        return Policy(self.on_failure, self.validate_args, self.draws)


class FrozenProjection(nn.Module):
    """``u = P z + c`` as buffers: nothing but one matrix product, for ONNX and other exports."""

    matrix: Tensor
    offset: Tensor

    def __init__(self, matrix: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)  # (n, n)
        self.register_buffer("offset", offset)  # (*batch, n)

    def forward(self, z: Tensor) -> Tensor:
        """Project points z (..., n)."""
        return z @ self.matrix.mT + self.offset

    def variance(self, variance: Tensor) -> Tensor:
        """Projected marginal variances from independent ones, (..., n)."""
        return variance @ self.matrix.square().mT


def _check_cov(z: Tensor, cov: Covariance) -> None:
    if cov.shape[-1] != z.shape[-1]:
        raise ShapeError(
            f"The points have {z.shape[-1]} variables, the distribution of the metric {cov.shape[-1]}.",
            "The oblique metric weighs each variable by its own variance.",
            "Pass the distribution that the points belong to.",
        )
    broadcast_batch(z.shape[:-1], cov.shape[:-1], "the points", "the distribution")


def _at_least_single(x: Tensor) -> Tensor:
    """Half precision ruins constraints: bfloat16 and float16 are projected, and returned, in float32."""
    if not x.is_floating_point():
        raise ParameterError(
            f"The points have the dtype {x.dtype}.", "A projection moves by fractions.", "Pass x.float() or x.double()."
        )
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _full_precision(base: LocationScale) -> LocationScale:
    loc = _at_least_single(base.loc)
    return base if loc is base.loc else LocationScale(loc, base.cov.to(torch.float32), base.family, validate_args=False)
