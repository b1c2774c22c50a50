"""The rows of a polyhedron for projections with their equalities eliminated: ``A u = b, l <= C u <= h``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard.projection.lifting import joined
from probhard.projection.merged_rows import independent_rows
from probhard.projection.parts import Parts

STEPS = 8  # usual number of factors of an element; a reduction for each element must not cost more than they do


@dataclass(frozen=True)
class ReducedRows:
    """The rows of all parts in float64."""

    equal: Tensor  # A, (q, n), without redundant rows
    right: Tensor  # b, (*batch, q)
    unequal: Tensor  # C: rows G, then a unit row for each bounded variable, (m, n)
    lower: Tensor  # l, (*batch, m)
    upper: Tensor  # h, (*batch, m)
    bounded: Tensor  # variables with a finite bound, (k,)

    @classmethod
    def of(cls, parts: Parts, like: Tensor) -> ReducedRows:
        """The rows, cached with the plan if the data are constant."""
        known: ReducedRows | None = (parts.kept or {}).get((cls, like.device))
        if known is not None:
            return known
        n = parts.variables
        lower, upper = parts.bounds(like)
        bounded = (torch.isfinite(lower) | torch.isfinite(upper)).reshape(-1, n).any(0).nonzero().squeeze(-1)
        equal, right = like.new_zeros(0, n), like.new_zeros(0)
        if parts.linear is not None:
            equal, right = independent_rows(parts.linear, like)
        rows = [part.prepared.map.at(like).dense() for part in parts.inequalities]
        rows.append(torch.eye(n, dtype=like.dtype, device=like.device).index_select(0, bounded))
        most = [part.d.to(like) for part in parts.inequalities]
        least = [torch.full_like(d.detach(), -torch.inf) for d in most]
        lower, upper = lower.index_select(-1, bounded), upper.index_select(-1, bounded)
        made = cls(equal, right, torch.cat(rows), joined([*least, lower]), joined([*most, upper]), bounded)
        if parts.kept is not None:
            parts.kept[cls, like.device] = made
        return made

    def pays(self, constant: bool) -> bool:
        """Whether factors of active rows cost less than factors of all rows with their auxiliary variables."""
        (q, n), m = self.equal.shape, len(self.unequal)
        p = m - len(self.bounded)
        every, active = (q + p) ** 2 * (n + p + (q + p) / 3), min(m, n - q) ** 3 / 3
        once = 0 if constant else (q * q + p * p) * n + m * m * q
        return active <= every and once <= STEPS * every
