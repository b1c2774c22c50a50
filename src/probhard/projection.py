"""The differentiable probabilistic projection layer, DPPL (paper, section of that name).

    u*(z) = argmin_{u feasible} |u - z|_Q^2,     Y ~ F(u*(mu), P Sigma P^T),     P = du*/dz at mu.

The layer takes a distribution and a constraint and returns the projected distribution: mean and variance for training
without sampling, and draws that are projected one by one, so that every one of them is feasible.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Size, Tensor, nn
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard.censored import CensoredMarginals
from probhard.constraints.base import Constraint
from probhard.constraints.linear import LinearEquality, broadcast_batch
from probhard.covariance import Covariance, Diagonal, check_finite, safe_sqrt
from probhard.distribution import LocationScale, Marginals, as_location_scale
from probhard.errors import ConvergenceError, ParameterError, ShapeError, check_choice, checking
from probhard.metric import Metric, as_metric
from probhard.projectors import Options, Projector, Solution, Stats, projector_of
from probhard.tangent import Differential, ProjectedCovariance

COVARIANCES = ("auto", "delta", "censored", "monte-carlo", "keep")
CURVATURES = ("gauss-newton", "exact")
FAILURES = ("raise", "flag", "resample")
RESAMPLES = 20  # rounds of redrawing before giving up


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
        with _no_autocast(base.loc):
            projector = self._projector(base.loc, base.cov, constraint)
            kind = self._kind(projector, constraint)
            if kind == "censored":
                return Projected(base, constraint, self, projector, laws=projector.censored(base))
            if kind in ("keep", "monte-carlo"):
                solution: Solution | None = projector.solve(base.loc)
                assert solution is not None
                mean, scale, tangent = solution.value, None, solution.tangent
            else:
                solution, mean, scale, tangent = projector.moments(base.loc, base.cov)
        if solution is not None:
            self._check(solution.stats, projector, base.loc)
        if kind == "keep":
            return LocationScale(mean, base.cov, base.family, validate_args=False)
        return Projected(base, constraint, self, projector, mean, tangent, scale, solution)

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
        with _no_autocast(z):
            return self._solved(self._projector(z, cov, constraint), z, start)

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
        with _no_autocast(samples):
            cov = None if self.metric.fixed else Diagonal(samples.var(0))
            return self._solved(self._projector(samples, cov, constraint), samples)

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
            projector = solution.tangent.apply(torch.eye(constraint.variables).to(like)).mT
        return FrozenProjection(projector.contiguous(), solution.value)

    def _projector(self, z: Tensor, cov: Covariance | None, constraint: Constraint) -> Projector:
        """The constraint under this layer's metric, ready for points like z."""
        if cov is not None:
            _check_cov(z, cov)
        weight = self.metric.weight(z, cov)
        broadcast_batch(z.shape[:-1], weight.shape[:-1], "the distribution", "the metric")
        options = Options(
            self.curvature == "exact", self.solver == "dense", self.solver == "newton", self.validate_args
        )
        return projector_of(constraint, z, weight, options)

    def _solved(self, projector: Projector, z: Tensor, start: Tensor | None = None) -> Solution:
        solution = projector.solve(z, start)
        self._check(solution.stats, projector, z)
        return solution

    def _check(self, stats: Stats, projector: Projector, z: Tensor) -> None:
        """Raise for points that are not feasible, unless they are to be flagged."""
        if self.on_failure == "flag" or not self.validate_args or not checking() or bool(stats.converged.all()):
            return  # a mean cannot be drawn again, so "resample" raises here too
        raise projector.explain(z, stats) or ConvergenceError(
            failure(stats, "points"),
            "There may be no feasible point, or the variances range over too many orders of magnitude.",
            "Check the constraint, set a floor on the variances, or pass on_failure='flag' and read the stats.",
        )


def failure(stats: Stats, what: str) -> str:
    """How many did not get there, and the worst of them."""
    bad = ~stats.converged
    worst = float(stats.residual.nan_to_num(torch.inf).max())
    return (
        f"{int(bad.sum())} of {bad.numel()} {what} are not feasible or not nearest; "
        f"the worst relative residual is {worst:.3g}."
    )


