"""A factor learned in a second phase: the operator stays, sums become honest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.errors import ParameterError
from probhard.method import Method, Step
from probhard.pde import Correlated, VarianceNO
from probhard.training import Schedule, fit

SHAPE = (8, 16)
BLOCKS = ph.BlockMeans(SHAPE, (2, 4))
METHOD = Method(Step("variances"), Step("variances"), functionals=BLOCKS)


def operator() -> VarianceNO:
    torch.manual_seed(0)
    return VarianceNO(2, (3, 3), 6, 2, padding=0)


def mass() -> ph.Conservation:
    return ph.Conservation(torch.full((128,), 1 / 128), 0.0)


def data(net: VarianceNO, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets around the operator's mean, whose errors are one smooth wave each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, *SHAPE, generator=generator)
    wave = torch.cos(torch.pi * (torch.arange(16) + 0.5) / 16).expand(SHAPE).flatten()
    with torch.no_grad():
        law = net(inputs)
        mean = ph.DPPL("oblique")(law, mass()).mean
        stddev = law.variance.sqrt()
    noise = torch.randn(count, 1, generator=generator) * wave + 0.1 * torch.randn(count, 128, generator=generator)
    noise = stddev * noise
    return inputs, mean + noise - noise.mean(-1, keepdim=True)


def test_the_mean_stays_and_bands_of_sums_become_right() -> None:
    net = operator()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = ph.ConstrainedModel(Correlated(net, 4), mass(), METHOD)
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.operator.state_dict().items())
    start = [score(model, net), covered(model, net)]
    fit(model, data(net, 120, 1), data(net, 40, 2), Schedule(25, 20, lr=2e-2), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.operator.state_dict().items())
    assert all(weight.grad is None for weight in model.backbone.operator.parameters())
    inputs, target = data(net, 200, 3)
    mean = model.forecast(inputs).mean
    alone = ph.ConstrainedModel(net, mass())
    torch.testing.assert_close(model.backbone(inputs).mean, net(inputs).mean, rtol=0, atol=0)
    assert (mean - target).square().mean() < 1.05 * (alone.forecast(inputs).mean - target).square().mean()
    assert score(model, net) < 0.95 * min(start[0], score(alone, net))
    assert 0.8 < covered(model, net) < 0.97
    assert covered(alone, net) < 0.75


def score(model: ph.ConstrainedModel, net: VarianceNO) -> float:
    inputs, target = data(net, 200, 3)
    with torch.no_grad():
        return float(ph.crps(model.forecast(inputs), target, functionals=BLOCKS).mean())


def covered(model: ph.ConstrainedModel, net: VarianceNO) -> float:
    """Share of block means in 90 % bands."""
    inputs, target = data(net, 200, 3)
    rows = BLOCKS.rows(128)
    with torch.no_grad():
        law = model.forecast(inputs)
        error, scale = rows.at(target).apply(target - law.mean), law.functional(rows).scale
    return float((error.abs() <= 1.645 * scale).double().mean())


def test_draws_obey_and_models_are_saved(tmp_path) -> None:
    net = operator()
    model = ph.ConstrainedModel(Correlated(net, 4), mass(), METHOD)
    inputs, _ = data(net, 3, 1)
    assert mass().violation(model.sample(inputs, 10)).max() < 1e-5
    model.save(tmp_path / "model.pt")
    again = ph.ConstrainedModel.load(tmp_path / "model.pt", Correlated(operator(), 4), mass())
    torch.testing.assert_close(again.forecast(inputs).stddev, model.forecast(inputs).stddev)
    assert again.method.inference.metric == "variances"


def test_what_has_a_joint_law_is_refused() -> None:
    for net, rank in ((VarianceNO(2, (3, 3), 6, 2, rank=2), 4), (operator(), 0)):
        with pytest.raises(ParameterError, match="VarianceNO of independent points"):
            Correlated(net, rank)
