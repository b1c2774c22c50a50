"""Clarabel's nearest point, an oracle for convex cases of one point."""

from __future__ import annotations

import warnings

import cvxpy as cp
import numpy as np
import torch

from experiments.reliability.cases import Case
from probhard.metric import as_metric

NEAR = 1e-4  # relative tolerance of distances
FEASIBLE = 1e-7


def weight_of(made: Case) -> np.ndarray:
    """The weight W of a case of one point, (n, n)."""
    weight = as_metric(made.metric).weight(made.law.loc.double(), made.law.cov.to(torch.float64))
    return weight.dense().detach().numpy()


def nearest(made: Case, root: np.ndarray) -> np.ndarray | None:
    """Clarabel's nearest point under ``Q = root^T root``; None where it finds none that NumPy calls feasible."""
    z, scale = made.law.loc.double().numpy(), 10.0**made.recipe.size
    u = cp.Variable(len(z))  # in units of the scale: Clarabel's tolerances are absolute
    terms = [term for part in made.parts for term in part.terms(scale * u)]  # type: ignore[misc]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(root @ (u - z / scale))), terms)
    with warnings.catch_warnings(action="ignore"):
        try:
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
        except cp.SolverError:
            return None
    if problem.status != "optimal" or u.value is None:
        return None
    found = scale * u.value
    violation = made.violation(found)
    return found if np.isfinite(violation) and violation <= FEASIBLE else None


def farther(made: Case, ours: np.ndarray) -> bool | None:
    """Whether our point is farther than Clarabel's, beyond the tolerance of both; None if Clarabel finds none."""
    weight = weight_of(made)
    values, vectors = np.linalg.eigh(weight)
    if values[0] <= 1e-8 * values[-1] or values[-1] == 0:
        return None  # the metric has no root that Clarabel could use
    root = (vectors / np.sqrt(values / values[-1])) @ vectors.T
    theirs, z = nearest(made, root), made.law.loc.double().numpy()
    if theirs is None:
        return None
    size = np.linalg.norm(root @ z)
    own, other = (float(np.linalg.norm(root @ (u - z))) for u in (ours, theirs))
    return bool(own > other * (1 + NEAR) + 1e-6 * size)
