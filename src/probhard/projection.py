"""The differentiable probabilistic projection layer, DPPL (paper, section of that name).

    u*(z) = argmin_{u feasible} |u - z|_Q^2,     Y ~ F(u*(mu), P Sigma P^T),     P = du*/dz at mu.

The layer takes a distribution and a constraint and returns the projected distribution: mean and variance for training
without sampling, and draws that are projected one by one, so that every one of them is feasible.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard.constraints.linear import LinearEquality, broadcast_batch
from probhard.covariance import Covariance, Diagonal, check_finite, safe_sqrt
from probhard.distribution import LocationScale, Marginals, as_location_scale
from probhard.errors import ConvergenceError, ParameterError, ShapeError, check_choice, checking
from probhard.metric import Metric, as_metric
from probhard.tangent import DenseTangent, ProjectedCovariance, Tangent, tangent_of

COVARIANCES = ("auto", "delta", "censored", "monte-carlo", "keep")
CURVATURES = ("gauss-newton", "exact")
FAILURES = ("raise", "flag", "resample")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative feasibility of a returned point
RESAMPLES = 20  # rounds of redrawing before giving up


@dataclass(frozen=True)
class Stats:
    """How a projection went, per point (*samples, *batch)."""

    steps: Tensor
    residual: Tensor  # relative to the terms that should cancel
    converged: Tensor


@dataclass(frozen=True)
class Solution:
    """Projected points with the tangent at them and their status."""

    value: Tensor
    tangent: Tangent
    stats: Stats


class DPPL(nn.Module):
    """Projects distributions, points and samples onto constraints.

    Args:
        metric: ``"oblique"``, ``"orthogonal"`` or a ``Metric``, fixed or learned.
        covariance: ``"auto"`` and ``"delta"`` use the exact tangent for equalities; ``"monte-carlo"`` takes moments
            from fixed antithetic draws; ``"keep"`` leaves the covariance, and promises nothing about draws.
        curvature: ``"gauss-newton"`` or ``"exact"``; the same for linear constraints.
        on_failure: What to do with draws that are not feasible: ``"raise"``, ``"flag"`` or ``"resample"``.
        validate_args: Check values (NaN, negative variances, feasibility) in eager mode.
        solver: None chooses from the structure; ``"dense"`` ignores it.
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
            check_choice("solver", solver, ("dense",))
        self.metric = as_metric(metric)
        self.covariance, self.curvature, self.on_failure = covariance, curvature, on_failure
        self.validate_args, self.solver, self.draws = validate_args, solver, draws

    def extra_repr(self) -> str:
        return f"covariance={self.covariance!r}, on_failure={self.on_failure!r}"

    def forward(self, dist: Any, constraint: LinearEquality) -> Projected | LocationScale:
        """The projected distribution; a plain LocationScale, not feasible, with ``covariance="keep"``."""
        base = _full_precision(as_location_scale(dist, validate_args=False))
        if self.validate_args:
            base.validate()
        with _no_autocast(base.loc):
            if self.covariance in ("keep", "monte-carlo"):
                tangent, mean = self._solve(base.loc, base.cov, constraint)
                scale = None
            else:
                tangent = self._tangent(base.loc, base.cov, constraint)
                mean, scale = tangent.moments(base.loc, constraint.b, base.cov)
                mean = self._verified(mean, constraint, tangent)
        if self.covariance == "keep":
            return LocationScale(mean, base.cov, base.family, validate_args=False)
        return Projected(base, constraint, self, tangent, mean, scale)

    def project(self, z: Tensor, constraint: LinearEquality, dist: Any = None) -> Solution:
        """Project points z (*samples, *batch, n); ``dist`` gives the oblique metric its covariance."""
        if self.validate_args and checking():
            check_finite("The point", z)
        cov = None if dist is None else as_location_scale(dist, validate_args=False).cov
        with _no_autocast(z):
            tangent, value = self._solve(z, cov, constraint)
            return self._finished(value, constraint, tangent)

    def project_samples(self, samples: Tensor, constraint: LinearEquality) -> Solution:
        """Project an empirical law, samples (S, *batch, n); the oblique metric takes their own variances."""
        if samples.dim() < 2 or (samples.shape[0] < 2 and not self.metric.fixed):
            raise ShapeError(
                f"The samples have shape {tuple(samples.shape)}.",
                "Samples lead, (S, *batch, n), and the oblique metric needs at least two for their variance.",
                "Stack the members of the ensemble along a new first dimension.",
            )
        if self.validate_args and checking():
            check_finite("The sample", samples)
        with _no_autocast(samples):
            cov = None if self.metric.fixed else Diagonal(samples.var(0))
            tangent, value = self._solve(samples, cov, constraint)
            return self._finished(value, constraint, tangent)

    def freeze(self, constraint: LinearEquality) -> FrozenProjection:
        """A fixed metric and shared rows as one matrix product, for export."""
        if not self.metric.fixed or not isinstance(constraint, LinearEquality):
            raise ParameterError(
                f"freeze() got the metric {type(self.metric).__name__} and a {type(constraint).__name__}.",
                "Only a fixed metric and linear rows give one matrix for all inputs.",
                "Use metric='orthogonal' or a DiagonalMetric, LowRankMetric or DenseMetric.",
            )
        like = torch.zeros(constraint.variables, dtype=constraint.b.dtype, device=constraint.b.device)
        with torch.no_grad():
            tangent, offset = self._solve(like, None, constraint)
            projector = tangent.apply(torch.eye(constraint.variables).to(like)).mT
        return FrozenProjection(projector.contiguous(), offset)

    def _solve(self, z: Tensor, cov: Covariance | None, constraint: LinearEquality) -> tuple[Tangent, Tensor]:
        """The tangent and the nearest feasible points."""
        tangent = self._tangent(z, cov, constraint)
        return tangent, self._verified(tangent.project(z, constraint.b), constraint, tangent)

    def _tangent(self, z: Tensor, cov: Covariance | None, constraint: LinearEquality) -> Tangent:
        """The tangent of a constraint under this layer's metric."""
        if not isinstance(constraint, LinearEquality):
            raise ParameterError(
                f"DPPL got a {type(constraint).__name__} as its constraint.",
                "It projects onto linear equalities.",
                "Pass a LinearEquality, a Hierarchy, a Conservation, or several joined by '&'.",
            )
        constraint.check_event(z, "The distribution")
        broadcast_batch(z.shape[:-1], constraint.batch_shape, "the distribution", "the constraint")
        if cov is not None:
            _check_cov(z, cov)
        make = DenseTangent if self.solver == "dense" else tangent_of
        tangent = make(constraint.system, self.metric.weight(z, cov))
        if self.validate_args and checking():
            tangent.check()
        return tangent

    def _verified(self, value: Tensor, constraint: LinearEquality, tangent: Tangent) -> Tensor:
        """Points that are feasible to rounding, or the error that ``on_failure`` asks for.

        Only behind a Cholesky factor can rounding grow, so that the O(n) sweeps are not looked at again.
        """
        if not (self.validate_args and tangent.conditioned and checking()):
            return value
        solution = self._finished(value, constraint, tangent)
        if self.on_failure == "raise" and not bool(solution.stats.converged.all()):
            bad = ~solution.stats.converged
            raise ConvergenceError(
                f"{int(bad.sum())} of {bad.numel()} points are not feasible after projection; the worst relative "
                f"residual is {float(solution.stats.residual.nan_to_num(torch.inf).max()):.3g}.",
                "The variances range over too many orders of magnitude for this system of rows.",
                "Set a floor on the variances, use the orthogonal metric, or pass on_failure='flag'.",
            )
        return solution.value

    def _finished(self, value: Tensor, constraint: LinearEquality, tangent: Tangent) -> Solution:
        """Points with their status; those above rounding get one step of refinement."""
        residual = constraint.relative_violation(value)
        if checking() and bool((residual > 1e-2 * TOLERANCE[value.dtype]).any()):
            value = tangent.project(value, constraint.b)
            residual = constraint.relative_violation(value)
        converged = residual <= TOLERANCE[value.dtype]
        return Solution(value, tangent, Stats(torch.ones_like(residual, dtype=torch.int64), residual, converged))


