"""The families: normal, Laplace, logistic, uniform and Student's t, each by its unit law.

| family    | density of the unit law       | variance      | multivariate law                     |
|-----------|-------------------------------|---------------|--------------------------------------|
| normal    | exp(-z^2 / 2) / sqrt(2 pi)    | 1             | elliptical                           |
| Laplace   | exp(-abs(z)) / 2              | 2             | elliptical, variance exponential     |
| logistic  | exp(-z) / (1 + exp(-z))^2     | pi^2 / 3      | independent coordinates              |
| uniform   | 1/2 on [-1, 1]                | 1/3           | independent coordinates              |
| Student-t | ~ (1 + z^2/df)^(-(df + 1)/2)  | df / (df - 2) | elliptical, variance inverse gamma   |

A family is given by its unit law (location 0, scale 1), symmetric about 0. With ``e = loc - y``, ``z = e / scale``, F
the distribution function of the unit law and c(z) its CRPS at z,

    CRPS(y) = e (2 F(z) - 1) + scale h(z),      h(z) = c(z) - z c'(z),      c'(z) = 2 F(z) - 1,
    dCRPS/dloc = 2 F(z) - 1,                    dCRPS/dscale = h(z).

The slope ``2 F - 1`` and the spread ``h`` are bounded, so value and gradients are finite for every ``scale >= 0``. At
scale 0 the score is ``|y - loc|``. The CRPS is a loss, ``E|X - y| - E|X - X'| / 2``, the paper's with reversed sign.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from probhard._util.tensors import broadcast
from probhard.laws._crps import location_scale_crps

FAR = 1e3  # exp(-FAR) is 0 in float64; products with it stay finite at infinity


@dataclass(frozen=True)
class Family(ABC):
    """Unit law of a symmetric location-scale family.

    Args:
        exact: Whether an affine map of a multivariate member stays in the family. True for elliptical laws,
            whose coordinates share one mixing variable; False for products of independent coordinates.
    """

    exact: bool
    name: ClassVar[str]
    variance: ClassVar[float]

    @property
    def unit_variance(self) -> float | Tensor:
        """Variance of the unit law."""
        return self.variance

    @abstractmethod
    def cdf(self, z: Tensor) -> Tensor:
        """Distribution function F of the unit law, elementwise, of the shape of z."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the unit law's density, elementwise, of the shape of z."""

    @abstractmethod
    def icdf(self, p: Tensor) -> Tensor:
        """Quantile function of the unit law, elementwise, of the shape of p in [0, 1]."""

    @abstractmethod
    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope ``2 F(z) - 1`` and spread ``h(z)`` of the CRPS, each of the shape of z and finite at infinity."""

    def crps_spread(self, z: Tensor) -> Tensor:
        """``h(z) = c(z) - z c'(z)``, the derivative of the CRPS in the scale, of the shape of z."""
        return self.crps_terms(z)[1]

    def crps(
        self,
        loc: Tensor,  # (*batch, n)
        scale: Tensor,  # (*batch, n), >= 0
        y: Tensor,  # (*batch, n)
    ) -> Tensor:
        """Continuous ranked probability score of ``loc + scale * unit``.

        Args:
            loc: Locations, (*batch, n).
            scale: Scales, (*batch, n), >= 0.
            y: Targets, (*batch, n).

        Returns:
            The score, (*batch, n).
        """
        shapes = (loc.shape, scale.shape, y.shape, self._parameter_shape())
        if not (shapes[0] == shapes[1] == shapes[2]) or shapes[3]:
            shape = broadcast(*shapes)
            loc, scale, y = loc.expand(shape), scale.expand(shape), y.expand(shape)
        if not loc.dtype == scale.dtype == y.dtype:
            dtype = torch.promote_types(torch.promote_types(loc.dtype, scale.dtype), y.dtype)
            loc, scale, y = loc.to(dtype), scale.to(dtype), y.to(dtype)
        return location_scale_crps(self, loc, scale, y)

    def independent(self) -> Family:
        """The family with the same marginal law and independent coordinates."""
        return replace(self, exact=False)

    def sample(
        self,
        shape: Sequence[int],
        event_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Draw unit noise; elliptical laws draw one mixing variable per event.

        Args:
            shape: Leading dimensions: samples and batch.
            event_size: Number of coordinates of an event.
            dtype: Of the draws; torch's default for None.
            device: Of the draws; torch's default for None.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Noise, (*shape, event_size).
        """
        return self._draw(torch.empty((*shape, event_size), dtype=dtype, device=device), generator)

    @abstractmethod
    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        """Fill ``noise`` with draws of the unit law."""

    def _mix(self, noise: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Normal noise times the root of a random variance: one per event, or one per coordinate."""
        size = (*noise.shape[:-1], 1) if self.exact else noise.shape
        return noise * draw(noise.new_empty(size)).sqrt()

    def _parameter_shape(self) -> Sequence[int]:
        return ()


class NormalFamily(Family):
    """Normal law; the scale is the standard deviation."""

    name = "normal"
    variance = 1.0

    def cdf(self, z: Tensor) -> Tensor:
        return torch.special.ndtr(z)

    def log_density(self, z: Tensor) -> Tensor:
        return -0.5 * z.square() - 0.5 * math.log(2 * math.pi)

    def icdf(self, p: Tensor) -> Tensor:
        return torch.special.ndtri(p)

    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and ``2 density - 1 / sqrt(pi)``."""
        w = z * math.sqrt(0.5)
        spread = (w * w).neg_().exp() * math.sqrt(2 / math.pi)
        return torch.erf(w), spread.sub_(1 / math.sqrt(math.pi))

    def independent(self) -> Family:
        """This family: uncorrelated normal coordinates are independent."""
        return self

    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        return noise.normal_(generator=generator)


class LaplaceFamily(Family):
    """Laplace law with density ``exp(-|z|) / 2``: a normal law whose variance is exponential."""

    name = "laplace"
    variance = 2.0

    def cdf(self, z: Tensor) -> Tensor:
        return torch.where(z < 0, 0.5 * torch.exp(z.clamp(max=0)), 1 - 0.5 * torch.exp(-z.clamp(min=0)))

    def log_density(self, z: Tensor) -> Tensor:
        return -z.abs() - math.log(2)

    def icdf(self, p: Tensor) -> Tensor:
        outer = -torch.log(2 * torch.minimum(p, 1 - p))
        return torch.where(p < 0.5, -outer, outer)

    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and ``(1 + |z|) exp(-|z|) - 3/4``."""
        size = z.abs().clamp(max=FAR)
        return torch.copysign(torch.expm1(-size), z), (1 + size) * torch.exp(-size) - 0.75

    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        return self._mix(noise.normal_(generator=generator), lambda out: 2 * out.exponential_(generator=generator))


class LogisticFamily(Family):
    """Logistic law, independent coordinates."""

    name = "logistic"
    variance = math.pi**2 / 3

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def log_density(self, z: Tensor) -> Tensor:
        return -z.abs() - 2 * torch.log1p(torch.exp(-z.abs()))

    def icdf(self, p: Tensor) -> Tensor:
        return torch.logit(p)

    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and ``2 |z| F(-|z|) - 2 log F(|z|) - 1``."""
        size = z.abs().clamp(max=FAR)
        tail = torch.exp(-size)
        return torch.tanh(z / 2), 2 * (size * tail / (1 + tail) + torch.log1p(tail)) - 1

    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        floor = torch.finfo(noise.dtype).eps / 4  # a uniform draw can be exactly 0
        return torch.logit(noise.uniform_(generator=generator).clamp_(min=floor))


class UniformFamily(Family):
    """Uniform law on [-1, 1], independent coordinates; the scale is the half width."""

    name = "uniform"
    variance = 1 / 3

    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 * z.clamp(-1, 1) + 0.5

    def log_density(self, z: Tensor) -> Tensor:
        return torch.full_like(z, -math.log(2)).masked_fill(z.abs() > 1, -math.inf)

    def icdf(self, p: Tensor) -> Tensor:
        return 2 * p - 1

    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and ``1/6 - min(|z|, 1)^2 / 2``."""
        inside = z.clamp(-1, 1)
        return inside, 1 / 6 - 0.5 * inside.square()

    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        return noise.uniform_(-1, 1, generator=generator)


NORMAL = NormalFamily(exact=True)
LAPLACE = LaplaceFamily(exact=True)
LOGISTIC = LogisticFamily(exact=False)
UNIFORM = UniformFamily(exact=False)
