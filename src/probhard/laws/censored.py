"""Censored marginals: the law of ``clip(X, l, h)`` for a location-scale X, coordinate by coordinate.

It has point masses ``P(X <= l)`` at l and ``P(X >= h)`` at h, and the density of X between. With c = clip(loc), y
in [l, h], and for each point p of {y, l, h} the partial moments P (``first``) and A (``square``) of the unit law at
``-|p - loc| / scale`` (see ``partial``), and g = E|T - T'| / 2 of the unit law,

    E clip(X) = c + scale (P_l - P_h),
    CRPS(y) = int_l^y F^2 + int_y^h (1 - F)^2 = |y - c| + scale B(P, A),
    B(P, A) = 2 P_y - g - A_l - A_h                 where loc lies in [l, h],
              2 (P_y - P_l) + A_l - A_h             where loc < l,         mirrored where loc > h.

A target outside adds its distance to the bound. The derivatives of the CRPS are F(y)^2 - (1 - F(y))^2 in y,
-F(l)^2 in l, (1 - F(h))^2 in h, minus their sum in loc, and ``B(P - t F, A - t F^2)`` in scale: all are bounded, and
where loc is far outside they are sums of tail masses, so that they vanish only by underflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import safe_sqrt
from probhard.laws.distribution import Marginals
from probhard.laws.family import NORMAL, Family
from probhard.laws.tails import FARTHEST, log_mass, partial_moments, tail_of, unit_variance


class CensoredMarginals(Marginals):
    """The laws of ``clip(X, lower, upper)``, X = loc + scale * unit; a scale of 0 is a point mass at clip(loc).

    Args:
        loc: Location of X, (*batch, n).
        scale: Scale of X, (*batch, n), >= 0.
        family: Unit law of X.
        lower: Lower bounds, broadcasting with (*batch, n); -inf for none.
        upper: Upper bounds, broadcasting with (*batch, n); inf for none. Equal bounds are a point mass.
        validate_args: Check the bounds in eager mode.
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
                "They do not broadcast to one shape (*batch, n).",
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
        """Mean, (*batch, n); it lies within the bounds."""
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
        ends = _reach(loc, scale, lower, below), _reach(loc, scale, upper, ~above)
        t, finite = torch.stack(ends), ~torch.stack((lower, upper)).isinf()  # (2, *batch, n)
        mass, first, second = (torch.where(finite, part, 0.0) for part in partial_moments(self.family, t))
        width = (torch.where(bounded, upper, 0.0) - torch.where(bounded, lower, 0.0)).clamp(max=FARTHEST)
        span = (width / _positive(scale)).clamp(max=FARTHEST)
        between = unit_variance(self.family) - (second - 2 * t * first).sum(0)  # less E[T^2 - t^2; T < t]
        left, right = second[0] - second[1] - 2 * span * first[1], second[1] - second[0] - 2 * span * first[0]
        square = torch.where(below, left, torch.where(above, right, between))  # E (clip(X) - c)^2 / scale^2
        shift = scale * (first[0] - first[1])
        mean, variance = torch.clamp(loc, lower, upper) + shift, scale.square() * square - shift.square()
        # Narrow bounds cancel; there the monotone F encloses the variance 2 int_(l<s<u<h) F(s) (1 - F(u)) and the mean.
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
        """Closed-form continuous ranked probability score, (*batch, n)."""
        shape = broadcast(self.batch_shape, y.shape)
        dtype = torch.promote_types(torch.promote_types(self.loc.dtype, self.scale.dtype), y.dtype)
        parts = (self.loc, self.scale, y, self.lower, self.upper)
        loc, scale, y, lower, upper = (part.to(dtype).expand(shape) for part in parts)
        inside = torch.clamp(y, lower, upper)
        function = _CensoredCRPS if torch.compiler.is_compiling() else _DualCensoredCRPS
        return (y - inside).abs() + function.apply(loc, scale, inside, lower, upper, self.family)[0]

    def standardised(self, y: Tensor) -> Tensor:
        """``(y - loc) / scale`` in float64 with finite gradients: 0 for 0/0, at most 1e100 in size."""
        distance = y.double() - self.loc.double()
        return (distance / _positive(self.scale.double())).clamp(-FARTHEST, FARTHEST)

    def cdf(self, value: Tensor) -> Tensor:
        """Distribution function, continuous from the right: 0 below ``lower``, 1 from ``upper`` on."""
        inner = self.family.cdf(self.standardised(value)).to(torch.promote_types(self.loc.dtype, value.dtype))
        inner = torch.where(self.scale == 0, (value >= self.loc).to(inner.dtype), inner)
        return torch.where(value < self.lower, 0.0, torch.where(value >= self.upper, 1.0, inner))

    def pit(self, y: Tensor) -> Tensor:
        """``(F(y-) + F(y)) / 2``: a point mass counts half."""
        inner = self.family.cdf(self.standardised(y)).to(torch.promote_types(self.loc.dtype, y.dtype))
        before, after = torch.where(y <= self.lower, 0.0, inner), torch.where(y >= self.upper, 1.0, inner)
        middle = 0.5 * (torch.where(y > self.upper, 1.0, before) + torch.where(y < self.lower, 0.0, after))
        centre = torch.clamp(self.loc, self.lower, self.upper)
        return torch.where(self.scale == 0, 0.5 + 0.5 * torch.sign(y - centre), middle)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantile function: the clipped one of X."""
        unit = self.family.icdf(value)
        quantile = torch.where(self.scale == 0, self.loc, self.loc + self.scale * unit).detach()
        inside = (quantile > self.lower) & (quantile < self.upper)
        inner = self.loc + self.scale * torch.where(inside & (self.scale > 0), unit, 0.0)
        return torch.where(quantile <= self.lower, self.lower, torch.where(quantile >= self.upper, self.upper, inner))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density between the bounds, log of the point mass at a bound, minus infinity outside."""
        loc, scale, lower, upper = self.loc.double(), self.scale.double(), self.lower.double(), self.upper.double()
        inside = (value > lower) & (value < upper) & (scale > 0)
        z = self.standardised(torch.where(inside, value, self.loc))
        density = self.family.log_density(z) - torch.where(inside, _positive(scale), 1.0).log()
        # The law left of the lower bound, and by symmetry that right of the upper one, without 0/0 or inf/inf.
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

    def nll(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``-log_prob``, (*batch, n); 0 where the law is degenerate or the target masked, NaN included."""
        skip = self.degenerate if mask is None else self.degenerate | ~mask
        loc, scale = torch.where(skip, 0.0, self.loc), torch.where(skip, 1.0, self.scale)
        lower, upper = torch.where(skip, -math.inf, self.lower), torch.where(skip, math.inf, self.upper)
        law = CensoredMarginals(loc, scale, self.family, lower, upper, validate_args=False)
        return torch.where(skip, 0.0, -law.log_prob(torch.where(skip, 0.0, y)))

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each coordinate, within the bounds."""
        return torch.clamp(super().rsample(sample_shape, generator), self.lower, self.upper)


def _positive(scale: Tensor) -> Tensor:
    return scale.clamp_min(1 / FARTHEST)


def _reach(
    loc: Tensor,
    scale: Tensor,
    point: Tensor,
    right: Tensor,  # bool: whether the point counts as right of loc
) -> Tensor:
    """``-|point - loc| / scale``, differentiable where it is 0; infinite points at the far end."""
    finite = ~point.isinf()
    apart = torch.where(finite, point, loc) - loc
    reach = torch.where(right, -apart, apart) / _positive(scale)
    return torch.where(finite, reach.clamp_min(-FARTHEST), -FARTHEST)


def _enclosed(value: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """The value clamped against rounding, its gradient as it was."""
    constant = value.detach()
    return torch.clamp(constant, least.detach(), most.detach()) + (value - constant)


class _CensoredCRPS(torch.autograd.Function):
    """Value and its five derivatives, which are outputs so that they can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, y: Tensor, lower: Tensor, upper: Tensor, family: Family
    ) -> tuple[Tensor, ...]:
        dtype = loc.dtype
        loc, scale, y, lower, upper = (part.double() for part in (loc, scale, y, lower, upper))
        below, above = loc < lower, loc > upper
        sides = _reach(loc, scale, lower, below), _reach(loc, scale, upper, ~above)
        t, finite = torch.stack(sides), ~torch.stack((lower, upper)).isinf()  # (2, *batch, n)
        t_y = _reach(loc, scale, y, y > loc)
        target, ends = tail_of(family, t_y), tail_of(family, t)
        mass, first, square = (torch.where(finite, part, 0.0) for part in (ends.mass, ends.first, ends.square()))
        spread = -family.crps_spread(loc.new_full((), math.inf))

        def bracket(of_y: Tensor, of_first: Tensor, of_square: Tensor, constant: Tensor | float) -> Tensor:
            inside = 2 * of_y - constant - of_square.sum(0)
            left = 2 * (of_y - of_first[0]) + of_square[0] - of_square[1]
            right = 2 * (of_y - of_first[1]) + of_square[1] - of_square[0]
            return torch.where(below, left, torch.where(above, right, inside))

        centre = torch.clamp(loc, lower, upper)
        value = (y - centre).abs() + scale * bracket(target.first, first, square, spread)
        partials = target.first - t_y * target.mass, first - t * mass, square - t * mass.square()
        to_scale = bracket(*partials, spread)
        left = torch.where(below, 1 - mass[0], mass[0])  # F(lower)
        right = torch.where(above, 1 - mass[1], mass[1])  # 1 - F(upper)
        side = torch.sign(y - loc)
        to_y, to_lower, to_upper = side * (1 - 2 * target.mass), -left.square(), right.square()
        outer = 2 * target.mass - 2 * mass[0] + mass[0].square() - mass[1].square()
        mirrored = 2 * mass[1] - 2 * target.mass + mass[0].square() - mass[1].square()
        to_loc = torch.where(below, outer, torch.where(above, mirrored, -to_y - to_lower - to_upper))
        # Narrow bounds cancel; there the monotone F encloses the score.
        apart = torch.stack((y - lower, upper - y))
        near = torch.where(torch.stack((y > loc, y <= loc)), 1 - target.mass, target.mass).square()  # F(y), 1 - F(y)
        least = torch.where(finite, apart, 0.0) * torch.stack((left, right)).square()
        value = torch.clamp(value, least.sum(0), torch.where(finite, apart * near, math.inf).sum(0))
        return tuple(part.to(dtype) for part in (value, to_loc, to_scale, to_y, to_lower, to_upper))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.family = inputs[5]
        ctx.save_for_backward(*inputs[:5], *output[1:])
        ctx.save_for_forward(*inputs[:5], *output[1:])

    @staticmethod
    def _hessian_product(ctx: Any, vector: Any) -> list[Tensor]:
        """Second derivatives times a vector; each point p adds a function of ``(p - loc, scale)`` of degree 1."""
        loc, scale, *points = ctx.saved_tensors[:5]
        of_loc, of_scale, *of_points = (torch.zeros_like(loc) if part is None else part for part in vector)
        positive = scale.clamp_min(torch.finfo(loc.dtype).tiny)
        pulls, to_loc, to_scale = [], torch.zeros_like(loc), torch.zeros_like(loc)
        for k, (point, of_point) in enumerate(zip(points, of_points)):
            z = ((point - loc) / positive).clamp(-1e15, 1e15)  # beyond, the density and its products are 0
            factor = 2.0 if k == 0 else -2 * ctx.family.cdf(z if k == 1 else -z)
            rate = torch.where(point.isinf(), 0.0, factor * ctx.family.log_density(z).exp() / positive)
            pull = rate * (of_point - of_loc - z * of_scale)
            pulls.append(pull)
            to_loc, to_scale = to_loc - pull, to_scale - z * pull
        return [to_loc, to_scale, *pulls]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_value, *others = gradients
        needed, slopes = ctx.needs_input_grad, ctx.saved_tensors[5:]
        results: list[Tensor | None] = [
            of_value * slope if need and of_value is not None else None for need, slope in zip(needed, slopes)
        ]
        if any(part is not None for part in others):
            second = _CensoredCRPS._hessian_product(ctx, others)
            results = [b if a is None else a + b for a, b in zip(results, second)]
        return *results, None


class _DualCensoredCRPS(_CensoredCRPS):
    """The same with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        pairs = zip(tangents[:5], ctx.saved_tensors[5:])
        value = sum((t * slope for t, slope in pairs if t is not None), torch.zeros_like(ctx.saved_tensors[0]))
        return value, *_CensoredCRPS._hessian_product(ctx, tangents[:5])
