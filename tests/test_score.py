"""Scores against scoringrules in NumPy, dense formulas and hand-written metrics."""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import scoringrules
import torch
from torch import distributions as td
from torch.autograd import gradcheck

from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.laws.distribution import LocationScale, Marginals
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM
from probhard.laws.student_t import student_t
from probhard.score import (
    LEVELS,
    SCORES,
    constraint_error,
    coverage,
    crps,
    crps_ensemble,
    degenerate,
    energy_score,
    mse,
    nll,
    pit,
    quantile_loss,
    sample_quantiles,
    weighted_quantile_loss,
)


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """These tests name float64 where they need it."""
    return torch.float32


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOC, SCALE, Y = draw(4, 3), draw(4, 3, seed=1).exp(), draw(4, 3, seed=2)
LAWS = [
    (td.Normal(LOC, SCALE), NORMAL),
    (td.Independent(td.Normal(LOC, SCALE), 1), NORMAL),
    (td.MultivariateNormal(LOC, scale_tril=torch.diag_embed(SCALE)), NORMAL),
    ((LOC, SCALE), NORMAL),
    (td.StudentT(4.0, LOC, SCALE), student_t(4.0)),
    (td.Laplace(LOC, SCALE), LAPLACE),
    (td.Uniform(LOC - SCALE, LOC + SCALE), UNIFORM),
    (LocationScale(LOC, Diagonal(SCALE**2), LOGISTIC), LOGISTIC),
]


@pytest.mark.parametrize(("dist", "family"), LAWS)
def test_location_scale_inputs(dist, family):
    torch.testing.assert_close(crps(dist, Y), family.crps(LOC, SCALE, Y))
    torch.testing.assert_close(pit(dist, Y), family.cdf((Y - LOC) / SCALE))
    torch.testing.assert_close(mse(dist, Y), (Y - LOC) ** 2)
    density = family.log_density((Y - LOC) / SCALE) - SCALE.log()
    torch.testing.assert_close(nll(dist, Y), -density)
    if isinstance(dist, td.Normal | td.StudentT | td.Laplace):
        torch.testing.assert_close(nll(dist, Y), -dist.log_prob(Y))
    half = SCALE * family.icdf(torch.tensor(0.9, dtype=torch.float64))
    assert torch.equal(coverage(dist, Y, 0.8), ((Y - LOC).abs() <= half).double())
    assert not degenerate(dist).any()


def test_crps_of_gamma_and_beta_matches_scoringrules():
    random = np.random.default_rng(0)
    first, second = random.uniform(0.3, 19, (2, 50))
    y = random.gamma(first, 1 / second)
    y[:3] = (-1.0, 0.0, 30.0)
    value = crps(td.Gamma(torch.tensor(first), torch.tensor(second)), torch.tensor(y))
    oracle = scoringrules.crps_gamma(np.maximum(y, 0), first, second) + np.maximum(-y, 0)
    np.testing.assert_allclose(value, oracle, rtol=1e-10, atol=1e-12)
    large = crps(td.Gamma(torch.tensor(first + 20), torch.tensor(second)), torch.tensor(y + 4))
    oracle = scoringrules.crps_gamma(y + 4, first + 20, second)
    np.testing.assert_allclose(large, oracle, rtol=1e-7)  # torch's gammainc is off by 4e-10 above a shape of 20
    first, second = 10 ** random.uniform(-0.5, 2.5, (2, 50))
    y = random.beta(first, second)
    y[:2] = (0.0, 1.0)
    beta = td.Beta(torch.tensor(first), torch.tensor(second))
    np.testing.assert_allclose(
        crps(beta, torch.tensor(y)), scoringrules.crps_beta(y, first, second), rtol=1e-10, atol=1e-12
    )
    assert crps(td.Independent(beta, 1), torch.tensor(y)).shape == (50,)


@pytest.mark.parametrize("y", [0.05, 0.4, 1.3])
@pytest.mark.parametrize("law", ["gamma", "beta"])
def test_crps_of_gamma_and_beta_matches_quadrature(law, y):
    first, second = 2.3, 0.7
    kind, exact = {
        "gamma": (td.Gamma, scipy.stats.gamma(first, scale=1 / second)),
        "beta": (td.Beta, scipy.stats.beta(first, second)),
    }[law]
    dist = kind(torch.tensor([first], dtype=torch.float64), torch.tensor([second], dtype=torch.float64))
    area = 0.0
    for low, high in ((0.0, min(y, 1.0)), (min(y, 1.0), y), (y, max(y, 1.0)), (max(y, 1.0), np.inf)):
        power = exact.cdf if high <= y else exact.sf
        area += scipy.integrate.quad(lambda x, power=power: power(x) ** 2, low, high, epsabs=1e-12)[0]
    assert crps(dist, torch.tensor([y], dtype=torch.float64)).item() == pytest.approx(area, rel=1e-7)


