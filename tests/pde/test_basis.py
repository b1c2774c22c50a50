"""Basis functions that solve an equation: weights against NumPy and SciPy, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares as peer

import probhard as ph
from probhard.pde.basis import BasisNO, blocks
from probhard.solvers.least_squares import implicit, least_squares

SHAPE, K = (4, 6), 5
N = 24
SMALL = {"channels": 2, "width": 4, "modes": (2, 2), "layers": 2, "padding": 2}
A, B = torch.randn(2, 9, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear(inputs: torch.Tensor) -> ph.NonlinearEquality:
    return ph.NonlinearEquality(lambda u, x: u @ A.T - x, (inputs.flatten(1)[:, :9],))


def curved(inputs: torch.Tensor) -> ph.NonlinearEquality:
    return ph.NonlinearEquality(lambda u, x: u @ A.T + 0.3 * (u @ B.T).square() - x, (inputs.flatten(1)[:, :9],))


def rows_as_matrix(inputs: torch.Tensor) -> ph.LinearEquality:
    return ph.LinearEquality(A, inputs.flatten(1)[:, :9])


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return tuple(torch.randn(*s, dtype=torch.float64, generator=source) for s in ((3, 2, *SHAPE), (3, N, K)))


@pytest.mark.parametrize("equations", [linear, rows_as_matrix])
@pytest.mark.parametrize("fitted", [None, torch.arange(9) % 3 > 0])
def test_linear_weights_are_those_of_numpy(case, equations, fitted) -> None:
    inputs, basis = case
    _, weights = BasisNO(equations, K, fitted=fitted, ridge=0.0, **SMALL).combined(inputs, basis)
    used = slice(None) if fitted is None else fitted
    for x, functions, w in zip(inputs, basis, weights[0]):
        expected = np.linalg.lstsq((A @ functions)[used].numpy(), x.flatten()[:9][used].numpy(), rcond=None)[0]
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-9)


def test_nonlinear_weights_are_those_of_scipy(case) -> None:
    inputs, basis = case
    _, weights = BasisNO(curved, K, linear=False, ridge=0.0, **SMALL).combined(inputs, basis)
    for index, w in enumerate(weights[0]):
        rows = curved(inputs[index : index + 1])

        def residual(v: np.ndarray, rows=rows, index=index) -> np.ndarray:
            return rows.residual((basis[index] @ torch.as_tensor(v))[None])[0].numpy()

        found = peer(residual, np.zeros(K), method="lm", xtol=1e-14, ftol=1e-14, gtol=1e-14)
        assert np.abs(residual(w.numpy())).max() > 1e-3  # the residual stays: its curvature counts in gradients
        np.testing.assert_allclose(w.numpy(), found.x, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("equations", "is_linear"), [(linear, True), (curved, False)])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_implicit_gradients_against_differences(case, equations, is_linear, ridge) -> None:
    inputs, basis = case
    network = BasisNO(equations, K, linear=is_linear, ridge=ridge, **SMALL)
    probe, direction = torch.randn(2, *basis.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def value(functions: torch.Tensor) -> torch.Tensor:
        return (probe[..., 0] * network.combined(inputs, functions)[0]).sum()

    (gradient,) = torch.autograd.grad(value(basis.requires_grad_()), basis)
    with torch.no_grad():
        step = 1e-5 * direction
        difference = (value(basis + step) - value(basis - step)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-5, atol=1e-6)


def test_a_minimum_from_afar() -> None:
    def rosenbrock(w: torch.Tensor) -> torch.Tensor:
        x, y = w.unbind(-1)
        return torch.stack([10 * (y - x**2), 1 - x], -1)

    found = least_squares(rosenbrock, torch.tensor([[-1.2, 1.0], [3.0, -4.0], [1.0, 1.0]]).double(), steps=200)
    assert found.converged.all()
    torch.testing.assert_close(found.value, torch.ones(3, 2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(implicit(rosenbrock, found.value), found.value, atol=1e-6, rtol=0)


def test_experts_fit_their_own_rows(case) -> None:
    inputs, basis = case
    regions, places = blocks(SHAPE, (1, 2)), torch.tensor([0, 1, 2, 6, 4, 5, 3, 10, 11])
    network = BasisNO(linear, 3, regions=regions, places=places, ridge=0.0, **SMALL)
    field, weights = network.combined(inputs, basis[..., :3])
    for expert in range(2):
        own = regions[places] == expert
        for x, functions, w in zip(inputs, basis[..., :3], weights[expert]):
            expected = np.linalg.lstsq((A @ functions)[own].numpy(), x.flatten()[:9][own].numpy(), rcond=None)[0]
            np.testing.assert_allclose(w.numpy(), expected, rtol=1e-8)
        there = regions == expert
        expected_field = (basis[..., :3] @ weights[expert].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(field[:, there], expected_field[:, there])


def test_blocks() -> None:
    assert blocks((2, 4), (2, 2)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("spread", [False, True])
def test_as_a_backbone(case, spread: bool) -> None:
    inputs, _ = case
    network = BasisNO(linear, K, fitted=torch.arange(9) < 6, spread=spread, **SMALL).double()
    first = ph.LinearEquality(torch.eye(N, dtype=torch.float64)[:2], torch.zeros(2, dtype=torch.float64))
    model = ph.ConstrainedModel(network, first, "probhard-ob" if spread else "probhard-or")
    if spread:
        model.loss((inputs, torch.zeros(3, N, dtype=torch.float64))).backward()
        assert all(weight.grad is not None for weight in network.parameters())
    assert float(model((inputs,)).mean[:, :2].abs().max() if spread else model((inputs,))[:, :2].abs().max()) < 1e-12
    free = ph.ConstrainedModel(network, first, "base", network.residual_score())
    rows = linear(inputs).residual(network(inputs).mean if spread else network(inputs))[:, 6:]
    torch.testing.assert_close(free.loss((inputs,)), rows.square().sum())


def test_training_lowers_the_residual_elsewhere(case) -> None:
    inputs, _ = case
    torch.manual_seed(0)
    network = BasisNO(linear, K, fitted=torch.arange(9) < 7, **SMALL).double()
    model = ph.ConstrainedModel(network, ph.Box(-1e9, 1e9), "base", network.residual_score())
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        losses.append(model.loss((inputs,)))
        losses[-1].backward()
        optimiser.step()
    assert float(losses[-1].detach()) < 0.5 * float(losses[0].detach())


def test_bad_requests(case) -> None:
    inputs, basis = case
    with pytest.raises(ph.ParameterError, match="without places"):
        BasisNO(linear, K, regions=blocks(SHAPE, (1, 2)), **SMALL)
    with pytest.raises(ph.ShapeError, match="fitted do not fit 9 rows"):
        BasisNO(linear, K, fitted=torch.ones(4, dtype=torch.bool), **SMALL).combined(inputs, basis)
