"""Scores of functionals against dense algebra, scoringrules and Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import scoringrules
import torch
from torch import distributions as td
from torch.autograd import gradcheck

import probhard as ph
from functional_cases import BATCH, FAMILIES, GRID, N, covariance, dense_rows, randn
from probhard._score.functional_crps import antithetic_crps
from probhard.errors import ParameterError, ShapeError
from registry import binary_tree

# --------------------------------------------------------------------------------------------- closed form

CRPS = {
    "normal": (ph.NORMAL, scoringrules.crps_normal),
    "laplace": (ph.LAPLACE, scoringrules.crps_laplace),
    "student-t": (ph.student_t(5.0), lambda y, loc, scale: scoringrules.crps_t(y, 5.0, loc, scale)),
}


@pytest.mark.parametrize("law", CRPS)
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_functionals_of_elliptical_laws(kind, law):
    family, oracle = CRPS[law]
    dist, y = ph.LocationScale(randn(BATCH, N), covariance(kind), family), randn(BATCH, N, seed=5)
    rows = dense_rows(GRID)
    scale = (rows @ dist.cov.dense() @ rows.T).diagonal(dim1=-2, dim2=-1).sqrt()
    expected = oracle(y @ rows.T, dist.loc @ rows.T, scale)
    forms = (GRID, rows, rows.to_sparse(), rows.to_sparse_csr(), rows.numpy(), sp.csr_array(rows.numpy()), GRID.rows(N))
    for functionals in forms:
        np.testing.assert_allclose(ph.crps(dist, y, functionals=functionals), expected, rtol=1e-12)
    assert ph.functional_rule(dist) == "closed form"


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
@pytest.mark.parametrize("constraint", ["conservation", "slices", "tree", "dense rows", "pins and mass"])
def test_functionals_of_projected_laws_equal_dense_algebra(constraint, kind, metric):
    part, n, family = {
        "conservation": lambda: (ph.Conservation(randn(N).exp(), randn(BATCH)), N, GRID),
        "slices": lambda: (ph.per_slice(ph.Conservation(randn(4).exp(), randn(BATCH, 3)), (3, 4)), N, GRID),
        "tree": lambda: (ph.Hierarchy(binary_tree(2)), 7, ph.Levels(binary_tree(2))),
        "dense rows": lambda: (ph.LinearEquality(randn(3, N), randn(3)), N, FAMILIES["directions"]),
        "pins and mass": lambda: (
            ph.Conservation(randn(N).exp(), 2.0) & ph.LinearEquality(torch.eye(N)[[0, 5]], [0.3, 0.1]),
            N,
            GRID + ph.Directions(np.eye(N)),
        ),
    }[constraint]()
    dist = ph.LocationScale(randn(BATCH, n), covariance(kind, n))
    projected = ph.DPPL(metric)(dist, part)
    S, zero = dist.cov.dense(), torch.zeros(BATCH, n)
    A = (part.residual(torch.eye(n)[:, None] + zero) - part.residual(zero))[:, 0].T
    W = S if metric == "oblique" else torch.eye(n).expand_as(S)
    P = torch.eye(n) - W @ A.T @ torch.linalg.solve(A @ W @ A.T, A.expand(BATCH, *A.shape))
    rows, y = dense_rows(family), randn(BATCH, n, seed=5)
    variance = (rows @ P @ S @ P.mT @ rows.T).diagonal(dim1=-2, dim2=-1)
    fixed = variance < 1e-13 * (rows**2 @ S.diagonal(dim1=-2, dim2=-1).mT).mT
    scale = torch.where(fixed, 0.0, variance.clamp(min=0)).sqrt()
    np.testing.assert_allclose(projected.functional(family.rows(n)).scale, scale, rtol=1e-8, atol=1e-7)
    score = ph.crps(projected, y, functionals=family)
    mean = projected.mean @ rows.T
    spread = scoringrules.crps_normal(y @ rows.T, mean, torch.where(fixed, 1.0, scale))
    expected = np.where(fixed, abs(y @ rows.T - mean), spread)
    np.testing.assert_allclose(score, expected, rtol=1e-7, atol=1e-7)
    assert ph.functional_rule(projected) == "closed form"
    assert ph.functional_rule(projected.as_location_scale()) == "closed form"


@pytest.mark.parametrize("kind", ["diagonal", "low rank"])
def test_levels_of_a_coherent_law_are_its_nodes(kind):
    S = binary_tree(3)
    law, y = ph.LocationScale(randn(BATCH, 15), covariance(kind, 15)), randn(BATCH, 15, seed=5)
    levels, projected = ph.Levels(S), ph.DPPL()(law, ph.Hierarchy(S))
    score = ph.crps(projected, y, functionals=levels)
    np.testing.assert_allclose(score, ph.crps(projected, y, functionals=levels.matrix), rtol=1e-9)
    scale = projected.scale
    assert torch.equal(levels.variables_of(projected), torch.arange(15))
    torch.testing.assert_close(projected.functional(levels.rows(15)).scale, scale, rtol=1e-9, atol=0)
    # Not so for a law on another hierarchy, on none, or one whose draws are not coherent.
    other = ph.DPPL()(law, ph.Hierarchy(np.vstack([np.ones(14), np.eye(14)])))
    kept = ph.DPPL(covariance="keep")(law, ph.Hierarchy(S))
    for incoherent in (law, other, kept):
        assert levels.variables_of(incoherent) is None
        expected = ph.crps(incoherent, y, functionals=levels.matrix)
        torch.testing.assert_close(ph.crps(incoherent, y, functionals=levels), expected)


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "only shared noise"])
def test_held_variables_and_noise_that_is_only_shared(kind, metric):
    """One row over three nodes, the second of which may not move."""
    shared = ph.LowRank(randn(BATCH, 3, 2, seed=2), torch.tensor([0.0, 0.5, 0.5]).expand(BATCH, 3))
    cov = shared if kind == "only shared noise" else covariance(kind, 3)
    part, family = ph.Hierarchy(binary_tree(1), immutable=[1]), ph.Directions(randn(4, 3, seed=3))
    projected = ph.DPPL(metric)(ph.LocationScale(randn(BATCH, 3), cov), part)
    S, A, free = cov.dense(), torch.tensor([[1.0, -1.0, -1.0]]), torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    W = free @ (S if metric == "oblique" else torch.eye(3).expand_as(S)) @ free
    P = torch.eye(3) - W @ A.T @ torch.linalg.solve(A @ W @ A.T, A.expand(BATCH, 1, 3))
    rows = dense_rows(family)
    expected = (rows @ P @ S @ P.mT @ rows.T).diagonal(dim1=-2, dim2=-1).sqrt()
    torch.testing.assert_close(projected.functional(family.rows(3)).scale, expected, rtol=1e-8, atol=1e-8)


def test_variances_of_functionals_follow_the_rows_of_each_constraint():
    """The parts of functionals are kept for one set of rows; other rows get parts of their own."""
    law = ph.LocationScale(torch.zeros(N), ph.Diagonal(randn(N, seed=1).exp()))
    rows, F = GRID.rows(N), dense_rows(GRID)
    for shape in ((3, 4), (4, 3), (3, 4), (1, 12)):
        constraint = ph.per_slice(ph.Conservation(torch.ones(shape[1]), 1.0), shape)
        A = torch.kron(torch.eye(shape[0]), torch.ones(1, shape[1]))
        S = torch.diag(law.variance)
        conditional = S - S @ A.T @ torch.linalg.solve(A @ S @ A.T, A @ S)
        expected = (F @ conditional @ F.T).diagonal().clamp(min=0).sqrt()
        scale = ph.DPPL()(law, constraint).functional(rows).scale
        torch.testing.assert_close(scale, expected, rtol=1e-9, atol=1e-7)
        assert scale[-1] == 0  # the total is fixed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["diagonal", "low rank"])
def test_a_conserved_total_scores_its_distance_and_gradients_are_finite(kind, dtype):
    cov = covariance(kind).to(dtype)
    loc = randn(BATCH, N).to(dtype).requires_grad_()
    mass, y = randn(BATCH, seed=4).to(dtype), randn(BATCH, N, seed=5).to(dtype)
    projected = ph.DPPL()(ph.LocationScale(loc, cov), ph.Conservation(torch.ones(N, dtype=dtype), mass))
    score = ph.crps(projected, y, functionals=ph.BlockMeans((N,), (5, "total")))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(score[:, -1], (y.mean(1) - mass / N).abs(), rtol=0, atol=tolerance)
    (gradient,) = torch.autograd.grad(score.sum(), loc)
    assert gradient.isfinite().all()
    projected = ph.DPPL()(ph.LocationScale(loc, cov), ph.Conservation(torch.ones(N, dtype=dtype), mass))
    (of_total,) = torch.autograd.grad(ph.crps(projected, y, functionals=torch.ones(1, N)).sum(), loc)
    torch.testing.assert_close(of_total, torch.zeros_like(of_total), rtol=0, atol=10 * tolerance)


def test_scores_do_not_cancel_far_from_zero_in_float32():
    dist = ph.LocationScale(randn(BATCH, N), covariance("low rank"))
    y = randn(BATCH, N, seed=5)
    far = ph.LocationScale((dist.loc + 2**16).float(), dist.cov.to(torch.float32))
    shifted = ph.LocationScale(far.loc.double(), dist.cov)
    target = (y + 2**16).float()
    exact = ph.crps(shifted, target.double(), functionals=torch.ones(1, N))
    np.testing.assert_allclose(ph.crps(far, target, functionals=torch.ones(1, N)), exact, rtol=1e-5)


@pytest.mark.parametrize("case", ["plain", "projected", "product", "bounds"])
def test_gradients(case):
    y, mass = randn(2, 6, seed=5), torch.ones(2)
    family = ph.LAPLACE.independent() if case == "product" else ph.NORMAL
    constraint = ph.Conservation(torch.ones(6), mass)

    def score(loc, factor, diagonal):
        cov = ph.Diagonal(diagonal.exp()) if case == "bounds" else ph.LowRank(factor, diagonal.exp())
        law = ph.LocationScale(loc, cov, family, validate_args=False)
        if case == "bounds":
            law = ph.DPPL("orthogonal", draws=8)(law, constraint & ph.NonNegative())
        if case == "projected":
            law = ph.DPPL()(law, constraint)
        return ph.crps(law, y, functionals=ph.BlockMeans((6,), (2, 4)))

    inputs = [randn(2, 6), randn(2, 6, 2, seed=1), randn(2, 6, seed=2)]
    if case == "bounds":  # far from the kinks of single draws
        inputs[0] = inputs[0] + 1
    assert gradcheck(score, [x.requires_grad_() for x in inputs], eps=1e-7, atol=1e-5)


def test_unobserved_variables_leave_functionals_out():
    loc = randn(BATCH, N).requires_grad_()
    dist = ph.LocationScale(loc, covariance("low rank"))
    y, mask = randn(BATCH, N, seed=5), torch.ones(BATCH, N, dtype=torch.bool)
    mask[0, 1] = mask[1, 11] = False
    broken = torch.where(mask, y, torch.nan)
    whole = (~mask).double() @ (dense_rows(GRID) != 0).double().T == 0
    expected = torch.where(whole, ph.crps(dist, y, functionals=GRID), 0.0)
    score = ph.crps(dist, broken, mask, functionals=GRID)
    torch.testing.assert_close(score, expected)
    assert torch.equal(whole.sum(1), torch.tensor([8, 8, 11]))
    assert torch.autograd.grad(score[0, 0], loc)[0].abs().sum() == 0  # of a functional that does not count
    samples = dist.rsample((6,), torch.Generator().manual_seed(0))
    drawn = ph.crps_ensemble(samples, broken, mask, functionals=GRID)
    rows = dense_rows(GRID)
    torch.testing.assert_close(drawn, torch.where(whole, ph.crps_ensemble(samples @ rows.T, y @ rows.T), 0.0))
    with pytest.raises(ParameterError, match="dtype"):
        ph.crps(dist, y, mask.double(), functionals=GRID)


def test_laws_without_a_covariance_raise():
    dist, y = ph.LocationScale(randn(BATCH, N), covariance("low rank")), randn(BATCH, N)
    bounded = ph.DPPL()(ph.LocationScale(randn(BATCH, N), covariance("diagonal")), ph.NonNegative())
    for margins in (dist.marginals, bounded.marginals):
        for call in (lambda law: ph.crps(law, y, functionals=GRID), ph.functional_rule):
            with pytest.raises(ParameterError, match="marginals have none"):
                call(margins)
    with pytest.raises(ParameterError, match="location-scale"):
        ph.crps(td.Gamma(torch.ones(BATCH, N), 1.0), y.exp(), functionals=GRID)
    with pytest.raises(ShapeError, match="target"):
        ph.crps(dist, randn(BATCH, N + 1), functionals=GRID)
    with pytest.raises(ShapeError, match="the law has 12"):
        ph.crps(dist, y, functionals=torch.ones(2, 5))


# --------------------------------------------------------------------------------------------------- draws


def law_for(rule: str) -> ph.LocationScale | ph.Projected:
    plain = ph.LocationScale(randn(BATCH, N), covariance("low rank"))
    product = ph.LocationScale(plain.loc, covariance("diagonal"), ph.LOGISTIC)
    total = ph.Conservation(torch.ones(N), torch.ones(BATCH))
    normal = ph.LocationScale(plain.loc, covariance("diagonal"))
    return {
        "product": lambda: product,
        "torch's laplace": lambda: td.Laplace(plain.loc, 1.0 + plain.loc**2),
        "projected product": lambda: ph.DPPL()(product, total),
        "bounds": lambda: ph.DPPL()(normal, ph.NonNegative()),
        "bounds and total": lambda: ph.DPPL()(normal, total & ph.NonNegative()),
        "order": lambda: ph.DPPL()(normal, ph.Monotone("increasing")),
        "sphere": lambda: ph.DPPL()(plain, ph.NonlinearEquality(lambda u: (u**2).sum(-1, keepdim=True) - N)),
        "forced": lambda: ph.DPPL(covariance="monte-carlo")(plain, total),
    }[rule]()


@pytest.mark.parametrize(
    "rule",
    ["product", "torch's laplace", "projected product", "bounds", "bounds and total", "order", "sphere", "forced"],
)
def test_other_laws_are_scored_by_fixed_draws(rule):
    law, y = law_for(rule), randn(BATCH, N, seed=5)
    assert ph.functional_rule(law) == "draws"
    score = ph.crps(law, y, functionals=GRID)
    assert torch.equal(score, ph.crps(law_for(rule), y, functionals=GRID))  # common random numbers
    joint = ph.as_location_scale(law) if rule == "torch's laplace" else law
    rows = dense_rows(GRID)
    draws = joint.sample((1000 if rule == "sphere" else 4000,), torch.Generator().manual_seed(1)) @ rows.T
    many = ph.crps_ensemble(draws, y @ rows.T, estimator="fair")
    noise = ((draws - y @ rows.T).abs().std(0) + draws.std(0)) / 10  # of 100 draws
    assert ((score - many).abs() <= 4 * noise + 1e-12).all()


def test_mirrored_draws_give_an_unbiased_score():
    """The mean over many sets of six draws is the closed form; with mirrored pairs counted it would not be."""
    sets = 40_000
    half = randn(3, sets, 1, seed=8)
    draws = torch.cat([half, -half])
    closed = scoringrules.crps_normal(0.4, 0.0, 1.0)
    scores = antithetic_crps(draws - 0.4)
    error = float(scores.std() / math.sqrt(sets))
    assert abs(float(scores.mean()) - closed) < 4 * error
    fair = ph.crps_ensemble(draws, torch.full((sets, 1), 0.4), estimator="fair")
    assert abs(float(fair.mean()) - closed) > 10 * error
    assert antithetic_crps(torch.tensor([[1.0], [-1.0]])).item() == pytest.approx(1 - 1)


def test_the_rules_agree_where_both_apply():
    law, y = ph.LocationScale(randn(BATCH, N), covariance("low rank")), randn(BATCH, N, seed=5)
    total = ph.Conservation(torch.ones(N), torch.ones(BATCH))
    exact = ph.crps(ph.DPPL()(law, total), y, functionals=GRID)
    drawn = ph.crps(ph.DPPL(covariance="monte-carlo", draws=20_000)(law, total), y, functionals=GRID)
    torch.testing.assert_close(drawn, exact, rtol=0.03, atol=1e-9)


def test_a_product_family_is_not_scored_as_if_sums_stayed_in_it():
    """The sum of twelve uniform variables is nearly normal, not uniform."""
    law = ph.LocationScale(torch.zeros(1, N), ph.Diagonal(torch.ones(1, N)), ph.UNIFORM)
    y, total = torch.full((1, N), 3 / N), torch.ones(1, N)
    score = ph.crps(law, y, functionals=total).item()
    assert score == pytest.approx(scoringrules.crps_normal(3.0, 0.0, math.sqrt(N / 3)), rel=0.1)
    assert abs(score - law.functional(ph.Directions(total).rows(N)).crps(torch.tensor([[3.0]])).item()) > 0.05
