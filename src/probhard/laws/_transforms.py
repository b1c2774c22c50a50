"""Orthonormal real transforms of fields on a grid, by FFT along every axis.

| boundary     | transform | basis along an axis of m points                  |
|--------------|-----------|--------------------------------------------------|
| periodic     | Hartley   | cos(2 pi k j / m) + sin(2 pi k j / m)            |
| reflecting   | DCT-II    | cos(pi k (2 j + 1) / (2 m)), k = 0 .. m - 1      |
| zero         | DST-II    | sin(pi (k + 1) (2 j + 1) / (2 m)), k = 0 .. m - 1 |

A stationary covariance is diagonal in these bases. Points are cells, so walls lie half a cell outside the first point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

BOUNDARIES = ("periodic", "reflecting", "zero")


def forward(x: Tensor, shape: tuple[int, ...], boundary: str) -> Tensor:
    """``T x``, (..., n), for flattened fields x (..., n)."""
    field = x.unflatten(-1, shape)
    if boundary == "periodic":
        return _hartley(field, len(shape)).flatten(-len(shape))
    return _each_axis(field, len(shape), _cosine if boundary == "reflecting" else _sine)


def backward(y: Tensor, shape: tuple[int, ...], boundary: str) -> Tensor:
    """``T^T y``, the inverse of ``forward``, (..., n)."""
    field = y.unflatten(-1, shape)
    if boundary == "periodic":
        return _hartley(field, len(shape)).flatten(-len(shape))
    return _each_axis(field, len(shape), _cosine_back if boundary == "reflecting" else _sine_back)


def filtered(x: Tensor, power: Tensor, shape: tuple[int, ...], boundary: str) -> Tensor:
    """``T^T diag(p) T x``, (..., n), for power p (..., n), even in k if periodic."""
    if boundary != "periodic":
        return backward(power * forward(x, shape, boundary), shape, boundary)
    dims = tuple(range(-len(shape), 0))
    half = power.unflatten(-1, shape)[..., : shape[-1] // 2 + 1]
    spectrum = torch.fft.rfftn(x.unflatten(-1, shape), dim=dims) * half
    return torch.fft.irfftn(spectrum, s=shape, dim=dims).flatten(-len(shape))


def squared(power: Tensor, shape: tuple[int, ...], boundary: str) -> Tensor:
    """``diag(T^T diag(p) T)``, (..., n), for power p (..., n)."""
    if boundary == "periodic":
        return power.mean(-1, keepdim=True).expand(power.shape)
    return _each_axis(power.unflatten(-1, shape), len(shape), lambda p: _squared_axis(p, boundary))


def even(power: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The part of a periodic power spectrum (..., n) that is the same at k and -k; real fields have no other."""
    return 0.5 * (power + power.index_select(-1, _mirror(shape).to(power.device)))


def wave_numbers(shape: tuple[int, ...], boundary: str) -> Tensor:
    """Half periods along each axis, (n, axes): 0, 2, 4, .. and back for periodic axes, 0, 1, 2, .. at walls."""
    axes = []
    for m in shape:
        k = torch.arange(m, dtype=torch.float64)
        axes.append(2 * torch.minimum(k, m - k) if boundary == "periodic" else k + (boundary == "zero"))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


@lru_cache(maxsize=32)
def _mirror(shape: tuple[int, ...]) -> Tensor:
    index = torch.arange(math.prod(shape)).reshape(shape)
    for axis, m in enumerate(shape):
        index = index.index_select(axis, (-torch.arange(m)) % m)
    return index.flatten()


def _hartley(field: Tensor, axes: int) -> Tensor:
    spectrum = torch.fft.fftn(field, dim=tuple(range(-axes, 0)), norm="ortho")
    return spectrum.real - spectrum.imag


def _each_axis(field: Tensor, axes: int, transform: Callable[[Tensor], Tensor]) -> Tensor:
    for axis in range(-axes, 0):
        field = transform(field.movedim(axis, -1)).movedim(-1, axis)
    return field.flatten(-axes)


def _phase(first: int, m: int, like: Tensor) -> Tensor:
    """``exp(-i pi k / (2 m))`` for k = first .. first + m - 1."""
    k = torch.arange(first, first + m, dtype=torch.float64, device=like.device)
    angle = -math.pi * k / (2 * m)
    return torch.complex(angle.cos(), angle.sin()).to(
        torch.complex128 if like.dtype == torch.float64 else torch.complex64
    )


def _norm(m: int, special: int, like: Tensor) -> Tensor:
    """``sqrt(2 / m)``, and ``sqrt(1 / m)`` for the basis function without a factor 1/2 in its mean square."""
    norm = torch.full((m,), math.sqrt(2 / m), dtype=like.dtype, device=like.device)
    norm[special] = math.sqrt(1 / m)
    return norm


def _cosine(x: Tensor) -> Tensor:
    m = x.shape[-1]
    spectrum = torch.fft.rfft(x, n=2 * m)[..., :m]
    return (spectrum * _phase(0, m, x)).real * _norm(m, 0, x)


def _cosine_back(y: Tensor) -> Tensor:
    m = y.shape[-1]
    return torch.fft.fft(y * _norm(m, 0, y) * _phase(0, m, y), n=2 * m)[..., :m].real


def _sine(x: Tensor) -> Tensor:
    m = x.shape[-1]
    spectrum = torch.fft.rfft(x, n=2 * m)[..., 1:]
    return -(spectrum * _phase(1, m, x)).imag * _norm(m, m - 1, x)


def _sine_back(y: Tensor) -> Tensor:
    m = y.shape[-1]
    weighted = y * _norm(m, m - 1, y) * _phase(1, m, y)
    shifted = torch.cat([torch.zeros_like(weighted[..., :1]), weighted], -1)
    return -torch.fft.fft(shifted, n=2 * m)[..., :m].imag


def _squared_axis(p: Tensor, boundary: str) -> Tensor:
    """``sum_k p_k b_k(j)^2`` along the last axis; squares are ``1 + cos`` or ``1 - cos`` of twice the angle."""
    m = p.shape[-1]
    first, sign = (0, 1.0) if boundary == "reflecting" else (1, -1.0)
    weight = torch.full((m,), sign / m, dtype=p.dtype, device=p.device)
    weight[0 if first == 0 else m - 1] = 0.0  # this basis function has the same square everywhere
    k = torch.arange(first, first + m, dtype=torch.float64, device=p.device)
    angle = -math.pi * k / m
    kind = torch.complex128 if p.dtype == torch.float64 else torch.complex64
    phased = p * weight * torch.complex(angle.cos(), angle.sin()).to(kind)
    if first:  # frequency m is frequency 0
        phased = phased.roll(1, -1)
    return p.sum(-1, keepdim=True) / m + torch.fft.fft(phased, n=m).real
