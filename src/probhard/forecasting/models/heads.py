"""Heads of a recurrent network: hidden states to the law of a step, in data units.

location-scale:   y = centre + scale * (loc + (softplus + 1e-3) z + F e),
poisson-mixture:  P(y) = sum_k w_k prod_i Poisson(y_i / unit; scale_i / unit * (softplus_ik + 1e-3)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from probhard.laws.covariance import Covariance, Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.family import Family
from probhard.laws.poisson_mixture import PoissonMixture

Law = LocationScale | PoissonMixture

HEADS = ("location-scale", "poisson-mixture")
FIRST_SPREAD = 0.1  # spread of an untrained network, relative to the scale of a series
SMALLEST_SPREAD = 1e-3
WIDEST = 5.0  # first rates of the components lie within this many first spreads of the scale


class Units(NamedTuple):
    """Location and scale that normalize the values of a series."""

    centre: Tensor  # (B, 1, n)
    scale: Tensor  # (B, 1, n)


class LocationScaleHead(nn.Linear):
    """Location, spread and low-rank factor of every series.

    Args:
        hidden_size: Size of a hidden state.
        series: Number of series.
        rank: Columns of the factor.
        family: Distribution of the noise.
    """

    def __init__(self, hidden_size: int, series: int, rank: int, family: Family) -> None:
        super().__init__(hidden_size, series * (2 + rank))
        self.series, self.rank, self.family = series, rank, family

    def law(self, hidden: Tensor, units: Units) -> LocationScale:
        """The laws (*batch, series) of hidden states (*batch, hidden)."""
        sizes = [self.series, self.series, *([self.series * self.rank] if self.rank else [])]
        loc, raw, *factor = self(hidden).split(sizes, -1)
        spread = functional.softplus(raw + _softplus_inverse(FIRST_SPREAD)) + SMALLEST_SPREAD
        cov: Covariance = Diagonal.from_stddev(spread)
        if self.rank:
            columns = FIRST_SPREAD * factor[0].unflatten(-1, (self.series, self.rank))
            cov = LowRank(columns, spread.square())
        return LocationScale(loc, cov, self.family, validate_args=False).affine(units.scale, units.centre)


class PoissonMixtureHead(nn.Linear):
    """Weights of the components, and the rates of every series in them.

    Args:
        hidden_size: Size of a hidden state.
        series: Number of series.
        components: Number of components K.
        unit: Value of one count.
    """

    def __init__(self, hidden_size: int, series: int, components: int, unit: float) -> None:
        super().__init__(hidden_size, (series + 1) * components)
        self.series, self.components, self.unit = series, components, unit

    def law(self, hidden: Tensor, units: Units) -> PoissonMixture:
        """The laws (*batch, series) of hidden states (*batch, hidden); untrained, rates are near the scale."""
        raw = self(hidden).unflatten(-1, (self.series + 1, self.components))
        first = 1 + FIRST_SPREAD * torch.linspace(-WIDEST, WIDEST, self.components, device=raw.device, dtype=raw.dtype)
        relative = functional.softplus(raw[..., 1:, :] + first.expm1().log()) + SMALLEST_SPREAD
        return PoissonMixture(raw[..., 0, :], relative * (units.scale / self.unit).unsqueeze(-1), self.unit)


def _softplus_inverse(value: float) -> float:
    return math.log(math.expm1(value))
