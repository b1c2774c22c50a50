"""Lanes: a few batch elements side by side in memory, so that each step of a pattern is one vector instruction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probhard._util.jit import compiled

LANES = 32
TINY = 2.0**-1022

Index = NDArray[np.int64]
Numbers = NDArray[np.floating]  # of the caller's dtype


@compiled
def load(source: Numbers, first: int, out: Numbers) -> None:
    """Rows from ``first`` on of the source (batch, k) as lanes (k, lanes); lanes beyond the batch repeat its last."""
    for lane in range(out.shape[1]):
        at = min(first + lane, source.shape[0] - 1)
        for i in range(out.shape[0]):
            out[i, lane] = source[at, i]


@compiled
def store(lanes: Numbers, first: int, out: Numbers) -> None:
    """The inverse of ``load``, as far as the batch goes."""
    for lane in range(min(lanes.shape[1], out.shape[0] - first)):
        for i in range(out.shape[1]):
            out[first + lane, i] = lanes[i, lane]


@compiled
def product(row: Index, column: Index, value: Numbers, x: Numbers, out: Numbers) -> None:
    """Add ``A x`` to ``out``; with rows and columns exchanged, ``A^T x``."""
    for t in range(len(value)):
        i, j, a = row[t], column[t], value[t]
        for k in range(out.shape[1]):
            out[i, k] += x[j, k] * a
