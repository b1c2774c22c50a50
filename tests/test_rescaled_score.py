"""n-MeRCI: its definition, its extremes, and what it ignores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph

BATCH, N = 50, 7


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    y = torch.randn(BATCH, N, generator=source, dtype=torch.float64)
    return y, y + torch.rand(BATCH, 1, generator=source) * torch.randn(BATCH, N, generator=source)


def test_against_numpy(case) -> None:
    y, mean = case
    spread = torch.rand(BATCH, N, dtype=torch.float64) + 0.1
    error, sigma = np.abs(mean - y).mean(-1).numpy(), np.sqrt((spread.numpy() ** 2).mean(-1))
    factor = np.quantile(error / sigma, 0.95)
    expected = (factor * sigma.mean() - error.mean()) / (error.max() - error.mean())
    assert float(ph.n_merci((mean, spread), y)) == pytest.approx(expected)


def test_spreads_like_errors_score_zero_at_any_size(case) -> None:
    y, mean = case
    error = (mean - y).abs().mean(-1, keepdim=True).expand(BATCH, N)
    for size in (0.1, 1.0, 30.0):
        assert float(ph.n_merci((mean, size * error), y)) == pytest.approx(0.0, abs=1e-12)


def test_misleading_spreads_score_worse_than_constant_ones(case) -> None:
    y, mean = case
    error = (mean - y).abs().mean(-1, keepdim=True).expand(BATCH, N)
    constant = float(ph.n_merci((mean, torch.ones_like(y)), y))
    assert 0.5 < constant < 1.0 < float(ph.n_merci((mean, 1 / error), y))


def test_one_element_is_refused(case) -> None:
    y, mean = case
    with pytest.raises(ph.ShapeError, match="several elements"):
        ph.n_merci((mean[:1], torch.ones_like(y[:1])), y[:1])
