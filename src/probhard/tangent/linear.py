"""The tangent of linear rows, and its simplest kind: under a diagonal weight.

At a solution with active rows A and metric weight ``W = Q^-1`` (paper, proposition "linearsolution_main")

    P = I - W A^T (A W A^T)^-1 A,     u* = z - W A^T (A W A^T)^-1 (A z - b),     cov(u*) = P S P^T.

Only W is stored, so the oblique metric W = S inverts nothing. Under a diagonal W, pinned variables are substituted and
the structure's own factor solves the rest. Weights that couple variables are in ``coupled``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from probhard._util.tensors import checking, safe_sqrt
from probhard.errors import InfeasibleError
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance, Diagonal, Factored, Identity, LowRank
from probhard.laws.hierarchy_factors import HierarchyFactors
from probhard.rows.base import Structure
from probhard.rows.presolve import Pins
from probhard.rows.system import LinearSystem
from probhard.tangent.base import Differential
from probhard.tangent.few_rows import FEW_ROWS, factor_variance, few_rows_variance
from probhard.tangent.functionals import structured_variance

RANGE = 1e15  # weights in float32 beyond it, or below its inverse, are solved in float64


def coherent(system: LinearSystem, cov: Covariance) -> bool:
    """Whether the shared noise of a covariance obeys the rows, ``A G = 0``: then no projection changes it."""
    if not isinstance(cov, HierarchyFactors) or not checking() or system.core is None:
        return False
    point = cov.combination()
    core, rounding = system.core.at(point), 64 * torch.finfo(point.dtype).eps
    free = system.pins is None and system.held is None
    return free and bool((core.apply(point).abs() <= rounding * core.magnitude(point)).all())


class Tangent(Differential):
    """``P`` for one system of rows and one weight."""

    system: LinearSystem
    core: Structure
    given: Covariance  # W as passed in
    weight: Covariance  # W in the working precision, with 0 for variables that may not move
    dtype: torch.dtype = torch.float64  # precision of the solves
    known: Pins | None = None  # variables that single rows fix; set exactly where all rows are solved together

    @abstractmethod
    def multiplier(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r`` for r (*samples, *batch, q)."""

    @abstractmethod
    def pivots(self) -> Tensor:
        """Numbers (*batch, k) that are all positive if and only if ``A W A^T`` is regular."""

    @abstractmethod
    def _variance(self, cov: Covariance | None) -> Tensor:
        """``diag(P C P^T)`` in the working precision; None means C = W, the oblique case."""

    @property
    def conditioned(self) -> bool:
        """Whether rounding grows with the range of the weights, as with a Cholesky factor."""
        return True

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        """The nearest point to z with ``A u = b``.

        Args:
            z: Points, (*samples, *batch, n).
            b: Right-hand sides, (..., q).

        Returns:
            The nearest points, (*samples, *batch, n), in the dtype of z.
        """
        point, right = self.system.substitute(z.to(self.dtype), b)
        value = self._nearest(point, right)
        if self.known is not None:
            values = self.known.values(b.to(point))
            value = value.index_copy(-1, self.known.variable, values.expand(*value.shape[:-1], -1))
        return value.to(z.dtype)

    def moments(self, z: Tensor, b: Tensor, cov: Covariance | None = None) -> tuple[Tensor, Tensor]:
        """Projected points and standard deviations.

        Args:
            z: Points, (*samples, *batch, n).
            b: Right-hand sides, (..., q).
            cov: Covariance C, as in ``variance``.

        Returns:
            ``project(z, b)`` and the root of ``variance(cov)``.
        """
        return self.project(z, b), safe_sqrt(self.variance(cov))

    def apply(self, x: Tensor) -> Tensor:
        free = self.system.free(x.to(self.dtype))
        return self._exact(self._nearest(free, free.new_zeros(self.core.row_count))).to(x.dtype)

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

    def variance(self, cov: Covariance | None = None) -> Tensor:
        """``diag(P C P^T)``, (*batch, n).

        Args:
            cov: Covariance C of the points. None means C = W, the oblique case, which has shorter formulas.
        """
        return self._exact(self._variance(cov)).to(self.given.dtype if cov is None else cov.dtype)

    def gains(self, r: Tensor) -> Tensor:
        """``K r = W A^T (A W A^T)^-1 r``, (*samples, *batch, n), for r (*samples, *batch, q)."""
        return self.weight.apply(self.core.transpose(self.multiplier(r)))

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        if self.core.row_count > min(FEW_ROWS, rows.row_count):
            return super().functional_variance(rows, cov)
        return few_rows_variance(self, cov, rows)

    def _columns(self, matrix: Tensor) -> Tensor:
        """Columns of a matrix (*batch, n, k) as points (k, *batch, n) that broadcast with the batch of the rows."""
        columns = matrix.movedim(-1, 0).to(self.dtype)
        missing = max(0, self.core.batch_dims - (columns.dim() - 2))
        return columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])

    def _root_variance(self, cov: Covariance) -> Tensor:
        """``diag(P R (P R)^T)`` for a dense covariance with root R: a sum of squares over its columns."""
        return self.apply(self._columns(cov.root_matrix())).square().sum(0)

    @property
    def regular(self) -> bool:
        """Whether ``A W A^T`` is regular: every row has a variable to move."""
        return bool((self.pivots().detach() > 0).all())

    def check(self) -> Self:
        """Check that every row has a variable to move, in eager mode only.

        Raises:
            InfeasibleError: If ``A W A^T`` is singular.
        """
        if checking() and not self.regular:
            raise unmoved()
        return self


