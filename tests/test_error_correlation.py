"""The correlation of held-out errors: estimates, calibration with it, saved models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from probhard.laws.calibration import Calibration
from probhard.laws.field_correlation import resized
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


@pytest.mark.parametrize("shape", [(12, 10), (6, 25), (4, 7)])
def test_another_grid_has_the_same_waves(shape):
    """Against sums of cosines at the cells of the other grid."""
    old = truth("reflecting")
    new = resized(old, shape)
    waves = [torch.arange(min(m, grid), dtype=torch.float64) for m, grid in zip(shape, SHAPE)]
    power = old.power.unflatten(0, SHAPE)[: len(waves[0]), : len(waves[1])]
    tables = []
    for m, k in zip(shape, waves):
        x = (torch.arange(m, dtype=torch.float64) + 0.5) / m
        tables.append(torch.cos(torch.pi * x[:, None] * k) * torch.where(k > 0, 2.0, 1.0).sqrt())
    fields = torch.einsum("ai,bj->abij", *tables).flatten(2).flatten(0, 1)  # (cells, waves)
    shared = fields @ torch.diag(power.flatten()) @ fields.T
    level = shared.diagonal().sqrt()
    expected = 0.9 * shared / level / level[:, None] + 0.1 * torch.eye(len(level), dtype=torch.float64)
    torch.testing.assert_close(new.dense(), expected)


def test_a_periodic_grid_keeps_signed_waves():
    old = truth("periodic")
    fine = resized(old, (12, 20)).power.unflatten(0, (12, 20))
    coarse = old.power.unflatten(0, SHAPE)
    assert torch.equal(fine[-2:, -4:], coarse[-2:, -4:])
    assert torch.equal(fine[:3, :5], coarse[:3, :5])
    assert fine[4:9].abs().max() == 0
    torch.testing.assert_close(resized(resized(old, (13, 21)), (13, 21)).dense(), resized(old, (13, 21)).dense())


def test_numbers_of_octaves_follow_to_another_grid():
    calibration = Calibration(1.5, by_octave=(1.0, 2.0, 3.0, 4.0, 5.0), correlation=truth("reflecting"))
    same, fine = calibration.on_grid(SHAPE), calibration.on_grid((6, 100))
    assert same is calibration
    assert fine.by_octave == (1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0)
    assert calibration.on_grid((3, 3)).by_octave == (1.0, 2.0, 3.0)
    zeros = torch.zeros(600, dtype=torch.float64)
    fine.apply(ph.LocationScale(zeros, ph.Diagonal(zeros + 1)))
    low_rank = ph.LowRank(torch.zeros(N, 1, dtype=torch.float64), torch.ones(N, dtype=torch.float64))
    assert Calibration(correlation=low_rank).on_grid(SHAPE) is None
    assert Calibration(2.0, 2.0).on_grid(SHAPE) == Calibration(2.0, 2.0)
