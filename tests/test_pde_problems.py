"""Exact solutions against their equation, their mass, quadrature, and the constraint built from them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import scipy.integrate
import torch

from probhard import DPPL, LocationScale
from probhard.covariance import Diagonal
from probhard.errors import ParameterError
from probhard.pde import PorousMedium, Problem

EXACT = PorousMedium(dtype=torch.float64)


def test_grid_and_times_follow_the_protocol() -> None:
    problem = PorousMedium()
    np.testing.assert_allclose(problem.grid, np.linspace(0, 1, 100), atol=1e-7)
    np.testing.assert_allclose(problem.times, np.linspace(0, 1, 100)[0:-1:5], atol=1e-7)
    assert problem.shape == (20, 100)
    assert problem.grid.dtype == torch.float32
    assert isinstance(problem, Problem)
    with pytest.raises(FrozenInstanceError):
        problem.points = 50  # type: ignore[misc]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_shapes(batch: tuple[int, ...]) -> None:
    problem = PorousMedium(points=11, slices=4)
    m = torch.full(batch, 2.5)
    assert problem.solution(m).shape == (*batch, 4, 11)
    assert problem.mass(m).shape == (*batch, 4)
    assert problem.inputs(m).shape == (*batch, 3, 4, 11)
    field = problem.solution(m).flatten(-2)
    assert problem.constraint(m).residual(field).shape == (*batch, 4)
    assert problem.slice_constraint(m).residual(problem.solution(m)).shape == (*batch, 4, 1)


@pytest.mark.parametrize("m", [2.0, 2.4, 3.0, 4.5])
def test_mass_is_the_integral_of_the_solution(m: float) -> None:
    def profile(x: float, t: float) -> float:
        return (m * max(t - x, 0.0)) ** (1 / m)

    expected = [scipy.integrate.quad(profile, 0, t, (t,), epsabs=1e-11)[0] if t else 0.0 for t in EXACT.times.tolist()]
    np.testing.assert_allclose(EXACT.mass(m), expected, atol=1e-7)
    fine = PorousMedium(points=200_001, dtype=torch.float64)
    np.testing.assert_allclose(fine.constraint(m).residual(fine.solution(m).flatten(-2)), 0, atol=1e-6)


@pytest.mark.parametrize("m", [2.0, 2.7, 3.0])
def test_solution_satisfies_the_equation(m: float) -> None:
    """u_t = (u^m u_x)_x by central differences of the field itself, behind the front."""
    step = 1e-4

    def u(t: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (m * np.maximum(t - x, 0)) ** (1 / m)

    t, x = EXACT.times.numpy()[:, None], EXACT.grid.numpy()
    np.testing.assert_allclose(EXACT.solution(m), u(t, x), rtol=1e-12)
    behind = t - x > 0.1

    def flux(place: np.ndarray) -> np.ndarray:
        return u(t, place) ** m * (u(t, place + step) - u(t, place - step)) / (2 * step)

    left = (u(t + step, x) - u(t - step, x)) / (2 * step)
    right = (flux(x + step) - flux(x - step)) / (2 * step)
    np.testing.assert_allclose(left[behind], right[behind], rtol=1e-4)


def test_front_and_boundary() -> None:
    m = torch.tensor([2.0, 3.0], dtype=torch.float64)
    field = EXACT.solution(m)
    assert (field[:, EXACT.times[:, None] <= EXACT.grid] == 0).all()
    torch.testing.assert_close(field[..., 0], (m[:, None] * EXACT.times) ** (1 / m[:, None]))
    assert (field.diff(dim=-1) <= 0).all()


def test_trapezoid_gap_of_the_exact_field() -> None:
    """The protocol's figure: the exact field itself has a CE of 11e-3, from discretisation."""
    m = EXACT.parameters(100, torch.Generator().manual_seed(0))
    gap = EXACT.constraint(m).residual(EXACT.solution(m).flatten(-2)).abs().sum(-1).mean()
    assert 0.010 < float(gap) < 0.012


def test_gradient_is_finite_and_right() -> None:
    m = torch.tensor([2.0, 2.6], dtype=torch.float64, requires_grad=True)
    small = PorousMedium(points=7, slices=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(small.solution, (m,))
    assert torch.autograd.gradcheck(small.mass, (m,))
    single = m.detach().float().requires_grad_()
    (PorousMedium().solution(single).sum() + PorousMedium().mass(single).sum()).backward()
    assert single.grad is not None
    assert single.grad.isfinite().all()


def test_parameters_are_uniform_in_range_and_seeded() -> None:
    problem = PorousMedium(lower=3.0, upper=4.0)
    draw = problem.parameters(4000, torch.Generator().manual_seed(1))
    assert draw.shape == (4000,)
    assert 3.0 <= float(draw.min()) < 3.01
    assert 3.99 < float(draw.max()) <= 4.0
    assert abs(float(draw.mean()) - 3.5) < 0.02
    assert torch.equal(draw, problem.parameters(4000, torch.Generator().manual_seed(1)))
    assert not torch.equal(draw, problem.parameters(4000, torch.Generator().manual_seed(2)))


def test_inputs_hold_parameter_time_and_place() -> None:
    m = torch.tensor([2.1, 2.9], dtype=torch.float64)
    value, time, place = EXACT.inputs(m).unbind(-3)
    assert (value == m[:, None, None]).all()
    assert (time == EXACT.times[:, None]).all()
    assert (place == EXACT.grid).all()


def test_constraint_of_field_and_of_slices_project_alike() -> None:
    m = EXACT.parameters(3, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    z = EXACT.solution(m) + 0.1 * torch.randn(3, 20, 100, dtype=torch.float64, generator=generator)
    variance = torch.rand(3, 20, 100, dtype=torch.float64, generator=generator) + 0.1
    field = DPPL()(LocationScale(z.flatten(1), Diagonal(variance.flatten(1))), EXACT.constraint(m))
    slices = DPPL()(LocationScale(z, Diagonal(variance)), EXACT.slice_constraint(m))
    torch.testing.assert_close(field.mean, slices.mean.flatten(1))
    torch.testing.assert_close(field.variance, slices.variance.flatten(1))
    trapezoid = torch.trapezoid(field.mean.unflatten(-1, (20, 100)), EXACT.grid)
    torch.testing.assert_close(trapezoid, EXACT.mass(m), atol=1e-13, rtol=0)


@pytest.mark.parametrize("m", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_named(m: float) -> None:
    with pytest.raises(ParameterError, match=r"1 of 2 parameters of PorousMedium .* \[2, 3\]"):
        EXACT.solution(torch.tensor([2.5, m]))


@pytest.mark.parametrize(
    "options",
    [{"lower": 0.0}, {"lower": 4.0}, {"upper": float("inf")}, {"points": 1}, {"slices": 0}, {"length": 0.5}],
)
def test_bad_problems_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        PorousMedium(**options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="count=0"):
        PorousMedium().parameters(0)
