"""The tangent of a projection, ``P = du*/dz``, on which everything else rests.

At a solution with active rows A and metric weight ``W = Q^-1`` (paper, proposition "linearsolution_main")

    P = I - W A^T (A W A^T)^-1 A,     u* = z - W A^T (A W A^T)^-1 (A z - b),     cov(u*) = P S P^T.

Only W is represented, so the oblique metric W = S inverts nothing. Marginal variances never form an n x n matrix where
the structure allows it. One class per kind of W: diagonal, low rank plus diagonal, anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from probhard.covariance import Covariance, Diagonal, LowRank, matvec, safe_sqrt
from probhard.errors import InfeasibleError, broadcast, checking
from probhard.structure.base import Structure
from probhard.structure.dense import cholesky_solve
from probhard.structure.presolve import Pins
from probhard.structure.system import LinearSystem


@dataclass(frozen=True, eq=False)
class Identity(Diagonal):
    """The orthogonal metric's weight: what depends on A alone is then factored once."""

    @classmethod
    def like(cls, x: Tensor) -> Identity:
        """Ones for the variables of x (*batch, n)."""
        return cls(torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


class Differential(ABC):
    """``du*/dz`` at a solution, by its products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)`` of the points that it belongs to, as far as it depends on them."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``P x``, forward mode."""

    @abstractmethod
    def transpose(self, x: Tensor) -> Tensor:
        """``P^T x``, reverse mode."""

    @abstractmethod
    def variance(self, cov: Covariance) -> Tensor:
        """``diag(P C P^T)``, (*batch, n)."""


class Tangent(Differential):
    """``P`` for one system of rows and one weight; ``dtype`` is the precision of its solves."""

    system: LinearSystem
    core: Structure
    weight: Covariance
    known: Pins | None = None  # variables that rows pin outright, kept exact where all rows are solved together

    @abstractmethod
    def multiplier(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r`` for r (*samples, *batch, q)."""

    @abstractmethod
    def pivots(self) -> Tensor:
        """Positive exactly when ``A W A^T`` is regular."""

    @abstractmethod
    def _variance(self, cov: Covariance) -> Tensor:
        """``diag(P C P^T)`` in the working precision."""

    @property
    def conditioned(self) -> bool:
        """Whether a Cholesky factor is behind it, whose rounding grows with the range of the weights."""
        return True

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Working precision."""
        return self.weight.dtype

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        """The nearest point to z (*samples, *batch, n) with ``A u = b``."""
        b = b.to(z.device, self.dtype)
        point, right = self.system.substitute(z.to(self.dtype), b)
        value = self._nearest(point, right)
        if self.known is not None:
            values = self.known.values(b)
            value = value.index_copy(-1, self.known.variable, values.expand(*value.shape[:-1], -1))
        return value.to(z.dtype)

    def moments(self, z: Tensor, b: Tensor, cov: Covariance) -> tuple[Tensor, Tensor]:
        """The projected point and the root of ``diag(P C P^T)``."""
        return self.project(z, b), safe_sqrt(self.variance(cov))

    def apply(self, x: Tensor) -> Tensor:
        free = self.system.free(x.to(self.dtype))
        return self._exact(self._nearest(free, free.new_zeros(self.core.rows))).to(x.dtype)

    def _exact(self, x: Tensor) -> Tensor:
        """Set pinned variables of x (..., n) to 0."""
        return x if self.known is None else x.index_fill(-1, self.known.variable, 0.0)

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        """``z - W A^T (A W A^T)^-1 (A z - b)``."""
        return z - self.weight.apply(self.core.transpose(self.multiplier(self.core.apply(z) - b)))

    def transpose(self, x: Tensor) -> Tensor:
        y = self._exact(x.to(self.dtype))
        pushed = self.core.transpose(self.multiplier(self.core.apply(self.weight.apply(y))))
        return self.system.free(y - pushed).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        return self._exact(self._variance(cov)).to(cov.dtype)

    def _columns(self, matrix: Tensor) -> Tensor:
        """Columns of a matrix (*batch, n, k) as k points (k, *batch, n) that broadcast with the rows' batch."""
        columns = matrix.movedim(-1, 0).to(self.dtype)
        missing = max(0, self.core.batch_dims - (columns.dim() - 2))
        return columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])

    def _root_variance(self, cov: Covariance) -> Tensor:
        """``diag(P R (P R)^T)`` column by column of the root: a sum of squares, for dense covariances."""
        eye = torch.eye(cov.root_size, dtype=cov.dtype, device=cov.device)
        columns = cov.root(eye.reshape(-1, *[1] * (len(cov.shape) - 1), cov.root_size))
        return self.apply(self._columns(columns.movedim(0, -1))).square().sum(0)

    def check(self) -> Self:
        """Raise where the weight leaves a row nothing to move; eager mode only."""
        if checking():
            low = self.pivots().detach().amin() if self.pivots().numel() else torch.ones(())
            if not bool(low > 0):
                raise InfeasibleError(
                    f"The metric leaves a constraint row no variable to move (smallest pivot {float(low):.3g}).",
                    "All variables of that row have zero variance, are fixed, or depend on each other.",
                    "Give at least one of them a positive variance, or use the orthogonal metric.",
                )
        return self


