"""Student's t law as a family: elliptical, its variance an inverse gamma."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from probhard._util.tensors import checking
from probhard.errors import ParameterError, ShapeError
from probhard.laws import special
from probhard.laws.family import Family


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
