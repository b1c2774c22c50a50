"""The layer against dense float64 algebra over the registry, and the paper's theory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.distributions import Normal

import probhard as ph
from probhard._util import jit
from probhard.rows.maps import SparseMap
from registry import ALGORITHMS, CONSTRAINTS, COVARIANCES, METRICS, covariance, dense_projection, rand, randn, triangle

BATCHES = [(), (3,), (2, 3)]
CASES = [
    case
    for case in itertools.product(CONSTRAINTS, COVARIANCES, METRICS, BATCHES)
    if case[3] == (2, 3) or (case[0] != "per batch element" and case[1] not in ("spectral", "along a hierarchy"))
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_is_chosen_from_the_structure(constraints, name):
    assert ALGORITHMS[name] in constraints[name].algorithm
    assert constraints[name].algorithm in repr(constraints[name])


@pytest.mark.parametrize(("name", "kind", "metric", "batch"), CASES, ids=lambda v: str(v).replace(" ", "_"))
def test_mean_variance_and_draws_agree_with_dense_algebra(constraints, name, kind, metric, batch):
    constraint = constraints[name]
    n = constraint.variables
    loc, cov = 2 * randn(*batch, n), covariance(kind, *batch, n)
    dist = ph.LocationScale(loc, cov)
    layer = ph.DPPL(METRICS[metric](n))
    projected = layer(dist, constraint)
    weight = layer.metric.weight(loc, cov).dense().detach()

    mean, projector = dense_projection(constraint, weight, loc)
    matrix = projector @ cov.dense() @ projector.mT
    close(projected.mean, mean)
    close(projected.variance, matrix.diagonal(dim1=-2, dim2=-1))
    close(projected.cov.dense(), matrix)
    few = functionals(n)
    close(projected.cov.functional_variance(SparseMap(few)), _form(torch.from_numpy(few.toarray()), matrix))

    z = dist.rsample((4,), torch.Generator().manual_seed(3))
    draws = projected.rsample((4,), torch.Generator().manual_seed(3))
    close(draws, dense_projection(constraint, weight, z)[0])
    assert constraint.relative_violation(draws).max() < 1e-12
    assert constraint.relative_violation(projected.mean).max() < 1e-12
    assert projected.stats.converged.all()
    assert projected.stats.converged.shape == projected.mean.shape[:-1]


def functionals(n):
    """A sum of all variables, a difference, and a part."""
    rows = np.zeros((3, n))
    rows[0], rows[1, :2], rows[2, n // 2 :] = 1, (1, -1), 0.5
    return sp.csr_array(rows)


def _form(rows, matrix):
    return (rows @ matrix @ rows.mT).diagonal(dim1=-2, dim2=-1)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected.expand_as(actual), rtol=tolerance, atol=tolerance)


def test_draws_of_a_full_covariance_have_the_projected_covariance():
    constraint = CONSTRAINTS["overlapping"]()
    n = constraint.variables
    dist = ph.LocationScale(randn(n), ph.Dense(triangle(n)))
    projected = ph.DPPL()(dist, constraint)
    draws = projected.sample((200_000,), torch.Generator().manual_seed(1))
    expected = projected.cov.dense()
    assert (draws.T.cov() - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch.linalg.matrix_rank(expected) == n - constraint.row_count


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["slices", "tree", "dense", "crossed small", "pins and mass"])
def test_projection_is_non_expansive_and_fixes_feasible_points(constraints, name, metric):
    """Paper, appendix "Universal Approximation": |P x - P y|_Q <= |x - y|_Q, and u* = u on the set."""
    constraint = constraints[name]
    n = constraint.variables
    layer = ph.DPPL(METRICS[metric](n))
    dist = ph.LocationScale(randn(n), covariance("low rank", n))
    x, y = randn(50, n), randn(50, n)
    first, second = (layer.project(point, constraint, dist=dist).value for point in (x, y))
    inverse = torch.linalg.inv(layer.metric.weight(x, dist.cov).dense()).detach()

    def length(v):
        return torch.einsum("bi,ij,bj->b", v, inverse, v).sqrt()

    assert (length(first - second) <= length(x - y) * (1 + 1e-9)).all()
    again = layer.project(first, constraint, dist=dist)
    torch.testing.assert_close(again.value, first, rtol=1e-11, atol=1e-11)
    assert again.stats.converged.all()
    # optimality: no feasible point is nearer to x
    assert (length(first - x) <= length(second - x) * (1 + 1e-9)).all()


def test_projecting_a_projected_distribution_changes_nothing(constraints):
    constraint = constraints["tree"]
    n = constraint.variables
    once = ph.DPPL("orthogonal")(ph.LocationScale(randn(n), covariance("dense", n)), constraint)
    twice = ph.DPPL("orthogonal")(once, constraint)
    torch.testing.assert_close(twice.mean, once.mean, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(twice.variance, once.variance, rtol=1e-9, atol=1e-11)


def test_pinned_variables_have_exactly_zero_variance_and_finite_scores(constraints):
    for dtype in (torch.float32, torch.float64):
        constraint = constraints["pins and mass"].to(dtype)
        mean, stddev = randn(4, 6).to(dtype).requires_grad_(), rand(4, 6).to(dtype).requires_grad_()
        projected = ph.DPPL()((mean, stddev), constraint)
        assert (projected.variance[:, [0, 5]] == 0).all()
        assert ph.degenerate(projected).sum() == 8
        score = ph.crps(projected, torch.zeros(4, 6, dtype=dtype)).sum() + ph.nll(projected, mean.detach()).sum()
        score.backward()
        assert mean.grad.isfinite().all()
        assert stddev.grad.isfinite().all()


def test_determined_variables_have_exactly_zero_variance():
    constraint = ph.LinearEquality([[1.0, 1, 0, 0], [1, -1, 0, 0], [0, 0, 1, 1]], [2.0, 0.0, 1.0])
    for metric in ("oblique", "orthogonal"):
        projected = ph.DPPL(metric)((randn(5, 4), rand(5, 4)), constraint)
        assert (projected.variance[:, :2] == 0).all()
        assert (projected.variance[:, 2:] > 0).all()
        torch.testing.assert_close(projected.mean[:, :2], torch.ones(5, 2))


def test_zero_variance_rows_keep_their_feasible_values(constraints):
    """Variables without variance stay; the rest of the tree takes the correction."""
    constraint = constraints["tree"]
    n = constraint.variables
    variance = rand(n)
    variance[[2, 5, 6]] = 0  # an aggregate and both of its children, coherent already
    loc = randn(n)
    loc[2] = loc[5] + loc[6]
    variance[11:15] = 0
    loc[5], loc[6] = loc[11] + loc[12], loc[13] + loc[14]
    loc[2] = loc[5] + loc[6]
    layer = ph.DPPL(validate_args=False)
    projected = layer(ph.LocationScale(loc, ph.Diagonal(variance)), constraint)
    assert projected.mean.isfinite().all()
    assert constraint.violation(projected.mean) < 1e-12
    torch.testing.assert_close(projected.mean[variance == 0], loc[variance == 0])


def test_delta_method_error_falls_with_sigma():
    """Theorem "locscaldeltamethod" where it is not exact: an independent Laplace law's projected quantiles."""
    constraint = ph.Conservation(torch.ones(3), 0.0)
    dist = torch.distributions.Laplace(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 0.2, 0.2]))
    projected = ph.DPPL("orthogonal")(dist, constraint)
    assert not projected.exact
    draws = projected.sample((400_000,), torch.Generator().manual_seed(2))
    torch.testing.assert_close(draws.var(0), projected.variance, rtol=0.02, atol=0)  # moments match exactly
    gaps = []
    for scale in (1.0, 0.1, 0.01):
        law = torch.distributions.Laplace(dist.loc, scale * dist.scale)
        moved = ph.DPPL("orthogonal")(law, constraint)
        sample = moved.sample((100_000,), torch.Generator().manual_seed(2))
        gaps.append(float((sample.quantile(0.9, 0) - moved.marginals.icdf(torch.tensor(0.9))).abs().max()))
    assert gaps[1] < 0.15 * gaps[0]
    assert gaps[2] < 0.15 * gaps[1]


