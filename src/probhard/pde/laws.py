"""Nonlinear conservation laws, discretised so that smooth exact solutions obey them.

    d/dt (integral of u over x) = F(u)|_left - F(u)|_right          (paper, section "Nonlinear Conservation Law")

``porous_medium_law`` is the paper's case, F = -u^m u_x, with its initial and boundary values. Signs follow the
equation; the paper prints them reversed. ``conservation_law`` takes any flux F(u). Fields are flattened time-major:
slice j of u (*batch, nt * nx) is ``u[..., j * nx : (j + 1) * nx]``.
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

from probhard.constraints.base import Constraint
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import ParameterError, check_choice
from probhard.pde._flux import FluxRows
from probhard.pde._porous_medium import PorousMediumRows
from probhard.pde.problems import PorousMedium, power_of
from probhard.rows.system import LinearSystem


def porous_medium_law(problem: PorousMedium, m: Tensor | float, mass: str = "product") -> Constraint:
    """The conservation law of the porous medium equation: ``known_values`` and ``porous_medium_flux``.

    The known values are substituted once. Newton's method then works on the nt - 1 flux rows alone.

    Args:
        problem: Gives grid and times; computations are always in float64.
        m: Exponents, (*batch,).
        mass: Rule for the mass of a slice, ``"product"`` or ``"trapezoid"``.

    Returns:
        The constraint over nt * nx variables.

    Raises:
        ParameterError: If an exponent or the rule is not valid, or there is only one slice.
    """
    return known_values(problem, m) & porous_medium_flux(problem, m, mass)


def known_values(problem: PorousMedium, m: Tensor | float) -> LinearEquality:
    """Initial and left boundary values, ``u(0, x) = 0`` and ``u(t, 0) = (m t)^(1/m)``, one row each.

    Args:
        problem: Gives grid and times.
        m: Exponents, (*batch,).

    Returns:
        The constraint, with nx + nt - 1 rows: the corner u(0, 0) has one.

    Raises:
        ParameterError: If an exponent is not positive.
    """
    m, times, _ = _exact(problem, m)
    b = pad(power_of(m * times[1:], 1 / m), (problem.points, 0))
    return LinearEquality(_picks(*problem.shape), b)


def porous_medium_flux(problem: PorousMedium, m: Tensor | float, mass: str = "product") -> NonlinearEquality:
    """``mass(t_j) = integral over [0, t_j] of (flux in - flux out)`` for j = 1, ..., nt - 1; see ``_porous_medium``.

    Args:
        problem: Gives grid and times.
        m: Exponents, (*batch,).
        mass: ``"product"`` takes u^m linear in each cell, ``"trapezoid"`` takes u linear.

    Returns:
        The constraint; the row of t = 0 repeats the initial condition and is left out.

    Raises:
        ParameterError: If an exponent or the rule is not valid, or there is only one slice.
    """
    check_choice("mass", mass, ("product", "trapezoid"))
    if problem.slices < 2:
        raise ParameterError(
            f"The problem has {problem.slices} time slice.",
            "The conservation law relates later slices to the first, which is known.",
            "Use slices >= 2.",
        )
    m, times, grid = _exact(problem, m)
    rows = PorousMediumRows(grid, times, mass == "product")
    return NonlinearEquality(rows.residual, (m,), rows.jacobian, linearise=rows.linearised)


def conservation_law(
    flux: Callable[..., Tensor],
    grid: Tensor,
    times: Tensor,
    boundary: str = "open",
    kind: str = "global",
    args: tuple[Any, ...] = (),
) -> NonlinearEquality:
    """``u_t + F(u)_x = 0``: in each time step, the mass changes by the flow through the ends.

    Args:
        flux: F, elementwise in u; called as ``flux(u, *args)`` with fields (*batch, nt * nx).
        grid: Increasing points in x, (nx,).
        times: Increasing points in t, (nt,).
        boundary: F at the ends: ``"open"`` from the field, ``"periodic"`` the mean of both ends, ``"closed"`` 0.
        kind: ``"global"`` has one row per step; ``"local"``, the box scheme, one per step and cell, for small fields.
        args: This batch's data, as of ``NonlinearEquality``, for instance speeds (*batch, 1).

    Returns:
        The constraint over nt * nx variables; smooth solutions leave O(dt^2 + dx^2) per unit of time (and of x).

    Raises:
        ParameterError: If an option is not known, or the grid or the times do not increase.
    """
    check_choice("boundary", boundary, ("open", "periodic", "closed"))
    check_choice("kind", kind, ("global", "local"))
    rows = FluxRows(flux, grid, times, boundary, kind == "local")
    return NonlinearEquality(rows.residual, args, rows.jacobian)


def _exact(problem: PorousMedium, m: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents (*batch, 1), times and grid in float64."""
    problem = replace(problem, dtype=torch.float64)
    value = problem._value(m).unsqueeze(-1)
    return value, problem.times.to(value.device), problem.grid.to(value.device)


@lru_cache(maxsize=32)
def _picks(slices: int, width: int) -> LinearSystem:
    """Rows that select the first slice and the first point of every later slice."""
    columns = np.concatenate([np.arange(width), width * np.arange(1, slices)])
    entries = (np.ones(len(columns)), (np.arange(len(columns)), columns))
    return LinearSystem.of(sp.csr_array(entries, shape=(len(columns), slices * width)))
