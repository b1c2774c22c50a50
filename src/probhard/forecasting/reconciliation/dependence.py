"""How the forecasts of different nodes depend on each other: from past errors, or from their spreads alone.

| covariance  | correlation C of the base law                                                       |
|-------------|-------------------------------------------------------------------------------------|
| errors      | the shrunk correlation of past one-step errors                                       |
| hierarchy   | factors along the hierarchy that explain the spreads of aggregates                   |
| independent | I                                                                                    |
| draws       | that of the given joint draws                                                        |

Spreads identify no joint law, but bound it: an aggregate is wider than the independent sum of its bottoms only if these
move together. ``hierarchy`` fits a bottom covariance with one factor per aggregate, which loads on its bottoms in
proportion to their deviations s,

    Sigma_b = diag(v s^2) + sum_a c_a s_a s_a^T,      v, c >= 0,      diag(S Sigma_b S^T) ~ variances of all nodes,

by least squares of relative variances. What the factors leave of a node's variance is noise of its own.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from scipy.optimize import minimize

from probhard.constraints import Hierarchy
from probhard.laws import HierarchyFactors, HierarchyPattern

COVARIANCES = ("errors", "hierarchy", "independent")
EXACT = 30.0  # weight of the bottoms' variances: a joint law explains aggregates, it does not change bottoms
ITERATIONS = 1000


def along_hierarchy(stddev: np.ndarray, hierarchy: Hierarchy) -> HierarchyFactors:
    """Fit a correlation to the deviations of all nodes.

    Args:
        stddev: Deviations, (H, n), above 0.
        hierarchy: The sums.

    Returns:
        C with unit diagonal, (n,), the same for all steps.
    """
    summation, aggregates = hierarchy.summation, hierarchy.aggregates
    size = np.sqrt(np.square(stddev).mean(0))  # (n,)
    bottom = size[aggregates:]
    pattern = HierarchyPattern(summation)
    members = sp.csr_array((abs(summation) > 0).astype(np.float64))
    columns = members[np.flatnonzero(np.diff(summation.indptr) > 1)]  # the pattern's factors, (k, m)
    loads = sp.csr_array(summation @ sp.diags_array(bottom) @ columns.T)  # sums of s over node and factor, (n, k)
    own = sp.csr_array(summation.power(2) @ sp.diags_array(bottom**2))
    scale = np.where(np.arange(len(size)) < aggregates, 1.0, EXACT)
    matrix = sp.csr_array(sp.diags_array(scale / size**2) @ sp.hstack([own, loads.power(2)]))

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        gap = matrix @ x - scale
        return float(gap @ gap) / 2, matrix.T @ gap

    bottoms, factors = len(bottom), columns.shape[0]
    start = np.concatenate([np.full(bottoms, 0.5), np.full(factors, 0.5 / max(1, factors))])
    limits = [(0.0, None)] * len(start)
    options = {"maxiter": ITERATIONS, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=limits, options=options).x
    strength = torch.from_numpy(np.sqrt(found[bottoms:]))
    loadings = strength[pattern.factor] * torch.from_numpy(bottom)[pattern.bottom]
    shared = HierarchyFactors(pattern, loadings, torch.zeros(len(size), dtype=torch.float64))
    variance = shared.factor_diagonal()
    total = torch.maximum(variance, torch.from_numpy(size**2))  # factors may exceed a variance by what the fit leaves
    return HierarchyFactors(pattern, loadings, (1 - variance / total).clamp(min=0), total.rsqrt())
