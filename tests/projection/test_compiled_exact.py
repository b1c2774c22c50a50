"""torch.compile of models with exact projections on inequalities: solvers run outside the graph."""

from __future__ import annotations

import pytest
import torch

import probhard as ph
from registry import rand, randn

N = 6
SUMS = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], *torch.eye(4).tolist()])
SETS = {
    "simplex": lambda: ph.Simplex(),
    "monotone": lambda: ph.Monotone(),
    "hierarchy and bounds": lambda: ph.Hierarchy(SUMS) & ph.NonNegative(),
    "rows": lambda: ph.LinearInequality(randn(4, N), rand(4)),
    "turnover": lambda: ph.Simplex() & ph.L1Ball(0.5, torch.full((N,), 1 / N)),
    "sphere": lambda: ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 1),
}


def network() -> torch.nn.Module:
    return torch.nn.Linear(3, N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(SETS))
def test_a_compiled_loss_equals_the_eager_one(name, dtype):
    torch._dynamo.reset()
    constraint, net, layer = SETS[name](), network().to(dtype), ph.DPPL()
    x, y = randn(5, 3).to(dtype), rand(5, N).to(dtype)

    def loss(x, y):
        mean = net(x)
        projected = layer((mean, mean.exp()), constraint)
        return ph.crps(projected, y).sum() + projected.mean.square().sum()

    expected = torch.autograd.grad(loss(x, y), list(net.parameters()))
    actual = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x, y), list(net.parameters()))
    torch.testing.assert_close(actual, expected)


def test_compiled_points_and_samples():
    torch._dynamo.reset()
    layer, constraint, z = ph.DPPL("orthogonal"), ph.Monotone(), randn(4, N)

    def both(z):
        return layer.project(z, constraint).value, layer.project_samples(z, constraint).value

    torch.testing.assert_close(torch.compile(both, backend="eager")(z), both(z))


def test_compiled_draws_are_feasible():
    torch._dynamo.reset()
    layer, constraint = ph.DPPL(), ph.Simplex()
    draws = torch.compile(lambda m: layer((m, m.exp()), constraint).sample((20,)), backend="eager")(randn(4, N))
    assert constraint.violation(draws).max() < 1e-14
    assert draws.std(0).max() > 0


def test_an_empty_set_is_still_an_error():
    torch._dynamo.reset()
    layer = ph.DPPL(validate_args=False)
    constraint = ph.Conservation(torch.ones(N), torch.tensor(1.0)) & ph.Box(0.0, 0.1)
    with pytest.raises(ph.InfeasibleError):
        torch.compile(lambda m: layer((m, m.exp()), constraint).sample((3,)), backend="eager")(randn(4, N))


def test_export_names_the_way_out():
    class Model(torch.nn.Module):
        def forward(self, z):
            return ph.DPPL("orthogonal").project(z, ph.Simplex()).value

    with pytest.raises(ph.ParameterError, match="iterations"):
        torch.export.export(Model(), (randn(3, N),), strict=False)


@pytest.mark.slow
def test_inductor(compiler):
    layer, net = ph.DPPL(), network()
    x, y = randn(5, 3), rand(5, N)
    for name in ("simplex", "monotone"):
        constraint = SETS[name]()

        def loss(x, y, constraint=constraint):
            mean = net(x)
            return ph.crps(layer((mean, mean.exp()), constraint), y).sum()

        torch.testing.assert_close(torch.compile(loss)(x, y), loss(x, y))