def test_gamma_and_beta_are_evaluation_only():
    rate = torch.ones(3, requires_grad=True)
    with pytest.raises(ParameterError, match="evaluation only"):
        crps(td.Gamma(torch.ones(3), rate), torch.ones(3))
    with torch.no_grad():
        assert crps(td.Gamma(torch.ones(3), rate), torch.ones(3)).dtype == torch.float32


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()


@pytest.mark.parametrize("score", [crps, nll, mse])
def test_masked_targets_may_be_nan(score):
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[0], mask[2, 1] = False, False
    broken = torch.where(mask, Y, math.nan)
    loc, scale = leaves()
    value = score(td.Normal(loc, scale, validate_args=False), broken, mask)
    assert torch.equal(value, torch.where(mask, score((LOC, SCALE), Y), 0.0))
    inputs = (loc,) if score is mse else (loc, scale)
    for gradient in torch.autograd.grad(value.sum(), inputs):
        assert gradient.isfinite().all()
        assert (gradient[~mask] == 0).all()
        assert (gradient[mask] != 0).all()


def test_masks_of_the_other_scores():
    mask = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) > 0.4
    assert 0 < mask.sum() < 12
    broken = torch.where(mask, Y, math.nan)
    samples = draw(7, 4, 3, seed=5).requires_grad_()
    quantiles = sample_quantiles(samples, (0.25, 0.5))
    for value, full in (
        (crps_ensemble(samples, broken, mask), crps_ensemble(samples, Y)),
        (quantile_loss(quantiles, broken, (0.25, 0.5), mask), quantile_loss(quantiles, Y, (0.25, 0.5))),
        (coverage(samples, broken, mask=mask), coverage(samples, Y)),
        (coverage((LOC, SCALE), broken, mask=mask), coverage((LOC, SCALE), Y)),
        (pit(samples, broken, mask), pit(samples, Y)),
        (pit((LOC, SCALE), broken, mask), pit((LOC, SCALE), Y)),
    ):
        assert torch.equal(value, torch.where(mask, full, 0.0))
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), samples, retain_graph=True)
            assert gradient.isfinite().all()
            assert (gradient[:, ~mask] == 0).all()
    row = mask[1]
    subset = energy_score(samples[:, 1, row], Y[1, row])
    torch.testing.assert_close(energy_score(samples, broken, mask)[1], subset)
    nothing = energy_score(samples, broken, torch.zeros_like(mask))
    (gradient,) = torch.autograd.grad(nothing.sum(), samples)
    assert (nothing == 0).all()
    assert (gradient == 0).all()
    pooled = weighted_quantile_loss(samples, broken, mask=mask)
    flat = weighted_quantile_loss(samples[:, mask], Y[mask])
    torch.testing.assert_close(pooled, flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_coordinates(dtype):
    loc = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, requires_grad=True)
    scale = torch.tensor([0.0, 0.0, 2.0], dtype=dtype, requires_grad=True)
    y = torch.tensor([1.0, 5.0, 4.0], dtype=dtype)
    dist = Marginals(loc, scale, NORMAL)
    pair = SimpleNamespace(marginals=dist)
    assert degenerate(pair).tolist() == [True, True, False]
    value = nll(pair, y)
    assert value[:2].tolist() == [0.0, 0.0]
    assert value[2].item() == pytest.approx(-td.Normal(3.0, 2.0).log_prob(torch.tensor(4.0)).item(), rel=1e-6)
    for gradient in torch.autograd.grad(value.sum(), (loc, scale)):
        assert gradient[:2].tolist() == [0.0, 0.0]
        assert gradient[2] != 0
    value = crps(pair, y)
    assert value[:2].tolist() == [0.0, 3.0]
    assert all(t.isfinite().all() for t in torch.autograd.grad(value.sum(), (loc, scale)))
    assert coverage(pair, y).tolist() == [1.0, 0.0, 1.0]
    assert pit(pair, y)[:2].tolist() == [0.5, 1.0]


def dense_ensemble(samples: torch.Tensor, y: torch.Tensor, pairs: int) -> torch.Tensor:
    return (samples - y).abs().mean(0) - (samples[:, None] - samples[None]).abs().sum((0, 1)) / (2 * pairs)