def test_exactness_is_told():
    constraint = ph.Conservation(torch.ones(3), 0.0)
    for family, exact in ((ph.NORMAL, True), (ph.student_t(5.0), True), (ph.LAPLACE, True), (ph.LOGISTIC, False)):
        dist = ph.LocationScale(torch.zeros(3), ph.Diagonal(torch.ones(3)), family)
        projected = ph.DPPL()(dist, constraint)
        assert projected.exact is exact
        draws = projected.sample((300_000,), torch.Generator().manual_seed(3))
        torch.testing.assert_close(draws.var(0), projected.variance, rtol=0.03, atol=0)
        if exact:  # marginal law, not only moments
            inside = (draws <= projected.marginals.icdf(torch.tensor(0.8))).double().mean(0)
            torch.testing.assert_close(inside, torch.full((3,), 0.8), rtol=0, atol=0.004)


def test_monte_carlo_covariance_converges_to_the_exact_one(constraints):
    constraint = constraints["tree"]
    n = constraint.variables
    mean, stddev = randn(n).requires_grad_(), rand(n).requires_grad_()
    exact = ph.DPPL("oblique")((mean, stddev), constraint)
    rough = ph.DPPL("oblique", covariance="monte-carlo", draws=40_000)((mean, stddev), constraint)
    torch.testing.assert_close(rough.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rough.variance, exact.variance, rtol=0.05, atol=0)
    again = ph.DPPL("oblique", covariance="monte-carlo", draws=40_000)((mean, stddev), constraint)
    assert torch.equal(rough.variance, again.variance)  # common random numbers
    gradients = [torch.autograd.grad(d.variance.sum(), stddev)[0] for d in (exact, rough)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.1, atol=0.02)


