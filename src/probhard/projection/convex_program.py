"""Projection on any convex set that cvxpy describes, joined with other convex constraints.

    u*(z) = argmin 1/2 |R (u - z)|^2  subject to all constraints,     R^T R = W^-1.

cvxpy turns the problem into a cone program, which ``solvers.cone`` solves to rounding: Clarabel first, then Newton's
method on the optimality conditions. Their residual proves that a point is nearest. Derivatives in z, W and all data
come through cvxpylayers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE, WEIGHT_FLOOR, floored
from probhard._util.tensors import broadcast, checking
from probhard.constraints.ball import Ball
from probhard.constraints.convex_program import ConvexProgram, cvx
from probhard.constraints.shapes import Term
from probhard.errors import InfeasibleError, ParameterError, ProbhardError
from probhard.laws.covariance import Covariance, Dense, Diagonal
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.compiled_program import compiled_of
from probhard.projection.parts import Parts
from probhard.projection.smooth_sets import smoothly
from probhard.solvers.cone import Report
from probhard.tangent import Differential, tangent_of

DENSE_VARIABLES = 64  # largest number of variables whose Jacobian is formed


class ProgramProjector(Projector):
    """Projects on convex programs with linear rows, bounds and shapes, under any weight.

    Args:
        parts: The parts of the constraint.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        ParameterError: The constraint also has torch functions or a non-convex part.
    """

    moments_from = "monte-carlo"

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        functions = parts.nonlinear is not None or not all(isinstance(part, Ball) for part in parts.curved)
        if functions or parts.diminishing is not None:
            raise ParameterError(
                f"The constraint {parts.constraint!r} joins a ConvexProgram with functions of torch.",
                "The cone solver needs every part as cvxpy expressions.",
                "Write the functions in the description with cvxpy's atoms, such as cvxpy.log_sum_exp.",
            )
        self.parts, self.options = parts, options
        self.has_equalities = parts.linear is not None
        self.weight, self.root = _rooted(weight)
        self.terms = _terms(parts)
        self.held = None if parts.linear is None else parts.linear.system.held

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        return smoothly(self.parts, self.weight, z, self.solved(z), self.solved)

    def solved(self, z: Tensor, only: Tensor | None = None) -> Solution:
        """Project points z (*lead, n): all, or ``only`` some (*lead,) bool; the others are not converged.

        Raises:
            ParameterError: torch is tracing.
        """
        if not checking():
            raise ParameterError(
                "A ConvexProgram was projected on inside torch.compile, torch.export or torch.func.",
                "The cone solver runs outside of torch.",
                "Call the layer eagerly; gradients by backward() work.",
            )
        point = z.cpu().to(torch.float64)
        nearest, reports, lead = self.nearest(point, only)
        at = (torch.ones(lead, dtype=torch.bool) if only is None else only.expand(lead)).flatten()
        point = point.expand(*lead, point.shape[-1])
        steps, solved = torch.zeros(len(at), dtype=torch.int64), torch.zeros(len(at), dtype=torch.bool)
        steps[at] = torch.tensor([report.steps for report in reports], dtype=torch.int64)
        solved[at] = torch.tensor([report.solved for report in reports], dtype=torch.bool)
        steps, solved = steps.reshape(lead), solved.reshape(lead)
        nearest = point.detach().reshape(len(at), point.shape[-1]).index_put((at,), nearest).reshape(point.shape)
        value = torch.where(torch.isfinite(nearest), nearest, point.detach()).to(z)
        with torch.no_grad():
            inside = self._polished(value)
            size = torch.maximum(z.abs(), inside.abs()).amax(-1, keepdim=True)
            residual = self.parts.constraint.relative_violation(inside, size).nan_to_num(torch.inf)
        value = inside + (value - value.detach())  # feasible to rounding, with the gradients of the layer
        converged = solved.to(z.device) & (residual <= TOLERANCE[z.dtype])
        stats = Stats(steps.to(z.device), residual, converged)
        return Solution(value, ProgramTangent(self, point.detach(), only), stats)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        at = tuple(int(i) for i in torch.nonzero(~stats.converged)[0])
        point = z.detach().cpu().to(torch.float64).expand(*stats.converged.shape, -1)
        plain = torch.ones_like(self.root) if isinstance(self.weight, Diagonal) else torch.eye(point.shape[-1])
        origin = torch.zeros_like(point)
        if self.held is not None:
            origin[..., self.held.cpu()] = point[..., self.held.cpu()]
        with torch.no_grad():  # from the origin in a plain metric, so that bad scaling does not look like an empty set
            _, reports, _ = self.nearest(origin, at, plain.to(point))
        if "PrimalInfeasible" not in reports[0].status:
            return None
        where = f" in batch element {at}" if at else ""
        return InfeasibleError(
            f"The constraints {self.parts.constraint!r} contradict each other{where}.",
            "The cone solver proved that no point satisfies all of them.",
            "Leave one out, or relax it.",
        )

    def nearest(
        self, z: Tensor, only: tuple[int, ...] | Tensor | None = None, root: Tensor | None = None
    ) -> tuple[Tensor, list[Report], torch.Size]:
        """Solve the cone programs of points z (*lead, n), in float64 on the CPU.

        Args:
            z: Points to project.
            only: Index of a single point to solve for, or which points to solve for, (*lead,) bool; all if None.
            root: R to use instead of that of the weight.

        Returns:
            Points (k, n) over the flattened leading dimensions, one report each, and all leading dimensions.
        """
        root = self.root if root is None else root
        diagonal, terms, n = isinstance(self.weight, Diagonal), list(self.terms), z.shape[-1]
        if self.held is not None:
            held = self.held.cpu()
            index, fixed = held.numpy(), z.index_select(-1, held)
            terms.append(Term(("held", *index), lambda u, b: [u[index] == b], (fixed,), ((len(index),),)))
        own = [(root, root.shape[-1 if diagonal else -2 :]), (z, (n,))]
        own += [(x, shape) for term in terms for x, shape in zip(term.data, term.shapes)]
        lead = broadcast(*(x.shape[: x.dim() - len(shape)] for x, shape in own))
        flat = [x.expand((*lead, *shape))[() if only is None else only].reshape(-1, *shape) for x, shape in own]
        moved = flat[0] * flat[1] if diagonal else (flat[0] @ flat[1].unsqueeze(-1)).squeeze(-1)  # R z
        size = moved.detach().norm(dim=-1)
        weights = flat[0].detach() if diagonal else flat[0].detach().norm(dim=-2)
        scale = 1 / torch.maximum(size, weights.amin(-1))
        points, reports = compiled_of(terms, n, diagonal)(flat[0], moved, flat[2:], scale)
        return points, reports, lead

    def _polished(self, value: Tensor) -> Tensor:
        """Linear equalities in closed form and bounds by clipping, after rounding to the caller's precision."""
        linear = self.parts.linear
        if linear is not None:
            value = tangent_of(linear.system, self.weight.to(value.device)).project(value, linear.b)
        lower, upper = self.parts.bounds(value)
        return torch.minimum(torch.maximum(value, lower), upper)


