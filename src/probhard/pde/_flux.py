"""Rows of the conservation law ``u_t + F(u)_x = 0`` for any flux F(u), by trapezoid rules in time and space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from probhard.constraints.conservation import trapezoid_weights
from probhard.errors import ShapeError


class FluxRows:
    """Residuals and Jacobian of ``u_t + F(u)_x = 0`` by trapezoid rules.

    Args:
        flux: F, elementwise in u.
        grid: Increasing points in x, (nx,).
        times: Increasing points in t, (nt,).
        boundary: ``"open"``, ``"periodic"`` or ``"closed"``, as in ``conservation_law``.
        local: One row per step and cell, instead of one per step.

    Raises:
        ParameterError: If the grid or the times do not increase.
    """

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
        """Residuals (*batch, rows) of fields (*batch, nt * nx); raises ShapeError if F is not elementwise."""
        step = self.times.diff().to(u).unsqueeze(-1) / 2
        flow = self._field(self._flux(u, *args)) @ self.flows.to(u).mT  # (*batch, nt, cells)
        mass = self._field(u) @ self.masses.to(u).mT
        return (mass.diff(dim=-2) + step * (flow[..., 1:, :] + flow[..., :-1, :])).flatten(-2)

    def jacobian(self, u: Tensor, *args: Any) -> Tensor:
        """Derivatives of the residuals, (*batch, rows, nt * nx)."""
        speed = torch.func.grad(lambda v: self._flux(v, *args).sum())(u)
        flows = self.flows.to(u) * self._field(speed).unsqueeze(-2)  # (*batch, nt, cells, nx)
        masses, step = self.masses.to(u), self.times.diff().to(u)[:, None, None] / 2
        early, late = step * flows[..., :-1, :, :] - masses, step * flows[..., 1:, :, :] + masses
        eye = torch.eye(len(step), dtype=u.dtype, device=u.device)[:, None, :, None]  # (step, 1, slice, 1)
        rows = pad(eye * early.unsqueeze(-2), (0, 0, 0, 1)) + pad(eye * late.unsqueeze(-2), (0, 0, 1, 0))
        return rows.flatten(-2).flatten(-3, -2)  # from (*batch, step, cells, nt, nx)

    def _field(self, u: Tensor) -> Tensor:
        return as_slices(u, len(self.times), len(self.grid))

    def _flux(self, u: Tensor, *args: Any) -> Tensor:
        flux = self.flux(u, *args)
        if flux.shape != u.shape:
            raise ShapeError(
                f"The flux has shape {tuple(flux.shape)} for a field of shape {tuple(u.shape)}.",
                "F is evaluated at every point of the field separately.",
                "Use elementwise operations; give its data the shape (*batch, 1).",
            )
        return flux


def as_slices(u: Tensor, slices: int, width: int) -> Tensor:
    """Unflatten fields.

    Args:
        u: Fields, (*batch, nt * nx), time-major.
        slices: nt.
        width: nx.

    Returns:
        The fields, (*batch, nt, nx).

    Raises:
        ShapeError: If the last dimension is not nt * nx.
    """
    if u.shape[-1] != slices * width:
        raise ShapeError(
            f"The field has shape {tuple(u.shape)}, the conservation law {slices} times and {width} grid points.",
            "Fields flatten time-major.",
            f"Give it the shape (*batch, {slices * width}).",
        )
    return u.unflatten(-1, (slices, width))