def test_keep_returns_a_law_that_promises_nothing(constraints):
    constraint = constraints["tree"]
    n = constraint.variables
    kept = ph.DPPL("orthogonal", covariance="keep")((randn(n), rand(n)), constraint)
    assert isinstance(kept, ph.LocationScale)
    assert not isinstance(kept, ph.Projected)
    assert kept.feasible is False
    assert constraint.violation(kept.mean) < 1e-12
    assert (constraint.violation(kept.sample((50,))) > 1e-3).all()


def test_project_samples_uses_the_samples_own_variances(constraints):
    constraint = constraints["tree"]
    n = constraint.variables
    samples = randn(30, 4, n) * rand(n)
    solution = ph.DPPL("oblique").project_samples(samples, constraint)
    weight = torch.diag_embed(samples.var(0))
    expected, _ = dense_projection(constraint, weight, samples)
    torch.testing.assert_close(solution.value, expected, rtol=1e-10, atol=1e-10)
    assert solution.stats.converged.shape == (30, 4)
    assert solution.stats.converged.all()


def test_float32_input_gives_float32_output_feasible_to_rounding(constraints):
    for name, constraint in constraints.items():
        n, batch = constraint.variables, (2, 3)
        dist = Normal(100 * randn(*batch, n).float(), rand(*batch, n).float())
        for metric in ("oblique", "orthogonal"):
            projected = ph.DPPL(metric)(dist, constraint)
            draws = projected.sample((10,))
            assert draws.dtype == projected.mean.dtype == projected.variance.dtype == torch.float32, name
            assert constraint.relative_violation(draws).max() < 1e-6, name
            double = Normal(dist.loc.double(), dist.scale.double())
            reference = ph.DPPL(metric)(double, constraint).mean
            torch.testing.assert_close(projected.mean.double(), reference, rtol=1e-4, atol=1e-3)


