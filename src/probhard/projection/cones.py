"""Projection on second-order and semidefinite cones, joined with rows and bounds, under any weight.

    u* = argmin |u - z|_Q^2 / 2     subject to  M u + m in K,     W = Q^-1 = L L^T.

A standard cone under equal weights has a closed form: negative eigenvalues become 0. Everything else is solved for
``u = z + L h`` by ``solvers.symmetric_cones``, with rows and bounds as cones {0} and ``x >= 0``. One more Newton step
on the optimality conditions, differentiated, carries the gradients in z, W and all data.

The tangent is ``L T L^-1``. T projects on the directions that keep active rows and zero eigenvalues, and bends with the
cone: with the curvature C (ratios of negative to positive eigenvalues of ``M u + m - y``) and the projector P on those
directions, ``T = P (I + P C P)^-1 P``. At kinks an eigenvalue of 0 within rounding counts as free, as a variable that
touches its bound does: points of the set have the identity as their tangent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE, WEIGHT_FLOOR, floored
from probhard._util.tensors import broadcast, checking, matvec
from probhard.constraints.cones import matrix_of, vectorise
from probhard.constraints.semidefinite import Correlation
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.cone_rows import cone_rows
from probhard.projection.inactive import without_curved
from probhard.projection.parts import Parts
from probhard.projection.second_try import by_program
from probhard.solvers.cone_frames import Frame, frame, nearest
from probhard.solvers.symmetric_cones import Cones, solve
from probhard.tangent import Differential

KINK = 1e-9  # eigenvalues this small next to others count as 0 in derivatives
RANK = 1e-10  # relative size of directions that active rows do not fix
CHUNK = 2e7  # numbers in the matrices that are solved at once


class ConeProjector(Projector):
    """Projects on cones with linear rows, bounds and shapes of rows, under any weight.

    Args:
        parts: The parts of the constraint.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        ParameterError: The constraint also has other curved parts.
    """

    moments_from = "monte-carlo"

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        self.parts, self.weight, self.options = parts, weight, options
        self.has_equalities = parts.linear is not None
        self.rows = cone_rows(parts, torch.empty(0, dtype=torch.float64, device=weight.device))

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        if not checking():
            raise ParameterError(
                f"The constraint {self.parts.constraint!r} was projected on inside torch.compile or torch.func.",
                "Its solver looks at values.",
                "Call the layer eagerly; gradients by backward() work.",
            )
        double = z.to(torch.float64)
        if self._direct:
            shape = broadcast(z.shape, self.weight.shape)
            return self._spectral(z, double.expand(shape))
        return without_curved(self.parts, self.weight, self.options, z, self._checked)

    def _checked(self, z: Tensor) -> Solution:
        """Points, by the solver of convex programs where the own one fails; it is slower and needs cvxpy."""
        return by_program(self.parts, self.weight, z, self._iterated(z), self._iterated)

    @property
    def _direct(self) -> bool:
        """Whether the set is one standard cone, and all weights are equal and constant."""
        alone = len(self.rows.cones.blocks) == 1 and len(self.parts.cones) == 1 and self.parts.cones[0].standard
        if not alone or not isinstance(self.weight, Diagonal):
            return False
        variance = self.weight.variance
        return not variance.requires_grad and bool((variance == variance[..., :1]).all())

    def _spectral(self, z: Tensor, double: Tensor) -> Solution:
        flat = double.detach().reshape(-1, double.shape[-1])
        found = frame(self.parts.cones[0].kind, flat, KINK)
        tangent = SpectralTangent(found, double.shape)
        value = found.nearest.reshape(double.shape)
        value = value + tangent.apply(double - double.detach()) if double.requires_grad else value
        return self._finished(z, value, tangent, torch.zeros(double.shape[:-1], dtype=torch.int64), None)

    def _iterated(self, z: Tensor) -> Solution:
        double, rows, n = z.to(torch.float64), self.rows, self.parts.variables
        root = self._root()
        lead = broadcast(double.shape[:-1], root.shape[:-2], rows.M.shape[:-2], rows.m.shape[:-1])
        flat = _Flat(
            double.detach().expand(*lead, n).reshape(-1, n),
            root.expand(*lead, n, n).reshape(-1, n, n),
            rows.M.detach().expand(*lead, *rows.M.shape[-2:]).reshape(-1, *rows.M.shape[-2:]),
            rows.m.detach().expand(*lead, rows.m.shape[-1]).reshape(-1, rows.m.shape[-1]),
        )
        count = max(int(CHUNK / max(n * rows.M.shape[-2], 1)), 1)
        h, y, steps, settled = (torch.cat(x) for x in zip(*(_solved(rows.cones, *x) for x in flat.chunks(count))))
        u = (flat.z + (flat.root @ h.unsqueeze(-1)).squeeze(-1)).reshape(*lead, n)
        y = y.reshape(*lead, y.shape[-1])
        tangent = ConeTangent(rows.cones, flat, u, y)
        with torch.no_grad():
            size = torch.maximum(double.abs(), u.abs()).amax(-1, keepdim=True)
            residual = self.parts.constraint.relative_violation(u, size)
            if bool((residual > 0.01 * TOLERANCE[torch.float64]).any()):  # such as at the tip of a cone
                u = u - tangent.answer(tangent.gap)
        value = self._attached(double, u, y, tangent)
        return self._finished(z, value, tangent, steps.reshape(lead), settled.reshape(lead))

    def _root(self) -> Tensor:
        """L (*batch, n, n) with ``W = L L^T``, lower triangular."""
        if isinstance(self.weight, Diagonal):
            variance = self.weight.variance.detach().to(torch.float64)
            top = variance.amax(-1, keepdim=True)
            return torch.diag_embed(torch.where(top > 0, floored(variance), 1.0).sqrt())
        matrix = self.weight.to(torch.float64).dense().detach()
        size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        eye = torch.eye(matrix.shape[-1]).to(matrix)
        return torch.linalg.cholesky(torch.where(size > 0, matrix, eye) + WEIGHT_FLOOR * size * eye)

    def _attached(self, z: Tensor, u: Tensor, y: Tensor, tangent: ConeTangent) -> Tensor:
        """The points u with gradients: one Newton step from u on conditions that hold there."""
        rows = self.rows
        weight = self.weight.diagonal() if isinstance(self.weight, Diagonal) else self.weight.dense()
        trained = rows.M.requires_grad or rows.m.requires_grad
        if not torch.is_grad_enabled() or not (z.requires_grad or weight.requires_grad or trained):
            return u
        push = matvec(rows.M.mT, y)
        weight = weight.to(torch.float64)
        moved = z + (weight * push if isinstance(self.weight, Diagonal) else matvec(weight, push))
        value = u + tangent.apply(moved - moved.detach())
        if trained:
            reached = matvec(rows.M, u) + rows.m
            value = value - tangent.answer(reached - reached.detach())
        return value

    def _finished(
        self, z: Tensor, value: Tensor, tangent: Differential, steps: Tensor, settled: Tensor | None
    ) -> Solution:
        with torch.no_grad():
            inside = self._inside(value.detach(), z.dtype)
            size = torch.maximum(z.abs(), inside.abs()).amax(-1, keepdim=True)
            residual = self.parts.constraint.relative_violation(inside, size)
        value = inside + (value - value.detach()).to(z.dtype) if value.requires_grad else inside
        converged = residual <= TOLERANCE[z.dtype]
        return Solution(value, tangent, Stats(steps, residual, converged if settled is None else converged & settled))

    def _inside(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Points that are feasible to rounding: standard cones and bounds by clipping, exact ones in correlations."""
        for cone in self.parts.cones:
            if cone.standard:
                value = nearest(cone.kind, value)
        if isinstance(self.parts.constraint, Correlation):
            matrix = matrix_of(value)
            size = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
            value = vectorise(matrix / (size.unsqueeze(-1) * size.unsqueeze(-2)))
            value[..., self.parts.constraint.diagonal] = 1.0
        value = value.to(dtype)
        lower, upper = self.parts.bounds(value)
        return torch.minimum(torch.maximum(value, lower), upper)