class ProgramTangent(Differential):
    """``du*/dz`` by backward passes through the problem, which is solved again. It is not differentiable itself.

    Args:
        projector: The projector.
        z: The points that were projected, (*lead, n).
        only: Which of them were, (*lead,) bool, all if None; products are 0 for the others.
    """

    def __init__(self, projector: ProgramProjector, z: Tensor, only: Tensor | None = None) -> None:
        self.projector, self.z, self.only = projector, z, only
        self._graph: tuple[Tensor, Tensor] | None = None
        self._matrix: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.z.shape

    @property
    def matrix(self) -> Tensor:
        """The Jacobian, (*batch, n, n).

        Raises:
            ParameterError: There are more than ``DENSE_VARIABLES`` variables.
        """
        n = self.z.shape[-1]
        if n > DENSE_VARIABLES:
            raise ParameterError(
                f"The Jacobian of a ConvexProgram was asked for {n} variables.",
                f"It takes one backward pass for each and is formed up to {DENSE_VARIABLES}.",
                "Use covariance='monte-carlo' and draws instead of products with the covariance.",
            )
        if self._matrix is None:
            rows = [self._pulled(unit.expand(self.z.shape)) for unit in torch.eye(n, dtype=torch.float64)]
            self._matrix = torch.stack(rows, -2)
        return self._matrix

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix.to(x.device) @ x.to(torch.float64).unsqueeze(-1)).squeeze(-1).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        lead = broadcast(x.shape, self.z.shape)
        each = x.cpu().to(torch.float64).expand(lead).reshape(-1, *self.z.shape)
        return torch.stack([self._pulled(one) for one in each]).reshape(lead).to(x)

    def variance(self, cov: Covariance) -> Tensor:
        matrix = self.matrix.to(cov.device)
        return (matrix @ cov.to(torch.float64).dense() * matrix).sum(-1).to(cov.dtype)

    def _pulled(self, x: Tensor) -> Tensor:
        """``P^T x`` for one x of the points' shape."""
        if self._graph is None:
            with torch.enable_grad():
                z = self.z.clone().requires_grad_()
                value = self.projector.nearest(z, self.only)[0]
                self._graph = z, value.reshape(self.z.shape) if self.only is None else value
        z, value = self._graph
        return torch.autograd.grad(value, z, x if self.only is None else x[self.only], retain_graph=True)[0]


