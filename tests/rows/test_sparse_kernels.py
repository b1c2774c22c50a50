"""Compiled kernels of sparse rows against dense algebra and against torch."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import probhard as ph
from probhard._util import jit
from probhard.rows._kernels import sparse as kernels
from probhard.rows._kernels.lanes import LANES
from probhard.rows.maps import SparseMap
from probhard.rows.sparse import KernelFactor, SparseFactor, SparseRows
from registry import binary_tree, crossed, rand, randn

needs_numba = pytest.mark.skipif(not jit.AVAILABLE, reason="numba is not installed, so there are no kernels")


def banded() -> sp.csr_array:
    """Signed rows of different lengths, some with distant entries, so that fill and pivots of all degrees occur."""
    generator = np.random.default_rng(0)
    matrix = sp.lil_array((60, 150))
    for row in range(60):
        columns = np.unique(np.concatenate([2 * row + np.arange(4), generator.integers(0, 150, size=row % 3)]))
        matrix[[row] * len(columns), columns] = generator.normal(size=len(columns)) + 2
    return sp.csr_array(matrix)


def coherent() -> sp.csr_array:
    S = crossed(4, 3)[:-48]
    return sp.csr_array(np.hstack([np.eye(len(S)), -S]))


STRUCTURES = {"banded": banded, "crossed": coherent}


@pytest.fixture(params=list(STRUCTURES))
def structure(request):
    return SparseRows(STRUCTURES[request.param]())


def dense_moments(A, z, w, b):
    inverse = torch.linalg.inv(A @ torch.diag_embed(w) @ A.mT)
    multiplier = (inverse @ (z @ A.mT - b).unsqueeze(-1)).squeeze(-1)
    variance = w - w.square() * torch.einsum("qi,...qr,ri->...i", A, inverse, A)
    return z - w * (multiplier @ A), variance.sqrt()


def leaf(x):
    return x.clone().requires_grad_()


# ------------------------------------------------------------------------------------------- against dense algebra


@needs_numba
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 16), (LANES + 1,), (3, LANES)])
@pytest.mark.parametrize("shared", [True, False])
def test_moments_and_their_gradients(structure, batch, shared):
    n, q = structure.variables, structure.row_count
    z, w = leaf(randn(*batch, n)), leaf(rand(*batch, n))
    b = leaf(randn(q) if shared else randn(*batch, q))
    factor = structure.factor(w)
    assert isinstance(factor, KernelFactor)
    result, expected = factor.moments(z, b), dense_moments(structure.dense(), z, w, b)
    pull = [randn(*batch, n), randn(*batch, n)]
    gradients = torch.autograd.grad(result, (z, w, b), pull)
    for a, c in zip((*result, *gradients), (*expected, *torch.autograd.grad(expected, (z, w, b), pull))):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-10)


@needs_numba
def test_pivots_are_those_of_the_permuted_matrix(structure):
    w = rand(7, structure.variables)
    columns = structure.plan.columns
    order = columns.row[columns.start[:-1]]
    assert sorted(order) == list(range(structure.row_count))
    A = structure.dense().numpy()[order]
    root = np.linalg.cholesky((A * w.numpy()[:, None]) @ A.T)
    np.testing.assert_allclose(structure.factor(w).pivots(), np.einsum("bii->bi", root) ** 2, rtol=1e-10)


@needs_numba
def test_inverse_and_its_derivative_on_the_pattern(structure):
    """Z and Z G Z at every entry of the pattern, for a G that is independent of W."""
    tables, columns = structure.kernel_tables, structure.plan.columns
    w, g = rand(4, structure.variables), randn(4, structure.variables)
    A = structure.dense()
    Z = torch.linalg.inv(A @ torch.diag_embed(w) @ A.mT)
    N = Z @ A @ torch.diag_embed(g) @ A.mT @ Z
    column = np.repeat(columns.row[columns.start[:-1]], np.diff(columns.start))

    factor, _ = kernels.factorise(tables, w.numpy(), 4)
    inverse, slope = np.empty_like(factor[0]), np.empty_like(factor[0])
    kernels._invert(tables, factor[0], inverse)
    kernels._assemble(tables, np.ascontiguousarray(g.numpy().T), slope)
    kernels._differentiate(tables, factor[0], inverse, slope, np.empty((structure.row_count, 4)))
    np.testing.assert_allclose(inverse.T, Z.numpy()[:, columns.row, column], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(slope.T, N.numpy()[:, columns.row, column], rtol=1e-8, atol=1e-9)


@needs_numba
@pytest.mark.parametrize(
    ("weights", "points"), [((), (40,)), ((), ()), ((6,), (6,)), ((6,), (5, 6)), ((2, 3), (5, 2, 3)), ((6, 1), (6, 4))]
)
def test_solve_and_its_gradients(structure, weights, points):
    """Samples over a batch, samples over one weight, and shapes that broadcast in the middle."""
    w, r = leaf(rand(*weights, structure.variables)), leaf(randn(*points, structure.row_count))
    A = structure.dense()
    result = structure.factor(w).solve(r)
    expected = torch.linalg.solve(A @ torch.diag_embed(w) @ A.mT, r.unsqueeze(-1)).squeeze(-1)
    pull = randn(*points, structure.row_count)
    for a, c in zip(
        (result, *torch.autograd.grad(result, (r, w), pull)), (expected, *torch.autograd.grad(expected, (r, w), pull))
    ):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------------------ other derivatives


def layer_moments(mean, stddev, constraint):
    projected = ph.DPPL()((mean, stddev), constraint)
    return projected.mean, projected.scale


@needs_numba
def test_first_and_second_derivatives_of_the_layer():
    constraint = ph.Hierarchy(crossed(4, 3))
    n = constraint.variables
    inputs = leaf(randn(n)), leaf(rand(n))
    arguments = {"eps": 1e-6, "atol": 1e-5, "fast_mode": True}
    assert gradcheck(lambda m, s: layer_moments(m, s, constraint), inputs, **arguments)
    assert gradgradcheck(lambda m, s: layer_moments(m, s, constraint), inputs, **arguments)


@needs_numba
def test_batched_cotangents_and_forward_mode(structure):
    """Torch serves the cases without kernels, with the same numbers."""
    n = structure.variables
    z, w, b = leaf(randn(3, n)), leaf(rand(3, n)), randn(structure.row_count)
    outputs = structure.factor(w).moments(z, b)
    pulls = [randn(2, 3, n), randn(2, 3, n)]
    gradients = torch.autograd.grad(outputs, (z, w), pulls, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        one = torch.autograd.grad(outputs, (z, w), [pull[i] for pull in pulls], retain_graph=True)
        for a, c in zip(gradients, one):
            torch.testing.assert_close(a[i], c, rtol=1e-9, atol=1e-10)

    directions = randn(3, n), randn(3, n)
    with forward_ad.dual_level():
        dual_z, dual_w = (forward_ad.make_dual(x.detach(), d) for x, d in zip((z, w), directions))
        slopes = [forward_ad.unpack_dual(x).tangent for x in structure.factor(dual_w).moments(dual_z, b)]
    forward = sum((slope * pull[0]).sum() for slope, pull in zip(slopes, pulls))
    reverse = sum((gradients[i][0] * directions[i]).sum() for i in range(2))
    torch.testing.assert_close(forward, reverse, rtol=1e-9, atol=1e-10)


@needs_numba
def test_certain_variables_stay_and_have_no_gradient(structure):
    n = structure.variables
    w = rand(5, n)
    w[:, 3] = 0
    z, w = leaf(randn(5, n)), leaf(w)
    mean, scale = structure.factor(w).moments(z, randn(structure.row_count))
    assert torch.equal(mean[:, 3], z[:, 3])
    assert scale[:, 3].tolist() == [0.0] * 5
    (gradient,) = torch.autograd.grad(scale.sum(), w)
    assert bool(gradient.isfinite().all())


# ----------------------------------------------------------------------------------------------- the choice of code


def test_without_numba_torch_gives_the_same_numbers(structure, monkeypatch):
    n = structure.variables
    z, w, b = leaf(randn(5, n)), leaf(rand(5, n)), randn(structure.row_count)
    expected = dense_moments(structure.dense(), z, w, b)
    monkeypatch.setattr(jit, "AVAILABLE", False)
    factor = structure.factor(w)
    assert isinstance(factor, SparseFactor)
    result = factor.moments(z, b)
    pull = [randn(5, n), randn(5, n)]
    for a, c in zip(
        (*result, *torch.autograd.grad(result, (z, w), pull)), (*expected, *torch.autograd.grad(expected, (z, w), pull))
    ):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-10)


@needs_numba
def test_single_precision_is_solved_in_double():
    constraint = ph.Hierarchy(crossed(4, 3))
    mean, stddev = randn(4, constraint.variables), rand(4, constraint.variables) * 10 ** (4 * rand(4, 1))
    low = [leaf(x.float()) for x in (mean, stddev)]
    high = [leaf(x.detach().double()) for x in low]
    result, expected = layer_moments(*low, constraint.to(torch.float32)), layer_moments(*high, constraint)
    assert {x.dtype for x in result} == {torch.float32}
    gradients = torch.autograd.grad(sum(x.sum() for x in result), low)
    for a, c in zip((*result, *gradients), (*expected, *torch.autograd.grad(sum(x.sum() for x in expected), high))):
        torch.testing.assert_close(a, c.float(), rtol=1e-5, atol=1e-5 * float(c.detach().abs().max()))


@needs_numba
def test_tourism_large(hierarchical_data, monkeypatch):
    """A whole batch of the crossed data set, by the kernels and by torch."""
    hierarchy = ph.Hierarchy(pd.read_csv(hierarchical_data / "tourism_large" / "agg_mat.csv", index_col=0))
    n = hierarchy.variables
    inputs = leaf(randn(2, 20, n)), leaf(rand(2, 20, n))
    pull = [randn(2, 20, n), randn(2, 20, n)]
    result = layer_moments(*inputs, hierarchy)
    gradients = torch.autograd.grad(result, inputs, pull)
    monkeypatch.setattr(jit, "AVAILABLE", False)
    expected = layer_moments(*inputs, hierarchy)
    for a, c in zip((*result, *gradients), (*expected, *torch.autograd.grad(expected, inputs, pull))):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-10)
    assert float(hierarchy.relative_violation(result[0].detach()).max()) < 1e-12


# -------------------------------------------------------------------------------------------------- compressed rows


@pytest.mark.parametrize("batch", [(), (200,), (10, 30)])
@pytest.mark.parametrize("product", ["apply", "transpose", "magnitude"])
def test_products_and_their_gradients(batch, product):
    matrix = banded()
    entries, dense = SparseMap(matrix), torch.from_numpy(matrix.toarray())
    x = leaf(randn(*batch, 60 if product == "transpose" else 150))
    result = getattr(entries, product)(x)
    if product == "magnitude":
        expected = x.abs() @ dense.abs().mT
    else:
        expected = x @ (dense if product == "transpose" else dense.mT)
    pull = leaf(randn(*result.shape))
    pairs = [(result, expected)]
    for y in (result, expected):
        (gradient,) = torch.autograd.grad(y, x, pull, create_graph=True)
        pairs.append((gradient, torch.autograd.grad(gradient, pull, torch.ones_like(gradient))[0]))
    torch.testing.assert_close(*pairs[0], rtol=1e-12, atol=1e-12)
    for a, c in zip(pairs[1], pairs[2]):
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_other_values_leave_no_trace_of_the_first():
    """Cached products of one matrix are not used for another of its pattern."""
    structure = SparseRows(banded())
    x = randn(300, structure.variables)
    structure.map.apply(x), structure.map.magnitude(x)
    values = rand(structure.map.value.shape[0])
    other = structure.with_values(values)
    dense = torch.zeros(structure.row_count, structure.variables)
    dense[structure.map.row, structure.map.column] = values
    torch.testing.assert_close(other.map.apply(x), x @ dense.mT)
    torch.testing.assert_close(other.map.magnitude(x), x.abs() @ dense.abs().mT)
    w, r = rand(3, structure.variables), randn(3, structure.row_count)
    expected = torch.linalg.solve(dense @ torch.diag_embed(w) @ dense.mT, r.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(other.factor(w).solve(r), expected, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------- many points, one fixed weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [False, True])
def test_many_points_of_a_tree_under_a_fixed_metric(dtype, budget):
    """For many points, one product with the squared entries of P agrees with the sweeps for few points."""
    constraint = ph.Hierarchy(binary_tree(3)).to(dtype)
    constraint = constraint.fix([3], [2.0]) if budget else constraint
    n, layer = constraint.variables, ph.DPPL("orthogonal")
    inputs = leaf(randn(2, 40, n).to(dtype)), leaf((rand(2, 40, n) * 10 ** (3 * rand(2, 40, n))).to(dtype))
    many = layer(inputs, constraint)
    few = [layer((inputs[0][0, i], inputs[1][0, i]), constraint) for i in range(3)]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(many.scale[0, :3], torch.stack([one.scale for one in few]), **tolerance)
    P = layer.freeze(constraint.to(torch.float64)).matrix
    variance = inputs[1].double().square()
    if budget:
        assert many.scale[..., 3].tolist() == [[0.0] * 40] * 2
        variance = variance.index_fill(-1, torch.tensor([3]), 0.0)
    expected = (variance @ P.square().mT).clamp(min=1e-300).sqrt()
    torch.testing.assert_close(many.scale, expected.to(dtype), **tolerance)
    pull = randn(2, 40, n)
    for a, c in zip(
        torch.autograd.grad(many.scale, inputs[1], pull.to(dtype)), torch.autograd.grad(expected, inputs[1], pull)
    ):
        torch.testing.assert_close(a, c, **tolerance)
