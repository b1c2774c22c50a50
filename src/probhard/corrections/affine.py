"""HardNet-Aff (Min and Azizan 2024): a shift along the pseudo-inverse of two-sided rows.

    y = z + A^+ (relu(lower - A z) - relu(A z - upper)),     A of full row rank.

Rows that are met keep their value and violated rows move to their bound, so every y is feasible. It is the nearest
point if the rows are orthogonal or all of them are equalities; else it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import plain
from probhard.corrections.base import Bound, Correction, inapplicable
from probhard.corrections.rows import TwoSided, affine_rows
from probhard.projection.parts import Parts

NAME = "HardNet-Aff"
REFINED = 2  # shifts: the first one leaves rounding errors of the pseudo-inverse
_INVERSES: Recent[Tensor] = Recent(16)


@dataclass(frozen=True)
class AffineShift(Correction):
    """HardNet-Aff's shift of points on linear rows, bounds and monotone or convex profiles."""

    kind: ClassVar[str] = "affine-shift"

    def bound(self, parts: Parts, like: Tensor) -> Bound:
        rows = affine_rows(parts, like)
        if rows is None:
            raise inapplicable(
                NAME, parts, "It is made for linear rows and bounds.", "Use 'hardnet++' or 'probhard-or'."
            )
        if rows.count > parts.variables:
            raise inapplicable(
                NAME,
                parts,
                f"It has {rows.count} rows on {parts.variables} variables, and a shift can only move as many rows "
                "independently as there are variables.",
                "Use 'probhard-or', which projects on any number of rows.",
            )
        return _Shift(rows)


class _Shift(Bound):
    """The shift of one set of rows."""

    guaranteed = True

    def __init__(self, rows: TwoSided) -> None:
        self.rows = rows
        self.inverse = _inverse(rows)  # A^+, (*batch, n, m)
        if rows.matrix.dim() == 2 and bool((rows.lower == rows.upper).all()):
            eye = torch.eye(rows.matrix.shape[-1], dtype=rows.matrix.dtype, device=rows.matrix.device)
            self.matrix = eye - self.inverse @ rows.matrix

    def __call__(self, z: Tensor) -> Tensor:
        for _ in range(REFINED):
            excess = self.rows.excess(z)
            many = self.inverse.dim() > 2
            z = z - ((self.inverse @ excess.unsqueeze(-1)).squeeze(-1) if many else excess @ self.inverse.mT)
        return z


def _inverse(rows: TwoSided) -> Tensor:
    """``A^+``, cached if A is shared and constant."""

    def make() -> Tensor:
        rows.check_rank()
        return torch.linalg.pinv(rows.matrix)

    matrix = rows.matrix
    if matrix.dim() > 2 or matrix.requires_grad or not plain(matrix):
        return make()
    return _INVERSES.get((tuple(matrix.shape), matrix.numpy().tobytes()), make)
