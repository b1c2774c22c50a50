"""The solver of last resort for polyhedra: flat sets and weights of many decades, against Clarabel."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch

from probhard.rows.dense import DenseRows
from probhard.solvers import least_distance
from probhard.solvers.quadratic import QuadraticProblem


def problem(seed: int, slack: float, decades: float = 0.0) -> QuadraticProblem:
    """Rows and bounds around a known point; with slack 0 some bounds touch it."""
    random = np.random.default_rng(seed)
    n, q = 6, 2
    point, rows = random.normal(size=n), random.normal(size=(q, n))
    lower, upper = (point + sign * slack * random.uniform(size=n) for sign in (-1, 1))
    weight = 10 ** random.uniform(-decades, decades, n)
    arrays = (rows @ point, point + 3 * random.normal(size=n), weight, weight, lower, upper)
    right, centre, weight, natural, lower, upper = (torch.from_numpy(x)[None] for x in arrays)
    return QuadraticProblem(DenseRows(torch.from_numpy(rows)), right, centre, weight, natural, lower, upper)


def clarabel(given: QuadraticProblem) -> np.ndarray:
    v = cp.Variable(given.centre.shape[-1])
    rows = given.core.dense().numpy()
    fields = (given.right, given.centre, given.weight, given.lower, given.upper)
    right, centre, weight, lower, upper = (x[0].numpy() for x in fields)
    cost = cp.sum_squares(cp.multiply(weight**-0.5, v - centre))
    terms = [rows @ v == right, v >= lower, v <= upper]
    cp.Problem(cp.Minimize(cost), terms).solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return v.value


@pytest.mark.parametrize("seed", range(8))
def test_nearest_points_are_those_of_clarabel(seed):
    given = problem(seed, slack=1.0, decades=1.0)
    faces = least_distance.solve(given)
    assert bool(faces.done.all())
    np.testing.assert_allclose(faces.value[0].numpy(), clarabel(given), atol=1e-6)
    free = faces.side[0] == 0
    assert bool(((faces.value - given.lower)[0] > 0)[free].all())


@pytest.mark.parametrize("seed", range(8))
def test_flat_sets_have_their_point(seed):
    given = problem(seed, slack=0.0, decades=4.0)
    faces = least_distance.solve(given)
    assert bool(faces.done.all())
    torch.testing.assert_close(faces.value, given.lower, atol=1e-12, rtol=1e-12)
    assert bool((faces.side != 0).all())


def test_an_empty_set_is_not_done():
    given = problem(0, slack=1.0)
    empty = QuadraticProblem(given.core, given.right + 1e3, *(getattr(given, x) for x in FIELDS))
    assert not bool(least_distance.solve(empty).done.any())


FIELDS = ("centre", "weight", "natural", "lower", "upper")
