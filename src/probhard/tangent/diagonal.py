"""Tangents under a diagonal weight: pins are substituted and the structure's own factor does the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.rows.system import LinearSystem
from probhard.tangent.base import Tangent


@dataclass(frozen=True, eq=False)
class Identity(Diagonal):
    """The orthogonal metric's weight: what depends on A alone is then factored once."""

    @classmethod
    def like(cls, x: Tensor) -> Identity:
        """Ones for the variables of x (*batch, n)."""
        return cls(torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


class DiagonalTangent(Tangent):
    """W diagonal: pins are substituted and the structure's own factor does the rest."""

    given: Diagonal

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

    def moments(self, z: Tensor, b: Tensor, cov: Covariance | None = None) -> tuple[Tensor, Tensor]:
        if cov is not None and not isinstance(cov, Diagonal):
            return super().moments(z, b, cov)
        if cov is not None and self.core.double and cov.dtype == z.dtype:
            scale = self.factor.quick_scale(self.system.free(cov.variance))
            if scale is not None:
                return self.project(z, b), scale
        point, right = self.system.substitute(z.to(self.dtype), b.to(z.device, self.dtype))
        mean, scale = self.factor.moments(point, right, self._spread(cov))
        return mean.to(z.dtype), scale.to(z.dtype)

    def _spread(self, cov: Diagonal | None) -> Tensor | None:
        """Variances of the free variables; None if they are the factor's weights."""
        if cov is None and self.system.held is None:
            return None
        variance = self.given.variance if cov is None else cov.variance
        return self.system.free(variance.to(self.dtype))

    def _variance(self, cov: Covariance | None) -> Tensor:
        if cov is None or isinstance(cov, Diagonal):
            return self.factor.variance(self._spread(cov))
        if isinstance(cov, LowRank):
            diagonal = self.factor.variance(self.system.free(cov.diagonal_part.to(self.dtype)))
            return diagonal + self.apply(self._columns(cov.factor)).square().sum(0)
        return self._root_variance(cov)


class PinnedTangent(Tangent):
    """Every row pins one variable: the projection substitutes and moves nothing else."""

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        self.system, self.given, self.weight = system.at(weight.diagonal()), weight, weight

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

    def _variance(self, cov: Covariance | None) -> Tensor:
        return self.system.free((self.weight if cov is None else cov).diagonal())