class Projected(td.Distribution):
    """A distribution whose mean is feasible and whose every draw is."""

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    has_rsample = True
    feasible = True

    def __init__(
        self,
        base: LocationScale,
        constraint: Constraint,
        layer: DPPL,
        projector: Projector,
        mean: Tensor | None = None,
        tangent: Differential | None = None,
        scale: Tensor | None = None,
        solution: Solution | None = None,
        laws: CensoredMarginals | None = None,
    ) -> None:
        self.base, self.constraint, self.layer, self.projector = base, constraint, layer, projector
        self._tangent, self._point, self._scale, self._solution = tangent, mean, scale, solution
        self._laws = laws
        self._fixed: tuple[Tensor, Tensor] | None = None
        shape = laws.loc.shape if mean is None and laws is not None else cast(Tensor, mean).shape
        super().__init__(shape[:-1], shape[-1:], validate_args=False)

    @property
    def family(self) -> Any:
        """The family of the base law."""
        return self.base.family

    @property
    def exact(self) -> bool:
        """Whether the marginals are those of the projected law, not only its first two moments."""
        if self._laws is not None:
            return not self.projector.equalities
        linear = isinstance(self.constraint, LinearEquality)
        return self.base.exact and linear and self._sampled is None

    @property
    def mean(self) -> Tensor:
        """Projected mean, (*batch, n)."""
        if self._laws is not None:
            if self._point is None:
                self._point = self._censored_mean(self._laws)
            return self._point
        return cast(Tensor, self._point) if self._sampled is None else self._sampled[0]

    def _censored_mean(self, laws: CensoredMarginals) -> Tensor:
        """The mean of the clipped marginals; where there are equalities too, the feasible point nearest to it."""
        if not self.projector.equalities:
            return laws.mean
        with _no_autocast(laws.mean):
            return self.layer._solved(self.projector, laws.mean).value

    @property
    def tangent(self) -> Differential:
        """The tangent at the projected location."""
        if self._tangent is None:
            self._tangent = self._located.tangent
        return self._tangent

    @property
    def scale(self) -> Tensor:
        """Marginal scales (*batch, n); exactly 0 where the constraint fixes a variable."""
        if self._scale is None:
            variance = self._laws.variance if self._laws is not None else self._moments[1]
            self._scale = safe_sqrt(variance / self.family.unit_variance)
        return self._scale.expand(self.batch_shape + self.event_shape)

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
        return Marginals(self.mean, self.scale, self.family) if self._laws is None else self._laws

    @property
    def stats(self) -> Stats:
        """How the projection of the mean went."""
        return self._located.stats

    @property
    def _located(self) -> Solution:
        """The projection of the location."""
        if self._solution is None:
            self._solution = self.projector.solve(self.base.loc)
        return self._solution

    def as_location_scale(self) -> LocationScale:
        """The projected law as a location-scale one with singular covariance."""
        return LocationScale(self.mean, self.cov, self.family, validate_args=False)

    def draw(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Solution:
        """Projected draws (*sample_shape, *batch, n) with the status of each."""
        z = self.base.rsample(sample_shape, generator)
        with _no_autocast(z):
            return self.projector.solve(z)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterised draws, all feasible; see ``on_failure`` for those that cannot be."""
        z = self.base.rsample(sample_shape, generator)
        with _no_autocast(z):
            solution = self.projector.solve(z)
        if not checking() or bool(solution.stats.converged.all()):
            return solution.value
        return self._handle(z, solution, Size(sample_shape), generator)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient, all feasible."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Projected:
        """The same law with broadcast batch dimensions."""
        base = self.base.expand(batch_shape)
        if self._laws is not None:
            return Projected(base, self.constraint, self.layer, self.projector, laws=self.projector.censored(base))
        mean = cast(Tensor, self._point).expand(*Size(batch_shape), *self.event_shape)
        parts = (self.layer, self.projector, mean, self.tangent, self._scale, self._solution)
        return Projected(base, self.constraint, *parts)

    @property
    def _sampled(self) -> tuple[Tensor, Tensor] | None:
        """The moments of fixed draws, where these are what is asked for."""
        return self._moments if self._scale is None or self._fixed is not None else None

    @property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of fixed antithetic draws: exact mean, pathwise gradients, common random numbers."""
        if self._fixed is None:
            self._fixed = self._fixed_draws()
        return self._fixed

    def _fixed_draws(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.base.loc.device).manual_seed(0)
        base, half = self.base, max(1, self.layer.draws // 2)
        shape = (half, *base.batch_shape)
        noise = base.family.sample(shape, base.cov.root_size, base.loc.dtype, base.loc.device, generator)
        moved = base.cov.root(noise)
        with _no_autocast(moved):
            z = torch.cat([base.loc + moved, base.loc - moved])
            solution = self.projector.solve(z)
        self.layer._check(solution.stats, self.projector, z)
        draws = torch.where(solution.stats.converged.unsqueeze(-1), solution.value, torch.nan)  # flagged, not averaged
        mean = draws.mean(0)
        return self._inside(mean), (draws - mean).square().mean(0)

    def _inside(self, mean: Tensor) -> Tensor:
        """The mean of draws, or, where the set is not convex, the feasible point nearest to it; NaN stays."""
        if not self.projector.local:
            return mean
        known = torch.isfinite(mean).all(-1, keepdim=True)
        with _no_autocast(mean):
            solution = self.layer._solved(self.projector, torch.where(known, mean, self.base.loc))
        return torch.where(known & solution.stats.converged.unsqueeze(-1), solution.value, torch.nan)

    def _handle(self, z: Tensor, solution: Solution, shape: Size, generator: torch.Generator | None) -> Tensor:
        """Draws with failures among them, as ``on_failure`` asks."""
        value, bad = solution.value, ~solution.stats.converged
        if self.layer.on_failure == "resample":
            for _ in range(RESAMPLES):
                again = self.draw(shape, generator)
                value = torch.where(bad.unsqueeze(-1), again.value, value)
                bad = bad & ~again.stats.converged
                if not bool(bad.any()):
                    return value
        found = failure(replace(solution.stats, converged=~bad), "draws")
        if self.layer.on_failure == "flag":
            warnings.warn(f"{found} They are NaN.", RuntimeWarning, stacklevel=3)
            return torch.where(bad.unsqueeze(-1), torch.nan, value)
        raise self.projector.explain(z, solution.stats) or ConvergenceError(
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


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
