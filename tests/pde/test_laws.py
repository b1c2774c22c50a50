"""Nonlinear conservation laws against exact solutions, derivatives by torch.func, and projected fields."""

from __future__ import annotations

import math

import pytest
import scipy.integrate
import torch

from probhard import DPPL, LocationScale
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.pde import PorousMedium, conservation_law, known_values, porous_medium_flux, porous_medium_law

FULL = PorousMedium(dtype=torch.float64)
SMALL = PorousMedium(points=25, slices=5, dtype=torch.float64)  # as on the full grid, fronts fall on grid points
EXPONENTS = torch.tensor([2.0, 2.6, 4.3], dtype=torch.float64)
MASSES = ["product", "trapezoid"]
KINDS = ["global", "local"]
BOUNDARIES = ["open", "periodic", "closed"]


def burgers(u, *_):
    return u.square() / 2


def advection(u, speed):
    return speed * u


def dense_jacobian(constraint, u):
    """The Jacobian of every element by itself, by torch.func."""
    rows = torch.func.jacrev(constraint.residual)(u)
    return torch.stack([rows[i, :, i] for i in range(len(u))])


def burgers_field(grid, times):
    """Exact solution from u(0, x) = 1 + sin(3 x) / 2 by characteristics; shocks come after t = 2/3."""
    u = torch.ones(len(times), len(grid))
    for _ in range(200):
        u = 1 + torch.sin(3 * (grid - u * times[:, None])) / 2
    return u.flatten()


# --- the porous medium equation


@pytest.mark.parametrize("m", [2.0, 2.5, 3.0, 4.0, 5.0])
def test_exact_porous_medium_fields_obey_the_law(m):
    field = FULL.solution(m).flatten(-2)
    assert porous_medium_law(FULL, m).violation(field) < 1e-12
    assert known_values(FULL, m).violation(field) < 1e-15
    assert 2e-4 < porous_medium_flux(FULL, m, "trapezoid").violation(field) < 2e-3


def test_the_naive_discretisation_is_worse_than_either():
    m = torch.tensor([2.0, 3.0, 5.0])
    field = FULL.solution(m)
    flux = field[..., 0] ** m[:, None] * (field[..., 0] - field[..., 1]) / FULL.grid[1]
    inflow = torch.cumulative_trapezoid(flux, FULL.times, dim=-1)
    naive = ((field @ FULL.weights)[..., 1:] - inflow).abs().amax(-1)
    assert bool((naive > 2e-3).all())
    assert bool((naive < 1e-2).all())
    assert bool((porous_medium_flux(FULL, m, "trapezoid").violation(field.flatten(-2)) < 0.4 * naive).all())


def test_what_flows_out_is_subtracted():
    m = 2.5
    field = torch.zeros(SMALL.shape)
    field[1:, -2:] = torch.rand(4, 2)
    flux = field[:, -1] * (field[:, -2] ** m - field[:, -1] ** m) / (m * SMALL.grid[1])
    expected = (field @ SMALL.weights)[1:] + torch.cumulative_trapezoid(flux, SMALL.times)
    torch.testing.assert_close(porous_medium_flux(SMALL, m, "trapezoid").residual(field.flatten()), expected)


def test_product_mass_is_the_integral_of_the_interpolated_pressure():
    problem = PorousMedium(points=4, slices=2, dtype=torch.float64)
    m, values = 2.6, torch.tensor([1.0, 0.8, -0.9, 0.81])  # without flux in or out of its own
    field = torch.cat([torch.zeros(4), values])
    law = porous_medium_flux(problem, m)
    other = porous_medium_flux(problem, m, "trapezoid")
    gap = law.residual(field) - other.residual(field) + problem.weights @ values

    def root(x):
        cell = min(int(3 * x), 2)
        power = values.sign() * values.abs() ** m
        pressure = float(power[cell] + (3 * x - cell) * (power[cell + 1] - power[cell]))
        return math.copysign(abs(pressure) ** (1 / m), pressure)

    expected, _ = scipy.integrate.quad(root, 0, 1, points=[1 / 3, 2 / 3], limit=400)
    assert abs(float(gap) - expected) < 1e-7


