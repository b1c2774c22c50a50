"""The covariance ``P C P^T`` of a projected law: singular, stored as the tangent and the base covariance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance
from probhard.tangent.base import Differential


@dataclass(frozen=True, eq=False)
class ProjectedCovariance(Covariance):
    """``diag(s) P C P^T diag(s)``, singular and never formed.

    Args:
        tangent: P.
        base: C, the covariance before the projection.
        scale: s, (*batch, n); 1 unless the law was rescaled.
    """

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

    def root_transpose(self, x: Tensor) -> Tensor:
        return self.base.root_transpose(self.tangent.transpose(self.scale * x))

    def functional_variance(self, rows: LinearMap) -> Tensor:
        if isinstance(self.scale, Tensor):
            return super().functional_variance(rows)
        return self.scale**2 * self.tangent.functional_variance(rows, self.base)

    def scaled(self, scale: Tensor) -> ProjectedCovariance:
        return ProjectedCovariance(self.tangent, self.base, self.scale * scale)

    def to(self, *args: object, **kwargs: object) -> ProjectedCovariance:
        scale = self.scale.to(*args, **kwargs) if isinstance(self.scale, Tensor) else self.scale  # type: ignore[call-overload]
        return ProjectedCovariance(self.tangent, self.base.to(*args, **kwargs), scale)

    def validate(self) -> None:
        self.base.validate()