class DiagonalTangent(Tangent):
    """W diagonal: pins are substituted and the structure's own factor does the rest."""

    def __init__(self, system: LinearSystem, weight: Diagonal) -> None:
        assert system.core is not None
        like = weight.variance.new_empty(0, dtype=torch.float64 if system.core.double else weight.dtype)
        self.given = weight
        self.system = system.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        if isinstance(weight, Identity):
            self.factor = self.system.unit_factor(like)
        else:
            self.factor = self.core.factor(self.system.movable(weight.variance.to(like)))
        self.weight = Diagonal(self.factor.weight)

    @property
    def conditioned(self) -> bool:
        return self.core.double

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        return self.factor.project(z, b)

    def multiplier(self, r: Tensor) -> Tensor:
        return self.factor.solve(r)

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def moments(self, z: Tensor, b: Tensor, cov: Covariance) -> tuple[Tensor, Tensor]:
        if not isinstance(cov, Diagonal):
            return super().moments(z, b, cov)
        point, right = self.system.substitute(z.to(self.dtype), b.to(z.device, self.dtype))
        mean, scale = self.factor.moments(point, right, self._spread(cov))
        return mean.to(z.dtype), scale.to(z.dtype)

    def _spread(self, cov: Diagonal) -> Tensor:
        """Variances of the free variables; the factor's own weight where they are the same."""
        if cov is self.given and self.system.held is None:
            return self.factor.weight
        return self.system.free(cov.variance.to(self.dtype))

    def _variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            return self.factor.variance(self._spread(cov))
        if isinstance(cov, LowRank):
            diagonal = self.factor.variance(self.system.free(cov.diagonal_part.to(self.dtype)))
            return diagonal + self.apply(self._columns(cov.factor)).square().sum(0)
        return self._root_variance(cov)


class LowRankTangent(Tangent):
    """``W = D + F F^T`` by Woodbury on the structure's factor for D, all rows solved together.

    With ``G = A F``, ``Y = M_D^-1 G`` and ``C = I + G^T Y``, the multiplier is ``M_D^-1 (r - G e)`` with
    ``e = C^-1 Y^T r``, and the oblique covariance is ``P_D D P_D^T + U C^-1 U^T`` with ``U = P_D F``: sums of squares.
    """

    def __init__(self, system: LinearSystem, weight: LowRank) -> None:
        self.given = weight
        held = LowRank(*_held(system, weight))
        like = held.diagonal_part.new_empty(0, dtype=torch.float64)
        self.system = system.coupled.at(like)
        self.known = None if system.pins is None else system.pins.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        self.weight = held.to(torch.float64)
        self.factor = self.core.factor(held.diagonal_part.to(torch.float64))
        columns = self._columns(held.factor)  # (rank, *batch, n)
        images = self.core.apply(columns)  # G^T, (rank, *batch, q)
        solved = self.factor.solve(images)  # Y^T
        pushed = self.factor.weight * self.core.transpose(solved)
        self.image, self.solved = images.movedim(0, -1), solved.movedim(0, -1)  # (*batch, q, rank)
        self.moved = (columns - pushed).movedim(0, -1)  # U, (*batch, n, rank)
        identity = torch.eye(len(columns), dtype=torch.float64, device=like.device)
        self.lower = torch.linalg.cholesky(identity + self.image.mT @ self.solved)

    def multiplier(self, r: Tensor) -> Tensor:
        noise = cholesky_solve(self.lower, matvec(self.solved.mT, r))
        return self.factor.solve(r) - matvec(self.solved, noise)

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def _variance(self, cov: Covariance) -> Tensor:
        if cov is self.given and self.system.held is None:
            half = torch.linalg.solve_triangular(self.lower, self.moved.mT, upper=False)
            return self.factor.variance(self.factor.weight) + half.square().sum(-2)
        if isinstance(cov, Diagonal):
            return self._diagonal_variance(cov.variance.to(self.dtype))
        if isinstance(cov, LowRank):
            spread = self.apply(self._columns(cov.factor)).square().sum(0)
            return self._diagonal_variance(cov.diagonal_part.to(self.dtype)) + spread
        return self._root_variance(cov)

    def _diagonal_variance(self, s: Tensor) -> Tensor:
        """``diag(P S P^T)`` with ``P = P_D - U V^T``, ``V = A^T Y C^-1``."""
        pulled = self.core.transpose(self.solved.movedim(-1, 0)).movedim(0, -1)  # A^T Y, (*batch, n, rank)
        v = torch.cholesky_solve(pulled.mT, self.lower).mT
        spread = s.unsqueeze(-1) * v
        columns = spread.movedim(-1, 0)
        crossed = columns - self.factor.weight * self.core.transpose(self.factor.solve(self.core.apply(columns)))
        inner = self.moved @ (v.mT @ spread)
        found = self.factor.variance(s) + ((inner - 2 * crossed.movedim(0, -1)) * self.moved).sum(-1)
        return found.clamp(min=0)


