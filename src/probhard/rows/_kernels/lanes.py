"""Lanes: a few batch elements side by side in memory, so that each step is one vector instruction."""

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
    """Copy rows of ``source`` (batch, k), from ``first`` on, to lanes (k, lanes); past the batch, repeat its last."""
    for lane in range(out.shape[1]):
        at = min(first + lane, source.shape[0] - 1)
        for i in range(out.shape[0]):
            out[i, lane] = source[at, i]


@compiled
def store(lanes: Numbers, first: int, out: Numbers) -> None:
    """Copy lanes (k, lanes) to rows of ``out`` (batch, k), from ``first`` on; the inverse of ``load``."""
    for lane in range(min(lanes.shape[1], out.shape[0] - first)):
        for i in range(out.shape[1]):
            out[first + lane, i] = lanes[i, lane]


@compiled
def product(row: Index, column: Index, value: Numbers, x: Numbers, out: Numbers) -> None:
    """Add ``A x`` to ``out`` (q, lanes) for x (n, lanes); with rows and columns exchanged, ``A^T x``."""
    for t in range(len(value)):
        i, j, a = row[t], column[t], value[t]
        for k in range(out.shape[1]):
            out[i, k] += x[j, k] * a
