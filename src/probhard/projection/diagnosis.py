"""Why no point was found: rows that the bounds cannot meet, or a certificate that the set is empty."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import checking, segment_sum
from probhard.errors import InfeasibleError
from probhard.projection.parts import Parts
from probhard.rows.base import Structure
from probhard.rows.disjoint import DisjointRows
from probhard.rows.maps import DenseMap, SparseMap
from probhard.rows.system import LinearSystem

LARGEST = 20_000  # variables up to which emptiness is looked for


def check_capacity(parts: Parts, like: Tensor) -> None:
    """Raise where a linear equality asks for more, or less, than the bounds allow; eager mode only.

    Sets that are a single point within rounding pass: 1e-12 relative in float64, 1e-6 in float32.
    """
    if parts.linear is None or parts.box is None or not checking():
        return
    linear = parts.linear
    lower, upper = parts.bounds(like)
    bottom, top = _range(linear.system.map.at(like), lower.detach(), upper.detach())
    b = linear.b.detach().to(like)
    tolerance = 1e-12 if linear.b.dtype == torch.float64 and like.dtype == torch.float64 else 1e-6
    size = tolerance * (b.abs() + top.nan_to_num(0.0, 0.0, 0.0).abs() + bottom.nan_to_num(0.0, 0.0, 0.0).abs())
    gap = torch.maximum(bottom - b, b - top) - size
    if bool((gap > 0).any()):
        at = tuple(int(i) for i in (gap > 0).nonzero()[0])
        where = f" in batch element {at[:-1]}" if len(at) > 1 else ""
        found = [float(x.expand(gap.shape)[at]) for x in (b, bottom, top)]
        raise InfeasibleError(
            f"Row {at[-1]} of {type(linear).__name__} asks for {found[0]:.8g}{where}, but the bounds only allow "
            f"{found[1]:.8g} to {found[2]:.8g}.",
            "No point satisfies both: the set is empty.",
            "Relax the bounds, or correct the right-hand side.",
        )


def check_sides(least: Tensor, most: Tensor) -> None:
    """Raise where a row is to be at least more than it may be at most; eager mode only."""
    gap = least - most
    bad = gap > 1e-12 * (least.abs() + most.abs())
    if checking() and bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        where = f" in batch element {at[:-1]}" if len(at) > 1 else ""
        low, high = float(least[at]), float(most[at])
        raise InfeasibleError(
            f"Profile {at[-1]}{where}: a sum is to be at least {low:.8g} and at most {high:.8g}.",
            "No point satisfies both: the set is empty.",
            "Correct the right-hand sides of the inequality.",
        )


def _range(rows: SparseMap | DenseMap | Structure, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest value of each row over the bounds, (*batch, q)."""
    if isinstance(rows, SparseMap):
        low, high = (x.index_select(-1, rows.column) for x in (lower, upper))
        ends = [torch.where(rows.value > 0, a, b) * rows.value for a, b in ((low, high), (high, low))]
        return segment_sum(ends[0], rows.row, rows.row_count), segment_sum(ends[1], rows.row, rows.row_count)
    if isinstance(rows, DisjointRows):
        a = rows.split_coefficient()
        low, high = rows.split(lower), rows.split(upper)
        ends = [torch.where(a == 0, 0.0, torch.where(a > 0, x, y) * a) for x, y in ((low, high), (high, low))]
        return rows.sums(ends[0]), rows.sums(ends[1])
    a = rows.matrix.detach() if isinstance(rows, DenseMap) else rows.dense()
    low, high = lower.unsqueeze(-2), upper.unsqueeze(-2)
    ends = [torch.where(a == 0, 0.0, torch.where(a > 0, x, y) * a) for x, y in ((low, high), (high, low))]
    return ends[0].sum(-1), ends[1].sum(-1)


def empty_set(
    parts: Parts, rows: sp.csr_array | None, right: Tensor, lower: Tensor, upper: Tensor
) -> tuple[str, str, str] | None:
    """What makes ``rows v = right`` within the bounds empty, if that can be shown: what, why, and what to do."""
    if rows is None or rows.shape[1] > LARGEST:
        return None
    b, low, high = (x.detach().cpu().double().numpy() for x in (right, lower, upper))
    positive, negative = rows.maximum(0), rows.minimum(0)
    bottom, top = (
        _product(positive, low) + _product(negative, high),
        _product(positive, high) + _product(negative, low),
    )
    gap = np.maximum(bottom - b, b - top)
    worst = int(np.nanargmax(np.where(np.isfinite(gap), gap, -np.inf)))
    if gap[worst] > 1e-12 * max(1.0, abs(b[worst])):
        name = _name(parts, worst)
        return (
            f"{name} asks for {b[worst]:.8g}, but the bounds only allow {bottom[worst]:.8g} to {top[worst]:.8g}",
            "The set is empty.",
            "Relax the bounds, or correct the right-hand side.",
        )
    bounds = np.stack([low, high], 1)
    found = scipy.optimize.linprog(np.zeros(rows.shape[1]), A_eq=rows, b_eq=b, bounds=bounds, method="highs")
    if found.status == 2:
        return (
            f"The constraints {parts.constraint!r} contradict each other",
            "No point satisfies all of them.",
            "Leave one out, or relax it.",
        )
    return None


def matrix_of(system: LinearSystem) -> sp.csr_array | None:
    """All rows of a system, where they are shared."""
    if system.matrix is not None:
        return system.matrix
    if isinstance(system.map, DenseMap):
        return sp.csr_array(system.map.matrix.cpu().numpy()) if system.map.matrix.dim() == 2 else None
    return sp.csr_array(system.map.dense().detach().cpu().numpy())


def _product(matrix: sp.csr_array, x: np.ndarray) -> np.ndarray:
    """Row sums in which an infinite bound counts only where the row has an entry."""
    entries = sp.coo_array(matrix)
    found = np.zeros(matrix.shape[0])
    with np.errstate(invalid="ignore"):
        np.add.at(found, entries.coords[0], entries.data * x[entries.coords[1]])
    return found


def _name(parts: Parts, row: int) -> str:
    """Which constraint a row of the lifted system belongs to."""
    count = 0 if parts.linear is None else parts.linear.row_count
    if row < count:
        return f"Row {row} of {type(parts.linear).__name__}"
    for part in parts.inequalities:
        if row < count + part.prepared.map.row_count:
            return f"Row {row - count} of LinearInequality"
        count += part.prepared.map.row_count
    return "A row of " + " & ".join(map(repr, parts.shapes))