@pytest.mark.parametrize(("estimator", "name", "pairs"), [("standard", "nrg", 81), ("fair", "fair", 72)])
def test_crps_ensemble(estimator, name, pairs):
    samples = draw(9, 4, 3, seed=3).requires_grad_()
    y = Y.clone().requires_grad_()
    value = crps_ensemble(samples, y, estimator=estimator)
    torch.testing.assert_close(value, dense_ensemble(samples, y, pairs))
    oracle = scoringrules.crps_ensemble(Y.numpy(), samples.detach().numpy(), m_axis=0, estimator=name)
    np.testing.assert_allclose(value.detach(), oracle, rtol=1e-10)
    expected = torch.autograd.grad(dense_ensemble(samples, y, pairs).sum(), (samples, y))
    for result, exact in zip(torch.autograd.grad(value.sum(), (samples, y)), expected):
        torch.testing.assert_close(result, exact)
    assert gradcheck(lambda s: crps_ensemble(s, Y, estimator=estimator), samples)


def test_crps_ensemble_far_from_zero_in_float32():
    samples = draw(200, 5).float() * 0.1 + 1000
    exact = crps_ensemble(samples.double(), torch.full((5,), 1000.0).double())
    np.testing.assert_allclose(crps_ensemble(samples, torch.full((5,), 1000.0)), exact, rtol=1e-5)


