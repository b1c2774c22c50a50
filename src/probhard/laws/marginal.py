"""Marginals: the one-dimensional laws ``loc + scale * unit`` of the coordinates of a location-scale law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard.errors import broadcast
from probhard.laws.family import NORMAL, Family


class Marginals(td.Distribution):
    """The one-dimensional laws of the coordinates; arguments of methods broadcast with (*batch, n).

    Args:
        loc: Location, (*batch, n).
        scale: Scale, (*batch, n), >= 0; scale 0 is a point mass.
        family: Unit law.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, family: Family = NORMAL) -> None:
        self.loc, self.scale, self.family = loc, scale, family
        super().__init__(broadcast(loc.shape, scale.shape), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variance, (*batch, n)."""
        return self.scale.square() * self.family.unit_variance

    def crps(self, y: Tensor) -> Tensor:
        """Closed-form continuous ranked probability score, (*batch, n), at targets y (*batch, n)."""
        return self.family.crps(self.loc, self.scale, y)

    def nll(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log density, 0 where the law is degenerate or ``mask`` is False.

        Args:
            y: Targets, (*batch, n); masked ones may be NaN.
            mask: True where the target is observed, (*batch, n) bool.

        Returns:
            (*batch, n).
        """
        skip = self.degenerate if mask is None else self.degenerate | ~mask
        scale = torch.where(skip, 1.0, self.scale)
        z = torch.where(skip, 0.0, y - self.loc) / scale
        return torch.where(skip, 0.0, scale.log() - self.family.log_density(z))

    @property
    def degenerate(self) -> Tensor:
        """Where the law is a point mass, (*batch, n) bool."""
        return self.scale == 0

    def standardised(self, y: Tensor) -> Tensor:
        """``(y - loc) / scale``, (*batch, n), with 0 for 0/0."""
        distance = y - self.loc
        return torch.where((self.scale == 0) & (distance == 0), 0.0, distance / self.scale)

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function at values (*batch, n)."""
        return self.family.cdf(self.standardised(value))

    def pit(self, y: Tensor) -> Tensor:
        """Probability integral transform at targets y (*batch, n): ``cdf``, where point masses count half."""
        return self.cdf(y)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles at probabilities that broadcast with (*batch, n)."""
        return torch.where(self.scale == 0, self.loc, self.loc + self.scale * self.family.icdf(value))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density at values (*batch, n); infinite where the scale is 0."""
        return self.family.log_density(self.standardised(value)) - self.scale.log()

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each coordinate, which carry gradients.

        Args:
            sample_shape: Leading dimensions of the draws.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Draws, (*sample_shape, *batch, n).
        """
        shape = (*Size(sample_shape), *self.batch_shape)
        noise = self.family.independent().sample(shape[:-1], shape[-1], self.loc.dtype, self.loc.device, generator)
        return self.loc + self.scale * noise
