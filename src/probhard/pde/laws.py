"""Conservation laws that are nonlinear in the field, discretised so that smooth exact solutions obey them.

    d/dt (integral of u over x) = F(u)|_left - F(u)|_right          (paper, section "Nonlinear Conservation Law")

``porous_medium_law`` is the paper's case, F = -u^m u_x, with its initial and boundary values; the signs are those of
the equation, the paper prints them reversed. ``conservation_law`` builds the law of any flux F(u). Fields flatten
time-major: slice j of u (*batch, nt * nx) is ``u[..., j * nx : (j + 1) * nx]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.nn.functional import pad

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.constraints.conservation import trapezoid_weights
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.pde.problems import PorousMedium, power_of
from probhard.rows.blocks import BlockRows, Mixed
from probhard.rows.system import LinearSystem

NEAR = 0.05  # relative half-difference below which the pressure mean is summed as a series
TERMS = 5  # of that series: what is left out is below rounding
PASSAGE = 0.64  # share of the front's first value, squared, from which cells are taken linear in u^m


def porous_medium_law(problem: PorousMedium, m: Tensor | float, mass: str = "product") -> Constraint:
    """The porous medium law, ``porous_medium_flux``, joined with its ``known_values``.

    The known values are substituted once; Newton's method then works on the nt - 1 flux rows alone.

    Args:
        problem: Its grid and times; everything is computed in float64, whatever its dtype.
        m: Exponents, (*batch,).
        mass: The rule for the mass of a slice, ``"product"`` or ``"trapezoid"``.
    """
    return known_values(problem, m) & porous_medium_flux(problem, m, mass)


def known_values(problem: PorousMedium, m: Tensor | float) -> LinearEquality:
    """Initial and left boundary values, ``u(0, x) = 0`` and ``u(t, 0) = (m t)^(1/m)``, as rows of one variable each.

    There are nx + nt - 1 of them: the corner u(0, 0) is named once.
    """
    m, times, _ = _exact(problem, m)
    b = pad(power_of(m * times[1:], 1 / m), (problem.points, 0))
    return LinearEquality.from_system(_picks(*problem.shape), b)


def porous_medium_flux(problem: PorousMedium, m: Tensor | float, mass: str = "product") -> NonlinearEquality:
    """``mass(t_j) = integral over [0, t_j] of (flux in - flux out)`` for j = 1, ..., nt - 1.

    The row of t = 0 is left out: it repeats the initial condition and makes the Schur matrix singular. The rules are
    exact where u^m is linear, as it is behind the front: flux in ``u0 s`` with ``s = (u0^m - u1^m) / (m dx)`` and
    weights ``integral of u0(t) hat_j(t) dt`` of the known u0 = (m t)^(1/m), s(0) := s(t_1); mass ``"product"`` from
    the root of u^m taken linear in each cell. Largest residual of the exact field for m = 2, 3, 5: below 1e-14; with
    ``"trapezoid"`` mass, linear in u, 2.9e-4, 8.7e-4, 1.9e-3; with the flux -u0^m (u1 - u0) / dx and trapezoid sums
    throughout 3.1e-3, 4.9e-3, 9.1e-3. Fronts between grid points (nx other than 5 nt) leave 1e-4 to 1e-3 at nx = 200.
    Powers keep the sign, ``sign(u) |u|^m``, with derivative ``m |u|^(m-1)``: draws may be negative.
    """
    check_choice("mass", mass, ("product", "trapezoid"))
    if problem.slices < 2:
        raise ParameterError(
            f"The problem has {problem.slices} time slice.",
            "The law relates later slices to the first, which is known.",
            "Use slices >= 2.",
        )
    m, times, grid = _exact(problem, m)
    rows = _PorousMediumRows(grid, times, mass == "product")
    return NonlinearEquality(rows.residual, (m,), rows.jacobian, linearise=rows.linearised)


class _PorousMediumRows:
    """Residuals and Jacobian of the porous medium law for fields u (*batch, nt * nx) and exponents m (*batch, 1)."""

    def __init__(self, grid: Tensor, times: Tensor, product: bool) -> None:
        self.grid, self.times, self.product = grid, times, product
        self._known: tuple[Tensor, int, tuple[Tensor, Tensor], Tensor] | None = None  # what depends on m alone

    def residual(self, u: Tensor, m: Tensor) -> Tensor:
        field, m, steps = self._slices(u, m)  # (*batch, nt - 1, nx)
        power = _signed_power(field, m)
        cells, _ = self._means(field, power, m)
        return self._balance(field, power, cells, m, steps)

    def jacobian(self, u: Tensor, m: Tensor) -> BlockRows:
        return self.linearised(u, m)[1]

    def linearised(self, u: Tensor, m: Tensor) -> tuple[Tensor, BlockRows]:
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
        """Mass less what has flowed in, plus what has flowed out."""
        inflow, outflow = self._constants(m)[0]
        into = (power[..., 0] - power[..., 1]) / (m[..., 0] * steps[0])
        out = field[..., -1] * (power[..., -2] - power[..., -1]) / (m[..., 0] * steps[-1])
        return cells @ steps - (inflow @ into.unsqueeze(-1) - outflow @ out.unsqueeze(-1)).squeeze(-1)

    def _slices(self, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        field = _as_slices(u, len(self.times), len(self.grid))
        return field[..., 1:, :], m.unsqueeze(-1), self.grid.diff().to(u)

    def _means(
        self, field: Tensor, power: Tensor, m: Tensor, slope: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Mean of u over every cell and, given the slope of the powers, its derivatives in left and right values."""
        a, b = field[..., :-1], field[..., 1:]
        middle, half = (a + b) / 2, torch.full_like(a, 0.5)
        if not self.product:
            return middle, (half, half)
        # The pressure mean has a kink at a = b = 0. Cells well below the front's first value (m dx)^(1/m) are taken
        # linear in u instead, with a smooth passage: without it, noise ahead of the front costs Newton 20 times more.
        bound = self._constants(m)[1]
        x = ((a.square() + b.square()) / bound).clamp(max=1)
        share = x**3 * (10 - 15 * x + 6 * x.square())
        close = ((a - b).abs() < 2 * NEAR * middle.abs()) & (x >= 1e-6)
        near = close | (x < 1e-6)  # with a share of x^3 it does not matter which mean tiny values have
        # both branches of where() enter gradients: the unused one is evaluated at a harmless point
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
        """The weights of the fluxes and the passage of the mean, kept for the last m without a gradient."""
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
        # moments 0 and 1 of u0 over each step
        zeroth = (power_of(m * times, 1 + 1 / m) / (m + 1)).diff()
        moment = (times * power_of(m * times, 1 + 1 / m) / (2 * m + 1)).diff()
        late = (moment - first * zeroth) / step
        early = zeroth - late
        held = torch.cat([late[..., :1] + early[..., :1], late[..., 1:]], -1)  # s(0) := s(t_1)
        half = step / 2
        return _up_to(early[..., 1:], held), _up_to(half[1:], half)


