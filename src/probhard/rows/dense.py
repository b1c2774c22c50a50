"""Dense Cholesky factors: of ``A W A^T`` (q x q) or, where that is smaller, of an (n-q) x (n-q) system.

The smaller system solves the rows for q pivot variables a, in terms of the n - q others b: ``u_a = C u_b + b'``. Then
``A W A^T = W_a + C W_b C^T``. By Woodbury's identity, only ``H = I + R_b C^T W_a^-1 C R_b`` with ``R_b = W_b^1/2`` is
factored. The oblique variances are sums of squares: ``cov(u_b) = R_b H^-1 R_b`` and ``cov(u_a) = C cov(u_b) C^T``.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import checking, matvec, safe_sqrt
from probhard.rows.base import Factor, Mapped
from probhard.rows.maps import DenseMap


def cholesky_solve(factor: Tensor, r: Tensor) -> Tensor:
    """``(L L^T)^-1 r``; sample dimensions become columns of one solve.

    Args:
        factor: L, (*batch, q, q).
        r: Right-hand sides, (*samples, *batch, q).

    Returns:
        The solutions, (*samples, *batch, q).
    """
    extra = r.dim() - (factor.dim() - 1)
    if extra <= 0:
        return torch.cholesky_solve(r.unsqueeze(-1), factor).squeeze(-1)
    columns = r.flatten(0, extra - 1).movedim(0, -1)
    return torch.cholesky_solve(columns, factor).movedim(-1, 0).unflatten(0, r.shape[:extra])


class DenseRows(Mapped):
    """A dense A, solved by Cholesky of ``A W A^T``.

    Args:
        matrix: A, (*batch, q, n).
    """

    map: DenseMap
    double = True

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(DenseMap(matrix))
        self.determined = determined(matrix)  # variables that A alone fixes: their variance is exactly 0

    @property
    def batch_dims(self) -> int:
        return self.map.matrix.dim() - 2

    @property
    def constant(self) -> bool:
        return self.map.matrix.dim() == 2 and not self.map.matrix.requires_grad

    @property
    def algorithm(self) -> str:
        return f"dense Cholesky of {self.row_count} x {self.row_count}"

    def factor(self, weight: Tensor) -> DenseRowsFactor:
        return DenseRowsFactor(self, weight)


class DenseRowsFactor(Factor):
    """``L L^T = A W A^T``, plus the filling (*batch, q, q) of its null space if there is one."""

    structure: DenseRows

    def __init__(self, structure: DenseRows, weight: Tensor, filling: Tensor | None = None) -> None:
        self.structure, self.weight = structure, weight
        self.scaled = structure.map.matrix * weight.unsqueeze(-2)  # A W
        gram = self.scaled @ structure.map.matrix.mT
        self.lower, self.info = torch.linalg.cholesky_ex(gram if filling is None else gram + filling)

    def solve(self, r: Tensor) -> Tensor:
        return cholesky_solve(self.lower, r)

    def variance(self, s: Tensor | None = None) -> Tensor:
        matrix = self.structure.map.matrix
        if s is None:
            half = torch.linalg.solve_triangular(self.lower, self.scaled, upper=False)
            variance = self.weight - half.square().sum(-2)
        else:
            gain = torch.cholesky_solve(self.scaled, self.lower)  # K^T
            spread = matrix * s.unsqueeze(-2)  # A S
            variance = s - 2 * (gain * spread).sum(-2) + (gain * (spread @ matrix.mT @ gain)).sum(-2)
        return torch.where(self.structure.determined, 0.0, variance.clamp(min=0))

    def pivots(self) -> Tensor:
        regular = (self.info == 0).unsqueeze(-1)
        return torch.where(regular, self.lower.diagonal(dim1=-2, dim2=-1), 0.0)

    @cached_property
    def sines(self) -> Tensor:
        """Sines of the angles between rows of ``A W^1/2`` and those before them, (*batch, q); 0 if M has no factor."""
        lower = self.lower.detach()
        return self.pivots().detach() / lower.square().sum(-1).sqrt().clamp(min=TINY)


class NullRows(Mapped):
    """Rows solved for q pivot variables, ``u_a - C u_b = b'``; for n - q < q.

    Args:
        matrix: A, (q, n), of rank q.
    """

    double = True

    def __init__(self, matrix: np.ndarray) -> None:
        super().__init__(DenseMap(torch.from_numpy(matrix)))
        _, _, order = scipy.linalg.qr(matrix, mode="economic", pivoting=True)
        pivot, other = np.sort(order[: self.row_count]), np.sort(order[self.row_count :])
        self.pivot, self.other = (
            torch.from_numpy(pivot.astype(np.int64)),
            torch.from_numpy(other.astype(np.int64)),
        )
        self.transform = torch.from_numpy(np.linalg.inv(matrix[:, pivot]))  # makes the pivot columns the identity
        self.combination = -self.transform @ torch.from_numpy(matrix[:, other])  # C, (q, n - q)
        self.rows_form = DenseRows(self.map.dense())
        self.determined = self.rows_form.determined

    @property
    def algorithm(self) -> str:
        free = self.variables - self.row_count
        return f"dense Cholesky of the {free} x {free} complement of {self.row_count} rows"

    def factor(self, weight: Tensor) -> Factor:
        if checking() and bool((weight.index_select(-1, self.pivot) > 0).all()):
            return NullRowsFactor(self, weight)
        return self.rows_form.at(weight).factor(weight)  # weights of pivot variables must be invertible


class NullRowsFactor(Factor):
    """``L L^T = H``, by ``B = R_b C^T W_a^-1`` and ``H = I + B C R_b``."""

    structure: NullRows

    def __init__(self, structure: NullRows, weight: Tensor) -> None:
        self.structure, self.weight = structure, weight
        self.pivot_weight = weight.index_select(-1, structure.pivot)
        self.root = safe_sqrt(weight.index_select(-1, structure.other))
        combination = structure.combination
        self.scaled = self.root.unsqueeze(-1) * combination.mT  # R_b C^T
        self.gain = self.scaled / self.pivot_weight.unsqueeze(-2)
        identity = torch.eye(combination.shape[-1], dtype=weight.dtype, device=weight.device)
        self.lower = torch.linalg.cholesky_ex(identity + self.gain @ self.scaled.mT).L

    def solve(self, r: Tensor) -> Tensor:
        r = matvec(self.structure.transform, r) / self.pivot_weight
        inner = cholesky_solve(self.lower, matvec(self.scaled, r))
        r = r - matvec(self.scaled.mT, inner) / self.pivot_weight
        return matvec(self.structure.transform.mT, r)

    def variance(self, s: Tensor | None = None) -> Tensor:
        structure = self.structure
        combination = structure.combination
        if s is None:
            eye = torch.eye(self.lower.shape[-1], dtype=self.weight.dtype, device=self.weight.device)
            half = torch.linalg.solve_triangular(self.lower, eye, upper=False) * self.root.unsqueeze(-2)  # L^-1 R_b
            free, tied = half.square().sum(-2), (half @ combination.mT).square().sum(-2)
        else:
            gain = self.root.unsqueeze(-1) * torch.cholesky_solve(self.gain, self.lower)  # d u_b / d z_a
            stay = torch.eye(gain.shape[-2], dtype=s.dtype, device=s.device) - gain @ combination  # d u_b / d z_b
            parts = (
                s.index_select(-1, structure.pivot).unsqueeze(-2),
                s.index_select(-1, structure.other).unsqueeze(-2),
            )
            free = (gain.square() * parts[0]).sum(-1) + (stay.square() * parts[1]).sum(-1)
            tied = ((combination @ gain).square() * parts[0]).sum(-1)
            tied = tied + ((combination @ stay).square() * parts[1]).sum(-1)
        order = torch.argsort(torch.cat([structure.pivot, structure.other]))
        return torch.where(structure.determined, 0.0, torch.cat([tied, free], -1).index_select(-1, order))

    def pivots(self) -> Tensor:
        return torch.cat([self.pivot_weight, self.lower.diagonal(dim1=-2, dim2=-1)], -1)


def determined(matrix: Tensor) -> Tensor:
    """Variables that the rows alone fix: their unit vectors lie in the row space of A.

    Args:
        matrix: A, (*batch, q, n).

    Returns:
        A mask (n,), or a single False for a batched matrix or a traced graph.
    """
    if matrix.dim() > 2 or not checking():
        return torch.zeros((), dtype=torch.bool, device=matrix.device)
    basis = torch.linalg.qr(matrix.detach().to(torch.float64).mT).Q
    return basis.square().sum(-1) > 1 - 1e-12
