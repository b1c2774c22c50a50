"""Eigenvalues of points next to symmetric cones: projections, and their derivatives by divided differences.

    w = sum_i l_i e_i,     Pi(w) = sum_i max(l_i, 0) e_i.

In the basis of the eigenvectors of w the derivative of Pi is diagonal. Its entries are the divided differences
``d = (max(l_i, 0) - max(l_j, 0)) / (l_i - l_j)`` of pairs of eigenvalues: 1, 0, or between both for mixed signs.
A point (t, v) of a second-order cone has the two eigenvalues ``t + |v|`` and ``t - |v|``; a number has one, itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.cones import matrix_of, vectorise


@dataclass(frozen=True)
class Frame:
    """The derivative of the projection on a cone at w in its eigenvectors.

    Args:
        nearest: The projection of w, (k, m).
        basis: Orthonormal columns, (k, m, m); None for the identity.
        stiff: Where the derivative is 0, (k, m).
        bend: ``(1 - d) / d`` for the derivative d elsewhere, (k, m).
    """

    nearest: Tensor
    basis: Tensor | None
    stiff: Tensor
    bend: Tensor

    @property
    def lost(self) -> Tensor:
        """1 less the derivative, (k, m)."""
        return torch.where(self.stiff, 1.0, self.bend / (1 + self.bend))

    def turned(self, x: Tensor) -> Tensor:
        """``basis^T x`` for x (k, m, n)."""
        return x if self.basis is None else self.basis.mT @ x


def frame(kind: str, w: Tensor, tolerance: float = 0.0) -> Frame:
    """The projection of w (k, m) and its derivative; eigenvalues above ``-tolerance |w|`` count as not negative."""
    size = tolerance * w.norm(dim=-1, keepdim=True)
    if kind == "zero":
        return Frame(torch.zeros_like(w), None, torch.ones_like(w, dtype=torch.bool), torch.zeros_like(w))
    if kind == "non-negative":
        return Frame(w.clamp(min=0), None, w < -size, torch.zeros_like(w))
    if kind == "second-order":
        values, basis = second_order_eigen(w)
        stiff, bend = pairs(values[..., :1], values[..., 1:], size)
        own, none = values < -size, torch.zeros_like(values)
        others = (*w.shape[:-1], w.shape[-1] - 2)
        stiff, bend = torch.cat([own, stiff.expand(others)], -1), torch.cat([none, bend.expand(others)], -1)
        nearest = (basis[..., :2] @ (values.clamp(min=0) * 0.5**0.5).unsqueeze(-1)).squeeze(-1)
        return Frame(nearest, basis, stiff, bend)
    values, vectors = torch.linalg.eigh(matrix_of(w))
    row, column = torch.tril_indices(values.shape[-1], values.shape[-1])
    stiff, bend = pairs(values[..., row], values[..., column], size)
    nearest = vectorise((vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT)
    return Frame(nearest, _semidefinite_basis(vectors), stiff, bend)


def nearest(kind: str, w: Tensor) -> Tensor:
    """The projection of w (k, m) on a cone."""
    if kind == "zero":
        return torch.zeros_like(w)
    if kind == "non-negative":
        return w.clamp(min=0)
    if kind == "second-order":
        t, v = w[..., :1], w[..., 1:]
        size = v.norm(dim=-1, keepdim=True)
        high, low = (t + size).clamp(min=0), (t - size).clamp(min=0)
        return 0.5 * torch.cat([high + low, (high - low) * v / size.clamp(min=TINY)], -1)
    values, vectors = torch.linalg.eigh(matrix_of(w))
    return vectorise((vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT)


def pairs(first: Tensor, second: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Where divided differences of ``max(., 0)`` are 0, and ``(1 - d) / d`` elsewhere, for pairs of eigenvalues.

    An eigenvalue of 0 counts as positive next to positive ones and itself, and as negative next to negative ones.
    """
    high, low = torch.maximum(first, second), torch.minimum(first, second)
    below = low < -size
    stiff = below & (high <= size)
    bend = torch.where(below & ~stiff, -low / high.clamp(min=TINY), 0.0)
    return stiff, torch.where(stiff, 0.0, bend)


def second_order_eigen(w: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``t + |v|``, ``t - |v|`` (k, 2) of w = (t, v), and orthonormal eigenvectors (k, m, m)."""
    t, v = w[..., :1], w[..., 1:]
    size = v.norm(dim=-1, keepdim=True)
    first = torch.zeros_like(v)
    first[..., 0] = 1.0
    unit = torch.where(size > 0, v / size.clamp(min=TINY), first)
    sign = torch.where(unit[..., :1] >= 0, 1.0, -1.0)
    mirror = unit + sign * first  # a reflection that maps the first axis to -sign * unit
    scaled = 2 * mirror / mirror.square().sum(-1, keepdim=True)
    reflection = torch.eye(v.shape[-1]).to(v) - scaled.unsqueeze(-1) * mirror.unsqueeze(-2)
    half = torch.full_like(t, 0.5**0.5)
    high, low = torch.cat([half, half * unit], -1), torch.cat([half, -half * unit], -1)
    rest = reflection[..., :, 1:]
    rest = torch.cat([torch.zeros_like(rest[..., :1, :]), rest], -2)
    return torch.cat([t + size, t - size], -1), torch.cat([high.unsqueeze(-1), low.unsqueeze(-1), rest], -1)


def _semidefinite_basis(vectors: Tensor) -> Tensor:
    """The vectorised matrices ``v_i v_j^T + v_j v_i^T`` of length 1, as columns (k, m, m)."""
    row, column = torch.tril_indices(vectors.shape[-1], vectors.shape[-1])
    one, two = vectors[..., row, :], vectors[..., column, :]  # (k, m, p)
    sums = one[..., row] * two[..., column] + one[..., column] * two[..., row]
    off = (row != column).to(vectors)
    return sums * (1 + (2**0.5 - 1) * off).unsqueeze(-1) * (0.5 + (0.5**0.5 - 0.5) * off)
