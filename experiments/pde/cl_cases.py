"""Problems of the PDE-CL table: random data, a reference of our own solvers, and the equation as rows.

| problem | equation                             | grid                | reference                         |
|---------|--------------------------------------|---------------------|-----------------------------------|
| heat    | u_t = k u_xx, periodic               | 16 times, 32 places | exact, by Fourier modes           |
| burgers | u_t + (u^2 / 2)_x = v u_xx, periodic | 24 times, 32 places | Runge-Kutta on 128 places         |
| darcy   | -div(a grad u) = 1, 0 at the walls   | 17 x 17             | five-point rule on 65 x 65 points |

Rows are small where fields are right: Crank-Nicolson with spectral derivatives, times the time step; the five-point
rule times h^2; and initial or boundary values. So the reference does not satisfy them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import spsolve
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.model import Batch

LENGTH = 2 * math.pi
FINE, STEPS = 4, 40  # of Burgers' reference: places per place, steps per time slice


@dataclass(frozen=True)
class Case:
    """A problem of the table.

    Args:
        name: Of the problem.
        shape: Points per axis.
        channels: Of the inputs.
        linear: Whether rows are affine in the field.
        parts: Regions per axis of four experts.
        data: Maps a number of fields and a generator to inputs and reference fields.
        equations: The rows of inputs.
        places: Grid point of every row, (q,).
        known: The constraint of our rows: initial or boundary values, and the mass where it is conserved.
    """

    name: str
    shape: tuple[int, int]
    channels: int
    linear: bool
    parts: tuple[int, int]
    data: Callable[[int, torch.Generator], Batch]
    equations: Callable[[Tensor], Constraint]
    places: Tensor
    known: Callable[[Tensor], Constraint]


@lru_cache
def derivatives(points: int) -> tuple[Tensor, Tensor]:
    """First and second spectral derivatives on a periodic grid, (points, points) each."""
    k = np.fft.fftfreq(points, 1 / points)
    odd = np.where(np.abs(k) == points / 2, 0.0, k)
    eye = np.eye(points)
    first = np.fft.ifft(1j * odd[:, None] * np.fft.fft(eye, axis=0), axis=0).real
    second = np.fft.ifft(-((k**2)[:, None]) * np.fft.fft(eye, axis=0), axis=0).real
    return torch.as_tensor(first), torch.as_tensor(second)


def _periodic(
    name: str, shape: tuple[int, int], flux: Callable[[Tensor, Tensor], Tensor], span: tuple[float, float], linear: bool
) -> Case:
    """A problem ``u_t = flux(u, parameter)`` on [0, 1] x [0, 2 pi]."""
    nt, nx = shape
    dt = 1 / (nt - 1)

    def residual(u: Tensor, parameter: Tensor, initial: Tensor) -> Tensor:
        field = u.unflatten(-1, shape)
        rate = flux(field, parameter.unsqueeze(-1))
        rows = field[..., 1:, :] - field[..., :-1, :] - dt / 2 * (rate[..., 1:, :] + rate[..., :-1, :])
        return torch.cat([field[..., 0, :] - initial, rows.flatten(-2)], -1)

    def equations(inputs: Tensor) -> Constraint:
        return NonlinearEquality(residual, (inputs[:, 0, 0, :1], inputs[:, 1, 0]))

    def data(count: int, generator: torch.Generator) -> Batch:
        parameter = span[0] + (span[1] - span[0]) * torch.rand(count, generator=generator, dtype=torch.float64)
        fine = nx * FINE
        x = torch.arange(fine, dtype=torch.float64) * LENGTH / fine
        waves = torch.stack([f(m * x) for m in (1, 2, 3) for f in (torch.sin, torch.cos)])
        size = torch.tensor([1, 1, 0.5, 0.5, 0.3, 0.3], dtype=torch.float64)
        initial = (torch.randn(count, 6, generator=generator, dtype=torch.float64) * size) @ waves * 0.6
        if linear:
            k = torch.fft.rfftfreq(fine, 1 / fine, dtype=torch.float64)
            times = torch.linspace(0, 1, nt, dtype=torch.float64)
            decay = torch.exp(-parameter[:, None, None] * times[:, None] * k**2)
            field = torch.fft.irfft(torch.fft.rfft(initial).unsqueeze(1) * decay, fine)
        else:
            field = burgers(initial, parameter, nt)
        target = field[..., ::FINE]
        grid = torch.meshgrid(torch.linspace(0, 1, nt), torch.arange(nx) / nx, indexing="ij")
        channels = [parameter[:, None, None], target[:, :1], *(axis.double() for axis in grid)]
        inputs = torch.stack([part.expand(count, nt, nx) for part in channels], 1)
        return Batch(inputs, target.flatten(1), None, inputs)

    picks = torch.zeros(nt, nt * nx, dtype=torch.float64)
    for slice_ in range(nt):
        picks[slice_, slice_ * nx : (slice_ + 1) * nx] = 1 / nx
    rows = torch.cat([torch.eye(nx, nt * nx, dtype=torch.float64), picks[1:]])  # the first mass is that of the values

    def known(inputs: Tensor) -> Constraint:
        initial = inputs[:, 1, 0].double()
        mass = initial.mean(-1, keepdim=True).expand(-1, nt - 1)
        return LinearEquality(rows.to(inputs.dtype), torch.cat([initial, mass], -1).to(inputs.dtype))

    return Case(name, shape, 4, linear, (1, 4), data, equations, torch.arange(nt * nx), known)


def burgers(initial: Tensor, viscosity: Tensor, slices: int) -> Tensor:
    """Viscous Burgers fields by Runge-Kutta steps in Fourier space.

    Args:
        initial: (count, points) on [0, 2 pi), periodic.
        viscosity: (count,).
        slices: Number of times in [0, 1].

    Returns:
        (count, slices, points).
    """
    points = initial.shape[-1]
    k = torch.fft.rfftfreq(points, 1 / points, dtype=torch.float64)
    kept = k < points / 3  # products have no aliases
    dt = 1 / ((slices - 1) * STEPS)

    def rate(c: Tensor) -> Tensor:
        square = torch.fft.rfft(torch.fft.irfft(c, points).square())
        return (-0.5j * k * square - viscosity[:, None] * k**2 * c) * kept

    c, fields = torch.fft.rfft(initial) * kept, [initial]
    for _ in range(slices - 1):
        for _ in range(STEPS):
            first = rate(c)
            second = rate(c + dt / 2 * first)
            third = rate(c + dt / 2 * second)
            c = c + dt / 6 * (first + 2 * second + 2 * third + rate(c + dt * third))
        fields.append(torch.fft.irfft(c, points))
    return torch.stack(fields, 1)


def _heat_flux(u: Tensor, k: Tensor) -> Tensor:
    return k * (u @ derivatives(u.shape[-1])[1].T)


def _burgers_flux(u: Tensor, viscosity: Tensor) -> Tensor:
    first, second = derivatives(u.shape[-1])
    return viscosity * (u @ second.T) - 0.5 * u.square() @ first.T


DARCY, FINER = 17, 65


def _darcy() -> Case:
    n, h = DARCY, 1 / (DARCY - 1)
    inside = torch.zeros(n, n, dtype=torch.bool)
    inside[1:-1, 1:-1] = True
    wall, middle = (torch.nonzero(mask.flatten()).squeeze(-1) for mask in (~inside, inside))

    def residual(u: Tensor, a: Tensor) -> Tensor:
        field, a = u.unflatten(-1, (n, n)), a.unflatten(-1, (n, n))
        out = torch.zeros_like(field[..., 1:-1, 1:-1])
        for axis in (-2, -1):
            flow = (a.narrow(axis, 1, n - 1) + a.narrow(axis, 0, n - 1)) / 2
            flow = flow * (field.narrow(axis, 1, n - 1) - field.narrow(axis, 0, n - 1))
            change = flow.narrow(axis, 1, n - 2) - flow.narrow(axis, 0, n - 2)
            out = out + change.narrow(-3 - axis, 1, n - 2)
        rows = -out - h**2
        return torch.cat([u[..., wall], rows.flatten(-2) * 4], -1)

    def equations(inputs: Tensor) -> Constraint:
        return NonlinearEquality(residual, (inputs[:, 0].flatten(1),))

    def data(count: int, generator: torch.Generator) -> Batch:
        x = torch.linspace(0, 1, FINER, dtype=torch.float64)
        waves = torch.stack([torch.cos(math.pi * m * x) for m in range(4)])
        power = torch.tensor([[(1 + i * i + j * j) ** -0.75 for j in range(4)] for i in range(4)], dtype=torch.float64)
        noise = torch.randn(count, 4, 4, generator=generator, dtype=torch.float64) * power
        fine = torch.exp(0.7 * torch.einsum("bij,ix,jy->bxy", noise, waves, waves))
        target = torch.stack([torch.as_tensor(darcy(a.numpy())) for a in fine])
        step = (FINER - 1) // (n - 1)
        grid = torch.meshgrid(*[torch.linspace(0, 1, n, dtype=torch.float64)] * 2, indexing="ij")
        channels = [fine[:, ::step, ::step], *(axis.expand(count, n, n) for axis in grid)]
        inputs = torch.stack(channels, 1)
        return Batch(inputs, target[:, ::step, ::step].flatten(1), None, inputs)

    def known(inputs: Tensor) -> Constraint:
        rows = torch.eye(n * n, dtype=inputs.dtype)[wall]
        return LinearEquality(rows, torch.zeros(len(inputs), len(wall), dtype=inputs.dtype))

    return Case("darcy", (n, n), 3, True, (2, 2), data, equations, torch.cat([wall, middle]), known)


def darcy(a: np.ndarray) -> np.ndarray:
    """The solution of ``-div(a grad u) = 1`` with 0 at the walls, by the five-point rule on a's own grid (n, n)."""
    n = len(a)
    index = np.arange(n * n).reshape(n, n)
    matrix = sp.lil_matrix((n * n, n * n)).tocsr()
    for first, second, face in (
        (index[1:], index[:-1], (a[1:] + a[:-1]) / 2),
        (index[:, 1:], index[:, :-1], (a[:, 1:] + a[:, :-1]) / 2),
    ):
        i, j, w = first.ravel(), second.ravel(), face.ravel()
        matrix = matrix + sp.coo_matrix(
            (np.r_[w, w, -w, -w], (np.r_[i, j, i, j], np.r_[i, j, j, i])), shape=matrix.shape
        )
    inner = index[1:-1, 1:-1].ravel()
    u = np.zeros(n * n)
    u[inner] = spsolve(matrix.tocsr()[inner][:, inner].tocsc(), np.full(len(inner), 1 / (n - 1) ** 2))
    return u.reshape(n, n)


CASES: dict[str, Callable[[], Case]] = {
    "heat": lambda: _periodic("heat", (16, 32), _heat_flux, (0.05, 0.2), True),
    "burgers": lambda: _periodic("burgers", (24, 32), _burgers_flux, (0.1, 0.3), False),
    "darcy": _darcy,
}
