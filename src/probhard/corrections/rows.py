"""Two-sided rows ``lower <= A y <= upper`` of a constraint; equalities have equal sides.

Rows that are multiples of each other, such as the two sides of ``LinearInequality.between``, become one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.tensors import broadcast, checking, plain
from probhard.errors import InfeasibleError, RankError
from probhard.projection.iterated_rows import IteratedRows
from probhard.projection.parts import Parts
from probhard.rows.presolve import dependent_rows

DIGITS = 12  # of the directions of rows that are compared
LISTED = 8  # rows named in an error
_PLANS: Recent[tuple[np.ndarray, np.ndarray, np.ndarray] | None] = Recent(16)


@dataclass(frozen=True)
class TwoSided:
    """``lower <= A y <= upper``."""

    matrix: Tensor  # A, (m, n) or (*batch, m, n)
    lower: Tensor  # (*batch, m)
    upper: Tensor  # (*batch, m)

    @property
    def count(self) -> int:
        """Number of rows m."""
        return self.matrix.shape[-2]

    def excess(self, y: Tensor) -> Tensor:
        """``relu(A y - upper) - relu(lower - A y)``, (*lead, m), at y (*lead, n)."""
        value = (self.matrix @ y.unsqueeze(-1)).squeeze(-1) if self.matrix.dim() > 2 else y @ self.matrix.mT
        return torch.relu(value - self.upper) - torch.relu(self.lower - value)

    def merged(self) -> TwoSided:
        """The same set, with parallel rows as one; rows that differ between batch elements are left as they are."""
        if self.matrix.dim() > 2 or not plain(self.matrix) or self.matrix.requires_grad or not self.count:
            return self
        rows = self.matrix.numpy(force=True)
        plan = _PLANS.get((rows.shape, rows.tobytes()), lambda: _parallel(rows))
        if plan is None:
            return self
        chosen, group = (torch.from_numpy(index).to(self.matrix.device) for index in plan[:2])
        ratio = torch.from_numpy(plan[2]).to(self.matrix)
        sides = self.lower / ratio, self.upper / ratio
        lower, upper = torch.minimum(*sides), torch.maximum(*sides)
        merged = TwoSided(
            self.matrix[chosen],
            _reduced(lower, group, len(chosen), "amax"),
            _reduced(upper, group, len(chosen), "amin"),
        )
        if checking() and bool((merged.lower > merged.upper).any()):
            raise InfeasibleError(
                "Two parallel rows of the constraint leave no value.",
                "The lower side of one is above the upper side of the other.",
                "Relax one of them.",
            )
        return merged

    def bounded(self) -> TwoSided:
        """The same set without rows that bound nothing in any batch element."""
        if not checking() or not self.count:
            return self
        bounds = torch.isfinite(self.lower) | torch.isfinite(self.upper)
        kept = bounds.flatten(0, -2).any(0) if bounds.dim() > 1 else bounds
        if bool(kept.all()):
            return self
        return TwoSided(self.matrix[..., kept, :], self.lower[..., kept], self.upper[..., kept])

    def check_rank(self) -> None:
        """Check that no row is a combination of others; raises RankError."""
        if not checking() or self.matrix.requires_grad:
            return
        rank = torch.linalg.matrix_rank(self.matrix)
        if bool((rank < self.count).any()):
            element = () if rank.dim() == 0 else tuple(int(i) for i in (rank < self.count).nonzero()[0])
            _, dependent, _ = dependent_rows(self.matrix[element].numpy(force=True))
            names = ", ".join(str(int(row)) for row in dependent[:LISTED])
            raise RankError(
                f"The rows {names} of {self.count} two-sided rows are combinations of the others.",
                "A shift along A^+ moves all rows independently, so they must be independent.",
                "Leave these rows out, or use a projection, which takes them.",
            )


def affine_rows(parts: Parts, like: Tensor) -> TwoSided | None:
    """The linear rows, bounds and profiles of a constraint; None if it has other parts.

    Args:
        parts: The parts of the constraint.
        like: A tensor of the device and of float64.
    """
    other = parts.nonlinear is not None or parts.diminishing is not None or parts.semicontinuous
    if other or not parts.polyhedral or not all(shape.only_rows for shape in parts.shapes):
        return None
    return linear_rows(parts, like)


def linear_rows(parts: Parts, like: Tensor) -> TwoSided:
    """The linear rows, bounds and profiles among the parts of a constraint, merged; equalities come first."""
    n = parts.variables
    if parts.linear is None:
        equal, right = like.new_zeros(0, n), like.new_zeros(0)
    else:
        equal, right = parts.linear.system.map.at(like).dense(), parts.linear.b.to(like)
    rows, lower, upper = [equal], [right], [right]
    if parts.inequalities or parts.box is not None or any(shape.only_rows for shape in parts.shapes):
        found = IteratedRows.of(parts, like)
        count = found.blocks[0].start if found.blocks else found.unequal.shape[-2]
        rows.append(found.unequal[..., :count, :])
        lower.append(found.lower[..., :count])
        upper.append(found.upper[..., :count])
    batch = broadcast(*(part.shape[:-2] for part in rows))
    matrix = torch.cat([part.expand(*batch, *part.shape[-2:]) for part in rows], -2)
    lead = broadcast(*(part.shape[:-1] for part in (*lower, *upper)))
    sides = (torch.cat([part.expand(*lead, part.shape[-1]) for part in side], -1) for side in (lower, upper))
    return TwoSided(matrix, *sides).bounded().merged()


def _parallel(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Rows to keep (k,), the kept row that each is a multiple of (m,) and the multiples (m,); None if all are kept."""
    sizes = np.linalg.norm(rows, axis=1)
    first = rows[np.arange(len(rows)), np.argmax(np.abs(rows) > 1e-9 * sizes[:, None], axis=1)]
    factors = np.where(first < 0, -1.0, 1.0) * np.where(sizes > 0, sizes, 1.0)
    directions = np.round(rows / factors[:, None], DIGITS) + 0.0
    _, chosen, group = np.unique(directions, axis=0, return_index=True, return_inverse=True)
    if len(chosen) == len(rows):
        return None
    order = np.argsort(chosen)  # rows keep their order
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    chosen, group = chosen[order], place[group.ravel()]
    return chosen, group, factors / factors[chosen[group]]


def _reduced(x: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    """The largest or smallest of x (*batch, m) in each group."""
    out = x.new_zeros(*x.shape[:-1], count)
    return out.scatter_reduce(-1, index.expand(x.shape), x, how, include_self=False)
