"""Why no point was found: rows that the bounds cannot meet, or a certificate that the set is empty."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import scipy.sparse as sp
from torch import Tensor

from probhard.projectors.gathered import Gathered
from probhard.structure.base import DenseMap
from probhard.structure.system import LinearSystem

LARGEST = 20_000  # variables up to which emptiness is looked for


def empty_set(
    parts: Gathered, system: LinearSystem, right: Tensor, lower: Tensor, upper: Tensor
) -> tuple[str, str, str] | None:
    """What makes the set of one element empty, if that can be shown: what, why, and what to do."""
    rows = _matrix(system)
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


def _matrix(system: LinearSystem) -> sp.csr_array | None:
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


def _name(parts: Gathered, row: int) -> str:
    """Which constraint a row of the lifted system belongs to."""
    count = 0 if parts.linear is None else parts.linear.rows
    if row < count:
        return f"Row {row} of {type(parts.linear).__name__}"
    for rows in parts.rows:
        if row < count + rows.rows.map.rows:
            return f"Row {row - count} of LinearInequality"
        count += rows.rows.map.rows
    return "A row of " + " & ".join(map(repr, parts.shapes))
