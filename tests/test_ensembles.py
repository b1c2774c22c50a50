"""Mixtures as backbones: moments, draws that keep the mixture's shape, dropout under control."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import probhard as ph
from probhard import Mixture
from probhard.ensembles import DeepEnsemble, MCDropout, fit_ensemble
from probhard.pde.operators import VarianceNO

N = 4


class Network(nn.Module):
    """A small backbone with dropout."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, 2 * N))

    def forward(self, x):
        mean, raw = self.body(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.05


class Constant(nn.Module):
    """Says the same law for every input."""

    def __init__(self, mean: torch.Tensor, stddev: float) -> None:
        super().__init__()
        self.mean, self.stddev = nn.Parameter(mean), stddev

    def forward(self, x):
        mean = self.mean.expand(len(x), -1)
        return mean, torch.full_like(mean, self.stddev)


def total() -> ph.LinearEquality:
    return ph.LinearEquality(torch.ones(1, N), torch.tensor([2.0]))


def backbones():
    return {"ensemble": DeepEnsemble([Network() for _ in range(3)]).eval(), "dropout": MCDropout(Network(), 5)}


def test_moments_are_those_of_the_mixture():
    means, stddevs = torch.randn(3, 2, N), torch.rand(3, 2, N) + 0.1
    mixture = Mixture(tuple(ph.as_location_scale(pair) for pair in zip(means, stddevs)))
    same = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(2, N, 3)),
        torch.distributions.Normal(means.movedim(0, -1), stddevs.movedim(0, -1)),
    )
    torch.testing.assert_close(mixture.matched().mean, same.mean)
    torch.testing.assert_close(mixture.matched().variance, same.variance)


def test_moments_of_members_of_another_family():
    laws = [ph.LocationScale(torch.randn(N), ph.Diagonal(torch.rand(N)), ph.student_t(5.0)) for _ in range(2)]
    spread = (laws[0].mean - laws[1].mean).square() / 4
    expected = (laws[0].variance + laws[1].variance) / 2 + spread
    torch.testing.assert_close(Mixture(tuple(laws)).matched().variance, expected)


def test_draws_come_from_all_members_alike():
    laws = tuple(ph.as_location_scale((torch.full((N,), float(i)), torch.full((N,), 1e-3))) for i in range(3))
    draws = Mixture(laws).rsample(8, torch.Generator().manual_seed(0))
    assert draws.round().mean(-1).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("name", ["ensemble", "dropout"])
@pytest.mark.parametrize("method", sorted(ph.METHODS))
def test_every_method_takes_them(name, method):
    backbone = backbones()[name]
    model = ph.ConstrainedModel(backbone, total(), method)
    batch = (torch.randn(5, 3), torch.randn(5, N))
    model.loss(batch).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    forecast = model.forecast(batch)
    draws = model.sample(batch, 30)
    assert draws.shape == (30, 5, N)
    if forecast.feasible:
        assert float(total().violation(draws).max()) < 1e-12
    state = model.state_dict()
    copy.deepcopy(model).load_state_dict(state, strict=True)


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_projected_draws_are_feasible_and_keep_two_modes(metric):
    apart = torch.tensor([1.0, -1.0, 0.0, 0.0])
    ensemble = DeepEnsemble([Constant(0.5 + apart, 0.05), Constant(0.5 - apart, 0.05)])
    inputs = torch.zeros(2, 3)
    layer, generator = ph.DPPL(metric), torch.Generator().manual_seed(0)
    solution = ensemble.mixture(inputs).project(layer, total(), 400, generator)
    draws = solution.value
    assert bool(solution.stats.converged.all())
    assert float(total().violation(draws).max()) < 1e-12
    assert not draws.requires_grad
    near = (draws[..., 0] - 0.5).abs()
    assert float((near - 1).abs().max()) < 0.3  # every draw is near one of the two members
    matched = layer(ensemble(inputs), total()).sample((400,), generator)
    assert float(((matched[..., 0] - 0.5).abs() < 0.5).double().mean()) > 0.2  # its normal law fills the gap


def test_projected_draws_obey_inequalities_too():
    ensemble = DeepEnsemble([Network() for _ in range(3)]).eval()
    both = ph.Simplex(2.0)
    draws = ensemble.mixture(torch.randn(4, 3)).project(ph.DPPL(), both, 30).value
    assert float(both.violation(draws).max()) < 1e-10
    assert bool((draws == 0).any())