def _rooted(weight: Covariance) -> tuple[Covariance, Tensor]:
    """The weight with small variances raised to the floor, and R with ``R^T R = W^-1``: its diagonal, or a matrix."""
    if isinstance(weight, Diagonal):
        variance = weight.variance.cpu().to(torch.float64)
        top = variance.detach().amax(-1, keepdim=True)
        variance = torch.where(top > 0, floored(variance), WEIGHT_FLOOR)
        return Diagonal(variance), variance.rsqrt()
    matrix = weight.to("cpu", torch.float64).dense()
    top = matrix.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64)
    factor = torch.linalg.cholesky(matrix + WEIGHT_FLOOR * torch.where(top > 0, top, 1.0) * eye)
    return Dense(factor), torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def _terms(parts: Parts) -> list[Term]:
    """All parts of the constraint as terms of a cvxpy problem."""
    like = torch.empty(0, dtype=torch.float64)
    terms = []
    for program in parts.convex_programs:
        assert isinstance(program, ConvexProgram)
        data = tuple(x.to(like) for x in program.args)
        terms.append(Term((program.compiled,), _described(program), data, program.compiled.shapes))
    if parts.linear is not None:
        system, linear = parts.linear.system, parts.linear.to(like)
        kept = slice(None) if system.redundancy is None else torch.from_numpy(system.redundancy.others)
        terms.append(_rows(("==", system), linear.A[..., kept, :], linear.b[..., kept], lambda x, b: x == b))
    for sign, bound in zip((1.0, -1.0), parts.bounds(like)):  # lower <= u and -upper <= -u
        finite = torch.isfinite(bound)
        index = np.flatnonzero(finite.reshape(-1, parts.variables).any(0).numpy())
        if len(index):
            mask, value = finite[..., index].to(like), torch.where(finite, sign * bound, -1.0)[..., index]
            terms.append(Term((">=", sign, *index), _bounded(sign, index), (mask, value), ((len(index),),) * 2))
    for inequality in parts.inequalities:
        matrix, d = inequality.prepared.map.at(like).dense(), inequality.d.to(like)
        finite = torch.isfinite(d)
        if not bool(finite.all()):  # rows without a bound in some element become 0 <= 1 there
            matrix, d = matrix * finite.unsqueeze(-1), torch.where(finite, d, 1.0)
        terms.append(_rows(("<=", inequality.prepared), matrix, d, lambda x, d: x <= d, bool(finite.all())))
    terms += [_ball(part, parts.variables, like) for part in parts.curved if isinstance(part, Ball)]
    terms += [cone.term(parts.variables, like) for cone in parts.cones]
    return terms + [shape.term(parts.variables, like) for shape in parts.shapes]


def _ball(ball: Ball, n: int, like: Tensor) -> Term:
    cp = cvx("cvxpy")
    center = like.new_zeros(n) if ball.center is None else ball.center.to(like)
    data = ball.radius.to(like), center.expand(*center.shape[:-1], n)
    return Term(("ball", n), lambda u, radius, middle: [cp.norm(u - middle, 2) <= radius], data, ((), (n,)))


def _described(program: ConvexProgram) -> Callable[..., Any]:
    """The user's description of a program, with its parameters as further arguments."""
    make = program.compiled.constraints
    return lambda u, *parameters: make(u, list(parameters))


def _bounded(sign: float, index: np.ndarray) -> Callable[..., Any]:
    """Bounds of some variables; the mask is 0 for elements without one."""
    cp = cvx("cvxpy")
    return lambda u, mask, bound: [cp.multiply(mask, sign * u[index]) >= bound]


def _rows(key: Any, matrix: Tensor, right: Tensor, relation: Any, shared: bool = True) -> Term:
    """Linear rows: constants if all elements share them, parameters if they differ or are trained."""
    count = matrix.shape[-2]
    if shared and matrix.dim() == 2 and not matrix.requires_grad:
        fixed = sp.csr_array(matrix.numpy())
        return Term(key, lambda u, b: [relation(fixed @ u, b)], (right,), ((count,),))
    shapes = (tuple(matrix.shape[-2:]), (count,))
    return Term((key[0], count), lambda u, a, b: [relation(a @ u, b)], (matrix, right), shapes)
