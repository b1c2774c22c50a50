"""The layer of a correction: a ``DPPL`` whose points are corrected instead of projected.

Moments are exact where the correction is affine (equalities alone), else those of fixed draws. Points are returned as
they are; ``stats`` has their violations, and ``Projected.feasible`` is True only if every point is feasible by design.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import broadcast
from probhard.constraints.base import Constraint
from probhard.corrections.base import Bound, Correction
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale
from probhard.projection.base import Projector, Solution, Stats
from probhard.projection.layer import DPPL
from probhard.projection.parts import Parts, parts_of
from probhard.projection.policy import Policy
from probhard.tangent.base import Differential


class CorrectionLayer(DPPL):
    """Corrects distributions, points and samples.

    Args:
        correction: The correction.
        draws: Number of fixed draws that give moments where the correction is not affine.
    """

    as_is = True

    def __init__(self, correction: Correction, draws: int = 100) -> None:
        super().__init__("orthogonal", on_failure="flag", draws=draws)
        self.correction = correction

    def extra_repr(self) -> str:
        """The options that ``repr`` shows."""
        return repr(self.correction)

    def _projector(
        self, z: Tensor, cov: Covariance | None, constraint: Constraint, oblique: bool | None = None
    ) -> Projector:
        parts = parts_of(constraint, z.shape[-1])
        constraint.check_event(z, "The distribution")
        like = torch.empty(0, dtype=torch.float64, device=z.device)
        return CorrectionProjector(parts, self.correction.bound(parts, like))

    @property
    def _policy(self) -> Policy:
        return Policy("flag", self.validate_args, self.draws, self.failures, approximate=True, as_is=True)


class CorrectionProjector(Projector):
    """Corrects points on one constraint.

    Args:
        parts: The parts of the constraint.
        bound: The correction on it.
    """

    def __init__(self, parts: Parts, bound: Bound) -> None:
        self.parts, self.bound = parts, bound
        self.guaranteed = bound.guaranteed
        self.moments_from = "delta" if bound.matrix is not None else "monte-carlo"
        self.has_equalities = parts.linear is not None or parts.nonlinear is not None
        self.local = parts.nonlinear is not None

    def projected_shape(self, base: LocationScale) -> torch.Size:
        return torch.Size((*broadcast(base.loc.shape[:-1], self.parts.batch_shape), self.parts.variables))

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        lead = broadcast(z.shape[:-1], self.parts.batch_shape)
        point = z.to(torch.float64).expand(*lead, self.parts.variables)
        y = self.bound(point).to(z.dtype)
        with torch.no_grad():
            size = torch.maximum(z.abs().amax(-1, keepdim=True), y.abs().amax(-1, keepdim=True))
            residual = self.parts.constraint.relative_violation(y, size).nan_to_num(torch.inf)
            steps = torch.full_like(residual, self.bound.steps, dtype=torch.int64)
            stats = Stats(steps, residual, residual <= TOLERANCE[z.dtype], local=self.local)
        return Solution(y, CorrectionTangent(self.bound, point.detach()), stats)


class CorrectionTangent(Differential):
    """``dy/dz`` of a correction, by its matrix or by automatic differentiation.

    Args:
        bound: The correction on a constraint.
        point: z, (*lead, n).
    """

    def __init__(self, bound: Bound, point: Tensor) -> None:
        self.bound, self.point = bound, point

    @property
    def shape(self) -> torch.Size:
        return self.point.shape

    def apply(self, x: Tensor) -> Tensor:
        matrix = self.bound.matrix
        if matrix is not None:
            return x @ matrix.to(x).mT
        points, directions = self._flat(x)
        return torch.autograd.functional.jvp(self.bound, points, directions)[1].reshape(x.shape).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        matrix = self.bound.matrix
        if matrix is not None:
            return x @ matrix.to(x)
        points, directions = self._flat(x)
        return torch.autograd.functional.vjp(self.bound, points, directions)[1].reshape(x.shape).to(x.dtype)

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Points and directions (*samples, *lead, n) in float64."""
        directions = x.to(torch.float64).expand(broadcast(x.shape, self.point.shape))
        return self.point.expand(directions.shape).clone(), directions.clone()
