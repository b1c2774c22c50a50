"""Correlated weights with many rows: conjugate gradients against dense algebra, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from probhard._util.conjugate_gradients import conjugate_gradients, implicit_solve
from probhard.rows.maps import SparseMap
from probhard.tangent import dispatch
from probhard.tangent.iterative import IterativeTangent
from registry import covariance, crossed, dense_projection, rand, randn

KINDS = ("spectral", "along a hierarchy")


def test_conjugate_gradients_solve_every_element():
    root = randn(4, 6, 6)
    matrix, right = root @ root.mT + torch.eye(6, dtype=torch.float64), randn(3, 4, 6)
    right[0, 1] = 0.0
    found = conjugate_gradients(lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1), right)
    truth = torch.linalg.solve(matrix, right.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def test_gradients_of_a_solution_are_those_of_the_system():
    root, right = randn(5, 5).requires_grad_(), randn(2, 5).requires_grad_()

    def solved(root, right):
        matrix = root @ root.mT + torch.eye(5, dtype=torch.float64)

        def product(x):
            return (matrix @ x.unsqueeze(-1)).squeeze(-1)

        return implicit_solve(product, right, lambda r: conjugate_gradients(product, r))

    assert torch.autograd.gradcheck(solved, (root, right))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_the_projection_is_that_of_dense_algebra(kind, batch, monkeypatch):
    monkeypatch.setattr(dispatch, "DENSE_NUMBERS", 0)
    constraint = ph.Hierarchy(crossed(2, 3))
    n = constraint.variables
    loc, cov = 2 * randn(*batch, n), covariance(kind, *batch, n)
    projected = ph.DPPL()(ph.LocationScale(loc, cov), constraint)
    assert isinstance(projected.tangent, IterativeTangent)
    mean, projector = dense_projection(constraint, cov.dense(), loc)
    truth = projector @ cov.dense() @ projector.mT
    torch.testing.assert_close(projected.mean, mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(projected.variance, truth.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-10)
    rows = torch.cat([torch.ones(1, n), torch.eye(n)[:2]]).double()
    variance = projected.cov.functional_variance(SparseMap(rows.numpy()))
    torch.testing.assert_close(variance, (rows @ truth @ rows.mT).diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-10)
    assert constraint.relative_violation(projected.sample((4,))).max() < 1e-12


def test_gradients_reach_the_spectrum(monkeypatch):
    monkeypatch.setattr(dispatch, "DENSE_NUMBERS", 0)
    constraint = ph.LinearEquality(torch.eye(6)[1:] - 2 * torch.eye(6)[:-1], torch.zeros(5))
    inputs = [randn(6), rand(6), rand(6), rand(6)]

    def moments(loc, power, scale, own):
        law = ph.LocationScale(loc, ph.Spectral((6,), power, scale, own, "zero"))
        projected = ph.DPPL()(law, constraint)
        return projected.mean, projected.variance

    assert torch.autograd.gradcheck(moments, [x.requires_grad_() for x in inputs], atol=1e-6)


def test_factors_along_the_solved_hierarchy_are_not_changed():
    summing = np.vstack([np.ones((1, 4)), np.kron(np.eye(2), np.ones((1, 2))), np.eye(4)])
    constraint, pattern = ph.Hierarchy(summing), ph.HierarchyPattern(summing)
    cov = ph.HierarchyFactors(pattern, randn(3, pattern.loads), rand(3, 7))
    projected = ph.DPPL()(ph.LocationScale(randn(3, 7), cov), constraint)
    assert type(projected.tangent).__name__ == "CoherentTangent"
    shared = cov.factor_apply(randn(3, pattern.factors))
    torch.testing.assert_close(projected.tangent.apply(shared), shared)
    other = ph.DPPL()(ph.LocationScale(randn(3, 7), cov), constraint.fix([0], [5.0]))
    assert type(other.tangent).__name__ == "DenseTangent"
