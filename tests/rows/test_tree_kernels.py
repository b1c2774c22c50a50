"""Compiled sweeps of trees against dense algebra, finite differences and the sweeps in torch."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.autograd import gradcheck, gradgradcheck

import probhard as ph
from probhard._util import jit
from probhard.rows._kernels.lanes import LANES
from probhard.rows.tree import Tree
from registry import rand, randn

pytestmark = pytest.mark.skipif(not jit.AVAILABLE, reason="numba is not installed, so there are no kernels")

BATCHES = [(), (1,), (5,), (2, 16), (LANES + 1,), (3, LANES)]


def sums() -> sp.csr_array:
    """Two trees of signed rows of different lengths; the last variable is in no row."""
    rows = [{0: 1, 1: -1, 2: -1}, {1: 1, 3: -2, 4: -0.5, 5: -1}, {2: 3, 6: 1}, {5: 1, 7: 1, 8: -1}, {9: 1, 10: 2}]
    matrix = sp.lil_array((len(rows), 12))
    for row, entries in enumerate(rows):
        for variable, value in entries.items():
            matrix[row, variable] = value
    return sp.csr_array(matrix)


@pytest.fixture
def tree():
    forest = Tree.find(sums())
    assert forest is not None
    assert len(forest.levels) == 3
    return forest


def dense(A, z, w, s, b):
    """Projected points and roots of the projected variances by explicit inverses."""
    weight = torch.diag_embed(w)
    inverse = torch.linalg.inv(A @ weight @ A.mT)
    P = torch.eye(A.shape[-1]) - weight @ A.mT @ inverse @ A
    shift = (weight @ A.mT @ inverse @ b.unsqueeze(-1)).squeeze(-1)
    return (P @ z.unsqueeze(-1)).squeeze(-1) + shift, (P.square() @ s.unsqueeze(-1)).squeeze(-1).sqrt()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_moments_and_gradients_are_those_of_dense_algebra(tree, batch, shared, fixed):
    A = torch.from_numpy(sums().toarray())
    z, s = randn(*batch, 12).requires_grad_(), (rand(*batch, 12) + 0.1).requires_grad_()
    b = randn(*(() if shared else batch), 5).requires_grad_()
    w = rand(12) + 0.1 if fixed else s
    result, expected = tree.factor(w).moments(z, b, s if fixed else None), dense(A, z, w, s, b)
    slopes = [randn(*batch, 12), randn(*batch, 12)]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(pair, (z, s, b), slopes) for pair in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fixed", [True, False])
def test_first_and_second_derivatives_are_those_of_finite_differences(tree, fixed):
    w = rand(12) + 0.3

    def moments(z, s, b):
        return tree.factor(w if fixed else s).moments(z, b, s if fixed else None)

    inputs = (randn(3, 12), rand(3, 12) + 0.3, randn(5))
    inputs = tuple(x.requires_grad_() for x in inputs)
    assert gradcheck(moments, inputs)
    assert gradgradcheck(moments, inputs)


def test_a_fixed_weight_projects_draws_and_pulls_gradients_back(tree):
    A = torch.from_numpy(sums().toarray())
    w, z, b = rand(12) + 0.1, randn(7, 3, 12).requires_grad_(), randn(3, 5).requires_grad_()
    result, expected = tree.factor(w).project(z, b), dense(A, z, w, w, b)[0]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)
    slope = randn(7, 3, 12)
    gradients = [torch.autograd.grad(x, (z, b), slope) for x in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fixed", [True, False])
def test_variables_of_no_variance_keep_their_values_and_finite_gradients(tree, fixed):
    z, s = randn(4, 12).requires_grad_(), rand(4, 12) + 0.1
    still = [0, 5, 9]
    s[:, still] = 0.0
    s.requires_grad_()
    weight = torch.ones(12).index_fill(0, torch.tensor(still), 0.0)
    point, scale = tree.factor(weight if fixed else s).moments(z, torch.zeros(5), s if fixed else None)
    torch.testing.assert_close(point[:, still], z[:, still])
    assert float((point.detach() @ torch.from_numpy(sums().toarray()).mT).abs().max()) < 1e-14
    gradients = torch.autograd.grad((point, scale), (z, s), (randn(4, 12), randn(4, 12)))
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_sums_hold_whatever_the_range_of_the_weights():
    hierarchy = ph.Hierarchy(np.vstack([np.ones((1, 6)), np.kron(np.eye(2), np.ones((1, 3))), np.eye(6)]))
    stddev = 10.0 ** (12 * rand(200, 9) - 6)
    projected = ph.DPPL("oblique")((1e3 * randn(200, 9), stddev), hierarchy)
    assert float(hierarchy.relative_violation(projected.mean).max()) < 1e-14


def test_float32_points_are_projected_as_float64_ones_and_rounded(tree):
    z, s, b = randn(40, 12).float(), (rand(40, 12) + 0.1).float(), torch.zeros(5)
    single = tree.factor(s).moments(z, b.float())
    double = tree.plain_moments(z.double(), s.double(), b)
    assert single[0].dtype == torch.float32
    torch.testing.assert_close([x.double() for x in single], list(double), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["oblique", "fixed", "points"])
def test_batched_gradients_are_those_of_one_after_the_other(tree, kind):
    z, s, w, b = randn(3, 12).requires_grad_(), (rand(3, 12) + 0.1).requires_grad_(), rand(12) + 0.1, randn(5)
    if kind == "points":
        result, inputs = tree.factor(w).project(z, b), (z,)
    else:
        own = kind == "oblique"
        result, inputs = torch.cat(tree.factor(s if own else w).moments(z, b, None if own else s)), (z, s)
    slopes = randn(4, *result.shape)
    together = torch.autograd.grad(result, inputs, slopes, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(result, inputs, slope, retain_graph=True) for slope in slopes]
    torch.testing.assert_close(together, tuple(torch.stack(parts) for parts in zip(*apart)), rtol=1e-11, atol=1e-12)
