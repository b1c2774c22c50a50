"""Variances of local functionals of a field with a spectrum: sums over pairs of points of one box, by transforms.

Products of two basis functions depend on differences and, at walls, on sums of coordinates. With the power spectrum
continued evenly to the doubled grid and ``A`` its inverse Fourier transform,

    periodic:           c(a, b) = A(a - b),
    reflecting, zero:   c(a, b) = sum over signs of the axes of  +-A(a -+ b),    a + b + 1 instead of a + b,

where sums count -1 for ``zero``. A functional with coefficients x on a box has the variance

    sum_ij x_i x_j c(i, j) = sum over signs, t of  +-A(t) r(t),     r = correlation or convolution of x with itself,

by one transform of twice the size of the box. Large boxes are not worth it.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor


def kernel(power: Tensor, shape: tuple[int, ...], boundary: str) -> Tensor:
    """A, (*batch, *grid), with a doubled grid at walls, for an even power (*batch, n)."""
    spectrum = power.unflatten(-1, shape)
    axes = tuple(range(-len(shape), 0))
    for axis in axes if boundary != "periodic" else ():
        spectrum = _even(spectrum.movedim(axis, -1), boundary).movedim(-1, axis)
    return torch.fft.ifftn(spectrum, dim=axes).real


def _even(p: Tensor, boundary: str) -> Tensor:
    """The spectrum along the last axis, continued to -m .. m - 1; cosines lack frequency m, sines frequency 0."""
    zero = torch.zeros_like(p[..., :1])
    if boundary == "reflecting":
        return torch.cat([p, zero, p[..., 1:].flip(-1)], -1)
    return torch.cat([zero, p, p[..., :-1].flip(-1)], -1)


def box_variance(
    x: Tensor,  # (*batch, boxes, points)
    covariance: Tensor,  # (*batch, *grid)
    box: tuple[int, ...],
    origin: Tensor,  # (boxes, axes)
    boundary: str,
) -> Tensor:
    """Variances of functionals on boxes of one shape.

    Args:
        x: Coefficients times scales, (*batch, boxes, points).
        covariance: A, as ``kernel`` returns it.
        box: Points of a box along each axis.
        origin: The first point of each box, (boxes, axes).
        boundary: As for ``Spectral``.

    Returns:
        (*batch, boxes).
    """
    count = len(box)
    axes, size, grid = tuple(range(-count, 0)), tuple(2 * m for m in box), covariance.shape[-count:]
    spectrum = torch.fft.rfftn(x.unflatten(-1, box), s=size, dim=axes)
    table, total = covariance.flatten(-count), torch.zeros_like(x[..., 0])
    for sums in product((False, True) if boundary != "periodic" else (False,), repeat=count):  # per axis
        overlap = torch.fft.irfftn(spectrum * _reflected(spectrum, sums), s=size, dim=axes).flatten(-count)
        at = _places(box, grid, origin, sums).to(x.device)  # (boxes or 1, points of size)
        values = (overlap * table[..., at]).sum(-1)
        total = total + (-values if boundary == "zero" and sum(sums) % 2 else values)
    return total.clamp(min=0)


def _reflected(spectrum: Tensor, sums: tuple[bool, ...]) -> Tensor:
    """The half spectrum of x, reflected along the axes whose differences count."""
    # Reflection along all axes is conjugation, so that the last axis, of which half is stored, is never turned.
    turned = [axis for axis, added in enumerate(sums) if added == (not sums[-1])]
    for axis in turned:
        dim = axis - len(sums)
        length = spectrum.shape[dim]
        spectrum = spectrum.index_select(dim, (-torch.arange(length, device=spectrum.device)) % length)
    return spectrum if sums[-1] else spectrum.conj()


def _places(box: tuple[int, ...], grid: torch.Size, origin: Tensor, sums: tuple[bool, ...]) -> Tensor:
    """Where A is read for each entry of the overlap, (boxes or 1, points): differences, or sums from the origin."""
    flat = torch.zeros(1, 1, dtype=torch.long, device=origin.device)
    for axis, (m, length) in enumerate(zip(box, grid)):
        t = torch.arange(2 * m, device=origin.device)
        if sums[axis]:
            along = t + 2 * origin[:, axis : axis + 1] + 1  # (boxes, 2 m)
        else:
            along = torch.where(t < m, t, t - 2 * m).unsqueeze(0)
        step = math.prod(grid[axis + 1 :])
        flat = (flat.unsqueeze(-1) + ((along % length) * step).unsqueeze(-2)).flatten(-2)
    return flat
