"""Families of symmetric location-scale laws, each given by its unit law (location 0, scale 1), and the CRPS.

With ``e = loc - y``, ``z = e / scale``, F the unit law's distribution function and c(z) its CRPS at z,

    CRPS(y) = e (2 F(z) - 1) + scale h(z),      h(z) = c(z) - z c'(z),      c'(z) = 2 F(z) - 1,
    dCRPS/dloc = 2 F(z) - 1,                    dCRPS/dscale = h(z).

Slope ``2F - 1`` and spread ``h`` are bounded, so value and gradients are finite for every ``scale >= 0``; at
scale 0 the score is ``|y - loc|``. It is a loss, ``E|X - y| - E|X - X'| / 2``, the paper's sign reversed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from probhard._util.tensors import broadcast, checking
from probhard.errors import ParameterError, ShapeError
from probhard.laws import special

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
        """Distribution function."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density."""

    @abstractmethod
    def icdf(self, p: Tensor) -> Tensor:
        """Quantile function."""

    @abstractmethod
    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope ``2F - 1`` and spread ``h`` of the CRPS, finite at infinity."""

    def crps_spread(self, z: Tensor) -> Tensor:
        """``h(z) = c(z) - z c'(z)``, the derivative of the CRPS in the scale."""
        return self.crps_terms(z)[1]

    def crps(
        self,
        loc: Tensor,  # (*batch, n)
        scale: Tensor,  # (*batch, n), >= 0
        y: Tensor,  # (*batch, n)
    ) -> Tensor:
        """Continuous ranked probability score of ``loc + scale * unit`` at ``y``, (*batch, n)."""
        shapes = (loc.shape, scale.shape, y.shape, self._parameter_shape())
        if not (shapes[0] == shapes[1] == shapes[2]) or shapes[3]:
            shape = broadcast(*shapes)
            loc, scale, y = loc.expand(shape), scale.expand(shape), y.expand(shape)
        if not loc.dtype == scale.dtype == y.dtype:
            dtype = torch.promote_types(torch.promote_types(loc.dtype, scale.dtype), y.dtype)
            loc, scale, y = loc.to(dtype), scale.to(dtype), y.to(dtype)
        return special.location_scale_crps(self, loc, scale, y)

    def independent(self) -> Family:
        """The same marginal law with independent coordinates."""
        return replace(self, exact=False)

    def sample(
        self,
        shape: Sequence[int],
        event_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Unit noise of shape ``(*shape, event_size)``; elliptical laws mix each event as a whole."""
        return self._draw(torch.empty((*shape, event_size), dtype=dtype, device=device), generator)

    @abstractmethod
    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        """Draws in the place of ``noise``."""

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
        """Itself: uncorrelated normal coordinates are independent."""
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


@dataclass(frozen=True, eq=False)
class StudentTFamily(Family):
    """Student's t: a normal law whose variance is inverse gamma; compares by value, tensors by identity."""

    df: float | Tensor
    name = "student-t"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StudentTFamily) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.exact, id(self.df) if isinstance(self.df, Tensor) else self.df

    @property
    def unit_variance(self) -> float | Tensor:
        """Variance of the unit law."""
        return self.df / (self.df - 2)

    def cdf(self, z: Tensor) -> Tensor:
        return special.student_t_cdf(z, self.df)

    def log_density(self, z: Tensor) -> Tensor:
        return special.student_t_log_density(z, self.df)

    def icdf(self, p: Tensor) -> Tensor:
        return special.student_t_icdf(p, self.df)

    def crps_terms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and ``2 (df + z^2) density / (df - 1) - E|X - X'| / 2``."""
        df = torch.as_tensor(self.df, dtype=torch.float64, device=z.device)
        peak = special.student_t_peak(self.df, z)
        power = torch.exp((1 - df) / 2 * torch.log1p(z.double().square() / df))
        half = math.sqrt(math.pi) * df.sqrt() * peak * torch.exp(-special.log_gamma_half_step(df - 0.5))
        spread = 2 * df * peak / (df - 1) * (power - half)
        slope = torch.copysign(special.student_t_masses(z, self.df)[0], z)
        return slope.to(z.dtype), spread.to(z.dtype)

    def _draw(self, noise: Tensor, generator: Generator | None) -> Tensor:
        half = torch.as_tensor(self.df, dtype=noise.dtype, device=noise.device) / 2
        if self.exact and half.dim() and half.shape[-1] != 1:
            raise ShapeError(
                f"Cannot draw from a multivariate Student's t with df of shape {tuple(half.shape)}.",
                "Its coordinates share one mixing variable and so one number of degrees of freedom.",
                "Give df the shape (*batch, 1), or use student_t(df).independent().",
            )
        normal = noise.normal_(generator=generator)
        return self._mix(normal, lambda out: half / torch._standard_gamma(half.expand_as(out), generator=generator))

    def _parameter_shape(self) -> Sequence[int]:
        return self.df.shape if isinstance(self.df, Tensor) else ()


NORMAL = NormalFamily(exact=True)
LAPLACE = LaplaceFamily(exact=True)
LOGISTIC = LogisticFamily(exact=False)
UNIFORM = UniformFamily(exact=False)


def student_t(
    df: float | Tensor,  # a number, (*batch, 1), or (*batch, n) for the independent twin
) -> StudentTFamily:
    """Multivariate Student's t, one mixing variable per event; ``.independent()`` mixes each coordinate.

    Raises:
        ParameterError: If ``df`` is not above 2, infinite, or a tensor that requires a gradient.
    """
    if isinstance(df, Tensor) and df.requires_grad:
        raise ParameterError(
            "student_t got df that requires a gradient.",
            "Scores and draws treat the degrees of freedom as a constant, so it would never be trained.",
            "Pass df.detach() and choose it by validation.",
        )
    if checking() and not bool(torch.as_tensor((df > 2) & (df < math.inf)).all()):
        raise ParameterError(
            f"student_t got df = {df}.",
            "At 2 degrees of freedom or fewer a variance does not exist, so there are no moments to project.",
            "Choose 2 < df < inf, or NORMAL for the limit of many degrees of freedom.",
        )
    return StudentTFamily(exact=True, df=df if isinstance(df, Tensor) else float(df))