def test_time_weights_integrate_the_known_boundary_value():
    """With s = t behind, the inflow is the integral of u0(t) t after the first step, where s is held."""
    m, times = 3.0, SMALL.times
    field = torch.zeros(SMALL.shape)
    field[:, 0] = (m * SMALL.grid[1] * times) ** (1 / m)
    inflow = -porous_medium_flux(SMALL, m, "trapezoid").residual(field.flatten())
    inflow = inflow + field[1:] @ SMALL.weights
    expected = [
        scipy.integrate.quad(lambda t: (m * t) ** (1 / m) * max(t, float(times[1])), 0, float(end))[0]
        for end in times[1:]
    ]
    torch.testing.assert_close(inflow, torch.tensor(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mass", MASSES)
def test_porous_medium_derivatives(mass):
    law = porous_medium_flux(SMALL, EXPONENTS, mass)
    u = SMALL.solution(EXPONENTS).flatten(-2) + 0.1 * torch.randn(3, 125)
    u[0, 40] = 0
    u[1, 60:62] = 0.5
    u[2, 71] = u[2, 70] * (1 + 1e-9)
    u[2, 73] = -u[2, 72]
    assert bool((u < -0.05).any())
    for point in (u, torch.zeros_like(u), SMALL.solution(EXPONENTS).flatten(-2)):
        torch.testing.assert_close(law.jacobian(point), dense_jacobian(law, point), rtol=1e-9, atol=1e-12)
    direction, multiplier = torch.randn_like(u), torch.randn(3, 4)
    step = 1e-6 * direction
    slopes = (law.jacobian(u + step) - law.jacobian(u - step)) / 2e-6
    expected = (multiplier.unsqueeze(-1) * slopes).sum(-2)
    torch.testing.assert_close(law.curvature(u, multiplier, direction), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_projected_porous_medium_fields(metric, mass):
    exact = FULL.solution(EXPONENTS).flatten(-2)
    loc = (exact + 0.01 * torch.randn_like(exact)).requires_grad_()
    variance = (1e-4 * (0.2 + torch.rand_like(exact))).requires_grad_()
    m = EXPONENTS.clone().requires_grad_()
    law = porous_medium_law(FULL, m, mass)
    projected = DPPL(metric)(LocationScale(loc, Diagonal(variance)), law)
    mean = projected.mean
    law = porous_medium_law(FULL, EXPONENTS, mass)
    assert float(law.relative_violation(mean.detach()).max()) < 1e-10
    assert float(known_values(FULL, EXPONENTS).violation(mean.detach()).max()) == 0
    torch.testing.assert_close(mean.unflatten(-1, FULL.shape)[:, :, 0], FULL.solution(EXPONENTS)[:, :, 0])
    (mean.sum() + projected.variance.sum()).backward()
    for leaf in (loc, variance, m):
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())
    draws = projected.sample((2,))
    assert float(law.relative_violation(draws).max()) < 1e-10


@pytest.mark.parametrize("mass", MASSES)
def test_gradients_with_exact_curvature_are_those_of_finite_differences(mass):
    loc = SMALL.solution(EXPONENTS).flatten(-2) + 0.03 * torch.randn(3, 125)
    probe, along, turn = torch.randn(3, 125), torch.randn(3, 125), torch.randn(3)
    layer = DPPL("orthogonal", curvature="exact")

    def value(step):
        law = porous_medium_law(SMALL, EXPONENTS + step * turn, mass)
        return (probe * layer.project(loc + step * along, law).value).sum()

    step = torch.tensor(0.0, requires_grad=True)
    (slope,) = torch.autograd.grad(value(step), step)
    with torch.no_grad():  # solutions are stationary to 1e-9, which shorter differences would magnify
        expected = (value(3e-4) - value(-3e-4)) / 6e-4
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=0)  # Gauss-Newton curvature misses by 3e-4


@pytest.mark.parametrize("same", [True, False])
def test_variances_of_block_rows_against_dense_algebra(same):
    """``diag(P S P^T)`` with ``P = I - W J^T (J W J^T)^-1 J``, and its gradients."""
    u = SMALL.solution(EXPONENTS).flatten(-2) + 0.1 * torch.rand(3, 125)
    rows = porous_medium_flux(SMALL, EXPONENTS).jacobian_rows(u)
    weight = (0.5 + torch.rand(3, 125)).requires_grad_()
    spread = weight if same else (0.5 + torch.rand(3, 125)).requires_grad_()
    matrix = rows.dense()
    pushed = matrix * weight.unsqueeze(-2)
    tangent = torch.eye(125) - pushed.mT @ torch.linalg.solve(pushed @ matrix.mT, matrix)
    expected = (tangent.square() * spread.unsqueeze(-2)).sum(-1)
    variance = rows.factor(weight).variance(None if same else spread)
    torch.testing.assert_close(variance, expected, rtol=1e-10, atol=1e-12)
    probe, leaves = torch.randn(3, 125), (weight,) if same else (weight, spread)
    gradients = (torch.autograd.grad((probe * x).sum(), leaves, retain_graph=True) for x in (variance, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_float32_fields():
    problem = PorousMedium()
    m = EXPONENTS.float()
    field = problem.solution(m).flatten(-2)
    law = porous_medium_law(problem, m)
    assert law.residual(field).dtype == torch.float32
    assert float(law.violation(field).max()) < 2e-5
    loc = (field + 0.01 * torch.randn_like(field)).requires_grad_()
    mean = DPPL()(LocationScale(loc, Diagonal(torch.full_like(field, 1e-4))), law).mean
    assert mean.dtype == torch.float32
    assert float(law.relative_violation(mean.detach()).max()) < 1e-5
    mean.sum().backward()
    assert bool(loc.grad.isfinite().all())


def test_batches_and_single_fields_agree():
    together = porous_medium_law(SMALL, EXPONENTS)
    u = SMALL.solution(EXPONENTS).flatten(-2) + 0.1 * torch.randn(2, 3, 125)
    for i, m in enumerate(EXPONENTS):
        alone = porous_medium_law(SMALL, float(m)).residual(u[1, i])
        torch.testing.assert_close(together.residual(u)[1, i], alone, rtol=1e-12, atol=1e-14)
    assert porous_medium_flux(SMALL, EXPONENTS).residual(u).shape == (2, 3, 4)
    assert known_values(SMALL, EXPONENTS).row_count == 25 + 4


def test_wrong_input_is_refused():
    with pytest.raises(ParameterError, match="mass='simpson'"):
        porous_medium_flux(SMALL, 2.5, "simpson")
    with pytest.raises(ParameterError, match="1 time slice"):
        porous_medium_law(PorousMedium(slices=1), 2.5)
    with pytest.raises(ParameterError, match="not positive"):
        porous_medium_law(SMALL, torch.tensor([2.0, -1.0]))
    with pytest.raises(ShapeError, match="5 times and 25 grid points"):
        porous_medium_flux(SMALL, 2.5).residual(torch.zeros(7))
    grid, times = torch.linspace(0, 1, 5), torch.linspace(0, 1, 3)
    with pytest.raises(ParameterError, match="kind='cell'"):
        conservation_law(burgers, grid, times, kind="cell")
    with pytest.raises(ParameterError, match="do not increase"):
        conservation_law(burgers, grid.flip(0), times)
    with pytest.raises(ShapeError, match="The flux has shape"):
        conservation_law(lambda u: u.sum(-1), grid, times).residual(torch.zeros(15))


# --- any flux


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("equation", ["advection", "burgers"])
def test_smooth_solutions_obey_the_law_to_second_order(equation, kind):
    sizes = []
    for count in (21, 41, 81):
        grid, times = torch.linspace(0, 1, count), torch.linspace(0, 0.4, count)
        if equation == "burgers":
            law, field = conservation_law(burgers, grid, times, kind=kind), burgers_field(grid, times)
        else:
            speed = torch.tensor([1.5])
            law = conservation_law(advection, grid, times, kind=kind, args=(speed,))
            field = torch.sin(3 * (grid - speed * times[:, None])).flatten()
        unit = times[1] * (grid[1] if kind == "local" else 1)
        sizes.append(float(law.violation(field) / unit))
    assert 3.5 < sizes[0] / sizes[1] < 4.5
    assert 3.5 < sizes[1] / sizes[2] < 4.5


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_local_rows_sum_to_the_global_ones(boundary):
    grid, times = torch.rand(7).cumsum(0), torch.rand(4).cumsum(0)
    whole, cells = (conservation_law(burgers, grid, times, boundary, kind) for kind in KINDS)
    u = torch.randn(2, 28)
    assert cells.residual(u).shape == (2, 18)
    total = cells.residual(u).unflatten(-1, (3, 6)).sum(-1)
    torch.testing.assert_close(total, whole.residual(u))
    field = u.unflatten(-1, (4, 7))
    change = torch.trapezoid(field, grid).diff(dim=-1)
    out = field[..., -1].square() / 2 - field[..., 0].square() / 2
    flowed = torch.trapezoid(torch.stack([out[..., :-1], out[..., 1:]], -1)) * times.diff()
    torch.testing.assert_close(whole.residual(u), change + (flowed if boundary == "open" else 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_derivatives_of_any_flux(boundary, kind):
    grid, times = torch.rand(6).cumsum(0), torch.rand(4).cumsum(0)
    u = torch.randn(3, 24)
    for flux, args in ((burgers, ()), (advection, (torch.rand(3, 1),))):
        law = conservation_law(flux, grid, times, boundary, kind, args)
        rows = law.jacobian(u)
        torch.testing.assert_close(rows, dense_jacobian(law, u))
        if kind == "local" and boundary == "open":
            assert int((rows != 0).sum(-1).max()) == 4  # two points at two times


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_projected_burgers_fields(metric, kind):
    grid, times = torch.linspace(0, 1, 9), torch.linspace(0, 0.4, 6)
    exact = burgers_field(grid, times)
    loc = (exact + 0.02 * torch.randn(3, 54)).requires_grad_()
    law = conservation_law(burgers, grid, times, kind=kind)
    before = law.violation(loc)
    dist = LocationScale(loc, Diagonal(4e-4 * (0.2 + torch.rand(3, 54))))
    mean = DPPL(metric)(dist, law).mean
    assert bool((before > 1e-4).all())
    assert float(law.violation(mean.detach()).max()) < 1e-11
    assert float(law.relative_violation(mean.detach()).max()) < 1e-10
    mean.sum().backward()
    assert bool(loc.grad.isfinite().all())
    single = DPPL(metric)(LocationScale(loc.detach().float(), Diagonal(torch.full((3, 54), 1e-4).float())), law).mean
    assert single.dtype == torch.float32
    assert float(law.relative_violation(single).max()) < 1e-5
