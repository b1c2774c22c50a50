"""Learned metrics: their gradients, training and saving."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from probhard import (
    DPPL,
    ConstrainedModel,
    DenseMetric,
    Diagonal,
    DiagonalMetric,
    Hierarchy,
    LocationScale,
    LowRankMetric,
    Method,
    Step,
    crps,
)
from small_model import (
    DOUBLE,
    Backbone,
    N,
    S,
    data,
)


def learned(kind: str, learn: bool = True):
    generator = torch.Generator().manual_seed(10)
    ones = torch.ones(N, dtype=DOUBLE)
    if kind == "diagonal":
        return DiagonalMetric(ones, learn)
    if kind == "low rank":
        return LowRankMetric(0.3 * torch.randn(N, 2, dtype=DOUBLE, generator=generator), ones, learn)
    return DenseMetric(torch.diag(ones) + 0.2 * torch.randn(N, N, dtype=DOUBLE, generator=generator).tril(-1), learn)


def with_metric(metric, draws: int = 0) -> Method:
    return Method(Step(metric, draws=draws), Step(metric))


each_metric = pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])


@each_metric
def test_a_learned_metric_is_trained(kind):
    x, y = data(64)
    metric = learned(kind)
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric))
    before = {name: value.detach().clone() for name, value in metric.named_parameters()}
    assert before
    assert {id(p) for p in metric.parameters()} <= {id(p) for p in one.parameters()}
    weight = metric.weight(y, None).dense().detach()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = one.loss((x, y))
        loss.backward()
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all()
        optimizer.step()
        losses.append(loss.item())
    for name, value in metric.named_parameters():
        assert (value - before[name]).abs().max() > 1e-3, name
    after = metric.weight(y, None).dense().detach()
    assert (after - weight).abs().max() > 1e-2
    assert torch.linalg.eigvalsh(after).min() > 0
    assert losses[-1] < losses[0]
    assert Hierarchy(S).violation(one.sample(x, 5)).max() < 1e-11


@each_metric
def test_the_gradient_of_a_learned_metric_is_right(kind):
    x, y = data(2)
    metric = learned(kind)
    names = [name for name, _ in metric.named_parameters()]
    with torch.no_grad():
        base = LocationScale(Backbone()(x)[0], Diagonal.from_stddev(Backbone()(x)[1]))

    def loss(*values):
        layer = DPPL(metric)
        parameters = {f"layer.metric.{name}": value for name, value in zip(names, values)}
        return torch.func.functional_call(Score(layer), parameters, (base, y))

    assert torch.autograd.gradcheck(loss, tuple(p.detach().clone().requires_grad_() for p in metric.parameters()))


class Score(nn.Module):
    def __init__(self, layer: DPPL) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, base, y):
        return crps(self.layer(base, Hierarchy(S)), y).sum()


@each_metric
def test_a_fixed_metric_has_no_parameters_and_matches_its_learned_twin(kind):
    x, _ = data()
    fixed, trained = learned(kind, learn=False), learned(kind)
    assert not list(fixed.parameters())
    assert list(fixed.buffers())
    first = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(fixed)).forecast(x)
    second = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(trained)).forecast(x)
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-12, atol=1e-12)


@each_metric
def test_a_learned_metric_is_saved_with_the_model(kind, tmp_path):
    x, y = data()
    metric = learned(kind)
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric))
    optimizer = torch.optim.Adam(one.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        one.loss((x, y)).backward()
        optimizer.step()
    one.save(tmp_path / "model.pt")
    fresh = learned(kind)
    other = ConstrainedModel.load(tmp_path / "model.pt", Backbone(), Hierarchy(S), with_metric(fresh))
    for first, second in zip(metric.parameters(), fresh.parameters()):
        assert torch.equal(first, second)
    assert torch.equal(other.forecast(x).mean, one.forecast(x).mean)
    assert torch.equal(other.forecast(x).variance, one.forecast(x).variance)


def test_a_learned_metric_can_be_trained_by_draws():
    x, y = data()
    metric = learned("diagonal")
    one = ConstrainedModel(Backbone(), Hierarchy(S), with_metric(metric, draws=30).replace(score="quantile"))
    one.loss((x, y)).backward()
    assert metric.values.grad.isfinite().all()
    assert metric.values.grad.any()