@dataclass(frozen=True)
class _Flat:
    """Points and their data over flattened leading dimensions."""

    z: Tensor  # (k, n)
    root: Tensor  # (k, n, n)
    M: Tensor  # (k, m, n)
    m: Tensor  # (k, m)

    def chunks(self, count: int) -> list[tuple[Tensor, ...]]:
        """``count`` points at a time."""
        return list(zip(*(x.split(count) for x in (self.z, self.root, self.M, self.m))))


def _solved(cones: Cones, z: Tensor, root: Tensor, M: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """h, multipliers of the rows, steps and whether solved."""
    G, g = M @ root, matvec(M, z) + m
    scale = cones.scales(G)
    found = solve(cones, scale.unsqueeze(-1) * G, scale * g)
    return found.h, scale * found.y, found.steps, found.settled


class SpectralTangent(Differential):
    """The derivative of a projection in the eigenvectors of its point. It is symmetric.

    Args:
        found: The frame of the points, over flattened leading dimensions.
        shape: ``(*batch, n)``.
    """

    def __init__(self, found: Frame, shape: torch.Size) -> None:
        self._shape, self.found = shape, found

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @cached_property
    def matrix(self) -> Tensor:
        """The Jacobian, (*batch, n, n)."""
        basis = self.found.basis
        assert basis is not None
        kept = 1 - self.found.lost
        return (basis * kept.unsqueeze(-2) @ basis.mT).reshape(*self._shape, self._shape[-1])

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.matrix, x.to(torch.float64)).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return self.apply(x)