def _up_to(early: Tensor, late: Tensor) -> Tensor:
    """Sums of the steps' integrals: step k has ``early[k - 1]`` at its start, but for the first, and ``late[k]``."""
    return (torch.diag_embed(late) + torch.diag_embed(early, offset=-1)[..., : late.shape[-1], :]).cumsum(-2)


def _series(x: Tensor, m: Tensor, slopes: bool) -> tuple[Tensor, Tensor]:
    """The pressure mean of ``1 + r`` and ``1 - r`` and, if asked for, its derivative in ``x = r^2``, for small x.

    The mean over a cell of the root of ``u^m`` taken linear between a and b, with signed powers, is
    ``m / (m + 1) (|a|^(m+1) - |b|^(m+1)) / (a^m - b^m)``; this is it where the differences nearly cancel.
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


def conservation_law(
    flux: Callable[..., Tensor],
    grid: Tensor,
    times: Tensor,
    boundary: str = "open",
    kind: str = "global",
    args: tuple[Any, ...] = (),
) -> NonlinearEquality:
    """``u_t + F(u)_x = 0``: over each time step, mass changes by what flows through the ends.

    Args:
        flux: F, elementwise in u; called as ``flux(u, *args)`` with fields (*batch, nt * nx).
        grid: Increasing points in x, (nx,).
        times: Increasing points in t, (nt,).
        boundary: ``"open"`` takes F at the ends from the field, ``"periodic"`` one mean F for both, ``"closed"`` 0.
        kind: ``"global"``, nt - 1 rows, one per step; ``"local"``, one per step and interval of the grid, the box
            scheme: (nt - 1)(nx - 1) rows whose sums over x are the global ones; for small fields. Per unit of time
            (and of x) a smooth solution leaves O(dt^2 + dx^2).
        args: This batch's data, as of ``NonlinearEquality``, for instance speeds (*batch, 1).
    """
    check_choice("boundary", boundary, ("open", "periodic", "closed"))
    check_choice("kind", kind, ("global", "local"))
    law = _FluxRows(flux, grid, times, boundary, kind == "local")
    return NonlinearEquality(law.residual, args, law.jacobian)


class _FluxRows:
    """Residuals and Jacobian of ``u_t + F(u)_x = 0`` by trapezoid rules."""

    def __init__(self, flux: Callable[..., Tensor], grid: Tensor, times: Tensor, boundary: str, local: bool) -> None:
        trapezoid_weights(grid), trapezoid_weights(times)  # both must increase
        self.flux, self.grid, self.times = flux, grid, times
        masses = torch.diag_embed(grid.diff() / 2)
        masses = pad(masses, (0, 1)) + pad(masses, (1, 0))  # (nx - 1, nx): mass of each cell
        ends = torch.eye(len(grid), dtype=grid.dtype, device=grid.device)
        if boundary != "open":
            share = 0.5 if boundary == "periodic" else 0.0
            ends[0, 0] = ends[-1, -1] = ends[0, -1] = ends[-1, 0] = share
        flows = ends.diff(dim=0)  # (nx - 1, nx): flow out of each cell
        if not local:
            masses, flows = masses.sum(0, keepdim=True), (ends[-1] - ends[0]).unsqueeze(0)
        self.masses, self.flows = masses, flows

    def residual(self, u: Tensor, *args: Any) -> Tensor:
        step = self.times.diff().to(u).unsqueeze(-1) / 2
        flow = self._field(self._flux(u, *args)) @ self.flows.to(u).mT  # (*batch, nt, cells)
        mass = self._field(u) @ self.masses.to(u).mT
        return (mass.diff(dim=-2) + step * (flow[..., 1:, :] + flow[..., :-1, :])).flatten(-2)

    def jacobian(self, u: Tensor, *args: Any) -> Tensor:
        speed = torch.func.grad(lambda v: self._flux(v, *args).sum())(u)
        flows = self.flows.to(u) * self._field(speed).unsqueeze(-2)  # (*batch, nt, cells, nx)
        masses, step = self.masses.to(u), self.times.diff().to(u)[:, None, None] / 2
        early, late = step * flows[..., :-1, :, :] - masses, step * flows[..., 1:, :, :] + masses
        eye = torch.eye(len(step), dtype=u.dtype, device=u.device)[:, None, :, None]  # (step, 1, slice, 1)
        rows = pad(eye * early.unsqueeze(-2), (0, 0, 0, 1)) + pad(eye * late.unsqueeze(-2), (0, 0, 1, 0))
        return rows.flatten(-2).flatten(-3, -2)  # from (*batch, step, cells, nt, nx)

    def _field(self, u: Tensor) -> Tensor:
        return _as_slices(u, len(self.times), len(self.grid))

    def _flux(self, u: Tensor, *args: Any) -> Tensor:
        found = self.flux(u, *args)
        if found.shape != u.shape:
            raise ShapeError(
                f"The flux has shape {tuple(found.shape)} for a field of shape {tuple(u.shape)}.",
                "It is taken at every point of the field by itself.",
                "Use elementwise operations; give its data the shape (*batch, 1).",
            )
        return found


def _exact(problem: PorousMedium, m: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents (*batch, 1), times and grid in float64."""
    problem = replace(problem, dtype=torch.float64)
    value = problem._value(m).unsqueeze(-1)
    return value, problem.times.to(value.device), problem.grid.to(value.device)