class DenseTangent(Tangent):
    """Any W, by its products with the rows of A: Cholesky of the q x q matrix ``A W A^T``."""

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        self.given = weight
        like = weight.diagonal().new_empty(0, dtype=torch.float64)
        self.system = system.coupled.at(like)
        self.known = None if system.pins is None else system.pins.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        self.weight = (weight if system.held is None else weight.scaled(_mask(system, weight))).to(torch.float64)
        matrix = self.core.dense()  # (*batch, q, n)
        rows = matrix.movedim(-2, 0)
        rows = rows.reshape(rows.shape[0], *[1] * (len(weight.shape) - rows.dim() + 1), *rows.shape[1:])
        pushed = self.weight.apply(rows)  # A W, (q, *batch, n)
        self.lower, self.info = torch.linalg.cholesky_ex(matrix @ pushed.movedim(0, -1))

    def multiplier(self, r: Tensor) -> Tensor:
        return cholesky_solve(self.lower, r)

    def pivots(self) -> Tensor:
        regular = (self.info == 0).unsqueeze(-1)
        return torch.where(regular, self.lower.diagonal(dim1=-2, dim2=-1), 0.0)

    def _variance(self, cov: Covariance) -> Tensor:
        return self._root_variance(cov.to(self.dtype))


class PinnedTangent(Tangent):
    """Every row pins one variable: the projection substitutes and moves nothing else."""

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        self.system, self.weight = system.at(weight.diagonal()), weight

    @property
    def conditioned(self) -> bool:
        return False

    def multiplier(self, r: Tensor) -> Tensor:
        return r

    def pivots(self) -> Tensor:
        return self.weight.diagonal()[..., :0]

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        return self.system.substitute(z, b.to(z))[0]

    def apply(self, x: Tensor) -> Tensor:
        return self.system.free(x)

    def transpose(self, x: Tensor) -> Tensor:
        return self.system.free(x)

    def _variance(self, cov: Covariance) -> Tensor:
        return self.system.free(cov.diagonal())


def tangent_of(system: LinearSystem, weight: Covariance) -> Tangent:
    """The tangent of rows under a metric weight."""
    if isinstance(weight, Diagonal):
        return PinnedTangent(system, weight) if system.core is None else DiagonalTangent(system, weight)
    if isinstance(weight, LowRank) and (not checking() or bool((weight.diagonal_part > 0).all())):
        return LowRankTangent(system, weight)
    return DenseTangent(system, weight)


def _mask(system: LinearSystem, weight: Covariance) -> Tensor:
    ones = torch.ones(system.variables, dtype=weight.dtype, device=weight.device)
    return ones if system.held is None else ones.index_fill(0, system.held.to(ones.device), 0.0)


def _held(system: LinearSystem, weight: LowRank) -> tuple[Tensor, Tensor]:
    if system.held is None:
        return weight.factor, weight.diagonal_part
    masked = weight.scaled(_mask(system, weight))
    return masked.factor, masked.diagonal_part


@dataclass(frozen=True, eq=False)
class ProjectedCovariance(Covariance):
    """``diag(s) P C P^T diag(s)``, singular and never formed; s is 1 unless the law was rescaled."""

    tangent: Differential
    base: Covariance
    scale: Tensor | float = 1.0

    @property
    def shape(self) -> torch.Size:
        return broadcast(self.base.shape, self.tangent.shape)

    @property
    def root_size(self) -> int:
        return self.base.root_size

    def diagonal(self) -> Tensor:
        return self.scale**2 * self.tangent.variance(self.base)

    def apply(self, x: Tensor) -> Tensor:
        return self.scale * self.tangent.apply(self.base.apply(self.tangent.transpose(self.scale * x)))

    def root(self, noise: Tensor) -> Tensor:
        return self.scale * self.tangent.apply(self.base.root(noise))

    def scaled(self, scale: Tensor) -> ProjectedCovariance:
        return ProjectedCovariance(self.tangent, self.base, self.scale * scale)

    def to(self, *args: object, **kwargs: object) -> ProjectedCovariance:
        scale = self.scale.to(*args, **kwargs) if isinstance(self.scale, Tensor) else self.scale  # type: ignore[call-overload]
        return ProjectedCovariance(self.tangent, self.base.to(*args, **kwargs), scale)

    def validate(self) -> None:
        self.base.validate()
