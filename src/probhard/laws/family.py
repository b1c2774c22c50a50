"""The families: normal, Laplace, logistic, uniform and Student's t, each by its unit law; see ``laws.base``.

| family    | density of the unit law       | variance      | multivariate law                     |
|-----------|-------------------------------|---------------|--------------------------------------|
| normal    | exp(-z^2 / 2) / sqrt(2 pi)    | 1             | elliptical                           |
| Laplace   | exp(-abs(z)) / 2              | 2             | elliptical, variance exponential     |
| logistic  | exp(-z) / (1 + exp(-z))^2     | pi^2 / 3      | independent coordinates              |
| uniform   | 1/2 on [-1, 1]                | 1/3           | independent coordinates              |
| Student-t | ~ (1 + z^2/df)^(-(df + 1)/2)  | df / (df - 2) | elliptical, variance inverse gamma   |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from probhard._util.tensors import checking
from probhard.errors import ParameterError, ShapeError
from probhard.laws import special
from probhard.laws.base import Family

__all__ = [
    "LAPLACE",
    "LOGISTIC",
    "NORMAL",
    "UNIFORM",
    "Family",
    "LaplaceFamily",
    "LogisticFamily",
    "NormalFamily",
    "StudentTFamily",
    "UniformFamily",
    "student_t",
]

FAR = 1e3  # exp(-FAR) is 0 in float64; products with it stay finite at infinity


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


@dataclass(frozen=True, eq=False)
class StudentTFamily(Family):
    """Student's t: a normal law whose variance is inverse gamma.

    Instances compare by value, and by identity where ``df`` is a tensor.

    Args:
        df: Degrees of freedom: a number, (*batch, 1), or (*batch, n) for independent coordinates.
    """

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
                "Its coordinates share one mixing variable, and so the degrees of freedom.",
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
    df: float | Tensor,  # a number, (*batch, 1) or (*batch, n)
) -> StudentTFamily:
    """The family of the multivariate Student's t; ``.independent()`` has one mixing variable per coordinate.

    Args:
        df: Degrees of freedom above 2: a number, (*batch, 1), or (*batch, n) if made independent.

    Returns:
        The family, with one mixing variable per event.

    Raises:
        ParameterError: If ``df`` is at most 2, infinite, or requires a gradient.
    """
    if isinstance(df, Tensor) and df.requires_grad:
        raise ParameterError(
            "student_t got df that requires a gradient.",
            "Scores and draws treat the degrees of freedom as constant, so they would never be trained.",
            "Pass df.detach() and choose it by validation.",
        )
    if checking() and not bool(torch.as_tensor((df > 2) & (df < math.inf)).all()):
        raise ParameterError(
            f"student_t got df = {df}.",
            "With 2 degrees of freedom or fewer the variance does not exist, so there are no moments to project.",
            "Choose 2 < df < inf, or NORMAL for the limit of many degrees of freedom.",
        )
    return StudentTFamily(exact=True, df=df if isinstance(df, Tensor) else float(df))
