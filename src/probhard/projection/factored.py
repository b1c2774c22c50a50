"""Projection on a polyhedron under a weight ``W = D + G G^T``, by projections under its diagonal part D.

The distance in ``W^-1`` is the least cost of moving a point by independent and shared noise together:

    min_u |u - z|_{W^-1}^2  =  min_e |e|^2 + |p(z + G e) - z - G e|_{D^-1}^2,

with p the projection under the diagonal weight D, which is fast for trees, single rows, profiles and bounds. The right
side is convex and smooth in e. Its gradient is ``e + G^T m`` with the multipliers ``m = D^-1 (z + G e - p)``. Its
Hessian is ``H = I + G^T D^-1 (I - T) G`` with T the tangent of p. Newton's method ends after few steps on the right
face; every iterate ``p(z + G e)`` is feasible. H is formed for few columns of G, else conjugate gradients apply it.

The tangent is ``P = T (I - G H^-1 G^T D^-1 (I - T))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.conjugate_gradients import conjugate_gradients
from probhard._util.tensors import broadcast, divide
from probhard.errors import ProbhardError
from probhard.laws.covariance import Factored
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.checked import placed
from probhard.projection.coupled import CoupledProjector
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import censored_laws
from probhard.tangent import Differential

FORMED = 64  # up to this many columns of G the Hessian is a matrix
STEPS, HALVINGS = 60, 30
SETTLED = 1e-12  # the next step's length in the metric, relative to the distance moved
LOOSE = 1e-3  # relative error of a Newton step by conjugate gradients: half the products of 1e-6, two steps more
BEYOND = 0.1  # slope behind the minimum at which a step is too long, relative to the slope at its start
ROUNDING = 1e-15  # ... and to the distance of the point from 0


@dataclass(frozen=True)
class Newton:
    """H at a solution, (*lead, r, r) by its Cholesky factor, or by its products if ``lower`` is None."""

    weight: Factored  # float64, without gradients
    tangent: Differential  # T
    lower: Tensor | None

    @classmethod
    def at(cls, weight: Factored, tangent: Differential, lead: torch.Size) -> Newton:
        """The Hessian where p has a tangent T over the leading dimensions."""
        r = weight.factor_size
        if r > FORMED:
            return cls(weight, tangent, None)
        columns = []
        for unit in torch.eye(r, dtype=torch.float64, device=weight.device):
            columns.append(cls(weight, tangent, None).product(unit.expand(*lead, r)))
        return cls(weight, tangent, _lower(torch.stack(columns, -1)))

    @cached_property
    def size(self) -> Tensor:
        """Nearly the diagonal of H, if the rows and bounds in effect are spread evenly, (*lead, r)."""
        own = self.weight.diagonal_part
        probe = torch.randn(own.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        probe = probe.to(own.device).expand(self.tangent.shape)
        gone = divide(probe - self.tangent.apply(probe), own) * probe
        share = (gone.sum(-1) / divide(probe.square(), own).sum(-1)).clamp(0, 1).unsqueeze(-1)
        return 1 + share * self.weight.factor_norms(divide(torch.ones_like(own), own))

    def product(self, e: Tensor) -> Tensor:
        """``H e``, (*lead, r)."""
        moved = self.weight.factor_apply(e)
        return e + self.weight.factor_transpose(divide(moved - self.tangent.apply(moved), self.weight.diagonal_part))

    def solve(self, right: Tensor, tolerance: float = 1e-13) -> Tensor:
        """``H^-1 r`` for r (*samples, *lead, r); by conjugate gradients to a relative tolerance."""
        if self.lower is None:
            return conjugate_gradients(self.product, right, lambda r: r / self.size, tolerance)
        return torch.cholesky_solve(right.unsqueeze(-1), self.lower).squeeze(-1)


def _lower(hessian: Tensor) -> Tensor:
    """The Cholesky factor of H; where rounding has made H indefinite, of H with eigenvalues of at least 1."""
    hessian = 0.5 * (hessian + hessian.mT)
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if not bool(failed.any()):
        return lower
    values, vectors = torch.linalg.eigh(hessian.nan_to_num(0.0, 0.0, 0.0))
    mended = (vectors * values.clamp(min=1).unsqueeze(-2)) @ vectors.mT
    other = torch.linalg.cholesky_ex(0.5 * (mended + mended.mT)).L
    return torch.where((failed > 0)[..., None, None], other, lower)


class FactoredProjector(Projector):
    """Projects under ``W = D + G G^T`` by a projector for the weight D.

    Args:
        inner: The projector under D.
        parts: The parts of the constraint.
        weight: W, with positive D.
        options: Options of the layer.
    """

    def __init__(self, inner: Projector, parts: Parts, weight: Factored, options: Options) -> None:
        self.inner, self.parts, self.given, self.options = inner, parts, weight, options
        self.moments_from, self.has_equalities = inner.moments_from, inner.has_equalities
        double = weight.to(torch.float64)
        held = None if parts.linear is None else parts.linear.system.held
        if held is not None:
            ones = torch.ones(parts.variables, dtype=torch.float64, device=double.device)
            double = double.scaled(ones.index_fill(0, held.to(double.device), 0.0))
        self.weight = double

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, self.given, self.options)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        return self.inner.explain(z, stats)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        lead = broadcast(z.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        point = z.to(torch.float64).expand(*lead, self.parts.variables)
        e, newton, found, steps, settled = self._minimised(point)
        inputs = [point, self.weight.diagonal_part, self.weight.factor_apply(e)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            # one more step, whose gradients are those of the solution
            shifted = point + self.weight.factor_apply(e)
            gap = divide(shifted - self.inner.solve(shifted).value, self.weight.diagonal_part)
            e = e - _Constant.solve(newton, e + self.weight.factor_transpose(gap))
            found = self.inner.solve(point + self.weight.factor_apply(e))
        value = found.value.to(z.dtype)
        if z.dtype != torch.float64:  # rounded again, never out of its bounds
            box = self.parts.box
            if box is not None:
                value = placed(value, value.detach().clamp(box.lower.to(value), box.upper.to(value)))
        stats = found.stats
        converged = stats.converged & settled
        if not bool(converged.all()):
            other = CoupledProjector(self.parts, self.given, self.options).solve(z)
            if bool((other.stats.converged | ~converged).all()):
                return other
        return Solution(value, FactoredTangent(newton), Stats(steps, stats.residual, converged, stats.local))

    @torch.no_grad()
    def _minimised(self, z: Tensor) -> tuple[Tensor, Newton, Solution, Tensor, Tensor]:
        """The best e (*lead, r), H and p there, the number of steps and whether e has converged, (*lead,)."""
        weight, lead = _detached(self.weight), z.shape[:-1]
        own = weight.diagonal_part
        e = z.new_zeros(*lead, weight.factor_size)
        # |G^T D^-1 z|^2 at most: the gradient is a difference of terms of that size
        size = divide(z.square() * weight.diagonal(), own.square().expand(z.shape)).sum(-1)
        steps = torch.zeros(lead, dtype=torch.int64, device=z.device)

        def at(e: Tensor) -> tuple[Solution, Tensor, Tensor]:
            shifted = z + weight.factor_apply(e)
            found = self.inner.solve(shifted)
            gap = shifted - found.value
            pull = divide(gap, own)
            return found, e + weight.factor_transpose(pull), 0.5 * (e.square().sum(-1) + (gap * pull).sum(-1))

        found, gradient, cost = at(e)
        newton = Newton.at(weight, found.tangent, lead)
        settled = torch.zeros(lead, dtype=torch.bool, device=z.device)
        for _ in range(STEPS):
            step = -newton.solve(gradient, LOOSE)
            fall = -(gradient * step).sum(-1)  # squared length of the step in the Hessian
            settled = fall <= (SETTLED**2 * 2 * cost + ROUNDING**2 * size).clamp(min=0)
            if bool(settled.all()):
                break
            length = torch.where(settled, 0.0, 1.0)
            for _ in range(HALVINGS):
                trial = at(e + length.unsqueeze(-1) * step)
                beyond = ((trial[1] * step).sum(-1) > BEYOND * fall) & ~settled
                if not bool(beyond.any()):
                    break
                length = torch.where(beyond, 0.5 * length, length)
            e, (found, gradient, cost) = e + length.unsqueeze(-1) * step, trial
            newton = Newton.at(weight, found.tangent, lead)
            steps = steps + (~settled).to(torch.int64)
        return e, newton, found, steps, settled


class _Constant(torch.autograd.Function):
    """``H^-1 r`` with H constant; H is symmetric, so its adjoint is itself."""

    @staticmethod
    def forward(ctx: object, right: Tensor, newton: Newton) -> Tensor:
        ctx.newton = newton  # type: ignore[attr-defined]
        return newton.solve(right)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return _Constant.solve(ctx.newton, gradient), None  # type: ignore[attr-defined]

    @classmethod
    def solve(cls, newton: Newton, right: Tensor) -> Tensor:
        """Apply the function."""
        result: Tensor = cls.apply(right, newton)
        return result


class FactoredTangent(Differential):
    """``P = T (I - G H^-1 G^T D^-1 (I - T))``.

    Args:
        newton: H, T and W at the solution.
    """

    def __init__(self, newton: Newton) -> None:
        self.newton, self.inner, self.weight = newton, newton.tangent, newton.weight

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape

    def apply(self, x: Tensor) -> Tensor:
        double = x.to(torch.float64)
        pull = divide(double - self.inner.apply(double), self.weight.diagonal_part)
        moved = self.newton.solve(self.weight.factor_transpose(pull))
        return self.inner.apply(double - self.weight.factor_apply(moved)).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        pulled = self.inner.transpose(x.to(torch.float64))
        moved = self.weight.factor_apply(self.newton.solve(self.weight.factor_transpose(pulled)))
        moved = divide(moved, self.weight.diagonal_part)
        return (pulled - (moved - self.inner.transpose(moved))).to(x.dtype)


def _detached(weight: Factored) -> Factored:
    """The weight without gradients."""
    with torch.no_grad():
        return weight.scaled(torch.ones_like(weight.diagonal_part))
