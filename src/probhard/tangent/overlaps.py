"""Variances of functionals under a diagonal weight and rows without shared variables, by the pairs that overlap.

For ``W = C = D`` and disjoint rows, ``A D A^T`` is diagonal with entries m_a, and

    diag(F P D P^T F^T)_f = sum_i F_fi^2 d_i - sum_a g_fa^2 / m_a,      g_fa = sum_i F_fi A_ai d_i.

Only pairs (f, a) with a common variable have g_fa != 0. All g are one sparse product with d, which costs as much as F.
What is left below the rounding of the terms is exactly 0: these functionals are fixed by the rows.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import divide
from probhard.rows.disjoint import DisjointFactor, DisjointRows
from probhard.rows.maps import SparseMap
from probhard.tangent.few_rows import ROUNDING


def serves(core: object, rows: object) -> bool:
    """Whether rows of A and functionals F are such that pairs can be listed: constant, A disjoint, F sparse."""
    return isinstance(core, DisjointRows) and core.constant and isinstance(rows, SparseMap) and rows.value.dim() == 1


def overlap_variance(factor: DisjointFactor, rows: SparseMap) -> Tensor:
    """``diag(F P D P^T F^T)``, (*batch, k).

    Args:
        factor: Of the rows for the weight D, in float64.
        rows: F, (k, n).
    """
    core, d = factor.structure, factor.weight
    products, squares, row = _pairs(core, rows)
    total = rows.at(d).squared(d)
    shares = divide(products.at(d).apply(d).square(), factor.mass.index_select(-1, row.to(d.device)))
    lost = squares.at(d).apply(shares)
    variance = total - lost
    floor = ROUNDING[d.dtype] * (total + lost).detach()
    return torch.where(variance > floor, variance, 0.0)


def _pairs(core: DisjointRows, rows: SparseMap) -> tuple[SparseMap, SparseMap, Tensor]:
    """The map from d to all g_fa (pairs, n), the sums over the pairs of each f (k, pairs), and a of each pair."""
    coefficient = core.join(core.split_coefficient().expand(core.row_count, -1)) if core.shared else core.coefficient
    value = coefficient.detach().cpu().double().numpy()
    if core.group is None:
        group = np.repeat(np.arange(core.row_count), core.variables // core.row_count)
    else:
        group = core.group.cpu().numpy()
    f, i = rows.row.cpu().numpy(), rows.column.cpu().numpy()
    keys, pair = np.unique(f * core.row_count + group[i], return_inverse=True)
    entries = rows.value.detach().cpu().double().numpy() * value[i]
    products = sp.coo_array((entries, (pair, i)), shape=(len(keys), rows.variables))
    sums = sp.coo_array((np.ones(len(keys)), (keys // core.row_count, np.arange(len(keys)))), (rows.row_count, len(keys)))
    return SparseMap(products), SparseMap(sums), torch.from_numpy(keys % core.row_count)