def test_scores_ignore_autocast():
    samples, y = draw(20, 4, 3).float(), Y.float()
    with torch.autocast("cpu", torch.bfloat16):
        for score in (crps_ensemble, energy_score):
            low = score(samples, y)
            assert low.dtype == torch.float32
            torch.testing.assert_close(low.double(), score(samples.double(), y.double()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(crps((LOC, SCALE), Y), NORMAL.crps(LOC, SCALE, Y), rtol=0, atol=0)


def test_crps_ensemble_approaches_the_closed_form():
    samples = 2 * draw(40000, 3) + 1
    exact = NORMAL.crps(torch.ones(3).double(), torch.full((3,), 2.0).double(), Y[0])
    torch.testing.assert_close(crps_ensemble(samples, Y[0], estimator="fair"), exact, rtol=0.03, atol=0)


@pytest.mark.parametrize(("estimator", "name"), [("standard", "nrg"), ("fair", "fair")])
def test_energy_score(estimator, name):
    samples = draw(9, 4, 3, seed=3).requires_grad_()
    value = energy_score(samples, Y, estimator=estimator)
    assert value.shape == (4,)
    oracle = scoringrules.es_ensemble(Y.numpy(), samples.detach().numpy(), m_axis=0, v_axis=-1, estimator=name)
    np.testing.assert_allclose(value.detach(), oracle, rtol=1e-10)
    assert gradcheck(lambda s, y: energy_score(s, y, estimator=estimator), (samples, Y.clone().requires_grad_()))


def test_energy_score_in_one_dimension_is_the_crps():
    samples = draw(9, 5, seed=4)
    torch.testing.assert_close(
        energy_score(samples[..., None], Y.flatten()[:5, None]), crps_ensemble(samples, Y.flatten()[:5])
    )


def test_energy_score_where_draws_coincide():
    samples = torch.zeros(4, 2, 3, dtype=torch.float64)
    samples[2:, 1] = 1.0
    samples.requires_grad_()
    value = energy_score(samples, torch.zeros(2, 3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), samples)
    assert value[0] == 0
    assert gradient.isfinite().all()
    assert (gradient[:, 0] == 0).all()
    assert gradient[2, 1].abs().sum() > 0


def test_quantile_loss_and_sample_quantiles():
    samples = draw(11, 4, 3, seed=6)
    order = np.sort(samples.numpy(), axis=0)
    expected = np.stack([order[round(10 * q)] for q in LEVELS])
    quantiles = sample_quantiles(samples)
    assert np.array_equal(quantiles.numpy(), expected)
    level = np.array(LEVELS)[:, None, None]
    loss = 2 * np.abs((expected - Y.numpy()) * ((Y.numpy() <= expected) - level))
    np.testing.assert_allclose(quantile_loss(quantiles, Y, LEVELS), loss, rtol=1e-12)
    median = quantiles[9:10].clone().requires_grad_()
    torch.testing.assert_close(quantile_loss(median, Y, [0.5])[0], (median[0] - Y).abs())
    assert gradcheck(lambda q: quantile_loss(q, Y, torch.tensor([0.3])), median)


def pooled(samples: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    order = np.sort(samples, axis=0)
    for k in range(1, 20):
        quantile = order[int(np.round((len(samples) - 1) * k / 20))]
        total += np.sum(2 * np.abs((quantile - y) * ((y <= quantile) - k / 20))) / np.sum(np.abs(y))
    return total / 19


def test_weighted_quantile_loss_is_pooled():
    samples, y = draw(200, 6, 5, seed=7) * 3 + 10, draw(6, 5, seed=8) + 10
    y[:, 0] *= 50
    assert weighted_quantile_loss(samples, y).item() == pytest.approx(pooled(samples.numpy(), y.numpy()), rel=1e-12)
    point = y + draw(6, 5, seed=9)
    expected = (y - point).abs().sum() / y.abs().sum()  # a point forecast
    torch.testing.assert_close(weighted_quantile_loss(point.expand(4, 6, 5), y), expected)


def test_coverage_and_pit_are_calibrated():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20000, 1, dtype=torch.float64, generator=generator)
    dist = td.Normal(torch.zeros(1).double(), torch.ones(1).double())
    assert coverage(dist, y, 0.7).mean().item() == pytest.approx(0.7, abs=0.015)
    assert scipy.stats.kstest(pit(dist, y).flatten().numpy(), "uniform").pvalue > 1e-3
    samples = torch.randn(501, 1, dtype=torch.float64, generator=generator)
    assert coverage(samples, y, 0.7).mean().item() == pytest.approx(0.7, abs=0.06)
    assert pit(torch.tensor([[1.0], [2.0], [2.0], [3.0]]), torch.tensor([2.0])).item() == 0.5


def test_constraint_error():
    residual = torch.tensor([[1.0, -2.0], [0.0, 0.5]])
    constraint = SimpleNamespace(
        residual=lambda u: residual * u[..., :1],
        excess=lambda u: -u,
        violation=lambda u: residual.abs().amax(-1),
    )
    error = constraint_error(constraint, torch.ones(2, 3))
    assert error.largest.item() == 2.0
    assert error.mean.item() == 1.75
    assert error.mean_square.item() == 2.625
    of_mean = constraint_error(constraint, td.Normal(2 * torch.ones(2, 3), torch.ones(2, 3)))
    assert of_mean.mean.item() == 3.5


@pytest.mark.parametrize("score", [crps, nll, mse, pit, coverage])
def test_shapes_are_checked(score):
    dist = td.Normal(torch.zeros(4, 3), torch.ones(4, 3))
    for shape in ((4, 1), (4,), (2, 3), (4, 2)):
        with pytest.raises(ShapeError, match=r"\(4, 3\)"):
            score(dist, torch.zeros(shape))
    assert score(dist, torch.zeros(5, 1, 3)).shape == (5, 4, 3)
    with pytest.raises(ShapeError):
        crps(td.Gamma(torch.ones(4, 3), torch.ones(4, 3)), torch.ones(4, 1))


@pytest.mark.parametrize("score", [crps_ensemble, energy_score, weighted_quantile_loss, pit, coverage])
def test_samples_are_checked(score):
    with pytest.raises(ParameterError, match="at least two"):
        score(torch.zeros(1, 4, 3), torch.zeros(4, 3))
    with pytest.raises(ShapeError, match=r"\(4, 2\)"):
        score(torch.zeros(5, 4, 3), torch.zeros(4, 2))


def test_options_are_checked():
    samples, y = torch.zeros(5, 3), torch.zeros(3)
    for level in (0.0, 1.0, 5.0):
        with pytest.raises(ParameterError, match="between 0 and 1"):
            sample_quantiles(samples, [level])
    for level in (0.0, -1.0, 1.0, 90):
        with pytest.raises(ParameterError):
            coverage(samples, y, level)
        with pytest.raises(ParameterError):
            coverage((y, y), y, level)
    with pytest.raises(ShapeError, match="one quantile per level"):
        quantile_loss(samples, y, [0.5])
    with pytest.raises(ParameterError, match="'fair'"):
        crps_ensemble(samples, y, estimator="quick")


def test_functional_transforms():
    def loss(loc: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (crps((loc, scale), y) + nll((loc, scale), y)).sum()

    loc, scale = leaves()
    expected = torch.autograd.grad(loss(loc, scale, Y), (loc, scale))
    result = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(LOC, SCALE, Y)
    for value, exact in zip(result, expected):
        torch.testing.assert_close(value, exact)
    samples = draw(6, 4, 3)
    batched = torch.func.vmap(crps_ensemble, in_dims=(1, 0))(samples, Y)
    torch.testing.assert_close(batched, crps_ensemble(samples, Y))
    jacobian = torch.func.jacrev(lambda s: energy_score(s, Y).sum())(samples)
    leaf = samples.clone().requires_grad_()
    torch.testing.assert_close(jacobian, torch.autograd.grad(energy_score(leaf, Y).sum(), leaf)[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled():
    mask = Y > -1

    def loss(loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        laws = SimpleNamespace(marginals=Marginals(loc, scale, NORMAL))
        return (crps(laws, Y, mask) + nll(laws, Y, mask)).sum()

    loc, scale = leaves()
    expected = torch.autograd.grad(loss(loc, scale), (loc, scale))
    for value, exact in zip(torch.autograd.grad(torch.compile(loss)(loc, scale), (loc, scale)), expected):
        torch.testing.assert_close(value, exact)


def test_table_of_training_scores():
    assert {"crps": crps, "nll": nll} == SCORES
