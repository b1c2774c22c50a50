"""Marginals: the laws ``loc + scale * unit`` of the coordinates of a location-scale law, and those clipped at bounds.

The law of ``clip(X, l, h)`` has point masses ``P(X <= l)`` at l and ``P(X >= h)`` at h, and the density of X between
them. Let c = clip(loc), and let P_l and P_h be the first partial moments of the unit law at ``-|l - loc| / scale`` and
``-|h - loc| / scale`` (see ``laws.tails``). The mean is

    E clip(X) = c + scale (P_l - P_h).

The equations of the CRPS stand in ``laws._censored_crps``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard._util.tensors import broadcast, checking, safe_sqrt
from probhard.errors import ParameterError, ShapeError
from probhard.laws._censored_crps import censored_crps, positive, reach
from probhard.laws.family import NORMAL, Family
from probhard.laws.tails import FARTHEST, log_mass, partial_moments, unit_variance


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
        """``-log_prob`` at targets y (*batch, n); 0 where the law is degenerate or ``mask`` is False.

        Args:
            y: Targets, (*batch, n); masked ones may be NaN.
            mask: True where the target is observed, (*batch, n) bool.

        Returns:
            (*batch, n).
        """
        return self._nll(y, self.degenerate if mask is None else self.degenerate | ~mask)

    def _nll(self, y: Tensor, skip: Tensor) -> Tensor:
        """The same, with 0 where ``skip``."""
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
        return self.loc + self.scale * self._noise(sample_shape, generator)

    def _noise(self, sample_shape: Any, generator: torch.Generator | None) -> Tensor:
        """Independent draws of the unit law, (*sample_shape, *batch, n)."""
        shape = (*Size(sample_shape), *self.batch_shape)
        return self.family.independent().sample(shape[:-1], shape[-1], self.loc.dtype, self.loc.device, generator)


class CensoredMarginals(Marginals):
    """The laws of ``clip(X, lower, upper)`` with X = loc + scale * unit; scale 0 is a point mass at clip(loc).

    Args:
        loc: Location of X, (*batch, n).
        scale: Scale of X, (*batch, n), >= 0.
        family: Unit law of X.
        lower: Lower bounds, broadcasting with (*batch, n); -inf for none.
        upper: Upper bounds, broadcasting with (*batch, n); inf for none. Equal bounds give a point mass.
        validate_args: Check the bounds in eager mode.

    Raises:
        ParameterError: If a lower bound exceeds its upper bound, or a bound is NaN or infinite on the wrong side.
        ShapeError: If the shapes do not broadcast.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        family: Family = NORMAL,
        lower: Tensor | float = -math.inf,
        upper: Tensor | float = math.inf,
        validate_args: bool = True,
    ) -> None:
        low, high = (torch.as_tensor(bound, dtype=loc.dtype, device=loc.device) for bound in (lower, upper))
        if validate_args and checking() and not bool(((low <= high) & (low < math.inf) & (high > -math.inf)).all()):
            raise ParameterError(
                f"CensoredMarginals got {int((~(low <= high)).sum())} lower bounds above their upper bounds or NaN.",
                "No value lies between them, or one of them is infinite on the wrong side.",
                "Give lower <= upper, with -inf and inf where there is no bound.",
            )
        parts = (loc, scale, low, high)
        try:
            shape = broadcast(*(part.shape for part in parts), family._parameter_shape())
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ShapeError(
                f"CensoredMarginals got loc, scale, lower and upper of shapes {shapes}.",
                "They do not broadcast to a common shape (*batch, n).",
                "Give the bounds one entry per variable, in the last dimension.",
            ) from error
        super().__init__(loc.expand(shape), scale.expand(shape), family)
        self.lower, self.upper = low.expand(shape), high.expand(shape)

    @property
    def degenerate(self) -> Tensor:
        """Where the law is a point mass, (*batch, n) bool."""
        return (self.scale == 0) | (self.lower == self.upper)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n), within the bounds."""
        return self._moments()[0].to(self.loc.dtype)

    @property
    def variance(self) -> Tensor:
        """Variance, (*batch, n)."""
        return self._moments()[1].to(self.loc.dtype)

    @property
    def stddev(self) -> Tensor:
        """Standard deviation, (*batch, n), with gradient 0 where it is 0."""
        return safe_sqrt(self.variance)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance in float64."""
        loc, scale, lower, upper = (x.double() for x in (self.loc, self.scale, self.lower, self.upper))
        below, above, bounded = loc < lower, loc > upper, ~(lower.isinf() | upper.isinf())
        ends = reach(loc, scale, lower, below), reach(loc, scale, upper, ~above)
        t, finite = torch.stack(ends), ~torch.stack((lower, upper)).isinf()  # (2, *batch, n)
        mass, first, second = (torch.where(finite, part, 0.0) for part in partial_moments(self.family, t))
        width = (torch.where(bounded, upper, 0.0) - torch.where(bounded, lower, 0.0)).clamp(max=FARTHEST)
        span = (width / positive(scale)).clamp(max=FARTHEST)
        between = unit_variance(self.family) - (second - 2 * t * first).sum(0)  # less E[T^2 - t^2; T < t]
        left, right = second[0] - second[1] - 2 * span * first[1], second[1] - second[0] - 2 * span * first[0]
        square = torch.where(below, left, torch.where(above, right, between))  # E (clip(X) - c)^2 / scale^2
        shift = scale * (first[0] - first[1])
        mean, variance = torch.clamp(loc, lower, upper) + shift, scale.square() * square - shift.square()
        # Between narrow bounds the terms cancel. F is monotone, which encloses the mean and the variance
        # 2 int_(l<s<u<h) F(s) (1 - F(u)).
        at_lower, past_upper = torch.where(below, 1 - mass[0], mass[0]), torch.where(above, 1 - mass[1], mass[1])
        past_lower, at_upper = torch.where(below, mass[0], 1 - mass[0]), torch.where(above, mass[1], 1 - mass[1])
        area = torch.where(scale > 0, width, 0.0).square()
        most = torch.where(bounded, area * (at_upper * past_lower).clamp(max=0.25), math.inf)
        variance = _enclosed(variance, area * at_lower * past_upper, most)
        narrow = bounded & (span < 1e-3)
        least = torch.where(narrow, lower + width * past_upper, lower)
        most = torch.where(narrow, lower + width * past_lower, upper)
        return _enclosed(mean, torch.maximum(least, lower), torch.minimum(most, upper)), variance

    def crps(self, y: Tensor) -> Tensor:
        """Closed-form continuous ranked probability score, (*batch, n), at targets y (*batch, n)."""
        shape = broadcast(self.batch_shape, y.shape)
        dtype = torch.promote_types(torch.promote_types(self.loc.dtype, self.scale.dtype), y.dtype)
        parts = (self.loc, self.scale, y, self.lower, self.upper)
        loc, scale, y, lower, upper = (part.to(dtype).expand(shape) for part in parts)
        inside = torch.clamp(y, lower, upper)
        return (y - inside).abs() + censored_crps(loc, scale, inside, lower, upper, self.family)

    def standardised(self, y: Tensor) -> Tensor:
        """``(y - loc) / scale``, (*batch, n) float64, with finite gradients; 0 for 0/0, clamped to +-1e100."""
        distance = y.double() - self.loc.double()
        return (distance / positive(self.scale.double())).clamp(-FARTHEST, FARTHEST)

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function at values (*batch, n): right-continuous, 0 below ``lower``, 1 from ``upper`` on."""
        inner = self.family.cdf(self.standardised(value)).to(torch.promote_types(self.loc.dtype, value.dtype))
        inner = torch.where(self.scale == 0, (value >= self.loc).to(inner.dtype), inner)
        return torch.where(value < self.lower, 0.0, torch.where(value >= self.upper, 1.0, inner))

    def pit(self, y: Tensor) -> Tensor:
        """``(F(y-) + F(y)) / 2``, (*batch, n), at targets y (*batch, n): point masses count half."""
        inner = self.family.cdf(self.standardised(y)).to(torch.promote_types(self.loc.dtype, y.dtype))
        before, after = torch.where(y <= self.lower, 0.0, inner), torch.where(y >= self.upper, 1.0, inner)
        middle = 0.5 * (torch.where(y > self.upper, 1.0, before) + torch.where(y < self.lower, 0.0, after))
        centre = torch.clamp(self.loc, self.lower, self.upper)
        return torch.where(self.scale == 0, 0.5 + 0.5 * torch.sign(y - centre), middle)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles at probabilities that broadcast with (*batch, n): those of X, clipped to the bounds."""
        unit = self.family.icdf(value)
        quantile = torch.where(self.scale == 0, self.loc, self.loc + self.scale * unit).detach()
        inside = (quantile > self.lower) & (quantile < self.upper)
        inner = self.loc + self.scale * torch.where(inside & (self.scale > 0), unit, 0.0)
        return torch.where(quantile <= self.lower, self.lower, torch.where(quantile >= self.upper, self.upper, inner))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density at values (*batch, n); log of the point mass at a bound, minus infinity outside the bounds."""
        loc, scale, lower, upper = self.loc.double(), self.scale.double(), self.lower.double(), self.upper.double()
        inside = (value > lower) & (value < upper) & (scale > 0)
        z = self.standardised(torch.where(inside, value, self.loc))
        density = self.family.log_density(z) - torch.where(inside, positive(scale), 1.0).log()
        # Mass below the lower bound and, by symmetry, above the upper one, without 0/0 or inf/inf.
        left = self.standardised(torch.where(lower.isinf(), loc, lower))
        right = self.standardised(torch.where(upper.isinf(), loc, upper))
        result = torch.where(inside, density, -math.inf)
        result = torch.where(value == lower, log_mass(self.family, left), result)
        result = torch.where(value == upper, log_mass(self.family, -right), result)
        result = torch.where((lower == upper) & (value == lower), 0.0, result)
        centre = torch.clamp(loc, lower, upper)
        atom = torch.where((loc <= lower) | (loc >= upper), 0.0, math.inf)
        point = torch.where(value == centre, atom, -math.inf)
        return torch.where(scale == 0, point, result).to(torch.promote_types(self.loc.dtype, value.dtype))

    def _nll(self, y: Tensor, skip: Tensor) -> Tensor:
        loc, scale = torch.where(skip, 0.0, self.loc), torch.where(skip, 1.0, self.scale)
        lower, upper = torch.where(skip, -math.inf, self.lower), torch.where(skip, math.inf, self.upper)
        law = CensoredMarginals(loc, scale, self.family, lower, upper, validate_args=False)
        return torch.where(skip, 0.0, -law.log_prob(torch.where(skip, 0.0, y)))

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each coordinate within the bounds, (*sample_shape, *batch, n)."""
        return torch.clamp(super().rsample(sample_shape, generator), self.lower, self.upper)


def _enclosed(value: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """The value clamped against rounding, with the gradient of the unclamped value."""
    constant = value.detach()
    return torch.clamp(constant, least.detach(), most.detach()) + (value - constant)
