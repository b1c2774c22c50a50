"""All linear rows of a polyhedron with two bounds each, ``A u = b, l <= C u <= h``, no two rows of C parallel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probhard.constraints.equality import LinearEquality
from probhard.projection.lifting import joined
from probhard.projection.parts import Parts

PARALLEL = 1e-12  # distance of unit rows that count as one


@dataclass(frozen=True)
class MergedRows:
    """Equalities and the rows with bounds of all parts in float64, no two of them parallel."""

    equal: Tensor  # A, (q, n)
    right: Tensor  # b, (*batch, q)
    dense: Tensor  # rows that are not single variables, (p, n)
    units: Tensor  # variables with bounds, (k,); their rows follow
    rest: Tensor  # variables without, (n - k,)
    lower: Tensor  # (*batch, p + k)
    upper: Tensor  # (*batch, p + k)

    @classmethod
    def of(cls, parts: Parts, like: Tensor) -> MergedRows:
        """The rows, cached with the plan if the data are constant."""
        known: MergedRows | None = (parts.kept or {}).get((cls, like.device))
        if known is None:
            known = _merged(parts, like)
            if parts.kept is not None:
                parts.kept[cls, like.device] = known
        return known

    def times(self, matrix: Tensor) -> Tensor:
        """``M C^T``, (..., n, p + k), for M (..., n, n) or any number of rows."""
        return torch.cat([matrix @ self.dense.mT, matrix.index_select(-1, self.units)], -1)


def _merged(parts: Parts, like: Tensor) -> MergedRows:
    n, linear = parts.variables, parts.linear
    equal, right = like.new_zeros(0, n), like.new_zeros(0)
    if linear is not None:
        equal, right = independent_rows(linear, like)
    lower, upper = parts.bounds(like)
    bounded = (torch.isfinite(lower) | torch.isfinite(upper)).reshape(-1, n).any(0).numpy(force=True)
    rows, sides = [np.eye(n)[bounded]], [(lower[..., bounded], upper[..., bounded])]
    for part in parts.inequalities:
        rows.append(part.prepared.map.at(like).dense().numpy(force=True))
        sides.append((torch.full_like(part.d, -torch.inf).to(like), part.d.to(like)))
    for shape in parts.shapes:
        lifted = shape.lifted(n)
        sign = -lifted.own.diagonal()[:, None]
        rows.append(sign * lifted.on_u.toarray())
        sides.append((like.new_zeros(len(sign)), torch.full((len(sign),), torch.inf).to(like)))
    every, least, most = np.concatenate(rows), joined([x for x, _ in sides]), joined([x for _, x in sides])
    group, factor = _parallel(every)
    scale = torch.from_numpy(factor).to(like)
    ends = torch.stack(torch.broadcast_tensors(least / scale, most / scale))
    least, most = ends.amin(0), ends.amax(0)  # a negative factor swaps them
    index = torch.from_numpy(group).to(like.device).expand(least.shape)
    count = int(group.max(initial=-1)) + 1
    least = least.new_full((*least.shape[:-1], count), -torch.inf).scatter_reduce(-1, index, least, "amax")
    most = most.new_full((*most.shape[:-1], count), torch.inf).scatter_reduce(-1, index, most, "amin")
    first = np.unique(group, return_index=True)[1]
    kept_rows = every[first] / factor[first, None]
    single = (kept_rows != 0).sum(-1) == 1
    order = torch.from_numpy(np.concatenate([np.flatnonzero(~single), np.flatnonzero(single)])).to(like.device)
    units = kept_rows[single].argmax(-1)
    rest = np.setdiff1d(np.arange(n), units)
    dense = torch.from_numpy(kept_rows[~single]).to(like)
    bounded_at, rest_at = (torch.from_numpy(x.astype(np.int64)).to(like.device) for x in (units, rest))
    return MergedRows(equal, right, dense, bounded_at, rest_at, least[..., order], most[..., order])


def independent_rows(linear: LinearEquality, like: Tensor) -> tuple[Tensor, Tensor]:
    """A (q, n) and b (*batch, q) of shared equalities without redundant rows, in the dtype of ``like``."""
    equal, right = linear.system.map.at(like).dense(), linear.b.to(like)
    if linear.system.redundancy is None:
        return equal, right
    kept = torch.from_numpy(linear.system.redundancy.others.astype(np.int64)).to(like.device)
    return equal.index_select(-2, kept), right.index_select(-1, kept)


def _parallel(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The group of every row and its factor: rows of a group are their factors times one row."""
    lead = np.abs(rows).argmax(-1)
    factor = rows[np.arange(len(rows)), lead]
    factor = np.where(factor == 0, 1.0, factor)
    unit = np.round(rows / factor[:, None] / PARALLEL) * PARALLEL
    return np.unique(unit, axis=0, return_inverse=True)[1].reshape(-1), factor
