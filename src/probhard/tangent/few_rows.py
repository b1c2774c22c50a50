"""Variances of projected laws where there are few rows: products with the q rows of A, and no n x n matrix.

With ``K = W A^T (A W A^T)^-1`` and ``M = A C A^T``, the variances of functionals F of a projected law are

    diag(F P C P^T F^T) = diag(F C F^T) - 2 (F K) . (F C A^T) + (F K M) . (F K),       P = I - K A,

where ``.`` sums products over the q columns. The difference cancels: what is left below the rounding of its terms is
exactly 0, with gradient 0. These are the functionals that the rows fix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.laws.base import CHUNK, LinearMap
from probhard.laws.covariance import Covariance, Factored

if TYPE_CHECKING:
    from probhard.tangent.linear import Tangent

FEW_ROWS = 64  # up to this many rows
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6}  # variances below this share of their terms are 0


def few_rows_variance(tangent: Tangent, cov: Covariance, rows: LinearMap | None = None) -> Tensor:
    """``diag(F P C P^T F^T)``, (*batch, k), or (*batch, n) without F.

    Args:
        tangent: P, of few rows.
        cov: C.
        rows: F, (k, n); None for the identity.
    """
    dtype = tangent.dtype
    base, gains, images, inner = _images(tangent, cov)
    total = base.diagonal()
    if rows is not None:
        f = rows.at(total)
        gains, images, total = f.apply(gains), f.apply(images), base.functional_variance(f)
    mixed = torch.einsum("a...k,a...b->b...k", gains, inner)
    terms = (2 * images - mixed) * gains
    variance = total - terms.sum(0)
    floor = ROUNDING[dtype] * (total + terms.abs().sum(0)).detach()
    return torch.where(variance > floor, variance, 0.0).to(cov.dtype)


def _images(tangent: Tangent, cov: Covariance) -> tuple[Covariance, Tensor, Tensor, Tensor]:
    """C in the working precision, and the columns of K and ``C A^T`` (q, *batch, n) and of M (q, *batch, q).

    They are kept for the next call with the same C: variances of variables and of functionals need both.
    """
    known = tangent.__dict__.get("_row_images")
    if known is not None and known[0] is cov:
        return known[1]
    core, dtype = tangent.core, tangent.dtype
    base = cov if cov.dtype == dtype else cov.to(dtype)
    if tangent.system.pins is not None:
        base = base.scaled(tangent.system.free(torch.ones_like(base.diagonal())))
    like = base.diagonal()
    points = core.at(like).dense().movedim(-2, 0)  # (q, *batch of A, n)
    dims = max(len(base.shape) - 1, len(tangent.shape) - 1, points.dim() - 2)
    images = base.apply(_aligned(points, dims))
    gains = tangent.gains(_aligned(torch.eye(core.row_count, dtype=dtype, device=like.device), dims))
    inner = core.apply(images)  # columns of M, (q, *batch, q)
    result = base, gains, images, inner
    if checking():
        tangent.__dict__["_row_images"] = cov, result
    return result


def _aligned(x: Tensor, dims: int) -> Tensor:
    """Columns (q, *batch, m) with ``dims`` batch dimensions."""
    return x.reshape(len(x), *[1] * (dims - x.dim() + 2), *x.shape[1:])


def factor_variance(tangent: Tangent, cov: Factored) -> Tensor:
    """``diag(P G G^T P^T)``, (*batch, n), by P times the columns of G, few at a time."""
    like = cov.diagonal().to(tangent.dtype)
    dims, total = like.dim() - 1, torch.zeros_like(like)
    size = max(1, CHUNK // max(1, like.numel()))
    for first in range(0, cov.factor_size, size):
        index = torch.arange(first, min(first + size, cov.factor_size), device=like.device)
        unit = cov.diagonal().new_zeros(len(index), cov.factor_size).scatter(1, index.unsqueeze(1), 1.0)
        columns = cov.factor_apply(unit.reshape(len(index), *[1] * dims, cov.factor_size))
        total = total + tangent.apply(columns.to(tangent.dtype)).square().sum(0)
    return total