class ConeTangent(Differential):
    """``L T L^-1`` at a solution, computed when it is first used.

    Args:
        cones: K.
        flat: The points that were projected, with their data.
        u: The solutions, (*lead, n).
        y: Multipliers, (*lead, m).
    """

    def __init__(self, cones: Cones, flat: _Flat, u: Tensor, y: Tensor) -> None:
        self.cones, self.flat, self.u, self.y = cones, flat, u, y

    @property
    def shape(self) -> torch.Size:
        return self.u.shape

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tangent (*lead, n, n), the answer (*lead, n, m) to a change of ``M u + m``, and its gap (*lead, m)."""
        cones, flat, n = self.cones, self.flat, self.u.shape[-1]
        G = flat.M @ flat.root
        scale = cones.scales(G)
        s = scale * (matvec(flat.M, self.u.reshape(-1, n)) + flat.m)
        frames = cones.frames(s - self.y.reshape(s.shape) / scale, KINK)
        turned = cones.turned(frames, scale.unsqueeze(-1) * G)
        stiff = torch.cat([f.stiff for f in frames], -1).unsqueeze(-1)
        bend = torch.cat([f.bend for f in frames], -1).unsqueeze(-1)
        fixed, bent = turned * stiff, bend * turned
        values, vectors = torch.linalg.eigh(fixed.mT @ fixed)
        held = values > RANK * values.amax(-1, keepdim=True).clamp(min=1e-30)
        free = vectors * (~held).unsqueeze(-2) @ vectors.mT
        inverse = vectors * torch.where(held, 1 / torch.where(held, values, 1.0), 0.0).unsqueeze(-2) @ vectors.mT
        curvature, eye = turned.mT @ bent, torch.eye(n).to(s)
        inner = free @ torch.cholesky_solve(free, torch.linalg.cholesky(eye + free @ curvature @ free))
        back = (eye - inner @ (eye + curvature)) @ inverse @ fixed.mT + inner @ bent.mT  # (k, n, m), in eigenvectors
        untied = cones.turned(frames, torch.diag_embed(scale))
        tangent = torch.linalg.solve_triangular(flat.root, flat.root @ inner, upper=False, left=False)
        answer, lead = flat.root @ back @ untied, self.u.shape[:-1]
        gap = (s - torch.cat([f.nearest for f in frames], -1)) / scale
        return tangent.reshape(*lead, n, n), answer.reshape(*lead, *answer.shape[1:]), gap.reshape(self.y.shape)

    @property
    def matrix(self) -> Tensor:
        """The Jacobian, (*lead, n, n)."""
        return self._parts[0]

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.matrix, x.to(torch.float64)).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return matvec(self.matrix.mT, x.to(torch.float64)).to(x.dtype)

    @property
    def gap(self) -> Tensor:
        """By how much ``M u + m`` is not in the cones, up to rounding of the solver, (*lead, m)."""
        return self._parts[2]

    def answer(self, change: Tensor) -> Tensor:
        """How u moves back, (*lead, n), if ``M u + m`` changes by ``change`` (*lead, m)."""
        return matvec(self._parts[1], change)