class Projected(td.Distribution):
    """A distribution whose mean is feasible and whose every draw is."""

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    has_rsample = True
    feasible = True

    def __init__(
        self,
        base: LocationScale,
        constraint: LinearEquality,
        layer: DPPL,
        tangent: Tangent,
        mean: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        self.base, self.constraint, self.layer, self.tangent = base, constraint, layer, tangent
        self._point, self._scale = mean, scale
        self._fixed: tuple[Tensor, Tensor] | None = None
        super().__init__(mean.shape[:-1], mean.shape[-1:], validate_args=False)

    @property
    def family(self) -> Any:
        """The family of the base law."""
        return self.base.family

    @property
    def exact(self) -> bool:
        """Whether the marginals are those of the projected law, not only its first two moments."""
        return self.base.exact and self.layer.covariance != "monte-carlo"

    @property
    def mean(self) -> Tensor:
        """Projected mean, (*batch, n)."""
        return self._moments[0] if self.layer.covariance == "monte-carlo" else self._point

    @property
    def scale(self) -> Tensor:
        """Marginal scales (*batch, n); exactly 0 where the constraint fixes a variable."""
        if self._scale is None:
            self._scale = safe_sqrt(self._moments[1] / self.family.unit_variance)
        return self._scale.expand(self._point.shape)

    @property
    def variance(self) -> Tensor:
        """Projected marginal variances, (*batch, n)."""
        return self.scale.square() * self.family.unit_variance

    @property
    def cov(self) -> Covariance:
        """The projected scale matrix, singular and never formed."""
        return ProjectedCovariance(self.tangent, self.base.cov)

    @property
    def marginals(self) -> Marginals:
        """The coordinates' own laws."""
        return Marginals(self.mean, self.scale, self.family)

    @property
    def stats(self) -> Stats:
        """How the projection of the mean went."""
        return self.layer._finished(self._point, self.constraint, self.tangent).stats

    def as_location_scale(self) -> LocationScale:
        """The projected law as a location-scale one with singular covariance."""
        return LocationScale(self.mean, self.cov, self.family, validate_args=False)

    def draw(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Solution:
        """Projected draws (*sample_shape, *batch, n) with the status of each."""
        z = self.base.rsample(sample_shape, generator)
        with _no_autocast(z):
            value = self.tangent.project(z, self.constraint.b)
            return self.layer._finished(value, self.constraint, self.tangent)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterised draws, all feasible; see ``on_failure`` for those that cannot be."""
        solution = self.draw(sample_shape, generator)
        if not checking() or bool(solution.stats.converged.all()):
            return solution.value
        return self._handle(solution, Size(sample_shape), generator)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient, all feasible."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Projected:
        """The same law with broadcast batch dimensions."""
        mean = self._point.expand(*Size(batch_shape), *self.event_shape)
        base = self.base.expand(batch_shape)
        return Projected(base, self.constraint, self.layer, self.tangent, mean, self._scale)

    @property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of fixed antithetic draws: exact mean, pathwise gradients, common random numbers."""
        if self._fixed is None:
            self._fixed = self._fixed_draws()
        return self._fixed

    def _fixed_draws(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self._point.device).manual_seed(0)
        base, half = self.base, max(1, self.layer.draws // 2)
        shape = (half, *base.batch_shape)
        noise = base.family.sample(shape, base.cov.root_size, base.loc.dtype, base.loc.device, generator)
        moved = base.cov.root(noise)
        with _no_autocast(moved):
            draws = self.tangent.project(torch.cat([base.loc + moved, base.loc - moved]), self.constraint.b)
        mean = draws.mean(0)
        return mean, (draws - mean).square().mean(0)

    def _handle(self, solution: Solution, shape: Size, generator: torch.Generator | None) -> Tensor:
        """Draws with failures among them, as ``on_failure`` asks."""
        value, bad = solution.value, ~solution.stats.converged
        if self.layer.on_failure == "resample":
            for _ in range(RESAMPLES):
                again = self.draw(shape, generator)
                value = torch.where(bad.unsqueeze(-1), again.value, value)
                bad = bad & ~again.stats.converged
                if not bool(bad.any()):
                    return value
        worst, count = float(solution.stats.residual.nan_to_num(torch.inf).max()), int(bad.sum())
        found = f"{count} of {bad.numel()} draws are not feasible; the worst relative residual is {worst:.3g}."
        if self.layer.on_failure == "flag":
            warnings.warn(f"{found} They are NaN.", RuntimeWarning, stacklevel=3)
            return torch.where(bad.unsqueeze(-1), torch.nan, value)
        raise ConvergenceError(
            found,
            "An infeasible draw is never returned as if it were feasible.",
            "Look for enormous or degenerate variances, use float64, or pass on_failure='flag' and read draw().stats.",
        )


class FrozenProjection(nn.Module):
    """``u = P z + c`` as buffers: nothing but one matrix product, for ONNX and other exports."""

    projector: Tensor
    offset: Tensor

    def __init__(self, projector: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("projector", projector)  # (n, n)
        self.register_buffer("offset", offset)  # (*batch, n)

    def forward(self, z: Tensor) -> Tensor:
        """Project points z (..., n)."""
        return z @ self.projector.mT + self.offset

    def variance(self, variance: Tensor) -> Tensor:
        """Projected marginal variances from independent ones, (..., n)."""
        return variance @ self.projector.square().mT


def _check_cov(z: Tensor, cov: Covariance) -> None:
    if cov.shape[-1] != z.shape[-1]:
        raise ShapeError(
            f"The points have {z.shape[-1]} variables, the distribution of the metric {cov.shape[-1]}.",
            "The oblique metric weighs each variable by its own variance.",
            "Pass the distribution that the points belong to.",
        )
    broadcast_batch(z.shape[:-1], cov.shape[:-1], "the points", "the distribution")


def _full_precision(base: LocationScale) -> LocationScale:
    """Half precision ruins constraints: bfloat16 and float16 laws are projected, and returned, in float32."""
    if base.loc.dtype in (torch.bfloat16, torch.float16):
        cov = base.cov.to(torch.float32)
        return LocationScale(base.loc.float(), cov, base.family, validate_args=False)
    return base


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
