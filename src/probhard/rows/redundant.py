"""Dense rows that depend on each other: ``M = A W A^T`` is filled up along its null space.

With the rows scaled to a unit diagonal, ``M = S^-1 E L E^T S^-1``. The eigenvectors N of eigenvalues near 0 are added,

    M + S^-1 N N^T S^-1,

which has a Cholesky factor and, since ``A^T S N = 0``, the same products ``W A^T M^+ A`` as the pseudo-inverse. N is
constant in derivatives: rows that stay dependent change these products only in second order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.rows.dense import DenseRows, DenseRowsFactor

DEPENDENT = 1e-13  # eigenvalues of the scaled M, relative to the largest, that count as 0


class RedundantRows(DenseRows):
    """Dense rows with the filling of their null space.

    Args:
        matrix: A, (*batch, q, n).
        filling: What is added to ``A W A^T``, (*batch, q, q); 0 for elements with independent rows.
    """

    def __init__(self, matrix: Tensor, filling: Tensor) -> None:
        super().__init__(matrix)
        self.filling = filling

    def factor(self, weight: Tensor) -> DenseRowsFactor:
        return DenseRowsFactor(self, weight, self.filling)


@torch.no_grad()
def filling(gram: Tensor, dependent: float = DEPENDENT) -> Tensor:
    """``S^-1 N N^T S^-1``, (*batch, q, q).

    Args:
        gram: ``A W A^T``, (*batch, q, q).
        dependent: Eigenvalues of the scaled matrix, relative to the largest, that count as 0.
    """
    finite = torch.isfinite(gram).all(-1).all(-1)[..., None, None]
    gram = torch.where(finite, gram, torch.eye(gram.shape[-1]).to(gram))
    size = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    largest = size.amax(-1, keepdim=True)
    root = torch.where(size > TINY + 1e-30 * largest, size, torch.where(largest > 0, largest, 1.0)).sqrt()
    values, vectors = torch.linalg.eigh(gram / (root.unsqueeze(-1) * root.unsqueeze(-2)))
    null = values <= dependent * values.amax(-1, keepdim=True).clamp(min=TINY)
    basis = root.unsqueeze(-1) * torch.where(null.unsqueeze(-2), vectors, 0.0)
    return basis @ basis.mT
