"""``DPPL(iterations=K)``: branch-free projections that compile, export and vectorise; the exact layer is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from registry import rand, randn

N = 9
SUMS = torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3, [0.0] * 3 + [1.0] * 3, *torch.eye(6).tolist()])


def rows():
    inside = 0.1 * randn(N)
    A, G = randn(3, N), randn(6, N)
    return ph.LinearEquality(A, A @ inside) & ph.LinearInequality(G, G @ inside + rand(6)) & ph.Box(-1.0, 1.0)


SETS = {
    "simplex": lambda: ph.Simplex(),
    "slices": lambda: ph.per_slice(ph.Simplex(), shape=(3, 3)),
    "monotone": lambda: ph.Monotone("decreasing"),
    "mass and profile": lambda: (
        ph.Monotone() & ph.Conservation(torch.ones(N), torch.tensor(3.0)) & ph.Box(0.0, torch.inf)
    ),
    "hierarchy": lambda: ph.Hierarchy(SUMS) & ph.NonNegative(),
    "dense rows": rows,
    "l1": lambda: ph.L1Ball(1.5, 0.2 * randn(N)),
    "turnover": lambda: ph.Simplex() & ph.L1Ball(0.5, torch.full((N,), 1 / N)),
    "variation": lambda: ph.TotalVariation(1.0),
    "variation of slices": lambda: ph.per_slice(ph.TotalVariation(0.5), shape=(3, 3)) & ph.Box(-1.0, 1.0),
    "convex": lambda: ph.Convex(),
}
METRICS = {
    "orthogonal": lambda: "orthogonal",
    "oblique": lambda: "oblique",
    "dense": lambda: ph.DenseMetric(torch.eye(N) + 0.3 * randn(N, N).tril(-1)),
}


TRACED = ["simplex", "mass and profile", "dense rows", "turnover"]  # each kind of row, for the tests that compile


@pytest.fixture(params=list(SETS))
def constraint(request):
    return SETS[request.param]()


@pytest.fixture(params=TRACED)
def traced(request):
    return SETS[request.param]()


@pytest.mark.parametrize("metric", list(METRICS))
def test_points_and_gradients_are_those_of_the_exact_layer(constraint, metric):
    metric = METRICS[metric]()
    z, stddev, up = randn(20, N).requires_grad_(), (rand(20, N) + 0.3).requires_grad_(), randn(20, N)
    values, gradients = [], []
    for iterations in (None, 200):
        layer = ph.DPPL(metric, iterations=iterations, on_failure="flag")
        solution = layer.project(z, constraint, dist=(z.detach(), stddev))
        values.append(solution)
        gradients.append(torch.autograd.grad((solution.value * up).sum(), [z, stddev], allow_unused=True))
    exact, found = values
    assert found.stats.converged.double().mean() >= 0.9
    settled = found.stats.converged & exact.stats.converged
    torch.testing.assert_close(found.value[settled], exact.value[settled], rtol=1e-8, atol=1e-8)
    for a, b in zip(gradients[1], gradients[0]):
        if b is not None:
            torch.testing.assert_close(a[settled], b[settled], rtol=1e-4, atol=2e-5)  # L1 balls are inexact in b
    assert constraint.violation(found.value[found.stats.converged]).max() < 1e-10


def test_few_iterations_say_so():
    """A residual that is too large is reported, and nothing is called feasible."""
    n = 12
    constraint = ph.Convex() & ph.Box(-0.2, 0.2)
    layer = ph.DPPL("orthogonal", covariance="delta", iterations=1, on_failure="raise")
    law = layer((3 * randn(40, n), rand(40, n)), constraint)
    assert not law.stats.converged.all()
    assert law.stats.residual.max() > 1e-3
    assert not law.feasible
    with pytest.raises(ph.ConvergenceError):
        law.sample((50,))
    again = ph.DPPL("orthogonal", iterations=400).project(law.base.loc, constraint)
    assert again.stats.converged.double().mean() > law.stats.converged.double().mean()


def test_a_feasible_law_is_called_feasible():
    law = randn(5, N), rand(5, N)
    for constraint, covariance in ((ph.Simplex(), "censored"), (ph.Monotone(), "monte-carlo")):
        projected = ph.DPPL(covariance=covariance, iterations=100)(law, constraint)
        assert projected.feasible
        assert constraint.violation(projected.sample((30,))).max() < 1e-13
        exact = ph.DPPL(covariance=covariance)(law, constraint)
        torch.testing.assert_close(projected.mean, exact.mean, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(projected.variance, exact.variance, rtol=1e-8, atol=1e-9)


def test_the_tangent_is_the_jacobian(constraint):
    z = randn(N)
    layer = ph.DPPL("orthogonal", iterations=200)
    solution = layer.project(z, constraint)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer.project(x, constraint).value, z)
    columns = solution.tangent.apply(torch.eye(N)).mT
    torch.testing.assert_close(columns, jacobian, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solution.tangent.transpose(torch.eye(N)), jacobian, rtol=1e-9, atol=1e-9)
    step = 1e-6 * randn(N)
    moved = (layer.project(z + step, constraint).value - layer.project(z - step, constraint).value) / 2
    torch.testing.assert_close(jacobian @ step, moved, rtol=1e-5, atol=1e-10)


def test_one_graph(traced):
    torch._dynamo.reset()
    layer, net, y = ph.DPPL("oblique", iterations=5), nn.Linear(3, N), rand(4, N)

    def loss(x):
        mean = net(x)
        solution = layer.project(mean, traced, dist=(mean, mean.exp()))
        return (solution.value - y).square().sum(), solution.stats.residual

    x = randn(4, 3)
    (expected, residual), (actual, found) = loss(x), torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close((actual, found), (expected, residual), rtol=1e-7, atol=1e-7)
    for a, b in zip(*(torch.autograd.grad(value, list(net.parameters())) for value in (actual, expected))):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_law_is_one_graph():
    torch._dynamo.reset()
    layer, constraint, y = ph.DPPL(iterations=5, draws=10), ph.Simplex() & ph.Box(0.0, 0.5), rand(4, N)

    def loss(mean, stddev):
        return ph.crps(layer((mean, stddev), constraint), y).sum()

    arguments = randn(4, N).requires_grad_(), (rand(4, N) + 0.1).requires_grad_()
    expected = loss(*arguments)
    actual = torch.compile(loss, backend="aot_eager", fullgraph=True)(*arguments)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, arguments), torch.autograd.grad(expected, arguments))


class Points(nn.Module):
    def __init__(self, constraint, metric, iterations=5):
        super().__init__()
        self.constraint, self.layer = constraint, ph.DPPL(metric, iterations=iterations)

    def forward(self, z, stddev):
        solution = self.layer.project(z, self.constraint, dist=(z, stddev))
        return solution.value, solution.stats.residual


@pytest.mark.parametrize("metric", ["orthogonal", "oblique"])
def test_export_with_a_dynamic_batch(traced, metric):
    module, batch = Points(traced, metric), torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(module, (randn(3, N), rand(3, N)), dynamic_shapes=shapes, strict=False)
    arguments = randn(7, N), rand(7, N)
    for a, b in zip(program.module()(*arguments), module(*arguments)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_vmap(traced):
    module, z, stddev = Points(traced, "oblique"), randn(5, N), rand(5, N)
    for a, b in zip(torch.func.vmap(module)(z, stddev), module(z, stddev)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda m, s: module(m, s)[0]))(z, stddev)
    assert jacobian.shape == (5, N, N)
    assert jacobian.isfinite().all()


def test_rows_and_bounds_alone_stay_exact():
    layer, z = ph.DPPL("orthogonal", iterations=1), randn(4, N)
    for constraint in (ph.Hierarchy(SUMS), ph.Box(-0.1, 0.2)):
        assert layer.project(z, constraint).stats.converged.all()
        torch.testing.assert_close(
            layer.project(z, constraint).value, ph.DPPL("orthogonal").project(z, constraint).value
        )


def test_float32_returns_float32():
    solution = ph.DPPL("orthogonal", iterations=50).project(randn(4, N).float(), ph.Simplex())
    assert solution.value.dtype == torch.float32
    assert solution.stats.converged.all()
    assert (solution.value >= 0).all()


@pytest.mark.parametrize(
    "constraint", [ph.Ball(1.0), ph.Semicontinuous(0.1), ph.TotalVariationPenalty(1.0), ph.Ball(1.0) & ph.NonNegative()]
)
def test_other_sets_are_rejected(constraint):
    with pytest.raises(ph.ParameterError, match="iterations"):
        ph.DPPL("orthogonal", iterations=10).project(randn(4, N), constraint)


def test_at_least_one_iteration():
    with pytest.raises(ph.ParameterError, match="iterations=0"):
        ph.DPPL(iterations=0)


@pytest.mark.slow
def test_inductor(compiler):
    for name in ("simplex", "monotone", "turnover"):
        module = Points(SETS[name](), "oblique")
        arguments = randn(4, N), rand(4, N)
        for a, b in zip(torch.compile(module, fullgraph=True)(*arguments), module(*arguments)):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
