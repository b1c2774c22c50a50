"""Coherent, and coherent and non-negative, point forecasts against hierarchicalforecast in the same structural weights.

Tourism-L (555 series, 36 steps) by MinTrace, dense and sparse, and an M5-shaped crossed hierarchy (42,840 series,
30,490 of them bottoms, 12 levels, 28 steps) by MinTraceSparse. With non-negativity the peer clips its base forecasts
first. Its objective is then not minimal; the notes say by how much it is larger.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from hierarchicalforecast.methods import MinTrace, MinTraceSparse
from torch import Tensor

import probhard as ph
from benchmarks.hierarchies import tourism_large
from benchmarks.timing import Comparison, measured, worst


def m5(items: int = 3049) -> sp.csr_array:
    """The summation matrix of items x stores, with the twelve levels of M5."""
    department = np.sort(np.arange(items) % 7)
    category, state = np.array([0, 0, 1, 1, 2, 2, 2]), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    i, s = (x.ravel() for x in np.meshgrid(np.arange(items), np.arange(10), indexing="ij"))
    d, place = department[i], state[s]
    c = category[d]
    keys = [0 * i, place, s, c, d, place * 3 + c, place * 7 + d, s * 3 + c, s * 7 + d, i, i * 3 + place]
    blocks = []
    for key in keys:
        _, group = np.unique(key, return_inverse=True)
        blocks.append(sp.csr_array((np.ones(len(i)), (group, np.arange(len(i)))), shape=(group.max() + 1, len(i))))
    return sp.csr_array(sp.vstack([*blocks, sp.eye_array(len(i))]))


def counts(summing: Any, steps: int) -> np.ndarray:
    """Base forecasts (series, steps) of intermittent counts, incoherent and partly negative."""
    rng = np.random.default_rng(0)
    shape = (summing.shape[1], steps)
    true = summing @ (rng.gamma(0.5, 1.0, shape) * rng.binomial(1, 0.6, shape))
    return true + 0.7 * rng.normal(size=true.shape) * np.sqrt(np.maximum(true, 0.3))


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare in float64."""
    tourism = sp.csr_array(tourism_large().summation)
    yield from _compared("Tourism-L", tourism, MinTrace, 36, (None, None))
    yield from _compared("Tourism-L", tourism, MinTraceSparse, 36, (None, None))
    items, steps = (20, 2) if quick else (3049, 28)
    yield from _compared("M5", m5(items), MinTraceSparse, steps, (1, 10))


def _compared(
    name: str, summing: sp.csr_array, peer: type, steps: int, goals: tuple[float | None, float | None]
) -> Iterator[Comparison]:
    base = counts(summing, steps)
    weight = torch.from_numpy(np.asarray(summing.sum(1)).ravel())
    hierarchy = ph.Hierarchy(summing)
    points = torch.from_numpy(base.T.copy())
    law = ph.LocationScale(points, ph.Diagonal(weight))
    matrix = sp.csr_matrix(summing) if peer is MinTraceSparse else summing.toarray()
    for nonnegative, goal in zip((False, True), goals):
        constraint = hierarchy & ph.NonNegative() if nonnegative else hierarchy
        method = peer(method="wls_struct", nonnegative=nonnegative, num_threads=torch.get_num_threads())

        def theirs(method: Any = method) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mean = method.fit_predict(S=matrix, y_hat=base)["mean"]
            return torch.from_numpy(np.asarray(mean).T.copy())

        def ours(constraint: ph.Constraint = constraint) -> Tensor:
            return ph.DPPL().project(points, constraint, law).value

        runs = measured(theirs, ours)
        objective = [float(((run.value - points) ** 2 / weight).sum()) / 2 for run in runs]
        what = "coherent, non-negative" if nonnegative else "coherent"
        more = f"Objective {objective[1]:,.1f}; the peer's is {objective[0] / objective[1] - 1:.2%} larger."
        case = f"{name}, {steps} steps, {what}"
        judge = partial(worst, constraint)
        yield Comparison.of(case, peer.__name__, runs[0], runs[1], judge, goal=goal, explanation=more)
