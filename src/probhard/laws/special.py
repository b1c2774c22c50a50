"""Special functions that torch lacks: the incomplete beta function and Student's t.

With ``s = a + b`` and ``y = 1 - x``

    I_x(a, b) = x^a y^b / B(a, b) / (d_0 + c_1 / (d_1 + c_2 / (d_2 + ...))),
    c_n = n (a + n - 1) (s + n - 1) (b - n) x^2 / (a + 2n - 1)^2,
    d_n = a + 2n + x (n (b - n) / (a + 2n - 1) - (a + n) (s + n) / (a + 2n + 1)),

the even part of the classical continued fraction, used below the mean of the beta law; above it
``I_x(a, b) = 1 - I_y(b, a)``. Student's t is ``P(|T| > z) = I_x(df/2, 1/2)`` with ``x = df / (df + z^2)``.
Every function is elementwise torch, computed in float64. Results have the argument's dtype unless said otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.errors import ParameterError

STEPS = 128  # terms of the fraction: converged to rounding for a, b up to 1e4
STUDENT_STEPS = 48  # the same with b = 1/2, for any degrees of freedom
NEWTON_STEPS = 12
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)


def _double(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)


def _stirling(x: Tensor) -> Tensor:
    """Remainder of Stirling's formula: ``lgamma(x) - (x - 1/2) log x + x - log(2 pi) / 2``."""
    low, high = x.clamp(max=10.0), x.clamp(min=10.0)
    exact = torch.lgamma(low) - (low - 0.5) * low.log() + low - 0.5 * math.log(2 * math.pi)
    inverse_square = high.square().reciprocal()
    series = torch.zeros_like(high)
    for coefficient in reversed(STIRLING):
        series = series * inverse_square + coefficient
    return torch.where(x < 10.0, exact, series / high)


def log_gamma_half_step(x: Tensor) -> Tensor:
    """``lgamma(x + 1/2) - lgamma(x)`` for x > 0, of the shape of x, without the cancellation of two large numbers."""
    return x * torch.log1p(0.5 / x) + 0.5 * x.log() - 0.5 + _stirling(x + 0.5) - _stirling(x)


def log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Logarithm of the complete beta function B(a, b), without cancellation for large arguments.

    Args:
        a: Positive, any shape.
        b: Positive, broadcasting with a.

    Returns:
        ``log B(a, b)``, of the broadcast shape.
    """
    powers = (0.5 - a) * torch.log1p(b / a) - b * torch.log1p(a / b)
    return powers - 0.5 * torch.log(b / (2 * math.pi)) + _stirling(a) + _stirling(b) - _stirling(a + b)


def _fraction(a: Tensor | float, b: Tensor | float, x: Tensor, steps: int) -> Tensor:
    """``1 / (d_0 + c_1 / (d_1 + ...))``, evaluated from the last term backwards."""
    square = x.square()
    total = a + b
    tail: Tensor | None = None
    for n in range(steps, -1, -1):
        slope = -(a + n) * (total + n) / (a + (2 * n + 1))
        if n:
            slope = slope + n * (b - n) / (a + (2 * n - 1))
        denominator = slope * x + (a + 2 * n)
        tail = denominator if tail is None else denominator + tail
        if n:
            numerator = n * (a + (n - 1)) * (total + (n - 1)) * (b - n) / (a + (2 * n - 1)) ** 2
            tail = square * numerator / tail
    assert tail is not None
    return tail.reciprocal()


def _log_power(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``log(x^a y^b / B(a, b))``, accurate near the mode, where its large terms cancel."""
    total = a + b
    excess = torch.where(x <= y, total * x - a, b - total * y)
    above, below = excess / a, -excess / b
    log_x = torch.where(above.abs() < 0.5, torch.log1p(above), torch.log(x * (total / a)))
    log_y = torch.where(below.abs() < 0.5, torch.log1p(below), torch.log(y * (total / b)))
    correction = _stirling(total) - _stirling(a) - _stirling(b)
    return a * log_x + b * log_y + 0.5 * torch.log(a / total * b / (2 * math.pi)) + correction


def betainc(
    a: Tensor | float,
    b: Tensor | float,
    x: Tensor,
) -> Tensor:
    """Regularised incomplete beta function ``I_x(a, b)``; a value only, without gradient.

    Args:
        a: Positive, up to 1e4.
        b: Positive, up to 1e4, broadcasting with a.
        x: In [0, 1], broadcasting with both.

    Returns:
        ``I_x(a, b)``, of the broadcast shape.

    Raises:
        ParameterError: If an argument requires a gradient.
    """
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (a, b, x)):
        raise ParameterError(
            "betainc got an argument that requires a gradient.",
            "It is a value only: its derivatives in a and b have no elementary form.",
            "Detach the arguments or call it under torch.no_grad().",
        )
    first, second, point = _double(a, x), _double(b, x), x.double()
    other = 1 - point
    swap = point > (first + 1) / (first + second + 2)
    first, second = torch.where(swap, second, first), torch.where(swap, first, second)
    point, other = torch.where(swap, other, point), torch.where(swap, point, other)
    part = torch.exp(_log_power(first, second, point, other)) * _fraction(first, second, point, STEPS)
    return torch.where(swap, 1 - part, part).to(x.dtype)