def unmoved(where: str = "") -> InfeasibleError:
    """The error for a row that no variable can move."""
    return InfeasibleError(
        f"The metric leaves a constraint row no variable to move{where} (smallest pivot 0).",
        "All variables of that row have zero variance, are fixed, or depend on each other.",
        "Give at least one of them a positive variance, or use the orthogonal metric.",
    )


class DiagonalTangent(Tangent):
    """W diagonal: pins are substituted, and the structure's own factor solves the rest.

    Args:
        system: The rows, with a core.
        weight: W.
    """

    given: Diagonal

    def __init__(self, system: LinearSystem, weight: Diagonal) -> None:
        assert system.core is not None
        variance = weight.variance
        double = system.core.double or _leaves_range(system.core, variance)
        like = variance.new_empty(0, dtype=torch.float64 if double else variance.dtype)
        self.given = weight
        self.system = system.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        if isinstance(weight, Identity):
            self.factor = self.system.unit_factor(like)
        else:
            self.factor = self.system.factor(variance.to(like))
        self.weight, self.dtype = Diagonal(self.factor.weight), like.dtype

    @property
    def conditioned(self) -> bool:
        return self.factor.conditioned

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        return self.factor.project(z, b)

    def multiplier(self, r: Tensor) -> Tensor:
        return self.factor.solve(r)

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def moments(self, z: Tensor, b: Tensor, cov: Covariance | None = None) -> tuple[Tensor, Tensor]:
        if cov is not None and not isinstance(cov, Diagonal):
            return super().moments(z, b, cov)
        if cov is not None and self.core.double and cov.dtype == z.dtype:
            scale = self.factor.quick_scale(self.system.free(cov.variance))
            if scale is not None:
                return self.project(z, b), scale
        point, right = self.system.substitute(z.to(self.dtype), b)
        mean, scale = self.factor.moments(point, right, self._spread(cov))
        return mean.to(z.dtype), scale.to(z.dtype)

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        known = structured_variance(self, rows, cov)
        return super().functional_variance(rows, cov) if known is None else known

    def _spread(self, cov: Diagonal | None) -> Tensor | None:
        """Variances of the free variables; None if they equal the factor's weights."""
        if cov is None and self.system.held is None:
            return None
        variance = self.given.variance if cov is None else cov.variance
        return self.system.free(variance.to(self.dtype))

    def _variance(self, cov: Covariance | None) -> Tensor:
        if cov is None or isinstance(cov, Diagonal):
            return self.factor.variance(self._spread(cov))
        if isinstance(cov, Factored):
            own = self.factor.variance(self.system.free(cov.diagonal_part.to(self.dtype)))
            if isinstance(cov, LowRank):
                return own + self.apply(self._columns(cov.factor)).square().sum(0)
            if coherent(self.system, cov):
                return own + cov.factor_diagonal().to(self.dtype)
            if self.core.row_count > FEW_ROWS:
                return own + factor_variance(self, cov)
            return few_rows_variance(self, cov)
        return self._root_variance(cov)


def _leaves_range(core: Structure, variance: Tensor) -> bool:
    """Whether ``(A W A^T)^2``, which derivatives divide by, leaves the range of float32."""
    if variance.dtype != torch.float32 or not variance.numel() or not checking():
        return False
    with torch.no_grad():
        low, high = variance.aminmax()
        rows = core.at(variance).magnitude(variance.new_ones(core.variables))
        least, most = high * rows.amin().square(), high * rows.amax().square()
        outside = torch.stack([most > RANGE, least < 1 / RANGE, (low > 0) & (low < 1 / RANGE), high > RANGE])
        return bool(outside.any())


class PinnedTangent(Tangent):
    """Every row pins one variable: the projection only substitutes.

    Args:
        system: The rows, without a core.
        weight: W.
    """

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        variance = weight.diagonal()
        self.system, self.given, self.weight, self.dtype = system.at(variance), weight, weight, variance.dtype

    @property
    def conditioned(self) -> bool:
        return False

    def multiplier(self, r: Tensor) -> Tensor:
        return r

    def pivots(self) -> Tensor:
        return self.weight.diagonal()[..., :0]

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        return self.system.substitute(z.to(self.dtype), b)[0].to(z.dtype)

    def apply(self, x: Tensor) -> Tensor:
        return self.system.free(x)

    def transpose(self, x: Tensor) -> Tensor:
        return self.system.free(x)

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        return cov.scaled(self.system.free(torch.ones_like(cov.diagonal()))).functional_variance(rows)

    def _variance(self, cov: Covariance | None) -> Tensor:
        return self.system.free((self.weight if cov is None else cov).diagonal())
