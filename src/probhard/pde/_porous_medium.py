"""Rows of the conservation law of the porous medium equation.

    mass(t_j) = integral over [0, t_j] of (flux in - flux out),      j = 1, ..., nt - 1.

The rules are exact where u^m is linear, as it is behind the front. The flux in is ``u0 s`` with the known left value
``u0 = (m t)^(1/m)`` and ``s = (u0^m - u1^m) / (m dx)``. Its weights are the integrals of ``u0(t) hat_j(t)``, with
s(0) := s(t_1). Fronts between grid points (nx other than 5 nt) leave residuals of 1e-4 to 1e-3 at nx = 200. Largest
residual of the exact field with fronts on grid points:

| mass and flux                                            | m = 2  | m = 3  | m = 5  |
|----------------------------------------------------------|--------|--------|--------|
| ``"product"`` mass, u^m linear in a cell                 | <1e-14 | <1e-14 | <1e-14 |
| ``"trapezoid"`` mass, u linear in a cell                 | 2.9e-4 | 8.7e-4 | 1.9e-3 |
| trapezoid sums throughout, flux ``-u0^m (u1 - u0) / dx`` | 3.1e-3 | 4.9e-3 | 9.1e-3 |

Powers keep the sign, ``sign(u) |u|^m``, with derivative ``m |u|^(m-1)``, since draws may be negative.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from probhard._util.tensors import checking
from probhard.pde._flux import as_slices
from probhard.pde.problems import power_of
from probhard.rows.blocks import BlockRows, Mixed

NEAR = 0.05  # relative half-difference below which the pressure mean is summed as a series
TERMS = 5  # of that series: the remainder is below rounding
PASSAGE = 0.64  # share of the front's first value, squared, from which cells are linear in u^m


class PorousMediumRows:
    """Residuals and Jacobian for fields u (*batch, nt * nx) and exponents m (*batch, 1).

    Args:
        grid: Points in x, (nx,).
        times: Points in t, (nt,).
        product: Whether cells are linear in u^m; else they are linear in u, the trapezoid rule.
    """

    def __init__(self, grid: Tensor, times: Tensor, product: bool) -> None:
        self.grid, self.times, self.product = grid, times, product
        self._known: tuple[Tensor, int, tuple[Tensor, Tensor], Tensor] | None = None  # cache of what depends on m alone

    def residual(self, u: Tensor, m: Tensor) -> Tensor:
        """Residuals, (*batch, nt - 1)."""
        field, m, steps = self._slices(u, m)  # (*batch, nt - 1, nx)
        power = _signed_power(field, m)
        cells, _ = self._means(field, power, m)
        return self._balance(field, power, cells, m, steps)

    def jacobian(self, u: Tensor, m: Tensor) -> BlockRows:
        """Derivatives of the residuals, as structured rows."""
        return self.linearised(u, m)[1]

    def linearised(self, u: Tensor, m: Tensor) -> tuple[Tensor, BlockRows]:
        """Residuals (*batch, nt - 1) and their derivatives, with shared work."""
        field, m, steps = self._slices(u, m)
        power = _signed_power(field, m)
        slope = m * _ratio(power, field)
        cells, (left, right) = self._means(field, power, m, slope)
        mass = pad(left * steps, (0, 1)) + pad(right * steps, (1, 0))
        inflow, outflow = self._constants(m)[0]
        near = torch.stack([slope[..., 0], -slope[..., 1]], -1) / (m * steps[0])
        last = field[..., -1]
        at_last = power[..., -2] - power[..., -1] - last * slope[..., -1]
        far = torch.stack([last * slope[..., -2], at_last], -1) / (m * steps[-1])
        width = field.shape[-1]
        mixed = Mixed(0, -near, inflow), Mixed(width - 2, far, outflow)
        rows = BlockRows(mass, mixed, before=width)  # the first slice enters no row
        return self._balance(field, power, cells, m, steps), rows

    def _balance(self, field: Tensor, power: Tensor, cells: Tensor, m: Tensor, steps: Tensor) -> Tensor:
        """Mass, minus the inflow, plus the outflow, up to every time."""
        inflow, outflow = self._constants(m)[0]
        into = (power[..., 0] - power[..., 1]) / (m[..., 0] * steps[0])
        out = field[..., -1] * (power[..., -2] - power[..., -1]) / (m[..., 0] * steps[-1])
        return cells @ steps - (inflow @ into.unsqueeze(-1) - outflow @ out.unsqueeze(-1)).squeeze(-1)

    def _slices(self, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        field = as_slices(u, len(self.times), len(self.grid))
        return field[..., 1:, :], m.unsqueeze(-1), self.grid.diff().to(u)

    def _means(
        self, field: Tensor, power: Tensor, m: Tensor, slope: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Mean of u over every cell and, if the slope of the powers is passed, its derivatives in both end values."""
        a, b = field[..., :-1], field[..., 1:]
        middle, half = (a + b) / 2, torch.full_like(a, 0.5)
        if not self.product:
            return middle, (half, half)
        # The pressure mean has a kink at a = b = 0. Cells well below the front's first value (m dx)^(1/m) are therefore
        # linear in u, with a smooth transition. Without it, noise ahead of the front costs Newton 20 times more.
        bound = self._constants(m)[1]
        x = ((a.square() + b.square()) / bound).clamp(max=1)
        share = x**3 * (10 - 15 * x + 6 * x.square())
        close = ((a - b).abs() < 2 * NEAR * middle.abs()) & (x >= 1e-6)
        near = close | (x < 1e-6)  # tiny values have a share of x^3, so their mean does not matter
        # Both branches of where() enter gradients; the unused one is evaluated at a safe point.
        safe = torch.where(close, middle, 1.0)
        r = torch.where(close, (a - b) / (2 * safe), 0.0)
        series, rise = _series(r.square(), m, slope is not None)
        gap = torch.where(near, 1.0, power[..., :-1] - power[..., 1:])
        far = m / (m + 1) * (a * power[..., :-1] - b * power[..., 1:]) / gap
        pressure = torch.where(near, middle * series, far)
        mean = middle + share * (pressure - middle)
        if slope is None:
            return mean, (half, half)
        turn, rise = 60 * (x - x.square()).square() / bound * (pressure - middle), rise * r / safe
        left = torch.where(near, series / 2 + rise * b, slope[..., :-1] * (a - far) / gap)
        right = torch.where(near, series / 2 - rise * a, slope[..., 1:] * (far - b) / gap)
        return mean, (half + share * (left - half) + turn * a, half + share * (right - half) + turn * b)

    def _constants(self, m: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Weights of the fluxes and bound of the transition, cached for the last m without a gradient."""
        plain = checking() and not m.requires_grad
        base = m._base if m._base is not None else m
        if plain and self._known is not None and self._known[0] is base and self._known[1] == base._version:
            return self._known[2], self._known[3]
        weights, bound = self._weights(m), PASSAGE * power_of(m * self.grid.diff().to(m), 2 / m)
        if plain:
            self._known = (base, base._version, weights, bound)
        return weights, bound

    def _weights(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (*batch, nt - 1, nt - 1) of s and of the flux out at t_1, ... in the integrals up to t_1, ..."""
        times = self.times.to(m)
        m = m.squeeze(-1)
        first, step = times[:-1], times.diff()
        # Moments 0 and 1 of u0 over each step.
        zeroth = (power_of(m * times, 1 + 1 / m) / (m + 1)).diff()
        moment = (times * power_of(m * times, 1 + 1 / m) / (2 * m + 1)).diff()
        late = (moment - first * zeroth) / step
        early = zeroth - late
        held = torch.cat([late[..., :1] + early[..., :1], late[..., 1:]], -1)  # s(0) := s(t_1)
        half = step / 2
        return _up_to(early[..., 1:], held), _up_to(half[1:], half)


def _up_to(early: Tensor, late: Tensor) -> Tensor:
    """Sums of steps up to each time; step k weighs its end by ``late[k]``, its start by ``early[k - 1]`` if k > 0."""
    return (torch.diag_embed(late) + torch.diag_embed(early, offset=-1)[..., : late.shape[-1], :]).cumsum(-2)


def _series(x: Tensor, m: Tensor, slopes: bool) -> tuple[Tensor, Tensor]:
    """The pressure mean of ``1 + r`` and ``1 - r`` for small ``x = r^2`` and, with ``slopes``, its derivative in x.

    If ``u^m`` is linear over a cell with end values a and b, the mean of u is, with signed powers,
    ``m / (m + 1) (|a|^(m+1) - |b|^(m+1)) / (a^m - b^m)``. This series replaces it where the differences nearly cancel.
    """
    upper, lower = [torch.ones_like(m)], [torch.ones_like(m)]
    for k in range(1, TERMS + 1):
        upper.append(upper[-1] * (m - 2 * k + 2) * (m - 2 * k + 1) / (2 * k * (2 * k + 1)))
        lower.append(lower[-1] * (m - 2 * k + 1) * (m - 2 * k) / (2 * k * (2 * k + 1)))
    top, top_slope, bottom, bottom_slope = (torch.zeros_like(x) for _ in range(4))
    if not slopes:
        for p, q in zip(reversed(upper), reversed(lower)):
            top, bottom = top * x + p, bottom * x + q
        return top / bottom, top_slope
    for p, q in zip(reversed(upper), reversed(lower)):  # Horner's rule with derivatives
        top, top_slope = top * x + p, top_slope * x + top
        bottom, bottom_slope = bottom * x + q, bottom_slope * x + bottom
    mean = top / bottom
    return mean, (top_slope - mean * bottom_slope) / bottom


def _signed_power(u: Tensor, m: Tensor) -> Tensor:
    """``sign(u) |u|^m``."""
    return u.sign() * power_of(u.abs(), m)


def _ratio(power: Tensor, u: Tensor) -> Tensor:
    """``sign(u) |u|^m / u``, 0 where u is 0."""
    return torch.where(u == 0, 0.0, power / torch.where(u == 0, 1.0, u))
