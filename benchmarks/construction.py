"""Building linear rows that are redundant: the divergence of a velocity on the faces of a periodic grid.

    (u_{i+1,j} - u_{i,j}) + (v_{i,j+1} - v_{i,j}) = 0     for all n x n cells;     the rows sum to 0.

``LinearEquality`` finds the redundant row by sparse elimination and verifies it. Times are those of building the
constraint once, with ``rank="reveal"``, against those allowed (1 s for a grid of 64, 5 s for 128), and for a small grid
against a dense pivoted QR of the same rows, which it replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import scipy.linalg
import scipy.sparse as sp
import torch

import probhard as ph
from benchmarks.timing import Comparison, Overhead, measured

ALLOWED = {64: 1.0, 128: 5.0}  # seconds
SMALL = 24  # cells along a side for the dense peer


def divergence(size: int) -> sp.csr_array:
    """The rows (size^2, 2 size^2) of a periodic grid."""
    forward = sp.eye_array(size, k=1) + sp.eye_array(size, k=1 - size) - sp.eye_array(size)
    same = sp.eye_array(size)
    return sp.csr_array(sp.hstack([sp.kron(forward, same), sp.kron(same, forward)]))


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Build once for each size; the median of a few."""
    small = divergence(8 if quick else SMALL)
    dense = small.toarray()

    def factored() -> int:
        _, upper, _ = scipy.linalg.qr(dense.T, mode="economic", pivoting=True)
        diagonal = abs(upper.diagonal())
        return int((diagonal > 1e-10 * diagonal[0]).sum())

    def built(matrix: sp.csr_array = small) -> ph.LinearEquality:
        return ph.LinearEquality(matrix, torch.zeros(matrix.shape[0], dtype=torch.float64), rank="reveal")

    theirs, ours = measured(factored, built)
    assert theirs.value == small.shape[0] - 1 == len(ours.value.system.redundancy.others)
    yield Comparison.of(f"divergence of {len(dense) ** 0.5:.0f} x {len(dense) ** 0.5:.0f}", "pivoted QR", theirs, ours)
    for size, allowed in {8: 1.0}.items() if quick else ALLOWED.items():
        matrix = divergence(size)
        (run,) = measured(partial(built, matrix))
        case = f"divergence of {size} x {size}, built; 'without' is the time allowed"
        yield Overhead(case, allowed, run.seconds, 1.0)