def test_extreme_scales_stay_feasible():
    """Weights over twenty orders of magnitude, in float64."""
    constraint = CONSTRAINTS["tree"]()
    n = constraint.variables
    stddev = 10.0 ** (20 * (rand(100, n) - 0.6))
    projected = ph.DPPL("oblique")((1e3 * randn(100, n), stddev), constraint)
    assert constraint.relative_violation(projected.mean).max() < 1e-9
    assert (projected.variance >= 0).all()
    assert (projected.variance <= stddev.square() * (1 + 1e-9)).all()
    draws = projected.sample((20,))
    assert constraint.relative_violation(draws).max() <= 1e-10


def test_failures_are_never_silent(monkeypatch):
    constraint = ph.Conservation(torch.ones(4), 1.0)
    dist = (torch.zeros(3, 4), torch.ones(3, 4))
    broken = ph.tangent.DiagonalTangent.project
    monkeypatch.setattr(ph.tangent.DiagonalTangent, "project", lambda self, z, b: broken(self, z, b) + 1e-3)
    with pytest.raises(ph.ConvergenceError, match="6 of 6 draws are not feasible"):
        ph.DPPL()(dist, constraint).sample((2,))
    with pytest.warns(RuntimeWarning, match="6 of 6 draws"):
        draws = ph.DPPL(on_failure="flag")(dist, constraint).sample((2,))
    assert draws.isnan().all()
    solution = ph.DPPL()(dist, constraint).draw((2,))
    assert not solution.stats.converged.any()


def test_failed_draws_are_drawn_again(monkeypatch):
    constraint = ph.Conservation(torch.ones(4), 1.0)
    project = ph.tangent.DiagonalTangent.project
    calls = []

    def sometimes(self, z, b):
        calls.append(1)
        value = project(self, z, b)
        if 2 <= len(calls) <= 3:  # the first draw and its refinement fail for one element
            value = value.clone()
            value[..., 0, :] += 1
        return value

    monkeypatch.setattr(ph.tangent.DiagonalTangent, "project", sometimes)
    projected = ph.DPPL(on_failure="resample")((torch.zeros(3, 4), torch.ones(3, 4)), constraint)
    draws = projected.sample((2,))
    assert constraint.violation(draws).max() < 1e-12


def test_half_precision_points_come_back_in_float32(constraints):
    constraint, layer = constraints["tree"], ph.DPPL("orthogonal")
    points = randn(4, constraint.variables).to(torch.bfloat16)
    for solution in (layer.project(points, constraint), layer.project_samples(points, constraint)):
        assert solution.value.dtype == torch.float32
        assert constraint.relative_violation(solution.value).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounded", [False, True])
def test_the_oblique_projection_of_a_tree_runs_its_fused_kernel(dtype, bounded, monkeypatch):
    """A cast must not change the path: the README's example runs one compiled sweep in both precisions."""
    sweeps = pytest.importorskip("probhard.rows._kernels.sweeps")
    if not jit.AVAILABLE:
        pytest.skip("numba is not installed")
    calls, fused = [], sweeps.Moments.apply
    monkeypatch.setattr(sweeps.Moments, "apply", lambda *args: calls.append(args[0].dtype) or fused(*args))
    constraint = ph.Hierarchy(torch.cat([torch.ones(1, 4), torch.kron(torch.eye(2), torch.ones(1, 2)), torch.eye(4)]))
    if bounded:
        constraint = constraint & ph.NonNegative()
    loc, stddev = torch.ones(5, 7, dtype=dtype), torch.ones(5, 7, dtype=dtype)
    assert ph.DPPL("oblique")((loc, stddev), constraint).variance.dtype == dtype
    assert calls == [dtype]
