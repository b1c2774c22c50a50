"""Marginals in two pieces: ``U = A + B - c`` with clipped A >= c >= B, of which one at most differs from c.

The distribution function of U is that of B below c and that of A from c on. So the CRPS, an integral over the line, is
the sum of two, and with v = A - c and w = c - B, which are never positive together,

    E U = c + E v - E w,      Var U = Var v + Var w + 2 E v E w.

Turnover limits have such laws: a variable is bought, sold, or stays where it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import safe_sqrt
from probhard.laws.marginals import CensoredMarginals, Marginals


class SplitMarginals(Marginals):
    """The laws of ``above`` where they exceed ``center``, of ``below`` where they fall short of it, else ``center``.

    Args:
        pieces: ``above`` and ``below``, clipped at ``center`` from below and from above, (2, *batch, n).
        center: (*batch, n).
    """

    def __init__(self, pieces: CensoredMarginals, center: Tensor) -> None:
        self.pieces, self.center = pieces, center
        super().__init__(pieces.loc[0], pieces.scale[0], pieces.family)

    @property
    def above(self) -> CensoredMarginals:
        """The laws above the center, (*batch, n)."""
        return self._side(0)

    @property
    def below(self) -> CensoredMarginals:
        """The laws below the center, (*batch, n)."""
        return self._side(1)

    def _side(self, index: int) -> CensoredMarginals:
        parts = (self.pieces.loc, self.pieces.scale, self.pieces.lower, self.pieces.upper)
        loc, scale, lower, upper = (part[index] for part in parts)
        return CensoredMarginals(loc, scale, self.family, lower, upper, validate_args=False)

    @property
    def degenerate(self) -> Tensor:
        """Where the law is a point mass, (*batch, n) bool."""
        return self.pieces.degenerate.all(0)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.pieces.mean.sum(0) - self.center

    @property
    def variance(self) -> Tensor:
        """Variance, (*batch, n)."""
        above, below = (self.pieces.mean - self.center).unbind(0)
        return self.pieces.variance.sum(0) - 2 * above * below

    @property
    def stddev(self) -> Tensor:
        """Standard deviation, (*batch, n), with gradient 0 where it is 0."""
        return safe_sqrt(self.variance)

    def crps(self, y: Tensor) -> Tensor:
        """Closed-form continuous ranked probability score, (*batch, n), at targets y (*batch, n)."""
        ends = torch.stack([torch.maximum(y, self.center), torch.minimum(y, self.center)])
        pieces, more = self.pieces, ends.dim() - 1 - self.center.dim()
        if more:  # the pieces stay the first dimension
            shape = (2, *(1,) * more, *self.center.shape)
            parts = (x.reshape(shape) for x in (pieces.loc, pieces.scale, pieces.lower, pieces.upper))
            loc, scale, lower, upper = parts
            pieces = CensoredMarginals(loc, scale, self.family, lower, upper, validate_args=False)
        return pieces.crps(ends).sum(0)

    def _piece(self, value: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.where(value < self.center, low, high)

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function at values (*batch, n), right-continuous."""
        return self._piece(value, self.below.cdf(value), self.above.cdf(value))

    def _before(self, y: Tensor) -> Tensor:
        """Probability of smaller values."""
        at = 2 * self.below.pit(y) - self.below.cdf(y)
        return torch.where(y <= self.center, at, 2 * self.above.pit(y) - self.above.cdf(y))

    def pit(self, y: Tensor) -> Tensor:
        """``(F(y-) + F(y)) / 2``, (*batch, n), at targets y (*batch, n): point masses count half."""
        inside = 0.5 * (self._before(y) + self.cdf(y))
        return torch.where(self.degenerate, 0.5 + 0.5 * torch.sign(y - self.mean), inside)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles at probabilities that broadcast with (*batch, n)."""
        low, high = self.below.icdf(value), self.above.icdf(value)
        return torch.where(low < self.center, low, high)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density at values (*batch, n); log of the point mass at bounds and at the center."""
        smooth = self._piece(value, self.below.log_prob(value), self.above.log_prob(value))
        stays = (self.above.cdf(self.center) - self._before(self.center)).clamp(min=0)
        known = torch.where(stays > 0, stays, 1.0).log()
        mass = torch.where(stays > 0, known, -math.inf)
        return torch.where(value == self.center, mass, smooth)

    def _nll(self, y: Tensor, skip: Tensor) -> Tensor:
        inner = torch.where(skip, self.center, y)
        atom = inner == self.center
        below, above = (
            side.nll(inner, ~skip & ~atom & own)
            for side, own in ((self.below, inner < self.center), (self.above, inner > self.center))
        )
        mass = torch.where(atom & ~skip, -self.log_prob(torch.where(atom, inner, self.center)), 0.0)
        return below + above + mass

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each coordinate, (*sample_shape, *batch, n): one unit draw moves both pieces."""
        noise = self._noise(sample_shape, generator)
        high = torch.clamp(self.above.loc + self.above.scale * noise, self.above.lower, self.above.upper)
        low = torch.clamp(self.below.loc + self.below.scale * noise, self.below.lower, self.below.upper)
        return high + low - self.center
