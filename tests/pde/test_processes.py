"""Fields from scattered observations: the exact Gaussian process, and the neural process beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import probhard as ph
from probhard.pde import AttentiveNP, GaussianProcess, Observations

NOISE = 0.01


def drawn(process: GaussianProcess, count: int, generator: torch.Generator, seen: int = 8, n: int = 12) -> Observations:
    """Functions of a Gaussian process on [0, 2], with noise."""
    x = 2 * torch.rand(count, seen + n, 1, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        cov = process.kernel(x, x) + process._noise() * torch.eye(seen + n)
        y = torch.linalg.cholesky(cov) @ torch.randn(count, seen + n, 1, generator=generator, dtype=torch.float64)
    x, y = x.float(), y.squeeze(-1).float()
    return Observations(x[:, :seen], y[:, :seen], x[:, seen:], y[:, seen:])


def test_posterior_against_gpytorch() -> None:
    gpytorch = pytest.importorskip("gpytorch")
    process = GaussianProcess(2, (0.4, 0.9), 1.7, NOISE)
    x, y, targets = torch.rand(1, 9, 2).double(), torch.randn(1, 9).double(), torch.rand(1, 5, 2).double()

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x[0], y[0], likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

        def forward(self, places: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(places), self.kernel(places))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    peer = Exact(likelihood).double()
    likelihood.noise = float(process._noise().detach())
    peer.kernel.outputscale = 1.7
    peer.kernel.base_kernel.lengthscale = torch.tensor([0.4, 0.9])
    margin = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, peer)
    evidence = margin(peer.train()(x[0]), y[0]) * y.shape[-1]
    torch.testing.assert_close(process.evidence((x, y, targets))[0], evidence)
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        law = likelihood.eval()(peer.eval()(targets[0]))
    ours = process((x, y, targets))
    torch.testing.assert_close(ours.mean[0], law.mean)
    tril = ours.cov.scale_tril[0]
    torch.testing.assert_close(tril @ tril.mT, law.covariance_matrix)


def test_the_neural_process_comes_nearer_to_the_process_that_made_the_data() -> None:
    source = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    process, network = GaussianProcess(1, (0.8,), 1.0, NOISE), AttentiveNP(1, 16, draws=5)
    test = drawn(process, 200, source)
    model = ph.ConstrainedModel(network, ph.Box(-9.0, 9.0), "base", network.latent_score())
    assert test.truth is not None

    def gap() -> float:
        """Mean log likelihood per target that the network lacks."""
        asked = Observations(test.places, test.values, test.targets)
        with torch.no_grad():
            return float((ph.nll(network(asked), test.truth) - ph.nll(process(asked), test.truth)).mean())

    gaps = [gap()]
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(2):
        for _ in range(40):
            batch = drawn(process, 32, source)
            optimiser.zero_grad()
            model.loss((batch, batch.truth)).backward()
            optimiser.step()
        gaps.append(gap())
    assert gaps[0] > gaps[1] > gaps[2] > 0  # the process itself has the best likelihood
    assert gaps[2] < 0.6 * gaps[0]
    assert all(weight.grad is not None for weight in network.parameters())


def test_divergence_against_draws() -> None:
    torch.manual_seed(0)
    network = AttentiveNP(1, 8)
    batch = drawn(GaussianProcess(1), 2, torch.Generator().manual_seed(0))
    assert batch.truth is not None
    first = torch.distributions.Normal(*network._encoded(batch.targets, batch.truth))
    second = torch.distributions.Normal(*network._encoded(batch.places, batch.values))
    z = first.sample((20_000,))
    expected = (first.log_prob(z) - second.log_prob(z)).sum(-1).mean(0)
    torch.testing.assert_close(network.divergence(batch), expected, rtol=0.05, atol=0.02)


def test_order_of_observations_does_not_matter() -> None:
    network = AttentiveNP(1, 8).eval()
    batch = drawn(GaussianProcess(1), 3, torch.Generator().manual_seed(0))
    order = torch.randperm(batch.values.shape[1])
    asked = Observations(batch.places, batch.values, batch.targets)
    moved = Observations(batch.places[:, order], batch.values[:, order], batch.targets)
    torch.testing.assert_close(network(asked).mean, network(moved).mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(network(asked).variance, network(moved).variance, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("method", ["probhard-ob", "probconserv", "hardc"])
def test_processes_are_backbones(method: str, correlated: bool) -> None:
    batch = drawn(GaussianProcess(1), 3, torch.Generator().manual_seed(0))
    total = ph.LinearEquality(torch.ones(1, 12), torch.zeros(1))
    for backbone in (AttentiveNP(1, 8, draws=4, correlated=correlated), GaussianProcess(1)):
        model = ph.ConstrainedModel(backbone, total, method)
        asked = Observations(batch.places, batch.values, batch.targets)
        assert float(total.violation(model.forecast((asked,)).mean).max()) < 1e-4
        model.loss((asked, batch.truth)).backward()


def test_bad_requests() -> None:
    with pytest.raises(ph.ShapeError, match="one value each"):
        Observations.of((torch.ones(2, 3, 1), torch.ones(2, 4), torch.ones(2, 5, 1)))
    with pytest.raises(ph.ParameterError, match="width=6"):
        AttentiveNP(1, 6)
    with pytest.raises(ph.ParameterError, match="lengths"):
        GaussianProcess(2, (1.0,))
