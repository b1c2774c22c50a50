"""Tangents under a diagonal weight: pins are substituted and the structure's own factor does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.laws.covariance import Identity as Identity
from probhard.rows.system import LinearSystem
from probhard.tangent.base import Tangent


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
            self.factor = self.system.factor(weight.variance.to(like))
        self.weight = Diagonal(self.factor.weight)

    @property
    def conditioned(self) -> bool:
        return self.factor.conditioned

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        return self.factor.project(z, b)

    def multiplier(self, r: Tensor) -> Tensor:
        return self.factor.solve(r)

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def moments(self, z: Tensor, b: Tensor, cov: Covariance) -> tuple[Tensor, Tensor]:
        if not isinstance(cov, Diagonal):
            return super().moments(z, b, cov)
        if self.core.double and cov.dtype == z.dtype:
            scale = self.factor.quick_scale(self.system.free(cov.variance))
            if scale is not None:
                return self.project(z, b), scale
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
