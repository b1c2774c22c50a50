"""The correlation of held-out errors: estimates, calibration with it, saved models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from probhard.laws.calibration import Calibration
from probhard.rows.maps import SparseMap

SHAPE = (6, 10)
N = 60


def truth(boundary: str) -> ph.Spectral:
    k = torch.arange(N, dtype=torch.float64)
    power = 1 / (1 + (k // 10) ** 2 + (k % 10) ** 2)
    if boundary == "periodic":
        rows, columns = torch.minimum(k // 10, 6 - k // 10), torch.minimum(k % 10, 10 - k % 10)
        power = 1 / (1 + rows**2 + columns**2)
    return ph.Spectral.normalised(SHAPE, power, torch.ones(N, dtype=torch.float64), 0.9, boundary)


class Known(nn.Module):
    """Predicts the inputs, with independent noise of known spread."""

    def __init__(self) -> None:
        super().__init__()
        self.log_spread = nn.Parameter(torch.linspace(-0.5, 0.5, N, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, self.log_spread.exp().expand_as(inputs)


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets whose errors are correlated along the grid and sum to 0."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, N, generator=generator, dtype=torch.float64)
    inputs = inputs - inputs.mean(-1, keepdim=True)
    cov = truth("reflecting").scaled(Known().log_spread.detach().exp())
    law = ph.LocationScale(inputs, cov)
    mass = ph.Conservation(torch.ones(N, dtype=torch.float64), 0.0)
    return inputs, ph.DPPL("orthogonal")(law, mass).sample((), generator)


def model() -> ph.ConstrainedModel:
    return ph.ConstrainedModel(Known(), ph.Conservation(torch.ones(N, dtype=torch.float64), 0.0), "probhard-ob")


@pytest.mark.parametrize("boundary", ["periodic", "reflecting"])
def test_the_spectrum_of_many_fields_is_the_true_one(boundary):
    law = ph.LocationScale(torch.zeros(N, dtype=torch.float64), truth(boundary))
    errors = law.sample((20_000,), torch.Generator().manual_seed(0))
    found = ph.spectral_correlation(errors, SHAPE, boundary)
    torch.testing.assert_close(found.diagonal(), torch.ones(N, dtype=torch.float64))
    assert (found.dense() - law.cov.dense()).abs().max() < 0.04


def test_calibration_with_it_covers_block_means_and_moves_no_mean():
    plain, blocks = model(), ph.BlockMeans(SHAPE, (3,))
    correlation = ph.error_correlation(plain, data(100, 1), SHAPE)
    joint = ph.calibrate(plain, data(100, 2), functionals=blocks, correlation=correlation)
    independent = ph.calibrate(plain, data(100, 2), functionals=blocks)
    inputs, target = data(400, 3)
    rows, covered = blocks.rows(N), {}
    for name, one in (("joint", joint), ("independent", independent)):
        forecast = one.forecast(inputs)
        torch.testing.assert_close(forecast.mean, plain.forecast(inputs).mean, rtol=1e-12, atol=1e-12)
        law = forecast.functional(SparseMap(blocks.matrix))
        covered[name] = float(((rows.apply(target) - law.mean).abs() < 1.645 * law.stddev).double().mean())
        draws = forecast.sample((10,))
        assert draws.sum(-1).abs().max() < 1e-10
    assert 0.87 < covered["joint"] < 0.93
    assert covered["independent"] < 0.8


def test_without_a_shape_it_is_the_shrunk_correlation():
    found = ph.error_correlation(model(), data(50, 1), rank=5)
    assert isinstance(found, ph.LowRank)
    assert found.factor.shape == (N, 5)
    torch.testing.assert_close(found.diagonal(), torch.ones(N, dtype=torch.float64))


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_saved_models_keep_it(shape, tmp_path):
    first = model()
    found = ph.calibrate(first, data(20, 1), correlation=ph.error_correlation(first, data(20, 2), shape))
    found.save(tmp_path / "model.pt")
    again = ph.ConstrainedModel.load(tmp_path / "model.pt", Known(), first.constraint_fn)
    inputs = data(3, 4)[0]
    torch.testing.assert_close(again.forecast(inputs).variance, found.forecast(inputs).variance)
    assert "past errors" in str(again.calibration)


def test_errors_say_what_is_wrong():
    errors = torch.ones(3, N, dtype=torch.float64)
    with pytest.raises(ph.ShapeError, match="grid"):
        ph.spectral_correlation(errors, (5, 5))
    with pytest.raises(ph.ParameterError, match="all of them are 0"):
        ph.spectral_correlation(0 * errors, SHAPE)
    law = ph.LocationScale(torch.zeros(4), ph.Diagonal(torch.ones(4)))
    with pytest.raises(ph.ShapeError, match="The correlation is of"):
        Calibration(correlation=truth("zero")).apply(law)
