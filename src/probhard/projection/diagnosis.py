"""Why a projection failed: rows that the bounds make infeasible, or a certificate that the set is empty."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.numerics import SINGLE_POINT
from probhard._util.tensors import checking, segment_sum
from probhard.errors import InfeasibleError
from probhard.projection.parts import Parts
from probhard.rows.base import Structure
from probhard.rows.disjoint import DisjointRows
from probhard.rows.maps import DenseMap, SparseMap
from probhard.rows.system import LinearSystem

LARGEST = 20_000  # largest number of variables for which emptiness is checked


def check_capacity(parts: Parts, like: Tensor) -> None:
    """Check that the bounds allow every linear equality; eager mode only.

    The relative tolerance is 1e-12 in float64 and 1e-6 in float32, so sets of a single point pass.

    Args:
        parts: The parts of the constraint.
        like: A tensor of the dtype and device to work in.

    Raises:
        InfeasibleError: A right-hand side is out of the range that the bounds allow.
    """
    if parts.linear is None or parts.box is None or not checking():
        return
    linear = parts.linear
    lower, upper = parts.bounds(like)
    bottom, top = _range(linear.system.map.at(like), lower.detach(), upper.detach())
    b = linear.b.detach().to(like)
    tolerance = max(SINGLE_POINT.get(dtype, 1e-6) for dtype in (linear.b.dtype, like.dtype))
    size = tolerance * (b.abs() + top.nan_to_num(0.0, 0.0, 0.0).abs() + bottom.nan_to_num(0.0, 0.0, 0.0).abs())
    gap = torch.maximum(bottom - b, b - top) - size
    if bool((gap > 0).any()):
        at = tuple(int(i) for i in (gap > 0).nonzero()[0])
        where = f" in batch element {at[:-1]}" if len(at) > 1 else ""
        requested, least, most = (float(x.expand(gap.shape)[at]) for x in (b, bottom, top))
        raise InfeasibleError(
            f"Row {at[-1]} of {type(linear).__name__} asks for {requested:.8g}{where}, but the bounds only allow "
            f"{least:.8g} to {most:.8g}.",
            "No point satisfies both: the set is empty.",
            "Relax the bounds, or correct the right-hand side.",
        )


def check_sides(least: Tensor, most: Tensor) -> None:
    """Check the limits of two-sided rows; eager mode only.

    Args:
        least: Lower limits, (*batch, slices).
        most: Upper limits, (*batch, slices).

    Raises:
        InfeasibleError: A lower limit is above its upper limit.
    """
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
    """Explain why ``rows v = right`` within the bounds has no solution.

    Args:
        parts: The parts of the constraint, for names.
        rows: The lifted rows, (q, N).
        right: Right-hand sides, (q,).
        lower: Lower bounds, (N,).
        upper: Upper bounds, (N,).

    Returns:
        The three parts of an error; None if a solution may exist.
    """
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
    program = scipy.optimize.linprog(np.zeros(rows.shape[1]), A_eq=rows, b_eq=b, bounds=bounds, method="highs")
    if program.status == 2:
        return (
            f"The constraints {parts.constraint!r} contradict each other",
            "No point satisfies all of them.",
            "Leave one out, or relax it.",
        )
    return None


def matrix_of(system: LinearSystem) -> sp.csr_array | None:
    """All rows of a system, (q, n); None if they differ between batch elements."""
    if system.matrix is not None:
        return system.matrix
    if isinstance(system.map, DenseMap):
        return sp.csr_array(system.map.matrix.cpu().numpy()) if system.map.matrix.dim() == 2 else None
    return sp.csr_array(system.map.dense().detach().cpu().numpy())


def _product(matrix: sp.csr_array, x: np.ndarray) -> np.ndarray:
    """Row sums in which an infinite bound counts only where the row has an entry."""
    entries = sp.coo_array(matrix)
    sums = np.zeros(matrix.shape[0])
    with np.errstate(invalid="ignore"):
        np.add.at(sums, entries.coords[0], entries.data * x[entries.coords[1]])
    return sums


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
