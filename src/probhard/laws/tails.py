"""Partial moments of the unit laws below a point ``t <= 0`` of their left tail.

With F the distribution function of a symmetric unit law T,

    mass = F(t),      first = E (t - T)+ = int_(-inf)^t F,      second = E (t - T)+^2 = 2 int_(-inf)^t first,
    square = int_(-inf)^t F^2.

By symmetry they serve both tails. Each is computed without the cancellation of ``1 - F`` and keeps its digits far out,
so a law far outside its bounds still has gradients. With m the Mills ratio F / f of the normal law, all four are f or
f^2 times a polynomial in t and m. The logistic second moment is the dilogarithm: with ``L = first = log(1 + exp t)``,

    -2 Li2(-exp t) = 2 (L + L^2 / 4 + sum_k B_2k L^(2k + 1) / (2k + 1)!),      square = L + exp(-L) - 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from probhard.errors import ParameterError
from probhard.laws import special
from probhard.laws.family import Family

FARTHEST = 1e100  # largest |t|: its square and its products with 1 / scale stay finite in float64
SMALLEST_MASS = 1e-290  # below, the logarithm of a Student-t mass is taken from its density
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798)
DILOGARITHM = tuple(number / math.factorial(2 * k + 3) for k, number in enumerate(BERNOULLI))
EXPONENTIAL = tuple((-1) ** k / math.factorial(k + 2) for k in range(16))  # (L + exp(-L) - 1) / L^2


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


class Tail(ABC):
    """Left tail of a unit law at ``t``, float64 with ``-FARTHEST <= t <= 0``; values only, without gradient.

    Subclasses take ``(family, t)`` and set ``mass`` and ``first``, of the shape of t.
    """

    mass: Tensor
    first: Tensor

    @abstractmethod
    def second(self) -> Tensor:
        """``E (t - T)+^2``, of the shape of t."""

    @abstractmethod
    def square(self) -> Tensor:
        """Integral of ``F^2`` up to t, of the shape of t."""


class NormalTail(Tail):
    """Normal: ``f (1 + t m)``, ``f ((1 + t^2) m + t)`` and ``f^2 (t m^2 + 2 m - sqrt(2) m(sqrt(2) t))``."""

    def __init__(self, family: Family, t: Tensor) -> None:
        self.t, self.density = t, torch.exp(-0.5 * t.square()) / math.sqrt(2 * math.pi)
        self.ratio = self._mills(t)
        self.mass = self.density * self.ratio
        self.first = self.density * (1 + t * self.ratio)

    @staticmethod
    def _mills(t: Tensor) -> Tensor:
        return torch.special.erfcx(t * -math.sqrt(0.5)) * math.sqrt(math.pi / 2)

    def second(self) -> Tensor:
        return (self.density * ((1 + self.t.square()) * self.ratio + self.t)).clamp_min(0)

    def square(self) -> Tensor:
        double = math.sqrt(2) * self._mills(math.sqrt(2) * self.t)
        return (self.density.square() * (self.ratio * (self.t * self.ratio + 2) - double)).clamp_min(0)


class LaplaceTail(Tail):
    """Laplace: powers of ``exp(t)``."""

    def __init__(self, family: Family, t: Tensor) -> None:
        self.mass = self.first = 0.5 * torch.exp(t)

    def second(self) -> Tensor:
        return 2 * self.first

    def square(self) -> Tensor:
        return 0.5 * self.first.square()


class LogisticTail(Tail):
    """Logistic: series in ``log(1 + exp t)``, which is at most log 2."""

    def __init__(self, family: Family, t: Tensor) -> None:
        self.mass, self.first = torch.sigmoid(t), torch.log1p(torch.exp(t))

    def second(self) -> Tensor:
        series = _polynomial(DILOGARITHM, self.first.square())
        return 2 * self.first * (1 + self.first * (0.25 + self.first * series))

    def square(self) -> Tensor:
        return self.first.square() * _polynomial(EXPONENTIAL, self.first)


class UniformTail(Tail):
    """Uniform: powers of the distance to the end of the support."""

    def __init__(self, family: Family, t: Tensor) -> None:
        self.inside = (t + 1).clamp_min(0)
        self.mass, self.first = 0.5 * self.inside, 0.25 * self.inside.square()

    def second(self) -> Tensor:
        return self.inside**3 / 6

    def square(self) -> Tensor:
        return self.inside**3 / 12


class StudentTTail(Tail):
    """Student's t: ``-E[T; T < t] = df/(df - 1) f(0) (1 + t^2/df)^((1 - df)/2)``.

    The square of that is proportional to the density of a t law with 2 df - 1 degrees of freedom.
    """

    def __init__(self, family: Any, t: Tensor) -> None:
        self.t, self.df = t, family.df
        freedom = torch.as_tensor(self.df, dtype=t.dtype, device=t.device)
        self.peak = special.student_t_peak(self.df, t)
        power = torch.exp((1 - freedom) / 2 * torch.log1p(t.square() / freedom))
        self.freedom, self.moment = freedom, freedom * self.peak / (freedom - 1) * power  # -E[T; T < t]
        self.mass = special.student_t_masses(t, self.df)[1] / 2
        self.first = (self.moment + t * self.mass).clamp_min(0)

    def second(self) -> Tensor:
        freedom, t = self.freedom, self.t
        variance = freedom / (freedom - 2)
        return ((t.square() + variance) * self.mass + t * self.moment * ((freedom - 3) / (freedom - 2))).clamp_min(0)

    def square(self) -> Tensor:
        twice, freedom = 2 * self.df - 1, self.freedom
        stretch = ((2 * freedom - 1) / freedom).sqrt()
        factor = freedom / (freedom - 1) * self.peak.square() / special.student_t_peak(twice, self.t) / stretch
        outer = special.student_t_masses(stretch * self.t, twice)[1]  # both tails: twice the mass
        return (self.mass * (self.t * self.mass + 2 * self.moment) - factor * outer).clamp_min(0)


TAILS: dict[str, Any] = {
    "normal": NormalTail,
    "laplace": LaplaceTail,
    "logistic": LogisticTail,
    "uniform": UniformTail,
    "student-t": StudentTTail,
}


def tail_of(family: Family, t: Tensor) -> Tail:
    """The left tail of a family's unit law.

    Args:
        family: The family.
        t: Points, (*batch, n), float64 and at most 0.

    Returns:
        Mass, first and second moments at t, each (*batch, n).

    Raises:
        ParameterError: If the family has no entry in ``TAILS``.
    """
    if family.name not in TAILS:
        raise ParameterError(
            f"The partial moments of a {family.name} law are not available.",
            "Censored moments and scores need closed forms for the family.",
            f"Use one of {', '.join(TAILS)}, or add a Tail to probhard.laws.tails.TAILS.",
        )
    tail: Tail = TAILS[family.name](family, t)
    return tail


class _PartialMoments(torch.autograd.Function):
    """Mass, first and second moment; each is the derivative of the next, up to a factor 2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, family: Family) -> tuple[Tensor, Tensor, Tensor]:
        tail = tail_of(family, t)
        return tail.mass.clone(), tail.first.clone(), tail.second()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.family = inputs[1]
        ctx.save_for_backward(inputs[0], *output[:2])
        ctx.save_for_forward(inputs[0], *output[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        t, mass, first = ctx.saved_tensors
        of_mass, of_first, of_second = gradients
        density = ctx.family.log_density(t).exp()
        return of_mass * density + of_first * mass + 2 * of_second * first, None


class _DualPartialMoments(_PartialMoments):
    """``_PartialMoments`` with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        t, mass, first = ctx.saved_tensors
        return tangents[0] * ctx.family.log_density(t).exp(), tangents[0] * mass, 2 * tangents[0] * first


def partial_moments(family: Family, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Partial moments of a unit law, differentiable in ``t``.

    Args:
        family: The family.
        t: Points, (*batch, n), float64 and at most 0.

    Returns:
        ``F(t)``, ``E (t - T)+`` and ``E (t - T)+^2``, each (*batch, n).

    Raises:
        ParameterError: If the family has no entry in ``TAILS``.
    """
    function = _PartialMoments if torch.compiler.is_compiling() else _DualPartialMoments
    mass, first, second = function.apply(t, family)
    return mass, first, second


def unit_variance(family: Family) -> float | Tensor:
    """Variance of the unit law of a family; in float64 where the degrees of freedom are a tensor, of their shape."""
    df = getattr(family, "df", None)
    return df.double() / (df.double() - 2) if isinstance(df, Tensor) else family.unit_variance


def log_mass(family: Family, z: Tensor) -> Tensor:
    """``log F(z)``, accurate in the far tail and differentiable.

    Args:
        family: The family of the unit law.
        z: Any real numbers, (*batch, n), float64.

    Returns:
        (*batch, n); minus infinity where the mass is 0.
    """
    if family.name == "normal":
        return torch.special.log_ndtr(z)
    if family.name == "logistic":
        return torch.nn.functional.logsigmoid(z)
    if family.name == "laplace":
        right = torch.log1p(-0.5 * torch.exp(-z.clamp_min(0)))
        return torch.where(z < 0, z - math.log(2), right)
    mass = family.cdf(z)
    small = mass < SMALLEST_MASS
    inner = torch.where(small, 1.0, mass).log()
    if family.name != "student-t":
        return torch.where(small, -math.inf, inner)
    # In the far tail F is about (1 + z^2 / df) f / |z|; the logarithm, near -700, is off by less than 1e-2.
    far = torch.where(small, z, -1.0)
    df = torch.as_tensor(family.df, dtype=z.dtype, device=z.device)  # type: ignore[attr-defined]
    outer = family.log_density(far) + torch.log1p(far.square() / df) - torch.log(-far)
    return torch.where(small, outer, inner)