def test_dropout_has_the_moments_of_random_masks():
    rate, passes = 0.3, 1000
    linear = nn.Linear(6, N, bias=False)

    class Thin(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(rate), linear

        def forward(self, x):
            mean = self.linear(self.drop(x))
            return mean, torch.full_like(mean, 0.5)

    inputs = torch.randn(2, 6)
    law = MCDropout(Thin(), passes)(inputs)
    parts = linear.weight * inputs[:, None, :]
    variance = (parts.square() * rate / (1 - rate)).sum(-1)
    assert ((law.mean - parts.sum(-1)) / (variance / passes).sqrt()).abs().max().item() < 4.5
    torch.testing.assert_close(law.variance, variance + 0.25, rtol=0.2, atol=0)


def test_dropout_is_on_in_both_modes_and_leaves_no_trace():
    model = MCDropout(Network(0.5), 4)
    inputs = torch.randn(6, 3)
    plain = model.backbone.eval()(inputs)[0]
    state = torch.get_rng_state()
    trained, evaluated = model.train()(inputs), model.eval()(inputs)
    assert torch.equal(trained.mean, evaluated.mean)
    assert float(evaluated.mean.sub(plain).abs().max()) > 1e-3
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.backbone(inputs)[0], plain)
    assert model.train().backbone.body[2].training
    assert not torch.equal(model.backbone(inputs)[0], model.backbone(inputs)[0])


def test_a_forecast_does_not_depend_on_its_batch():
    model = MCDropout(Network(0.5), 4)
    inputs = torch.randn(6, 3)
    torch.testing.assert_close(model(inputs).mean[3:4], model(inputs[3:4]).mean)
    torch.testing.assert_close(model(inputs).variance[3:4], model(inputs[3:4]).variance)


def test_seeds_choose_the_masks():
    backbone, inputs = Network(0.5), torch.randn(6, 3)
    first, again, other = (MCDropout(backbone, 4, seed)(inputs).mean for seed in (0, 0, 9))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    fresh = MCDropout(backbone, 4, None)
    torch.manual_seed(1)
    one, two = fresh(inputs).mean, fresh(inputs).mean
    torch.manual_seed(1)
    assert torch.equal(fresh(inputs).mean, one)
    assert not torch.allclose(one, two)


def test_channel_dropout_drops_whole_channels():
    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout2d(0.5)

        def forward(self, x):
            mean = self.drop(x).flatten(1)
            return mean, torch.ones_like(mean)

    members = MCDropout(Channels(), 10).mixture(torch.ones(2, 8, 3, 3)).members
    values = torch.stack([member.mean for member in members]).unflatten(-1, (8, 9))
    assert torch.equal(values.amin(-1), values.amax(-1))
    assert set(values.unique().tolist()) == {0.0, 2.0}


def test_dropout_works_on_a_compiled_operator(compiler):
    net = VarianceNO(modes=(2,), width=4, layers=2, dropout=0.3).eval()
    inputs = torch.randn(2, 3, 8)
    expected = MCDropout(net, 3)(inputs)
    net.compile(backend="aot_eager")
    plain = net(inputs).mean
    forecast = MCDropout(net, 3)(inputs)
    assert torch.equal(forecast.mean, expected.mean)
    assert not torch.allclose(forecast.mean, plain)
    torch.testing.assert_close(net(inputs).mean, plain)


def test_errors_say_what_to_do():
    with pytest.raises(ph.ParameterError, match="no members"):
        DeepEnsemble([])
    with pytest.raises(ph.ParameterError, match="without active dropout"):
        MCDropout(Network(0.0))
    with pytest.raises(ph.ParameterError, match="passes=0"):
        MCDropout(Network(), 0)


def test_members_are_trained_apart(tmp_path):
    training = pytest.importorskip("probhard.training")
    inputs = torch.randn(24, 3)
    target = torch.tanh(inputs @ torch.randn(3, N))
    data = (inputs[:16], target[:16]), (inputs[16:], target[16:])
    schedule = training.Schedule(3, batch_size=8, lr=1e-2)

    def build():
        return ph.ConstrainedModel(Network(), total(), "probhard-ob")

    ensemble, fits = fit_ensemble(build, 2, *data, schedule, seed=3, directory=tmp_path, progress=False)
    assert [one.epochs for one in fits] == [3, 3]
    torch.manual_seed(7)
    single = build()
    alone = training.fit(single, *data, schedule, seed=7, progress=False)
    assert alone.history == fits[1].history != fits[0].history
    for mine, other in zip(single.backbone.parameters(), ensemble.members[1].parameters()):
        assert torch.equal(mine, other)
    resumed, _ = fit_ensemble(build, 2, *data, schedule, seed=3, directory=tmp_path, progress=False)
    assert torch.equal(resumed(inputs).mean, ensemble(inputs).mean)
    model = ph.ConstrainedModel(ensemble, total(), "probhard-ob")
    assert float(total().violation(model.sample(inputs, 10)).max()) < 1e-12
