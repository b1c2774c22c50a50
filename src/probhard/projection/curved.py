"""Projection on curved inequalities, and on curved equalities with bounds, under a diagonal weight.

    u* = argmin |u - z|_Q^2 / 2     subject to  h(u) = 0,   g(u) <= 0,   lower <= u <= upper,  and linear rows.

``curved_faces`` finds the active bounds and functions and the point there. On that face the problem is a nonlinear
equality in (u, s), whose gradients and tangent are those of ``NonlinearProjector``. For convex functions the point is
the nearest; for others it may be a local minimum, which the statistics report.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import TINY, floored
from probhard._util.tensors import broadcast
from probhard.constraints.nonlinear import check_start
from probhard.errors import ParameterError, ProbhardError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.checked import finished, within
from probhard.projection.curved_faces import FaceSearch
from probhard.projection.curved_functions import JointFunction, masked_weight
from probhard.projection.inactive import without_curved
from probhard.projection.nonlinear import NonlinearProjector, NonlinearTangent
from probhard.projection.nonlinear_diagnosis import Attempt
from probhard.projection.parts import Parts
from probhard.projection.smooth_sets import smoothly
from probhard.tangent import Differential


class CurvedProjector(Projector):
    """Projects on functions, bounds and rows under a diagonal weight.

    Args:
        parts: The parts of the constraint.
        weight: W, which must be diagonal.
        options: Options of the layer.

    Raises:
        ParameterError: The weight couples variables, or a total variation is joined with functions.
    """

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        if not isinstance(weight, Diagonal):
            raise ParameterError(
                f"The constraint {parts.constraint!r} got a metric that couples variables.",
                "Curved constraints with inequalities are solved under diagonal metrics.",
                "Use a diagonal covariance, metric='orthogonal', or a DiagonalMetric.",
            )
        if not all(shape.only_rows for shape in parts.shapes):
            raise ParameterError(
                f"The constraint {parts.constraint!r} joins a total variation or an L1 ball with curved functions.",
                "No solver handles both at once.",
                "Leave one out, or describe the set as a ConvexProgram.",
            )
        self.parts = parts
        self.options = replace(options, exact=options.exact or bool(parts.curved))
        variance = weight.variance.to(torch.float64)
        self.weight = torch.where(variance > 0, floored(variance), 0.0)  # variables without a variance are known
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = True
        self.attempt: Attempt | None = None
        self.function = JointFunction(parts, self.weight.new_empty(0))
        self.local = not self.function.convex

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        weight = Diagonal(self.weight)

        def solved(point: Tensor) -> Solution:
            return without_curved(self.parts, weight, self.options, point, lambda own: self._solved(own, start))

        return smoothly(self.parts, weight, z, solved(z), solved)

    def _solved(self, z: Tensor, start: Tensor | None) -> Solution:
        n, options = self.parts.variables, self.options
        double = z.to(torch.float64)
        lower, upper = self.parts.bounds(double)
        lead = broadcast(*(x.shape[:-1] for x in (double, self.weight, lower, upper)), self.function.batch_shape)
        double, lower, upper = (x.expand(*lead, n) for x in (double, lower, upper))
        double, lower, upper = self.function.pinned(double, lower, upper)
        function = self.function.in_units(double.detach())
        if function.unit != 1:
            double, lower, upper = (x / function.unit for x in (double, lower, upper))
            start = None if start is None else start / function.unit
        if options.validate:
            check_start(function.equation(), torch.cat([double.detach(), function.no_slack(lead)], -1))
        weight = self.weight.expand(*lead, n)
        weight = weight / weight.detach().amax(-1, keepdim=True).clamp(min=TINY)
        search = FaceSearch(function, options.hessian or bool(self.parts.curved), options.restarts)
        face = search.solve(double.detach(), weight.detach(), lower.detach(), upper.detach(), start)
        side, iterates, free = face.side, face.iterates, face.side == 0
        equation = function.equation(function.active(side))
        inner = NonlinearProjector(None, equation, Diagonal(masked_weight(function, weight, side)), options)
        bound = torch.where(side[..., :n] < 0, lower, upper)
        point = torch.where(free[..., :n], double, torch.where(torch.isfinite(bound), bound, 0.0))
        slack = iterates.u[..., n:]
        self.attempt = Attempt(equation, torch.cat([point.detach(), slack], -1), inner.weight.diagonal(), iterates)
        whole = torch.cat([point, torch.zeros_like(slack)], -1)
        value = inner.attached(whole, iterates)[..., :n]
        value = torch.where(free[..., :n], value, point)
        value = within(value, double, lower, upper)
        tangent = MaskedTangent(NonlinearTangent(inner, whole, torch.cat([value, slack], -1), iterates), free, n)
        if function.unit != 1:  # bounds are exact: units are powers of 2
            value = function.unit * value
        return finished(self.parts, z, value, tangent, iterates.steps, face.settled, self.local)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        return None if self.attempt is None else self.attempt.explained(stats)

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        assert self.parts.nonlinear is not None
        weight = Diagonal(self.weight.to(base.loc.dtype))
        inner = NonlinearProjector(self.parts.linear, self.parts.nonlinear, weight, self.options)
        _, loc, scale, _ = inner.moments(base.loc, base.cov)
        lower, upper = self.parts.bounds(loc)
        return CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)


class MaskedTangent(Differential):
    """A tangent in (u, s) restricted to free variables.

    Args:
        inner: The tangent over variables and slacks.
        free: Which of them are free, (*lead, N) bool.
        variables: Number n of variables.
    """

    def __init__(self, inner: NonlinearTangent, free: Tensor, variables: int) -> None:
        self.inner, self.free, self.variables = inner, free, variables

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.free.shape[:-1], self.variables))

    def apply(self, x: Tensor) -> Tensor:
        return self._cut(self.inner.apply(self._padded(x))).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return self._cut(self.inner.transpose(self._padded(x))).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            return self._cut(self.inner.variance(Diagonal(self._padded(cov.variance)))).to(cov.dtype)
        return super().variance(cov)

    def _padded(self, x: Tensor) -> Tensor:
        """Zeros at held variables and for slacks, (*lead, N)."""
        x = torch.where(self.free[..., : self.variables], x.to(torch.float64), 0.0)
        extra = self.free.shape[-1] - self.variables
        return torch.cat([x, x.new_zeros(*x.shape[:-1], extra)], -1) if extra else x

    def _cut(self, x: Tensor) -> Tensor:
        """The variables of x (*lead, N), with zeros where held."""
        return torch.where(self.free, x, 0.0)[..., : self.variables]