@lru_cache(maxsize=32)
def _picks(slices: int, width: int) -> LinearSystem:
    """Rows that pick the first slice and the first point of all later ones."""
    chosen = np.concatenate([np.arange(width), width * np.arange(1, slices)])
    entries = (np.ones(len(chosen)), (np.arange(len(chosen)), chosen))
    return LinearSystem.of(sp.csr_array(entries, shape=(len(chosen), slices * width)))


def _as_slices(u: Tensor, slices: int, width: int) -> Tensor:
    """Fields (*batch, nt * nx) as (*batch, nt, nx)."""
    if u.shape[-1] != slices * width:
        raise ShapeError(
            f"The field has shape {tuple(u.shape)}, the law {slices} times and {width} grid points.",
            "Fields flatten time-major.",
            f"Give it the shape (*batch, {slices * width}).",
        )
    return u.unflatten(-1, (slices, width))


def _signed_power(u: Tensor, m: Tensor) -> Tensor:
    """``sign(u) |u|^m``."""
    return u.sign() * power_of(u.abs(), m)


def _ratio(power: Tensor, u: Tensor) -> Tensor:
    """``sign(u) |u|^m / u``, 0 where u is 0."""
    return torch.where(u == 0, 0.0, power / torch.where(u == 0, 1.0, u))
