"""Crossed hierarchies, swept axis by axis, against dense algebra and against the general factor."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard._util import jit
from probhard.forecasting import cross_temporal
from probhard.laws.covariance import Diagonal, Identity
from probhard.rows import crossed
from probhard.rows.crossed import CrossedFactor, split
from probhard.tangent import tangent_of

REGIONS = [[0, 1, 2], [3, 4], [5], [0, 1, 2, 3, 4, 5, 6, 7]]  # one region has a single member
PRODUCTS = [[0, 1], [2, 3, 4], [0, 1, 2, 3, 4]]
CHANNELS = [[0, 1, 2]]


def tree(groups):
    leaves = max(map(len, groups))
    rows = [np.isin(np.arange(leaves), group).astype(float) for group in groups]
    return np.vstack([*rows, np.eye(leaves)])


def summation(*axes, seed=0):
    """The crossing of trees: aggregates, then bottoms, each in random order."""
    grid = np.ones((1, 1))
    for axis in axes:
        grid = np.kron(grid, tree(axis))
    generator = np.random.default_rng(seed)
    leaves = [tree(axis).shape[1] for axis in axes]
    last = np.zeros((1,), dtype=bool) | True
    for axis, count in zip(axes, leaves):
        nodes = tree(axis).shape[0]
        last = np.kron(last, np.arange(nodes) >= nodes - count).astype(bool)
    bottom = np.flatnonzero(last)
    order = generator.permutation(len(bottom))
    upper = generator.permutation(np.flatnonzero(~last))
    return np.vstack([grid[upper], grid[bottom[order]]])[:, order]


CASES = {"two": (REGIONS, PRODUCTS), "three": (REGIONS, PRODUCTS, CHANNELS)}


def weights(hierarchy, kind):
    return torch.ones(hierarchy.variables, dtype=torch.float64) if kind == "equal" else hierarchy.sizes


def factor_of(hierarchy, weight):
    return tangent_of(hierarchy.system, Diagonal(weight)).factor


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_axes_are_found_in_any_order_of_the_nodes(case, seed):
    S = summation(*CASES[case], seed=seed)
    axes = split(sp.csr_array(S))
    assert axes is not None
    grid = np.kron(axes.small.toarray(), axes.large.toarray())
    ordered = S[axes.order]
    assert sorted(map(tuple, ordered.T)) == sorted(map(tuple, grid.T))  # equal up to the order of the bottoms
    assert len(ph.Hierarchy(S).system.crossing.axes) == len(CASES[case])


def test_places_by_months_cross():
    places = ph.Hierarchy(tree(REGIONS))
    for place, axes in ((places, 2), (ph.Hierarchy(summation(REGIONS, PRODUCTS)), 3)):
        months = cross_temporal(place, horizon=12, periods=[1, 3, 12])
        assert len(months.system.crossing.axes) == axes


def test_incomplete_crossings_have_no_axes():
    S = summation(REGIONS, PRODUCTS)
    counts = S.shape[0] - S.shape[1]
    assert split(sp.csr_array(tree(REGIONS))) is None
    for left_out in (3, counts - 1):  # an aggregate is missing
        assert ph.Hierarchy(np.delete(S, left_out, 0)).system.crossing is None
    keep = np.arange(S.shape[1]) != 7  # a product that one region does not sell
    rows = np.append(np.arange(counts), counts + np.flatnonzero(keep))
    assert ph.Hierarchy(S[rows][:, keep]).system.crossing is None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["equal", "sizes"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("compiled", [True, False])
def test_moments_are_those_of_dense_algebra(case, kind, dtype, compiled, monkeypatch):
    monkeypatch.setattr(jit, "AVAILABLE", compiled and jit.AVAILABLE)
    S = summation(*CASES[case])
    hierarchy = ph.Hierarchy(S)
    weight = weights(hierarchy, kind)
    inverse = np.diag(1 / weight.numpy())
    projector = torch.from_numpy(S @ np.linalg.solve(S.T @ inverse @ S, S.T @ inverse))
    generator = torch.Generator().manual_seed(1)
    z, s = torch.randn(2, 3, len(S), generator=generator), torch.rand(2, 3, len(S), generator=generator)
    tangent = tangent_of(
        hierarchy.system, Identity.like(z.to(dtype)) if kind == "equal" else Diagonal(weight.to(dtype))
    )
    assert isinstance(tangent.factor, CrossedFactor)
    mean, scale = tangent.moments(z.to(dtype), hierarchy.b, Diagonal(s.to(dtype)))
    assert mean.dtype == scale.dtype == dtype
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(mean.double(), z.double() @ projector.mT, **tolerance)
    torch.testing.assert_close(scale.double().square(), s.double() @ projector.square().mT, **tolerance)
    torch.testing.assert_close(
        tangent.variance(Diagonal(s.to(dtype))).double(), s.double() @ projector.square().mT, **tolerance
    )


def test_derivatives_of_first_and_second_order():
    hierarchy = ph.Hierarchy(summation(REGIONS, PRODUCTS))
    factor = factor_of(hierarchy, hierarchy.sizes)
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, hierarchy.variables, dtype=torch.float64, generator=generator, requires_grad=True)
    s = torch.rand(2, hierarchy.variables, dtype=torch.float64, generator=generator, requires_grad=True)
    zero = hierarchy.b

    def project(x):
        return factor.project(x, zero)[..., ::7]

    def scale(x):
        return factor.scale(x)[..., ::7]

    for function, point in ((project, z), (scale, s)):
        assert torch.autograd.gradcheck(function, point, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, point, fast_mode=True)
        assert torch.autograd.gradcheck(function, point, check_forward_ad=True, check_batched_grad=True, fast_mode=True)


def test_transforms_see_the_same_projection():
    hierarchy = ph.Hierarchy(summation(REGIONS, PRODUCTS))
    factor = factor_of(hierarchy, weights(hierarchy, "equal"))
    z = torch.randn(3, hierarchy.variables, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = factor.project(z, hierarchy.b)
    torch.testing.assert_close(torch.func.vmap(lambda x: factor.project(x, hierarchy.b))(z), expected)
    torch.testing.assert_close(torch.func.vmap(factor.scale)(z.square()), factor.scale(z.square()))


@pytest.mark.parametrize("case", ["weights", "values", "batch"])
def test_other_weights_and_right_hand_sides_use_the_general_factor(case):
    S = summation(REGIONS, PRODUCTS)
    generator = torch.Generator().manual_seed(4)
    count = len(S) - S.shape[1]
    rows = torch.from_numpy(np.hstack([np.eye(count), -S[:count]]))
    b = torch.zeros(count, dtype=torch.float64)
    weight = torch.ones(len(S), dtype=torch.float64)
    if case == "values":
        b = torch.randn(count, dtype=torch.float64, generator=generator)
    elif case == "weights":
        weight = 0.5 + torch.rand(len(S), dtype=torch.float64, generator=generator)
    else:
        weight = 0.5 + torch.rand(2, len(S), dtype=torch.float64, generator=generator)
    constraint = ph.LinearEquality(rows, b)
    assert constraint.system.crossing is not None
    tangent = tangent_of(constraint.system, Diagonal(weight))
    assert isinstance(tangent.factor, CrossedFactor) == (case == "values")
    z = torch.randn(2, len(S), dtype=torch.float64, generator=generator)
    gain = weight.unsqueeze(-1) * rows.mT @ torch.linalg.inv(rows * weight.unsqueeze(-2) @ rows.mT)
    expected = z - (gain @ (z @ rows.mT - b).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(tangent.project(z, b), expected, rtol=0, atol=1e-11)


def test_nodes_that_may_not_move_stay():
    hierarchy = ph.Hierarchy(summation(REGIONS, PRODUCTS), immutable=[0, 5])
    z = torch.randn(4, hierarchy.variables, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    value = ph.DPPL("orthogonal").project(z, hierarchy).value
    torch.testing.assert_close(value[:, [0, 5]], z[:, [0, 5]], rtol=0, atol=1e-12)
    assert float(hierarchy.violation(value).max()) < 1e-10


def test_a_crossing_that_disagrees_is_not_used(monkeypatch):
    hierarchy = ph.Hierarchy(summation(REGIONS, PRODUCTS))
    monkeypatch.setattr(crossed, "AGREE", -1.0)
    assert not isinstance(factor_of(hierarchy, hierarchy.sizes), CrossedFactor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_add_up(dtype):
    """Totals of 1e7 over bottoms of 1e1."""
    hierarchy = ph.Hierarchy(summation(REGIONS, PRODUCTS, CHANNELS))
    size = hierarchy.sizes.to(dtype) ** 3
    law = ph.DPPL("orthogonal")((10 * size, size), hierarchy)
    draws = law.sample((500,), torch.Generator().manual_seed(6))
    assert float(hierarchy.relative_violation(draws).max()) < (1e-12 if dtype == torch.float64 else 1e-6)
    assert float(hierarchy.relative_violation(law.mean).max()) < (1e-12 if dtype == torch.float64 else 1e-6)
