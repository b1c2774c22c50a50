"""Projection on ``h(u) = 0`` and linear rows: points by SQP, derivatives by the implicit function theorem.

    u* = argmin |u - z|_Q^2 / 2     subject to  h(u) = 0,  A u = b,     Q = W^-1.

``solvers.sqp`` finds the points without gradients, which are attached afterwards. With Gauss-Newton curvature (the
paper's) that is one linear projection with the Jacobian at the solution. With exact curvature the adjoint system
``(I + P W C) x = P W g`` is solved by conjugate gradients. C is the sum of the multipliers times the Hessians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import broadcast, checking, divide, matvec, safe_sqrt
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality, check_start
from probhard.errors import ParameterError, ProbhardError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.linear_digits import restored
from probhard.projection.nonlinear_diagnosis import Attempt
from probhard.rows.redundant import RedundantRows
from probhard.solvers import sqp
from probhard.solvers.linearised import Linearised, revealed
from probhard.solvers.sqp_steps import Iterates
from probhard.tangent import Differential, PinnedTangent, ProjectedCovariance, Tangent, tangent_of

DENSE_VARIABLES = 256  # largest number of variables whose exact KKT system is solved densely


class NonlinearProjector(Projector):
    """Projects on ``h(u) = 0`` and linear rows. Points are projected on the rows first; every step satisfies them.

    Args:
        linear: The linear rows, or None.
        curved: h.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        InfeasibleError: W leaves a linear row no variable to move, and ``options.validate`` is set.
    """

    local = True

    def __init__(
        self,
        linear: LinearEquality | None,
        curved: NonlinearEquality,
        weight: Covariance,
        options: Options,
    ) -> None:
        self.linear, self.curved, self.options = linear, curved, options
        self.exact = options.exact
        self.weight = weight.to(torch.float64)
        self.first: Tangent | None = None
        self.attempt: Attempt | None = None
        if linear is not None:
            self.first = tangent_of(linear.system, self.weight)
            if options.validate and checking():
                self.first.check()
            if isinstance(self.first, PinnedTangent) and isinstance(self.weight, Diagonal):
                self.weight = Diagonal(linear.system.at(self.weight.variance).movable(self.weight.variance))
            else:
                self.weight = ProjectedCovariance(self.first, self.weight)

    @property
    def own(self) -> bool:
        """Whether the covariance, projected on the linear rows, is the weight of the curved part."""
        held = self.linear is not None and self.linear.system.held is not None
        return self.options.oblique and not held

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        solution = self.solve(z)
        assert isinstance(solution.tangent, NonlinearTangent)
        variance = solution.tangent.variance(None if self.own and not self.exact else cov)
        return solution, solution.value, safe_sqrt(variance).to(z.dtype), solution.tangent

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        point = z.to(torch.float64)
        if self.first is not None and self.linear is not None:
            point = self.first.project(point, self.linear.b)
        point = point.expand(broadcast(point.shape, (*self.weight.shape[:-1], point.shape[-1])))
        if self.options.validate:
            check_start(self.curved, point.detach())
        guess = None if start is None else start.detach().to(torch.float64).expand(point.shape)
        if guess is not None and self.first is not None and self.linear is not None:
            guess = self.first.project(guess, self.linear.b).detach()
        options = self.options
        iterates = sqp.solve(
            self.curved, point.detach(), _detached(self.weight), guess, options.hessian, options.restarts
        )
        self.attempt = Attempt(self.curved, point.detach(), _detached(self.weight).diagonal(), iterates)
        value = self.attached(point, iterates)
        converged, residual = iterates.converged, iterates.residual
        if self.linear is not None and self.first is not None:
            weight = _detached(self.weight)
            value, residual = restored(self.linear, self.first, self.curved, weight, value, residual)
            converged = converged & (residual <= TOLERANCE[torch.float64])
        stats = Stats(iterates.steps, residual, converged, self.local)
        return Solution(value.to(z.dtype), NonlinearTangent(self, point, value, iterates), stats)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        return None if self.attempt is None else self.attempt.explained(stats)

    def attached(self, z: Tensor, iterates: Iterates) -> Tensor:
        """The nearest points with gradients in z, in the weight and in the constraint's data.

        Args:
            z: The points that were projected, (*lead, n).
            iterates: The result of the solver for them.

        Returns:
            The nearest points, (*lead, n).
        """
        needs = torch.is_grad_enabled() and (
            z.requires_grad
            or self.weight.diagonal().requires_grad
            or any(isinstance(a, Tensor) and a.requires_grad for a in self.curved.args)
        )
        if not needs:
            return iterates.u
        if not self.exact:
            with torch.no_grad():
                rows = self.curved.jacobian_rows(iterates.u)
            tangent = revealed(rows, self.weight)
            moved = tangent.project(z, rows.apply(iterates.u) - self.curved.residual(iterates.u))
            return iterates.u + moved - moved.detach()
        pulled = _pulled(self.curved, iterates)
        first = z - self.weight.apply(pulled) - iterates.u
        return cast(Tensor, ImplicitStep.apply(iterates.u, first, self.curved.residual(iterates.u), self, iterates))


class NonlinearTangent(Differential):
    """The tangent of a nonlinear projection at its solution; the tangent of the linear rows is applied first.

    Args:
        projector: The projector.
        z: Points after the projection on the linear rows, (*lead, n).
        value: The nearest points, (*lead, n).
        iterates: The result of the solver.
    """

    def __init__(self, projector: NonlinearProjector, z: Tensor, value: Tensor, iterates: Iterates) -> None:
        self.projector, self.z, self.value, self.iterates = projector, z, value, iterates
        self._rows: Tangent | None = None
        self._matrix: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def linearised(self) -> Tangent:
        """The Gauss-Newton tangent ``I - W J^T (J W J^T)^-1 J``; its gradients reach the point through J."""
        if self._rows is None:
            rows = self.projector.curved.jacobian_rows(self.value)
            self._rows = revealed(rows, self.projector.weight)
        return self._rows

    def apply(self, x: Tensor) -> Tensor:
        x = x.to(torch.float64)
        x = x if self.projector.first is None else self.projector.first.apply(x)
        return self._curved(x) if self.projector.exact else self.linearised.apply(x)

    def moved(self, x: Tensor) -> Tensor:
        """``apply`` to points x (*samples, *batch, n) that satisfy the linear rows, with gradients of few variables."""
        if not self.projector.exact:
            return self.linearised.apply(x)
        return matvec(self._dense(), x) if x.shape[-1] <= DENSE_VARIABLES else self._curved(x)

    def transpose(self, x: Tensor) -> Tensor:
        if self.projector.exact:
            near, bend = _at_solution(self.projector, self.iterates)
            y = near.tangential(bend, near.dual(x.to(torch.float64)))[0]
            x = near.dual(x - bend(y))
            return x if self.projector.first is None else self.projector.first.transpose(x)
        x = self.linearised.transpose(x.to(torch.float64))
        return x if self.projector.first is None else self.projector.first.transpose(x)

    def variance(self, cov: Covariance | None = None) -> Tensor:
        """``diag(P C P^T)``, (*batch, n); if None, C is the weight of the projector."""
        if cov is None and not self.projector.exact:
            return self.linearised.variance()
        cov = (self.projector.weight if cov is None else cov).to(torch.float64)
        small = self.value.shape[-1] <= DENSE_VARIABLES
        if self.projector.exact and (small or (torch.is_grad_enabled() and self._needs_gradient(cov))):
            return self._dense_variance(cov)
        if self.projector.exact:
            return super().variance(cov)
        first = self.projector.first
        if first is None:
            return self.linearised.variance(cov)
        if isinstance(first, PinnedTangent) and isinstance(cov, Diagonal):
            return self.linearised.variance(Diagonal(first.system.free(cov.variance)))
        return self.linearised.variance(ProjectedCovariance(first, cov))

    def _needs_gradient(self, cov: Covariance) -> bool:
        weight = self.projector.weight.diagonal()
        return self.value.requires_grad or weight.requires_grad or cov.diagonal().requires_grad

    def _dense_variance(self, cov: Covariance) -> Tensor:
        """Exact variances and gradients under any weight, for few variables."""
        tangent = self._dense()
        inner = cov if self.projector.first is None else ProjectedCovariance(self.projector.first, cov)
        return (tangent @ inner.dense() * tangent).sum(-1)

    def _dense(self) -> Tensor:
        """The exact tangent (*batch, n, n) of the curved part, from the dense KKT system."""
        if self._matrix is not None:
            return self._matrix
        n, rows = self.value.shape[-1], self.linearised
        if n > DENSE_VARIABLES:
            raise ParameterError(
                f"curvature='exact' was asked for gradients of the variances of {n} variables.",
                f"They need dense Hessians, which are formed for up to {DENSE_VARIABLES} variables.",
                "Use curvature='gauss-newton', or covariance='monte-carlo' with exact curvature.",
            )
        multiplier = rows.multiplier(rows.core.apply(self.z - self.value))
        directions = torch.eye(n, dtype=self.value.dtype, device=self.value.device)
        directions = directions.reshape(n, *[1] * (self.value.dim() - 1), n).expand(n, *self.value.shape)
        bend = self.projector.curved.curvature
        bent = torch.func.vmap(lambda x: bend(self.value, multiplier, x))(directions).movedim(0, -1)
        weight = self.projector.weight.dense()
        matrix = rows.core.dense()
        upper = torch.cat([torch.eye(n).to(bent) + weight @ bent, weight @ matrix.mT], -1)
        corner = -rows.core.filling if isinstance(rows.core, RedundantRows) else matrix.new_zeros(matrix.shape[-2], 1)
        corner = corner.expand(*matrix.shape[:-1], matrix.shape[-2])
        lower = torch.cat([matrix, corner], -1).expand(*upper.shape[:-2], -1, -1)
        right = torch.eye(n + matrix.shape[-2], n).to(bent).expand(*upper.shape[:-2], -1, -1)
        self._matrix = torch.linalg.solve(torch.cat([upper, lower], -2), right)[..., :n, :]
        return self._matrix

    def _curved(self, x: Tensor) -> Tensor:
        """``du*/dz x`` with exact curvature: ``(I + P W C) y = P x``."""
        weight = self.projector.weight
        if not isinstance(weight, Diagonal):
            raise ParameterError(
                f"curvature='exact' got a metric that couples {x.shape[-1]} variables.",
                f"Beyond {DENSE_VARIABLES} variables its forward products divide by the weights.",
                "Use curvature='gauss-newton', or a diagonal covariance or metric.",
            )
        shape = x.shape
        near, bend = _at_solution(self.projector, self.iterates)
        dual = near.dual(divide(x, weight.variance.expand(shape)))
        return near.tangential(bend, dual)[0]


class ImplicitStep(torch.autograd.Function):
    """The solution as a function of ``z - W J^T l - u`` and of h: value u, adjoint by the exact KKT system."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, first: Tensor, h: Tensor, projector: Any, iterates: Any) -> Tensor:
        """Return u and save the solution for the backward pass."""
        ctx.projector, ctx.iterates = projector, iterates
        return u.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Solve ``(I + P W C) x = P W g``; pull ``g - C x`` back."""
        (g,) = gradients
        near, bend = _at_solution(ctx.projector, ctx.iterates)
        x = near.tangential(bend, near.dual(g))[0]
        rest = g - bend(x)
        pushed = near.multiplier(near.push(near.weight.apply(rest)))
        return None, near.dual(rest), -pushed, None, None


def _at_solution(projector: NonlinearProjector, iterates: Iterates) -> tuple[Linearised, Callable[[Tensor], Tensor]]:
    """The linearised constraint at the solution and the product with ``C``."""
    near = Linearised.at(projector.curved, iterates.u, _detached(projector.weight))

    def bend(x: Tensor) -> Tensor:
        u, multiplier = iterates.u.expand(x.shape), iterates.multiplier
        return projector.curved.curvature(u, multiplier.expand(*x.shape[:-1], -1), x)

    return near, bend


def _pulled(curved: NonlinearEquality, iterates: Iterates) -> Tensor:
    """``J(u)^T l`` at the solution, attached to the constraint's data."""

    def weighted(u: Tensor) -> Tensor:
        return (iterates.multiplier * curved.residual(u)).sum()

    return torch.func.grad(weighted)(iterates.u)


def _detached(weight: Covariance) -> Covariance:
    """The weight without gradients."""
    if isinstance(weight, Diagonal):
        return Diagonal(weight.variance.detach())
    return weight