def student_t_peak(df: Tensor | float, like: Tensor) -> Tensor:
    """Density of Student's t at 0: ``Gamma((df + 1) / 2) / (sqrt(df pi) Gamma(df / 2))``.

    Args:
        df: Degrees of freedom, any shape.
        like: A tensor on the device of the result.

    Returns:
        The density in float64, of the shape of df.
    """
    freedom = _double(df, like)
    return torch.exp(log_gamma_half_step(freedom / 2)) / torch.sqrt(freedom * math.pi)


def student_t_log_density(z: Tensor, df: Tensor | float) -> Tensor:
    """Log density of Student's t, differentiable in ``z``.

    Args:
        z: Any shape.
        df: Degrees of freedom, broadcasting with z.

    Returns:
        The log density, of the broadcast shape.
    """
    freedom = _double(df, z)
    tail = (freedom + 1) / 2 * torch.log1p(z.double().square() / freedom)
    return (student_t_peak(df, z).log() - tail).to(z.dtype)


def student_t_masses(z: Tensor, df: Tensor | float) -> tuple[Tensor, Tensor]:
    """Masses of Student's t on both sides of ``|z|``, without gradient.

    Args:
        z: Any shape.
        df: Degrees of freedom, broadcasting with z.

    Returns:
        ``P(|T| < |z|)`` and ``P(|T| > |z|)`` in float64, each to the relative precision of z.
    """
    freedom, square = _double(df, z), z.double().square()
    # With a float df the coefficients of the fraction are floats. Few degrees of freedom and float32 need few terms.
    half = df / 2 if isinstance(df, float) else freedom / 2
    steps = min(STUDENT_STEPS, 10 + int(3 * math.sqrt(df))) if isinstance(df, float) else STUDENT_STEPS
    steps = steps if z.dtype == torch.float64 else steps // 2
    ratio = square / freedom
    x, y = 1 / (1 + ratio), 1 / (1 + 1 / ratio)  # both exact at z = 0 and at infinity
    power = torch.exp(-freedom / 2 * torch.log1p(ratio)) * y.sqrt() * (student_t_peak(df, z) * freedom.sqrt())
    central = power * _fraction(0.5, half, y, steps)
    outer = power * _fraction(half, 0.5, x, steps)
    inside = y * (half + 2.5) < 1.5  # each fraction where it converges fast
    return torch.where(inside, central, 1 - outer), torch.where(inside, 1 - central, outer)


class _StudentTCdf(torch.autograd.Function):
    """Distribution function whose derivative is the analytic density."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, df: Tensor | float) -> Tensor:
        outer = student_t_masses(z, df)[1] / 2
        return torch.where(z > 0, 1 - outer, outer).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        z, ctx.df = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return gradients[0] * student_t_log_density(z, ctx.df).exp(), None


class _DualStudentTCdf(_StudentTCdf):
    """``_StudentTCdf`` with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (z,) = ctx.saved_tensors
        return tangents[0] * student_t_log_density(z, ctx.df).exp()


def student_t_cdf(z: Tensor, df: Tensor | float) -> Tensor:
    """Distribution function of Student's t, differentiable in ``z``.

    Args:
        z: Any shape.
        df: Degrees of freedom, a constant, broadcasting with z.

    Returns:
        ``P(T <= z)``, of the broadcast shape.
    """
    if isinstance(df, Tensor):
        z = z.expand(broadcast(z.shape, df.shape))
    function = _StudentTCdf if torch.compiler.is_compiling() else _DualStudentTCdf
    return function.apply(z, df)


def student_t_icdf(p: Tensor, df: Tensor | float) -> Tensor:
    """Quantiles of Student's t, without gradient.

    Newton's method on the logarithm of the tail mass in the coordinate ``w = asinh(z / sqrt(df))``. That function is
    concave and, far out, linear.

    Args:
        p: Probabilities in [0, 1].
        df: Degrees of freedom, broadcasting with p.

    Returns:
        The quantiles, of the broadcast shape.
    """
    with torch.no_grad():
        probability, freedom = p.double(), _double(df, p)
        root, peak = freedom.sqrt(), student_t_peak(df, p)
        tail = torch.minimum(probability, 1 - probability)
        inner = tail.clamp(min=torch.finfo(torch.float64).tiny)  # probabilities 0 and 1 are set below
        w = torch.asinh(torch.special.ndtri(inner).abs() / root)
        for _ in range(NEWTON_STEPS):
            mass = student_t_masses(root * torch.sinh(w), df)[1] / 2
            hazard = peak * root * torch.cosh(w) ** -freedom / mass  # -d log(mass) / dw
            w = w + (mass.log() - inner.log()) / hazard
        z = torch.where(tail == 0, math.inf, root * torch.sinh(w))
        return torch.where(probability < 0.5, -z, z).to(p.dtype)
