"""Calibration: known misscaling is found, means stay, draws stay feasible, records are saved."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard import METHODS, BlockMeans
from probhard.calibration import Calibration, calibrate, draws_factor
from probhard.errors import ParameterError, ShapeError
from probhard.laws._transforms import wave_numbers
from probhard.laws.calibration import octaves
from registry import covariance
from small_model import DOUBLE, Backbone, Fixed, N, S, data, model

UNITS = 4000
TREE = torch.cat([S[:1], S])  # levels: 0, 1 (twice, so that it has more nodes), bottoms


def factors(seed: int = 3) -> ph.LowRank:
    generator = torch.Generator().manual_seed(seed)
    return ph.LowRank(
        torch.randn(N, 2, dtype=DOUBLE, generator=generator),
        torch.rand(N, dtype=DOUBLE, generator=generator) + 0.5,
    )


def units(cov: ph.Covariance, constraint: ph.Constraint, count: int = UNITS, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Locations and targets: the projections of draws around them, in the metric of ``METRIC``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, N, dtype=DOUBLE, generator=generator) + 4
    noise = torch.randn(count, cov.root_size, dtype=DOUBLE, generator=generator)
    weight = ph.LocationScale(torch.zeros(N, dtype=DOUBLE), factors())
    return x, ph.DPPL("oblique").project(x + cov.root(noise), constraint, weight).value


ROWS = ph.Hierarchy(S)
FUNCTIONALS = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]], dtype=DOUBLE)


def test_both_weights_of_a_law_that_is_too_narrow_are_found() -> None:
    x, y = units(factors().weighted(2.0, 3.0), ROWS)
    before = ph.ConstrainedModel(Fixed(factors()), ROWS)
    after = calibrate(before, (x, y), functionals=FUNCTIONALS)
    assert after.calibration is not None
    assert after.calibration.own == pytest.approx(2.0, rel=0.06)
    assert after.calibration.shared == pytest.approx(3.0, rel=0.06)
    assert before.calibration is None
    draws = after.sample((x[:50],), 20, torch.Generator().manual_seed(0))
    assert float(ROWS.relative_violation(draws).max()) < 1e-10


def test_bounds_take_part() -> None:
    """Some bottoms lie at their bound; the score of functionals uses fixed draws."""
    constraint, count = ROWS & ph.NonNegative(), 60
    coherent = S @ torch.tensor([[0.15], [0.1], [0.2], [0.1]], dtype=DOUBLE)
    law = ph.LowRank(coherent, torch.full((N,), 0.05, dtype=DOUBLE))
    generator = torch.Generator().manual_seed(6)
    x = (2 * torch.rand(count, 4, dtype=DOUBLE, generator=generator)) @ S.T
    noise = torch.randn(count, law.root_size, dtype=DOUBLE, generator=generator)
    weight = ph.LocationScale(torch.zeros(N, dtype=DOUBLE), law)
    y = ph.DPPL("oblique").project(x + law.weighted(2.0, 3.0).root(noise), constraint, weight).value
    assert 0.05 < float((y[:, 3:] == 0).double().mean()) < 0.5
    after = calibrate(ph.ConstrainedModel(Fixed(law), constraint), (x, y), functionals=FUNCTIONALS)
    assert after.calibration is not None
    assert after.calibration.own == pytest.approx(2.0, rel=0.35)
    assert after.calibration.shared == pytest.approx(3.0, rel=0.25)
    draws = after.sample((x,), 20, torch.Generator().manual_seed(0))
    assert float(constraint.relative_violation(draws).max()) < 1e-10


def test_projected_means_do_not_move_and_spreads_do() -> None:
    x, y = units(factors().weighted(2.0, 3.0), ROWS, 300)
    before = ph.ConstrainedModel(Fixed(factors()), ROWS)
    after = calibrate(before, [(x[:100], y[:100]), (x[100:], y[100:])])
    first, second = before.forecast((x,)), after.forecast((x,))
    torch.testing.assert_close(second.mean, first.mean, rtol=1e-14, atol=1e-13)
    assert bool((second.stddev > 1.5 * first.stddev).all())
    whole = calibrate(before, (x, y)).calibration
    assert whole is not None
    assert after.calibration is not None
    assert (whole.own, whole.shared) == pytest.approx((after.calibration.own, after.calibration.shared), rel=1e-5)


@pytest.mark.parametrize("method", ["probhard-ob", "probhard-or", "base", "hardc"])
def test_one_number_of_a_diagonal_law_is_the_best_on_a_grid(method: str) -> None:
    x, y = data(40)
    trained = model(method)
    found = calibrate(trained, (x, y)).calibration
    assert found is not None
    assert found.own == found.shared
    grid = np.geomspace(found.own / 2, found.own * 2, 201)
    losses = []
    for factor in grid:
        law = trained.calibrated(Calibration(factor, factor)).forecast((x,))
        losses.append(float(ph.crps(law, y).sum().detach()))
    assert grid[int(np.argmin(losses))] == pytest.approx(found.own, rel=0.01)


def test_the_energy_score_sees_the_size_of_whole_errors() -> None:
    """Where one variable has most of the error, the factor is that of the best energy score on a grid."""
    scale = torch.full((N,), 1.0, dtype=DOUBLE)
    generator, x = torch.Generator().manual_seed(1), torch.zeros(400, N, dtype=DOUBLE)
    y = 0.3 * torch.randn(400, N, dtype=DOUBLE, generator=generator)
    y[:, 0] *= 20
    before = ph.ConstrainedModel(Fixed(ph.Diagonal(scale)), ph.Box(-1e9, 1e9), METHODS["base"])
    factors = torch.logspace(-0.5, 1.0, 61, dtype=DOUBLE)
    draws = torch.randn(60, 400, N, dtype=DOUBLE, generator=generator)
    losses = [float(ph.energy_score(factor * draws, y, estimator="fair").mean()) for factor in factors]
    best = factors[int(np.argmin(losses))].item()
    found = [calibrate(before, (x, y), energy=weight).calibration.own for weight in (0.0, 1e6)]
    assert found[1] == pytest.approx(best, rel=0.1)
    assert found[0] < 0.5 * best


def test_groups_get_numbers_of_their_own() -> None:
    truth = torch.tensor([3.0, 0.5, 2.0], dtype=DOUBLE)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    narrow = ph.Diagonal(torch.rand(N, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) + 0.5)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3000, N, dtype=DOUBLE, generator=generator)
    y = x + narrow.scaled(truth[labels]).root(torch.randn(3000, N, dtype=DOUBLE, generator=generator))
    found = calibrate(ph.ConstrainedModel(Fixed(narrow), ROWS, "base"), (x, y), groups=10 * labels + 7)
    assert found.calibration is not None
    assert found.calibration.by_group == pytest.approx(truth.tolist(), rel=0.05)
    assert found.calibration.groups == tuple(labels.tolist())
    torch.testing.assert_close(found.forecast((x,)).stddev[0], narrow.stddev * truth[labels], rtol=0.05, atol=0)
    lines = str(found.calibration)
    assert "group 0 times" in lines
    assert "group 2 times" in lines


def test_groups_and_weights_together() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    truth = torch.tensor([2.0, 0.7], dtype=DOUBLE)
    wide = factors().weighted(1.0, 2.5).scaled(truth[labels])
    x, y = units(wide, ROWS)
    found = calibrate(
        ph.ConstrainedModel(Fixed(factors()), ROWS), (x, y), groups=labels, functionals=FUNCTIONALS
    ).calibration
    assert found is not None
    assert found.own == 1
    assert found.shared == pytest.approx(2.5, rel=0.25)
    assert found.by_group == pytest.approx(truth.tolist(), rel=0.25)


def test_masked_targets_do_not_count() -> None:
    x, y = data(40)
    mask = torch.ones_like(y, dtype=torch.bool)
    mask[::3] = False
    holed = torch.where(mask, y, torch.nan)
    kept = mask.all(-1)
    some, rest = (calibrate(model(), batch).calibration for batch in ((x, holed, mask), (x[kept], y[kept])))
    assert some is not None
    assert rest is not None
    assert some.own == pytest.approx(rest.own, rel=1e-6)


def test_a_calibrated_model_is_saved_with_its_numbers(tmp_path: Path) -> None:
    x, y = data(20)
    first = calibrate(model(), (x, y))
    first.save(tmp_path / "model.pt")
    second = ph.ConstrainedModel.load(tmp_path / "model.pt", Backbone(seed=9), ROWS)
    assert second.calibration == first.calibration
    torch.testing.assert_close(second.forecast((x,)).stddev, first.forecast((x,)).stddev, rtol=0, atol=0)
    losses = [float(m.loss((x, y)).detach()) for m in (first, second, model())]
    assert losses[0] == losses[1] < losses[2]
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert content["version"] == 2  # earlier versions would ignore the numbers
    model().save(tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["version"] == 1
    content["calibration"] = {"own": 1.0}
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ParameterError, match=r"model\.pt.*Calibrate the model again"):
        ph.ConstrainedModel.load(tmp_path / "model.pt", Backbone(), ROWS)


def test_a_calibration_applies_to_any_law_that_has_its_parts() -> None:
    numbers = Calibration(2.0, 3.0)
    law = ph.LocationScale(torch.zeros(N, dtype=DOUBLE), factors())
    dense = law.cov.factor @ law.cov.factor.mT
    expected = 4 * torch.diag(law.cov.diagonal_part) + 9 * dense
    torch.testing.assert_close(numbers.apply(law).cov.dense(), expected)
    assert str(numbers) == "own part times 2; correlated part times 3"
    assert Calibration.from_record(numbers.record()) == numbers
    with pytest.raises(ParameterError, match="no own and correlated part"):
        numbers.apply(ph.LocationScale(law.loc, ph.Diagonal(torch.ones(N, dtype=DOUBLE))))
    assert str(Calibration(0.5, 0.5)) == "standard deviations times 0.5"


@pytest.mark.parametrize(
    ("validation", "options", "error", "text"),
    [
        ([], {}, ParameterError, "no validation data"),
        ((torch.zeros(0, 3, dtype=DOUBLE), torch.zeros(0, N, dtype=DOUBLE)), {}, ParameterError, "no validation data"),
        ((torch.zeros(2, 3, dtype=DOUBLE),), {}, ParameterError, "without targets"),
        (data(), {"groups": [0, 1]}, ShapeError, "7 variables"),
        (data(), {"groups": torch.zeros(N)}, ParameterError, "float32"),
        ((data()[0], data()[1] * torch.nan), {}, ParameterError, "not finite"),
    ],
)
def test_errors_say_what_to_do(validation: object, options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        calibrate(model(), validation, **options)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("numbers", [(0.0, 1.0), (1.0, float("inf")), (1.0, 1.0, (2.0,)), (1.0, 1.0, (2.0,), (1,))])
def test_impossible_numbers_are_refused(numbers: tuple) -> None:
    with pytest.raises(ParameterError):
        Calibration(*numbers)


def test_the_factor_of_draws_undoes_their_narrowness() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, 400, dtype=DOUBLE, generator=generator)
    draws = torch.randn(500, 3, 400, dtype=DOUBLE, generator=generator) / 4
    holed = y.clone()
    holed[0, :5] = torch.nan
    assert draws_factor([draws], [holed]) == pytest.approx(4.0, rel=0.1)


SHAPE = (4, 8)
CELLS = math.prod(SHAPE)


def spectral(boundary: str) -> ph.Spectral:
    power = 1 / (1 + wave_numbers(SHAPE, boundary).square().sum(-1))
    ones = torch.ones(CELLS, dtype=DOUBLE)
    return ph.Spectral(SHAPE, power, ones, 0.003 * ones, boundary)


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "zero"])
def test_waves_of_every_octave_get_numbers_of_their_own(boundary: str) -> None:
    law = spectral(boundary)
    labels = octaves(law)
    truth = torch.linspace(3.0, 2.0, int(labels.max()) + 1, dtype=DOUBLE)
    exact = Calibration(1.5, 1.0, by_octave=truth.tolist())
    constraint = ph.Conservation(torch.ones(CELLS, dtype=DOUBLE), 0.0)
    method = METHODS["probhard-ob"].replace(functionals=BlockMeans(SHAPE, (1, 2, 4)))
    before = ph.ConstrainedModel(Fixed(law), constraint, method)
    x = torch.zeros(1500, CELLS, dtype=DOUBLE)
    y = before.calibrated(exact).sample((x,), 1, torch.Generator().manual_seed(0))[0]
    after = calibrate(before, (x, y), octaves=True)
    found = after.calibration
    assert found is not None
    assert found.by_octave[1] == pytest.approx(truth[1].item(), rel=0.1)  # short waves and own noise are much alike
    scales = [
        m.forecast((x[:1],)).functional(method.functionals.rows(CELLS)).scale for m in (after, before.calibrated(exact))
    ]
    torch.testing.assert_close(*scales, rtol=0.05, atol=0)
    assert "waves of octave 1 times" in str(found)
    assert Calibration.from_record(found.record()) == found


def test_octaves_are_powers_of_two() -> None:
    line = ph.Spectral((9,), *(torch.ones(9, dtype=DOUBLE) for _ in range(3)), "reflecting")
    assert octaves(line).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4]
    with pytest.raises(ParameterError, match="Only a spectral covariance"):
        calibrate(model(), data(), octaves=True)
    with pytest.raises(ParameterError, match="another grid"):
        Calibration(by_octave=(1.0, 2.0)).apply(ph.LocationScale(torch.zeros(9, dtype=DOUBLE), line))


@pytest.mark.parametrize("kind", ["low rank", "spectral", "along a hierarchy"])
def test_means_are_the_same_numbers(kind: str) -> None:
    cov = covariance(kind, 8)
    rows = ph.Conservation(torch.ones(8, dtype=DOUBLE), 2.0)
    before = ph.ConstrainedModel(Fixed(cov), rows)
    x = torch.randn(5, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    after = before.calibrated(Calibration(0.5, 4.0))
    assert torch.equal(before.forecast((x,)).mean, after.forecast((x,)).mean)
    assert not torch.allclose(before.forecast((x,)).stddev, after.forecast((x,)).stddev)
