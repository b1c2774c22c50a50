"""Shrunk correlations against dense formulas and against hierarchicalforecast."""

from __future__ import annotations

import pytest
import torch

from probhard import LowRank, ParameterError, ShapeError, shrunk_correlation
from probhard.laws.correlation import shrinkage_intensity

DOUBLE = torch.float64
SIZES = [(12, 5), (8, 8), (9, 30)]


def correlated(times: int, n: int, seed: int = 0) -> torch.Tensor:
    """Residuals with three common factors, unequal scales and a mean."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DOUBLE, generator=generator)

    scale = torch.logspace(-3, 4, n, dtype=DOUBLE)
    return (normal(times, 3) @ normal(3, n) + normal(times, n)) * scale + 2 * scale


def dense_intensity(residuals: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Schaefer and Strimmer's printed formulas, pair by pair: unbiased variances, n / (n - 1)^3 for var(r)."""
    times, n = residuals.shape
    z = (residuals - residuals.mean(0)) / residuals.std(0)
    above = below = 0.0
    correlation = torch.eye(n, dtype=DOUBLE)
    for i in range(n):
        for j in range(n):
            if i != j:
                w = z[:, i] * z[:, j]
                correlation[i, j] = times / (times - 1) * w.mean()
                above += float(times / (times - 1) ** 3 * (w - w.mean()).square().sum())
                below += float(correlation[i, j].square())
    return min(1.0, above / below), correlation


@pytest.mark.parametrize(("times", "n"), SIZES)
def test_dense_formulas(times, n):
    residuals = correlated(times, n)
    intensity, correlation = dense_intensity(residuals)
    assert 0 < intensity < 1
    assert shrinkage_intensity(residuals) == pytest.approx(intensity, rel=1e-10)
    law = shrunk_correlation(residuals)
    expected = (1 - intensity) * correlation + intensity * torch.eye(n, dtype=DOUBLE)
    torch.testing.assert_close(law.dense(), expected)
    assert law.factor.shape == (n, min(times, n))


@pytest.mark.parametrize(("times", "n"), SIZES)
def test_covariance_is_that_of_hierarchicalforecast(times, n):
    utils = pytest.importorskip("hierarchicalforecast.utils")
    residuals = correlated(times, n) / torch.logspace(-3, 4, n, dtype=DOUBLE)  # it adds 2e-8 to every scale
    expected = utils._shrunk_covariance_schaferstrimmer_no_nans(residuals.mT.contiguous().numpy(), 0.0)
    law = shrunk_correlation(residuals).scaled(residuals.std(0))
    torch.testing.assert_close(law.dense(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("times", "n"), SIZES)
def test_truncated_rank_keeps_the_best_approximation_and_the_unit_diagonal(times, n):
    residuals = correlated(times, n)
    full, law = shrunk_correlation(residuals), shrunk_correlation(residuals, rank=2)
    assert law.factor.shape == (n, 2)
    torch.testing.assert_close(law.diagonal(), torch.ones(n, dtype=DOUBLE))
    u, s, _ = torch.linalg.svd(full.factor)
    torch.testing.assert_close(law.factor @ law.factor.mT, (u[:, :2] * s[:2].square()) @ u[:, :2].mT)
    assert shrunk_correlation(residuals, rank=1000).factor.shape == (n, min(times, n))


def test_rank_and_shrinkage_that_are_given():
    residuals = correlated(20, 4)
    sample = torch.corrcoef(residuals.mT)
    torch.testing.assert_close(shrunk_correlation(residuals, shrinkage=0.0).dense(), sample)
    torch.testing.assert_close(shrunk_correlation(residuals, shrinkage=1.0).dense(), torch.eye(4, dtype=DOUBLE))


def test_constant_variables_are_uncorrelated():
    residuals = correlated(12, 5)
    alone = shrunk_correlation(residuals[:, [0, 1, 3, 4]])
    residuals[:, 2] = 0.1
    dense = shrunk_correlation(residuals).dense()
    torch.testing.assert_close(dense[2], torch.eye(5, dtype=DOUBLE)[2])
    torch.testing.assert_close(dense[[0, 1, 3, 4]][:, [0, 1, 3, 4]], alone.dense())
    nothing = shrunk_correlation(torch.zeros(5, 3, dtype=DOUBLE))
    torch.testing.assert_close(nothing.dense(), torch.eye(3, dtype=DOUBLE))


def test_missing_values():
    residuals = correlated(12, 5)
    residuals[:4, 1] = torch.nan
    residuals[:4, 3] = torch.nan
    residuals[2:, 4] = torch.nan  # too few
    law = shrunk_correlation(residuals, shrinkage=0.25)
    dense = law.dense()
    torch.testing.assert_close(law.diagonal(), torch.ones(5, dtype=DOUBLE))
    # The same times of both: the correlation of those times.
    torch.testing.assert_close(dense[1, 3], 0.75 * torch.corrcoef(residuals[4:].mT)[1, 3])
    # Different times: each has its own mean and scale, and common times only count.
    x, y = residuals[:, 0] - residuals[:, 0].mean(), residuals[4:, 1] - residuals[4:, 1].mean()
    torch.testing.assert_close(dense[0, 1], 0.75 * (x[4:] * y).sum() / (x.norm() * y.norm()))
    torch.testing.assert_close(dense[4], torch.eye(5, dtype=DOUBLE)[4])
    assert torch.linalg.eigvalsh(dense)[0] > 0
    assert 0 < shrinkage_intensity(residuals) < 1


def test_independent_variables_are_shrunk_almost_to_the_identity():
    generator = torch.Generator().manual_seed(1)
    assert shrinkage_intensity(torch.randn(50, 200, generator=generator, dtype=DOUBLE)) > 0.9


def test_many_variables_need_no_square_matrix():
    residuals = correlated(10, 100_000).float()
    law = shrunk_correlation(residuals, rank=4)
    assert isinstance(law, LowRank)
    assert (law.factor.shape, law.dtype) == ((100_000, 4), torch.float32)
    torch.testing.assert_close(law.diagonal(), torch.ones(100_000, dtype=torch.float32))


@pytest.mark.parametrize(
    ("residuals", "settings", "error", "says"),
    [
        (torch.zeros(4), {}, ShapeError, r"\(4,\)"),
        (torch.zeros(2, 3), {}, ParameterError, "2 times"),
        (torch.full((4, 3), torch.inf), {}, ParameterError, "12 of 12"),
        (torch.zeros(4, 3), {"rank": 0}, ParameterError, "rank is 0"),
        (torch.zeros(4, 3), {"shrinkage": 1.5}, ParameterError, "shrinkage is 1.5"),
    ],
)
def test_bad_input(residuals, settings, error, says):
    with pytest.raises(error, match=says):
        shrunk_correlation(residuals, **settings)
